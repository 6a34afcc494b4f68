"""One node's part of a checkpoint: its state and its exchanges in flight, written by orbax.

Both become named arrays with checksums. Arrays that orbax cannot write, without elements or of rare
dtypes, are written as bytes. A folder may hold files of another program. Reading executes no code:
orbax stores arrays and JSON. Copies between a program and the host trust the shapes of the program,
so what comes from a file is compared with the state before it is posted again.
"""

import asyncio
import contextlib
import json
import re
import threading
import warnings
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_leaves_with_path

from jdaso.cluster.topology import Group
from jdaso.core.chain import ChainState
from jdaso.core.exchange import (
    AGREEMENT_NAMES,
    HEADER_SIZE,
    Exchange,
    HostState,
    PostedExchange,
    SentLeaf,
    Shards,
)
from jdaso.core.state import AveragingState, FragmentState, find_states, map_states
from jdaso.core.tree import named_floats, place_like
from jdaso.core.types import JdasoError, PyTree
from jdaso.core.wire import WIRE_OF_BITS, wire_dtype

#: The format of parts. It changes when an older version of jdaso could not read them rightly.
FORMAT = 2
#: Position of an :class:`jdaso.Exchange` in the list that Checkpoints was given, and the number
#: of what it has in flight.
Key = tuple[int, int]
InFlight = dict[Key, PostedExchange]
_GROUPS = ("state", "in_flight", "about")
_MAX_LISTED = 5  # differences in an error
_MAX_ERROR_LENGTH = 300  # characters of an error of orbax
# The dtypes that orbax writes in all of its versions.
_WRITTEN_DTYPES = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
}


class NodePart(NamedTuple):
    """The arrays of a node's state by name, its exchanges in flight, and the run that saved it.

    Attributes:
        averaged: :func:`averaged_names`. If they are not finite, the node cannot continue.
        run: what rank 0 of the job has drawn.
    """

    state: dict[str, np.ndarray]
    in_flight: InFlight
    averaged: Collection[str]
    run: int

    def lost(self) -> list[str]:
        """Returns the names of the averaged arrays that are not finite."""
        return sorted(name for name in self.averaged if not is_finite(self.state[name]))


def is_finite(array: np.ndarray) -> bool:
    floating = jnp.issubdtype(array.dtype, np.floating)
    return not floating or bool(np.isfinite(array.astype(np.float64)).all())


# The state as named arrays.


def _named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    return [(_name_of(path), leaf) for path, leaf in tree_leaves_with_path(tree)]


def _name_of(path: Sequence[Any]) -> str:
    return keystr(tuple(path), simple=True, separator=".")


def to_host_arrays(tree: PyTree) -> dict[str, np.ndarray | Shards]:
    """Copies the leaves of a tree to named arrays; leaves without elements are left out.

    Views would not do: a CPU array may be donated to the next step while a thread writes it. Of an
    array that several processes hold, it copies the shards of this process.

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
        if not _is_numeric(array.dtype):
            raise ValueError(f"{name} must be an array of numbers or a number, got {leaf!r}.")
        if name in arrays:
            raise ValueError(f"two leaves have the name {name}; rename one of them.")
        if array.size:
            arrays[name] = array
    return arrays


def _is_numeric(dtype: np.dtype) -> bool:
    return np.issubdtype(dtype, np.bool_) or jnp.issubdtype(dtype, jnp.number)


def gather_shards(node: Group, tree: PyTree) -> PyTree | None:
    """Replaces shards by whole arrays; returns None on all processes of the node but the first."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, Shards))
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Shards) and (parts := node.gather(leaf.shards, to_all=False)):
            leaves[i] = leaf._replace(shards=list(chain.from_iterable(parts))).whole()
    return jax.tree.unflatten(treedef, leaves) if node.rank == 0 else None


