"""Functions on trees of arrays, most of them on the floating-point leaves."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jdaso.core.types import Leaves, ParamsWithMoments, PyTree
from jdaso.core.wire import round_to, sum_dtype


def is_floating(leaf: Any) -> bool:
    """Whether a leaf has a floating-point dtype, also one that cannot be averaged."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def is_float(leaf: Any) -> bool:
    """Whether a leaf is exchanged. Integers and booleans are not.

    Raises:
        ValueError: for complex leaves, because no wire format is defined for them, and for floats
            of less than 8 bits or without a sign.
    """
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError(
            f"complex parameters are not supported, got a leaf of dtype {dtype}: "
            "store the real and the imaginary part as two leaves."
        )
    if not is_floating(leaf):
        return False
    # Without NaN, nobody would notice that a node's parameters are not finite.
    if jnp.finfo(dtype).bits < 8 or np.dtype(dtype).name == "float8_e8m0fnu":
        raise ValueError(
            f"a leaf of dtype {dtype} cannot be averaged, which requires a sign and NaN: store it "
            "as float8_e5m2, float8_e4m3fn or a wider dtype."
        )
    return True


def check_arrays(name: str, tree: PyTree) -> None:
    """Raises ValueError if a leaf is no array, such as a function in an equinox model."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not hasattr(leaf, "dtype"):
            number = isinstance(leaf, bool | int | float | complex)
            advice = (
                "convert it with jnp.asarray"
                if number
                else "keep such leaves out of the tree, for an equinox model with "
                "params, static = eqx.partition(model, eqx.is_array)"
            )
            raise ValueError(
                f"{name} requires arrays, got {leaf!r} at "
                f"{jax.tree_util.keystr(path) or 'the root'}: {advice}."
            )


def is_placeholder(tree: PyTree) -> bool:
    """Whether a tree has no leaves, and a call of ``init`` with it is not the start of a training.

    ``optax.tree_map_params`` calls ``init`` on such a tree to find the structure of a state. Then
    nothing is compared between nodes, and no numbers restart.
    """
    return not jax.tree.leaves(tree)


def is_masked(node: PyTree) -> bool:
    """Whether a node of a tree is an :class:`optax.MaskedNode`."""
    return isinstance(node, optax.MaskedNode)


@functools.partial(jax.jit, inline=True)  # one program for all shapes outside jit
def finite_leaves(leaves: Leaves) -> jax.Array:
    """Whether all numbers of each array in a list are finite, bool[leaves], in one pass over them.

    A number times zero is zero, unless it is not finite, and one such product makes a sum NaN.
    """
    sums = [jnp.sum(leaf * 0, dtype=sum_dtype(leaf.dtype)) for leaf in leaves]
    # In one array, because XLA fuses a chain of "and" as a whole into every use of it. With 300
    # leaves it would compile for half a minute.
    return jnp.isfinite(jnp.stack(sums)) if sums else jnp.ones((0,), bool)


def all_finite(leaves: Leaves) -> jax.Array:
    """Whether all numbers in a list of arrays are finite, as :func:`finite_leaves` finds it."""
    return jnp.all(finite_leaves(leaves))


def host_arrays(leaf: Any) -> list[np.ndarray]:
    """The different shards of an array that this process holds; none while it is traced by jit."""
    while isinstance(leaf, jax.core.Tracer):
        leaf = getattr(leaf, "val", None)  # of vmap outside jit, the numbers of all nodes
    if isinstance(leaf, jax.Array):
        shards = {str(shard.index): shard.data for shard in leaf.addressable_shards}
        return [np.asarray(shard) for shard in shards.values()]
    return [np.asarray(leaf)] if isinstance(leaf, np.ndarray | np.generic) else []


def check_finite(name: str, kind: str, tree: PyTree, num_nodes: int) -> None:
    """Raises ValueError for a leaf whose sum over the nodes is not finite, where values are known.

    The nodes' leaves are taken to be about as large as this node's.
    """

    def is_finite(x: np.ndarray) -> bool:
        if x.size == 0:
            return True
        largest = max(float(x.max()), -float(x.min()))  # NaN if there is one
        return largest <= float(jnp.finfo(sum_dtype(x.dtype)).max) / num_nodes

    for path, leaf in named_floats(tree):
        if not all(map(is_finite, host_arrays(leaf))):
            raise ValueError(
                f"{name}: the {kind} {path or 'that was given'} is not finite, or too large for a "
                f"sum over {num_nodes} nodes, so no exchange could average it. Start from finite "
                f"numbers. {KEEP_OUT}"
            )


#: What to do about a leaf that is not finite by design.
KEEP_OUT = (
    "If the leaf is not finite by design, such as a mask of -inf, keep it out of the parameters: "
    "pass it to the model beside them, make it a static field, or separate it with "
    "equinox.partition. A mask of large negative numbers, such as -1e9, is finite."
)


def float_leaves(tree: PyTree) -> Leaves:
    """The floating-point leaves of a tree."""
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def named_floats(tree: PyTree) -> list[tuple[str, Any]]:
    """Path and value of each floating-point leaf of a tree."""
    return [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_floating(leaf)
    ]


def split(tree: PyTree) -> tuple[Leaves, Callable[[Leaves], PyTree]]:
    """The floating-point leaves of a tree, and a function that replaces them in the tree."""
    leaves, treedef = jax.tree.flatten(tree)

    def replace(floats: Leaves) -> PyTree:
        rest = iter(floats)
        return jax.tree.unflatten(treedef, [next(rest) if is_float(x) else x for x in leaves])

    return [x for x in leaves if is_float(x)], replace


def split_state(
    init: Callable[[PyTree], PyTree], state: PyTree
) -> tuple[list[Leaves], Leaves, Callable[..., PyTree]]:
    """Takes a state apart that ``init`` has made of parameters.

    Returns:
        The floating-point leaves of each of its trees like the parameters; all other arrays, such
        as step counts; and ``(lists, rest, part) -> state``, which puts them together again. If a
        part is given, the lists hold only the leaves of this part, and :class:`optax.MaskedNode`
        takes the places of the others.
    """

    def map_state(of_tree: Callable[[PyTree], Any], of_rest: Callable[[Any], Any]) -> PyTree:
        return optax.tree_map_params(
            init, of_tree, state, transform_non_params=of_rest, is_leaf=lambda _: True
        )

    trees: list[PyTree] = []
    rest: Leaves = []
    map_state(trees.append, rest.append)

    def rebuild(lists: list[Leaves], rest: Leaves, part: slice = slice(None)) -> PyTree:
        new_lists, new_rest = iter(lists), iter(rest)

        def fill(tree: PyTree) -> PyTree:
            floats, replace = split(tree)
            new: list[Any] = [optax.MaskedNode()] * len(floats)
            new[part] = next(new_lists)
            return replace(new)

        return map_state(fill, lambda _: next(new_rest))

    return [float_leaves(tree) for tree in trees], rest, rebuild


def where_tree(condition: jax.Array, x: PyTree, y: PyTree) -> PyTree:
    """``jnp.where`` with one condition for all leaves of two trees."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), x, y)


