"""Faults on purpose: what becomes of a job when a process dies, stops, is slow, or goes astray.

    faults = [Fault(Kind.STUCK, rank=1, step=12)]
    exchange = faulty(jdaso.mpi_exchange(topology), faults, topology.rank)

Every process may be given all faults, and takes its own. For trainings over MPI whose processes
have one device each. What is promised for each of them, and measured: bench/README.md.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import io_callback

from jdaso._base import Exchange, Leaves, PyTree
from jdaso._checkpoint_folder import part_path
from jdaso._faults import LINK, Due, die, happen
from jdaso._faults import Fault as Fault
from jdaso._faults import Kind as Kind
from jdaso.checkpoint import Checkpoints

__all__ = [
    "Fault",
    "FaultyCheckpoints",
    "Kind",
    "faulty",
    "faulty_gradients",
]

_BEFORE_POST = LINK | {
    *(Kind.FAIL_BEFORE_POST, Kind.STUCK, Kind.SLOW_POST, Kind.WRONG_SHAPE, Kind.SIGTERM)
}
_OF_EXCHANGES = _BEFORE_POST | {Kind.FAIL_IN_FLIGHT, Kind.FAIL_IN_FINISH}
# A disk with room for the small files of a checkpoint, and for nothing else.
_DISK_BYTES = 10_000
_LOOK_SECONDS = 1e-4


def faulty(
    exchange: Exchange,
    faults: Iterable[Fault],
    rank: int,
    link: Callable[[Fault], None] | None = None,
) -> Exchange:
    """An exchange whose process suffers faults when it posts and collects.

    Args:
        exchange: from :func:`jdaso.mpi_exchange`.
        faults: of all processes; those of gradients and checkpoints are for the functions below.
        rank: of this process.
        link: slows this process's link, or cuts it, and returns at once; SLOW_LINK and LINK_DOWN
            need it.

    Returns:
        An exchange; the same one, if none of the faults is for it.

    Raises:
        ValueError: for a fault that cannot be, or one of a link without ``link``.

    >>> import jdaso
    >>> exchange = jdaso.single_exchange()
    >>> faulty(exchange, [Fault(Kind.STUCK, rank=1, step=12)], rank=0) is exchange
    True
    """
    due = Due(faults, rank)
    if not due.kinds() & _OF_EXCHANGES:
        return exchange
    if link is None and due.kinds() & LINK:
        raise ValueError("faults: SLOW_LINK and LINK_DOWN need link=, which does it to the link.")
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    doomed: set[int] = set()

    def before(step: np.ndarray, number: np.ndarray) -> np.ndarray:
        taken = due.take(_BEFORE_POST, int(step))
        for fault in taken:
            happen(fault, link)
        if due.take({Kind.FAIL_IN_FINISH}, int(step)):
            doomed.add(int(number))
        return np.array([step, any(fault.kind is Kind.WRONG_SHAPE for fault in taken)], np.int32)

    def posted(step: np.ndarray, following: np.ndarray) -> np.ndarray:
        if due.take({Kind.FAIL_IN_FLIGHT}, int(step)):
            die()
        return np.asarray(following)

    def collecting(number: np.ndarray) -> np.ndarray:
        if int(number) in doomed:
            die()
        return np.asarray(number)

    # What a callback returns goes into what follows, so that it comes first.
    def start(state, number, step, leaves: Leaves, header, wire):
        if isinstance(number, int):  # a consensus, which belongs to no step
            return exchange.start(state, number, step, leaves, header, wire)
        said = io_callback(before, jax.ShapeDtypeStruct((2,), jnp.int32), step, number)

        def post(leaves: Leaves):
            return exchange.start(state, number, said[0], leaves, header, wire)

        if Kind.WRONG_SHAPE in due.kinds():
            state, following = lax.cond(
                said[1] > 0, lambda: post(_one_too_many(leaves)), lambda: post(leaves)
            )
        else:
            state, following = post(leaves)
        return state, io_callback(posted, scalar, step, following)

    def finish(state, number, like: Leaves):
        if not isinstance(number, int):
            number = io_callback(collecting, scalar, number)
        return exchange.finish(state, number, like)

    return exchange._replace(start=start, finish=finish)


class FaultyGradientsState(NamedTuple):
    """The step that is next, int32."""

    next_step: jax.Array


def faulty_gradients(faults: Iterable[Fault], rank: int) -> optax.GradientTransformation:
    """The first of a chain: gradients that are not finite at the steps of the faults NAN.

    Outside of :func:`jdaso.chain`, which brings back the optimizer's state when it skips a step,
    and with it the number of the step: ``optax.chain(faulty_gradients(...), jdaso.chain(...))``.

    >>> tx = faulty_gradients([Fault(Kind.NAN, rank=0, step=1)], rank=0)
    >>> state = tx.init(jnp.ones(2))
    >>> for _ in range(3):
    ...     gradients, state = tx.update(jnp.ones(2), state)
    ...     print(gradients)
    [1. 1.]
    [nan nan]
    [1. 1.]
    """
    faults = list(faults)
    Due(faults, rank)
    steps = jnp.array([f.step for f in faults if f.kind is Kind.NAN and f.rank == rank], jnp.int32)

    def init(params: PyTree) -> FaultyGradientsState:
        del params
        return FaultyGradientsState(jnp.zeros((), jnp.int32))

    def update(updates: PyTree, state: FaultyGradientsState, params: PyTree = None):
        del params
        bad = jnp.any(steps == state.next_step)
        updates = jax.tree.map(lambda g: jnp.where(bad, jnp.nan, g).astype(g.dtype), updates)
        return updates, FaultyGradientsState(state.next_step + 1)

    return optax.GradientTransformation(init, update)


class FaultyCheckpoints(Checkpoints):
    """The same checkpoints, whose process suffers KILL_IN_CHECKPOINT or DISK_FULL when it saves.

    A full disk is a limit on the size of files: what the process writes elsewhere suffers, too.

    Args:
        checkpoints: they are used here from now on.
        faults: of all processes.
        rank: of this process.
    """

    def __init__(self, checkpoints: Checkpoints, faults: Iterable[Fault], rank: int):
        self.__dict__.update(checkpoints.__dict__)
        self._due = Due(faults, rank)

    def save(self, step: int, state: PyTree) -> None:
        """As :meth:`jdaso.checkpoint.Checkpoints.save`, if that comes to its end."""
        if self._due.take({Kind.DISK_FULL}, step):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing is then an error
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (_DISK_BYTES, most))
        if self._due.take({Kind.KILL_IN_CHECKPOINT}, step):
            self.wait()
            here = self._topology
            path = part_path(
                self._directory, (self._next or 0) + 1, step, here.node, here.num_nodes
            )
            threading.Thread(target=_die_in, args=(path,), daemon=True).start()
        super().save(step, state)


def _die_in(path: Path) -> None:
    """Dies as soon as something is written that will be the file or folder at this path."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            if any(other.name.startswith(path.name) for other in path.parent.iterdir()):
                die()
                return
        time.sleep(_LOOK_SECONDS)


def _one_too_many(leaves: Leaves) -> Leaves:
    first = leaves[0].reshape(-1)
    return [jnp.concatenate([first, first[:1]]), *leaves[1:]]
