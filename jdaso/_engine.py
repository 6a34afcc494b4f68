"""schedule x exchange x merge -> an optax transformation.

The one state machine under every algorithm. What is exchanged, the subject, is mostly the
parameters after the local optimizer's update. After that of step t, for each fragment of them,

1. what is in flight is merged, if it has flown as long as it was meant to, or if the schedule
   wants the air clear;
2. the result is posted, if an exchange is due;
3. and merged at once, if it was posted with delay 0.

On all other steps the updates pass untouched.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jdaso._base import Exchange, JdasoError, Merge, Plan, PyTree, Remembering, Schedule, stay
from jdaso._communicate import Moment, Told, communication
from jdaso._feedback import nothing_owed
from jdaso._fragments import cut, part
from jdaso._leaves import all_finite, float_leaves, is_float
from jdaso._state import AveragingState, Flight
from jdaso._subject import AFTER, Subject


class Averaging(optax.GradientTransformationExtraArgs):
    """An optax transformation that averages parameters between nodes, and can be drained.

    Attributes:
        finish: ``(params, state) -> (params, state)``, merges what is in flight with its age.
        state_type: the type of the state that ``finish`` takes.
        moves_moments: whether :func:`jdaso.chain` may send the optimizer's moments along.
    """

    finish: Callable[[PyTree, Any], tuple[PyTree, Any]]
    state_type: type
    moves_moments: bool

    def __new__(cls, init, update, finish, state_type=AveragingState, moves_moments=False):
        self = super().__new__(cls, init, update)
        self.finish = finish
        self.state_type = state_type
        self.moves_moments = moves_moments
        return self


def averaging(
    name: str,
    exchange: Exchange,
    schedule: Schedule,
    merge: Merge,
    wire: str | None = None,
    blocking_wire: str | None = None,
    nonfinite: str = "skip",
    fragments: int = 1,
    subject: Subject = AFTER,
) -> Averaging:
    """Composes schedule, exchange and merge into an optax transformation.

    Args:
        name: the algorithm's name, for error messages.
        exchange: how nodes reach each other.
        schedule: when to post and how long to wait.
        merge: what a late sum does to the parameters.
        wire: dtype name on the wire, or None for the leaves' own. With int8 the state remembers
            what rounding has taken away, and what differences are taken to: two more copies of
            the parameters in float32, or one of gradients.
        blocking_wire: the same where the plan says ``blocking``.
        nonfinite: what happens to updates that are not finite, or parameters that would not be
            after them: ``skip`` leaves out the step, and the node of the next sum, counts both,
            and lets the node take the others' mean; ``raise`` stops. A sum that is not finite,
            of numbers near the end of their range, is left out by all nodes, and counted.
        fragments: into how many parts of about equal bytes the parameters are cut; each is
            exchanged once in a period, one after the other, so that the network's load is flat.
        subject: what is exchanged; ``AFTER`` are the parameters after the update.

    Returns:
        An :class:`optax.GradientTransformationExtraArgs` whose ``update`` needs ``params``. It
        moves parameters, so it must come last in a chain.

    Raises:
        ValueError: for a ``nonfinite`` that is not one of the two, for more fragments than steps
            in a period, and in ``init`` for more fragments than floating-point leaves.
    """
    if nonfinite not in ("skip", "raise"):
        raise ValueError(f"nonfinite must be 'skip' or 'raise', got {nonfinite!r}.")
    check_schedule(name, schedule)
    whole = isinstance(fragments, numbers.Integral) and not isinstance(fragments, bool)
    if not whole or not 1 <= fragments <= schedule.longest:
        raise ValueError(
            f"fragments must be a whole number in [1, {schedule.longest}], got {fragments!r}: "
            "there is one step of a period for each."
        )

    def check(finite: jax.Array, step: jax.Array) -> jax.Array:
        def stop():
            # Not io_callback: that is not allowed in a cond on a virtual cluster.
            jax.debug.callback(functools.partial(_raise_unless_finite, name), finite, step)

        if nonfinite == "raise":
            lax.cond(finite, lambda: None, stop)
        return finite

    communicate, receive = communication(exchange, merge, wire, blocking_wire, subject.kept, check)

    def init(params: PyTree) -> AveragingState:
        if jax.tree.leaves(params) and not float_leaves(params):
            raise ValueError(f"{name}: params hold no floating-point leaf, nothing to average.")
        zero, no, yes = jnp.zeros((), jnp.int32), jnp.zeros((), bool), jnp.ones((), bool)
        at_start = schedule.init()

        def flight(tree: PyTree) -> Flight:
            start = merge.init(tree.params if isinstance(tree, Remembering) else tree)
            owed = nothing_owed(tree, subject.anchored) if "int8" in (wire, blocking_wire) else ()
            return Flight(no, zero, zero, zero, yes, exchange.init(tree), start, owed)

        state = AveragingState(
            step=zero,
            exchanges=zero,
            skipped=zero,
            left_out=zero,
            merged=no,
            plan=_stable(schedule.plan(at_start, zero)[0]),
            losses=jnp.zeros((2,), jnp.float32),
            schedule=at_start,
            flights=tuple(flight(part(params, places)) for places in cut(params, fragments)),
        )
        # A buffer of its own for every field, or the state could not be donated.
        return jax.tree.map(lambda x: jnp.array(x, copy=True), state)

    def update(updates, state, params=None, *, value=None, **extra_args):
        del extra_args
        if params is None and subject.needs_params:
            raise ValueError(f"{name} moves parameters: call update(updates, state, params).")
        tree = updates if params is None else params
        xs, treedef = jax.tree.flatten(tree)
        us = jax.tree.leaves(jax.tree.map(_or_zeros, tree, updates, is_leaf=lambda x: x is None))

        started = state.step >= subject.lag
        plan, scheduled = schedule.plan(state.schedule, state.step - subject.lag)
        plan = _stable(plan)
        plan = plan._replace(flush=plan.flush & started, epoch_end=plan.epoch_end & started)
        # Where the clock is behind, this step's loss belongs to the next step's count.
        loss = _loss(value)
        losses = state.losses if subject.lag else state.losses + loss
        finite = check(all_finite(float_leaves(subject.lands(xs, us))), state.step)

        # In conds of their own, since what a branch passes on is not copied: at a step without an
        # exchange the updates are not touched, at one that only posts they are not written.
        us = _cond(name, finite, lambda us: us, lambda us: [jnp.zeros_like(u) for u in us], us)

        def talk(us, flight, number, xs, own, moment):
            leaves = subject.take(xs, us)
            leaves, flight, told = communicate(leaves, own, flight, number, moment)
            changed = moment.due | (moment.plan.delay == 0) | (merge.depart is not stay)
            us = lax.cond(changed, lambda us: subject.put(xs, us, leaves), lambda us: us, us)
            return us, flight, told

        def pass_on(us, flight, number):
            return us, flight, Told(number, jnp.zeros((), jnp.int32), jnp.zeros((2,), jnp.float32))

        told = Told(state.exchanges, state.left_out, jnp.zeros((2,), jnp.float32))
        flights, merged = [], jnp.zeros((), bool)
        for index, places in enumerate(_float_places(tree, fragments)):
            flight = state.flights[index]
            flight = flight._replace(age=flight.age + flight.posted, sound=flight.sound & finite)
            post = started & plan.posts(index, fragments)
            due = flight.posted & ((flight.age >= flight.delay) | post | plan.flush)
            here = [xs[i] for i in places]
            replicated = () if subject.needs_params or params is None else here
            moment = Moment(state.step, plan, state.schedule, replicated, losses, due, post)
            own = sum(i < _num_parameters(tree) for i in places)
            out, flight, news = _cond(
                name,
                due | post,
                functools.partial(talk, xs=here, own=own, moment=moment),
                pass_on,
                [us[i] for i in places],
                flight,
                told.number,
            )
            for i, u in zip(places, out, strict=True):
                us[i] = u
            flights.append(flight)
            merged |= due | (post & (plan.delay == 0))
            told = Told(
                news.number,
                told.left_out + news.left_out,
                news.losses if index == 0 else told.losses,
            )
        # Sum and number of the epoch's losses over all nodes: the same floats everywhere.
        heard = plan.epoch_end & ~plan.blocking & (told.losses[1] > 0)
        observed = schedule.observe(scheduled, told.losses[0] / jnp.maximum(told.losses[1], 1))
        state = AveragingState(
            step=state.step + 1,
            exchanges=told.number,
            skipped=state.skipped + ~finite,
            left_out=told.left_out,
            merged=merged,
            plan=plan,
            losses=jnp.where(plan.epoch_end, 0.0, losses) + (loss if subject.lag else 0.0),
            schedule=jax.tree.map(lambda old, new: jnp.where(heard, new, old), scheduled, observed),
            flights=tuple(flights),
        )
        return jax.tree.unflatten(treedef, us), state

    @jax.jit
    def finish(params, state):
        xs, treedef = jax.tree.flatten(params)
        flights, left_out = [], state.left_out
        for places, flight in zip(_float_places(params, fragments), state.flights, strict=True):
            own = sum(i < _num_parameters(params) for i in places)
            here, flight, lost = lax.cond(
                flight.posted,
                lambda x, f, own=own: receive(x, own, f, state.step)[:3],
                lambda x, f: (x, f, jnp.zeros((), bool)),
                [xs[i] for i in places],
                flight,
            )
            left_out = left_out + lost
            for i, x in zip(places, here, strict=True):
                xs[i] = x
            flights.append(flight)
        state = state._replace(flights=tuple(flights), left_out=left_out)
        return jax.tree.unflatten(treedef, xs), state

    return Averaging(init, update, finish, moves_moments=merge.own_weight is not None)


def check_schedule(name: str, schedule: Any) -> None:
    """Raises ValueError for what is no schedule."""
    if not isinstance(schedule, Schedule):
        raise ValueError(
            f"{name}: schedule must be a jdaso.Schedule, such as jdaso.constant(4, 2), "
            f"got {schedule!r}."
        )


def _float_places(tree: PyTree, fragments: int) -> list[list[int]]:
    """The positions of each fragment's floating-point leaves."""
    leaves = jax.tree.leaves(tree)
    return [[i for i in places if is_float(leaves[i])] for places in cut(tree, fragments)]


