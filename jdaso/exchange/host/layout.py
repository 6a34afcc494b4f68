"""Which device holds which shard of a leaf, and where the staging buffers hold it.

The staging buffers hold every shard of every leaf once. Several devices may hold copies of a
shard. Copy ``k mod n`` of its n copies is sent by exchange k.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdaso.core.wire import BLOCK_DTYPE, pack, unpack, unpadded, wire_shape


class LeafSpec(NamedTuple):
    """Shape and dtype of one leaf, or one shard of a leaf, on the wire."""

    shape: tuple[int, ...]
    dtype: np.dtype


class Placement(NamedTuple):
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
        specs: of all shards of all leaves, in order.
        placements: for each device the placement of its shard of each leaf.
        bounds: for each shard its leaf, and where it is in the leaf.
    """

    specs: tuple[LeafSpec, ...]
    placements: tuple[tuple[Placement, ...], ...]
    bounds: tuple[tuple[int, Bounds], ...]

    @property
    def replicated(self) -> bool:
        """Whether every device holds all leaves."""
        devices = len(self.placements)
        return all(placement.copies == devices for placement in self.placements[0])

    @property
    def senders(self) -> int:
        """The number of devices that copy their shards to the staging buffers."""
        return 1 if self.replicated else len(self.placements)

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
        return [self.specs[shard].dtype for shard in self.shards_of(0)]

    @property
    def int8(self) -> bool:
        """Whether the leaves are sent in blocks of int8."""
        return BLOCK_DTYPE in self.dtypes

    def join(self, shards: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Copies of the leaves, from all shards in their wire dtypes. Blocks become float32."""
        leaves: list[np.ndarray] = []
        ends = {leaf: [end for _, end in bounds] for leaf, bounds in self.bounds}
        for (leaf, bounds), shard in zip(self.bounds, shards, strict=True):
            if shard.dtype == BLOCK_DTYPE:
                shard = unpadded(unpack(shard), tuple(end - start for start, end in bounds))
            if leaf == len(leaves):  # the last shard of a leaf ends where the leaf ends
                leaves.append(np.empty(ends[leaf], shard.dtype))
            leaves[leaf][_slices(bounds)] = shard
        return leaves

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
    placements = tuple(Placement(i, 0, 1) for i in range(len(specs)))
    bounds = tuple((i, tuple((0, n) for n in spec.shape)) for i, spec in enumerate(specs))
    return Layout(tuple(specs), (placements,), bounds)


@functools.lru_cache(maxsize=1024)
def make_layout(
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[np.dtype, ...],
    specs: tuple[PartitionSpec, ...],
    mesh: Mesh,
) -> Layout:
    """The layout of sharded leaves.

    Args:
        shapes: of the whole leaves.
        dtypes: on the wire.
        specs: of the leaves, on ``mesh``.
    """
    devices = list(mesh.devices.flat)
    leaf_specs: list[LeafSpec] = []
    all_bounds: list[tuple[int, Bounds]] = []
    placements: list[list[Placement]] = [[] for _ in devices]
    for leaf, (shape, dtype, spec) in enumerate(zip(shapes, dtypes, specs, strict=True)):
        index = NamedSharding(mesh, spec).devices_indices_map(shape)
        bounds = [
            tuple(s.indices(n)[:2] for s, n in zip(index[device], shape, strict=True))
            for device in devices
        ]
        distinct = list(dict.fromkeys(bounds))
        for device, own in enumerate(bounds):
            shard = len(leaf_specs) + distinct.index(own)
            placements[device].append(
                Placement(shard, bounds[:device].count(own), bounds.count(own))
            )
        for own in distinct:
            local = tuple(stop - start for start, stop in own)
            leaf_specs.append(LeafSpec(wire_shape(local, dtype), dtype))
            all_bounds.append((leaf, own))
    return Layout(tuple(leaf_specs), tuple(map(tuple, placements)), tuple(all_bounds))
