"""Fragments of the parameters that are exchanged at different steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jdaso
from jdaso.core.tree import cut, part_of
from jdaso.core.types import ParamsWithMoments

NODES, STEPS, LR = 3, 26, 2.0**-4
EXACT = {"wire": "float32", "blocking_wire": "float32"}


def is_float(leaf):
    return np.issubdtype(leaf.dtype, np.floating)


leaves = st.builds(
    lambda size, dtype: np.zeros(size, dtype),
    st.integers(0, 50),
    st.sampled_from(["f2", "f4", "f8", "i4", "?"]),
)


@st.composite
def trees_and_counts(draw):
    tree = draw(st.lists(leaves, min_size=1, max_size=12).filter(lambda t: any(map(is_float, t))))
    return tree, draw(st.integers(1, sum(map(is_float, tree))))


@given(trees_and_counts())
def test_cut_makes_a_partition_of_consecutive_leaves_with_a_float_in_each(drawn):
    tree, count = drawn
    fragments = cut(tree, count)
    assert len(fragments) == count
    assert sorted(i for places in fragments for i in places) == list(range(len(tree)))
    floats = [[i for i in places if is_float(tree[i])] for places in fragments]
    assert all(floats)
    assert [i for places in floats for i in places] == [
        i for i, leaf in enumerate(tree) if is_float(leaf)
    ]


@given(trees_and_counts())
@settings(max_examples=300)
def test_cut_balances_bytes_within_the_largest_leaf(drawn):
    tree, count = drawn
    sizes = [leaf.nbytes if is_float(leaf) else 0 for leaf in tree]
    share = sum(sizes) / count
    for places in cut(tree, count):
        assert sum(sizes[i] for i in places) <= share + max(sizes)


@given(trees_and_counts())
def test_parts_hold_each_leaf_once(drawn):
    tree, count = drawn
    held = [part_of({"a": tree}, places)["a"] for places in cut(tree, count)]
    for i, leaf in enumerate(tree):
        (only,) = [x[i] for x in held if not isinstance(x[i], optax.MaskedNode)]
        assert only is leaf


def test_a_function_must_use_every_index():
    tree = [np.ones(2), np.ones(1), np.ones(1, int)]
    assert cut(tree, lambda path: 1 - path[0].idx) == [[1, 2], [0]]
    with pytest.raises(ValueError, match=r"each index from 0 .* got the indices \[0, 2\]"):
        cut(tree, lambda path: 2 * path[0].idx)


def test_the_memory_of_a_parameter_is_in_its_fragment():
    params = {"a": np.ones(2), "b": {"c": np.ones(1), "d": np.ones(1)}, "n": np.ones(9, int)}
    nothing = optax.MaskedNode()
    moments = [
        {"a": np.ones(2), "b": nothing, "n": nothing},
        {"a": nothing, "b": {"c": np.ones(1), "d": np.ones(1)}, "n": nothing},
    ]
    # The leaves are a, c, d, n, then the moments of a, c and d.
    assert cut(ParamsWithMoments(params, moments), 2) == [[0, 3, 4], [1, 2, 5, 6]]


def test_more_fragments_than_leaves_or_steps_are_refused():
    with pytest.raises(ValueError, match=r"fragments must be at most 2, .*got 3"):
        cut({"a": np.ones(3), "b": np.ones(1), "n": np.ones(5, int)}, 3)
    tx = jdaso.dasgd(jdaso.single_exchange(), 4, 2, fragments=3)
    with pytest.raises(ValueError, match=r"fragments must be at most 2, .*got 3"):
        tx.init({"a": jnp.ones(3), "b": jnp.ones(1)})
    for count in (0, 5):
        with pytest.raises(ValueError, match=rf"integer in \[1, 4\], got {count}"):
            jdaso.dasgd(jdaso.single_exchange(), 4, 2, fragments=count)


@given(st.integers(1, 40).flatmap(lambda p: st.tuples(st.just(p), st.integers(1, p))))
@settings(max_examples=30)
def test_turns_are_spread_evenly_over_a_period(drawn):
    period, fragments = drawn
    schedule = jdaso.constant(period)
    plan = schedule.plan((), np.arange(3 * period))[0]
    posts = np.array([plan.posts(k, fragments) for k in range(fragments)])
    for first in range(2 * period):  # wherever a period starts
        assert (posts[:, first : first + period].sum(1) == 1).all()
    assert posts.sum(0).max() == 1
    gaps = np.diff(np.flatnonzero(posts.any(0)))
    assert set(gaps) <= {period // fragments, -(-period // fragments)}


PARAMS = {"a": jnp.linspace(-1, 1, 8), "b": jnp.linspace(2, 3, 6), "c": jnp.linspace(0, 5, 7)}


def simulate(averaging, params=PARAMS, steps=STEPS, losses=1.0):
    """Parameters and engine state of all nodes after every step. Leaves are (T, P, ...)."""
    tx = jdaso.chain(optax.sgd(LR, momentum=0.5), averaging)
    rng = np.random.default_rng(0)
    drawn = {name: rng.normal(size=(steps, NODES, *x.shape)) for name, x in PARAMS.items()}
    grads = {name: jnp.asarray(drawn[name], jnp.float32) for name in params}

    def node(grads):
        def step(carry, grad):
            x, state = carry
            x, state = jdaso.apply_gradients(tx, grad, state, x, value=losses)
            return (x, state), (x, jdaso.core.averaging_state(state))

        return lax.scan(step, (params, tx.init(params)), grads)[1]

    return jax.jit(jax.vmap(node, 1, 1, axis_name="node"))(grads)


def posted(state, fragment):
    return state.fragments[fragment].posted[:, 0]


EXCHANGE = jdaso.axis_exchange("node", NODES)
ALGORITHMS = {
    "daso": lambda schedule, **options: jdaso.daso(EXCHANGE, schedule=schedule, **EXACT, **options),
    "dasgd": lambda schedule, **options: jdaso.dasgd(EXCHANGE, schedule=schedule, **options),
    "diloco": lambda schedule, **options: jdaso.diloco(
        EXCHANGE, schedule=schedule, mix=0.5, warmup=1, **options
    ),
}


@pytest.mark.parametrize(
    ("name", "period", "delay"), [("daso", 7, 4), ("daso", 3, 3), ("dasgd", 5, 0), ("diloco", 7, 4)]
)
def test_a_fragment_is_exchanged_as_if_alone_with_its_own_clock(name, period, delay):
    schedule = jdaso.constant(period, delay)
    params, state = simulate(ALGORITHMS[name](schedule, fragments=3))
    numbers = []
    for k, leaf in enumerate(PARAMS):
        turn = k * period // 3
        shifted = schedule._replace(
            plan=lambda state, step, turn=turn: schedule.plan(state, step - turn)
        )
        alone, its_state = simulate(ALGORITHMS[name](shifted), {leaf: PARAMS[leaf]})
        np.testing.assert_array_equal(posted(state, k), posted(its_state, 0))
        # The same recursion in another program differs by a few roundings of float32.
        np.testing.assert_allclose(params[leaf], alone[leaf], rtol=1e-5, atol=1e-6)
        numbers.append(its_state.exchanges[:, 0])
    np.testing.assert_array_equal(state.exchanges[:, 0], sum(numbers))
    assert (np.diff(state.exchanges[:, 0]) <= 1).all()  # never two at a step


PHASES = functools.partial(
    jdaso.cycling, period=4, delay=3, warmup=3, cooldown=3, total=STEPS, epoch=6, patience=0
)


def test_blocking_phases_and_ends_of_epochs_exchange_all_fragments():
    schedule = PHASES()
    params, state = simulate(ALGORITHMS["daso"](schedule, fragments=3))
    plan = jax.tree.map(lambda x: np.asarray(x)[:, 0], state.plan)
    exchanges = np.diff(state.exchanges[:, 0], prepend=0)
    everything = plan.blocking | plan.epoch_end
    assert plan.epoch_end[~plan.blocking].any()
    assert (exchanges[everything] == 3).all()
    assert exchanges[~everything].max() >= 1
    assert exchanges[:10].tolist() == [3, 3, 3, 1, 1, 3, 1, 1, 1, 0]
    in_flight = np.stack([posted(state, k) for k in range(3)])
    assert not in_flight[:, everything].any()
    assert in_flight.any(1).all()
    for x in params.values():  # adding the difference to the mean rounds
        np.testing.assert_allclose(x[everything], x[everything][:, :1] + 0 * x[everything], 1e-6)


def test_fragments_hear_the_same_losses():
    """Plateaus halve the period below the number of fragments, so several share a step."""
    _, whole = simulate(ALGORITHMS["daso"](PHASES()))
    _, cut_up = simulate(ALGORITHMS["daso"](PHASES(), fragments=3))
    np.testing.assert_array_equal(whole.plan.period, cut_up.plan.period)
    assert {1, 2, 4} <= set(np.asarray(whole.plan.period).ravel().tolist())


def test_where_all_exchanges_block_fragments_change_no_bit():
    schedule = PHASES(warmup=13, cooldown=13)
    whole, _ = simulate(ALGORITHMS["daso"](schedule))
    cut_up, state = simulate(ALGORITHMS["daso"](schedule, fragments=3))
    assert state.exchanges[-1, 0] == 3 * STEPS
    jax.tree.map(np.testing.assert_array_equal, whole, cut_up)


def test_one_fragment_is_the_whole():
    schedule = jdaso.constant(4, 3)
    one, _ = simulate(ALGORITHMS["dasgd"](schedule, fragments=lambda path: 0))
    whole, _ = simulate(ALGORITHMS["dasgd"](schedule))
    jax.tree.map(np.testing.assert_array_equal, one, whole)
