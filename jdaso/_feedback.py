"""Error feedback: what rounding to int8 takes away stays with its node, and is sent later.

Eight bits are too few for parameters, whose changes would be lost. So what node i sends, of x_i,
is how far it is from a, the mean that has arrived last, the same bits on all nodes, and what it
owes from before, its residual r_i. With C the rounding of ``_int8.py`` and P nodes,

    v_i = x_i - a + r_i        q_i = C(v_i)        r_i <- v_i - q_i
    s = sum_i q_i              a <- a + C(s) / P   r_j <- r_j + s - C(s)

where the last is done by the node j that has added up this part of the sum, to whom alone s is
known. Of what should have been sent nothing is lost:

    P a + sum_i r_i  =  sum_i x_i + sum_i r_i of before,

and since differences are rounded, the error is a part of what changes between two exchanges, not
of the parameters. The first mean, for which there is no a, travels in float32 (or the leaves' own
dtype, if that is narrower). Gradients need no a: it is 0. On another wire, in blocking phases for
instance, x_i + r_i is sent, and r_i is what that rounds off; what a narrower one than float32
rounds off the sum on its way back is lost there, as without feedback.

References:
    Residuals: Seide et al., 1-bit stochastic gradient descent and its application to data-parallel
    distributed training of speech DNNs, Interspeech 2014; Karimireddy et al., Error feedback fixes
    SignSGD and other gradient compression schemes, ICML 2019. Of the sum as well: Tang et al.,
    DoubleSqueeze, ICML 2019. Differences: Mishchenko et al., Distributed learning with compressed
    gradient differences (DIANA), arXiv:1901.09269; Koloskova et al., Decentralized stochastic
    optimization and gossip algorithms with compressed communication (CHOCO-SGD), ICML 2019.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdaso._base import Leaves, PyTree
from jdaso._leaves import divide, float_leaves
from jdaso._wire import rounded, sum_dtype, wire_dtype

# In which the first mean travels, to which differences are taken.
FIRST_WIRE = "float32"


class Feedback(NamedTuple):
    """What a node remembers of the exchanges of a fragment, where any of them is in int8.

    On another number of nodes, each goes on with the mean of the residuals, by which the mean of
    the nodes is owed as much as before, but for what is in flight: that is dropped, and once with
    it what it had of the residual.

    Attributes:
        residual: r, like the exchanged leaves, in the dtype in which they are added up.
        anchor: a, the same; nothing for gradients.
        coarse: bool, whether what is in flight, or was last, is in int8.
        ready: bool, whether there is an anchor, or none is needed; the same on all nodes.
    """

    residual: Leaves
    anchor: Leaves
    coarse: jax.Array
    ready: jax.Array


def nothing_owed(tree: PyTree, anchored: bool) -> Feedback:
    """At the start of a training."""

    def zeros() -> Leaves:
        return [jnp.zeros(x.shape, sum_dtype(x.dtype)) for x in float_leaves(tree)]

    no, ready = jnp.zeros((), bool), jnp.full((), not anchored)
    return Feedback(zeros(), zeros() if anchored else [], no, ready)


def coarsened(leaves: Leaves, wire: str | None, feedback: Feedback) -> tuple[Leaves, Leaves]:
    """What crosses, and what a node owes then; not finite where what should cross is not."""
    crossing, residual = [], []
    for x, r, a in zip(leaves, feedback.residual, _anchors(feedback), strict=True):
        if wire == "int8":
            due = x.astype(r.dtype) - a + r
            sent = rounded(due)
        else:
            due = x.astype(r.dtype) + r
            sent = due.astype(wire_dtype(x.dtype, wire)).astype(x.dtype)
        crossing.append(sent)
        residual.append(due - sent)
    return crossing, residual


def owing(feedback: Feedback, residual: Leaves, sound: jax.Array, wire: str | None) -> Feedback:
    """After it was sent; who is not in the sum owes as much as before."""
    kept = [jnp.where(sound, new, r) for new, r in zip(residual, feedback.residual, strict=True)]
    return feedback._replace(residual=kept, coarse=jnp.full((), wire == "int8"))


def arrived(
    total: Leaves, members: jax.Array, feedback: Feedback
) -> tuple[Leaves, Leaves, Feedback]:
    """Sum and mean of the leaves of so many nodes, from what an exchange has returned.

    Args:
        total: s where this node has added up, elsewhere C(s); or sums of the leaves themselves,
            unless ``feedback.coarse``.
        members: float32 scalar, how many nodes contributed; 0 is not divided by.
        feedback: as :func:`owing` has left it.
    """
    sums, means, residual, anchor = [], [], [], []
    for s, r, a in zip(total, feedback.residual, _anchors(feedback), strict=True):
        coarse = jnp.where(feedback.coarse, rounded(s), s)
        lost = s - coarse
        # A sum that has overflowed must not stay in the residual.
        residual.append(r + jnp.where(jnp.isfinite(lost), lost, 0))
        base = jnp.where(feedback.coarse, a, 0)
        mean = base + divide(coarse, jnp.maximum(members, 1).astype(s.dtype))
        sums.append(members.astype(s.dtype) * base + coarse)
        means.append(mean)
        anchor.append(jnp.where(members > 0, mean, a))
    feedback = feedback._replace(
        residual=residual,
        anchor=anchor[: len(feedback.anchor)],
        ready=feedback.ready | (members > 0),
    )
    return sums, means, feedback


def _anchors(feedback: Feedback) -> Leaves:
    return feedback.anchor or [jnp.zeros((), r.dtype) for r in feedback.residual]
