"""The other processes, as a progress thread sees them: late, exited, or dead."""

import time
from typing import Protocol

from jdaso.cluster.topology import Topology
from jdaso.core.log import logger
from jdaso.core.types import JdasoError
from jdaso.exchange.transport.membership import Membership
from jdaso.exchange.transport.request import Request

_POLL_SECONDS = 0.5


class ExitProtocol(Protocol):
    """Reports which processes have exited, and announces the exit of this one."""

    def exited(self) -> frozenset[int]:
        """The ranks that have exited and whose messages have all arrived."""
        return frozenset()

    def announce_exit(self) -> None:
        """Announces that this process exits, and waits until it may."""


class Peers:
    """The processes of a topology that have not died. Without a recovery, a death is an error."""

    def __init__(
        self, topology: Topology, exit_protocol: ExitProtocol, recovery: Membership | None = None
    ):
        self.topology = topology
        self.recovery = recovery
        #: Ranks that have exited.
        self.exited: frozenset[int] = frozenset()
        self._exit_protocol = exit_protocol
        self._poll_after = 0.0

    @property
    def own_name(self) -> str:
        """Rank and host of this process."""
        return self.topology.describe(self.topology.rank)

    def poll(self) -> bool:
        """Updates ``exited`` twice per second; returns whether a death was found."""
        if time.monotonic() > self._poll_after:
            self._poll_after = time.monotonic() + _POLL_SECONDS
            try:
                self.exited = self._exit_protocol.exited()
            except Exception as error:
                if not self._can_repair(error):
                    raise
                return True
        return False

    def check(self, request: Request, now: float) -> None:
        """Fails a request whose peers have exited or whose deadline has passed. Warns of delays."""
        if request.done.is_set():
            return
        topology, missing = self.topology, request.state.ranks
        if exited := missing & self.exited:
            names = ", ".join(map(topology.describe, sorted(exited)))
            request.fail(
                JdasoError(
                    f"{request.description} cannot complete: {names} exited without taking part. "
                    "All nodes must take the same number of steps."
                )
            )
        elif now > request.deadline:
            request.fail(
                JdasoError(
                    f"{request.description} did not complete within "
                    f"{request.deadline - request.started_at:g} s: nothing came from "
                    f"{topology.states(missing)}. The argument timeout of mpi_exchange and "
                    "mpi_center sets the least time to wait."
                )
            )
        elif now > request.warn_at:
            seconds = now - request.started_at
            request.warn_at = now + seconds
            text = "%s is late, for %.0f s now: it waits for %s."
            logger.warning(text, request.description, seconds, topology.states(missing))

    def repair(self) -> None:
        assert self.recovery is not None
        self.topology, self.exited = self.recovery.repair(), frozenset()

    def announce_exit(self) -> None:
        """Announces this process's exit, again after each repair: the others may need it there."""
        while True:
            try:
                return self._exit_protocol.announce_exit()
            except Exception as error:
                if not self._can_repair(error):
                    raise
                self.repair()

    def _can_repair(self, error: Exception) -> bool:
        return self.recovery is not None and self.recovery.can_repair(error)
