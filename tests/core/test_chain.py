"""How momentum and Adam's moments change when parameters are merged."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdaso
from jdaso.core.state import find_state

NODES, STEPS, DECAY, XI = 3, 15, 0.9, 0.25
PERIOD, DELAY = 4, 2
PARAMS = {"a": jnp.linspace(-1, 1, 6), "b": jnp.linspace(2, 3, 4)}
EXCHANGE = jdaso.axis_exchange("node", NODES)


def gradients():
    """(steps, nodes, ...)"""
    rng = np.random.default_rng(0)
    draw = {name: rng.normal(size=(STEPS, NODES, *x.shape)) for name, x in PARAMS.items()}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), draw)


def at(step, tree):
    return jax.tree.map(lambda x: x[step], tree)


def start(tx):
    params = jax.tree.map(lambda x: jnp.stack([x] * NODES), PARAMS)
    return params, jax.vmap(tx.init)(params)


def train(tx, steps=STEPS, in_place=True):
    """Parameters and states of all nodes, before the first step and after every one."""

    def step(params, state, grads):
        if not in_place:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state
        return jdaso.apply_gradients(tx, grads, state, params)

    history, grads = [start(tx)], gradients()
    step = jax.jit(jax.vmap(step, axis_name="node"))
    for t in range(steps):
        history.append(step(*history[-1], at(t, grads)))
    return history


def sgd(rate=0.1):
    return optax.sgd(rate, momentum=DECAY)


def dasgd(delay=DELAY, **options):
    return jdaso.dasgd(EXCHANGE, PERIOD, delay, XI, **options)


def momentum(state):
    """The momentum in the optimizer's state, {name: (nodes, ...)}."""
    return optax.tree.get(state.optimizer, "trace")


def merges(history):
    """The steps at which an exchange was merged."""
    return [t for t, (_, s) in enumerate(history[1:]) if jdaso.core.averaging_state(s).merged.all()]


def assert_same_bits(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_rounded(actual, expected):
    """Compares up to the last bits: XLA fuses the optimizer's update with what follows it."""
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2**-20, atol=2**-24), actual, expected
    )


def assert_close(actual, expected):
    """Compares float32 with float64, up to a few roundings of numbers near 1."""
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), actual, expected
    )


@pytest.mark.parametrize("in_place", [True, False])
def test_local_is_an_optax_chain(in_place):
    chained = train(optax.chain(sgd(), dasgd()), in_place=False)
    local = train(jdaso.chain(sgd(), dasgd()), in_place=in_place)
    for (x, state), (y, expected) in zip(local, chained, strict=True):
        assert_close(x, y)
        assert_close(tuple(state), expected)


