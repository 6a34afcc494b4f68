"""One node's part of a checkpoint: named arrays, a checksum for each, written by orbax.

Arrays that orbax cannot write, without elements or of rare dtypes, are written as bytes.

A folder may hold files of another program. Reading executes no code: orbax stores arrays and JSON.
"""

import asyncio
import contextlib
import json
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdaso.checkpoint.checksums import checksums, raw_bytes
from jdaso.checkpoint.in_flight import InFlight, arrays_to_posted, posted_to_arrays
from jdaso.core.types import JdasoError

#: The format of parts. It changes when an older version of jdaso could not read them rightly.
FORMAT = 2
_GROUPS = ("state", "in_flight", "about")
_MAX_ERROR_LENGTH = 300  # characters of an error of orbax
# The dtypes that orbax writes in all of its versions.
_WRITTEN_DTYPES = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
}


class NodePart(NamedTuple):
    """The arrays of a node's state by name, its exchanges in flight, and the run that saved it.

    Attributes:
        averaged: the names of the parameters that the node averages with others, and of arrays
            like them, such as moments. If they are not finite, the node cannot continue.
        run: what rank 0 of the job has drawn.
    """

    state: dict[str, np.ndarray]
    in_flight: InFlight
    averaged: Collection[str] = ()
    run: int = 0

    def lost(self) -> list[str]:
        """The names of the averaged arrays that are not finite."""
        return sorted(name for name in self.averaged if not is_finite(self.state[name]))


def checkpointer() -> Any:
    """An orbax checkpointer, which writes and reads parts."""
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
    """The tree that orbax writes for a :class:`NodePart`, with a checksum for every array.

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
            else:
                tree.setdefault("as_bytes", {}).setdefault(at, {})[name] = _to_bytes(x)
    return tree


def _to_bytes(array: np.ndarray) -> np.ndarray:
    """A line with dtype and shape, and the bytes of the array."""
    about = json.dumps([array.dtype.name, array.shape])
    return np.frombuffer(about.encode() + b"\n" + raw_bytes(array), np.uint8)


def _from_bytes(written: Any) -> np.ndarray:
    about, _, data = np.asarray(written, np.uint8).tobytes().partition(b"\n")
    dtype, shape = json.loads(about)
    return np.frombuffer(bytearray(data), np.dtype(dtype)).reshape(shape)


def read_part(reader: Any, path: Path) -> NodePart:
    """Reads a part with a :func:`checkpointer` and verifies its checksums.

    If something is missing, damaged, or not a part, it raises JdasoError, which names the folder,
    and ValueError if the part has another format.
    """
    with _reads_finish():
        try:
            tree = reader.restore(path)
            if (found := _format_of(tree)) == FORMAT:
                return _validated(tree)
        except Exception as error:  # orbax raises errors of many types
            text = f"{type(error).__name__}: {error}"[:_MAX_ERROR_LENGTH]
            raise JdasoError(f"{path} cannot be read; it is damaged. ({text})") from None
    raise ValueError(
        f"{path} has {f'the format {found}' if found else 'no format number'}, and this version of "
        f"jdaso reads the format {FORMAT}. Continue the training with the version of jdaso that "
        "saved it, or start a new one in another folder."
    )


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


def _validated(tree: Any) -> NodePart:
    """The part in a tree; raises ValueError if the tree is not what :func:`part_tree` made."""
    if not isinstance(tree, Mapping) or not tree.keys() <= {*_GROUPS, "as_bytes", "checksums"}:
        raise ValueError(f"it is no part of a checkpoint, which has {', '.join(_GROUPS)}")
    as_bytes = tree.get("as_bytes", {})
    groups = {
        at: dict(tree.get(at, {})) | {n: _from_bytes(x) for n, x in as_bytes.get(at, {}).items()}
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


def _format_of(tree: Any) -> int:
    """The format of a part, 0 if it has none; of what is no part, that of this version."""
    if not isinstance(tree, Mapping) or "checksums" not in tree:
        return FORMAT  # _validated says what is wrong
    return int(np.asarray(tree.get("about", {}).get("format", 0)))


def is_finite(array: np.ndarray) -> bool:
    """Whether an array is finite."""
    floating = jnp.issubdtype(array.dtype, np.floating)
    return not floating or bool(np.isfinite(array.astype(np.float64)).all())
