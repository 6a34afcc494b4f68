"""The XLA custom calls of a program; see ffi_queue.h."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdaso.core.block_format import FORMATS, format_of
from jdaso.core.exchange import HEADER_SIZE
from jdaso.core.types import Leaves
from jdaso.core.wire import pack
from jdaso.exchange.host import compiled

#: The dtypes on the wire for which the copies compute error feedback.
FEEDBACK_DTYPES = {
    *(rows.dtype for rows in FORMATS.values()),
    np.dtype("float32"),
    np.dtype(jnp.bfloat16),
}
# How a leaf is sent: 0 as it is, otherwise the bits of a number.
_BFLOAT16 = 16


def post(
    inputs: Sequence[jax.Array],
    dtypes: Sequence[Sequence[np.dtype]],
    leaves: Leaves,
    feedback: tuple[Leaves, Leaves],
    on_cpu: bool,
    **attributes: Any,
) -> tuple[jax.Array, Leaves]:
    """Copies leaves to the host. Returns the token and the new residuals.

    Args:
        inputs: token, device, number, step, index of the wire, whether to send, header.
        dtypes: of the leaves, on each wire that may be used.
        feedback: residuals and anchors of the first leaves, the others have one dtype.
        on_cpu: whether the copies convert the leaves. XLA does all other casts.
    """
    residual, anchor = feedback

    def rounds(x, dtype):
        return on_cpu and x.dtype == jnp.float32 and dtype == jnp.bfloat16

    count = len(residual)
    pairs = zip(leaves[count:], dtypes[0][count:], strict=True)
    leaves = [
        *(x.astype(jnp.float32) for x in leaves[:count]),
        # A leaf that stays in its dtype is copied as it lies in memory.
        *(x if rounds(x, dtype) or x.dtype == dtype else pack(x, dtype) for x, dtype in pairs),
    ]
    wires = [
        rows.bits if i < count and (rows := format_of(dtype)) else _BFLOAT16 * rounds(x, dtype)
        for each in dtypes
        for i, (x, dtype) in enumerate(zip(leaves, each, strict=True))
    ]
    shapes = [jax.ShapeDtypeStruct((), jnp.int32), *map(_like, residual)]
    first = len(inputs) + len(leaves)
    aliases = {first + i: 1 + i for i in range(len(residual))}
    # XLA is told of no side effects. The token orders the calls.
    call = jax.ffi.ffi_call(compiled.POST, shapes, input_output_aliases=aliases)
    arguments = *inputs, *leaves, *residual, *anchor
    attributes["queue"] = np.int32(attributes["queue"])
    token, *residual = call(*arguments, wires=np.array(wires, np.int32), **attributes)
    return token, residual


def collect(
    inputs: Sequence[jax.Array],
    shapes: Sequence[jax.ShapeDtypeStruct],
    feedback: tuple[jax.Array, Leaves, Leaves] | None,
    keep: bool,
    attributes: Mapping[str, int],
) -> tuple[Leaves, jax.Array, jax.Array]:
    """Waits for an exchange. Returns a part of the sums, the header and the token.

    Args:
        inputs: token, device, number.
        feedback: ``block_bits`` of the exchange, residuals and anchors of the first leaves. Their
            means are then returned in place of the sums, and the new residuals after all leaves.
        keep: whether the means are not written to the places of the anchors.
    """
    of_token = jax.ShapeDtypeStruct((), jnp.int32)
    of_header = jax.ShapeDtypeStruct((HEADER_SIZE,), jnp.float32)
    results, arguments, aliases = [of_token, of_header, *shapes], list(inputs), {}
    residual: Leaves = []
    if feedback is not None:
        bits, residual, anchor = feedback
        first = len(inputs) + 1
        arguments += [bits, *residual, *anchor]
        for i in range(len(residual)):
            aliases[first + i] = len(results) + i
        for i in range(0 if keep else len(anchor)):
            aliases[first + len(residual) + i] = 2 + i
        results += map(_like, residual)
    call = jax.ffi.ffi_call(compiled.COLLECT, results, input_output_aliases=aliases)
    attributes = {**attributes, "residuals": len(residual)}
    integers = {name: np.int32(value) for name, value in attributes.items()}
    token, header, *sums = call(*arguments, **integers)
    return sums, header, token


def order(
    token: jax.Array, lists: list[Leaves], into: list[Leaves] | None = None
) -> tuple[jax.Array, list[Leaves]]:
    """As ``after`` of :class:`jdaso.core.exchange.PartOperations`."""
    places, treedef = jax.tree.flatten((token, lists if into is None else into))
    copied = [] if into is None else jax.tree.leaves(lists)
    aliases = {i: i for i in range(len(places))}
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in places]
    call = jax.ffi.ffi_call(compiled.ORDER, shapes, input_output_aliases=aliases)
    return jax.tree.unflatten(treedef, call(*places, *copied))


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
