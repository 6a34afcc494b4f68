"""DaSGD: Local SGD whose means arrive late, while training goes on."""

from __future__ import annotations

from jdaso._base import Arrival, Exchange, Leaves, Merge, PyTree, Schedule
from jdaso._engine import Averaging, averaging
from jdaso.algorithms._arguments import (
    check_progress,
    check_share,
    chosen_schedule,
    chosen_wire,
    mixed,
)


def dasgd(
    exchange: Exchange,
    period: int | None = None,
    delay: int | None = None,
    xi: float = 0.25,
    *,
    schedule: Schedule | None = None,
    wire: str | None = None,
    fragments: int = 1,
    nonfinite: str = "skip",
) -> Averaging:
    """Local SGD with delayed averaging.

    With tau the period, d the delay, and x' what the local optimizer makes of x, the parameters
    after every tau-th step are averaged over the M nodes and merged d steps later, that is where
    (k + 1) mod tau = d:

        x_{k+1} = xi x'_k + (1 - xi) (1/M) sum_j x'_{k-d}(j)          (dasgd Eq. 2)

    The mean over nodes then follows SGD in which the d steps between posting and merging count
    xi of what the others do (Sec. III-C). d = 0, xi = 0 is Local SGD. The authors choose d as
    the smallest integer above t_c / t_p, the times of an exchange and of a step, and tau = d + 1
    (Sec. III-D).

    Args:
        exchange: how nodes reach each other.
        period: tau, optimizer steps between two exchanges.
        delay: d, optimizer steps that an exchange flies, ``0 <= delay <= period``.
        xi: weight of a node's own parameters, in [0, 1].
        schedule: instead of period and delay, such as :func:`jdaso.linear`.
        wire: dtype that crosses the network, never one wider than a leaf itself, or ``int8``, as
            in :func:`jdaso.daso`. None: that of the exchange, or float32.
        fragments: into how many parts the parameters are cut, which are exchanged one after the
            other within a period.
        nonfinite: ``skip`` or ``raise``, as in :func:`jdaso.daso`.

    Returns:
        An optax transformation, to be the last of a chain. ``update`` needs ``params``.

    Raises:
        ValueError: for an xi outside [0, 1], a delay above the period or, with xi = 0, equal to
            it, more fragments than steps in a period, an unknown wire.

    References:
        Zhou et al., DaSGD: Squeezing SGD parallelization performance in distributed training
        using delayed averaging, arXiv:2006.00441, 2020.

    >>> import jdaso, optax
    >>> exchange = jdaso.single_exchange()
    >>> tx = optax.chain(optax.sgd(0.1), jdaso.dasgd(exchange, period=4, delay=3))
    """
    check_share("xi", xi)
    schedule = chosen_schedule("dasgd", period, delay, schedule)
    check_progress("dasgd", "xi", xi, schedule)
    wire = chosen_wire("wire", wire, exchange, "float32")
    return averaging(
        "dasgd",
        exchange,
        schedule,
        mixing(xi),
        wire=wire,
        blocking_wire=wire,
        nonfinite=nonfinite,
        fragments=fragments,
    )


def mixing(own: float) -> Merge:
    """The merge ``x <- own x + (1 - own) mean``."""

    def merge(leaves: Leaves, arrival: Arrival, state: PyTree) -> tuple[Leaves, PyTree]:
        return mixed(own, leaves, arrival.mean), state

    return Merge(init=lambda params: (), merge=merge, own_weight=lambda arrival: own)
