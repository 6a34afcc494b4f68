"""DiLoCo: an outer optimizer moves an anchor by what the nodes have agreed on."""

from __future__ import annotations

from typing import NamedTuple

import jax
import optax

from jdaso._base import Arrival, Exchange, Leaves, Merge, PyTree, Schedule
from jdaso._engine import Averaging, averaging
from jdaso._leaves import is_float, widened
from jdaso.algorithms._arguments import (
    check_progress,
    check_share,
    chosen_schedule,
    chosen_wire,
    mixed,
)

#: The outer optimizer of the DiLoCo paper.
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


class DilocoState(NamedTuple):
    """The anchor, a tree like the parameters in float32, and the outer optimizer's state."""

    anchor: PyTree
    outer: PyTree


def diloco(
    exchange: Exchange,
    period: int | None = None,
    outer: optax.GradientTransformation = NESTEROV,
    delay: int = 0,
    mix: float = 0.0,
    fragments: int = 1,
    *,
    schedule: Schedule | None = None,
    wire: str | None = None,
    nonfinite: str = "skip",
) -> Averaging:
    """DiLoCo, and Streaming DiLoCo.

    With a the anchor, the same on all P nodes, which starts as the parameters, every H-th step

        a <- outer(a, a - (1/P) sum_i x_i)           (DiLoCo Alg. 1, lines 12 and 14)
        x <- mix x + (1 - mix) a                     (Streaming DiLoCo, its alpha; mix = 0: DiLoCo)

    where ``outer(a, g)`` is a step of an optimizer with the outer gradient g. With a delay the
    x_i are those of ``delay`` steps before; with fragments each part of the parameters has its
    own turn within a period. With ``outer=optax.sgd(1.0)`` and no delay this is Local SGD.

    Args:
        exchange: how nodes reach each other.
        period: H, optimizer steps between two exchanges of a fragment.
        outer: optimizer of the anchor; it sees each fragment by itself.
        delay: optimizer steps that an exchange flies, ``0 <= delay <= period``.
        mix: weight of a node's own parameters in the merge, in [0, 1).
        fragments: into how many parts of about equal bytes the parameters are cut.
        schedule: instead of period and delay.
        wire: dtype that crosses the network, never one wider than a leaf itself, or ``int8``, as
            in :func:`jdaso.daso`. None: that of the exchange, or float32.
        nonfinite: ``skip`` or ``raise``, as in :func:`jdaso.daso`.

    Returns:
        An optax transformation, to be the last of a chain. ``update`` needs ``params``, which
        have to be the same on all nodes in ``init``: over MPI the first exchange, and every later
        one, is an error if anchors differ.

    Raises:
        ValueError: for a mix outside [0, 1), a delay above the period or, with mix = 0, equal to
            it, more fragments than steps in a period or leaves, an unknown wire.

    References:
        Douillard et al., DiLoCo: Distributed low-communication training of language models,
        arXiv:2311.08105, 2023. Douillard et al., Streaming DiLoCo with overlapping
        communication, arXiv:2501.18512, 2025.

    >>> import jdaso, optax
    >>> averaging = jdaso.diloco(jdaso.single_exchange(), period=50, delay=5, mix=0.5)
    >>> tx = optax.chain(optax.adamw(1e-3), averaging)
    """
    check_share("mix", mix, below_one=True)
    if not isinstance(outer, optax.GradientTransformation):
        raise ValueError(
            f"outer must be an optax optimizer, such as optax.sgd(1.0), got {outer!r}."
        )
    schedule = chosen_schedule("diloco", period, delay, schedule)
    check_progress("diloco", "mix", mix, schedule)
    wire = chosen_wire("wire", wire, exchange, "float32")
    return averaging(
        "diloco",
        exchange,
        schedule,
        _outer_merge(outer, mix),
        wire=wire,
        blocking_wire=wire,
        nonfinite=nonfinite,
        fragments=fragments,
    )


def _outer_merge(outer: optax.GradientTransformation, mix: float) -> Merge:
    def init(params: PyTree) -> DilocoState:
        # No more than the leaves that are exchanged: an optimizer takes no integers.
        floats = jax.tree.map(lambda x: x if is_float(x) else optax.MaskedNode(), params)
        anchor = widened(floats)
        return DilocoState(anchor, outer.init(anchor))

    def merge(leaves: Leaves, arrival: Arrival, state: DilocoState):
        treedef = jax.tree.structure(state.anchor)
        mean = jax.tree.unflatten(treedef, arrival.mean)
        gradient = jax.tree.map(lambda a, m: a - m, state.anchor, mean)
        updates, outer_state = outer.update(gradient, state.outer, state.anchor)
        anchor = optax.apply_updates(state.anchor, updates)
        return mixed(mix, leaves, jax.tree.leaves(anchor)), DilocoState(anchor, outer_state)

    return Merge(init, merge, own_weight=lambda arrival: mix, shared=True)
