"""Repeats Figure 1 of the EASGD paper: with workers in turns, ADMM can diverge and EASGD cannot.

    python examples/papers/center_stability.py [--out center_stability.png]

On F(x) = x^2/2 a round, in which each worker has one turn, is a linear map. jdaso's simulation
gives its matrix, column by column, from the unit vectors. The plot shows the largest absolute
eigenvalue minus 1. EASGD is stable within the bound of the paper.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdaso
from jdaso.center import SimulatedCluster, init_cluster, round_robin, take_turns

GRID = 50


def one_round(tx, cluster: SimulatedCluster, workers: int) -> SimulatedCluster:
    """Each worker takes one step on x^2/2, whose gradient is x."""

    def step(params, opt_state, _):
        updates, opt_state = tx.update(params, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, None

    return take_turns(step, cluster, round_robin(workers, workers), None)[0]


def admm(eta, rho, workers: int):
    """The matrix of a round for the workers' lambda and x. c is the result of Eq. 11."""
    tx = jdaso.center.admm(jdaso.center.simulated_center(workers), eta, rho)
    unit = jnp.eye(2 * workers)
    multipliers, params = unit[:workers], unit[workers:]
    first = init_cluster(tx, unit[0], workers)
    state = first.opt_state._replace(multiplier=multipliers)
    center = first.center._replace(center=[jnp.mean(params - multipliers, axis=0)])
    last = one_round(tx, SimulatedCluster(params, state, center), workers)
    return jnp.concatenate([last.opt_state.multiplier, last.params])


def easgd(eta, alpha, workers: int):
    """The matrix of a round for the workers' x and c."""
    tx = jdaso.chain(
        optax.sgd(eta), jdaso.center.async_easgd(jdaso.center.simulated_center(workers), 1, alpha)
    )
    unit = jnp.eye(workers + 1)
    first = init_cluster(tx, unit[0], workers)
    # Workers do not exchange with the center before their first step, so begin after it.
    elastic = first.opt_state.averaging
    state = first.opt_state._replace(averaging=elastic._replace(step=jnp.ones_like(elastic.step)))
    center = first.center._replace(center=[unit[-1]])
    last = one_round(tx, SimulatedCluster(unit[:-1], state, center), workers)
    return jnp.concatenate([last.params, last.center.center[0][None]])


def radii(matrix, workers: int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The largest absolute eigenvalues, indexed [y, x]."""
    rounds = jax.jit(jax.vmap(functools.partial(matrix, workers=workers)))
    every_x, every_y = np.meshgrid(x, y)
    matrices = np.asarray(rounds(every_x.ravel(), every_y.ravel()))
    return np.abs(np.linalg.eigvals(matrices)).max(axis=1).reshape(every_x.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("center_stability.png"), help="plot")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)  # radii differ from 1 by 1e-4 and less
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    etas, rhos = (np.arange(1, GRID + 1) / GRID * most for most in (0.01, 10))
    print("| | eta 0.001, rho 2.5 | largest on the grid | unstable, of the grid |")
    print("|---|---|---|---|")
    for axis, workers in zip(axes, (3, 8), strict=False):
        found = radii(admm, workers, etas, rhos)
        at = radii(admm, workers, np.array([0.001]), np.array([2.5])).item()
        print(f"| ADMM, p = {workers} | {at:.5f} | {_seen(found)} |")
        drawn = axis.pcolormesh(etas, rhos, found - 1, cmap="RdBu_r", norm=_around_zero(found - 1))
        figure.colorbar(drawn, ax=axis, label="radius - 1")
        axis.set(title=f"ADMM, p = {workers}", xlabel="eta", ylabel="rho")
    workers, axis = 4, axes[2]
    etas, alphas = np.arange(GRID) / GRID * 2, np.arange(1, GRID) / GRID
    found = radii(easgd, workers, etas, alphas)
    bound = (4 - 2 * etas) / (4 - etas)
    inside = alphas[:, None] <= bound
    print(f"| EASGD, p = {workers}, within its bound | | {_seen(found[inside])} |")
    drawn = axis.pcolormesh(etas, alphas, found - 1, cmap="RdBu_r", norm=_around_zero(found - 1))
    figure.colorbar(drawn, ax=axis, label="radius - 1")
    axis.plot(etas, bound, "k", label="(4 - 2 eta) / (4 - eta)")
    axis.set(title=f"EASGD, p = {workers}", xlabel="eta", ylabel="alpha", ylim=(0, 1))
    axis.legend(loc="lower left")
    figure.savefig(args.out, dpi=120)
    print(f"\n{args.out}")


def _seen(found: np.ndarray) -> str:
    """The largest radius, and the fraction of radii above 1 by more than rounding errors."""
    return f"{found.max():.5f} | {(found > 1 + 1e-9).mean():.3f}"


def _around_zero(values: np.ndarray):
    from matplotlib.colors import SymLogNorm

    most = np.abs(values).max()
    return SymLogNorm(linthresh=most / 100, vmin=-most, vmax=most)


if __name__ == "__main__":
    main()
