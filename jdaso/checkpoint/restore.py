"""Reading a complete checkpoint: a node's own part, or the mean over all parts."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdaso.checkpoint import in_flight
from jdaso.checkpoint.agreement import from_first, gathered, on_all
from jdaso.checkpoint.flight_check import awaited, check_leaves, differences, with_keys_of
from jdaso.checkpoint.folder import SavedCheckpoint
from jdaso.checkpoint.host_arrays import from_host_arrays
from jdaso.checkpoint.node_part import NodePart, is_finite, read_part
from jdaso.cluster.topology import Topology
from jdaso.core.exchange import Exchange
from jdaso.core.log import logger
from jdaso.core.types import JdasoError, PyTree


def read_checkpoint(
    checkpoint: SavedCheckpoint,
    like: PyTree,
    topology: Topology,
    exchanges: Sequence[Exchange],
    reader: Any,
) -> PyTree:
    """Reads a complete checkpoint on all processes; collective.

    It raises JdasoError on all processes if the checkpoint is damaged or inconsistent, and
    ValueError if its format is another one, or if its leaves are not those of ``like``.
    """
    parts, source = checkpoint.parts, str(checkpoint.path)
    purpose = f"the checkpoints in {checkpoint.path.parent}"
    if len(parts) == topology.num_nodes:
        part = on_all(topology, purpose, lambda: read_part(reader, parts[topology.node]))
        _check_same_run(source, gathered(topology, part.run))
        _check_same_exchanges(topology, source, in_flight.describe_posted(part.in_flight))
        state = from_host_arrays(part.state, like, source)
        state = with_keys_of(like, state, exchanges, source)
        sent = awaited(state, exchanges)

        def check_posted() -> None:
            texts = differences([key for key, _ in sent], part.in_flight)
            if texts := texts + in_flight.other_bits(part.state, part.in_flight):
                raise JdasoError(f"{source} cannot be restored: {'; '.join(texts)}")

        on_all(topology, purpose, check_posted)
        check_leaves(sent, part.in_flight, source)
        for position, exchange in enumerate(exchanges):
            own = {n: posted for (at, n), posted in part.in_flight.items() if at == position}
            exchange.post_again(own, {n: leaves for (at, n), leaves in sent if at == position})
        return state

    def read_mean() -> dict[str, np.ndarray]:
        return _mean_of_one_run(parts, source, reader) if topology.rank == 0 else {}

    mean = on_all(topology, purpose, read_mean)
    names = from_first(topology, list(mean))
    mean = {name: from_first(topology, mean.get(name)) for name in names}
    state = from_host_arrays(mean, in_flight.remove_exchange_states(like), source)
    return in_flight.reset_exchanges(state, like)


def mean_of_parts(parts: Sequence[Path], read: Callable[[Path], NodePart]) -> dict[str, np.ndarray]:
    """The mean over the nodes that saved; reads one part after the other.

    As in an exchange, a node whose averaged parameters are not finite is left out. Any other array
    is the mean over the nodes where it is finite. One that is finite nowhere, such as a mask of
    -inf, is that of the first node, as are arrays of other dtypes than floating point. The states
    of exchanges are dropped. It raises JdasoError if the parts hold different arrays, or all are
    left out.
    """
    first: dict[str, np.ndarray] = {}
    total: dict[str, np.ndarray] = {}
    members: Counter[str] = Counter()
    lost: list[str] = []
    for path in parts:
        part = read(path)
        if lost := part.lost():
            logger.warning("%s is left out: %s is not finite.", path, lost[0])
            continue
        state = part.state
        first = first or state
        if {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in first.items()}:
            raise JdasoError(f"{path} holds other arrays than {parts[0]}.")
        for name, value in state.items():
            if jnp.issubdtype(value.dtype, np.floating) and is_finite(value):
                total[name] = total.get(name, 0.0) + value.astype(np.float64)
                members[name] += 1
    if not first and lost:
        raise JdasoError(
            f"no node has saved finite parameters in {parts[0].parent}: on all of them, an array "
            f"such as {lost[0]} is not finite."
        )
    return {
        k: (total[k] / members[k]).astype(v.dtype) if k in total else v
        for k, v in first.items()
        if not in_flight.is_exchange_state(k)
    }


def _mean_of_one_run(parts: Sequence[Path], source: str, reader: Any) -> dict[str, np.ndarray]:
    runs = []

    def read(path: Path) -> NodePart:
        part = read_part(reader, path)
        runs.append(part.run)
        return part

    mean = mean_of_parts(parts, read)
    _check_same_run(source, runs)
    return mean


def _check_same_run(source: str, runs: Sequence[int]) -> None:
    if len(set(runs)) > 1:
        raise JdasoError(
            f"{source} has parts of {len(set(runs))} jobs, which wrote to this folder at the same "
            "time. Give every job a folder of its own."
        )


def _check_same_exchanges(topology: Topology, source: str, own: dict[str, str]) -> None:
    first, *others = gathered(topology, own)
    for rank, other in enumerate(others, start=1):
        if other != first:
            raise JdasoError(
                f"{source} was saved when nodes were out of step: "
                f"{topology.describe(rank)} had the exchanges {other} in flight, and "
                f"{topology.describe(0)} had {first}."
            )
