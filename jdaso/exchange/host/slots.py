"""The slots of an exchange, as Python sees them: the compiled library, its calls, and their memory.

``slots.cc`` says what a slot is. Compiled programs fill and read slots without Python. Host
callbacks do the same through :class:`Table`, and the progress thread takes filled slots from it.
Where there is no compiled library, :class:`PlainTable` stands in.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
import logging
import pathlib
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jdaso.core.block_format import format_of, pack, unpack
from jdaso.core.exchange import HEADER_SIZE, UNCOUNTED, ExchangeRecord
from jdaso.core.log import logger
from jdaso.core.types import JdasoError
from jdaso.exchange.host.layout import Layout, Memory, Plan

#: The names of its functions in compiled programs.
POST, COLLECT, ORDER = "jdaso_post", "jdaso_collect", "jdaso_order"
_LIBRARY = "jdaso.exchange.host._copies"
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

    def as_tuple(self) -> ExchangeRecord:
        numbers = self.number, self.step, self.bytes_sent
        pairs = self.copy_to_host, self.transfer, self.wait, self.copy_to_device
        return ExchangeRecord(*numbers, *((start, end) for start, end in pairs))


_i32, _i64, _f64, _bool = ctypes.c_int32, ctypes.c_int64, ctypes.c_double, ctypes.c_bool
_pointer, _text, _size, _slot = (
    ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(Slot)
)  # fmt: skip
# The functions that Python calls: result and arguments. The calls release the interpreter lock.
_FUNCTIONS: dict[str, tuple] = {
    "open": (_i32, _text, _text, _f64, _bool),
    "free": (None, _i32),
    "layout": (_i32, _i32, _i32, _i32, _i64, _i64, _pointer, _i64),
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
    "await_copies": (None,),
}


@functools.cache
def load() -> ctypes.CDLL | str:
    """The compiled library, registered with XLA, or the reason why it cannot be used."""
    found = importlib.util.find_spec(_LIBRARY)
    if found is None or found.origin is None:
        folder = pathlib.Path(__file__).parent
        return (
            f"{folder} contains no compiled library; a C++17 compiler builds it when jdaso is "
            "installed (in a clone, run pip install -e . or start Python in another folder)"
        )
    return open_library(found.origin, {"cpu": "", "CUDA": "_cuda"})


def open_library(path: str, suffixes: Mapping[str, str]) -> ctypes.CDLL | str:
    """Loads a library, and registers its functions, which have these suffixes, with XLA."""
    try:
        library = ctypes.CDLL(path)
        if library.jdaso_header() != HEADER_SIZE:
            raise OSError("the library belongs to another version of jdaso")
        for (platform, suffix), name in itertools.product(suffixes.items(), (POST, COLLECT, ORDER)):
            capsule = jax.ffi.pycapsule(getattr(library, name + suffix))
            jax.ffi.register_ffi_target(name, capsule, platform=platform)
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(library, f"jdaso_{name}")
            function.restype, function.argtypes = result, arguments
    except Exception as error:  # built for another system, jdaso or XLA
        return f"{path} cannot be loaded: {error}; install jdaso again"
    return library


def unavailable_reason(platform: str = "cpu", native: bool | None = None) -> str | None:
    """The reason why this process does not use compiled code; None if it does."""
    if platform not in ("cpu", "gpu"):
        return f"it supports CPU and CUDA devices, not {platform}"
    library = load()
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


def rounds(platform: str) -> bool:
    """Whether the post of compiled code rounds float32 to bfloat16. Elsewhere XLA does it."""
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

    >>> rows = format_of(np.int8)
    >>> terms = np.stack([pack(np.full((1, 64), x, np.float32), rows) for x in (1, 2)])
    >>> sums, packed = np.empty((1, 64), np.float32), np.empty((1, 65), np.int8)
    >>> sum_blocks(terms, sums, packed)
    >>> float(sums[0, 0]), bool((unpack(packed) == sums).all())
    (3.0, True)
    """
    loaded = load()
    if isinstance(loaded, ctypes.CDLL):
        addresses = [_address(array) for array in (terms, sums, packed)]
        loaded.jdaso_sum_blocks(_bits(terms), addresses[0], *terms.shape[:2], *addresses[1:])
        return
    sums[...] = unpack(terms[0])
    for term in terms[1:]:
        sums += unpack(term)
    rows = format_of(terms.dtype)
    assert rows is not None
    packed[...] = pack(sums, rows)


