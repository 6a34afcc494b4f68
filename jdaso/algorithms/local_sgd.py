"""Local SGD: averaging of the parameters every few steps, at once or late."""

from jdaso.algorithms.defaults import (
    averaging_on_one_wire,
    choose_merge,
    mixing_merge,
    resolve_schedule,
)
from jdaso.algorithms.progress import warn_if_slow
from jdaso.core.exchange import Exchange
from jdaso.core.transformation import Averaging
from jdaso.core.tree import Fragments
from jdaso.core.types import Schedule


def local_sgd(
    exchange: Exchange,
    period: int | None = None,
    delay: int = 0,
    merge: str = "mean",
    *,
    schedule: Schedule | None = None,
    wire: str | None = None,
    fragments: Fragments = 1,
    nonfinite: str = "skip",
) -> Averaging:
    """Local SGD, also called periodic averaging.

    Every ``period`` steps, with M nodes,

        x <- (1/M) sum_j x_j                                          (dasgd Sec. II-C3)

    Training waits for the mean. With period 1 and plain SGD this is minibatch SGD. Use it to
    exchange less often than :func:`jdaso.allreduce_gradients`, without staleness. For post-local
    SGD, which averages at every step at first, see :func:`jdaso.schedules.by_step`.

    With a delay d, training does not wait, and the mean of step k arrives after step k + d. Then
    ``merge="delta"`` adds the change that the mean is for this node,

        x_{k+d} <- x_{k+d} + (1/M) sum_j x_k(j) - x_k                 (hivemind's delta rule)

    so that the steps since then are kept as they are. Use it for delays of a step or two. With
    ``merge="mean"`` the mean replaces them. :func:`jdaso.dasgd` and :func:`jdaso.daso` keep a part.

    Args:
        exchange: The connection between nodes.
        period: Optimizer steps between two exchanges.
        delay: Optimizer steps between posting and merging, ``0 <= delay <= period``.
        merge: ``mean`` or ``delta``. The values that were posted are subtracted as they were
            rounded on the wire, in the host's memory. With int8 and float4 the device keeps them,
            in float32. With bfloat16 and float16 each merge adds the rounding error of the sum.
        schedule: Replaces period and delay.
        wire, nonfinite: As in :func:`jdaso.daso`.
        fragments: As in :func:`jdaso.dasgd`.

    Returns:
        An optax transformation. Put it last in a chain. ``update`` requires ``params``.

    Raises:
        ValueError: for a period below 1, a delay above the period, an unknown merge or wire, or
            more fragments than steps in a period.

    References:
        The delta rule is ``delta_rule_averaging`` of ``TrainingStateAverager`` in hivemind,
        https://github.com/learning-at-home/hivemind.

    >>> import jdaso, optax
    >>> tx = jdaso.chain(optax.sgd(0.1), jdaso.local_sgd(jdaso.single_exchange(), period=8))
    """
    schedule = resolve_schedule("local_sgd", period, delay, schedule)
    rule = choose_merge(merge, mixing_merge(0.0), lambda arrival: 1.0)
    options = {"nonfinite": nonfinite, "fragments": fragments}
    found = averaging_on_one_wire("local_sgd", exchange, schedule, rule, wire, **options)
    warn_if_slow("local_sgd", exchange, period, delay, 0.0 if merge == "delta" else 1.0)
    return found
