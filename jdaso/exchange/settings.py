"""The arguments of ``mpi_exchange`` that must be the same on all processes, and their checks."""

from __future__ import annotations

from typing import NamedTuple

from jdaso.cluster.topology import Topology
from jdaso.core.block_format import FORMATS
from jdaso.core.validation import check_whole
from jdaso.exchange.transport.collectives import different
from jdaso.exchange.transport.operation import run


class Settings(NamedTuple):
    """The arguments of mpi_exchange that must be the same on all processes."""

    wire: str | None
    chunk_bytes: int
    same_bits: bool


def check_settings(settings: Settings) -> None:
    """Raises ValueError for arguments that a process can see to be invalid."""
    check_whole("chunk_bytes", settings.chunk_bytes, 16)
    if settings.chunk_bytes >= 2**31:
        raise ValueError(f"chunk_bytes must be below 2**31, got {settings.chunk_bytes}.")
    if settings.wire in FORMATS:
        check_feedback(settings.wire, settings.same_bits)


def check_feedback(wire: str, same_bits: bool) -> None:
    """Raises ValueError for arguments with which the wires int8 and float4 cannot be used."""
    if not same_bits:
        raise ValueError(
            f"same_bits=False allows nodes to differ in the last bits, and the wire {wire} sends "
            "differences from a mean that must be equal on all nodes: use the wire bfloat16."
        )


def check_same_settings(topology: Topology, settings: Settings) -> None:
    """Raises ValueError on all processes if their arguments differ; collective."""
    assert topology.comm is not None
    own = [repr(value) for value in settings]
    if (pair := run(different(topology.comm, own))) is None:
        return
    ranks, values = list(pair), zip(Settings._fields, *pair.values(), strict=True)
    name, *given = next(texts for texts in values if texts[1] != texts[2])
    raise ValueError(
        f"{name} must be the same on all processes, got {given[0]} in "
        f"{topology.describe(ranks[0])} and {given[1]} in {topology.describe(ranks[1])}: pass the "
        "same arguments to mpi_exchange."
    )
