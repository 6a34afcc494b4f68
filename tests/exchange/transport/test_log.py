"""What a process logs of its exchanges."""

import os
import re
import subprocess
import sys

import jax.numpy as jnp
import pytest

import jdaso
from jdaso.core.exchange import changed

# One exchange of a single process.
PROGRAM = """
import numpy as np
from jax.sharding import PartitionSpec
import jdaso
from jdaso.core.exchange import HEADER_SIZE
from jdaso.exchange.host.layout import make_layout
from jdaso.exchange.transport.mpi_transport import Membership
from jdaso.exchange.transport.mpi_transport import MpiTransport, mpi_table
from jdaso.exchange.transport.progress import Progress

topology = jdaso.discover_topology()
membership = Membership(topology, chunk_bytes=1 << 22)
table = mpi_table(topology)
progress = Progress(topology, 60.0, membership.announce_exit, topology.abort, table)
transport = MpiTransport(membership, progress)
layout = make_layout(((3,),), (np.dtype("float32"),), (PartitionSpec(),), topology.mesh)
slot = table.begin_post(4, 9, np.ones(HEADER_SIZE, np.float32), table.register(layout))
table.memory(slot).fill([np.arange(3.0)])
table.end_post(slot)
slot = table.begin_collect(4, readers=1)
assert table.memory(slot).sums[0].tolist() == [0, 1, 2]
table.end_collect(slot, 1, True)
"""
LINES = r"""jdaso: rank 0 \(.+\) posted exchange 4 after step 9, 12 bytes
jdaso: rank 0 .+ completed exchange 4 posted after step 9; transfer \S+ s, training blocked \S+ s
"""


def logged_by(program, debug=""):
    environment = os.environ | {"JDASO_DEBUG": debug, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program]
    options = {"capture_output": True, "text": True, "check": True, "timeout": 120}
    return subprocess.run(command, env=environment, **options).stderr


@pytest.mark.parametrize(("debug", "expected"), [("1", LINES), ("", "")])
def test_with_jdaso_debug_each_exchange_is_logged_when_posted_and_when_completed(debug, expected):
    logged = logged_by(PROGRAM, debug)
    assert re.fullmatch(expected, logged), logged


@pytest.mark.parametrize(("total", "times"), [(10, 0), (9, 1)])
def test_the_first_step_beyond_those_of_the_schedule_is_said_to_block(total, times):
    program = PROGRAM.replace("layout =", f"transport.begin_run({total}, False)\nlayout =")
    text = f"has taken the {total} steps of its schedule. Every further step blocks"
    assert logged_by(program).count(text) == times


def test_an_exchange_is_told_the_steps_of_the_schedule():
    told = []
    exchange = changed(jdaso.single_exchange(), begin_run=lambda total, *_: told.append(total))
    schedule = jdaso.cycling(period=2, warmup=1, cooldown=1, total=7)
    for each in (schedule, jdaso.constant(2)):
        jdaso.daso(exchange, schedule=each).init(jnp.ones(3))
    assert told == [7, None]
