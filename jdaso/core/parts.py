"""Copies the sums of an exchange in parts, so that temporary memory is that of one part.

A merge needs memory for the sums. If they arrive in parts, and each part is merged before the next
one arrives, this is the memory of the largest part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import jax
import numpy as np

from jdaso.core.exchange import BoundExchange
from jdaso.core.fragments import near_equal
from jdaso.core.types import Leaves, PyTree

# More parts take less memory and more time to compile. Those that fit a cache are merged faster.
_COUNT, _LEAST_BYTES = 16, 1 << 18

#: Lists of arrays. Array j of each has the shape of leaf j of a part.
Lists = list[Leaves]


def cut_leaves(exchange: BoundExchange, leaves: Leaves, whole: bool = False) -> list[slice]:
    """The parts of the leaves: one, if ``whole`` or if the exchange does not copy parts."""
    sizes = np.array([x.size * x.dtype.itemsize for x in leaves])
    count = min(_COUNT, len(leaves), sizes.sum() // _LEAST_BYTES)
    if whole or not exchange.in_parts or count < 2:
        return [slice(0, len(leaves))]
    return [slice(*ends) for ends in near_equal(sizes, int(count))]


def finish_in_parts(
    exchange: BoundExchange,
    state: PyTree,
    leaves: Leaves,
    collect: Callable[[PyTree, slice], tuple[Any, jax.Array, PyTree]],
    function: Callable[[slice, Any, jax.Array], Lists],
    whole: bool = False,
    into: Lists | None = None,
) -> tuple[Lists, jax.Array, PyTree]:
    """Waits for the sums, and applies a function to them.

    Args:
        leaves: like the sums.
        collect: ``(state, part) -> (arrived, header, state)``, waits for a part.
        function: ``(part, arrived, header) -> lists``. Array j of each list has the shape of leaf
            j of the part.
        whole: whether the function needs all leaves.
        into: lists in whose places the results are put, part by part. They are necessary if XLA
            cannot compute the results there, because one result depends on several of them.

    Returns:
        The lists for all leaves, the header and the state.
    """
    results = []
    for part in cut_leaves(exchange, leaves, whole):
        arrived, header, state = collect(state, part)
        lists = function(part, arrived, header)
        if exchange.in_parts:
            places = None if into is None else [each[part] for each in into]
            state, lists = exchange.after(state, part, lists, places)
        results.append(lists)
    return _joined(results), header, state


def _joined(parts: Sequence[Lists]) -> Lists:
    """The lists for all leaves, from those for each part."""
    return [list(chain.from_iterable(lists)) for lists in zip(*parts, strict=True)]
