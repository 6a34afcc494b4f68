"""Operations report what they wait for, and whether they have progressed."""

import pytest

from jdaso.exchange.transport.operation import (
    WINDOW,
    WaitState,
    in_world_ranks,
    interleave,
    wait_for,
)


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


def test_waiting_names_the_missing_ranks_and_progresses_when_one_of_them_completes():
    requests = {3: Request(), 5: Request(), 6: None}  # nothing is expected from rank 6
    waiting = wait_for(requests)
    assert next(waiting) == WaitState(frozenset({3, 5}), True, (requests[3], requests[5]))
    assert next(waiting) == WaitState(frozenset({3, 5}), False, (requests[3], requests[5]))
    requests[3].complete = True
    assert next(waiting) == WaitState(frozenset({5}), True, (requests[5],))
    assert next(waiting) == WaitState(frozenset({5}), False, (requests[5],))
    requests[5].complete = True
    assert result_of(waiting) is None


def test_ranks_of_a_communicator_become_those_of_all_processes():
    def operation():
        yield WaitState(frozenset({0, 2}), progressed=True)
        return "done"

    renamed = in_world_ranks(operation(), ranks=[4, 5, 8])
    assert next(renamed) == WaitState(frozenset({4, 8}), progressed=True)
    assert result_of(renamed) == "done"


def test_at_most_a_window_of_operations_runs_ahead_of_a_late_one():
    late, started = Request(), []

    def operation(number):
        started.append(number)
        if number == 0:
            yield from wait_for({1: late})
        return number

    interleaved = interleave(map(operation, range(3 * WINDOW)))
    for _ in range(4 * WINDOW):
        assert next(interleaved).ranks == {1}
    assert started == list(range(WINDOW))
    late.complete = True
    states = []

    def remaining():
        states.append((yield from interleaved))

    assert all(not state.ranks for state in remaining())
    assert states == [sum(range(3 * WINDOW))]


@pytest.mark.parametrize("unnamed", [False, True])
def test_operations_are_polled_if_one_waits_for_what_is_no_request(unnamed):
    request = Request()

    def other():
        yield WaitState(frozenset({2}), requests=() if unnamed else (request,))

    state = next(interleave([wait_for({1: request}), other()]))
    assert state.ranks == {1, 2}
    assert state.requests == (() if unnamed else (request, request))
