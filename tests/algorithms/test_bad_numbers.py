"""Non-finite numbers on one node, on all nodes and in sums, for every algorithm.

A new algorithm is one line of ALGORITHMS.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdaso

NODES, STEPS, RATE, BAD = 3, 16, 0.1, 1
OTHERS = np.arange(NODES) != BAD
LARGE = 2e38  # finite, but the sum of two of them is not
PHASES = {"period": 2, "warmup": 3, "cooldown": 3, "total": STEPS, "epoch": 5, "patience": 0}


def sgd():
    """Without momentum, so that a non-finite gradient is forgotten after its step."""
    return optax.sgd(RATE)


# name -> exchange -> a whole optimizer, none of whose numbers depends on how many nodes there are.
ALGORITHMS = {
    "daso": lambda x: jdaso.chain(sgd(), jdaso.daso(x, 4, 2)),
    "dasgd": lambda x: jdaso.chain(sgd(), jdaso.dasgd(x, 4, 2)),
    "dasgd fragments": lambda x: jdaso.chain(sgd(), jdaso.dasgd(x, 4, 3, fragments=2)),
    "local_sgd": lambda x: jdaso.chain(sgd(), jdaso.local_sgd(x, 4)),
    "easgd": lambda x: jdaso.chain(sgd(), jdaso.easgd(x, alpha=0.2, schedule=jdaso.constant(4, 2))),
    "easgd blocking": lambda x: jdaso.chain(
        sgd(), jdaso.easgd(x, alpha=0.2, schedule=jdaso.constant(4))
    ),
    "eamsgd": lambda x: jdaso.eamsgd(x, None, RATE, 0.9, alpha=0.2, schedule=jdaso.constant(4, 3)),
    "diloco": lambda x: jdaso.chain(sgd(), jdaso.diloco(x, 4)),
    "streaming diloco": lambda x: jdaso.chain(
        sgd(), jdaso.diloco(x, 4, delay=3, mix=0.5, fragments=2, warmup=1)
    ),
    "moments average": lambda x: jdaso.chain(
        optax.sgd(RATE, momentum=0.9), jdaso.dasgd(x, 4, 2), moments="average"
    ),
    "allreduce_gradients": lambda x: jdaso.chain(sgd(), jdaso.allreduce_gradients(x, "float32")),
}
# Here a node merges a mean and posts it in the same step, so that it contributes again.
AT_ONCE = {
    "daso cycling": lambda x: jdaso.chain(
        sgd(), jdaso.daso(x, schedule=jdaso.cycling(**PHASES), blocking_wire="float32")
    ),
    "easgd whole period": lambda x: jdaso.chain(sgd(), jdaso.easgd(x, 4, alpha=0.2)),
    "eamsgd whole period": lambda x: jdaso.eamsgd(x, 4, RATE, 0.9, alpha=0.2),
}
# Here nodes keep rounding errors of the sums, and the owner of a shard depends on P.
COARSE = {
    "dasgd int8": lambda x: jdaso.chain(sgd(), jdaso.dasgd(x, 4, 2, wire="int8")),
    "dasgd float4": lambda x: jdaso.chain(sgd(), jdaso.dasgd(x, 4, 2, wire="float4")),
    "allreduce_gradients int8": lambda x: jdaso.chain(sgd(), jdaso.allreduce_gradients(x, "int8")),
}
ALL = ALGORITHMS | AT_ONCE | COARSE
PARAMS = {"bias": jnp.linspace(-1, 1, 7), "kernel": jnp.linspace(-2, 3, 15).reshape(3, 5)}


def gradients(nodes=NODES):
    """Gradients of every step and node, (steps, nodes, ...)."""
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.normal(size=(STEPS, nodes, *x.shape)), jnp.float32)
        for name, x in PARAMS.items()
    }


def at(step, grads):
    return jax.tree.map(lambda g: g[step], grads)


@functools.cache
def stepper(build, nodes, apply_gradients=jdaso.apply_gradients):
    """The optimizer of a number of nodes, and a step of all of them."""
    tx = build(jdaso.axis_exchange("node", nodes))

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    @functools.partial(jax.vmap, axis_name="node")
    def step(params, state, grads):
        return apply_gradients(tx, grads, state, params, value=1.0)

    return tx, step


def run(build, grads, params=PARAMS, damage=None, **options):
    """Parameters of all nodes after every step, and their states after the last.

    ``damage(step, params)`` is what happens to parameters before a step.
    """
    nodes = jax.tree.leaves(grads)[0].shape[1]
    tx, step = stepper(build, nodes, **options)
    params = jax.tree.map(lambda x: jnp.stack([x] * nodes), params)
    # Where the numbers are traced, init does not refuse any.
    state, history = jax.jit(jax.vmap(tx.init))(params), []
    for t in range(STEPS):
        if damage is not None:
            params = damage(t, params)
        params, state = step(params, state, at(t, grads))
        history.append(params)
    return jax.tree.map(lambda *x: np.stack(x), *history), state


def shared(state):
    """The states of the merges (centers and anchors), which are equal on all nodes."""
    return [fragment.merge for fragment in jdaso.core.averaging_state(state).fragments]


def assert_same(actual, expected, **tolerance):
    """Checks equality up to a few roundings, because XLA fuses the arithmetic differently."""
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-6}
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), actual, expected)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_node_that_is_never_finite_does_not_affect_the_others(name):
    grads = gradients()
    without = jax.tree.map(lambda g: g[:, OTHERS], grads)
    bad = jax.tree.map(lambda g: g.at[:, BAD].set(jnp.nan), grads)
    params, state = run(ALGORITHMS[name], bad)
    expected, expected_state = run(ALGORITHMS[name], without)
    assert_same(jax.tree.map(lambda x: x[:, OTHERS], params), expected)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
    for mine, theirs in zip(shared(state), shared(expected_state), strict=True):
        assert_same(mine, jax.tree.map(lambda x: np.stack([x[0]] * NODES), theirs))
    seen = jdaso.metrics(state)
    assert seen.step.tolist() == [STEPS] * NODES
    np.testing.assert_array_equal(seen.skipped, np.where(OTHERS, 0, STEPS))
    np.testing.assert_array_equal(seen.left_out, np.where(OTHERS, 0, seen.exchanges))
    assert seen.exchanges.min() > 0


@pytest.mark.parametrize("name", ALL)
def test_where_no_node_is_ever_finite_nothing_changes_but_counts(name):
    bad = jax.tree.map(lambda g: jnp.full_like(g, jnp.inf), gradients())
    params, state = run(ALL[name], bad)
    # Here the mean of equal numbers rounds.
    near = {"rtol": 2.0**-20, "atol": 2.0**-24} if name in AT_ONCE else {"rtol": 0}
    for x, start in zip(*map(jax.tree.leaves, (params, PARAMS)), strict=True):
        np.testing.assert_allclose(x, np.broadcast_to(start, x.shape), **near)
    first = ALL[name](jdaso.axis_exchange("node", NODES)).init(PARAMS)
    for mine, start in zip(shared(state), shared(first), strict=True):
        assert_same(mine, jax.tree.map(lambda x: np.stack([x] * NODES), start), **near)
    seen = jdaso.metrics(state)
    assert (seen.skipped == STEPS).all()
    assert (seen.left_out > 0).all()
    assert (seen.left_out == seen.exchanges).all() or name in AT_ONCE


def with_one(number, tree=PARAMS, dtype=jnp.float32):
    """The tree with a large number in one place of each leaf."""
    tree = jax.tree.map(lambda x: x.astype(dtype), tree)
    return {
        "bias": tree["bias"].at[..., 4].set(number),
        "kernel": tree["kernel"].at[..., 1, 2].set(number),
    }


@pytest.mark.parametrize("name", ALL)
def test_a_sum_that_is_not_finite_changes_nothing(name):
    """The numbers of each node are finite and their sum is not, so all nodes leave it out."""
    grads, params = jax.tree.map(jnp.zeros_like, gradients()), with_one(LARGE)
    if name.startswith("allreduce"):
        grads, params = with_one(LARGE, grads), PARAMS
    history, state = run(ALL[name], grads, params)
    seen = jdaso.metrics(state)
    assert (seen.skipped == 0).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((history, shared(state))))
    if name == "allreduce_gradients int8":
        return  # such a sum is clipped to the largest number
    for x, start in zip(*map(jax.tree.leaves, (history, params)), strict=True):
        np.testing.assert_array_equal(x, np.broadcast_to(start, x.shape))
    assert (seen.left_out == seen.exchanges - seen.in_flight).all()
    assert (seen.left_out > 0).all()


PARAMETERS = [name for name in ALL if not name.startswith("allreduce")]


def damaged(step, params):
    """A hardware fault on one node."""
    if step != 5:
        return params
    return params | {"kernel": params["kernel"].at[BAD, 1, 2].set(jnp.nan)}


def assert_healed(params, state):
    """One node has lost its parameters for some steps, and has taken the mean of the others."""
    others = jax.tree.map(lambda x: x[:, OTHERS], params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(others))
    last = jax.tree.map(lambda x: x[-1], params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((last, state)))
    seen = jdaso.metrics(state)
    assert (seen.skipped == 0).all()
    assert (seen.left_out[OTHERS] == 0).all()
    assert seen.left_out[BAD] > 0


@pytest.mark.parametrize("name", PARAMETERS)
def test_lost_parameters_come_back_with_the_next_mean_and_reach_no_other_node(name):
    params, state = run(ALL[name], gradients(), damage=damaged)
    assert_healed(params, state)
    if name == "local_sgd":
        for x in jax.tree.leaves(params):
            np.testing.assert_array_equal(x[7], np.broadcast_to(x[7, :1], x[7].shape))


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_step_out_of_the_range_of_numbers_is_mended_by_the_next_mean(name):
    """60000 and a tenth of 65000 are float16 numbers. Their sum exceeds 65504, the largest one."""
    params = with_one(60000.0, dtype=jnp.float16)
    grads = jax.tree.map(lambda g: jnp.zeros_like(g, jnp.float16), gradients())
    grads["kernel"] = grads["kernel"].at[5, BAD, 1, 2].set(-65000.0)
    history, state = run(ALL[name], grads, params)
    moving = jax.tree.leaves(history)
    for x, start in zip(moving, jax.tree.leaves(params), strict=True):
        # All nodes have equal numbers, and float16 means round to 1/2048 of a number.
        expected = np.broadcast_to(start, x[:, OTHERS].shape)
        np.testing.assert_allclose(x[:, OTHERS], expected, rtol=2**-10, atol=2**-10)
    assert not np.isfinite(history["kernel"][5, BAD, 1, 2])
    if "eamsgd" not in name and name != "moments average":  # their momentum goes on
        assert_healed(history, state)


OFF = {
    "daso": lambda x: jdaso.daso(x, 4, 2, nonfinite="off"),
    "dasgd fragments": lambda x: jdaso.dasgd(x, 4, 3, fragments=2, nonfinite="off"),
    "local_sgd": lambda x: jdaso.local_sgd(x, 4, nonfinite="off"),
    "easgd": lambda x: jdaso.easgd(x, 4, alpha=0.2, nonfinite="off"),
    "diloco": lambda x: jdaso.diloco(x, 4, nonfinite="off"),
}


@pytest.mark.parametrize("name", OFF)
def test_off_takes_the_step_and_the_next_mean_mends_it(name):
    bad = gradients()
    bad["kernel"] = bad["kernel"].at[5, BAD, 1, 2].set(jnp.nan)
    params, state = run(lambda x: jdaso.chain(sgd(), OFF[name](x)), bad)
    assert np.isnan(params["kernel"][5, BAD, 1, 2])
    assert_healed(params, state)


@pytest.mark.parametrize("name", ["dasgd", "moments average", "allreduce_gradients"])
def test_a_step_that_loss_scaling_skips_advances_the_schedule(name):
    """Half-precision gradients of a scaled loss. An overflow halves the scale."""
    tx, grads = ALL[name](jdaso.axis_exchange("node", NODES)), gradients()

    @jax.jit
    @functools.partial(jax.vmap, axis_name="node")
    def step(params, state, scale, grads):
        half = jax.tree.map(lambda g: (g * scale).astype(jnp.float16), grads)
        finite = jnp.stack([jnp.isfinite(g).all() for g in half.values()]).all()
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, half)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, jnp.where(finite, 2 * scale, scale / 2), finite

    params = jax.tree.map(lambda x: jnp.stack([x] * NODES), PARAMS)
    state, scale, overflows = jax.vmap(tx.init)(params), 2.0 ** jnp.array([12, 14, 10]), 0
    for t in range(STEPS):
        params, state, scale, finite = step(params, state, scale, at(t, grads))
        overflows = overflows + ~np.asarray(finite)
    seen = jdaso.metrics(state)
    np.testing.assert_array_equal(seen.skipped, overflows)
    assert (overflows > 0).all()
    assert seen.step.tolist() == [STEPS] * NODES
    assert len(set(seen.exchanges.tolist())) == 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((params, state)))


RAISING = {
    "daso": lambda x: jdaso.daso(x, 2, 1, nonfinite="raise"),
    "dasgd": lambda x: jdaso.dasgd(x, 2, 1, nonfinite="raise"),
    "local_sgd": lambda x: jdaso.local_sgd(x, 2, nonfinite="raise"),
    "easgd": lambda x: jdaso.easgd(x, 2, alpha=0.2, nonfinite="raise"),
    "eamsgd": lambda x: jdaso.eamsgd(x, 2, RATE, 0.9, alpha=0.2, nonfinite="raise"),
    "diloco": lambda x: jdaso.diloco(x, 2, nonfinite="raise"),
    "allreduce_gradients": lambda x: jdaso.allreduce_gradients(x, nonfinite="raise"),
}


@pytest.mark.parametrize("name", RAISING)
def test_raise_stops_and_names_algorithm_and_step(name):
    tx = RAISING[name](jdaso.single_exchange())
    params, update = jnp.ones(3), jax.jit(tx.update)
    _, state = jax.block_until_ready(update(jnp.zeros(3), tx.init(params), params))
    with pytest.raises(Exception, match=rf"{name}: .*not finite at step 1"):
        jax.block_until_ready(update(jnp.array([0.0, jnp.inf, 0.0]), state, params))


def test_raise_names_a_wire_that_cannot_hold_the_parameters():
    tx = jdaso.daso(jdaso.single_exchange(), 1, 0, wire="float16", nonfinite="raise")
    params = jnp.array([1e5])
    with pytest.raises(Exception, match=r"above 65504 in magnitude, which the wire float16 cannot"):
        jax.block_until_ready(jax.jit(tx.update)(jnp.zeros(1), tx.init(params), params))


def test_raise_names_the_leaf_of_parameters_that_are_not_finite():
    tx = RAISING["local_sgd"](jdaso.axis_exchange("node", 2))
    params = {"mask": jnp.full((2, 2), -jnp.inf), "w": jnp.ones((2, 3))}
    grads = jax.tree.map(jnp.zeros_like, params)
    step = jax.jit(jax.vmap(tx.update, axis_name="node"))
    state = jax.jit(jax.vmap(tx.init))(params)  # traced, so that nobody knows the numbers
    with pytest.raises(Exception, match=r"not finite at step 0, namely \['mask'\], or"):
        jax.block_until_ready(step(grads, state, params))


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("on_nodes", [True, False])
def test_init_refuses_a_parameter_that_is_not_finite_by_name(name, on_nodes):
    params = PARAMS | {"mask": jnp.array([0.0, -jnp.inf])}
    init = ALL[name](jdaso.axis_exchange("node", NODES)).init
    if on_nodes:
        params = jax.tree.map(lambda x: jnp.stack([x] * NODES), params)
        init = jax.vmap(init)
    message = r"the parameter \['mask'\] is not finite.*equinox.partition"
    with pytest.raises(ValueError, match=message):
        init(params)
    jax.eval_shape(init, params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_init_refuses_a_mask_whose_sum_over_the_nodes_would_overflow(dtype):
    mask = jnp.array([0, jnp.finfo(dtype).min], dtype)
    init = jdaso.local_sgd(jdaso.axis_exchange("node", 2), 1).init
    with pytest.raises(
        ValueError, match=r"\['mask'\] is not finite, or too large for a sum over 2"
    ):
        init({"mask": mask, "w": jnp.ones(3)})
    init({"mask": mask / 4, "w": jnp.ones(3)})


def test_large_numbers_are_averaged_although_the_sum_of_a_leaf_would_overflow():
    tx = jdaso.chain(optax.sgd(0.1), jdaso.local_sgd(jdaso.axis_exchange("node", 2), 1))
    large = jnp.full((2, 1000), 1e37)
    params = {"large": large, "w": jnp.array([[1.0], [3.0]])}
    state = jax.vmap(tx.init)(params)
    step = jax.vmap(lambda g, s, p: jdaso.apply_gradients(tx, g, s, p), axis_name="node")
    params, state = jax.jit(step)(jax.tree.map(jnp.zeros_like, params), state, params)
    np.testing.assert_array_equal(params["w"], [[2.0], [2.0]])
    np.testing.assert_array_equal(params["large"], large)
    assert not jdaso.metrics(state).left_out.any()


def test_a_mask_that_is_kept_out_averages_the_rest():
    exchange = jdaso.axis_exchange("node", NODES)
    tx = optax.partition(
        {"shared": jdaso.local_sgd(exchange, 1), "own": optax.set_to_zero()},
        {"mask": "own", "w": "shared"},
    )
    params = {"mask": jnp.full((NODES, 2), -jnp.inf), "w": jnp.arange(3.0)}
    state = jax.vmap(tx.init)(params)
    updates, _ = jax.vmap(tx.update, axis_name="node")(
        jax.tree.map(jnp.zeros_like, params), state, params
    )
    np.testing.assert_array_equal(optax.apply_updates(params, updates)["w"], jnp.ones(3))


def test_raise_stops_at_a_sum_that_is_not_finite():
    tx = RAISING["local_sgd"](jdaso.axis_exchange("node", 2))
    params = jnp.full((2, 1), LARGE)
    step = jax.jit(jax.vmap(lambda s, x: tx.update(jnp.zeros(1), s, x)[1], axis_name="node"))
    state = step(jax.jit(jax.vmap(tx.init))(params), params)
    with pytest.raises(Exception, match=r"local_sgd: .*at step 1, or their sum"):
        jax.block_until_ready(step(state, params))


def test_consensus_leaves_out_nodes_that_are_not_finite():
    exchange = jdaso.axis_exchange("node", NODES)
    mean = jax.vmap(lambda x: jdaso.consensus(exchange, x), axis_name="node")
    x = jnp.array([[1.0, 2.0], [jnp.nan, 6.0], [3.0, 4.0]])
    np.testing.assert_array_equal(mean(x), [[2.0, 3.0]] * NODES)
    assert jnp.isnan(mean(x * jnp.inf)).all()


@pytest.mark.parametrize("name", AT_ONCE | COARSE)
def test_apply_gradients_computes_what_update_and_apply_updates_compute(name):
    def plain(tx, grads, state, params, **extra):
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    moved, state = run(ALL[name], gradients())
    expected, expected_state = run(ALL[name], gradients(), apply_gradients=plain)
    assert_same(moved, expected)
    assert_same(state, expected_state)


def test_apply_gradients_keeps_dtypes_integers_and_none():
    averaging = jdaso.local_sgd(jdaso.single_exchange(), 4)
    params = {"w": jnp.arange(3, dtype=jnp.bfloat16), "n": jnp.arange(2), "none": None}
    updates = {"w": jnp.full(3, 0.3), "n": jnp.ones(2, int), "none": None}
    tx = jdaso.chain(optax.identity(), averaging)
    mine = jdaso.apply_gradients(tx, updates, tx.init(params), params)[0]
    theirs = optax.apply_updates(params, updates)
    assert jax.tree.map(lambda x: x.dtype, mine) == jax.tree.map(lambda x: x.dtype, theirs)
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)


@pytest.mark.parametrize("wrong", ["sgd", "averaging", "optax.chain"])
def test_apply_gradients_refuses_what_jdaso_did_not_chain(wrong):
    averaging = jdaso.local_sgd(jdaso.single_exchange(), 4)
    tx = {
        "sgd": sgd(),
        "averaging": averaging,
        "optax.chain": optax.chain(sgd(), averaging),
    }[wrong]
    with pytest.raises(ValueError, match=r"tx must be what jdaso.chain\(optimizer, averaging\)"):
        jdaso.apply_gradients(tx, PARAMS, tx.init(PARAMS), PARAMS)
