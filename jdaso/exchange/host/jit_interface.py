"""The part of an exchange that runs inside a compiled program. It decides which device posts what.

Each device of the node copies its own shards to the host. It does so inside ``shard_map`` over the
mesh of the node, which the functions of this file add where the program is not in one already.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from jdaso.core.types import (
    AGREEMENT_NAMES,
    HEADER_SIZE,
    UNCOUNTED,
    Leaves,
    Number,
    PostedExchange,
    SentLeaf,
)
from jdaso.core.wire import BLOCK_DTYPE, pack, sum_dtype, unpadded, wire_dtype
from jdaso.exchange.host.ffi_bridge import FfiBridge
from jdaso.exchange.host.layout import Layout, make_layout
from jdaso.exchange.host.node_mesh import REPLICATED, NodeMesh, Specs
from jdaso.exchange.host.shardings import Shardings
from jdaso.exchange.host.transport_protocol import Transport


class JitInterface:
    """``start`` and ``finish`` of an exchange whose state is a token, an int32 scalar.

    The token orders the calls of a program. If ``native``, compiled code copies the leaves.
    """

    def __init__(self, transport: Transport, native: bool, shardings: Shardings):
        self._callbacks = Callbacks(transport)
        self._shardings = shardings
        self._mesh = NodeMesh(shardings)
        platform = shardings.mesh.devices.flat[0].platform
        self._bridge = FfiBridge(transport, platform, self._mesh.size) if native else None
        self.all_devices = self._mesh.all_devices
        self.per_shard = self._mesh.per_shard

    def close(self) -> None:
        """Fails all calls of compiled code from now on."""
        if self._bridge is not None:
            self._bridge.close()

    def specs(self, names: Sequence[str], leaves: Leaves) -> Specs:
        """The specs of leaves, given by their names."""
        inside = self._mesh.size > 1 and self._mesh.device_index() is not None
        return tuple(self._shardings.specs(names, leaves, inside))

    def posted_layout(self, sent: Sequence[SentLeaf], posted: PostedExchange) -> Layout:
        """The layout of leaves that a checkpoint has saved."""
        whole = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in sent]
        specs = self._shardings.specs([leaf.name for leaf in sent], whole)
        dtypes = tuple(BLOCK_DTYPE if posted.int8 else leaf.dtype for leaf in posted.leaves)
        shapes = tuple(leaf.shape for leaf in sent)
        return make_layout(shapes, dtypes, tuple(specs), self._shardings.mesh)

    def start(self, token, number, step, leaves: Leaves, header, wire, specs: Specs | None = None):
        """As in :class:`jdaso.Exchange`. ``specs`` are those of the leaves, None if replicated."""
        if header.shape != (HEADER_SIZE,):
            raise ValueError(f"header must be float32[{HEADER_SIZE}], got {header.shape}.")
        specs = specs or (REPLICATED,) * len(leaves)
        shapes = [x.shape for x in leaves]
        if self._mesh.device_index() is not None:
            shapes = [self._mesh.whole_shape(*each) for each in zip(shapes, specs, strict=True)]
        dtypes = tuple(wire_dtype(x.dtype, wire) for x in leaves)
        layout = make_layout(tuple(shapes), dtypes, specs, self._shardings.mesh)
        calls = self._host_calls(leaves)
        token = self._mesh.run(
            ("post", layout, specs, calls),
            functools.partial(self._post, calls, layout),
            (*[REPLICATED] * 4, list(specs)),
            REPLICATED,
            *(token, jnp.asarray(number, jnp.int32), jnp.asarray(step, jnp.int32), header),
            leaves,
        )
        # The condition always holds. It makes the next exchange depend on this one, so that all
        # nodes post in the same order.
        return token, jnp.where(token >= 0, number + 1, number)

    def finish(self, token, number, like: Leaves, specs: Specs | None = None):
        """As in :class:`jdaso.Exchange`."""
        specs = specs or (REPLICATED,) * len(like)
        shapes = [x.shape for x in like]
        if self._mesh.device_index() is None:
            shapes = [self._mesh.shard_shape(*each) for each in zip(shapes, specs, strict=True)]
        sums = tuple(
            jax.ShapeDtypeStruct(shape, sum_dtype(x.dtype))
            for shape, x in zip(shapes, like, strict=True)
        )
        uncounted = isinstance(number, int) and number == UNCOUNTED
        calls = self._host_calls(like)
        return self._mesh.run(
            ("collect", sums, specs, uncounted, calls),
            functools.partial(self._collect, calls, sums, uncounted),
            (REPLICATED, REPLICATED),
            (list(specs), REPLICATED, REPLICATED),
            *(token, jnp.asarray(number, jnp.int32)),
        )

    def _post(self, calls, layout: Layout, token, number, step, header, leaves: Leaves):
        """Posts the leaves of one device."""
        device = self._mesh.device_index()

        def post(token):
            return calls.post(layout, device, leaves, token, number, step, header)

        if self._mesh.size == 1:
            return post(token)
        if layout.replicated:
            turn = jnp.maximum(number, 0) % self._mesh.size
            token = lax.cond(device == turn, post, lambda token: token, token)
        else:
            header = _same_header(header, device, self._mesh.axes)
            token = post(token)
        # Another device may be the first to post the next exchange. It has to wait for this one.
        return self._mesh.last(token)

    def _collect(self, calls, sums, uncounted: bool, token, number):
        """Collects an exchange on one device."""
        device = self._mesh.device_index()
        total, header, token = calls.collect(self._mesh.size, device, sums, token, number)
        # The next consensus has the same number.
        return list(total), header, self._mesh.last(token) if uncounted else token

    def _host_calls(self, leaves: Leaves) -> FfiBridge | Callbacks:
        wide = any(x.dtype == jnp.float64 for x in leaves)
        return self._bridge if self._bridge is not None and not wide else self._callbacks


def _same_header(header: jax.Array, device: Number | None, axes: Sequence[str]) -> jax.Array:
    """One header for all devices, whose last number depends on the shared state of all of them.

    Inside the user's own ``shard_map``, each device has computed it from its own shards.
    """
    assert AGREEMENT_NAMES[-1] == "the shared state"
    shared = lax.psum(header[-1].astype(jnp.int32), axes) & 0xFFFFFF
    first = lax.psum(jnp.where(device == 0, header, jnp.zeros_like(header)), axes)
    return first.at[-1].set(shared.astype(jnp.float32))


class Callbacks:
    """Calls the transport of this process by host callbacks."""

    def __init__(self, transport: Transport):
        self._transport = transport

    def post(
        self,
        layout: Layout,
        device: Number,
        leaves: Leaves,
        token: jax.Array,
        number: Number,
        step: Number,
        header: jax.Array,
    ) -> jax.Array:
        """Posts a device's leaves, or zeros if ``header[0]`` is 0. Returns the token."""

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

        cast = [pack(x, dtype) for x, dtype in zip(leaves, layout.dtypes, strict=True)]
        return io_callback(call, token, token, device, number, step, header, *cast)

    def collect(
        self,
        readers: int,
        device: Number,
        shapes: Sequence[jax.ShapeDtypeStruct],
        token: jax.Array,
        number: Number,
    ) -> tuple[Leaves, jax.Array, jax.Array]:
        """Waits for an exchange. Returns the sums for a device, the header and the token."""

        def call(token, device, number):
            with self._transport.abort_on_error():
                staging, header = self._transport.collect(int(number), readers)
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