def from_host_arrays(arrays: dict[str, np.ndarray], like: PyTree, source: str) -> PyTree:
    """Inverts :func:`to_host_arrays`, with the structure, types and placement of ``like``.

    If names, shapes or dtypes differ, it raises ValueError, which names the ``source`` of the
    arrays. An array of an optimizer's state keeps the dtype that it was saved with, because many
    optimizers change dtypes at the first step.
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
            leaves = [(x.name, x.shape) for x in _owner(fragment.exchange, exchanges)[1]]
        else:  # with the sums in its state
            leaves = [(name, np.shape(x)) for name, x in named_floats(fragment.exchange)]
        sent |= {(prefix.sub("", name), shape) for name, shape in leaves}
    rest = map_states(AveragingState, lambda _: None, tree)
    return frozenset(
        _name_of(path)
        for path, leaf in tree_leaves_with_path(rest)
        if any((keystr(path[i:]), np.shape(leaf)) in sent for i in range(len(path) + 1))
    )


# Exchanges in flight, and the states that wait for them.


def exchanges_in_flight(tree: PyTree, exchanges: Sequence[Exchange]) -> InFlight:
    """Returns what is in flight; raises JdasoError unless the states wait for exactly that."""
    # Every device must have posted and collected its exchanges. Copying a replicated array would
    # wait for one device only.
    jax.block_until_ready(tree)
    posted = {
        (position, number): posted
        for position, exchange in enumerate(exchanges)
        for number, posted in exchange.posted().items()
    }
    if texts := differences(awaited(tree, exchanges), posted):
        raise JdasoError(
            f"the checkpoint would not be complete: {'; '.join(texts)}. Save the state that the "
            "last step returned, with all optimizer states, and pass all exchanges to Checkpoints."
        )
    return posted


def awaited(tree: PyTree, exchanges: Sequence[Exchange]) -> list[tuple[Key, list[SentLeaf]]]:
    """Returns the exchanges that the states in a tree wait for, and the leaves each has sent."""
    found = []
    for fragment in find_states(FragmentState, tree):
        state = fragment.exchange
        if isinstance(state, HostState):
            position, leaves = _owner(state, exchanges)
            if fragment.posted:
                found.append(((position, int(fragment.number)), leaves))
        elif isinstance(state, jax.Array) and state.ndim == 0 and fragment.posted:
            raise JdasoError(
                "a state waits for an exchange with a center, which a checkpoint does not hold: "
                "call jdaso.drain before you save the state, and save what center.read returns."
            )
    return found


def awaited_names(arrays: dict[str, np.ndarray]) -> list[tuple[Key, str]]:
    """Does what :func:`awaited` does for named arrays, with the names of the states."""
    found = []
    for name, posted in arrays.items():
        if (match := re.fullmatch(r"(.*fragments\.\d+)\.posted", name)) and posted.all():
            # A virtual cluster has the sums in its state, and no key.
            names = (f"{match[1]}.exchange.key", f"{match[1]}.number")
            numbers = [int(arrays[x]) for x in names if x in arrays and arrays[x].size == 1]
            if len(numbers) == 2:
                found.append(((numbers[0], numbers[1]), match[1]))
    return found


def _owner(state: HostState, exchanges: Sequence[Exchange]) -> tuple[int, list[SentLeaf]]:
    """Returns the position of a state's exchange, and the leaves that it sends."""
    for position, exchange in enumerate(exchanges):
        if (leaves := exchange.sent_leaves(state)) is not None:
            return position, leaves
    raise ValueError(
        "the state holds the state of an exchange that Checkpoints was not given: pass all "
        "exchanges of this process, Checkpoints(folder, topology, [first, second])."
    )


def differences(expected: Iterable[tuple[Key, Any]], posted: Iterable[Key]) -> list[str]:
    """Says where the exchanges that states wait for differ from those in flight.

    >>> differences([((0, 3), "its state")], [(0, 3), (0, 4)])
    ['exchange 4 is in flight, and no state waits for it']
    """
    states, flights = Counter(key for key, _ in expected), Counter(list(posted))
    return [
        *(f"a state waits for {_name(key)}, which is not in flight" for key in states - flights),
        *(f"{_name(key)} is in flight, and no state waits for it" for key in flights - states),
    ]


def _name(key: Key) -> str:
    position, number = key
    return f"exchange {number}" + (f" of the exchange at position {position}" if position else "")


def other_bits(arrays: dict[str, np.ndarray], posted: InFlight) -> list[str]:
    """Names each exchange in flight whose bits are not those of its state."""
    texts = []
    for key, fragment in awaited_names(arrays):
        said = arrays.get(f"{fragment}.feedback.block_bits", np.zeros(()))  # without feedback
        # The parameters, which come first, have the bits of the state, and moments have 0.
        if key in posted and (bits := max(posted[key].block_bits, default=0)) != said.max():
            texts.append(
                f"exchange {key[1]} has block_bits of {bits}, {fragment} of {int(said.max())}"
            )
    return texts


