"""Operations report what they wait for, and whether they have progressed."""

import pytest

from jdaso.exchange.transport.operation import WaitState, interleave, wait_for


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


def test_interleaved_operations_do_not_wait_for_each_other():
    late = Request()

    def operation(number):
        if number == 0:
            yield from wait_for([late])
        yield WaitState()
        return number

    interleaved = interleave(map(operation, range(5)))
    next(interleaved)
    assert next(interleaved) == WaitState(progressed=True, requests=(late,))  # of the first alone
    assert next(interleaved) == WaitState(progressed=False, requests=(late,))
    late.complete = True
    next(interleaved)
    assert result_of(interleaved) == sum(range(5))


@pytest.mark.parametrize("unnamed", [False, True])
def test_operations_are_polled_if_one_waits_for_what_is_no_request(unnamed):
    request = Request()

    def other():
        yield WaitState(requests=() if unnamed else (request,))

    state = next(interleave([wait_for([request]), other()]))
    assert state.requests == (() if unnamed else (request, request))