@pytest.mark.parametrize(
    ("averaging", "moments"),
    [
        (dasgd(fragments=2), "average"),
        (jdaso.diloco(EXCHANGE, PERIOD, delay=DELAY, fragments=2, warmup=1), "average"),
        (jdaso.easgd(EXCHANGE, PERIOD), "local"),
    ],
    ids=["dasgd", "diloco", "easgd"],
)
def test_both_forms_of_a_step_do_the_same(averaging, moments):
    tx = jdaso.chain(sgd(), averaging, moments=moments)
    in_place, with_updates = train(tx), train(tx, in_place=False)
    for (x, state), (y, expected) in zip(in_place, with_updates, strict=True):
        assert_close(x, y)
        assert_close(state, expected)
    assert len(merges(in_place)) >= 2


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize(
    ("averaging", "own"),
    [
        (lambda **o: dasgd(**o), XI),
        (lambda **o: dasgd(delay=0, **o), XI),
        (lambda **o: jdaso.diloco(EXCHANGE, PERIOD, delay=DELAY, mix=0.5, **o), 0.5),
        (lambda **o: jdaso.daso(EXCHANGE, PERIOD, DELAY, **o), None),
    ],
    ids=["dasgd", "dasgd blocking", "diloco", "daso"],
)
def test_average_merges_momentum_with_the_weight_of_the_parameters(averaging, own, fragments):
    """Compares with NumPy: v <- w v + (1 - w) mean of the posted v, fragment by fragment."""
    history = train(jdaso.chain(sgd(), averaging(fragments=fragments), moments="average"))
    delay = int(jdaso.core.averaging_state(history[-1][1]).plan.delay[0])
    own = 2 * delay / (2 * delay + NODES) if own is None else own
    grads = gradients()
    for k, name in enumerate(PARAMS):
        turn = (k * PERIOD // 2) if fragments == 2 else 0
        v, posted = np.zeros((NODES, *PARAMS[name].shape)), {}
        for t in range(STEPS):
            v = DECAY * v + np.asarray(grads[name][t], np.float64)
            if (t + 1 - turn) % PERIOD == 0:
                posted[t] = v.mean(0)
            if t - delay in posted:
                v = own * v + (1 - own) * posted[t - delay]
            assert_close(momentum(history[t + 1][1])[name], v)
    assert int(jdaso.core.averaging_state(history[-1][1]).exchanges[0]) >= 3 * fragments


def test_after_a_blocking_mean_all_nodes_have_the_mean_momentum():
    averaging = jdaso.local_sgd(EXCHANGE, PERIOD)
    history = train(jdaso.chain(sgd(), averaging, moments="average"))
    before = train(jdaso.chain(sgd(), averaging))  # the same until the first mean
    (_, state), (_, local) = history[PERIOD], before[PERIOD]
    for v, own in zip(*map(jax.tree.leaves, map(momentum, (state, local))), strict=True):
        assert not (own == own[0]).all()
        # Adding the difference to the mean rounds on each node separately.
        np.testing.assert_allclose(v, [own.mean(0)] * NODES, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("moments", ["average", "reset"])
def test_until_the_first_merge_nothing_differs_from_local(moments):
    first = PERIOD - 1 + DELAY
    history = train(jdaso.chain(sgd(), dasgd(), moments), steps=first + 1)
    local = train(jdaso.chain(sgd(), dasgd()), steps=first + 1)
    assert merges(history) == merges(local) == [first]
    for (x, state), (y, expected) in zip(history[:-1], local[:-1], strict=True):
        assert_rounded(x, y)
        assert_rounded(state.optimizer, expected.optimizer)
    assert_rounded(history[-1][0], local[-1][0])  # the parameters' merge is the same
    assert not (momentum(history[-1][1])["a"] == momentum(local[-1][1])["a"]).any()


WRAPPERS = {
    "plain": lambda optimizer: optimizer,
    "apply_if_finite": lambda optimizer: optax.apply_if_finite(optimizer, 5),
    "masked": lambda optimizer: optax.masked(optimizer, {"a": True, "b": False}),
    "inject_hyperparams": lambda optimizer: optax.inject_hyperparams(
        lambda scale: optax.chain(optimizer, optax.scale(scale))
    )(1.0),
    "in a chain in a chain": lambda optimizer: optax.chain(
        optax.clip(100.0), optax.chain(optimizer, optax.identity())
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_reset_starts_adam_anew_and_lets_the_learning_rate_go_on(wrapper):
    schedule = optax.linear_schedule(0.1, 0.0, 100)
    optimizer = WRAPPERS[wrapper](
        optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(schedule))
    )
    history = train(jdaso.chain(optimizer, dasgd(), moments="reset"))
    assert merges(history) == [5, 9, 13]
    age = 0  # steps since Adam was reset
    for t, (_, state) in enumerate(history[1:]):
        age = 0 if t in merges(history) else age + 1
        adam, rate = (
            find_state(optax.ScaleByAdamState, state),
            find_state(optax.ScaleByScheduleState, state),
        )
        assert adam.count.tolist() == [age] * NODES
        assert rate.count.tolist() == [t + 1] * NODES
        assert all((x != 0).all() == bool(age) for x in jax.tree.leaves((adam.mu, adam.nu)))


def test_reset_zeroes_momentum():
    history = train(jdaso.chain(sgd(), dasgd(), moments="reset"))
    for t, (_, state) in enumerate(history[1:]):
        assert all((v == 0).all() == (t in merges(history)) for v in momentum(state).values())


class Model(NamedTuple):
    """Parameters of a type that looks like an optimizer's state."""

    a: jax.Array
    b: jax.Array


def test_reset_of_parameters_that_are_a_named_tuple():
    averaging = jdaso.local_sgd(jdaso.single_exchange(), 2)
    tx = jdaso.chain(optax.scale_by_adam(), averaging, moments="reset")
    params = Model(**PARAMS)
    state, counts = tx.init(params), []
    for _ in range(4):
        _, state = tx.update(params, state, params)
        counts.append(int(state.optimizer.count))
    assert counts == [1, 0, 1, 0]
    assert type(state.optimizer.mu) is Model


def test_reset_starts_from_the_merged_parameters():
    """Lookahead and schedule-free optimizers keep parameters in their state."""
    remember = optax.GradientTransformation(optax.TraceState, lambda u, s, p: (u, s))
    tx = jdaso.chain(optax.chain(sgd(), remember), dasgd(), moments="reset")
    history = train(tx)
    for t in range(STEPS):
        began = max((m + 1 for m in merges(history) if m <= t), default=0)
        assert_same_bits(history[t + 1][1].optimizer[1].trace, history[began][0])


@pytest.mark.parametrize("moments", ["local", "average", "reset"])
def test_drain_treats_moments_as_a_merge_does(moments):
    tx = jdaso.chain(sgd(), dasgd(), moments)
    before, (params, state) = train(tx, steps=PERIOD + 1)[-2:]
    assert jdaso.core.averaging_state(state).fragments[0].posted.all()
    drain = jax.vmap(lambda p, s: jdaso.drain(tx, s, p), axis_name="node")
    drained, after = drain(params, state)
    assert not jdaso.core.averaging_state(after).fragments[0].posted.any()
    posted = before[0]  # posted after step PERIOD - 1, now one step old
    for name in PARAMS:
        expected = XI * params[name] + (1 - XI) * posted[name].mean(0)
        assert_close(drained[name], expected)
        v = momentum(state)[name]
        mixed = XI * v + (1 - XI) * momentum(before[1])[name].mean(0)
        assert_close(momentum(after)[name], {"local": v, "average": mixed, "reset": 0 * v}[moments])
    again, same = drain(drained, after)
    assert_same_bits((again, same), (drained, after))


def test_drain_with_nothing_in_flight_resets_nothing():
    tx = jdaso.chain(sgd(), dasgd(), "reset")
    params, state = train(tx, steps=2)[-1]
    drain = jax.vmap(lambda p, s: jdaso.drain(tx, s, p), axis_name="node")
    assert_same_bits(drain(params, state), (params, state))
    assert all((v != 0).all() for v in momentum(state).values())


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="one of local, average, reset, got 'mean'"):
        jdaso.chain(sgd(), dasgd(), moments="mean")
    for averaging in (jdaso.easgd(EXCHANGE, PERIOD), jdaso.allreduce_gradients(EXCHANGE)):
        for moments in ("average", "reset"):
            with pytest.raises(ValueError, match="moments must be 'local' with this algorithm"):
                jdaso.chain(sgd(), averaging, moments)
    tx = jdaso.chain(sgd(), dasgd(fragments=2), moments="reset")
    with pytest.raises(ValueError, match="moments='reset' requires fragments=1, got 2"):
        tx.init(PARAMS)


@pytest.mark.parametrize("moments", ["local", "average", "reset"])
@pytest.mark.parametrize(
    "arguments",
    [
        lambda: (sgd(), jdaso.eamsgd(EXCHANGE, PERIOD, 0.1, 0.9)),
        lambda: (sgd(), jdaso.chain(sgd(), dasgd())),
        lambda: (sgd(), optax.chain(sgd(), dasgd())),
    ],
    ids=["eamsgd", "a chain", "an optax chain"],
)
def test_what_is_not_one_averaging_is_refused(arguments, moments):
    with pytest.raises(ValueError, match=r"averaging must be what jdaso\.daso\(\.\.\.\) or anoth"):
        jdaso.chain(*arguments(), moments)


def test_drain_takes_what_has_the_state():
    member = dasgd()
    tx = jdaso.chain(sgd(), member, "average")
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match=r"not an optax\.chain or another wrapper around it"):
        jdaso.drain(optax.chain(sgd(), member), state, PARAMS)
    with pytest.raises(ValueError, match=r"call jdaso\.drain\(tx, opt_state, params\)"):
        jdaso.drain(member, state, PARAMS)


@pytest.mark.parametrize("moments", ["local", "average", "reset"])
def test_a_step_that_is_not_finite_leaves_the_memory_as_it_was(moments):
    """One node skips a step without a merge. The others take it, and the node continues."""
    tx = jdaso.chain(sgd(), dasgd(), moments)

    @jax.jit
    @functools.partial(jax.vmap, axis_name="node")
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = start(tx)
    for t in range(STEPS):
        grads = at(t, gradients())
        if t == 1:
            before = momentum(state)
            grads["a"] = grads["a"].at[2, 0].set(jnp.nan)
        params, state = step(params, state, grads)
        if t == 1:
            for name, trace in momentum(state).items():
                np.testing.assert_array_equal(trace[2], before[name][2])
                assert (trace[:2] != before[name][:2]).all()
    assert jdaso.core.averaging_state(state).skipped.tolist() == [0, 0, 1]
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((params, momentum(state))))


