"""Averaged moments keep their sign and size on every wire, and a reset restarts nothing else."""

import functools
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jdaso
from jdaso.core.moments import _KEPT, _ONE_COUNT
from jdaso.core.state import find_state, find_states

NODES = 4
EXCHANGE = jdaso.axis_exchange("node", NODES)


def train(tx, params, gradients, look=lambda params, state: (params, state)):
    """What ``look`` returns after the last step, and the states after every step.

    ``gradients`` has leaves (steps, nodes, ...). All nodes start with the same parameters.
    """
    params = jax.tree.map(lambda x: jnp.stack([x] * NODES), params)
    state = jax.jit(jax.vmap(tx.init))(params)

    @functools.partial(jax.vmap, axis_name="node")
    def step(params, state, grads):
        return jdaso.apply_gradients(tx, grads, state, params)

    def scanned(carry, grads):
        carry = step(*carry, grads)
        return carry, look(*carry)

    # The first step may widen the state.
    first, rest = (jax.tree.map(lambda g, s=s: g[s], gradients) for s in (0, slice(1, None)))
    carry = jax.jit(step)(params, state, first)
    return jax.jit(lambda carry: jax.lax.scan(scanned, carry, rest))(carry)


# One for each way to use a root.
ROOTS = {
    "adam": optax.adam(1e-3),
    "adagrad": optax.adagrad(1e-2),
    "rmsprop": optax.rmsprop(1e-3),
}


def squares(state):
    """The moments of which the optimizers take roots."""
    kinds = (
        (optax.ScaleByAdamState, "nu"),
        (optax.ScaleByRssState, "sum_of_squares"),
        (optax.ScaleByRmsState, "nu"),
    )
    return [
        leaf
        for kind, name in kinds
        for leaf in jax.tree.leaves(getattr(find_state(kind, state), name))
    ]


@functools.cache
def squares_on(wire, moments_wire=None, delay=1):
    """The squares after each of 200 steps, and the parameters at the end."""
    sizes = jnp.asarray(np.tile(np.logspace(-4, 0, 64), 2), jnp.float32)  # in each block of 64
    draw = np.random.default_rng(0).normal(size=(200, NODES, 128))
    grads = {name: jnp.asarray(draw, jnp.float32) * sizes for name in ROOTS}
    optimizer = optax.partition(ROOTS, {name: name for name in ROOTS})
    averaging = jdaso.dasgd(EXCHANGE, period=2, delay=delay, wire=wire)
    tx = jdaso.chain(optimizer, averaging, moments="average", moments_wire=moments_wire)
    params = {name: jnp.zeros(128) for name in ROOTS}
    (params, _), seen = train(tx, params, grads, lambda params, state: squares(state))
    return seen, params


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16", "int8", "float4"])
def test_averaged_squares_never_become_negative(wire):
    """In 200 steps whose gradients differ by 10^4 within a block, on every wire of parameters."""
    seen, params = squares_on(wire)
    assert all((x >= 0).all() for x in seen)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((seen, params)))
    # The gradients do not depend on the parameters, so the wire of these changes no moment.
    for x, exact in zip(seen, squares_on(None)[0], strict=True):
        np.testing.assert_array_equal(x, exact)


@pytest.mark.parametrize("wire", [None, "int8"])
@pytest.mark.parametrize("delay", [1, 2])
def test_averaged_squares_follow_their_recursion(delay, wire):
    """Also where the delay is the period, so that nodes post what was there before the merge."""
    seen, _ = squares_on(wire, delay=delay)
    sizes = np.tile(np.logspace(-4, 0, 64), 2)
    draw = np.random.default_rng(0).normal(size=(200, NODES, 128)) * sizes
    v, posted = np.zeros((NODES, 128)), {}
    for t, g in enumerate(draw):
        v = 0.999 * v + 0.001 * g**2
        if t % 2 == 1:
            posted[t] = v.mean(0)
        if t - delay in posted:
            v = 0.25 * v + 0.75 * posted[t - delay]
    np.testing.assert_allclose(seen[0][-1], v, rtol=1e-5)


