"""Starts Python programs as forks of a process that has imported JAX, jdaso and others already.

Imports are a quarter of the CPU time of a test suite that starts hundreds of short processes. In
place of ``python PROGRAM``, a launcher starts ``python -IS forked.py PROGRAM``. That small process
stays the one that the launcher knows: it passes its arguments, environment, file descriptors and
ignored signals to the server, forwards the signals it gets, and ends as the fork ends. If it dies,
the server kills the fork.

There are two servers, for even and odd ranks, so that the processes of a job differ in the order of
their sets and in the addresses of their memory, as they do in production.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path

FOLDER = "JDASO_TEST_FORK_SERVERS"  # variable with the folder of the servers' sockets
SERVERS = 2
CLIENT = [sys.executable, "-IS", str(Path(__file__).with_name("forked.py"))]
IMPORTED = (
    *("jdaso", "jdaso.checkpoint", "flax.nnx", "grain"),
    *("matplotlib.backends.backend_agg", "sklearn.datasets", "sklearn.model_selection"),
)
MOST_DESCRIPTORS = 250  # of one message; descriptors of forks are below this number
_REQUEST_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1
# A program gets a process of its own if the test sets one of these, which imports read.
READ_BY_IMPORTS = ("JAX_", "JDASO_", "MPI4PY_", "MPL", "PYTHON")


def command(env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Returns the command that starts a Python program, and the variables that it needs.

    ``env`` has the variables that a test adds to those of this process.
    """
    reads = any(name.startswith(READ_BY_IMPORTS) for name in env)
    if reads or "JDASO_TEST_OPTIMIZED" in os.environ or not _has_pidfds():
        return [sys.executable], {}
    return CLIENT, {FOLDER: _start()}


@functools.cache
def _has_pidfds() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # of Linux before 5.3, and of some sandboxes
        return False
    return True


@functools.cache
def _start() -> str:
    """Starts the servers of this process, which end with it; returns their sockets' folder."""
    folder = tempfile.mkdtemp(prefix="jdaso-tests-")  # which other users cannot enter
    for index in range(SERVERS):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/{index}")
            listener.listen(100)
            server = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno())],
                stdin=subprocess.PIPE,  # its end tells the server that this process has ended
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": str(1 + index)},
                start_new_session=True,
            )
        atexit.register(server.communicate)  # closes its standard input, and waits for its end
    return folder


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
                received = _receive(connection)
                if received is None:
                    connection.close()
                    continue
                request, descriptors = received
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
            elif key.data == "owner":  # has ended, and the forks end with this process
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


def _receive(connection: socket.socket) -> tuple[dict, list[int]] | None:
    """Returns a request and its descriptors, or None if the client died before it sent them."""
    connection.settimeout(_REQUEST_SECONDS)
    descriptors: list[int] = []
    try:
        size, descriptors, _, _ = socket.recv_fds(connection, 4, MOST_DESCRIPTORS)
        with connection.makefile("rb") as file:
            return json.loads(file.read(int.from_bytes(size, "big"))), descriptors
    except (OSError, ValueError):
        for descriptor in descriptors:
            os.close(descriptor)
        return None


def _take(request: dict, descriptors: list[int]) -> None:
    """Gives this fork the descriptors, ignored signals, environment and folder of the client."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # when the server dies
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
    listener = socket.socket(fileno=int(sys.argv[1]))
    folder = Path(listener.getsockname()).parent
    request = serve(listener)
    if request is None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
    program, *_ = sys.argv = request["arguments"]
    sys.path[0] = str(Path(program).parent)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = program
    exec(compile(Path(program).read_bytes(), program, "exec"), module.__dict__)


if __name__ == "__main__":
    main()
