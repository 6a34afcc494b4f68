"""DiLoCo: an outer optimizer updates an anchor with the mean of the nodes."""

from typing import NamedTuple

import jax
import optax

from jdaso.algorithms import defaults
from jdaso.core.exchange import Exchange
from jdaso.core.transformation import Averaging
from jdaso.core.tree import is_float, widened
from jdaso.core.types import Arrival, Leaves, Merge, PyTree, Schedule
from jdaso.core.validation import check_share

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
    """DiLoCo and Streaming DiLoCo.

    The anchor a starts as the parameters and is the same on all P nodes. At every H-th step

        a <- outer(a, a - (1/P) sum_i x_i)           (DiLoCo Alg. 1, lines 12 and 14)
        x <- mix x + (1 - mix) a                     (Streaming DiLoCo, its alpha; mix = 0: DiLoCo)

    where ``outer(a, g)`` is a step of an optimizer with the outer gradient g. With a delay, the
    x_i are those of ``delay`` steps before. With ``outer=optax.sgd(1.0)`` and no delay this is
    Local SGD.

    Use it for long periods. The paper uses 500 steps, with AdamW as the local optimizer.

    Args:
        exchange: The connection between nodes.
        period: H, optimizer steps between two exchanges of a fragment.
        outer: Optimizer of the anchor. It updates each fragment separately.
        delay: Optimizer steps between posting and merging, ``0 <= delay <= period``.
        mix: Weight of a node's own parameters in the merge, in [0, 1).
        fragments: Number of parts of the parameters, of about equal bytes. The parts are
            exchanged one after the other within a period.
        schedule: Replaces period and delay.
        wire, nonfinite: As in :func:`jdaso.daso`.

    Returns:
        An optax transformation. Put it last in a chain. ``update`` requires ``params``. The
        ``params`` given to ``init`` must be the same on all nodes. An MPI exchange raises an
        error if anchors differ.

    Raises:
        ValueError: for a mix outside [0, 1), a delay above the period or, with mix = 0, equal to
            it, more fragments than steps in a period or leaves, or an unknown wire.

    References:
        Douillard et al., DiLoCo: Distributed low-communication training of language models,
        arXiv:2311.08105, 2023. Douillard et al., Streaming DiLoCo with overlapping
        communication, arXiv:2501.18512, 2025.

    >>> import jdaso, optax
    >>> averaging = jdaso.diloco(jdaso.single_exchange(), period=50, delay=5, mix=0.5)
    >>> tx = jdaso.chain(optax.adamw(1e-3), averaging)
    """
    check_share("mix", mix, below_one=True)
    if not isinstance(outer, optax.GradientTransformation):
        raise ValueError(
            f"outer must be an optax optimizer, such as optax.sgd(1.0), got {outer!r}."
        )
    schedule = defaults.resolve_schedule("diloco", period, delay, schedule)
    defaults.check_progress("diloco", "mix", mix, schedule)
    merge, options = _outer_merge(outer, mix), {"nonfinite": nonfinite, "fragments": fragments}
    return defaults.averaging_on_one_wire("diloco", exchange, schedule, merge, wire, **options)


def _outer_merge(outer: optax.GradientTransformation, mix: float) -> Merge:
    """The outer step of DiLoCo as a merge rule."""

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
        mixed = defaults.mix_leaves(mix, leaves, jax.tree.leaves(anchor))
        return mixed, DilocoState(anchor, outer_state)

    return Merge(init, merge, own_weight=lambda arrival: mix, shared=True)
