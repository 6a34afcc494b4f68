"""What crosses between a worker and the server: one message there, one back, each a frame.

A frame is one MPI message, a head and its content, so that nothing can get out of step: whatever
is wrong with a frame, the next one is a new one.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jdaso._center import CenterState
from jdaso.exchange._staging import Spec

# What workers send: a message for the rule, or ask, or say. The last two are answers.
EXCHANGE, JOIN, READ, WRITE, ALIVE, END, ANSWER, REFUSAL = range(8)
# The worker in whose process the server is.
SERVER = 0
_MAGIC = 0x6A64
_HEAD = np.dtype(
    [
        ("magic", "<i4"),
        ("kind", "<i4"),
        ("question", "<i4"),
        ("contributes", "<i4"),
        ("fingerprint", "<i8"),
        ("length", "<i8"),
    ]
)


class Frame(NamedTuple):
    """A frame that has been read.

    Attributes:
        kind: one of the above.
        question: its number, which the answer repeats.
        contributes: whether the worker's numbers are to be taken.
        fingerprint: of rule and shapes.
        content: uint8, numbers, or what :func:`spoken` makes of anything.
    """

    kind: int
    question: int
    contributes: bool
    fingerprint: int
    content: np.ndarray


def packed(
    kind: int,
    question: int,
    parts: Sequence[np.ndarray] = (),
    contributes: bool = True,
    fingerprint: int = 0,
) -> np.ndarray:
    """A frame, uint8, whose content are vectors one after the other."""
    contents = [part.reshape(-1).view(np.uint8) for part in parts]
    length = sum(len(content) for content in contents)
    head = np.array([(_MAGIC, kind, question, contributes, fingerprint, length)], _HEAD)
    return np.concatenate([head.view(np.uint8), *contents])


def unpacked(frame: np.ndarray) -> Frame:
    """What a frame says.

    Raises:
        ValueError: if it is none, or of another length than it says.

    >>> frame = packed(READ, 7, [np.float32([1, 2])])
    >>> unpacked(frame).question, unpacked(frame).content.view(np.float32).tolist()
    (7, [1.0, 2.0])
    """
    if len(frame) < _HEAD.itemsize:
        raise ValueError(f"a message of {len(frame)} bytes has no head")
    head = frame[: _HEAD.itemsize].view(_HEAD)[0]
    content = frame[_HEAD.itemsize :]
    if head["magic"] != _MAGIC or head["length"] != len(content):
        raise ValueError(f"a message of {len(frame)} bytes is not what its head says")
    kind, question = int(head["kind"]), int(head["question"])
    return Frame(kind, question, bool(head["contributes"]), int(head["fingerprint"]), content)


def unfold(content: np.ndarray, vectors: Sequence[np.ndarray]) -> None:
    """Copies the content of a frame to the vectors that it was made of.

    >>> vectors = [np.zeros(2, np.float32), np.zeros(1)]
    >>> unfold(unpacked(packed(ANSWER, 0, [np.float32([1, 2]), np.array([3.0])])).content, vectors)
    >>> [vector.tolist() for vector in vectors]
    [[1.0, 2.0], [3.0]]
    """
    start = 0
    for vector in vectors:
        vector.view(np.uint8)[:] = content[start : start + vector.nbytes]
        start += vector.nbytes


def spoken(content: Any) -> list[np.ndarray]:
    """Texts, whole numbers, None, arrays and lists of them as the content of a frame.

    As JSON, in which an array is its dtype and shape, and then the numbers: to read it executes
    nothing, whoever has sent it.
    """
    arrays: list[np.ndarray] = []

    def described(x: Any) -> Any:
        if isinstance(x, np.ndarray | np.generic):
            arrays.append(np.ascontiguousarray(x))
            return {"dtype": x.dtype.name, "shape": list(x.shape)}
        return [described(y) for y in x] if isinstance(x, list | tuple) else x

    text = json.dumps(described(content)).encode()
    return [np.array([len(text)], "<i8"), np.frombuffer(text, np.uint8), *arrays]


def heard(content: np.ndarray) -> Any:
    """What :func:`spoken` has put into a frame; tuples have become lists.

    Raises:
        ValueError: if nothing like it has.

    >>> said = heard(unpacked(packed(READ, 7, spoken(["a", None, np.float32([1, 2])]))).content)
    >>> said[:2], said[2].tolist()
    (['a', None], [1.0, 2.0])
    """
    try:
        begin = 8 + int(content[:8].view("<i8")[0])
        numbers = content[begin:]

        def undescribed(x: Any) -> Any:
            nonlocal numbers
            if isinstance(x, dict):
                dtype = np.dtype(x["dtype"])
                size = math.prod(x["shape"]) * dtype.itemsize
                array = np.frombuffer(numbers[:size].tobytes(), dtype).reshape(x["shape"])
                numbers = numbers[size:]
                return array.copy()
            return [undescribed(y) for y in x] if isinstance(x, list) else x

        said = undescribed(json.loads(content[8:begin].tobytes()))
    except Exception as error:  # of any kind, as the bytes may be anything
        raise ValueError(f"the content of a message cannot be read: {error}") from error
    if len(numbers):
        raise ValueError(f"a message has {len(numbers)} bytes too many")
    return said


def heard_state(content: np.ndarray) -> CenterState:
    """A state that was spoken.

    Raises:
        ValueError: for anything else.
    """
    return state_of(heard(content))


def state_of(fields: Any) -> CenterState:
    """A state of a list of its fields.

    Raises:
        ValueError: for anything else.
    """
    if not isinstance(fields, list) or len(fields) != len(CenterState._fields):
        raise ValueError("it is not like the centre's state")
    center, velocity, average, clock = fields
    return CenterState(center, velocity or (), average or (), clock)


def fingerprint(rule: str, specs: Sequence[Spec]) -> int:
    """A number that differs where rules or shapes do."""
    shapes = [(tuple(spec.shape), np.dtype(spec.dtype).name) for spec in specs]
    return zlib.crc32(repr((rule, shapes)).encode())
