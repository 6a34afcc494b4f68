"""A worker's side of a center over MPI: its messages, its heartbeats, and its exit."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from jdaso.center import frames
from jdaso.center.frames import SERVER, SERVER_TAG, reply_tag
from jdaso.center.server import exit_without
from jdaso.center.types import reply_header
from jdaso.cluster.ending import on_exception
from jdaso.cluster.mpi_types import Comm
from jdaso.cluster.topology import Topology
from jdaso.core.log import logger
from jdaso.core.types import JdasoError
from jdaso.exchange.host.layout import Memory
from jdaso.exchange.host.program import abort_on_error, report_error
from jdaso.exchange.host.slots import Table
from jdaso.exchange.transport.progress import Operation, Progress, WaitState

_RETRY_SECONDS = 0.1
_POSTED_TWICE = (
    "{} with the center was posted twice in %s: one optimizer state was stepped twice (as "
    "optax.MultiSteps does), or two states share this center. To return to an earlier state, call "
    "tx.init first."
)
_NOT_IN_FLIGHT = (
    "{} with the center is not in flight in %s: the optimizer state is from before a restart, or "
    "was stepped twice. Call jdaso.drain before saving."
)


class Worker:
    """The connection of a worker to the server.

    Programs fill and read the slots of ``table``, as those of an exchange. Each slot is a message
    to the server, and its reply are the sums. Only servers and workers use ``comm``.
    """

    def __init__(self, topology: Topology, comm: Comm, timeout: float, heartbeat_seconds: float):
        self._topology, self._comm, self._timeout = topology, comm, timeout
        self._name = topology.describe(topology.rank)
        self.rule_name = ""  # of the rule that the server must apply
        self.table = Table(_POSTED_TWICE % self._name, _NOT_IN_FLIGHT % self._name)
        self._requests = 0
        self._failed = False  # by an exception
        if topology.rank != SERVER:
            on_exception(self._on_exception)
        _ignore_death_signal()
        self._ended = threading.Event()
        self._progress = Progress(topology, timeout, self._announce_exit, self._abort, self.table)
        self._progress.exchanges = self
        self._heartbeats = threading.Thread(
            target=self._send_heartbeats, args=(heartbeat_seconds,), name="jdaso-alive", daemon=True
        )
        self._heartbeats.start()

    def ask(self, kind: int, content: Any) -> Any:
        """Sends a request other than an exchange, and waits for the content of its reply."""
        operation = self._request(kind, content)
        description = f"a request to the center, sent by {self._name},"
        return self._progress.wait(self._progress.submit(operation, description))

    def take(self, slot: Any) -> None:
        """Starts to send a message that a program has posted; called by the progress thread."""
        number, step, memory = slot.number, slot.step, self.table.memory(slot)
        size = sum(vector.nbytes for vector, _ in memory.pairs)
        text = "%s posted exchange %d with the center after step %d, %d bytes"
        logger.debug(text, self._name, number, step, size)
        description = (
            f"exchange {number} with the center, posted by {self._name} after step {step},"
        )
        operation = self._exchange(memory, slot.header[0] > 0, size)
        self._progress.start(slot, operation, description, measured=True, call=None)

    def log_completed(self) -> None:
        """Nothing is logged of exchanges that programs have collected."""

    def report_error(self, problem: str) -> None:
        """Reports an error of compiled code."""
        report_error(self._topology, self._abort, problem)

    def abort_on_error(self) -> AbstractContextManager[None]:
        """Reports the errors of a block, in a host callback."""
        return abort_on_error(self._topology, self._abort)

    def _exchange(self, memory: Memory, contributes: bool, size: int) -> Operation:
        """Returns the header of the sums, and the bytes sent."""
        message = (self.rule_name, contributes, memory.leaves)
        reply = yield from self._request(frames.EXCHANGE, message)
        for total, leaf in zip(memory.sums, reply, strict=True):
            total[...] = leaf
        return np.array(reply_header(memory.finite()), np.float32), size

    def _request(self, kind: int, content: Any) -> Operation:
        """Sends a frame, waits for the reply, and returns the content of the reply.

        JdasoError if the server refuses. Only one thread at a time advances requests.
        """
        from mpi4py import MPI

        self._requests += 1
        tag, status = reply_tag(self._requests), MPI.Status()
        frame = frames.pack(kind, self._requests, content)
        sent = self._comm.Isend(frame, dest=SERVER, tag=SERVER_TAG)
        while (message := self._comm.Improbe(SERVER, tag, status)) is None:
            sent.Test()
            yield WaitState(frozenset({SERVER}))
        reply = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        received = message.Irecv(reply)
        while not (received.Test() and sent.Test()):
            yield WaitState(frozenset({SERVER}), progressed=True)
        parsed = frames.unpack(reply)
        if parsed.kind == frames.REFUSAL:
            raise JdasoError(parsed.content())
        return parsed.content()

    def _send_heartbeats(self, seconds: float) -> None:
        """Sends heartbeats, also while the program computes."""
        frame = frames.pack(frames.ALIVE, 0)
        while not self._ended.wait(seconds):
            sent = self._comm.Isend(frame, dest=SERVER, tag=SERVER_TAG)
            while not (sent.Test() or self._ended.wait(seconds)):
                pass

    def _abort(self, reason: str) -> None:
        """Ends this worker because it has failed; that of node 0 ends the job."""
        if self._topology.rank == SERVER:
            return self._topology.abort(reason)
        sys.stdout.flush()
        logger.error("%s The others continue.", reason)
        os._exit(1)

    def _on_exception(self, error: BaseException) -> None:
        self._failed = True
        sys.stdout.flush()
        logger.error("%s failed; the others continue.", self._name)

    def _announce_exit(self, progress: Progress) -> None:
        """Tells the server that this worker exits, and waits until all others have ended."""
        while (gone := self._request_end()) is None:
            time.sleep(_RETRY_SECONDS)
        self._ended.set()
        self._heartbeats.join()
        if self._topology.rank != SERVER:  # the server exits last
            exit_without(self._topology, gone, int(self._failed))

    def _request_end(self) -> list[int] | None:
        """The workers that did not end by themselves; None while other workers are active."""
        operation = self._request(frames.END, self._failed)
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            try:
                next(operation)
            except StopIteration as end:
                return end.value
            time.sleep(1e-3)
        self._abort(
            f"exit without the center: {self._topology.describe(SERVER)} has not replied for "
            f"{self._timeout:g} s."
        )
        return []


def _ignore_death_signal() -> None:
    """Ignores SIGUSR1, with which MPICH's launcher reports a death, unless it has a handler."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
