"""What a process says of its exchanges."""

import types

import numpy as np
import pytest
from one_process import memory_of

import jdaso
from jdaso.exchange.host.layout import LeafSpec
from jdaso.exchange.transport.mpi_transport import MpiTransport, mpi_table


class Process(types.SimpleNamespace):
    _left_out, _name, _label = 0, "rank 1 (host)", "exchange {}".format


def test_a_process_that_is_left_out_names_the_wire_that_cannot_hold_its_parameters(caplog):
    process = Process()
    memory = memory_of([LeafSpec((2,), np.dtype("float16"))])
    for number in range(7):
        MpiTransport._warn_left_out(process, number, memory, lost=1)
    numbers = [message.split(" of exchange ")[1][0] for message in caplog.messages]
    assert numbers == ["0", "1", "3"]  # the first, second and fourth time
    for message in caplog.messages:
        assert message.startswith("rank 1 (host) is left out")
        assert "because leaf 0 is not finite" in message
        assert "or above 65504 in magnitude, which the wire float16 cannot hold" in message


def test_a_process_that_has_skipped_steps_names_no_leaf(caplog):
    process = Process()
    memory = memory_of([LeafSpec((2,), np.dtype("float16"))])
    MpiTransport._warn_left_out(process, 3, memory, lost=0)
    assert "because gradients of a step since the last merge were not finite" in caplog.text
    assert "mask" not in caplog.text


def test_messages_have_the_name_of_an_exchange():
    table = mpi_table(jdaso.discover_topology(), name="outer")
    with pytest.raises(jdaso.JdasoError, match="exchange 3 of 'outer' is not in flight in rank 0"):
        table.begin_collect(3, readers=1)
