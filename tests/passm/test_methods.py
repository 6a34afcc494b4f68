"""ASSM, PASSM and PASSM+ are the recursions of the paper, for a given order of the steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_passm import plus, train, weighted_mean
from passm_problem import batch, first_params, flat, gradient, loss_fn, places

import jdaso
from jdaso.passm import assm, partition, passm, passm_plus, settled, simulated_memory
from jdaso.passm.training import group_mean

STEPS, RATE, MOMENTUM, PROCESSES = 12, 0.2, 0.8, 3
SWITCHES = [3, 6, 9]


def decaying(step):
    return RATE * 0.9**step


METHODS = {
    "assm": (assm, {}, lambda k: True, lambda k: 1.0),
    "passm": (passm, {}, lambda k: False, lambda k: 1.0),
    "passm_plus": (passm_plus, {"switches": SWITCHES}, *plus(SWITCHES, PROCESSES)),
}


def train_in_turn(memories, blocks, method, data=batch, steps=STEPS, **options):
    """Steps of all processes in turn: yields the results of each round, and the states."""
    options = {"loss_fn": loss_fn, "learning_rate": decaying, "momentum": MOMENTUM} | options
    trainings = [method(memory, blocks, **options) for memory in memories]
    states = [training.init() for training in trainings]
    for k in range(steps):
        results = []
        for c, training in enumerate(trainings):
            states[c], result = training.step(states[c], *data(c, k))
            results.append(result)
        yield results, states


def run(method, processes, read_together=False, data=batch, **options):
    """Steps of all processes in turn. Returns the parameters after each round, and the states."""
    params, common = first_params(), [None]
    memories = simulated_memory(params, processes)
    read = memories[0].read
    if read_together:
        memories = [memory._replace(read=lambda: common[0]) for memory in memories]
    common[0], seen = read(), []
    rounds = train_in_turn(memories, partition(params, processes), method, data, **options)
    for _, states in rounds:  # noqa: B007
        common[0] = read()
        seen.append(flat(common[0]))
    return np.array(seen), states


def indices(block):
    """The indices of a block's leaves in the result of :func:`flat`."""
    leaves = places(first_params())
    return np.concatenate([leaves[i] for i in block])


def expected(processes, whole, factor, read_together=False, gradient=gradient):
    """The oracle's parameters after each round. Who reads together misses other's writes."""
    x = flat(first_params())
    blocks = [indices(block) for block in partition(first_params(), processes)]
    turns = [
        (c, range(len(x)) if whole(k) else block)
        for k in range(STEPS)
        for c, block in enumerate(blocks)
    ]
    versions, _ = train(
        x,
        gradient,
        turns,
        lambda k: decaying(k) * factor(k),
        MOMENTUM,
        lambda k: k % processes if read_together else 0,
    )
    return versions[processes::processes]


@pytest.mark.parametrize("read_together", [False, True])
@pytest.mark.parametrize("name", ["assm", "passm", "passm_plus"])
def test_it_is_the_recursion_of_the_paper(name, read_together):
    method, options, whole, factor = METHODS[name]
    seen, states = run(method, PROCESSES, read_together, **options)
    golden = expected(PROCESSES, whole, factor, read_together)
    np.testing.assert_allclose(seen, golden, rtol=0, atol=2e-5)
    assert [(state.step, state.skipped) for state in states] == [(STEPS, 0)] * PROCESSES


def drawn_delays(max_delay, seed):
    """The delays that the simulation draws, as ``k -> d^k``; at k = 0 there is one version only."""
    rng, shapes = np.random.default_rng(seed), [x.shape for x in jax.tree.leaves(first_params())]

    def delays(k):
        drawn = [rng.integers(max_delay, size=shape, endpoint=True) for shape in shapes if k]
        return np.concatenate([np.ravel(d) for d in drawn]) if drawn else 0

    return delays


