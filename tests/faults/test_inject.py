"""Faults happen once, in their process, at the first opportunity from their step on."""

import os
import signal
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdaso
from jdaso import faults as module
from jdaso.faults import Fault, FaultyCheckpoints, Kind, faulty, faulty_gradients

PERIOD, DELAY, STEPS = 3, 2, 12  # posted after steps 2, 5, 8, 11; collected after 4, 7, 10


@pytest.fixture
def happened(monkeypatch):
    """Records signals and sleeps instead of applying them to this process."""
    events = []

    def kill(pid, number):
        assert pid == os.getpid()
        events.append(signal.Signals(number).name)

    monkeypatch.setattr(module, "os", SimpleNamespace(getpid=os.getpid, kill=kill))
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=events.append))
    return events


def train(exchange, happened):
    """Trains; returns the events with their steps, and the parameters."""
    tx = optax.chain(optax.sgd(0.1), jdaso.dasgd(exchange, PERIOD, DELAY))
    params = jnp.ones(3)
    state = tx.init(params)
    update = jax.jit(tx.update)
    at = []
    for step in range(STEPS):
        before = len(happened)
        updates, state = update(jnp.ones(3), state, params)
        params = jax.block_until_ready(optax.apply_updates(params, updates))
        at += [(event, step) for event in happened[before:]]
    return at, params


@pytest.mark.parametrize(
    ("kind", "step", "expected"),
    [
        (Kind.FAIL_BEFORE_POST, 5, [("SIGKILL", 5)]),
        (Kind.FAIL_BEFORE_POST, 6, [("SIGKILL", 8)]),
        (Kind.FAIL_IN_FLIGHT, 3, [("SIGKILL", 5)]),
        (Kind.FAIL_IN_FINISH, 3, [("SIGKILL", 7)]),
        (Kind.STUCK, 0, [("SIGSTOP", 2)]),
        (Kind.SIGTERM, 9, [("SIGTERM", 11)]),
        (Kind.SLOW_POST, 4, [(7.5, 5)]),
        (Kind.SLOW_POST, STEPS, []),
    ],
)
def test_fault_happens_once_at_its_step(kind, step, expected, happened, caplog):
    faults = [Fault(kind, 0, step, seconds=7.5), Fault(Kind.STUCK, 1, 0)]
    exchange = faulty(jdaso.single_exchange(), faults, rank=0)
    at, params = train(exchange, happened)
    assert at == expected
    messages = [f"fault: rank 0, step {s}: {kind.value}" for _, s in expected]
    if kind is not Kind.FAIL_IN_FINISH:  # logged at the step that posts
        assert caplog.messages == messages
    np.testing.assert_array_equal(params, train(jdaso.single_exchange(), [])[1])


def test_several_faults_of_one_process(happened):
    faults = [Fault(Kind.SLOW_POST, 0, step, 1.5) for step in (2, 6)] + [Fault(Kind.SIGTERM, 0, 6)]
    at, _ = train(faulty(jdaso.single_exchange(), faults, rank=0), happened)
    assert at == [(1.5, 2), (1.5, 8), ("SIGTERM", 8)]


def test_link_faults_call_the_function_of_the_caller(happened):
    cut = []
    fault = Fault(Kind.LINK_DOWN, 0, 3, seconds=2.0)
    train(faulty(jdaso.single_exchange(), [fault], 0, link=cut.append), happened)
    assert cut == [fault]
    with pytest.raises(ValueError, match="require link="):
        faulty(jdaso.single_exchange(), [fault], 0)


def test_consensus_has_no_faults(happened):
    exchange = faulty(jdaso.single_exchange(), [Fault(Kind.STUCK, 0, 0)], 0)
    np.testing.assert_array_equal(jdaso.consensus(exchange, jnp.ones(2)), 1.0)
    assert happened == []


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (Fault("STUCK", 0, 0), "kind"),
        (Fault(Kind.STUCK, -1, 0), "rank"),
        (Fault(Kind.STUCK, 0, 1.5), "step"),
        (Fault(Kind.SLOW_POST, 0, 0, float("nan")), "seconds"),
    ],
)
def test_invalid_fault_is_an_error_in_every_process(fault, named):
    for make in (faulty, lambda _, *rest: faulty_gradients(*rest)):
        with pytest.raises(ValueError, match=f"^{named} must be"):
            make(jdaso.single_exchange(), [fault], 7)


def test_gradients_are_not_finite_in_one_process_only():
    fault = Fault(Kind.NAN, rank=1, step=2)
    gradients = {"w": jnp.ones(2), "b": jnp.ones((), jnp.bfloat16)}
    for rank in range(2):
        tx = faulty_gradients([fault], rank)
        state = tx.init(gradients)
        for step in range(4):
            found, state = jax.jit(tx.update)(gradients, state)
            finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(found))
            assert finite == ((rank, step) != (1, 2))
            assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(
                lambda x: x.dtype, gradients
            )


def test_killed_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    topology, exchange = jdaso.discover_topology(), jdaso.single_exchange()
    inner = jdaso.checkpoint.Checkpoints(tmp_path, topology, exchange)
    checkpoints = FaultyCheckpoints(inner, [Fault(Kind.KILL_IN_CHECKPOINT, 0, 2)], 0)
    seen = []

    def look():
        seen.append([path.name for path in tmp_path.glob("*/*")])

    monkeypatch.setattr(module, "_die", look)
    for step in (1, 2, 3):
        checkpoints.save(step, {"x": np.random.default_rng(step).normal(size=1000)})
    checkpoints.close()
    assert len(seen) == 1
    assert any(name.startswith("node_0_of_1") for name in seen[0])
    assert checkpoints.steps() == [1, 2, 3]
