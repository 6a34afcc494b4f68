"""Schedules follow the timeline of the NumPy recursion and reject invalid arguments."""

import itertools

import golden
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jdaso

VALID = {"period": 4, "warmup": 10, "cooldown": 10, "total": 100, "epoch": 10, "delay": 1}


def timeline(schedule, steps):
    """The plans of the first steps, when no loss is observed."""
    return jax.vmap(schedule.plan, (None, 0))(schedule.init(), jnp.arange(steps))[0]


def golden_run(schedule, steps):
    return golden.daso(np.zeros((1, 1)), np.zeros((steps, 1, 1)), schedule, lr=1.0)


def in_flight(plan):
    """Whether an exchange is in flight after each step according to the plan."""
    due, pending = None, []
    for t in range(len(plan.posts())):
        if due is not None and (t == due or plan.flush[t]):
            due = None
        if plan.posts()[t] and plan.delay[t] > 0:
            due = t + int(plan.delay[t])
        pending.append(due is not None)
    return pending


@pytest.mark.parametrize("period", [1, 2, 3, 6])
@pytest.mark.parametrize("delay", [0, 1, 3, 6])
def test_constant_plans_the_golden_timeline(period, delay):
    delay = min(delay, period)
    plan = timeline(jdaso.constant(period, delay), 30)
    expected = golden_run(golden.Schedule(period, delay), 30)
    assert (plan.period == period).all()
    assert (plan.delay == delay).all()
    assert plan.posts().tolist() == [(t + 1) % period == 0 for t in range(30)]
    assert in_flight(plan) == expected.in_flight.tolist()


@pytest.mark.parametrize(
    "schedule",
    [
        golden.Schedule(4, 2, warmup=6, cooldown=5, total=40, epoch=7),
        golden.Schedule(3, 3, warmup=0, cooldown=0, total=31, epoch=10),
        golden.Schedule(5, 0, warmup=1, cooldown=1, total=20, epoch=20),
        golden.Schedule(6, 4, warmup=2, cooldown=12, total=20, epoch=1),
        golden.Schedule(2, 1, warmup=10, cooldown=10, total=20, epoch=3),  # no cycling phase
        golden.Schedule(4, 4, warmup=7, cooldown=6, total=30, epoch=30),  # phases cut periods
    ],
)
def test_cycling_plans_the_golden_timeline(schedule):
    steps = schedule.total
    plan = timeline(jdaso.cycling(**vars(schedule)), steps)
    expected = golden_run(schedule, steps)
    assert plan.phase.tolist() == expected.phase.tolist()
    assert plan.period.tolist() == expected.period.tolist()
    assert plan.delay.tolist() == expected.delay.tolist()
    assert in_flight(plan) == expected.in_flight.tolist()
    assert plan.epoch_end.tolist() == [schedule.epoch_ends(t) for t in range(steps)]
    assert plan.blocking.tolist() == (expected.phase != golden.CYCLING).tolist()


def test_steps_are_counted_anew_in_each_phase():
    plan = timeline(jdaso.cycling(period=4, warmup=3, cooldown=0, total=20), 20)
    assert np.flatnonzero(plan.posts()).tolist() == [0, 1, 2, 3 + 3, 3 + 7, 3 + 11, 3 + 15, 19]


def test_without_epochs_only_the_end_is_one():
    plan = timeline(jdaso.cycling(period=4, warmup=2, cooldown=2, total=20), 20)
    assert np.flatnonzero(plan.epoch_end).tolist() == [19]


