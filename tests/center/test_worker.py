"""A worker's side of the center: an optimizer state that is stepped twice is an error."""

import contextlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from one_process import unsharded

import jdaso
from jdaso.center.async_easgd import elastic_rule
from jdaso.center.frames import END
from jdaso.center.mpi_center import Worker, _MpiCenter
from jdaso.core.exchange import HEADER_SIZE, UNCOUNTED
from jdaso.exchange.host.layout import LeafSpec, Shardings
from jdaso.exchange.host.program import Program
from jdaso.exchange.host.slots import Table

LAYOUT = unsharded([LeafSpec((3,), np.dtype("float32"))])
TOPOLOGY = jdaso.discover_topology()


class EchoWorker(Worker):
    """A worker whose server replies with what it gets."""

    def __init__(self):
        super().__init__(TOPOLOGY, comm=None, timeout=60.0, heartbeat_seconds=1e6)

    def _request(self, kind, content):
        yield from ()
        if kind == END:
            return []  # no other worker is active
        _, contributes, leaves = content
        assert contributes
        return leaves


@pytest.fixture
def table():
    worker = EchoWorker()
    yield worker.table
    worker.progress.close()


def post(table, number, values):
    header = np.ones(HEADER_SIZE, np.float32)
    slot = table.begin_post(number, number, header, table.register(LAYOUT))
    table.memory(slot).fill([np.float32(values)])
    table.end_post(slot)


def collect(table, number):
    slot = table.begin_collect(number, readers=1)
    sums, header = table.memory(slot).sums[0].tolist(), list(slot.total)
    table.end_collect(slot, 1, True)
    return sums, header


def test_a_reply_is_collected_once(table):
    post(table, 3, [1, 2, 3])
    sums, header = collect(table, 3)
    assert sums == [1, 2, 3]
    assert header[0] == 1
    report = table.report()
    assert (report["exchanges"], report["bytes_sent"]) == (1, 12)
    assert report["seconds_in_flight"] > 0
    with pytest.raises(jdaso.JdasoError, match=r"exchange 3 .* is not in flight in rank 0"):
        collect(table, 3)


def test_a_consensus_is_an_error():
    mesh = Mesh(np.array(jax.local_devices()[:1]), ("local",))
    program = Program(Table(), True, Shardings(None, mesh), contextlib.nullcontext)
    center = _MpiCenter(1, SimpleNamespace(), program, None)
    exchange = center.make_exchange(elastic_rule(0.5))
    leaves = [jnp.ones(3)]
    with pytest.raises(ValueError, match="broadcast and consensus are not available"):
        exchange.bind((), leaves).post(
            jnp.int32(0), UNCOUNTED, 0, leaves, jnp.ones(HEADER_SIZE), None
        )


@pytest.mark.parametrize("number", [2, 3])
def test_a_number_is_posted_once_until_numbers_restart(table, number):
    post(table, 3, [1, 2, 3])
    with pytest.raises(jdaso.JdasoError, match=f"exchange {number} .* was posted twice in rank 0"):
        post(table, number, [1, 2, 3])
    table.restart()
    post(table, number, [4, 5, 6])
    assert collect(table, number)[0] == [4, 5, 6]
