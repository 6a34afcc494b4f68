"""Every asynchronous method in turns against NumPy recursions written from the paper."""

import functools

import golden_center
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from virtual_nodes import LR, assert_near, both_ways

import jdaso
from jdaso.center import init_cluster, random_order, read_center, round_robin, take_turns
from jdaso.center.simulation import center_of

SIZE, TURNS, WORKERS = 60, 90, 3
CURVATURE = np.linspace(0.5, 8.0, SIZE).astype(np.float32)
ORDERS = {"round robin": round_robin(WORKERS, TURNS), "random": random_order(WORKERS, TURNS, 1)}


def two_leaves(vector):
    """Two leaves, of different lengths."""
    return [vector[..., :24], vector[..., 24:]]


def joined(leaves):
    return np.concatenate([np.asarray(x) for x in leaves], axis=-1)


def random_run(seed=0):
    """Start and noise as float32 numbers in float64, and the gradient of each turn."""
    rng = np.random.default_rng(seed)
    start = rng.normal(size=SIZE).astype(np.float32).astype(np.float64)
    noise = rng.normal(size=(TURNS, SIZE)).astype(np.float32).astype(np.float64)
    return start, noise, lambda turn, x: CURVATURE * x - noise[turn]


def run(tx, start, noise, order, workers=WORKERS, in_place=False):
    """The center after every turn, as one CenterState with a leading axis, and the cluster."""

    def step(params, opt_state, noise):
        # A quadratic, whose gradient depends on where it is taken.
        grads = [k * x - n for k, x, n in zip(two_leaves(CURVATURE), params, noise, strict=True)]
        if in_place:
            params, opt_state = jdaso.apply_gradients(tx, grads, opt_state, params)
            return params, opt_state, center_of(opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, center_of(opt_state)

    @jax.jit
    def all_turns(start, noise):
        return take_turns(step, init_cluster(tx, start, workers), order, noise)

    start, noise = (two_leaves(jnp.asarray(x, jnp.float32)) for x in (start, noise))
    cluster, seen = all_turns(start, noise)
    return seen, cluster


@both_ways
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("period", "delay"), [(1, 0), (1, 1), (4, 0), (4, 2), (4, 4)])
def test_easgd_follows_algorithm_1(order, period, delay, in_place):
    start, noise, gradient = random_run()
    averaging = jdaso.center.async_easgd(
        jdaso.center.simulated_center(WORKERS), period, alpha=0.3, delay=delay
    )
    tx = jdaso.chain(optax.sgd(LR), averaging)
    seen, cluster = run(tx, start, noise, ORDERS[order], in_place=in_place)
    expected = golden_center.eamsgd(start, gradient, ORDERS[order], period, 0.3, LR, delay=delay)
    assert_near(joined(seen.center), expected.centers)
    assert_near(joined(cluster.params), expected.params)


@both_ways
@pytest.mark.parametrize("delay", [0, 3])
def test_eamsgd_follows_algorithm_2(delay, in_place):
    start, noise, gradient = random_run()
    tx = jdaso.center.async_eamsgd(
        jdaso.center.simulated_center(WORKERS), 4, LR, 0.9, alpha=0.3, delay=delay
    )
    seen, cluster = run(tx, start, noise, ORDERS["random"], in_place=in_place)
    expected = golden_center.eamsgd(
        start, gradient, ORDERS["random"], 4, 0.3, LR, momentum=0.9, delay=delay
    )
    assert_near(joined(seen.center), expected.centers)
    own = jax.vmap(jdaso.eamsgd_eval_params)(cluster.opt_state, cluster.params)
    assert_near(joined(own), expected.params)


def test_alpha_is_beta_over_workers_at_every_exchange():
    start, noise, gradient = random_run()
    center = jdaso.center.simulated_center
    expected = golden_center.eamsgd(start, gradient, ORDERS["random"], 4, 0.9 / 3, LR)
    for tx in (
        jdaso.chain(optax.sgd(LR), jdaso.center.async_easgd(center(WORKERS), 4)),
        jdaso.center.async_eamsgd(center(WORKERS), 4, LR, 0.0),
    ):
        seen, _ = run(tx, start, noise, ORDERS["random"])
        assert_near(joined(seen.center), expected.centers)


