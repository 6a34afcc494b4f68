"""Measures what jdaso.daso costs a training step between two exchanges, in paired runs.

    python bench/overhead.py [--millions 25] [--rows 4096] [--pairs 7]

One process trains a network of dense layers with the given number of parameters by SGD with
momentum. 4096 rows need as many operations per parameter as 25 images of 224 x 224 pixels need in
ResNet-50, which has 25 million parameters. No exchange is due in any of the measured steps, so only
the transformation itself is measured. Each pair runs the same number of steps without and with
jdaso.daso, in alternating order. The script prints the median of the pairs' ratios and its range.
"""

from __future__ import annotations

import argparse
import functools
import statistics

import jax
import jax.numpy as jnp
import optax
from machine import keep_memory, machine
from step import apply_gradients, timed

import jdaso

LAYERS = 10


def loss_fn(params, x):
    """Mean square of the output of a network of dense layers."""
    for kernel in params:
        x = jnp.tanh(x @ kernel)
    return jnp.mean(x**2)


def prepare(tx, width, rows):
    """Returns a function that takes a number of training steps and returns the seconds per step."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]
    state = [params, tx.init(params)]
    batch = jax.random.normal(jax.random.key(1), (rows, width))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return apply_gradients(tx, grads, opt_state, params, value=loss)

    run = timed(step, state, batch)
    run(2)
    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, default=25, help="million parameters")
    parser.add_argument("--rows", type=int, default=4096, help="rows of a batch")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of runs")
    parser.add_argument("--steps", type=int, default=1, help="steps of one run")
    arguments = parser.parse_args()
    keep_memory()

    width = round((arguments.millions * 1e6 / LAYERS) ** 0.5)
    sgd = optax.sgd(1e-3, momentum=0.9)
    # No run reaches the end of this period.
    averaging = jdaso.daso(jdaso.single_exchange(), period=10**6, delay=1)
    without = prepare(sgd, width, arguments.rows)
    within = prepare(jdaso.chain(sgd, averaging), width, arguments.rows)
    pairs = []
    for i in range(arguments.pairs):
        if i % 2:
            after, before = within(arguments.steps), without(arguments.steps)
        else:
            before, after = without(arguments.steps), within(arguments.steps)
        pairs.append((before, after))
    ratios = [after / before for before, after in pairs]
    print(machine())
    print(
        f"{LAYERS * width**2 / 1e6:.1f} M float32 parameters, {arguments.rows} rows, "
        f"{arguments.pairs} pairs of {arguments.steps} steps"
    )
    print(f"without jdaso.daso  {1e3 * statistics.median(p[0] for p in pairs):8.1f} ms per step")
    print(f"with jdaso.daso     {1e3 * statistics.median(p[1] for p in pairs):8.1f} ms per step")
    print(f"ratio {statistics.median(ratios):.4f}  ({min(ratios):.4f}..{max(ratios):.4f})")


if __name__ == "__main__":
    main()
