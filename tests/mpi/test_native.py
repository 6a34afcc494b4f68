"""Compiled code: the same bits as host callbacks, and what is said where they cannot be used."""

import os
import shutil
import subprocess
import warnings
from pathlib import Path

import jax
import pytest
from launch import mpiexec, passes

from jdaso.exchange import _native

HERE = Path(__file__).parent / "stand_in"
SOURCES = Path(_native.__file__).parent
FLAGS = ["-std=c++17", f"-I{SOURCES}", f"-I{HERE}", "-isystem", jax.ffi.include_dir()]
# What driver.h says beside cuda.h, where results are of an enumeration.
DECLARED = """
#include <cuda.h>
#include <type_traits>
#include "driver.h"

template <typename T>
using Plain = std::conditional_t<std::is_same_v<T, CUresult>, int, T>;
template <typename... Theirs, typename... Ours>
constexpr bool Alike(CUresult (*)(Theirs...), int (*)(Ours...)) {
  return std::is_same_v<void(Plain<Theirs>...), void(Ours...)>;
}
#define ALIKE(name, arguments) static_assert(Alike(&name, decltype(jdaso::Driver::name)()), #name);
JDASO_DRIVER_FUNCTIONS(ALIKE)
static_assert(jdaso::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(jdaso::kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(jdaso::kHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
"""

needs_library = pytest.mark.skipif(
    _native.why_not() is not None, reason=f"no compiled code: {_native.why_not()}"
)


ALIKE = [
    ("--fragments", 3),
    ("--dtypes", "float32", "bfloat16", "float16"),
    ("--wire", "bfloat16", "--blocking-wire", "float16"),
    ("--wire", "int8", "--blocking-wire", "bfloat16"),
    ("--devices", 2),
    ("--devices", 2, "--fragments", 3),
]
UNOPTIMIZED = "--xla_backend_optimization_level=0"


@needs_library
@pytest.mark.parametrize("options", ALIKE, ids=lambda options: " ".join(map(str, options)))
def test_compiled_code_gives_the_bits_of_host_callbacks(options):
    passes(mpiexec(2, "native.py", *options, XLA_FLAGS=UNOPTIMIZED))


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """The code for CUDA devices with a driver whose copies come late, for a CPU."""
    compiler = shutil.which("g++") or pytest.skip("no g++")
    library = tmp_path_factory.mktemp("stand_in") / "copies.so"
    sources = [SOURCES / "desk.cc", SOURCES / "copies_cuda.cc", HERE / "driver.cc"]
    defines = ["-include", HERE / "stand_in.h", "-DJDASO_STREAM=stand_in::Program"]
    subprocess.run(
        [compiler, *FLAGS, "-shared", "-fPIC", "-pthread", *defines, *sources, "-o", library],
        check=True,
    )
    return library


@needs_library
@pytest.mark.parametrize("options", ALIKE, ids=lambda options: " ".join(map(str, options)))
def test_code_for_cuda_devices_gives_the_bits_of_host_callbacks(stand_in, options):
    passes(mpiexec(2, "native.py", *options, "--stand-in", stand_in, XLA_FLAGS=UNOPTIMIZED))


def test_functions_of_the_driver_are_declared_as_in_cuda(tmp_path):
    root = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if not (Path(root) / "include" / "cuda.h").is_file() or shutil.which("g++") is None:
        pytest.skip(f"no cuda.h in {root} (CUDA_HOME says where), or no g++")
    check = tmp_path / "declared.cc"
    check.write_text(DECLARED)
    subprocess.run(["g++", *FLAGS, f"-I{root}/include", "-fsyntax-only", check], check=True)


def test_without_a_compiled_library_callbacks_serve_and_it_is_said_once(monkeypatch):
    monkeypatch.setattr(_native, "why_not", lambda platform, native: "it was not built")
    _native._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="host callbacks instead of compiled code: it was not"):
        assert not _native.chosen(None, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not _native.chosen(None, "cpu")
    with pytest.raises(ValueError, match=r"native=True: the compiled code cannot be used"):
        _native.chosen(True, "cpu")


@needs_library
def test_compiled_code_serves_cuda_devices_where_it_is_asked_for(monkeypatch, tmp_path):
    _native._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="host callbacks .* with native=True only"):
        assert not _native.chosen(None, "gpu")
    monkeypatch.setattr(_native, "_DRIVER", bytes(tmp_path / "libcuda.so.1"))
    with pytest.raises(
        ValueError, match=r"CUDA driver cannot be used: .*libcuda.so.1: cannot open"
    ):
        _native.chosen(True, "gpu")


def test_compiled_code_is_not_for_other_devices():
    with pytest.raises(ValueError, match="it serves CPU and CUDA devices, not tpu"):
        _native.chosen(True, "tpu")


def test_compiled_code_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(_native, "HEADER_SIZE", _native.HEADER_SIZE + 1)
    assert "belongs to another version of jdaso" in _native._load.__wrapped__()
