"""Region mutual information against its definition, and intersection over union."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage
from segmentation import intersection_over_union
from segmentation import region_mutual_information as rmi

RIDGE, CLASSES = 5e-4, 4


def scene(seed, shape=(2, 48, 80)):
    """Labels with a straight border, a disc and squares, and some pixels without a label."""
    rng = np.random.default_rng(seed)
    labels = np.zeros(shape, int)
    y, x = np.mgrid[: shape[1], : shape[2]]
    for image in labels:
        image[y < rng.integers(8, 40)] = 1  # rows are alike: covariances are singular
        image[(y - rng.integers(10, 40)) ** 2 + (x - 40) ** 2 < 120] = 2
        for top, left in rng.integers(0, 40, (6, 2)):
            image[top : top + 6, left : left + 9] = rng.integers(-1, CLASSES)
    return labels


def scores(labels, kind, seed=1):
    """Logits from random guesses to certainty."""
    rng = np.random.default_rng(seed)
    signs = 2.0 * (labels[..., None] == np.arange(CLASSES)) - 1
    return {
        "noise": rng.normal(size=signs.shape),
        "nothing": np.full(signs.shape, -1.0),
        "beginner": 0.01 * signs,
        "good": 3 * signs + rng.normal(size=signs.shape),
        "certain": 1e4 * signs,
        "certain and wrong": -1e4 * signs,
        "infinite": 1e38 * signs,
    }[kind]


def published(logits, labels):
    """The authors' region loss in float64, one matrix after the other."""
    truth = (labels[..., None] == np.arange(CLASSES)).astype(np.float64)
    logits = np.clip(logits, -700, 700)
    probabilities = (labels >= 0)[..., None] / (1 + np.exp(-logits)) + 1e-6
    total = 0.0
    for image in range(len(labels)):
        for c in range(CLASSES):
            y, p = points(truth[image, :, :, c]), points(probabilities[image, :, :, c])
            posterior = y @ p.T @ np.linalg.inv(p @ p.T + RIDGE * np.eye(9)) @ p @ y.T
            total += np.linalg.slogdet(y @ y.T - posterior + RIDGE * np.eye(9))[1] / 2
    return total / 9 / len(labels)


def points(image):
    """The columns are the 3x3 neighbourhoods of an image that is pooled 4x4, minus their mean."""
    height, width = image.shape[0] // 4, image.shape[1] // 4
    pooled = image[: 4 * height, : 4 * width].reshape(height, 4, width, 4).mean(axis=(1, 3))
    columns = [
        pooled[i : i + 3, j : j + 3].ravel() for i in range(height - 2) for j in range(width - 2)
    ]
    return (np.array(columns) - np.mean(columns, axis=0)).T


loss = jax.jit(rmi.loss)
loss_and_gradient = jax.jit(jax.value_and_grad(rmi.loss))


@jax.jit
@jax.value_and_grad
def region_and_gradient(logits, labels):
    """The region loss alone and its gradient, with a pixel weight of 0."""
    return rmi.loss(logits, labels, pixel_weight=0.0)


def region(logits, labels):
    return region_and_gradient(jnp.asarray(logits, jnp.float32), labels)[0]


