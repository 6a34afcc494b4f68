"""Processes of a job compile in turn, so that a program that all of them need is compiled once.

The first process compiles and writes JAX's persistent cache, the others read it. JAX by itself lets
all of them compile at the same time, and a process may read what another has written in part.
Import this module for its effect.
"""

import fcntl
import functools
import os
from pathlib import Path

from jax._src import compiler

_compile = compiler.compile_or_get_cached


@functools.wraps(_compile)
def _in_turn(backend, computation, devices, options, host_callbacks, *more):
    def compiled():
        return _compile(backend, computation, devices, options, host_callbacks, *more)

    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if host_callbacks or not folder:  # JAX does not keep programs with callbacks
        return compiled()
    # Without these variables, the launcher is the parent of all processes on this host.
    job = os.environ.get("JDASO_TEST_JOB") or os.environ.get("SLURM_JOB_ID") or os.getppid()
    with Path(folder, f"lock-{job}").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return compiled()


compiler.compile_or_get_cached = _in_turn
