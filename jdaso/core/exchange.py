"""The interface of exchanges, the only part of an algorithm that knows a network."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdaso.core.log import logger
from jdaso.core.tree import finite_leaves
from jdaso.core.types import JdasoError, Leaves, Number, Plan, PyTree
from jdaso.core.wire import Wire, rounded

#: Names of the quantities that must be equal on all nodes, as error messages show them. The
#: function :func:`agreement_numbers` computes one number for each.
AGREEMENT_NAMES = ("period", "delay", "phase", "the schedule's state", "the shared state")
#: Length of the header that travels with every exchange and is never rounded: 1 if the node
#: contributes, the sum and the number of its losses in this epoch, and its agreement numbers. The
#: agreement numbers are compared between nodes, all others are summed. In place of the 1, a node
#: that does not contribute has -k, if leaf k is the first that is not finite, counted from 1, and 0
#: if all are finite, but a step since the last merge was skipped. These count as 0 in the sum.
HEADER_SIZE = 3 + len(AGREEMENT_NAMES)
#: Places in the header of an exchange that has ended, which :meth:`BoundExchange.collect` explains.
MEMBERS, LOSSES, FINITE, OWN = 0, slice(1, 3), 3, 4
#: Number of an exchange that is collected immediately and does not count.
UNCOUNTED = -1
#: Name of a leaf that is the same on all devices of a node, whatever ``shardings`` says.
REPLICATED_NAME = "<replicated>"


class PostedExchange(NamedTuple):
    """What this node has sent for an exchange that has not completed.

    Attributes:
        step: optimizer step after which the exchange was posted.
        header: float32[HEADER_SIZE].
        leaves: arrays in their wire dtypes, float32 for int8 and float4.
        block_bits: for each leaf 8 for the wire int8, 4 for float4, 0 for others. Blocks depend on
            the sharding of the leaves.
        relative: as in :meth:`BoundExchange.post`.
    """

    step: int
    header: np.ndarray
    leaves: list[np.ndarray]
    block_bits: tuple[int, ...]
    relative: bool = False


class Shards(NamedTuple):
    """Some shards of an array, each with its place in the array."""

    shape: tuple[int, ...]
    dtype: np.dtype
    shards: list[tuple[tuple[slice, ...], np.ndarray]]

    @property
    def size(self) -> int:
        """The number of elements of the array."""
        return math.prod(self.shape)

    def whole(self) -> np.ndarray:
        """The array, of which these must be all shards."""
        array = np.empty(self.shape, self.dtype)
        for place, shard in self.shards:
            array[place] = shard
        return array


class HostState(NamedTuple):
    """The state of an exchange whose data the host keeps outside the program.

    Attributes:
        key: int32 scalar. What ``init`` returns tells the exchange and the leaves of this process.
            Inside a program it is the token that orders the calls of the exchange.
    """

    key: jax.Array


class SentLeaf(NamedTuple):
    """A floating-point leaf that an exchange sends, with its shape and dtype in the program."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype


class ExchangeRecord(NamedTuple):
    """Timing of a completed exchange.

    The last four fields are pairs of start and end time, in seconds of the monotonic clock.

    Attributes:
        step: optimizer step after which it was posted.
        bytes_sent: bytes that this process sent.
        copy_to_host: the parameters were copied to the host and cast to the wire dtype.
        transfer: the progress thread exchanged messages.
        wait: training was blocked.
        copy_to_device: the sums were copied to the device. Zeros until this copy has ended. With
            host callbacks, JAX makes another copy before ``copy_to_host`` and after
            ``copy_to_device``, which these times do not include.
    """

    number: int
    step: int
    bytes_sent: int
    copy_to_host: tuple[float, float]
    transfer: tuple[float, float]
    wait: tuple[float, float]
    copy_to_device: tuple[float, float]


