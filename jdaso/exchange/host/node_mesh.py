"""Runs functions on the shards of each device of a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec

from jdaso.core.types import Leaves, PyTree
from jdaso.exchange.host.shardings import Shardings

REPLICATED = PartitionSpec()
Specs = tuple[PartitionSpec, ...]


class NodeMesh:
    """The devices of a node, on which a program runs a function with ``shard_map``.

    A program may be in a ``shard_map`` over the mesh already. Then each device has its own index,
    and the leaves are its shards.
    """

    def __init__(self, shardings: Shardings):
        self._shardings = shardings
        self.size = shardings.mesh.size
        self.local_size = len(shardings.mesh.local_devices)  # those of this process
        # Outside jit, a function that is compiled again for every call would be slow.
        self._compiled: dict[Any, Callable] = {}

    @property
    def axes(self) -> tuple[str, ...]:
        return self._shardings.mesh.axis_names

    def device_index(self) -> jax.Array | int | None:
        """The index of this device, None outside of ``shard_map`` over several devices.

        Raises:
            ValueError: inside ``shard_map`` over some of the mesh's axes.
        """
        if self.size == 1:
            return 0
        bound = [axis for axis in self.axes if _is_bound(axis)]
        if not bound:
            return None
        if len(bound) < len(self.axes):
            raise ValueError(
                f"inside shard_map over {bound}, an exchange with a mesh of the axes {self.axes} "
                "cannot be used: use shard_map over all of them, or none."
            )
        return lax.axis_index(self.axes)

    def inside(self) -> bool:
        """Whether the program is in ``shard_map`` over several devices."""
        return self.size > 1 and self.device_index() is not None

    def all_devices(self, flag: jax.Array) -> jax.Array:
        """Whether a flag holds on all devices. Outside ``shard_map`` they have the same flag."""
        if self.size == 1 or self.device_index() is None:
            return flag
        return lax.pmin(flag.astype(jnp.int32), self.axes) > 0

    def last(self, token: jax.Array) -> jax.Array:
        """A token that a device gets after all others have theirs, inside ``shard_map``."""
        return token if self.size == 1 else lax.pmax(token, self.axes)

    def shard_shape(self, shape: tuple[int, ...], spec: PartitionSpec) -> tuple[int, ...]:
        """The shape of the shards of a leaf."""
        return NamedSharding(self._shardings.mesh, spec).shard_shape(shape)

    def whole_shape(self, shape: tuple[int, ...], spec: PartitionSpec) -> tuple[int, ...]:
        """The shape of a leaf whose shards have this shape."""
        sizes = [1] * len(shape)
        for axis, names in enumerate(spec):
            for name in jax.tree.leaves(names):
                sizes[axis] *= self._shardings.mesh.shape[name]
        return tuple(n * size for n, size in zip(shape, sizes, strict=True))

    def run(
        self, key: Any, function: Callable, in_specs: PyTree, out_specs: PyTree, *args: Any
    ) -> Any:
        """Applies a function to the shards of each device.

        Args:
            key: equal for equal functions, which are compiled only once.
            in_specs: ``PartitionSpec`` of the arguments.
            out_specs: ``PartitionSpec`` of the results.
        """
        if self.device_index() is not None:
            return function(*args)
        if key not in self._compiled:
            self._compiled[key] = jax.jit(self._mapped(function, in_specs, out_specs))
        if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
            mesh = self._shardings.mesh
            args = jax.device_put(args, jax.tree.map(lambda s: NamedSharding(mesh, s), in_specs))
        return self._compiled[key](*args)

    def call_host(self, key: Any, call: Callable, leaves: Leaves, specs: Specs) -> Leaves:
        """Calls a function of the host with the shards of each device, and returns its results."""

        def on_device(*shards):
            like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shards]
            return io_callback(call, like, *shards)

        return self.run((key, specs), on_device, specs, list(specs), *leaves)

    def per_shard(self, function: Callable, specs: Specs) -> Callable:
        """A function on whole leaves that is applied to the shards of each device.

        Lists with one array per leaf have the shardings of the leaves, in arguments and results.
        All other arrays are replicated.
        """
        if self.device_index() is not None:
            return function

        def call(*args):
            results = jax.eval_shape(function, *args)
            in_specs, out_specs = (_specs_of(tree, specs) for tree in (args, results))
            return self._mapped(function, in_specs, out_specs)(*args)

        return call

    def _mapped(self, function: Callable, in_specs: PyTree, out_specs: PyTree) -> Callable:
        # JAX cannot know that exchanged values are equal on all nodes, so check_vma=False.
        mesh = self._shardings.mesh
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


def _specs_of(tree: PyTree, specs: Sequence[PartitionSpec]) -> PyTree:
    def is_leaves(node: PyTree) -> bool:
        return isinstance(node, list) and len(node) == len(specs)

    return jax.tree.map(
        lambda node: list(specs) if is_leaves(node) else REPLICATED, tree, is_leaf=is_leaves
    )


def _is_bound(axis: str) -> bool:
    try:
        lax.axis_index(axis)
    except NameError:
        return False
    return True
