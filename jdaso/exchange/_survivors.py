"""Going on without the nodes that have died, by MPI's User-Level Failure Mitigation.

An operation that needs a dead process fails in those that look at it, and nowhere else; so whoever
sees it revokes the communicators, after which it fails everywhere, and all that are left make a
communicator without the dead one. What was under way is done again on that. For this to be the
same on all nodes, an operation has ended only when all have agreed that it has.

References:
    Bland et al., Post-failure recovery of MPI communication capability, International Journal of
    High Performance Computing Applications 27, 2013.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jdaso.exchange._fault_tolerance import is_loss
from jdaso.exchange._messages import Regrouped, Waiting, Waits
from jdaso.topology import Topology

# More agreements than may be under way at once.
_REMEMBERED = 256


class Agreements:
    """Which operations all have agreed to have ended.

    Operations of one line agree over one communicator, one after the other, and so are the same
    ones on all processes. An agreement is the same for all who look at it; but one may have seen
    it when another one, who has agreed as well, finds that a process has died and stops looking.
    So those that are left tell each other what they have seen.
    """

    def __init__(self) -> None:
        self._made: Counter[str] = Counter()
        self._seen: list[tuple[str, int]] = []
        self._kept: list[BaseException] = []

    def share(self, comm: Any) -> None:
        """Tells the others what this process has seen, and hears what they have; collective."""
        self._seen = sorted(set().union(*comm.allgather(self._seen)))

    def lasting(self, make: Callable[[], Waits], comm: Callable[[], Any], line: str) -> Waits:
        """An operation that begins anew when a process has died, until all have ended it.

        Args:
            make: makes the operation, for those that are there then.
            comm: their communicator.
            line: operations with the same one agree over the same communicator.

        Returns:
            The operation's result.
        """
        agreement, result = None, None
        while agreement not in self._seen:
            try:
                result = yield from make()
                agreement = agreement or self._next(line)
                yield from _agree(comm())
                self._seen = [*self._seen[-_REMEMBERED:], agreement]
            except Regrouped as error:
                # Its traceback keeps memory that what comes late may still be written to.
                self._kept.append(error)
            except Exception as error:
                if not is_loss(error):
                    raise
                self._kept.append(error)
                yield from _await_the_others()
        return result

    def _next(self, line: str) -> tuple[str, int]:
        self._made[line] += 1
        return line, self._made[line]


def _await_the_others() -> Waits:
    try:
        while True:
            yield Waiting(frozenset(), lost=True)
    except Regrouped:
        return


def _agree(comm: Any) -> Waits:
    request = comm.Iagree(np.ones(1, np.int32))
    while not request.Test():
        yield Waiting(frozenset(), requests=(request,))


def _all_are(comm: Any, connected: bool) -> bool:
    """The same answer for all who are left, also if one dies meanwhile."""
    try:
        return bool(comm.Agree(int(connected)))
    except Exception as error:
        if not is_loss(error):
            raise
        return False


def _together(
    before: Topology, revoked: list[Any], connect: Callable[[Topology], None]
) -> Topology:
    whole = before.comm
    while True:
        for comm in revoked:
            comm.Revoke()
        whole = whole.Shrink()
        revoked, connected = [whole], False
        try:
            topology = before.within(whole)
            connect(topology)
            connected = True
        except Exception as error:  # one more has died
            if not is_loss(error):
                raise
            whole.Revoke()  # or others would wait for this one
        if _all_are(whole, connected):
            return topology


def regroup(
    before: Topology,
    communicators: Iterable[Any],
    connect: Callable[[Topology], None],
    timeout: float,
) -> None:
    """Brings together those that are left, and says who is not; collective over them.

    Args:
        before: who was there.
        communicators: all that are in use.
        connect: makes new ones among those that are left; collective.
        timeout: seconds after which all end, as one does not come.
    """
    here = before.describe(before.rank)
    late = threading.Timer(
        timeout,
        before.end_all,
        [f"{here} failed: going on without those that have died took more than {timeout:g} s"],
    )
    late.daemon = True
    late.start()
    try:
        topology = _together(before, [*communicators, before.comm], connect)
    finally:
        late.cancel()
    left = {process.rank for process in topology.processes}
    lost = [rank for rank, process in enumerate(before.processes) if process.rank not in left]
    print(
        f"jdaso: {', '.join(map(before.describe, lost)) or 'nobody'} has died; {here} goes on, "
        f"nodes left: {topology.num_nodes}.",
        file=sys.stderr,
        flush=True,
    )
