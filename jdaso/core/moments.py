"""The moments of an optimizer: how to find, replace and reset them in its state.

Moments are the parts of the state that are trees like the parameters. ``optax.tree_map_params``
finds them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from jdaso.core.state import find_states
from jdaso.core.tree import change_if, is_float, is_masked, widened
from jdaso.core.types import PyTree

#: The fields that a reset leaves as they are, by the type of state. Some count the steps of a
#: schedule or hold a learning rate. Others belong to a step that is not complete yet.
_KEPT: dict[type, tuple[str, ...]] = {
    optax.ApplyEvery: ("count", "grad_acc"),
    optax.ApplyIfFiniteState: ("notfinite_count", "last_finite", "total_notfinite"),
    optax.ConditionallyMaskState: ("step",),
    optax.ConditionallyTransformState: ("step",),
    optax.InjectHyperparamsState: ("count", "hyperparams"),
    optax.InjectStatefulHyperparamsState: ("count", "hyperparams", "hyperparams_states"),
    optax.MultiStepsState: ("mini_step", "gradient_step", "acc_grads", "skip_state"),
    optax.SnapshotState: ("measurement",),
    contrib.DoGState: ("is_init_step", "max_dist", "sum_sq_norm_grads"),
    contrib.DoWGState: ("weighted_sq_norm_grads", "estim_sq_dist"),
    contrib.MechanicState: ("count", "r", "m", "v", "s"),
    contrib.SAMState: ("steps_since_sync", "cache"),
    contrib.ScheduleFreeState: ("b1", "weight_sum", "step_count", "max_lr"),
    contrib.ScaleByAdemamixState: ("count_m2",),
}
#: States with one count for their moments and for the learning rate.
_ONE_COUNT: tuple[type, ...] = (
    contrib.DAdaptAdamWState,
    contrib.MadgradState,
    contrib.MomoAdamState,
    contrib.MomoState,
    contrib.ProdigyState,
    contrib.ScaleBySimplifiedAdEMAMixState,
)
#: Copies of the parameters that do no harm: those from which an optimizer measures distances, and
#: the iterate that schedule-free optimizers interpolate with the parameters.
_KNOWN_COPIES: dict[type, str] = {
    contrib.DoGState: "init_params",
    contrib.DoWGState: "init_params",
    contrib.MechanicState: "x0",
    contrib.ProdigyState: "params0",
    contrib.ScheduleFreeState: "z",
}


def read_moments(
    optimizer: optax.GradientTransformation, state: PyTree, params: PyTree
) -> list[PyTree]:
    """The moments of the floating-point parameters, with MaskedNode in place of all others."""
    found: list[PyTree] = []
    _map_moments(found.append, optimizer, state)

    def is_missing(node: PyTree) -> bool:
        return node is None or is_masked(node)

    def exchanged(moment: Any, x: Any) -> Any:
        # The moment of an integer may be a float. Optax masks whole branches as well as leaves.
        both = not is_missing(moment) and is_float(moment) and is_float(x)
        return moment if both else optax.MaskedNode()

    return [jax.tree.map(exchanged, tree, params, is_leaf=is_missing) for tree in found]


def replace_moments(
    optimizer: optax.GradientTransformation, state: PyTree, moments: list[PyTree]
) -> PyTree:
    """The state with other moments, without those that :func:`read_moments` has left out."""
    rest = iter(moments)

    def replace(tree: PyTree) -> PyTree:
        return jax.tree.map(
            lambda new, old: old if is_masked(new) else new, next(rest), tree, is_leaf=is_masked
        )

    return _map_moments(replace, optimizer, state)


def reset_moments_if(
    platform: str,
    condition: jax.Array,
    optimizer: optax.GradientTransformation,
    state: PyTree,
    params: PyTree,
) -> PyTree:
    """The state with initial moments if the condition holds; see :func:`jdaso.chain`."""

    def reset(state: PyTree) -> PyTree:
        moments = _map_moments(
            lambda _: True, optimizer, state, transform_non_params=lambda _: False
        )
        new = _reset(state, optimizer.init(params), moments)
        # An optimizer may have widened its state at the first step.
        return jax.tree.map(lambda x, old: jnp.asarray(x, old.dtype), new, state)

    return change_if(platform, condition, reset, state)


def check_moments(optimizer: optax.GradientTransformation, state: PyTree, params: PyTree) -> None:
    """Raises ValueError if a state does not show which of its parts are moments.

    If ``params`` are given, moments must be trees like them.
    """
    try:
        _map_moments(lambda tree: tree, optimizer, state)
    except Exception as error:  # of any kind, from the optimizer
        raise ValueError(
            "moments must be 'local' with this optimizer: it cannot be initialized for a tree "
            f"without arrays, which would show which parts of its state are moments ({error})."
        ) from error
    if params is not None:
        try:
            read_moments(optimizer, state, params)
        except ValueError:
            tuples = {type(x).__name__ for x in _tuples(state)}
            raise ValueError(
                "moments must not be 'average' with this optimizer, whose moments are no trees "
                f"like the parameters (its state has {', '.join(sorted(tuples))}). Use "
                "moments='local', or another optimizer."
            ) from None


def _tuples(state: PyTree) -> list[Any]:
    """The NamedTuples in an optimizer's state that have moments as fields."""
    found: list[Any] = []

    def look(node: Any) -> bool:
        if hasattr(node, "_fields") and not all(hasattr(x, "_fields") for x in node):
            found.append(node)
        return False

    jax.tree.leaves(state, is_leaf=look)
    return found


