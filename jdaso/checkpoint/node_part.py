"""One node's part of a checkpoint: a tree as named arrays, with checksums, written by orbax.

Arrays that orbax cannot write, without elements or of rare dtypes, are written as bytes. A folder
may hold files of another program. Reading executes no code: orbax stores arrays and JSON.
"""

import asyncio
import contextlib
import json
import re
import warnings
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_leaves_with_path

from jdaso.checkpoint.in_flight import InFlight, arrays_to_posted, owner, posted_to_arrays
from jdaso.cluster.mpi_types import Comm
from jdaso.core.chain import ChainState
from jdaso.core.exchange import Exchange, HostState, Shards
from jdaso.core.state import AveragingState, FragmentState, find_states, map_states
from jdaso.core.tree import named_floats, place_like
from jdaso.core.types import JdasoError, PyTree

#: The format of parts. It changes when an older version of jdaso could not read them rightly.
FORMAT = 2
_GROUPS = ("state", "in_flight", "about")
_MAX_LISTED = 5  # differences in an error
_MAX_ERROR_LENGTH = 300  # characters of an error of orbax
# The dtypes that orbax writes in all of its versions.
_WRITTEN_DTYPES = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
}


def _named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    return [(_name_of(path), leaf) for path, leaf in tree_leaves_with_path(tree)]


def _name_of(path: Sequence[Any]) -> str:
    return keystr(tuple(path), simple=True, separator=".")


def to_host_arrays(tree: PyTree) -> dict[str, np.ndarray | Shards]:
    """Copies the leaves of a tree to named arrays; leaves without elements are left out.

    Views would not do: a CPU array may be donated to the next step while a thread writes it. Of an
    array that several processes hold, it copies the shards of this process. It raises ValueError
    for a leaf that is not an array of numbers, such as a typed random key.

    >>> to_host_arrays({"layer": [jnp.ones(2), 3]})
    {'layer.0': array([1., 1.], dtype=float32), 'layer.1': array(3)}
    """
    arrays: dict[str, np.ndarray | Shards] = {}
    for name, leaf in _named_leaves(tree):
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(f"{name} is a typed random key; save its jax.random.key_data.")
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            array: np.ndarray | Shards = np.array(leaf)
        else:
            first = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
            copies = [(shard.index, np.array(shard.data)) for shard in first]
            array = Shards(leaf.shape, leaf.dtype, copies)
        if not (array.dtype == bool or jnp.issubdtype(array.dtype, jnp.number)):
            raise ValueError(f"{name} must be an array of numbers or a number, got {leaf!r}.")
        if name in arrays:
            raise ValueError(f"two leaves have the name {name}; rename one of them.")
        if array.size:
            arrays[name] = array
    return arrays


