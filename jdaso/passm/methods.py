"""The methods of the paper: ASSM, PASSM and PASSM+."""

from collections.abc import Callable, Sequence
from typing import Unpack

from jdaso.passm.layer_blocks import Block
from jdaso.passm.memory import Memory
from jdaso.passm.switching import Phase, phases
from jdaso.passm.training import Method, Options, Training, make_training

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

    A step of a process reads the shared parameters, computes a subgradient at these parameters on
    a minibatch of its own, and updates with its private momentum

        u <- m u + g,    x <- x - (1 - m) gamma u                  (passm Algorithm 1)

    The write holds a lock, for the leaves of one process at a time, as in line 8 of Algorithm 1
    and in Sec. 1. The read holds no lock and may mix versions (Sec. 2); Appendix C.4 mentions a
    variant whose reads are locked too, which is not offered. The paper's step size gamma is
    ``1 / (1 - m)`` times that of ``optax.sgd(gamma, m)``.

    Args:
        memory: From :func:`shared_memory`, or from :func:`simulated_memory` with delays.
        blocks: From :func:`partition`, as many for each process that updates, and equal on all
            processes.
        loss_fn: ``(params, *args) -> loss`` or, with ``has_aux``, ``(loss, aux)``. It is jitted.
        learning_rate: gamma, or ``step -> gamma`` of this process's own steps, on the host.
        momentum: m in [0, 1), private to a process.
        **options: Keyword arguments:

            - ``before``: Transformation of a subgradient before it enters the momentum, without a
              state, such as ``optax.add_decayed_weights(1e-4)``. Default: none.
            - ``group``: For servers with slaves, an exchange over :func:`server_group`. All
              members of the group compute at the parameters that the server has read, and the
              server uses the mean subgradient of all their samples (passm Sec. 4, Eq. 9). The
              members must take equally many steps. Default: None.
            - ``batch_size``: With ``group``, the number of samples that this process takes in a
              step, by which the mean is weighted. In passm Fig. 4 a server takes 32 and each of
              its slaves 128. Without a group it must be left out.
            - ``accumulate``: Number n of minibatches whose subgradients make one step. All n are
              computed at the same parameters, one after the other in the memory of one, and their
              mean enters the momentum. Every array among the arguments of ``step`` has a first
              axis of length n. The loss is the mean, and ``aux`` has an entry for each. passm
              Fig. 3 computes at 64 samples and updates at 128, which is n = 2; it does not say
              whether its processes read again in between. Default: 1.
            - ``has_aux``: As in ``jax.value_and_grad``. Default: False.
            - ``nonfinite``: ``"skip"`` (default) writes nothing in a step whose subgradient is not
              finite, and leaves the momentum unchanged. ``"raise"`` raises an error.
            - ``seed``: Seed of the blocks that :func:`passm` draws at random. Default: 0.

    Returns:
        A :class:`Training`. All processes must call this function.

    Raises:
        ValueError: For blocks that do not divide the parameters among the processes, a learning
            rate that is not positive, a momentum outside [0, 1), ``before`` with a state, a
            ``group`` without ``batch_size``, or minibatches to accumulate that are not stacked.
        JdasoError: If the blocks, or the seeds of drawn blocks, differ between processes.

    >>> import jax.numpy as jnp
    >>> from jdaso import passm
    >>> params = {"w": jnp.float32(1.0)}
    >>> memory = passm.simulated_memory(params)[0]
    >>> blocks = passm.partition(params, 1)
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
    process writes the block, so no update is lost without locks (passm Sec. 1). Each number is
    written in one piece, so a reader finds old and new numbers, and never a mixture of their bits.

    The experiments of the paper give one block to each process (Sec. 4). Its Algorithms 1 and 2
    draw the block of a step at random among those of a process, which happens here if there are
    several for each: with ``partition(params, 3 * memory.processes, order)`` process c owns the
    consecutive blocks 3c to 3c + 2, and at each step it updates one of them, all equally likely.
    The choice depends on ``seed``, the process and its step only, so a resumed training repeats it.

    Args:
        memory, blocks, loss_fn, learning_rate, momentum: As in :func:`assm`.
        **options: As in :func:`assm`. ``before`` sees the block of the step only.

    Returns:
        A :class:`Training`. All processes must call this function.

    Raises:
        ValueError, JdasoError: As :func:`assm`.

    >>> import jax.numpy as jnp
    >>> from jdaso import passm as shared
    >>> params = {"a": jnp.float32(1.0), "b": jnp.float32(1.0)}
    >>> memories = shared.simulated_memory(params, processes=2)
    >>> blocks = shared.partition(params, 2)
    >>> def loss_fn(params, x):
    ...     return (params["a"] * params["b"] * x) ** 2 / 2
    >>> for memory in memories:  # the second reads what the first wrote
    ...     training = passm(memory, blocks, loss_fn, 0.5, momentum=0.0)
    ...     state, loss = training.step(training.init(), 1.0)
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
        memory, blocks, loss_fn, learning_rate, momentum: As in :func:`assm`. The learning rate is
            scaled by (1 - 1/c) at each switch to PASSM, see :func:`phases`.
        switches: Steps at which the other method begins, such as those of :func:`switches_around`.
        **options: As in :func:`assm`.

    Returns:
        A :class:`Training`. All processes must call this function.

    Raises:
        ValueError: As :func:`assm`, and for switches that are not increasing or a single process.
        JdasoError: As :func:`assm`.

    >>> import jax.numpy as jnp
    >>> from jdaso import passm
    >>> params = {"a": jnp.float32(1.0), "b": jnp.float32(1.0)}
    >>> memory, _ = passm.simulated_memory(params, processes=2)
    >>> blocks = passm.partition(params, 2)
    >>> def loss_fn(params, x):
    ...     return (params["a"] + params["b"]) * x
    >>> training = passm_plus(memory, blocks, loss_fn, 0.5, momentum=0.0, switches=[1])
    >>> state = training.init()
    >>> for step in range(2):
    ...     state, loss = training.step(state, 1.0)
    >>> {name: float(x) for name, x in memory.read().items()}  # 1 - 0.5 - 0.5 (1 - 1/2), 1 - 0.5
    {'a': 0.25, 'b': 0.5}
    """
    phase = phases(switches, memory.processes)
    method = Method("passm_plus", phase, kinds=[True, False], locked=True)
    return make_training(method, memory, blocks, loss_fn, learning_rate, momentum, **options)
