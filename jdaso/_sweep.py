"""Exchanges of several sizes between the nodes, measured: flight, copies, computing beside them."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdaso import perf
from jdaso._base import HEADER_SIZE, Exchange
from jdaso.topology import Topology

# Of the product of matrices that stands for training.
_WIDTH = 512


class Measured(NamedTuple):
    """What a sweep has found.

    Attributes:
        exchanges: (bytes, seconds in the background) of each.
        overhead: seconds of one of the largest that are spent on copies before and after it.
        slowdown: seconds that computing takes longer while one of the largest is in flight.
    """

    exchanges: list[tuple[float, float]]
    overhead: float
    slowdown: float

    @property
    def largest(self) -> float:
        """Bytes of the largest exchanges."""
        return max(size for size, _ in self.exchanges)

    def times(self) -> list[float]:
        """Seconds of the largest exchanges."""
        return [seconds for size, seconds in self.exchanges if size == self.largest]


def sweep(
    topology: Topology,
    exchange: Exchange,
    num_parameters: int,
    wire: str,
    repeats: int,
    seconds: float,
) -> Measured:
    """Exchanges of a 256th, a 64th, ... and all of the parameters, until the time is over.

    Collective. The time of an exchange is that of the node for which it took longest, so that
    all nodes have the same numbers, and decide alike when to stop.
    """
    comm = topology.comm.Dup()

    def longest(seconds: float) -> float:
        return max(comm.allgather(seconds))

    found: list[tuple[float, float]] = []
    overheads: list[float] = []
    begin = time.monotonic()
    for elements in sorted({max(1, num_parameters // 4**k) for k in range(5)}):
        once = prepare(exchange, elements, wire)
        comm.Barrier()
        # The first one compiles, and touches its memory for the first time.
        flight = longest(once(lambda: None)[0])
        since, overheads = time.monotonic(), []
        for _ in range(repeats):
            comm.Barrier()
            # Awaited, an exchange is looked at more often than while training goes on.
            left_alone = functools.partial(time.sleep, 1.2 * flight)
            flown, overhead = map(longest, once(left_alone))
            found.append((perf.wire_bytes(elements, wire), flown))
            overheads.append(overhead)
            flight = min(flight, flown)
        # The next size takes about four times as long. Two sizes are needed.
        now = time.monotonic()
        until_next = longest(now - begin + 4 * (now - since))
        if until_next > seconds and len(found) > repeats:
            break
    # So much that it has not ended before the exchange, which computing slows down as well.
    compute = computing(longest(1.5 * flight))
    alone, beside = [], []
    for _ in range(repeats):
        comm.Barrier()
        alone.append(timed(compute))
        comm.Barrier()
        beside.append(timed_beside(once, compute))
        if longest(time.monotonic() - begin) > seconds:
            break
    # Medians of each node first: the longest of several would be that of what else goes on there.
    slower = longest(statistics.median(beside) - statistics.median(alone))
    comm.Free()
    return Measured(found, statistics.median(overheads), max(0.0, slower))


def prepare(
    exchange: Exchange, elements: int, wire: str
) -> Callable[[Callable[[], object]], tuple[float, float]]:
    """An exchange of so many float32 numbers.

    Returns:
        A function that posts it, calls what it is given, and then takes the exchange back; it
        returns the seconds the exchange flew, and those spent on copies around it.
    """
    leaf = jnp.zeros(elements, jnp.float32)
    header = jnp.zeros(HEADER_SIZE, jnp.float32).at[0].set(1.0)
    post = jax.jit(lambda state, n, leaf: exchange.start(state, n, n, [leaf], header, wire))
    collect = jax.jit(lambda state, n, leaf: exchange.finish(state, n, [leaf]))
    state, number = exchange.init([leaf]), jnp.int32(0)

    def once(meanwhile: Callable[[], object]) -> tuple[float, float]:
        nonlocal state, number
        before, start = exchange.report(), time.monotonic()
        state, following = jax.block_until_ready(post(state, number, leaf))
        posted = time.monotonic()
        meanwhile()
        awake = time.monotonic()
        _, _, state = jax.block_until_ready(collect(state, number, leaf))
        end, after, number = time.monotonic(), exchange.report(), following
        waited = after["seconds_blocked"] - before["seconds_blocked"]
        flown = after["seconds_in_flight"] - before["seconds_in_flight"]
        return flown, posted - start + end - awake - waited

    return once


def computing(seconds: float) -> Callable[[], object]:
    """Products of matrices on this process's device that take about so long without exchanges."""
    matrix = jnp.full((_WIDTH, _WIDTH), 1 / _WIDTH)
    products = jax.jit(lambda m, n: jax.lax.fori_loop(0, n, lambda _, x: x @ m, m))
    few = 10
    products(matrix, few).block_until_ready()  # compiles
    number = max(1, round(few * seconds / timed(lambda: products(matrix, few))))
    return lambda: products(matrix, number)


def timed_beside(
    once: Callable[[Callable[[], object]], object], compute: Callable[[], object]
) -> float:
    """Seconds that computing takes with an exchange in flight."""
    seconds: list[float] = []
    once(lambda: seconds.append(timed(compute)))
    return seconds[0]


def timed(compute: Callable[[], object]) -> float:
    """Seconds until what a function returns is there."""
    start = time.monotonic()
    jax.block_until_ready(compute())
    return time.monotonic() - start
