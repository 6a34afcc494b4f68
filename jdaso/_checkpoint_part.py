"""One node's part of a checkpoint: named arrays, written by orbax, and read with suspicion.

A disk may lose a file or turn a bit, and a folder may hold what jdaso has not written. Numbers are
taken only if they are those that were saved, and nothing that is read is ever executed: what orbax
writes are numbers, and JSON that describes them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdaso._base import JdasoError, Posted
from jdaso._in_flight import joined, of_exchanges, split

_SHOWN = 300  # characters of somebody else's error


class Part(NamedTuple):
    """What a node has saved: its state's arrays by name, and what it had in flight."""

    state: dict[str, np.ndarray]
    in_flight: dict[int, Posted]


def orbax() -> Any:
    """What writes and reads parts."""
    try:
        from orbax.checkpoint import StandardCheckpointer
    except ImportError as error:
        raise ImportError(
            "Checkpoints are written with orbax: pip install orbax-checkpoint"
        ) from error
    return StandardCheckpointer()


def to_write(state: dict[str, np.ndarray], posted: dict[int, Posted]) -> dict[str, Any]:
    """The tree that is written, with a checksum of every array.

    >>> tree = to_write({"w": np.ones(3)}, {})
    >>> sorted(tree), tree["checksums"].shape
    (['checksums', 'state'], (1,))
    """
    groups: dict[str, Any] = {"state": state, "in_flight": split(posted)}
    # Arrays all of them: a number by itself would come back as Python's.
    groups = {
        at: {name: np.asarray(x) for name, x in group.items()} for at, group in groups.items()
    }
    written = {at: group for at, group in groups.items() if group}
    return {**written, "checksums": _checksums(groups)}


def read_part(reader: Any, path: Path) -> Part:
    """Reads a part, all of it or nothing.

    Args:
        reader: from :func:`orbax`.
        path: the part's folder.

    Raises:
        JdasoError: naming the folder, for what is missing, damaged, or something else.
    """
    try:
        return _checked(reader.restore(path))
    except Exception as error:  # of orbax, of any kind
        text = f"{type(error).__name__}: {error}"[:_SHOWN]
        raise JdasoError(
            f"{path} cannot be read; it is damaged, or was not written by this version of jdaso. "
            f"({text})"
        ) from error


def _checked(tree: Any) -> Part:
    """The part that a tree is; raises ValueError if it is none, or was changed."""
    if not isinstance(tree, Mapping) or not tree.keys() <= {"state", "in_flight", "checksums"}:
        raise ValueError("this is no part of a checkpoint")
    groups = {name: dict(tree.get(name, {})) for name in ("state", "in_flight")}
    for group in groups.values():
        for name, x in group.items():
            number = isinstance(x, np.ndarray | np.generic | jax.Array) and (
                x.dtype == bool or jnp.issubdtype(x.dtype, jnp.number)
            )
            if not number:
                raise ValueError(f"{name} is no array of numbers")
            group[name] = np.asarray(x)
    found, saved = _checksums(groups), np.asarray(tree.get("checksums", ()))
    if found.shape != saved.shape:
        raise ValueError(f"{found.size} arrays, but checksums of {saved.size}")
    if (changed := found != saved).any():
        names = [name for group in groups.values() for name in sorted(group)]
        raise ValueError(f"{names[int(changed.argmax())]} is not what was saved")
    return Part(groups["state"], joined(groups["in_flight"]))


def _checksums(groups: Mapping[str, dict[str, np.ndarray]]) -> np.ndarray:
    """uint32, one for each array, in the order of groups and names."""
    return np.array(
        [_checksum(name, group[name]) for group in groups.values() for name in sorted(group)],
        np.uint32,
    )


def _checksum(name: str, array: np.ndarray) -> int:
    array = np.asarray(array)
    about = f"{name} {array.dtype.name} {array.shape}".encode()
    return zlib.crc32(raw(array), zlib.crc32(about))


def raw(array: np.ndarray) -> memoryview:
    """The bytes of an array of any dtype."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def mean_of(parts: Sequence[Path], read: Callable[[Path], Part]) -> dict[str, np.ndarray]:
    """The mean over the nodes that saved, two parts in memory at a time.

    One of whose numbers some are not finite is left out, as of a consensus.

    Raises:
        JdasoError: if they are not of the same arrays, or all are left out.
    """
    first: dict[str, np.ndarray] = {}
    total: dict[str, np.ndarray] = {}
    members = 0
    for path in parts:
        part = read(path).state
        if lost := sorted(k for k, v in part.items() if not is_finite(v)):
            print(f"jdaso: {path} is left out: {lost[0]} is not finite.", flush=True)
            continue
        first = first or part
        if {k: v.shape for k, v in part.items()} != {k: v.shape for k, v in first.items()}:
            raise JdasoError(f"{path} holds other arrays than {parts[0]}.")
        for name, value in part.items():
            if jnp.issubdtype(value.dtype, np.floating):
                total[name] = total.get(name, 0.0) + value.astype(np.float64)
        members += 1
    if not members:
        raise JdasoError(f"no node has saved finite numbers in {parts[0].parent}.")
    return {
        k: (total[k] / members).astype(v.dtype) if k in total else v
        for k, v in first.items()
        if not of_exchanges(k)
    }


def is_finite(array: np.ndarray) -> bool:
    """A number by itself may be infinite, as the best loss before there was one is."""
    if not jnp.issubdtype(array.dtype, np.floating):
        return True
    wide = array.astype(np.float64)
    return bool((np.isfinite(wide) if array.ndim else ~np.isnan(wide)).all())
