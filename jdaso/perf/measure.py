"""Measures exchanges of several sizes: their time, their copies, and how they slow computing."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdaso import perf
from jdaso.algorithms.dasgd import dasgd
from jdaso.cluster.topology import Topology
from jdaso.core.engine import move
from jdaso.core.exchange import Exchange
from jdaso.core.types import ParamsWithMoments, PyTree

_WIDTH = 512  # of the matrices whose products simulate training


class Measured(NamedTuple):
    """Measurements on one wire."""

    exchanges: list[tuple[float, float]]  # bytes and seconds in the background of each exchange
    overhead: float  # seconds of copies before and after one of the largest exchanges
    slowdown: float  # seconds by which one of the largest exchanges in flight slows computing
    noise: float = 0.0  # seconds between the quartiles of equal computations, of the worst node

    @property
    def largest(self) -> float:
        """Size of the largest exchanges in bytes."""
        return max(size for size, _ in self.exchanges)

    def times(self) -> list[float]:
        """Times of the largest exchanges in seconds."""
        return [seconds for size, seconds in self.exchanges if size == self.largest]


def sweep(
    topology: Topology,
    exchange: Exchange,
    num_parameters: int,
    wire: str,
    repeats: int,
    seconds: float,
    sizes: int = 5,
    moments: int = 0,
    moments_wire: str = "float32",
) -> Measured:
    """Measures exchanges of all parameters, a quarter, a sixteenth, and so on, the smallest first.

    There are at most ``sizes`` sizes, each with ``moments`` moments of each parameter. This is
    collective. The time of an exchange is the longest over all nodes, so all have the same numbers
    and stop at the same size after ``seconds``.
    """
    comm = topology.duplicate_comm()

    def longest(seconds: float) -> float:
        return max(comm.allgather(seconds))

    exchanges: list[tuple[float, float]] = []
    overheads: list[float] = []
    begin = time.monotonic()
    for elements in sorted({max(1, num_parameters // 4**k) for k in range(sizes)}):
        exchange_once = prepare(exchange, elements, wire, moments, moments_wire)
        comm.Barrier()
        # The first exchange compiles, and its memory is not mapped yet.
        expected = longest(exchange_once(lambda: None)[0])
        since, overheads = time.monotonic(), []
        for _ in range(repeats):
            comm.Barrier()
            # Sleep, do not collect: while the program waits for a result, the progress thread
            # polls more often than beside training.
            sleep = functools.partial(time.sleep, 1.2 * expected)
            exchange_time, overhead = map(longest, exchange_once(sleep))
            size = perf.wire_bytes(elements, wire, moments, moments_wire)
            exchanges.append((size, exchange_time))
            overheads.append(overhead)
            expected = min(expected, exchange_time)
        # The next size takes about four times as long. Two sizes are needed.
        now = time.monotonic()
        until_next = longest(now - begin + 4 * (now - since))
        if until_next > seconds and len(exchanges) > repeats:
            break
    # Computing must last longer than the exchange, which it slows as well.
    compute = matrix_products(longest(1.5 * expected))
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(repeats):
        comm.Barrier()
        alone.append(elapsed(compute))
        comm.Barrier()
        exchange_once(lambda: beside.append(elapsed(compute)))
        if longest(time.monotonic() - begin) > seconds:
            break
    # The median of each node comes first: the longest single time may be a disturbance.
    slowdown = longest(statistics.median(beside) - statistics.median(alone))
    noise = longest(max(_between_quartiles(times) for times in (alone, beside)))
    comm.Free()
    return Measured(exchanges, statistics.median(overheads), max(0.0, slowdown), noise)


def prepare(
    exchange: Exchange,
    elements: int,
    wire: str,
    moments: int = 0,
    moments_wire: str = "float32",
) -> Callable[[Callable[[], object]], tuple[float, float]]:
    """A function ``exchange_once(meanwhile)`` for exchanges of ``elements`` float32 parameters.

    It posts an exchange, calls ``meanwhile`` and merges the result, as DaSGD does. It returns the
    seconds the exchange was in flight, and the seconds of the copies before and after.
    """
    averaging = dasgd(exchange, period=2, delay=1, wire=wire)
    assert averaging.engine is not None
    engine = averaging.engine._replace(moments_wire=moments_wire)

    # The steps of a training after the optimizer's update, which post and merge in turn.
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        return move(engine, params, state, jnp.bool_(True))

    def zeros() -> jax.Array:
        return jnp.zeros(elements, jnp.float32)

    params: PyTree = ParamsWithMoments(zeros(), [zeros() for _ in range(moments)])
    params, state = step(params, averaging.init(params))

    def exchange_once(meanwhile: Callable[[], object]) -> tuple[float, float]:
        nonlocal params, state
        before, start = exchange.report(), time.monotonic()
        params, state = jax.block_until_ready(step(params, state))
        posted = time.monotonic()
        meanwhile()
        resumed = time.monotonic()
        params, state = jax.block_until_ready(step(params, state))
        end, after = time.monotonic(), exchange.report()
        waited = after["seconds_blocked"] - before["seconds_blocked"]
        in_flight = after["seconds_in_flight"] - before["seconds_in_flight"]
        return in_flight, posted - start + end - resumed - waited

    return exchange_once


def matrix_products(seconds: float) -> Callable[[], object]:
    """A function that multiplies matrices for about ``seconds`` when no exchange is in flight."""
    matrix = jnp.full((_WIDTH, _WIDTH), 1 / _WIDTH)
    products = jax.jit(lambda m, n: jax.lax.fori_loop(0, n, lambda _, x: x @ m, m))
    few = 10
    products(matrix, few).block_until_ready()  # compiles
    number = max(1, round(few * seconds / elapsed(lambda: products(matrix, few))))
    return lambda: products(matrix, number)


def _between_quartiles(times: list[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4)
    return high - low


def elapsed(compute: Callable[[], object]) -> float:
    """Seconds until the arrays that ``compute`` returns are ready."""
    start = time.monotonic()
    jax.block_until_ready(compute())
    return time.monotonic() - start
