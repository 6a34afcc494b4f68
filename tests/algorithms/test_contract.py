"""Properties that every algorithm has, whatever it computes.

A new algorithm is one line of ALGORITHMS.
"""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from jax import lax

import jdaso

NODES, STEPS, RATE = 3, 16, 0.1
PHASES = {"period": 2, "warmup": 3, "cooldown": 3, "total": STEPS, "epoch": 5, "patience": 0}

# name -> (exchange, sgd, rate, chain) -> a whole optimizer; sgd(rate) is the local one.
ALGORITHMS = {
    "daso": lambda x, sgd, lr, chain: chain(sgd(lr), jdaso.daso(x, 4, 2)),
    "daso cycling": lambda x, sgd, lr, chain: chain(
        sgd(lr), jdaso.daso(x, schedule=jdaso.cycling(**PHASES), blocking_wire="float32")
    ),
    "daso delta": lambda x, sgd, lr, chain: chain(sgd(lr), jdaso.daso(x, 4, 2, merge="delta")),
    "dasgd": lambda x, sgd, lr, chain: chain(sgd(lr), jdaso.dasgd(x, 4, 2)),
    "dasgd delta": lambda x, sgd, lr, chain: chain(sgd(lr), jdaso.dasgd(x, 4, 2, merge="delta")),
    "dasgd fragments": lambda x, sgd, lr, chain: chain(sgd(lr), jdaso.dasgd(x, 4, 3, fragments=2)),
    "dasgd linear": lambda x, sgd, lr, chain: chain(
        sgd(lr), jdaso.dasgd(x, schedule=jdaso.schedules.linear((1, 0), (4, 3), 10))
    ),
    "local_sgd": lambda x, sgd, lr, chain: chain(sgd(lr), jdaso.local_sgd(x, 4)),
    "local_sgd delta": lambda x, sgd, lr, chain: chain(sgd(lr), jdaso.local_sgd(x, 4, 2, "delta")),
    "easgd": lambda x, sgd, lr, chain: chain(sgd(lr), jdaso.easgd(x, 4)),
    "eamsgd": lambda x, sgd, lr, chain: jdaso.eamsgd(x, 4, lr, 0.9),
    "diloco": lambda x, sgd, lr, chain: chain(sgd(lr), jdaso.diloco(x, 4)),
    "streaming diloco": lambda x, sgd, lr, chain: chain(
        sgd(lr), jdaso.diloco(x, 4, delay=3, mix=0.5, fragments=2, warmup=1)
    ),
    "allreduce_gradients": lambda x, sgd, lr, chain: chain(sgd(lr), jdaso.allreduce_gradients(x)),
    "moments local": lambda x, sgd, lr, chain: jdaso.chain(sgd(lr), jdaso.dasgd(x, 4, 2), "local"),
    "moments average": lambda x, sgd, lr, chain: jdaso.chain(
        sgd(lr), jdaso.dasgd(x, 4, 2), "average"
    ),
    "moments average, fragments": lambda x, sgd, lr, chain: jdaso.chain(
        sgd(lr), jdaso.dasgd(x, 4, 3, fragments=2), "average"
    ),
    "moments reset": lambda x, sgd, lr, chain: jdaso.chain(sgd(lr), jdaso.dasgd(x, 4, 2), "reset"),
}
for_each_algorithm = pytest.mark.parametrize("name", ALGORITHMS)

FLOATS = {"bias": jnp.linspace(-1, 1, 7), "kernel": jnp.linspace(-2, 3, 15).reshape(3, 5)}
MIXED = {**FLOATS, "count": jnp.arange(9), "half": jnp.linspace(0, 2, 11, dtype=jnp.bfloat16)}


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def plain(rate):
    """SGD with momentum for the floating-point leaves."""
    return optax.masked(optax.sgd(rate, momentum=0.9), lambda t: jax.tree.map(is_float, t))


def protected(rate):
    """The same with momentum that ignores non-finite gradients."""
    return optax.apply_if_finite(plain(rate), 100)


def optax_chain(optimizer, averaging):
    """The averaging comes last, or first if it averages gradients."""
    links = optimizer, averaging
    return optax.chain(*(links[::-1] if averaging.engine.sync_target.of_gradients else links))


def build(name, sgd=protected, rate=RATE, exchange=None, chain=optax_chain):
    return ALGORITHMS[name](exchange or jdaso.axis_exchange("node", NODES), sgd, rate, chain)


def start(tx, params):
    """Parameters of all nodes, and their states."""
    params = jax.tree.map(lambda x: jnp.stack([x] * NODES), params)
    return params, jax.vmap(tx.init)(params)


def stepper(tx):
    """One step of all nodes."""

    def step(params, state, grads, loss):
        updates, state = tx.update(grads, state, params, value=loss, unexpected="ignored")
        return optax.apply_updates(params, updates), state

    return jax.vmap(step, axis_name="node")


def gradients(params, steps=STEPS):
    """Gradients (steps, nodes, ...). Those of integers are zeros of their dtype."""
    rng = np.random.default_rng(0)

    def draw(x):
        shape = (steps, NODES, *x.shape)
        return jnp.asarray(rng.normal(size=shape) if is_float(x) else np.zeros(shape), x.dtype)

    return jax.tree.map(draw, params)


