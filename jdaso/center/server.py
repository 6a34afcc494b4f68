"""The server of a center: its state machine, which workers live, and the loop that serves them.

The state machine handles the frames of workers in the order of their arrival, without a network. An
invalid frame is refused and does not affect other workers.
"""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from typing import Any

import jax
import numpy as np

from jdaso.center import frames
from jdaso.center.frames import SERVER, SERVER_TAG, Frame, reply_tag
from jdaso.center.types import CenterState, ServerRule
from jdaso.cluster.mpi_types import Comm, MpiRequest
from jdaso.cluster.topology import Topology
from jdaso.core.log import logger
from jdaso.exchange.transport.collectives import check_alike
from jdaso.exchange.transport.progress import Operation, Progress, WaitState

_LIVENESS_SECONDS = 0.2
_LAST_REPLIES_SECONDS = 5.0  # the longest wait for them
# Frames to send, each with its receiver.
Replies = list[tuple[int, np.ndarray]]
# Called with a worker and its message.
Record = Callable[[int, list[np.ndarray]], None]


class CenterServer:
    """The state machine: the state of the center, and that of each worker.

    Times are those of any clock.

    Args:
        describe: Names a worker in messages.
        record: ``(worker, message)``, called in order for each message that the rule has applied.
        gone_after: Seconds of silence after which a worker counts as gone.
        now: Time at which the workers start.

    Attributes:
        exchanges: The number of exchanges of each worker.
        ended: Workers that have ended by themselves.
        failed: Those of them that have ended by an exception.
        gone: Workers that have died or are silent.
    """

    def __init__(
        self,
        num_workers: int,
        describe: Callable[[int], str],
        record: Record | None = None,
        gone_after: float = math.inf,
        now: float = 0.0,
    ):
        self.rule: ServerRule | None = None
        self.exchanges = dict.fromkeys(range(num_workers), 0)
        self.ended: set[int] = set()
        self.failed: set[int] = set()
        self.gone: set[int] = set()
        self.died: set[int] = set()  # any thread may add to it
        self._notified: set[int] = set()  # that have ended and know who is gone
        self._last_message = dict.fromkeys(range(num_workers), now)
        self._describe, self._record, self._gone_after = describe, record, gone_after
        self._state: CenterState | None = None
        self._outline: list[str] = []
        # Requests to join that arrived before that of node 0.
        self._early_joins: list[tuple[int, Frame]] = []

    def receive(self, worker: int, message: np.ndarray, now: float) -> Replies:
        """Handles a message, and returns the replies to send."""
        self._last_message[worker] = now
        try:
            frame = frames.unpack(message)
            if frame.kind == frames.END:
                return self._end(worker, frame)
        except ValueError as error:  # the request to refuse is unknown
            logger.warning("center: what rank %d sent is ignored: %s", worker, error)
            return []
        return [] if frame.kind == frames.ALIVE else self.handle(worker, frame)

    def update(self, now: float) -> None:
        """Updates which workers are gone."""
        for worker in sorted(self._last_message.keys() - self.ended):
            died, silent = worker in self.died, now - self._last_message[worker] > self._gone_after
            if (died or silent) and worker not in self.gone:
                self.gone.add(worker)
                how = "died" if died else f"been silent for {self._gone_after:g} s"
                logger.warning(
                    "center: %s has %s; the others continue", self._describe(worker), how
                )
            elif not (died or silent) and worker in self.gone:
                self.gone.remove(worker)
                logger.warning("center: %s is back", self._describe(worker))

    def active(self) -> set[int]:
        """The workers that have neither ended nor gone."""
        return self._last_message.keys() - self.ended - self.gone

    def may_exit(self) -> bool:
        """Whether no worker is active, and those that have ended know it."""
        return not self.active() and self._notified >= self.ended

    def report(self) -> dict[str, Any]:
        """As ``report`` of :class:`jdaso.center.Center`."""
        return {
            "workers": dict(self.exchanges),
            "ended": sorted(self.ended - self.failed),
            "failed": sorted(self.failed),
            "gone": sorted(self.gone),
        }

    def _end(self, worker: int, frame: Frame) -> Replies:
        """Replies with the workers that are gone, or with None while others are active.

        A worker that ends repeats its request until no worker is active. It must know who is gone,
        because MPI cannot be finalized without them.
        """
        if frame.content():
            self.failed.add(worker)
        self.ended.add(worker)
        self.gone.discard(worker)
        if self.active():
            return [(worker, _reply(frame, None))]
        self._notified.add(worker)
        return [(worker, _reply(frame, sorted(self.gone)))]

    def handle(self, worker: int, frame: Frame) -> Replies:
        """Executes or refuses a request, and returns the replies to send."""
        try:
            if frame.kind == frames.JOIN:
                return self._join(worker, frame)
            if self._state is None or self.rule is None:
                raise ValueError("there is no center yet; call center.join(params) first.")
            content: Any = None
            if frame.kind == frames.EXCHANGE:
                content = self._exchange(worker, frame, self._state, self.rule)
            elif frame.kind == frames.READ:
                self._check_outline(worker, frame.content())
                content = self._state
            elif frame.kind == frames.WRITE:
                self._state = _checked(frames.to_state(frame.content()), self._state)
            else:
                raise ValueError(f"the message is of the unknown kind {frame.kind}.")
            return [(worker, _reply(frame, content))]
        except Exception as error:
            text = f"the center refuses a message of {self._describe(worker)}: {error}"
            return [(worker, frames.pack(frames.REFUSAL, frame.request, text))]

    def _exchange(
        self, worker: int, frame: Frame, state: CenterState, rule: ServerRule
    ) -> list[np.ndarray]:
        rule_name, contributes, message = frame.content()
        required = [rule.name, *(f"{x.dtype}{x.shape}" for x in state.center)]
        given = [rule_name, *(f"{x.dtype}{x.shape}" for x in message)]
        for ours, theirs in zip_longest(required, given, fillvalue="no such leaf"):
            if ours != theirs:
                raise ValueError(
                    f"rule or shapes are not those of the center: it has {ours}, got {theirs}. Use "
                    "the same model and the same arguments on all workers."
                )
        reply = state.center
        if contributes:
            if lost := self._not_finite(message):
                raise ValueError(
                    f"it has numbers that are not finite, in {lost}. It was ignored: lower the "
                    "learning rate."
                )
            with np.errstate(over="ignore", invalid="ignore"):
                updated, reply = rule.update(state, message)
            if lost := self._not_finite(updated.center):
                raise ValueError(
                    f"the center would overflow with this worker's message, in {lost}. The message "
                    "was ignored: lower the learning rate or alpha."
                )
            if self._record is not None:
                self._record(worker, message)
            self._state = updated
        self.exchanges[worker] += 1
        return reply

    def _join(self, worker: int, frame: Frame) -> Replies:
        """Replies with the current center, also to workers that asked before it was created."""
        rule_name, outline, leaves, saved = frame.content()
        if self.rule is not None and rule_name != self.rule.name:
            raise ValueError(
                f"its rule is '{rule_name}', that of the center is '{self.rule.name}'. Use the "
                "same algorithm with the same arguments on all workers."
            )
        state = self._state
        if state is None:
            if leaves is None or worker != SERVER:
                self._early_joins.append((worker, frame))
                return []
            assert self.rule is not None  # the request is from the process of the server
            self._outline, state = outline, self.rule.init(leaves)
        self._state = state if saved is None else _checked(frames.to_state(saved), state)
        self._check_outline(worker, outline)
        replies = [(worker, _reply(frame, self._state.center))]
        early, self._early_joins = self._early_joins, []
        for other, request in early:
            replies += self.handle(other, request)
        return replies

    def _not_finite(self, leaves: Sequence[np.ndarray]) -> str:
        """The names of the leaves that are not finite, or ""."""
        texts = (text.rpartition(": ") for text in self._outline)
        names = [name for name, _, dtype in texts if "float" in dtype]
        lost = [i for i, leaf in enumerate(leaves) if not np.isfinite(leaf).all()]
        return ", ".join(names[i] for i in lost[:4])

    def _check_outline(self, worker: int, outline: list[str]) -> None:
        check_alike([self._outline, outline], lambda index: self._describe((0, worker)[index]))


