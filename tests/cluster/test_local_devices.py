"""The mean over the devices of a node, and what devices need before they are used."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jdaso
from jdaso.cluster.local_devices import devices_are_busy


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2), {"rows": x.shape[0], "mean": jnp.mean(x)}


def test_one_device_equals_jax_value_and_grad():
    params, x = {"w": jnp.ones(3)}, jnp.arange(12.0).reshape(4, 3)
    mesh = jdaso.discover_topology().mesh
    (loss, aux), grads = jdaso.local_value_and_grad(loss_fn, mesh, has_aux=True)(params, x)
    (expected, _), expected_grads = jax.value_and_grad(loss_fn, has_aux=True)(params, x)
    np.testing.assert_allclose(loss, expected)
    np.testing.assert_allclose(grads["w"], expected_grads["w"])
    assert aux["rows"] == 4
    np.testing.assert_allclose(aux["mean"], x.mean())


def test_a_mesh_with_other_axes_is_an_error():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    with pytest.raises(ValueError, match=r"the one axis 'local', got axes \('data',\)"):
        jdaso.local_value_and_grad(loss_fn, mesh)


def test_a_missing_spec_is_an_error():
    mesh = jdaso.discover_topology().mesh
    with pytest.raises(ValueError, match="in_specs must have 1 specs, one per arg, got 0"):
        jdaso.local_value_and_grad(loss_fn, mesh, in_specs=())({"w": jnp.ones(3)}, jnp.ones((4, 3)))


def test_pmean_is_stateless_and_averages():
    tx = optax.chain(jdaso.cluster.pmean("local"), optax.sgd(1.0))
    grads = jnp.array([1.0, 2.0, 6.0])
    updates = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="local")(grads)
    np.testing.assert_allclose(updates, -jnp.full(3, 3.0))


def test_pmean_every_second_step():
    tx = jdaso.cluster.pmean("local", every=2)
    grads = jnp.array([1.0, 3.0])
    state = jax.vmap(tx.init)(grads)
    update = jax.vmap(tx.update, axis_name="local")
    separate, state = update(grads, state)
    averaged, state = update(grads, state)
    assert separate.tolist() == [1.0, 3.0]
    assert averaged.tolist() == [2.0, 2.0]


def test_pmean_every_zero_steps_is_an_error():
    with pytest.raises(ValueError, match="every must be at least 1 step, got 0"):
        jdaso.cluster.pmean("local", every=0)


def test_no_virtual_devices_is_an_error():
    with pytest.raises(ValueError, match="num_devices must be at least 1, got 0"):
        jdaso.cluster.use_virtual_devices(0)


def test_devices_are_busy_until_what_was_dispatched_has_completed():
    multiply = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda i, y: y @ y / 700, x))
    x = multiply(jnp.ones((700, 700))).block_until_ready()
    assert not devices_are_busy()
    result = multiply(x)
    assert devices_are_busy()
    result.block_until_ready()
    assert not devices_are_busy()


PROGRAM = """
import os, jax.numpy as jnp, jdaso
jdaso.discover_topology()
print(jnp.ones(3).sum(), os.environ.get("XLA_FLAGS", "").split())
"""


@pytest.mark.parametrize("flags", ["", "--xla_gpu_executable_terminate_timeout=77"])
@pytest.mark.parametrize("has_plugin", [False, True])
def test_gpus_may_wait_for_other_nodes_and_xla_knows_the_flags(tmp_path, has_plugin, flags):
    if has_plugin:
        (tmp_path / "jax_cuda12_plugin").mkdir()
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = f"{tmp_path}:{environment.get('PYTHONPATH', '')}"
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    first = "--xla_gpu_first_collective_call_terminate_timeout_seconds"
    for flag in (first, "--xla_gpu_executable_terminate_timeout"):
        assert ended.stdout.count(flag) == (has_plugin or flag in flags)
    assert not flags or f"{flags}'" in ended.stdout
