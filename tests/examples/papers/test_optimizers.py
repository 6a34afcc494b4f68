"""Every optimizer of the training script uses the learning rate that it gets for each step."""

import dataclasses
import functools

import config
import jax
import jax.numpy as jnp
import models
import numpy as np
import optimizers
import pytest
from flax import nnx

import jdaso

EPOCH = 5  # steps
RATES = [0.5, 0.25, 0.0, 0.125]
PARAMS = {"kernel": np.float32([[1.0, -2.0], [0.5, 3.0]]), "bias": np.float32([1.0, 2.0])}
GRADS = {"kernel": np.float32([[0.5, 0.25], [-1.0, 0.0]]), "bias": np.float32([-0.5, 1.0])}
# Before anything is exchanged, only the learning rate and the gradient move the parameters.
PLAIN = {
    "epochs": 4,
    "warmup_epochs": 0,
    "momentum": 0.0,
    "weight_decay": 0.0,
}


def build(**keys):
    phases = {"cooldown_epochs": 0} if keys.get("sync", "daso") == "daso" else {}
    configured = config.complete(dataclasses.replace(config.Config(), **PLAIN | phases | keys))
    return optimizers.create(configured, jdaso.single_exchange(), EPOCH)


def start():
    return jax.tree.map(jnp.asarray, PARAMS)


def compiled(optimizer):
    """The training step with given gradients, and how often it was traced."""
    traces = []

    # Fast compilation, because the speed of the program does not matter.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def step(params, opt_state, rate):
        traces.append(rate)
        return optimizer.apply_gradients(GRADS, opt_state, params, rate, jnp.float32(1))

    return step, traces


def run(optimizer, rates):
    """Parameters after every step, and the last state."""
    step, traces = compiled(optimizer)
    params, opt_state, seen = start(), jax.jit(optimizer.init)(start()), []
    for rate in rates:
        params, opt_state = step(params, opt_state, jnp.float32(rate))
        seen.append(params)
    assert len(traces) == 1
    return seen, opt_state


def assert_close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


@pytest.mark.parametrize("sync", config.SYNC)
def test_every_step_uses_its_own_learning_rate(sync):
    late = {} if sync in ("allreduce_gradients", "none") else {"period": 5}
    wire = {} if sync == "none" else {"wire": "float32"}  # a wire of 16 bits would round
    seen, opt_state = run(build(sync=sync, **late, **wire), RATES)
    for params, total in zip(seen, np.cumsum(RATES), strict=True):
        assert_close(params, jax.tree.map(lambda x, g, t=total: x - t * g, PARAMS, GRADS))
    assert int(jdaso.core.averaging_state(opt_state).step) == len(RATES)


def heavy_ball(rates, momentum, nesterov):
    """v <- m v + g; x <- x - rate v, or with Nesterov x - rate (g + m v), the rate outside of v."""
    v, x, seen = 0.0, PARAMS["bias"], []
    g = GRADS["bias"]
    for rate in rates:
        v = momentum * v + g
        x = x - rate * (g + momentum * v if nesterov else v)
        seen.append(x)
    return seen


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_and_nesterov(nesterov):
    seen, _ = run(build(sync="none", momentum=0.9, nesterov=nesterov), RATES)
    assert_close([params["bias"] for params in seen], heavy_ball(RATES, 0.9, nesterov))


def test_eamsgd_has_nesterovs_momentum_with_the_rate_of_the_step():
    """v <- m v - rate g; y moves by (1 + m) v' - m v until the first exchange."""
    seen, _ = run(build(sync="eamsgd", period=5, momentum=0.9), RATES)
    v, y, g = 0.0, PARAMS["bias"], GRADS["bias"]
    for rate, params in zip(RATES, seen, strict=True):
        old, v = v, 0.9 * v - rate * g
        y = y + 1.9 * v - 0.9 * old
        assert_close(params["bias"], y)


@pytest.mark.parametrize("sync", ["none", "eamsgd"])
def test_kernels_decay_and_biases_do_not(sync):
    seen, _ = run(build(sync=sync, weight_decay=0.1), [0.5])
    gradient = GRADS["kernel"] + 0.1 * PARAMS["kernel"]
    assert_close(seen[0]["kernel"], PARAMS["kernel"] - 0.5 * gradient)
    assert_close(seen[0]["bias"], PARAMS["bias"] - 0.5 * GRADS["bias"])


@pytest.fixture(scope="module")
def resnet():
    """The shapes of the parameters."""
    return nnx.state(nnx.eval_shape(lambda: models.create("resnet20", 1, 10, 0)), nnx.Param)


def test_in_a_resnet_all_kernels_decay_and_nothing_else(resnet):
    named = jax.tree.flatten_with_path(optimizers.kernels(resnet))[0]
    decays = {(jax.tree_util.keystr(path).count("kernel"), decay) for path, decay in named}
    assert decays == {(1, True), (0, False)}


@pytest.mark.parametrize("sync", ["daso", "eamsgd"])
def test_a_step_of_a_resnet_keeps_the_types_of_its_state(sync, resnet):
    optimizer, number = build(sync=sync), jax.ShapeDtypeStruct((), jnp.float32)
    state = jax.eval_shape(optimizer.init, resnet)
    after = jax.eval_shape(optimizer.apply_gradients, resnet, state, resnet, number, number)
    before = resnet, state
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (before, after)]
    assert kinds[0] == kinds[1]


def test_phases_are_counted_in_epochs():
    phases = {"epochs": 4, "warmup_epochs": 1, "cooldown_epochs": 2, "period": 2, "delay": 1}
    step, _ = compiled(build(**phases))
    opt_state, seen = jax.jit(build(**phases).init)(start()), []
    for _ in range(4 * EPOCH):
        _, opt_state = step(start(), opt_state, jnp.float32(0))
        seen.append(jdaso.schedules.PHASES[jdaso.core.averaging_state(opt_state).plan.phase])
    assert seen == ["warm-up"] * EPOCH + ["cycling"] * EPOCH + ["cool-down"] * 2 * EPOCH


def test_a_merge_resets_moments():
    """Local SGD on one node changes no parameter, so only the change of v is visible."""
    keys = {"sync": "local_sgd", "period": 2, "momentum": 0.5}
    seen, _ = run(build(**keys, moments="reset"), RATES)
    first, second = (heavy_ball(rates, 0.5, False) for rates in (RATES[:2], RATES[2:]))
    later = [x + first[-1] - PARAMS["bias"] for x in second]
    assert_close([params["bias"] for params in seen], first + later)


@pytest.mark.parametrize("sync", ["dasgd", "delta_rule", "easgd", "eamsgd"])
def test_what_is_in_flight_can_be_drained(sync):
    late = {"delay": 2} if sync in ("dasgd", "delta_rule") else {}
    optimizer = build(sync=sync, period=3, **late)
    seen, opt_state = run(optimizer, RATES)
    assert jdaso.core.averaging_state(opt_state).fragments[0].posted
    params, drained = jdaso.drain(optimizer.averaging, opt_state, seen[-1])
    assert not jdaso.core.averaging_state(drained).fragments[0].posted
    assert jax.tree.structure(drained) == jax.tree.structure(opt_state)
    evaluated = optimizer.evaluated(params, drained)
    assert_close(evaluated, params if late else jdaso.easgd_center(drained))
