"""The pure JAX engine: types, wire formats, and the state machine of all algorithms.

It imports no other part of jdaso, and every other part may import it. To write an algorithm of
your own, use the names below. A schedule says when to exchange, a :class:`Merge` says how a mean
changes the parameters, and :func:`averaging` makes an optax transformation of both.
"""

from jdaso.core.state import AveragingState, Metrics, averaging_state
from jdaso.core.transformation import AFTER_UPDATE, BEFORE_UPDATE, GRADIENTS, averaging
from jdaso.core.types import Arrival, Merge, Plan, SyncTarget

__all__ = [
    "AFTER_UPDATE",
    "BEFORE_UPDATE",
    "GRADIENTS",
    "Arrival",
    "AveragingState",
    "Merge",
    "Metrics",
    "Plan",
    "SyncTarget",
    "averaging",
    "averaging_state",
]
