"""The steps of all methods: read shared parameters, compute, write (passm Algorithm 1)."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdaso.core.consensus import broadcast, consensus
from jdaso.core.exchange import Exchange
from jdaso.core.fragments import part
from jdaso.core.tree import all_finite, is_masked
from jdaso.core.types import JdasoError, Leaves, PyTree
from jdaso.core.validation import check_choice, check_positive, check_share
from jdaso.passm.block_gradient import restricted_value_and_grad, with_leaves
from jdaso.passm.layer_blocks import Block, check_blocks
from jdaso.passm.memory import Memory
from jdaso.passm.switching import Phase

_IDENTITY = optax.identity()


class State(NamedTuple):
    """The state that is private to a process.

    Attributes:
        step: int, steps taken.
        momentum: Like the parameters, with :class:`optax.MaskedNode` in place of the leaves that
            this process never writes.
        skipped: int, steps that wrote nothing because a subgradient was not finite.
    """

    step: int
    momentum: PyTree
    skipped: int


class Training(NamedTuple):
    """The training of one process.

    Attributes:
        init: ``(*args) -> State``. With a batch, as for ``step``, it compiles the steps and waits
            until all processes have compiled theirs, so that they start together. Without a batch,
            the first step compiles, and other processes may take many steps meanwhile.
        step: ``(state, *args) -> (state, loss)``, or ``(state, (loss, aux))``: reads the shared
            parameters, computes, and writes. ``args`` are those of the loss.
    """

    init: Callable[..., State]
    step: Callable[..., tuple[State, Any]]


class Method(NamedTuple):
    """The differences between the methods."""

    name: str
    phase: Callable[[int], Phase]
    kinds: Sequence[bool]  # the values of Phase.whole that occur
    locked: bool  # whether writes hold the lock of their block


class Options(TypedDict, total=False):
    """The keyword arguments of all methods; see :func:`jdaso.passm.assm`."""

    before: optax.GradientTransformation
    group: Exchange | None
    has_aux: bool
    nonfinite: str


def make_training(
    method: Method,
    memory: Memory,
    blocks: Sequence[Block],
    loss_fn: Callable,
    learning_rate: float | Callable[[int], float],
    momentum: float,
    *,
    before: optax.GradientTransformation = _IDENTITY,
    group: Exchange | None = None,
    has_aux: bool = False,
    nonfinite: str = "skip",
) -> Training:
    """The training of a method; the other arguments are those of :func:`jdaso.passm.assm`."""
    check_share("momentum", momentum, below_one=True)
    if not callable(learning_rate):
        check_positive("learning_rate", learning_rate)
    check_choice("nonfinite", nonfinite, ("skip", "raise"))
    check_blocks(blocks, memory.params, memory.processes)
    _check_before(before, memory.params)
    _check_group(memory, group)
    memory.compare([f"{method.name}, block {i}: leaves {block}" for i, block in enumerate(blocks)])
    everything = tuple(sorted(i for block in blocks for i in block))
    positions = {True: everything, False: blocks[memory.process]}  # of the leaves, by Phase.whole
    computes = {
        whole: jax.jit(_compute(loss_fn, inside, momentum, before, group, has_aux))
        for whole, inside in positions.items()
    }
    # Each process starts with its own block, so that they do not queue for the same locks.
    turns = [(memory.process + i) % memory.processes for i in range(memory.processes)]

    def init(*args: PyTree) -> State:
        written = positions[True in method.kinds]
        zeros = jax.tree.map(jnp.zeros_like, part(memory.params, list(written)))
        if args:
            leaves = jax.tree.leaves(zeros, is_leaf=is_masked)
            for whole in method.kinds:
                computes[whole](memory.read(), [leaves[i] for i in positions[whole]], 0.0, *args)
            memory.barrier()
        return State(0, zeros, 0)

    def step(state: State, *args: PyTree) -> tuple[State, Any]:
        phase = method.phase(state.step)
        inside = positions[phase.whole]
        rate = _rate_at(learning_rate, state.step) * phase.factor
        params = memory.read()
        leaves, structure = jax.tree.flatten(state.momentum, is_leaf=is_masked)
        old = [leaves[i] for i in inside]
        value, new, updates, finite = computes[phase.whole](params, old, rate, *args)
        if not (finite := bool(finite)) and nonfinite == "raise":
            raise JdasoError(
                f"{method.name}: a subgradient of process {memory.process} is not finite at its "
                f"step {state.step}; nothing was written. Lower the learning rate, or use "
                "nonfinite='skip'."
            )
        if finite and memory.writes:
            update_at = dict(zip(inside, map(np.asarray, updates), strict=True))
            written = turns if phase.whole else [memory.process]
            memory.add({c: {i: update_at[i] for i in blocks[c]} for c in written}, method.locked)
        momenta = with_leaves(structure, leaves, inside, new)
        return State(state.step + 1, momenta, state.skipped + (not finite)), value

    return Training(init, step)


def _check_before(before: optax.GradientTransformation, params: PyTree) -> None:
    if jax.tree.leaves(jax.eval_shape(before.init, params)):
        raise ValueError(
            "before must be a transformation without a state, such as optax.add_decayed_weights or "
            "optax.clip_by_global_norm, because the method has its own momentum; got one with a "
            "state."
        )


def _check_group(memory: Memory, group: Exchange | None) -> None:
    members = 1 if group is None else group.num_nodes
    if members != memory.members:
        raise ValueError(
            f"group must have {memory.members} members, as many as a server of this memory, got "
            f"{members}: pass the same num_servers to shared_memory and server_group, and use "
            "group=jdaso.mpi_exchange(server_group(...))."
        )


def _compute(
    loss_fn: Callable,
    inside: Block,
    m: float,
    before: optax.GradientTransformation,
    group: Exchange | None,
    has_aux: bool,
) -> Callable:
    """The computation of a step: momentum and update of the leaves at positions ``inside``."""
    value_and_grad = restricted_value_and_grad(loss_fn, inside, has_aux)

    def compute(params: PyTree, momentum: Leaves, rate: jax.Array, *args: PyTree):
        if group is not None:
            params = broadcast(group, params)  # those that the server has read
        value, grads = value_and_grad(params, *args)
        if group is not None:
            grads = consensus(group, grads)
        within = part(params, list(inside))
        grads, _ = before.update(grads, before.init(within), within)
        subgradient = jax.tree.leaves(grads)
        finite = all_finite(subgradient)
        # Algorithm 1, lines 7 and 8; with the new u, as in Eq. 2.
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
