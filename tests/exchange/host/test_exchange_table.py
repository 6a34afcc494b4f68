"""Exchanges that are reserved and not yet posted, or about to be posted."""

import threading
import time

import numpy as np
import pytest

import jdaso
from jdaso.exchange.host import exchange_table
from jdaso.exchange.host.buffers import StagingBuffers
from jdaso.exchange.host.exchange_table import ExchangeTable
from jdaso.exchange.host.layout import LeafSpec

BUFFERS = StagingBuffers([LeafSpec((3,), np.dtype("float32"))])


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(exchange_table, "_SECONDS", 0.05)
    table = ExchangeTable()
    table.pending.add(7, BUFFERS, BUFFERS.layout)
    return table


def test_an_exchange_that_is_never_posted_is_an_error_until_it_is_discarded(table):
    with pytest.raises(jdaso.JdasoError, match="exchange 7 was reserved but not posted within"):
        table.pending.wait_until_posted()
    table.pending.discard(7)
    table.pending.discard(8)
    table.pending.wait_until_posted()
    assert table.find(7, 1) is None


def test_find_waits_for_copies_and_for_the_device_that_posts(table, monkeypatch):
    monkeypatch.setattr(exchange_table, "_SECONDS", 30.0)
    assert table.find(6, 1) is None  # not reserved, so it does not wait

    def post():
        time.sleep(0.05)
        with table.lock:
            assert table.pending.filled(7) is BUFFERS
            table.post(7, "seven")
        time.sleep(0.05)
        with table.lock:
            table.post(8, "eight")

    thread = threading.Thread(target=post)
    thread.start()
    assert table.find(7, 1) == "seven"
    assert table.find(8, 2) == "eight"
    thread.join()
    assert 7 not in table.pending
