"""A program whose mesh has other axes than that of its exchange is refused in plain words."""

import compile_in_turn  # noqa: F401
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdaso

jdaso.cluster.use_virtual_devices(2)
topology = jdaso.discover_topology()
exchange = jdaso.mpi_exchange(topology)  # without shardings
averaging = jdaso.local_sgd(exchange, 1)
params = {"w": jnp.ones(4)}
state = averaging.init(params)


def fails(function, *args, axes="data"):
    with pytest.raises(ValueError, match=rf"a mesh with the axes \('{axes}',\), and .*shardings="):
        function(*args)


copies = jax.tree.map(lambda x: jnp.stack([x] * 2), (params, state, params))
fails(jax.pmap(averaging.update, axis_name="data"), *copies)
fails(jax.pmap(averaging.update), *copies, axes="[^']+")  # a name of JAX
for kind in AxisType.Explicit, AxisType.Auto:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    placed = jax.device_put(params, NamedSharding(mesh, P()))
    if kind == AxisType.Explicit:
        fails(jax.jit(averaging.update), placed, state, placed)
    with jax.set_mesh(mesh):
        fails(jax.jit(averaging.update), params, state, params)
        fails(jdaso.consensus, exchange, params)
updates, _ = jax.pmap(averaging.update, axis_name="local")(*copies)
assert updates["w"].shape == (2, 4)
given = NamedSharding(mesh, P())
with jdaso.mpi_exchange(topology, shardings=given) as own, jax.set_mesh(mesh):
    averaging = jdaso.local_sgd(own, 1)
    jax.block_until_ready(jax.jit(averaging.update)(placed, averaging.init(placed), placed))
