"""Error feedback for int8 and float4: rounding errors are kept and sent with the next exchange.

Eight bits are too few for parameters, because rounding would remove their small changes. Node i
therefore sends the difference of its parameters x_i from an anchor a, plus its residual r_i. The
anchor has the same bits on all nodes: it is the center of EASGD, the anchor of DiLoCo, and
otherwise the mean that arrived last. The residual is the rounding error that the node has not sent
yet. With C the rounding of ``block_format.py`` and P nodes,

    v_i = x_i - a + r_i        q_i = C(v_i)        r_i <- v_i - q_i
    s = sum_i q_i              a <- a + C(s) / P   r_j <- r_j + s - C(s)

The node j that computes a part of the sum adds that part's rounding error to its own residual,
because only this node knows s. Nothing is lost:

    P a + sum_i r_i  =  sum_i x_i + sum_i r_i of before

Since differences are rounded, the error is a fraction of what changes between two exchanges, not
of the parameters.

- The first exchange has no mean to differ from. It is in float32, or in the leaves' dtype if that
  is narrower.
- Gradients need no anchor: a = 0.
- The residual is not kept in bfloat16: it would stop growing before it reaches half a step of the
  block, and small numbers of the block would never be sent.
- Merges with ``merge="delta"`` subtract what the other nodes have decoded of this node's leaves,
  a + q_i. What is not subtracted stays in the leaves and is sent with them, so r is 0, and node j
  adds s - C(s) to its leaves: the mean of all is kept. The state holds a + q_i in place of r.
- EASGD and DiLoCo move their anchor themselves. The mean is still a + C(s) / P, and the rounding
  errors stay in the residuals, so that sums over time lose nothing.
- Other wires, for instance in blocking phases, send x_i + r_i, and r_i becomes the rounding error.
  If such a wire is narrower than float32, the rounding error of the returned sum is lost.

References:
    Residuals: Seide et al., 1-bit stochastic gradient descent and its application to data-parallel
    distributed training of speech DNNs, Interspeech 2014; Karimireddy et al., Error feedback fixes
    SignSGD and other gradient compression schemes, ICML 2019. Of the sum as well: Tang et al.,
    DoubleSqueeze, ICML 2019. Differences: Mishchenko et al., Distributed learning with compressed
    gradient differences (DIANA), arXiv:1901.09269; Koloskova et al., Decentralized stochastic
    optimization and gossip algorithms with compressed communication (CHOCO-SGD), ICML 2019.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdaso.core.block_format import FORMATS
from jdaso.core.exchange import MEMBERS, BoundExchange, is_usable
from jdaso.core.tree import float_leaves, where_tree
from jdaso.core.types import Leaves, PyTree
from jdaso.core.wire import block_bits, round_to, sum_dtype, wire_dtype

FIRST_WIRE = "float32"


class Feedback(NamedTuple):
    """State of the error feedback of one fragment, if any of its wires is int8 or float4.

    If training is restored on another number of nodes, each node gets the mean of the residuals,
    which keeps their mean the same. Exchanges in flight are dropped with their residuals.

    Attributes:
        residual: r, like the parameters or gradients, in their ``sum_dtype``. If the merge is
            relative, what the others have decoded of the leaves in flight. The optimizer's moments
            are never on these wires.
        anchor: a, like ``residual``. Empty for gradients, and where the merge rule has one.
        block_bits: int32, bits of a number in the exchange in flight, or else in the last one:
            8 for int8, 4 for float4, 0 for other wires.
        anchor_ready: bool, whether the anchor is set or not needed. The same on all nodes.
    """

    residual: Leaves
    anchor: Leaves
    block_bits: jax.Array
    anchor_ready: jax.Array


def init_feedback(tree: PyTree, uses_anchor: bool) -> Feedback:
    """The state at the start of training."""
    zeros = [jnp.zeros_like(x, sum_dtype(x.dtype)) for x in float_leaves(tree)]  # sharded as x
    bits, ready = jnp.zeros((), jnp.int32), jnp.full((), not uses_anchor)
    return Feedback(zeros, list(zeros) if uses_anchor else [], bits, ready)


def compress(
    exchange: BoundExchange,
    wire: str | None,
    relative: bool,
    healthy: jax.Array,
    leaves: Leaves,
    residual: Leaves,
    anchor: Leaves,
) -> tuple[Leaves, Leaves]:
    """Computes what to send of the shards of a device, and the new residual.

    If the merge is ``relative``, what the others decode takes the place of the residual. A node
    that is not ``healthy`` does not contribute and keeps its old residual.
    """
    base = _anchors(anchor if wire in FORMATS else [], residual)
    each = zip(leaves, residual, base, strict=True)
    values = [x.astype(r.dtype) - a for x, r, a in each]
    if not relative:
        values = [value + r for value, r in zip(values, residual, strict=True)]
    if wire in FORMATS:
        message = exchange.rounded(values, block_bits(wire))
    else:
        message = [
            round_to(value, wire_dtype(x.dtype, wire)).astype(x.dtype)
            for value, x in zip(values, leaves, strict=True)
        ]
    kept = []
    for value, sent, r, a in zip(values, message, residual, base, strict=True):
        if relative:
            kept.append(jnp.where(healthy, a + sent.astype(r.dtype), 0))
        else:
            kept.append(jnp.where(healthy, _finite_or_zero(value - sent.astype(r.dtype)), r))
    return message, kept


def decompress(
    exchange: BoundExchange,
    total: Leaves,
    members: jax.Array,
    bits: jax.Array,
    residual: Leaves,
    anchor: Leaves,
) -> tuple[Leaves, Leaves, Leaves]:
    """The mean of the shards of a device, from what the exchange has returned.

    Args:
        total: s where this node has summed and C(s) elsewhere. With ``bits`` 0, sums of the leaves.
        members: float32 scalar, the number of nodes that contributed, may be 0.
        bits: int32 scalar, ``block_bits`` of the exchange.

    Returns:
        The means, the new residual and the new anchor.
    """
    means, kept, moved = [], [], []
    rounded, anchors = exchange.rounded(total, bits), _anchors(anchor, residual)
    for s, near, r, a in zip(total, rounded, residual, anchors, strict=True):
        received = jnp.where(bits > 0, near, s)
        # A sum that has overflowed must not stay in the residual.
        kept.append(r + _finite_or_zero(s - received))
        base = jnp.where(bits > 0, a, 0)
        mean = base + received / jnp.maximum(members, 1).astype(s.dtype)
        means.append(mean)
        moved.append(jnp.where(members > 0, mean, a))
    return means, kept, moved[: len(anchor)]


def decompress_part(
    exchange: BoundExchange,
    feedback: Feedback,
    total: Leaves,
    header: jax.Array,
    part: slice,
    anchor: Leaves,
) -> tuple[Leaves, list[Leaves]]:
    """The means of the parameters of a part, and their residual and anchor after the exchange.

    ``total`` and ``header`` are what the exchange has returned for the part. ``anchor`` has the
    anchors of all parameters, also if the merge rule keeps and moves them. The list of those that
    the feedback keeps is then empty.
    """
    decompress_on = functools.partial(decompress, exchange)
    run = exchange.per_shard(decompress_on, slice(part.start, part.start + len(total)))
    residual, own_anchor = feedback.residual[part], feedback.anchor[part]
    means, new_residual, moved = run(
        total, header[MEMBERS], feedback.block_bits, residual, anchor[part]
    )
    new = [new_residual, moved[: len(own_anchor)]]
    # Neither a sum that is not finite nor what no node has sent must stay in the feedback.
    return means, where_tree(is_usable(header), new, [residual, own_anchor])


def _finite_or_zero(error: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(error), error, 0)


def _anchors(anchor: Leaves, residual: Leaves) -> Leaves:
    return anchor or [jnp.zeros((), r.dtype) for r in residual]