def unpack_blocks(packed: np.ndarray, numbers: np.ndarray) -> None:
    """Decodes rows of a format, [rows, row_bytes], into float32[rows, 64]."""
    loaded = load()
    if isinstance(loaded, ctypes.CDLL):
        loaded.jdaso_unpack_blocks(_bits(packed), _address(packed), len(packed), _address(numbers))
    else:
        numbers[...] = unpack(packed)


def _bits(rows: np.ndarray) -> int:
    blocks = format_of(rows.dtype)
    assert blocks is not None
    return blocks.bits


def _address(array: np.ndarray) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


# The longest wait for another device of this node, or for copies; as in slots.cc.
_SECONDS = 30.0
_CLOSED = "the exchange is closed, or the interpreter is exiting: no exchange can start or end"
_FREE, _FILLING, _FILLED, _DONE, _FAILED = range(5)


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

    def __init__(self, posted_twice: str, not_in_flight: str, patience: float = _SECONDS):
        loaded = load()
        assert not isinstance(loaded, str)
        texts = posted_twice.encode(), not_in_flight.encode()
        self.id = loaded.jdaso_open(*texts, patience, logger.isEnabledFor(logging.DEBUG))
        self._library, self._patience = loaded, patience
        self._plans: list[Plan] = []
        self._layouts: dict[Layout, int] = {}
        self._lock = threading.Lock()
        self._text = ctypes.create_string_buffer(4096)  # of a problem, for the progress thread
        # Handlers that still run keep the memory.
        weakref.finalize(self, loaded.jdaso_free, self.id).atexit = False

    def __getattr__(self, name: str) -> Any:
        function = functools.partial(getattr(self._library, f"jdaso_{name}"), self.id)
        setattr(self, name, function)  # the next use finds it without this method
        return function

    def register(self, layout: Layout) -> int:
        """Tells the handlers a layout. Returns its index."""
        with self._lock:
            if layout not in self._layouts:
                plan = Plan(layout)
                places = plan.places()
                self._layouts[layout] = self._library.jdaso_layout(
                    *(self.id, layout.senders, places.shape[1], plan.bytes, plan.family),
                    *(places.ctypes.data, places.size),
                )
                self._plans.append(plan)
            return self._layouts[layout]

    def memory(self, slot: Slot) -> Memory:
        """The memory of a slot, which lives as long as there are views of it."""
        address, size = ctypes.c_void_p(), ctypes.c_int64()
        held = self._library.jdaso_hold(slot, ctypes.byref(address), ctypes.byref(size))
        assert address.value is not None
        array = (ctypes.c_uint8 * size.value).from_address(address.value)
        weakref.finalize(array, self._library.jdaso_let_go, held).atexit = False
        return Memory(self._plans[slot.layout], np.ctypeslib.as_array(array))

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
        _check_posted(self._library.jdaso_await_posted(self.id), self._patience)

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
        return self._records()[0]

    def report(self) -> dict[str, float]:
        """Exchanges collected, bytes sent, seconds that training waited, and seconds in flight."""
        return _report(self._records()[1])

    def _records(self) -> tuple[list[ExchangeRecord], Sequence[float]]:
        records, totals = (Record * 1000)(), (ctypes.c_double * 4)()
        count = self._library.jdaso_records(self.id, records, totals)
        return [record.as_tuple() for record in records[:count]], list(totals)

    def _checked(self, name: str, *arguments: Any) -> Any:
        """The result of a function that can fail."""
        error = ctypes.create_string_buffer(4096)
        found = getattr(self._library, f"jdaso_{name}")(self.id, *arguments, error, len(error))
        if not found:
            raise JdasoError(error.value.decode(errors="replace"))
        return found


