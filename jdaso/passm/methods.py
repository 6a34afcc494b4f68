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

    The write holds the lock of one block at a time. The read holds no lock and may mix versions.
    The paper's step size gamma is ``1 / (1 - m)`` times that of ``optax.sgd(gamma, m)``.

    Args:
        memory: From :func:`shared_memory`.
        blocks: From :func:`partition`, one for each process that updates, equal on all processes.
        loss_fn: ``(params, *args) -> loss`` or, with ``has_aux``, ``(loss, aux)``. It is jitted.
        learning_rate: gamma, or ``step -> gamma`` of this process's own steps, on the host.
        momentum: m in [0, 1), private to a process.
        **options: Keyword arguments:

            - ``before``: Transformation of a subgradient before it enters the momentum, without a
              state, such as ``optax.add_decayed_weights(1e-4)``. Default: none.
            - ``group``: For servers with slaves, an exchange over :func:`server_group`. All
              members of the group compute at the parameters that the server has read, and the
              server uses their mean subgradient, as with :func:`jdaso.allreduce_gradients`. The
              members must take the same steps with batches of one size, because the mean is not
              weighted. Default: None.
            - ``has_aux``: As in ``jax.value_and_grad``. Default: False.
            - ``nonfinite``: ``"skip"`` (default) writes nothing in a step whose subgradient is not
              finite, and leaves the momentum unchanged. ``"raise"`` raises an error.

    Returns:
        A :class:`Training`. All processes must call this function.

    Raises:
        ValueError: For blocks that do not divide the parameters among the processes, a learning
            rate that is not positive, a momentum outside [0, 1), or ``before`` with a state.
        JdasoError: If the blocks differ between processes.

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
    process writes the block, so no update is lost. Each number is written in one piece, so a
    reader finds old and new numbers, and never a mixture of their bits.

    Args:
        memory, blocks, loss_fn, learning_rate, momentum: As in :func:`assm`.
        **options: As in :func:`assm`. ``before`` sees the block only.

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
    the previous phase. A block is always written with its lock held, and in PASSM no other process
    wants that lock. In PASSM the momentum of other blocks is unchanged, as in Algorithm 1.

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
