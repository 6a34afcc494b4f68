"""Ranks in messages between processes, and in texts."""

from collections.abc import Callable, Collection
from typing import Any

#: Processes that a text names.
MAX_NAMES = 8


def is_number(value: Any, limit: int) -> bool:
    """Whether a part of a message is an integer in [0, limit)."""
    return type(value) is int and 0 <= value < limit


def encode_ranks(ranks: Collection[int]) -> list[list[int]]:
    """Ranks as pairs of the first and the last one of consecutive ones, for a message.

    >>> encode_ranks({1, 2, 3, 7})
    [[1, 3], [7, 7]]
    """
    pairs: list[list[int]] = []
    for rank in sorted(ranks):
        if pairs and pairs[-1][1] == rank - 1:
            pairs[-1][1] = rank
        else:
            pairs.append([rank, rank])
    return pairs


def decode_ranks(message: list[Any], size: int) -> frozenset[int]:
    """The inverse of :func:`encode_ranks`. What is not a pair of ranks in order is left out."""
    ranks = [-1]
    for pair in message:
        match pair:
            case [first, last] if is_number(first, size) and is_number(last, size):
                ranks += range(max(first, ranks[-1] + 1), last + 1)
    return frozenset(ranks[1:])


def name_ranks(ranks: Collection[int], describe: Callable[[int], str]) -> str:
    """Names a few of some ranks, and says how many others there are.

    >>> name_ranks({3, 1}, "rank {}".format), name_ranks(range(20), str)
    ('rank 1, rank 3', '0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    named = ", ".join(map(describe, sorted(ranks)[:MAX_NAMES]))
    return named + f" and {len(ranks) - MAX_NAMES} more" * (len(ranks) > MAX_NAMES)