@pytest.mark.parametrize("name", METHODS)
def test_delayed_reads_mix_versions_as_in_algorithm_2(name):
    method, options, whole, factor = METHODS[name]
    blocks, x = partition(first_params(), PROCESSES), flat(first_params())
    turns = [
        (c, range(len(x)) if whole(k) else indices(block))
        for k in range(STEPS)
        for c, block in enumerate(blocks)
    ]
    golden, reads = train(
        x, gradient, turns, lambda k: decaying(k) * factor(k), MOMENTUM, drawn_delays(4, 7)
    )
    memories = simulated_memory(first_params(), PROCESSES, max_delay=4, seed=7)
    rounds = train_in_turn(
        memories, blocks, method, loss_fn=lambda p, *b: (loss_fn(p, *b), p), has_aux=True, **options
    )
    seen = [flat(read) for results, _ in rounds for _, read in results]
    np.testing.assert_allclose(seen, reads, rtol=0, atol=2e-5)
    np.testing.assert_allclose(flat(settled(memories[0])), golden[-1], rtol=0, atol=2e-5)
    assert np.abs(golden[:-1] - reads).max() > 0.1  # the delays matter


@pytest.mark.parametrize(("name", "processes"), [("passm", 1), ("passm", 2), ("passm_plus", 2)])
def test_blocks_are_drawn_at_random_among_those_of_a_process(name, processes):
    """One process that draws among all blocks and reads with delays is Algorithm 2 as a whole."""
    method, options, whole, _ = METHODS[name]
    factor = plus(SWITCHES, processes)[1] if options else METHODS[name][3]
    blocks, seed, x = [(0,), (2, 1), (3,), (4,)], 3, flat(first_params())
    own, turns, drawn = np.array_split(np.arange(4), processes), [], set()
    for k in range(STEPS):
        for c in range(processes):
            block = own[c][np.random.default_rng((seed, c, k)).integers(len(own[c]))]
            turns.append((c, range(len(x)) if whole(k) else indices(blocks[block])))
            drawn.add(block)
    golden, _ = train(
        x, gradient, turns, lambda k: decaying(k) * factor(k), MOMENTUM, drawn_delays(4, 7)
    )
    memories = simulated_memory(first_params(), processes, max_delay=4, seed=7)
    list(train_in_turn(memories, blocks, method, seed=seed, **options))
    np.testing.assert_allclose(flat(settled(memories[0])), golden[-1], rtol=0, atol=2e-5)
    assert drawn == {0, 1, 2, 3}


def test_whoever_owns_several_blocks_holds_their_momentum_only():
    blocks = [(0,), (1, 2), (3,), (4,)]
    memories = simulated_memory(first_params(), 2)
    _, states = list(train_in_turn(memories, blocks, passm))[-1]
    shapes = [[x.shape for x in jax.tree.leaves(state.momentum)] for state in states]
    assert shapes == [[(2,), (2, 3), (3,)], [(), (4,)]]


def parts(count):
    """Minibatches in ``count`` parts, stacked."""

    def data(c, k):
        rows = zip(*(batch(c, count * k + j) for j in range(count)), strict=True)
        return tuple(np.stack(part) for part in rows)

    return data


@pytest.mark.parametrize("name", METHODS)
def test_a_step_accumulates_the_subgradients_of_several_minibatches(name):
    """Computed at 8 rows and applied at 16, as passm Fig. 3 does at 64 and 128."""
    method, options, whole, factor = METHODS[name]

    def mean(x, c, k):
        return weighted_mean([gradient(x, c, 2 * k + j) for j in range(2)], [8, 8])

    seen, _ = run(method, PROCESSES, data=parts(2), accumulate=2, **options)
    golden = expected(PROCESSES, whole, factor, gradient=mean)
    np.testing.assert_allclose(seen, golden, rtol=0, atol=2e-5)


def test_the_loss_of_accumulated_minibatches_is_their_mean_and_aux_has_one_entry_for_each():
    def with_aux(params, a, b):
        return loss_fn(params, a, b), b[0]

    memories, data = simulated_memory(first_params()), parts(3)
    rounds = train_in_turn(
        memories, [(0, 1, 2, 3, 4)], assm, data, 1, loss_fn=with_aux, has_aux=True, accumulate=3
    )
    ((loss, aux),), _ = next(iter(rounds))
    params, (a, b) = first_params(), data(0, 0)
    assert float(loss) == pytest.approx(np.mean([loss_fn(params, a[j], b[j]) for j in range(3)]))
    np.testing.assert_array_equal(aux, b[:, 0])


def test_accumulated_minibatches_must_be_stacked():
    memories = simulated_memory(first_params())
    rounds = train_in_turn(memories, [(0, 1, 2, 3, 4)], assm, batch, 1, accumulate=2)
    with pytest.raises(ValueError, match=r"accumulate=2 .* shape \(8, 16\)"):
        next(rounds)


