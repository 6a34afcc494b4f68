"""Compiled code: the same bits as host callbacks, and what is said where they cannot be used."""

import warnings

import pytest
from launch import mpiexec, passes

from jdaso.exchange import _native

needs_library = pytest.mark.skipif(
    _native.why_not() is not None, reason=f"no compiled code: {_native.why_not()}"
)


@needs_library
@pytest.mark.parametrize(
    "options",
    [
        ("--fragments", 3),
        ("--dtypes", "float32", "bfloat16", "float16"),
        ("--wire", "bfloat16", "--blocking-wire", "float16"),
        ("--wire", "int8", "--blocking-wire", "bfloat16"),
        ("--devices", 2),
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_compiled_code_gives_the_bits_of_host_callbacks(options):
    passes(mpiexec(2, "native.py", *options, XLA_FLAGS="--xla_backend_optimization_level=0"))


def test_without_a_compiled_library_callbacks_serve_and_it_is_said_once(monkeypatch):
    monkeypatch.setattr(_native, "why_not", lambda platform: "it was not built")
    _native._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="host callbacks instead of compiled code: it was not"):
        assert not _native.chosen(None, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not _native.chosen(None, "cpu")
    with pytest.raises(ValueError, match=r"native=True: the compiled code cannot be used"):
        _native.chosen(True, "cpu")


def test_compiled_code_is_not_for_other_devices_than_cpu():
    _native._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="host callbacks .* it serves CPU devices, not gpu"):
        assert not _native.chosen(None, "gpu")
    with pytest.raises(ValueError, match="it serves CPU devices, not gpu"):
        _native.chosen(True, "gpu")


def test_compiled_code_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(_native, "HEADER_SIZE", _native.HEADER_SIZE + 1)
    assert "belongs to another version of jdaso" in _native._load.__wrapped__()