def test_moments_are_rounded_to_their_own_wire():
    """Adagrad's sums, which grow by less than a rounding, fall behind; averages do not."""
    seen, _ = squares_on("int8", "bfloat16")
    exact, _ = squares_on("int8")
    assert all((x >= 0).all() for x in seen)
    for kind, x, y in zip(("adam", "adagrad", "rmsprop"), seen, exact, strict=True):
        assert not (x == y).all()
        np.testing.assert_allclose(x[-1], y[-1], rtol=0.15 if kind == "adagrad" else 0.05)


@pytest.mark.parametrize("moments_wire", [None, "float32", "bfloat16"])
def test_small_squares_survive_a_float16_wire(moments_wire):
    """Adam's first five steps with gradients of 1e-4 are of the size of the learning rate."""
    averaging = jdaso.local_sgd(EXCHANGE, period=1, wire="float16")
    tx = jdaso.chain(optax.adam(0.01), averaging, "average", moments_wire)
    (params, _), _ = train(tx, jnp.zeros(8), jnp.full((5, NODES, 8), 1e-4))
    np.testing.assert_allclose(params, -0.05, rtol=0.01)


def test_moments_of_float16_parameters_are_merged_in_float32():
    """A node's least float16 survives 0.5 m + 0.5 mean = 0.625 m; 0.5 m would round to 0."""
    least = 2.0**-24
    averaging = jdaso.dasgd(EXCHANGE, period=1, delay=0, xi=0.5)
    tx = jdaso.chain(optax.trace(0.5), averaging, "average")
    grads = jnp.array([[0.0, 0, 0, least], [0, 0, 0, 0]], jnp.float16)
    params = jnp.zeros((), jnp.float16)
    state = jax.vmap(tx.init)(jnp.stack([params] * NODES))
    step = jax.vmap(lambda g, s, p: tx.update(g, s, p), axis_name="node")
    _, state = step(grads[0], state, jnp.zeros(NODES, jnp.float16))
    assert state.optimizer.trace.tolist() == [0, 0, 0, least]
    assert state.optimizer.trace.dtype == jnp.float16


def test_float64_moments_travel_as_they_are():
    with jax.enable_x64():
        tx = jdaso.chain(optax.trace(0.5), jdaso.local_sgd(EXCHANGE, 1), "average")
        grads = jnp.full((3, NODES, 2), 1e-60, jnp.float64)
        (_, state), _ = train(tx, jnp.zeros(2, jnp.float64), grads)
        np.testing.assert_allclose(state.optimizer.trace, 1.75e-60, rtol=1e-12)


def test_a_wire_that_makes_moments_negative_is_refused():
    averaging = jdaso.local_sgd(EXCHANGE, 4)
    for wire in ("int8", "float4"):
        with pytest.raises(ValueError, match=f"moments_wire must be one of .* got '{wire}', whi"):
            jdaso.chain(optax.adam(0.1), averaging, "average", moments_wire=wire)
    with pytest.raises(ValueError, match="moments_wire must be one of float32, bfloat16, float16"):
        jdaso.chain(optax.adam(0.1), averaging, "average", moments_wire="float8")
    with pytest.raises(ValueError, match="moments_wire requires moments='average', got 'float32'"):
        jdaso.chain(optax.adam(0.1), averaging, moments_wire="float32")


@pytest.mark.parametrize("wire", ["int8", "float4"])
@pytest.mark.parametrize("algorithm", [jdaso.dasgd, jdaso.diloco])
def test_moments_have_neither_residual_nor_anchor(algorithm, wire):
    tx = jdaso.chain(optax.adam(0.1), algorithm(EXCHANGE, 4, delay=2, wire=wire), "average")
    [fragment] = jdaso.core.averaging_state(tx.init({"w": jnp.ones(3)})).fragments
    own_anchor = 1 if algorithm is jdaso.dasgd else 0
    assert len(fragment.feedback.residual) == 1
    assert len(fragment.feedback.anchor) == own_anchor


