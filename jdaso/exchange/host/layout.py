"""Which device holds which shard of a leaf, and where the staging buffers hold it.

The staging buffers hold every shard of every leaf once. Several devices may hold copies of a
shard. Copy ``k mod n`` of its n copies is sent by exchange k. If several processes are joined into
one program, those of a process hold the shards of its devices.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdaso.core.block_format import format_of
from jdaso.core.exchange import Shards
from jdaso.core.wire import pack, unpack, unpadded, wire_shape

Group = tuple[np.dtype, tuple[int, ...]]


class LeafSpec(NamedTuple):
    """Shape and dtype of one leaf, or one shard of a leaf, on the wire.

    ``holders`` has the process of each of its copies, if several are joined into one program.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    holders: tuple[int, ...] = ()

    @property
    def group(self) -> Group:
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
        relative: whether the sums are to be without what this node has sent; see ``start`` of
            :class:`jdaso.Exchange`.
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
        """The number of devices of this process that copy shards to the staging buffers."""
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


def unsharded(specs: Sequence[LeafSpec]) -> Layout:
    """The layout of leaves on one device, given by their shapes on the wire.

    >>> layout = unsharded([LeafSpec((3,), np.dtype("float32"))])
    >>> layout.senders, layout.shards_of(0), layout.sent_by(0, number=5)
    (1, [0], [True])
    """
    placements = tuple(HeldShard(i, 0, 1) for i in range(len(specs)))
    bounds = tuple((i, tuple((0, n) for n in spec.shape)) for i, spec in enumerate(specs))
    shapes = tuple(spec.shape for spec in specs)
    return Layout(tuple(specs), (placements,), bounds, shapes, _checksum(specs, bounds))


def sender(holders: Sequence[int], number: int) -> int:
    """The process that sends a shard in exchange ``number``."""
    return holders[max(number, 0) % len(holders)]


def _checksum(specs: Sequence[LeafSpec], bounds: Sequence[tuple[int, Bounds]]) -> int:
    return zlib.crc32(repr([*bounds, *(spec[:2] for spec in specs)]).encode())


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
    return Layout(
        tuple(leaf_specs),
        tuple(map(tuple, placements)),
        tuple(leaf_bounds),
        shapes,
        _checksum(all_specs, all_bounds) ^ relative,
        relative,
        names,
    )
