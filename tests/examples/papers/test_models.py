"""The published numbers of parameters, shapes, precisions, and one training step of ResNet-50."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jdaso

PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
}


@functools.cache
def shapes(name, channels=3, num_classes=1000, dtype=jnp.bfloat16):
    """The model with shapes in place of parameters, which need no computation."""
    return nnx.eval_shape(lambda: models.create(name, channels, num_classes, 0, dtype))


def num_parameters(model):
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_imagenet_models_have_the_published_number_of_parameters(name):
    assert num_parameters(shapes(name)) == PUBLISHED[name]


@pytest.mark.parametrize(("channels", "num_classes"), [(3, 10), (1, 100)])
def test_resnet20_has_its_number_of_parameters(channels, num_classes):
    """Stem, 3 stages of 3 blocks, classifier; every norm has a scale and a bias per feature."""
    blocks = sum(
        (9 * features * width + 2 * width)
        + (9 * width * width + 2 * width)
        + (features * width + 2 * width if features != width else 0)  # projection
        for width in (16, 32, 64)
        for features in (max(width // 2, 16), width, width)
    )
    total = (9 * channels * 16 + 2 * 16) + blocks + (64 * num_classes + num_classes)
    assert num_parameters(shapes("resnet20", channels, num_classes)) == total


@pytest.mark.parametrize("name", models.IMAGE_SIZE)
def test_logits_parameters_and_statistics_are_float32(name):
    model, size = shapes(name), models.IMAGE_SIZE[name]
    images = jax.ShapeDtypeStruct((2, size, size, 3), jnp.uint8)
    logits = nnx.eval_shape(lambda model, images: model(images, train=False), model, images)
    assert logits.shape == (2, 1000)
    assert {str(x.dtype) for x in [logits, *jax.tree.leaves(nnx.state(model))]} == {"float32"}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_convolutions_calculate_in_the_dtype(dtype):
    graphdef, state = nnx.split(shapes("resnet20", dtype=dtype))
    jaxpr = jax.make_jaxpr(lambda state, images: nnx.merge(graphdef, state)(images, train=False))(
        state, jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.uint8)
    )
    convolutions = [e for e in jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    assert len(convolutions) == 1 + 2 * 9 + 2  # stem, blocks, projections
    assert {x.aval.dtype for e in convolutions for x in e.invars + e.outvars} == {np.dtype(dtype)}


@pytest.mark.parametrize("block", [models.BasicBlock, models.Bottleneck])
def test_blocks_start_as_the_identity(block):
    features = 4 * block.expansion
    x = np.random.default_rng(0).random((2, 3, 3, features), np.float32)
    y = block(features, 4, 1, jnp.float32, nnx.Rngs(0))(x, train=False)
    np.testing.assert_array_equal(y, x)


def test_unknown_model_is_named():
    with pytest.raises(ValueError, match=r"must be one of resnet18, .* got 'resnet19'"):
        models.create("resnet19", 3, 10, seed=0)


@pytest.mark.slow
def test_training_step_of_resnet50():
    """Two images of 224 x 224, differentiated as in train.py, reach every parameter."""
    rng = np.random.default_rng(0)
    model = shapes("resnet50", dtype=jnp.float32)
    graphdef, params, stats = nnx.split(model, nnx.Param, nnx.BatchStat)
    # Compiling initializers, or optimizing, would take longer than the step itself.
    params = jax.tree.map(lambda x: 0.1 * rng.standard_normal(x.shape, np.float32), params)
    stats = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), stats)
    images, labels = rng.integers(0, 256, (2, 224, 224, 3), np.uint8), np.array([3, 999])

    def loss_fn(params, stats, images, labels):
        model = nnx.merge(graphdef, params, stats, copy=True)
        logits = model(images, train=True)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, nnx.state(model, nnx.BatchStat)

    mesh = jax.make_mesh((1,), ("local",), axis_types=(jax.sharding.AxisType.Auto,))
    step = jdaso.local_value_and_grad(
        loss_fn, mesh, has_aux=True, in_specs=(P(), P("local"), P("local"))
    )
    step = jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})
    (loss, new_stats), grads = step(params, stats, images, labels)
    assert 0 < loss < np.inf
    for leaf in jax.tree.leaves(grads):
        assert np.all(np.isfinite(leaf))
        assert np.any(leaf != 0)
    for before, after in zip(jax.tree.leaves(stats), jax.tree.leaves(new_stats), strict=True):
        assert np.all(np.isfinite(after))
        assert np.any(after != before)


def test_batch_norm_is_over_all_devices_of_a_process():
    """Two devices with half of the images each compute the same as one device with all images."""
    model = models.create("resnet20", 1, 10, 0)
    graphdef, params, stats = nnx.split(model, nnx.Param, nnx.BatchStat)
    images = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 1), np.uint8)

    @functools.partial(jax.vmap, axis_name="local", in_axes=(None, None, 0))
    def outputs(params, stats, images):
        model = nnx.merge(graphdef, params, stats)
        return model(images, train=True), nnx.state(model, nnx.BatchStat)

    together, seen = jax.jit(outputs)(params, stats, images[None])
    apart, seen_apart = jax.jit(outputs)(params, stats, images.reshape(2, 4, 8, 8, 1))
    np.testing.assert_allclose(apart.reshape(8, 10), together[0], rtol=1e-4, atol=1e-4)
    for one, two in zip(*map(jax.tree.leaves, (seen, seen_apart)), strict=True):
        np.testing.assert_allclose(two, jnp.stack([one[0]] * 2), rtol=1e-4, atol=1e-4)
