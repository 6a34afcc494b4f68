"""Collective calls that the program makes on the host, outside of exchanges."""

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jdaso.cluster.local_devices import devices_are_busy
from jdaso.cluster.topology import Topology
from jdaso.core.caller import caller
from jdaso.core.log import logger
from jdaso.core.tree import host_arrays, named_floats
from jdaso.core.types import JdasoError, PyTree
from jdaso.exchange.transport import collectives
from jdaso.exchange.transport.membership import Membership
from jdaso.exchange.transport.operation import Operation
from jdaso.exchange.transport.progress import Progress
from jdaso.exchange.transport.request import Request, completed

# Calls of ``any_node`` until its answer, which has arrived by then in most cases. One node may be
# this many steps ahead of another.
_ANSWER_AFTER = 4


# In place of a fingerprint.
_TRACED = -1
_DIFFERENT = (
    "in tx.init, the parameters of %s differ from those of %s, so the first exchanges average "
    "unrelated numbers: start all nodes with params = jdaso.broadcast(exchange, params) before "
    "tx.init."
)


def _fingerprint(params: PyTree) -> int:
    """A checksum of the floating-point leaves that this process holds."""
    checksum = 0
    for _, leaf in named_floats(params):
        if not (arrays := host_arrays(leaf)):
            return _TRACED
        for array in arrays:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            checksum = zlib.crc32(data, checksum)
    return checksum


class HostCollectives:
    """Broadcasts, comparisons and queries of all processes that are alive."""

    def __init__(self, membership: Membership, progress: Progress):
        self._membership, self._progress = membership, progress
        self._name = membership.topology.describe(membership.topology.rank)
        self._flags: deque[Request] = deque()

    def topology(self) -> Topology | None:
        """The processes that are alive, the same for all. None if they cannot change."""

        def current() -> Operation:
            yield from ()
            return self._membership.topology

        if not self._membership.shrinks:
            return None
        return self._run(current, "comparisons", "the query of the topology", devices_are_busy)

    def any_node(self, flag: bool) -> bool:
        """Whether any process passed True in the fourth call before this one, if there is one."""
        # Operations that are repeated after a repair must complete in order.
        before = self._flags[-1] if self._flags and self._membership.shrinks else None

        def ask() -> Operation:
            yield from completed(before)
            return (yield from collectives.any_true(self._membership.flags, flag))

        asked = self._membership.repeated(ask, lambda: self._membership.flags, "flags")
        call = self._membership.call("flags")
        description = f"a flag, sent by {self._name},"
        self._flags.append(self._progress.submit(asked, description, call=call))
        if len(self._flags) <= _ANSWER_AFTER:
            return False
        return self._progress.wait(self._flags.popleft(), devices_are_busy)

    def broadcast(self, leaves: Sequence[np.ndarray], root: int) -> list[np.ndarray]:
        """The leaves of node ``root``, as it was numbered at the start.

        If the processes of a node are joined, each receives the shards of its local rank.
        """

        def from_root() -> Operation:
            copies = [np.array(leaf, order="C") for leaf in leaves]
            comm, rank = self._membership.broadcasts, self._current_rank(root)
            if self._membership.topology.joined:  # ``broadcasts`` connects those of one local rank
                rank = root
            yield from collectives.broadcast(comm, copies, rank)
            return copies

        # No ``busy``: outside jit, the comparison before it has waited for the devices. Inside jit,
        # they are busy with this broadcast.
        return self._run(from_root, "broadcasts", caller() or "a broadcast")

    def compare(self, outline: Sequence[str]) -> None:
        """Raises JdasoError, on every node, if the outlines of the nodes' trees differ."""

        def compare() -> Operation:
            describe = self._membership.topology.describe
            return collectives.compare(self._membership.comparisons, outline, describe)

        what = f"the comparison of parameters in {caller() or 'tx.init'}"
        self._run(compare, "comparisons", what, devices_are_busy)

    def warn_if_different(self, params: PyTree) -> None:
        """Logs which processes start with other parameters than those of the first node.

        Nothing is compared if one of them traces its parameters.
        """
        own, membership = np.array([_fingerprint(params)], np.int64), self._membership

        def compare() -> Operation:
            topology = membership.topology
            numbers = yield from collectives.gather(membership.comparisons, own)
            # Each process of a node may hold other shards.
            local = [place.local_rank for place in topology.placements]
            alike = [local.index(each) for each in local]
            differs = np.flatnonzero(numbers != numbers[alike])
            if topology.rank == 0 and differs.size and (numbers != _TRACED).all():
                one, other = alike[differs[0]], int(differs[0])
                logger.warning(_DIFFERENT, *map(topology.describe, (other, one)))

        what = "the comparison of parameters in tx.init"
        self._run(compare, "comparisons", what, devices_are_busy)

    def _current_rank(self, node: int) -> int:
        """The rank of the first process of a node, as it was numbered at the start."""
        initial = self._membership.initial
        first = next(r for r, place in enumerate(initial.placements) if place.node == node)
        for rank, process in enumerate(self._membership.topology.processes):
            if process.rank == initial.processes[first].rank:
                return rank
        raise JdasoError(
            f"broadcast: its root, {initial.describe(first)}, has died. Choose a node that is left."
        )

    def _run(
        self,
        make: Callable[[], Operation],
        series: str,
        what: str,
        busy: Callable[[], bool] | None = None,
    ) -> Any:
        membership = self._membership
        operation = membership.repeated(make, lambda: getattr(membership, series), series)
        description, call = f"{what}, called by {self._name},", membership.call(series)
        request = self._progress.submit(operation, description, call=call)
        return self._progress.wait(request, busy)
