"""A model of the step time with exchanges, and the period and delay that hide them."""

import math
from collections.abc import Callable
from typing import NamedTuple

from jdaso.core.block_format import FORMATS
from jdaso.core.validation import check_choice, check_number, check_period_and_delay, check_whole
from jdaso.perf.network import (
    FLOAT32_WIRES,
    WITHOUT_FORMATS,
    Network,
    allreduce_time,
    wire_bytes,
)


class Algorithm(NamedTuple):
    """The defaults of an algorithm.

    Attributes:
        wire: Dtype on the network.
        delay: ``period -> delay``.
        mean_weight: ``(nodes, delay) -> weight`` of the mean in a merge, 0 if nothing is stale.
        moves_moments: Whether :func:`jdaso.chain` can average the optimizer's moments with it.
    """

    wire: str
    delay: Callable[[int], int]
    mean_weight: Callable[[int, int], float] = lambda nodes, delay: 0.0
    moves_moments: bool = True


ALGORITHMS = {
    "allreduce_gradients": Algorithm("bfloat16", lambda period: 0, moves_moments=False),
    "local_sgd": Algorithm("float32", lambda period: 0, lambda nodes, delay: 1.0),
    "dasgd": Algorithm("float32", lambda period: period - 1, lambda nodes, delay: 0.75),
    "easgd": Algorithm("float32", lambda period: period, moves_moments=False),
    "eamsgd": Algorithm("float32", lambda period: period, moves_moments=False),
    "daso": Algorithm(
        "float32", lambda period: max(1, period // 4), lambda nodes, s: nodes / (2 * s + nodes)
    ),
    "diloco": Algorithm("float32", lambda period: 0, lambda nodes, delay: 1.0),
}
# Time of jdaso's own code in an exchange, measured by bench/scale.py --stand-in 1024 8192.
_SECONDS_PER_NODE = 3e-7


class PeriodAndDelay(NamedTuple):
    """Optimizer steps between two exchanges, and between posting and merging an exchange."""

    period: int
    delay: int


class Prediction(NamedTuple):
    """The mean costs of a training step on a number of nodes.

    Attributes:
        step_time: Seconds of a step in total.
        waiting: Seconds of it in which training waits for other nodes.
        hidden: Seconds per step in which an exchange is in flight while training continues.
        exchange_time: Seconds of one exchange.
        period: Optimizer steps between two exchanges.
        delay: Optimizer steps between posting and merging an exchange.
        efficiency: Step time on one node divided by ``step_time`` (weak scaling).
        speedup: Efficiency times the number of nodes.
    """

    step_time: float
    waiting: float
    hidden: float
    exchange_time: float
    period: int
    delay: int
    efficiency: float
    speedup: float


def hiding_schedule(step_time: float, exchange_time: float) -> PeriodAndDelay:
    """Returns the period and delay that hide an exchange behind as few steps as possible.

    With t_p the time of a step and t_c that of an exchange,

        d > t_c / t_p,   tau = d + 1                                  (DaSGD Eq. 3, Sec. VI-D)

    d is the smallest integer greater than t_c/t_p. If the ratio is exactly 2, d = 3. The paper's
    Table II has no integer ratio, so it does not test this.

    Args:
        step_time: t_p, seconds of a step without exchanges.
        exchange_time: t_c, seconds of an exchange in the background.

    Returns:
        ``(period, delay)``.

    Raises:
        ValueError: for a step time that is not positive, a negative exchange time, or an infinite
            number of steps per exchange.

    >>> hiding_schedule(step_time=0.526, exchange_time=0.447)
    PeriodAndDelay(period=2, delay=1)
    """
    check_number("step_time", step_time, above=True)
    check_number("exchange_time", exchange_time)
    steps = exchange_time / step_time
    if not math.isfinite(steps):
        raise ValueError(
            f"exchange_time must be a finite number of steps, got {exchange_time} s and step_time="
            f"{step_time} s. Give both in seconds."
        )
    delay = int(exchange_time // step_time) + 1
    return PeriodAndDelay(period=delay + 1, delay=delay)


def mean_step_time(step_time: float, exchange_time: float, period: int, delay: int) -> float:
    """Returns the mean seconds of a step with exchanges.

    With t_p the time of a step and t_c that of an exchange,

        t = t_p + max(0, t_c - d t_p) / tau

    This is DaSGD Eq. 4 for tau = 1 and d = 0, Eq. 5 for d = 0, and Eq. 6 where d hides the
    exchange, each divided by the number of steps.

    Args:
        step_time: t_p, seconds of a step without exchanges.
        exchange_time: t_c, seconds of an exchange.
        period: tau, optimizer steps between two exchanges.
        delay: d, optimizer steps between posting and merging an exchange.

    Returns:
        Seconds.

    Raises:
        ValueError: for numbers out of range.

    >>> mean_step_time(step_time=1.0, exchange_time=2.5, period=2, delay=2)
    1.25
    """
    check_number("step_time", step_time, above=True)
    check_number("exchange_time", exchange_time)
    check_period_and_delay(period, delay)
    return step_time + max(0.0, exchange_time - delay * step_time) / period


def exchange_seconds(num_bytes: float, nodes: int, network: Network, pattern: str) -> float:
    """Seconds of an exchange between nodes, with those of jdaso's own code."""
    own = nodes * _SECONDS_PER_NODE if pattern == "collectives" and nodes > 1 else 0.0
    return own + allreduce_time(num_bytes, nodes, network=network, pattern=pattern)


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
    pattern: str = "collectives",
    overhead: float = 0.0,
    slowdown: float = 0.0,
    blocking_share: float = 0.0,
    moments: int = 0,
    moments_wire: str = "float32",
) -> Prediction:
    """Predicts the step time and weak scaling of an algorithm.

    There are two levels, as in DASO. At every step the gradients are averaged within each node, in
    float32. An exchange is an all-reduce between nodes by **one** device of each node, one of the
    L groups of daso-journal Fig. 1. A broadcast within the node follows (Fig. 4), which no delay
    hides. With the pattern of ``mpi_exchange``, jdaso's own code adds 300 ns for each node.
    :func:`mean_step_time` combines them. DaSGD's Fig. 7 has no mean within the node at
    every step, but one as a part of each exchange. To reproduce it, pass the result of
    :func:`allreduce_time` to :func:`mean_step_time`.

    Args:
        algorithm: One of ``ALGORITHMS``.
        nodes: Number of nodes. One node exchanges nothing.
        num_parameters: Number of parameters of the model.
        step_time: Seconds of a step of one device, without any communication. If
            ``network.local_bandwidth`` is infinite, ``step_time`` is that of one node and includes
            its communication.
        network: The links, see :func:`fit`.
        gpus_per_node: L.
        period: Optimizer steps between two exchanges. None selects that of
            :func:`hiding_schedule`.
        delay: Optimizer steps between posting and merging. None selects the algorithm's default:
            0 for ``local_sgd`` and ``diloco``, period - 1 for ``dasgd``, a quarter of the period
            for ``daso``, and the period for ``easgd`` and ``eamsgd``.
        wire: Dtype between nodes, not wider than the float32 parameters. None selects bfloat16
            for ``allreduce_gradients``, and float32 for the others.
        pattern: Pattern of the all-reduce, see :func:`allreduce_time`. int8 and float4 exclude
            ``ring`` and ``halving``. ``halving`` requires a power of two for nodes.
        overhead: Seconds per exchange that no delay hides, such as copies to and from the host.
        slowdown: Seconds by which each fully hidden exchange slows computing, if the same cores
            train and move messages. ``python -m jdaso tune`` measures it.
        blocking_share: Fraction of all steps that are in DASO's warm-up or cool-down. Each such
            step waits for an exchange in bfloat16. ``python -m jdaso predict`` uses 8/90. The model
            does not include DASO's plateaus, which halve period and delay.
        moments, moments_wire: Averaged moments of the optimizer, see :func:`wire_bytes`.

    Returns:
        A :class:`Prediction`.

    Raises:
        ValueError: for numbers out of range, an unknown algorithm, wire or pattern, or a period,
            delay or share that the algorithm does not have, or moments that it does not average.

    >>> network = Network(latency=50e-6, bandwidth=1.25e9)
    >>> of = dict(num_parameters=25_000_000, step_time=0.1, network=network)
    >>> f"{predict('local_sgd', 16, period=4, **of).step_time:.4f}"
    '0.1376'
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
            "blocking_share must be at most 1 for daso, and 0 for all other algorithms, got "
            f"{blocking_share} for {algorithm}."
        )
    if moments and not ALGORITHMS[algorithm].moves_moments:
        raise ValueError(
            f"moments must be 0 for {algorithm}, which does not average them, got {moments}."
        )
    wire = wire or ALGORITHMS[algorithm].wire
    if wire in FORMATS and pattern in WITHOUT_FORMATS:
        raise ValueError(f"pattern must be collectives with wire {wire}, got {pattern!r}.")
    if pattern == "halving" and nodes & (nodes - 1):
        raise ValueError(f"pattern halving requires a power of two for nodes, got {nodes}.")
    total_bytes = wire_bytes(num_parameters, "float32")
    local = allreduce_time(total_bytes, 1, gpus_per_node, network=network, pattern=pattern)
    alone = step_time + local

    def time_on(wire: str) -> float:
        own = wire if wire in FLOAT32_WIRES else "float32"  # that of the parameters, if narrower
        sent = wire_bytes(num_parameters, own, moments, moments_wire)
        return exchange_seconds(sent, nodes, network, pattern)

    exchange_time = time_on(wire)
    broadcast = 0.0
    if nodes > 1 and gpus_per_node > 1:
        merged_bytes = wire_bytes(num_parameters, "float32", moments)
        broadcast = network.local_latency + merged_bytes / network.local_bandwidth
    if period is None:
        every_step = algorithm == "allreduce_gradients"
        period = 1 if every_step else hiding_schedule(alone, exchange_time).period
    check_whole("period", period, 1)
    delay = ALGORITHMS[algorithm].delay(period) if delay is None else delay
    if algorithm == "allreduce_gradients" and (period > 1 or delay):
        raise ValueError(
            f"allreduce_gradients exchanges at every step and blocks; got period={period} and "
            f"delay={delay}. Omit both, or choose dasgd."
        )

    def waiting_and_overhead(exchange_time: float, period: int, delay: int) -> tuple[float, float]:
        waiting = mean_step_time(alone, exchange_time, period, delay) - alone + broadcast / period
        return waiting, overhead / period if nodes > 1 else 0.0

    waiting, copies = waiting_and_overhead(exchange_time, period, delay)
    hidden = min(exchange_time, delay * alone) / period
    if blocking_share:
        blocked, copied = waiting_and_overhead(time_on("bfloat16"), 1, 0)
        waiting += blocking_share * (blocked - waiting)
        copies += blocking_share * (copied - copies)
        hidden *= 1 - blocking_share
    slowed = slowdown * hidden / exchange_time if hidden else 0.0
    total = alone + waiting + copies + slowed
    return Prediction(
        total, waiting, hidden, exchange_time, period, delay, alone / total, nodes * alone / total
    )
