"""A worker's side of the center: an optimizer state that is stepped twice is an error."""

import numpy as np
import pytest

import jdaso
from jdaso.center.server.worker_transport import WorkerTransport
from jdaso.core.exchange import HEADER_SIZE, UNCOUNTED
from jdaso.exchange.host.layout import LeafSpec, unsharded

LAYOUT = unsharded([LeafSpec((3,), np.dtype("float32"))])


class Connection:
    """A server that replies with what it gets."""

    def submit(self, kind, description, parts, contributes, fingerprint):
        request = np.concatenate([part.view(np.uint8) for part in parts]).view(Reply)
        request.seconds = 0.5
        return request

    def wait(self, request):
        return request


class Reply(np.ndarray):
    """The content of a reply, which is also the request."""


@pytest.fixture
def transport():
    return WorkerTransport(jdaso.discover_topology(), Connection(), abort=str)


def post(transport, number, values):
    transport.reserve(number, LAYOUT).fill([np.float32(values)])
    transport.post(number, step=number, header=np.ones(HEADER_SIZE, np.float32))


def test_a_reply_is_collected_once(transport):
    post(transport, 3, [1, 2, 3])
    staging, header = transport.collect(3, readers=1)
    assert staging.sums[0].tolist() == [1, 2, 3]
    assert header[0] == 1
    report = transport.report()
    assert (report["exchanges"], report["bytes_sent"]) == (1, 12)
    assert report["seconds_in_flight"] == 0.5
    with pytest.raises(jdaso.JdasoError, match=r"exchange 3 .* is not in flight in rank 0"):
        transport.collect(3, readers=1)


def test_a_consensus_is_an_error(transport):
    with pytest.raises(ValueError, match="broadcast and consensus are not available"):
        transport.reserve(UNCOUNTED, LAYOUT)


@pytest.mark.parametrize("number", [2, 3])
def test_a_number_is_posted_once_until_numbers_restart(transport, number):
    post(transport, 3, [1, 2, 3])
    with pytest.raises(jdaso.JdasoError, match=f"exchange {number} .* was posted twice in rank 0"):
        transport.reserve(number, LAYOUT)
    transport.restart_numbers()
    post(transport, number, [4, 5, 6])
    assert transport.collect(number, readers=1)[0].sums[0].tolist() == [4, 5, 6]
