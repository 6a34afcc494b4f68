"""Builds the extension jdaso.exchange.host._native. All other settings are in pyproject.toml.

If it cannot be compiled, the installation continues, without exchanges over MPI.
"""

from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup

jaxlib = find_spec("jaxlib")
extensions = []
if jaxlib is not None and jaxlib.origin is not None:
    extensions.append(
        Extension(
            "jdaso.exchange.host._native",
            sources=[
                f"jdaso/exchange/host/{name}.cc"
                for name in ("slots", "slots_cuda", "block_kernels")
            ],
            depends=[f"jdaso/exchange/host/{name}.h" for name in ("slots", "cuda_driver")],
            include_dirs=[str(Path(jaxlib.origin).parent / "include")],
            # Without contraction to fused operations, the bits are those of NumPy.
            extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=off"],
            libraries=["dl"],
            language="c++",
            optional=True,
        )
    )
setup(ext_modules=extensions)
