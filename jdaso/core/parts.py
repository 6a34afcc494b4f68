"""Copies the leaves of an exchange in parts, so that temporary memory is that of one part.

A merge needs memory for the sums. If they arrive in parts, and each part is merged before the next
one arrives, this is the memory of the largest part. The same holds for what is computed from the
leaves to be sent.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import jax
import numpy as np

from jdaso.core.exchange import Exchange
from jdaso.core.fragments import near_equal
from jdaso.core.types import Leaves, Number, PyTree

# More parts take less memory and more time to compile. Parts that fit a cache are also merged
# faster.
_COUNT, _LEAST_BYTES = 16, 1 << 18

#: Lists of arrays. Array j of each has the shape of leaf j of a part.
Lists = list[Leaves]


def cut_leaves(exchange: Exchange, leaves: Leaves, whole: bool = False) -> list[slice]:
    """The parts of the leaves: one, if ``whole`` or if the exchange does not copy parts."""
    sizes = np.array([x.size * x.dtype.itemsize for x in leaves])
    count = min(_COUNT, len(leaves), sizes.sum() // _LEAST_BYTES)
    if whole or exchange.parts is None or count < 2:
        return [slice(0, len(leaves))]
    return [slice(*ends) for ends in near_equal(sizes, int(count))]


def start_in_parts(
    exchange: Exchange,
    state: PyTree,
    number: Number,
    step: Number,
    leaves: Leaves,
    header: jax.Array,
    wire: str | None,
    inputs: Lists,
    function: Callable[[slice, Lists], tuple[Leaves, Lists]],
) -> tuple[PyTree, Number, Lists]:
    """Posts what a function computes from the leaves.

    Args:
        leaves: of the shapes that are sent.
        inputs: lists with one array per leaf, which the function replaces.
        function: ``(part, inputs) -> (sent, outputs)``.

    Returns:
        The state, the number of the next exchange, and the outputs.
    """
    sent, results = [], []
    for part in cut_leaves(exchange, leaves):
        own = [each[part] for each in inputs]
        if exchange.parts is not None:
            state, own = exchange.parts.after(state, part, own)
        message, outputs = function(part, own)
        results.append(outputs)
        if exchange.parts is None:
            sent += message
            continue
        state, following = exchange.parts.start(state, number, step, message, header, wire, part)
    if exchange.parts is None:
        state, following = exchange.start(state, number, step, sent, header, wire)
    return state, following, _joined(results)


def finish_in_parts(
    exchange: Exchange,
    state: PyTree,
    number: Number,
    leaves: Leaves,
    function: Callable[[slice, Leaves, jax.Array], Lists],
    whole: bool = False,
    into: Lists | None = None,
) -> tuple[Lists, jax.Array, PyTree]:
    """Waits for the sums, and applies a function to them.

    Args:
        leaves: like the sums.
        function: ``(part, sums, header) -> lists``. Array j of each list has the shape of leaf j of
            the part.
        whole: whether the function needs all leaves.
        into: lists in whose places the results are put, part by part. They are necessary if XLA
            cannot compute the results there, because one result depends on several of them.

    Returns:
        The lists for all leaves, the header and the state.
    """
    if exchange.parts is None:
        sums, header, state = exchange.finish(state, number, leaves)
        return function(slice(0, len(leaves)), sums, header), header, state
    results = []
    for part in cut_leaves(exchange, leaves, whole):
        sums, header, state = exchange.parts.finish(state, number, leaves[part], part)
        places = None if into is None else [each[part] for each in into]
        state, lists = exchange.parts.after(state, part, function(part, sums, header), places)
        results.append(lists)
    return _joined(results), header, state


def _joined(results: list[Lists]) -> Any:
    return [list(chain.from_iterable(lists)) for lists in zip(*results, strict=True)]
