"""DaSGD: Local SGD with delayed averaging."""

from jdaso.algorithms.defaults import (
    averaging_on_one_wire,
    choose_merge,
    mixing_merge,
    resolve_schedule,
)
from jdaso.algorithms.progress import warn_if_slow
from jdaso.core.exchange import Exchange
from jdaso.core.transformation import Averaging
from jdaso.core.tree import Fragments
from jdaso.core.types import Schedule
from jdaso.core.validation import check_share


def dasgd(
    exchange: Exchange,
    period: int | None = None,
    delay: int | None = None,
    xi: float = 0.25,
    *,
    schedule: Schedule | None = None,
    wire: str | None = None,
    fragments: Fragments = 1,
    nonfinite: str = "skip",
    merge: str = "mean",
) -> Averaging:
    """Local SGD with delayed averaging.

    Let tau be the period, d the delay, and x' the result of the local optimizer's update of x.
    The parameters after every tau-th step are averaged over the M nodes. The mean is merged d
    steps later, where (k + 1 - d) mod tau = 0:

        x_{k+1} = xi x'_k + (1 - xi) (1/M) sum_j x'_{k-d}(j)          (dasgd Eq. 2)

    This condition is the one of the paper's appendix. Eq. 2 itself says (k + 1) mod tau = d, which
    is the same for d < tau and never holds for d = tau.

    The mean over nodes then follows SGD in which the d steps between posting and merging have
    the weight xi (Sec. III-C). d = 0, xi = 0 is Local SGD.

    Use it to hide an exchange behind a fixed number of steps. The authors advise to choose d as the
    smallest integer above t_c / t_p, the times of an exchange and of a step (Eq. 3), and tau =
    d + 1 (Sec. VI-D). They train with tau = 4 and d = 1 (Table I) or 2 (Fig. 6), and vary tau from
    4 to 32 and d from 0 to 7. ``python -m jdaso tune`` measures both times.

    Args:
        exchange: The connection between nodes.
        period: tau, optimizer steps between two exchanges.
        delay: d, optimizer steps between posting and merging, ``0 <= delay <= period``.
        xi: Weight of a node's own parameters, in [0, 1].
        schedule: Replaces period and delay, for example :func:`jdaso.schedules.linear`.
        wire, nonfinite: As in :func:`jdaso.daso`.
        fragments: Number of parts of the parameters, or a function, see
            :func:`jdaso.core.averaging`. The parts are exchanged one after the other within a
            period.
        merge: ``mean``, as published, or ``delta``, as in :func:`jdaso.daso`:
            ``x_{k+1} = x'_k + (1 - xi) ((1/M) sum_j x'_{k-d}(j) - x'_{k-d})``.

    Returns:
        An optax transformation. Put it last in a chain. ``update`` requires ``params``.

    Raises:
        ValueError: for an xi outside [0, 1], a delay above the period, more fragments than steps in
            a period, or an unknown wire or merge.

    References:
        Zhou et al., DaSGD: Squeezing SGD parallelization performance in distributed training
        using delayed averaging, arXiv:2006.00441, 2020.

    >>> import jdaso, optax
    >>> exchange = jdaso.single_exchange()
    >>> tx = jdaso.chain(optax.sgd(0.1), jdaso.dasgd(exchange, period=4, delay=3))
    """
    check_share("xi", xi)
    schedule = resolve_schedule("dasgd", period, delay, schedule)
    rule = choose_merge(merge, mixing_merge(xi), lambda arrival: 1 - xi)
    options = {"nonfinite": nonfinite, "fragments": fragments}
    found = averaging_on_one_wire("dasgd", exchange, schedule, rule, wire, **options)
    warn_if_slow("dasgd", exchange, period, delay, 0.0 if merge == "delta" else 1 - xi)
    return found
