"""Injects faults into exchanges, gradients and checkpoints, to test how a job reacts.

    faults = [Fault(Kind.STUCK, rank=1, step=12)]
    exchange = faulty(jdaso.mpi_exchange(topology), faults, topology.rank)

Every process may be given the faults of all processes. It selects those of its own rank. This is
for MPI jobs with one device per process. bench/README.md lists how jdaso reacts to each fault.
"""

import enum
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import io_callback

from jdaso.checkpoint.checkpoints import Checkpoints
from jdaso.core.exchange import BoundExchange, Exchange, changed
from jdaso.core.log import logger
from jdaso.core.types import Leaves, PyTree
from jdaso.core.validation import check_number, check_whole

__all__ = ["Fault", "FaultyCheckpoints", "Kind", "faulty", "faulty_gradients"]


class Kind(enum.Enum):
    """What happens to a process."""

    FAIL_BEFORE_POST = "killed before it posts"
    FAIL_IN_FLIGHT = "killed after it has posted"
    FAIL_IN_FINISH = "killed before it collects the result of an exchange"
    STUCK = "stopped (SIGSTOP) before it posts"
    SLOW_POST = "sleeps for some seconds before it posts"
    SLOW_LINK = "has a slow link for some seconds, from before it posts"
    LINK_DOWN = "has no link for some seconds, from before it posts"
    NAN = "computes gradients that are not finite"
    WRONG_SHAPE = "posts a leaf with one number too many"
    KILL_IN_CHECKPOINT = "killed while it writes a checkpoint"
    DISK_FULL = "cannot write files above 10 kB, from a checkpoint on"
    SIGTERM = "receives SIGTERM before it posts"


_LINK = {Kind.SLOW_LINK, Kind.LINK_DOWN}
# The signals that a process receives before it posts.
_SIGNALS = {
    Kind.FAIL_BEFORE_POST: signal.SIGKILL,
    Kind.STUCK: signal.SIGSTOP,
    Kind.SIGTERM: signal.SIGTERM,
}
_BEFORE_POST = {*_LINK, *_SIGNALS, Kind.SLOW_POST, Kind.WRONG_SHAPE}
_OF_EXCHANGES = {*_BEFORE_POST, Kind.FAIL_IN_FLIGHT, Kind.FAIL_IN_FINISH}
# Enough for the small files of a checkpoint, and for no array.
_FULL_DISK_BYTES = 10_000
_POLL_SECONDS = 1e-4


class Fault(NamedTuple):
    """A fault that happens once, at the first opportunity from a step on.

    Attributes:
        kind: What happens. If the kind says "posts", the opportunity is an exchange posted after
            this step or a later one. For a checkpoint, it is one saved at this step or later.
        rank: Rank of the process.
        step: Optimizer step, counted from 0.
        seconds: Duration, if the kind says "some seconds".

    >>> Fault(Kind.SLOW_POST, rank=1, step=12, seconds=3.0).kind.value
    'sleeps for some seconds before it posts'
    """

    kind: Kind
    rank: int
    step: int
    seconds: float = 0.0


def _of_process(faults: Iterable[Fault], rank: int) -> list[Fault]:
    """The faults of one process; ValueError if that of any process is invalid."""
    faults = list(faults)
    for fault in faults:
        if not isinstance(fault.kind, Kind):
            raise ValueError(f"kind must be one of jdaso.faults.Kind, got {fault.kind!r}.")
        check_whole("rank", fault.rank, 0)
        check_whole("step", fault.step, 0)
        check_number("seconds", fault.seconds)
    return [fault for fault in faults if fault.rank == rank]


def _take(pending: list[Fault], kinds: Collection[Kind], step: int) -> list[Fault]:
    """Removes, logs and returns the faults of these kinds that are due at a step.

    >>> pending = [Fault(Kind.STUCK, rank=1, step=12)]
    >>> [len(_take(pending, {Kind.STUCK}, step)) for step in (11, 13, 14)]
    [0, 1, 0]
    """
    due = [fault for fault in pending if fault.kind in kinds and fault.step <= step]
    for fault in due:
        pending.remove(fault)
        logger.warning("fault: rank %d, step %d: %s", fault.rank, step, fault.kind.value)
    return due


