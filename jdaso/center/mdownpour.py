"""MDOWNPOUR: the server runs SGD with momentum on the gradients of the workers."""

import jax.numpy as jnp
import optax

from jdaso.algorithms.defaults import python_float
from jdaso.center.rules import check_center, momentum_rule
from jdaso.center.types import Center
from jdaso.core.chain import chain
from jdaso.core.transformation import Averaging, averaging
from jdaso.core.tree import widened
from jdaso.core.types import Merge, SyncTarget
from jdaso.core.validation import check_positive, check_share
from jdaso.schedules import constant

# Gradients are sent, and parameters are received.
_SERVER_STEPS = SyncTarget(
    lambda params, updates: updates,
    lambda tree, updates: tree,
    fallback=lambda leaf: jnp.full_like(leaf, jnp.nan),  # a gradient cannot replace the reply
    uses_anchor=False,
)


def mdownpour(
    center: Center, learning_rate: float, momentum: float, *, nonfinite: str = "skip"
) -> Averaging:
    """Momentum DOWNPOUR: workers send gradients, and only the server updates the parameters.

    At every step of a worker, with g its gradient:

        v <- delta v - eta g;  c <- c + delta v;  x <- c              (easgd Algorithms 4, 5)

    These are the equations as printed, so ``momentum=0`` would not move the centre. There is no
    period and no delay, because a worker cannot compute without the reply.

    Args:
        center: From :func:`jdaso.center.mpi_center` or :func:`jdaso.center.simulated_center`.
        learning_rate: eta. The paper's are 100 times smaller than for DOWNPOUR, with delta = 0.99.
        momentum: delta, in (0, 1).
        nonfinite: With ``skip``, a worker does not contribute gradients that are not finite. With
            ``raise``, it raises an error.

    Returns:
        An optax transformation, a complete optimizer. ``update`` requires ``params``. Start from
        ``center.join(params)``.

    Raises:
        ValueError: for a learning rate that is not positive or a momentum outside (0, 1).

    >>> import jdaso
    >>> center = jdaso.center.simulated_center(4)
    >>> tx = jdaso.center.mdownpour(center, learning_rate=0.01, momentum=0.9)
    """
    check_center("mdownpour", center)
    check_positive("learning_rate", learning_rate)
    check_positive("momentum", momentum)
    check_share("momentum", momentum, below_one=True)
    rate, delta = python_float("learning_rate", learning_rate), python_float("momentum", momentum)
    adopt_center = Merge(
        init=lambda params: (),
        merge=lambda leaves, arrival, state: (arrival.total, state),
        message=lambda leaves, state: (widened(leaves), state),
    )
    steps = averaging(
        "mdownpour",
        center.make_exchange(momentum_rule(rate, delta)),
        constant(period=1, delay=0),
        adopt_center,
        nonfinite=nonfinite,
        sync_target=_SERVER_STEPS,
    )
    return chain(optax.identity(), steps)
