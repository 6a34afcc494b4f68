"""Processes that tell each other that they live: whether one is dead, silent, or only slow.

All are connected to the first by a socket, over which a thread sends a beat every second. When a
process dies, however it does, the kernel closes its socket, and all others know at once; that of
a process that is stopped, or whose host or link is gone, stays open and is silent; one that is
slow beats on. MPI itself says none of this: who waits for a dead process waits for ever.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from jdaso._addresses import addresses
from jdaso._line import LONGEST_BYTES, Line
from jdaso._sockets import admit, join, new_secret

#: Exit status where a process has died or was silent for too long: EX_UNAVAILABLE of sysexits.h.
EXIT_NODE_LOST = 69
BEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0
# Whatever waits for a process that is silent for so long, waits in vain.
LOST_SECONDS = 600.0
_CONNECT_SECONDS = 20.0


class Heartbeat:
    """One thread of this process that beats and listens.

    Args:
        rank: of this process.
        lines: to the first process or, in that one, to all others.
        describe: rank -> text, names a rank and its host.
        end: called with a reason and an exit status, on every process, when one has died, was
            silent for ten minutes, or has asked all to end.
        unheard: ranks that have no line.
    """

    def __init__(
        self,
        rank: int,
        lines: Collection[Line],
        describe: Callable[[int], str],
        end: Callable[[str, int], None],
        unheard: frozenset[int] = frozenset(),
    ):
        self._rank = rank
        self._lines = list(lines)
        self._describe, self._end = describe, end
        self._unheard = unheard
        self._died: list[Callable[[int], None]] = []
        self._outlives_silence = False
        self._silent: frozenset[int] = frozenset()
        self._closing = False
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._run, name="jdaso-heartbeat", daemon=True).start()

    def silent(self) -> frozenset[int]:
        """The ranks of which nothing was heard for some seconds."""
        return self._silent

    def states(self, ranks: frozenset[int]) -> str:
        """Names of ranks, and what is known of each."""
        unknown = ranks - {0, self._rank} - self._silent if 0 in self._silent else frozenset()
        groups = {
            "silent: stopped, or its host or link is down": ranks & self._silent,
            "it has no heartbeat here": (ranks & self._unheard) - self._silent - unknown,
            "unknown, as rank 0 is silent and passes nothing on": unknown,
            "alive: slower, at another step, or busy with something else": (
                ranks - self._silent - self._unheard - unknown
            ),
        }
        said = [
            f"{', '.join(map(self._describe, sorted(group)))} ({state})"
            for state, group in groups.items()
            if group
        ]
        return "; ".join(said) or "the other processes"

    def tell(self, reason: str, status: int) -> None:
        """Lets all other processes end, and say why."""
        for line in list(self._lines):
            line.send("end", reason[-LONGEST_BYTES // 16 :], status)

    def outlive(self, died: Callable[[int], None], silence: bool) -> None:
        """From now on one that dies ends no other; in the first process, of all its lines.

        Args:
            died: called with the rank of one that has died.
            silence: whether one that is silent for long ends no other, either.
        """
        self._died.append(died)
        self._outlives_silence |= silence

    def close(self) -> None:
        """Says that this process ends as it should."""
        self._closing = True
        for line in list(self._lines):
            line.send("bye")

    def _forget(self) -> None:
        """In a child that was forked: its parent's sockets must close when its parent dies."""
        for line in self._lines:
            line.connection.close()
        self._lines.clear()

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        for line in self._lines:
            selector.register(line.connection, selectors.EVENT_READ, line)
        next_beat = time.monotonic()
        while self._lines:
            for key, _ in selector.select(max(0.0, next_beat - time.monotonic())):
                self._listen(key.data)
                if key.data.closed:
                    selector.unregister(key.data.connection)
                    self._lost(key.data)
            now = time.monotonic()
            if now >= next_beat:
                # After a pause of its own, a process cannot know who was silent in it.
                if now - next_beat > SILENT_SECONDS - BEAT_SECONDS:
                    for line in self._lines:
                        line.heard = now
                next_beat = now + BEAT_SECONDS
                self._beat(now)

    def _beat(self, now: float) -> None:
        quiet = {
            line.rank for line in self._lines if not line.over and now - line.heard > SILENT_SECONDS
        }
        # What the first one hears it passes on: the others hear only it.
        passed_on = frozenset() if self._rank == 0 else self._silent - {0}
        self._silent = passed_on | quiet
        for line in self._lines:
            lost = line.rank in quiet and now - line.heard > LOST_SECONDS
            if lost and not self._outlives_silence:
                name = self._describe(line.rank)
                reason = f"nothing was heard from {name} for {LOST_SECONDS:.0f} s."
                self._all_end(reason, EXIT_NODE_LOST, but=line)
        for line in list(self._lines):
            line.send("beat", sorted(self._silent) if self._rank == 0 else [])

    def _listen(self, line: Line) -> None:
        for message in line.read():
            match message:
                case ["beat", [*ranks]] if line.rank == 0:
                    self._silent = frozenset(r for r in ranks if isinstance(r, int))
                case ["bye"]:
                    line.over = True
                case ["end", str(reason), int(status)]:
                    self._all_end(reason, status, but=line)

    def _lost(self, line: Line) -> None:
        self._lines.remove(line)
        if line.rank == 0:  # if that is outlived, nothing will be known of anybody
            self._silent = frozenset({0} if self._died else ())
        if not line.over and not self._closing:
            if not self._died:
                self._all_end(f"{self._describe(line.rank)} has died.", EXIT_NODE_LOST, but=line)
            else:
                self._unheard |= {line.rank}
                for died in self._died:
                    died(line.rank)
        line.connection.close()

    def _all_end(self, reason: str, status: int, but: Line) -> None:
        for line in self._lines:
            if line is not but:
                line.send("end", reason, status)
        self._end(reason, status)


