"""One node's part of a checkpoint: named arrays, a checksum for each, written by orbax.

A folder may hold files of another program. Reading executes no code: orbax stores arrays and JSON.
"""

import asyncio
import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdaso.checkpoint.checksums import checksums
from jdaso.checkpoint.in_flight import InFlight, arrays_to_posted, posted_to_arrays
from jdaso.core.types import JdasoError

#: The format of parts. It changes when an older version of jdaso could not read them rightly.
FORMAT = 1
_GROUPS = ("state", "in_flight", "about")
_MAX_ERROR_LENGTH = 300  # characters of an error of orbax


class NodePart(NamedTuple):
    """The arrays of a node's state by name, its exchanges in flight, and the run that saved it."""

    state: dict[str, np.ndarray]
    in_flight: InFlight
    run: int = 0  # what rank 0 of the job has drawn


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


def part_tree(state: Mapping[str, Any], posted: InFlight, run: int = 0) -> dict[str, Any]:
    """The tree that orbax writes, with a checksum for every array.

    >>> tree = part_tree({"w": np.ones(3)}, {})
    >>> sorted(tree), tree["checksums"].shape
    (['about', 'checksums', 'state'], (3,))
    """
    about = {"format": np.int64(FORMAT), "run": np.int64(run)}
    contents = (state, posted_to_arrays(posted), about)
    groups: dict[str, Any] = dict(zip(_GROUPS, contents, strict=True))
    # orbax restores a scalar that is not an array as a Python number.
    groups = {
        at: {name: np.asarray(x) for name, x in group.items()} for at, group in groups.items()
    }
    written = {at: group for at, group in groups.items() if group}
    return {**written, "checksums": checksums(groups)}


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
    if not isinstance(tree, Mapping) or not tree.keys() <= {*_GROUPS, "checksums"}:
        raise ValueError(f"it is no part of a checkpoint, which has {', '.join(_GROUPS)}")
    groups = {name: dict(tree.get(name, {})) for name in _GROUPS}
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
    run = int(groups["about"]["run"])
    return NodePart(groups["state"], arrays_to_posted(groups["in_flight"]), run)


def _format_of(tree: Any) -> int:
    """The format of a part, 0 if it has none; of what is no part, that of this version."""
    if not isinstance(tree, Mapping) or "checksums" not in tree:
        return FORMAT  # _validated says what is wrong
    return int(np.asarray(tree.get("about", {}).get("format", 0)))


def is_finite(array: np.ndarray) -> bool:
    """Whether an array is finite; a scalar may be infinite, as a best loss is before the first."""
    if not jnp.issubdtype(array.dtype, np.floating):
        return True
    wide = array.astype(np.float64)
    return bool((np.isfinite(wide) if array.ndim else ~np.isnan(wide)).all())
