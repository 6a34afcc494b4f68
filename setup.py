"""The compiled copies of jdaso/exchange/copies*.cc; all else is in pyproject.toml.

Where they cannot be compiled, installing goes on without them, and exchanges use host callbacks.
"""

from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup

jaxlib = find_spec("jaxlib")
extensions = []
if jaxlib is not None and jaxlib.origin is not None:
    extensions.append(
        Extension(
            "jdaso.exchange._copies",
            sources=[f"jdaso/exchange/{name}.cc" for name in ("desk", "copies", "copies_cuda")],
            depends=["jdaso/exchange/desk.h", "jdaso/exchange/driver.h"],
            include_dirs=[str(Path(jaxlib.origin).parent / "include")],
            extra_compile_args=["-std=c++17", "-O3"],
            libraries=["dl"],
            language="c++",
            optional=True,
        )
    )
setup(ext_modules=extensions)
