"""Where the leaves of an exchange lie: on the devices of a process, and in its staging buffers.

The staging buffers hold every shard of every leaf once. Several devices may hold copies of a
shard. Copy ``k mod n`` of its n copies is sent by exchange k.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdaso.core.types import JdasoError
from jdaso.core.wire import BLOCK_DTYPE, wire_shape


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


class Layout(NamedTuple):
    """The layout of a list of leaves.

    Attributes:
        specs: of all shards of all leaves, in order.
        placements: for each device the placement of its shard of each leaf.
        bounds: for each shard its leaf, and start and end along each axis.
    """

    specs: tuple[LeafSpec, ...]
    placements: tuple[tuple[Placement, ...], ...]
    bounds: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]

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

    def join(self, shards: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The leaves on the wire, from all shards. Blocks of int8 are concatenated."""
        leaves: dict[int, list[tuple[tuple[tuple[int, int], ...], np.ndarray]]] = {}
        for (leaf, bounds), shard in zip(self.bounds, shards, strict=True):
            leaves.setdefault(leaf, []).append((bounds, shard))
        return [_joined(parts) for _, parts in sorted(leaves.items())]

    def cut(self, leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The inverse of :meth:`join`.

        Raises:
            JdasoError: if blocks of int8 were saved with other shards.
        """
        if leaves and leaves[0].dtype == BLOCK_DTYPE:
            return self._cut_blocks(leaves)
        return [
            leaves[leaf][tuple(slice(*pair) for pair in bounds)] for leaf, bounds in self.bounds
        ]

    def _cut_blocks(self, leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
        used = [0] * len(leaves)
        shards = []
        for (leaf, _), (shape, _) in zip(self.bounds, self.specs, strict=True):
            shards.append(leaves[leaf][used[leaf] : used[leaf] + shape[0]])
            used[leaf] += shape[0]
        if used != [len(leaf) for leaf in leaves]:
            raise JdasoError(
                "an exchange in flight with the wire int8 was saved with other shards of the "
                "parameters: restore on as many devices as saved it, or call jdaso.drain before "
                "saving."
            )
        return shards


def _joined(parts: list[tuple[tuple[tuple[int, int], ...], np.ndarray]]) -> np.ndarray:
    if len(parts) == 1:
        return parts[0][1]
    if parts[0][1].dtype == BLOCK_DTYPE:
        return np.concatenate([shard for _, shard in parts])
    last = parts[-1][0]  # shards are in order, so the last one ends where the leaf ends
    shape = [stop for _, stop in last]
    whole = np.empty(shape, parts[0][1].dtype)
    for bounds, shard in parts:
        whole[tuple(slice(*pair) for pair in bounds)] = shard
    return whole


def unsharded(specs: Sequence[LeafSpec]) -> Layout:
    """The layout of leaves, given by their shapes on the wire, on one device.

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
    all_bounds: list[tuple[int, tuple[tuple[int, int], ...]]] = []
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