@pytest.mark.parametrize(("period", "delay"), [(1, 1), (3, 1), (4, 1), (8, 2), (11, 2)])
def test_the_default_delay_is_a_quarter_of_the_period(period, delay):
    schedule = jdaso.cycling(period=period, warmup=0, cooldown=0, total=100)
    assert int(schedule.plan(schedule.init(), 0)[0].delay) == delay == max(1, period // 4)


def heard(schedule, losses):
    """(period, delay) after each of the losses."""
    state, pairs = schedule.init(), []
    for loss in losses:
        state = schedule.observe(state, jnp.float32(loss))
        plan, _ = schedule.plan(state, 0)
        pairs.append((int(plan.period), int(plan.delay)))
    return pairs


def test_an_epoch_shorter_than_the_period_warns(recwarn):
    jdaso.cycling(period=4, warmup=2, cooldown=2, total=40, epoch=4)
    jdaso.cycling(period=4, warmup=20, cooldown=20, total=40, epoch=3)  # no cycling phase
    assert not recwarn
    jdaso.cycling(period=4, warmup=2, cooldown=2, total=40, epoch=3)
    (warning,) = recwarn
    assert "epoch=3 and period=4" in str(warning.message)
    assert warning.filename == __file__


def cycling_forever(period, delay, patience, threshold=0.05):
    return jdaso.cycling(period, 0, 0, 10**6, 10, delay, threshold, patience)


@pytest.mark.parametrize("patience", [0, 1, 2])
def test_more_than_patience_bad_epochs_are_a_plateau(patience):
    pairs = heard(cycling_forever(4, 2, patience), [1.0] * (2 + patience))
    assert pairs[: patience + 1] == [(4, 2)] * (patience + 1)  # the first loss is the best so far
    assert pairs[-1] == (2, 1)


@pytest.mark.parametrize(
    ("period", "delay", "cycle"),
    [
        (6, 6, [(6, 6), (3, 3), (1, 1)]),
        (6, 2, [(6, 2), (3, 1), (1, 1)]),
        (5, 1, [(5, 1), (2, 1), (1, 1)]),
        (1, 1, [(1, 1)]),
        (4, 0, [(4, 0), (2, 0), (1, 0)]),  # a delay of 0 stays 0
    ],
)
def test_each_plateau_halves_both_and_the_lowest_starts_anew(period, delay, cycle):
    pairs = heard(cycling_forever(period, delay, patience=0), [1.0] * 7)
    assert pairs == (cycle * 7)[:7]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_threshold_is_relative_also_for_negative_losses(sign):
    # As in Heat, an improvement is more than 5 % of the best loss, whatever its sign.
    good, poor = 1.0 - sign * 0.06, 1.0 - sign * 0.04
    assert heard(cycling_forever(4, 2, 0), [sign, sign * good]) == [(4, 2), (4, 2)]
    assert heard(cycling_forever(4, 2, 0), [sign, sign * poor]) == [(4, 2), (2, 1)]


def test_plateaus_follow_the_golden_test_for_random_losses():
    losses = np.random.default_rng(0).choice([3.0, 2.0, 1.0, 0.98, 0.5, -1.0, -1.02, -2.0], 60)
    cycle = golden.Cycle(golden.Schedule(12, 7, patience=1))
    expected = []
    for loss in losses:
        cycle.epoch_loss(loss)
        expected.append((cycle.period, cycle.delay))
    assert heard(cycling_forever(12, 7, patience=1), losses) == expected
    assert set(expected) == {(12, 7), (6, 3), (3, 1), (1, 1)}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"period": 0}, "period .*got 0"),
        ({"period": 2.5}, "period .*got 2.5"),
        ({"delay": -1}, "delay .*got -1"),
        ({"delay": 5}, "delay=5 and period=4"),
        ({"warmup": -1}, "warmup .*got -1"),
        ({"cooldown": -2}, "cooldown .*got -2"),
        ({"total": 0, "warmup": 0, "cooldown": 0}, "total .*got 0"),
        ({"epoch": 0}, "epoch .*got 0"),
        ({"warmup": 95}, r"warmup \+ cooldown .*95 \+ 10 > 100"),
        ({"warmup": 45, "cooldown": 52}, "period=4 .*3 steps"),
        ({"threshold": -0.1}, "threshold .*got -0.1"),
        ({"threshold": 1.0}, "threshold .*got 1.0"),
        ({"patience": -1}, "patience .*got -1"),
        ({"warmup": 2.5}, "warmup .*got 2.5"),
        ({"epoch": 7.5}, "epoch .*got 7.5"),
    ],
)
def test_cycling_names_the_argument_that_does_not_fit_and_its_value(bad, message):
    with pytest.raises(ValueError, match=message):
        jdaso.cycling(**VALID | bad)


@pytest.mark.parametrize(
    ("period", "delay", "message"),
    [(0, 0, "period .*got 0"), (4, -1, "delay .*got -1"), (4, 5, "delay=5 and period=4")],
)
def test_constant_names_the_argument_that_does_not_fit_and_its_value(period, delay, message):
    with pytest.raises(ValueError, match=message):
        jdaso.constant(period, delay)


def at_step(pairs, step):
    """A function of the step from a list of (period, delay) per step. The last one stays."""
    return pairs[min(step, len(pairs) - 1)]


def of_table(pairs):
    """The same as a traceable function."""
    table = np.array(pairs)

    def function(step):
        return tuple(jnp.asarray(table)[jnp.clip(step, 0, len(table) - 1)])

    return function


def periods(function, steps):
    """(first step, period, delay) of each period, in plain Python.

    After an exchange the function is asked, for the step that follows, when to post the next one.
    """
    first = 0
    while first < steps:
        period, delay = function(first)
        yield first, period, delay
        first += period


