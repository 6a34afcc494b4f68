"""Copies between a program's arrays and the host memory of an exchange, by host callbacks."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jdaso._base import HEADER_SIZE, Leaves, Number
from jdaso._wire import pack, unpadded
from jdaso.exchange._carrier import Carrier
from jdaso.exchange._staging import Spec


class Callbacks:
    """How a program reaches a carrier, and its memory, without compiled code."""

    def __init__(self, carrier: Carrier):
        self._carrier = carrier

    def post(
        self,
        specs: Sequence[Spec],
        leaves: Leaves,
        ticket: jax.Array,
        number: Number,
        step: Number,
        header: jax.Array,
    ) -> jax.Array:
        """Copies the leaves and lets them fly, zeros if ``header[0]`` is 0; returns the ticket."""

        def call(ticket, number, step, header, *leaves):
            with self._carrier.ending_all_devices():
                # As numbers of NumPy: JAX's operations would wait for the program that waits here.
                header = np.asarray(header)
                nothing = [np.zeros((), leaf.dtype) for leaf in leaves]
                self._carrier.reserved.wait()  # what compiled code has begun is posted first
                staging = self._carrier.reserve(int(number), specs)
                try:
                    staging.put(leaves if header[0] > 0 else nothing)
                except BaseException:
                    self._carrier.reserved.forget(int(number))
                    raise
                self._carrier.post(int(number), int(step), header)
            return ticket

        cast = [pack(x, spec.dtype) for x, spec in zip(leaves, specs, strict=True)]
        return io_callback(call, ticket, ticket, number, step, header, *cast)

    def collect(
        self,
        takers: int,
        shapes: Sequence[jax.ShapeDtypeStruct],
        ticket: jax.Array,
        number: Number,
    ) -> tuple[Leaves, jax.Array, jax.Array]:
        """Waits for an exchange; returns the sums in these shapes, the header, and the ticket."""

        def call(ticket, number):
            with self._carrier.ending_all_devices():
                staging, header = self._carrier.collect(int(number), takers)
            # One device may post the next exchange while another still reads this one.
            sums = staging.get(copy=takers > 1)
            # A float64 leaf that crossed in a narrower wire arrives as float32.
            wide = [
                unpadded(s, x.shape).astype(x.dtype, copy=False)
                for s, x in zip(sums, shapes, strict=True)
            ]
            return wide, header, ticket

        header = jax.ShapeDtypeStruct((HEADER_SIZE,), jnp.float32)
        return io_callback(call, (list(shapes), header, ticket), ticket, number)