@pytest.mark.parametrize("fragments", [1, 2])
def test_moments_of_an_integer_leaf_stay_local(fragments):
    """Adam without a mask keeps float32 moments of integers, from the first step on."""
    params = {"a": jnp.ones(3), "n": jnp.arange(2), "w": jnp.ones((2, 2))}
    averaging = jdaso.local_sgd(EXCHANGE, 2, fragments=fragments)
    tx = jdaso.chain(optax.adam(0.1), averaging, moments="average")
    draw = np.random.default_rng(0).normal(size=(4, NODES, 3))
    grads = {
        "a": jnp.asarray(draw, jnp.float32),
        "n": jnp.broadcast_to(jnp.arange(NODES)[:, None], (4, NODES, 2)),
        "w": jnp.zeros((4, NODES, 2, 2)),
    }
    (params, state), _ = train(tx, params, grads)
    mu = optax.tree.get(state, "mu")
    if fragments == 1:
        assert (mu["a"] == mu["a"][0]).all()  # of the mean at the last step
    own = jnp.arange(NODES) * (1 - 0.9**4)
    np.testing.assert_allclose(mu["n"], jnp.stack([own] * 2, 1), rtol=1e-6)
    assert params["n"].dtype == jnp.int32


def test_a_reset_lets_the_schedule_inside_of_multi_steps_go_on():
    """sgd with a rate that rises to 1 in 40 updates, one in two steps; a mean every 8 steps."""
    optimizer = optax.MultiSteps(optax.sgd(optax.linear_schedule(0.0, 1.0, 40)), 2)
    averaging = jdaso.local_sgd(jdaso.single_exchange(), period=8)
    tx = jdaso.chain(optimizer, averaging, moments="reset")
    params, grads = jnp.zeros(()), jnp.ones(())
    state = tx.init(params)
    step = jax.jit(tx.update)
    for _ in range(64):
        updates, state = step(grads, state, params)
    assert float(updates) == pytest.approx(-0.775)
    assert int(state.optimizer.gradient_step) == 32


RATE = optax.linear_schedule(0.1, 0.2, 100)


def adam():
    return optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(RATE))


def with_loss(name, **options):
    """An optimizer of optax or optax.contrib."""
    make = getattr(optax, name, None) or getattr(contrib, name)
    return lambda: make(RATE, **options)


