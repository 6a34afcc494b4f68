"""Copies between a program's arrays and the host memory of an exchange, by compiled code.

``copies.cc``, and ``copies_cuda.cc`` for CUDA devices, hold two functions that XLA calls as part of
the program. They copy each leaf; what is to be done in Python, they ask for at a desk, where a
thread answers. So a training step calls no Python, and JAX dispatches it as fast as one without
exchanges. An exchange works without them, by host callbacks, and costs more.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
import pathlib
import threading
import warnings
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jdaso._at_exit import at_exit
from jdaso._base import HEADER_SIZE, UNCOUNTED, Leaves, Number
from jdaso._wire import pack
from jdaso.exchange._carrier import Carrier
from jdaso.exchange._pinning import Pins
from jdaso.exchange._staging import Spec

_LIBRARY = "jdaso.exchange._copies"
_DRIVER = b"libcuda.so.1"
_POST, _COLLECT = "jdaso_post", "jdaso_collect"
# How long the interpreter may wait, at its end, until what was posted last flies.
_END_SECONDS = 5.0
_RESERVES, _POSTS, _COLLECTS, _FAILS = range(4)


class _Call(ctypes.Structure):
    """The part of a call that Python reads; ``about`` is the number of the specs, or of takers."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("number", ctypes.c_int32),
        ("step", ctypes.c_int32),
        ("about", ctypes.c_int32),
        ("pins", ctypes.c_int32),
        ("header", ctypes.c_float * HEADER_SIZE),
        ("problem", ctypes.c_char * 256),
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
    return _open(found.origin, {"cpu": "", "CUDA": "_cuda"})


def _open(path: str, suffixes: Mapping[str, str]) -> ctypes.CDLL | str:
    """A library; XLA knows its functions with these endings for these platforms."""
    try:
        library = ctypes.CDLL(path)
        if library.jdaso_header() != HEADER_SIZE:
            raise OSError("it belongs to another version of jdaso")
        for (platform, suffix), name in itertools.product(suffixes.items(), (_POST, _COLLECT)):
            capsule = jax.ffi.pycapsule(getattr(library, name + suffix))
            jax.ffi.register_ffi_target(name, capsule, platform=platform)
        pointer = ctypes.c_void_p
        library.jdaso_next.restype = pointer
        library.jdaso_answer.argtypes = [ctypes.c_int32, pointer, ctypes.c_char_p, pointer, pointer]
        library.jdaso_answer.restype = None
        library.jdaso_driver.restype = ctypes.c_char_p
        library.jdaso_pin.argtypes = [pointer, ctypes.c_size_t]
        library.jdaso_pin.restype = ctypes.c_bool
        library.jdaso_unpin.argtypes = [pointer]
    except Exception as error:  # built for another system, jdaso, or interface of XLA
        return f"{path} does not fit: {error}; install jdaso again"
    return library


def why_not(platform: str = "cpu", native: bool | None = None) -> str | None:
    """Why compiled code is not used in this process; None if it is."""
    if platform not in ("cpu", "gpu"):
        return f"it serves CPU and CUDA devices, not {platform}"
    library = _load()
    if isinstance(library, str):
        return library
    if platform == "cpu":
        return None
    if not native:
        # It has been tested with a stand-in for the driver, for want of a GPU.
        return "on CUDA devices, where nobody has measured it, it serves with native=True only"
    error = library.jdaso_driver(_DRIVER)
    return f"the CUDA driver cannot be used: {error.decode()}" if error else None


def chosen(native: bool | None, platform: str) -> bool:
    """Whether exchanges use compiled code.

    Raises:
        ValueError: if it was asked for and cannot be used.
    """
    if native is False:
        return False
    reason = why_not(platform, native)
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
    """Where programs ask a carrier for memory, to carry it, and for what has arrived.

    Args:
        carrier: is asked.
        platform: of the devices, ``cpu`` or ``gpu``.
    """

    def __init__(self, carrier: Carrier, platform: str):
        library = _load()
        assert not isinstance(library, str)
        self._carrier = carrier
        self._library = library
        self._desk = library.jdaso_open()
        self._narrows = platform == "cpu"
        self._specs: list[tuple[Spec, ...]] = []
        self._pins = Pins(library.jdaso_pin, library.jdaso_unpin)
        self._thread = threading.Thread(target=self._run, name="jdaso-desk", daemon=True)
        self._thread.start()
        at_exit(self._close)

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
        # A CPU rounds float32 to bfloat16 while it copies; other casts are left to XLA.
        narrow = [
            self._narrows and x.dtype == jnp.float32 and spec.dtype == jnp.bfloat16
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
                elif asked.kind == _COLLECTS:
                    staging, header = self._carrier.collect(asked.number, asked.about)
                    rows = staging.addresses.of_sums
                else:
                    self._carrier.reserved.forget(asked.number)
                    raise RuntimeError(asked.problem.decode())
                if asked.pins and asked.number != UNCOUNTED:  # whose memory is used only once
                    self._pins.add(staging)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}".encode()
        # The call is gone with its answer. Its rows live as long as the memory they lead to.
        places = [None if array is None else array.ctypes.data for array in (rows, header)]
        self._library.jdaso_answer(self._desk, call, error, *places)

    def _close(self) -> None:
        self._library.jdaso_close(self._desk)
        self._library.jdaso_await_copies()
        self._library.jdaso_end(self._desk)
        self._thread.join(_END_SECONDS)
