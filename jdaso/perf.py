"""What an exchange costs and what hides it: a model, its fit to measurements, and the choice.

Times are in seconds, sizes in bytes, bandwidths in bytes per second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from jdaso._checks import check_choice, check_number, check_period_and_delay, check_whole
from jdaso._network import (
    BYTES,
    INT8_BLOCK,
    PATTERNS,
    Network,
    allreduce_time,
    fit,
    wire_bytes,
)

__all__ = [
    "ALGORITHMS",
    "BYTES",
    "INT8_BLOCK",
    "PATTERNS",
    "Algorithm",
    "Network",
    "Prediction",
    "Recommendation",
    "allreduce_time",
    "fit",
    "mean_step_time",
    "predict",
    "recommend",
    "wire_bytes",
]


class Algorithm(NamedTuple):
    """What an algorithm does unless told otherwise: its wire, and its delay for a period."""

    wire: str
    delay: Callable[[int], int]


ALGORITHMS = {
    "allreduce_gradients": Algorithm("bfloat16", lambda period: 0),
    "local_sgd": Algorithm("float32", lambda period: 0),
    "dasgd": Algorithm("float32", lambda period: period - 1),
    "easgd": Algorithm("float32", lambda period: period),
    "eamsgd": Algorithm("float32", lambda period: period),
    "daso": Algorithm("float32", lambda period: max(1, period // 4)),
    "diloco": Algorithm("float32", lambda period: 0),
}
# They have no delay, whatever is asked for.
_BLOCKING = ("allreduce_gradients", "local_sgd")


class Recommendation(NamedTuple):
    """Optimizer steps between two exchanges, and steps that each of them flies."""

    period: int
    delay: int


class Prediction(NamedTuple):
    """What a training step costs on so many nodes, in the mean over many steps.

    Attributes:
        step_time: seconds of a step, all included.
        waiting: seconds of it in which training waits for other nodes.
        hidden: seconds per step that exchanges fly while training goes on.
        exchange_time: seconds of one exchange.
        period: optimizer steps between two exchanges.
        delay: optimizer steps that an exchange may fly.
        efficiency: step time on one node divided by this one, every node having its own batch.
        speedup: efficiency times the number of nodes.
    """

    step_time: float
    waiting: float
    hidden: float
    exchange_time: float
    period: int
    delay: int
    efficiency: float
    speedup: float


def recommend(step_time: float, exchange_time: float) -> Recommendation:
    """Period and delay that hide an exchange behind as few steps as possible.

    With t_p the time of a step and t_c that of an exchange,

        d > t_c / t_p,   tau = d + 1                                  (DaSGD Eq. 3, Sec. VI-D)

    and d the smallest integer that is strictly above: an exchange of exactly two steps gets 3,
    since Eq. 3 and the condition of Eq. 6 exclude equality. No row of Table II is such a case.

    Args:
        step_time: t_p, seconds of a step without exchanges.
        exchange_time: t_c, seconds of an exchange in the background.

    Returns:
        ``(period, delay)``.

    Raises:
        ValueError: for a step time that is not positive, a negative exchange time, or more steps
            per exchange than can be counted.

    >>> recommend(step_time=0.526, exchange_time=0.447)
    Recommendation(period=2, delay=1)
    """
    check_number("step_time", step_time, above=True)
    check_number("exchange_time", exchange_time)
    steps = exchange_time / step_time
    if not math.isfinite(steps):
        raise ValueError(
            f"an exchange_time of {exchange_time} s is too many steps of step_time={step_time} s."
        )
    delay = int(exchange_time // step_time) + 1
    return Recommendation(period=delay + 1, delay=delay)


def mean_step_time(step_time: float, exchange_time: float, period: int, delay: int) -> float:
    """Seconds of a step with exchanges, in the mean over a period.

    With t_p the time of a step and t_c that of an exchange,

        t = t_p + max(0, t_c - d t_p) / tau

    which is DaSGD Eq. 4 for tau = 1 and d = 0, Eq. 5 for d = 0, and Eq. 6 where d is enough,
    without their common factor, the number of steps.

    Args:
        step_time: t_p, seconds of a step without exchanges.
        exchange_time: t_c, seconds of an exchange.
        period: tau, optimizer steps between two exchanges.
        delay: d, optimizer steps that an exchange flies before training waits for it.

    Returns:
        Seconds.

    Raises:
        ValueError: for numbers that cannot be.

    >>> mean_step_time(step_time=1.0, exchange_time=2.5, period=2, delay=2)
    1.25
    """
    check_number("step_time", step_time, above=True)
    check_number("exchange_time", exchange_time)
    check_period_and_delay(period, delay)
    return step_time + max(0.0, exchange_time - delay * step_time) / period


def predict(
    algorithm: str,
    nodes: int,
    *,
    num_parameters: int,
    step_time: float,
    network: Network,
    gpus_per_node: int = 1,
    period: int | None = None,
    delay: int | None = None,
    wire: str | None = None,
    pattern: str = "direct",
    overhead: float = 0.0,
    slowdown: float = 0.0,
    blocking_share: float = 0.0,
) -> Prediction:
    """Step time and scaling of an algorithm, every node having a batch of its own.

    Two levels, as in DASO: at every step the gradients are averaged within each node, in float32;
    an exchange is an all-reduce between nodes by **one** device of each, one of the L groups of
    daso-journal Fig. 1, and when it has arrived, a broadcast within the node (Fig. 4), which no
    delay hides. Then :func:`mean_step_time`. DaSGD's Fig. 7 has no mean within the node at every
    step, but one as a part of each exchange: for its numbers give :func:`mean_step_time` what
    :func:`allreduce_time` says.

    Args:
        algorithm: one of ``ALGORITHMS``.
        nodes: how many there are; with 1 nothing is exchanged.
        num_parameters: of the model.
        step_time: seconds of a step of one device, without any communication; with an infinite
            ``local_bandwidth`` of one node, communication within it included.
        network: the links, see :func:`fit`.
        gpus_per_node: L.
        period: optimizer steps between two exchanges. None: what :func:`recommend` says.
        delay: steps that an exchange may fly. None: the algorithm's own, 0 for ``local_sgd`` and
            ``diloco``, period - 1 for ``dasgd``, a quarter of the period for ``daso``, and the
            whole period for ``easgd`` and ``eamsgd``.
        wire: dtype between nodes, at most as wide as the float32 parameters. None: bfloat16 for
            ``allreduce_gradients``, otherwise float32.
        pattern: how an all-reduce is done, see :func:`allreduce_time`; an exchange in int8 is
            ``direct``, and ``halving`` is for a power of two.
        overhead: seconds per exchange that nothing hides, such as copies to and from the host.
        slowdown: seconds that computing takes longer for a whole exchange in flight beside it,
            where the cores that train also move messages; see ``python -m jdaso tune``.
        blocking_share: share of the steps that are in DASO's warm-up and cool-down, which block at
            every step, in bfloat16; ``python -m jdaso predict`` takes 1/9. Its plateaus, after
            which period and delay are halved, cannot be predicted and are not counted.

    Returns:
        A :class:`Prediction`.

    Raises:
        ValueError: for numbers that cannot be, an unknown algorithm, wire or pattern, or a period,
            delay or share that the algorithm does not have.

    >>> network = Network(latency=50e-6, bandwidth=1.25e9)
    >>> of = dict(num_parameters=25_000_000, step_time=0.1, network=network)
    >>> f"{predict('local_sgd', 16, period=4, **of).step_time:.4f}"
    '0.1375'
    >>> f"{predict('dasgd', 16, **of).step_time:.4f}"
    '0.1000'
    """
    check_choice("algorithm", algorithm, ALGORITHMS)
    check_whole("nodes", nodes, 1)
    check_number("step_time", step_time, above=True)
    check_number("overhead", overhead)
    check_number("slowdown", slowdown)
    check_number("blocking_share", blocking_share)
    if blocking_share > (1 if algorithm == "daso" else 0):
        raise ValueError(
            f"blocking_share must be at most 1, and 0 for all but daso, got {blocking_share} for "
            f"{algorithm}."
        )
    wire = wire or ALGORITHMS[algorithm].wire
    if wire == "int8" and pattern in ("ring", "halving"):
        raise ValueError(f"pattern must be direct for the wire int8, got {pattern!r}.")
    if pattern == "halving" and nodes & (nodes - 1):
        raise ValueError(f"the pattern halving needs a power of two for nodes, got {nodes}.")
    whole = wire_bytes(num_parameters, "float32")
    alone = step_time + allreduce_time(whole, 1, gpus_per_node, network=network, pattern=pattern)

    def exchange_seconds(wire: str) -> float:
        sent = min(whole, wire_bytes(num_parameters, wire))
        return allreduce_time(sent, nodes, network=network, pattern=pattern)

    exchange_time = exchange_seconds(wire)
    broadcast = 0.0
    if nodes > 1 and gpus_per_node > 1:
        broadcast = network.local_latency + whole / network.local_bandwidth
    if algorithm == "allreduce_gradients":
        period = 1 if period is None else period
    if period is None:
        period = recommend(alone, exchange_time).period
    check_whole("period", period, 1)
    delay = ALGORITHMS[algorithm].delay(period) if delay is None else delay
    if (algorithm == "allreduce_gradients" and period > 1) or (algorithm in _BLOCKING and delay):
        raise ValueError(
            f"{algorithm} waits for every exchange, allreduce_gradients at every step; got "
            f"period={period} and delay={delay}. Leave them out, or choose dasgd."
        )

    def waiting_and_overhead(exchange_time: float, period: int, delay: int) -> tuple[float, float]:
        waiting = mean_step_time(alone, exchange_time, period, delay) - alone + broadcast / period
        return waiting, overhead / period if nodes > 1 else 0.0

    waiting, copies = waiting_and_overhead(exchange_time, period, delay)
    hidden = min(exchange_time, delay * alone) / period
    if blocking_share:
        blocked, copied = waiting_and_overhead(exchange_seconds("bfloat16"), 1, 0)
        waiting += blocking_share * (blocked - waiting)
        copies += blocking_share * (copied - copies)
        hidden *= 1 - blocking_share
    slowed = slowdown * hidden / exchange_time if hidden else 0.0
    total = alone + waiting + copies + slowed
    return Prediction(
        total, waiting, hidden, exchange_time, period, delay, alone / total, nodes * alone / total
    )
