"""What happens to one fragment at a step at which an exchange is merged, posted, or both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdaso._base import Arrival, Exchange, Leaves, Merge, Plan, PyTree
from jdaso._feedback import FIRST_WIRE, arrived, coarsened, owing
from jdaso._leaves import all_finite, divide
from jdaso._state import Flight
from jdaso._wire import wire_dtype


class Moment(NamedTuple):
    """What a fragment has to know of the step.

    Attributes:
        step: int32, the optimizer's step.
        plan: what the schedule asks for.
        losses: float32[2], sum and number of this node's losses in this epoch.
        due: bool, whether what is in flight is to be merged.
        post: bool, whether the fragment is to be posted.
    """

    step: jax.Array
    plan: Plan
    losses: jax.Array
    due: jax.Array
    post: jax.Array


class Told(NamedTuple):
    """What a fragment tells afterwards.

    Attributes:
        number: int32, the number of the next exchange.
        left_out: bool, whether this node was left out of what it posted.
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
    check: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[Callable, Callable]:
    """The functions ``communicate`` and ``receive`` of one fragment.

    ``communicate(leaves, own, flight, number, moment) -> (leaves, flight, told)``, and
    ``receive(leaves, own, flight) -> (leaves, flight, losses)``. The first ``own`` of the leaves
    are parameters, the others are the optimizer's memory of them.

    Args:
        exchange: how nodes reach each other.
        merge: what a late sum does to the parameters.
        wire: dtype name on the wire, or None for the leaves' own.
        blocking_wire: the same where the plan says ``blocking``.
        check: ``(finite, step) -> finite``, may stop the program.
    """

    def send(leaves: Leaves, own: int, flight: Flight, number: jax.Array, moment: Moment):
        def over(wire: str | None, state: PyTree, feedback: PyTree):
            if feedback:
                crossing, residual = coarsened(leaves, wire, feedback)
                finite = all_finite(residual)
            else:
                crossing = leaves
                finite = all_finite([x.astype(wire_dtype(x.dtype, wire)) for x in leaves])
            sound = flight.sound & check(finite, moment.step)
            if feedback:
                feedback = owing(feedback, residual, sound, wire)
            header = jnp.concatenate([sound.astype(jnp.float32)[None], moment.losses])
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
            feedback=feedback,
        )
        # Who is not in the sum is not moved by having posted either.
        mine = leaves[:own]
        departed = [
            jnp.where(sound, new, old)
            for new, old in zip(merge.depart(mine, flight.merge), mine, strict=True)
        ]
        return [*departed, *leaves[own:]], flight, following

    def receive(leaves: Leaves, own: int, flight: Flight):
        total, header, exchange_state = exchange.finish(flight.exchange, flight.number, leaves)
        members, feedback = header[0], flight.feedback
        if feedback:
            total, mean, feedback = arrived(total, members, feedback)
        else:
            mean = [divide(t, jnp.maximum(members, 1).astype(t.dtype)) for t in total]
        wide = [x.astype(t.dtype) for x, t in zip(leaves, total, strict=True)]
        # A node that has lost its way starts again from what the others agree on.
        wide = [jnp.where(flight.sound, x, m) for x, m in zip(wide, mean, strict=True)]
        arrival = Arrival(total[:own], mean[:own], members, flight.age)
        merged, merge_state = merge.merge(wide[:own], arrival, flight.merge)
        memory = []
        if merge.own_weight is not None:
            w = merge.own_weight(arrival)
            memory = [w * x + (1 - w) * m for x, m in zip(wide[own:], mean[own:], strict=True)]
        nobody = members == 0
        leaves = [
            jnp.where(nobody, x, m.astype(x.dtype))
            for x, m in zip(leaves, [*merged, *memory], strict=True)
        ]
        flight = flight._replace(
            posted=jnp.zeros((), bool),
            sound=jnp.ones((), bool),
            exchange=exchange_state,
            merge=jax.tree.map(
                lambda old, new: jnp.where(nobody, old, new), flight.merge, merge_state
            ),
            feedback=feedback,
        )
        return leaves, flight, header[1:]

    def communicate(
        leaves: Leaves, own: int, flight: Flight, number: jax.Array, moment: Moment
    ) -> tuple[Leaves, Flight, Told]:
        def get(leaves, flight):
            return receive(leaves, own, flight)

        def keep(leaves, flight):
            return leaves, flight, jnp.zeros((2,), jnp.float32)

        leaves, flight, _ = lax.cond(moment.due, get, keep, leaves, flight)
        leaves, flight, number = lax.cond(
            moment.post,
            lambda x, f: send(x, own, f, number, moment),
            lambda x, f: (x, f, number),
            leaves,
            flight,
        )
        left_out = moment.post & ~flight.sound
        at_once = moment.post & (moment.plan.delay == 0)
        leaves, flight, losses = lax.cond(at_once, get, keep, leaves, flight)
        return leaves, flight, Told(number, left_out, losses)

    return communicate, receive
