"""Compiled code gives the same bits as host callbacks, which replace it on other devices."""

import os
import shutil
import subprocess
import sys
import types
import warnings
from pathlib import Path

import jax
import pytest
from launch import Batch

import jdaso
from jdaso.exchange.host import slots

HERE = Path(__file__).parents[1] / "support" / "cuda_stand_in"
CHILDREN = HERE.parent / "children"
CPU = {"JAX_PLATFORMS": "cpu"}
SOURCES = Path(slots.__file__).parent
FLAGS = ["-std=c++17", f"-I{SOURCES}", f"-I{HERE}", "-isystem", jax.ffi.include_dir()]
# Compares cuda_driver.h with cuda.h, which has enumerations in place of some integers.
DECLARED = """
#include <cuda.h>
#include <type_traits>
#include "cuda_driver.h"

template <typename T>
using Plain = std::conditional_t<std::is_enum_v<T>, int, T>;
template <typename... Theirs, typename... Ours>
constexpr bool Alike(CUresult (*)(Theirs...), int (*)(Ours...)) {
  return std::is_same_v<void(Plain<Theirs>...), void(Ours...)>;
}
#define ALIKE(name, arguments) static_assert(Alike(&name, decltype(jdaso::Driver::name)()), #name);
JDASO_DRIVER_FUNCTIONS(ALIKE)
static_assert(jdaso::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(jdaso::kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(jdaso::kHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(jdaso::kReleaseThreshold == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD);
"""

DTYPES = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32")
MIXED = ("--dtypes", *DTYPES, "int32")
COPIED = ("--dtypes", "bfloat16", "float32")
WITH_64_BITS = ("--x64", *MIXED, "int64")
ONE_DEVICE = {
    "dtypes in fragments": (*MIXED, "--fragments", 3),
    "bfloat16 and float16": ("--wire", "bfloat16", "--blocking-wire", "float16"),
    "dtypes, int8 and bfloat16": (
        *(*MIXED, "--moments", "float16"),
        *("--wire", "int8", "--blocking-wire", "bfloat16"),
    ),
    "diloco": ("--algorithm", "diloco", "--fragments", 2),
}
TWO_DEVICES = {"dtypes in fragments, two devices": ("--devices", 2, *MIXED, "--fragments", 3)}
# Not with the code for CUDA devices, to save time.
ON_CPU = {
    "easgd, int8": ("--algorithm", "easgd", "--wire", "int8"),
    "diloco clipped, float4": ("--algorithm", "diloco clipped", "--wire", "float4"),
    "int64": WITH_64_BITS,
    "int8 and bfloat16": (
        *(*COPIED, "--moments", "float32"),
        *("--wire", "int8", "--blocking-wire", "bfloat16"),
    ),
    "float64 and int8": (*WITH_64_BITS, "float64", "--wire", "int8"),
}
ON_TWO_CPUS = {
    "float64, two devices": ("--devices", 2, *WITH_64_BITS, "float64"),
    "float4 and int8, two devices": (
        *("--devices", 2, *COPIED, "--moments", "bfloat16"),
        *("--wire", "float4", "--blocking-wire", "int8"),
    ),
}


def alike(folder, groups, *more):
    """Jobs that compare compiled code with host callbacks; options -> the job they are in.

    The folder keeps what host callbacks gave.
    """
    more = ("--callbacks", folder, *more)
    jobs = {}
    for group in groups:
        children = {name: ("native.py", *options, *more) for name, options in group.items()}
        job = Batch(2, children)
        jobs |= dict.fromkeys(group, job)
    return jobs


