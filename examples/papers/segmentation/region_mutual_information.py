"""Region mutual information loss (Zhao et al. 2019, arXiv:1910.12037).

Each pixel and its neighbours form one point with a dimension for each pixel. Labels and predictions
become two sets of such points. Their mutual information has a lower bound that depends only on the
covariances.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.fft
from flax import nnx
from jax import lax

POOL = 4  # maps are averaged over POOL x POOL pixels first, which saves memory
RADIUS = 3  # side of the neighbourhood, which has RADIUS^2 dimensions
RIDGE = 5e-4  # added to the diagonal of sums over all points, as in the authors' code

_COSINES = scipy.fft.dct(np.eye(RADIUS), norm="ortho", axis=0)
_BASIS = np.einsum("ky,lx->yxkl", _COSINES, _COSINES).reshape(RADIUS, RADIUS, 1, RADIUS**2)
_ROUNDING = 1e-6  # relative rounding error of a sum of squares in float32


def loss(logits: jax.Array, labels: jax.Array, pixel_weight: float = 0.5) -> jax.Array:
    """``λ cross_entropy + (1 - λ) region_loss``, for each class against all others.

    Pixels without a label do not count in either term.

    Args:
        logits: Array of shape (batch, height, width, classes).
        labels: Integers of shape (batch, height, width), -1 for no label.
        pixel_weight: The weight λ.

    Returns:
        A float32 scalar that is never negative. It is 0 if no pixel has a label.

    Raises:
        ValueError: If height or width is less than 12 pixels.
    """
    truth = jax.nn.one_hot(labels, logits.shape[-1])  # zeros for pixels without a label
    labelled = (labels >= 0)[..., None]
    probabilities = labelled * jax.nn.sigmoid(logits.astype(jnp.float32))
    region = region_loss(truth, probabilities)
    return pixel_weight * cross_entropy(logits, labels) + (1 - pixel_weight) * region


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Binary cross-entropy, summed over classes and averaged over the pixels with a label."""
    truth = jax.nn.one_hot(labels, logits.shape[-1])
    labelled = (labels >= 0)[..., None]
    terms = optax.sigmoid_binary_cross_entropy(logits.astype(jnp.float32), truth)
    return jnp.sum(terms * labelled) / jnp.maximum(jnp.sum(labelled), 1)


def region_loss(truth: jax.Array, probabilities: jax.Array) -> jax.Array:
    """``1/(2d) sum_c log det(I + M_c / ridge)`` with d = 9 dimensions, averaged over images.

    M is the part of Y's covariance that a linear prediction from P does not explain,
    ``M = Σ_Y - Σ_YP (Σ_P + ridge I)^-1 Σ_PY``. The authors minimize ``1/(2d) sum_c log det(M_c +
    ridge I)``, which differs by a constant. The loss here is never negative, and 0 means that
    everything is explained. So its relative change, which plateau detectors use, has a meaning.

    Args:
        truth: float32 of shape (batch, height, width, classes), each 0 or 1.
        probabilities: float32 of the same shape.
    """
    y, p = _points(truth), _points(probabilities)
    # The difference above would lose its digits in float32, so the authors use float64. Written as
    # squares of the residuals of a regression, M = R^T R + ridge B^T B with R = Y - P B, it is
    # accurate in float32. B minimizes M, so an error of B has a second-order effect on M, and
    # gradients through B vanish.
    b = lax.stop_gradient(jnp.linalg.solve(_regular(_squares(p, p), RIDGE), _squares(p, y)))
    residual = y - jnp.einsum("bcni,bcij->bcnj", p, b, precision="highest")
    unexplained = _squares(residual, residual) / RIDGE + _squares(b, b)
    factor = jnp.linalg.cholesky(_regular(unexplained, 1.0))
    half_log_det = jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)).sum(axis=-1)
    return jnp.mean(jnp.sum(half_log_det, axis=-1)) / RADIUS**2


def _points(maps: jax.Array) -> jax.Array:
    """The neighbourhoods minus their mean, of shape (batch, classes, points, dimensions).

    They are expressed in a basis of cosines. A rotation of the basis does not change determinants.
    In the basis of pixels the covariances would be nearly singular, because neighbours are similar.
    In the basis of cosines they are nearly diagonal.
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
        precision="highest",  # the default on GPUs has 10 bits
    ).reshape(batch, classes, -1, RADIUS**2)
    return points - points.mean(axis=2, keepdims=True)


def _squares(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum("bcni,bcnj->bcij", a, b, precision="highest")


def _regular(matrix: jax.Array, ridge: float) -> jax.Array:
    """Increases the diagonal, so that rounding does not make the Cholesky decomposition fail."""
    return matrix + jnp.eye(RADIUS**2) * (ridge + _ROUNDING * matrix)