def check_leaves(
    sent: Iterable[tuple[Key, list[SentLeaf]]], posted: Mapping[Key, PostedExchange], source: str
) -> None:
    """Raises ValueError unless each exchange in flight has the leaves that its state sends."""
    # The wire may differ between steps.
    wires = {wire_dtype(np.float32, wire) for wire in (None, "bfloat16", "float16")}
    for key, leaves in sent:
        saved = posted[key].leaves
        texts = [
            f"{leaf.name} as {x.dtype.name}{x.shape}, the state sends "
            f"{np.dtype(leaf.dtype).name}{leaf.shape}"
            for x, leaf in zip(saved, leaves, strict=False)
            if x.dtype not in wires | {np.dtype(leaf.dtype)} or x.shape != leaf.shape
        ]
        if len(saved) != len(leaves):
            texts = [f"{len(saved)} leaves, the state sends {len(leaves)}"]
        if texts:
            raise ValueError(
                f"{source} does not fit the state it is restored into: {_name(key)}, in flight, "
                f"has {texts[0]}. Build the same model and optimizer, with the same fragments and "
                "moments, as when it was saved."
            )


def number_exchanges(tree: PyTree, exchanges: Sequence[Exchange]) -> PyTree:
    """Replaces the key in each host state, of one process, by the position of its exchange."""

    def numbered(state: HostState) -> HostState:
        return HostState(jnp.asarray(_owner(state, exchanges)[0], jnp.int32))

    return map_states(HostState, numbered, tree)


def with_keys_of(like: PyTree, tree: PyTree, exchanges: Sequence[Exchange], source: str) -> PyTree:
    """Inverts :func:`number_exchanges`, with the keys of a tree that has equal positions."""
    states = iter(find_states(HostState, like))

    def with_key(saved: HostState) -> HostState:
        state, position = next(states), int(saved.key)
        if position != (now := _owner(state, exchanges)[0]):
            raise ValueError(
                f"{source} was saved with exchange {position} of Checkpoints where the state now "
                f"has exchange {now}: pass the exchanges in the same order as when it was saved."
            )
        return state

    return map_states(HostState, with_key, tree)


def without_exchange_states(tree: PyTree) -> PyTree:
    """Removes the states of exchanges, which are of no use to another set of nodes."""
    return map_states(FragmentState, lambda fragment: fragment._replace(exchange=()), tree)


def is_exchange_state(name: str) -> bool:
    """Returns whether :func:`without_exchange_states` removes the leaf of this name.

    >>> is_exchange_state("opt_state.1.fragments.0.exchange.sums.w")
    True
    """
    return re.search(r"(^|\.)fragments\.\d+\.exchange(\.|$)", name) is not None


def reset_exchanges(tree: PyTree, like: PyTree) -> PyTree:
    """Returns the tree with nothing in flight and the exchanges' states of another tree.

    A node's steps without finite gradients do not concern the mean that all nodes continue from,
    so all are healthy.
    """
    idle = iter(find_states(FragmentState, like))

    def reset(fragment: FragmentState) -> FragmentState:
        posted, healthy = jnp.zeros_like(fragment.posted), jnp.ones_like(fragment.healthy)
        return fragment._replace(posted=posted, healthy=healthy, exchange=next(idle).exchange)

    return map_states(FragmentState, reset, tree)


def describe_posted(posted: InFlight) -> dict[str, str]:
    """Describes, by name, everything in an exchange that must be equal on all nodes.

    >>> exchange = PostedExchange(3, np.zeros(HEADER_SIZE, "f4"), [np.ones(2)], block_bits=(0,))
    >>> describe_posted({(0, 7): exchange})
    {'0.7': 'step 3, [0, 0, 0, 0, 0], 1 leaf (20e9ac1a)'}
    """
    texts = {}
    for (position, number), (step, header, leaves, bits, relative) in posted.items():
        agreed = [int(x) for x in header[-len(AGREEMENT_NAMES) :]]
        each = zip(leaves, bits, strict=True)
        sent = "; ".join(f"{x.dtype.name}{x.shape}" + f" in {n} bits" * (n > 0) for x, n in each)
        what = "1 leaf" if len(leaves) == 1 else f"{len(leaves)} leaves"
        if most := max(bits, default=0):
            what += f" in {WIRE_OF_BITS[most]}"
        what += ", relative" * relative + f" ({zlib.crc32(sent.encode()):08x})"
        texts[f"{position}.{number}"] = f"step {step}, {agreed}, {what}"
    return texts


def posted_to_arrays(posted: InFlight) -> dict[str, Any]:
    """Turns exchanges in flight into named arrays.

    >>> exchange = PostedExchange(3, np.zeros(3, "f4"), [np.ones(2)], block_bits=(0,))
    >>> sorted(posted_to_arrays({(0, 7): exchange}))
    ['0.7.block_bits', '0.7.header', '0.7.leaf.0', '0.7.relative', '0.7.step']
    """
    arrays: dict[str, Any] = {}
    for (position, number), (step, header, leaves, bits, relative) in posted.items():
        fields = {"step": np.int64(step), "header": header, "relative": np.bool_(relative)}
        fields |= {"block_bits": np.array(bits, np.int64)}
        fields |= {f"leaf.{i}": leaf for i, leaf in enumerate(leaves)}
        arrays |= {f"{position}.{number}.{field}": x for field, x in fields.items()}
    return arrays


