"""What crosses between nodes, as operations of the progress thread.

Every operation yields for which ranks of its communicator it still waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jdaso._base import AGREED, HEADER_SIZE, UNCOUNTED, JdasoError
from jdaso.exchange._all_reduce import all_reduce, part, shards
from jdaso.exchange._messages import Waiting, Waits, wait_for
from jdaso.exchange._staging import Staging

_GREETING_TAG, _OUTLINE_TAG, _FLAG_TAG, _FIRST_TAG = 0, 1, 2, 3
_BROADCAST_BYTES = 1 << 26
_SAME_SCHEDULE = "All nodes must use the same schedule and continue the same checkpoint."
_SAME_START = (
    "That is EASGD's centre, DiLoCo's anchor with its outer optimizer, or the parameters of "
    "synchronous training: start from jdaso.broadcast(exchange, params), with the same "
    "hyperparameters on all nodes, and let nothing else change them. If nodes are of different "
    "hardware, whose last bits differ, pass same_bits=False to mpi_exchange."
)
_GREETING = np.dtype(
    [("number", "<i8"), ("step", "<i8"), ("specs", "<i8"), ("header", "<f4", (HEADER_SIZE,))]
)
# What is compared, how it is called, and what to do where it differs.
_COMPARED = {
    "number": ("number", "All nodes must use the same schedule and start from the same step."),
    "step": ("step", "All nodes must use the same schedule and start from the same step."),
    "specs": (
        "the checksum of shapes and dtypes that cross",
        "All nodes must use the same wire, the same model, and as many fragments.",
    ),
}


def greet(
    comm: Any,
    fingerprint: int,
    number: int,
    step: int,
    header: np.ndarray,
    contributors: Sequence[int],
    describe: Callable[[int], str],
) -> Waits:
    """Tells all members what this one is about to exchange, and adds up the headers.

    Nodes that have fallen out of step find out here, before any number is added to another. The
    communicator is the same for every exchange, whatever its number, or they would not meet.

    Args:
        fingerprint: of what is about to be exchanged.
        contributors: ranks whose headers are summed, one per node.

    Returns:
        The summed header; its last numbers, equal on all, are not summed.

    Raises:
        JdasoError: if what must be equal is not; names two ranks and what each of them has.
    """
    greeting = np.zeros(1, _GREETING)
    greeting[0] = (number, step, fingerprint, header)
    greetings = yield from _gather(comm, greeting, _GREETING_TAG)
    own, at = comm.Get_rank(), "a consensus" if number == UNCOUNTED else f"exchange {number}"
    for rank, other in enumerate(greetings):
        for what, (name, advice) in _COMPARED.items():
            if other[what][0] != greeting[what][0]:
                raise JdasoError(
                    f"nodes are out of step at {at}: {name} is {greeting[what][0]} in "
                    f"{describe(own)}{_plan(header)} but {other[what][0]} in {describe(rank)}"
                    f"{_plan(other['header'][0])}. {advice}"
                )
        _check_agreed(at, header, other["header"][0], [describe(r) for r in (own, rank)])
    # Added in the same order by every member, so that all get the same bits.
    total = header.copy()
    total[: -len(AGREED)] = 0
    for rank in contributors:
        total[: -len(AGREED)] += greetings[rank]["header"][0][: -len(AGREED)]
    return total


def _plan(header: np.ndarray) -> str:
    """Period and delay, as said beside a step; nothing where an exchange has none."""
    period, delay = (int(x) for x in header[-len(AGREED) :][:2])
    return f" (period {period}, delay {delay})" if period else ""


def _check_agreed(at: str, mine: np.ndarray, theirs: np.ndarray, who: Sequence[str]) -> None:
    """Raises, naming what, if what must be equal on all nodes is not."""
    for what, a, b in zip(AGREED, mine[-len(AGREED) :], theirs[-len(AGREED) :], strict=True):
        if a != b:
            value = "the fingerprint of " if what.startswith("the ") else ""
            advice = _SAME_START if what == AGREED[-1] else _SAME_SCHEDULE
            raise JdasoError(
                f"nodes disagree at {at}: {value}{what} is {int(a)} in {who[0]} but "
                f"{int(b)} in {who[1]}. {advice}"
            )


class Strategy(NamedTuple):
    """How an exchange crosses; see :func:`jdaso.mpi_exchange`."""

    pattern: str = "direct"
    senders: str = "one"
    chunk_bytes: int = 1 << 20


def sum_staged(
    comm: Any, staging: Staging, strategy: Strategy, index: int = 0, parts: int = 1
) -> Waits:
    """Sums a part of what is staged over the members of a communicator; returns the bytes sent."""
    sent = 0
    for vector, sums in staging.pairs:
        owned = part(shards(len(vector), comm.Get_size()), index, parts)
        elements = max(1, strategy.chunk_bytes // (vector.itemsize * math.prod(vector.shape[1:])))
        sent += yield from all_reduce(
            comm, vector, sums, owned, elements, _FIRST_TAG, strategy.pattern
        )
    return sent


def broadcast(comm: Any, arrays: Sequence[np.ndarray], root: int) -> Waits:
    """Overwrites arrays with those of one member."""
    requests = []
    for array in arrays:
        raw = array.reshape(-1).view(np.uint8)
        for start in range(0, len(raw), _BROADCAST_BYTES):
            requests.append(comm.Ibcast(raw[start : start + _BROADCAST_BYTES], root=root))
    before = None
    while requests := [request for request in requests if not request.Test()]:
        # The root waits for it knows not whom, and says so by an empty set.
        ranks = frozenset({root} - {comm.Get_rank()})
        yield Waiting(ranks, len(requests) != before, tuple(requests))
        before = len(requests)


def compare(
    comm: Any, outline: Sequence[str], digest: bytes, describe: Callable[[int], str]
) -> Waits:
    """Raises on every member, naming rank and leaf, if the outlines of a tree differ."""
    digests = yield from _gather(comm, np.frombuffer(digest, np.uint8).copy(), _GREETING_TAG)
    if all(np.array_equal(digests[0], other) for other in digests):
        return
    text = np.frombuffer("\n".join(outline).encode(), np.uint8).copy()
    lengths = yield from _gather(comm, np.array([len(text)], np.int64), _OUTLINE_TAG)
    longest = max(int(length[0]) for length in lengths)
    padded = np.zeros(longest, np.uint8)
    padded[: len(text)] = text
    texts = yield from _gather(comm, padded, _OUTLINE_TAG)
    outlines = [
        raw[: int(length[0])].tobytes().decode().split("\n")
        for raw, length in zip(texts, lengths, strict=True)
    ]
    check_alike(outlines, describe)


def check_alike(outlines: Sequence[Sequence[str]], describe: Callable[[int], str]) -> None:
    """Raises, naming rank and leaf, if the outlines of the members' trees differ."""
    first = outlines[0]
    for rank, other in enumerate(outlines):
        if list(other) == list(first):
            continue
        index = 0
        while index < min(len(first), len(other)) and first[index] == other[index]:
            index += 1
        mine, theirs = (
            lines[index] if index < len(lines) else "no such leaf" for lines in (first, other)
        )
        raise JdasoError(
            f"the nodes' parameters differ: {describe(0)} has {mine}, {describe(rank)} has "
            f"{theirs}. Build the same model on every node."
        )


def in_world_ranks(operation: Waits, ranks: Sequence[int]) -> Waits:
    """The same operation, yielding ``ranks[r]`` for a rank r of its communicator."""
    while True:
        try:
            waiting = next(operation)
        except StopIteration as end:
            return end.value
        yield waiting._replace(ranks=frozenset(ranks[rank] for rank in waiting.ranks))


def anyone(comm: Any, flag: bool) -> Waits:
    """Whether any member's flag is set."""
    flags = yield from _gather(comm, np.array([flag]), _FLAG_TAG)
    return any(bool(given[0]) for given in flags)


def _gather(comm: Any, own: np.ndarray, tag: int) -> Waits:
    """What every member gave, by rank; all of one shape and dtype."""
    size, rank = comm.Get_size(), comm.Get_rank()
    given = [np.empty_like(own) for _ in range(size)]
    given[rank] = own
    peers = [(rank + i) % size for i in range(1, size)]
    receives = {p: comm.Irecv(given[p].view(np.uint8), source=p, tag=tag) for p in peers}
    sends = {p: comm.Isend(own.view(np.uint8), dest=p, tag=tag) for p in peers}
    yield from wait_for(receives)
    yield from wait_for(sends)
    return given
