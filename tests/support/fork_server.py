"""Starts Python programs as forks of a process that has imported JAX, jdaso and flax already.

Imports are a quarter of the CPU time of a test suite that starts hundreds of short processes. In
place of ``python PROGRAM``, a launcher starts ``python -IS forked.py PROGRAM``. That small process
stays the one that the launcher knows: it passes its arguments, environment, file descriptors and
ignored signals to the server, forwards the signals it gets, and ends as the fork ends. If it dies,
the server kills the fork.
"""

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import types
import warnings
from pathlib import Path

NAME = "JDASO_TEST_FORK_SERVER"
CLIENT = [sys.executable, "-IS", str(Path(__file__).with_name("forked.py"))]
IMPORTED = ("jdaso", "jdaso.checkpoint", "flax.nnx", "grain")
MOST_DESCRIPTORS = 250  # of one message; descriptors of forks are below this number
# A program gets a process of its own if the test sets one of these, which imports read.
READ_BY_IMPORTS = ("JAX_", "JDASO_", "MPI4PY_", "PYTHON")


def command(env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """What starts a Python program with additional variables, and the variables that this needs."""
    reads = any(name.startswith(READ_BY_IMPORTS) for name in env)
    if reads or "JDASO_TEST_OPTIMIZED" in os.environ or not hasattr(os, "pidfd_open"):
        return [sys.executable], {}
    return CLIENT, {NAME: _start()}


@functools.cache
def _start() -> str:
    """Starts the server of this process, which ends with it; returns the name of its socket."""
    name = f"jdaso-tests-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(100)
        number = listener.fileno()
        server = subprocess.Popen(
            [sys.executable, __file__, str(number)],
            stdin=subprocess.PIPE,  # its end tells the server that this process has ended
            stdout=subprocess.DEVNULL,
            pass_fds=[number],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            start_new_session=True,
        )
    atexit.register(server.communicate)  # closes its standard input, and waits for its end
    return name


def serve(listener: socket.socket) -> dict | None:
    """Forks for each request. It returns the request in a fork, and None at the end."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ, "owner")
    connections: dict[int, socket.socket] = {}  # by process
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                request, descriptors = _receive(connection)
                with warnings.catch_warnings(action="ignore"):
                    process = os.fork()
                if process == 0:
                    for used in (listener, connection, *connections.values()):
                        used.detach()  # its number is closed below, and may be used again
                    selector.close()
                    _take(request, descriptors)
                    return request
                for descriptor in descriptors:
                    os.close(descriptor)
                connections[process] = connection
                _send(connection, process)
                selector.register(os.pidfd_open(process), selectors.EVENT_READ, process)
                selector.register(connection, selectors.EVENT_READ, process)
            elif key.data == "owner":  # has ended
                for process in connections:
                    os.kill(process, signal.SIGKILL)
                return None
            elif key.data not in connections:  # the fork and its client have ended together
                continue
            elif key.fileobj is connections[key.data]:  # the client has died
                selector.unregister(key.fileobj)
                os.kill(key.data, signal.SIGKILL)
            else:
                selector.unregister(key.fd)
                os.close(key.fd)
                with connections.pop(key.data) as connection:
                    if connection in selector.get_map():
                        selector.unregister(connection)
                    _send(connection, os.waitpid(key.data, 0)[1])


def _send(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the client has died
        connection.sendall(number.to_bytes(4, "big"))


def _receive(connection: socket.socket) -> tuple[dict, list[int]]:
    size, descriptors, _, _ = socket.recv_fds(connection, 4, MOST_DESCRIPTORS)
    with connection.makefile("rb") as file:
        return json.loads(file.read(int.from_bytes(size, "big"))), descriptors


def _take(request: dict, descriptors: list[int]) -> None:
    """Makes this fork what the client would have been."""
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, MOST_DESCRIPTORS) for fd in descriptors]
    os.closerange(3, MOST_DESCRIPTORS)
    for fd, number in zip(above, request["descriptors"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        os._exit(0)
    program, *_ = sys.argv = request["arguments"]
    sys.path[0] = str(Path(program).parent)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = program
    exec(compile(Path(program).read_bytes(), program, "exec"), module.__dict__)


if __name__ == "__main__":
    main()
