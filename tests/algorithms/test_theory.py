"""Results that the papers prove: means, variances and stability."""

import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_nodes import LR, assert_near, few, random_run, simulate, train

import jdaso


def roots(nodes, eta_h, alpha):
    """gamma and phi of easgd Lemma 7.1, the eigenvalues of the center's motion."""
    a = eta_h + (nodes + 1) * alpha
    root = np.sqrt(a**2 - 4 * eta_h * nodes * alpha)
    return 1 - (a - root) / 2, 1 - (a + root) / 2


def lemma(t, x0, c0, eta, alpha, h, sigma):
    """Mean and variance of the center after t steps, easgd Eq. 15 and 16, with x* = 0."""
    p = len(x0)
    gamma, phi = roots(p, eta * h, alpha)
    u0 = (x0 - alpha / (1 - p * alpha - phi) * c0).sum()
    mean = gamma**t * c0 + (gamma**t - phi**t) / (gamma - phi) * alpha * u0
    bracket = (
        (gamma**2 - gamma ** (2 * t)) / (1 - gamma**2)
        + (phi**2 - phi ** (2 * t)) / (1 - phi**2)
        - 2 * (gamma * phi - (gamma * phi) ** t) / (1 - gamma * phi)
    )
    return mean, (p * alpha * eta / (gamma - phi)) ** 2 * bracket * sigma**2 / p


def propagated(t, x0, c0, eta, alpha, h, sigma):
    """The same from repeated steps with the drift matrix of Eq. 18 and 19."""
    p = len(x0)
    drift = np.diag([1 - alpha - eta * h] * p + [1 - p * alpha])
    drift[:p, p] = drift[p, :p] = alpha
    noise = np.diag([(eta * sigma) ** 2] * p + [0.0])
    mean, covariance = np.append(x0, c0), np.zeros((p + 1, p + 1))
    for _ in range(t):
        mean, covariance = drift @ mean, drift @ covariance @ drift.T + noise
    return mean[p], covariance[p, p]


NOISY = [(1, 0.1, 0.9), (4, 0.5, 0.9), (10, 1.0, 0.5)]


@pytest.mark.parametrize(("nodes", "eta", "beta"), NOISY)
def test_lemma_7_1_agrees_with_its_recursion(nodes, eta, beta):
    arguments = {"eta": eta, "alpha": beta / nodes, "h": 1.3, "sigma": 2.0}
    x0, c0 = np.random.default_rng(0).normal(size=nodes), 0.7
    for t in (1, 2, 10, 100):
        expected = propagated(t, x0, c0, **arguments)
        np.testing.assert_allclose(lemma(t, x0, c0, **arguments), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("nodes", "eta", "beta"), NOISY)
def test_the_center_of_noisy_quadratics_has_the_mean_and_variance_of_lemma_7_1(nodes, eta, beta):
    # Each parameter is an independent run, because EASGD does not couple them.
    runs, steps, h, sigma, start, optimum = 10_000, 60, 1.3, 2.0, 1.5, 0.5
    noise = sigma * np.random.default_rng(1).standard_normal((steps, nodes, runs), np.float32)
    averaging = jdaso.easgd(jdaso.axis_exchange("node", nodes), period=1, beta=beta)

    def center(state, params):
        # c_t of the paper includes the exchange posted before step t.
        return jdaso.easgd_center(jdaso.drain(averaging, state, params)[1])[0]

    _, centers = train(
        optax.chain(optax.sgd(eta), averaging),
        np.full((nodes, runs), start),
        noise,
        gradient=lambda x, xi: h * (x - optimum) - xi,
        look=center,
    )
    for t in (2, 5, 20, 60):
        c = centers[t - 1, 0].astype(np.float64) - optimum
        mean, variance = lemma(
            t, np.full(nodes, start - optimum), start - optimum, eta, beta / nodes, h, sigma
        )
        # c is a sum of normal numbers, so this is the standard error of its variance.
        mean_error, variance_error = np.sqrt(variance / runs), variance * np.sqrt(2 / (runs - 1))
        assert abs(c.mean() - mean) <= 3 * mean_error
        assert abs(c.var(ddof=1) - variance) <= 3 * variance_error


@pytest.mark.parametrize(("nodes", "alpha"), [(1, 0.5), (4, 0.3), (8, 0.9 / 8)])
def test_the_center_is_stable_just_inside_condition_17_and_not_just_outside(nodes, alpha):
    # (2 - eta h)(2 - P alpha) > 2 alpha, solved for eta h.
    bound = 2 - 2 * alpha / (2 - nodes * alpha)
    eta_h = bound * np.array([0.98, 1.02])
    averaging = jdaso.easgd(jdaso.axis_exchange("node", nodes), period=1, alpha=alpha)
    _, centers = simulate(
        averaging,
        np.ones((nodes, 2)),
        np.broadcast_to(eta_h / LR, (400, nodes, 2)),
        gradient=lambda x, h: h * x,
        look=lambda state, params: jdaso.easgd_center(state)[0],
    )
    rate = np.abs(centers[-1, 0] / centers[-101, 0]) ** (1 / 100)
    assert rate[0] < 1 < rate[1]
    # The largest eigenvalue dominates by then, with six digits after a hundred float32 steps.
    np.testing.assert_allclose(rate, np.abs(roots(nodes, eta_h, alpha)).max(axis=0), rtol=1e-6)


def gradient(x, noise):
    """Gradient of a bounded loss, not quadratic, for NumPy and JAX."""
    return x / (1 + x * x) - noise


@few(max_examples=3)
@given(
    # With d = tau, what is sent is from before the merge: see test_post_before_merge.py.
    st.integers(1, 6).flatmap(lambda tau: st.tuples(st.just(tau), st.integers(0, tau - 1))),
    st.integers(2, 5),
    st.sampled_from([0.25, 0.5]),
    st.integers(0, 2**32 - 1),
)
def test_the_mean_of_dasgd_follows_the_perturbed_sgd_of_its_analysis(tau_and_d, nodes, xi, seed):
    tau, d = tau_and_d
    x, noise = random_run(seed, 100, nodes)
    averaging = jdaso.dasgd(jdaso.axis_exchange("node", nodes), tau, d, xi)
    params, _ = simulate(averaging, x, noise, gradient=gradient)
    before = np.concatenate([x[None], params])  # x_k is the start of step k
    mu, g = before.mean(axis=1), gradient(before[:-1], noise).mean(axis=1)
    here, there = [], []
    for start in range(d, 100 - tau, tau):  # tau k + d
        alone = g[start : start + tau - d].sum(axis=0)
        waiting = g[start + tau - d : start + tau].sum(axis=0)
        here.append(mu[start + tau])
        there.append(mu[start] - LR * (xi * waiting + alone))  # dasgd Sec. III-C1
    # Each comparison covers one period, with fewer roundings than 100 steps.
    assert_near(np.array(here), np.array(there))
