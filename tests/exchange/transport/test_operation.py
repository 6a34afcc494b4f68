"""Operations report what they wait for, and whether they have progressed."""

import pytest

from jdaso.exchange.transport.operation import WaitState, wait_for


class Request:
    """An MPI request, which a test completes."""

    def __init__(self):
        self.complete = False

    def Test(self):
        return self.complete


def result_of(operation):
    with pytest.raises(StopIteration) as end:
        next(operation)
    return end.value.value


def test_waiting_progresses_when_a_request_completes():
    requests = [Request(), Request()]
    waiting = wait_for(requests)
    assert next(waiting) == WaitState(progressed=True, requests=tuple(requests))
    assert next(waiting) == WaitState(progressed=False, requests=tuple(requests))
    requests[0].complete = True
    assert next(waiting) == WaitState(progressed=True, requests=(requests[1],))
    assert next(waiting) == WaitState(progressed=False, requests=(requests[1],))
    requests[1].complete = True
    assert result_of(waiting) is None