def test_a_group_weighs_subgradients_by_batch_and_leaves_out_what_is_not_finite():
    """passm Fig. 4: a server computes at 32, its slaves at 128. The others' weights stay right."""
    rng = np.random.default_rng(0)
    grads, sizes = rng.normal(size=(4, 50)).astype("f4"), np.array([32, 128, 128, 128])
    group = jdaso.axis_exchange("member", 4)

    def mean(grads):
        each = jax.vmap(lambda g, b: group_mean(group, {"w": g}, b)["w"], axis_name="member")
        return each(grads, sizes.astype("f4"))

    np.testing.assert_allclose(mean(grads)[2], weighted_mean(grads, sizes), rtol=0, atol=1e-6)
    half = mean(1000 * grads.astype("f2"))  # the sum of weighted float16 would overflow
    assert half.dtype == np.float16
    np.testing.assert_allclose(half[0], 1000 * weighted_mean(grads, sizes), rtol=2e-3, atol=2)
    grads[1, 7] = np.nan
    left = weighted_mean(np.delete(grads, 1, 0), np.delete(sizes, 1))
    np.testing.assert_allclose(mean(grads)[0], left, rtol=0, atol=1e-6)


def test_a_learning_rate_that_sequential_sgd_bears_is_too_large_for_delayed_reads():
    """x <- x - 1.5 x halves x at each step; with the x of up to four steps ago it grows."""

    def last(max_delay):
        memories = simulated_memory({"w": np.float32(1)}, 1, max_delay)
        rounds = train_in_turn(
            memories,
            [(0,)],
            assm,
            lambda c, k: (),
            40,
            loss_fn=lambda p: p["w"] ** 2 / 2,
            learning_rate=1.5,
            momentum=0.0,
        )
        list(rounds)
        return abs(float(settled(memories[0])["w"]))

    assert last(0) == 2**-40
    assert last(4) > 10


def test_one_process_of_assm_is_sgd_with_momentum():
    """The step of Algorithm 1 is (1 - m) times that of optax.sgd."""
    seen, _ = run(assm, 1)
    tx = optax.sgd(lambda k: (1 - MOMENTUM) * RATE * 0.9**k, momentum=MOMENTUM)

    @jax.jit
    def step(params, state, *data):
        updates, state = tx.update(jax.grad(loss_fn)(params, *data), state)
        return optax.apply_updates(params, updates), state

    params = first_params()
    state = tx.init(params)
    for k in range(STEPS):
        params, state = step(params, state, *batch(0, k))
        np.testing.assert_allclose(seen[k], flat(params), rtol=0, atol=2e-6)


def test_passm_plus_without_switches_is_assm_and_with_one_at_once_almost_passm():
    np.testing.assert_array_equal(run(passm_plus, 2, switches=[])[0], run(assm, 2)[0])
    late, early = run(passm_plus, 2, switches=[STEPS])[0], run(passm_plus, 2, switches=[1])[0]
    np.testing.assert_array_equal(late, run(assm, 2)[0])
    assert np.abs(early - run(passm, 2)[0]).max() > 1e-3  # the first step was ASSM's


def test_weights_decay_before_the_momentum():
    decay = 0.1
    seen, _ = run(passm, 3, before=optax.add_decayed_weights(decay))
    golden = expected(
        3, lambda k: False, lambda k: 1.0, gradient=lambda x, c, k: gradient(x, c, k) + decay * x
    )
    np.testing.assert_allclose(seen, golden, rtol=0, atol=2e-5)


@pytest.mark.parametrize("method", [assm, passm])
def test_a_subgradient_that_is_not_finite_writes_nothing(method):
    def broken(c, k):
        a, b = batch(c, k)
        return (a * np.nan, b) if (c, k) == (1, 4) else (a, b)

    seen, states = run(method, 2, data=broken)
    assert np.isfinite(seen).all()
    assert [state.skipped for state in states] == [0, 1]
    with pytest.raises(jdaso.JdasoError, match="process 1 is not finite at its step 4"):
        run(method, 2, data=broken, nonfinite="raise")


