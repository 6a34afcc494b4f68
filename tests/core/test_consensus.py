"""Broadcasts and consensus of every dtype, and of leaves that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdaso

ONE = jdaso.single_exchange()
NODES = 3
EXCHANGE = jdaso.axis_exchange("node", NODES)
WIDE = {
    "int64": np.array([5_000_000_000, -1]),
    "uint64": np.uint64(2**63 + 1),
    "float64": np.array([[1 / 3]]),
    "complex128": np.array([1 / 3 + 1e300j]),
    "empty": np.zeros((0, 2)),
    "time": np.array(["2026-01-01"], "datetime64[s]"),
    "big endian": np.arange(3, dtype=">f4"),
    "bytes": np.array([b"abc", b"d"]),
}
NARROW = ["complex64", "float8_e8m0fnu", "float4_e2m1fn", "float8_e5m2", "int4", "uint2", "bool"]


def on_nodes(function):
    return jax.vmap(function, axis_name="node")


@pytest.mark.parametrize("name", WIDE)
def test_broadcast_keeps_numpy_arrays_that_jax_would_cut(name):
    """5 000 000 000 does not become 705 032 704."""
    sent = jdaso.broadcast(ONE, {"x": WIDE[name]})["x"]
    assert isinstance(sent, np.ndarray)
    np.testing.assert_array_equal(sent, WIDE[name], strict=not np.isscalar(WIDE[name]))
    assert sent.dtype == WIDE[name].dtype


@pytest.mark.parametrize("name", NARROW)
def test_broadcast_sends_every_dtype(name):
    x = jnp.array([[1, 0, 1], [0, 0, 1], [1, 1, 1]]).astype(name)
    sent = on_nodes(lambda x: jdaso.broadcast(EXCHANGE, x, 1))(x)
    assert sent.dtype == x.dtype
    # With NumPy: JAX 0.10.0 cannot stack uint2. float8_e8m0fnu has no 0 but NaN.
    assert sent.tobytes() == np.stack([np.asarray(x)[1]] * NODES).tobytes()
    alone = jdaso.broadcast(ONE, x)
    assert (alone.dtype, alone.tobytes()) == (x.dtype, x.tobytes())


def test_broadcast_sends_what_is_not_finite_unchanged():
    mask = jnp.array([0.0, -jnp.inf, jnp.nan])
    sent = on_nodes(lambda x: jdaso.broadcast(EXCHANGE, x, 1))(jnp.stack([mask + 1, mask, mask]))
    np.testing.assert_array_equal(sent, jnp.stack([mask] * NODES))


def test_a_compiled_broadcast_refuses_numpy_arrays_that_jax_would_cut():
    message = r"broadcast: \['n'\] is a NumPy array of dtype int64, which JAX.*outside of jit"
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda x: jdaso.broadcast(ONE, {"x": x, "n": WIDE["int64"]}))(1.0)


@pytest.mark.parametrize("call", [jdaso.consensus, jdaso.drift])
def test_means_of_numpy_arrays_that_jax_would_cut_are_refused(call):
    """And not computed in float32 in silence. Integers are returned as they are."""
    message = rf"{call.__name__}: \['x'\] is a NumPy array of dtype float64, .*numpy.float32"
    with pytest.raises(ValueError, match=message):
        call(ONE, {"n": WIDE["int64"], "x": np.float64(1 / 3)})
    assert jdaso.consensus(ONE, {"n": WIDE["int64"], "y": jnp.ones(2)})["n"] is WIDE["int64"]


def test_a_leaf_that_is_finite_on_some_nodes_is_their_mean_and_the_others_stay():
    """A node is left out of the mean of one leaf, and not of the others."""
    tree = {
        "mask": jnp.array([[0.0, -jnp.inf]] * NODES),
        "w": jnp.array([[1.0, 2.0], [jnp.nan, 6.0], [3.0, 4.0]]),
        "b": jnp.array([1.0, 2.0, 6.0]),
        "large": jnp.full((NODES, 2), 2e38).at[1:].set(0),
    }
    for function in (on_nodes, lambda f: jax.jit(on_nodes(f))):
        mean = function(lambda x: jdaso.consensus(EXCHANGE, x))(tree)
        assert jnp.isnan(mean["mask"]).all()
        np.testing.assert_array_equal(mean["w"], [[2.0, 3.0]] * NODES)
        np.testing.assert_array_equal(mean["b"], [3.0] * NODES)
        np.testing.assert_allclose(mean["large"], [[2e38 / 3] * 2] * NODES, rtol=1e-6)


def test_consensus_says_which_leaf_is_not_finite(caplog):
    jdaso.consensus(ONE, {"the mask": jnp.array([0.0, -jnp.inf]), "w": jnp.ones(1)})
    jdaso.consensus(ONE, {"the mask": jnp.array([0.0, -jnp.inf]), "w": jnp.ones(1)})
    [text] = [r.getMessage() for r in caplog.records]
    assert "['the mask'] is not finite on this node" in text