LABELS = {"a": "x", "b": "y"}
#: Every wrapper and optimizer of optax that has a state like the parameters.
OPTIMIZERS = {
    "apply_every": lambda: optax.chain(optax.apply_every(3), adam()),
    "apply_if_finite": lambda: optax.apply_if_finite(adam(), 5),
    "chain": lambda: optax.chain(optax.clip(9.0), optax.chain(adam(), optax.identity())),
    "conditionally_mask": lambda: optax.conditionally_mask(adam(), lambda step, **_: step >= 0),
    "conditionally_transform": lambda: optax.conditionally_transform(
        adam(), lambda step, **_: step >= 0
    ),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.scale_by_learning_rate(RATE)),
    "freeze": lambda: optax.selective_transform(adam(), freeze_mask={"a": True, "b": False}),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(RATE),
    "inject of a bare state": lambda: optax.inject_hyperparams(bare)(RATE),
    "masked": lambda: optax.masked(adam(), {"a": True, "b": False}),
    "mechanize": lambda: contrib.mechanize(adam()),
    "multi_steps": lambda: optax.MultiSteps(adam(), 3),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(9.0)), ("adam", adam())),
    "partition": lambda: optax.partition({"x": adam(), "y": optax.sgd(RATE, 0.9)}, LABELS),
    "reduce_on_plateau": lambda: optax.chain(adam(), contrib.reduce_on_plateau()),
    "sam": lambda: without_loss(contrib.sam(adam(), optax.sgd(0.1), sync_period=3)),
    "schedule_free": lambda: contrib.schedule_free(adam(), RATE),
    "snapshot": lambda: optax.chain(optax.snapshot("updates", lambda u: u), adam()),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(adam()),
    "scale_by_lbfgs": lambda: optax.chain(
        optax.scale_by_lbfgs(), optax.scale_by_learning_rate(RATE)
    ),
    "zero_nans": lambda: optax.chain(optax.zero_nans(), adam()),
    "sgd": with_loss("sgd", momentum=0.9),
    "sophia": with_loss("sophia"),
    **{
        name: with_loss(name)
        for name in (
            *(
                "adabelief",
                "adadelta",
                "adafactor",
                "adagrad",
                "adamax",
                "adamw",
                "adan",
                "amsgrad",
            ),
            *("lamb", "lars", "lion", "nadam", "novograd", "optimistic_adam_v2", "radam"),
            *("optimistic_gradient_descent", "rmsprop", "sign_sgd", "signum", "yogi"),
            *("acprop", "ademamix", "adopt", "cocob", "dog", "dowg", "galore", "muon"),
            *("schedule_free_adamw", "schedule_free_sgd"),
        )
    },
    "sm3": lambda: optax.sm3(0.1),
    "rprop": lambda: optax.chain(optax.rprop(0.1), optax.scale_by_schedule(RATE)),
}
ONE_COUNT = ("dadapt_adamw", "madgrad", "momo", "momo_adam", "prodigy", "simplified_ademamix")
OPAQUE = {
    "flatten": lambda: optax.flatten(adam()),
    "lbfgs": optax.lbfgs,
    "linesearch": lambda: optax.chain(adam(), optax.scale_by_backtracking_linesearch(5)),
}


def without_loss(optimizer):
    """An optimizer that is given no loss, as SAM takes no argument for it."""
    return optax.GradientTransformation(
        optimizer.init, lambda updates, state, params: optimizer.update(updates, state, params)
    )


def bare(learning_rate):
    """Momentum whose state is a tree like the parameters, in no tuple."""

    def update(updates, state, params=None):
        del params
        new = jax.tree.map(lambda g, m: g + 0.9 * m, updates, state)
        return jax.tree.map(lambda m: -learning_rate * m, new), new

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def moments_of(optimizer, state):
    """The moments in a state, and the rest, in which they are None."""
    found = []
    rest = optax.tree_map_params(optimizer, found.append, state, is_leaf=lambda _: True)
    return found, rest


def kept_by_type(state):
    """The fields that a reset must leave as they are."""
    return {
        f"{kind.__name__}.{name}.{i}": getattr(node, name)
        for kind, names in _KEPT.items()
        for i, node in enumerate(find_states(kind, state))
        for name in names
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_reset_initializes_moments_and_nothing_else(name):
    """A mean after steps 4 and 8 of a single node, beside the same training without a reset."""
    params = {"a": jnp.linspace(0.5, 1, 6).reshape(2, 3), "b": jnp.linspace(-1, -0.5, 3)}
    optimizer = optax.with_extra_args_support(OPTIMIZERS[name]())
    averaging = jdaso.local_sgd(jdaso.single_exchange(), period=4)
    tx = jdaso.chain(optimizer, averaging, moments="reset")
    state, local = tx.init(params), optimizer.init(params)
    structure = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    step, extra = jax.jit(tx.update), {"value": jnp.float32(1)}
    if name == "sophia":
        extra["obj_fn"] = lambda p: sum(jnp.sum(x**2) for x in jax.tree.leaves(p))
        step = tx.update
    for t in range(8):
        grads = jax.tree.map(lambda x, t=t: jnp.sin(x + t), params)
        updates, state = step(grads, state, params, **extra)
        if t < 4:
            _, local = optimizer.update(grads, local, params, **extra)
        params = optax.apply_updates(params, updates)
        if t == 3:
            after, merged = state.optimizer, params
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == structure
    fresh = optimizer.init(merged)
    kept, want = kept_by_type(after), kept_by_type(local)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), kept, want)
    kept_leaves = {id(x) for x in jax.tree.leaves(kept)}
    for x, y in zip(*(moments_of(optimizer, s)[0] for s in (after, fresh)), strict=True):
        if not {id(leaf) for leaf in jax.tree.leaves(x)} & kept_leaves:
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), x, y)
    counts = [node.count for node in find_states(optax.ScaleByScheduleState, after)]
    assert [int(count) for count in counts] == [
        int(node.count) for node in find_states(optax.ScaleByScheduleState, local)
    ]
    assert all(int(node.count) == 0 for node in find_states(optax.ScaleByAdamState, after))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(params))


