"""Copies between a program's arrays and the host memory of an exchange, by compiled code.

``copies.cc`` holds two functions that XLA calls as part of the program. They copy each leaf once,
and cast it on the way; what is to be done in Python, they ask for at a desk, where a thread
answers. So a training step calls no Python, and JAX dispatches it as fast as one without
exchanges. An exchange works without them, by host callbacks, and costs more.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import pathlib
import threading
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jdaso._at_exit import at_exit
from jdaso._base import HEADER_SIZE, Leaves, Number
from jdaso._wire import pack
from jdaso.exchange._carrier import Carrier
from jdaso.exchange._staging import Spec

_LIBRARY = "jdaso.exchange._copies"
_POST, _COLLECT = "jdaso_post", "jdaso_collect"
_RESERVES, _POSTS, _COLLECTS = range(3)


class _Call(ctypes.Structure):
    """The part of a call that Python reads; ``about`` is the number of the specs, or of takers."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("number", ctypes.c_int32),
        ("step", ctypes.c_int32),
        ("about", ctypes.c_int32),
        ("header", ctypes.c_float * HEADER_SIZE),
    )


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, its functions known to XLA; or why it cannot be used."""
    found = importlib.util.find_spec(_LIBRARY)
    if found is None or found.origin is None:
        folder = pathlib.Path(__file__).parent
        return (
            f"none is in {folder}, from where jdaso is imported; it is built, by a C++17 compiler, "
            "when jdaso is installed (in a clone by pip install -e ., or start elsewhere)"
        )
    try:
        library = ctypes.CDLL(found.origin)
        if library.jdaso_header() != HEADER_SIZE:
            raise OSError("it belongs to another version of jdaso")
        for name in (_POST, _COLLECT):
            capsule = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    except Exception as error:  # built for another system, jdaso, or interface of XLA
        return f"{found.origin} does not fit: {error}; install jdaso again"
    library.jdaso_next.restype = ctypes.c_void_p
    pointer = ctypes.c_void_p
    library.jdaso_answer.argtypes = [ctypes.c_int32, pointer, ctypes.c_char_p, pointer, pointer]
    library.jdaso_answer.restype = None
    return library


def why_not(platform: str = "cpu") -> str | None:
    """Why compiled code cannot be used in this process; None if it can."""
    if platform != "cpu":
        return f"it serves CPU devices, not {platform}"
    library = _load()
    return library if isinstance(library, str) else None


def chosen(native: bool | None, platform: str) -> bool:
    """Whether exchanges use compiled code.

    Raises:
        ValueError: if it was asked for and cannot be used.
    """
    if native is False:
        return False
    reason = why_not(platform)
    if reason is not None and native:
        raise ValueError(f"native=True: the compiled code cannot be used: {reason}.")
    if reason is not None:
        _warn_once(reason)
    return reason is None


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"parameters are copied by host callbacks instead of compiled code: {reason}. Training is "
        "the same, exchanges cost more time.",
        stacklevel=4,
    )


class Desk:
    """Where programs ask a carrier for memory, to carry it, and for what has arrived."""

    def __init__(self, carrier: Carrier):
        library = _load()
        assert not isinstance(library, str)
        self._carrier = carrier
        self._library = library
        self._desk = library.jdaso_open()
        self._specs: list[tuple[Spec, ...]] = []
        threading.Thread(target=self._run, name="jdaso-desk", daemon=True).start()
        at_exit(library.jdaso_close, self._desk)

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
        # It rounds float32 to bfloat16 while it copies; other casts are left to XLA.
        narrow = [
            x.dtype == jnp.float32 and spec.dtype == jnp.bfloat16
            for x, spec in zip(leaves, specs, strict=True)
        ]
        cast = [
            x if halve else pack(x, spec.dtype)
            for x, halve, spec in zip(leaves, narrow, specs, strict=True)
        ]
        # Without side effects, as far as XLA knows: what comes later depends on the ticket.
        return jax.ffi.ffi_call(_POST, jax.ShapeDtypeStruct((), jnp.int32))(
            ticket,
            jnp.asarray(number, jnp.int32),
            jnp.asarray(step, jnp.int32),
            header,
            *cast,
            desk=np.int32(self._desk),
            specs=np.int32(self._number_of(tuple(specs))),
            narrow=np.array(narrow, np.int32),
        )

    def collect(
        self,
        takers: int,
        shapes: Sequence[jax.ShapeDtypeStruct],
        ticket: jax.Array,
        number: Number,
    ) -> tuple[Leaves, jax.Array, jax.Array]:
        """Waits for an exchange; returns the sums in these shapes, the header, and the ticket."""
        whole = jax.ShapeDtypeStruct((), jnp.int32)
        of_header = jax.ShapeDtypeStruct((HEADER_SIZE,), jnp.float32)
        ticket, header, *sums = jax.ffi.ffi_call(_COLLECT, [whole, of_header, *shapes])(
            ticket,
            jnp.asarray(number, jnp.int32),
            desk=np.int32(self._desk),
            takers=np.int32(takers),
        )
        return sums, header, ticket

    def _number_of(self, specs: tuple[Spec, ...]) -> int:
        if specs not in self._specs:
            self._specs.append(specs)
        return self._specs.index(specs)

    def _run(self) -> None:
        while call := self._library.jdaso_next(self._desk):
            if _Call.from_address(call).kind == _COLLECTS:
                # It waits, and what it waits for may have to be posted by another device first.
                threading.Thread(target=self._answer, args=(call,), daemon=True).start()
            else:
                self._answer(call)

    def _answer(self, call: int) -> None:
        error, rows, header = None, None, None
        asked = _Call.from_address(call)
        try:
            with self._carrier.ending_all_devices():
                if asked.kind == _RESERVES:
                    staging = self._carrier.reserve(asked.number, self._specs[asked.about])
                    rows = staging.addresses.of_leaves
                elif asked.kind == _POSTS:
                    given = np.array(asked.header, np.float32)
                    self._carrier.post(asked.number, asked.step, given)
                else:
                    staging, header = self._carrier.collect(asked.number, asked.about)
                    rows = staging.addresses.of_sums
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}".encode()
        # The call is gone with its answer. Its rows live as long as the memory they lead to.
        places = [None if array is None else array.ctypes.data for array in (rows, header)]
        self._library.jdaso_answer(self._desk, call, error, *places)