def simulated(pairs, steps, fragment=0, fragments=1):
    """Steps at which a fragment is posted, and at which one is merged, in plain Python.

    The first fragment has the last step of a period, the others are spread over those before.
    """
    posts, due = [], []
    for first, period, delay in periods(lambda step: at_step(pairs, step), steps):
        posts.append(first - 1 + (fragment * period // fragments or period))
        due.append(posts[-1] + delay)
    # At most one exchange is in flight, so posting merges the previous one.
    merges = {min(d, following) for d, following in zip(due, [*posts[1:], steps], strict=True)}
    return [t for t in posts if t < steps], sorted(t for t in merges if t < steps)


pairs = st.integers(1, 6).flatmap(lambda period: st.tuples(st.just(period), st.integers(0, period)))
tables = st.lists(pairs, min_size=1, max_size=40)


def asked(function, steps):
    """(period, delay) at each step, latched as :func:`periods` says."""
    held = ([period, delay] for _, period, delay in periods(function, steps) for _ in range(period))
    return list(itertools.islice(held, steps))


@settings(max_examples=10)  # each example is compiled
@given(tables)
def test_by_step_posts_and_merges_as_a_loop_in_python_does(drawn):
    averaging = jdaso.dasgd(
        jdaso.single_exchange(), schedule=jdaso.schedules.by_step(of_table(drawn))
    )

    def step(state, _):
        before = state.exchanges
        _, state = averaging.update(jnp.zeros(1), state, jnp.zeros(1))
        seen = jnp.stack([state.plan.period, state.plan.delay])
        return state, (state.exchanges > before, state.merged, seen)

    _, (posts, merges, plans) = jax.lax.scan(step, averaging.init(jnp.zeros(1)), length=60)
    expected = simulated(drawn, 60)
    assert np.flatnonzero(posts).tolist() == expected[0]
    assert np.flatnonzero(merges).tolist() == expected[1]
    assert plans.tolist() == asked(lambda step: at_step(drawn, step), 60)


def turns(schedule, fragments, steps=60):
    """Array (steps, fragments): whether a fragment is posted after a step."""

    def step(state, t):
        plan, state = schedule.plan(state, t)
        return state, jnp.stack([plan.posts(k, fragments) for k in range(fragments)])

    return np.asarray(jax.lax.scan(step, schedule.init(), jnp.arange(steps))[1])


def assert_each_has_its_turn(posts, expected):
    """posts has shape (T, fragments), expected holds the steps after which each is posted."""
    assert [np.flatnonzero(column).tolist() for column in posts.T] == expected
    ends = expected[0]
    for begin, end in zip([-1, *ends], ends, strict=False):
        assert (posts[begin + 1 : end + 1].sum(0) == 1).all()  # once in every period
        length, steps = end - begin, np.flatnonzero(posts[begin + 1 : end + 1].any(1))
        n = min(len(expected), length)
        assert len(steps) == n
        gaps = np.diff(steps, prepend=-1)  # from the end of the previous period
        assert set(gaps.tolist()) <= {length // n, -(-length // n)}


@settings(max_examples=12)
@given(st.data())
def test_by_step_gives_every_fragment_one_turn_in_a_period(data):
    drawn = data.draw(tables)
    fragments = data.draw(st.integers(1, max(period for period, _ in drawn)))
    posts = turns(jdaso.schedules.by_step(of_table(drawn)), fragments)
    expected = [simulated(drawn, 60, k, fragments)[0] for k in range(fragments)]
    assert_each_has_its_turn(posts, expected)


@settings(max_examples=6)
@given(pairs, pairs, st.integers(1, 50), st.data())
def test_linear_gives_every_fragment_one_turn_in_a_period(start, end, steps, data):
    fragments = data.draw(st.integers(1, max(start[0], end[0])))
    posts = turns(jdaso.schedules.linear(start, end, steps), fragments)
    line = [straight(start, end, steps, t) for t in range(steps + 1)]
    expected = [simulated(line, 60, k, fragments)[0] for k in range(fragments)]
    assert_each_has_its_turn(posts, expected)


def straight(start, end, steps, step):
    """(period, delay) on a straight line, rounded down."""
    return tuple(a + (b - a) * min(step, steps) // steps for a, b in zip(start, end, strict=True))


def posted_by(schedule, steps):
    """Steps after which a stateful schedule posts."""

    def step(state, t):
        plan, state = schedule.plan(state, t)
        return state, plan.posts()

    return np.flatnonzero(jax.lax.scan(step, schedule.init(), jnp.arange(steps))[1]).tolist()


def test_by_step_of_numbers_is_constant():
    for period, delay in [(1, 0), (3, 2), (4, 4)]:
        schedule = jdaso.schedules.by_step(lambda step, pair=(period, delay): pair)
        assert posted_by(schedule, 30) == posted_by(jdaso.constant(period, delay), 30)


def test_post_local_sgd():
    schedule = jdaso.schedules.by_step(lambda step: (jnp.where(step < 10, 1, 8), 0))
    assert posted_by(schedule, 40) == [*range(10), 17, 25, 33]
    assert schedule.longest == 8


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda step: (0, 0), r"function\(0\): period .*got 0"),
        (lambda step: (2.5, 0), r"function\(0\): period .*got 2.5"),
        (lambda step: (4 - step // 10, 0), r"function\(40\): period .*got 0"),
        (lambda step: (4, step // 100), r"function\(500\): .*delay=5 and period=4"),
        (lambda step: (4, -(step // 4095)), r"function\(4095\): delay .*got -1"),
        (lambda step: (4, jnp.where(step < 2**20, 4, 5)), r"function\(1048576\): .*delay=5"),
    ],
)
def test_by_step_names_the_step_at_which_the_function_does_not_fit(function, message):
    with pytest.raises(ValueError, match=f"by_step: {message}"):
        jdaso.schedules.by_step(function)


def test_by_step_clips_where_it_has_not_looked():
    def at_5000(usual, other):
        return lambda step: tuple(
            jnp.where(step == 5000, b, a) for a, b in zip(usual, other, strict=True)
        )

    for other, clipped in [
        ((0, 0), (1, 0)),
        ((-3, 2), (1, 1)),
        ((4, 9), (4, 4)),
        ((4, -1), (4, 0)),
    ]:
        schedule = jdaso.schedules.by_step(at_5000((4, 2), other))
        plan, _ = schedule.plan(jnp.int32(4999), 5000)
        assert (int(plan.period), int(plan.delay)) == clipped


def test_by_step_may_be_made_inside_jit():
    """optax.inject_hyperparams makes a new optimizer in every step."""

    @optax.inject_hyperparams
    def optimizer(learning_rate):
        schedule = jdaso.schedules.linear((1, 0), (4, 2), 8)
        averaging = jdaso.dasgd(jdaso.single_exchange(), schedule=schedule)
        return optax.chain(optax.sgd(learning_rate), averaging)

    tx = optimizer(learning_rate=0.1)
    _, state = jax.jit(tx.update)(jnp.ones(1), tx.init(jnp.ones(1)), jnp.ones(1))
    assert int(jdaso.core.averaging_state(state).exchanges) == 1


@settings(max_examples=20)
@given(pairs, pairs, st.integers(1, 3000))
def test_linear_is_a_straight_line_rounded_down(start, end, steps):
    schedule, total = jdaso.schedules.linear(start, end, steps), steps + steps // 2 + 10

    def step(state, t):
        plan, state = schedule.plan(state, t)
        return state, (plan.period, plan.delay)

    _, walked = jax.lax.scan(step, schedule.init(), jnp.arange(total))
    expected = asked(lambda t: straight(start, end, steps, t), total)
    assert np.stack(walked, -1).tolist() == expected


def test_linear_is_exact_for_long_periods_and_many_steps():
    for steps in (10**4, 3 * 10**4, 10**6 + 3):
        schedule = jdaso.schedules.linear((1, 0), (1001, 500), steps)
        asked = [k * steps // 1000 + i for k in range(1, 1000, 7) for i in (-1, 0, 1, 2)]
        last = jnp.asarray(asked) - 1  # there was an exchange at the previous step
        plan, _ = jax.vmap(schedule.plan)(last, last + 1)
        assert plan.period.tolist() == [1 + 1000 * t // steps for t in asked]
        assert plan.delay.tolist() == [500 * t // steps for t in asked]


@pytest.mark.parametrize(
    ("start", "end", "steps", "message"),
    [
        ((0, 0), (4, 2), 10, "period .*got 0"),
        ((4, 2), (4, 5), 10, "delay=5 and period=4"),
        ((1, 0), (4, 2), 0, "steps .*got 0"),
        ((1, 0), (4, 2), 2.5, "steps .*got 2.5"),
    ],
)
def test_linear_names_the_argument_that_does_not_fit(start, end, steps, message):
    with pytest.raises(ValueError, match=message):
        jdaso.schedules.linear(start, end, steps)


def test_cycling_has_no_number_that_jax_debug_infs_refuses():
    tx = jdaso.local_sgd(jdaso.single_exchange(), schedule=jdaso.cycling(4, 1, 1, 40, epoch=5))
    with jax.debug_infs(True):
        state, params = tx.init(jnp.ones(2)), jnp.ones(2)
        for _ in range(12):
            _, state = tx.update(params, state, params, value=jnp.float32(1.0))
    assert int(jdaso.metrics(state).step) == 12
