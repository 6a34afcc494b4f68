"""The timeline of one exchange: which one is chosen, what a file may contain, what is drawn."""

import json

import numpy as np
import pytest
import report
import timeline

from jdaso.exchange import ExchangeRecord

figures = pytest.importorskip("matplotlib.figure")

DELAY = 2


def record(step, flight, begin=100.0):
    """An exchange that takes 1 s to copy, each way, and is not waited for."""
    sent, merged = begin + 1, begin + 3 + flight
    spans = [(begin, sent), (sent, sent + flight), (merged, merged), (merged, merged + 1)]
    return ExchangeRecord(step, step, 80, *spans)


HISTORY = [record(3, flight=9.0), record(7, 5.0), record(11, 1.0), record(15, 3.0)]


def test_the_exchange_with_the_median_flight_is_chosen_in_seconds_since_its_post():
    found = timeline.typical(HISTORY, range(4, 18), DELAY)
    assert found == {
        "step": 15,
        "delay": DELAY,
        "copy_to_host": [0, 1],
        "transfer": [1, 4],
        "wait": [6, 6],
        "copy_to_device": [6, 7],
    }
    assert timeline.is_valid(json.loads(json.dumps(found)))


def test_exchanges_that_are_merged_after_the_steps_or_not_yet_are_left_out():
    assert timeline.typical(HISTORY[:1], range(3, 3 + DELAY), DELAY) is None
    assert timeline.typical(HISTORY[:1], range(3, 4 + DELAY), DELAY)["step"] == 3
    unread = [HISTORY[0]._replace(copy_to_device=(0.0, 0.0))]
    assert timeline.typical(unread, range(20), DELAY) is None


FOUND = timeline.typical(HISTORY, range(20), DELAY)


@pytest.mark.parametrize(
    "damage",
    [
        {"wait": None},
        {"wait": [1.0]},
        {"wait": [1.0, "2"]},
        {"wait": [1.0, float("nan")]},
        {"delay": 10**9},
        {"delay": "2"},
        {"step": None},
    ],
)
def test_a_damaged_timeline_is_found(damage):
    assert timeline.is_valid(FOUND)
    assert not timeline.is_valid(FOUND | damage)
    assert not timeline.is_valid([FOUND])


def drawn(tmp_path, monkeypatch, exchanges):
    """The panels of a run whose lines have these timelines."""
    seen = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *a, **k: seen.append(figure))
    lines = ({"step": k, "seconds": k, "loss": 1.0, "exchange": e} for k, e in enumerate(exchanges))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report.report([tmp_path])
    return [axis for axis in seen[0].axes if axis.axison]


def test_a_report_draws_the_last_late_exchange_over_milliseconds(tmp_path, monkeypatch):
    blocking = FOUND | {"delay": 0}
    *_, panel = drawn(tmp_path, monkeypatch, [FOUND, FOUND | {"step": 99}, blocking])
    assert panel.get_title() == "the exchange posted after step 99"
    assert panel.get_xlabel() == timeline.LABEL
    names = [text.get_text() for text in panel.get_yticklabels()]
    assert names == ["training steps", "post", "flight", "wait", "merge"]
    bars = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in panel.patches]
    begin, end = 1e3 * FOUND["copy_to_host"][1], 1e3 * FOUND["wait"][0]
    middle = (begin + end) / 2
    spans = [tuple(1e3 * time for time in FOUND[name]) for name in timeline.SPANS]
    np.testing.assert_allclose(bars, [(begin, middle), (middle, end), *spans])


def test_a_report_without_timelines_has_no_such_panel(tmp_path, monkeypatch):
    panels = drawn(tmp_path, monkeypatch, [None, {"step": 3}])
    assert timeline.LABEL not in [panel.get_xlabel() for panel in panels]
