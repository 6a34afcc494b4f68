"""Exchanges in flight as named arrays, and optimizer states without their exchanges."""

import re
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdaso.core.exchange import AGREEMENT_NAMES, HEADER_SIZE, PostedExchange
from jdaso.core.state import AveragingState, FragmentState, find_states, map_states
from jdaso.core.types import PyTree
from jdaso.core.wire import WIRE_OF_BITS

#: Position of an :class:`jdaso.Exchange` in the list that Checkpoints was given, and the number
#: of what it has in flight.
Key = tuple[int, int]
InFlight = dict[Key, PostedExchange]


def posted_to_arrays(posted: InFlight) -> dict[str, Any]:
    """Exchanges in flight as named arrays.

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
    """The inverse of :func:`posted_to_arrays`; ValueError for other names or shapes."""
    posted = {}
    left = dict(arrays)
    for name in sorted({".".join(name.split(".")[:2]) for name in arrays}):
        position, number = map(int, name.split("."))
        count = sum(other.startswith(f"{name}.leaf.") for other in arrays)
        fields = ["step", "header", "block_bits", "relative", *(f"leaf.{i}" for i in range(count))]
        if missing := [field for field in fields if f"{name}.{field}" not in left]:
            raise ValueError(f"exchange {name} lacks the array {missing[0]!r}")
        step, header, bits, relative, *leaves = (left.pop(f"{name}.{field}") for field in fields)
        scalars = all(x.shape == () for x in (step, relative))
        if not scalars or header.shape != (HEADER_SIZE,):
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
        posted[position, number] = PostedExchange(
            int(step), header, leaves, block_bits, bool(relative)
        )
    if left:
        raise ValueError(f"{min(left)} belongs to no exchange")
    return posted


def describe_posted(posted: InFlight) -> dict[str, str]:
    """By name, a text of everything in an exchange that must be equal on all nodes.

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
    """Returns the exchanges between processes that states wait for, with the states' names."""
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
    """Returns a text for each exchange in flight whose bits are not those of its state."""
    texts = []
    for key, fragment in awaited_names(arrays):
        said = arrays.get(f"{fragment}.feedback.block_bits", np.zeros(()))  # without feedback
        # The parameters, which come first, have the bits of the state, and moments have 0.
        if key in posted and (bits := max(posted[key].block_bits, default=0)) != said.max():
            texts.append(
                f"exchange {key[1]} has block_bits of {bits}, {fragment} of {int(said.max())}"
            )
    return texts


def remove_exchange_states(tree: PyTree) -> PyTree:
    """A tree without the states of its exchanges, which are of no use to another set of nodes."""
    return map_states(FragmentState, lambda fragment: fragment._replace(exchange=()), tree)


def is_exchange_state(name: str) -> bool:
    """Whether :func:`remove_exchange_states` removes the leaf of this name.

    >>> is_exchange_state("opt_state.1.fragments.0.exchange.sums.w")
    True
    """
    return re.search(r"(^|\.)fragments\.\d+\.exchange(\.|$)", name) is not None


def reset_exchanges(tree: PyTree, like: PyTree) -> PyTree:
    """A tree with nothing in flight and the states of the exchanges of another tree.

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
