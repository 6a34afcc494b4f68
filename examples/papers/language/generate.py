"""Generates text with a trained model."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


@functools.partial(jax.jit, static_argnames=("logits_of", "count"))
def continuation(
    logits_of: Callable,
    params: object,
    tokens: jax.Array,
    length: jax.Array,
    count: int,
    temperature: float,
    key: jax.Array,
) -> jax.Array:
    """Draws ``count`` tokens one after the other, each from the distribution after the last ones.

    Args:
        logits_of: ``(params, tokens (1, context)) -> logits (1, context, vocabulary)``.
        tokens: int32[context] with the prompt at the beginning.
        length: Number of tokens of the prompt, from 1 to the context.
        temperature: Divides the logits. Small values favour likely tokens.
    """

    def draw(carry, key):
        tokens, length = carry
        logits = logits_of(params, tokens[None])[0, length - 1]
        token = jax.random.categorical(key, logits / temperature)
        full = length == len(tokens)
        tokens = jnp.where(full, jnp.roll(tokens, -1), tokens)
        length = length + ~full
        return (tokens.at[length - 1].set(token), length), token

    return jax.lax.scan(draw, (tokens, length), jax.random.split(key, count))[1]


def generate(
    logits_of: Callable,
    params: object,
    prompt: np.ndarray,
    context: int,
    count: int,
    temperature: float,
    seed: int,
) -> np.ndarray:
    """Returns the prompt, an array of tokens, and the tokens that the model continues it with."""
    last = np.asarray(prompt, np.int32)[-context:]
    tokens = np.zeros(context, np.int32)
    tokens[: len(last)] = last
    arguments = jnp.asarray(tokens), jnp.int32(len(last)), count, temperature, jax.random.key(seed)
    return np.concatenate([prompt, jax.device_get(continuation(logits_of, params, *arguments))])
