"""The compiled library: whether it can be used, its functions, and sums of blocks by them."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
import pathlib
import warnings
from collections.abc import Mapping

import jax
import numpy as np

from jdaso.core.block_format import format_of, pack, unpack
from jdaso.core.exchange import HEADER_SIZE, ExchangeRecord

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
