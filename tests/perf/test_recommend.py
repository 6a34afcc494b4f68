"""The choice of wire, period and delay, and what late merges discard."""

import functools
import itertools
import math

import golden_family
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from virtual_nodes import few

import jdaso
from jdaso import perf
from jdaso.perf import WireCosts
from jdaso.perf.model import RULES

seconds = st.floats(1e-4, 10)
costs = st.builds(WireCosts, seconds, st.floats(0, 1), st.floats(0, 1))
settings = st.integers(1, 9).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))


def least_cost(step, costs, nodes):
    """The least cost of all settings up to a period, by the definition."""
    found, hiding = math.inf, perf.hiding_schedule(step, costs.exchange_time).delay
    for algorithm, merge in RULES:
        longest = 8 if algorithm == "local_sgd" else max(8, hiding)
        for period, delay in itertools.product(range(1, longest + 1), range(longest + 1)):
            if delay <= period and (delay > 0) == (algorithm != "local_sgd"):
                hidden = min(1, delay * step / costs.exchange_time)
                added = max(0, costs.exchange_time - delay * step) + costs.overhead
                time = step + (added + hidden * costs.slowdown) / period
                worth = perf.progress(algorithm, period, delay, nodes, merge)
                found = min(found, time / worth)
    return found


@given(
    seconds, st.dictionaries(st.sampled_from(["float32", "bfloat16", "int8"]), costs, min_size=1)
)
def test_the_best_come_first(step, wires):
    found = perf.recommend(step, wires, nodes=4)
    assert 1 <= len(found) <= 3
    assert [each.cost for each in found] == sorted(each.cost for each in found)
    assert len({(each.wire, each.algorithm, each.merge) for each in found}) == len(found)


@few(max_examples=20)
@given(
    st.floats(0.01, 1),
    st.builds(WireCosts, st.floats(0.01, 50), st.floats(0, 50), st.floats(0, 1)),
    st.integers(2, 9),
)
@example(0.005, WireCosts(0.004, 0.15), 2)  # the overhead, and not the exchange, takes long
def test_no_setting_is_better(step, costs, nodes):
    costs = costs._replace(exchange_time=min(costs.exchange_time, 20 * step))
    best, *_ = perf.recommend(step, {"float32": costs}, nodes)
    assert best.cost <= least_cost(step, costs, nodes) * (1 + 1e-9)
    assert best.cost == best.step_time / best.progress


def test_only_the_given_rules_are_compared():
    found = perf.recommend(0.1, {"float32": WireCosts(0.25)}, 2, [("dasgd", "mean")])
    assert [(each.algorithm, each.merge) for each in found] == [("dasgd", "mean")]
    assert found[0].code.startswith("jdaso.dasgd(exchange, period=")


def test_the_line_to_copy_makes_the_setting():
    for each in perf.recommend(0.1, {"int8": WireCosts(0.25)}, 2):
        averaging = eval(each.code, {"jdaso": jdaso, "exchange": jdaso.axis_exchange("node", 2)})
        plan, _ = averaging.engine.schedule.plan(averaging.engine.schedule.init(), 0)
        assert (plan.period, plan.delay) == (each.period, each.delay)
        assert averaging.engine.merge.relative == (each.merge == "delta")


@given(settings, st.integers(2, 12))
def test_progress_falls_with_period_delay_and_what_merges_discard(setting, nodes):
    period, delay = setting
    of = functools.partial(perf.progress, nodes=nodes)
    delta = of("daso", period, delay, merge="delta")
    assert 0 < of("daso", period, delay) <= delta <= 1
    assert of("daso", period + 1, delay, merge="delta") <= delta
    assert delta <= of("local_sgd", period, 0)


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (lambda x: jdaso.dasgd(x, 4, 3), 'With merge="delta" it keeps'),
        (lambda x: jdaso.local_sgd(x, 4, 3), 'With merge="delta" it keeps'),
    ],
)
def test_a_setting_that_keeps_little_progress_warns(make, other):
    with pytest.warns(UserWarning, match=rf"keeps [4-7]\d% of the progress .* 2 nodes.*{other}"):
        make(jdaso.axis_exchange("node", 2))


@pytest.mark.filterwarnings("error")
def test_other_settings_do_not():
    jdaso.dasgd(jdaso.single_exchange(), 4, 3)
    exchange = jdaso.axis_exchange("node", 2)
    jdaso.daso(exchange, 4, 3, merge="delta")
    jdaso.local_sgd(exchange, 8)


@given(settings, st.integers(2, 9))
def test_the_expected_numbers(setting, nodes):
    period, delay = setting
    share = perf.discarded("daso", period, delay, nodes)
    assert share == pytest.approx(nodes / (2 * delay + nodes) * delay / period)
    assert perf.discarded("dasgd", period, delay, nodes) == pytest.approx(0.75 * delay / period)
    assert perf.discarded("dasgd", period, delay, nodes, 0.5) == pytest.approx(0.5 * delay / period)
    assert perf.discarded("easgd", period, delay, nodes) == 0


@pytest.mark.parametrize(("period", "delay", "xi"), [(2, 1, 0.25), (5, 4, 0.25), (4, 2, 0.5)])
def test_equal_nodes_make_the_progress_that_merges_leave(period, delay, xi):
    """Nodes with equal constant updates move by 1 - w s / k of what they would move alone."""
    steps = 40 * period + delay  # the last step merges
    updates = np.ones((steps, 2, 1))
    run = golden_family.dasgd(np.zeros((2, 1)), updates, period, delay, xi)
    lost = steps - run.params[-1, 0, 0]
    assert lost == pytest.approx(40 * period * perf.discarded("dasgd", period, delay, 2, xi))
    delta = golden_family.delta(np.zeros((2, 1)), updates, period, delay)
    assert delta.params[-1, 0, 0] == steps


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: perf.recommend(0, {"int8": WireCosts(1)}, 2), "step_time must be .*, got 0"),
        (
            lambda: perf.recommend(1, {"int4": perf.WireCosts(1.0)}, 2),
            "each key of wires must be one of .*, got 'int4'",
        ),
        (
            lambda: perf.recommend(1, {"int8": 0.8}, 2),
            r"wires\['int8'\] must be a WireCosts, got 0.8",
        ),
        (lambda: perf.recommend(1, {}, 2), "wires must have .* at least one wire, got none"),
        (
            lambda: perf.recommend(1, {"int8": WireCosts(1, -1)}, 2),
            r"wires\['int8'\].overhead must be .*, got -1",
        ),
        (
            lambda: perf.recommend(1, {"int8": WireCosts(math.inf)}, 2),
            r"wires\['int8'\].exchange_time must be .*, got inf",
        ),
        (lambda: perf.recommend(1, {"int8": WireCosts(1)}, 0), "nodes must be an integer"),
        (
            lambda: perf.recommend(1, {"int8": WireCosts(1)}, 2, [("easgd", "mean")]),
            "algorithm must be one of local_sgd, daso, dasgd, got 'easgd'",
        ),
        (lambda: perf.discarded("sgd", 2, 1, 2), "algorithm must be one of"),
        (lambda: perf.discarded("daso", 2, 1, 2, 0.5), "own_weight requires .* dasgd, got daso"),
        (lambda: perf.discarded("daso", 2, 3, 2), "delay must not exceed period"),
    ],
)
def test_wrong_numbers_name_the_argument(function, message):
    with pytest.raises(ValueError, match=message):
        function()
