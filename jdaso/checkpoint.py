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
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jdaso._base import Exchange, JdasoError, PyTree
from jdaso._checkpoint_folder import Found, check_shared, found, none_complete, part_path
from jdaso._checkpoint_part import Part, mean_of, orbax, read_part, to_write
from jdaso._checks import check_whole
from jdaso._host import named, put_back
from jdaso._in_flight import at_step as at_step
from jdaso._in_flight import grounded, outlines, without_exchanges
from jdaso._meeting import meet
from jdaso.topology import Topology


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

    A checkpoint is a folder, ``000007_step_1200`` the seventh, with an orbax checkpoint for each
    node, ``node_0_of_2`` and ``node_1_of_2``. One that is not complete is never restored. All
    nodes must call every method, at the same steps. Needs ``pip install orbax-checkpoint``.

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
        self._writer = orbax()
        self._directory = Path(directory).absolute()
        self._topology = topology
        self._exchange = exchange
        self._keep = keep
        self._next: int | None = None
        self._unusable: set[int] = set()
        self._spared = 0  # the last one of which parts are missing, and that is not deleted
        self._directory.mkdir(parents=True, exist_ok=True)
        check_shared(self._directory, topology)
        # A node that looked later could see what another one has begun to write.
        self._taken = self._told(bool(found(self._directory)))

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first, without what restore has passed over."""
        return [checkpoint.step for checkpoint in self._complete()]

    def save(self, step: int, state: PyTree) -> None:
        """Copies a state, and what is in flight, to the host; a thread writes it.

        Waits until the one before is written.

        Args:
            step: how many optimizer steps the state has taken.
            state: any tree of arrays and Python numbers, with the optimizer's state in it.

        Raises:
            JdasoError: if the one before could not be written, for want of space for instance;
                those before that are still there.
            ValueError: if another training has left checkpoints in the folder.
        """
        self.wait()
        self._look_around()
        if self._topology.local_rank > 0:
            return  # a node of several processes: they all hold the same
        if self._next is None and self._taken:
            raise ValueError(
                f"directory {self._directory} holds checkpoints of a training, perhaps incomplete "
                "ones. To continue it, call restore first; for another, take a new folder."
            )
        self._next = (self._next or 0) + 1
        arrays = named(state)  # waits for the step's computation, and so until it has posted
        tree = to_write(arrays, self._exchange.posted())
        path = part_path(
            self._directory, self._next, step, self._topology.node, self._topology.num_nodes
        )
        with self._explained():
            self._writer.save(path, tree)

    def wait(self) -> None:
        """Waits until everything is written; old checkpoints are deleted then.

        Raises:
            JdasoError: if it could not be written.
        """
        with self._explained():
            self._writer.wait_until_finished()
        if self._topology.rank == 0:
            kept = self._complete()[-self._keep :]
            for other in found(self._directory):
                if kept and self._spared < other.number < kept[0].number:
                    shutil.rmtree(other.path, ignore_errors=True)

    def close(self) -> None:
        """Waits until all nodes have written everything, and ends the writer's threads."""
        self._look_around()
        self.wait()
        self._meet()
        self.wait()
        self._writer.close()

    def restore(self, like: PyTree) -> Restored | None:
        """The newest complete checkpoint; what was in flight is posted again.

        If another number of nodes saved it, floating-point arrays are averaged over them, others
        are those of the first, and what was in flight is dropped: the mean of the parameters is
        newer. (With EASGD and DiLoCo the centre, or anchor, misses this last move.)

        If none is complete, a line says so, and this process deletes nothing of what is there. One
        from which training cannot go on, because a part of it is damaged, or nodes that had
        fallen out of step wrote it, is passed over with a line that says so: a job that starts
        again by itself must not fail at the same place for ever.

        Args:
            like: a state of the same structure, shapes and dtypes, placed as the result shall be.
                Its optimizer's state must be new, from ``init``.

        Returns:
            What was found, or None if there is no complete checkpoint.

        Raises:
            ValueError: if the checkpoint's leaves are not those of ``like``.
            JdasoError: on all nodes, if there are checkpoints, but none that can be gone on from.
        """
        self._look_around()
        self.wait()
        self._meet()
        there = self._told(found(self._directory))
        # Numbers go on after what was not ended, so that no part of it can be taken for a new one.
        self._next = max((other.number for other in there), default=0)
        problems = []
        for checkpoint in reversed([other for other in there if other.parts]):
            try:
                return self._restored(checkpoint, like)
            except JdasoError as error:  # on all nodes
                problems.append(str(error))
                self._unusable.add(checkpoint.number)
                if self._topology.rank == 0:
                    text = f"jdaso: {checkpoint.path.name} is passed over: {error}"
                    print(text, file=sys.stderr, flush=True)
        if problems:
            raise JdasoError("; ".join(problems))
        self._spared = self._next
        if there and self._topology.rank == 0:
            print(f"jdaso: {none_complete(there)}", file=sys.stderr, flush=True)
        return None

    def _look_around(self) -> None:
        """Some may have died, where that does not end all."""
        self._topology = self._exchange.topology() or self._topology

    def _restored(self, checkpoint: Found, like: PyTree) -> Restored:
        """A complete checkpoint; JdasoError on all nodes if it is not what they can go on from."""
        comm, parts, source = self._topology.comm, checkpoint.parts, str(checkpoint.path)
        if len(parts) == self._topology.num_nodes:
            part = self._together(lambda: self._read(parts[self._topology.node]))
            self._check_in_step(checkpoint, outlines(part.in_flight))
            state = put_back(part.state, like, source)
            self._exchange.post_again(part.in_flight)
            return Restored(state, checkpoint.step, len(parts))
        first = self._topology.rank == 0
        mean = self._together(lambda: mean_of(parts, self._read) if first else {})
        if comm is not None:
            names = comm.bcast(list(mean))
            mean = {name: comm.bcast(mean.get(name)) for name in names}
        state = grounded(put_back(mean, without_exchanges(like), source), like)
        return Restored(state, checkpoint.step, len(parts))

    def _check_in_step(self, checkpoint: Found, own: dict[int, str]) -> None:
        comm = self._topology.comm
        all_of_them = [own] if comm is None else comm.allgather(own)
        first = all_of_them[0]
        for rank, other in enumerate(all_of_them):
            if other != first:
                who = self._topology.describe
                raise JdasoError(
                    f"{checkpoint.path} was saved when nodes were out of step: in flight are "
                    f"{other} of {who(rank)} but {first} of {who(0)}."
                )

    def _read(self, path: Path) -> Part:
        return read_part(self._writer, path)

    def _together(self, read: Callable[[], Any]) -> Any:
        """What this process has read; an error on all of them if one could not."""
        value: Any = None
        problem: str | None = None
        try:
            value = read()
        except Exception as error:
            problem = f"{self._topology.describe(self._topology.rank)}: {error}"
        self._meet()
        comm = self._topology.comm
        problems = [problem] if comm is None else comm.allgather(problem)
        if any(problems):
            raise JdasoError("; ".join(filter(None, problems)))
        return value

    def _complete(self) -> list[Found]:
        return [
            checkpoint
            for checkpoint in found(self._directory)
            if checkpoint.parts and checkpoint.number not in self._unusable
        ]

    def _told(self, value: Any) -> Any:
        """What the first process sees, on all of them."""
        comm = self._topology.comm
        return value if comm is None else comm.bcast(value)

    def _meet(self) -> None:
        meet(self._topology, f"the checkpoints in {self._directory}")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Says whose part could not be written, whatever orbax raises."""
        try:
            yield
        except Exception as error:
            steps = self.steps()
            kept = f"The one of step {steps[-1]} stays." if steps else "There is no earlier one."
            raise JdasoError(
                f"a checkpoint in {self._directory} could not be written by "
                f"{self._topology.describe(self._topology.rank)}: {error} {kept}"
            ) from error