def gather_shards(comm: Comm | None, tree: PyTree) -> PyTree | None:
    """Replaces shards by whole arrays; returns None on all processes but the first.

    ``comm`` connects the processes that hold the shards. Without it, the tree has no shards.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, Shards))
    for i, leaf in enumerate(leaves):
        parts = comm.gather(leaf.shards) if comm and isinstance(leaf, Shards) else None
        if parts is not None:
            leaves[i] = leaf._replace(shards=list(chain.from_iterable(parts))).whole()
    return jax.tree.unflatten(treedef, leaves) if comm is None or comm.Get_rank() == 0 else None


def from_host_arrays(arrays: dict[str, np.ndarray], like: PyTree, source: str) -> PyTree:
    """Inverts :func:`to_host_arrays`, with the structure, types and placement of ``like``.

    ``like`` is a tree of arrays and Python numbers. If names, shapes or dtypes differ, it raises
    ValueError, which names the ``source`` of the arrays. An array of an optimizer's state keeps the
    dtype that it was saved with, because many optimizers change dtypes at the first step.
    """
    may_change = _optimizer_names(like)
    wanted = {name: leaf for name, leaf in _named_leaves(like) if np.size(leaf)}
    wrong = [f"{name} is not in the checkpoint" for name in wanted if name not in arrays]
    wrong += [f"{name} is not in the state" for name in arrays if name not in wanted]
    for name in wanted.keys() & arrays.keys():
        old, new = arrays[name], wanted[name]
        shape, dtype = np.shape(new), new.dtype if hasattr(new, "dtype") else np.result_type(new)
        fixed = isinstance(new, jax.Array) and name not in may_change
        if old.shape != shape or (fixed and old.dtype != dtype):
            wrong.append(f"{name} is {old.dtype}{old.shape}, the state has {dtype}{shape}")
    if wrong:
        more = f" and {len(wrong) - _MAX_LISTED} more" if len(wrong) > _MAX_LISTED else ""
        raise ValueError(
            f"{source} does not fit the state it is restored into: "
            f"{'; '.join(sorted(wrong)[:_MAX_LISTED])}{more}. Build the same model and optimizer "
            "as when it was saved. If a transformation of your own changes the dtype of its state "
            "at the first step, use this dtype in its init."
        )

    def placed(leaf: Any, value: np.ndarray) -> Any:
        if isinstance(leaf, jax.Array | np.ndarray):
            return place_like(value, leaf)
        # An integer, such as a best loss of 0 at the start, may have become a float.
        keeps_value = np.can_cast(value.dtype, np.result_type(leaf), "same_kind")
        return type(leaf)(value) if keeps_value else value.item()

    leaves = [placed(x, arrays[n]) if np.size(x) else x for n, x in _named_leaves(like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _optimizer_names(tree: PyTree) -> set[str]:
    """Returns the names of the arrays in states of optimizers, without those of averagings."""

    def is_state(node: Any) -> bool:
        of_optax = type(node).__module__.partition(".")[0] == "optax"
        return isinstance(node, ChainState) or (
            of_optax and not isinstance(node, optax.LookaheadParams)
        )

    rest = map_states(AveragingState, lambda _: None, tree)
    return {
        _name_of([*path, *inside])
        for path, node in tree_leaves_with_path(rest, is_leaf=is_state)
        if is_state(node)
        for inside, _ in tree_leaves_with_path(node)
    }


def averaged_names(tree: PyTree, exchanges: Sequence[Exchange]) -> frozenset[str]:
    """Returns the names of the arrays that nodes average, and of those like them: moments.

    An array is recognized by its shape and by the end of its path, which is the path of a leaf
    that an exchange sends.
    """
    sent = set()
    prefix = re.compile(r"^(\.sums)?(\.params|\.moments\[\d+\])?")  # before the parameter's path
    for fragment in find_states(FragmentState, tree):
        if isinstance(fragment.exchange, HostState):
            leaves = [(x.name, x.shape) for x in owner(fragment.exchange, exchanges)[1]]
        else:  # with the sums in its state
            leaves = [(name, np.shape(x)) for name, x in named_floats(fragment.exchange)]
        sent |= {(prefix.sub("", name), shape) for name, shape in leaves}
    rest = map_states(AveragingState, lambda _: None, tree)
    return frozenset(
        _name_of(path)
        for path, leaf in tree_leaves_with_path(rest)
        if any((keystr(path[i:]), np.shape(leaf)) in sent for i in range(len(path) + 1))
    )


class NodePart(NamedTuple):
    """The arrays of a node's state by name, its exchanges in flight, and the run that saved it.

    Attributes:
        averaged: :func:`averaged_names`. If they are not finite, the node cannot continue.
        run: what rank 0 of the job has drawn.
    """

    state: dict[str, np.ndarray]
    in_flight: InFlight
    averaged: Collection[str] = ()
    run: int = 0

    def lost(self) -> list[str]:
        """Returns the names of the averaged arrays that are not finite."""
        return sorted(name for name in self.averaged if not is_finite(self.state[name]))


def is_finite(array: np.ndarray) -> bool:
    floating = jnp.issubdtype(array.dtype, np.floating)
    return not floating or bool(np.isfinite(array.astype(np.float64)).all())


def checkpointer() -> Any:
    """Makes an orbax checkpointer, which writes and reads parts."""
    try:
        from orbax.checkpoint import StandardCheckpointer, options
    except ImportError as error:
        raise ImportError(
            "checkpoints require orbax-checkpoint, which is not installed; run: pip install "
            "orbax-checkpoint"
        ) from error
    # Each process calls it on its own, also if others are part of its JAX program.
    own = jax.process_index()
    alone = options.MultiprocessingOptions(primary_host=own, active_processes={own})
    several = jax.process_count() > 1
    return StandardCheckpointer(**({"multiprocessing_options": alone} if several else {}))


def part_tree(
    state: Mapping[str, Any], posted: InFlight, averaged: Collection[str] = (), run: int = 0
) -> dict[str, Any]:
    """Makes the tree that orbax writes for a :class:`NodePart`, with a checksum for every array.

    >>> tree = part_tree({"w": np.ones(3)}, {})
    >>> sorted(tree), tree["checksums"].shape
    (['about', 'checksums', 'state'], (3,))
    """
    places = [i for i, name in enumerate(sorted(state)) if name in averaged]
    about: dict[str, Any] = {"format": np.int64(FORMAT), "run": np.int64(run)}
    about |= {"averaged": np.array(places, np.int64)} if places else {}
    groups: dict[str, Any] = {"state": state, "in_flight": posted_to_arrays(posted), "about": about}
    # orbax restores a scalar that is not an array as a Python number.
    groups = {
        at: {name: np.asarray(x) for name, x in group.items()} for at, group in groups.items()
    }
    tree: dict[str, Any] = {"checksums": checksums(groups)}
    for at, group in groups.items():
        for name, x in group.items():
            if x.size and x.dtype.name in _WRITTEN_DTYPES:
                tree.setdefault(at, {})[name] = x
            else:  # a line with dtype and shape, and the bytes of the array
                head = json.dumps([x.dtype.name, x.shape]).encode() + b"\n"
                written = np.frombuffer(head + raw_bytes(x), np.uint8)
                tree.setdefault("as_bytes", {}).setdefault(at, {})[name] = written
    return tree


def checksums(groups: Mapping[str, dict[str, np.ndarray]]) -> np.ndarray:
    """Returns the CRC-32 of name, dtype, shape and bytes of each array, by name, in uint32."""
    sums = []
    for group in groups.values():
        for name, array in sorted(group.items()):
            about = f"{name} {array.dtype.name} {array.shape}".encode()
            sums.append(zlib.crc32(raw_bytes(array), zlib.crc32(about)))
    return np.array(sums, np.uint32)


def raw_bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def read_part(reader: Any, path: Path) -> NodePart:
    """Reads a part with a :func:`checkpointer` and verifies its checksums.

    If something is missing, damaged, or not a part, it raises JdasoError, which names the folder,
    and ValueError if the part has another format.
    """
    with _reads_finish():
        try:
            tree = reader.restore(path)
            found = FORMAT  # _validated says what is wrong with a tree that is no part
            if isinstance(tree, Mapping) and "checksums" in tree:
                found = int(np.asarray(tree.get("about", {}).get("format", 0)))
            if found == FORMAT:
                return _validated(tree)
        except Exception as error:  # orbax raises errors of many types
            text = f"{type(error).__name__}: {error}"[:_MAX_ERROR_LENGTH]
            raise JdasoError(f"{path} cannot be read; it is damaged. ({text})") from None
    raise ValueError(
        f"{path} has {f'the format {found}' if found else 'no format number'}, and this version of "
        f"jdaso reads the format {FORMAT}. Continue the training with the version of jdaso that "
        "saved it, or start a new one in another folder."
    )


def _validated(tree: Any) -> NodePart:
    """Returns the part in a tree; raises ValueError if :func:`part_tree` did not make it."""
    if not isinstance(tree, Mapping) or not tree.keys() <= {*_GROUPS, "as_bytes", "checksums"}:
        raise ValueError(f"it is no part of a checkpoint, which has {', '.join(_GROUPS)}")

    def from_bytes(written: Any) -> np.ndarray:
        about, _, data = np.asarray(written, np.uint8).tobytes().partition(b"\n")
        dtype, shape = json.loads(about)
        return np.frombuffer(bytearray(data), np.dtype(dtype)).reshape(shape)

    as_bytes = tree.get("as_bytes", {})
    groups = {
        at: dict(tree.get(at, {})) | {n: from_bytes(x) for n, x in as_bytes.get(at, {}).items()}
        for at in _GROUPS
    }
    for group in groups.values():
        for name, x in group.items():
            is_number = isinstance(x, np.ndarray | np.generic | jax.Array) and (
                x.dtype == bool or jnp.issubdtype(x.dtype, jnp.number)
            )
            if not is_number:
                raise ValueError(f"{name} is not an array of numbers")
            group[name] = np.asarray(x)
    computed, saved = checksums(groups), np.asarray(tree.get("checksums", ()))
    if computed.shape != saved.shape:
        raise ValueError(f"there are {computed.size} arrays and {saved.size} checksums")
    if (changed := computed != saved).any():
        names = [name for group in groups.values() for name in sorted(group)]
        raise ValueError(f"the checksum of {names[int(changed.argmax())]} does not match")
    names, about = sorted(groups["state"]), groups["about"]
    averaged = {names[i] for i in about.get("averaged", ())}
    run = int(about["run"])
    return NodePart(groups["state"], arrays_to_posted(groups["in_flight"]), averaged, run)


class _FinishingLoop(asyncio.SelectorEventLoop):
    """An event loop that finishes its tasks before it is closed."""

    def close(self) -> None:
        if not self.is_closed() and (tasks := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.wait(tasks))
        super().close()


@contextlib.contextmanager
def _reads_finish() -> Iterator[None]:
    """Keeps orbax from printing errors of its own when an array cannot be read.

    orbax reads all arrays as tasks of one event loop, and closes the loop when one of them fails.
    The other reads then report to a closed loop, which prints "Event loop is closed". Coroutines
    that orbax did not start print a warning when they are freed.
    """
    original = asyncio.new_event_loop
    asyncio.new_event_loop = _FinishingLoop
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            yield
    finally:
        asyncio.new_event_loop = original
