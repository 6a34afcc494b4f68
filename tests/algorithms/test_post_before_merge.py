"""Where a post and a merge fall on one step, a node sends its parameters from before the merge."""

import golden_family
import numpy as np
import pytest
from virtual_nodes import LR, assert_near, random_run, simulate

import jdaso

NODES = 4
NODE_AXIS = jdaso.axis_exchange("node", NODES)
in_both_ways = pytest.mark.parametrize("in_place", [False, True], ids=["update", "apply_gradients"])


def matrix_form(x, gradient, tau, d, xi, steps):
    """dasgd Eq. 7 in matrix form: column i of X is x_i, and J averages the columns.

    ``X_{k+1} = xi (X_k - eta G_k) + (1 - xi) (X_{k-d} - eta G_{k-d}) J`` if ``(k + 1 - d) mod tau``
    is 0, otherwise ``X_k - eta G_k``.
    """
    columns = x.T
    average = np.full((len(x), len(x)), 1 / len(x))
    stepped, history = [], []
    for k in range(steps):
        stepped.append(columns - LR * gradient(columns))
        columns = stepped[k]
        if k + 1 > d and (k + 1 - d) % tau == 0:
            columns = xi * stepped[k] + (1 - xi) * stepped[k - d] @ average
        history.append(columns.T)
    return np.array(history)


@in_both_ways
@pytest.mark.parametrize(("tau", "d"), [(4, 4), (1, 1), (4, 3)])
def test_dasgd_follows_equation_7_on_a_quadratic_also_where_the_delay_is_the_period(
    tau, d, in_place
):
    x, inputs = random_run(0, 40, NODES)
    optimum = inputs[0].T  # of each node its own

    expected = matrix_form(x, lambda c: 8 * (c - optimum), tau, d, 0.25, 40)
    params, _ = simulate(
        jdaso.dasgd(NODE_AXIS, tau, d),
        x,
        np.broadcast_to(inputs[0], inputs.shape),
        gradient=lambda x, optimum: 8 * (x - optimum),
        in_place=in_place,
    )
    assert_near(params, expected)


ALGORITHMS = {
    "dasgd": (
        lambda wire: jdaso.dasgd(NODE_AXIS, 4, 4, xi=0.25, wire=wire),
        lambda x, u: golden_family.dasgd(x, u, 4, 4, 0.25),
    ),
    "dasgd in fragments": (
        lambda wire: jdaso.dasgd(NODE_AXIS, 4, 4, xi=0.25, wire=wire, fragments=2),
        lambda x, u: golden_family.in_fragments(golden_family.dasgd, x, u, 4, 2, delay=4, xi=0.25),
    ),
    "easgd": (
        lambda wire: jdaso.easgd(NODE_AXIS, 4, alpha=0.2, wire=wire),
        lambda x, u: golden_family.easgd(x, u, 4, 0.2, 4),
    ),
    "diloco": (
        lambda wire: jdaso.diloco(
            NODE_AXIS, 4, jdaso.algorithms.diloco.NESTEROV, 4, 0.5, warmup=0, wire=wire
        ),
        lambda x, u: golden_family.diloco(x, u, 4, 0.7, 0.9, delay=4, mix=0.5),
    ),
}
# Of the distance that the nodes move. Numbers of 8 bits are exact to 1/254 of the largest of their
# block, those of 4 bits to 1/12, and what is rounded away arrives an exchange later.
ASTRAY = {"float32": 1e-5, "int8": 0.01, "float4": 0.1}


@in_both_ways
@pytest.mark.parametrize("wire", ASTRAY)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_wire_sends_what_was_there_before_the_merge(name, wire, in_place):
    build, recursion = ALGORITHMS[name]
    x, grads = random_run(1, 36, NODES, size=128, alike=True)
    grads += np.random.default_rng(2).normal(size=(1, NODES, 128))  # each node moves elsewhere
    params, state = simulate(build(wire), x, grads, leaves=2, in_place=in_place)
    expected = recursion(x, golden_family.sgd(grads, LR)).params
    moved = np.linalg.norm(expected - x, axis=(1, 2))
    error = np.linalg.norm(params - expected, axis=(1, 2))
    assert (error <= ASTRAY[wire] * moved).all(), (error / moved).max()
    for fragment in state.fragments:
        for anchor in fragment.feedback.anchor if fragment.feedback else ():
            assert (anchor == anchor[:, :1]).all()  # the same on all nodes


def test_a_blocking_mean_at_the_end_of_an_epoch_is_that_of_the_parameters_before_the_merge():
    x, grads = random_run(3, 12, NODES)
    schedule = jdaso.cycling(period=4, delay=3, warmup=0, cooldown=0, total=1000, epoch=6)
    averaging = jdaso.daso(NODE_AXIS, schedule=schedule, blocking_wire="float32")
    params, state = simulate(averaging, x, grads)
    assert (state.plan.delay[5] == 0).all()
    own = x - LR * np.cumsum(grads[:6], axis=0)[-1]  # an exchange of step 3 is still in flight
    np.testing.assert_allclose(params[5], np.broadcast_to(own.mean(0), own.shape), atol=1e-6)
    assert not state.fragments[0].posted[5].any()


def test_a_change_is_not_added_besides_a_blocking_mean():
    """The delta rule's change is relative to older parameters, and would leave the nodes apart."""
    x, grads = random_run(4, 12, NODES)
    schedule = jdaso.cycling(period=4, delay=3, warmup=0, cooldown=0, total=1000, epoch=6)
    averaging = jdaso.local_sgd(NODE_AXIS, schedule=schedule, merge="delta")
    params, _ = simulate(averaging, x, grads)
    own = x - LR * np.cumsum(grads[:6], axis=0)[-1]
    np.testing.assert_allclose(params[5], np.broadcast_to(own.mean(0), own.shape), atol=1e-6)


@pytest.mark.parametrize("period", [1, 2, 4])
def test_the_delta_rule_brings_nodes_together_where_the_delay_is_the_period(period):
    """It merges first: with post before merge, a difference would be removed twice, for ever."""
    x, grads = random_run(6, 12, NODES)
    averaging = jdaso.local_sgd(NODE_AXIS, period, period, merge="delta")
    params, _ = simulate(averaging, x, np.zeros_like(grads))
    for after in params[2 * period - 1 :]:
        np.testing.assert_allclose(after, np.broadcast_to(x.mean(0), x.shape), atol=1e-6)


def test_a_node_that_is_out_at_a_step_of_both_takes_the_mean_and_contributes_to_the_next():
    x, grads = random_run(5, 24, NODES)
    grads[11, 1] = np.nan  # the third exchange is posted after this step, and the second merged
    params, state = simulate(jdaso.dasgd(NODE_AXIS, 4, 4), x, grads)
    expected = golden_family.dasgd(x, golden_family.sgd(grads, LR), 4, 4, 0.25)
    assert_near(params, expected.params)
    assert state.left_out[-1].tolist() == expected.left_out.tolist() == [0, 1, 0, 0]
