"""Local SGD: blocking averaging of the parameters every few steps."""

from jdaso.algorithms.dasgd import mixing_merge
from jdaso.algorithms.defaults import averaging_on_one_wire, check_progress, resolve_schedule
from jdaso.core.exchange import Exchange
from jdaso.core.transformation import Averaging
from jdaso.core.types import Schedule


def local_sgd(
    exchange: Exchange,
    period: int | None = None,
    *,
    schedule: Schedule | None = None,
    wire: str | None = None,
    nonfinite: str = "skip",
) -> Averaging:
    """Local SGD, also called periodic averaging.

    Every ``period`` steps, with M nodes,

        x <- (1/M) sum_j x_j                                          (dasgd Sec. II-C3)

    Training waits for the mean. With period 1 and plain SGD this is minibatch SGD. Use it to
    exchange less often than :func:`jdaso.allreduce_gradients`, without staleness. For post-local
    SGD, which averages at every step at first, see :func:`jdaso.schedules.by_step`.

    Args:
        exchange: The connection between nodes.
        period: Optimizer steps between two exchanges.
        schedule: Replaces the period. If its delay is not 0, the mean replaces the steps of the
            node since the exchange was posted. :func:`jdaso.dasgd` keeps a part of them.
        wire, nonfinite: As in :func:`jdaso.daso`.

    Returns:
        An optax transformation. Put it last in a chain. ``update`` requires ``params``.

    Raises:
        ValueError: for a period below 1, a schedule whose delay is a whole period, or an unknown
            wire.

    >>> import jdaso, optax
    >>> tx = jdaso.chain(optax.sgd(0.1), jdaso.local_sgd(jdaso.single_exchange(), period=8))
    """
    schedule = resolve_schedule("local_sgd", period, 0, schedule)
    check_progress("local_sgd", "a node's own weight", 0.0, schedule)
    return averaging_on_one_wire(
        "local_sgd", exchange, schedule, mixing_merge(0.0), wire, nonfinite=nonfinite
    )