def arrays_to_posted(arrays: dict[str, np.ndarray]) -> InFlight:
    """Inverts :func:`posted_to_arrays`; raises ValueError for other names or shapes."""
    posted = {}
    left = dict(arrays)
    for name in sorted({".".join(name.split(".")[:2]) for name in arrays}):
        position, number = map(int, name.split("."))
        count = sum(other.startswith(f"{name}.leaf.") for other in arrays)
        fields = ["step", "header", "block_bits", "relative", *(f"leaf.{i}" for i in range(count))]
        if missing := [field for field in fields if f"{name}.{field}" not in left]:
            raise ValueError(f"exchange {name} lacks the array {missing[0]!r}")
        step, header, bits, relative, *leaves = (left.pop(f"{name}.{field}") for field in fields)
        if step.shape or relative.shape or header.shape != (HEADER_SIZE,):
            raise ValueError(
                f"exchange {name} must have scalars and a header of shape ({HEADER_SIZE},), got "
                f"the shape {header.shape}"
            )
        if not np.isfinite(agreed := header[-len(AGREEMENT_NAMES) :]).all():
            raise ValueError(f"exchange {name} must have finite agreement numbers, got {agreed}")
        block_bits = tuple(map(int, bits.flat))
        if len(block_bits) != count or not {*block_bits} <= WIRE_OF_BITS.keys():
            raise ValueError(
                f"exchange {name} must have block_bits of 0, 4 or 8 for each leaf, got {bits}"
            )
        exchange = PostedExchange(int(step), header, leaves, block_bits, bool(relative))
        posted[position, number] = exchange
    if left:
        raise ValueError(f"{min(left)} belongs to no exchange")
    return posted


# What orbax writes and reads.


def checkpointer() -> Any:
    """Makes an orbax checkpointer, which writes and reads parts."""
    try:
        from orbax.checkpoint import StandardCheckpointer, options
    except ImportError as error:
        raise ImportError(
            "checkpoints require orbax-checkpoint, which is not installed; run: pip install "
            "orbax-checkpoint"
        ) from error
    if jax.process_count() == 1:
        return StandardCheckpointer()
    # Each process calls it on its own, also if others are part of its JAX program.
    own = jax.process_index()
    alone = options.MultiprocessingOptions(primary_host=own, active_processes={own})
    return StandardCheckpointer(multiprocessing_options=alone)


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
    named = zip(_GROUPS, (state, posted_to_arrays(posted), about), strict=True)
    # orbax restores a scalar that is not an array as a Python number.
    groups = {at: {name: np.asarray(x) for name, x in group.items()} for at, group in named}
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
            if not isinstance(x, np.ndarray | np.generic | jax.Array) or not _is_numeric(x.dtype):
                raise ValueError(f"{name} is not an array of numbers")
            group[name] = np.asarray(x)
    computed, saved = checksums(groups), np.asarray(tree.get("checksums", ()))
    if computed.shape != saved.shape:
        raise ValueError(f"there are {computed.size} arrays and {saved.size} checksums")
    if (changed := computed != saved).any():
        names = [name for group in groups.values() for name in sorted(group)]
        raise ValueError(f"the checksum of {names[int(changed.argmax())]} does not match")
    state, posted, about = groups.values()
    names = sorted(state)
    averaged = {names[i] for i in about.get("averaged", ())}
    return NodePart(state, arrays_to_posted(posted), averaged, int(about["run"]))


class _FinishingLoop(asyncio.SelectorEventLoop):
    """An event loop that finishes its tasks before it is closed."""

    def close(self) -> None:
        if not self.is_closed() and (tasks := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.wait(tasks))
        super().close()


_reading = threading.Lock()


@contextlib.contextmanager
def _reads_finish() -> Iterator[None]:
    """Keeps orbax from printing errors of its own when an array cannot be read.

    orbax reads all arrays as tasks of one event loop, and closes the loop when one of them fails.
    The other reads then report to a closed loop, which prints "Event loop is closed". Coroutines
    that orbax did not start print a warning when they are freed. Other threads are left alone.
    """
    own = threading.get_ident()

    def new_event_loop() -> asyncio.AbstractEventLoop:
        return _FinishingLoop() if threading.get_ident() == own else original()

    with _reading, warnings.catch_warnings():
        original = asyncio.new_event_loop
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        asyncio.new_event_loop = new_event_loop
        try:
            yield
        finally:
            asyncio.new_event_loop = original
