"""Exchanges can be given back, and an error says so when MPI has no more communicators."""

import pytest
from launch import mpiexec, passes


def test_closed_exchanges_give_threads_and_communicators_back():
    passes(mpiexec(2, "closing.py", "closed"))


def test_too_many_open_exchanges_are_an_error_that_says_what_has_run_out():
    ended = mpiexec(2, "closing.py", "open")
    assert ended.returncode != 0
    assert "MPI cannot create another communicator" in ended.output
    assert "call exchange.close()" in ended.output


@pytest.mark.parametrize("what", ["an exchange", "a center"])
def test_what_only_one_process_creates_is_an_error(what):
    ended = mpiexec(2, "closing.py", "one alone", what)
    assert ended.returncode != 0
    barrier = f"the barrier for the creation of {what}"
    assert f"has been waiting for all other processes at {barrier}, for 1 s: rank 1" in ended.output
    assert f"has waited 2 s for all other processes at {barrier}: rank 1" in ended.output


@pytest.mark.parametrize("where", ["other order", "at exit"])
def test_exchanges_that_are_closed_in_different_orders_are_an_error(where):
    ended = mpiexec(2, "closing.py", where)
    assert ended.returncode != 0
    assert "the closing of an exchange, by rank" in ended.output
    assert "All nodes must make the same calls in the same order" in ended.output


@pytest.mark.parametrize("devices", [1, 2])
def test_steps_that_nobody_awaits_are_executed_before_the_end(devices):
    ended = mpiexec(2, "closing.py", "steps not awaited", devices)
    passes(ended)
    assert "failed" not in ended.output


@pytest.mark.parametrize("devices", [1, 2])
def test_closed_exchanges_leave_no_compiled_programs(devices):
    passes(mpiexec(2, "closing.py", "programs", devices))


def test_a_program_may_finalize_mpi_with_exchanges_open():
    ended = mpiexec(2, "closing.py", "finalized")
    passes(ended)
    assert ended.output.count("came to its end") == 2
    assert "failed" not in ended.output


@pytest.mark.parametrize(("nodes", "devices"), [(2, 1), (3, 1), (2, 2)])
def test_nodes_leave_a_training_at_different_steps_and_train_again(nodes, devices):
    passes(mpiexec(nodes, "abandon.py", "sweep", devices))


def test_a_node_that_is_left_alone_is_told_so_and_does_not_train_on_for_ever():
    ended = mpiexec(2, "abandon.py", "alone", 1)
    assert ended.returncode != 0
    assert "has abandoned the exchanges, and exchange 2 averages nothing" in ended.output
    assert "has abandoned the exchanges, and exchange 11 averages nothing" in ended.output
    assert "Diverged" in ended.output


def test_a_consensus_with_a_node_that_has_left_is_an_error():
    ended = mpiexec(2, "abandon.py", "consensus", 1)
    assert ended.returncode != 0
    assert "called by rank 1" in ended.output
    assert "cannot complete: rank 0" in ended.output


@pytest.mark.parametrize(
    ("how", "lost"),
    [("lost", 2), ("closed", 2), ("saved too early", 1), ("saved", 0), ("drained and restored", 0)],
)
def test_exchanges_that_nobody_merges_or_saves_are_named_at_the_end(how, lost):
    ended = mpiexec(2, "lost.py", how)
    passes(ended)
    count = "1 exchange is" if lost == 1 else f"{lost} exchanges are"
    said = f"{count} still in flight at the end, posted after step 11, and will never be merged"
    assert ended.output.count(said) == (lost > 0), ended.output
    assert ended.output.count("in flight at the end") == (lost > 0), ended.output
