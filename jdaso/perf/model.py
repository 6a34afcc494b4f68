"""The cost model behind ``predict`` and ``tune``, and the choice of a setting.

It goes from the bytes of an exchange to the time of an all-reduce, the mean step time of each
algorithm, and the best wire, period and delay.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jdaso.algorithms.daso import mean_weight
from jdaso.algorithms.progress import MEASURED_PERIOD
from jdaso.algorithms.progress import progress as measured_progress
from jdaso.core.block_format import BLOCK_SIZE, FORMATS
from jdaso.core.chain import MOMENTS_WIRES
from jdaso.core.validation import (
    check_choice,
    check_number,
    check_period_and_delay,
    check_share,
    check_whole,
)
from jdaso.core.wire import WIRES, check_wire

#: Patterns with a cost model: that of ``mpi_exchange``, and those of papers.
MODELLED_PATTERNS = ("collectives", "ring", "halving", "butterfly", "tree")
#: Those of them that exclude the wires int8 and float4.
WITHOUT_FORMATS = ("ring", "halving")
#: Wires that are not wider than float32 parameters.
FLOAT32_WIRES = tuple(wire for wire in WIRES if wire != "float64")
#: The wires that ``tune`` and ``predict`` compare.
COMPARED_WIRES = ("float32", "bfloat16", "int8", "float4")
# Bytes of a parameter on each wire. int8 and float4 add one byte of scale to each block.
_BYTES_PER_NUMBER: dict[str, float] = {
    wire: FORMATS[wire].row_bytes / BLOCK_SIZE if wire in FORMATS else jnp.dtype(wire).itemsize
    for wire in WIRES
}
# Time of jdaso's own code in an exchange, measured by bench/scale.py --stand-in 1024 8192.
_SECONDS_PER_NODE = 3e-7
#: The algorithms and merges that ``tune`` and ``predict`` compare.
RULES = (("local_sgd", "mean"), ("daso", "delta"), ("daso", "mean"), ("dasgd", "mean"))
LONGEST_PERIOD = 64
#: The standard deviation of the progress of a task and rate from the formula.
SPREAD = 0.2


class Network(NamedTuple):
    """Links between nodes, and between the devices of a node.

    Attributes:
        latency: Seconds of an empty message between nodes.
        bandwidth: Bytes per second between nodes.
        local_latency: Seconds of an empty message between devices of a node.
        local_bandwidth: Bytes per second between devices of a node. If it is infinite, the step
            time includes the communication within the node.
    """

    latency: float
    bandwidth: float
    local_latency: float = 0.0
    local_bandwidth: float = math.inf


def wire_bytes(
    num_parameters: int, wire: str, moments: int = 0, moments_wire: str = "float32"
) -> float:
    """Returns the size of the parameters on the network, with averaged moments of the optimizer.

    Args:
        num_parameters: Number of parameters, at least 1. int8 and float4 pad every array to a
            multiple of 64, which is not counted. It matters for models of many small arrays.
        wire: ``float64``, ``float32``, ``bfloat16``, ``float16``, or ``int8`` and ``float4`` with
            a scale of one byte for each 64 parameters.
        moments: How many moments of each parameter ``jdaso.chain(..., moments="average")`` sends: 2
            of Adam, 1 of momentum.
        moments_wire: That of :func:`jdaso.chain`: ``float32``, ``bfloat16`` or ``float16``.

    Returns:
        Bytes.

    Raises:
        ValueError: for no parameters, a negative number of moments, or an unknown wire.

    >>> wire_bytes(1024, "float32"), wire_bytes(1024, "bfloat16"), wire_bytes(1024, "int8")
    (4096, 2048, 1040.0)
    >>> wire_bytes(1024, "int8", moments=2)
    9232.0
    """
    check_whole("num_parameters", num_parameters, 1, bits=63)
    check_choice("wire", wire, _BYTES_PER_NUMBER)
    check_whole("moments", moments, 0)
    check_choice("moments_wire", moments_wire, MOMENTS_WIRES)
    return num_parameters * (_BYTES_PER_NUMBER[wire] + moments * _BYTES_PER_NUMBER[moments_wire])


def allreduce_time(
    num_bytes: float,
    nodes: int,
    gpus_per_node: int = 1,
    *,
    network: Network,
    pattern: str = "collectives",
) -> float:
    """Returns the time of an all-reduce over nodes, followed by one over the devices of a node.

    With P members, n bytes, latency a and bandwidth w, each level takes

        collectives   (1 + log2(P)) a + 2 (P-1)/P n/w   jdaso.mpi_exchange
        ring          2 (P-1) (a + n/(P w))             Patarasuk and Yuan 2009
        halving       2 log2(P) a + 2 (P-1)/P n/w       Rabenseifner 2004
        butterfly     log2(P) (a + n/w)                 DaSGD Table II, "Butterfly"
        tree          2 log2(P) (a + n/w)               DaSGD Table II, "Tree"

    Logarithms are rounded up. DaSGD prints no formula (its Eq. 3 is coarser). These formulas give
    its Table II, without latency. ``collectives`` assumes that MPI sends all shards to their owners
    at the same time, and gathers the sums with recursive doubling. It does not count MPI's time to
    process messages, and with hundreds of nodes it is a lower bound.

    Args:
        num_bytes: n, contribution of one member, see :func:`wire_bytes`.
        nodes: P between nodes.
        gpus_per_node: P within a node.
        network: The links.
        pattern: One of ``MODELLED_PATTERNS``, on both levels.

    Returns:
        Seconds.

    Raises:
        ValueError: for numbers out of range, or an unknown pattern.

    ResNet-50 on 32 servers of 8 GPUs with 20 Gbit/s between and 16 GB/s within servers:

    >>> network = Network(latency=0, bandwidth=20e9 / 8, local_bandwidth=16e9)
    >>> time = allreduce_time(4 * 25_530_472, 32, 8, network=network, pattern="tree")
    >>> f"{1e3 * time:.2f} ms"
    '446.78 ms'
    """
    check_number("num_bytes", num_bytes)
    check_whole("nodes", nodes, 1)
    check_whole("gpus_per_node", gpus_per_node, 1)
    for name, value in network._asdict().items():
        if name != "local_bandwidth" or value != math.inf:
            check_number(f"network.{name}", value, above="bandwidth" in name)
    messages, volume = _passes(pattern, nodes)
    between = messages * network.latency + volume * num_bytes / network.bandwidth
    messages, volume = _passes(pattern, gpus_per_node)
    return between + messages * network.local_latency + volume * num_bytes / network.local_bandwidth


def _passes(pattern: str, members: int) -> tuple[int, float]:
    """Returns how many messages follow each other, and how often all bytes cross a link."""
    check_choice("pattern", pattern, MODELLED_PATTERNS)
    rounds = (members - 1).bit_length()  # log2, rounded up
    share = 2 * (members - 1) / members
    return {
        "collectives": (1 + rounds if members > 1 else 0, share),
        "ring": (2 * (members - 1), share),
        "halving": (2 * rounds, share),
        "butterfly": (rounds, rounds),
        "tree": (2 * rounds, 2 * rounds),
    }[pattern]


def exchange_seconds(num_bytes: float, nodes: int, network: Network, pattern: str) -> float:
    """Returns the seconds of an exchange between nodes, with those of jdaso's own code."""
    own = nodes * _SECONDS_PER_NODE if pattern == "collectives" and nodes > 1 else 0.0
    return own + allreduce_time(num_bytes, nodes, network=network, pattern=pattern)


