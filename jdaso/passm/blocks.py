"""Blocks of the parameters: consecutive layers, their order, and the subgradient of one block."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.extend.core import Literal

from jdaso.core.tree import is_float, near_equal
from jdaso.core.types import PyTree
from jdaso.core.validation import check_whole

Block = tuple[int, ...]


def partition(params: PyTree, num_blocks: int, order: Sequence[int] | None = None) -> list[Block]:
    """Blocks of consecutive layers with near-equal numbers of weights (passm Sec. 4).

    The arrays that an innermost dictionary or module holds are one layer, such as a kernel and its
    bias. Each array of a list, or of the tree itself, is a layer. Layers are not divided, so a
    block differs from its share of the weights by at most the largest layer.

    Args:
        params: Arrays. Arrays of integers and booleans belong to no block.
        num_blocks: Number of blocks, one for each process; c in the paper.
        order: Positions of the leaves from input to output, from :func:`order_of_use`. None
            selects the order of the tree.

    Returns:
        For each block, the first next to the input, the ascending positions of its arrays in
        ``jax.tree.leaves(params)``.

    Raises:
        ValueError: For more blocks than layers, or an order that is no permutation.

    >>> import numpy as np
    >>> params = {"conv": {"bias": np.ones(2), "kernel": np.ones(4)}, "head": np.ones(6)}
    >>> partition(params, 2)
    [(0, 1), (2,)]
    """
    check_whole("num_blocks", num_blocks, 1)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    order = range(len(leaves)) if order is None else order
    if sorted(order) != list(range(len(leaves))):
        raise ValueError(
            f"order must contain each of the {len(leaves)} positions in jax.tree.leaves(params) "
            f"once, got {list(order)}; use order_of_use(loss_fn, params, *batch)."
        )
    layers: dict[Any, list[int]] = {}
    for position in order:
        path, leaf = leaves[position]
        if is_float(leaf):
            layers.setdefault(_layer(path, position), []).append(position)
    if num_blocks > len(layers):
        raise ValueError(
            f"num_blocks must be at most {len(layers)}, the number of layers, got {num_blocks}; "
            "start fewer processes."
        )
    members = list(layers.values())
    weights = np.array([sum(np.size(leaves[i][1]) for i in layer) for layer in members])
    return [
        tuple(sorted(position for layer in members[first:end] for position in layer))
        for first, end in near_equal(weights, num_blocks)
    ]


def _layer(path: tuple[Any, ...], position: int) -> Any:
    """A key that is equal for the leaves of one layer: the path of their container."""
    if path and getattr(path[-1], "name", None) == "value":  # flax.nnx wraps an array in a variable
        path = path[:-1]
    if not path or isinstance(path[-1], jax.tree_util.SequenceKey):
        return position
    return path[:-1] or position


def check_blocks(blocks: Sequence[Block], params: PyTree, processes: int) -> None:
    """Raises ValueError unless each leaf is in one block and each process has as many blocks."""
    floats = [i for i, leaf in enumerate(jax.tree.leaves(params)) if is_float(leaf)]
    equal = blocks and len(blocks) % processes == 0
    if not equal or sorted(i for block in blocks for i in block) != floats:
        raise ValueError(
            f"blocks must divide all floating-point leaves among {processes} processes, the same "
            f"number of blocks for each, got {list(blocks)}; use partition(params, {processes}), "
            f"or a multiple of {processes}."
        )


# What a value of a program depends on: the data, or only the parameters at these positions.
_DATA = None
_Origin = frozenset[int] | None


def order_of_use(loss_fn: Callable, params: PyTree, *args: PyTree) -> list[int]:
    """The positions of the leaves in the order in which the loss combines them with data.

    A tree is ordered by its names, which is not always the order of the layers. Restricted
    backpropagation saves operations only if blocks are consecutive in the order of the layers.

    Args:
        loss_fn: ``(params, *args) -> loss``. It is traced, not computed.
        params, args: Arrays, or anything with shapes and dtypes.

    Returns:
        The positions of all leaves in ``jax.tree.leaves(params)``. Leaves that are not combined
        with data come last.

    Raises:
        ValueError: If no leaf is combined with data.

    >>> import jax.numpy as jnp
    >>> def loss_fn(params, x):
    ...     return jnp.sum(jnp.tanh(x * params["stem"]) @ params["head"])
    >>> order_of_use(loss_fn, {"head": jnp.ones(2), "stem": jnp.ones(2)}, jnp.ones((3, 2)))
    [1, 0]
    """
    count = len(jax.tree.leaves(params))
    program = jax.make_jaxpr(loss_fn)(params, *args).jaxpr
    origins = [frozenset([i]) if i < count else _DATA for i in range(len(program.invars))]
    used: dict[int, None] = {}  # in order
    _trace_origins(program, origins, used)
    if count and not used:
        raise ValueError(
            "loss_fn combines no parameter with one of its arguments, so the order of the layers "
            "is unknown; pass the data as arguments, not in a closure."
        )
    return list({**used, **dict.fromkeys(range(count))})


def _trace_origins(
    program: Any, origins: Sequence[_Origin], used: dict[int, None]
) -> list[_Origin]:
    """The origins of a program's results; adds parameters combined with data to ``used``."""
    known: dict[Any, _Origin] = dict.fromkeys(program.constvars, frozenset())
    known.update(zip(program.invars, origins, strict=True))

    def origin(value: Any) -> _Origin:
        return frozenset() if isinstance(value, Literal) else known[value]

    for equation in program.eqns:
        given = [origin(value) for value in equation.invars]
        if (inner := _inner_program(equation)) is not None:
            results = _trace_origins(inner, given, used)
        else:
            params = [x for x in given if x is not None]
            combined = frozenset().union(*params)
            if _DATA in given:
                used.update(dict.fromkeys(i for x in params for i in sorted(x)))
            results = [_DATA if _DATA in given else combined] * len(equation.outvars)
        known.update(zip(equation.outvars, results, strict=True))
    return [origin(value) for value in program.outvars]


