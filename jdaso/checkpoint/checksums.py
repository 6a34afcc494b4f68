"""The checksums of a checkpoint's arrays. A disk may lose a file or flip a bit."""

import zlib
from collections.abc import Mapping

import numpy as np


def checksums(groups: Mapping[str, dict[str, np.ndarray]]) -> np.ndarray:
    """uint32, the CRC-32 of name, dtype, shape and bytes of each array, in the order of names."""
    sums = []
    for group in groups.values():
        for name, array in sorted(group.items()):
            about = f"{name} {array.dtype.name} {array.shape}".encode()
            sums.append(zlib.crc32(raw_bytes(array), zlib.crc32(about)))
    return np.array(sums, np.uint32)


def raw_bytes(array: np.ndarray) -> memoryview:
    """The bytes of an array of any dtype."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
