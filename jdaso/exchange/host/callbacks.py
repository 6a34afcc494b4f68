"""Host callbacks, which copy leaves and sums where there is no compiled code for it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jdaso.core.exchange import HEADER_SIZE
from jdaso.core.types import JdasoError, Leaves, Number
from jdaso.core.wire import pack, unpadded
from jdaso.exchange.host.buffers import StagingBuffers
from jdaso.exchange.host.layout import Layout
from jdaso.exchange.host.transport_protocol import Message, Transport


def _check_sizes(number: int, staging: StagingBuffers, device: int, shapes: Sequence) -> None:
    """Raises JdasoError unless the sums fit these shapes. Compiled code checks the same."""
    sums, places = staging.sums_of(device), staging.places_to_read(device)[:-1]
    if len(sums) != len(shapes):
        raise JdasoError(
            f"exchange {number} has {len(sums)} leaves, the program copies {len(shapes)}"
        )
    for i, (place, total, x) in enumerate(zip(places, sums, shapes, strict=True)):
        size = math.prod(x.shape) * total.itemsize
        if not place["least_bytes"] <= size <= place["most_bytes"]:
            raise JdasoError(
                f"leaf {i} of exchange {number} has {place['most_bytes']} bytes, the program "
                f"copies {size}"
            )


class Callbacks:
    """Calls the transport of this process by host callbacks."""

    def __init__(self, transport: Transport):
        self._transport = transport

    def post(
        self, layouts: Sequence[Layout], device: Number, token, message: Message, sends=True
    ) -> tuple[jax.Array, Leaves]:
        """As in :class:`HostCalls`. XLA computes the error feedback of callbacks."""
        del sends
        [layout] = layouts

        def call(token, device, number, step, header, *leaves):
            number = int(number)
            with self._transport.abort_on_error():
                # NumPy, because JAX's operations would wait for the program that waits here.
                header = np.asarray(header)
                zeros = [np.zeros((), leaf.dtype) for leaf in leaves]
                # Exchanges that compiled code has reserved are posted first.
                self._transport.pending.wait_until_posted(but=number)
                staging = self._transport.reserve(number, layout)
                try:
                    staging.fill_from(int(device), number, leaves if header[0] > 0 else zeros)
                except BaseException:
                    self._transport.pending.discard(number)
                    raise
                self._transport.post(number, int(step), header)
            return token

        cast = [pack(x, dtype) for x, dtype in zip(message.leaves, layout.dtypes, strict=True)]
        sent = message.number, message.step, message.header, *cast
        return io_callback(call, token, token, device, *sent), []

    def collect(
        self, readers: int, device: Number, shapes: Sequence, token, number, *of_copies
    ) -> tuple[Leaves, jax.Array, jax.Array]:
        """As in :class:`HostCalls`, for all leaves."""
        del of_copies

        def call(token, device, number):
            with self._transport.abort_on_error():
                staging, header = self._transport.collect(int(number), readers)
                _check_sizes(int(number), staging, int(device), shapes)
                # One device may post the next exchange while another still reads this one.
                sums = staging.read(int(device), copy=readers > 1)
            # A float64 leaf on a narrower wire arrives as float32.
            wide = [
                unpadded(s, x.shape).astype(x.dtype, copy=False)
                for s, x in zip(sums, shapes, strict=True)
            ]
            return wide, header, token

        header = jax.ShapeDtypeStruct((HEADER_SIZE,), jnp.float32)
        return io_callback(call, (list(shapes), header, token), token, device, number)
