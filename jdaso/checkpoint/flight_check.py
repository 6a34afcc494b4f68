"""Whether the exchanges in flight are those that a state waits for, with the leaves it sends.

Copies between a program and the host trust the shapes of the program, so what comes from a file is
compared with the state before it is posted again.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jdaso.checkpoint.host_arrays import name_of
from jdaso.checkpoint.in_flight import InFlight, Key
from jdaso.core.exchange import Exchange, HostState, PostedExchange, SentLeaf
from jdaso.core.state import AveragingState, FragmentState, find_states, map_states
from jdaso.core.tree import named_floats
from jdaso.core.types import JdasoError, PyTree
from jdaso.core.wire import wire_dtype


def exchanges_in_flight(tree: PyTree, exchanges: Sequence[Exchange]) -> InFlight:
    """What the exchanges have in flight; JdasoError unless the tree's states wait for just that."""
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


def averaged_names(tree: PyTree, exchanges: Sequence[Exchange]) -> frozenset[str]:
    """The names of the arrays that nodes average, and of those like them, such as moments.

    An array is recognized by its shape and by the end of its path, which is the path of a leaf
    that an exchange sends.
    """
    sent = set()
    for fragment in find_states(FragmentState, tree):
        if isinstance(fragment.exchange, HostState):
            leaves = [(x.name, x.shape) for x in _owner(fragment.exchange, exchanges)[1]]
        else:  # with the sums in its state
            leaves = [(name, np.shape(x)) for name, x in named_floats(fragment.exchange)]
        sent |= {(_parameter(name), shape) for name, shape in leaves}
    rest = map_states(AveragingState, lambda _: None, tree)
    return frozenset(
        name_of(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(rest)
        if any((keystr(path[i:]), np.shape(leaf)) in sent for i in range(len(path) + 1))
    )


def _parameter(name: str) -> str:
    """The path of a parameter in that of a leaf of an exchange's state or of its moments.

    >>> _parameter(".sums.moments[0]['w']"), _parameter("['w']")
    ("['w']", "['w']")
    """
    return re.sub(r"^(\.sums)?(\.params|\.moments\[\d+\])?", "", name)


def number_exchanges(tree: PyTree, exchanges: Sequence[Exchange]) -> PyTree:
    """The tree with the position of each host state's exchange in place of its key.

    Keys are valid in one process only, so a checkpoint stores positions. It raises ValueError if a
    state belongs to an exchange that is not in the list.
    """

    def numbered(state: HostState) -> HostState:
        return HostState(jnp.asarray(_owner(state, exchanges)[0], jnp.int32))

    return map_states(HostState, numbered, tree)


def with_keys_of(like: PyTree, tree: PyTree, exchanges: Sequence[Exchange], source: str) -> PyTree:
    """The inverse of :func:`number_exchanges`, with the keys of a tree that has equal positions."""
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


def awaited(tree: PyTree, exchanges: Sequence[Exchange]) -> list[tuple[Key, list[SentLeaf]]]:
    """The exchanges that the states in a tree wait for, and the leaves that each has sent."""
    found = []
    for fragment in find_states(FragmentState, tree):
        if isinstance(fragment.exchange, HostState):
            position, leaves = _owner(fragment.exchange, exchanges)
            if fragment.posted:
                found.append(((position, int(fragment.number)), leaves))
        elif _is_scalar(fragment.exchange) and fragment.posted:
            raise JdasoError(
                "a state waits for an exchange with a center, which a checkpoint does not hold: "
                "call jdaso.drain before you save the state, and save what center.read returns."
            )
    return found


def _is_scalar(state: PyTree) -> bool:
    """Whether this is the state of an exchange with a center over MPI."""
    return isinstance(state, jax.Array) and state.ndim == 0


def differences(expected: Iterable[Key], posted: Iterable[Key]) -> list[str]:
    """Texts for the exchanges that a state waits for and those in flight, where they differ.

    >>> differences([(0, 3)], [(0, 3), (0, 4)])
    ['exchange 4 is in flight, and no state waits for it']
    """
    states, flights = Counter(list(expected)), Counter(list(posted))
    return [
        *(f"a state waits for {_name(key)}, which is not in flight" for key in states - flights),
        *(f"{_name(key)} is in flight, and no state waits for it" for key in flights - states),
    ]


def check_leaves(
    sent: Iterable[tuple[Key, list[SentLeaf]]], posted: Mapping[Key, PostedExchange], source: str
) -> None:
    """Raises ValueError unless each exchange in flight has the leaves that its state sends."""
    for key, leaves in sent:
        if text := _difference(posted[key].leaves, leaves):
            raise ValueError(
                f"{source} does not fit the state it is restored into: {_name(key)}, in flight, "
                f"has {text}. Build the same model and optimizer, with the same fragments and "
                "moments, as when it was saved."
            )


def _owner(state: HostState, exchanges: Sequence[Exchange]) -> tuple[int, list[SentLeaf]]:
    """The position of a state's exchange, and the leaves that it sends."""
    for position, exchange in enumerate(exchanges):
        if (leaves := exchange.sent_leaves(state)) is not None:
            return position, leaves
    raise ValueError(
        "the state holds the state of an exchange that Checkpoints was not given: pass all "
        "exchanges of this process, Checkpoints(folder, topology, [first, second])."
    )


def _difference(saved: Sequence[np.ndarray], sent: Sequence[SentLeaf]) -> str | None:
    """A text for the first difference between leaves in flight and those that a state sends."""
    if len(saved) != len(sent):
        return f"{len(saved)} leaves, the state sends {len(sent)}"
    # The wire may differ between steps.
    wires = {wire_dtype(np.float32, wire) for wire in (None, "bfloat16", "float16")}
    for array, leaf in zip(saved, sent, strict=True):
        dtype = np.dtype(leaf.dtype)
        if array.dtype not in wires | {dtype} or array.shape != leaf.shape:
            own = f"{dtype.name}{leaf.shape}"
            return f"{leaf.name} as {array.dtype.name}{array.shape}, the state sends {own}"
    return None


def _name(key: Key) -> str:
    position, number = key
    return f"exchange {number}" + (f" of the exchange at position {position}" if position else "")
