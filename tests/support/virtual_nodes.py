"""A virtual cluster of nodes whose gradients are given, and how near it must come to NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import Phase, settings
from jax import lax

import jdaso

LR = 2.0**-6
# A float32 rounding is 3e-8 of a number, on average. In 100 steps the recursion in NumPy's float32
# goes up to 7e-7 of the parameters' norm astray; a rounding that is always to the same side, for
# instance of 1/3, would add up to 3e-6.
RELATIVE_TO_NORM = 1e-6
# Every example is compiled anew, a second or two each: few examples, long runs, and no shrinking.
few = functools.partial(settings, phases=(Phase.explicit, Phase.reuse, Phase.generate))
# A step is tx.update with optax.apply_updates, or jdaso.apply_gradients, which has its own code.
both_ways = pytest.mark.parametrize("in_place", [False, True], ids=["update", "in_place"])


def engine_state(state, params):
    """The engine's state, without what its exchange keeps."""
    del params
    seen = jdaso.core.averaging_state(state)
    return seen._replace(fragments=tuple(f._replace(exchange=()) for f in seen.fragments))


def given_gradients(params, inputs):
    """The gradients are the inputs, whatever the parameters."""
    del params
    return inputs


def train(
    tx,
    x,
    inputs,
    losses=None,
    *,
    gradient=given_gradients,
    look=engine_state,
    leaves=1,
    in_place=False,
):
    """Runs P nodes under vmap, scanned over T steps.

    Args:
        tx: a whole optimizer, whose exchange is over the axis "node".
        x: (P, n), where the nodes start.
        inputs: (T, P, n), what each node is given in each step: gradients, or noise in them.
        losses: (T, P), each node's loss in each step, or None.
        gradient: ``(params, inputs) -> gradients``, element by element.
        look: ``(state, params) -> what to return`` of every step.
        leaves: number of leaves, equally long, that the n parameters make up.
        in_place: whether to take steps with ``jdaso.apply_gradients``, and not with ``tx.update``.

    Returns:
        The parameters after every step, (T, P, n), and what ``look`` saw then, (T, P, ...).
    """

    def step(carry, given):
        params, state = carry
        inputs, loss = given
        grads = jax.tree.map(gradient, params, jnp.split(inputs, leaves))
        if in_place:
            params, state = jdaso.apply_gradients(tx, grads, state, params, value=loss)
        else:
            updates, state = tx.update(grads, state, params, value=loss)
            params = optax.apply_updates(params, updates)
        return (params, state), (jnp.concatenate(params), look(state, params))

    def start(x):
        params = jnp.split(x, leaves)
        return params, tx.init(params)

    on_nodes = functools.partial(jax.vmap, axis_name="node")

    @jax.jit
    def run(x, inputs, losses):
        return lax.scan(on_nodes(step), on_nodes(start)(x), (inputs, losses))[1]

    f32 = functools.partial(jnp.asarray, dtype=jnp.float32)
    losses = None if losses is None else f32(losses)
    return jax.tree.map(np.asarray, run(f32(x), f32(inputs), losses))


def simulate(averaging, x, grads, losses=None, momentum=None, **options):
    """The same with SGD before ``averaging``; grads is (T, P, n)."""
    chain = jdaso.chain if options.get("in_place") else optax.chain
    tx = chain(optax.sgd(LR, momentum), averaging)
    return train(tx, x, grads, losses, **options)


def random_run(seed, steps, nodes, size=60, alike=False):
    """Start and gradients as float32 numbers in float64, so that both sides get the same ones.

    With ``alike`` all nodes start from the same parameters.
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(nodes, size)).astype(np.float32).astype(np.float64)
    grads = rng.normal(size=(steps, nodes, size)).astype(np.float32).astype(np.float64)
    return np.broadcast_to(x[0], x.shape) if alike else x, grads


def dyadic_run(steps, nodes):
    """Numbers of few bits in [1, 2): sums and quotients by powers of 2 of them are exact."""
    rng = np.random.default_rng(7)
    x = 1.25 + rng.integers(0, 64, (nodes, 8)) / 128
    grads = rng.integers(-8, 9, (steps, nodes, 8)) / 8  # times LR: multiples of 2^-9
    return x.astype(np.float32), grads.astype(np.float32)


def assert_near(actual, expected, tolerance=RELATIVE_TO_NORM):
    """What (T, ...) arrays hold after each step differs by little of that step's norm.

    What a node has after it lost its numbers, until it takes the others' mean, is left to the
    library; the recursion says nan there.
    """
    sound = np.isfinite(expected).all(axis=-1, keepdims=True)
    error = np.where(sound, actual - np.where(sound, expected, 0), 0)
    axes = tuple(range(1, expected.ndim))
    norm = np.linalg.norm(np.where(sound, expected, 0).reshape(len(expected), -1), axis=1)
    distance = np.sqrt((error**2).sum(axis=axes))
    worst = np.argmax(distance / norm)
    assert (distance <= tolerance * norm).all(), (
        f"step {worst}: {distance[worst] / norm[worst]:.2g} of the norm astray"
    )