METHODS = {
    "downpour": (jdaso.center.downpour, None),
    "adownpour": (jdaso.center.adownpour, lambda t: 1 / (t + 1)),
    "mvadownpour": (functools.partial(jdaso.center.mvadownpour, moving_rate=0.01), lambda t: 0.01),
}


@both_ways
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("method", "period", "delay"),
    [
        ("downpour", 1, 0),
        ("downpour", 4, 3),
        ("downpour", 4, 4),
        ("adownpour", 4, 0),
        ("mvadownpour", 1, 0),
        ("mvadownpour", 4, 1),
    ],
)
def test_downpour_follows_algorithm_3_and_its_averages_section_5(
    order, method, period, delay, in_place
):
    start, noise, gradient = random_run()
    make, rate = METHODS[method]
    averaging = make(jdaso.center.simulated_center(WORKERS), period, delay=delay)
    tx = jdaso.chain(optax.sgd(LR), averaging)
    seen, cluster = run(tx, start, noise, ORDERS[order], in_place=in_place)
    expected = golden_center.downpour(
        start, gradient, ORDERS[order], period, LR, delay, **({"rate": rate} if rate else {})
    )
    assert_near(joined(seen.center), expected.centers)
    assert_near(joined(cluster.params), expected.params)
    if rate:
        assert_near(joined(seen.average), expected.averages)
    assert int(cluster.center.clock) == sum(
        (np.cumsum(ORDERS[order] == w)[-1]) // period for w in range(WORKERS)
    )


@both_ways
@pytest.mark.parametrize("order", ORDERS)
def test_mdownpour_follows_algorithms_4_and_5(order, in_place):
    start, noise, gradient = random_run()
    tx = jdaso.center.mdownpour(jdaso.center.simulated_center(WORKERS), LR, 0.9)
    seen, cluster = run(tx, start, noise, ORDERS[order], in_place=in_place)
    expected = golden_center.mdownpour(start, gradient, ORDERS[order], LR, 0.9)
    # The velocity is a sum of about ten gradients, each with its own rounding error.
    assert_near(joined(seen.center), expected.centers, 5e-6)
    assert_near(joined(cluster.params), expected.params, 5e-6)


def test_apply_gradients_of_mdownpour_sends_the_gradient_alone():
    """x = 1, g = 3: v = -0.1 * 3 and c = 1 + 0.8 v = 0.76. With x + g it would be 0.68."""
    tx = jdaso.center.mdownpour(jdaso.center.simulated_center(1), 0.1, 0.8)
    params = jnp.float32(1)
    params, state = jdaso.apply_gradients(tx, jnp.float32(3), tx.init(params), params)
    assert float(params) == pytest.approx(0.76)
    assert float(center_of(state).center[0]) == pytest.approx(0.76)


def test_one_worker_of_downpour_is_the_optimizer_alone():
    """Also its averages: ASGD and MVASGD, which optax calls an incremental update."""
    start, noise, _ = random_run()
    order = round_robin(1, TURNS)
    alone = optax.sgd(LR, momentum=0.9)

    def train(rate):
        def step(carry, given):
            params, state, z = carry
            t, noise = given
            grads = [
                k * x - n for k, x, n in zip(two_leaves(CURVATURE), params, noise, strict=True)
            ]
            updates, state = alone.update(grads, state, params)
            z = optax.incremental_update(params, z, rate(t))
            return (optax.apply_updates(params, updates), state, z), None

        first = two_leaves(jnp.asarray(start, jnp.float32))
        given = jnp.arange(TURNS), two_leaves(jnp.asarray(noise, jnp.float32))
        return jax.lax.scan(step, (first, alone.init(first), first), given)[0]

    for make, rate in [
        (jdaso.center.adownpour, lambda t: 1 / (t + 1)),
        (jdaso.center.mvadownpour, lambda t: 0.001),
    ]:
        tx = optax.chain(alone, make(jdaso.center.simulated_center(1), period=1))
        _, cluster = run(tx, start, noise, order, workers=1)
        params, _, z = train(rate)
        assert_near(joined(cluster.center.center)[None], joined(params)[None])
        assert_near(joined(cluster.center.average)[None], joined(z)[None])