@pytest.mark.parametrize("given", [{}, {"value": jnp.float32(2.0)}, {"value": None}])
@pytest.mark.parametrize("in_place", [True, False])
def test_the_optimizer_gets_the_extra_arguments_that_were_given(given, in_place):
    seen = []

    def update(updates, state, params=None, **extra_args):
        seen.append(extra_args)
        return updates, state

    optimizer = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    tx = jdaso.chain(optimizer, jdaso.local_sgd(jdaso.single_exchange(), PERIOD))
    given = {"scale": jnp.float32(1.0), **given}
    if in_place:
        jdaso.apply_gradients(tx, PARAMS, tx.init(PARAMS), PARAMS, **given)
    else:
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, **given)
    assert {frozenset(extra_args) for extra_args in seen} == {frozenset(given)}


@pytest.mark.parametrize("in_place", [True, False])
def test_an_optimizer_that_takes_no_loss(in_place):
    """SAM in its opaque mode takes grad_fn, and nothing else."""
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True)
    tx = jdaso.chain(sam, jdaso.local_sgd(jdaso.single_exchange(), PERIOD))

    def grad_fn(params, _):
        return jax.tree.map(lambda x: 2 * x, params)

    def step(tx, params, state):
        if in_place and tx is not sam:
            return jdaso.apply_gradients(tx, PARAMS, state, params, grad_fn=grad_fn)
        updates, state = tx.update(PARAMS, state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state

    moved, expected = (step(t, PARAMS, t.init(PARAMS))[0] for t in (tx, sam))
    assert_rounded(moved, expected)


RESHAPING = {
    "lookahead": (
        optax.lookahead(optax.sgd(1.0), 10, 0.5),
        optax.LookaheadParams.init_synced,
        lambda grads: grads,
    ),
    "per-example gradients": (
        optax.chain(optax.contrib.differentially_private_aggregate(1e6, 0.0, 0), optax.scale(-1.0)),
        lambda params: params,
        lambda grads: jax.tree.map(lambda g: jnp.stack([g - 1, g + 1]), grads),
    ),
}


@pytest.mark.parametrize("name", RESHAPING)
def test_an_optimizer_that_reshapes_gradients_goes_into_an_optax_chain(name):
    optimizer, wrap, batched = RESHAPING[name]
    averaging = jdaso.local_sgd(EXCHANGE, period=1)
    params = jax.tree.map(lambda x: jnp.stack([x] * NODES), PARAMS)
    grads = at(0, gradients())
    tx = optax.chain(optimizer, averaging)

    @functools.partial(jax.vmap, axis_name="node")
    def step(params, grads):
        params = wrap(params)
        updates, _ = tx.update(batched(grads), tx.init(params), params)
        return optax.apply_updates(params, updates)

    moved = step(params, grads)
    moved = moved.fast if name == "lookahead" else moved
    expected = jax.tree.map(lambda x, g: x - g.mean(0), params, grads)
    assert_close(moved, expected)
    alone = jdaso.chain(optimizer, jdaso.local_sgd(jdaso.single_exchange(), period=1))
    params = wrap(PARAMS)
    with pytest.raises(ValueError, match=r"use optax.chain\(optimizer, averaging\)"):
        jdaso.apply_gradients(alone, batched(at(0, grads)), alone.init(params), params)
