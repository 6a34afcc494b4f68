"""``python -IS forked.py PROGRAM ...``: see fork_server.py, which runs the program in a fork."""

import contextlib
import json
import os
import resource
import signal
import socket
import sys

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def forward(number, _):
    with contextlib.suppress(ProcessLookupError):  # its status arrives next
        os.kill(process, number)


def received():
    if not (data := server.recv(4, socket.MSG_WAITALL)):
        sys.exit("the fork server of the tests has ended")
    return int.from_bytes(data, "big")


server = socket.socket(socket.AF_UNIX)
server.connect(f"{os.environ['JDASO_TEST_FORK_SERVERS']}/{int(os.environ['PMI_RANK']) % 2}")
opened = [int(name) for name in os.listdir("/proc/self/fd")]
# Without the descriptors of the list itself, which is closed, and of the server.
opened = [fd for fd in opened if fd != server.fileno() and os.path.exists(f"/proc/self/fd/{fd}")]
ignored = [number for number in FORWARDED if signal.getsignal(number) is signal.SIG_IGN]
request = {
    "arguments": sys.argv[1:],
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "descriptors": opened,
    "ignored": ignored,
}
text = json.dumps(request).encode()
socket.send_fds(server, [len(text).to_bytes(4, "big")], opened)
server.sendall(text)
process = received()
for number in {*FORWARDED} - {*ignored}:
    signal.signal(number, forward)
status = received()
if os.WIFSIGNALED(status):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (number := os.WTERMSIG(status)) != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
os._exit(os.waitstatus_to_exitcode(status))
