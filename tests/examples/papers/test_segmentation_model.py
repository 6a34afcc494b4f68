"""Shapes, sizes, and the fusion of scales."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from segmentation import attention, region_mutual_information
from segmentation.attention import MultiScaleAttention, fuse
from segmentation.hrnet import HRNet, resize

IMAGES = np.random.default_rng(0).integers(0, 256, (2, 32, 48, 3), np.uint8)


def drawn(make):
    """The module that ``make`` returns, with values that are drawn without compilation."""
    rng = np.random.default_rng(0)

    def draw(x):
        if x.ndim == 1:  # scales and variances are positive
            return jnp.asarray(rng.uniform(0.5, 1, x.shape), x.dtype)
        return jnp.asarray(rng.normal(size=x.shape) / np.sqrt(np.prod(x.shape[:-1])), x.dtype)

    graphdef, state = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graphdef, jax.tree.map(draw, state))


def small(**options):
    return drawn(
        lambda: MultiScaleAttention(3, 5, nnx.Rngs(0), widths=(4, 8), head_width=8, **options)
    )


@nnx.jit
def predict(model, images):
    return model(images, train=False)


@nnx.jit
def predict_at_one_scale(model, x):
    (logits, _), _ = model.at_one_scale(x, train=False)
    return logits


def decided(model, alpha):
    """The model with an attention map that is 0 or 1 everywhere."""
    model.attention_head.kernel[...] = jnp.zeros_like(model.attention_head.kernel[...])
    model.attention_head.bias[...] = jnp.full(1, 1e3 * (2 * alpha - 1))
    return model


def alone(model, scale):
    """The prediction of the model at one scale."""
    height, width = IMAGES.shape[1:3]
    size = (int(scale * height), int(scale * width))
    x = resize(jnp.asarray(IMAGES, jnp.float32) / 127.5 - 1, size)
    logits = predict_at_one_scale(model, x)
    return resize(resize(logits, (height // 4, width // 4)), (height, width))


def test_number_of_parameters():
    def conv_norm(features, out, size):
        return size**2 * features * out + 2 * out

    model = nnx.eval_shape(lambda: MultiScaleAttention(3, 7, nnx.Rngs(0)))
    stem = conv_norm(3, 32, 3) + conv_norm(32, 32, 3) + conv_norm(32, 64, 3)
    stage = 2 * conv_norm(32, 32, 3) + 2 * conv_norm(64, 64, 3)
    exchange = conv_norm(64, 32, 1) + conv_norm(32, 64, 3)
    context = 96 * 7 + 7 + conv_norm(96, 64, 3) + 3 * (64 * 64 + 64) + conv_norm(128, 64, 1)
    heads = 64 * 7 + 7 + 2 * conv_norm(64, 64, 3) + 64 + 1
    sizes = [x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
    assert sum(sizes) == stem + stage + exchange + context + heads == 293_391


def test_branches_have_halved_resolutions_whatever_the_size():
    """Four branches and two blocks, with odd sizes."""
    model = nnx.eval_shape(lambda: HRNet(3, (4, 6, 8, 10), 2, jnp.float32, nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((1, 50, 70, 3), jnp.float32)
    features = nnx.eval_shape(lambda model, x: model(x, train=False), model, x)
    assert features.shape == (1, 13, 18, 4 + 6 + 8 + 10)
    stages = [[len(branches) for branches in stage.branches] for stage in model.stages]
    assert stages == [[2] * 2, [2] * 3, [2] * 4]


def test_exchange_carries_every_branch_to_every_other():
    widths = (4, 6, 8)
    model = drawn(lambda: HRNet(3, widths, 0, jnp.float32, nnx.Rngs(0)))
    shapes = [(1, 16 // 2**i, 16 // 2**i, width) for i, width in enumerate(widths)]
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    graphdef, state = nnx.split(model.stages[1])
    stage = jax.jit(lambda xs: nnx.merge(graphdef, state)(xs, train=False))
    before = stage(xs)
    assert [x.shape for x in before] == shapes
    for i in range(3):
        after = stage([x + np.float32(i == j) for j, x in enumerate(xs)])
        assert all(np.any(np.asarray(a) != b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_predictions_are_float32_in_the_size_of_the_images(dtype):
    for logits in nnx.eval_shape(predict, small(dtype=dtype), IMAGES):
        assert logits.shape == (2, 32, 48, 5)
        assert logits.dtype == jnp.float32


def test_attention_of_0_is_the_fine_scale_and_of_1_the_coarse():
    rng = np.random.default_rng(0)
    coarse, fine = rng.normal(size=(1, 4, 6, 3)), rng.normal(size=(1, 8, 12, 3))
    none, full = np.zeros((1, 4, 6, 1)), np.ones((1, 4, 6, 1))
    np.testing.assert_allclose(fuse(coarse, none, fine, (8, 12)), fine, rtol=1e-6)
    np.testing.assert_allclose(
        fuse(coarse, full, fine, (8, 12)), resize(coarse, (8, 12)), rtol=1e-5, atol=1e-6
    )


def test_fusion_is_equation_1():
    """U(α l) + (1 - U(α)) l with bilinear U, in one dimension: 1/4 and 3/4 of two neighbours."""
    up = np.array([[1, 0], [0.75, 0.25], [0.25, 0.75], [0, 1]])
    alpha, coarse, fine = np.array([0.2, 0.6]), np.array([2.0, -1.0]), np.array([1.0, 2, 3, 4])
    expected = up @ (alpha * coarse) + (1 - up @ alpha) * fine
    columns = (x.reshape(1, -1, 1, 1) for x in (coarse, alpha, fine))
    np.testing.assert_allclose(fuse(*columns, (4, 1)).ravel(), expected, rtol=1e-6)


def test_shrinking_takes_means_of_squares():
    x = np.arange(32.0).reshape(1, 4, 8, 1)
    expected = x.reshape(1, 2, 2, 4, 2, 1).mean(axis=(2, 4))
    np.testing.assert_allclose(resize(x, (2, 4)), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("alpha", "scales", "expected"),
    [
        (0, (0.5, 1.0), 1.0),
        (1, (0.5, 1.0), 0.5),
        (0, (2.0, 0.5, 1.0), 2.0),
        (1, (2.0, 0.5, 1.0), 0.5),
    ],
)
def test_attention_chooses_among_scales(alpha, scales, expected):
    """With attention 0 only the finest scale counts, with 1 only the coarsest."""
    model = decided(small(scales=scales), alpha)
    logits = predict(model, IMAGES).logits
    np.testing.assert_allclose(logits, alone(model, expected), rtol=1e-4, atol=1e-4)


def test_scales_without_1_are_refused():
    with pytest.raises(ValueError, match=r"contain 1.*\(0.5, 2.0\)"):
        small(scales=(0.5, 2.0))


def test_training_looks_at_two_scales_whatever_evaluation_does():
    """The statistics are updated by the images, then by the images in half the size."""
    graphdef, params, stats = nnx.split(small(scales=(1.0,)), nnx.Param, nnx.BatchStat)

    @functools.partial(jax.vmap, axis_name="local")
    def train(images):
        model = nnx.merge(graphdef, params, stats, copy=True)
        model(images, train=True)
        return nnx.state(model, nnx.BatchStat)

    new_stats = jax.jit(train)(IMAGES[None])
    mean = stats["backbone"]["stem"]["norm"]["mean"][...]
    for size in ((32, 48), (16, 24)):
        x = resize(jnp.asarray(IMAGES, jnp.float32) / 127.5 - 1, size)
        kernel = params["backbone"]["stem"]["conv"]["kernel"][...]
        y = jax.lax.conv_general_dilated(
            x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        mean = 0.9 * mean + 0.1 * y.mean(axis=(0, 1, 2))
    new_mean = new_stats["backbone"]["stem"]["norm"]["mean"][0]
    np.testing.assert_allclose(new_mean, mean, rtol=1e-4, atol=1e-5)


def test_loss_has_the_auxiliary_head_in_it():
    rng = np.random.default_rng(0)
    labels = rng.integers(-1, 3, (1, 16, 16))
    prediction = attention.Prediction(*rng.normal(size=(2, 1, 16, 16, 3)))
    loss = jax.jit(attention.loss)(prediction, labels)
    expected = jax.jit(region_mutual_information.loss)(prediction.logits, labels)
    expected += 0.4 * region_mutual_information.cross_entropy(prediction.auxiliary, labels)
    assert loss == pytest.approx(float(expected), rel=1e-6)
