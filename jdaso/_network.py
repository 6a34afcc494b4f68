"""What an all-reduce costs between nodes: a model of links, and its fit to measurements.

Times are in seconds, sizes in bytes, bandwidths in bytes per second.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jdaso import _int8
from jdaso._checks import check_choice, check_number, check_whole

PATTERNS = ("direct", "ring", "halving", "butterfly", "tree")
#: Numbers that share a scale, of one byte, on an int8 wire.
INT8_BLOCK = _int8.NUMBERS
BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": _int8.BYTES / _int8.NUMBERS,
}


class Network(NamedTuple):
    """Links between nodes, and those between the devices of a node.

    Attributes:
        latency: seconds that a message takes however short it is.
        bandwidth: bytes per second.
        local_latency: the same between the devices of a node.
        local_bandwidth: the same; infinite: the time it takes is part of the step's.
    """

    latency: float
    bandwidth: float
    local_latency: float = 0.0
    local_bandwidth: float = math.inf


def wire_bytes(num_parameters: int, wire: str) -> float:
    """Bytes of so many parameters in a wire dtype.

    Args:
        num_parameters: at least 1. int8 fills up every array to a multiple of 64, which is not
            counted: it matters for a model of many small ones.
        wire: ``float64``, ``float32``, ``bfloat16``, ``float16``, or ``int8`` with a scale
            of one byte for each ``INT8_BLOCK`` parameters.

    Returns:
        Bytes.

    Raises:
        ValueError: for no parameters or an unknown wire.

    >>> wire_bytes(1024, "float32"), wire_bytes(1024, "bfloat16"), wire_bytes(1024, "int8")
    (4096, 2048, 1040.0)
    """
    check_whole("num_parameters", num_parameters, 1)
    check_choice("wire", wire, BYTES)
    return num_parameters * BYTES[wire]


def allreduce_time(
    num_bytes: float,
    nodes: int,
    gpus_per_node: int = 1,
    *,
    network: Network,
    pattern: str = "direct",
) -> float:
    """Seconds of a blocking all-reduce of n bytes over nodes, and then over devices of a node.

    Of P members, each level takes, with latency a and bandwidth w,

        direct        2 a + 2 (P-1)/P n/w               jdaso.mpi_exchange
        ring          2 (P-1) (a + n/(P w))               the same with pattern="ring"
        halving       2 log2(P) a + 2 (P-1)/P n/w         the same with pattern="halving"
        butterfly     log2(P) (a + n/w)                 DaSGD Table II, "Butterfly"
        tree          2 log2(P) (a + n/w)               DaSGD Table II, "Tree"

    Logarithms are rounded up. DaSGD prints no formula (its Eq. 3 is coarser); these are what its
    Table II was computed with, without latency. ``direct`` counts no time for the number of
    messages, 2 (P-1) per node: with hundreds of nodes it is a lower bound, ``ring`` an upper one.

    Args:
        num_bytes: what one member contributes, see :func:`wire_bytes`.
        nodes: P between nodes; 1: nothing crosses.
        gpus_per_node: P within a node.
        network: its links.
        pattern: one of ``PATTERNS``, on both levels.

    Returns:
        Seconds.

    Raises:
        ValueError: for numbers that cannot be, or an unknown pattern.

    ResNet-50 on 32 servers of 8 GPUs, 20 Gbit/s between them and 16 GB/s within, 446.78 ms:

    >>> network = Network(latency=0, bandwidth=20e9 / 8, local_bandwidth=16e9)
    >>> time = allreduce_time(4 * 25_530_472, 32, 8, network=network, pattern="tree")
    >>> f"{1e3 * time:.2f} ms"
    '446.78 ms'
    """
    check_number("num_bytes", num_bytes)
    check_whole("nodes", nodes, 1)
    check_whole("gpus_per_node", gpus_per_node, 1)
    _check_network(network)
    messages, volume = _passes(pattern, nodes)
    between = messages * network.latency + volume * num_bytes / network.bandwidth
    messages, volume = _passes(pattern, gpus_per_node)
    return between + messages * network.local_latency + volume * num_bytes / network.local_bandwidth


def _passes(pattern: str, members: int) -> tuple[int, float]:
    """Messages one after the other, and how often all bytes go through a member's link."""
    check_choice("pattern", pattern, PATTERNS)
    if members == 1:
        return 0, 0.0
    rounds = (members - 1).bit_length()  # log2, rounded up
    share = 2 * (members - 1) / members
    return {
        "direct": (2, share),
        "ring": (2 * (members - 1), share),
        "halving": (2 * rounds, share),
        "butterfly": (rounds, rounds),
        "tree": (2 * rounds, 2 * rounds),
    }[pattern]


def fit(measured: Iterable[tuple[float, float]], nodes: int, pattern: str = "direct") -> Network:
    """Latency and bandwidth from measured all-reduces.

    Least squares of relative errors of :func:`allreduce_time`, over the median time of each size,
    so that a few disturbed measurements do not count. A latency below 0 is taken for 0.

    Args:
        measured: (bytes, seconds) of exchanges, of at least two sizes; several of each are better.
        nodes: over how many nodes they were measured, at least 2.
        pattern: how the bytes crossed, one of ``PATTERNS``.

    Returns:
        A :class:`Network`; latency includes everything that does not grow with the size.

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
            f"measured must have at least two sizes, got {sorted(by_size)}: one time does not "
            "tell latency from bandwidth."
        )
    medians = np.array([np.median(times) for times in by_size.values()])
    # Seconds per unit of latency and of 1 / bandwidth, each divided by the time it took.
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
            "they tell nothing of the bandwidth. Measure larger exchanges, on nodes without other "
            "work."
        )
    return Network(float(latency), float(1 / inverse))


def _check_network(network: Network) -> None:
    for name, value in network._asdict().items():
        if name == "local_bandwidth" and value == math.inf:
            continue
        check_number(f"network.{name}", value, above="bandwidth" in name)
