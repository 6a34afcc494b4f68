"""The interfaces of schedules and merges, and the types that all parts of an algorithm share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PyTree = Any
Leaves = list[jax.Array]
Number = jax.Array | int


class JdasoError(RuntimeError):
    """An error between nodes. Its message names the ranks and hosts."""


class Plan(NamedTuple):
    """What a schedule requests at one step. All fields are scalars and equal on all nodes.

    Attributes:
        phase: int32, index of the schedule's phase that contains this step.
        period: int32, optimizer steps between two exchanges.
        delay: int32, optimizer steps between posting an exchange and merging its result.
        clock: int32, steps since the periods are counted from, including this step.
        flush: bool, whether to complete all exchanges at this step.
        blocking: bool, whether exchanges block in this phase, which may use another wire.
        epoch_end: bool, whether to average all parameters at this step. This exchange also
            carries the losses of the epoch.
    """

    phase: jax.Array
    period: jax.Array
    delay: jax.Array
    clock: jax.Array
    flush: jax.Array
    blocking: jax.Array
    epoch_end: jax.Array

    def posts(self, fragment: int = 0, fragments: int = 1) -> jax.Array:
        """Whether to post a fragment at this step. Fragments take turns within a period."""
        turn = fragment * self.period // fragments
        return self.epoch_end | (jnp.mod(self.clock - turn, self.period) == 0)


class Schedule(NamedTuple):
    """When to post an exchange and when to merge it.

    Attributes:
        init: ``() -> state``. The state holds arrays only.
        plan: ``(state, step) -> (Plan, state)``. ``step`` is an int32 scalar that starts at 0.
        observe: ``(state, loss) -> state``, called at the end of each epoch, unless its plan is
            ``blocking``. ``loss`` is the mean loss of the epoch over all nodes, a float32 scalar
            with the same bits on every node.
        longest: the longest period in steps.
        may_block: whether the delay may be 0, and a plan ``blocking``. If not, a program contains
            no merge at the step that posts, and no code for the blocking wire.
        may_delay: whether the delay may be above 0. If not, a program contains only the merge at
            the step that posts. An exchange that is in flight when another schedule takes over is
            then not merged, and counts as left out.
        may_coincide: whether an exchange may be merged at a step that posts the next one. If not, a
            program needs no code for two exchanges in flight.
        total: steps of the whole run, after which every step blocks, or None.
    """

    init: Callable[[], PyTree]
    plan: Callable[[PyTree, jax.Array], tuple[Plan, PyTree]]
    observe: Callable[[PyTree, jax.Array], PyTree]
    longest: int
    may_block: bool = True
    may_delay: bool = True
    may_coincide: bool = True
    total: int | None = None


class Arrival(NamedTuple):
    """The result of an exchange, when it is merged.

    Attributes:
        total: sums over the contributing nodes, float32 (float64 for float64 leaves).
        mean: ``total`` divided by ``members``. If the merge is ``relative``, both are differences
            from what this node has posted: ``mean_i x_i - x_posted``.
        members: float32 scalar, the number of members, the nodes whose leaves are in the sum.
        age: int32 scalar, steps since the exchange was posted.
        healthy: bool scalar. A node is healthy if its parameters have been finite since its last
            merge. If it is not, the merge gets the mean in their place.
    """

    total: Leaves
    mean: Leaves
    members: jax.Array
    age: jax.Array
    healthy: jax.Array


def keep_leaves(leaves: Leaves, state: PyTree) -> Leaves:
    """Returns the leaves unchanged, the default of ``Merge.on_post``."""
    return leaves


def send_leaves(leaves: Leaves, state: PyTree) -> tuple[Leaves, PyTree]:
    """Returns the leaves and the state unchanged, the default of ``Merge.message``."""
    return leaves, state


class Merge(NamedTuple):
    """How an exchange changes a node's own parameters.

    Attributes:
        init: ``(params) -> state``, arrays only. With several fragments it is called for each of
            them, on a tree with :class:`optax.MaskedNode` in place of the other fragments' leaves.
        merge: ``(leaves, arrival, state) -> (leaves, state)``, called when the sums arrive.
            ``leaves`` are the node's floating-point leaves in the dtype of ``arrival.total``.
        on_post: ``(leaves, state) -> leaves``, called after the node has posted its leaves. Where a
            merge is due at the same step, it comes first and must not change the leaves.
        message: ``(leaves, state) -> (message, state)``, computes what is posted. The arrays of
            the message have the shapes of the leaves. Where a merge is due at the same step, it
            comes first, because the message depends on the state.
        own_weight: ``(arrival) -> w``, the weight of a node's own optimizer moments m where they
            are averaged as well: ``m <- w m + (1 - w) mean_i m_i``. None if they cannot be.
        leafwise: whether leaf j of each result depends on the leaves j only, and the rest of the
            state, such as a count, on no leaf. ``merge`` may then be called for some of the leaves
            at a time, so that the sums of the others need no memory. In the state,
            :class:`optax.MaskedNode` takes the places of the others.
        shared: whether the state must be the same on all nodes, bit for bit.
        relative: whether the sums are differences from what this node has posted. The host
            subtracts it in the slots, so that the device keeps no copy. On the wires int8 and
            float4 the device keeps it. A node that has not contributed takes the mean in place of
            what ``merge`` returns. Where a merge is due at a step that posts, it comes first.
        base: ``(state) -> leaves``, one for each floating-point leaf, in the dtype of its sum. They
            must be the same on all nodes (``shared``) and change only in ``merge``. int8 and float4
            send differences from them. If it is None, int8 and float4 send differences from the
            last mean, which they keep in addition.
    """

    init: Callable[[PyTree], PyTree]
    merge: Callable[[Leaves, Arrival, PyTree], tuple[Leaves, PyTree]]
    on_post: Callable[[Leaves, PyTree], Leaves] = keep_leaves
    own_weight: Callable[[Arrival], jax.Array | float] | None = None
    message: Callable[[Leaves, PyTree], tuple[Leaves, PyTree]] = send_leaves
    leafwise: bool = False
    shared: bool = False
    relative: bool = False
    base: Callable[[PyTree], Leaves] | None = None


class SyncTarget(NamedTuple):
    """What is exchanged at a step, and what to make of the merged tree.

    Attributes:
        to_tree: ``(params, updates) -> tree`` to exchange, with updates of the local optimizer.
        to_params: ``(tree, updates) -> params`` after the step, from the merged tree.
        of_gradients: whether the tree is that of the gradients, before the local optimizer sees
            them. Then ``to_tree`` and ``to_params`` are not used.
        fallback: ``(leaf) -> leaf``, used in place of a merged leaf if no node has contributed.
        schedule_lag: steps by which the schedule's clock is behind. It is 1 if parameters are
            exchanged before the update, because they are the result of the previous step.
        uses_anchor: whether int8 and float4 send differences from an anchor. This requires leaves
            that stay close to their last mean.
    """

    to_tree: Callable[[PyTree, PyTree], PyTree]
    to_params: Callable[[PyTree, PyTree], PyTree]
    of_gradients: bool = False
    fallback: Callable[[jax.Array], jax.Array] = lambda leaf: leaf
    schedule_lag: int = 0
    uses_anchor: bool = True


class ParamsWithMoments(NamedTuple):
    """Parameters, and the optimizer moments that are averaged together with them."""

    params: PyTree
    moments: PyTree