def _inner_program(equation: Any) -> Any:
    """The inner jaxpr of a call such as jit or remat; None for other equations."""
    if equation.primitive.name not in ("scan", "while", "cond"):
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns") and len(inner.invars) == len(equation.invars):
                return inner
    return None


def restricted_value_and_grad(loss_fn: Callable, block: Block, has_aux: bool = False) -> Callable:
    """Like ``jax.value_and_grad``, with the subgradient of one block only (passm Sec. 4).

    Layers below the block have no backward pass, and layers above it have no subgradients of their
    weights. For one step of each of c processes, with F operations of a whole backward pass, the
    paper counts savings of F (c-1) / 2 in Appendix D and F (c-1)(c-2) / c in Sec. 4, which agree
    for its c = 4 only. Both leave out weights above a block, so the real savings are larger.

    Args:
        loss_fn: ``(params, *args) -> loss`` or, with ``has_aux``, ``(loss, aux)``.
        block: Positions of leaves, one of the blocks of :func:`partition`.
        has_aux: As in ``jax.value_and_grad``.

    Returns:
        ``(params, *args) -> (loss, grads)``, or ``((loss, aux), grads)``. ``grads`` is a tree like
        params with :class:`optax.MaskedNode` in place of all leaves that are not in the block.

    >>> import jax.numpy as jnp
    >>> value_and_grad = restricted_value_and_grad(lambda p, x: p["a"] * p["b"] * x, block=(1,))
    >>> loss, grads = value_and_grad({"a": jnp.float32(2), "b": jnp.float32(3)}, 5.0)
    >>> float(loss), float(grads["b"]), jax.tree.leaves(grads["a"])
    (30.0, 10.0, [])
    """

    def value_and_grad(params: PyTree, *args: PyTree):
        leaves, structure = jax.tree.flatten(params)
        whole = functools.partial(with_leaves, structure, leaves, block)
        value, grads = jax.value_and_grad(
            lambda inside, *args: loss_fn(whole(inside), *args), has_aux=has_aux
        )([leaves[position] for position in block], *args)
        return value, with_leaves(structure, [optax.MaskedNode()] * len(leaves), block, grads)

    return value_and_grad


def with_leaves(
    structure: Any, leaves: Sequence[Any], positions: Block, replacements: Sequence[Any]
) -> PyTree:
    """A tree of these leaves, with replacements for those at some positions."""
    replaced = dict(enumerate(leaves)) | dict(zip(positions, replacements, strict=True))
    return jax.tree.unflatten(structure, replaced.values())
