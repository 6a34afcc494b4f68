"""Copies between a program's arrays and the host memory of an exchange, compiled.

``copies.cc`` holds two functions that XLA calls as part of the program: each leaf is copied once,
and cast on the way, without the interpreter. An exchange works without them, by host callbacks,
which copy more often.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jdaso._base import HEADER_SIZE, Leaves, Number
from jdaso.exchange._courier import Courier
from jdaso.exchange._staging import Spec

_LIBRARY = "jdaso.exchange._copies"
_FILL, _TAKE = "jdaso_fill", "jdaso_take"
# What both return, beside what they copy: 0, so that what depends on it comes later.
_DONE = jax.ShapeDtypeStruct((), jnp.int32)


@functools.cache
def why_not() -> str | None:
    """Why the compiled copies cannot be used in this process; None if they can."""
    found = importlib.util.find_spec(_LIBRARY)
    if found is None or found.origin is None:
        return "they were not built, which needs a C++17 compiler when jdaso is installed"
    try:
        library = ctypes.CDLL(found.origin)
        for name in (_FILL, _TAKE):
            jax.ffi.register_ffi_target(
                name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu"
            )
    except Exception as error:  # built for another system, or another interface of XLA
        return f"{found.origin} does not fit this jaxlib: {error}; install jdaso again"
    return None


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"parameters are copied by host callbacks instead of compiled code: {reason}. Training is "
        "the same, exchanges cost more time.",
        stacklevel=4,
    )


def chosen(native: bool | None, platform: str) -> bool:
    """Whether exchanges use the compiled copies.

    Raises:
        ValueError: if they were asked for and cannot be used.
    """
    if native is False or (native is None and platform != "cpu"):
        return False
    reason = why_not() if platform == "cpu" else f"they serve CPU devices, not {platform}"
    if reason is not None and native:
        raise ValueError(f"native=True: the compiled copies cannot be used: {reason}.")
    if reason is not None:
        _warn_once(reason)
    return reason is None


def post(
    courier: Courier,
    specs: Sequence[Spec],
    leaves: Leaves,
    ticket: jax.Array,
    number: Number,
    step: Number,
    header: jax.Array,
) -> jax.Array:
    """Copies the leaves and lets them fly, zeros if ``header[0]`` is 0; returns the ticket."""

    def reserve(ticket, number):
        with courier.ending_all_devices():
            return courier.reserve(int(number), specs).addresses.of_leaves

    def fly(ticket, number, step, header):
        with courier.ending_all_devices():
            courier.post(int(number), int(step), np.asarray(header))
        return ticket

    # It rounds float32 to bfloat16 while it copies; other casts are left to XLA.
    narrow = [
        x.dtype == jnp.float32 and spec.dtype == jnp.bfloat16
        for x, spec in zip(leaves, specs, strict=True)
    ]
    cast = [
        x if halve else x.astype(spec.dtype)
        for x, halve, spec in zip(leaves, narrow, specs, strict=True)
    ]
    addresses = io_callback(reserve, _rows(len(leaves)), ticket, number)
    filled = jax.ffi.ffi_call(_FILL, _DONE, has_side_effect=True)(
        addresses, header, *cast, narrow=np.array(narrow, np.int32)
    )
    return io_callback(fly, ticket, ticket + filled, number, step, header)


def collect(
    courier: Courier,
    takers: int,
    shapes: Sequence[jax.ShapeDtypeStruct],
    ticket: jax.Array,
    number: Number,
) -> tuple[Leaves, jax.Array, jax.Array]:
    """Waits for an exchange; returns the sums in these shapes, the header, and the ticket."""

    def wait(ticket, number):
        with courier.ending_all_devices():
            staging, header = courier.collect(int(number), takers)
        return staging.addresses.of_sums, header

    header = jax.ShapeDtypeStruct((HEADER_SIZE,), jnp.float32)
    addresses, header = io_callback(wait, (_rows(len(shapes)), header), ticket, number)
    taken, *sums = jax.ffi.ffi_call(_TAKE, [_DONE, *shapes], has_side_effect=True)(addresses)
    # What is posted next comes after this, and finds the memory free.
    return sums, header, ticket + taken


def _rows(leaves: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((leaves + 1, 2), jnp.uint32)
