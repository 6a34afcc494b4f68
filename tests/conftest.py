"""What all tests share: deterministic examples, and compiled programs that are kept."""

import gc
import itertools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import pytest
from hypothesis import settings

# The same examples in every run: what fails in CI fails everywhere, and because of the change.
settings.register_profile("deterministic", derandomize=True, deadline=None)
settings.load_profile("deterministic")

# Children are programs that tests start under mpiexec; pytest must not import them.
collect_ignore_glob = ["support/*"]

# XLA's older code generator for CPUs compiles the programs of these tests three times faster. Their
# functions are few, so that splitting them between threads costs a third of the compilation.
FAST = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
# Every Python process that a test starts imports sitecustomize.py from this folder.
START = Path(__file__).parent / "support" / "start"
TESTS = Path(__file__).parent
STARTERS = ("slurm", "mpi", "examples", "bench")  # folders of tests that start processes
CACHE = Path(__file__).parents[1] / ".pytest_cache" / "jax"


def pytest_configure(config):
    """Keeps compiled programs, and compiles them without optimizations, in a fraction of the time.

    Programs of this process are kept between runs. Programs of children are kept for this run
    only, because a child that is killed may leave half a file behind. JDASO_TEST_CACHE names a
    folder to keep those as well. ``make test-all`` compiles with optimizations.
    """
    logging.getLogger("jdaso").propagate = True  # to pytest's caplog
    if "JDASO_TEST_OPTIMIZED" not in os.environ:
        jax.config.update("jax_disable_most_optimizations", True)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for children
        if not hasattr(config, "workerinput") and _xla_accepts(FAST):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FAST}".strip()
    jax.config.update("jax_compilation_cache_dir", str(CACHE))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if not hasattr(config, "workerinput"):  # workers of xdist inherit the variables
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [before, str(START)]))
        kept = os.environ.get("JDASO_TEST_CACHE")
        if kept:
            Path(kept).mkdir(parents=True, exist_ok=True)
        folder = kept or tempfile.mkdtemp(prefix="jdaso-tests-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def _xla_accepts(flag):
    """Whether this version of XLA knows a flag. It ends the process if it does not."""
    program = [sys.executable, "-c", "import jax; jax.devices()"]
    environment = {**os.environ, "XLA_FLAGS": flag}
    return subprocess.run(program, env=environment, stderr=subprocess.DEVNULL).returncode == 0


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by markers
def pytest_collection_modifyitems(items):
    """Marks tests that start processes. Their files take turns with the others.

    While jobs of MPI or Slurm wait, tests of one process use the cores. Many jobs at the same time
    would disturb each other.
    """
    folders = {folder: {} for folder in (*STARTERS, None)}
    for item in items:
        parts = item.path.parts[len(TESTS.parts) :] if TESTS in item.path.parents else ()
        folder = parts[0] if parts and parts[0] in STARTERS else None
        if folder:
            item.add_marker("processes")
        folders[folder].setdefault(item.path, []).append(item)
    others = folders.pop(None).values()
    starters = itertools.chain.from_iterable(files.values() for files in folders.values())
    both = itertools.zip_longest(starters, others, fillvalue=())
    items[:] = [test for pair in both for tests in pair for test in tests]


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput") and not os.environ.get("JDASO_TEST_CACHE"):
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


def pytest_collection_finish():
    """Excludes what the imports have created from later searches for cyclic garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def optimized():
    """Compiles with optimizations, for tests of bits that depend on how XLA fuses."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
