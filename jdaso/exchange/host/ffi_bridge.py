"""Copies between a program's arrays and staging buffers by compiled code.

``copies_cpu.cc`` and ``copies_cuda.cc`` define XLA custom calls that copy the leaves and the sums.
They submit what needs Python to the queue of ``ffi_queue.cc``, and threads of :class:`FfiBridge`
execute it. The program itself calls no Python, so JAX dispatches it as fast as a program without
exchanges. Where no compiled code is available, host callbacks do the same and cost more time.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
import pathlib
import queue
import threading
import time
import warnings
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jdaso.cluster.abort import at_exit
from jdaso.core.exchange import HEADER_SIZE, UNCOUNTED
from jdaso.core.types import Leaves, Number
from jdaso.core.wire import pack
from jdaso.exchange.host.layout import Layout
from jdaso.exchange.host.pinned_memory import PinnedMemory
from jdaso.exchange.host.transport_protocol import Transport

_LIBRARY = "jdaso.exchange.host._copies"
_DRIVER = b"libcuda.so.1"
_POST_TARGET, _COLLECT_TARGET, _ORDER_TARGET = _TARGETS = (
    "jdaso_post",
    "jdaso_collect",
    "jdaso_order",
)
# The longest wait at exit until the last exchanges are posted.
_SHUTDOWN_SECONDS = 5.0
# The kinds of calls, in the order of ffi_queue.h.
_RESERVE, _POST, _COLLECT, _FAIL = range(4)


class _Arguments(ctypes.Structure):
    """The arguments of a call; see ffi_queue.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("number", ctypes.c_int32),
        ("step", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("argument", ctypes.c_int32),
        ("pin", ctypes.c_int32),
        ("header", ctypes.c_float * HEADER_SIZE),
        ("message", ctypes.c_char * 256),
    )


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The compiled library, registered with XLA, or the reason why it cannot be used."""
    found = importlib.util.find_spec(_LIBRARY)
    if found is None or found.origin is None:
        folder = pathlib.Path(__file__).parent
        return (
            f"{folder} contains no compiled library; a C++17 compiler builds it when jdaso is "
            "installed (in a clone, run pip install -e . or start Python in another folder)"
        )
    return _open(found.origin, {"cpu": "", "CUDA": "_cuda"})


def _open(path: str, suffixes: Mapping[str, str]) -> ctypes.CDLL | str:
    """Loads a library, and registers its functions, which have these suffixes, with XLA."""
    try:
        library = ctypes.CDLL(path)
        if library.jdaso_header() != HEADER_SIZE:
            raise OSError("the library belongs to another version of jdaso")
        for (platform, suffix), name in itertools.product(suffixes.items(), _TARGETS):
            capsule = jax.ffi.pycapsule(getattr(library, name + suffix))
            jax.ffi.register_ffi_target(name, capsule, platform=platform)
        pointer = ctypes.c_void_p
        library.jdaso_next.argtypes = [ctypes.c_int32, pointer]
        library.jdaso_next.restype = pointer
        complete = library.jdaso_complete
        integer = ctypes.c_int32
        complete.argtypes = [integer, pointer, ctypes.c_char_p, pointer, integer, pointer]
        complete.restype = None
        library.jdaso_fail_taken.restype = None  # older libraries do not have it
        library.jdaso_driver.restype = ctypes.c_char_p
        library.jdaso_pin.argtypes = [pointer, ctypes.c_size_t]
        library.jdaso_pin.restype = ctypes.c_bool
        library.jdaso_unpin.argtypes = [pointer]
    except Exception as error:  # built for another system, jdaso or XLA
        return f"{path} cannot be loaded: {error}; install jdaso again"
    return library


def unavailable_reason(platform: str = "cpu", native: bool | None = None) -> str | None:
    """The reason why this process does not use compiled code; None if it does."""
    if platform not in ("cpu", "gpu"):
        return f"it supports CPU and CUDA devices, not {platform}"
    library = _load()
    if isinstance(library, str):
        return library
    if platform == "cpu":
        return None
    if not native:
        # It has been tested with a simulated driver only.
        return "on CUDA devices, where it has not been measured, it needs native=True"
    error = library.jdaso_driver(_DRIVER)
    return f"the CUDA driver cannot be used: {error.decode()}" if error else None


def use_native(native: bool | None, platform: str) -> bool:
    """Whether exchanges use compiled code.

    Args:
        native: True requires it, False excludes it, None uses it where it is available.

    Raises:
        ValueError: If it is required and cannot be used.
    """
    if native is False:
        return False
    reason = unavailable_reason(platform, native)
    if reason is not None and native:
        raise ValueError(f"native=True: the compiled code cannot be used: {reason}.")
    if reason is not None:
        _warn_once(reason)
    return reason is None


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"parameters are copied by host callbacks instead of compiled code: {reason}. Results are "
        "the same, but exchanges take more time.",
        stacklevel=4,
    )


class FfiBridge:
    """Executes the calls of compiled programs in threads.

    All threads start here, because the interpreter starts none at exit, and a process may reach
    its limit later.

    Args:
        transport: Posts and collects.
        platform: ``cpu`` or ``gpu``.
        devices: Number of local devices.
    """

    def __init__(self, transport: Transport, platform: str, devices: int):
        library = _load()
        assert not isinstance(library, str)
        self._transport, self._library = transport, library
        self._queue = library.jdaso_open()
        self._narrows = platform == "cpu"
        self._layouts: list[Layout] = []
        self._pinned = PinnedMemory(library.jdaso_pin, library.jdaso_unpin)
        self._collects: queue.SimpleQueue[tuple[int, _Arguments] | None] = queue.SimpleQueue()
        # A collect may wait for an exchange that another device posts through this queue. Each
        # device waits in one collect, or in two while consensus runs beside a step.
        targets = [self._run, *[self._run_collects] * (2 * devices)]
        self._threads = [
            threading.Thread(target=target, name="jdaso-ffi", daemon=True) for target in targets
        ]
        for thread in self._threads:
            thread.start()
        self._forget = at_exit(self.close)

    def post(
        self, layout: Layout, device: Number, leaves: Leaves, token, number, step, header, part
    ) -> jax.Array:
        """Copies a part of a device's leaves, or zeros if ``header[0]`` is 0. Returns the token.

        The exchange is posted after the last part.
        """
        if layout not in self._layouts:
            self._layouts.append(layout)
        dtypes = layout.dtypes[part]
        # On a CPU, the copy rounds float32 to bfloat16. XLA does all other casts.
        narrow = [
            self._narrows and x.dtype == jnp.float32 and dtype == jnp.bfloat16
            for x, dtype in zip(leaves, dtypes, strict=True)
        ]
        cast = [
            x if narrowed else pack(x, dtype)
            for x, narrowed, dtype in zip(leaves, narrow, dtypes, strict=True)
        ]
        # XLA is told of no side effects. The token orders the calls.
        return jax.ffi.ffi_call(_POST_TARGET, jax.ShapeDtypeStruct((), jnp.int32))(
            token,
            jnp.asarray(device, jnp.int32),
            jnp.asarray(number, jnp.int32),
            jnp.asarray(step, jnp.int32),
            header,
            *cast,
            queue=np.int32(self._queue),
            first=np.int32(part.start),
            last=np.int32(part.stop == len(layout.dtypes)),
            layout=np.int32(self._layouts.index(layout)),
            narrow=np.array(narrow, np.int32),
        )

    def collect(
        self, readers: int, device: Number, shapes: Sequence, token, number, part: slice, last: bool
    ) -> tuple[Leaves, jax.Array, jax.Array]:
        """Waits for an exchange. Returns a part of the sums, the header and the token."""
        of_token = jax.ShapeDtypeStruct((), jnp.int32)
        of_header = jax.ShapeDtypeStruct((HEADER_SIZE,), jnp.float32)
        token, header, *sums = jax.ffi.ffi_call(_COLLECT_TARGET, [of_token, of_header, *shapes])(
            token,
            jnp.asarray(device, jnp.int32),
            jnp.asarray(number, jnp.int32),
            queue=np.int32(self._queue),
            first=np.int32(part.start),
            last=np.int32(last),
            readers=np.int32(readers),
        )
        return sums, header, token

    @staticmethod
    def order(
        token: jax.Array, lists: list[Leaves], into: list[Leaves] | None = None
    ) -> tuple[jax.Array, list[Leaves]]:
        """As ``after`` of :class:`jdaso.core.exchange.PartOperations`."""
        places, treedef = jax.tree.flatten((token, lists if into is None else into))
        copied = [] if into is None else jax.tree.leaves(lists)
        aliases = {i: i for i in range(len(places))}
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in places]
        call = jax.ffi.ffi_call(_ORDER_TARGET, shapes, input_output_aliases=aliases)
        return jax.tree.unflatten(treedef, call(*places, *copied))

    def _run(self) -> None:
        arguments = _Arguments()
        while call := self._library.jdaso_next(self._queue, ctypes.addressof(arguments)):
            copy = _Arguments.from_buffer_copy(arguments)
            if copy.kind == _COLLECT:
                self._collects.put((call, copy))
            else:
                self._execute(call, copy)
        for _ in self._threads[1:]:
            self._collects.put(None)

    def _run_collects(self) -> None:
        while (item := self._collects.get()) is not None:
            self._execute(*item)

    def _execute(self, address: int, call: _Arguments) -> None:
        message, places, header = None, None, None
        try:
            with self._transport.abort_on_error():
                if call.kind == _RESERVE:
                    staging = self._transport.reserve(call.number, self._layouts[call.argument])
                    places = staging.places_to_fill(call.device, call.number)
                elif call.kind == _POST:
                    self._transport.post(call.number, call.step, np.array(call.header, np.float32))
                elif call.kind == _COLLECT:
                    staging, header = self._transport.collect(call.number, call.argument)
                    places = staging.places_to_read(call.device)
                else:
                    self._transport.pending.discard(call.number)
                    raise RuntimeError(call.message.decode())
                if call.pin and call.number != UNCOUNTED:  # whose buffers are used only once
                    self._pinned.add(staging)
        except BaseException as error:  # the program waits for an answer in any case
            message = f"{type(error).__name__}: {error}".encode()
        # The places live as long as the buffers.
        at, count = (None, 0) if places is None else (places.ctypes.data, len(places))
        pointer = None if header is None else header.ctypes.data
        self._library.jdaso_complete(self._queue, address, message, at, count, pointer)

    def close(self) -> None:
        """Fails all calls from now on, and ends the threads."""
        self._forget()
        self._library.jdaso_close(self._queue)
        self._library.jdaso_await_copies()
        self._library.jdaso_shut_down(self._queue)
        deadline = time.monotonic() + _SHUTDOWN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._library.jdaso_fail_taken(self._queue)
