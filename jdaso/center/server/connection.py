"""A worker's connection to the server: requests and replies, heartbeats, and the exit."""

import threading
import time
from collections.abc import Sequence

import numpy as np

from jdaso.center.server import frames
from jdaso.center.server.event_loop import SERVER_TAG, reply_tag
from jdaso.center.server.worker_exit import WorkerExit
from jdaso.cluster.mpi_types import Comm
from jdaso.cluster.topology import Topology
from jdaso.core.types import JdasoError
from jdaso.exchange.host.slots import PlainTable, Table
from jdaso.exchange.transport.progress import Operation, Progress, WaitState

_RETRY_SECONDS = 0.1


class Connection:
    """Sends requests to the server. At exit, it waits until all workers have ended.

    Only servers and connections use ``comm``.
    """

    def __init__(
        self,
        topology: Topology,
        comm: Comm,
        timeout: float,
        heartbeat_seconds: float,
        policy: WorkerExit,
        table: Table | PlainTable,
    ):
        self._comm = comm
        self._timeout = timeout
        self._policy = policy
        self._server = topology.describe(frames.SERVER)
        self._requests = 0
        self._ended = threading.Event()
        self.progress = Progress(topology, timeout, self._announce_exit, policy.abort, table)
        self._heartbeats = threading.Thread(
            target=self._send_heartbeats, args=(heartbeat_seconds,), name="jdaso-alive", daemon=True
        )
        self._heartbeats.start()

    def _announce_exit(self, progress: Progress) -> None:
        """Tells the server that this worker exits, and waits until all have ended."""
        while (gone := self._request_end()) is None:
            time.sleep(_RETRY_SECONDS)
        self._ended.set()
        self._heartbeats.join()
        self._policy.finish(gone)

    def _request_end(self) -> list[int] | None:
        """Tells the server that this worker exits.

        Returns:
            None while other workers are active, else the workers that did not end by themselves.
        """
        operation = self.request(frames.END, (), not self._policy.failed(), 0)
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            try:
                next(operation)
            except StopIteration as end:
                return frames.decode(end.value)
            time.sleep(1e-3)
        self._policy.abort(
            f"exit without the center: {self._server} has not replied for {self._timeout:g} s."
        )
        return []

    def request(
        self,
        kind: int,
        parts: Sequence[np.ndarray],
        contributes: bool = True,
        fingerprint: int = 0,
    ) -> Operation:
        """Sends a frame, waits for the reply, and returns the content of the reply.

        JdasoError if the server refuses. Only one thread at a time advances requests.
        """
        from mpi4py import MPI

        self._requests += 1
        tag, status = reply_tag(self._requests), MPI.Status()
        frame = frames.pack(kind, self._requests, parts, contributes, fingerprint)
        sent = self._comm.Isend(frame, dest=frames.SERVER, tag=SERVER_TAG)
        while (message := self._comm.Improbe(frames.SERVER, tag, status)) is None:
            sent.Test()
            yield WaitState(frozenset({frames.SERVER}))
        reply = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        received = message.Irecv(reply)
        while not (received.Test() and sent.Test()):
            yield WaitState(frozenset({frames.SERVER}), progressed=True)
        if (parsed := frames.unpack(reply)).kind == frames.REFUSAL:
            raise JdasoError(frames.decode(parsed.content))
        return parsed.content

    def _send_heartbeats(self, seconds: float) -> None:
        """Sends heartbeats, also while the program computes."""
        frame = frames.pack(frames.ALIVE, 0)
        while not self._ended.wait(seconds):
            sent = self._comm.Isend(frame, dest=frames.SERVER, tag=SERVER_TAG)
            while not (sent.Test() or self._ended.wait(seconds)):
                pass