class BoundExchange:
    """An exchange of one list of leaves: what of it runs inside a program.

    Attributes:
        in_parts: whether :meth:`collect` returns parts of the leaves, one after the other.
    """

    in_parts = False

    def post(
        self,
        state: PyTree,
        number: Number,
        step: Number,
        leaves: Leaves,
        header: jax.Array,
        wire: Wire,
        relative: bool = False,
    ) -> tuple[PyTree, Number]:
        """Posts the leaves, and returns without waiting where the network allows it.

        Args:
            state: what :meth:`Exchange.init`, or the last call, has returned.
            number: int32, counts the exchanges and is equal on all nodes. The Python int
                ``UNCOUNTED`` stands for an exchange that is collected immediately.
            step: int32, equal on all nodes.
            leaves: arrays. Unless ``header[0]`` is 1, they count as zeros, whatever they contain.
            header: float32[HEADER_SIZE].
            wire: a dtype name or None for all leaves, or a tuple with one for each.
            relative: whether the sums are, where m nodes contribute, ``sum_i x_i - m x``. Here x is
                what this node has sent, as rounded on the wire. int8 and float4 exclude it.

        Returns:
            The state and the number of the next exchange.
        """
        raise NotImplementedError

    def collect(
        self, state: PyTree, number: Number, like: Leaves, part: slice | None = None
    ) -> tuple[Leaves, jax.Array, PyTree]:
        """Waits for the sums.

        Args:
            like: arrays or shapes like the leaves, or those of the part.
            part: the part of the leaves to return, if the exchange is ``in_parts``.

        Returns:
            The sums in their accumulation dtype, float32 or float64; the header, and the state. The
            header holds the number of nodes that contributed, the sum and the number of the losses,
            at ``FINITE`` 1 if all sums are finite, 0 if not, and at ``OWN`` 1 if this node has
            contributed. With the wires int8 and float4, the part that this node has summed is not
            rounded yet. The node must round it and keep the rounding error in its error feedback,
            because no other node knows the error.
        """
        raise NotImplementedError

    def after(
        self, state: PyTree, part: slice, lists: list[Leaves], into: list[Leaves] | None = None
    ) -> tuple[PyTree, list[Leaves]]:
        """Orders calls of an exchange that is ``in_parts``. Returns the lists unchanged.

        Calls that take the returned state run after the lists have been computed. Array j of each
        list is like leaf j of the part. With ``into``, the arrays are copied over those of
        ``into``, which must not be used afterwards.
        """
        return state, lists

    def per_shard(self, function: Callable, part: slice) -> Callable:
        """A function that is applied to the shards of each device.

        Lists with one array per leaf of the part are sharded like the leaves, all other arrays are
        replicated.
        """
        return function

    def rounded(self, leaves: Leaves, bits: int | jax.Array) -> Leaves:
        """Rounds the shards of a device to int8 or float4, as :func:`jdaso.core.wire.rounded` does.

        Over MPI between CPUs it is a call of compiled code.
        """
        return [rounded(leaf, bits) for leaf in leaves]


