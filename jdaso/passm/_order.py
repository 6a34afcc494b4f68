"""In which order a loss uses its parameters: the layers of a network from input to output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from jdaso._base import PyTree

# Where a value of a program comes from: the data, or else these parameters only.
_DATA = None
_Origin = frozenset[int] | None


def order_of_use(loss_fn: Callable, params: PyTree, *args: PyTree) -> list[int]:
    """The positions of the leaves in the order in which data meets them on its way to the loss.

    The order of a tree is that of its names, which need not be that of the layers: restricted
    backpropagation saves work only if blocks are consecutive in this one. The loss is traced, not
    computed.

    Args:
        loss_fn: ``(params, *args) -> loss``; what else it returns does not matter.
        params: arrays, or anything with their shapes and dtypes.
        args: data, likewise.

    Returns:
        The positions of all leaves in ``jax.tree.leaves(params)``; those that meet no data come
        last.

    >>> import jax.numpy as jnp
    >>> def loss_fn(params, x):
    ...     return jnp.sum(jnp.tanh(x * params["stem"]) @ params["head"])
    >>> order_of_use(loss_fn, {"head": jnp.ones(2), "stem": jnp.ones(2)}, jnp.ones((3, 2)))
    [1, 0]
    """
    count = len(jax.tree.leaves(params))
    program = jax.make_jaxpr(loss_fn)(params, *args).jaxpr
    origins: list[_Origin] = [
        frozenset([i]) if i < count else _DATA for i in range(len(program.invars))
    ]
    met: dict[int, None] = {}  # in order
    _follow(program, origins, met)
    if count and not met:
        raise ValueError(
            "no parameter of loss_fn meets one of its arguments, so the order of the layers cannot "
            "be seen: give it the data as arguments, not in a closure."
        )
    return list({**met, **dict.fromkeys(range(count))})


def _follow(program: Any, origins: Sequence[_Origin], met: dict[int, None]) -> list[_Origin]:
    """Notes the parameters that meet data; returns the origins of what a program returns."""
    known: dict[Any, _Origin] = dict.fromkeys(program.constvars, frozenset())
    known.update(zip(program.invars, origins, strict=True))

    def origin(value: Any) -> _Origin:
        return frozenset() if isinstance(value, Literal) else known[value]

    for equation in program.eqns:
        given = [origin(value) for value in equation.invars]
        inner = _called(equation)
        if inner is not None:
            results = _follow(inner, given, met)
        else:
            mixed = _mixed(given)
            if mixed is _DATA:
                met.update(dict.fromkeys(i for x in given if x is not None for i in sorted(x)))
            results = [mixed] * len(equation.outvars)
        known.update(zip(equation.outvars, results, strict=True))
    return [origin(value) for value in program.outvars]


def _called(equation: Any) -> Any:
    """The program that an equation calls with just its own operands, as jit and remat do."""
    if equation.primitive.name in ("scan", "while", "cond"):
        return None
    for value in equation.params.values():
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns") and len(inner.invars) == len(equation.invars):
            return inner
    return None


def _mixed(origins: Iterable[_Origin]) -> _Origin:
    given = list(origins)
    return _DATA if _DATA in given else frozenset().union(*(x for x in given if x is not None))
