"""Runs other child programs one after the other in one job, so that starting costs once.

    batch.py '[["name", "parity.py", ["--chunk-bytes", "16"], false], ...]'

After each child that ends well, its name is printed. The error of a child that raises ends the
job; with a fourth member, true, it is printed, and the next child begins.
"""

import functools
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import compile_in_turn  # noqa: F401
import jax

import jdaso

jdaso.discover_topology = functools.cache(jdaso.discover_topology)


def run(child, arguments):
    sys.argv = [child, *arguments]
    runpy.run_path(str(Path(__file__).with_name(child)), run_name="__main__")


def say(text):
    """Prints a line at once, so that the lines of several processes do not mix."""
    sys.stdout.flush()
    os.write(1, f"\n{text}\n".encode())


def main():
    for name, child, arguments, raises in json.loads(sys.argv[1]):
        x64 = jax.config.jax_enable_x64
        try:
            run(child, arguments)
        except Exception as error:
            if not raises:
                raise
            text = "".join(traceback.format_exception_only(error)).replace("\n", " ")
            say(f"[{name}] raised {text}")
        else:
            say(f"[{name}] passed")
        jax.config.update("jax_enable_x64", x64)


main()