@pytest.mark.parametrize("name", ONE_COUNT)
def test_a_reset_of_moments_that_share_their_count_with_a_schedule_is_refused(name):
    tx = jdaso.chain(with_loss(name)(), jdaso.local_sgd(EXCHANGE, 4), "reset")
    state = with_loss(name)().init(jnp.ones(2))
    assert find_states(_ONE_COUNT, state)
    with pytest.raises(ValueError, match=r"'reset' does not go with .* one step count"):
        tx.init(jnp.ones(2))


def test_moments_that_are_not_like_the_parameters_are_not_averaged():
    """Lookahead's parameters are two trees, and the moments are like one of them."""
    params = optax.LookaheadParams.init_synced({"a": jnp.ones(2)})
    tx = jdaso.chain(optax.lookahead(adam(), 5, 0.5), jdaso.local_sgd(EXCHANGE, 4), "average")
    with pytest.raises(ValueError, match="moments must not be 'average' with this optimizer"):
        tx.init(params)


def test_the_optimizer_whose_moments_cannot_be_averaged_is_named():
    tx = jdaso.chain(optax.sm3(0.1), jdaso.local_sgd(EXCHANGE, 4), "average")
    with pytest.raises(ValueError, match=r"its state has ScaleBySM3State\)\. Use moments='local'"):
        tx.init({"a": jnp.ones((2, 3))})


@pytest.mark.parametrize("moments", ["average", "reset"])
@pytest.mark.parametrize("name", OPAQUE)
def test_moments_that_cannot_be_found_are_refused(name, moments):
    tx = jdaso.chain(OPAQUE[name](), jdaso.local_sgd(EXCHANGE, 4), moments)
    with pytest.raises(ValueError, match="moments must be 'local' with this optimizer"):
        tx.init({"a": jnp.ones(2)})


def test_a_reset_keeps_the_dtypes_that_an_optimizer_has_widened():
    """Of bfloat16 parameters with float32 gradients."""
    tx = jdaso.chain(optax.sgd(0.1, 0.9), jdaso.local_sgd(jdaso.single_exchange(), 2), "reset")
    params = jnp.ones(3, jnp.bfloat16)
    state = tx.init(params)
    for t in range(4):
        _, state = tx.update(jnp.ones(3), state, params)
        trace = optax.tree.get(state, "trace")
        assert trace.dtype == jnp.float32
        assert (trace == 0).all() == (t % 2 == 1)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_merge_to_which_nobody_contributed_resets_nothing(delay):
    tx = jdaso.chain(optax.sgd(0.1, 0.9), jdaso.dasgd(EXCHANGE, 3, delay), moments="reset")
    grads = jnp.ones((8, NODES, 2)).at[1].set(jnp.nan)  # of all nodes, before the first post
    _, seen = train(
        tx, jnp.zeros(2), grads, lambda _, s: (s.averaging.merged, optax.tree.get(s, "trace"))
    )
    merged, trace = seen
    first, second = 2 + delay - 1, 5 + delay - 1  # ``seen`` lacks the first step
    assert merged.any(axis=1).nonzero()[0].tolist() == [second]
    assert (trace[first] != 0).all()
    assert (trace[second] == 0).all()