def check_reset(state: PyTree) -> None:
    """Raises ValueError for a state whose moments cannot be reset."""
    for node in find_states(_ONE_COUNT, state):
        raise ValueError(
            f"moments='reset' does not go with the optimizer that has a {type(node).__name__}: "
            "its moments and its learning-rate schedule have one step count, and a reset would "
            "restart the schedule or leave the moments without their correction. Use "
            "moments='local' or 'average'."
        )


def warn_of_copies(state: PyTree, params: PyTree) -> None:
    """Warns if an optimizer's state has a copy of the parameters, which no merge changes."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((state, params))):
        return
    own = [x for x in jax.tree.leaves(params) if _is_floating(x)]
    for path, x in jax.tree_util.tree_leaves_with_path(_without_known_copies(state)):
        candidates = [other for other in own if jnp.shape(other) == jnp.shape(x)]
        # An array of one number, such as zeros or an initial accumulator, may be equal by chance.
        if not candidates or not _is_floating(x) or jnp.size(x) == 0 or not jnp.any(x != x.min()):
            continue
        if any(jnp.array_equal(widened(x), widened(other)) for other in candidates):
            warnings.warn(
                f"the optimizer's state has a copy of parameters, at {jax.tree_util.keystr(path)}. "
                "If the optimizer computes its updates from this copy, as one with float32 copies "
                "of bfloat16 parameters does, it undoes every merge at the next step. Use "
                "jdaso.chain(..., moments='average'), which averages the copy as well.",
                stacklevel=3,
            )
            return


def _is_floating(leaf: Any) -> bool:
    # Of what an optimizer keeps, ``is_float`` would refuse some.
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def _without_known_copies(state: PyTree) -> PyTree:
    def known(node: Any) -> bool:
        return type(node) in _KNOWN_COPIES

    return jax.tree.map(
        lambda x: x._replace(**{_KNOWN_COPIES[type(x)]: ()}) if known(x) else x,
        state,
        is_leaf=known,
    )


def _map_moments(
    function: Callable[[PyTree], Any],
    optimizer: optax.GradientTransformation,
    state: PyTree,
    **options: Any,
) -> PyTree:
    """Maps a function over the trees of a state that are like the parameters."""
    return optax.tree_map_params(optimizer, function, state, is_leaf=lambda _: True, **options)


def _reset(state: PyTree, fresh: PyTree, moments: PyTree) -> PyTree:
    """Resets the moments of a state, and the other arrays of the tuples that have them as fields.

    ``moments`` has True in place of each tree like the parameters. The states inside such a tuple
    are those of other optimizers, and are reset in the same way.
    """
    if moments is True:
        return fresh
    if _is_leaf(state):
        return state
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        owns = any(field is True for field in moments)
        kept = _KEPT.get(type(state), ())
        fields = zip(state._fields, state, fresh, moments, strict=True)
        return type(state)(
            *(
                old if name in kept else new if owns and _is_leaf(old) else _reset(old, new, moment)
                for name, old, new, moment in fields
            )
        )
    return jax.tree.map(_reset, state, fresh, moments, is_leaf=lambda x: x is not state)


def _is_leaf(node: PyTree) -> bool:
    return jax.tree_util.all_leaves([node])
