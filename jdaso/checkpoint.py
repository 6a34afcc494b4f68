"""Checkpoints of all nodes: each writes its own part, what it has in flight included.

    checkpoints = jdaso.checkpoint.Checkpoints("runs/x/checkpoints", topology, exchange, keep=3)
    restored = checkpoints.restore(state)  # None, or the newest one that all nodes have written
    checkpoints.save(step, state)          # copies the state and returns; a thread writes
    checkpoints.close()

Between two exchanges the nodes' parameters differ, and what has been posted is with the host, so
the checkpoint of one node is not enough. A part appears under its name when it is whole, and a
checkpoint is one when all parts are there: nodes need not talk to each other to save.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jdaso._base import Exchange, JdasoError, PyTree
from jdaso._checks import check_whole
from jdaso._host import named, put_back
from jdaso._in_flight import at_step as at_step
from jdaso._in_flight import grounded, joined, of_exchanges, split, without_exchanges
from jdaso.topology import Topology

_STEP = re.compile(r"step_(\d{8,})")
_PART = re.compile(r"node_(\d+)_of_(\d+)")
# A network file system may show a new file late.
_SECONDS_TO_SHOW = 30.0


class Restored(NamedTuple):
    """What was found.

    Attributes:
        state: a tree like the one that was asked for.
        step: under which it was saved.
        num_nodes: how many nodes saved it. If they were as many as now, training goes on bit for
            bit; if not, this is the mean over them, and nothing is in flight.
    """

    state: PyTree
    step: int
    num_nodes: int


class Checkpoints:
    """A folder of checkpoints, on a file system that all nodes share.

    A checkpoint is a folder ``step_00001200`` with an orbax checkpoint ``node_0_of_2``,
    ``node_1_of_2`` for each node. Anything that is not complete is never restored. All nodes
    must call every method, at the same steps. Needs orbax: ``pip install jdaso[checkpoint]``.

    Args:
        directory: the folder; it is made if it is not there.
        topology: from :func:`jdaso.discover_topology`.
        exchange: what the optimizer inside the state was made with.
        keep: how many complete checkpoints stay; older ones are deleted.

    Raises:
        ValueError: for a ``keep`` below 1, or a folder that not all nodes see.

    >>> import tempfile, jax.numpy as jnp, jdaso
    >>> topology, folder = jdaso.discover_topology(), tempfile.mkdtemp()
    >>> checkpoints = Checkpoints(folder, topology, jdaso.mpi_exchange(topology))
    >>> checkpoints.save(7, {"w": jnp.ones(3)})
    >>> restored = checkpoints.restore({"w": jnp.zeros(3)})
    >>> restored.step, restored.state["w"].tolist()
    (7, [1.0, 1.0, 1.0])
    """

    def __init__(
        self, directory: Path | str, topology: Topology, exchange: Exchange, keep: int = 3
    ):
        check_whole("keep", keep, 1)
        self._writer = _orbax()
        self._directory = Path(directory).absolute()
        self._topology = topology
        self._exchange = exchange
        self._keep = keep
        self._directory.mkdir(parents=True, exist_ok=True)
        _check_shared(self._directory, topology)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in ascending order."""
        return sorted(step for step, folder in self._folders() if _parts(folder))

    def save(self, step: int, state: PyTree) -> None:
        """Copies a state, and what is in flight, to the host; a thread writes it.

        Waits until the one before is written.

        Args:
            step: its number; it must be greater than those that are there.
            state: any tree of arrays and Python numbers, with the optimizer's state in it.

        Raises:
            JdasoError: if the one before could not be written, for want of space for instance;
                those before that are still there.
            ValueError: if the folder holds a later step, left by another training.
        """
        self.wait()
        if self._topology.local_rank > 0:
            return  # a node of several processes: they all hold the same
        last = max(self.steps(), default=-1)
        if step <= last:
            raise ValueError(
                f"step must be greater than {last}, the last one in {self._directory}, got {step}. "
                "To continue that training, call restore first; for another, take a new folder."
            )
        arrays = named(state)  # waits for the step's computation, and so until it has posted
        tree = {"state": arrays, "in_flight": split(self._exchange.posted())}
        part = f"node_{self._topology.node}_of_{self._topology.num_nodes}"
        with self._explained():
            self._writer.save(self._folder(step) / part, {k: v for k, v in tree.items() if v})

    def wait(self) -> None:
        """Waits until everything is written; old checkpoints are deleted then.

        Raises:
            JdasoError: if it could not be written.
        """
        with self._explained():
            self._writer.wait_until_finished()
        if self._topology.rank == 0:
            kept = self.steps()[-self._keep :]
            for step, folder in self._folders():
                if kept and step < kept[0]:
                    shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Waits until all nodes have written everything, and ends the writer's threads."""
        self.wait()
        self._meet()
        self.wait()
        self._writer.close()

    def restore(self, like: PyTree) -> Restored | None:
        """The newest complete checkpoint; what was in flight is posted again.

        What is newer than it, parts that some node did not end, is deleted. With another number
        of nodes than now, floating-point arrays are averaged over those that saved, others are
        those of the first, and what was in flight is dropped: the mean of the parameters is newer.

        Args:
            like: a state of the same structure, shapes and dtypes, placed as the result shall be.
                Its optimizer's state must be new, from ``init``.

        Returns:
            What was found, or None if there is no complete checkpoint.

        Raises:
            ValueError: if the checkpoint's leaves are not those of ``like``.
        """
        self.wait()
        self._meet()
        comm, step, num_nodes = self._topology.comm, None, 0
        if self._topology.rank == 0:
            step = max(self.steps(), default=None)
            for other, folder in self._folders():
                if step is None or other > step:
                    shutil.rmtree(folder)
            if step is not None:
                num_nodes = len(_parts(self._folder(step)))
        if comm is not None:
            step, num_nodes = comm.bcast((step, num_nodes))
        if step is None:
            return None
        folder, own = self._folder(step), self._topology.num_nodes
        if num_nodes == own:
            tree = self._writer.restore(folder / f"node_{self._topology.node}_of_{own}")
            state = put_back(tree["state"], like, str(folder))
            self._exchange.post_again(joined(tree.get("in_flight", {})))
            return Restored(state, step, num_nodes)
        mean = self._mean(folder, num_nodes) if self._topology.rank == 0 else {}
        if comm is not None:
            names = comm.bcast(list(mean))
            mean = {name: comm.bcast(mean.get(name)) for name in names}
        found = put_back(mean, without_exchanges(like), str(folder))
        return Restored(grounded(found, like), step, num_nodes)

    def _mean(self, folder: Path, num_nodes: int) -> dict[str, np.ndarray]:
        """The mean over the nodes that saved, one part in memory at a time."""
        paths = [folder / f"node_{node}_of_{num_nodes}" for node in range(num_nodes)]
        first = self._writer.restore(paths[0])["state"]
        floats = {k for k, v in first.items() if jax.numpy.issubdtype(v.dtype, np.floating)}
        total = {name: first[name].astype(np.float64) for name in floats}
        for path in paths[1:]:
            part = self._writer.restore(path)["state"]
            for name in floats:
                total[name] += part[name]
        return {
            k: (total[k] / num_nodes).astype(v.dtype) if k in floats else v
            for k, v in first.items()
            if not of_exchanges(k)
        }

    def _folder(self, step: int) -> Path:
        return self._directory / f"step_{step:08}"

    def _folders(self) -> list[tuple[int, Path]]:
        found = ((_STEP.fullmatch(path.name), path) for path in self._directory.iterdir())
        return [(int(match[1]), path) for match, path in found if match]

    def _meet(self) -> None:
        if self._topology.comm is not None:
            self._topology.comm.Barrier()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Says whose part could not be written, whatever orbax raises."""
        try:
            yield
        except Exception as error:
            last = max(self.steps(), default=None)
            kept = "There is no earlier one." if last is None else f"The one of step {last} stays."
            raise JdasoError(
                f"a checkpoint in {self._directory} could not be written by "
                f"{self._topology.describe(self._topology.rank)}: {error} {kept}"
            ) from error


def _parts(folder: Path) -> list[Path]:
    """The parts of a checkpoint, if they are all there; otherwise none."""
    found = [(_PART.fullmatch(path.name), path) for path in folder.iterdir()]
    for size in {int(match[2]) for match, _ in found if match}:
        parts = [folder / f"node_{node}_of_{size}" for node in range(size)]
        if all(path.is_dir() for path in parts):
            return parts
    return []


def _check_shared(directory: Path, topology: Topology) -> None:
    """Raises, on every node, if one of them does not see what the first one writes."""
    if topology.comm is None:
        return
    name = None
    if topology.rank == 0:
        file, name = tempfile.mkstemp(prefix=".shared_", dir=directory)
        os.close(file)
    name = topology.comm.bcast(name)
    until = time.monotonic() + _SECONDS_TO_SHOW
    while not (seen := Path(name).name in os.listdir(directory)) and time.monotonic() < until:
        time.sleep(0.2)
    blind = [rank for rank, sees in enumerate(topology.comm.allgather(seen)) if not sees]
    if topology.rank == 0:
        os.unlink(name)
    if blind:
        raise ValueError(
            f"directory must be on a file system that all nodes share: what rank 0 writes to "
            f"{directory} is not seen by {', '.join(map(topology.describe, blind))}."
        )


def _orbax():
    try:
        from orbax.checkpoint import StandardCheckpointer
    except ImportError as error:
        raise ImportError(
            "Checkpoints are written with orbax: pip install jdaso[checkpoint]"
        ) from error
    return StandardCheckpointer()