def test_a_drain_to_which_nobody_contributed_resets_nothing():
    tx = jdaso.chain(optax.sgd(0.1, 0.9), jdaso.dasgd(EXCHANGE, 3, 2), moments="reset")
    grads = jnp.ones((3, NODES, 2)).at[1].set(jnp.nan)
    (params, state), _ = train(tx, jnp.zeros(2), grads)
    drain = jax.vmap(lambda p, s: jdaso.drain(tx, s, p), axis_name="node")
    _, after = drain(params, state)
    assert not jdaso.metrics(after).merged.any()
    assert (optax.tree.get(after, "trace") == optax.tree.get(state, "trace")).all()


class MasterState(NamedTuple):
    master: optax.Params
    inner: optax.OptState


def with_master(optimizer):
    """Updates float32 copies of the parameters, and the parameters to be the same, rounded."""

    def wide(tree):
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params):
        return MasterState(wide(params), optimizer.init(wide(params)))

    def update(updates, state, params):
        updates, inner = optimizer.update(wide(updates), state.inner, state.master)
        master = optax.apply_updates(state.master, updates)
        return jax.tree.map(lambda m, x: m.astype(x.dtype) - x, master, params), MasterState(
            master, inner
        )

    return optax.GradientTransformation(init, update)


def distance(moments):
    """The distance of two nodes whose gradients lead to different places, after 40 steps."""
    averaging = jdaso.local_sgd(EXCHANGE, period=4)
    tx = jdaso.chain(with_master(optax.sgd(0.05)), averaging, moments)
    params = jnp.stack([jnp.linspace(0.1, 1, 8).astype(jnp.bfloat16)] * NODES)
    goals = jnp.linspace(-1, 1, NODES)[:, None] * jnp.ones(8)
    state = jax.vmap(tx.init)(params)

    @jax.jit
    @functools.partial(jax.vmap, axis_name="node")
    def step(params, state, goal):
        return jdaso.apply_gradients(tx, params - goal.astype(params.dtype), state, params)

    for _ in range(41):
        params, state = step(params, state, goals)
    return float(jnp.linalg.norm((params[0] - params[-1]).astype(jnp.float32)))


def test_an_optimizer_with_a_copy_of_the_parameters_undoes_merges_unless_it_is_averaged():
    assert distance("local") > 10 * distance("average")


def warnings_of(optimizer, params, moments="local"):
    tx = jdaso.chain(optimizer, jdaso.local_sgd(EXCHANGE, 4), moments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tx.init(params)
        jax.eval_shape(tx.init, params)
    return [str(w.message) for w in caught if "copy of parameters" in str(w.message)]


def test_a_copy_of_the_parameters_is_warned_of():
    params = {"w": jnp.linspace(-1, 1, 4).astype(jnp.bfloat16), "n": jnp.arange(4)}
    [text] = warnings_of(with_master(optax.sgd(0.1)), params)
    assert "at .master['w']" in text
    assert "jdaso.chain(..., moments='average')" in text
    assert not warnings_of(with_master(optax.sgd(0.1)), params, "average")


@pytest.mark.parametrize(
    "name",
    ["adamw", "sgd", "adagrad", "dog", "dowg", "schedule_free_sgd", "lookahead", "mechanize"],
)
def test_an_optimizer_without_such_a_copy_is_not_warned_of(name):
    # Adagrad's sums begin with 0.1.
    params = {"w": jnp.linspace(-1, 1, 4), "zero": jnp.zeros(4), "scale": jnp.full(4, 0.1)}
    if name == "lookahead":
        optimizer = optax.lookahead(adam(), 5, 0.5)
        assert not warnings_of(optimizer, optax.LookaheadParams.init_synced(params))
    else:
        assert not warnings_of(OPTIMIZERS[name](), params)
