"""Compares what the processes are about to exchange, and sums the headers."""

from collections.abc import Callable, Sequence

import numpy as np

from jdaso.cluster.mpi_types import Comm
from jdaso.core.exchange import AGREEMENT_NAMES, HEADER_SIZE, UNCOUNTED
from jdaso.core.types import JdasoError
from jdaso.exchange.transport.all_reduce import add_in_order
from jdaso.exchange.transport.collectives import gather
from jdaso.exchange.transport.operation import Operation

_SAME_SCHEDULE = "All nodes must use the same schedule and continue the same checkpoint."
_SAME_START = (
    "This state is EASGD's centre, DiLoCo's anchor with its outer optimizer, or the parameters of "
    "synchronous training. Start from jdaso.broadcast(exchange, params), with the same "
    "hyperparameters on all nodes, and let nothing else change it. If the nodes' hardware rounds "
    "differently, pass same_bits=False to mpi_exchange."
)
_SAME_STEP = "All nodes must use the same schedule and start from the same step."
_RECORD = np.dtype(
    [
        ("number", "<i8"),
        ("step", "<i8"),
        ("specs", "<i8"),
        ("content", "<i8"),
        ("header", "<f4", (HEADER_SIZE,)),
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
# The number in the record of a process that closes the exchange.
_EXIT = -2
# The last entries of a header are agreement numbers, which are compared and not summed.
_AGREEMENT = slice(-len(AGREEMENT_NAMES), None)
_SUMMED = slice(None, -len(AGREEMENT_NAMES))


def exchange_name(number: int) -> str:
    return "a consensus" if number == UNCOUNTED else f"exchange {number}"


def closed_without(names: str) -> str:
    """Why an operation cannot complete in which processes have not taken part."""
    return (
        f"{names} closed this exchange, or exited, without taking part. All nodes must take the "
        "same number of steps and make the same calls."
    )


def handshake(
    comm: Comm,
    fingerprint: int,
    number: int,
    step: int,
    header: np.ndarray,
    contributors: np.ndarray,
    describe: Callable[[int], str],
    content: int = 0,
) -> Operation:
    """Sends a record of the exchange to all members, compares theirs, and sums the headers.

    If records differ, it raises JdasoError, which names two ranks and the value of each, before
    any sum is computed. The communicator is the same for every exchange. Otherwise the records of
    nodes at different exchanges would not meet.

    Args:
        fingerprint: Checksum of the shapes and dtypes of the exchanged arrays.
        step: Optimizer step after which it was posted.
        contributors: Ranks whose headers are summed, one per node.
        content: what :class:`Watch` has found about the arrays.

    Returns:
        The header, float32[HEADER_SIZE], with the sums and this process's agreement numbers, and
        the records of all members, with the fields ``header`` and ``content``.
    """
    record = np.zeros(1, _RECORD)
    record[0] = (number, step, fingerprint, content, header)
    records = yield from gather(comm, record)
    own, name = comm.Get_rank(), exchange_name(number)
    for rank in np.flatnonzero(records["number"] == _EXIT)[:1]:
        raise JdasoError(
            f"{name} of {describe(own)} cannot complete: {closed_without(describe(rank))}"
        )
    for field, (quantity, advice) in _COMPARED.items():
        for rank in np.flatnonzero(records[field] != record[field])[:1]:
            other = records[rank]
            raise JdasoError(
                f"nodes are out of step at {name}: {quantity} is {record[field][0]} in "
                f"{describe(own)}{_plan(header)} but {other[field]} in {describe(rank)}"
                f"{_plan(other['header'])}. {advice}"
            )
    differs = records["header"][:, _AGREEMENT] != header[_AGREEMENT]
    for rank in np.flatnonzero(differs.any(axis=1))[:1]:
        other = records["header"][rank]
        _raise_disagreement(name, header, other, [describe(own), describe(rank)])
    total = header.copy()
    # All members add in the same order and therefore get the same bits.
    headers = records["header"][contributors]
    headers[:, 0] = headers[:, 0] > 0
    add_in_order(headers[:, _SUMMED], total[_SUMMED])
    return total, records


def exit_barrier(comm: Comm) -> Operation:
    """Waits until all members have reached this barrier.

    A member that posts an exchange instead receives this record, raises an error, and reaches the
    barrier later. All members see the same records, so all gather again.
    """
    record = np.zeros(1, _RECORD)
    record["number"] = _EXIT
    while True:
        records = yield from gather(comm, record)
        if (records["number"] == _EXIT).all():
            return


def _plan(header: np.ndarray) -> str:
    """The period and delay of a header, in parentheses; empty if it has none."""
    period, delay = (int(x) for x in header[_AGREEMENT][:2])
    return f" (period {period}, delay {delay})" if period else ""


def _raise_disagreement(
    name: str, own: np.ndarray, other: np.ndarray, members: Sequence[str]
) -> None:
    """Raises an error with the first agreement number in which two headers differ."""
    for quantity, a, b in zip(AGREEMENT_NAMES, own[_AGREEMENT], other[_AGREEMENT], strict=True):
        if a != b:
            value = "the fingerprint of " if quantity.startswith("the ") else ""
            advice = _SAME_START if quantity == AGREEMENT_NAMES[-1] else _SAME_SCHEDULE
            raise JdasoError(
                f"nodes disagree at {name}: {value}{quantity} is {int(a)} in {members[0]} but "
                f"{int(b)} in {members[1]}. {advice}"
            )