def test_what_was_read_does_not_change_afterwards():
    """JAX uses NumPy memory without a copy where it can, so it must not get the shared memory."""
    memory = simulated_memory({"w": np.zeros(64, "f4")})[0]
    before = jnp.asarray(memory.read()["w"])
    memory.add({0: {0: np.ones(64, "f4")}}, False)
    assert float(before.sum()) == 0
    assert float(memory.read()["w"].sum()) == 64


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_stay_and_integers_are_left_alone(dtype):
    params = {"w": jnp.ones(4, dtype), "count": jnp.int32(7)}
    memory = simulated_memory(params)[0]
    training = assm(memory, partition(params, 1), lambda p, x: (p["w"] * x).sum(), 1.0, 0.0)
    state, _ = training.step(training.init(), jnp.ones(4, dtype))
    after = memory.read()
    assert (after["w"].dtype, after["count"]) == (jnp.dtype(dtype), 7)
    np.testing.assert_array_equal(np.asarray(after["w"], "f4"), np.zeros(4))
    assert state.momentum["w"].dtype == jnp.dtype(dtype)


def test_each_kind_of_step_is_compiled_once():
    traces = []

    def counted(params, a, b):
        traces.append(1)
        return loss_fn(params, a, b)

    params = first_params()
    memory, _ = simulated_memory(params, 2)
    training = passm_plus(memory, partition(params, 2), counted, decaying, switches=SWITCHES)
    state = training.init()
    for k in range(STEPS):
        state, _ = training.step(state, *batch(0, k))
    assert len(traces) == 2


BAD = [
    ({"learning_rate": 0.0}, "learning_rate must be positive and finite, got 0.0"),
    ({"learning_rate": -1}, "learning_rate must be positive and finite, got -1"),
    ({"learning_rate": float("nan")}, "learning_rate must be positive"),
    ({"learning_rate": "fast"}, "learning_rate must be a number"),
    ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
    ({"momentum": -0.1}, r"momentum must be in \[0, 1\)"),
    ({"nonfinite": "ignore"}, "nonfinite must be one of skip, raise"),
    ({"before": optax.trace(0.9)}, "before must be a transformation without a state"),
    ({"blocks": [(0, 1, 2, 3, 4)]}, r"among 2 processes.*.*use partition\(params, 2\)"),
    ({"blocks": [(0, 1), (3, 4)]}, "blocks must divide all floating-point leaves"),
    ({"blocks": [(0, 1), (2, 3), (4,)]}, "2 processes, the same number of blocks for each"),
    ({"blocks": []}, "blocks must divide all floating-point leaves"),
    ({"accumulate": 0}, "accumulate must be an integer >= 1, got 0"),
    ({"seed": -1}, "seed must be an integer >= 0, got -1"),
    ({"batch_size": 8}, "batch_size weighs .* give it together with group"),
]


@pytest.mark.parametrize(("arguments", "named"), BAD)
@pytest.mark.parametrize("method", [assm, passm, passm_plus])
def test_bad_arguments_are_named(method, arguments, named):
    params = first_params()
    memory = simulated_memory(params, 2)[0]
    options = {"blocks": partition(params, 2), "learning_rate": 0.1} | arguments
    if method is passm_plus:
        options["switches"] = [1]
    with pytest.raises(ValueError, match=named):
        method(memory, loss_fn=loss_fn, **options)


def test_the_group_must_have_the_members_of_a_server():
    params = first_params()
    memory = simulated_memory(params)[0]
    with pytest.raises(ValueError, match=r"group must have 2 members, .* got 1"):
        assm(memory._replace(members=2), partition(params, 1), loss_fn, 0.1)
    group = jdaso.axis_exchange("slave", 2)
    with pytest.raises(ValueError, match=r"group must have 1 members, .* got 2"):
        assm(memory, partition(params, 1), loss_fn, 0.1, group=group)


@pytest.mark.parametrize(
    ("batch_size", "named"),
    [(None, "group requires batch_size"), (0, "batch_size must be an integer >= 1")],
)
def test_a_group_needs_the_samples_of_each_member(batch_size, named):
    memory = simulated_memory(first_params())[0]._replace(members=2)
    group = jdaso.axis_exchange("slave", 2)
    with pytest.raises(ValueError, match=named):
        assm(memory, [(0, 1, 2, 3, 4)], loss_fn, 0.1, group=group, batch_size=batch_size)


def test_a_learning_rate_that_goes_wrong_later_is_named_with_its_step():
    params = first_params()
    training = assm(simulated_memory(params)[0], partition(params, 1), loss_fn, lambda k: 1 - 2 * k)
    state, _ = training.step(training.init(), *batch(0, 0))
    with pytest.raises(ValueError, match=r"got -1.0 at step 1"):
        training.step(state, *batch(0, 1))
