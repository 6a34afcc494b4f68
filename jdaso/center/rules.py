"""The updates of the server, as pure functions of NumPy or JAX arrays.

The server handles messages one at a time, in the order of their arrival.
"""

import numpy as np

from jdaso.center.types import Center, CenterState, ServerRule
from jdaso.core.types import Leaves


def check_center(name: str, center: Center) -> None:
    if not isinstance(center, Center):
        raise ValueError(
            f"{name} needs a center, got {type(center).__name__}: make one with "
            "jdaso.center.mpi_center or jdaso.center.simulated_center."
        )


def elastic_rule(alpha: float) -> ServerRule:
    """A worker sends x. ``c <- c + alpha (x - c)``; the reply is the old c (easgd Algorithm 1, b).

    >>> import numpy as np
    >>> rule = elastic_rule(0.25)
    >>> state, reply = rule.update(rule.init([np.float32([0, 8])]), [np.float32([4, 4])])
    >>> state.center[0].tolist(), reply[0].tolist()
    ([1.0, 7.0], [0.0, 8.0])
    """

    def update(state: CenterState, message: Leaves):
        center = [c + alpha * (x - c) for c, x in zip(state.center, message, strict=True)]
        return state._replace(center=center, clock=state.clock + 1), state.center

    return ServerRule(f"elastic, alpha={alpha}", _first_state, update)


def summing_rule() -> ServerRule:
    """A worker sends v. ``c <- c + v``; the reply is the new c (easgd Algorithm 3).

    >>> import numpy as np
    >>> rule = summing_rule()
    >>> state, reply = rule.update(rule.init([np.float32([1, 2])]), [np.float32([3, -1])])
    >>> reply[0].tolist(), int(state.clock)
    ([4.0, 1.0], 1)
    """

    def update(state: CenterState, message: Leaves):
        center = [c + v for c, v in zip(state.center, message, strict=True)]
        return state._replace(center=center, clock=state.clock + 1), center

    return ServerRule("summing", _first_state, update)


def averaging_rule(moving_rate: float | None = None) -> ServerRule:
    """:func:`summing_rule` with the average ``z <- (1 - a) z + a c`` of the old c (easgd Sec. 5).

    For ADOWNPOUR ``a = 1/(t+1)``, where t is the master's clock and starts at 0. For MVADOWNPOUR
    a is the constant ``moving_rate``. z starts as c.

    >>> import numpy as np
    >>> rule = averaging_rule()
    >>> state = rule.init([np.float32([0])])
    >>> for v in (1, 2):
    ...     state, _ = rule.update(state, [np.float32([v])])
    >>> state.center[0].tolist(), state.average[0].tolist()  # the mean of the centers 0 and 1
    ([3.0], [0.5])
    """
    inner = summing_rule()

    def init(leaves: Leaves) -> CenterState:
        return _first_state(leaves)._replace(average=[1 * x for x in leaves])

    def update(state: CenterState, message: Leaves):
        a = 1 / (state.clock + 1) if moving_rate is None else np.float64(moving_rate)
        z = [
            (1 - a).astype(z.dtype) * z + a.astype(z.dtype) * c
            for z, c in zip(state.average, state.center, strict=True)
        ]
        state, reply = inner.update(state, message)
        return state._replace(average=z), reply

    return ServerRule(f"averaging, moving_rate={moving_rate}", init, update)


def momentum_rule(learning_rate: float, momentum: float) -> ServerRule:
    """A worker sends g. ``v <- delta v - eta g``; ``c <- c + delta v`` (easgd Algorithm 5).

    The reply is the new c.

    >>> import numpy as np
    >>> rule = momentum_rule(learning_rate=0.5, momentum=0.5)
    >>> state, reply = rule.update(rule.init([np.float32([1])]), [np.float32([2])])
    >>> state.velocity[0].tolist(), reply[0].tolist()
    ([-1.0], [0.5])
    """

    def init(leaves: Leaves) -> CenterState:
        return _first_state(leaves)._replace(velocity=[0 * x for x in leaves])

    def update(state: CenterState, message: Leaves):
        velocity = [
            momentum * v - learning_rate * g for v, g in zip(state.velocity, message, strict=True)
        ]
        center = [c + momentum * v for c, v in zip(state.center, velocity, strict=True)]
        return state._replace(center=center, velocity=velocity, clock=state.clock + 1), center

    return ServerRule(f"momentum, learning_rate={learning_rate}, momentum={momentum}", init, update)


def _first_state(leaves: Leaves) -> CenterState:
    return CenterState([1 * x for x in leaves], (), (), np.int32(0))
