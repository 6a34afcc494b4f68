"""Shardings that do not fit are refused with the name of the leaf, before anything is sent."""

import functools

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdaso


def inside_shard_map(topology, mesh, given, params):
    """A leaf of an unknown name cannot be told from a shard, and ``init`` would see shards."""
    exchange = jdaso.mpi_exchange(topology, shardings=given)
    whole = NamedSharding(mesh, P())
    jdaso.dasgd(exchange, 4, 3).init(params)

    def fails(message, function, tree):
        shard_map = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
        with pytest.raises(ValueError, match=message):
            jax.jit(shard_map(function, in_specs=P(), out_specs=P()))(jax.device_put(tree, whole))

    if topology.num_nodes > 1 and mesh.size > 1:
        unknown = r"inside shard_map, jdaso does not know how \['other'\] of 2 axes is sharded"
        other = {"other": params["kernel"]}
        fails(unknown, functools.partial(jdaso.consensus, exchange), other)
        fails(unknown, functools.partial(jdaso.drift, exchange), other)
        fails("init inside shard_map gets shards", jdaso.dasgd(exchange, 4, 3).init, params)
        if not topology.joined:
            send = functools.partial(jdaso.broadcast, exchange)
            fails("broadcast inside shard_map", send, params)
    if topology.num_nodes > 1:
        mean = functools.partial(jdaso.consensus, exchange)
        for nest in ((False, False), (True, False), (False, True), (True, True)):
            means = [jax.jit(lambda tree: mean(tree)) if each else mean for each in nest]
            with pytest.raises(ValueError, match="calls consensus or drift twice for one exchange"):
                jax.jit(functools.partial(lambda fs, a: [f(a) for f in fs], means)).lower(params)

        def branch(tree):
            return [jax.jit(lambda tree: mean(tree))(tree) for _ in range(2)]

        with pytest.raises(ValueError, match="calls consensus or drift twice for one exchange"):
            jax.jit(lambda tree: jax.lax.cond(True, branch, branch, tree)).lower(params)
        jax.jit(mean).lower(params)  # another program
        jax.jit(lambda tree: jax.lax.cond(True, mean, mean, tree)).lower(params)
    exchange.close()


def check(topology, mesh, given, params):
    """Checks an exchange between any number of nodes.

    Args:
        mesh: of the devices of the node.
        given: shardings of the parameters. That of ``kernel`` is not replicated, and ``bias`` has
            one axis that cannot be cut.
    """

    def fails(message, shardings):
        with pytest.raises(ValueError, match=message):
            jdaso.dasgd(jdaso.mpi_exchange(topology, shardings=shardings), 4, 3).init(params)

    axis = mesh.axis_names[0]
    fails(r"no sharding for \['kernel'\]", {k: s for k, s in given.items() if k != "kernel"})
    fails(r"of \['bias'\] does not fit its shape \(7,\)", {**given, "bias": P(axis)})
    fails(r"of \['bias'\] does not fit its shape \(7,\)", {**given, "bias": P(None, axis)})
    fails(r"of \['bias'\] has the axis 'other', and the", {**given, "bias": P("other")})
    inside_shard_map(topology, mesh, given, params)
    fails(r"\['bias'\] must be a PartitionSpec or a NamedSharding", {**given, "bias": "data"})
    fewer = jax.sharding.Mesh(mesh.devices.flat[:1], ("x",))
    with_fewer = {**given, "bias": NamedSharding(fewer, P())}
    fails(r"mesh of \['bias'\] has the .* the node has", with_fewer)
    if topology.num_nodes > 1:
        other = {**given, "kernel": P() if topology.node else given["kernel"]}
        with pytest.raises(jdaso.JdasoError, match=r"kernel.*on a mesh"):
            jdaso.dasgd(jdaso.mpi_exchange(topology, shardings=other), 4, 3).init(params)
