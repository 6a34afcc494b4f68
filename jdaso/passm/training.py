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
from jdaso.core.tree import all_finite, is_masked, part_of
from jdaso.core.types import JdasoError, Leaves, Number, PyTree
from jdaso.core.validation import check_choice, check_positive, check_share, check_whole
from jdaso.core.wire import sum_dtype
from jdaso.passm.blocks import Block, check_blocks, restricted_value_and_grad, with_leaves
from jdaso.passm.memory import Memory

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


class Phase(NamedTuple):
    """The kind of update of a step.

    Attributes:
        whole: Whether the step updates the whole model (ASSM) or the process's block (PASSM).
        factor: Factor of the learning rate.
    """

    whole: bool
    factor: float


class Method(NamedTuple):
    """The differences between the methods."""

    name: str
    phase: Callable[[int], Phase]
    kinds: Sequence[bool]  # the values of Phase.whole that occur
    locked: bool  # whether writes hold the lock of their block


class Options(TypedDict, total=False):
    """The keyword arguments of all methods, which :func:`jdaso.passm.assm` explains."""

    before: optax.GradientTransformation
    group: Exchange | None
    batch_size: int | None
    accumulate: int
    has_aux: bool
    nonfinite: str
    seed: int


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
    batch_size: int | None = None,
    accumulate: int = 1,
    has_aux: bool = False,
    nonfinite: str = "skip",
    seed: int = 0,
) -> Training:
    """The training of a method, with the arguments of :func:`jdaso.passm.assm`."""
    check_share("momentum", momentum, below_one=True)
    if not callable(learning_rate):
        check_positive("learning_rate", learning_rate)
    check_whole("accumulate", accumulate, 1)
    check_choice("nonfinite", nonfinite, ("skip", "raise"))
    check_whole("seed", seed, 0, bits=63)
    check_blocks(blocks, memory.params, memory.processes)
    if jax.tree.leaves(jax.eval_shape(before.init, memory.params)):
        raise ValueError(
            "before must be a transformation without a state, such as optax.add_decayed_weights or "
            "optax.clip_by_global_norm, because the method has its own momentum; got one with a "
            "state."
        )
    _check_group(memory, group, batch_size)
    blocks, each = [tuple(sorted(block)) for block in blocks], len(blocks) // memory.processes
    lines = [f"{method.name}, block {i}: leaves {block}" for i, block in enumerate(blocks)]
    if each > 1:
        lines.append(f"{method.name}, seed of the drawn blocks: {seed}")
    memory.compare(lines)
    shares = [blocks[c * each : (c + 1) * each] for c in range(memory.processes)]
    leaves_of = [tuple(sorted(i for block in share for i in block)) for share in shares]
    everything = tuple(sorted(i for share in leaves_of for i in share))
    own = shares[memory.process]
    # Each process starts with its own leaves, so that they do not queue for the same locks.
    turns = [(memory.process + i) % memory.processes for i in range(memory.processes)]

    def computation(inside: Block) -> Callable:
        """The computation of a step: momentum and update of the leaves at these positions."""
        value_and_grad = restricted_value_and_grad(loss_fn, inside, has_aux)
        if accumulate > 1:
            value_and_grad = _mean_over_minibatches(value_and_grad, accumulate)

        @jax.jit
        def compute(params: PyTree, old: Leaves, rate: jax.Array, *args: PyTree):
            if group is not None:
                params = broadcast(group, params)  # those that the server has read
            value, grads = value_and_grad(params, *args)
            if group is not None:
                grads = group_mean(group, grads, batch_size or 1)
            within = part_of(params, list(inside))
            grads, _ = before.update(grads, before.init(within), within)
            subgradient = jax.tree.leaves(grads)
            finite = all_finite(subgradient)
            # Algorithm 1, lines 7 and 8; with the new u, as in Algorithm 2 and Eq. 2.
            new = [momentum * u + g.astype(u.dtype) for u, g in zip(old, subgradient, strict=True)]
            new = [jnp.where(finite, after, u) for after, u in zip(new, old, strict=True)]
            return value, new, [(-(1 - momentum) * rate * u).astype(u.dtype) for u in new], finite

        return compute

    computations = {
        inside: computation(inside)
        for whole in method.kinds
        for inside in ([everything] if whole else own)
    }

    def init(*args: PyTree) -> State:
        written = everything if True in method.kinds else leaves_of[memory.process]
        zeros = jax.tree.map(jnp.zeros_like, part_of(memory.params, list(written)))
        if args:
            leaves = jax.tree.leaves(zeros, is_leaf=is_masked)
            for inside, compute in computations.items():
                compute(memory.read(), [leaves[i] for i in inside], 0.0, *args)
            memory.barrier()
        return State(0, zeros, 0)

    def step(state: State, *args: PyTree) -> tuple[State, Any]:
        phase, inside = method.phase(state.step), own[0]
        if phase.whole:
            inside = everything
        elif each > 1:  # Algorithm 1, line 3; the block depends on nothing but its seed
            drawn = np.random.default_rng((seed, memory.process, state.step)).integers(each)
            inside = own[int(drawn)]
        rate = float(learning_rate(state.step) if callable(learning_rate) else learning_rate)
        if not 0 <= rate < math.inf:
            raise ValueError(
                f"learning_rate must be at least 0 and finite, got {rate} at step {state.step}."
            )
        params = memory.read()
        leaves, structure = jax.tree.flatten(state.momentum, is_leaf=is_masked)
        old = [leaves[i] for i in inside]
        value, new, updates, finite = computations[inside](params, old, rate * phase.factor, *args)
        if not (finite := bool(finite)) and nonfinite == "raise":
            raise JdasoError(
                f"{method.name}: a subgradient of process {memory.process} is not finite at its "
                f"step {state.step}; nothing was written. Lower the learning rate, or use "
                "nonfinite='skip'."
            )
        if finite and memory.writes:
            update_at = dict(zip(inside, map(np.asarray, updates), strict=True))
            written = turns if phase.whole else [memory.process]
            memory.add(
                {c: {i: update_at[i] for i in leaves_of[c] if i in update_at} for c in written},
                method.locked,
            )
        momenta = with_leaves(structure, leaves, inside, new)
        return State(state.step + 1, momenta, state.skipped + (not finite)), value

    return Training(init, step)


