"""``python -IS forked.py PROGRAM ...``: see fork_server.py, whose server runs the program."""

import json
import os
import resource
import signal
import socket
import sys

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

server = socket.socket(socket.AF_UNIX)
server.connect("\0" + os.environ["JDASO_TEST_FORK_SERVER"])
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
process = int.from_bytes(server.recv(4), "big")
for number in FORWARDED:
    if number not in ignored:
        signal.signal(number, lambda number, _: os.kill(process, number))
status = server.recv(4)
if not status:
    sys.exit("the fork server of the tests has ended")
status = int.from_bytes(status, "big")
if os.WIFSIGNALED(status):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (number := os.WTERMSIG(status)) in FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
os._exit(os.waitstatus_to_exitcode(status))
