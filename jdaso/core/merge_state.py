"""Parts of a merge rule's state, and what a rule computes from what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdaso.core.tree import float_leaves, is_float
from jdaso.core.types import Arrival, Leaves, Merge, PyTree
from jdaso.core.wire import sum_dtype

#: Places of arrays: the list of each, and its index.
Reads = set[tuple[int, int]]


class SplitState(NamedTuple):
    """A merge rule's state, taken apart.

    Attributes:
        lists: for each of its trees like the parameters the floating-point leaves.
        rest: all other arrays, such as step counts.
        rebuild: ``(lists, rest, part) -> state``. If a part is given, the lists hold only the
            leaves of this part, and :class:`optax.MaskedNode` takes the places of the others.
    """

    lists: list[Leaves]
    rest: Leaves
    rebuild: Callable[..., PyTree]


def split_state(init: Callable[[PyTree], PyTree], state: PyTree) -> SplitState:
    """Takes the state of a merge rule apart, which ``init`` has made."""

    def map_state(of_tree: Callable[[PyTree], Any], of_rest: Callable[[Any], Any]) -> PyTree:
        return optax.tree_map_params(
            init, of_tree, state, transform_non_params=of_rest, is_leaf=lambda _: True
        )

    trees: list[PyTree] = []
    rest: Leaves = []
    map_state(trees.append, rest.append)

    def rebuild(lists: list[Leaves], rest: Leaves, part: slice | None = None) -> PyTree:
        new_lists, new_rest = iter(lists), iter(rest)
        return map_state(
            lambda tree: _replace(tree, next(new_lists), part), lambda _: next(new_rest)
        )

    return SplitState([float_leaves(tree) for tree in trees], rest, rebuild)


def _replace(tree: PyTree, floats: Leaves, part: slice | None) -> PyTree:
    """The tree with other floating-point leaves, or with those of a part only."""
    leaves, treedef = jax.tree.flatten(tree)
    new: list[Any] = [x for x in leaves if is_float(x)]
    if part is None:
        new = floats
    else:
        new = [optax.MaskedNode()] * len(new)
        new[part] = floats
    rest = iter(new)
    return jax.tree.unflatten(treedef, [next(rest) if is_float(x) else x for x in leaves])


class Dependence(NamedTuple):
    """What the results of a merge depend on.

    Attributes:
        leafwise: whether leaf j, of the parameters and of each list of the state, depends on the
            leaves j only, and whether the rest of the state depends on no leaf.
        in_place: whether each leaf also depends on no leaf of another list, except for the sums. It
            can then be computed in the place of the old leaf.
    """

    leafwise: bool
    in_place: bool


def dependence(merge: Merge, leaves: Leaves, state: SplitState) -> Dependence:
    """Finds out what the results of a merge rule depend on, without computing them."""
    count = len(leaves)
    wide: list[Any] = [jax.ShapeDtypeStruct(x.shape, sum_dtype(x.dtype)) for x in leaves]
    lists = [wide, *state.lists]
    scalars = (jnp.float32(1), jnp.int32(1), jnp.bool_(True))

    def rule(lists, sums, rest):
        arrival = Arrival(sums[:count], sums[count:], *scalars)
        merged, new = merge.merge(lists[0], arrival, state.rebuild(lists[1:], rest))
        split = split_state(merge.init, new)
        return [merged, *split.lists], split.rest

    jaxpr = jax.make_jaxpr(rule)(lists, 2 * wide, state.rest).jaxpr
    # Each array has a list and an index. The sums are list -1.
    places = [(k, j) for k, each in enumerate(lists) for j in range(len(each))]
    inputs = [*places, *((-1, j % count) for j in range(2 * count))]
    rest = len(jaxpr.invars) - len(inputs)
    results = _reads(jaxpr, [*({place} for place in inputs), *[set()] * rest])
    of_lists = list(zip(places, results, strict=False))
    return Dependence(
        leafwise=all(own == j for (_, own), read in of_lists for _, j in read)
        and not any(results[len(places) :]),
        in_place=all(k in (-1, own) for (own, _), read in of_lists for k, _ in read),
    )


def _reads(jaxpr: Any, inputs: Sequence[Reads]) -> list[Reads]:
    """What each result of a jaxpr depends on, for what each of its arguments depends on."""
    reads = dict(zip(jaxpr.invars, inputs, strict=True))
    for equation in jaxpr.eqns:
        # Literals, which have a value, read nothing. Neither do constants.
        of = [set() if hasattr(v, "val") else reads.get(v, set()) for v in equation.invars]
        if equation.primitive.name in ("jit", "pjit"):
            results = _reads(equation.params["jaxpr"].jaxpr, of)
        else:
            results = [set().union(*of)] * len(equation.outvars)
        reads |= dict(zip(equation.outvars, results, strict=True))
    return [set() if hasattr(v, "val") else reads.get(v, set()) for v in jaxpr.outvars]