class Exchange:
    """How nodes communicate. This is the only part of an algorithm that knows a network.

    An exchange sums lists of arrays over all nodes, and a header of ``HEADER_SIZE`` numbers.
    ``with jdaso.mpi_exchange(topology) as exchange:`` closes it at the end.

    A new exchange defines :meth:`init`, :meth:`bind` and :meth:`broadcast`. What the other methods
    do here suits one that runs inside the program.

    Args:
        num_nodes: number of nodes.
        wire: dtype name that overrides the algorithm's choice, or None.
        name: what messages call it, if there are several.
        at_close: functions that :meth:`close` calls in this order.

    Attributes:
        keeps_sums: whether the state holds the sums in flight. An exchange is then collected with
            the state that its own ``post`` has returned, also if a later one has been posted.
        compares: whether the exchange compares the agreement numbers of the nodes. If not, the
            engine does not compute them.
        same_bits: whether the last agreement number, the shared state's, must be equal.
        may_shard: whether leaves may be sharded over devices. If not, arrays outside jit are put on
            one device.
        may_abandon: whether nodes may close it at different steps, with ``close(abandon=True)``.
        may_pickle: whether another process could use it. If not, pickling is a TypeError. Copies by
            ``copy.copy`` and ``copy.deepcopy`` are the exchange itself in any case.
    """

    keeps_sums = False
    compares = False
    same_bits = True
    may_shard = False
    may_abandon = True
    may_pickle = True

    def __init__(
        self,
        num_nodes: int,
        wire: str | None = None,
        name: str = "",
        at_close: Sequence[Callable[[], object]] = (),
    ):
        self.num_nodes, self.wire, self.name = num_nodes, wire, name
        self._at_close = [*at_close]
        self._closing = threading.RLock()  # a signal handler may close it again

    def init(self, params: PyTree, sharded: bool = True) -> PyTree:
        """Makes the state of one exchange in flight, arrays only.

        Args:
            params: what is exchanged. ``sharded`` says whether the shardings that the exchange was
                given, if any, describe it.

        Raises:
            JdasoError: if the nodes' parameters differ in structure, shape or dtype.
        """
        raise NotImplementedError

    def bind(self, names: Sequence[str], leaves: Leaves) -> BoundExchange:
        """The exchange of leaves of these names, as ``jax.tree_util.keystr`` returns them."""
        raise NotImplementedError

    @property
    def platform(self) -> str:
        """The platform of the devices that will run the traced program, as far as it is known.

        It decides how a program changes arrays in their places, and no result.
        """
        device = jax.sharding.get_abstract_mesh().abstract_device
        # None has no platform, nor have the devices of JAX 0.10.0.
        return getattr(device, "platform", jax.default_backend())

    def finite_leaves(self, leaves: Leaves) -> jax.Array:
        """Whether all numbers of each leaf are finite on all devices of the node, bool[leaves].

        Over MPI between CPUs it is a call of compiled code.
        """
        return finite_leaves(leaves)

    def broadcast(self, names: Sequence[str], leaves: Leaves, root: int) -> Leaves:
        """The leaves of node ``root``, bit for bit."""
        raise NotImplementedError

    def begin_run(self, total: int | None, params: PyTree, gradients: bool) -> None:
        """Begins a run; called when an optimizer state is made.

        Its exchanges may have the numbers of those of an earlier state, which are then forgotten.

        Args:
            total: the number of steps in the schedule, or None.
            params: over MPI it warns if those of the nodes differ, unless they are None or traced.
            gradients: whether gradients are exchanged, and not parameters.
        """

    def any_node(self, flag: bool) -> bool:
        """Whether any node passed True in one call: this one, or over MPI the fourth before it.

        The answer is the same on all nodes. All nodes call it at the same steps, on the host,
        outside jit.
        """
        return flag

    def sent_leaves(self, state: PyTree) -> list[SentLeaf] | None:
        """What is sent with a state. None if the state is of another exchange, or traced."""
        return None

    def posted(self) -> dict[int, PostedExchange]:
        """What the host keeps outside the state, by number. A checkpoint needs both.

        The dictionary is complete once the program that posts has ended. What it holds counts as
        saved: of other exchanges that are still in flight at the end, :meth:`close` and the exit of
        the process warn.
        """
        return {}

    def post_again(
        self, posted: dict[int, PostedExchange], sent: dict[int, list[SentLeaf]]
    ) -> None:
        """The inverse of :meth:`posted`, called by all nodes together.

        It posts the given exchanges again, whose leaves are ``sent``, and forgets those that were
        still in flight.
        """
        if posted:
            raise ValueError(
                "posted must be empty for an exchange that keeps everything in its state, got "
                f"exchanges {sorted(posted)}, which an mpi_exchange had posted: restore with an "
                "mpi_exchange."
            )

    def report(self) -> dict[str, float]:
        """What the host has measured; zeros for an exchange that runs inside the program."""
        return {"exchanges": 0, "bytes_sent": 0, "seconds_blocked": 0.0, "seconds_in_flight": 0.0}

    def history(self) -> list[ExchangeRecord]:
        """The last thousand completed exchanges."""
        return []

    def close(self, abandon: bool = False) -> None:
        """Completes what is in flight and gives back threads, memory and communicators.

        All nodes call it, on the host. Afterwards the exchange cannot be used. Further calls do
        nothing, and wait until the first one has ended.

        Args:
            abandon: Whether the nodes have stopped at different steps, as after an exception or an
                interrupt. What is in flight then ends without an error and is not merged anywhere.
                A node that is still training goes on alone and is told so, until it closes the
                exchange as well; over MPI the others wait for it, at most the exchange's timeout.
                The end of a ``with`` block does this after an exception.
        """
        with self._closing:
            functions = self._at_close.copy()
            self._at_close.clear()
            for function in functions:
                function()

    def __copy__(self) -> Self:
        return self  # all copies of an optimizer share the connection

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        if not self.may_pickle:
            raise TypeError(
                "an exchange that connects processes, and the optimizer that has it, cannot be "
                "pickled, because the connection belongs to this process: pickle the parameters "
                "and what jdaso.drain returns as the optimizer's state, or save with "
                "jdaso.checkpoint.Checkpoints, and make exchange and optimizer anew where they "
                "are loaded. copy.copy and copy.deepcopy work, and share the exchange."
            )
        return {name: x for name, x in vars(self).items() if name != "_closing"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _closing=threading.RLock())

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        if kind is None:
            self.close()
        elif self.may_abandon:
            try:
                self.close(abandon=True)
            except JdasoError as error:  # that of the block says more, and goes on
                logger.error("%s", error)