@pytest.mark.parametrize(
    "kind", ["noise", "nothing", "beginner", "good", "certain", "certain and wrong"]
)
def test_region_loss_is_the_published_one_up_to_a_constant(kind):
    labels = scene(0)
    logits = scores(labels, kind)
    expected = published(logits, labels) - CLASSES * np.log(RIDGE) / 2
    assert region(logits, labels) == pytest.approx(expected, rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("kind", ["noise", "beginner", "good"])
def test_gradient_is_that_of_the_published_loss(kind):
    labels = scene(0)
    logits = scores(labels, kind)
    gradient = region_and_gradient(jnp.asarray(logits, jnp.float32), labels)[1]
    gradient = np.asarray(gradient, np.float64)
    for direction in (gradient, np.random.default_rng(2).normal(size=logits.shape)):
        step = 1e-4 * direction / np.abs(direction).max()
        up, down = published(logits + step, labels), published(logits - step, labels)
        tolerance = 1e-3 * np.linalg.norm(gradient) * np.linalg.norm(step)
        assert np.sum(gradient * step) == pytest.approx((up - down) / 2, abs=tolerance)


@pytest.mark.parametrize("kind", ["nothing", "certain", "certain and wrong", "infinite"])
def test_extreme_logits_leave_loss_and_gradient_finite(kind):
    labels = scene(3)
    logits = jnp.asarray(scores(labels, kind), jnp.float32)
    value, gradient = loss_and_gradient(logits, labels)
    assert 0 <= value < np.inf
    assert np.isfinite(gradient).all()


def test_smooth_predictions_keep_their_digits():
    """Neighbours are nearly equal, so covariances of pixels are singular in float32."""
    labels = scene(0, (1, 48, 80)).repeat(4, axis=1).repeat(4, axis=2)
    logits = scores(np.roll(labels, 20, axis=2), "good", seed=2)
    logits = scipy.ndimage.gaussian_filter(logits, (0, 25, 25, 0), mode="nearest")
    expected = published(logits, labels) - CLASSES * np.log(RIDGE) / 2
    assert region(logits, labels) == pytest.approx(expected, rel=5e-6)


def test_structure_counts_where_pixels_do_not():
    """Predictions of the same cross-entropy: right with low confidence, often right with high."""
    labels = np.maximum(scene(0), 0)
    signs = 2.0 * (labels[..., None] == np.arange(CLASSES)) - 1
    flipped = np.random.default_rng(0).random(signs.shape) < 0.1
    scattered = np.where(flipped, -3 * signs, 3 * signs)
    mean = np.mean(np.log1p(np.exp(-signs * scattered)))
    whole = signs * -np.log(np.expm1(mean))
    assert rmi.cross_entropy(whole, labels) == pytest.approx(CLASSES * mean, rel=1e-5)
    assert rmi.cross_entropy(scattered, labels) == pytest.approx(CLASSES * mean, rel=1e-5)
    assert region(whole, labels) < 0.5 * region(scattered, labels)


def test_cross_entropy_is_of_labelled_pixels():
    labels = scene(0)
    logits = scores(labels, "good")
    truth = labels[..., None] == np.arange(CLASSES)
    terms = np.where(truth, np.log1p(np.exp(-logits)), np.log1p(np.exp(logits)))
    expected = terms[labels >= 0].sum(axis=-1).mean()
    assert rmi.cross_entropy(logits, labels) == pytest.approx(expected, rel=1e-5)
    assert (labels == -1).any()


def test_loss_is_half_of_both():
    labels = scene(0)
    logits = scores(labels, "noise")
    expected = 0.5 * rmi.cross_entropy(logits, labels) + 0.5 * region(logits, labels)
    assert loss(logits, labels) == pytest.approx(float(expected), rel=1e-5)


def test_pixels_without_label_have_no_gradient():
    labels = scene(0)
    logits = jnp.asarray(scores(labels, "good"), jnp.float32)
    gradient = np.asarray(loss_and_gradient(logits, labels)[1])
    assert not gradient[labels == -1].any()
    assert np.abs(gradient[labels >= 0]).max() > 0


def test_nothing_labelled_is_no_loss():
    logits = jnp.asarray(scores(scene(0), "good"), jnp.float32)
    value, gradient = loss_and_gradient(logits, np.full(logits.shape[:3], -1))
    assert value == 0
    assert not gradient.any()


def test_images_without_a_neighbourhood_are_refused():
    labels = np.zeros((1, 12, 12), int)
    assert jax.eval_shape(rmi.loss, np.zeros((1, 12, 12, 2)), labels).shape == ()
    with pytest.raises(ValueError, match="at least 12 pixels high and wide, got 11 x 12"):
        jax.eval_shape(rmi.loss, np.zeros((1, 11, 12, 2)), labels[:, :11])


def test_counts_of_batches_add_up_to_the_score():
    rng = np.random.default_rng(0)
    labels, predicted = rng.integers((-1, 0), 5, (6, 8, 10, 2)).transpose(3, 0, 1, 2)
    labels[labels == 4] = 3  # class 4 is predicted but not labelled, class 5 neither
    predicted = np.where(rng.random(labels.shape) < 0.5, np.maximum(labels, 0), predicted)
    logits = np.eye(6)[predicted]
    parts = [
        np.asarray(intersection_over_union.counts(logits[i : i + 2], labels[i : i + 2]), np.float64)
        for i in (0, 2, 4)
    ]
    ious = []
    for c in range(5):
        both = np.sum((labels == c) & (predicted == c))
        ious.append(both / np.sum(((labels == c) | (predicted == c)) & (labels >= 0)))
    assert ious[4] == 0
    score = intersection_over_union.score(sum(parts))
    assert score["test_iou"] == pytest.approx(np.mean(ious), rel=1e-12)
    right = (labels == predicted)[labels >= 0]
    assert score["test_pixel_accuracy"] == pytest.approx(right.mean(), rel=1e-12)


def test_images_that_fill_a_batch_count_nothing():
    counts = intersection_over_union.counts(np.zeros((2, 4, 4, 3)), np.full((2, 4, 4), -1))
    np.testing.assert_array_equal(counts, np.zeros((3, 3)))
    with pytest.raises(ValueError, match="no pixel"):
        intersection_over_union.score(np.asarray(counts))