def _or_zeros(x, update):
    """The update, or zeros where there is a parameter but no update of it."""
    return jnp.zeros_like(x) if update is None and x is not None else update


def _num_parameters(tree: PyTree) -> int:
    """How many of a tree's leaves, the first ones, are parameters."""
    return len(jax.tree.leaves(tree.params if isinstance(tree, Remembering) else tree))


def _loss(value) -> jax.Array:
    """A loss and its number, 1, or zeros if it was not given or is not finite."""
    if value is None:
        return jnp.zeros((2,), jnp.float32)
    value = jnp.asarray(value, jnp.float32)
    return jnp.where(jnp.isfinite(value), jnp.stack([value, jnp.ones_like(value)]), 0.0)


def _stable(plan: Plan) -> Plan:
    """A plan's fields as arrays of fixed dtypes, whatever the schedule computed them from."""
    ints = [jnp.asarray(x, jnp.int32) for x in plan[:4]]
    return Plan(*ints, *(jnp.asarray(x, bool) for x in plan[4:]))


def _cond(name: str, *args):
    """lax.cond, with a way out of what shard_map says of it."""
    try:
        return lax.cond(*args)
    except TypeError as error:
        if "manual axis types" not in str(error):
            raise
        raise ValueError(
            f"{name}: inside shard_map, update needs shard_map(..., check_vma=False); that "
            "exchanged values are equal on all nodes is more than JAX can know."
        ) from error


def _raise_unless_finite(name, finite, step):
    if not finite:
        raise JdasoError(
            f"{name}: updates or parameters are not finite at step {int(step)}, or a sum of them "
            "is not. Lower the learning rate, or let nonfinite='skip' leave this node out of the "
            "next exchange."
        )
