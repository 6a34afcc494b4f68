"""The part of an exchange that runs inside a compiled program: which device posts, and how."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from jdaso.cluster.local_devices import LOCAL_AXIS
from jdaso.core.types import HEADER_SIZE, Leaves, Number
from jdaso.core.wire import pack, sum_dtype, unpadded, wire_dtype, wire_shape
from jdaso.exchange.host.buffers import LeafSpec
from jdaso.exchange.host.ffi_bridge import FfiBridge
from jdaso.exchange.host.transport_protocol import Transport


class JitInterface:
    """``start`` and ``finish`` of an exchange whose state is a token, an int32 scalar.

    The token orders the calls of a program. If ``native``, compiled code copies the leaves.
    """

    def __init__(self, transport: Transport, native: bool, devices: Sequence[jax.Device]):
        self._callbacks = Callbacks(transport)
        self._bridge = FfiBridge(transport, devices[0].platform, len(devices)) if native else None
        self._local_devices = len(devices)

    def close(self) -> None:
        """Fails all calls of compiled code from now on."""
        if self._bridge is not None:
            self._bridge.close()

    def start(self, token, number, step, leaves: Leaves, header, wire):
        """As in :class:`jdaso.Exchange`."""
        if header.shape != (HEADER_SIZE,):
            raise ValueError(f"header must be float32[{HEADER_SIZE}], got {header.shape}.")
        dtypes = [wire_dtype(x.dtype, wire) for x in leaves]
        specs = [LeafSpec(wire_shape(x.shape, d), d) for x, d in zip(leaves, dtypes, strict=True)]
        calls = self._host_calls(leaves)

        def post(token):
            return calls.post(specs, leaves, token, number, step, header)

        def next_number(token):
            # The condition always holds. It makes the next exchange depend on this one, so that all
            # nodes post in the same order.
            return jnp.where(token >= 0, number + 1, number)

        device = _local_device()
        if device is None:
            token = post(token)
            return token, next_number(token)
        if isinstance(number, int):
            raise ValueError(
                "consensus cannot be called inside shard_map over the node's devices; call it "
                "outside, on replicated values."
            )
        turn = jnp.maximum(number, 0) % self._local_devices
        token = lax.cond(device == turn, post, lambda token: token, token)
        # Another device may post the next exchange. It has to wait for this one.
        token = lax.pmax(token, LOCAL_AXIS)
        return token, next_number(token)

    def finish(self, token, number, like: Leaves):
        """As in :class:`jdaso.Exchange`."""
        readers = 1 if _local_device() is None else self._local_devices
        shapes = [jax.ShapeDtypeStruct(x.shape, sum_dtype(x.dtype)) for x in like]
        return self._host_calls(like).collect(readers, shapes, token, number)

    def _host_calls(self, leaves: Leaves) -> FfiBridge | Callbacks:
        # Outside shard_map, a program for several devices would call compiled code on each of them.
        single = self._local_devices == 1 or _local_device() is not None
        wide = any(x.dtype == jnp.float64 for x in leaves)
        return self._bridge if self._bridge is not None and single and not wide else self._callbacks


def _local_device() -> jax.Array | None:
    """Index of the local device inside shard_map over the local devices; None outside."""
    try:
        return lax.axis_index(LOCAL_AXIS)
    except NameError:
        return None


class Callbacks:
    """Calls the transport of this process by host callbacks."""

    def __init__(self, transport: Transport):
        self._transport = transport

    def post(
        self,
        specs: Sequence[LeafSpec],
        leaves: Leaves,
        token: jax.Array,
        number: Number,
        step: Number,
        header: jax.Array,
    ) -> jax.Array:
        """Posts the leaves, or zeros if ``header[0]`` is 0. Returns the token."""

        def call(token, number, step, header, *leaves):
            with self._transport.abort_on_error():
                # NumPy, because JAX's operations would wait for the program that waits here.
                header = np.asarray(header)
                zeros = [np.zeros((), leaf.dtype) for leaf in leaves]
                # Exchanges that compiled code has reserved are posted first.
                self._transport.pending.wait_until_posted()
                staging = self._transport.reserve(int(number), specs)
                try:
                    staging.fill(leaves if header[0] > 0 else zeros)
                except BaseException:
                    self._transport.pending.discard(int(number))
                    raise
                self._transport.post(int(number), int(step), header)
            return token

        cast = [pack(x, spec.dtype) for x, spec in zip(leaves, specs, strict=True)]
        return io_callback(call, token, token, number, step, header, *cast)

    def collect(
        self, readers: int, shapes: Sequence[jax.ShapeDtypeStruct], token: jax.Array, number: Number
    ) -> tuple[Leaves, jax.Array, jax.Array]:
        """Waits for an exchange. Returns the sums, the header and the token."""

        def call(token, number):
            with self._transport.abort_on_error():
                staging, header = self._transport.collect(int(number), readers)
            # One device may post the next exchange while another still reads this one.
            sums = staging.read(copy=readers > 1)
            # A float64 leaf on a narrower wire arrives as float32.
            wide = [
                unpadded(s, x.shape).astype(x.dtype, copy=False)
                for s, x in zip(sums, shapes, strict=True)
            ]
            return wide, header, token

        header = jax.ShapeDtypeStruct((HEADER_SIZE,), jnp.float32)
        return io_callback(call, (list(shapes), header, token), token, number)
