"""The type of all averaging transformations, which :func:`jdaso.drain` accepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from jdaso.core.state import AveragingState
from jdaso.core.types import PyTree


class Averaging(optax.GradientTransformationExtraArgs):
    """An optax transformation that averages between nodes, and that :func:`jdaso.drain` accepts.

    Attributes:
        finish: ``(params, state) -> (params, state)``, merges the exchanges in flight.
        state_type: type of the state that ``finish`` takes.
        moves_moments: whether :func:`jdaso.chain` may average the optimizer's moments as well.
    """

    finish: Callable[[PyTree, Any], tuple[PyTree, Any]]
    state_type: type
    moves_moments: bool

    def __new__(cls, init, update, finish, state_type=AveragingState, moves_moments=False):
        self = super().__new__(cls, init, update)
        self.finish = finish
        self.state_type = state_type
        self.moves_moments = moves_moments
        return self
