"""EAMSGD: EASGD with Nesterov's momentum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdaso._base import Exchange, PyTree, Schedule
from jdaso._engine import Averaging
from jdaso._leaves import is_float
from jdaso._state import the_state
from jdaso.algorithms._arguments import check_share
from jdaso.algorithms._easgd import elastic


class EamsgdState(NamedTuple):
    """v, delta, the state of the learning rate, and that of the exchange."""

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

    Gradients are taken at the look-ahead point: the params that are trained are
    ``y = x + delta v``, and v is kept here. So y moves by ``v' + delta v' - delta v``, and the
    elastic force acts on, and nodes exchange, ``x = y - delta v``.

    Args:
        exchange: how nodes reach each other.
        period: tau, optimizer steps between two exchanges.
        learning_rate: eta, a number or an optax schedule.
        momentum: delta, in [0, 1). 0 is :func:`easgd` with plain SGD.
        alpha, beta, schedule, wire, nonfinite: as in :func:`easgd`.

    Returns:
        An optax transformation, a whole optimizer: nothing comes after it in a chain. ``update``
        needs ``params``. ``easgd_center(opt_state)`` is the centre, which is what one evaluates
        and saves, ``eamsgd_eval_params(opt_state, params)`` the node's own x.

    Raises:
        ValueError: as :func:`easgd`, and for a momentum outside [0, 1) or no learning rate.

    References:
        Zhang, Choromanska, LeCun, Deep learning with elastic averaging SGD, NeurIPS 2015.

    >>> import jdaso
    >>> tx = jdaso.eamsgd(jdaso.single_exchange(), period=4, learning_rate=0.1, momentum=0.9)
    """
    check_nesterov("eamsgd", learning_rate, momentum)
    inner = elastic("eamsgd", exchange, period, alpha, beta, schedule, wire, nonfinite)
    return nesterov("eamsgd", inner, learning_rate, momentum)


def check_nesterov(name: str, learning_rate: Any, momentum: Any) -> None:
    """Raises ValueError without a learning rate, or for a momentum outside [0, 1)."""
    if learning_rate is None:
        raise ValueError(f"{name} needs a learning_rate, a number or an optax schedule.")
    if momentum is None:
        raise ValueError(f"{name} needs a momentum in [0, 1).")
    check_share("momentum", momentum, below_one=True)


def nesterov(name: str, inner: Averaging, learning_rate: Any, momentum: Any) -> Averaging:
    """SGD with Nesterov's momentum, at whose x, not y, something else pulls."""
    delta = momentum
    scale = optax.scale_by_learning_rate(learning_rate)

    def init(params: PyTree) -> EamsgdState:
        velocity = jax.tree.map(jnp.zeros_like, params)
        momentum = jnp.asarray(delta, jnp.result_type(float))
        return EamsgdState(velocity, momentum, scale.init(params), inner.init(params))

    def update(grads, state, params=None, **extra_args):
        if params is None:
            raise ValueError(f"{name} moves parameters: call update(grads, state, params).")
        steps, learning_rate = scale.update(grads, state.learning_rate)
        old, before = state.velocity, state.momentum  # delta may be another at every step
        new = _map_floats(lambda v, s: jnp.asarray(delta, v.dtype) * v + s, old, steps)
        updates = _map_floats(
            lambda v, w: jnp.asarray(1 + delta, w.dtype) * w - before.astype(v.dtype) * v, old, new
        )
        x = _map_floats(lambda y, v: y - before.astype(v.dtype) * v, params, old)
        updates, averaging = inner.update(updates, state.averaging, x, **extra_args)
        # A step that was skipped must leave no trace here.
        taken = averaging.skipped == state.averaging.skipped
        velocity = jax.tree.map(lambda v, w: jnp.where(taken, w, v), old, new)
        momentum = jnp.where(taken, jnp.asarray(delta, before.dtype), before)
        return updates, EamsgdState(velocity, momentum, learning_rate, averaging)

    def finish(params, state):
        x = eamsgd_eval_params(state, params)
        moved, averaging = inner.finish(x, state.averaging)
        # Where nothing has moved x, y stays as it is, to the bit.
        params = _map_floats(lambda y, x, m: y + (m - x), params, x, moved)
        return params, state._replace(averaging=averaging)

    return Averaging(init, update, finish, state_type=EamsgdState)


def eamsgd_eval_params(opt_state: PyTree, params: PyTree) -> PyTree:
    """This node's x of :func:`jdaso.eamsgd`, from the look-ahead point: ``x = y - delta v``.

    Args:
        opt_state: the whole optimizer's state.
        params: y, what is trained.

    Returns:
        A tree like the parameters.

    Raises:
        ValueError: if ``opt_state`` does not hold exactly one state of ``eamsgd``.

    >>> import jax.numpy as jnp, jdaso
    >>> tx = jdaso.eamsgd(jdaso.single_exchange(), period=4, learning_rate=0.5, momentum=0.5)
    >>> params = jnp.float32(4.0)
    >>> updates, state = tx.update(jnp.float32(2.0), tx.init(params), params)
    >>> float(params + updates), float(jdaso.eamsgd_eval_params(state, params + updates))
    (2.5, 3.0)
    """
    state = the_state(EamsgdState, opt_state)
    delta = state.momentum
    return _map_floats(lambda y, v: y - delta.astype(v.dtype) * v, params, state.velocity)


def _map_floats(function: Callable[..., jax.Array], tree: PyTree, *rest: PyTree) -> PyTree:
    """Maps floating-point leaves; the others are those of the first tree."""
    return jax.tree.map(lambda x, *xs: function(x, *xs) if is_float(x) else x, tree, *rest)
