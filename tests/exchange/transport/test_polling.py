"""The pauses between two polls, as formulas in the time since the last progress."""

import threading
import time
import types

import pytest

from jdaso.exchange.host.slots import Table
from jdaso.exchange.transport import progress as module
from jdaso.exchange.transport.progress import Polling, WaitState

TIMEOUT = 20.0
WAITING = WaitState(requests=(object(),))


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still, except where a test moves it."""
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def test_the_pause_is_a_fraction_of_the_time_since_the_last_progress(clock):
    polling = Polling(Table())
    assert polling.pause() == module._SHORTEST_SECONDS
    clock.seconds += 4 * module._LONGEST_SECONDS / 2
    assert polling.pause() == pytest.approx(module._LONGEST_SECONDS / 2)
    clock.seconds += 4 * module._LONGEST_SECONDS
    assert polling.pause() == module._LONGEST_SECONDS


def test_after_progress_the_pause_is_a_fraction_of_what_that_progress_took(clock):
    polling = Polling(Table())
    clock.seconds += 4 * 1.5e-3
    polling.look()
    polling.note([WAITING._replace(progressed=True)], clock.seconds)
    assert polling.pause() == pytest.approx(1.5e-3)
    clock.seconds += 4 * 1e-3
    polling.look()
    polling.note([WAITING], clock.seconds)
    assert polling.pause() == pytest.approx(1.5e-3)  # it does not shrink before the next progress


def test_the_longest_pause_grows_with_the_time_of_an_operation(clock):
    polling, began = Polling(Table()), clock.seconds
    for seconds in (0.1, 0.6, 100.0):
        clock.seconds = began + seconds
        polling.look()
        polling.note([WAITING], began)
        taken = seconds / module._POLLS_PER_OPERATION
        limits = module._LONGEST_SECONDS, module._LONGEST_ON_SLOW_LINKS
        assert polling.pause() == pytest.approx(max(limits[0], min(taken, limits[1])))


def test_an_operation_that_names_no_message_is_polled_often(clock):
    polling, began = Polling(Table()), clock.seconds
    clock.seconds += 100.0
    polling.look()
    polling.note([WAITING, WaitState()], began)
    assert polling.pause() == module._LONGEST_SECONDS


def test_while_the_program_waits_the_pause_begins_short_and_grows(clock):
    polling = Polling(table := Table())
    clock.seconds += 1.0
    table.hurry(2)
    assert polling.pause() == module._AWAITED_SECONDS[0]
    clock.seconds += 1e-3
    assert polling.pause() == pytest.approx(1e-3 / module._POLLS_PER_AWAITED)
    clock.seconds += 1.0
    assert polling.pause() == module._AWAITED_SECONDS[1]
    table.hurry(-2)
    assert polling.pause() == module._LONGEST_SECONDS


def test_looks_tell_the_seconds_between_them(clock):
    polling = Polling(Table())
    polling.look()
    clock.seconds += 7.0
    assert polling.look() == 7.0


def test_a_wake_up_ends_the_sleep_or_the_next_one():
    table = Table()
    table.wake()
    table.wake()
    assert table.wait(TIMEOUT)
    assert not table.wait(1e-3)  # two wake-ups before a sleep are one
    threading.Timer(0.05, table.wake).start()
    begin = time.monotonic()
    assert table.wait(-1)
    assert time.monotonic() - begin < TIMEOUT


def test_polls_end_with_a_message_a_wake_up_or_the_time_to_look(monkeypatch):
    polls = []

    def request(ready):
        return types.SimpleNamespace(can_continue=lambda: polls.append(ready) or ready)

    polling = Polling(table := Table())
    polling.look()
    assert not polling.poll([request(False), request(True)])
    assert polls == [False, True]
    table.wake()
    assert polling.poll([request(False)])  # there may be news of slots
    assert len(polls) == 2  # without a poll
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.02)
    polling.look()
    assert not polling.poll([request(False)])
    assert len(polls) > 2
