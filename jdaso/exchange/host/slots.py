"""The slots of an exchange, as Python sees them: the compiled library, its calls, and their memory.

``slots.cc`` says what a slot is. Compiled programs fill and read slots without Python. Host
callbacks do the same through :class:`Table`, and the progress thread takes filled slots from it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import logging
import pathlib
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jdaso.core.block_format import format_of
from jdaso.core.exchange import HEADER_SIZE, UNCOUNTED, ExchangeRecord
from jdaso.core.log import logger
from jdaso.core.types import JdasoError
from jdaso.exchange.host.layout import Layout, Memory, Plan

#: The names of its functions in compiled programs.
POST, COLLECT, ORDER = "jdaso_post", "jdaso_collect", "jdaso_order"
FINITE_LEAVES, ROUND = "jdaso_finite_leaves", "jdaso_round"  # on CPUs
_LIBRARY = "jdaso.exchange.host._native"
_DRIVER = b"libcuda.so.1"


class Slot(ctypes.Structure):
    """An exchange; see slots.h."""

    _fields_ = (
        ("number", ctypes.c_int32),
        ("step", ctypes.c_int32),
        ("layout", ctypes.c_int32),
        ("state", ctypes.c_int32),
        ("parts_left", ctypes.c_int32),
        ("awaited", ctypes.c_int32),
        ("unpinned", ctypes.c_int32),
        ("header", ctypes.c_float * HEADER_SIZE),
        ("total", ctypes.c_float * HEADER_SIZE),
    )


class Record(ctypes.Structure):
    """What was measured of an exchange; see slots.h."""

    _fields_ = (
        ("number", ctypes.c_int32),
        ("step", ctypes.c_int32),
        ("bytes_sent", ctypes.c_int64),
        ("copy_to_host", ctypes.c_double * 2),
        ("transfer", ctypes.c_double * 2),
        ("wait", ctypes.c_double * 2),
        ("copy_to_device", ctypes.c_double * 2),
    )


_i32, _i64, _f64, _bool = ctypes.c_int32, ctypes.c_int64, ctypes.c_double, ctypes.c_bool
_pointer, _text, _size, _slot = (
    ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(Slot)
)  # fmt: skip
# The functions that Python calls: result and arguments. The calls release the interpreter lock.
_FUNCTIONS: dict[str, tuple] = {
    "open": (_i32, _text, _text, _f64, _bool),
    "free": (None, _i32),
    "layout": (_i32, _i32, _i32, _i32, _i64, _i64, _pointer, _i64),
    "reserve": (_bool, _i32, _i32, _text, _size),
    "begin_post": (_slot, _i32, _i32, _i32, _pointer, _i32, _text, _size),
    "end_post": (None, _i32, _slot),
    "discard": (None, _i32, _slot),
    "begin_collect": (_slot, _i32, _i32, _i32, _text, _size),
    "end_collect": (None, _i32, _slot, _i32, _bool),
    "hold": (_pointer, _slot, _pointer, _pointer),
    "let_go": (None, _pointer),
    "next": (_slot, _i32),
    "done": (None, _i32, _slot, _pointer, _i64, _f64, _f64),
    "fail": (None, _i32, _slot, _text),
    "wait": (_bool, _i32, _f64),
    "problem": (_bool, _i32, _text, _size),
    "wake": (None, _i32),
    "hurry": (_i32, _i32, _i32),
    "await_posted": (_i32, _i32),
    "await_done": (_bool, _i32, _text, _size),
    "in_flight": (_i32, _i32, _pointer, _i32),
    "release": (None, _i32, _slot),
    "restart": (None, _i32),
    "clear": (None, _i32),
    "close": (None, _i32),
    "records": (_i32, _i32, _pointer, _pointer),
    "sum_blocks": (None, _i32, _pointer, _size, _size, _pointer, _pointer),
    "unpack_blocks": (None, _i32, _pointer, _size, _pointer),
    "driver": (_text, _text),
    "prepare": (None, _i32, _text, _size),
    "await_copies": (None,),
}


@functools.cache
def load() -> ctypes.CDLL:
    """Loads the compiled library; in a clone without one, that of the installed jdaso.

    Raises:
        JdasoError: if it was not built, or for another system or version.
    """
    found = importlib.util.find_spec(_LIBRARY)
    if found is not None and found.origin is not None:
        return open_library(found.origin)
    folder = pathlib.Path(__file__).parent
    for installed in _installed():
        for source in (*folder.glob("*.cc"), *folder.glob("*.h")):
            copy = installed.with_name(source.name)
            if not copy.is_file() or copy.read_bytes() != source.read_bytes():
                raise JdasoError(
                    f"{installed} was built from another {source.name} than that of {folder}. "
                    "Install jdaso again from this clone, or start Python in another folder."
                )
        return open_library(str(installed))
    raise JdasoError(
        f"{folder} contains no compiled library, and no installed jdaso has one. Exchanges over "
        "MPI need it: a C++17 compiler, such as g++, builds it when pip installs jdaso."
    )


def _installed() -> Iterator[pathlib.Path]:
    """Yields the compiled libraries of installed distributions of jdaso."""
    for distribution in importlib.metadata.distributions(name="jdaso"):
        for file in distribution.files or ():
            path = pathlib.Path(str(distribution.locate_file(file)))
            if path.suffix == ".so" and path.is_file():
                yield path


def open_library(path: str) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(path)
        if library.jdaso_header() != HEADER_SIZE:
            raise OSError("the library belongs to another version of jdaso")
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(library, f"jdaso_{name}")
            function.restype, function.argtypes = result, arguments
    except Exception as error:  # built for another system
        raise JdasoError(f"{path} cannot be loaded: {error}; install jdaso again.") from error
    return library


@functools.cache
def register_handlers(platform: str = "cpu", suffix: str = "") -> None:
    """Tells XLA the handlers for the devices of a platform, once."""
    for name in (POST, COLLECT, ORDER, *(() if suffix else (FINITE_LEAVES, ROUND))):
        capsule = jax.ffi.pycapsule(getattr(load(), name + suffix))
        jax.ffi.register_ffi_target(name, capsule, platform=platform)


def why_callbacks(devices: Sequence[jax.Device]) -> str | None:
    """Makes devices ready for compiled handlers.

    Returns:
        The reason why host callbacks must copy on these devices, or None.
    """
    platform = devices[0].platform
    if platform == "cpu":
        return None
    if platform != "gpu":
        return f"it supports CPU and CUDA devices, not {platform}"
    if error := load().jdaso_driver(_DRIVER):
        return f"the CUDA driver cannot be used: {error.decode()}"
    text = ctypes.create_string_buffer(4096)
    for device in devices:
        load().jdaso_prepare(device.local_hardware_id, text, len(text))
        if text.value:
            return f"device {device.id} cannot be prepared: {text.value.decode()}"
    return None


def use_native(native: bool | None, devices: Sequence[jax.Device]) -> bool:
    """Whether compiled handlers copy in programs for these devices, or else host callbacks.

    Args:
        native: True requires handlers, False excludes them, None uses them where they work.

    Raises:
        ValueError: if they are required and cannot be used.
        JdasoError: if there is no compiled library, which host callbacks need as well.
    """
    load()
    if native is False:
        return False
    reason = why_callbacks(devices)
    if reason is None:
        if devices[0].platform == "gpu":
            register_handlers("CUDA", "_cuda")
        else:
            register_handlers()
        return True
    if native:
        raise ValueError(f"native=True: the compiled code cannot be used: {reason}.")
    _warn_once(reason)
    return False


def computes(platform: str) -> bool:
    """Whether compiled code rounds and checks for finite numbers, or else XLA does."""
    return platform == "cpu"


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"parameters are copied by host callbacks instead of compiled code: {reason}. Results are "
        "the same, but exchanges take more time.",
        stacklevel=4,
    )


def sum_blocks(terms: np.ndarray, sums: np.ndarray, packed: np.ndarray) -> None:
    """Adds the blocks of several members in their order.

    Args:
        terms: rows of a :class:`jdaso.core.block_format.BlockFormat`, [members, rows, row_bytes].
        sums: float32[rows, 64], receives the sums.
        packed: rows of the same format, [rows, row_bytes], receives the rounded sums.

    >>> from jdaso.core.block_format import format_of, pack, unpack
    >>> rows = format_of(np.int8)
    >>> terms = np.stack([pack(np.full((1, 64), x, np.float32), rows) for x in (1, 2)])
    >>> sums, packed = np.empty((1, 64), np.float32), np.empty((1, 65), np.int8)
    >>> sum_blocks(terms, sums, packed)
    >>> float(sums[0, 0]), bool((unpack(packed) == sums).all())
    (3.0, True)
    """
    addresses = [_address(array) for array in (terms, sums, packed)]
    load().jdaso_sum_blocks(_bits(terms), addresses[0], *terms.shape[:2], *addresses[1:])


def unpack_blocks(packed: np.ndarray, numbers: np.ndarray) -> None:
    """Decodes rows of a format, [rows, row_bytes], into float32[rows, 64]."""
    load().jdaso_unpack_blocks(_bits(packed), _address(packed), len(packed), _address(numbers))


def _bits(rows: np.ndarray) -> int:
    blocks = format_of(rows.dtype)
    assert blocks is not None
    return blocks.bits


def _address(array: np.ndarray) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


class Table:
    """The slots of one exchange, in compiled code.

    Args:
        posted_twice: Error for a number that is not new, with ``{}`` for the exchange's name.
        not_in_flight: Error for a number that is unknown.
        patience: Seconds for which it waits for another device of this node, or for copies.

    Methods that are not defined here are the functions of the library of the same names:

    - ``end_post(slot)`` counts a device that has filled its part.
    - ``discard(slot)`` frees a slot whose leaves could not be copied.
    - ``end_collect(slot, readers, last)`` counts a device that has read the sums, if it has read
      its ``last`` part. When all have, the slot is free.
    - ``wait(seconds)`` waits for news, and returns whether there are some. A negative time has no
      limit. Only the progress thread waits. ``wake()`` ends such a wait, or else the next one.
    - ``hurry(change)`` adds to the number of those who wait for a result, and returns it. Programs
      count as well.
    - ``release(slot)`` gives back what :meth:`in_flight` has returned.
    - ``restart()`` allows the numbers of exchanges to start again, once.
    - ``clear()`` forgets all posted exchanges. Numbers may start again.
    """

    def __init__(self, posted_twice: str = "", not_in_flight: str = "", patience: float = 30.0):
        loaded = load()
        texts = posted_twice.encode(), not_in_flight.encode()
        self.id = loaded.jdaso_open(*texts, patience, logger.isEnabledFor(logging.DEBUG))
        self._library, self._patience = loaded, patience
        self._plans: list[Plan] = []
        self._layouts: dict[Layout, int] = {}
        self._pinned: set[int] = set()
        self._lock = threading.Lock()
        self._text = ctypes.create_string_buffer(4096)  # of a problem, for the progress thread
        # Handlers that still run keep the memory.
        weakref.finalize(self, loaded.jdaso_free, self.id).atexit = False

    def __getattr__(self, name: str) -> Any:
        function = functools.partial(getattr(self._library, f"jdaso_{name}"), self.id)
        setattr(self, name, function)  # the next use finds it without this method
        return function

    def register(self, layout: Layout, pinned: bool = False) -> int:
        """Tells the handlers a layout. Returns its index. If ``pinned``, it makes its two slots."""
        with self._lock:
            if layout not in self._layouts:
                plan = Plan(layout)
                places = plan.places()
                self._layouts[layout] = self._library.jdaso_layout(
                    *(self.id, layout.senders, places.shape[1], plan.bytes, plan.family),
                    *(places.ctypes.data, places.size),
                )
                self._plans.append(plan)
            index = self._layouts[layout]
            if pinned and index not in self._pinned:
                self._pinned.add(index)
                self._checked("reserve", index)
            return index

    def memory(self, slot: Slot) -> Memory:
        """The memory of a slot, which lives as long as there are views of it."""
        address, size = ctypes.c_void_p(), ctypes.c_int64()
        held = self._library.jdaso_hold(slot, ctypes.byref(address), ctypes.byref(size))
        assert address.value is not None
        array = (ctypes.c_uint8 * size.value).from_address(address.value)
        weakref.finalize(array, self._library.jdaso_let_go, held).atexit = False
        return Memory(self._plans[slot.layout], np.frombuffer(memoryview(array), np.uint8))

    def begin_post(self, number: int, step: int, header: np.ndarray, layout: int) -> Slot:
        """The slot that a device fills. Other devices that send get the same one."""
        sent = np.ascontiguousarray(header, np.float32)
        return self._checked("begin_post", number, step, sent.ctypes.data, layout).contents

    def begin_collect(self, number: int, readers: int) -> Slot:
        """Waits for an exchange, which ``readers`` devices collect."""
        return self._checked("begin_collect", number, readers).contents

    def next(self) -> Slot | None:
        """The slot that was filled first of those that the progress thread has not got yet."""
        found = self._library.jdaso_next(self.id)
        if found and found.contents.unpinned:
            _warn_unpinned()
        return found.contents if found else None

    def done(self, slot: Slot, total: np.ndarray, sent: int, began: float, ended: float) -> None:
        """The sums are in the slot's memory. ``total`` is their header."""
        header = np.ascontiguousarray(total, np.float32)
        self._library.jdaso_done(self.id, slot, header.ctypes.data, sent, began, ended)

    def fail(self, slot: Slot, error: str) -> None:
        """Whoever collects the exchange gets this error."""
        self._library.jdaso_fail(self.id, slot, error.encode(errors="backslashreplace"))

    def problems(self) -> Iterator[str]:
        """Yields the errors of handlers, each of which waits until the next one is asked for."""
        while self._library.jdaso_problem(self.id, self._text, len(self._text)):
            yield self._text.value.decode(errors="replace")

    def await_posted(self) -> None:
        """Waits until no slot is being filled."""
        pending = self._library.jdaso_await_posted(self.id)
        if pending >= UNCOUNTED:
            raise JdasoError(
                f"exchange {pending} was reserved but not posted within {self._patience:g} s: "
                "copying the parameters to the host has failed or hangs. Look for an earlier error "
                "of this process."
            )

    def await_done(self) -> None:
        """Waits until all posted exchanges are done. Raises the error of one that has failed."""
        self._checked("await_done")

    def in_flight(self) -> list[Slot]:
        """The slots that are posted and not collected. Each must be released."""
        slots = (ctypes.POINTER(Slot) * 4096)()
        count = self._library.jdaso_in_flight(self.id, slots, len(slots))
        return [each.contents for each in slots[:count]]

    def close(self) -> None:
        """Fails all posts and collects from now on. What is posted still completes."""
        self._library.jdaso_await_copies()
        self._library.jdaso_close(self.id)

    def records(self) -> list[ExchangeRecord]:
        """The last thousand exchanges that were collected."""
        return self._measured()[0]

    def report(self) -> dict[str, float]:
        """Exchanges collected, bytes sent, seconds that training waited, and seconds in flight."""
        _, (exchanges, bytes_sent, blocked, in_flight) = self._measured()
        return {
            "exchanges": int(exchanges),
            "bytes_sent": int(bytes_sent),
            "seconds_blocked": blocked,
            "seconds_in_flight": in_flight,
        }

    def _measured(self) -> tuple[list[ExchangeRecord], list[float]]:
        records, totals = (Record * 1000)(), (ctypes.c_double * 4)()
        count = self._library.jdaso_records(self.id, records, totals)
        found = [
            ExchangeRecord(
                *(each.number, each.step, each.bytes_sent),
                *map(tuple, (each.copy_to_host, each.transfer, each.wait, each.copy_to_device)),
            )
            for each in records[:count]
        ]
        return found, list(totals)

    def _checked(self, name: str, *arguments: Any) -> Any:
        """The result of a function that can fail."""
        error = ctypes.create_string_buffer(4096)
        found = getattr(self._library, f"jdaso_{name}")(self.id, *arguments, error, len(error))
        if not found:
            raise JdasoError(error.value.decode(errors="replace"))
        return found


@functools.cache
def _warn_unpinned() -> None:
    warnings.warn(
        "CUDA cannot pin host memory for exchanges: copies are slower and block training. Raise "
        "the limit of locked memory (ulimit -l).",
        stacklevel=2,
    )


def exchange_name(number: int) -> str:
    return "a consensus" if number == UNCOUNTED else f"exchange {number}"