def _reply(frame: Frame, content: Any) -> np.ndarray:
    return frames.pack(frames.REPLY, frame.request, content)


def _checked(new: CenterState, old: CenterState) -> CenterState:
    """The new state; raises ValueError unless it is finite and has the old shapes and dtypes."""

    def named(state: CenterState) -> dict[str, np.ndarray]:
        leaves = jax.tree_util.tree_leaves_with_path(state)
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}

    given, required = (
        [(name, x.shape, x.dtype.name) for name, x in named(state).items()] for state in (new, old)
    )
    if given != required:
        raise ValueError(
            f"the saved state must have the shapes and dtypes of the center, {required}, got "
            f"{given}. Pass what center.read returned for the same model."
        )
    lost = [name for name, x in named(new).items() if not np.isfinite(x).all()]
    if lost or new.clock < 0:
        raise ValueError(
            f"the saved state must be finite, and its clock at least 0, got clock {new.clock}"
            f"{' and not finite ' * bool(lost)}{', '.join(lost[:4])}."
        )
    return new


def start_server(
    topology: Topology, comm: Comm, gone_after: float, record: Record | None
) -> CenterServer:
    """Starts the thread of the server, which ends after all workers."""
    workers, now = topology.num_nodes, time.monotonic()
    server = CenterServer(workers, topology.describe, record, gone_after, now)

    def operation() -> Operation:
        try:
            yield from serve(comm, server)
        except Exception as error:
            # Otherwise the workers would wait for the server.
            topology.abort(f"the center failed: {type(error).__name__}: {error}")
            raise

    progress = Progress(
        topology, math.inf, lambda _: exit_without(topology, server.gone, 0), topology.abort
    )
    progress.submit(operation(), "the center")
    return server


