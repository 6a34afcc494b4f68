"""JDASO_DEBUG=1 logs each exchange when it is posted and when it is collected."""

import os
import re
import subprocess
import sys

import pytest

# One exchange of a single process.
PROGRAM = """
import numpy as np
import jdaso
from jdaso.core.exchange import HEADER_SIZE
from jdaso.exchange.host.layout import LeafSpec, unsharded
from jdaso.exchange.transport.collectives import AllReduceOptions
from jdaso.exchange.transport.membership import Membership
from jdaso.exchange.transport.mpi_transport import MpiTransport
from jdaso.exchange.transport.progress import Progress

topology = jdaso.discover_topology()
membership = Membership(topology, AllReduceOptions(), timeout=60.0)
progress = Progress(topology, 60.0, membership.announce_exit, topology.abort)
transport = MpiTransport(membership, progress)
transport.reserve(4, unsharded([LeafSpec((3,), np.dtype("float32"))])).fill([np.arange(3.0)])
transport.post(4, 9, np.ones(HEADER_SIZE, np.float32))
staging, _ = transport.collect(4, readers=1)
assert staging.sums[0].tolist() == [0, 1, 2]
"""
LINES = r"""jdaso: rank 0 \(.+\) posted exchange 4 after step 9, 12 bytes
jdaso: rank 0 .+ completed exchange 4 posted after step 9; transfer \S+ s, training blocked \S+ s
"""


@pytest.mark.parametrize(("value", "expected"), [("1", LINES), ("", "")])
def test_each_exchange_is_logged_twice(value, expected):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"JDASO_DEBUG": value, "JAX_PLATFORMS": "cpu"},
    )
    assert re.fullmatch(expected, ended.stderr), ended.stderr
