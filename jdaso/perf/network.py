"""A model of the links between nodes: the time of an all-reduce, and a fit to measurements."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jdaso.core.block_format import BLOCK_SIZE, FORMATS
from jdaso.core.chain import MOMENTS_WIRES
from jdaso.core.validation import check_choice, check_number, check_whole
from jdaso.core.wire import WIRES

#: Patterns with a cost model: that of ``mpi_exchange``, and those of papers.
MODELLED_PATTERNS = ("collectives", "ring", "halving", "butterfly", "tree")
#: Those of them that exclude the wires int8 and float4.
WITHOUT_FORMATS = ("ring", "halving")
#: Wires that are not wider than float32 parameters.
FLOAT32_WIRES = tuple(wire for wire in WIRES if wire != "float64")
#: Bytes of a parameter on each wire. int8 and float4 add one byte of scale to each block.
BYTES_PER_NUMBER: dict[str, float] = {
    wire: FORMATS[wire].row_bytes / BLOCK_SIZE if wire in FORMATS else jnp.dtype(wire).itemsize
    for wire in WIRES
}


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
    """Size of the parameters on the network, with averaged moments of the optimizer.

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
    check_whole("num_parameters", num_parameters, 1)
    check_choice("wire", wire, BYTES_PER_NUMBER)
    check_whole("moments", moments, 0)
    check_choice("moments_wire", moments_wire, MOMENTS_WIRES)
    bytes_per_parameter = BYTES_PER_NUMBER[wire] + moments * BYTES_PER_NUMBER[moments_wire]
    return num_parameters * bytes_per_parameter


def allreduce_time(
    num_bytes: float,
    nodes: int,
    gpus_per_node: int = 1,
    *,
    network: Network,
    pattern: str = "collectives",
) -> float:
    """Time of a blocking all-reduce over nodes, followed by one over the devices of a node.

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
    """Number of consecutive messages, and how often all bytes cross a member's link."""
    check_choice("pattern", pattern, MODELLED_PATTERNS)
    if members == 1:
        return 0, 0.0
    rounds = (members - 1).bit_length()  # log2, rounded up
    share = 2 * (members - 1) / members
    return {
        "collectives": (1 + rounds, share),
        "ring": (2 * (members - 1), share),
        "halving": (2 * rounds, share),
        "butterfly": (rounds, rounds),
        "tree": (2 * rounds, 2 * rounds),
    }[pattern]


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
    latency, inverse = (
        np.linalg.lstsq(columns / scale, np.ones(len(medians)), rcond=None)[0] / scale
    )
    if latency < 0:
        latency, inverse = 0.0, columns[:, 1].sum() / scale[1] ** 2
    if inverse * volume * max(by_size) < 1e-3 * medians.max():
        raise ValueError(
            f"measured: times do not grow from {min(by_size):g} to {max(by_size):g} bytes, so "
            "they do not determine the bandwidth. Measure larger exchanges, on idle nodes."
        )
    return Network(float(latency), float(1 / inverse))
