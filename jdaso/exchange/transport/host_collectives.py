"""Collective calls that the program makes on the host, outside of exchanges."""

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jdaso.cluster.local_devices import devices_are_busy
from jdaso.core.caller import caller
from jdaso.core.log import logger
from jdaso.core.tree import host_arrays, named_floats
from jdaso.core.types import PyTree
from jdaso.exchange.transport import collectives
from jdaso.exchange.transport.membership import Membership
from jdaso.exchange.transport.operation import Operation
from jdaso.exchange.transport.progress import Progress
from jdaso.exchange.transport.request import Request

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
    """Broadcasts, comparisons and queries of all processes."""

    def __init__(self, membership: Membership, progress: Progress):
        self._membership, self._progress = membership, progress
        self._name = membership.topology.describe(membership.topology.rank)
        self._flags: deque[Request] = deque()

    def any_node(self, flag: bool) -> bool:
        """Whether any process passed True in the fourth call before this one, if there is one."""
        asked = collectives.any_true(self._membership.flags, flag)
        call = self._membership.call("flags")
        description = f"a flag, sent by {self._name},"
        self._flags.append(self._progress.submit(asked, description, call=call))
        if len(self._flags) <= _ANSWER_AFTER:
            return False
        return self._progress.wait(self._flags.popleft(), devices_are_busy)

    def broadcast(self, leaves: Sequence[np.ndarray], root: int) -> list[np.ndarray]:
        """The leaves of node ``root``.

        Each process receives the shards of its local rank.
        """

        def from_root() -> Operation:
            copies = [np.array(leaf, order="C") for leaf in leaves]
            yield from collectives.broadcast(self._membership.broadcasts, copies, root)
            return copies

        # No ``busy``: outside jit, the comparison before it has waited for the devices. Inside jit,
        # they are busy with this broadcast.
        return self._run(from_root(), "broadcasts", caller() or "a broadcast")

    def compare(self, outline: Sequence[str]) -> None:
        """Raises JdasoError, on every node, if the outlines of the nodes' trees differ."""

        describe = self._membership.topology.describe
        compared = collectives.compare(self._membership.comparisons, outline, describe)
        what = f"the comparison of parameters in {caller() or 'tx.init'}"
        self._run(compared, "comparisons", what, devices_are_busy)

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
        self._run(compare(), "comparisons", what, devices_are_busy)

    def _run(
        self,
        operation: Operation,
        series: str,
        what: str,
        busy: Callable[[], bool] | None = None,
    ) -> Any:
        description = f"{what}, called by {self._name},"
        call = self._membership.call(series)
        request = self._progress.submit(operation, description, call=call)
        return self._progress.wait(request, busy)
