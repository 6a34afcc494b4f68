"""How leaves are sharded over the devices of a node, and where a slot's memory holds the shards.

:class:`Shardings` finds the sharding of each leaf by its name, and :func:`make_layout` says which
device holds which shard. The memory holds every shard of every leaf once. Several devices may hold
copies of a shard. Copy ``k mod n`` of its n copies is sent by exchange k. If several processes are
joined into one program, those of a process hold the shards of its devices.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdaso.core.block_format import format_of, num_blocks
from jdaso.core.exchange import REPLICATED_NAME, Shards
from jdaso.core.tree import is_float
from jdaso.core.types import ParamsWithMoments, PyTree
from jdaso.core.wire import pack, sum_dtype, sum_padding, sum_shape, unpack, unpadded, wire_shape

_ADVICE = "pass shardings with one PartitionSpec or NamedSharding for each parameter"


class Shardings:
    """The shardings of leaves by name, on one mesh of a node's devices.

    Args:
        given: the argument ``shardings`` of :func:`jdaso.mpi_exchange`.
        mesh: the devices of the node, for shardings without a mesh.

    Attributes:
        mesh: of all shardings.
        given: whether there are any.

    Raises:
        ValueError: if a mesh has other devices, or if there are several meshes.
    """

    def __init__(self, given: Any, mesh: Mesh):
        self.mesh = self._devices_mesh = mesh
        self._has_mesh = False
        self.given = given is not None
        self._known: dict[Any, PartitionSpec] = {(REPLICATED_NAME, (0,)): PartitionSpec()}
        self._find: Callable[[Any, Any], Any]
        if given is None:
            given = PartitionSpec()
        if _is_sharding(given):
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
                    ) from None
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
        """A function of path and leaf that looks the sharding up in a tree.

        None stands for a leaf that is replicated.
        """
        leaves = jax.tree_util.tree_leaves_with_path(
            tree, is_leaf=lambda x: x is None or _is_sharding(x)
        )
        by_name = {_name(path): PartitionSpec() if x is None else x for path, x in leaves}
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
        if self.given and (unknown := [each for each in of_leaf if each not in known]):
            name, axes = unknown[0]
            raise ValueError(
                f"inside shard_map, jdaso does not know how {name or 'the array'} of {axes} axes "
                "is sharded: pass a tree with the names that tx.init has seen, or call it outside "
                "of shard_map."
            )
        return [known.get(each, PartitionSpec()) for each in of_leaf]

    def _spec(self, name: str, sharding: Any) -> PartitionSpec:
        """The spec of what a user has given for one leaf."""
        if isinstance(sharding, PartitionSpec):
            spec = sharding
        elif isinstance(sharding, NamedSharding):
            spec, mesh = sharding.spec, cast(Mesh, sharding.mesh)
            devices, own = set(mesh.devices.flat), set(self._devices_mesh.devices.flat)
            if devices != own:
                raise ValueError(
                    f"the mesh of {name or 'params'} has the devices {_ids(devices)}, and the node "
                    f"has {_ids(own)}: make the mesh of all topology.devices of the node."
                )
            if self._has_mesh and mesh != self.mesh:
                raise ValueError(
                    f"the mesh of {name or 'params'} is {mesh}, and that of another leaf is "
                    f"{self.mesh}: use one mesh for all parameters."
                )
            self.mesh, self._has_mesh = mesh, True
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

    def _spec_of(self, leaf: Any) -> PartitionSpec:
        """How an array is sharded on the mesh. Tracers and arrays elsewhere count as unsharded."""
        sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh == self.mesh:
            return sharding.spec
        return PartitionSpec()


def _name(path: Any) -> str:
    return _plain(jax.tree_util.keystr(path))


def _plain(name: str) -> str:
    """The name of a parameter, whether nnx has it as a variable or as an array."""
    return name.removesuffix(".value")


def _is_sharding(value: Any) -> bool:
    return isinstance(value, PartitionSpec | NamedSharding)


def _ids(devices: set[jax.Device]) -> list[int]:
    return sorted(device.id for device in devices)


# `Place` of slots.h. Offsets are in the memory of a slot.
_PLACE = np.dtype([(name, "<i8") for name in (
    "sent", "wire_bytes", "sums", "least_bytes", "most_bytes", "bits", "item", "copy", "copies"
)])  # fmt: skip
_ALIGNED = 64  # bytes of a cache line
# Numbers that are checked at a time, few enough that they stay in a cache.
_CHECKED_AT_ONCE = 1 << 16


def _rounded_bits(dtype: np.dtype) -> int:
    """Returns the bits to which compiled code rounds float32 for a wire dtype; 0 for none."""
    return rows.bits if (rows := format_of(dtype)) else 16 * (dtype.name == "bfloat16")


class LeafSpec(NamedTuple):
    """Shape and dtype of one leaf, or one shard of a leaf, on the wire.

    ``holders`` has the process of each of its copies, if several are joined into one program.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    holders: tuple[int, ...] = ()

    @property
    def group(self) -> tuple[np.dtype, tuple[int, ...]]:
        """What is equal for the shards of one vector."""
        return self.dtype, self.holders


