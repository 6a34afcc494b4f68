"""The methods of the paper: ASSM, PASSM and PASSM+, its switches, and the processes' samples."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Unpack

import numpy as np

from jdaso.core.validation import check_number, check_whole
from jdaso.passm.blocks import Block
from jdaso.passm.memory import Memory
from jdaso.passm.training import Method, Options, Phase, Training, make_training

_ASSM = Method("assm", lambda step: Phase(whole=True, factor=1.0), kinds=[True], locked=True)
_PASSM = Method("passm", lambda step: Phase(whole=False, factor=1.0), kinds=[False], locked=False)


def assm(
    memory: Memory,
    blocks: Sequence[Block],
    loss_fn: Callable,
    learning_rate: float | Callable[[int], float],
    momentum: float = 0.9,
    **options: Unpack[Options],
) -> Training:
    """ASSM: processes update the whole of a shared model without waiting for each other.

    A step of a process reads the shared parameters, computes a subgradient there on a minibatch of
    its own, and updates with its private momentum

        u <- m u + g,    x <- x - (1 - m) gamma u                  (passm Algorithm 1)

    The write holds a lock, for the leaves of one process at a time (Algorithm 1, line 8). The read
    holds no lock and may mix versions (Sec. 2). The paper's gamma is ``1 / (1 - m)`` times that of
    ``optax.sgd(gamma, m)``.

    Args:
        memory: From :func:`shared_memory` or :func:`simulated_memory`.
        blocks: From :func:`partition`, as many for each process that updates, and equal on all.
        loss_fn: ``(params, *args) -> loss`` or, with ``has_aux``, ``(loss, aux)``. It is jitted.
        learning_rate: gamma, or ``step -> gamma`` of this process's own steps, on the host.
        momentum: m in [0, 1), private to a process.
        **options: Keyword arguments:

            - ``before``: A transformation of the subgradient before it enters the momentum. It has
              no state, as ``optax.add_decayed_weights(1e-4)``.
            - ``group``: For servers with slaves, an exchange over :func:`server_group`. All
              members of the group compute at the parameters that the server has read, and the
              server uses the mean subgradient of all their samples (Sec. 4, Eq. 9). The members
              must take equally many steps.
            - ``batch_size``: Required with ``group``, and only then: the number of samples that
              this process takes in a step, by which the mean is weighted.
            - ``accumulate``: Number n of minibatches whose mean subgradient makes one step, 1 by
              default. They are computed one after the other at the same parameters. Every array
              among the arguments of ``step`` has a first axis of length n. The loss is the mean,
              and ``aux`` has an entry for each.
            - ``has_aux``: As in ``jax.value_and_grad``.
            - ``nonfinite``: ``"skip"`` (default) writes nothing in a step whose subgradient is not
              finite, and leaves the momentum unchanged. ``"raise"`` raises an error.
            - ``seed``: Seed of the blocks that :func:`passm` draws at random, 0 by default.

    Returns:
        A :class:`Training`. All processes must call this function.

    Raises:
        ValueError: For blocks that do not divide the parameters among the processes, a learning
            rate that is not positive, a momentum outside [0, 1), ``before`` with a state, a
            ``group`` without ``batch_size``, or minibatches to accumulate that are not stacked.
        JdasoError: If the blocks, or the seeds of drawn blocks, differ between processes.

    >>> import jax.numpy as jnp, jdaso
    >>> memory = jdaso.passm.simulated_memory(params := {"w": jnp.float32(1.0)})[0]
    >>> blocks = jdaso.passm.partition(params, 1)
    >>> training = assm(memory, blocks, lambda p, x: (p["w"] * x) ** 2 / 2, 0.1, momentum=0.5)
    >>> state, loss = training.step(training.init(), 2.0)
    >>> float(memory.read()["w"])  # 1 - (1 - 0.5) 0.1 4
    0.800000011920929
    """
    return make_training(_ASSM, memory, blocks, loss_fn, learning_rate, momentum, **options)


def passm(
    memory: Memory,
    blocks: Sequence[Block],
    loss_fn: Callable,
    learning_rate: float | Callable[[int], float],
    momentum: float = 0.9,
    **options: Unpack[Options],
) -> Training:
    """PASSM: each process updates its own block of a shared model, without locks.

    As :func:`assm`, with the block of the process in place of the whole model:

        u_b <- m u_b + g_b,    x_b <- x_b - (1 - m) gamma u_b      (passm Algorithm 1)

    Only the subgradient of the block is computed (:func:`restricted_value_and_grad`). No other
    process writes the block, so no update is lost without locks (Sec. 1). Each number is written in
    one piece, so a reader finds old and new numbers, and never a mixture of their bits.

    With several blocks for each process, as of ``partition(params, 3 * memory.processes, order)``,
    a step draws one of its process's at random (Algorithms 1 and 2). The draw depends on ``seed``,
    the process and its step only, so a resumed training repeats it.

    Arguments, result and errors are those of :func:`assm`; ``before`` sees the block only.

    >>> import jax.numpy as jnp, jdaso
    >>> params = {"a": jnp.float32(1.0), "b": jnp.float32(1.0)}
    >>> memories = jdaso.passm.simulated_memory(params, processes=2)
    >>> for memory in memories:  # the second reads what the first wrote
    ...     training = passm(memory, [(0,), (1,)], lambda p: (p["a"] * p["b"]) ** 2 / 2, 0.5, 0.0)
    ...     state, loss = training.step(training.init())
    >>> {name: float(x) for name, x in memories[0].read().items()}
    {'a': 0.5, 'b': 0.875}
    """
    return make_training(_PASSM, memory, blocks, loss_fn, learning_rate, momentum, **options)


def passm_plus(
    memory: Memory,
    blocks: Sequence[Block],
    loss_fn: Callable,
    learning_rate: float | Callable[[int], float],
    momentum: float = 0.9,
    *,
    switches: Sequence[int],
    **options: Unpack[Options],
) -> Training:
    """PASSM+: ASSM and PASSM in turn, ASSM first (passm Sec. 4).

    Each process counts its own steps. Around a switch, some processes may therefore still be in
    the previous phase. All writes hold a lock, which in PASSM no other process wants. In PASSM the
    momentum of other blocks is unchanged, as in Algorithm 1.

    Args:
        memory, blocks, loss_fn, learning_rate, momentum, options: As in :func:`assm`.
        switches: Steps at which the other method begins, such as those of :func:`switches_around`.
            The learning rate changes with them, see :func:`phases`.

    The result and the errors are those of :func:`assm` and :func:`phases`.

    >>> import jax.numpy as jnp, jdaso
    >>> params = [jnp.float32(1.0), jnp.float32(1.0)]
    >>> memory, _ = jdaso.passm.simulated_memory(params, processes=2)
    >>> training = passm_plus(memory, [(0,), (1,)], sum, 0.5, momentum=0.0, switches=[1])
    >>> state, _ = training.step(training.init())
    >>> state, _ = training.step(state)
    >>> [float(x) for x in memory.read()]  # 1 - 0.5 - 0.5 (1 - 1/2), 1 - 0.5
    [0.25, 0.5]
    """
    phase = phases(switches, memory.processes)
    method = Method("passm_plus", phase, kinds=[True, False], locked=True)
    return make_training(method, memory, blocks, loss_fn, learning_rate, momentum, **options)


def phases(switches: Sequence[int], processes: int) -> Callable[[int], Phase]:
    """The phases of PASSM+: ASSM and PASSM in turn, ASSM first (passm Sec. 4, Table 1).

    The learning rate is scaled by (1 - 1/c) at each switch from ASSM to PASSM (Sec. 4). The paper
    does not say whether a switch back to ASSM undoes that. Here it does not, so the factors of
    several switches multiply.

    Args:
        switches: Steps of a process, counted from 0, at which the other method begins.
        processes: Number of processes that update concurrently; c in the paper.

    Returns:
        ``step -> Phase``.

    Raises:
        ValueError: For switches below 1 or not increasing, or for one process, whose learning rate
            would be scaled to 0.

    >>> phase = phases([10, 20, 30], processes=4)
    >>> [tuple(phase(step)) for step in (9, 10, 20, 30)]
    [(True, 1.0), (False, 0.75), (True, 0.75), (False, 0.5625)]
    """
    check_whole("processes", processes, 1)
    if processes == 1:
        raise ValueError(
            "passm_plus requires at least 2 processes, got 1: a switch scales the learning rate by "
            "1 - 1/processes. Use assm for one process."
        )
    steps = list(switches)
    for switch in steps:
        check_whole("switches", switch, 1)
    if steps != sorted(set(steps)):
        raise ValueError(f"switches must be strictly increasing, got {steps}.")

    def phase(step: int) -> Phase:
        passed = bisect_right(steps, step)
        return Phase(passed % 2 == 0, (1 - 1 / processes) ** ((passed + 1) // 2))

    return phase


def switches_around(
    drops: Sequence[int], total: int, first: float = 0.25, window: float = 0.1
) -> list[int]:
    """The heuristic of PASSM+: ASSM first and around drops of the learning rate (passm Sec. 4).

    Sec. 4 uses ASSM for "roughly 25 %" of the steps at first and for "roughly 10 %" around the
    drops, about half of all steps in total, which implies a tenth around each drop. Table 1
    deviates from this rule in two places.

    Args:
        drops: Steps at which the learning rate drops.
        total: Steps of the whole training.
        first: Share of the steps with ASSM at the beginning.
        window: Share of the steps with ASSM around each drop, half of it before the drop.

    Returns:
        The ``switches`` of :func:`passm_plus`. Adjacent windows are merged.

    Raises:
        ValueError: For drops outside of the training, or shares outside [0, 1].

    >>> switches_around([150, 225], total=300)  # Table 1 has 75, 135, 165, 210, 225
    [75, 135, 165, 210, 240]
    >>> switches_around([60, 120, 160], total=200, first=0.15)  # Table 1, Shufflenet and others
    [30, 50, 70, 110, 130, 150, 170]
    """
    check_whole("total", total, 1)
    for name, share in (("first", first), ("window", window)):
        check_number(name, share)
        if share > 1:
            raise ValueError(f"{name} must be a share in [0, 1], got {share!r}.")
    for drop in drops:
        check_whole("drops", drop, 0)
        if drop >= total:
            raise ValueError(f"drops must be below total, {total}, got {drop}.")
    half = round(window * total / 2)
    ends = [0, max(1, round(first * total))]  # begin and end of each interval of ASSM
    for drop in sorted(drops) if half else ():
        begin, end = drop - half, drop + half
        if begin <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            ends += [begin, end]
    return [step for step in ends[1:] if step < total]


def minibatches(
    num_samples: int, batch_sizes: Sequence[int], epoch: int, seed: int = 0
) -> list[np.ndarray]:
    """The minibatches of one epoch for each process (passm Sec. 4).

    Processes need not communicate: each computes the same permutation, a new one in every epoch,
    and takes its own part. Samples that do not fill a minibatch of all processes are left out.

    Args:
        num_samples: Number of samples in all.
        batch_sizes: Samples of a step of each process.
        epoch, seed: They determine the permutation.

    Returns:
        For each process an int array of shape ``(steps, batch_size)`` of indices of samples.

    Raises:
        ValueError: If there are fewer samples than one step of all processes takes.

    >>> [part.shape for part in minibatches(100, batch_sizes=[8, 16], epoch=0)]
    [(4, 8), (4, 16)]
    """
    for size in batch_sizes:
        check_whole("batch_sizes", size, 1)
    together = sum(batch_sizes)
    steps = num_samples // together if together else 0
    if steps == 0:
        raise ValueError(
            f"the sum of batch_sizes must be between 1 and num_samples, {num_samples}, got "
            f"{together}; use fewer processes or smaller batches."
        )
    order = np.random.default_rng((seed, epoch)).permutation(num_samples)
    rows = order[: steps * together].reshape(steps, together)
    return np.split(rows, np.cumsum(batch_sizes)[:-1], axis=1)