def _check_group(memory: Memory, group: Exchange | None, batch_size: int | None) -> None:
    members = 1 if group is None else group.num_nodes
    if members != memory.members:
        raise ValueError(
            f"group must have {memory.members} members, as many as a server of this memory, got "
            f"{members}: pass the same num_servers to shared_memory and server_group, and use "
            "group=jdaso.mpi_exchange(server_group(...))."
        )
    if group is None and batch_size is not None:
        raise ValueError(
            f"batch_size weighs the subgradients of a group, got {batch_size} without a group; "
            "give it together with group, or leave it out."
        )
    if group is not None:
        if batch_size is None:
            raise ValueError(
                "group requires batch_size, the number of samples that this process computes in a "
                "step, because the mean of the group is weighted by it; got None."
            )
        check_whole("batch_size", batch_size, 1)


def _mean_over_minibatches(value_and_grad: Callable, count: int) -> Callable:
    """The mean of loss and subgradient over ``count`` stacked minibatches, one after the other."""

    def means(params: PyTree, *args: PyTree):
        for leaf in jax.tree.leaves(args):
            if jnp.shape(leaf)[:1] != (count,):
                raise ValueError(
                    f"accumulate={count} requires {count} minibatches, stacked along the first "
                    f"axis of each array, got an array of shape {jnp.shape(leaf)}; reshape a batch "
                    f"to ({count}, rows of a minibatch, ...)."
                )

        def add(total: PyTree, args: PyTree):
            value, grads = value_and_grad(params, *args)
            return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), value

        first = jax.tree.map(lambda x: x[0], args)
        like = jax.eval_shape(value_and_grad, params, *first)[1]
        zeros = jax.tree.map(lambda g: jnp.zeros(g.shape, sum_dtype(g.dtype)), like)
        total, values = jax.lax.scan(add, zeros, args, length=count)
        grads = jax.tree.map(lambda g, t: (t / count).astype(g.dtype), like, total)
        if isinstance(values, tuple):
            return (jnp.mean(values[0]), values[1]), grads
        return jnp.mean(values), grads

    return means


def group_mean(group: Exchange, grads: PyTree, batch_size: Number) -> PyTree:
    """The mean over the samples of all members (passm Eq. 9), who may have batches of any size.

    A member whose subgradient is not finite is left out with its samples.
    """
    weight = jnp.float32(batch_size)
    # In float32 at least, because the weights may be too large for float16.
    weighted = jax.tree.map(lambda g: weight * g.astype(sum_dtype(g.dtype)), grads)
    # A consensus leaves out what is not finite leaf by leaf. Here a process is left out as a whole.
    finite = all_finite(jax.tree.leaves(weighted))
    sent = jax.tree.map(lambda x: jnp.where(finite, x, jnp.nan), (weighted, weight))
    total, weights = consensus(group, sent)
    return jax.tree.map(lambda g, t: (t / weights).astype(g.dtype), grads, total)
