"""The order in which a loss uses its parameters: the layers from input to output."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from jdaso.core.types import PyTree

# What a value of a program depends on: the data, or only the parameters of these positions.
_DATA = None
_Origin = frozenset[int] | None


def order_of_use(loss_fn: Callable, params: PyTree, *args: PyTree) -> list[int]:
    """The positions of the leaves in the order in which the loss combines them with data.

    A tree is ordered by its names, which is not always the order of the layers. Restricted
    backpropagation saves operations only if blocks are consecutive in the order of the layers. The
    loss is traced, not computed.

    Args:
        loss_fn: ``(params, *args) -> loss``. Other results are ignored.
        params: Arrays, or anything with shapes and dtypes.
        args: Data, likewise.

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
    origins: list[_Origin] = [
        frozenset([i]) if i < count else _DATA for i in range(len(program.invars))
    ]
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
    if equation.primitive.name in ("scan", "while", "cond"):
        return None
    for value in equation.params.values():
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns") and len(inner.invars) == len(equation.invars):
            return inner
    return None