@contextlib.contextmanager
def helpful_errors(name: str) -> Iterator[None]:
    """Replaces JAX's errors of an exchange inside vmap and shard_map. They name ``name``."""
    try:
        yield
    except NotImplementedError as error:
        if "vmap" not in str(error):
            raise
        raise ValueError(
            f"{name}: jax.vmap cannot contain an mpi_exchange, which is for the whole process. For "
            "a virtual cluster pass jdaso.axis_exchange(axis_name, num_nodes) in its place."
        ) from error
    except TypeError as error:
        if "manual axis types" not in str(error):
            raise
        raise ValueError(
            f"{name}: inside shard_map, update requires shard_map(..., check_vma=False), because "
            "JAX cannot know that exchanged values are equal on all nodes."
        ) from error


def change_if(platform: str, condition: jax.Array, change: Callable, *operands: Any) -> Any:
    """``change(*operands)`` if the condition holds, otherwise the operands, in their places.

    Use it for work that is due at few steps. ``change`` returns as many trees as there are
    operands.

    It is a conditional whose first branch changes the operands. If that branch came second, XLA
    would copy them on CPU devices. On a GPU it is a loop of at most one round:

    - XLA for GPUs reverses the branches of a conditional and copies what passes it at every step. A
      loop changes its arrays in place.
    - It also makes the conditional an ``if`` before it partitions the program for several devices,
      and the ``if`` loses the shardings, so that all devices gather sharded arrays. A loop keeps
      them.

    On a GPU the host waits for the device in both forms, because it has to read the condition. It
    reads the condition of a loop once more after the round. On a TPU a loop would take twice the
    temporary memory of the conditional.
    """
    if platform != "gpu":

        def keep(*operands):
            return operands if len(operands) > 1 else operands[0]

        return lax.cond(condition, change, keep, *operands)

    def change_all(carry):
        new = change(*carry[1])
        return jnp.zeros_like(condition), new if len(operands) > 1 else (new,)

    arrays = jax.tree.map(jnp.asarray, operands)
    _, result = lax.while_loop(lambda carry: carry[0], change_all, (condition, arrays))
    return result if len(operands) > 1 else result[0]


