"""What a checkpoint may hold, and what is restored of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdaso
from jdaso import JdasoError
from jdaso.checkpoint import Checkpoints
from jdaso.checkpoint.node_part import (
    averaged_names,
    checkpointer,
    from_host_arrays,
    part_tree,
    read_part,
    to_host_arrays,
)
from jdaso.checkpoint.verify import verify
from jdaso.core.exchange import HEADER_SIZE, PostedExchange

TOPOLOGY = jdaso.discover_topology()
EXCHANGE = jdaso.single_exchange()
TX = jdaso.chain(optax.adam(0.1), jdaso.dasgd(EXCHANGE, period=4, delay=2))
NAN, INF = float("nan"), float("inf")


def write(folder, states, posted=None):
    """Writes a checkpoint of one node for each state."""
    writer = checkpointer()
    for node, state in enumerate(states):
        tree = part_tree(to_host_arrays(state), posted or {}, averaged_names(state, [EXCHANGE]))
        writer.save(folder / "000001_step_1" / f"node_{node}_of_{len(states)}", tree)
    writer.close()


def restore(folder, like):
    return Checkpoints(folder, TOPOLOGY, EXCHANGE).restore(like).state


def node_state(value, healthy=True, **more):
    """The state of a node whose parameters have this value, after a step."""
    params = {"w": jnp.full(3, value)}
    opt_state = TX.init({"w": jnp.ones(3)})  # it refuses numbers that are not finite
    _, averaging = opt_state
    fragment = averaging.fragments[0]._replace(healthy=jnp.array(healthy))
    opt_state = opt_state._replace(averaging=averaging._replace(fragments=(fragment,)))
    return {"params": params, "opt_state": opt_state, **more}


def test_on_another_number_of_nodes_all_are_healthy(tmp_path):
    write(tmp_path, [node_state(1.0, healthy=False), node_state(3.0)])
    state = restore(tmp_path, node_state(0.0))
    assert state["params"]["w"].tolist() == [2, 2, 2]
    assert bool(state["opt_state"].averaging.fragments[0].healthy)


MASK = np.array([0, -INF])


@pytest.mark.parametrize(
    ("name", "saved", "found"),
    [
        ("a loss before the first validation", [NAN, NAN], NAN),
        ("a loss that one node computes", [0.5, NAN], 0.5),
        ("a loss that the other node computes", [NAN, 0.5], 0.5),
        ("a best loss before the first", [INF, INF], INF),
        ("a mask", [MASK, MASK], MASK),
    ],
)
def test_what_is_not_finite_and_not_averaged_stays(tmp_path, name, saved, found):
    write(tmp_path, [node_state(1.0, x=saved[0]), node_state(3.0, x=saved[1])])
    _, defects = verify(tmp_path)
    assert defects == [], name
    state = restore(tmp_path, node_state(0.0, x=saved[0]))
    assert state["params"]["w"].tolist() == [2, 2, 2]
    np.testing.assert_array_equal(state["x"], found)


@pytest.mark.parametrize("moment", [False, True])
def test_a_node_whose_averaged_arrays_are_not_finite_is_left_out(tmp_path, caplog, moment):
    lost = node_state(1.0 if moment else NAN)
    name = "opt_state.optimizer.0.mu.w" if moment else "params.w"
    if moment:
        lost = jax.tree.map(
            lambda s: (
                s._replace(mu={"w": jnp.full(3, NAN)})
                if isinstance(s, optax.ScaleByAdamState)
                else s
            ),
            lost,
            is_leaf=lambda s: isinstance(s, optax.ScaleByAdamState),
        )
    write(tmp_path, [lost, node_state(5.0), node_state(7.0)])
    _, defects = verify(tmp_path)
    assert defects == [f"node 0: {name} is not finite"]
    assert restore(tmp_path, node_state(0.0))["params"]["w"].tolist() == [6, 6, 6]
    assert f"node_0_of_3 is left out: {name} is not finite" in caplog.text


def test_if_no_node_has_finite_parameters_it_is_an_error(tmp_path):
    write(tmp_path, [node_state(NAN), node_state(NAN)])
    with pytest.raises(JdasoError, match=r"no node has saved finite parameters.*params\.w"):
        restore(tmp_path, node_state(0.0))


@pytest.mark.parametrize("moments", ["local", "average"])
def test_averaged_arrays_are_found_in_any_tree(moments):
    """The parameters below any path, with those of two fragments, and moments of their shapes."""
    averaging = jdaso.dasgd(EXCHANGE, period=4, delay=2, fragments=2)
    tx = jdaso.chain(optax.adam(0.1), averaging, moments=moments)
    params = [jnp.ones(2), {"b": jnp.ones(()), "n": jnp.arange(2)}]
    tree = {"model": {"net": params}, "other": {"b": jnp.ones(2)}, "opt": (3, tx.init(params))}
    found = {"model.net.0", "model.net.1.b"}
    found |= {f"opt.1.optimizer.0.{m}.{x}" for m in ("mu", "nu") for x in ("0", "1.b")}
    assert averaged_names(tree, [EXCHANGE]) == found


RARE = ["uint2", "uint4", "float8_e4m3", "float8_e8m0fnu", "float4_e2m1fn", "int4"]


def test_arrays_of_all_dtypes_and_without_elements_come_back(tmp_path):
    state = {name: jnp.ones((2, 3)).astype(jnp.dtype(name)) for name in RARE}
    state |= {"empty": jnp.zeros((0, 3)), "long": np.ones(2, np.longdouble)}
    write(tmp_path, [state])
    found = restore(tmp_path, jax.tree.map(lambda x: x * 0, state))
    for name, array in state.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_an_exchange_in_flight_may_have_a_leaf_without_elements(tmp_path):
    leaves = [np.ones(3, np.float32), np.zeros((0, 4), jnp.bfloat16)]
    posted = {(0, 1): PostedExchange(5, np.ones(HEADER_SIZE, np.float32), leaves, (0, 0))}
    write(tmp_path, [{"step": 5}], posted)
    part = read_part(checkpointer(), tmp_path / "000001_step_1" / "node_0_of_1")
    found = part.in_flight[0, 1].leaves
    assert [(x.dtype, x.shape) for x in found] == [(x.dtype, x.shape) for x in leaves]
    np.testing.assert_array_equal(found[0], leaves[0])


LR = 0.01
WITHOUT_INTEGERS = {"w": True, "b": True, "n": False}
OPTIMIZERS = {
    "adafactor": optax.adafactor(LR),
    "adagrad": optax.adagrad(LR),
    "adam": optax.adam(LR),
    "adan": optax.adan(LR),  # it narrows the gradient that it keeps
    "adopt": optax.contrib.adopt(LR),
    "apply_if_finite": optax.masked(optax.apply_if_finite(optax.sgd(LR), 3), WITHOUT_INTEGERS),
    "cocob": optax.contrib.cocob(LR),
    "dog": optax.contrib.dog(LR),
    "flatten": optax.masked(optax.flatten(optax.adam(LR)), WITHOUT_INTEGERS),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=LR),
    "lion": optax.lion(LR),
    "momo": optax.contrib.momo(LR),
    "MultiSteps": optax.MultiSteps(optax.adam(LR), 2),
    "muon": optax.contrib.muon(LR),
    "prodigy": optax.masked(optax.contrib.prodigy(LR), WITHOUT_INTEGERS),
    "schedule_free": optax.contrib.schedule_free_adamw(LR),
    "sgd": optax.sgd(LR, momentum=0.9),
    "sm3": optax.sm3(LR),
}


def take_steps(tx, params, state, steps):
    """Steps with float32 gradients, and bfloat16 ones of float32 parameters."""
    tx = optax.with_extra_args_support(tx)
    for t in steps:
        grads = jax.tree.map(lambda x: 0.1 * x.astype(jnp.float32), params)
        grads |= {"b": grads["b"].astype(jnp.bfloat16), "n": jnp.zeros_like(params["n"])}
        updates, state = tx.update(grads, state, params, value=jnp.float32(1 / (1 + t)))
        params = optax.apply_updates(params, updates)
    return params, state


def assert_same_bits(found, expected):
    for want, got in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
        assert want.dtype == got.dtype
        assert np.isfinite(want).all()
        np.testing.assert_array_equal(want, got)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "bfloat16") for name in OPTIMIZERS), ("adam", "float16")]
)
def test_any_optimizer_continues_bit_for_bit(name, dtype):
    """Most of them change dtypes of their state at the first step."""
    tx = OPTIMIZERS[name]
    w = jnp.linspace(-1, 1, 12).reshape(4, 3)
    params = {"w": w.astype(dtype), "b": w[0], "n": jnp.arange(3)}
    first = params, tx.init(params)
    saved = take_steps(tx, *first, range(3))
    found = from_host_arrays(to_host_arrays(saved), first, "a checkpoint")
    expected = take_steps(tx, *saved, range(3, 5))
    assert_same_bits(take_steps(tx, *found, range(3, 5)), expected)


def scale_by_previous():
    """A user's transformation, whose state takes the dtype of the gradients."""

    def update(updates, state, params=None):
        del params
        return jax.tree.map(jnp.add, updates, state), updates

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def test_a_transformation_of_a_user_in_a_chain_continues_bit_for_bit(tmp_path):
    averaging = jdaso.dasgd(EXCHANGE, period=3, delay=1)
    tx = jdaso.chain(optax.chain(scale_by_previous(), optax.sgd(LR)), averaging)
    params = {"w": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(2), "n": jnp.arange(3)}
    first = params, tx.init(params)
    saved = take_steps(tx, *first, range(3))
    assert saved[1].averaging.fragments[0].posted
    write(tmp_path, [saved])
    assert verify(tmp_path)[1] == []
    expected = take_steps(tx, *saved, range(3, 7))
    assert_same_bits(take_steps(tx, *restore(tmp_path, first), range(3, 7)), expected)


@pytest.mark.parametrize("of_lookahead", [False, True])
def test_parameters_of_another_dtype_are_refused(of_lookahead):
    """Also the parameters of lookahead, which are of a type of optax, as its states are."""
    params = {"w": jnp.ones(3)}
    if of_lookahead:
        params = optax.LookaheadParams(params, params)
    tx = optax.lookahead(optax.adam(LR), 5, 0.5) if of_lookahead else optax.adam(LR)
    arrays = to_host_arrays((params, tx.init(params)))
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    with pytest.raises(ValueError, match=r"w is float32\(3,\), the state has bfloat16\(3,\)"):
        from_host_arrays(arrays, (narrow, tx.init(narrow)), "a checkpoint")


@pytest.mark.parametrize(
    ("like", "saved"), [(0, 0.73), (False, 3), (0, NAN), (1.0, 2), (np.float32(0), 0.5)]
)
def test_a_number_keeps_its_value(like, saved):
    found = from_host_arrays(to_host_arrays({"best": saved}), {"best": like}, "a checkpoint")
    np.testing.assert_equal(found["best"], saved)
