"""What happens to one fragment at a step at which an exchange is merged, posted, or both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdaso._agreement import agreed
from jdaso._base import AGREED, Arrival, Exchange, Leaves, Merge, Plan, PyTree
from jdaso._feedback import FIRST_WIRE, arrived, coarsened, owing
from jdaso._leaves import all_finite, divide
from jdaso._state import Flight
from jdaso._wire import wire_dtype


class Moment(NamedTuple):
    """What a fragment has to know of the step.

    Attributes:
        step: int32, the optimizer's step.
        plan: what the schedule asks for.
        schedule: the schedule's state.
        replicated: parameters that are the same on all nodes; () if they need not be.
        losses: float32[2], sum and number of this node's losses in this epoch.
        due: bool, whether what is in flight is to be merged.
        post: bool, whether the fragment is to be posted.
    """

    step: jax.Array
    plan: Plan
    schedule: PyTree
    replicated: PyTree
    losses: jax.Array
    due: jax.Array
    post: jax.Array


class Told(NamedTuple):
    """What a fragment tells afterwards.

    Attributes:
        number: int32, the number of the next exchange.
        left_out: int32, exchanges that lacked this node, or whose sum was not finite.
        losses: float32[2], sum and number of the losses of all nodes, if a blocking mean ended.
    """

    number: jax.Array
    left_out: jax.Array
    losses: jax.Array


def communication(
    exchange: Exchange,
    merge: Merge,
    wire: str | None,
    blocking_wire: str | None,
    kept: Callable[[jax.Array], jax.Array],
    check: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[Callable, Callable]:
    """The functions ``communicate`` and ``receive`` of one fragment.

    ``communicate(leaves, own, flight, number, moment) -> (leaves, flight, told)``, and
    ``receive(leaves, own, flight, step) -> (leaves, flight, lost, losses)``, where ``lost`` says
    that the sum was not finite. The first ``own`` of the leaves are parameters, the others are the
    optimizer's memory of them.

    Args:
        exchange: how nodes reach each other.
        merge: what a late sum does to the parameters.
        wire: dtype name on the wire, or None for the leaves' own.
        blocking_wire: the same where the plan says ``blocking``.
        kept: ``(leaf) -> leaf``, what stays of a leaf where an exchange brings nothing.
        check: ``(finite, step) -> finite``, may stop the program.
    """

    def send(leaves: Leaves, own: int, flight: Flight, number: jax.Array, moment: Moment):
        message, merge_state = merge.message(leaves[:own], flight.merge)
        posted = [*message, *leaves[own:]]
        alike = jnp.zeros((len(AGREED),), jnp.float32)
        if exchange.compares:
            shared: PyTree = ()
            if exchange.same_bits:
                # On an int8 wire differences to anchors cross, so nothing would mend an anchor.
                anchor = flight.feedback.anchor if flight.feedback else ()
                shared = (moment.replicated, flight.merge if merge.shared else (), anchor)
            alike = agreed(moment.plan, moment.schedule, shared)

        def over(wire: str | None, state: PyTree, feedback: PyTree):
            if feedback:
                crossing, residual = coarsened(posted, wire, feedback)
                finite = all_finite(residual)
            else:
                crossing = posted
                finite = all_finite([x.astype(wire_dtype(x.dtype, wire)) for x in posted])
            sound = flight.sound & check(finite, moment.step)
            if feedback:
                feedback = owing(feedback, residual, sound, wire)
            header = jnp.concatenate([sound.astype(jnp.float32)[None], moment.losses, alike])
            state, following = exchange.start(state, number, moment.step, crossing, header, wire)
            return state, following, sound, feedback

        wires = list(dict.fromkeys([wire, blocking_wire]))
        # Equal on all nodes, as everything is by which it is decided.
        choice = jnp.where(moment.plan.blocking, wires.index(blocking_wire), wires.index(wire))
        if flight.feedback and flight.feedback.anchor:
            wires = list(dict.fromkeys([*wires, FIRST_WIRE]))
            too_early = (choice == wires.index("int8")) & ~flight.feedback.ready
            choice = jnp.where(too_early, wires.index(FIRST_WIRE), choice)
        state, following, sound, feedback = lax.switch(
            choice,
            [functools.partial(over, wire) for wire in wires],
            flight.exchange,
            flight.feedback,
        )
        flight = flight._replace(
            posted=jnp.ones((), bool),
            age=jnp.zeros((), jnp.int32),
            delay=moment.plan.delay,
            number=number,
            sound=sound,
            exchange=state,
            merge=merge_state,
            feedback=feedback,
        )
        # Who is not in the sum is not moved by having posted either.
        mine = leaves[:own]
        departed = [
            jnp.where(sound, new, old)
            for new, old in zip(merge.depart(mine, flight.merge), mine, strict=True)
        ]
        return [*departed, *leaves[own:]], flight, following

    def receive(leaves: Leaves, own: int, flight: Flight, step: jax.Array):
        total, header, exchange_state = exchange.finish(flight.exchange, flight.number, leaves)
        members, feedback = header[0], flight.feedback
        if feedback:
            total, mean, feedback = arrived(total, members, feedback)
        else:
            mean = [divide(t, jnp.maximum(members, 1).astype(t.dtype)) for t in total]
        # Numbers near the end of their range may add up to infinity, on all nodes alike.
        lost = ~check(all_finite(total), step)
        nobody = lost | (members == 0)
        wide = [x.astype(t.dtype) for x, t in zip(leaves, total, strict=True)]
        # A node that has lost its way starts again from what the others agree on.
        wide = [jnp.where(flight.sound, x, m) for x, m in zip(wide, mean, strict=True)]
        arrival = Arrival(total[:own], mean[:own], members, flight.age, flight.sound)
        merged, merge_state = merge.merge(wide[:own], arrival, flight.merge)
        memory = []
        if merge.own_weight is not None:
            w = merge.own_weight(arrival)
            memory = [w * x + (1 - w) * m for x, m in zip(wide[own:], mean[own:], strict=True)]
        leaves = [
            jnp.where(nobody, kept(x), m.astype(x.dtype))
            for x, m in zip(leaves, [*merged, *memory], strict=True)
        ]
        flight = flight._replace(
            posted=jnp.zeros((), bool),
            sound=jnp.ones((), bool),
            exchange=exchange_state,
            merge=_first_if(nobody, flight.merge, merge_state),
            feedback=_first_if(lost, flight.feedback, feedback),
        )
        return leaves, flight, lost, header[1:3]

    def communicate(
        leaves: Leaves, own: int, flight: Flight, number: jax.Array, moment: Moment
    ) -> tuple[Leaves, Flight, Told]:
        def get(leaves, flight):
            return receive(leaves, own, flight, moment.step)

        def keep(leaves, flight):
            return leaves, flight, jnp.zeros((), bool), jnp.zeros((2,), jnp.float32)

        leaves, flight, lost, _ = lax.cond(moment.due, get, keep, leaves, flight)
        leaves, flight, number = lax.cond(
            moment.post,
            lambda x, f: send(x, own, f, number, moment),
            lambda x, f: (x, f, number),
            leaves,
            flight,
        )
        unsound = moment.post & ~flight.sound
        at_once = moment.post & (moment.plan.delay == 0)
        leaves, flight, lost_at_once, losses = lax.cond(at_once, get, keep, leaves, flight)
        left_out = jnp.sum(jnp.stack([lost, unsound, lost_at_once]), dtype=jnp.int32)
        return leaves, flight, Told(number, left_out, losses)

    return communicate, receive


def _first_if(condition: jax.Array, first: PyTree, second: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), first, second)
