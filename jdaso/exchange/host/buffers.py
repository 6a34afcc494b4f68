"""Staging buffers of exchanges, which hold the sent leaves and the sums, and their reuse."""

from __future__ import annotations

import copy
import functools
import math
import mmap
import time
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from jdaso.core.block_format import format_of, num_blocks
from jdaso.core.wire import sum_dtype, sum_padding, sum_shape, wire_shape
from jdaso.exchange.host.layout import Group, LeafSpec, unsharded

# Written by Python or compiled code: the number of devices that have read the sums, and the start
# and end of the copies of leaves and sums, in seconds of the monotonic clock.
RECORD = np.dtype(
    [
        ("reads", "<i4"),
        ("unused", "<i4"),
        ("copy_to_host", "<f8", (2,)),
        ("copy_to_device", "<f8", (2,)),
    ]
)


# Numbers, few enough that they stay in a cache.
_CHECKED_AT_ONCE = 1 << 16

# Place of ffi_queue.h. The sums of a leaf with int8 or float4 may end with padding.
PLACE = np.dtype([("address", "<u8"), ("least_bytes", "<u8"), ("most_bytes", "<u8")])


class Places(NamedTuple):
    """The places of leaves and of sums, each PLACE[number + 1]; the last one is the record's."""

    of_leaves: np.ndarray
    of_sums: np.ndarray


class StagingBuffers:
    """Host buffers of one exchange: one vector per wire dtype for the leaves, and one for the sums.

    Args:
        specs: Shapes and dtypes of the leaves, or of their shards, on the wire, in order.

    Attributes:
        layout: Which devices fill and read which leaves. One device, unless it is replaced.

    >>> staging = StagingBuffers(
    ...     [LeafSpec((2,), np.dtype("float32")), LeafSpec((), np.dtype("float32"))])
    >>> staging.fill([np.array([1.0, 2.0]), np.array(3.0)])
    >>> [vector.tolist() for vector, _ in staging.pairs]
    [[1.0, 2.0, 3.0]]
    """

    def __init__(self, specs: Sequence[LeafSpec]):
        self.specs = tuple(specs)
        self.layout = unsharded(self.specs)
        lengths: dict[Group, int] = {}
        places = []
        for spec in self.specs:
            start, row = lengths.get(spec.group, 0), math.prod(_row(spec.dtype))
            lengths[spec.group] = start + math.prod(spec.shape) // row
            places.append(slice(start, lengths[spec.group]))
        pairs = {
            (dtype, holders): (
                page_aligned((length, *_row(dtype)), dtype),
                page_aligned((length, *sum_shape(_row(dtype), dtype)), sum_dtype(dtype)),
            )
            for (dtype, holders), length in lengths.items()
        }
        #: For each wire dtype the vector that is sent and the vector of the sums. Shards that other
        #: processes hold as well have vectors of their own.
        self.pairs = list(pairs.values())
        self._holders = [holders for _, holders in pairs]
        each = list(zip(self.specs, places, strict=True))
        #: Views of the vectors that are sent, in the wire shapes of the leaves.
        self.leaves = [pairs[x.group][0][place].reshape(x.shape) for x, place in each]
        #: Views of the sums in the leaves' shapes; with int8 and float4, rows that end with zeros.
        self.sums = [
            pairs[x.group][1][place].reshape(sum_shape(x.shape, x.dtype)) for x, place in each
        ]
        self.record = np.zeros((), RECORD)
        self._lent: dict[tuple[str, int], np.ndarray] = {}  # places in use by compiled code
        #: Whether devices copy to and from the buffers asynchronously.
        self.used_by_devices = False

    def by_holders(self) -> list[tuple[tuple[int, ...], Self]]:
        """The vectors of each group of processes that hold the same shards."""
        groups = []
        for holders in sorted(set(self._holders)):
            own = [i for i, held_by in enumerate(self._holders) if held_by == holders]
            group = copy.copy(self)
            group.pairs = [self.pairs[i] for i in own]
            group.arrived = [self.arrived[i] for i in own]
            groups.append((holders, group))
        return groups

    def fill(self, leaves: Sequence[np.ndarray]) -> None:
        """Copies all leaves to the buffers."""
        for place, leaf in zip(self.leaves, leaves, strict=True):
            np.copyto(place, leaf)

    def fill_from(self, device: int, number: int, leaves: Sequence[np.ndarray]) -> None:
        """Copies the leaves that a device sends in an exchange to the buffers."""
        self.record["copy_to_host"][0] = time.monotonic()
        shards, sends = self.layout.shards_of(device), self.layout.sent_by(device, number)
        for shard, sent, leaf in zip(shards, sends, leaves, strict=True):
            if sent:
                np.copyto(self.leaves[shard], leaf)
        self.record["copy_to_host"][1] = time.monotonic()

    def sums_of(self, device: int) -> list[np.ndarray]:
        """The sums of a device's shards."""
        return [self.sums[shard] for shard in self.layout.shards_of(device)]

    def read(self, device: int, copy: bool) -> list[np.ndarray]:
        """The sums of a device's shards, which count as read by one more device."""
        self.record["copy_to_device"][0] = time.monotonic()
        sums = [total.copy() if copy else total for total in self.sums_of(device)]
        self.record["copy_to_device"][1] = time.monotonic()
        self.record["reads"] += 1
        return sums

    def finite(self) -> bool:
        """Whether all sums are finite. Rows of blocks are finite once they are rounded."""
        return all(
            np.isfinite(sums[start : start + _CHECKED_AT_ONCE]).all()
            for vector, sums in self.pairs
            if not format_of(vector.dtype)
            for start in range(0, len(sums), _CHECKED_AT_ONCE)
        )

        _ = self.places  # computed here, because several threads may ask for them later

    def reset(self) -> None:
        """Prepares the buffers for another exchange."""
        self.record = np.zeros((), RECORD)
        for places in self.places:
            places["address"][-1] = self.record.ctypes.data

    @functools.cached_property
    def arrived(self) -> list[np.ndarray]:
        """Memory for the sums in each wire dtype, which are the sums if that is their dtype."""
        return [
            sums if vector.dtype == sums.dtype else page_aligned(vector.shape, vector.dtype)
            for vector, sums in self.pairs
        ]

    def places_to_fill(self, device: int, number: int) -> np.ndarray:
        """PLACE[leaves + 1] of a device, with the address 0 for leaves that another one sends."""
        places = self.places.of_leaves[[*self.layout.shards_of(device), -1]]
        places["address"][:-1][~np.array(self.layout.sent_by(device, number), bool)] = 0
        self._lent["leaves", device] = places  # compiled code reads it while the buffers live
        return places

    def places_to_read(self, device: int) -> np.ndarray:
        """PLACE[leaves + 1] of the sums of a device's shards."""
        places = self.places.of_sums[[*self.layout.shards_of(device), -1]]
        self._lent["sums", device] = places
        return places

    @functools.cached_property
    def places(self) -> Places:
        """The memory that compiled code reads and writes."""
        paddings = [sum_padding(spec.dtype) for spec in self.specs]
        sums = zip([*self.sums, self.record], [*paddings, 0], strict=True)
        return Places(
            np.array([_place(array) for array in (*self.leaves, self.record)], PLACE),
            np.array([_place(array, padding) for array, padding in sums], PLACE),
        )


