"""DASO: asynchronous averaging with a merge weighted by age. Its schedule is jdaso.cycling."""

from typing import Any

from jdaso.algorithms.defaults import choose_merge, resolve_schedule, resolve_wire
from jdaso.algorithms.progress import warn_if_slow
from jdaso.core.exchange import Exchange
from jdaso.core.transformation import Averaging, averaging
from jdaso.core.tree import Fragments, division_by
from jdaso.core.types import Arrival, Leaves, Merge, PyTree, Schedule


def daso(
    exchange: Exchange,
    period: int | None = None,
    delay: int | None = None,
    *,
    schedule: Schedule | None = None,
    wire: str | None = None,
    blocking_wire: str | None = None,
    fragments: Fragments = 1,
    nonfinite: str = "skip",
    merge: str = "mean",
) -> Averaging:
    """Distributed asynchronous and selective optimization.

    A node continues to train while an exchange is in flight. The merge weighs the sum by its age.
    With S the age of the sum in steps and P the number of nodes that contributed to it,

        x(t+S) <- (2 S x(t+S) + sum_i x_i(t)) / (2 S + P)         (daso-journal Eq. 2)

    In the blocking phases S = 0, and this is the mean. ``x(t+S)`` is taken after the local update
    of that step. The papers write ``x_{t+S-1}`` for it, and call P "the number of GPUs in the
    global network". In Heat, the authors' code, and here P counts the members of one group, which
    has one GPU of each node: as many values as the sum has. With
    :func:`jdaso.mpi_exchange`, the devices with local index ``k mod L`` make the k-th exchange.
    Afterwards all devices of the node hold the result.

    The mean has the weight w = P / (2 S + P). With a period of B steps, each merge discards the
    share w S / B of the local progress. ``merge="delta"`` discards nothing. It adds a correction,
    the difference between the mean and what this node has posted:

        x(t+S) <- x(t+S) + P / (2 S + P) ((1/P) sum_i x_i(t) - x(t))

    The corrections of all nodes sum to zero, so their mean stays where the steps have brought it.

    Use it with :func:`jdaso.cycling`, which adapts period and delay to the training loss.

    Args:
        exchange: The connection between nodes.
        period: B, optimizer steps between two exchanges.
        delay: S, optimizer steps between posting and merging, ``0 <= delay <= period``.
        schedule: Replaces period and delay. :func:`jdaso.cycling` has the published phases.
        wire: Dtype on the network in the cycling phase: ``float64``, ``float32``, ``bfloat16``,
            ``float16``, ``int8`` or ``float4``. A leaf never travels in a wider dtype than its own.
            Sums are accumulated in float32, or in float64 for float64 wires. ``int8`` and
            ``float4`` send blocks of 64 numbers of 8 or 4 bits with one scale, 65 or 33 bytes. They
            send the difference from the last mean, so the first mean travels in float32. EASGD and
            DiLoCo send the difference from their center. The rounding error stays in the state and
            is added to the next exchange. None selects the wire of the exchange, or float32.
        blocking_wire: Dtype on the network in warm-up and cool-down, where training waits. None
            selects the wire of the exchange, or bfloat16. bfloat16 loses updates below 1/256 of a
            parameter. If ``wire`` is int8 or float4, error feedback also covers these phases. A
            bfloat16 blocking wire then loses only the rounding of the sums.
        fragments: Number of parts of the parameters, or a function, see
            :func:`jdaso.core.averaging`. In the cycling phase the parts are exchanged one
            after the other within a period, which spreads the load on the network.
        nonfinite: What happens to gradients that are not finite. ``skip`` skips the step: the
            parameters and, in :func:`jdaso.chain`, the optimizer's whole state stay unchanged.
            The node is left out of sums and of P until it has merged the mean of the others. The
            metrics ``skipped`` and ``left_out`` count both. ``raise`` raises an error. ``off``
            does not read the gradients. Parameters that are not finite are found when they are
            posted, and the node is then left out of that sum.
        merge: ``mean``, as published, or ``delta``. A node that was left out of a sum takes the
            mean of the others.

    Returns:
        An averaging for :func:`jdaso.chain`. It takes ``value=loss``. Without
        a loss, period and delay do not change. Integer leaves are not averaged. It is also an
        optax transformation, which must be the last in an ``optax.chain``.

    Raises:
        ValueError: for an unknown wire, a wire that contradicts ``exchange.wire``, or an unknown
            ``nonfinite`` or ``merge``.

    References:
        Coquelin et al., Accelerating neural network training with distributed asynchronous and
        selective optimization (DASO), Journal of Big Data 9:14, 2022.

    >>> import jax.numpy as jnp, jdaso, optax
    >>> schedule = jdaso.cycling(period=4, warmup=10, cooldown=10, total=100, epoch=10)
    >>> tx = jdaso.chain(optax.sgd(0.1), jdaso.daso(jdaso.single_exchange(), schedule=schedule))
    >>> params, grads = {"w": jnp.ones(3)}, {"w": jnp.ones(3)}
    >>> state = tx.init(params)
    >>> params, state = jdaso.apply_gradients(tx, grads, state, params, value=0.5)
    """
    schedule = resolve_schedule("daso", period, delay, schedule)
    mean = Merge(
        init=lambda params: (),
        merge=_merge,
        own_weight=lambda arrival: 2.0 * arrival.age / (2.0 * arrival.age + arrival.members),
        leafwise=True,
    )
    found = averaging(
        "daso",
        exchange,
        schedule,
        choose_merge(merge, mean, lambda arrival: mean_weight(arrival.members, arrival.age)),
        wire=resolve_wire("wire", wire, exchange, "float32"),
        blocking_wire=resolve_wire("blocking_wire", blocking_wire, exchange, "bfloat16"),
        nonfinite=nonfinite,
        fragments=fragments,
    )
    weight = 0.0 if merge == "delta" else mean_weight(exchange.num_nodes, delay or 0)
    warn_if_slow("daso", exchange, period, delay, weight)
    return found


def mean_weight(members: Any, age: Any) -> Any:
    """Returns w = P / (2 S + P), the weight of the mean of P members after S steps."""
    return members / (2.0 * age + members)


def _merge(leaves: Leaves, arrival: Arrival, state: PyTree) -> tuple[Leaves, PyTree]:
    own_weight = 2.0 * arrival.age
    divide = division_by(own_weight + arrival.members)
    merged = [
        divide(own_weight.astype(t.dtype) * x + t)
        for x, t in zip(leaves, arrival.total, strict=True)
    ]
    return merged, state