LOSSES = jnp.ones((STEPS, NODES))  # a plateau at every epoch


def at(step, grads):
    return jax.tree.map(lambda x: x[step], grads)


def jitted(function, **options):
    # Speed is not tested here, and this halves the time to compile.
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0}, **options)


@functools.cache
def one_step(name):
    return jitted(stepper(build(name)))


def train(name, grads, carry=None, step=None, steps=range(STEPS)):
    """Parameters and states of all nodes, after every step."""
    step = step or one_step(name)
    carry, history = carry or start(build(name), FLOATS), []
    for t in steps:
        carry = step(*carry, at(t, grads), LOSSES[t])
        history.append(carry)
    return history


@functools.cache
def plain_history(name):
    return train(name, gradients(FLOATS))


def signature(tree):
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)


def assert_same_bits(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_close(actual, expected):
    """Checks equality up to a few float32 roundings, because XLA fuses differently."""
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), actual, expected
    )


def in_flight(state):
    """Whether an exchange is in flight on node 0."""
    return any(bool(fragment.posted[0]) for fragment in jdaso.core.averaging_state(state).fragments)


@for_each_algorithm
def test_all_steps_are_one_trace_in_donated_buffers_of_the_same_dtypes(name):
    tx, traces = build(name), []

    @functools.partial(jitted, donate_argnums=(0, 1))
    def step(*arguments):
        traces.append(arguments)
        return stepper(tx)(*arguments)

    params, state = start(tx, MIXED)
    before, grads = signature((params, state)), gradients(MIXED)
    for t in range(STEPS):
        old = [x for x in jax.tree.leaves((params, state)) if x.ndim > 1]
        params, state = step(params, state, at(t, grads), LOSSES[t])
        assert all(x.is_deleted() for x in old)
        assert signature((params, state)) == before
    assert len(traces) == 1
    assert jdaso.core.averaging_state(state).exchanges[0] > 0
    assert not (params["half"][0] == MIXED["half"]).all()
    assert (params["count"] == MIXED["count"]).all()


@for_each_algorithm
def test_updates_have_the_dtypes_of_the_parameters(name):
    tx, grads = build(name), at(0, gradients(MIXED))
    params, state = start(tx, MIXED)
    updates, _ = jax.eval_shape(jax.vmap(tx.update, axis_name="node"), grads, state, params)
    assert signature(updates) == signature(params)


@for_each_algorithm
def test_a_step_may_be_a_branch_of_cond(name):
    tx = build(name, exchange=jdaso.single_exchange())

    def maybe(take, grads, state, params):
        return lax.cond(
            take, tx.update, lambda grads, state, params: (grads, state), grads, state, params
        )

    jax.eval_shape(maybe, True, at((0, 0), gradients(MIXED)), tx.init(MIXED), MIXED)


@for_each_algorithm
def test_a_scan_gives_what_a_loop_gives(name):
    def step(carry, inputs):
        carry = stepper(build(name))(*carry, *inputs)
        return carry, carry[0]

    inputs = gradients(FLOATS), LOSSES
    _, scanned = jitted(functools.partial(lax.scan, step))(start(build(name), FLOATS), inputs)
    looped = [params for params, _ in plain_history(name)]
    assert_close(scanned, jax.tree.map(lambda *x: jnp.stack(x), *looped))


@for_each_algorithm
def test_apply_gradients_gives_what_update_gives(name):
    tx = build(name, chain=jdaso.chain)

    def step(params, state, grads, loss):
        return jdaso.apply_gradients(tx, grads, state, params, value=loss)

    step = jitted(jax.vmap(step, axis_name="node"))
    history = train(name, gradients(FLOATS), start(tx, FLOATS), step)
    for (params, state), (expected, expected_state) in zip(
        history, plain_history(name), strict=True
    ):
        assert_close(params, expected)
        mine, theirs = map(jdaso.core.averaging_state, (state, expected_state))
        assert mine.exchanges.tolist() == theirs.exchanges.tolist()


@for_each_algorithm
def test_arguments_for_others_are_ignored(name):
    tx = build(name, exchange=jdaso.single_exchange())

    def program(**extra):
        update = functools.partial(tx.update, value=1.0, **extra)
        return str(jax.make_jaxpr(update)(at((0, 0), gradients(FLOATS)), tx.init(FLOATS), FLOATS))

    assert program(grad=FLOATS, value_fn=len, lambda_="a word") == program()