OPTIONS = [*ONE_DEVICE, *TWO_DEVICES]
OPTIONS_ON_CPU = [*OPTIONS, *ON_CPU, *ON_TWO_CPUS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("callbacks")


@pytest.fixture(scope="module")
def jobs(folder):
    return alike(folder, (ONE_DEVICE | ON_CPU, TWO_DEVICES | ON_TWO_CPUS))


@pytest.mark.parametrize("options", OPTIONS_ON_CPU)
def test_compiled_code_gives_the_bits_of_host_callbacks(jobs, options):
    jobs[options].passes(options)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The code for CUDA devices, linked with a simulated driver whose copies are delayed."""
    compiler = shutil.which("g++") or pytest.skip("no g++")
    library = tmp_path_factory.mktemp("stand_in") / "slots_cuda.so"
    sources = [
        *(SOURCES / f"{name}.cc" for name in ("slots", "block_kernels", "slots_cuda")),
        HERE / "driver.cc",
    ]
    defines = ["-include", HERE / "stand_in.h", "-DJDASO_STREAM=stand_in::Program"]
    subprocess.run(
        [compiler, *FLAGS, "-shared", "-fPIC", "-pthread", *defines, *sources, "-o", library],
        check=True,
    )
    return library


@pytest.fixture(scope="module")
def stand_in(folder, library):
    return alike(folder, (ONE_DEVICE, TWO_DEVICES), "--stand-in", library)


@pytest.mark.parametrize("options", OPTIONS)
def test_code_for_cuda_devices_gives_the_bits_of_host_callbacks(stand_in, options):
    stand_in[options].passes(options)


# For each function of the driver that posts and collects call, one of its calls or more.
CALLS = {
    "cuMemAllocAsync": [1],
    "cuMemcpyDtoDAsync_v2": [1, 3, 4],
    "cuMemcpyDtoHAsync_v2": [1, 5, 6],
    "cuMemcpyHtoDAsync_v2": [1, 3],
    "cuMemFreeAsync": [1],
    "cuEventRecord": [1, 2, 3, 4],
    "cuStreamWaitEvent": [1, 2, 3, 4],
    "cuStreamSynchronize": [1, 2],
    "cuLaunchHostFunc": [1, 2, 3],
}


def run_failing(library, devices, *calls):
    command = [sys.executable, CHILDREN / "failing_driver.py", library, devices, *calls]
    return subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=300, env=os.environ | CPU
    )


def test_a_failing_call_of_the_driver_is_an_error_that_names_it(library):
    calls = [f"{name}:{n}" for name, ns in CALLS.items() for n in ns]
    ended = run_failing(library, 1, *calls)
    assert (ended.returncode, ended.stdout) == (0, "ok\n"), ended.stderr


@pytest.mark.parametrize("name", ["cuMemcpyDtoHAsync_v2", "cuEventRecord", "cuMemcpyHtoDAsync_v2"])
def test_with_two_devices_the_progress_thread_gets_the_error(library, name):
    ended = run_failing(library, 2, f"{name}:2")
    assert ended.returncode in (0, 3), ended.stderr
    assert ended.returncode == 0 or f"{name}: refused" in ended.stdout


def test_the_copies_of_the_report_about_gpus_run_with_the_code_for_cuda_devices(library):
    part = [HERE.parents[2] / "bench" / "gpu.py", "--part", "copies", "--megabytes", 1]
    ended = subprocess.run(
        [sys.executable, *map(str, part), "--stand-in", library],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | CPU,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("| the same numbers |") == 3, ended.stdout


def test_functions_of_the_driver_are_declared_as_in_cuda(tmp_path):
    root = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if not (Path(root) / "include" / "cuda.h").is_file() or shutil.which("g++") is None:
        pytest.skip(f"no cuda.h in {root} (CUDA_HOME says where), or no g++")
    check = tmp_path / "declared.cc"
    check.write_text(DECLARED)
    subprocess.run(["g++", *FLAGS, f"-I{root}/include", "-fsyntax-only", check], check=True)


def test_without_a_compiled_library_an_exchange_says_how_to_build_it(monkeypatch):
    monkeypatch.setattr(slots, "_LIBRARY", "jdaso.exchange.host._missing")
    monkeypatch.setattr(slots, "_installed", lambda: iter(()))
    monkeypatch.setattr(slots, "load", slots.load.__wrapped__)
    with pytest.raises(jdaso.JdasoError, match=r"no compiled library.*C\+\+17 compiler"):
        slots.Table()


def test_in_a_clone_the_compiled_library_of_the_installed_jdaso_serves(tmp_path):
    site = tmp_path / "site"
    clone = tmp_path / "clone"
    built = Path(slots.load()._name)
    shutil.copytree(SOURCES.parents[1], clone / "jdaso", ignore=shutil.ignore_patterns("*.so"))
    installed = site / SOURCES.relative_to(SOURCES.parents[2])
    installed.mkdir(parents=True)
    for file in (built, *SOURCES.glob("*.cc"), *SOURCES.glob("*.h")):
        shutil.copy(file, installed)
    record = site / "jdaso-0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: jdaso\nVersion: 0\n")
    name = (installed / built.name).relative_to(site)
    (record / "RECORD").write_text(f"{name},,\n")
    program = "from jdaso.exchange.host import slots; print(slots.load()._name)"

    def run():
        return subprocess.run(
            [sys.executable, "-c", program],
            cwd=clone,
            env={**os.environ, **CPU, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            timeout=120,
        )

    assert run().stdout.split() == [str(installed / built.name)]
    (installed / "slots.h").write_text("// of another version\n")
    assert "was built from another slots.h" in run().stderr


def device(platform):
    return types.SimpleNamespace(platform=platform)


def test_without_a_driver_callbacks_serve_cuda_devices_and_it_is_said_once(monkeypatch, tmp_path):
    monkeypatch.setattr(slots, "_DRIVER", bytes(tmp_path / "libcuda.so.1"))
    slots._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"host callbacks .*libcuda.so.1: cannot open"):
        assert not slots.use_native(None, [device("gpu")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not slots.use_native(None, [device("gpu")])
        assert not slots.use_native(False, [device("gpu")])
    with pytest.raises(ValueError, match=r"native=True: .*CUDA driver cannot be used"):
        slots.use_native(True, [device("gpu")])


def test_compiled_code_is_not_for_other_devices():
    with pytest.raises(ValueError, match="it supports CPU and CUDA devices, not tpu"):
        slots.use_native(True, [device("tpu")])


def test_compiled_code_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(slots, "HEADER_SIZE", slots.HEADER_SIZE + 1)
    with pytest.raises(jdaso.JdasoError, match="belongs to another version of jdaso"):
        slots.load.__wrapped__()