def start_heartbeat(
    comm: Any, describe: Callable[[int], str], end: Callable[[str, int], None]
) -> Heartbeat:
    """Connects all processes of an mpi4py communicator, which is not needed afterwards."""
    rank, others = comm.Get_rank(), set(range(1, comm.Get_size()))
    hosts, port, found = ["no address"], 0, {}
    if rank == 0:
        listener = _listener(len(others))
        if listener is None:
            comm.bcast(None)
        else:
            hosts, port, secret = addresses(), listener.getsockname()[1], new_secret()
            comm.bcast((hosts, port, secret))
            # Some MPI libraries send nothing more, what was begun included, unless they are called.
            found = admit(listener, secret, others, _CONNECT_SECONDS, meanwhile=comm.Iprobe)
    elif (offer := comm.bcast(None)) is not None:
        hosts, port, secret = offer
        connection = join(hosts, port, secret, rank, _CONNECT_SECONDS)
        found = {} if connection is None else {0: connection}
    connected = comm.allgather(rank == 0 or bool(found))
    unheard = frozenset(r for r in range(len(connected)) if not (connected[rank] and connected[r]))
    if rank == 0 and unheard:
        print(
            f"jdaso: no heartbeat from {', '.join(map(describe, sorted(unheard)))}: no connection "
            f"to {describe(0)} at port {port} of {', '.join(hosts)}. That they have died is seen "
            "only when an exchange is late. A firewall has to let TCP pass between nodes.",
            file=sys.stderr,
            flush=True,
        )
    lines = [Line(s, r) for r, s in found.items() if rank > 0 or r not in unheard]
    return Heartbeat(rank, lines, describe, end, unheard)


def _listener(connections: int) -> socket.socket | None:
    """A socket to listen at, with descriptors for so many; None where there is no network."""
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        wanted = least + connections
        allowed = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    try:
        return socket.create_server(("", 0), backlog=connections)
    except OSError:
        return None
