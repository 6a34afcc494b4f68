"""The examples in the docstrings of modules that other scripts import."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["image_folders", "runs", "small_cnn", "study"])
def test_docstrings(name):
    pytest.importorskip("sklearn")
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0
