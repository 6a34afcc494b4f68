"""Synchronous data parallelism: the mean of gradients at every step."""

from __future__ import annotations

from jdaso._base import Exchange
from jdaso._engine import Averaging, averaging
from jdaso._subject import GRADIENTS
from jdaso.algorithms._arguments import chosen_wire
from jdaso.algorithms._dasgd import mixing
from jdaso.schedules import constant


def allreduce_gradients(
    exchange: Exchange, wire: str | None = None, nonfinite: str = "skip"
) -> Averaging:
    """The blocking mean of gradients over all nodes, the baseline of everything else.

    At every step, of P nodes,

        g <- (1/P) sum_i g_i                                           (daso-journal Eq. 1)

    All leaves travel in one buffer, rounded to 16 bits as by Horovod or, with
    ``wire="float32"``, as they are: the "classic" baseline of daso-journal.

    Args:
        exchange: how nodes reach each other.
        wire: dtype that crosses the network, never one wider than a leaf itself, or ``int8``,
            where what rounding takes away is added to later gradients. None: that of the
            exchange, or bfloat16.
        nonfinite: ``skip`` leaves a node whose gradients are not finite out of the mean, and
            lets it take the others'; ``raise`` stops.

    Returns:
        An optax transformation of gradients, to be the first of a chain. Nodes stay equal if
        they start from the same parameters; where ``update`` is given them, it is an error over
        MPI if they differ.

    Raises:
        ValueError: for an unknown wire.

    >>> import jdaso, optax
    >>> tx = optax.chain(jdaso.allreduce_gradients(jdaso.single_exchange()), optax.sgd(0.1, 0.9))
    """
    wire = chosen_wire("wire", wire, exchange, "bfloat16")
    return averaging(
        "allreduce_gradients",
        exchange,
        constant(period=1, delay=0),
        mixing(0.0)._replace(own_weight=None),
        wire=wire,
        blocking_wire=wire,
        nonfinite=nonfinite,
        subject=GRADIENTS,
    )
