"""A barrier for use outside of training. It has a timeout, which MPI collectives lack."""

import time

from jdaso.cluster.topology import Topology
from jdaso.core.log import logger
from jdaso.core.types import JdasoError

TIMEOUT_SECONDS = 1800.0  # one node may take long to read a checkpoint
_WARNING_SECONDS, _POLL_SECONDS = 30.0, 1e-3


def barrier(topology: Topology, what: str, timeout: float = TIMEOUT_SECONDS) -> None:
    """Waits until all processes have called it, so that a collective that follows does not wait.

    If one has not called it within ``timeout`` seconds, it raises JdasoError. Messages quote
    ``what``, the purpose of the barrier.
    """
    if topology.comm is None:
        return
    here = topology.describe(topology.rank)
    others = frozenset(range(len(topology.processes))) - {topology.rank}
    request, start = topology.comm.Ibarrier(), time.monotonic()
    warn_at = min(_WARNING_SECONDS, timeout / 2)
    while not request.Test():
        seconds = time.monotonic() - start
        if seconds > timeout:
            raise JdasoError(
                f"{here} has waited {timeout:g} s for all other processes at the barrier for "
                f"{what}: {topology.states(others)}. Every process must reach this barrier, even "
                "if it has nothing to do there. Make sure that all of them make the same calls."
            )
        if seconds > warn_at:
            warn_at *= 2
            logger.warning(
                "%s has been waiting for all other processes at the barrier for %s, for %.0f s: %s",
                *(here, what, seconds, topology.states(others)),
            )
        time.sleep(_POLL_SECONDS)
