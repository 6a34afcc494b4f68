"""The wire format of requests from workers to the server and of its replies.

A frame is one MPI message that consists of a head and a content. A malformed frame therefore does
not affect the frames after it.
"""

import json
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jdaso.center.types import CenterState
from jdaso.exchange.host.layout import LeafSpec

# Kinds of frames. Workers send the first six, and the server replies with the last two.
EXCHANGE, JOIN, READ, WRITE, ALIVE, END, REPLY, REFUSAL = range(8)
# The rank of the process that runs the server.
SERVER = 0
# The tag of requests. Replies have the tags after it, one for each open request.
SERVER_TAG, REPLY_TAGS = 0, 1 << 14
_MAGIC = 0x6A64
# The longest message of an MPI that counts bytes in 32 bits.
_MOST_BYTES = 2**31 - 1
# Magic number, kind, request, contributes, fingerprint, and length of the content.
_HEAD = struct.Struct("<4i2q")


def reply_tag(request: int) -> int:
    """The tag of the reply to a request. A worker has fewer than ``REPLY_TAGS`` open requests."""
    return 1 + request % REPLY_TAGS


class Frame(NamedTuple):
    """A parsed frame: the fields of its head, and its content."""

    kind: int  # one of the kinds above
    request: int  # number of the request, which its reply repeats
    contributes: bool  # whether the server applies the message
    fingerprint: int  # checksum of rule and shapes
    content: np.ndarray  # uint8, the bytes of the message, or a result of :func:`encode`


def pack(
    kind: int,
    request: int,
    parts: Sequence[np.ndarray] = (),
    contributes: bool = True,
    fingerprint: int = 0,
) -> np.ndarray:
    """A frame, uint8, whose content is the concatenation of arrays.

    It raises ValueError if MPI cannot send a frame of this length.
    """
    contents = [part.reshape(-1).view(np.uint8) for part in parts]
    length = sum(len(content) for content in contents)
    if _HEAD.size + length > _MOST_BYTES and not _has_large_counts():
        raise ValueError(
            f"a message between a worker and the center would have {length} bytes, and this MPI "
            f"sends at most {_MOST_BYTES}: use an MPI of version 4, such as MPICH, or fewer "
            "parameters."
        )
    head = _HEAD.pack(_MAGIC, kind, request, contributes, fingerprint, length)
    return np.concatenate([np.frombuffer(head, np.uint8), *contents])


def _has_large_counts() -> bool:
    from mpi4py import MPI

    return MPI.Get_version() >= (4, 0)


def unpack(frame: np.ndarray) -> Frame:
    """Parses a frame; ValueError if it is none, or its length is not that in its head.

    >>> frame = pack(READ, 7, [np.float32([1, 2])])
    >>> unpack(frame).request, unpack(frame).content.view(np.float32).tolist()
    (7, [1.0, 2.0])
    """
    if len(frame) < _HEAD.size:
        raise ValueError(f"a message of {len(frame)} bytes is too short for a frame")
    head, content = frame[: _HEAD.size].tobytes(), frame[_HEAD.size :]
    magic, kind, request, contributes, fingerprint, length = _HEAD.unpack(head)
    if magic != _MAGIC or length != len(content):
        raise ValueError(f"a message of {len(frame)} bytes does not match its head")
    return Frame(kind, request, bool(contributes), fingerprint, content)


def copy_content(content: np.ndarray, vectors: Sequence[np.ndarray]) -> None:
    """Copies the content of a frame to vectors like those that were packed.

    >>> vectors = [np.zeros(2, np.float32), np.zeros(1)]
    >>> frame = unpack(pack(REPLY, 0, [np.float32([1, 2]), np.array([3.0])]))
    >>> copy_content(frame.content, vectors)
    >>> [vector.tolist() for vector in vectors]
    [[1.0, 2.0], [3.0]]
    """
    start = 0
    for vector in vectors:
        vector.view(np.uint8)[:] = content[start : start + vector.nbytes]
        start += vector.nbytes


def encode(value: Any) -> list[np.ndarray]:
    """Encodes texts, whole numbers, None, arrays and lists of them as the content of a frame.

    The encoding is JSON, with the dtype and shape of each array, followed by the arrays' bytes.
    Decoding executes no code from the sender.
    """
    arrays: list[np.ndarray] = []

    def to_json(x: Any) -> Any:
        if isinstance(x, np.ndarray | np.generic):
            arrays.append(np.ascontiguousarray(x))
            return {"dtype": x.dtype.name, "shape": list(x.shape)}
        return [to_json(y) for y in x] if isinstance(x, list | tuple) else x

    text = json.dumps(to_json(value)).encode()
    return [np.array([len(text)], "<i8"), np.frombuffer(text, np.uint8), *arrays]


def decode(content: np.ndarray) -> Any:
    """The inverse of :func:`encode`, except that tuples become lists.

    It raises ValueError if :func:`encode` cannot have produced the content.

    >>> value = decode(unpack(pack(READ, 7, encode(["a", None, np.float32([1, 2])]))).content)
    >>> value[:2], value[2].tolist()
    (['a', None], [1.0, 2.0])
    """
    try:
        begin = 8 + int(content[:8].view("<i8")[0])
        rest = content[begin:]

        def next_array(described: dict[str, Any]) -> np.ndarray:
            nonlocal rest
            dtype, shape = np.dtype(described["dtype"]), described["shape"]
            size = math.prod(shape) * dtype.itemsize
            array, rest = np.frombuffer(rest[:size].tobytes(), dtype).reshape(shape), rest[size:]
            return array.copy()

        value = json.loads(content[8:begin].tobytes(), object_hook=next_array)
    except Exception as error:  # any kind, because the bytes are arbitrary
        raise ValueError(f"the content of a message cannot be decoded: {error}") from error
    if len(rest):
        raise ValueError(f"the content of a message is {len(rest)} bytes too long")
    return value


def to_state(fields: Any) -> CenterState:
    """The state that :func:`encode` has encoded; raises ValueError for any other decoded value."""
    if not isinstance(fields, list) or len(fields) != len(CenterState._fields):
        raise ValueError("the message does not contain a state of the center")
    center, velocity, average, clock = fields
    return CenterState(center, velocity or (), average or (), clock)


def fingerprint(rule: str, specs: Sequence[LeafSpec]) -> int:
    """A checksum of the rule's name and of shapes and dtypes."""
    shapes = [(tuple(spec.shape), np.dtype(spec.dtype).name) for spec in specs]
    return zlib.crc32(repr((rule, shapes)).encode())
