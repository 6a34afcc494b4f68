"""Round-robin EASGD and ADMM as linear maps (easgd Sec. 4), and what the simulation does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_center import admm_map, composed, easgd_map, radius

import jdaso
from jdaso.center import SimulatedCluster, init_cluster, round_robin, take_turns
from jdaso.center.simulation import center_of


def bound(eta):
    """The largest stable alpha of one map: (4 - 2 eta) / (4 - eta)."""
    return (4 - 2 * eta) / (4 - eta)


@pytest.mark.parametrize("eta", [0.0, 0.1, 1.0, 1.9, 2.0])
@pytest.mark.parametrize("workers", [1, 4])
def test_one_map_of_easgd_is_stable_just_up_to_its_bound(workers, eta):
    at = radius(easgd_map(workers, 0, eta, bound(eta)))
    assert at == pytest.approx(1, abs=1e-12)
    assert radius(easgd_map(workers, 0, eta, bound(eta) + 1e-6)) > 1 + 1e-9


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 16])
def test_the_bound_suffices_for_the_composed_map(workers):
    for eta in np.linspace(0, 2, 9):
        for share in (0.25, 0.5, 0.9, 1.0):
            matrix = composed(easgd_map, workers, eta, share * bound(eta))
            assert radius(matrix) <= 1 + 1e-9


# p = 4: alpha 0.1 % and 10 % beyond the bound.
@pytest.mark.parametrize(
    ("eta", "just", "far"), [(0.1, 0.9957, 1.279), (1.0, 0.984, 1.120), (1.9, 1.00006, 1.0105)]
)
def test_beyond_the_bound_the_composed_map_is_unstable_only_after_a_while(eta, just, far):
    assert radius(composed(easgd_map, 4, eta, 1.001 * bound(eta))) == pytest.approx(just, rel=5e-4)
    assert radius(composed(easgd_map, 4, eta, 1.1 * bound(eta))) == pytest.approx(far, rel=5e-4)


def easgd_round(eta, alpha, workers):
    tx = optax.chain(
        optax.sgd(eta), jdaso.center.async_easgd(jdaso.center.simulated_center(workers), 1, alpha)
    )
    unit = jnp.eye(workers + 1)
    cluster = init_cluster(tx, unit[0], workers)
    # Past the first step, before which there is no exchange.
    sgd, elastic = cluster.opt_state
    state = sgd, elastic._replace(step=jnp.ones_like(elastic.step))
    cluster = SimulatedCluster(
        unit[:workers], state, cluster.center._replace(center=[unit[workers]])
    )
    cluster, _ = take_turns(
        functools.partial(quadratic_step, tx), cluster, round_robin(workers, workers), None
    )
    return jnp.vstack([cluster.params, cluster.center.center[0]])


def quadratic_step(tx, params, opt_state, _):
    updates, opt_state = tx.update(params, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, center_of(opt_state).center[0]


def admm_round(eta, rho, workers):
    """On (lambda^1, x^1, ...), with c as Eq. 11 has left it."""
    tx = jdaso.center.admm(jdaso.center.simulated_center(workers), eta, rho)
    unit = jnp.eye(2 * workers)
    multipliers, params = unit[0::2], unit[1::2]
    cluster = init_cluster(tx, unit[0], workers)
    cluster = SimulatedCluster(
        params,
        cluster.opt_state._replace(multiplier=multipliers),
        cluster.center._replace(center=[jnp.mean(params - multipliers, axis=0)]),
    )
    cluster, _ = take_turns(
        functools.partial(quadratic_step, tx), cluster, round_robin(workers, workers), None
    )
    rows = jnp.stack([cluster.opt_state.multiplier, cluster.params], axis=1)
    return rows.reshape(2 * workers, -1)


@pytest.mark.parametrize("workers", [1, 4])
def test_the_simulation_of_easgd_is_the_composed_map(workers):
    etas = np.array([0.1, 0.1, 1.0, 1.9], np.float32)
    alphas = np.float32([0.5, 1, 1.1, 1.1]) * bound(etas)
    alphas = np.minimum(alphas, 0.999)
    rounds = jax.jit(jax.vmap(functools.partial(easgd_round, workers=workers)))(etas, alphas)
    for eta, alpha, matrix in zip(etas, alphas, rounds, strict=True):
        expected = composed(easgd_map, workers, float(eta), float(alpha))
        np.testing.assert_allclose(matrix, expected, atol=1e-6)
        assert radius(matrix) == pytest.approx(radius(expected), abs=1e-5)


def test_the_simulation_of_admm_is_the_composed_map_over_the_grid_of_figure_1():
    workers = 8
    etas, rhos = np.meshgrid(np.float32([1e-4, 1e-3, 1e-2]), np.float32([0.1, 2.5, 10.0]))
    simulated = jax.jit(jax.vmap(functools.partial(admm_round, workers=workers)))
    for eta, rho, matrix in zip(
        etas.ravel(), rhos.ravel(), simulated(etas.ravel(), rhos.ravel()), strict=True
    ):
        whole = composed(admm_map, workers, float(eta), float(rho))
        center = np.tile([-1, 1], workers) / workers  # Eq. 11
        expected = whole[:-1, :-1] + np.outer(whole[:-1, -1], center)
        np.testing.assert_allclose(matrix, expected, atol=2e-6)
        assert radius(expected) == pytest.approx(radius(whole), abs=1e-9)


@pytest.mark.parametrize(("workers", "expected"), [(3, 1.00097), (8, 1.00226)])
def test_admm_diverges_at_the_papers_eta_and_rho(workers, expected):
    matrix = composed(admm_map, workers, 0.001, 2.5)
    assert radius(matrix) == pytest.approx(expected, abs=5e-6)
    # Each turn alone is stable.
    assert radius(admm_map(workers, 0, 0.001, 2.5)) <= 1 + 1e-12


def test_admm_in_the_simulation_diverges_from_the_papers_start_and_easgd_does_not():
    """lambda = 0, x = c = 1000; at p = 8 it falls for 2000 rounds, then grows 9 times in 1000."""
    workers, rounds = 8, 5000
    order = round_robin(workers, workers * rounds)

    def centers(tx):
        step = functools.partial(quadratic_step, tx)
        run = jax.jit(lambda c: take_turns(step, c, order, None)[1])
        return np.abs(run(init_cluster(tx, jnp.float32(1000), workers)))[workers - 1 :: workers]

    diverging = centers(jdaso.center.admm(jdaso.center.simulated_center(workers), 0.001, 2.5))
    late, end = diverging[3000:3500].max(), diverging[4500:].max()
    # The phase of the oscillation is seen by the maxima of windows of 500 rounds.
    growth = composed(admm_map, workers, 0.001, 2.5)
    assert (end / late) ** (1 / 1500) == pytest.approx(radius(growth), abs=3e-4)
    elastic = jdaso.center.async_easgd(jdaso.center.simulated_center(workers), 1, alpha=0.001 * 2.5)
    falling = centers(optax.chain(optax.sgd(0.001), elastic))
    assert (np.diff(falling) <= 0).all()
    expected = radius(composed(easgd_map, workers, 0.001, 0.001 * 2.5))
    assert (falling[-1] / falling[-1001]) ** (1 / 1000) == pytest.approx(expected, abs=1e-5)
    assert expected < 1


def test_easgd_beyond_the_bound_grows_as_the_composed_map_does():
    workers, rounds, eta = 4, 600, 1.9
    alpha = 1.1 * bound(eta)
    tx = optax.chain(
        optax.sgd(eta), jdaso.center.async_easgd(jdaso.center.simulated_center(workers), 1, alpha)
    )
    step = functools.partial(quadratic_step, tx)
    order = round_robin(workers, workers * rounds)
    seen = jax.jit(lambda c: take_turns(step, c, order, None)[1])(
        init_cluster(tx, jnp.float32(1.0), workers)
    )
    state = np.array([1 - eta] * workers + [1.0])  # no exchange in the first round
    matrix, expected = composed(easgd_map, workers, eta, alpha), []
    for _ in range(rounds):
        expected.append(state[-1])
        state = matrix @ state
    largest = np.abs(expected).max()
    assert largest > 20
    # Roundings of 2400 turns, which grow as all does.
    np.testing.assert_allclose(seen[workers - 1 :: workers], expected, atol=1e-4 * largest)
