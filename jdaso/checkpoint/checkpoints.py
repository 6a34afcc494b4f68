"""Saving and restoring the checkpoints of all nodes.

The parameters of the nodes differ between two exchanges, and exchanges in flight are not part of
the state. One node's state is therefore not a checkpoint. Nodes communicate for the first save of
a training, and for no later one.
"""

import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdaso.checkpoint import folder, node_part
from jdaso.checkpoint.node_part import read_part
from jdaso.cluster.roll_call import MAX_NAMES
from jdaso.cluster.topology import Group, Topology
from jdaso.core.command_line import local_path
from jdaso.core.exchange import Exchange
from jdaso.core.log import logger
from jdaso.core.state import AveragingState, map_states
from jdaso.core.types import JdasoError, PyTree
from jdaso.core.validation import check_whole

_MAX_READS = 5  # of a folder in which a training deletes what is being read


class Restored(NamedTuple):
    """A checkpoint that was restored.

    Attributes:
        state: A tree like the one given to :meth:`Checkpoints.restore`.
        num_nodes: Number of nodes that saved it. If the job has as many, training continues bit
            for bit. Otherwise the state is the mean over them, with nothing in flight.
    """

    state: PyTree
    step: int
    num_nodes: int


class _DeletedError(Exception):
    """A training has deleted the checkpoint that is being read."""


