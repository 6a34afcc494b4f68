"""Exchanges that are about to be posted: who waits for them, and what if they never are."""

import threading
import time

import numpy as np
import pytest

import jdaso
from jdaso.exchange import _reserved
from jdaso.exchange._reserved import Reserved
from jdaso.exchange._staging import Spec, Staging

MEMORY = Staging([Spec((3,), np.dtype("float32"))])


@pytest.fixture
def reserved(monkeypatch):
    monkeypatch.setattr(_reserved, "_SECONDS", 0.05)
    reserved = Reserved(threading.Condition())
    reserved.put(7, MEMORY)
    return reserved


def test_one_that_is_not_posted_is_an_error_until_it_is_given_up(reserved):
    with pytest.raises(jdaso.JdasoError, match="exchange 7 was begun and is not posted after"):
        reserved.wait()
    reserved.forget(7)
    reserved.forget(8)
    reserved.wait()
    assert reserved.flight(7, 1, {}) is None


def test_whoever_collects_waits_for_copies_and_for_the_device_that_posts(reserved, monkeypatch):
    monkeypatch.setattr(_reserved, "_SECONDS", 30.0)
    assert reserved.flight(6, 1, {}) is None  # nobody has begun it: at once
    flights, changed = {}, reserved._changed

    def post():
        time.sleep(0.05)
        with changed:
            assert reserved.take(7) is MEMORY
            flights[7] = "seven"
        time.sleep(0.05)
        with changed:
            flights[8] = "eight"
            changed.notify_all()

    thread = threading.Thread(target=post)
    thread.start()
    assert reserved.flight(7, 1, flights) == "seven"
    assert reserved.flight(8, 2, flights) == "eight"
    thread.join()
    assert 7 not in reserved
