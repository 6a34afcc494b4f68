"""EAMSGD: EASGD with Nesterov's momentum."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdaso.algorithms.easgd import elastic_averaging
from jdaso.core.exchange import Exchange
from jdaso.core.state import find_state
from jdaso.core.transformation import Averaging, apply_step
from jdaso.core.tree import is_float, is_masked
from jdaso.core.types import PyTree, Schedule
from jdaso.core.validation import check_share


class EamsgdState(NamedTuple):
    """The velocity v, delta, and the states of the learning rate and of the exchange."""

    velocity: PyTree
    momentum: jax.Array
    learning_rate: PyTree
    averaging: PyTree


def eamsgd(
    exchange: Exchange,
    period: int | None = None,
    learning_rate: optax.ScalarOrSchedule | None = None,
    momentum: float | None = None,
    alpha: float | None = None,
    beta: float = 0.9,
    *,
    schedule: Schedule | None = None,
    wire: str | None = None,
    nonfinite: str = "skip",
) -> Averaging:
    """EASGD with Nesterov's momentum.

    With delta the momentum, eta the learning rate, and the elastic force as in :func:`easgd`:

        v <- delta v - eta g(x + delta v)                                  (easgd Eq. 7)
        x <- x + v - alpha (x - c)

    Gradients are taken at the look-ahead point ``y = x + delta v``. The trained ``params`` are y,
    and the state holds v. So y moves by ``v' + delta v' - delta v``. The elastic force acts on
    ``x = y - delta v``, which is also what nodes exchange.

    Use it instead of :func:`easgd` where SGD needs momentum. It is a complete optimizer.

    Args:
        exchange: The connection between nodes.
        period: tau, optimizer steps between two exchanges.
        learning_rate: eta, a number or an optax schedule.
        momentum: delta, in [0, 1). With 0 this is :func:`easgd` with plain SGD.
        alpha, beta, schedule, wire, nonfinite: As in :func:`easgd`.

    Returns:
        An optax transformation. Put nothing after it in a chain. ``update`` requires ``params``.
        Evaluate and save the center, ``easgd_center(opt_state)``. The node's own x is
        ``eamsgd_eval_params(opt_state, params)``.

    Raises:
        ValueError: as :func:`easgd`, and for a momentum outside [0, 1) or no learning rate.

    References:
        Zhang, Choromanska, LeCun, Deep learning with elastic averaging SGD, NeurIPS 2015.

    >>> import jdaso
    >>> tx = jdaso.eamsgd(jdaso.single_exchange(), period=4, learning_rate=0.1, momentum=0.9)
    """
    check_nesterov("eamsgd", learning_rate, momentum)
    inner = elastic_averaging("eamsgd", exchange, period, alpha, beta, schedule, wire, nonfinite)
    return nesterov("eamsgd", inner, learning_rate, momentum)


def check_nesterov(name: str, learning_rate: Any, momentum: Any) -> None:
    """Raises ValueError without a learning rate, or for a momentum outside [0, 1)."""
    if learning_rate is None:
        raise ValueError(f"{name} requires a learning_rate, a number or an optax schedule.")
    if momentum is None:
        raise ValueError(f"{name} requires a momentum in [0, 1).")
    check_share("momentum", momentum, below_one=True)


def nesterov(name: str, inner: Averaging, learning_rate: Any, momentum: Any) -> Averaging:
    """Returns Nesterov's SGD, in which ``inner`` acts on x instead of the look-ahead y."""
    scale, engine = optax.scale_by_learning_rate(learning_rate), inner.engine
    assert engine is not None

    def init(params: PyTree) -> EamsgdState:
        velocity = jax.tree.map(jnp.zeros_like, params)
        delta = jnp.asarray(momentum, jnp.result_type(float))
        return EamsgdState(velocity, delta, scale.init(params), inner.init(params))

    def accelerate(grads, state, params=None, **extra_args):
        # The local optimizer: its updates of x are the velocity.
        velocity, before, rate = state  # delta may change between steps
        steps, rate = scale.update(grads, rate)
        delta = jnp.asarray(momentum, before.dtype)
        velocity = _map_floats(lambda v, s: delta.astype(v.dtype) * v + s, velocity, steps)
        return velocity, (velocity, delta, rate)

    local = optax.GradientTransformationExtraArgs(optax.init_empty_state, accelerate)

    def step(grads, state, params, **extra_args):
        if params is None:
            raise ValueError(f"{name} moves parameters: call update(grads, state, params).")
        x, nested = eamsgd_eval_params(state, params), (tuple(state[:3]), state.averaging)
        result = apply_step(engine, local, grads, nested, x, **extra_args)
        velocity, delta, rate = result.optimizer
        new = EamsgdState(velocity, delta, rate, result.averaging)
        return result._replace(params=_map_floats(jnp.add, result.params, _lead(new))), new

    def apply(grads, state, params, **extra_args):
        result, new = step(grads, state, params, **extra_args)
        return result.params, new

    def update(grads, state, params=None, **extra_args):
        result, new = step(grads, state, params, updates_needed=True, **extra_args)
        own = _map_floats(lambda u, w, v: u + (w - v), result.updates, _lead(new), _lead(state))
        return own, new

    def finish(params, state):
        x = eamsgd_eval_params(state, params)
        moved, averaging = inner.finish(x, state.averaging)
        # y keeps its bits where x has not moved.
        params = _map_floats(lambda y, x, m: y + (m - x), params, x, moved)
        return params, state._replace(averaging=averaging)

    return Averaging(init, update, finish, EamsgdState, inner.exchange, apply)


def eamsgd_eval_params(opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns this node's x of :func:`jdaso.eamsgd`, where ``params`` are ``y = x + delta v``.

    Args:
        opt_state: The state of the whole optimizer.
        params: y, the trained parameters.

    Returns:
        A tree like the parameters, ``x = y - delta v``.

    Raises:
        ValueError: if ``opt_state`` does not hold exactly one state of ``eamsgd``.

    >>> import jax.numpy as jnp, jdaso
    >>> tx = jdaso.eamsgd(jdaso.single_exchange(), period=4, learning_rate=0.5, momentum=0.5)
    >>> params = jnp.float32(4.0)
    >>> updates, state = tx.update(jnp.float32(2.0), tx.init(params), params)
    >>> float(params + updates), float(jdaso.eamsgd_eval_params(state, params + updates))
    (2.5, 3.0)
    """
    # Inside a wrapper, the state has a placeholder for a leaf that another optimizer has.
    return jax.tree.map(
        lambda lead, y: y - lead if not is_masked(lead) and is_float(y) else y,
        *(_lead(find_state(EamsgdState, opt_state, params)), params),
        is_leaf=is_masked,
    )


def _lead(state: EamsgdState) -> PyTree:
    """Returns ``delta v``, by which the look-ahead y is ahead of x."""
    return _map_floats(lambda v: state.momentum.astype(v.dtype) * v, state.velocity)


def _map_floats(function: Callable[..., jax.Array], tree: PyTree, *rest: PyTree) -> PyTree:
    """Maps floating-point leaves, and takes the other leaves from the first tree."""
    return jax.tree.map(lambda x, *xs: function(x, *xs) if is_float(x) else x, tree, *rest)