def change_unless_skipped(
    platform: str, condition: jax.Array, change: Callable, *operands: Any
) -> Any:
    """As :func:`change_if`, for work that is due at nearly every step.

    On a GPU, where the host would wait for the condition, it always computes the change, and
    selects between the old and the new values. Elsewhere XLA would copy the old values for that, so
    there it is a conditional.
    """
    if platform != "gpu":
        return change_if(platform, condition, change, *operands)
    return where_tree(condition, change(*operands), operands)


def place_like(value: Any, like: Any) -> Any:
    """Moves an array to the devices of ``like``, so that a compiled step accepts it.

    Returns the value unchanged while tracing, and if ``like`` is not a JAX array. If ``like`` is
    not committed to its device, JAX may still move the result to others.
    """
    traced = isinstance(value, jax.core.Tracer) or isinstance(like, jax.core.Tracer)
    if traced or not isinstance(like, jax.Array):
        return value
    if not like.committed:
        return jnp.asarray(value)
    if not like.is_fully_addressable and getattr(value, "is_fully_addressable", True):
        # device_put would send the whole value to the other processes to compare it.
        return jax.make_array_from_callback(value.shape, like.sharding, value.__getitem__)
    return jax.device_put(value, like.sharding)


def add_updates(params: PyTree, updates: PyTree) -> PyTree:
    """``params + updates`` in the dtypes of the parameters. An update may be None for no change."""

    def add(x, update):
        return x if x is None or update is None else round_to(x + update, jnp.result_type(x))

    return jax.tree.map(add, params, updates, is_leaf=lambda x: x is None)


def difference(params: PyTree, updates: PyTree, moved: PyTree) -> PyTree:
    """The updates that lead from ``params`` to ``moved``, in the dtypes of ``updates``.

    Parameters that are not finite count as 0. Leaves that are not exchanged keep their update.
    """

    def subtract(x, update, m):
        if x is None or not is_float(x):
            return update
        wide = sum_dtype(x.dtype)
        own = jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))
        change = m.astype(wide) - own.astype(wide)
        return change if update is None else round_to(change, update.dtype)

    return jax.tree.map(subtract, params, updates, moved, is_leaf=lambda x: x is None)


def widened(tree: PyTree) -> PyTree:
    """The tree with its floating-point leaves cast to their ``sum_dtype``."""
    return jax.tree.map(lambda x: x.astype(sum_dtype(x.dtype)) if is_float(x) else x, tree)


