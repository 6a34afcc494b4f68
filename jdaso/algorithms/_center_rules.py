"""What a server does with a worker's message: pure functions, of NumPy's arrays and JAX's.

A state is updated at once, as a whole; the server takes messages in the order of their arrival.
"""

from __future__ import annotations

import numpy as np

from jdaso._base import Leaves
from jdaso._center import Center, CenterState, Rule


def check_center(name: str, center: Center) -> None:
    """Raises ValueError for what is no centre."""
    if not isinstance(center, Center):
        raise ValueError(
            f"{name} needs a centre, from jdaso.mpi_center or jdaso.simulated_center, got "
            f"{type(center).__name__}."
        )


def elastic_rule(alpha: float) -> Rule:
    """A worker sends x; ``c <- c + alpha (x - c)``, replies the old c (easgd Algorithm 1, b).

    >>> import numpy as np
    >>> rule = elastic_rule(0.25)
    >>> state, reply = rule.update(rule.init([np.float32([0, 8])]), [np.float32([4, 4])])
    >>> state.center[0].tolist(), reply[0].tolist()
    ([1.0, 7.0], [0.0, 8.0])
    """

    def update(state: CenterState, message: Leaves):
        pulled = [c + alpha * (x - c) for c, x in zip(state.center, message, strict=True)]
        return state._replace(center=pulled, clock=state.clock + 1), state.center

    return Rule(f"elastic, alpha={alpha}", _first, update)


def summing_rule() -> Rule:
    """A worker sends v; ``c <- c + v``, replies c (easgd Algorithm 3).

    >>> import numpy as np
    >>> rule = summing_rule()
    >>> state, reply = rule.update(rule.init([np.float32([1, 2])]), [np.float32([3, -1])])
    >>> reply[0].tolist(), int(state.clock)
    ([4.0, 1.0], 1)
    """

    def update(state: CenterState, message: Leaves):
        moved = [c + v for c, v in zip(state.center, message, strict=True)]
        return state._replace(center=moved, clock=state.clock + 1), moved

    return Rule("summing", _first, update)


def averaging_rule(moving_rate: float | None = None) -> Rule:
    """The same, with the average over time ``z <- (1 - a) z + a c``, c before its update.

    As in easgd Sec. 5: ``a = 1/(t+1)``, with t the master's clock from 0, for ADOWNPOUR, or
    constant for MVADOWNPOUR; z starts as c.

    >>> import numpy as np
    >>> rule = averaging_rule()
    >>> state = rule.init([np.float32([0])])
    >>> for v in (1, 2):
    ...     state, _ = rule.update(state, [np.float32([v])])
    >>> state.center[0].tolist(), state.average[0].tolist()  # of the centres 0 and 1
    ([3.0], [0.5])
    """
    inner = summing_rule()

    def init(leaves: Leaves) -> CenterState:
        return _first(leaves)._replace(average=[1 * x for x in leaves])

    def update(state: CenterState, message: Leaves):
        a = 1 / (state.clock + 1) if moving_rate is None else np.float64(moving_rate)
        z = [
            (1 - a).astype(z.dtype) * z + a.astype(z.dtype) * c
            for z, c in zip(state.average, state.center, strict=True)
        ]
        state, reply = inner.update(state, message)
        return state._replace(average=z), reply

    return Rule(f"averaging, moving_rate={moving_rate}", init, update)


def momentum_rule(learning_rate: float, momentum: float) -> Rule:
    """A worker sends g; ``v <- delta v - eta g``, ``c <- c + delta v`` (easgd Algorithm 5).

    >>> import numpy as np
    >>> rule = momentum_rule(learning_rate=0.5, momentum=0.5)
    >>> state, reply = rule.update(rule.init([np.float32([1])]), [np.float32([2])])
    >>> state.velocity[0].tolist(), reply[0].tolist()
    ([-1.0], [0.5])
    """

    def init(leaves: Leaves) -> CenterState:
        return _first(leaves)._replace(velocity=[0 * x for x in leaves])

    def update(state: CenterState, message: Leaves):
        velocity = [
            momentum * v - learning_rate * g for v, g in zip(state.velocity, message, strict=True)
        ]
        moved = [c + momentum * v for c, v in zip(state.center, velocity, strict=True)]
        return state._replace(center=moved, velocity=velocity, clock=state.clock + 1), moved

    return Rule(f"momentum, learning_rate={learning_rate}, momentum={momentum}", init, update)


def _first(leaves: Leaves) -> CenterState:
    return CenterState([1 * x for x in leaves], (), (), np.int32(0))
