"""How the leaves of an exchange are sharded over the devices of a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdaso.core.exchange import REPLICATED_NAME
from jdaso.core.tree import is_float
from jdaso.core.types import ParamsWithMoments, PyTree

_ADVICE = "pass shardings with one PartitionSpec or NamedSharding for each parameter"


class Shardings:
    """The shardings of leaves by name, on one mesh of a node's devices.

    Args:
        given: the argument ``shardings`` of :func:`jdaso.mpi_exchange`.
        mesh: the devices of the node, for shardings without a mesh.

    Attributes:
        mesh: of all shardings.

    Raises:
        ValueError: if a mesh has other devices, or if there are several meshes.
    """

    def __init__(self, given: Any, mesh: Mesh):
        self.mesh = self._devices_mesh = mesh
        self._has_mesh = False
        self._given = given is not None
        self._known: dict[Any, PartitionSpec] = {(REPLICATED_NAME, (0,)): PartitionSpec()}
        self._find: Callable[[Any, Any], Any]
        if given is None:
            self._find = lambda path, leaf: PartitionSpec()
        elif _is_sharding(given):
            self._spec("shardings", given)
            self._find = lambda path, leaf: given
        elif callable(given) and jax.tree_util.all_leaves([given]):  # not a model of specs
            self._find = given
        else:
            self._find = self._from_tree(given)

    def register(self, tree: PyTree) -> list[str]:
        """Finds and checks the shardings of a tree, which :meth:`specs` then returns.

        Returns:
            A text for each leaf that is sharded, to compare with those of other nodes.

        Raises:
            ValueError: if a leaf has no sharding, or one that does not fit its shape.
        """
        if not isinstance(tree, ParamsWithMoments):
            return self._register(tree, "")
        self._register(tree.params, "")  # for consensus, which gets the parameters alone
        texts = self._register(tree.params, ".params")
        for i, moments in enumerate(tree.moments):
            texts += self._register(moments, f".moments[{i}]")
        return texts

    def _register(self, tree: PyTree, prefix: str) -> list[str]:
        texts = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if not is_float(leaf):
                continue
            name, shape = _name(path), np.shape(leaf)
            spec = self._spec(name, self._find(path, leaf))
            try:
                sharding = NamedSharding(self.mesh, spec)
                sharding.check_compatible_aval(shape)  # for a spec of more axes
                sharding.shard_shape(shape)
            except ValueError as error:
                if not prefix.startswith(".moments"):
                    raise ValueError(
                        f"the sharding {spec} of {name or 'params'} does not fit its shape "
                        f"{shape} on a mesh of shape {dict(self.mesh.shape)}: {error} Each axis "
                        "that is sharded must be a multiple of its number of shards."
                    ) from error
                # Some optimizers keep moments of another shape than the parameter.
                spec = PartitionSpec()
            self._known[prefix + name, shape] = spec
            if any(axis is not None for axis in spec):
                mesh = dict(self.mesh.shape)
                text = f"{prefix + name or 'params'}: {spec} on a mesh of shape {mesh}"
                processes = [device.process_index for device in self.mesh.devices.flat]
                texts.append(f"{text} of processes {processes}" if any(processes) else text)
        return texts

    def _from_tree(self, tree: PyTree) -> Callable[[Any, Any], Any]:
        """A function of path and leaf that looks the sharding up in a tree."""
        by_name = _by_name(tree)
        # The specs without a mesh are of the mesh of the others.
        for name, leaf in sorted(by_name.items(), key=lambda x: isinstance(x[1], PartitionSpec)):
            self._spec(name, leaf)

        def find(path: Any, leaf: Any) -> Any:
            name = _name(path)
            if name not in by_name:
                known = ", ".join(sorted(by_name)[:5])
                raise ValueError(
                    f"shardings has no sharding for {name or 'params'}, a parameter of shape "
                    f"{np.shape(leaf)}; it has {known or 'none'}: {_ADVICE}."
                )
            return by_name[name]

        return find

    def specs(
        self, names: Sequence[str], leaves: Sequence[Any], inside: bool = False
    ) -> list[PartitionSpec]:
        """The specs of leaves.

        Outside ``shard_map``, leaves that were never registered are laid out as they are. Inside,
        their layout is unknown.

        Args:
            names: as ``jax.tree_util.keystr`` returns them.
            leaves: the leaves.
            inside: whether these are shards, inside ``shard_map``.

        Raises:
            ValueError: inside ``shard_map``, if there are shardings, for a leaf without one.
        """
        names = [*map(_plain, names)]
        if not inside:
            return [
                self._known.get((name, np.shape(leaf)), self._spec_of(leaf))
                for name, leaf in zip(names, leaves, strict=True)
            ]
        known = {(name, len(shape)): spec for (name, shape), spec in self._known.items()}
        of_leaf = [(name, np.ndim(leaf)) for name, leaf in zip(names, leaves, strict=True)]
        if self._given and (unknown := [each for each in of_leaf if each not in known]):
            raise ValueError(_unknown_inside(*unknown[0]))
        return [known.get(each, PartitionSpec()) for each in of_leaf]

    def _spec(self, name: str, sharding: Any) -> PartitionSpec:
        """The spec of what a user has given for one leaf."""
        if isinstance(sharding, PartitionSpec):
            spec = sharding
        elif isinstance(sharding, NamedSharding):
            spec = sharding.spec
            self._use(name, sharding.mesh)
        else:
            raise ValueError(
                f"the sharding of {name or 'params'} must be a PartitionSpec or a NamedSharding, "
                f"got {sharding!r}: {_ADVICE}."
            )
        axes = jax.tree.leaves(tuple(spec))
        if unknown := [axis for axis in axes if axis not in self.mesh.axis_names]:
            raise ValueError(
                f"the sharding {spec} of {name or 'params'} has the axis {unknown[0]!r}, and the "
                f"mesh has the axes {self.mesh.axis_names}: pass NamedShardings with your mesh."
            )
        return spec

    def _use(self, name: str, mesh: Any) -> None:
        devices, own = set(mesh.devices.flat), set(self._devices_mesh.devices.flat)
        if devices != own:
            raise ValueError(
                f"the mesh of {name or 'params'} has the devices {_ids(devices)}, and the node has "
                f"{_ids(own)}: make the mesh of all topology.devices of the node."
            )
        if self._has_mesh and mesh != self.mesh:
            raise ValueError(
                f"the mesh of {name or 'params'} is {mesh}, and that of another leaf is "
                f"{self.mesh}: use one mesh for all parameters."
            )
        self.mesh, self._has_mesh = mesh, True

    def _spec_of(self, leaf: Any) -> PartitionSpec:
        """How an array is sharded on the mesh. Tracers and arrays elsewhere count as unsharded."""
        sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh == self.mesh:
            return sharding.spec
        return PartitionSpec()


def _by_name(tree: PyTree) -> dict[str, Any]:
    """The shardings of a tree. None stands for a leaf that is replicated."""
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: x is None or _is_sharding(x)
    )
    return {_name(path): PartitionSpec() if x is None else x for path, x in leaves}


def _unknown_inside(name: str, axes: int) -> str:
    return (
        f"inside shard_map, jdaso does not know how {name or 'the array'} of {axes} axes is "
        "sharded: pass a tree with the names that tx.init has seen, or call it outside of "
        "shard_map."
    )


def _name(path: Any) -> str:
    return _plain(jax.tree_util.keystr(path))


def _plain(name: str) -> str:
    """The name of a parameter, whether nnx has it as a variable or as an array."""
    return name.removesuffix(".value")


def _is_sharding(value: Any) -> bool:
    return isinstance(value, PartitionSpec | NamedSharding)


def _ids(devices: set[jax.Device]) -> list[int]:
    return sorted(device.id for device in devices)
