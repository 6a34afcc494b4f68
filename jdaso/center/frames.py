"""The wire format of requests from workers to the server and of its replies.

A frame is one MPI message that consists of a head and a content. A malformed frame therefore does
not affect the frames after it.
"""

import json
import math
import struct
from typing import Any, NamedTuple

import numpy as np

from jdaso.center.types import CenterState

# Kinds of frames. Workers send the first six, and the server replies with the last two.
EXCHANGE, JOIN, READ, WRITE, ALIVE, END, REPLY, REFUSAL = range(8)
# The rank of the process that runs the server.
SERVER = 0
# The tag of requests. Replies have the tags after it, one for each open request.
SERVER_TAG, REPLY_TAGS = 0, 1 << 14
_MAGIC = 0x6A64
# The longest message of an MPI that counts bytes in 32 bits.
_MOST_BYTES = 2**31 - 1
# Magic number, kind, request, and the lengths of the text and of the arrays after it.
_HEAD = struct.Struct("<4iq")


def reply_tag(request: int) -> int:
    """The tag of the reply to a request. A worker has fewer than ``REPLY_TAGS`` open requests."""
    return 1 + request % REPLY_TAGS


class Frame(NamedTuple):
    """A frame whose content is not decoded yet."""

    kind: int  # one of the kinds above
    request: int  # number of the request, which its reply repeats
    text: bytes
    arrays: np.ndarray  # uint8, the bytes of all arrays

    def content(self) -> Any:
        """What was packed, with lists in place of tuples. Arrays are views of the frame.

        Decoding executes no code from the sender. It raises ValueError if :func:`pack` cannot have
        produced the content.
        """
        rest = self.arrays

        def next_array(described: dict[str, Any]) -> np.ndarray:
            nonlocal rest
            dtype, shape = np.dtype(described["dtype"]), described["shape"]
            size = math.prod(shape) * dtype.itemsize
            array, rest = rest[:size].view(dtype).reshape(shape), rest[size:]
            return array

        try:
            value = json.loads(self.text, object_hook=next_array)
        except Exception as error:  # any kind, because the bytes are arbitrary
            raise ValueError(f"the content of a message cannot be decoded: {error}") from None
        if len(rest):
            raise ValueError(f"the content of a message is {len(rest)} bytes too long")
        return value


def pack(kind: int, request: int, content: Any = None) -> np.ndarray:
    """A frame, uint8, with texts, integers, None, arrays and lists of them as content.

    They become JSON, with dtype and shape of each array, followed by the arrays' bytes. It raises
    ValueError if MPI cannot send a frame of this length.

    >>> frame = unpack(pack(READ, 7, ["a", None, np.float32([1, 2])]))
    >>> frame.request, frame.content()[:2], frame.content()[2].tolist()
    (7, ['a', None], [1.0, 2.0])
    """
    arrays: list[np.ndarray] = []

    def to_json(x: Any) -> Any:
        if isinstance(x, np.ndarray | np.generic):
            arrays.append(np.ascontiguousarray(x).reshape(-1).view(np.uint8))
            return {"dtype": x.dtype.name, "shape": x.shape}
        return [to_json(y) for y in x] if isinstance(x, list | tuple) else x

    text = json.dumps(to_json(content)).encode()
    text += b" " * (-len(text) % 8)  # aligns the arrays
    size = sum(map(len, arrays))
    if _HEAD.size + len(text) + size > _MOST_BYTES and not _has_large_counts():
        raise ValueError(
            f"a message between a worker and the center would have {size} bytes, and this MPI "
            f"sends at most {_MOST_BYTES}: use an MPI of version 4, such as MPICH, or fewer "
            "parameters."
        )
    head = _HEAD.pack(_MAGIC, kind, request, len(text), size) + text
    return np.concatenate([np.frombuffer(head, np.uint8), *arrays])


def _has_large_counts() -> bool:
    from mpi4py import MPI

    return MPI.Get_version() >= (4, 0)


def unpack(frame: np.ndarray) -> Frame:
    """Parses a frame; ValueError if it is none, or its length is not that in its head."""
    if len(frame) < _HEAD.size:
        raise ValueError(f"a message of {len(frame)} bytes is too short for a frame")
    magic, kind, request, text, arrays = _HEAD.unpack(frame[: _HEAD.size].tobytes())
    end = _HEAD.size + text
    if magic != _MAGIC or text < 0 or end + arrays != len(frame):
        raise ValueError(f"a message of {len(frame)} bytes does not match its head")
    return Frame(kind, request, frame[_HEAD.size : end].tobytes(), frame[end:])


def to_state(fields: Any) -> CenterState:
    """The state that a frame has contained; raises ValueError for any other content."""
    if not isinstance(fields, list) or len(fields) != len(CenterState._fields):
        raise ValueError("the message does not contain a state of the center")
    center, velocity, average, clock = fields
    return CenterState(center, velocity or (), average or (), clock)
