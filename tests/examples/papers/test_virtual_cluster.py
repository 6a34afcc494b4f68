"""The study of period and delay: its schedule, and the findings that it reports."""

import jax
import numpy as np
import pytest

pytest.importorskip("matplotlib")
import virtual_cluster

import jdaso


@pytest.mark.parametrize(("period", "delay"), [(1, 0), (4, 2), (32, 32)])
def test_numbers_that_are_traced_make_the_plans_of_constant(period, delay):
    @jax.jit
    def ours(period, delay, step):
        return virtual_cluster.fixed(period, delay).plan((), step)[0]

    theirs = jdaso.constant(period, delay)
    assert virtual_cluster.fixed(period, delay).longest >= theirs.longest
    for step in range(70):
        expected = theirs.plan(theirs.init(), step)[0]
        assert jax.tree.map(int, ours(period, delay, step)) == jax.tree.map(int, expected)


def test_phases_block_in_the_first_and_in_the_last_twentieth_of_the_steps():
    steps = 440
    schedule = virtual_cluster.phases(8, 4, steps)
    state, blocking = schedule.init(), []
    for step in range(steps):
        plan, _ = schedule.plan(state, step)
        blocking.append(bool(plan.blocking))
        if not plan.blocking and not plan.flush:
            assert (int(plan.period), int(plan.delay)) == (8, 4)
    edge = steps // 20
    assert blocking == [True] * edge + [False] * (steps - 2 * edge) + [True] * edge


def around(means, spread):
    return {row: mean + spread * np.array([-1.0, 0.5, 0.5]) for row, mean in means.items()}


def verdicts(rows):
    lines = virtual_cluster.findings(rows).splitlines()[:4]
    return [line.rpartition("Result: ")[2] for line in lines]


def test_the_papers_own_numbers_reproduce_the_paper():
    paper = virtual_cluster.PAPER
    assert verdicts(around(paper, 0.0)) == ["reproduced."] * 4
    opposite = {row: -mean for row, mean in paper.items()}
    assert verdicts(around(opposite, 0.0)) == ["the opposite was found."] * 4


def test_equal_rows_reproduce_nothing():
    assert (
        verdicts(around(dict.fromkeys(virtual_cluster.PAPER, 95.0), 1.0)) == ["not reproduced."] * 4
    )


def test_rows_that_differ_by_less_than_the_seeds_do_show_nothing():
    rng = np.random.default_rng(0)
    rows = {
        row: 90 + mean / 100 + rng.normal(0, 5, 4) for row, mean in virtual_cluster.PAPER.items()
    }
    assert set(verdicts(rows)) == {"not reproduced."}


def test_trainings_that_failed_are_named():
    rows = around(dict.fromkeys(virtual_cluster.PAPER, 95.0), 1.0)
    assert "failed" not in virtual_cluster.findings(rows)
    rows[32, 16] -= 70
    assert "below 50 % for (B, S) = (32, 16). Training" in virtual_cluster.findings(rows)