# A turn of worker 1 at which it sends. At the turns between, a reply replaces its parameters.
@pytest.mark.parametrize(
    ("make", "turn"), [(jdaso.center.async_easgd, 37), (jdaso.center.downpour, 40)]
)
def test_a_worker_with_nonfinite_parameters_starts_again_from_the_center(make, turn):
    start, noise, _ = random_run()
    noise[turn, 3] = np.nan
    tx = optax.chain(optax.sgd(LR), make(jdaso.center.simulated_center(WORKERS), 2, delay=1))
    seen, cluster = run(tx, start, noise, ORDERS["round robin"])
    assert np.isfinite(joined(seen.center)).all()
    assert np.isfinite(joined(cluster.params)).all()
    state = jdaso.core.averaging_state(cluster.opt_state)
    assert state.skipped.tolist() == [0, 1, 0]
    assert state.left_out.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("make", "turn"), [(jdaso.center.async_easgd, 2), (jdaso.center.downpour, 1)]
)
def test_a_worker_that_was_left_out_adopts_the_reply(make, turn):
    """Its gradient is not finite at the turn at which it sends, and 0 at the next one."""
    start, noise, gradient = random_run()
    tx = optax.chain(optax.sgd(LR), make(jdaso.center.simulated_center(1), 2, delay=1))
    sent = start
    for before in range(turn):
        sent = sent - LR * gradient(before, sent)
    noise[turn], noise[turn + 1] = np.nan, CURVATURE * sent
    _, cluster = run(tx, start, noise[: turn + 2], round_robin(1, turn + 2), workers=1)
    np.testing.assert_allclose(joined(cluster.params)[0], start, atol=1e-6)


MAKE = {
    "async_easgd": lambda center, **how: jdaso.center.async_easgd(center, 1, **how),
    "async_eamsgd": lambda center, **how: jdaso.center.async_eamsgd(center, 1, LR, 0.9, **how),
    "downpour": lambda center, **how: jdaso.center.downpour(center, 1, **how),
    "adownpour": lambda center, **how: jdaso.center.adownpour(center, 1, **how),
    "mvadownpour": lambda center, **how: jdaso.center.mvadownpour(center, 1, **how),
    "mdownpour": lambda center, **how: jdaso.center.mdownpour(center, 0.1, 0.9, **how),
}


@pytest.mark.parametrize("method", MAKE)
def test_gradients_that_are_not_finite_are_an_error_where_that_is_asked_for(method):
    center = jdaso.center.simulated_center(1)
    with pytest.raises(ValueError, match=r"nonfinite must be one of .*, got 'stop'"):
        MAKE[method](center, nonfinite="stop")
    tx = MAKE[method](center, nonfinite="raise")
    params = jnp.ones(2)
    with pytest.raises(Exception, match=f"{method}: updates or parameters are not finite at step"):
        jax.block_until_ready(tx.update(jnp.full(2, jnp.nan), tx.init(params), params))


def test_drain_applies_the_force_in_flight():
    """The worker moves back by as much as the center moved."""
    start, noise, _ = random_run()
    averaging = jdaso.center.async_easgd(jdaso.center.simulated_center(1), 4, alpha=0.3, delay=4)
    tx = optax.chain(optax.sgd(LR), averaging)
    seen, cluster = run(tx, start, noise[:5], round_robin(1, 5), workers=1)
    params, state = jax.vmap(lambda s, p: jdaso.drain(averaging, s, p))(
        cluster.opt_state, cluster.params
    )
    moved = joined(seen.center)[4] - start
    assert np.abs(moved).max() > 0.01
    np.testing.assert_allclose(joined(params)[0], joined(cluster.params)[0] - moved, atol=1e-6)
    assert not jdaso.core.averaging_state(state).fragments[0].posted.any()