@for_each_algorithm
def test_tree_map_params_reaches_what_has_the_shape_of_parameters(name):
    tx = build(name, exchange=jdaso.single_exchange())
    state = tx.init(MIXED)
    same = optax.tree_map_params(tx, lambda x: x, state)
    assert jax.tree.structure(same) == jax.tree.structure(state)
    assert_same_bits(same, state)
    zeros = optax.tree_map_params(tx, jnp.zeros_like, state)
    assert signature(zeros) == signature(state)

    def is_masked(node):
        return isinstance(node, optax.MaskedNode)

    # As for shardings: each copy of a parameter gets the value of the parameter.
    said = {x.shape: f"of {name}" for name, x in MIXED.items()}
    mapped = optax.tree_map_params(
        tx,
        lambda x, what: x if is_masked(x) else what,
        state,
        {name: said[x.shape] for name, x in MIXED.items()},
        transform_non_params=lambda x: "of none",
        is_leaf=is_masked,
    )
    assert mapped == jax.tree.map(lambda x: said.get(x.shape, "of none"), state)


@for_each_algorithm
def test_works_inside_inject_hyperparams(name):
    tx = optax.inject_hyperparams(lambda learning_rate: build(name, rate=learning_rate))(RATE)
    first, step, grads = start(tx, FLOATS), jitted(stepper(tx)), gradients(FLOATS)
    params, _ = train(name, grads, first, step)[-1]
    assert_close(params, plain_history(name)[-1][0])

    state = first[1]._replace(hyperparams={"learning_rate": jnp.zeros(NODES)})
    params, _ = train(name, grads, (first[0], state), step)[-1]
    assert_close(params, first[0])


@for_each_algorithm
def test_multi_steps_takes_the_mean_gradient_and_counts_optimizer_steps(name):
    micro, steps = 2, STEPS // 2
    means = jax.tree.map(lambda g: g.reshape(steps, micro, *g.shape[1:]).mean(1), gradients(FLOATS))
    tx = optax.MultiSteps(build(name), micro).gradient_transformation()
    grads, step = gradients(FLOATS), jitted(stepper(tx))
    params, state = train(name, grads, start(tx, FLOATS), step)[-1]
    expected, expected_state = train(name, means, steps=range(steps))[-1]
    assert_close(params, expected)
    mine, theirs = map(jdaso.core.averaging_state, (state, expected_state))
    assert mine.step.tolist() == [steps] * NODES
    assert mine.exchanges.tolist() == theirs.exchanges.tolist()
    assert theirs.exchanges[0] > 0


@for_each_algorithm
def test_a_restored_state_continues_bit_for_bit(name):
    """Saves with an exchange in flight, and restores into a new transformation and state."""
    grads, history = gradients(FLOATS), plain_history(name)
    blocks = all((jdaso.core.averaging_state(state).plan.delay == 0).all() for _, state in history)
    if blocks:
        save = STEPS // 2
        assert not any(in_flight(state) for _, state in history)
    else:
        # A blocking mean at the next step would make what is in flight obsolete.
        delays = [jdaso.core.averaging_state(state).plan.delay for _, state in history]
        save = next(
            t
            for t in range(STEPS // 2, STEPS)
            if in_flight(history[t][1]) and (delays[t + 1] > 0).all()
        )
    saved = serialization.to_bytes(history[save])

    tx = build(name)
    step = jitted(stepper(tx))
    carry = serialization.from_bytes(start(tx, FLOATS), saved)
    assert_same_bits(train(name, grads, carry, step, range(save + 1, STEPS))[-1], history[-1])

    # The exchange in flight matters.
    lost = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.zeros_like(x) if ".sums" in jax.tree_util.keystr(path) else x, carry
    )
    without = train(name, grads, lost, step, range(save + 1, STEPS))[-1]
    same = jax.tree.map(np.array_equal, without, history[-1])
    assert all(jax.tree.leaves(same)) == blocks


@for_each_algorithm
@pytest.mark.parametrize("sgd", [protected, plain])
def test_a_gradient_that_is_not_finite_leaves_nodes_in_step(name, sgd):
    bad = jax.tree.map(lambda g: g.at[6, 1].set(jnp.nan), gradients(FLOATS))
    tx = build(name, sgd)
    step = one_step(name) if sgd is protected else jitted(stepper(tx))
    history = train(name, bad, start(tx, FLOATS), step)

    def timeline(history):
        states = [jdaso.core.averaging_state(state) for _, state in history]
        return [(s.exchanges.tolist(), [f.posted.tolist() for f in s.fragments]) for s in states]

    assert timeline(history) == timeline(plain_history(name))
    params, state = history[-1]
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(params))
    if sgd is protected:
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state) if is_float(x))
    else:
        assert jdaso.core.averaging_state(state).skipped[1] > 0


# Programs choose virtual devices, and start MPI, after their optimizers are made or before.
MAKE_ALL = """
import jdaso, optax
x, schedule = jdaso.axis_exchange("node", 2), jdaso.constant(4, 2)
jdaso.chain(optax.adam(0.1), jdaso.daso(x, schedule=schedule), "average")
jdaso.dasgd(x, 4, 2), jdaso.local_sgd(x, 4, 2, "delta"), jdaso.easgd(x, 4)
jdaso.eamsgd(x, 4, 0.1, 0.9), jdaso.diloco(x, 4), jdaso.allreduce_gradients(x)
jdaso.cluster.use_virtual_devices(3)
import jax
assert len(jax.devices()) == 3
"""


def test_factories_leave_the_devices_to_be_chosen():
    command = [sys.executable, "-c", MAKE_ALL]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
