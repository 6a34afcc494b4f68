"""What the processes compare before and after a sum, to refuse trainings that are out of step.

The handshake compares what the processes are about to exchange, and sums the headers. The
:class:`Watch` notices trainings that gain nothing from their exchanges, from what all have sent.
"""

import zlib
from collections.abc import Callable
from typing import NoReturn

import numpy as np

from jdaso.cluster.mpi_types import Comm
from jdaso.cluster.topology import Topology
from jdaso.core.exchange import AGREEMENT_NAMES, HEADER_SIZE, UNCOUNTED
from jdaso.core.log import logger
from jdaso.core.tree import KEEP_OUT
from jdaso.core.types import JdasoError
from jdaso.core.wire import describe_narrow_wires
from jdaso.exchange.host.layout import Layout, Memory, sender
from jdaso.exchange.transport.collectives import gather
from jdaso.exchange.transport.progress import Operation, closed_without

_SAME_SCHEDULE = "All nodes must use the same schedule and continue the same checkpoint."
_SAME_START = (
    "This state is EASGD's center, DiLoCo's anchor with its outer optimizer, or the parameters of "
    "synchronous training. Start from jdaso.broadcast(exchange, params), with the same "
    "hyperparameters on all nodes, and let nothing else change it. If the nodes' hardware rounds "
    "differently, pass same_bits=False to mpi_exchange."
)
_SAME_STEP = "All nodes must use the same schedule and start from the same step."
# Of a header, the agreement numbers are compared, and the others are summed.
_AGREEMENT = slice(-len(AGREEMENT_NAMES), None)
_SUMMED = slice(None, -len(AGREEMENT_NAMES))
# All members must have the same bytes in these fields.
_COMPARED_FIELDS = [
    ("number", "<i8"),
    ("step", "<i8"),
    ("specs", "<i8"),
    ("agreement", "<f4", (len(AGREEMENT_NAMES),)),
]
_COMPARED_BYTES = np.dtype(_COMPARED_FIELDS).itemsize
_RECORD = np.dtype(
    [
        *_COMPARED_FIELDS,
        ("header", "<f4", (HEADER_SIZE - len(AGREEMENT_NAMES),)),
        ("content", "<i8"),  # a checksum of the arrays; at the exit, whether the process has failed
    ]
)
# Field of the record -> its name in messages, and the advice if it differs.
_COMPARED = {
    "number": ("number", _SAME_STEP),
    "step": ("step", _SAME_STEP),
    "specs": (
        "the checksum of shapes and dtypes on the wire",
        "All nodes must use the same wire, the same model, and the same number of fragments.",
    ),
}
# The numbers in the record of a process that closes the exchange, or abandons it.
_EXIT, _ABANDON = -2, -3


class Abandoned(Exception):
    """A member has abandoned the exchanges. The argument is its rank."""


def handshake(
    comm: Comm,
    name: str,
    fingerprint: int,
    number: int,
    step: int,
    header: np.ndarray,
    content: int,
    contributors: np.ndarray,
    describe: Callable[[int], str],
) -> Operation:
    """Sends a record of the exchange to all members, compares theirs, and sums the headers.

    If records differ, it raises JdasoError, which names two ranks and the value of each, before
    any sum is computed. The communicator is the same for every exchange but a consensus. Otherwise
    the records of nodes at different exchanges would not meet.

    Args:
        name: What messages call it.
        fingerprint: Checksum of the shapes and dtypes of the exchanged arrays.
        step: Optimizer step after which it was posted.
        content: The checksum of the arrays that :meth:`Watch.content` returns.
        contributors: Ranks whose headers are summed, one per node.

    Returns:
        The header, float32[HEADER_SIZE], with the sums and this process's agreement numbers, and
        the records of all members, with the fields ``header`` and ``content``.

    Raises:
        Abandoned: on all members, if one of them has abandoned the exchanges.
    """
    record = np.array(
        [(number, step, fingerprint, header[_AGREEMENT], header[_SUMMED], content)], _RECORD
    )
    records = yield from gather(comm, record)
    own = comm.Get_rank()
    compared = records.view(np.uint8).reshape(len(records), -1)[:, :_COMPARED_BYTES]
    if (compared != compared[own]).any():
        _explain(records, own, name, describe)
    total = header.copy()
    # All members add in the same order and therefore get the same bits.
    headers = records["header"][contributors]
    headers[:, 0] = headers[:, 0] > 0
    np.add.reduce(headers, axis=0, out=total[_SUMMED])
    return total, records