class HeldShard(NamedTuple):
    """A device's shard of a leaf.

    Attributes:
        shard: its index among the shards of all leaves.
        copy: its index among the copies of this shard.
        copies: the number of these copies.
    """

    shard: int
    copy: int
    copies: int


# Start and end along each axis.
Bounds = tuple[tuple[int, int], ...]


class Layout(NamedTuple):
    """The layout of a list of leaves.

    Attributes:
        specs: of all shards of all leaves that this process holds, in order.
        placements: for each device the placement of its shard of each leaf. Empty for devices of
            other processes.
        bounds: for each shard its leaf, and where it is in the leaf.
        shapes: of the whole leaves.
        fingerprint: a checksum of the shards of all processes of the program.
        relative: whether the sums are to be without what this node has sent; see
            :meth:`jdaso.core.exchange.BoundExchange.post`.
        names: of the leaves, for messages. Empty if they are unknown.
    """

    specs: tuple[LeafSpec, ...]
    placements: tuple[tuple[HeldShard, ...], ...]
    bounds: tuple[tuple[int, Bounds], ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    fingerprint: int = 0
    relative: bool = False
    names: tuple[str, ...] = ()

    def name(self, leaf: int) -> str:
        """What messages call a leaf."""
        return (self.names[leaf] or "the array") if self.names else f"leaf {leaf}"

    @property
    def _own(self) -> list[tuple[HeldShard, ...]]:
        """The placements of the devices of this process."""
        return [placements for placements in self.placements if placements]

    @property
    def replicated(self) -> bool:
        """Whether every device holds all leaves."""
        devices = len(self.placements)
        return all(placement.copies == devices for placement in self._own[0])

    @property
    def joined(self) -> bool:
        """Whether the devices belong to several processes."""
        return len(self._own) < len(self.placements)

    @property
    def senders(self) -> int:
        """The number of devices of this process that copy shards to the memory."""
        return 1 if self.replicated else len(self._own)

    def sent_by(self, device: int, number: int) -> list[bool]:
        """Whether a device sends its shard of each leaf in exchange ``number``."""
        turn = max(number, 0)
        return [copy == turn % copies for _, copy, copies in self.placements[device]]

    def shards_of(self, device: int) -> list[int]:
        """The shards that a device holds, one of each leaf."""
        return [placement.shard for placement in self.placements[device]]

    @property
    def dtypes(self) -> list[np.dtype]:
        """The dtype of each leaf on the wire."""
        return [self.specs[placement.shard].dtype for placement in self._own[0]]

    @property
    def block_bits(self) -> tuple[int, ...]:
        """As in :class:`jdaso.core.exchange.PostedExchange`."""
        return tuple(rows.bits if (rows := format_of(dtype)) else 0 for dtype in self.dtypes)

    def join(self, shards: Sequence[np.ndarray], number: int = 0) -> list[Any]:
        """Copies of the leaves, from all shards in their wire dtypes. Blocks become float32.

        If processes are joined, the shards of each leaf that this process sends in exchange
        ``number``.
        """
        dtypes = [np.dtype("float32") if format_of(x) else x for x in self.dtypes]
        each = zip(self.shapes, dtypes, strict=True)
        leaves = [Shards(shape, dtype, []) for shape, dtype in each]
        for (leaf, bounds), spec, shard in zip(self.bounds, self.specs, shards, strict=True):
            if spec.holders and sender(spec.holders, number) != jax.process_index():
                continue
            if format_of(shard.dtype):
                shard = unpadded(unpack(shard), tuple(end - start for start, end in bounds))
            leaves[leaf].shards.append((_slices(bounds), shard.copy()))
        return leaves if self.joined else [leaf.whole() for leaf in leaves]

    def cut(self, leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The inverse of :meth:`join`."""
        return [
            pack(leaves[leaf][_slices(bounds)], spec.dtype)
            for (leaf, bounds), spec in zip(self.bounds, self.specs, strict=True)
        ]


def _slices(bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(*pair) for pair in bounds)


def sender(holders: Sequence[int], number: int) -> int:
    """The process that sends a shard in exchange ``number``."""
    return holders[max(number, 0) % len(holders)]


@functools.lru_cache(maxsize=1024)
def make_layout(
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[np.dtype, ...],
    specs: tuple[PartitionSpec, ...],
    mesh: Mesh,
    relative: bool = False,
    names: tuple[str, ...] = (),
) -> Layout:
    """The layout of sharded leaves.

    Args:
        shapes: of the whole leaves.
        dtypes: on the wire.
        specs: of the leaves, on ``mesh``.
        relative: see :class:`Layout`.
        names: see :class:`Layout`.

    >>> mesh = Mesh(jax.devices()[:1], ("local",))
    >>> layout = make_layout(((3,),), (np.dtype("float32"),), (PartitionSpec(),), mesh)
    >>> layout.senders, layout.shards_of(0), layout.sent_by(0, number=5)
    (1, [0], [True])
    """
    devices, own_process = list(mesh.devices.flat), jax.process_index()
    processes = [device.process_index for device in devices]
    joined = len(set(processes)) > 1
    all_specs: list[LeafSpec] = []
    leaf_specs: list[LeafSpec] = []
    all_bounds: list[tuple[int, Bounds]] = []
    leaf_bounds: list[tuple[int, Bounds]] = []
    placements: list[list[HeldShard]] = [[] for _ in devices]
    for leaf, (shape, dtype, spec) in enumerate(zip(shapes, dtypes, specs, strict=True)):
        index = NamedSharding(mesh, spec).devices_indices_map(shape)
        bounds = [
            tuple(s.indices(n)[:2] for s, n in zip(index[device], shape, strict=True))
            for device in devices
        ]
        for own in dict.fromkeys(bounds):
            local = tuple(stop - start for start, stop in own)
            copies = [device for device, other in enumerate(bounds) if other == own]
            holders = tuple(processes[device] for device in copies)
            all_specs.append(LeafSpec(wire_shape(local, dtype), dtype, holders if joined else ()))
            all_bounds.append((leaf, own))
            if own_process not in holders:
                continue
            for copy, device in enumerate(copies):
                if processes[device] == own_process:
                    placements[device].append(HeldShard(len(leaf_specs), copy, len(copies)))
            leaf_specs.append(all_specs[-1])
            leaf_bounds.append(all_bounds[-1])
    fingerprint = zlib.crc32(repr([*all_bounds, *(spec[:2] for spec in all_specs)]).encode())
    return Layout(
        tuple(leaf_specs),
        tuple(map(tuple, placements)),
        tuple(leaf_bounds),
        shapes,
        fingerprint ^ relative,
        relative,
        names,
    )


class _Vectors(NamedTuple):
    """Offsets in the memory of a slot of the vectors of one dtype and one group of processes."""

    dtype: np.dtype
    holders: tuple[int, ...]
    rows: int  # elements, or rows of blocks
    sent: int
    sums: int
    arrived: int  # of sums in the wire dtype


class Plan:
    """Where the memory of a slot holds the shards of a layout.

    For each wire dtype there are a vector that is sent and a vector of sums. Shards that other
    processes hold as well have vectors of their own.
    """

    def __init__(self, layout: Layout):
        self.layout = layout
        rows: dict[Any, int] = {}
        places = []
        for spec in layout.specs:
            start = rows.get(spec.group, 0)
            end = start + math.prod(spec.shape) // math.prod(_row(spec.dtype))
            rows[spec.group] = end
            places.append(slice(start, end))
        self.vectors, self.bytes = [], 0
        for (dtype, holders), count in rows.items():
            item, wide = math.prod(_row(dtype)) * dtype.itemsize, sum_dtype(dtype)
            sent = self._next(count * item)
            sums = self._next(count * math.prod(sum_shape(_row(dtype), dtype)) * wide.itemsize)
            arrived = sums if wide == dtype else self._next(count * item)
            self.vectors.append(_Vectors(dtype, holders, count, sent, sums, arrived))
        sums_of = (sum_shape(spec.shape, spec.dtype) for spec in layout.specs)
        #: Equal for the wires of one list of leaves: the number of blocks of each.
        self.family = hash(tuple(map(num_blocks, sums_of)))
        order = {group: i for i, group in enumerate(rows)}
        #: For each shard its vectors, and its rows in them.
        self.shards = [
            (order[spec.group], place) for spec, place in zip(layout.specs, places, strict=True)
        ]

    def _next(self, size: int) -> int:
        start, self.bytes = self.bytes, self.bytes + -(-size // _ALIGNED) * _ALIGNED
        return start

    def places(self) -> np.ndarray:
        """_PLACE[devices, leaves], what each device sends and reads. Others' devices have none."""
        memory, placements = Memory(self), self.layout.placements
        start = memory.buffer.ctypes.data
        places = np.zeros((len(placements), len(self.layout.dtypes)), _PLACE)
        places["copy"], places["copies"] = 1, 1
        each = [
            (
                *(leaf.ctypes.data - start, leaf.nbytes, total.ctypes.data - start),
                *(max(total.nbytes - sum_padding(spec.dtype), 0), total.nbytes),
                *(_rounded_bits(spec.dtype), total.itemsize),
            )
            for spec, leaf, total in zip(self.layout.specs, memory.leaves, memory.sums, strict=True)
        ]
        for device, held in enumerate(placements):
            for leaf, (shard, *which) in enumerate(held):
                places[device, leaf] = (*each[shard], *which)
        return places


class Memory:
    """The memory of one exchange: what is sent, and the sums.

    Args:
        plan: Where it holds what.
        buffer: uint8 array of at least ``plan.bytes``; None for a new one.

    >>> mesh, float32 = Mesh(jax.devices()[:1], ("local",)), np.dtype("float32")
    >>> layout = make_layout(((2,), ()), (float32, float32), (PartitionSpec(),) * 2, mesh)
    >>> memory = Memory(Plan(layout))
    >>> memory.fill([np.array([1.0, 2.0]), np.array(3.0)])
    >>> [vector.tolist() for vector, _ in memory.pairs]
    [[1.0, 2.0, 3.0]]
    """

    def __init__(self, plan: Plan, buffer: np.ndarray | None = None):
        self.plan, self.layout, self.specs = plan, plan.layout, plan.layout.specs
        self.buffer = buffer = np.empty(plan.bytes, np.uint8) if buffer is None else buffer

        def view(start: int, rows: int, row: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            end = start + rows * math.prod(row) * dtype.itemsize
            return buffer[start:end].view(dtype).reshape(rows, *row)

        #: For each wire dtype the vector that is sent, and the vector of the sums.
        self.pairs = []
        #: Memory for the sums in each wire dtype, which are the sums if that is their dtype.
        self.arrived = []
        for dtype, _, rows, sent, sums, arrived in plan.vectors:
            row, wide = _row(dtype), sum_dtype(dtype)
            total = view(sums, rows, sum_shape(row, dtype), wide)
            self.pairs.append((view(sent, rows, row, dtype), total))
            self.arrived.append(total if arrived == sums else view(arrived, rows, row, dtype))

    @functools.cached_property
    def leaves(self) -> list[np.ndarray]:
        """Views of the vectors that are sent, in the wire shapes of the shards."""
        each = zip(self.specs, self.plan.shards, strict=True)
        return [self.pairs[i][0][rows].reshape(spec.shape) for spec, (i, rows) in each]

    @functools.cached_property
    def sums(self) -> list[np.ndarray]:
        """Views of the sums in the shards' shapes. Rows of int8 and float4 end with zeros."""
        each = zip(self.specs, self.plan.shards, strict=True)
        return [
            self.pairs[i][1][rows].reshape(sum_shape(spec.shape, spec.dtype))
            for spec, (i, rows) in each
        ]

    def by_holders(self) -> list[tuple[tuple[int, ...], Memory]]:
        """The vectors of each group of processes that hold the same shards."""
        groups = []
        all_holders = [vectors.holders for vectors in self.plan.vectors]
        for holders in sorted(set(all_holders)):
            own = [i for i, held_by in enumerate(all_holders) if held_by == holders]
            group = Memory(self.plan, self.buffer)
            group.pairs = [self.pairs[i] for i in own]
            group.arrived = [self.arrived[i] for i in own]
            groups.append((holders, group))
        return groups

    def fill(self, leaves: Sequence[np.ndarray]) -> None:
        """Copies all shards."""
        for place, leaf in zip(self.leaves, leaves, strict=True):
            np.copyto(place, leaf)

    def sums_of(self, device: int) -> list[np.ndarray]:
        """The sums of a device's shards."""
        return [self.sums[shard] for shard in self.layout.shards_of(device)]

    def finite(self) -> bool:
        """Whether all sums are finite. Rows of blocks are finite once they are rounded."""
        return all(
            np.isfinite(sums[start : start + _CHECKED_AT_ONCE]).all()
            for vector, sums in self.pairs
            if not format_of(vector.dtype)
            for start in range(0, len(sums), _CHECKED_AT_ONCE)
        )


def _row(dtype: np.dtype) -> tuple[int, ...]:
    """The shape of one element on the wire."""
    return wire_shape((), dtype)[1:]
