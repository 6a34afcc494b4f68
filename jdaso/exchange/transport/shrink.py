"""Continues without the nodes that have died, by MPI's User-Level Failure Mitigation.

An operation that needs a dead process fails only in the processes that poll it. Such a process
revokes all communicators, after which every operation fails everywhere. The remaining processes
create a communicator without the dead ones and repeat what has not completed. All of them must
agree on that, so an operation is complete only when all have agreed that it is.

References:
    Bland et al., Post-failure recovery of MPI communication capability, International Journal of
    High Performance Computing Applications 27, 2013.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from jdaso.cluster.mpi_types import Comm
from jdaso.cluster.ranks import name_ranks
from jdaso.cluster.topology import Topology
from jdaso.core.log import logger
from jdaso.exchange.transport.operation import Operation, Repaired, WaitState, wait_for
from jdaso.exchange.transport.ulfm import is_process_failure

# More operations than may be in progress at a time.
_REMEMBERED = 256


class CompletionLog:
    """Records which operations all processes have agreed to be complete.

    Operations of one queue agree over one communicator in order, and thus have the same number on
    all processes. An agreement has the same result on all processes, but some may stop polling it
    before they see the result, because a process has died. The processes therefore share their
    logs after a repair.
    """

    def __init__(self) -> None:
        self._started: Counter[str] = Counter()
        self._complete: list[tuple[str, int]] = []
        self._kept: list[BaseException] = []

    def share(self, comm: Comm) -> None:
        """Merges the logs of all processes; collective."""
        self._complete = sorted(set().union(*comm.allgather(self._complete)))

    def until_complete(
        self, make: Callable[[], Operation], comm: Callable[[], Comm | None], queue: str
    ) -> Operation:
        """Repeats an operation after each repair until all processes have completed it.

        ``make`` creates the operation for the processes that are alive, ``comm`` returns their
        communicator. Operations of one ``queue`` agree over the same communicator.
        """
        entry = result = None
        while entry not in self._complete:
            try:
                result = yield from make()
                entry = entry or self._next(queue)
                yield from _agree(comm())
                self._complete = [*self._complete[-_REMEMBERED:], entry]
            except Repaired as error:
                # Its traceback keeps buffers alive that late messages may still be written to.
                self._kept.append(error)
            except Exception as error:
                if not is_process_failure(error):
                    raise
                self._kept.append(error)
                yield from _wait_for_repair()
        return result

    def _next(self, queue: str) -> tuple[str, int]:
        self._started[queue] += 1
        return queue, self._started[queue]


class RepairWatchdog:
    """Aborts the job if a repair takes more than ``timeout`` seconds.

    Its thread starts here, because the interpreter starts none at exit, when a process may die.
    """

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._changed = threading.Condition()
        self._repaired: Topology | None = None
        threading.Thread(target=self._run, name="jdaso-repair", daemon=True).start()

    @contextlib.contextmanager
    def watch(self, before: Topology) -> Iterator[None]:
        """Aborts the job if the body of the ``with`` statement takes longer than ``timeout``.

        ``before`` names this process in the error.
        """
        self._set(before)
        try:
            yield
        finally:
            self._set(None)

    def _set(self, repaired: Topology | None) -> None:
        with self._changed:
            self._repaired = repaired
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            ended = True
            while ended:
                self._changed.wait_for(lambda: self._repaired is not None)
                ended = self._changed.wait_for(lambda: self._repaired is None, self._timeout)
            before = self._repaired
        assert before is not None
        before.abort(
            f"{before.describe(before.rank)} failed: the repair after the death of a process took "
            f"more than {self._timeout:g} s"
        )


def _wait_for_repair() -> Operation:
    try:
        while True:
            yield WaitState(needs_repair=True)
    except Repaired:
        return


def _agree(comm: Comm | None) -> Operation:
    assert comm is not None  # as there is one process per node
    request = comm.Iagree(np.ones(1, np.int32))
    yield from wait_for([request])


def repair(
    before: Topology,
    communicators: Iterable[Comm],
    connect: Callable[[Topology], None],
    watchdog: RepairWatchdog,
) -> None:
    """Connects the remaining processes, and logs which have died; collective over the remaining.

    It revokes ``communicators``, which are in use. ``connect`` creates new ones, collectively.
    """
    assert before.comm is not None
    own = before.describe(before.rank)
    with watchdog.watch(before):
        topology = _connect_remaining(before, before.comm, [*communicators, before.comm], connect)
    remaining = {process.rank for process in topology.processes}
    lost = [rank for rank, process in enumerate(before.processes) if process.rank not in remaining]
    dead = name_ranks(lost, before.describe) or "nobody"
    logger.warning("%s has died; %s continues, nodes left: %d.", dead, own, topology.num_nodes)


def _connect_remaining(
    before: Topology, comm: Comm, revoked: list[Comm], connect: Callable[[Topology], None]
) -> Topology:
    while True:
        for used in revoked:
            used.Revoke()
        comm = comm.Shrink()
        revoked, connected = [comm], False
        try:
            topology = before.restricted_to(comm.allgather(before.rank), comm)
            connect(topology)
            connected = True
        except Exception as error:  # another process has died
            # Topology raises the errors of Dup and Split as the cause of a JdasoError.
            if not is_process_failure(error.__cause__ or error):
                raise
            comm.Revoke()  # or the other processes would wait for this one
        if _all_connected(comm, connected):
            return topology


def _all_connected(comm: Comm, connected: bool) -> bool:
    """Whether all processes are connected: the same answer for all, even if one dies meanwhile."""
    try:
        return bool(comm.Agree(int(connected)))
    except Exception as error:
        if not is_process_failure(error):
            raise
        return False
