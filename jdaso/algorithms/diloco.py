"""DiLoCo: an outer optimizer updates an anchor with the mean of the nodes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdaso.algorithms.defaults import averaging_on_one_wire, mix_leaves, resolve_schedule
from jdaso.core.exchange import Exchange
from jdaso.core.state import averaging_state
from jdaso.core.transformation import Averaging
from jdaso.core.tree import Fragments, is_float, is_masked, where_tree, widened
from jdaso.core.types import Arrival, Leaves, Merge, PyTree, Schedule
from jdaso.core.validation import check_share, check_whole
from jdaso.core.wire import round_to

#: The outer optimizer of the DiLoCo paper.
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


class DilocoState(NamedTuple):
    """The anchor, a tree like the parameters in float32, and the outer optimizer's state."""

    anchor: PyTree
    outer: PyTree


class WarmupState(NamedTuple):
    """The number of rounds of plain averaging so far, and the outer optimizer's state."""

    rounds: jax.Array
    outer: PyTree


def diloco(
    exchange: Exchange,
    period: int | None = None,
    outer: optax.GradientTransformation = NESTEROV,
    delay: int = 0,
    mix: float = 0.0,
    fragments: Fragments = 1,
    *,
    schedule: Schedule | None = None,
    warmup: int = 0,
    wire: str | None = None,
    nonfinite: str = "skip",
) -> Averaging:
    """DiLoCo and Streaming DiLoCo.

    The anchor a starts as the parameters and is the same on all P nodes. At every H-th step

        a <- outer(a, a - (1/P) sum_i x_i)           (DiLoCo Alg. 1, lines 12 and 14)
        x <- mix x + (1 - mix) a                     (Streaming DiLoCo, its alpha; mix = 0: DiLoCo)

    where ``outer(a, g)`` is a step of an optimizer with the outer gradient g. With a delay, the x_i
    are those of ``delay`` steps before. With ``outer=optax.sgd(1.0)`` and no delay it is Local SGD.

    Use it for long periods, with AdamW as the local optimizer, and plan 100 rounds or more. The
    papers use periods of 30 to 500 steps. The momentum sums the outer gradients of the last
    1 / (1 - 0.9) = 10 rounds, and the first rounds have the largest, so the anchor overshoots at
    first. In a training of 20 rounds this was worse than :func:`jdaso.local_sgd`.

    A warm-up, which the papers do not have, leaves these gradients out. In the first ``warmup``
    rounds of a fragment the anchor becomes the mean of the nodes,

        a <- (1/P) sum_i x_i

    and the state of ``outer`` stays as it was. On small language models a warm-up of 10 rounds
    lowered the loss by 10 % after 20 rounds, and by 2 % after 100 and after 200.

    The best outer learning rate depends on the number of nodes, and hardly on the size of the model
    (Scaling laws, H = 30, Nesterov momentum 0.9):

    ===========================  ===  ===  ===  ===
    nodes                          1    2    4    8
    outer learning rate          0.4  0.6  0.6  0.8
    ===========================  ===  ===  ===  ===

    It rises with the period: DiLoCo uses 0.7 with H = 500. Streaming DiLoCo uses 0.4 for 2 nodes.
    Evaluate and save the anchor, :func:`jdaso.diloco_anchor`. In Streaming DiLoCo its loss is 2.67,
    that of the mean of the nodes 2.68, and that of one node 2.77.

    Args:
        exchange: The connection between nodes.
        period: H, optimizer steps between two exchanges of a fragment.
        outer: Optimizer of the anchor. It updates each fragment separately.
        delay: Optimizer steps between posting and merging, ``0 <= delay <= period``.
        mix: Weight of a node's own parameters in the merge, in [0, 1).
        fragments: Number of parts of the parameters, of about equal bytes, or a function of the
            path of a leaf, see :func:`jdaso.core.averaging`. The parts are exchanged one after the
            other within a period.
        schedule: Replaces period and delay.
        warmup: Rounds of a fragment at the start in which the anchor becomes the mean of the nodes,
            as in :func:`jdaso.local_sgd`. The outer optimizer begins with the next round. 0, the
            default, is the papers' algorithm, and right for parameters that are already trained.
            Each exchange is a round, also those of a phase with period 1 in ``schedule``.
        wire, nonfinite: As in :func:`jdaso.daso`.

    Returns:
        An optax transformation. Put it last in a chain. ``update`` requires ``params``. Those given
        to ``init`` must be equal on all nodes. An MPI exchange raises an error if anchors differ.

    Raises:
        ValueError: for a warmup below 0, a mix outside [0, 1), a delay above the period, more
            fragments than steps in a period or leaves, or an unknown wire.

    References:
        Douillard et al., DiLoCo: Distributed low-communication training of language models,
        arXiv:2311.08105, 2023. Douillard et al., Streaming DiLoCo with overlapping
        communication, arXiv:2501.18512, 2025. Charles et al., Communication-efficient language
        model training scales reliably and robustly: Scaling laws for DiLoCo, arXiv:2503.09799,
        2025.

    >>> import jdaso, optax
    >>> averaging = jdaso.diloco(jdaso.single_exchange(), period=50, delay=5, mix=0.5)
    >>> tx = jdaso.chain(optax.adamw(1e-3), averaging)
    """
    check_share("mix", mix, below_one=True)
    if not isinstance(outer, optax.GradientTransformation):
        raise ValueError(
            f"outer must be an optax optimizer, such as optax.sgd(1.0), got {outer!r}."
        )
    check_whole("warmup", warmup, 0)
    if warmup:
        outer = _with_warmup(outer, warmup)
    schedule = resolve_schedule("diloco", period, delay, schedule)
    merge, options = _outer_merge(outer, mix), {"nonfinite": nonfinite, "fragments": fragments}
    return averaging_on_one_wire("diloco", exchange, schedule, merge, wire, **options)