def faulty(
    exchange: Exchange,
    faults: Iterable[Fault],
    rank: int,
    link: Callable[[Fault], None] | None = None,
) -> Exchange:
    """Wraps an exchange so that faults happen when this process posts and collects.

    Args:
        exchange: From :func:`jdaso.mpi_exchange`.
        faults: Faults of all processes. Faults of gradients and checkpoints are ignored here.
        rank: Rank of this process.
        link: Function that slows or cuts this process's link and returns immediately. Required
            for SLOW_LINK and LINK_DOWN.

    Returns:
        The wrapped exchange, or ``exchange`` itself if no fault is for it.

    Raises:
        ValueError: for an invalid fault, or a fault of a link without ``link``.

    >>> import jdaso
    >>> exchange = jdaso.single_exchange()
    >>> faulty(exchange, [Fault(Kind.STUCK, rank=1, step=12)], rank=0) is exchange
    True
    """
    pending = _of_process(faults, rank)
    kinds, scalar = {fault.kind for fault in pending}, jax.ShapeDtypeStruct((), jnp.int32)
    if not kinds & _OF_EXCHANGES:
        return exchange
    if link is None and kinds & _LINK:
        raise ValueError("SLOW_LINK and LINK_DOWN require link=, a function that cuts the link.")
    fatal: set[int] = set()  # numbers of exchanges whose collection kills this process

    # The results of the callbacks are used, because that orders them and the exchange.
    def before_post(step: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        due = _take(pending, _BEFORE_POST, int(step))
        for fault in due:
            if fault.kind in _SIGNALS:
                os.kill(os.getpid(), _SIGNALS[fault.kind])
            elif fault.kind is Kind.SLOW_POST:
                time.sleep(fault.seconds)
            elif fault.kind in _LINK and link is not None:
                link(fault)
        if _take(pending, {Kind.FAIL_IN_FINISH}, int(step)):
            fatal.add(int(number))
        wrong_shape = any(fault.kind is Kind.WRONG_SHAPE for fault in due)
        return np.asarray(step), np.array(wrong_shape, np.int32)

    def after_post(step: np.ndarray, following: np.ndarray) -> np.ndarray:
        if _take(pending, {Kind.FAIL_IN_FLIGHT}, int(step)):
            _die()
        return np.asarray(following)

    def before_finish(number: np.ndarray) -> np.ndarray:
        if int(number) in fatal:
            _die()
        return np.asarray(number)

    def bind(names: Sequence[str], leaves: Leaves) -> BoundExchange:
        bound = exchange.bind(names, leaves)

        def post(state, number, step, leaves: Leaves, header, wire, **options):
            if isinstance(number, int):  # a consensus, which belongs to no step
                return bound.post(state, number, step, leaves, header, wire, **options)
            posted_step, wrong_shape = io_callback(before_post, (scalar, scalar), step, number)

            def send(leaves: Leaves):
                return bound.post(state, number, posted_step, leaves, header, wire, **options)

            def send_longer(leaves: Leaves):
                first = leaves[0].reshape(-1)
                return send([jnp.concatenate([first, first[:1]]), *leaves[1:]])

            if Kind.WRONG_SHAPE in kinds:
                state, following = lax.cond(wrong_shape > 0, send_longer, send, leaves)
            else:
                state, following = send(leaves)
            return state, io_callback(after_post, scalar, step, following)

        def collect(state, number, like: Leaves, part=None):
            if not isinstance(number, int):
                number = io_callback(before_finish, scalar, number)
            return bound.collect(state, number, like)

        return changed(bound, post=post, collect=collect, in_parts=False)

    return changed(exchange, bind=bind)


class FaultyGradientsState(NamedTuple):
    next_step: jax.Array  # int32


def faulty_gradients(faults: Iterable[Fault], rank: int) -> optax.GradientTransformation:
    """Makes the gradients NaN at the steps of the faults of kind NAN.

    Put it outside of :func:`jdaso.chain`, which restores the optimizer's state, and therefore
    the step count, when it skips a step: ``optax.chain(faulty_gradients(...), jdaso.chain(...))``.

    >>> tx = faulty_gradients([Fault(Kind.NAN, rank=0, step=1)], rank=0)
    >>> state = tx.init(jnp.ones(2))
    >>> for _ in range(3):
    ...     gradients, state = tx.update(jnp.ones(2), state)
    ...     print(gradients)
    [1. 1.]
    [nan nan]
    [1. 1.]
    """
    own = _of_process(faults, rank)
    steps = jnp.array([fault.step for fault in own if fault.kind is Kind.NAN], jnp.int32)

    def update(updates: PyTree, state: FaultyGradientsState, params: PyTree = None):
        bad = jnp.any(steps == state.next_step)
        updates = jax.tree.map(lambda g: jnp.where(bad, jnp.nan, g).astype(g.dtype), updates)
        return updates, FaultyGradientsState(state.next_step + 1)

    return optax.GradientTransformation(lambda params: FaultyGradientsState(jnp.int32(0)), update)


class FaultyCheckpoints(Checkpoints):
    """Checkpoints whose process suffers KILL_IN_CHECKPOINT or DISK_FULL when it saves.

    A full disk is simulated by a limit on the size of all files that the process writes.

    Args:
        checkpoints: The checkpoints to wrap. Do not use them directly afterwards.
        faults: Faults of all processes.
        rank: Rank of this process.
    """

    def __init__(self, checkpoints: Checkpoints, faults: Iterable[Fault], rank: int):
        self.__dict__.update(checkpoints.__dict__)
        self._pending = _of_process(faults, rank)

    def save(self, step: int, state: PyTree) -> None:
        """Saves as :meth:`jdaso.checkpoint.Checkpoints.save`, unless a fault prevents it."""
        if _take(self._pending, {Kind.DISK_FULL}, step):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing then raises OSError
            _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL_DISK_BYTES, hard_limit))
        if _take(self._pending, {Kind.KILL_IN_CHECKPOINT}, step):
            self.wait()
            path = self._next_path(step)
            threading.Thread(target=_die_when_written, args=(path,), daemon=True).start()
        super().save(step, state)


def _die_when_written(path: Path) -> None:
    """Kills this process as soon as it has begun to write the file or folder at ``path``."""
    while not any(path.parent.glob(f"{path.name}*")):
        time.sleep(_POLL_SECONDS)
    _die()


def _die() -> None:
    """Kills this process with SIGKILL, as the kernel does when memory is exhausted."""
    os.kill(os.getpid(), signal.SIGKILL)
