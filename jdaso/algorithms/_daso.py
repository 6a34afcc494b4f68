"""DASO: rare, late, asynchronous means of parameters, weighted by their age."""

from __future__ import annotations

import jax

from jdaso._base import Arrival, Exchange, Leaves, Merge, PyTree, Schedule
from jdaso._engine import Averaging, averaging
from jdaso._leaves import divide
from jdaso.algorithms._arguments import chosen_wire


def daso(
    exchange: Exchange,
    schedule: Schedule,
    wire: str | None = None,
    blocking_wire: str | None = None,
    fragments: int = 1,
    nonfinite: str = "skip",
) -> Averaging:
    """Distributed asynchronous and selective optimization.

    With S the age of what arrives, in steps, and P the nodes that contributed to it,

        x(t+S) <- (2 S x(t+S) + sum_i x_i(t)) / (2 S + P)         (daso-journal Eq. 2)

    which for S = 0, in the blocking phases, is the mean. ``x(t+S)`` is taken after the local
    update of that step; the papers write ``x_{t+S-1}`` for it. The k-th exchange is carried by
    the devices of local index ``k mod L``, and the result is on all of them afterwards.

    Args:
        exchange: how nodes reach each other.
        schedule: :func:`jdaso.cycling`, as published, or :func:`jdaso.constant`.
        wire: dtype that crosses the network in the cycling phase: ``float64``, ``float32``,
            ``bfloat16``, ``float16``, never one wider than a leaf itself, or ``int8``: whole
            numbers with a scale for each 64 of them, 65 bytes in all. What rounding to int8 takes
            away stays in the state, and is sent later; what is rounded are differences to the
            last mean, of which the first one travels in float32. None: that of the exchange, or
            float32. Sums are accumulated in float32 (float64 for float64 wires).
        blocking_wire: the same in warm-up and cool-down, where training waits for it. None: that
            of the exchange, or bfloat16, in which updates below 1/256 of a parameter get lost,
            with int8 as the other wire only what it rounds off sums.
        fragments: into how many parts the parameters are cut; in the cycling phase they are
            exchanged one after the other within a period, so that the network's load is flat.
        nonfinite: ``skip`` leaves out a step whose updates are not finite, and its node out of
            sums and out of P until it has taken the others' mean (counted in ``skipped`` and
            ``left_out``); ``raise`` stops. An optimizer with a memory has to be protected by
            itself: ``chain(apply_if_finite(sgd(0.1, 0.9), 10), daso(...))``.

    Returns:
        An optax transformation, to be the last of a chain. ``update`` needs ``params`` and takes
        ``value=loss``, without which period and delay stay. Integer leaves stay as they are.

    Raises:
        ValueError: for an unknown wire, or one that contradicts ``exchange.wire``; for an
            unknown ``nonfinite``.

    References:
        Coquelin et al., Accelerating neural network training with distributed asynchronous and
        selective optimization (DASO), Journal of Big Data 9:14, 2022.

    >>> import jax.numpy as jnp, jdaso, optax
    >>> schedule = jdaso.cycling(period=4, warmup=10, cooldown=10, total=100, epoch=10)
    >>> tx = optax.chain(optax.sgd(0.1), jdaso.daso(jdaso.single_exchange(), schedule))
    >>> params = {"w": jnp.ones(3)}
    >>> state = tx.init(params)
    >>> updates, state = tx.update({"w": jnp.ones(3)}, state, params, value=0.5)
    """
    return averaging(
        "daso",
        exchange,
        schedule,
        Merge(_init, _merge, own_weight=_own_weight),
        wire=chosen_wire("wire", wire, exchange, "float32"),
        blocking_wire=chosen_wire("blocking_wire", blocking_wire, exchange, "bfloat16"),
        nonfinite=nonfinite,
        fragments=fragments,
    )


def _init(params: PyTree) -> PyTree:
    del params
    return ()


def _merge(leaves: Leaves, arrival: Arrival, state: PyTree) -> tuple[Leaves, PyTree]:
    own_weight = 2.0 * arrival.age
    merged = [
        divide(own_weight.astype(t.dtype) * x + t, (own_weight + arrival.members).astype(t.dtype))
        for x, t in zip(leaves, arrival.total, strict=True)
    ]
    return merged, state


def _own_weight(arrival: Arrival) -> jax.Array:
    return 2.0 * arrival.age / (2.0 * arrival.age + arrival.members)