def test_rounding_of_bfloat16_parameters_does_not_move_the_center():
    averaging = jdaso.center.downpour(jdaso.center.simulated_center(2), period=1)

    def step(params, opt_state, update):
        updates, opt_state = averaging.update(update, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, None

    cluster = init_cluster(averaging, jnp.bfloat16(256), 2)
    cluster = cluster._replace(center=cluster.center._replace(center=[jnp.float32(256.75)]))
    # The nearest numbers of bfloat16 are 256 and 258.
    cluster, _ = take_turns(step, cluster, round_robin(2, 6), jnp.zeros(6, jnp.bfloat16))
    assert float(cluster.center.center[0]) == 256.75
    assert cluster.params.tolist() == [256.0, 256.0]


def test_the_center_is_read_as_the_parameters_tree():
    params = {"w": jnp.ones((2, 3), jnp.bfloat16), "n": jnp.int32(7), "b": jnp.zeros(2)}
    cluster = init_cluster(jdaso.center.adownpour(jdaso.center.simulated_center(2), 1), params, 2)
    seen = read_center(cluster)
    for tree in (seen.center, seen.average):
        assert jax.tree.map(jnp.shape, tree) == jax.tree.map(jnp.shape, params)
        assert tree["w"].dtype == jnp.float32
        assert tree["n"] == 7
    assert seen.velocity == ()


def turns(center, order, batches=None):
    """One step for each of the workers that the order names."""
    cluster = init_cluster(jdaso.center.downpour(center, 1), jnp.ones(2), 2)
    return take_turns(lambda p, s, _: (p, s, None), cluster, order, batches)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda c: jdaso.center.async_easgd(c, 0),
            "period must be an integer >= 1, got 0",
        ),
        (lambda c: jdaso.center.downpour(c, 2.5), "period must be an integer"),
        (lambda c: jdaso.center.downpour(c, 2, delay=3), "delay must not exceed period"),
        (
            lambda c: jdaso.center.async_easgd(c, 4, alpha=0.0),
            "alpha must be positive and finite, got 0",
        ),
        (lambda c: jdaso.center.async_easgd(c, 4, alpha=1.0), r"alpha must be in \[0, 1\), got 1"),
        (lambda c: jdaso.center.async_easgd(c, 4, beta=-1), "beta must be positive"),
        (lambda c: jdaso.center.async_eamsgd(c, 4, 0.1, 1.0), r"momentum must be in \[0, 1\)"),
        (lambda c: jdaso.center.mvadownpour(c, 4, 1.5), r"moving_rate must be in \[0, 1\]"),
        (lambda c: jdaso.center.mdownpour(c, 0.1, 0.0), "momentum must be positive"),
        (lambda c: jdaso.center.mdownpour(c, -0.1, 0.5), "learning_rate must be positive"),
        (
            lambda c: jdaso.center.admm(jdaso.center.Center(c.num_workers), 0.1, 1.0),
            "needs a simulated_center",
        ),
        (lambda c: jdaso.center.admm(c, 0.1, 0), "rho must be positive"),
        (lambda c: jdaso.center.simulated_center(0), "num_workers must be an integer"),
        (lambda c: c.read(None), r"read cluster\.center"),
        (lambda c: init_cluster(optax.sgd(0.1), jnp.ones(2), 2), "holds 0 states"),
        (
            lambda c: jdaso.center.downpour(jdaso.single_exchange(), 2),
            r"needs a center, got \w*Exchange",
        ),
        (lambda c: jdaso.center.async_easgd(jdaso.single_exchange(), 2), "needs a center"),
        (
            lambda c: jdaso.center.async_eamsgd(c, 4, 0.0, 0.9),
            "learning_rate must be positive and finite, got 0.0",
        ),
        (lambda c: turns(c, np.array([0, 1, 2])), "from 0 to 1, .* got int64 from 0 to 2"),
        (lambda c: turns(c, np.array([0.0, 1.0])), "integers"),
        (lambda c: turns(c, np.array([0, 1]), jnp.zeros(3)), r"axis of 2 turns.* shape \(3,\)"),
        (lambda c: turns(c, np.array([0, 1]), (x for x in "ab")), "turns, .* got generator"),
        (lambda c: c.join(None, saved=1), r"read cluster\.center"),
        (
            lambda c: init_cluster(jdaso.center.downpour(c, 2), jnp.ones(2), 3),
            r"num_workers=3, but simulated_center was made for 2",
        ),
    ],
)
def test_bad_input_is_named(make, match):
    with pytest.raises(ValueError, match=match):
        make(jdaso.center.simulated_center(2))
