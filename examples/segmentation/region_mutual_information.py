"""Region mutual information loss (Zhao et al. 2019, arXiv:1910.12037).

A pixel is taken together with its neighbours: a map becomes a set of points with as many
dimensions, and label and prediction two such sets, whose mutual information has a lower bound that
needs their covariances only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.fft
from flax import nnx
from jax import lax

POOL = 4  # maps are averaged over squares of that many pixels first, which saves memory
RADIUS = 3  # of the neighbourhood, hence RADIUS^2 dimensions
RIDGE = 5e-4  # on the diagonal of sums over all points, as in the authors' code

_COSINES = scipy.fft.dct(np.eye(RADIUS), norm="ortho", axis=0)
_BASIS = np.einsum("ky,lx->yxkl", _COSINES, _COSINES).reshape(RADIUS, RADIUS, 1, RADIUS**2)
_ROUNDING = 1e-6  # of a sum of squares in float32


def loss(logits: jax.Array, labels: jax.Array, pixel_weight: float = 0.5) -> jax.Array:
    """``λ cross_entropy + (1 - λ) region_loss``, for each class against all others.

    Pixels without label count in neither term.

    Args:
        logits: of shape (batch, height, width, classes).
        labels: integers of shape (batch, height, width); -1 where there is none.
        pixel_weight: λ.

    Returns:
        A float32 scalar, never negative; 0 if no pixel has a label.

    Raises:
        ValueError: for less than 12 pixels of height or width.
    """
    truth = jax.nn.one_hot(labels, logits.shape[-1])  # of zeros, where there is no label
    labelled = (labels >= 0)[..., None]
    probabilities = labelled * jax.nn.sigmoid(logits.astype(jnp.float32))
    region = region_loss(truth, probabilities)
    return pixel_weight * cross_entropy(logits, labels) + (1 - pixel_weight) * region


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Binary cross-entropy: sum over classes, mean over the pixels that have a label."""
    truth = jax.nn.one_hot(labels, logits.shape[-1])
    labelled = (labels >= 0)[..., None]
    terms = optax.sigmoid_binary_cross_entropy(logits.astype(jnp.float32), truth)
    return jnp.sum(terms * labelled) / jnp.maximum(jnp.sum(labelled), 1)


def region_loss(truth: jax.Array, probabilities: jax.Array) -> jax.Array:
    """``1/(2d) sum_c log det(I + M_c / ridge)``, mean over images; d = 9 dimensions.

    M is what a linear prediction from P leaves unexplained of Y's covariance,
    ``M = Σ_Y - Σ_YP (Σ_P + ridge I)^-1 Σ_PY``. The authors minimize ``1/(2d) sum_c log det(M_c +
    ridge I)``, which differs by a constant. Here 0 means that all is explained, and the loss is
    never negative, so that its relative change, which plateau detectors look at, has a meaning.

    Args:
        truth: 0 or 1, float32, of shape (batch, height, width, classes).
        probabilities: float32 in the same shape.
    """
    y, p = _points(truth), _points(probabilities)
    # The difference above would lose its digits in float32; the authors take float64. As squares
    # of the residuals of a regression, M = R^T R + ridge B^T B with R = Y - P B, it keeps them.
    # B minimizes M, so an error of B is of second order in M, and gradients need not pass it.
    b = lax.stop_gradient(jnp.linalg.solve(_regular(_squares(p, p), RIDGE), _squares(p, y)))
    residual = y - jnp.einsum("bcni,bcij->bcnj", p, b, precision="highest")
    unexplained = _squares(residual, residual) / RIDGE + _squares(b, b)
    factor = jnp.linalg.cholesky(_regular(unexplained, 1.0))
    half_log_det = jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)).sum(axis=-1)
    return jnp.mean(jnp.sum(half_log_det, axis=-1)) / RADIUS**2


def _points(maps: jax.Array) -> jax.Array:
    """Neighbourhoods without their mean, of shape (batch, classes, points, dimensions).

    In the basis of cosines rather than of pixels. A rotation changes no determinant, but
    neighbours are so much alike that covariances of pixels are nearly singular; those of cosines
    are nearly diagonal.
    """
    batch, height, width, classes = maps.shape
    if min(height, width) < RADIUS * POOL:
        raise ValueError(
            f"maps must be at least {RADIUS * POOL} pixels high and wide, got {height} x {width}."
        )
    pooled = nnx.avg_pool(maps, (POOL, POOL), strides=(POOL, POOL))
    pooled = jnp.moveaxis(pooled, -1, 1).reshape(-1, *pooled.shape[1:3], 1)
    points = lax.conv_general_dilated(
        pooled,
        jnp.asarray(_BASIS, pooled.dtype),
        (1, 1),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision="highest",  # the default of a GPU has 10 bits
    ).reshape(batch, classes, -1, RADIUS**2)
    return points - points.mean(axis=2, keepdims=True)


def _squares(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum("bcni,bcnj->bcij", a, b, precision="highest")


def _regular(matrix: jax.Array, ridge: float) -> jax.Array:
    """The matrix with a diagonal that rounding cannot make a Cholesky decomposition fail on."""
    return matrix + jnp.eye(RADIUS**2) * (ridge + _ROUNDING * matrix)