def exit_without(topology: Topology, gone: Collection[int], status: int) -> None:
    """Exits without finalizing MPI if workers are gone, because MPI would wait for them."""
    if gone:
        if topology.heartbeat is not None:
            topology.heartbeat.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve(comm: Comm, server: CenterServer) -> Operation:
    """Serves until all workers have ended or are gone."""
    from mpi4py import MPI

    def transferred(request: MpiRequest) -> bool | None:
        """Whether a message has been transferred; None if the worker has died."""
        try:
            return bool(request.Test())
        except MPI.Exception:
            return None

    # Messages under way, each with the worker that sends or receives it.
    receiving: list[tuple[int, np.ndarray, MpiRequest]] = []
    sending: list[tuple[int, np.ndarray, MpiRequest]] = []
    status, next_update, deadline = MPI.Status(), 0.0, math.inf
    while True:
        sending = [entry for entry in sending if transferred(entry[2]) is False]
        if all(worker in server.gone for worker, _, _ in sending) and server.may_exit():
            return
        now = time.monotonic()
        while (message := comm.Improbe(MPI.ANY_SOURCE, SERVER_TAG, status)) is not None:
            buffer = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            receiving.append((status.Get_source(), buffer, message.Irecv(buffer)))
        tested = [(entry, transferred(entry[2])) for entry in receiving]
        receiving = [entry for entry, done in tested if done is False]
        complete = [entry for entry, done in tested if done]
        for worker, frame, _ in complete:
            for receiver, reply in server.receive(worker, frame, now):
                tag = reply_tag(frames.unpack(reply).request)
                with contextlib.suppress(MPI.Exception):  # the worker has died
                    sending.append((receiver, reply, comm.Isend(reply, dest=receiver, tag=tag)))
        if now > next_update:
            next_update = now + _LIVENESS_SECONDS
            server.update(now)
            deadline = math.inf if server.active() else min(deadline, now + _LAST_REPLIES_SECONDS)
        if now > deadline:  # a worker that had ended died before it was notified
            return
        yield WaitState(progressed=bool(complete))
