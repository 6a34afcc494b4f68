"""schedule x exchange x merge -> an optax transformation.

The one state machine under every algorithm. After the local optimizer's update of step t

1. what is in flight is merged, if it has flown as long as it was meant to, or if the schedule
   wants the air clear;
2. the result is posted, if an exchange is due;
3. and merged at once, if it was posted with delay 0.

On all other steps the updates pass untouched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jdaso._base import Arrival, Exchange, JdasoError, Leaves, Merge, Plan, PyTree, Schedule
from jdaso._leaves import all_finite, difference, divide, float_leaves, split
from jdaso._state import AveragingState, Flight, averaging_state
from jdaso._wire import wire_dtype


class Averaging(optax.GradientTransformationExtraArgs):
    """An optax transformation that averages parameters between nodes, and can be drained.

    Attributes:
        finish: ``(params, state) -> (params, state)``, merges what is in flight with its age.
    """

    finish: Callable[[PyTree, AveragingState], tuple[PyTree, AveragingState]]

    def __new__(cls, init, update, finish):
        self = super().__new__(cls, init, update)
        self.finish = finish
        return self


def averaging(
    name: str,
    exchange: Exchange,
    schedule: Schedule,
    merge: Merge,
    wire: str | None = None,
    blocking_wire: str | None = None,
    nonfinite: str = "skip",
) -> Averaging:
    """Composes schedule, exchange and merge into an optax transformation.

    Args:
        name: the algorithm's name, for error messages.
        exchange: how nodes reach each other.
        schedule: when to post and how long to wait.
        merge: what a late sum does to the parameters.
        wire: dtype name on the wire, or None for the leaves' own.
        blocking_wire: the same where the plan says ``blocking``.
        nonfinite: what happens to updates, or parameters to be posted, that are not finite:
            ``skip`` leaves out the step, and the node of the next sum, counts both, and lets the
            node take the others' mean; ``raise`` stops.

    Returns:
        An :class:`optax.GradientTransformationExtraArgs` whose ``update`` needs ``params``. It
        moves parameters, so it must come last in a chain.

    Raises:
        ValueError: for a ``nonfinite`` that is not one of the two.
    """
    if nonfinite not in ("skip", "raise"):
        raise ValueError(f"nonfinite must be 'skip' or 'raise', got {nonfinite!r}.")

    def init(params: PyTree) -> AveragingState:
        leaves = float_leaves(params)
        if not leaves:
            raise ValueError(f"{name}: params hold no floating-point leaf, nothing to average.")
        zero = jnp.zeros((), jnp.int32)
        at_start = schedule.init()
        state = AveragingState(
            step=zero,
            exchanges=zero,
            sound=jnp.ones((), bool),
            skipped=zero,
            left_out=zero,
            flight=Flight(jnp.zeros((), bool), zero, zero),
            plan=_stable(schedule.plan(at_start, zero)),
            losses=jnp.zeros((2,), jnp.float32),
            schedule=at_start,
            exchange=exchange.init(params),
            merge=merge.init(leaves),
        )
        # A buffer of its own for every field, or the state could not be donated.
        return jax.tree.map(lambda x: jnp.array(x, copy=True), state)

    def checked(finite: jax.Array, step: jax.Array) -> jax.Array:
        def stop():
            # Not io_callback: that is not allowed in a cond on a virtual cluster.
            jax.debug.callback(functools.partial(_raise_unless_finite, name), finite, step)

        if nonfinite == "raise":
            lax.cond(finite, lambda: None, stop)
        return finite

    def post(leaves: Leaves, state: AveragingState, plan: Plan) -> AveragingState:
        def send(wire: str | None, exchange_state: PyTree) -> tuple[PyTree, jax.Array]:
            rounded = [x.astype(wire_dtype(x.dtype, wire)) for x in leaves]
            sound = state.sound & checked(all_finite(rounded), state.step)
            header = jnp.concatenate([sound.astype(jnp.float32)[None], state.losses])
            sent = exchange.start(exchange_state, state.exchanges, state.step, leaves, header, wire)
            return sent, sound

        if wire == blocking_wire:
            sent, sound = send(wire, state.exchange)
        else:
            sent, sound = lax.cond(
                plan.blocking,
                lambda s: send(blocking_wire, s),
                lambda s: send(wire, s),
                state.exchange,
            )
        return state._replace(
            exchange=sent,
            exchanges=state.exchanges + 1,
            left_out=state.left_out + jnp.where(sound, 0, 1),
            flight=Flight(jnp.ones((), bool), jnp.zeros((), jnp.int32), plan.delay),
        )

    def receive(leaves: Leaves, state: AveragingState) -> tuple[Leaves, AveragingState, jax.Array]:
        total, header, exchange_state = exchange.finish(state.exchange, state.exchanges - 1, leaves)
        members = header[0]
        mean = [divide(t, jnp.maximum(members, 1).astype(t.dtype)) for t in total]
        own = [x.astype(t.dtype) for x, t in zip(leaves, total, strict=True)]
        # A node that has lost its way starts again from what the others agree on.
        own = [jnp.where(state.sound, x, m) for x, m in zip(own, mean, strict=True)]
        merged, merge_state = merge.merge(
            own, Arrival(total, members, state.flight.age), state.merge
        )
        keep = members == 0
        merged = [
            jnp.where(keep, x, m.astype(x.dtype)) for x, m in zip(leaves, merged, strict=True)
        ]
        merge_state = jax.tree.map(
            lambda old, new: jnp.where(keep, old, new), state.merge, merge_state
        )
        state = state._replace(
            exchange=exchange_state,
            merge=merge_state,
            sound=jnp.ones((), bool),
            flight=state.flight._replace(posted=jnp.zeros((), bool)),
        )
        return merged, state, header[1:]

    def communicate(leaves: Leaves, state: AveragingState, plan: Plan, due: jax.Array):
        no_losses = jnp.zeros((2,), jnp.float32)
        leaves, state, _ = lax.cond(due, receive, lambda x, s: (x, s, no_losses), leaves, state)
        state = lax.cond(plan.post, lambda x, s: post(x, s, plan), lambda x, s: s, leaves, state)
        at_once = plan.post & (plan.delay == 0)
        leaves, state, losses = lax.cond(
            at_once, receive, lambda x, s: (x, s, no_losses), leaves, state
        )
        return leaves, state, losses

    def update(updates, state, params=None, *, value=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError(f"{name} moves parameters: call update(updates, state, params).")
        plan = _stable(schedule.plan(state.schedule, state.step))
        losses = state.losses
        if value is not None:
            value = jnp.asarray(value, jnp.float32)
            seen = jnp.isfinite(value)
            losses = losses + jnp.where(seen, jnp.stack([value, jnp.ones_like(value)]), 0.0)
        finite = checked(all_finite(float_leaves(updates)), state.step)
        flight = state.flight._replace(age=state.flight.age + state.flight.posted)
        state = state._replace(
            flight=flight,
            plan=plan,
            losses=losses,
            sound=state.sound & finite,
            skipped=state.skipped + jnp.where(finite, 0, 1),
        )
        due = flight.posted & ((flight.age >= flight.delay) | plan.post | plan.flush)

        def talk(updates, state):
            updates = jax.tree.map(lambda u: jnp.where(finite, u, jnp.zeros_like(u)), updates)
            moved, where = split(optax.apply_updates(params, updates))
            moved, state, sums = communicate(moved, state, plan, due)
            return difference(params, updates, where(moved)), state, sums

        def pass_on(updates, state):
            return updates, state, jnp.zeros((2,), jnp.float32)

        try:
            updates, state, sums = lax.cond(
                due | plan.post | ~finite, talk, pass_on, updates, state
            )
        except TypeError as error:
            if "manual axis types" not in str(error):
                raise
            raise ValueError(
                f"{name}: inside shard_map, update needs shard_map(..., check_vma=False); that "
                "exchanged values are equal on all nodes is more than JAX can know."
            ) from error
        # Sum and number of the epoch's losses over all nodes: the same floats everywhere.
        heard = plan.epoch_end & ~plan.blocking & (sums[1] > 0)
        observed = schedule.observe(state.schedule, sums[0] / jnp.maximum(sums[1], 1))
        state = state._replace(
            step=state.step + 1,
            losses=jnp.where(plan.epoch_end, 0.0, state.losses),
            schedule=jax.tree.map(
                lambda old, new: jnp.where(heard, new, old), state.schedule, observed
            ),
        )
        return updates, state

    @jax.jit
    def finish(params, state):
        leaves, where = split(params)
        leaves, state, _ = lax.cond(
            state.flight.posted,
            receive,
            lambda x, s: (x, s, jnp.zeros((2,), jnp.float32)),
            leaves,
            state,
        )
        return where(leaves), state

    return Averaging(init, update, finish)


def drain(transformation: Averaging, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
    """Merges what is in flight, with its actual age; without a flight, changes nothing.

    For the end of training under a schedule that does not know it, and before a checkpoint.

    Args:
        transformation: what ``jdaso.daso(...)`` (or a relative) returned, also if it is one
            member of an ``optax.chain``.
        opt_state: the whole optimizer's state.
        params: the node's parameters.

    Returns:
        ``(params, opt_state)`` with nothing in flight.

    Raises:
        ValueError: if ``opt_state`` does not hold exactly one state of a jdaso algorithm.

    >>> import jax.numpy as jnp, jdaso, optax
    >>> averaging = jdaso.daso(jdaso.single_exchange(), jdaso.constant(period=4, delay=2))
    >>> tx = optax.chain(optax.sgd(0.1), averaging)
    >>> params = {"w": jnp.ones(3)}
    >>> params, state = jdaso.drain(averaging, tx.init(params), params)
    """
    averaging_state(opt_state)
    done: list[PyTree] = []

    def replace(node):
        if not isinstance(node, AveragingState):
            return node
        moved, state = transformation.finish(params, node)
        done.append(moved)
        return state

    opt_state = jax.tree.map(
        replace, opt_state, is_leaf=lambda node: isinstance(node, AveragingState)
    )
    return done[0], opt_state


def _stable(plan: Plan) -> Plan:
    """A plan's fields as arrays of fixed dtypes, whatever the schedule computed them from."""
    ints = [jnp.asarray(x, jnp.int32) for x in plan[:3]]
    return Plan(*ints, *(jnp.asarray(x, bool) for x in plan[3:]))


def _raise_unless_finite(name, finite, step):
    if not finite:
        raise JdasoError(
            f"{name}: updates or parameters are not finite at step {int(step)}. Lower the "
            "learning rate, or let nonfinite='skip' leave this node out of the next exchange."
        )
