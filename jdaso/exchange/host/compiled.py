"""The compiled library of an exchange, and whether it can be used."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
import pathlib
import warnings
from collections.abc import Mapping

import jax

from jdaso.core.exchange import HEADER_SIZE

#: The names of its functions in compiled programs.
POST, COLLECT, ORDER = "jdaso_post", "jdaso_collect", "jdaso_order"
_LIBRARY = "jdaso.exchange.host._copies"
_DRIVER = b"libcuda.so.1"


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
        pointer = ctypes.c_void_p
        library.jdaso_next.argtypes = [ctypes.c_int32, pointer]
        library.jdaso_next.restype = pointer
        complete = library.jdaso_complete
        integer = ctypes.c_int32
        complete.argtypes = [integer, pointer, ctypes.c_char_p, pointer, integer, pointer]
        complete.restype = None
        size = ctypes.c_size_t
        library.jdaso_sum_blocks.argtypes = [integer, pointer, size, size, pointer, pointer]
        library.jdaso_unpack_blocks.argtypes = [integer, pointer, size, pointer]
        for function in (library.jdaso_sum_blocks, library.jdaso_unpack_blocks):
            function.restype = None
        library.jdaso_driver.restype = ctypes.c_char_p
        library.jdaso_pin.argtypes = [pointer, size]
        library.jdaso_pin.restype = ctypes.c_bool
        library.jdaso_unpin.argtypes = [pointer]
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


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"parameters are copied by host callbacks instead of compiled code: {reason}. Results are "
        "the same, but exchanges take more time.",
        stacklevel=4,
    )