class Checkpoints:
    """The checkpoints in a folder on a file system that all nodes share.

    A checkpoint is a folder such as ``000007_step_1200`` (seventh checkpoint, saved at step 1200)
    with an orbax checkpoint for each node, ``node_0_of_2`` and ``node_1_of_2``. Incomplete
    checkpoints are never restored. All nodes must call every method at the same steps. Requires
    ``pip install orbax-checkpoint``.

    Only :meth:`claim` and :meth:`save` write to the folder. A program that restores checkpoints
    changes nothing, and may read while a training writes.

    Args:
        directory: The folder, in a file system: ``~`` is expanded and ``file://`` removed. The
            first save creates it.
        exchange: The exchange that the optimizer was made with. A list of exchanges if the state
            holds several optimizer states, always in the same order.
        keep: Number of complete checkpoints to keep. Older ones are deleted after a save.

    Raises:
        ValueError: For a ``keep`` below 1, or a URL such as ``s3://`` as folder.

    >>> import tempfile, jax.numpy as jnp, jdaso
    >>> topology, folder = jdaso.discover_topology(), tempfile.mkdtemp()
    >>> checkpoints = Checkpoints(folder, topology, jdaso.mpi_exchange(topology))
    >>> checkpoints.save(7, {"w": jnp.ones(3)})
    >>> restored = checkpoints.restore({"w": jnp.zeros(3)})
    >>> restored.step, restored.state["w"].tolist()
    (7, [1.0, 1.0, 1.0])
    """

    def __init__(
        self,
        directory: Path | str,
        topology: Topology,
        exchange: Exchange | Sequence[Exchange],
        keep: int = 3,
    ):
        check_whole("keep", keep, 1)
        self._orbax = node_part.checkpointer()
        self._topology, self._node_group = topology, topology.node_group()
        self._path = local_path(directory, "directory").absolute()
        self._purpose = f"the checkpoints in {self._path}"  # for errors of barriers
        self._exchanges = [exchange] if isinstance(exchange, Exchange) else list(exchange)
        self._keep = keep
        self._unusable: set[int] = set()  # numbers of damaged checkpoints
        self._protected_up_to = 0  # the highest number that is not deleted
        self._last_number: int | None = None  # of the checkpoints of this training
        self._lock: folder.FolderLock | None = None  # of the folder, from claim on
        self._newest = 0  # the highest number in the folder when it was claimed
        self._has_saved = False

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first, without those that restore skipped."""
        return [checkpoint.step for checkpoint in self._usable()]

    def _usable(self) -> list[folder.SavedCheckpoint]:
        found = folder.list_checkpoints(self._path)
        return [c for c in found if c.parts and c.number not in self._unusable]

    def claim(self) -> None:
        """Reserves the folder for this job, as the first save does.

        It creates the folder, checks that all nodes see it, and locks it until :meth:`close`. Call
        it at the beginning of a training, to learn of a wrong folder before the first save. While
        another job holds the lock, this one waits until that one is known to live, for at most
        three minutes.

        Raises:
            JdasoError: On all nodes, if another job is writing to the folder, or if this one cannot
                write to it.
            ValueError: If not all nodes see the folder.
        """
        if self._lock is not None:
            return
        here = self._topology
        here.group.barrier(self._purpose)
        lock = folder.FolderLock(self._path, here.group.broadcast(secrets.randbits(63)))

        def claimed() -> int:
            # Only rank 0 looks for checkpoints: others may look when it has begun to write one.
            if here.rank > 0:
                return 0
            self._acquire(lock)
            return max((saved.number for saved in folder.list_checkpoints(self._path)), default=0)

        self._newest = here.group.broadcast(self._on_all(claimed))
        folder.check_shared(self._path, here)
        self._lock = lock

    def save(self, step: int, state: PyTree) -> None:
        """Copies a state and the exchanges in flight to the host; a thread writes them.

        Waits until the previous checkpoint is written. The first save claims the folder, see
        :meth:`claim`, and has its errors as well.

        Args:
            step: Optimizer steps taken.
            state: A tree of arrays and Python numbers, with the optimizer's state in it.

        Raises:
            JdasoError: If the previous checkpoint could not be written, for instance because the
                disk is full. Earlier checkpoints are kept. If the state does not wait for exactly
                the exchanges that are in flight, as the state of an earlier step. If another job
                has taken the folder over, because this one was stopped for three minutes.
            ValueError: If the folder holds checkpoints of another training, or newer ones than
                those that :meth:`restore` found.
        """
        self.claim()
        lock = self._lock
        assert lock is not None
        if self._topology.rank == 0:
            self._acquire(lock)  # another job may have taken it
        self.wait()
        if self._last_number is None and self._newest:
            raise ValueError(
                f"directory {self._path} holds checkpoints of a training, complete or not. "
                "To continue that training, call restore first; to start another one, use a new "
                "folder."
            )
        if self._newest > (self._last_number or 0):
            raise ValueError(
                f"directory {self._path} has newer checkpoints, up to {self._newest:06}, "
                f"than those that this job found when it called restore, up to "
                f"{self._last_number:06}: another job has saved there meanwhile. Start this job "
                "again, to continue from the newest one, or use a new folder. Call claim at the "
                "beginning of a training to keep other jobs out."
            )
        numbered = node_part.number_exchanges(state, self._exchanges)
        posted = node_part.exchanges_in_flight(state, self._exchanges)
        averaged = node_part.averaged_names(state, self._exchanges)
        own = node_part.to_host_arrays(numbered), posted
        whole = node_part.gather_shards(self._node_group, own)
        path = self._next_path(step)
        self._last_number = (self._last_number or 0) + 1
        if whole is not None:
            arrays, posted = whole
            with self._write_errors():
                self._orbax.save(path, node_part.part_tree(arrays, posted, averaged, lock.run))
                self._has_saved = True

    def wait(self) -> None:
        """Waits until everything is written, then deletes old checkpoints if it has saved one.

        Raises:
            JdasoError: If the checkpoint could not be written.
        """
        with self._write_errors():
            self._orbax.wait_until_finished()
        if self._topology.rank == 0 and self._has_saved and self._lock and self._lock.held():
            for first in self._usable()[-self._keep :][:1]:
                folder.delete_between(self._path, self._protected_up_to, first.number)

    def close(self) -> None:
        """Waits until all nodes have written everything, and releases the folder and threads."""
        self.wait()
        self._topology.group.barrier(self._purpose)
        self.wait()
        self._orbax.close()
        if self._lock is not None and self._topology.rank == 0:
            self._lock.release()

    def restore(self, like: PyTree, resume: bool = True) -> Restored | None:
        """Restores the newest complete checkpoint and posts its exchanges in flight again.

        What is in flight now is forgotten, so the training must go on from the result. A running
        training passes ``resume=False`` to look at a checkpoint, and goes on with its own state.

        If another number of nodes saved the checkpoint, floating-point arrays are averaged over
        these nodes and other arrays are those of node 0. Nodes whose averaged parameters are not
        finite are left out. Exchanges in flight are dropped, because the mean of the parameters is
        newer. The center of EASGD and the anchor of DiLoCo miss this last update.

        A damaged checkpoint, or one of nodes that were out of step, is skipped with a warning, so
        that a job that restarts by itself does not fail at the same place forever. If no
        checkpoint is complete, a warning says so, and this process deletes none of them. If a
        training deletes a checkpoint while this program reads it, the newest one is read.

        Args:
            like: A state of the same structure, shapes, dtypes and placement as the result. The
                optimizer's state in it must be new, from ``init``. With ``resume=False`` it may be
                that of the running training.
            resume: Whether training continues from the result. If not, nothing is posted, and the
                state has nothing in flight.

        Returns:
            The restored checkpoint, or None if none is complete.

        Raises:
            ValueError: If the leaves of the checkpoint are not those of ``like``, or if another
                version of jdaso saved it in another format.
            JdasoError: On all nodes, if complete checkpoints exist and none can be restored.
        """
        self.wait()
        self._topology.group.barrier(self._purpose)  # the other nodes have written their parts
        for _ in range(_MAX_READS):
            with contextlib.suppress(_DeletedError):
                return self._restore_newest(like, resume)
        raise JdasoError(
            f"the training that writes to {self._path} deletes its checkpoints while this "
            "program reads them. Let it keep more, or save less often."
        )

    def _restore_newest(self, like: PyTree, resume: bool) -> Restored | None:
        here = self._topology
        checkpoints = here.group.broadcast(
            self._on_all(lambda: folder.list_checkpoints(self._path) if here.rank == 0 else [])
        )
        # New numbers follow the incomplete ones: a new part must not complete an old checkpoint.
        if resume:
            self._last_number = max((checkpoint.number for checkpoint in checkpoints), default=0)
        problems = []
        for saved in reversed([checkpoint for checkpoint in checkpoints if checkpoint.parts]):
            same = len(saved.parts) == here.num_nodes
            try:
                state = (
                    self._own_state(saved, like, resume) if same else self._mean_state(saved, like)
                )
                return Restored(state, saved.step, len(saved.parts))
            except JdasoError as error:  # on all nodes
                if here.group.broadcast(not saved.path.is_dir()):
                    raise _DeletedError from error
                problems.append(str(error))
                self._unusable.add(saved.number)
                if here.rank == 0:
                    logger.warning("%s is skipped: %s", saved.path.name, error)
        if problems:
            raise JdasoError("; ".join(problems))
        if resume:
            self._protected_up_to = self._last_number or 0
        if checkpoints and here.rank == 0:
            names = ", ".join(folder.describe_incomplete(c.path) for c in checkpoints)
            logger.warning(
                "no checkpoint in %s is complete: %s. Training starts at its first step. This run "
                "keeps the incomplete checkpoints. The next run deletes them; copy what you need.",
                *(self._path, names),
            )
        return None

    def _own_state(self, saved: folder.SavedCheckpoint, like: PyTree, resume: bool) -> PyTree:
        """Returns this node's state of a checkpoint of as many nodes.

        With ``resume``, the exchanges that were in flight are posted again.
        """
        here, source, exchanges = self._topology, str(saved.path), self._exchanges
        part = self._on_all(lambda: read_part(self._orbax, saved.parts[here.node]))
        _check_same_run(source, here.group.gather(part.run))
        first, *others = here.group.gather(node_part.describe_posted(part.in_flight))
        for rank, other in enumerate(others, start=1):
            if other != first:
                raise JdasoError(
                    f"{source} was saved when nodes were out of step: {here.describe(rank)} had "
                    f"the exchanges {other} in flight, and {here.describe(0)} had {first}."
                )
        state = node_part.from_host_arrays(part.state, like, source)
        state = node_part.with_keys_of(like, state, exchanges, source)
        sent = node_part.awaited(state, exchanges)

        def check_posted() -> None:
            texts = node_part.differences(sent, part.in_flight)
            if texts := texts + node_part.other_bits(part.state, part.in_flight):
                raise JdasoError(f"{source} cannot be restored: {'; '.join(texts)}")

        self._on_all(check_posted)
        node_part.check_leaves(sent, part.in_flight, source)
        if not resume:
            return node_part.reset_exchanges(state, like)
        for position, exchange in enumerate(exchanges):
            own = {n: posted for (at, n), posted in part.in_flight.items() if at == position}
            exchange.post_again(own, {n: leaves for (at, n), leaves in sent if at == position})
        return state

    def _mean_state(self, saved: folder.SavedCheckpoint, like: PyTree) -> PyTree:
        """Returns the mean of a checkpoint of other nodes, with nothing in flight."""
        here, source = self._topology, str(saved.path)
        mean: dict[str, np.ndarray] = self._on_all(
            lambda: _mean_of_parts(saved.parts, source, self._orbax) if here.rank == 0 else {}
        )
        names = here.group.broadcast(list(mean))
        mean = {name: here.group.broadcast(mean.get(name)) for name in names}
        state = node_part.from_host_arrays(mean, node_part.without_exchange_states(like), source)
        return node_part.reset_exchanges(state, like)

    def _on_all(self, function: Callable[[], Any]) -> Any:
        return on_all(self._topology.group, self._purpose, function)

    def _acquire(self, lock: folder.FolderLock) -> None:
        """Creates and locks the folder, if this process has not done so."""
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except OSError as error:
            raise JdasoError(
                f"this process cannot write to {self._path}: {error.strerror}. Choose a folder to "
                "which its user may write, or make room on the disk."
            ) from error

    def _next_path(self, step: int) -> Path:
        number, here = (self._last_number or 0) + 1, self._topology
        return folder.part_path(self._path, number, step, here.node, here.num_nodes)

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        """Turns any error of orbax into a JdasoError that names this process."""
        try:
            yield
        except Exception as error:
            raise JdasoError(
                f"a checkpoint in {self._path} could not be written by "
                f"{self._topology.describe(self._topology.rank)}: {error} Complete checkpoints, "
                f"which are kept: steps {self.steps()}."
            ) from error


def on_all(group: Group, purpose: str, function: Callable[[], Any]) -> Any:
    """Returns this process's result of the function, or raises on all if it raises on one.

    The error is a ValueError if one of theirs is, and otherwise a JdasoError. Errors of the barrier
    after the calls name the ``purpose``.
    """
    value, problem = None, ("", False)
    try:
        value = function()
    except Exception as error:
        problem = f"{group.name}: {error}", type(error) is ValueError
    group.barrier(purpose)
    if problems := [found for found in group.gather(problem) if found[0]]:
        texts = [text for text, _ in problems[:MAX_NAMES]]
        if len(problems) > MAX_NAMES:
            texts.append(f"and {len(problems) - MAX_NAMES} more processes")
        raise (ValueError if any(kind for _, kind in problems) else JdasoError)("; ".join(texts))
    return value


def _mean_of_parts(parts: Sequence[Path], source: str, reader: Any) -> dict[str, np.ndarray]:
    """Returns the mean over the nodes that saved. One part after the other is in memory.

    As in an exchange, a node whose averaged parameters are not finite is left out. Any other array
    is the mean over the nodes where it is finite. One that is finite nowhere, such as a mask of
    -inf, is that of the first node, as are arrays of other dtypes than floating point. The states
    of exchanges are dropped.
    """
    first: dict[str, np.ndarray] = {}
    total: dict[str, np.ndarray] = {}
    members: Counter[str] = Counter()
    lost: list[str] = []
    runs = []
    for path in parts:
        part = read_part(reader, path)
        runs.append(part.run)
        if lost := part.lost():
            logger.warning("%s is left out: %s is not finite.", path, lost[0])
            continue
        first = first or part.state
        if {k: v.shape for k, v in part.state.items()} != {k: v.shape for k, v in first.items()}:
            raise JdasoError(f"{path} holds other arrays than {parts[0]}.")
        for name, value in part.state.items():
            if jnp.issubdtype(value.dtype, np.floating) and node_part.is_finite(value):
                total[name] = total.get(name, 0.0) + value.astype(np.float64)
                members[name] += 1
    if not first and lost:
        raise JdasoError(
            f"no node has saved finite parameters in {source}: on all of them, an array such as "
            f"{lost[0]} is not finite."
        )
    _check_same_run(source, runs)
    return {
        k: (total[k] / members[k]).astype(v.dtype) if k in total else v
        for k, v in first.items()
        if not node_part.is_exchange_state(k)
    }


def _check_same_run(source: str, runs: Sequence[int]) -> None:
    if len(set(runs)) > 1:
        raise JdasoError(
            f"{source} has parts of {len(set(runs))} jobs, which wrote to this folder at the same "
            "time. Give every job a folder of its own."
        )


def at_step(tree: PyTree, step: int) -> PyTree:
    """Sets the step of all averaging states in a tree.

    For a training that continues with another number of nodes. An epoch then has another number of
    steps, and schedules count steps.

    Args:
        tree: A tree with optimizer states in it.
        step: Optimizer steps taken, by the new count.

    >>> import jdaso
    >>> averaging = jdaso.daso(jdaso.single_exchange(), period=4, delay=2)
    >>> state = at_step(averaging.init({"w": jnp.ones(3)}), 100)
    >>> int(state.step)
    100
    """

    def with_step(state: AveragingState) -> AveragingState:
        value = np.asarray(step, state.step.dtype)
        return state._replace(step=jax.device_put(value, state.step.sharding))

    return map_states(AveragingState, with_step, tree)
