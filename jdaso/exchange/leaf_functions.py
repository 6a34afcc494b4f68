"""The functions of an exchange over MPI that depend on how its leaves are sharded."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import get_opaque_trace_state

from jdaso.cluster.topology import Topology
from jdaso.core.block_format import FORMATS
from jdaso.core.exchange import (
    UNCOUNTED,
    FeedbackOperations,
    HostState,
    PartOperations,
)
from jdaso.core.types import Leaves
from jdaso.exchange.host.jit_interface import Bound, JitInterface
from jdaso.exchange.settings import check_feedback
from jdaso.exchange.transport.host_collectives import HostCollectives
from jdaso.exchange.transport.mpi_transport import MpiTransport


class OncePerProgram:
    """Refuses a second consensus in one compiled program.

    The calls have no order in it, so nodes could sum different trees.
    """

    def __init__(self) -> None:
        self._traced: Any = None  # the last program with a consensus

    def check(self) -> None:
        """Raises ValueError if the program that is traced has called this before."""
        trace = get_opaque_trace_state(convention="jdaso")
        if trace == self._traced:
            raise ValueError(
                "a program calls consensus or drift twice for one exchange, and the calls have no "
                "order: pass one tree with all arrays, or compile two programs."
            )
        self._traced = trace


class LeafFunctions(NamedTuple):
    """The methods are the fields of :class:`jdaso.Exchange` of the same names.

    If ``bound`` is given, they are for these leaves.
    """

    topology: Topology
    program: JitInterface
    transport: MpiTransport
    collectives: HostCollectives
    same_bits: bool
    means: OncePerProgram
    bound: Bound | None = None

    def fields(self) -> dict[str, Any]:
        """The functions, as fields of an exchange."""
        parts, feedback = None, None
        if self.bound is not None and self.program.copies_parts(self.bound):
            parts = PartOperations(self.finish, self.after)
            supports = functools.partial(self.program.computes_feedback, self.bound)
            if supports("float32"):
                start, finish = self.start_with_feedback, self.finish_with_feedback
                feedback = FeedbackOperations(supports, start, finish)
        return {
            "start": self.start,
            "finish": self.finish,
            "broadcast": self.broadcast,
            "parts": parts,
            "feedback": feedback,
            "per_shard": self.per_shard,
        }

    def start(self, state: HostState, number, step, leaves: Leaves, header, wire, relative=False):
        _check_feedback([wire], self.same_bits)
        uncounted = isinstance(number, int) and number == UNCOUNTED
        if uncounted and isinstance(leaves[0], jax.core.Tracer):
            self.means.check()
        sent = state.key, number, step, leaves, header, wire
        token, number = self.program.start(*sent, self.bound, relative)
        return HostState(token), number

    def start_with_feedback(
        self, state: HostState, number, step, leaves, header, wires, choice, *feedback
    ):
        _check_feedback(wires, self.same_bits)
        sent = state.key, number, step, leaves, header, wires, choice
        token, number, residual = self.program.start_with_feedback(*sent, feedback, self.bound)
        return HostState(token), number, residual

    def finish(self, state: HostState, number, like: Leaves, part=None):
        sums, header, token = self.program.finish(state.key, number, like, part, None, self.bound)
        return sums, header, HostState(token)

    def finish_with_feedback(
        self, state: HostState, number, like: Leaves, part, bits, residual, anchor, keep
    ):
        received = state.key, number, like, part, (bits, residual, anchor)
        results, header, token = self.program.finish(*received, self.bound, keep)
        return results[: len(like)], results[len(like) :], header, HostState(token)

    def after(self, state: HostState, part: slice, lists: list[Leaves], into=None):
        assert self.bound is not None
        token, lists = self.program.after(state.key, part, lists, into, self.bound)
        return HostState(token), lists

    def per_shard(self, function, part: slice):
        if self.bound is None:
            return function
        return self.program.per_shard(function, self.bound.specs[part])

    def broadcast(self, leaves: Leaves, root: int) -> Leaves:
        def send(*leaves):
            with self.transport.abort_on_error():
                return self.collectives.broadcast(leaves, root)

        if self.topology.joined:
            specs = (self.bound or self.program.bind((), leaves)).specs
            return self.program.call_host(("broadcast", root), send, leaves, specs)
        if self.program.inside():
            raise ValueError(
                "broadcast inside shard_map would run once on each device: call it outside."
            )
        if not any(isinstance(x, jax.core.Tracer) for x in leaves):
            return send(*leaves)
        shape = jax.ShapeDtypeStruct((), bool)
        arrived, received = io_callback(
            lambda *leaves: (np.bool_(True), send(*leaves)), (shape, leaves), *leaves
        )
        # ``arrived`` is always True. In a program for several devices, the host's result lies on
        # one of them, and this operation with values on all devices distributes it.
        return [jnp.where(arrived, y, x) for y, x in zip(received, leaves, strict=True)]


def _check_feedback(wires: Sequence[Any], same_bits: bool) -> None:
    """:func:`check_feedback` for wires, each for all leaves or a tuple with one for each."""
    for wire in {*jax.tree.leaves(wires)} & {*FORMATS}:
        check_feedback(wire, same_bits)