def diloco_anchor(opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns the anchor of :func:`jdaso.diloco`, equal on all nodes, to evaluate and to save.

    It does not contain exchanges in flight. Call :func:`jdaso.drain` first after training.

    Args:
        opt_state: The state of the whole optimizer.
        params: The parameters of this node.

    Returns:
        A tree like the parameters, with their dtypes. Integers and booleans are those of
        ``params``.

    Raises:
        ValueError: if ``opt_state`` does not hold exactly one such state.

    >>> import jax.numpy as jnp, jdaso
    >>> params, tx = {"w": jnp.ones(2)}, jdaso.diloco(jdaso.single_exchange(), period=4)
    >>> jdaso.diloco_anchor(tx.init(params), params)["w"].tolist()
    [1.0, 1.0]
    """
    anchor = params
    for fragment in averaging_state(opt_state, params).fragments:
        if not isinstance(fragment.merge, DilocoState):
            raise ValueError("opt_state has no anchor: pass the state of jdaso.diloco.")
        anchor = jax.tree.map(
            lambda a, x: x if is_masked(a) else round_to(a, jnp.result_type(x)),
            fragment.merge.anchor,
            anchor,
            is_leaf=is_masked,
        )
    return anchor


def _with_warmup(outer: optax.GradientTransformation, rounds: int) -> optax.GradientTransformation:
    """Wraps the outer optimizer: in the first ``rounds`` rounds the anchor becomes the mean."""

    def init(params: PyTree) -> WarmupState:
        return WarmupState(jnp.int32(0), outer.init(params))

    def update(gradient: PyTree, state: WarmupState, params: PyTree = None):
        updates, new = outer.update(gradient, state.outer, params)
        warm = state.rounds < rounds
        to_mean = jax.tree.map(lambda g: -g, gradient)
        new = where_tree(warm, state.outer, new)
        return where_tree(warm, to_mean, updates), WarmupState(state.rounds + warm, new)

    return optax.GradientTransformation(init, update)


def _is_leafwise(outer: optax.GradientTransformation) -> bool:
    """Whether an optimizer updates each leaf by itself, as SGD and Adam do, unlike a clipped norm.

    :func:`jax.vmap` tells, without computing anything: two steps on a list of two leaves are mapped
    over the second leaf, and what then has an axis depends on it.
    """

    def without_second(second):
        params: list[jax.Array] = [jnp.ones(2), second]
        state = outer.init(params)
        for _ in range(2):  # the second step reads what the first has written to the state
            updates, state = outer.update(params, state, params)
            params = optax.apply_updates(params, updates)
        state = optax.tree_map_params(outer, lambda xs: xs[0], state, is_leaf=lambda _: True)
        return params[0], state

    try:
        # Shapes, because arrays would choose the devices of this process.
        second = jax.ShapeDtypeStruct((3, 2), jnp.float32)
        jax.eval_shape(jax.vmap(without_second, out_axes=None), second)
    except Exception:  # of vmap where an axis is left, and of an optimizer for other trees
        return False
    return True


def _outer_merge(outer: optax.GradientTransformation, mix: float) -> Merge:
    """Returns the outer step of DiLoCo as a merge rule."""

    def init(params: PyTree) -> DilocoState:
        # Optimizers do not accept integer leaves, which are not exchanged either.
        floats = jax.tree.map(lambda x: x if is_float(x) else optax.MaskedNode(), params)
        anchor = widened(floats)
        return DilocoState(anchor, outer.init(anchor))

    def merge(leaves: Leaves, arrival: Arrival, state: DilocoState):
        treedef = jax.tree.structure(state.anchor)
        mean = jax.tree.unflatten(treedef, arrival.mean)
        gradient = jax.tree.map(lambda a, m: a - m, state.anchor, mean)
        updates, outer_state = outer.update(gradient, state.outer, state.anchor)
        anchor = optax.apply_updates(state.anchor, updates)
        mixed = mix_leaves(mix, leaves, jax.tree.leaves(anchor))
        return mixed, DilocoState(anchor, outer_state)

    return Merge(
        init,
        merge,
        own_weight=lambda arrival: mix,
        leafwise=_is_leafwise(outer),
        shared=True,
        base=lambda state: jax.tree.leaves(state.anchor),
    )
