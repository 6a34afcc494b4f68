"""The part of an exchange that runs inside a compiled program. It decides which device posts what.

Each device of the node copies its own shards to the host. It does so inside ``shard_map`` over the
mesh of the node, which the functions of this file add where the program is not in one already.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdaso.cluster.ending import at_exit
from jdaso.cluster.local_devices import await_programs
from jdaso.core.exchange import AGREEMENT_NAMES, HEADER_SIZE, UNCOUNTED, PostedExchange, SentLeaf
from jdaso.core.types import Leaves, Number
from jdaso.core.wire import WIRE_OF_BITS, Wire, sum_dtype, wire_dtypes
from jdaso.exchange.host.callbacks import Callbacks
from jdaso.exchange.host.ffi_bridge import FfiBridge
from jdaso.exchange.host.layout import Layout, make_layout
from jdaso.exchange.host.node_mesh import REPLICATED, NodeMesh, Specs
from jdaso.exchange.host.shardings import Shardings
from jdaso.exchange.host.transport_protocol import HostCalls, Message, Transport


class Bound(NamedTuple):
    """The leaves of an exchange, with their shapes and dtypes in the program."""

    specs: Specs
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    names: tuple[str, ...]

    @property
    def whole(self) -> slice:
        """The part that has all leaves."""
        return slice(0, len(self.specs))


class JitInterface:
    """``start`` and ``finish`` of an exchange whose state is a token, an int32 scalar.

    The token orders the calls of a program. If ``native``, compiled code copies the leaves.
    """

    def __init__(self, transport: Transport, native: bool, shardings: Shardings):
        self._callbacks = Callbacks(transport)
        self._shardings = shardings
        self._mesh = NodeMesh(shardings)
        platform = shardings.mesh.devices.flat[0].platform
        devices = len(shardings.mesh.local_devices)
        self._bridge = FfiBridge(transport, platform, devices) if native else None
        self.inside, self.all_devices = self._mesh.inside, self._mesh.all_devices
        self.per_shard = self._mesh.per_shard
        self.call_host = self._mesh.call_host
        # Registered after the objects that programs call, so it runs before their exit functions.
        self._complete = functools.partial(await_programs, shardings.mesh.local_devices)
        self._forget = at_exit(self._complete)

    def close(self) -> None:
        """Waits for all programs that were dispatched; calls of compiled code fail from then on."""
        self._forget()
        self._complete()
        if self._bridge is not None:
            self._bridge.close()

    def bind(self, names: Sequence[str], leaves: Leaves) -> Bound:
        """Finds the shardings of leaves by their names. Without names they are replicated."""
        inside = self.inside()
        specs = (REPLICATED,) * len(leaves)
        if names:
            specs = tuple(self._shardings.specs(names, leaves, inside))
        shapes = tuple(x.shape for x in leaves)
        if inside:
            whole = self._mesh.whole_shape
            shapes = tuple(whole(*each) for each in zip(shapes, specs, strict=True))
        return Bound(specs, shapes, tuple(x.dtype for x in leaves), tuple(names))

    def copies_parts(self, bound: Bound) -> bool:
        """Whether compiled code copies the leaves. It can do so in parts."""
        return self._bridge is not None and jnp.float64 not in bound.dtypes

    def computes_feedback(self, bound: Bound, wire: Wire) -> bool:
        """Whether the copies compute the error feedback of a wire."""
        dtypes = wire_dtypes(bound.dtypes, wire)
        return self._bridge is not None and self._bridge.computes_feedback(dtypes)

    def posted_layout(self, sent: Sequence[SentLeaf], posted: PostedExchange) -> Layout:
        """The layout of leaves that a checkpoint has saved."""
        whole = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in sent]
        names, shapes, _ = zip(*sent, strict=True)
        wires = tuple(WIRE_OF_BITS[bits] for bits in posted.block_bits)
        dtypes = wire_dtypes([leaf.dtype for leaf in posted.leaves], wires)
        specs = tuple(self._shardings.specs(names, whole))
        return make_layout(shapes, dtypes, specs, self._shardings.mesh, posted.relative, names)

    def start(
        self, token, number, step, leaves, header, wire, bound: Bound | None = None, relative=False
    ):
        """As in :class:`jdaso.Exchange`."""
        sent = token, number, step, leaves, header, [wire]
        return self.start_with_feedback(*sent, bound=bound, relative=relative)[:2]

    def start_with_feedback(
        self,
        token,
        number,
        step,
        leaves: Leaves,
        header,
        wires: Sequence[Wire],
        choice: Number = 0,
        feedback: tuple[Leaves, Leaves] = ([], []),
        bound: Bound | None = None,
        relative: bool = False,
    ):
        """As in :class:`jdaso.core.exchange.FeedbackOperations`."""
        bound = bound or self.bind((), leaves)
        if header.shape != (HEADER_SIZE,):
            raise ValueError(f"header must be float32[{HEADER_SIZE}], got {header.shape}.")
        dtypes = [wire_dtypes(bound.dtypes, wire) for wire in wires]
        specs, options = bound.specs, (self._shardings.mesh, relative, bound.names)
        layouts = tuple(make_layout(bound.shapes, each, specs, *options) for each in dtypes)
        calls = self._host_calls(bound)
        of_leaves, *of_feedback = ([*specs[: len(arrays)]] for arrays in (leaves, *feedback))
        scalars = (jnp.asarray(x, jnp.int32) for x in (number, step, choice))
        token, residual = self._mesh.run(
            ("post", layouts, specs, len(feedback[0]), len(feedback[1]), calls),
            functools.partial(_post, self._mesh, calls, layouts),
            (REPLICATED, Message._make([*[REPLICATED] * 4, of_leaves, tuple(of_feedback)])),
            (REPLICATED, of_feedback[0]),
            *(token, Message._make([*scalars, header, leaves, tuple(feedback)])),
        )
        # The condition always holds. It makes the next exchange depend on this one, so that all
        # nodes post in the same order.
        return token, jnp.where(token >= 0, number + 1, number), residual

    def finish(
        self,
        token,
        number,
        like: Leaves,
        part: slice | None = None,
        feedback: tuple[jax.Array, Leaves, Leaves] | None = None,
        bound: Bound | None = None,
        keep: bool = False,
    ):
        """As in :class:`jdaso.Exchange`, or for a part of the leaves that are bound.

        With error feedback, returns means and new residuals in place of the sums.
        ``keep`` is that of :class:`jdaso.core.exchange.FeedbackOperations`.
        """
        bound = bound or self.bind((), like)
        part = part or bound.whole
        specs, shapes = bound.specs[part], [x.shape for x in like]
        if self._mesh.device_index() is None:
            shapes = [self._mesh.shard_shape(*each) for each in zip(shapes, specs, strict=True)]
        sums = tuple(
            jax.ShapeDtypeStruct(shape, sum_dtype(x.dtype))
            for shape, x in zip(shapes, like, strict=True)
        )
        uncounted = isinstance(number, int) and number == UNCOUNTED
        last = part.stop == bound.whole.stop
        calls = self._host_calls(bound)
        of_feedback, results = None, list(specs)
        if feedback is not None:
            of_feedback = REPLICATED, *(list(specs[: len(each)]) for each in feedback[1:])
            results += specs[: len(feedback[1])]
        return self._mesh.run(
            ("collect", sums, repr(of_feedback), specs, part.start, last, uncounted, keep, calls),
            functools.partial(_collect, self._mesh, calls, sums, part, last, uncounted, keep),
            (REPLICATED, REPLICATED, of_feedback),
            (results, REPLICATED, REPLICATED),
            *(token, jnp.asarray(number, jnp.int32), feedback),
        )

    def after(self, token, part: slice, lists: list[Leaves], into, bound: Bound):
        """As in :class:`jdaso.core.exchange.PartOperations`."""
        assert self._bridge is not None
        specs = [list(bound.specs[part][: len(arrays)]) for arrays in lists]
        of_into = None if into is None else specs
        return self._mesh.run(
            ("order", tuple(map(tuple, specs)), into is None),
            self._bridge.order,
            (REPLICATED, specs, of_into),
            (REPLICATED, specs),
            *(token, lists, into),
        )

    def _host_calls(self, bound: Bound) -> HostCalls:
        if self._bridge is None or not self.copies_parts(bound):
            return self._callbacks
        return self._bridge


def _post(
    mesh: NodeMesh, calls: HostCalls, layouts: Sequence[Layout], token: jax.Array, message: Message
) -> tuple[jax.Array, Leaves]:
    """Posts the leaves of one device. Returns the token and the residuals."""
    device, layout = mesh.device_index(), layouts[0]
    assert device is not None

    post = functools.partial(calls.post, layouts, device)
    if mesh.size == 1:
        return post(token, message)
    residual: Leaves = []
    if layout.replicated and not layout.joined:
        turn = jnp.maximum(message.number, 0) % mesh.size
        if message.feedback[0]:  # all devices compute it
            token, residual = post(token, message, device == turn)
        else:
            token = lax.cond(device == turn, lambda t: post(t, message)[0], lambda t: t, token)
    else:
        # All processes post, also those that send nothing: they receive the sums.
        header = _same_header(message.header, device, mesh.axes)
        token, residual = post(token, message._replace(header=header))
    # Another device may be the first to post the next exchange. It has to wait for this one.
    return mesh.last(token), residual


def _collect(
    mesh: NodeMesh,
    calls: HostCalls,
    sums: Sequence,
    part: slice,
    last: bool,
    uncounted: bool,
    keep: bool,
    token,
    number,
    feedback,
) -> tuple[Leaves, jax.Array, jax.Array]:
    """Collects a part of the sums on one device."""
    device = mesh.device_index()
    assert device is not None
    total, header, token = calls.collect(
        mesh.local_size, device, sums, token, number, part, last, feedback, keep
    )
    # The next consensus has the same number.
    return list(total), header, mesh.last(token) if uncounted else token


def _same_header(header: jax.Array, device: Number, axes: Sequence[str]) -> jax.Array:
    """One header for all devices, whose last number depends on the shared state of all of them.

    Inside the user's own ``shard_map``, each device has computed it from its own shards.
    """
    assert AGREEMENT_NAMES[-1] == "the shared state"
    shared = lax.psum(header[-1].astype(jnp.int32), axes) & 0xFFFFFF
    first = lax.psum(jnp.where(device == 0, header, jnp.zeros_like(header)), axes)
    return first.at[-1].set(shared.astype(jnp.float32))
