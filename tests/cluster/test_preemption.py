"""A signal requests a stop, and has no other effect until the process has exited."""

import os
import signal

import pytest

import jdaso
from jdaso.cluster import Preemption

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXCHANGE = jdaso.single_exchange()


def own_handler(number, frame):
    pass


@pytest.fixture(autouse=True)
def restored():
    """The handlers from before the test. Within it, SIGTERM has one and SIGUSR1 has none."""
    before = [signal.signal(number, signal.SIG_DFL) for number in SIGNALS]
    signal.signal(signal.SIGTERM, own_handler)
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_requests_a_stop_and_has_no_effect_after_it(number):
    with Preemption() as preemption:
        assert not preemption.requested(EXCHANGE)
        os.kill(os.getpid(), number)
        assert preemption.requested(EXCHANGE)
    assert own_handler not in map(signal.getsignal, SIGNALS)
    for again in SIGNALS:  # would end the process, or call the program's handler
        os.kill(os.getpid(), again)


def test_without_a_stop_handlers_return_and_sigusr1_is_ignored():
    with Preemption() as preemption:
        assert not preemption.requested(EXCHANGE)
    assert signal.getsignal(signal.SIGTERM) is own_handler
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_a_handler_of_the_program_returns_for_sigusr1_as_well():
    signal.signal(signal.SIGUSR1, own_handler)
    with Preemption():
        pass
    assert signal.getsignal(signal.SIGUSR1) is own_handler