def _check_posted(pending: int, seconds: float) -> None:
    if pending >= UNCOUNTED:
        raise JdasoError(
            f"exchange {pending} was reserved but not posted within {seconds:g} s: copying the "
            "parameters to the host has failed or hangs. Look for an earlier error of this process."
        )


@functools.cache
def _warn_unpinned() -> None:
    warnings.warn(
        "CUDA cannot pin host memory for exchanges: copies are slower and block training. Raise "
        "the limit of locked memory (ulimit -l).",
        stacklevel=2,
    )


class _PlainSlot:
    """As :class:`Slot`. ``times`` are the pairs of an :class:`ExchangeRecord`."""

    def __init__(self, number: int, step: int, header: np.ndarray, layout: int, plan: Plan):
        self.number, self.step, self.layout, self.state = number, step, layout, _FILLING
        self.parts_left, self.to_join = plan.layout.senders, plan.layout.senders - 1
        self.header, self.memory, self.error = np.array(header, np.float32), Memory(plan), ""
        self.total, self.awaited, self.collected, self.sent = self.header, 0, 0, 0
        self.times = [[0.0, 0.0] for _ in range(4)]
        self.times[0][0] = time.monotonic()


class PlainTable:
    """As :class:`Table`, in Python, for host callbacks. Memory is not reused."""

    def __init__(self, posted_twice: str = "", not_in_flight: str = "", patience: float = _SECONDS):
        self._texts, self._patience = (posted_twice, not_in_flight), patience
        self._changed = threading.Condition()
        self._plans: list[Plan] = []
        self._slots: list[Any] = []
        self._filled: deque[Any] = deque()
        self._records: deque[Any] = deque(maxlen=1000)
        self._totals, self._waiting, self._highest = [0.0] * 4, 0, UNCOUNTED
        self._restarted = self._closed = self._news = False

    def _change(self, function: Callable[[], Any]) -> Any:
        """Calls a function with the lock, and wakes whoever waits."""
        with self._changed:
            result, self._news = function(), True
            self._changed.notify_all()
            return result

    def _wait(self, condition: Callable[[], Any], seconds: float | None = None) -> Any:
        with self._changed:
            return self._changed.wait_for(condition, seconds)

    def _find(self, number: int) -> Any:
        return next((slot for slot in self._slots if slot.number == number), None)

    def register(self, layout: Layout) -> int:
        self._plans.append(Plan(layout))
        return len(self._plans) - 1

    def memory(self, slot: Any) -> Memory:
        return slot.memory

    def begin_post(self, number: int, step: int, header: np.ndarray, layout: int) -> Any:
        with self._changed:
            if self._closed:
                raise JdasoError(_CLOSED)
            slot = self._find(number)
            if slot is not None and slot.state == _FILLING and slot.to_join > 0:
                slot.to_join -= 1
                return slot
            known = slot is not None or UNCOUNTED < number <= self._highest
            if known and not self._restarted:
                raise JdasoError(self._texts[0].format(exchange_name(number)))
            if number != UNCOUNTED:
                self._slots = [x for x in self._slots if x.number < number or x.state < _FILLED]
                self._highest, self._restarted = number, False
            self._slots.append(_PlainSlot(number, step, header, layout, self._plans[layout]))
            return self._slots[-1]

    def end_post(self, slot: Any) -> None:
        def count() -> None:
            slot.times[0][1], slot.parts_left = time.monotonic(), slot.parts_left - 1
            if not slot.parts_left:
                slot.state = _FILLED
                self._filled.append(slot)

        self._change(count)

    def discard(self, slot: Any) -> None:
        self._change(lambda: self._slots.remove(slot))

    def begin_collect(self, number: int, readers: int) -> Any:
        def known() -> bool:
            slot = self._find(number)
            return self._closed or (readers == 1 if slot is None else slot.state != _FILLING)

        with self._changed:
            self._wait(known, self._patience)
            slot, since = self._find(number), time.monotonic()
            if slot is not None and slot.state == _FAILED:
                raise JdasoError(slot.error)
            if self._closed:
                raise JdasoError(_CLOSED)
            if slot is None or slot.state == _FILLING:
                raise JdasoError(self._texts[1].format(exchange_name(number)))
            slot.awaited = 1
            self.hurry(1)
            self._wait(lambda: self._closed or slot.state != _FILLED)
            self.hurry(-1)
            if slot.state != _DONE:
                raise JdasoError(slot.error if slot.state == _FAILED else _CLOSED)
            if not slot.times[2][0] and number != UNCOUNTED:
                slot.times[2][:] = since, time.monotonic()
                seconds = (end - start for start, end in (slot.times[2], slot.times[1]))
                for i, value in enumerate((1, slot.sent, *seconds)):
                    self._totals[i] += value
                self._records.append((slot.number, slot.step, slot.sent, slot.times))
            return slot

    def end_collect(self, slot: Any, readers: int, last: bool) -> None:
        with self._changed:
            slot.collected += last
            if slot.collected >= readers and slot in self._slots:
                self._slots.remove(slot)
                slot.times[3][:] = slot.times[2][1], time.monotonic()

    def next(self) -> Any:
        return self._filled.popleft() if self._filled else None

    def done(self, slot: Any, total: np.ndarray, sent: int, began: float, ended: float) -> None:
        slot.total, slot.sent, slot.times[1][:] = np.array(total), sent, (began, ended)
        self._change(lambda: setattr(slot, "state", _DONE))

    def fail(self, slot: Any, error: str) -> None:
        slot.error = error
        self._change(lambda: setattr(slot, "state", _FAILED))

    def wait(self, seconds: float) -> bool:
        with self._changed:
            self._wait(lambda: self._news, None if seconds < 0 else seconds)
            news, self._news = self._news, False
            return news

    def wake(self) -> None:
        self._change(lambda: None)

    def hurry(self, change: int) -> int:
        with self._changed:
            self._waiting += change
            if change > 0:
                self.wake()
            return self._waiting

    def problems(self) -> Iterator[str]:
        return iter(())  # callbacks report their errors themselves

    def await_posted(self) -> None:
        def pending() -> list[int]:
            return [x.number for x in self._slots if x.state == _FILLING]

        self._wait(lambda: not pending(), self._patience)
        _check_posted(min(pending(), default=UNCOUNTED - 1), self._patience)

    def await_done(self) -> None:
        for slot in self._slots:
            slot.awaited = 1
        self._wait(lambda: all(x.state != _FILLED for x in self._slots))
        for slot in self._slots:
            if slot.state == _FAILED:
                raise JdasoError(slot.error)

    def in_flight(self) -> list[Any]:
        with self._changed:
            found = [x for x in self._slots if x.state >= _FILLED and x.number != UNCOUNTED]
            return sorted(found, key=lambda x: x.number)

    def release(self, slot: Any) -> None:
        """Does nothing: whoever refers to a slot keeps its memory."""

    def restart(self) -> None:
        self._restarted = True

    def clear(self) -> None:
        with self._changed:
            self._slots = [x for x in self._slots if x.state == _FILLING]
            self._highest = UNCOUNTED

    def close(self) -> None:
        self._change(lambda: setattr(self, "_closed", True))

    def records(self) -> list[ExchangeRecord]:
        return [ExchangeRecord(*first, *map(tuple, times)) for *first, times in self._records]

    def report(self) -> dict[str, float]:
        return _report(self._totals)


def _report(totals: Sequence[float]) -> dict[str, float]:
    names = "exchanges", "bytes_sent", "seconds_blocked", "seconds_in_flight"
    return dict(zip(names, (*map(int, totals[:2]), *totals[2:]), strict=True))


def exchange_name(number: int) -> str:
    return "a consensus" if number == UNCOUNTED else f"exchange {number}"
