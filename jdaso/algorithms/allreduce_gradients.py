"""Synchronous data parallelism, which averages the gradients at every step."""

from jdaso.algorithms.defaults import averaging_on_one_wire, mixing_merge, resolve_wire
from jdaso.core.exchange import Exchange
from jdaso.core.transformation import GRADIENTS, Averaging
from jdaso.schedules import constant


def allreduce_gradients(
    exchange: Exchange, wire: str | None = None, nonfinite: str = "skip"
) -> Averaging:
    """Averages the gradients over all nodes at every step, and waits for the mean.

    At every step, with P nodes,

        g <- (1/P) sum_i g_i                                           (daso-journal Eq. 1)

    Use it as the baseline for the other algorithms. All leaves travel in one buffer, rounded to 16
    bits, when all gradients have been computed. Horovod, the baseline of daso-journal, computes
    the same mean and was set to 16 bits there as well. But it sends gradients in fused parts as
    soon as they are ready, so it hides a part of the exchange behind the backward pass. So does
    the "classic" baseline of daso-journal, which sends float32 (``wire="float32"``) and leaf by
    leaf. Here the whole exchange is waited for.

    Args:
        exchange: The connection between nodes.
        wire: Dtype on the network, as in :func:`jdaso.daso`. With ``int8`` or ``float4``,
            rounding errors are added to later gradients. None selects the wire of the exchange, or
            bfloat16.
        nonfinite: ``skip`` leaves a node with non-finite gradients out of the mean. The node
            applies the mean of the others. ``raise`` raises an error. With ``off``, gradients are
            read only when they are posted. The mean is the same as with ``skip``.

    Returns:
        An averaging for :func:`jdaso.chain`, which applies it before the optimizer. In an
        ``optax.chain`` it must be the first. Nodes that start from equal parameters stay equal. If
        ``update`` is given ``params``, an MPI exchange raises an error when they differ.

    Raises:
        ValueError: for an unknown wire.

    >>> import jdaso, optax
    >>> averaging = jdaso.allreduce_gradients(jdaso.single_exchange())
    >>> tx = jdaso.chain(optax.sgd(0.1, momentum=0.9), averaging)
    """
    return averaging_on_one_wire(
        "allreduce_gradients",
        exchange,
        constant(period=1, delay=0),
        mixing_merge(0.0)._replace(own_weight=None),
        resolve_wire("wire", wire, exchange, "bfloat16"),
        nonfinite=nonfinite,
        sync_target=GRADIENTS,
    )
