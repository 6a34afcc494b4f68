"""Heartbeats between processes, which tell whether a process is dead, silent, or only slow.

Every process is connected to rank 0 over TCP, see ``links``. A thread sends a heartbeat over each
connection every second. When a process dies, the kernel closes its connection, and rank 0 tells all
others at once; when rank 0 dies, all others notice it themselves. When a process is stopped, or its
host or network link is down, its connection is silent. A process that is only slow still sends
heartbeats. MPI reports none of this, and waits for a dead process forever.

A heartbeat carries a report. Rank 0 says which processes are silent, dead or have exited, asks who
has not posted an operation, and passes the merged answers on. The others ask it and answer it.
"""

import functools
import os
import resource
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from jdaso.cluster.ending import EXIT_NODE_LOST, DeathPolicy
from jdaso.cluster.links import (
    MAX_MESSAGE_BYTES,
    Acceptor,
    JsonSocket,
    addresses,
    connect,
    listen,
    send_all,
)
from jdaso.cluster.mpi_types import Comm
from jdaso.cluster.roll_call import (
    CALL,
    Answer,
    Call,
    RollCall,
    answers_shape,
    decode,
    decode_ranks,
    earliest,
    encode,
    encode_ranks,
    fits,
    merge,
    name_ranks,
    ranks_shape,
)
from jdaso.core.log import logger

BEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0
# A process that has been silent for this long is presumed dead, and the job is aborted.
LOST_SECONDS = 600.0
# For how long a process tries to connect to rank 0.
CONNECT_SECONDS = 20.0
_POLL_SECONDS, _EXIT_POLL_SECONDS = 0.01, 0.001
# Messages that arrive within this time are answered together: rank 0 may hear from thousands.
_TOGETHER_SECONDS = 0.02
_RESTART = "then start the job again from its last checkpoint."
_DIED = f"has died. Look for the cause in its output and in the log of its host, {_RESTART}"
_SILENT = (
    "was silent for {:.0f} s. Check whether it is stopped, or its host or network link is down, "
    f"{_RESTART}"
)
_NO_HEARTBEAT = (
    "no heartbeat from %s: %s could not connect to %s at port %d of %s within %g s. A death may "
    "then be noticed only when an exchange times out. Allow TCP connections between the nodes in "
    "their firewalls."
)


class Report(NamedTuple):
    """What a heartbeat says. Only rank 0 fills the sets of ranks."""

    silent: frozenset[int] = frozenset()
    dead: frozenset[int] = frozenset()
    exited: frozenset[int] = frozenset()
    questions: tuple[Call, ...] = ()
    answers: Mapping[Call, Answer] = MappingProxyType({})

    def encoded(self) -> list[Any]:
        *ranks, questions, answers = self
        return [*map(encode_ranks, ranks), [list(call) for call in questions], encode(answers)]


