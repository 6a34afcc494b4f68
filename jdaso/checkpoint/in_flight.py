"""Exchanges in flight: the states that wait for them, and their own form as named arrays.

Copies between a program and the host trust the shapes of the program, so what comes from a file is
compared with the state before it is posted again.
"""

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdaso.core.exchange import (
    AGREEMENT_NAMES,
    HEADER_SIZE,
    Exchange,
    HostState,
    PostedExchange,
    SentLeaf,
)
from jdaso.core.state import AveragingState, FragmentState, find_states, map_states
from jdaso.core.types import JdasoError, PyTree
from jdaso.core.wire import WIRE_OF_BITS, wire_dtype

#: Position of an :class:`jdaso.Exchange` in the list that Checkpoints was given, and the number
#: of what it has in flight.
Key = tuple[int, int]
InFlight = dict[Key, PostedExchange]


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
    if texts := differences([key for key, _ in awaited(tree, exchanges)], posted):
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
            position, leaves = owner(state, exchanges)
            if fragment.posted:
                found.append(((position, int(fragment.number)), leaves))
        elif isinstance(state, jax.Array) and state.ndim == 0 and fragment.posted:
            raise JdasoError(
                "a state waits for an exchange with a center, which a checkpoint does not hold: "
                "call jdaso.drain before you save the state, and save what center.read returns."
            )
    return found


def owner(state: HostState, exchanges: Sequence[Exchange]) -> tuple[int, list[SentLeaf]]:
    """Returns the position of a state's exchange, and the leaves that it sends."""
    for position, exchange in enumerate(exchanges):
        if (leaves := exchange.sent_leaves(state)) is not None:
            return position, leaves
    raise ValueError(
        "the state holds the state of an exchange that Checkpoints was not given: pass all "
        "exchanges of this process, Checkpoints(folder, topology, [first, second])."
    )


def differences(expected: Iterable[Key], posted: Iterable[Key]) -> list[str]:
    """Says where the exchanges that states wait for differ from those in flight.

    >>> differences([(0, 3)], [(0, 3), (0, 4)])
    ['exchange 4 is in flight, and no state waits for it']
    """
    states, flights = Counter(list(expected)), Counter(list(posted))
    return [
        *(f"a state waits for {_name(key)}, which is not in flight" for key in states - flights),
        *(f"{_name(key)} is in flight, and no state waits for it" for key in flights - states),
    ]


def _name(key: Key) -> str:
    position, number = key
    return f"exchange {number}" + (f" of the exchange at position {position}" if position else "")


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
    """Replaces the key in each host state by the position of its exchange.

    Keys are valid in one process only, so a checkpoint stores positions.
    """

    def numbered(state: HostState) -> HostState:
        return HostState(jnp.asarray(owner(state, exchanges)[0], jnp.int32))

    return map_states(HostState, numbered, tree)


def with_keys_of(like: PyTree, tree: PyTree, exchanges: Sequence[Exchange], source: str) -> PyTree:
    """Inverts :func:`number_exchanges`, with the keys of a tree that has equal positions."""
    states = iter(find_states(HostState, like))

    def with_key(saved: HostState) -> HostState:
        state, position = next(states), int(saved.key)
        if position != (now := owner(state, exchanges)[0]):
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


def at_step(tree: PyTree, step: int) -> PyTree:
    """Sets the step of all averaging states in a tree.

    For a training that continues with another number of nodes. An epoch then has another number of
    steps, and schedules count steps.

    Args:
        tree: A tree with optimizer states in it.
        step: Optimizer steps taken, by the new count.

    >>> import jdaso
    >>> averaging = jdaso.daso(jdaso.single_exchange(), jdaso.constant(period=4, delay=2))
    >>> state = at_step(averaging.init({"w": jnp.ones(3)}), 100)
    >>> int(state.step)
    100
    """

    def with_step(state: AveragingState) -> AveragingState:
        value = np.asarray(step, state.step.dtype)
        return state._replace(step=jax.device_put(value, state.step.sharding))

    return map_states(AveragingState, with_step, tree)


def posted_to_arrays(posted: InFlight) -> dict[str, Any]:
    """Turns exchanges in flight into named arrays.

    >>> exchange = PostedExchange(3, np.zeros(3, "f4"), [np.ones(2)], block_bits=(0,))
    >>> sorted(posted_to_arrays({(0, 7): exchange}))
    ['0.7.block_bits', '0.7.header', '0.7.leaf.0', '0.7.relative', '0.7.step']
    """
    arrays: dict[str, Any] = {}
    for (position, number), exchange in posted.items():
        name = f"{position}.{number}"
        arrays[f"{name}.step"] = np.int64(exchange.step)
        arrays[f"{name}.header"] = exchange.header
        arrays[f"{name}.block_bits"] = np.array(exchange.block_bits, np.int64)
        arrays[f"{name}.relative"] = np.bool_(exchange.relative)
        arrays |= {f"{name}.leaf.{i}": leaf for i, leaf in enumerate(exchange.leaves)}
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
        checksum = zlib.crc32(sent.encode())
        what = "1 leaf" if len(leaves) == 1 else f"{len(leaves)} leaves"
        most = max(bits, default=0)
        what += f" in {WIRE_OF_BITS[most]}" * (most > 0) + ", relative" * relative
        texts[f"{position}.{number}"] = f"step {step}, {agreed}, {what} ({checksum:08x})"
    return texts


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