def _place(array: np.ndarray, padding: int = 0) -> tuple[int, int, int]:
    return array.ctypes.data, max(array.nbytes - padding, 0), array.nbytes


def page_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialized array that shares no page with other memory, so that it can be pinned.

    >>> memory = page_aligned((3, 2), np.dtype("float32"))
    >>> memory.shape, memory.ctypes.data % mmap.PAGESIZE
    ((3, 2), 0)
    """
    size = math.prod(shape) * dtype.itemsize
    pages = -(-size // mmap.PAGESIZE)
    memory = np.empty((pages + 1) * mmap.PAGESIZE, np.uint8)
    start = -memory.ctypes.data % mmap.PAGESIZE
    return memory[start : start + size].view(dtype).reshape(shape)


class BufferPool:
    """Buffers of completed exchanges, which later exchanges of the same leaves reuse."""

    def __init__(self) -> None:
        self._in_use: list[tuple[StagingBuffers, int, bool]] = []
        self._free: dict[tuple[int, ...], list[StagingBuffers]] = {}

    def acquire(self, specs: Sequence[LeafSpec]) -> StagingBuffers:
        """Free buffers with these specs, or new ones. Frees buffers of other wires."""
        self._sort()
        free = self._free.get(_sizes(specs), [])
        # Buffers of another wire will not be needed again soon. Pinned ones stay, because unpinning
        # may wait until a device is idle, and that device may be waiting for the caller.
        kept = _dtypes(specs)
        free[:] = [old for old in free if old.used_by_devices or _dtypes(old.specs) == kept]
        staging = next((staging for staging in free if staging.specs == tuple(specs)), None)
        if staging is None:
            return StagingBuffers(specs)
        free.remove(staging)
        staging.reset()
        return staging

    def release(self, staging: StagingBuffers, readers: int, reuse: bool) -> None:
        """Returns buffers to the pool, which keeps them until ``readers`` devices have read them.

        With ``reuse=False`` no later exchange uses them.
        """
        self._sort()
        self._in_use.append((staging, readers, reuse))

    def _sort(self) -> None:
        in_use, self._in_use = self._in_use, []
        for entry in in_use:
            staging, readers, reuse = entry
            if staging.record["reads"] < readers:  # read once, as compiled code may increment it
                self._in_use.append(entry)
            elif reuse:
                self._free.setdefault(_sizes(staging.specs), []).append(staging)


def _dtypes(specs: Sequence[LeafSpec]) -> list[np.dtype]:
    return [spec.dtype for spec in specs]


def _sizes(specs: Sequence[LeafSpec]) -> tuple[int, ...]:
    """The number of blocks of each leaf. It does not depend on the wire."""
    return tuple(num_blocks(sum_shape(spec.shape, spec.dtype)) for spec in specs)


def _row(dtype: np.dtype) -> tuple[int, ...]:
    """The shape of one element on the wire."""
    return wire_shape((), dtype)[1:]
