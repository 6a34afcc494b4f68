"""What is left to the end of a process is done once, by this process."""

import atexit
import os

from jdaso._at_exit import at_exit


def test_a_fork_does_nothing(monkeypatch):
    done, registered = [], []
    monkeypatch.setattr(atexit, "register", registered.append)
    at_exit(done.append, 1)
    (function,) = registered
    function()
    assert done == [1]
    monkeypatch.setattr(os, "getpid", lambda: -1)
    function()
    assert done == [1]