def fit(
    measured: Iterable[tuple[float, float]], nodes: int, pattern: str = "collectives"
) -> Network:
    """Fits latency and bandwidth to measured all-reduces.

    Minimizes the squared relative errors of :func:`allreduce_time` for the median time of each
    size. Medians suppress a few disturbed measurements. A negative latency is replaced by 0.

    Args:
        measured: Pairs (bytes, seconds) of exchanges, of at least two sizes. Several exchanges of
            each size are better.
        nodes: Number of nodes that took part, at least 2.
        pattern: Pattern of the all-reduce, one of ``MODELLED_PATTERNS``.

    Returns:
        A :class:`Network`. Its latency includes everything that does not grow with the size.

    Raises:
        ValueError: for fewer than two sizes, numbers that are not positive, or times that do not
            grow with the size.

    >>> network = fit([(1e6, 0.012), (4e6, 0.042), (4e6, 0.9), (4e6, 0.042)], nodes=2)
    >>> f"{network.latency * 1e3:.3f} ms, {network.bandwidth / 1e6:.1f} MB/s"
    '1.000 ms, 100.0 MB/s'
    """
    check_whole("nodes", nodes, 2)
    messages, volume = _passes(pattern, nodes)
    by_size: dict[float, list[float]] = defaultdict(list)
    for num_bytes, seconds in measured:
        check_number("measured: bytes", num_bytes, above=True)
        check_number("measured: seconds", seconds, above=True)
        by_size[num_bytes].append(seconds)
    if len(by_size) < 2:
        raise ValueError(
            f"measured must have at least two sizes, got {sorted(by_size)}: one size does not "
            "separate latency from bandwidth."
        )
    medians = np.array([np.median(times) for times in by_size.values()])
    # Seconds per unit of latency and of 1 / bandwidth, relative to the measured time.
    columns = np.array([[messages, volume * size] for size in by_size]) / medians[:, None]
    scale = np.linalg.norm(columns, axis=0)
    latency, inverse = np.linalg.lstsq(columns / scale, np.ones(len(medians)))[0] / scale
    if latency < 0:
        latency, inverse = 0.0, columns[:, 1].sum() / scale[1] ** 2
    if inverse * volume * max(by_size) < 1e-3 * medians.max():
        raise ValueError(
            f"measured: times do not grow from {min(by_size):g} to {max(by_size):g} bytes, so "
            "they do not determine the bandwidth. Measure larger exchanges, on idle nodes."
        )
    return Network(float(latency), float(1 / inverse))


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
    "daso": Algorithm("float32", lambda period: max(1, period // 4), mean_weight),
    "diloco": Algorithm("float32", lambda period: 0, lambda nodes, delay: 1.0),
}


class PeriodAndDelay(NamedTuple):
    """Optimizer steps between two exchanges, and between posting and merging an exchange."""

    period: int
    delay: int


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
    if not math.isfinite(exchange_time / step_time):
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
    alone = step_time + allreduce_time(
        total_bytes, 1, gpus_per_node, network=network, pattern=pattern
    )
    copies, broadcast = overhead if nodes > 1 else 0.0, 0.0
    if nodes > 1 and gpus_per_node > 1:
        merged_bytes = wire_bytes(num_parameters, "float32", moments)
        broadcast = network.local_latency + merged_bytes / network.local_bandwidth

    def time_on(wire: str) -> float:
        own = "float32" if wire == "float64" else wire  # that of the parameters, if narrower
        sent = wire_bytes(num_parameters, own, moments, moments_wire)
        return exchange_seconds(sent, nodes, network, pattern)

    exchange_time = time_on(wire)
    every_step = algorithm == "allreduce_gradients"
    if period is None:
        period = 1 if every_step else hiding_schedule(alone, exchange_time).period
    check_whole("period", period, 1)
    delay = ALGORITHMS[algorithm].delay(period) if delay is None else delay
    if every_step and (period > 1 or delay):
        raise ValueError(
            f"allreduce_gradients exchanges at every step and blocks; got period={period} and "
            f"delay={delay}. Omit both, or choose dasgd."
        )

    def parts(exchange_time: float, period: int, delay: int) -> tuple[float, float, float]:
        waiting = mean_step_time(alone, exchange_time, period, delay) - alone + broadcast / period
        return waiting, copies / period, min(exchange_time, delay * alone) / period

    cycling, blocking = parts(exchange_time, period, delay), parts(time_on("bfloat16"), 1, 0)
    waiting, copying, hidden = (
        own + blocking_share * (blocked - own)
        for own, blocked in zip(cycling, blocking, strict=True)
    )
    slowed = slowdown * hidden / exchange_time if hidden else 0.0
    total = alone + waiting + copying + slowed
    return Prediction(
        total, waiting, hidden, exchange_time, period, delay, alone / total, nodes * alone / total
    )


class WireCosts(NamedTuple):
    """The costs of an exchange on one wire, in seconds.

    Attributes:
        exchange_time: of an exchange in the background.
        overhead: of what no delay hides, such as copies and rounding.
        slowdown: by which computing takes longer while a whole exchange is in flight.
    """

    exchange_time: float
    overhead: float = 0.0
    slowdown: float = 0.0


class Recommendation(NamedTuple):
    """A setting, and what to expect of it.

    Attributes:
        algorithm: ``local_sgd``, ``daso`` or ``dasgd``.
        merge: ``mean`` or ``delta``, the argument of the algorithm.
        wire: Dtype on the network.
        period: Optimizer steps between two exchanges.
        delay: Optimizer steps between posting and merging an exchange.
        step_time: Mean seconds of a step.
        progress: Steps of synchronous training that a step is worth, see :func:`progress`.
    """

    algorithm: str
    merge: str
    wire: str
    period: int
    delay: int
    step_time: float
    progress: float

    @property
    def cost(self) -> float:
        """Expected seconds for the progress of a step of synchronous training."""
        return self.step_time / self.progress

    @property
    def code(self) -> str:
        """The call that makes this averaging."""
        merge = f', merge="{self.merge}"' if self.merge == "delta" else ""
        return (
            f"jdaso.{self.algorithm}(exchange, period={self.period}, delay={self.delay}{merge}, "
            f'wire="{self.wire}")'
        )


def discarded(
    algorithm: str, period: int, delay: int, nodes: int, own_weight: float | None = None
) -> float:
    """Returns the share of a node's progress that late merges discard.

    A node moves by u in the s steps between posting x and merging. With w the weight of the mean,

        (1 - w) (x + u) + w mean  =  x + u - w (x - mean) - w u

    Averaging is ``w (x - mean)``. The rest, ``w u``, are w s steps of every k that are lost:

        w s / k,   w = P / (2 s + P) for DASO,   1 - xi for DaSGD

    Args:
        algorithm: One of ``ALGORITHMS``.
        period: k, optimizer steps between two exchanges.
        delay: s, optimizer steps between posting and merging an exchange.
        nodes: P.
        own_weight: xi, for DaSGD only. None selects the default of the algorithm.

    Returns:
        A number in [0, 1]. The delta rule of :func:`jdaso.local_sgd` discards nothing.

    Raises:
        ValueError: for numbers out of range, an unknown algorithm, or an ``own_weight`` with
            another algorithm than ``dasgd``.

    >>> discarded("daso", period=2, delay=1, nodes=2), discarded("dasgd", 2, 1, nodes=2)
    (0.25, 0.375)
    """
    check_choice("algorithm", algorithm, ALGORITHMS)
    check_period_and_delay(period, delay)
    check_whole("nodes", nodes, 1)
    if own_weight is None:
        return ALGORITHMS[algorithm].mean_weight(nodes, delay) * delay / period
    check_share("own_weight", own_weight)
    if algorithm != "dasgd":
        raise ValueError(f"own_weight requires the algorithm dasgd, got {algorithm}.")
    return (1 - own_weight) * delay / period


def progress(algorithm: str, period: int, delay: int, nodes: int, merge: str = "mean") -> float:
    """Returns the steps of synchronous training that a step is worth, as measured on average.

    The measurements are those of ``bench/progress.py``: six small trainings on 2 and on 8 nodes, at
    the best learning rate of synchronous training, half of it, and a quarter of it. Periods were at
    most 8. A formula of three coefficients interpolates them, see ``jdaso/algorithms/progress.py``.
    Trainings differ by more than most settings do.

    Args:
        algorithm: ``local_sgd``, ``daso`` or ``dasgd``.
        period: Optimizer steps between two exchanges.
        delay: Optimizer steps between posting and merging an exchange.
        nodes: Number of nodes.
        merge: ``mean`` or ``delta``.

    Returns:
        A number in (0, 1].

    Raises:
        ValueError: for numbers out of range, or an algorithm or merge that was not measured.

    >>> progress("daso", 4, 3, nodes=2) > progress("dasgd", 4, 3, nodes=2)
    True
    """
    check_choice("algorithm", algorithm, ("local_sgd", "daso", "dasgd"))
    check_choice("merge", merge, ("mean", "delta"))
    check_period_and_delay(period, delay)
    check_whole("nodes", nodes, 1)
    weight = ALGORITHMS[algorithm].mean_weight(nodes, delay) if merge == "mean" else 0.0
    return measured_progress(period, delay, nodes, weight)


def recommend(
    step_time: float,
    wires: Mapping[str, WireCosts],
    nodes: int,
    rules: Iterable[tuple[str, str]] = RULES,
) -> list[Recommendation]:
    """Chooses algorithm, merge, wire, period and delay for the shortest time to a loss.

    The mean step time is that of :func:`mean_step_time`, with the overhead and the slowdown of an
    exchange in every period. It is divided by the measured :func:`progress` of a step. The setting
    with the smallest quotient is the first, of all periods up to 8, the longest that was measured,
    or up to 64 if an exchange takes longer, and of all delays that hide more than shorter ones.
    ``local_sgd`` blocks. The rounding of the wire costs nothing but its time.

    Args:
        step_time: Seconds of a step without exchanges.
        wires: Costs of an exchange on each wire that may be used.
        nodes: Number of nodes.
        rules: The algorithms and merges to compare.

    Returns:
        The best setting and the next two, at most one for each wire, algorithm and merge.

    Raises:
        ValueError: for numbers out of range, no wire, an unknown wire or algorithm, or costs that
            are no :class:`WireCosts`.

    >>> wires = {"bfloat16": WireCosts(0.32, slowdown=0.03), "int8": WireCosts(0.17, overhead=0.15)}
    >>> best, *others = recommend(step_time=0.17, wires=wires, nodes=2)
    >>> best.wire, best.merge, best.delay
    ('bfloat16', 'delta', 2)
    """
    check_number("step_time", step_time, above=True)
    if not wires:
        raise ValueError("wires must have the costs of at least one wire, got none.")
    best = []
    for wire, costs in wires.items():
        check_wire("each key of wires", wire)
        if not isinstance(costs, WireCosts):
            raise ValueError(f"wires[{wire!r}] must be a WireCosts, got {costs!r}.")
        for name, seconds in costs._asdict().items():
            check_number(f"wires[{wire!r}].{name}", seconds)
        hidden = hiding_schedule(step_time, costs.exchange_time).delay
        for algorithm, merge in rules:
            blocks = algorithm == "local_sgd"
            # Longer periods than those that were measured only hide an exchange.
            longest = MEASURED_PERIOD
            if not blocks:
                longest = min(max(longest, hidden), LONGEST_PERIOD)
            found = [
                Recommendation(
                    *(algorithm, merge, wire, period, delay),
                    step_time + _added_seconds(step_time, costs, delay) / period,
                    progress(algorithm, period, delay, nodes, merge),
                )
                for period in range(1, longest + 1)
                for delay in ([0] if blocks else range(1, min(period, hidden) + 1))
            ]
            best.append(min(found, key=lambda setting: setting.cost))
    return sorted(best, key=lambda setting: setting.cost)[:3]


def _added_seconds(step_time: float, costs: WireCosts, delay: int) -> float:
    """Returns the seconds that an exchange adds to the steps of a period."""
    exchange_time, overhead, slowdown = costs
    hidden = min(1.0, delay * step_time / exchange_time) if exchange_time else 0.0
    return max(0.0, exchange_time - delay * step_time) + overhead + hidden * slowdown
