"""The methods of the paper: ASSM, PASSM and PASSM+."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import optax

from jdaso._base import Exchange
from jdaso.passm._blocks import Block
from jdaso.passm._switches import Phase, phases
from jdaso.passm._training import Options, Training, training
from jdaso.shared._memory import Memory

_NOTHING = optax.identity()


def assm(
    memory: Memory,
    blocks: Sequence[Block],
    loss_fn: Callable,
    learning_rate: float | Callable[[int], float],
    momentum: float = 0.9,
    *,
    before: optax.GradientTransformation = _NOTHING,
    group: Exchange | None = None,
    has_aux: bool = False,
    nonfinite: str = "skip",
) -> Training:
    """ASSM: processes update the whole of a shared model, each in its own time.

    A step of a process reads the shared parameters, computes a subgradient at what it has read, on
    a minibatch of its own, and with its private momentum

        u <- m u + g,    x <- x - (1 - m) gamma u                  (passm Algorithm 1)

    The write holds a lock, one for each block at a time; the read holds none and may mix versions.
    The paper's step size gamma is ``1 / (1 - m)`` times that of ``optax.sgd(gamma, m)``.

    Args:
        memory: from :func:`shared_memory`.
        blocks: from :func:`partition`, one for each process that updates; the same for all.
        loss_fn: ``(params, *args) -> loss`` or, with ``has_aux``, ``(loss, aux)``; jitted here.
        learning_rate: gamma, or ``step -> gamma`` of this process's own steps, on the host.
        momentum: m in [0, 1), private to a process.
        before: what is done to a subgradient before it enters the momentum, such as
            ``optax.add_decayed_weights(1e-4)``; without a state.
        group: for servers with slaves, an exchange over :func:`server_group`: all compute at what
            the server has read, and their mean subgradient is what it takes, as with
            :func:`jdaso.allreduce_gradients`. All members of a group take the same steps, with
            batches of one size: the mean does not weigh them.
        has_aux: as in ``jax.value_and_grad``.
        nonfinite: ``skip`` writes nothing in a step whose subgradient is not finite, and leaves
            the momentum as it was; ``raise`` stops.

    Returns:
        A :class:`Training`. All processes must call this function.

    Raises:
        ValueError: for blocks that do not share out the parameters among the processes, a
            learning rate that is not positive, a momentum outside [0, 1), ``before`` with a state.
        JdasoError: if processes have other blocks.

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
    options = Options(momentum, before, group, has_aux, nonfinite)

    def phase(step: int) -> Phase:
        return Phase(whole=True, factor=1.0)

    return training("assm", memory, blocks, loss_fn, learning_rate, phase, [True], True, options)


def passm(
    memory: Memory,
    blocks: Sequence[Block],
    loss_fn: Callable,
    learning_rate: float | Callable[[int], float],
    momentum: float = 0.9,
    *,
    before: optax.GradientTransformation = _NOTHING,
    group: Exchange | None = None,
    has_aux: bool = False,
    nonfinite: str = "skip",
) -> Training:
    """PASSM: each process updates its own block of a shared model, without locks.

    As :func:`assm`, with the block of the process in the place of the whole model:

        u_b <- m u_b + g_b,    x_b <- x_b - (1 - m) gamma u_b      (passm Algorithm 1)

    The subgradient of the block is all that is computed (:func:`restricted_value_and_grad`). Nobody
    else writes the block, so no update is lost; each number is written at once, so a reader finds
    old ones and new ones, but no mixture of bits.

    Args:
        memory, blocks, loss_fn, learning_rate, momentum: as in :func:`assm`.
        before, group, has_aux, nonfinite: likewise; ``before`` sees the block only.

    Returns:
        A :class:`Training`. All processes must call this function.

    Raises:
        ValueError: as :func:`assm`.
        JdasoError: as :func:`assm`.

    >>> import jax.numpy as jnp
    >>> from jdaso import passm as shared
    >>> params = {"a": jnp.float32(1.0), "b": jnp.float32(1.0)}
    >>> memories = shared.simulated_memory(params, processes=2)
    >>> blocks = shared.partition(params, 2)
    >>> def loss_fn(params, x):
    ...     return (params["a"] * params["b"] * x) ** 2 / 2
    >>> for memory in memories:  # one after the other; the second reads what the first wrote
    ...     training = passm(memory, blocks, loss_fn, 0.5, momentum=0.0)
    ...     state, loss = training.step(training.init(), 1.0)
    >>> {name: float(x) for name, x in memories[0].read().items()}
    {'a': 0.5, 'b': 0.875}
    """
    options = Options(momentum, before, group, has_aux, nonfinite)

    def phase(step: int) -> Phase:
        return Phase(whole=False, factor=1.0)

    return training("passm", memory, blocks, loss_fn, learning_rate, phase, [False], False, options)


def passm_plus(
    memory: Memory,
    blocks: Sequence[Block],
    loss_fn: Callable,
    learning_rate: float | Callable[[int], float],
    momentum: float = 0.9,
    *,
    switches: Sequence[int],
    before: optax.GradientTransformation = _NOTHING,
    group: Exchange | None = None,
    has_aux: bool = False,
    nonfinite: str = "skip",
) -> Training:
    """PASSM+: ASSM and PASSM in turn, beginning with ASSM (passm Sec. 4).

    Each process counts its own steps, so around a switch some may be in the one and some in the
    other. A block is therefore written with its lock held in both; nobody else wants it while all
    are in PASSM. Momentum of other blocks rests meanwhile, as Algorithm 1 has it.

    Args:
        memory, blocks, loss_fn, learning_rate, momentum: as in :func:`assm`. The learning rate is
            scaled by (1 - 1/c) at each switch to PASSM: see :func:`phases`.
        switches: steps that begin the other one, such as those of :func:`switches_around`.
        before, group, has_aux, nonfinite: as in :func:`assm`.

    Returns:
        A :class:`Training`. All processes must call this function.

    Raises:
        ValueError: as :func:`assm`, and for switches that do not rise, or a single process.
        JdasoError: as :func:`assm`.

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
    options = Options(momentum, before, group, has_aux, nonfinite)
    phase = phases(switches, memory.processes)
    return training(
        "passm_plus", memory, blocks, loss_fn, learning_rate, phase, [True, False], True, options
    )