_T = TypeVar("_T", Exchange, BoundExchange)


def changed(exchange: _T, **attributes: Any) -> _T:
    """An exchange with other attributes or methods, for what wraps another one.

    >>> changed(Exchange(2), name="outer").name
    'outer'
    """
    result = object.__new__(type(exchange))
    vars(result).update(vars(exchange) | attributes)
    return result


def is_usable(header: jax.Array) -> jax.Array:
    """Whether an exchange has a mean: some nodes have contributed, and no sum has overflowed.

    ``header`` is the one that :meth:`BoundExchange.collect` returns.
    """
    return (header[FINITE] > 0) & (header[MEMBERS] > 0)


# Gives each axis weights of its own.
_ODD = 0x9E3779B1


def agreement_numbers(plan: Plan, schedule: PyTree, shared: PyTree) -> jax.Array:
    """The numbers that ``AGREEMENT_NAMES`` names.

    Args:
        plan: what the schedule requests at this step.
        schedule: the schedule's state.
        shared: what else is the same on all nodes: a center, an anchor, replicated parameters.

    Returns:
        float32[5], integers. Those above 2^24 are rounded to float32.
    """
    numbers = [plan.period, plan.delay, plan.phase, fingerprint(schedule), fingerprint(shared)]
    return jnp.stack([jnp.asarray(number, jnp.float32) for number in numbers])


def fingerprint(tree: PyTree) -> jax.Array:
    """A number that differs, with high probability, if the bits of two trees differ.

    It sums the 32-bit words of a leaf with odd weights, modulo 2^32, along each axis. It detects
    the change of any single word, but for about one in 2^24, and most changes of several words. It
    does not detect the change of the signs of an even number of words.

    Returns:
        int32 scalar in [0, 2^24), 0 if the tree has no leaf.

    >>> a, b = jnp.array([1.0, 2.0]), jnp.array([2.0, 1.0])
    >>> len({int(fingerprint(tree)) for tree in (a, b, {"a": a, "b": b}, ())})
    4
    """
    sums = [jnp.uint32(0)]
    for leaf in jax.tree.leaves(tree):
        words = _words(jnp.asarray(leaf))
        # The weights depend on the leaf before, so that XLA has the products of one leaf after the
        # other in memory.
        first = 2 * sums[-1] + 1
        for axis in range(words.ndim):
            step = 2 * jnp.uint32(pow(_ODD, axis, 2**32))
            weights = first + step * lax.iota(jnp.uint32, len(words))
            weights = weights.reshape(-1, *[1] * (words.ndim - 1))
            words = jnp.sum(words * weights, axis=0, dtype=jnp.uint32)
        sums.append(words)
    odd = 2 * jnp.arange(len(sums), dtype=jnp.uint32) + 1
    total = jnp.sum(jnp.stack(sums) * odd, dtype=jnp.uint32)
    return ((total ^ (total >> 24)) & 0xFFFFFF).astype(jnp.int32)


def _words(leaf: jax.Array) -> jax.Array:
    """The bits of an array as uint32. Narrower dtypes are padded with zero bits."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == bool:
        return leaf.astype(jnp.uint32)
    size = min(leaf.dtype.itemsize, 4)  # 64-bit numbers become two words
    return lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * size}")).astype(jnp.uint32)