class Heartbeat:
    """Sends heartbeats from this process and watches those of others, in one thread.

    Args:
        size: The number of processes.
        abort: ``(reason, exit status)``. Called on every process when one has died, was silent for
            ten minutes, or has asked all to abort.
        acceptor: In rank 0, what accepts the others.
        connect: In another process, a function that connects to rank 0, or returns None.
        progress: Lets MPI deliver what it has not sent yet; called while this process waits.

    Attributes:
        describe: Names a rank and its host.
        roll_call: Which processes have posted an operation.
        settled: Set when rank 0 has accepted this process, or cannot be reached.
        unconnected: The ranks that could not connect at the start.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        describe: Callable[[int], str],
        abort: Callable[[str, int], None],
        acceptor: Acceptor | None = None,
        connect: Callable[[], socket.socket | None] = lambda: None,
        progress: Callable[[], object] = lambda: None,
    ):
        self._rank, self._size, self.describe, self._abort = rank, size, describe, abort
        self._acceptor, self._connect, self._progress = acceptor, connect, progress
        ranks = ranks_shape(size)
        self._shape = (ranks, ranks, ranks, [CALL], answers_shape(size))
        self._policies: list[DeathPolicy] = []
        self._peers: dict[int, JsonSocket] = {}
        self._heard: dict[int, Report] = {}  # the last report of each peer
        self._sent: list[Any] = []
        self.unconnected = frozenset[int]()
        # Only the thread changes these sets, each as a whole, so others may read them at any time.
        self._silent = self._dead = self._exited = self._silent_peers = frozenset[int]()
        self._handled = frozenset[int]()  # deaths of which policies have been told
        self._leaving = self._closing = False
        self.settled = threading.Event()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        if acceptor is not None:
            self._selector.register(acceptor, selectors.EVENT_READ)
        self.roll_call = RollCall(rank, self._wake)
        os.register_at_fork(after_in_child=self._close_sockets)
        threading.Thread(target=self._run, name="jdaso-heartbeat", daemon=True).start()

    # ---- What other threads call

    def silent_ranks(self) -> frozenset[int]:
        """Returns the ranks from which nothing was received for ``SILENT_SECONDS``."""
        return self._silent

    def exited_ranks(self) -> frozenset[int]:
        """Returns the ranks that have announced that they exit normally."""
        return self._exited

    def states(self, ranks: frozenset[int]) -> str:
        """Names ranks and their hosts, and says whether each is alive, silent or gone."""
        states = {
            "has died": self._dead,
            "has exited": self._exited,
            "silent: stopped, or its host or link is down": self._silent,
            "unknown: no heartbeat connection leads to it": ranks - self._reachable(),
            "alive: slower, at another step, or busy with something else": ranks,
        }
        texts = []
        for state, members in states.items():
            if group := ranks & members:
                texts.append(f"{name_ranks(group, self.describe)} ({state})")
                ranks -= group
        return "; ".join(texts) or "the other processes"

    def _reachable(self) -> frozenset[int]:
        """Returns the ranks to which connections lead, which need not be alive."""
        if self._rank != 0 and (not self.is_connected() or 0 in self._silent):
            return frozenset({self._rank})
        return frozenset(range(self._size)) - self.unconnected

    def is_connected(self) -> bool:
        """Returns whether this is rank 0, or rank 0 has accepted it and has not said goodbye."""
        peer = self._peers.get(0)
        return self._rank == 0 or (peer is not None and peer.heard and not peer.exiting)

    def broadcast_abort(self, reason: str, status: int, source: int | None = None) -> bool:
        """Asks all other processes but the source of the reason to abort for the same reason.

        Returns whether every one of them is reached.
        """
        others = [peer for peer in list(self._peers.values()) if peer.rank != source]
        send_all(others, "end", reason[-MAX_MESSAGE_BYTES // 16 :], status)
        gone = self._silent | self._dead | self._exited
        return len(self._reachable() - gone) == self._size

    def follow(self, policy: DeathPolicy) -> Callable[[], None]:
        """Lets a policy say which deaths and long silences the job survives.

        Without one, and for a rank that one of several policies needs, all processes abort. So they
        do for rank 0, whatever a policy says. The result is a function that ends this.
        """
        self._policies.append(policy)
        self._handled = frozenset()  # tells again of deaths that were known before
        return functools.partial(self._policies.remove, policy)

    def close(self) -> None:
        """Announces that this process exits normally."""
        self._closing = True
        if self._acceptor is not None:
            self._acceptor.refuse()
        send_all(list(self._peers.values()), "bye")

    def close_at_exit(self) -> None:
        """Announces that this process exits, and waits until all others have announced it as well.

        Rank 0 announces it last, so that it notices a death until then. MPI_Finalize would wait as
        well, but it keeps the interpreter's lock meanwhile, which stops the heartbeats.
        """
        self._leaving = True
        if self._rank != 0:
            self.close()
        peers = list(self._peers.values())
        try:
            # After a death that ends the job, this goes on until the thread ends the process.
            while not all(peer.exiting or peer.rank in self._dead for peer in peers):
                self._progress()
                time.sleep(_EXIT_POLL_SECONDS)
        finally:
            if self._rank == 0:
                self.close()

    def _wake(self) -> None:
        with suppress(OSError):  # it will end anyway, or this process exits
            self._wake_writer.send(b"?")

    def _close_sockets(self) -> None:
        """Closes all sockets, in a forked child."""
        for peer in self._peers.values():
            peer.connection.close()
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None  # for its own children

    # ---- The thread

    def _run(self) -> None:
        self._search()
        next_beat = time.monotonic()
        while self._peers or self._acceptor is not None:
            for peer in self._wait(max(0.0, next_beat - time.monotonic())):
                self._receive(peer)
                if peer.closed:
                    self._disconnected(peer)
            now = time.monotonic()
            if beats := now >= next_beat:
                # If this process itself was paused, it cannot know which peers were silent.
                if now - next_beat > SILENT_SECONDS - BEAT_SECONDS:
                    for peer in self._peers.values():
                        peer.last_received = now
                next_beat = now + BEAT_SECONDS
                self._check_silence(now)
            # Between two beats it says only what is new.
            if (message := self._report().encoded()) != self._sent or beats:
                self._sent = message
                if not self._closing:  # those that have said goodbye wait for that of rank 0
                    send_all(self._peers.values(), "beat", *message)
            self._handle_deaths()
            time.sleep(_TOGETHER_SECONDS)

    def _search(self) -> None:
        if (connection := self._connect()) is not None:
            self._add(JsonSocket(connection, 0))
        else:
            self.settled.set()

    def _add(self, peer: JsonSocket) -> None:
        self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._peers[peer.rank] = peer
        peer.send("bye" if self._closing else "here")  # the first message completes a connection

    def _wait(self, seconds: float) -> list[JsonSocket]:
        """Waits for messages; returns the peers that have sent some. Accepts connections."""

        def allows(rank: int) -> bool:
            gone = self._dead | self._exited | self._peers.keys()
            return 0 < rank < self._size and rank not in gone and not self._closing

        ready = [key for key, _ in self._selector.select(seconds)]
        if any(key.fileobj is self._wake_reader for key in ready):
            self._wake_reader.recv(1024)
        if self._acceptor is not None:
            for rank, connection in self._acceptor.accept(allows).items():
                self._add(JsonSocket(connection, rank))
        return [key.data for key in ready if key.data is not None]

    def _check_silence(self, now: float) -> None:
        """Updates the silent peers, and aborts if one is lost."""
        silent = {
            peer.rank: now - peer.last_received
            for peer in self._peers.values()
            if not peer.exiting and now - peer.last_received > SILENT_SECONDS
        }
        self._silent_peers = frozenset(silent)
        for rank, seconds in silent.items():
            if seconds > LOST_SECONDS and not self._tolerates(rank):
                self._abort_without(rank, _SILENT.format(LOST_SECONDS))

    def _report(self) -> Report:
        """Updates what this process knows of the others, and returns what it has to say."""
        calls = self.roll_call
        asked = list(calls.asked)
        if self._rank != 0:
            # What a silent rank 0 has said before may not hold any more.
            told = Report() if self._silent_peers else self._heard.get(0, Report())
            self._silent = (told.silent | self._silent_peers) - {self._rank}
            self._dead |= told.dead
            self._exited |= told.exited
            calls.answers = told.answers
            answers = {call: calls.answer_to(call) for call in told.questions}
            return Report(questions=tuple(earliest(asked)), answers=answers)
        self._silent = self._silent_peers
        if self._leaving:
            self._exited |= {0}
        reports = self._heard.values()
        questions = earliest([*asked, *(call for each in reports for call in each.questions)])
        calls.answers = {
            call: merge(
                [calls.answer_to(call), *(each.answers.get(call, Answer()) for each in reports)]
            )
            for call in questions
        }
        return Report(self._silent, self._dead, self._exited, tuple(questions), calls.answers)

    def _handle_deaths(self) -> None:
        died, self._handled = self._dead - self._handled, self._dead
        for rank in sorted(died):
            if self._needs(rank):  # not in rank 0, which aborts when it notices the death
                self._abort_without(rank, _DIED)
            for policy in list(self._policies):
                if policy.on_death is not None:
                    policy.on_death(rank)

    def _tolerates(self, rank: int) -> bool:
        handled = any(policy.on_death for policy in list(self._policies))
        return rank != 0 and handled and not self._needs(rank)

    def _needs(self, rank: int) -> bool:
        return any(rank in policy.needed for policy in list(self._policies))

    def _receive(self, peer: JsonSocket) -> None:
        for message in peer.read():
            self.settled.set()
            match message:
                case ["beat", *report] if not peer.exiting and fits(report, self._shape):
                    silent, dead, exited = map(decode_ranks, report[:3])
                    questions = tuple(Call(*call) for call in report[3])
                    said = Report(silent, dead, exited, questions, decode(report[4]))
                    self._heard[peer.rank] = said
                case ["bye"]:
                    peer.exiting = True
                    self._exited |= {peer.rank}
                    self._heard.pop(peer.rank, None)
                case ["end", str(reason), status] if fits(status, range(256)):
                    self._abort_all(reason, status, source=peer.rank)

    def _disconnected(self, peer: JsonSocket) -> None:
        self._selector.unregister(peer.connection)
        del self._peers[peer.rank]
        peer.connection.close()
        self._silent_peers -= {peer.rank}
        self._heard.pop(peer.rank, None)
        if peer.exiting or (self._closing and self._rank == 0):
            return
        if peer.rank == 0 and not peer.heard:
            # It has not accepted the connection, perhaps because it was paused, and is not dead.
            self._search()
        elif self._tolerates(peer.rank):
            self._dead |= {peer.rank}
        else:
            self._abort_without(peer.rank, _DIED)

    def _abort_without(self, rank: int, reason: str) -> None:
        self._abort_all(f"{self.describe(rank)} {reason}", EXIT_NODE_LOST, source=rank)

    def _abort_all(self, reason: str, status: int, source: int) -> None:
        self._progress = lambda: None  # MPI_Abort must not run beside other calls of MPI
        self.broadcast_abort(reason, status, source)
        self._abort(reason, status)


def start_heartbeat(
    comm: Comm, describe: Callable[[int], str], abort: Callable[[str, int], None]
) -> Heartbeat:
    """Connects the processes of a communicator, and starts their heartbeats; collective."""
    rank, size, acceptor = comm.Get_rank(), comm.Get_size(), None
    secret, hosts, port = secrets.token_bytes(), list[str](), 0
    if rank == 0 and (listener := listen()) is not None:
        _allow_connections(size)
        hosts, port = addresses(), listener.getsockname()[1]
        acceptor = Acceptor(listener, secret)
    secret, hosts, port = comm.bcast((secret, hosts, port))

    def search() -> socket.socket | None:
        return connect(hosts, port, secret, rank, CONNECT_SECONDS) if rank and hosts else None

    heartbeat = Heartbeat(rank, size, describe, abort, acceptor, search, comm.Iprobe)
    while not heartbeat.settled.wait(_POLL_SECONDS):
        comm.Iprobe()  # some MPI libraries send only while they are being called
    connects = comm.allgather(heartbeat.is_connected())
    unconnected = frozenset(other for other, found in enumerate(connects) if not found)
    heartbeat.unconnected = unconnected
    if rank == min(unconnected, default=None):
        logger.warning(
            _NO_HEARTBEAT,
            *(name_ranks(unconnected, describe), describe(rank), describe(0), port),
            *(", ".join(hosts) or "no address", CONNECT_SECONDS),
        )
    return heartbeat


def _allow_connections(count: int) -> None:
    """Raises the limit of open files by ``count``, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        wanted = soft + count if hard == resource.RLIM_INFINITY else min(soft + count, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
