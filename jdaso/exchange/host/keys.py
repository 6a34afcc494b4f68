"""Keys that say which exchange, and which leaves, an optimizer state belongs to."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp

from jdaso.core.exchange import HostState, SentLeaf
from jdaso.core.tree import named_floats
from jdaso.core.types import PyTree

# Unique in this process. A checkpoint stores the position of the exchange instead.
_numbers = itertools.count()


class Keys:
    """The keys of one exchange, one for each different list of leaves.

    >>> keys = Keys()
    >>> keys.key({"w": jnp.ones(2)}) == keys.key({"w": jnp.zeros(2)})
    True
    """

    def __init__(self) -> None:
        self._of_leaves: dict[tuple[SentLeaf, ...], int] = {}

    def key(self, params: PyTree) -> int:
        """The key of the floating-point leaves of a tree."""
        sent = tuple(
            SentLeaf(name, jnp.shape(leaf), jnp.result_type(leaf))
            for name, leaf in named_floats(params)
        )
        if sent not in self._of_leaves:
            self._of_leaves[sent] = next(_numbers)
        return self._of_leaves[sent]

    def sent_leaves(self, state: HostState) -> list[SentLeaf] | None:
        """The leaves of a state; None if it belongs to another exchange, or is traced."""
        if isinstance(state.key, jax.core.Tracer):
            return None
        wanted = int(state.key)
        return next((list(sent) for sent, key in self._of_leaves.items() if key == wanted), None)