def division_by(denominator: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Divides arrays by a scalar, with products, which are several times as fast as divisions.

    A product with ``1 / denominator`` alone would not do. That number is rounded, so all results
    would be too large, or all too small, and this error adds up over thousands of means. The
    reciprocal is therefore the sum of two float32 numbers, which is more precise than one.
    """
    denominator = jnp.asarray(denominator, jnp.float32)
    bits = lax.bitcast_convert_type(1 / denominator, jnp.int32)
    upper = lax.bitcast_convert_type(bits & ~0xFFFF, jnp.float32)
    # The product of the upper 8 bits with a denominator of up to 16 bits is exact.
    lower = (1 - denominator * upper) / denominator

    def divide(numerator: jax.Array) -> jax.Array:
        if numerator.dtype != jnp.float32:  # float64, whose bias is too small to add up
            return numerator / denominator.astype(numerator.dtype)
        return numerator * upper + numerator * lower

    return divide


def outline(params: PyTree) -> list[str]:
    """Path, dtype and shape of each leaf, as text to compare and to print."""
    return [
        f"{jax.tree_util.keystr(path) or 'params'}: {jnp.result_type(leaf).name}{jnp.shape(leaf)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    ]


#: The number of fragments of about equal bytes, or ``path of a leaf -> index of its fragment``.
Fragments = int | Callable[[Any], int]


def cut(tree: PyTree, fragments: Fragments) -> list[list[int]]:
    """Assigns the leaves of a tree to fragments.

    With a number of fragments, the floating-point leaves of a fragment are consecutive. Integers
    and booleans belong to the first fragment, and moments to the fragment of their parameter.

    Args:
        tree: arrays, or :class:`jdaso.core.types.ParamsWithMoments`.
        fragments: their number, or a function. Each gets at least one floating-point leaf.

    Returns:
        For each fragment the positions of its leaves in ``jax.tree.leaves(tree)``.

    Raises:
        ValueError: if the tree has fewer floating-point leaves than fragments, or if a function
            leaves out an index.

    >>> cut([np.ones(6, "f4"), np.ones(2, "f4"), np.ones(3, "f4"), np.ones(1, int)], 2)
    [[0, 3], [1, 2]]
    >>> cut([np.ones(6, "f4"), np.ones(2, "f4"), np.ones(3, "f4")], lambda path: path[0].idx % 2)
    [[0, 2], [1]]
    """
    if isinstance(tree, ParamsWithMoments):
        return _with_moments(cut(tree.params, fragments), tree)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    leaves = jax.tree.leaves(tree)
    floats = [i for i, leaf in enumerate(leaves) if is_float(leaf)]
    rest = [i for i in range(len(leaves)) if i not in set(floats)]
    if callable(fragments):
        index = {i: fragments(paths[i]) for i in floats}
        used = sorted(set(index.values()))
        if used != list(range(len(used))):
            raise ValueError(
                "fragments: the function must return each index from 0 to the number of fragments "
                f"- 1 for at least one floating-point leaf, got the indices {used[:9]}."
            )
        parts = [[i for i in floats if index[i] == k] for k in used] or [[]]
    else:
        if len(floats) < fragments and leaves:
            raise ValueError(
                f"fragments must be at most {len(floats)}, the number of floating-point leaves, "
                f"got {fragments}."
            )
        sizes = np.array([leaves[i].size * leaves[i].dtype.itemsize for i in floats])
        parts = [floats[a:b] for a, b in near_equal(sizes, fragments)]
    return [parts[0] + rest, *parts[1:]]


def float_positions(tree: PyTree, fragments: Fragments) -> list[list[int]]:
    """The positions of each fragment's floating-point leaves."""
    leaves = jax.tree.leaves(tree)
    return [[i for i in positions if is_float(leaves[i])] for positions in cut(tree, fragments)]


def near_equal(sizes: np.ndarray, count: int) -> list[tuple[int, int]]:
    """Cuts a sequence of things into ``count`` runs of near-equal total size.

    Returns start and end of each run. No run is empty, so ``sizes`` needs at least ``count``
    elements.

    >>> near_equal(np.array([6, 2, 3]), 2)
    [(0, 1), (1, 3)]
    """
    middles = np.cumsum(sizes) - sizes / 2
    ends = [0]
    for k in range(1, count):
        wanted = int(np.searchsorted(middles, sizes.sum() * k / count))
        ends.append(max(ends[-1] + 1, min(wanted, len(sizes) - count + k)))
    ends.append(len(sizes))
    return list(itertools.pairwise(ends))


def _with_moments(fragments: list[list[int]], tree: ParamsWithMoments) -> list[list[int]]:
    """Adds the positions of the moments. Each tree of moments is like the parameters."""
    leaves, structure = jax.tree.flatten(tree.params)
    numbers = jax.tree.unflatten(structure, range(len(leaves)))
    owners: list[int] = []  # the parameter of each leaf of the moments
    for moments in tree.moments:
        kept = jax.tree.map(
            lambda m, i: () if is_masked(m) else i, moments, numbers, is_leaf=is_masked
        )
        owners += jax.tree.leaves(kept)
    return [
        positions + [len(leaves) + k for k, i in enumerate(owners) if i in positions]
        for positions in fragments
    ]


def part_of(tree: PyTree, positions: list[int]) -> PyTree:
    """The tree with :class:`optax.MaskedNode` in place of the leaves at other positions."""
    leaves, treedef = jax.tree.flatten(tree)
    keep = set(positions)
    return jax.tree.unflatten(
        treedef, [leaf if i in keep else optax.MaskedNode() for i, leaf in enumerate(leaves)]
    )