def _explain(records: np.ndarray, own: int, name: str, describe: Callable[[int], str]) -> NoReturn:
    """Raises the error of records that differ, or Abandoned."""
    for rank in np.flatnonzero(records["number"] == _ABANDON)[:1]:
        raise Abandoned(int(rank))
    for rank in np.flatnonzero(records["number"] == _EXIT)[:1]:
        raise JdasoError(
            f"{name} of {describe(own)} cannot complete: {closed_without(describe(rank))}"
        )
    for field, (quantity, advice) in _COMPARED.items():
        for rank in np.flatnonzero(records[field] != records[field][own])[:1]:
            ours, theirs = records[own], records[rank]
            raise JdasoError(
                f"nodes are out of step at {name}: {quantity} is {ours[field]} in "
                f"{describe(own)}{_plan(ours)} but {theirs[field]} in "
                f"{describe(rank)}{_plan(theirs)}. {advice}"
            )
    agreements = np.ascontiguousarray(records["agreement"])
    bits = agreements.view(np.int32)
    rank, i = np.argwhere(bits != bits[own])[0]
    quantity, a, b = AGREEMENT_NAMES[i], agreements[own, i], agreements[rank, i]
    value = "the fingerprint of " if quantity.startswith("the ") else ""
    advice = _SAME_START if quantity == AGREEMENT_NAMES[-1] else _SAME_SCHEDULE
    raise JdasoError(
        f"nodes disagree at {name}: {value}{quantity} is {a:.0f} in {describe(own)} but "
        f"{b:.0f} in {describe(rank)}. {advice}"
    )


def exit_barrier(comm: Comm, abandon: bool, failed: bool) -> Operation:
    """Waits until all members have reached this barrier. Returns whether one of them has failed.

    A member that posts an exchange instead receives this record, and reaches the barrier later. Its
    exchange fails, or completes with nothing if this process abandons the exchanges. All members
    see the same records, so all gather again.
    """
    record = np.zeros(1, _RECORD)
    record["number"], record["content"] = _ABANDON if abandon else _EXIT, failed
    while True:
        records = yield from gather(comm, record)
        if np.isin(records["number"], (_EXIT, _ABANDON)).all():
            return bool(records["content"].any())


def _plan(record: np.void) -> str:
    """The period and delay of a record, in parentheses; empty if it has none."""
    period, delay = (int(x) for x in record["agreement"][:2])
    return f" (period {period}, delay {delay})" if period else ""


#: Exchanges in a row that bring nothing, after which it is an error.
IN_VAIN = 10
# The first exchanges, whose parameters are compared.
_FIRST = 8


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
        if not (self._compares and UNCOUNTED < number < _FIRST and header[0] > 0):
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
            self._overflows += 1
            # At the first, second, fourth, eighth ... time.
            if self._overflows & (self._overflows - 1) == 0:
                bounds = memory.layout.bounds
                lost = [i for i, sums in enumerate(memory.sums) if not np.isfinite(sums).all()]
                logger.warning(
                    "the sum over the nodes is not finite in exchange %d%s, and all nodes ignore "
                    "this exchange.",
                    *(number, f": {memory.layout.name(bounds[lost[0]][0])}" if lost else ""),
                )
        self._in_vain = 0 if finite and members else self._in_vain + 1
        if self._in_vain >= IN_VAIN and not self._gradients:
            raise JdasoError(
                f"the last {IN_VAIN} exchanges, up to exchange {number}, have averaged nothing, "
                "because on each node parameters or gradients were not finite since the merge "
                "before, or because the sum over the nodes was not: each node trains alone. Lower "
                "the learning rate, or the first scale if the loss is scaled."
            )
