"""Steps that read shared parameters, compute, and write: passm Algorithm 1, of all methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdaso._base import Exchange, JdasoError, Leaves, PyTree
from jdaso._checks import check_choice
from jdaso._consensus import broadcast, consensus
from jdaso._fragments import part
from jdaso._leaves import all_finite
from jdaso.algorithms._arguments import check_positive, check_share
from jdaso.passm._blocks import Block, check_blocks
from jdaso.passm._gradient import restricted_value_and_grad
from jdaso.passm._switches import Phase
from jdaso.shared._memory import Memory


class State(NamedTuple):
    """What a process keeps for itself.

    Attributes:
        step: int, how many it has taken.
        momentum: like the parameters, with :class:`optax.MaskedNode` in place of the leaves that
            this process never writes.
        skipped: int, steps that wrote nothing because a subgradient was not finite.
    """

    step: int
    momentum: PyTree
    skipped: int


class Training(NamedTuple):
    """A training as one process sees it.

    Attributes:
        init: ``(*args) -> State``. With a batch, as for ``step``, it compiles the steps for it and
            waits until all processes have, so that they begin together; without, the first step
            compiles, and others may be far ahead by then.
        step: ``(state, *args) -> (state, loss)``, or ``(state, (loss, aux))``: reads the shared
            parameters, computes, and writes. ``args`` are those of the loss.
    """

    init: Callable[..., State]
    step: Callable[..., tuple[State, Any]]


class Options(NamedTuple):
    """What all methods share; see :func:`jdaso.passm.assm`."""

    momentum: float
    before: optax.GradientTransformation
    group: Exchange | None
    has_aux: bool
    nonfinite: str


def training(
    name: str,
    memory: Memory,
    blocks: Sequence[Block],
    loss_fn: Callable,
    learning_rate: float | Callable[[int], float],
    phase: Callable[[int], Phase],
    kinds: Sequence[bool],
    locked: bool,
    options: Options,
) -> Training:
    """A training whose steps update the whole model or the process's own block.

    Args:
        name: of the method, for errors.
        memory, blocks, loss_fn, learning_rate: as in :func:`jdaso.passm.assm`.
        phase: ``step -> Phase``.
        kinds: whether phases are of the whole model, of blocks, or of both.
        locked: whether writes hold the lock of their block.
        options: the rest.

    Returns:
        A :class:`Training`.
    """
    check_share("momentum", options.momentum, below_one=True)
    if not callable(learning_rate):
        check_positive("learning_rate", learning_rate)
    check_choice("nonfinite", options.nonfinite, ("skip", "raise"))
    check_blocks(blocks, memory.params, memory.processes)
    if jax.tree.leaves(jax.eval_shape(options.before.init, memory.params)):
        raise ValueError(
            "before must be a transformation without a state, such as optax.add_decayed_weights or "
            "optax.clip_by_global_norm; the momentum of a step is that of the method."
        )
    _check_group(memory, options.group)
    memory.compare([f"{name}, block {i}: leaves {block}" for i, block in enumerate(blocks)])
    own = blocks[memory.process]
    everything = tuple(sorted(i for block in blocks for i in block))
    computes = {
        whole: jax.jit(_compute(loss_fn, everything if whole else own, options))
        for whole in (True, False)
    }
    # Each begins with its own block, so that they do not queue for the same locks.
    turns = [(memory.process + i) % memory.processes for i in range(memory.processes)]
    written = everything if True in kinds else own

    def init(*args: PyTree) -> State:
        def zeros(x):
            return jnp.zeros(x.shape, x.dtype)

        momentum = jax.tree.map(zeros, part(memory.params, list(written)))
        if args:
            places = jax.tree.leaves(momentum, is_leaf=_is_masked)
            for whole in kinds:
                before = [places[i] for i in (everything if whole else own)]
                computes[whole](memory.read(), before, 0.0, *args)
            memory.meet()
        return State(0, momentum, 0)

    def step(state: State, *args: PyTree) -> tuple[State, Any]:
        now = phase(state.step)
        inside = everything if now.whole else own
        rate = _rate_at(learning_rate, state.step) * now.factor
        params = memory.read()
        places, structure = jax.tree.flatten(state.momentum, is_leaf=_is_masked)
        before = [places[i] for i in inside]
        value, after, updates, finite = computes[now.whole](params, before, rate, *args)
        finite = bool(finite)
        if not finite and options.nonfinite == "raise":
            raise JdasoError(
                f"{name}: a subgradient of process {memory.process} is not finite at its step "
                f"{state.step}; nothing was written. Lower the learning rate, or use "
                "nonfinite='skip'."
            )
        if finite and memory.writes:
            moved = dict(zip(inside, map(np.asarray, updates), strict=True))
            for number in turns if now.whole else [memory.process]:
                memory.add(number, {i: moved[i] for i in blocks[number]}, locked)
        for i, u in zip(inside, after, strict=True):
            places[i] = u
        momentum = jax.tree.unflatten(structure, places)
        return State(state.step + 1, momentum, state.skipped + (not finite)), value

    return Training(init, step)


def _check_group(memory: Memory, group: Exchange | None) -> None:
    """Raises ValueError where slaves would compute for nobody, or all add their mean."""
    members = 1 if group is None else group.num_nodes
    if members != memory.members:
        raise ValueError(
            f"group has {members} members, but of this memory a server has {memory.members}: give "
            "shared_memory and server_group the same num_servers, and group="
            "jdaso.mpi_exchange(server_group(...))."
        )


def _compute(loss_fn: Callable, inside: Block, options: Options) -> Callable:
    """Everything of a step that is computed: of the leaves inside, momentum and update."""
    value_and_grad = restricted_value_and_grad(loss_fn, inside, options.has_aux)
    m, group = options.momentum, options.group

    def compute(params: PyTree, momentum: Leaves, rate: jax.Array, *args: PyTree):
        if group is not None:
            params = broadcast(group, params)  # what the server has read
        value, grads = value_and_grad(params, *args)
        if group is not None:
            grads = consensus(group, grads)
        within = part(params, list(inside))
        grads, _ = options.before.update(grads, options.before.init(within), within)
        subgradient = jax.tree.leaves(grads)
        finite = all_finite(subgradient)
        # Algorithm 1, lines 7 and 8; with the new u, as Eq. 2 has it.
        after = [m * u + g.astype(u.dtype) for u, g in zip(momentum, subgradient, strict=True)]
        after = [jnp.where(finite, new, u) for new, u in zip(after, momentum, strict=True)]
        updates = [(-(1 - m) * rate * u).astype(u.dtype) for u in after]
        return value, after, updates, finite

    return compute


def _rate_at(learning_rate: float | Callable[[int], float], step: int) -> float:
    if not callable(learning_rate):
        return float(learning_rate)
    rate = float(learning_rate(step))
    if not 0 <= rate < math.inf:
        raise ValueError(f"learning_rate must be at least 0 and finite, got {rate} at step {step}.")
    return rate


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
