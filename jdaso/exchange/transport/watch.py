"""Notices trainings that gain nothing from their exchanges, from what all nodes have sent."""

import zlib

import numpy as np

from jdaso.cluster.topology import Topology
from jdaso.core.exchange import UNCOUNTED
from jdaso.core.log import logger
from jdaso.core.tree import KEEP_OUT
from jdaso.core.types import JdasoError
from jdaso.core.wire import describe_narrow_wires
from jdaso.exchange.host.layout import Layout, Memory, sender

# Exchanges in a row that bring nothing, after which it is an error.
_IN_VAIN = 10
# The first exchanges, whose parameters are compared.
_COMPARED = 8


class Watch:
    """What the exchanges of one optimizer state have shown. All nodes come to the same results.

    If ``gradients`` are exchanged, all nodes may well skip steps together, as loss scaling does,
    and their parameters are equal.
    """

    def __init__(self, gradients: bool = False):
        self._gradients = gradients
        self._in_vain = 0
        self._overflows = 0
        self._compares = not gradients
        self._contents: dict[tuple[int, tuple[str, ...]], int] = {}

    def content(self, number: int, header: np.ndarray, memory: Memory, local_rank: int) -> int:
        """A checksum of what this process sends in one of the first exchanges; 0 for nothing.

        One second for two gigabytes or so, in which the progress thread does nothing else. It must
        not yield, because all nodes begin their handshakes in the same order.
        """
        if not (self._compares and UNCOUNTED < number < _COMPARED and header[0] > 0):
            return 0
        checksum = 0
        for spec, leaf in zip(memory.specs, memory.leaves, strict=True):
            if spec.holders and sender(spec.holders, number) != local_rank:
                continue
            checksum = zlib.crc32(leaf.reshape(-1).view(np.uint8).data, checksum)
        return checksum + 1

    def compare(
        self, number: int, contents: np.ndarray, topology: Topology, layout: Layout
    ) -> None:
        """Warns if two exchanges have had equal parameters on all nodes, and not the same twice.

        Each node has taken steps on its own data before it sends its parameters. They do not stay
        equal, unless the data are the same, or the steps change nothing, as at a learning rate of
        0. ``contents`` has a row for each local rank, and a column for each node.
        """
        if not self._compares or number == UNCOUNTED or not contents.all():
            return
        if (contents != contents[:, :1]).any():
            self._compares = False
            return
        fragment, content = (layout.fingerprint, layout.names), hash(contents[:, 0].tobytes())
        if self._contents.setdefault(fragment, content) == content:
            return
        self._compares = False
        if topology.rank == 0:
            logger.warning(
                "all %d nodes have sent the same parameters, bit for bit, in exchange %d and in "
                "one before it, after steps of their own: they seem to train on the same data. "
                "Give each node its own part, by topology.node and topology.num_nodes.",
                *(topology.num_nodes, number),
            )

    def check_contributions(self, number: int, contributions: np.ndarray, layout: Layout) -> None:
        """Raises JdasoError if the parameters of no node are finite; see ``HEADER_SIZE``."""
        if self._gradients or number == UNCOUNTED or (contributions >= 0).any():
            return
        lost = [layout.name(leaf) for leaf in dict.fromkeys((-1 - contributions).astype(int))]
        raise JdasoError(
            f"the parameters of all nodes are not finite at exchange {number}: "
            f"{', '.join(lost[:4])}{describe_narrow_wires(layout.dtypes)}. No mean can mend them. "
            f"Restore a checkpoint, and lower the learning rate. {KEEP_OUT}"
        )

    def check_sums(self, number: int, finite: bool, members: float, memory: Memory) -> None:
        """Raises JdasoError if ten exchanges in a row have brought nothing to any node."""
        if number == UNCOUNTED:
            return
        if not finite:
            self._warn_overflow(number, memory)
        self._in_vain = 0 if finite and members else self._in_vain + 1
        if self._in_vain >= _IN_VAIN and not self._gradients:
            raise JdasoError(
                f"the last {_IN_VAIN} exchanges, up to exchange {number}, have averaged nothing, "
                "because on each node parameters or gradients were not finite since the merge "
                "before, or because the sum over the nodes was not: each node trains alone. Lower "
                "the learning rate, or the first scale if the loss is scaled."
            )

    def _warn_overflow(self, number: int, memory: Memory) -> None:
        """Warns at the first, second, fourth, eighth ... time."""
        self._overflows += 1
        if self._overflows & (self._overflows - 1) == 0:
            bounds = memory.layout.bounds
            lost = [i for i, sums in enumerate(memory.sums) if not np.isfinite(sums).all()]
            logger.warning(
                "the sum over the nodes is not finite in exchange %d%s, and all nodes ignore this "
                "exchange.",
                *(number, f": {memory.layout.name(bounds[lost[0]][0])}" if lost else ""),
            )
