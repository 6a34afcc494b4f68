"""Waiting for all processes outside of training: never in silence, and never without end."""

from __future__ import annotations

import sys
import time

from jdaso._base import JdasoError
from jdaso.topology import Topology

LONGEST_SECONDS = 1800.0  # reading a checkpoint may take one node long
_WARNING_SECONDS, _PAUSE_SECONDS = 30.0, 1e-3


def meet(topology: Topology, what: str, timeout: float = LONGEST_SECONDS) -> None:
    """Waits until all processes have come here; after that, collective calls do not wait.

    Args:
        topology: who the others are.
        what: for which they come.
        timeout: seconds to wait.

    Raises:
        JdasoError: if one has not come by then.
    """
    if topology.comm is None:
        return
    others = frozenset(range(len(topology.processes))) - {topology.rank}
    here, begun = topology.comm.Ibarrier(), time.monotonic()
    warn_at = min(_WARNING_SECONDS, timeout / 2)
    while not here.Test():
        seconds = time.monotonic() - begun
        if seconds > timeout:
            raise JdasoError(
                f"{topology.describe(topology.rank)} has waited {timeout:g} s for all others at "
                f"{what}: {topology.states(others)}. All processes must come there, also those "
                "that find nothing to do."
            )
        if seconds > warn_at:
            warn_at *= 2
            print(
                f"jdaso: {topology.describe(topology.rank)} waits for all others at {what}, for "
                f"{seconds:.0f} s now: {topology.states(others)}",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(_PAUSE_SECONDS)
