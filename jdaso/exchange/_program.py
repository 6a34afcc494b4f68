"""The part of an exchange over MPI that is inside the program: who posts, and how."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jdaso._base import HEADER_SIZE, Leaves
from jdaso._wire import sum_dtype, wire_dtype, wire_shape
from jdaso.exchange._callback import Callbacks
from jdaso.exchange._carrier import Carrier
from jdaso.exchange._native import Desk
from jdaso.exchange._staging import Spec
from jdaso.local import LOCAL_AXIS


class Program:
    """``start`` and ``finish`` of an exchange whose state is a ticket, one int32.

    Args:
        carrier: takes what is posted.
        native: whether leaves are copied by compiled code.
        devices: of this process.
    """

    def __init__(self, carrier: Carrier, native: bool, devices: Sequence[jax.Device]):
        self._callbacks = Callbacks(carrier)
        self._desk = Desk(carrier, devices[0].platform) if native else None
        self._local_devices = len(devices)

    def start(self, ticket, number, step, leaves: Leaves, header, wire):
        """As in :class:`jdaso.Exchange`."""
        if header.shape != (HEADER_SIZE,):
            raise ValueError(f"header must be float32[{HEADER_SIZE}], got {header.shape}.")
        dtypes = [wire_dtype(x.dtype, wire) for x in leaves]
        specs = [Spec(wire_shape(x.shape, d), d) for x, d in zip(leaves, dtypes, strict=True)]

        def call(ticket):
            return self._way(leaves).post(specs, leaves, ticket, number, step, header)

        def following(ticket):
            # Always so; but now what is posted next is posted after this, on all nodes alike.
            return jnp.where(ticket >= 0, number + 1, number)

        device = _local_device()
        if device is None:
            ticket = call(ticket)
            return ticket, following(ticket)
        if isinstance(number, int):
            raise ValueError(
                "consensus cannot be called inside shard_map over the node's devices; call it "
                "outside, on replicated values."
            )
        turn = jnp.maximum(number, 0) % self._local_devices
        ticket = lax.cond(device == turn, call, lambda ticket: ticket, ticket)
        # The next one may be carried by another device, which has to wait for this.
        ticket = lax.pmax(ticket, LOCAL_AXIS)
        return ticket, following(ticket)

    def finish(self, ticket, number, like: Leaves):
        """As in :class:`jdaso.Exchange`."""
        takers = 1 if _local_device() is None else self._local_devices
        shapes = [jax.ShapeDtypeStruct(x.shape, sum_dtype(x.dtype)) for x in like]
        return self._way(like).collect(takers, shapes, ticket, number)

    def _way(self, leaves: Leaves) -> Desk | Callbacks:
        # Several devices outside shard_map run one program: each would post.
        single = self._local_devices == 1 or _local_device() is not None
        wide = any(x.dtype == jnp.float64 for x in leaves)
        return self._desk if self._desk is not None and single and not wide else self._callbacks


def _local_device() -> jax.Array | None:
    """Index of the local device inside shard_map over them; None outside."""
    try:
        return lax.axis_index(LOCAL_AXIS)
    except NameError:
        return None
