"""The plots and tables of runs, and the errors for runs that cannot be read."""

import json
import math
import sys

import numpy as np
import pytest
import report

figures = pytest.importorskip("matplotlib.figure")

EPOCH = 22
PHASES = ["warm-up"] * 2 + ["cycling"] * 3 + ["cool-down"]


def lines(epochs=6, seconds=5.0, **changes):
    """The lines of a run with all keys. A change is a new value, or None to leave a key out."""
    for k in range(1, epochs + 1):
        line = {
            "step": k * EPOCH,
            "epoch": k,
            "seconds": k * seconds,
            "loss": 2.0 / k,
            "test_accuracy": 1 - 0.5**k,
            "learning_rate": 0.1,
            "phase": PHASES[k - 1],
            "period": 4,
            "delay": 2,
            "exchanges": 5 * k,
            "images_per_second": 100.0 + k,
            "drift": 0.5,
            "bytes_sent": 3_000_000 * k,
            "seconds_blocked": 0.25 * k,
            "seconds_in_flight": 1.0 * k,
            "skipped": 0,
            "left_out": 0,
            "nodes": 2,
        }
        line |= changes
        yield {key: value for key, value in line.items() if value is not None}


def write(folder, records):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    return folder


@pytest.fixture
def drawn(monkeypatch):
    """The figures, which are collected instead of saved."""
    seen = []
    monkeypatch.setattr(
        figures.Figure, "savefig", lambda figure, *args, **options: seen.append(figure)
    )
    return seen


def labels(figure):
    return [(axis.get_ylabel(), axis.get_xlabel()) for axis in figure.axes if axis.axison]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


STEP, CLOCK = "optimizer step", "wall-clock time, s"
ALL = [
    ("training loss", STEP),
    ("training loss", CLOCK),
    ("test accuracy", STEP),
    ("test accuracy", CLOCK),
    ("steps", STEP),
    ("learning rate", STEP),
    ("images/s", STEP),
    ("replica drift ‖x - mean‖", STEP),
    ("sent, MB", STEP),
    ("seconds per epoch", STEP),
]


def test_a_run_has_a_page_in_its_folder(tmp_path):
    path = report.report([write(tmp_path / "daso", lines())])
    assert path == tmp_path / "daso" / "report.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_page_may_lie_elsewhere(tmp_path):
    run = write(tmp_path / "daso", ({"step": k, "seconds": k, "loss": 1.0} for k in (1, 2)))
    path = report.report([run], tmp_path / "new" / "daso.pdf")
    assert path.read_bytes().startswith(b"%PDF")


def test_a_page_has_all_panels_and_the_phases(tmp_path, drawn):
    report.report([write(tmp_path / "daso", lines())])
    assert labels(drawn[0]) == ALL
    assert legend(drawn[0]) == ["daso", "warm-up", "cycling", "cool-down"]


def test_phases_are_bands_over_steps_and_over_time(tmp_path, drawn):
    report.report([write(tmp_path / "daso", lines())])
    by_step, by_time = drawn[0].axes[:2]
    for axis, epoch in ((by_step, EPOCH), (by_time, 5.0)):
        bands = [(band.get_x(), band.get_x() + band.get_width()) for band in axis.patches]
        np.testing.assert_allclose(bands, np.array([(0, 2), (2, 5), (5, 6)]) * epoch)


def test_period_delay_and_times_hold_for_an_epoch(tmp_path, drawn):
    report.report([write(tmp_path / "daso", lines())])
    stairs = {
        axis.get_ylabel(): [
            patch.get_data() for patch in axis.patches if hasattr(patch, "get_data")
        ]
        for axis in drawn[0].axes
    }
    for label, values in (("steps", (4, 2)), ("seconds per epoch", (0.25, 1.0 - 0.25))):
        for data, value in zip(stairs[label], values, strict=True):
            np.testing.assert_array_equal(data.edges, np.arange(7) * EPOCH)
            np.testing.assert_allclose(data.values, [value] * 6)


def test_several_runs_are_laid_over_each_other(tmp_path, drawn, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [write(tmp_path / name, lines(seconds=s)) for name, s in (("sync", 9.0), ("daso", 5.0))]
    assert report.report(runs).resolve() == tmp_path / "report.png"
    assert labels(drawn[0]) == ALL
    assert legend(drawn[0]) == ["sync", "daso"]
    curves = drawn[0].axes[ALL.index(("test accuracy", CLOCK))].lines
    for curve, seconds in zip(curves, (9.0, 5.0), strict=True):
        np.testing.assert_allclose(curve.get_xdata(), np.arange(1, 7) * seconds)
        np.testing.assert_allclose(curve.get_ydata(), 1 - 0.5 ** np.arange(1, 7))
    assert len({curve.get_color() for curve in curves}) == 2


def test_long_runs_are_drawn_over_hours(tmp_path, drawn):
    report.report([write(tmp_path / "long", lines(seconds=7200.0))])
    assert labels(drawn[0])[1] == ("training loss", "wall-clock time, h")
    np.testing.assert_allclose(drawn[0].axes[1].lines[0].get_xdata(), 2.0 * np.arange(1, 7))


def test_panels_without_numbers_are_left_out(tmp_path, drawn):
    gone = dict.fromkeys(("drift", "bytes_sent", "seconds_in_flight", "learning_rate", "phase"))
    run = report.read(write(tmp_path / "run", lines(test_iou=0.5, loss=math.nan, **gone)))
    report.draw([run])
    tests = [(f"test {name}", x) for name in ("accuracy", "iou") for x in (STEP, CLOCK)]
    assert labels(drawn[0]) == [*tests, ("steps", STEP), ("images/s", STEP)]
    assert legend(drawn[0]) == ["run"]


def test_what_only_some_runs_have_is_drawn_of_those(tmp_path, drawn):
    runs = [write(tmp_path / "a", lines(drift=None)), write(tmp_path / "b", lines())]
    report.report(runs, tmp_path / "both.png")
    assert labels(drawn[0]) == ALL
    assert len(drawn[0].axes[ALL.index(("replica drift ‖x - mean‖", STEP))].lines) == 1


def test_what_only_some_lines_have_is_drawn_of_those(tmp_path, drawn):
    records = list(lines())
    for line in records[::2]:
        del line["drift"]
    report.report([write(tmp_path / "run", records)])
    curve = drawn[0].axes[ALL.index(("replica drift ‖x - mean‖", STEP))].lines[0]
    np.testing.assert_array_equal(curve.get_xdata(), [2 * EPOCH, 4 * EPOCH, 6 * EPOCH])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("loss", [1.0, math.nan, -1.0, 0.0])
def test_one_epoch_is_enough_whatever_its_loss(tmp_path, loss):
    line = {"step": 22, "seconds": 5.0, "loss": loss, "test_accuracy": 0.5}
    run = report.read(write(tmp_path / "run", [line]))
    assert report.draw([run]).stat().st_size > 1000
    assert f"{loss:.4f}" in report.summary([run])


def test_a_last_line_half_written_is_left_out_with_a_note(tmp_path, capsys):
    folder = write(tmp_path / "run", lines())
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 15')
    assert len(report.read(folder).columns["step"]) == 6
    assert capsys.readouterr().err.startswith(f"{folder / 'metrics.jsonl'}, line 7: ")


def spoil(text):
    return lambda folder: (folder / "metrics.jsonl").write_text(text)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "metrics.jsonl").unlink(), "does not exist"),
        (spoil(""), "is empty; a training"),
        (spoil('{"st\n{"step": 1, "seconds": 1}\n'), "line 1 is not a JSON object"),
        (spoil("[1, 2]\n[3, 4]\n"), "line 1 is not a JSON object"),
        (spoil('{"step": 1}\n'), "without the number 'seconds'"),
        (spoil('{"step": "1", "seconds": 1}\n'), "without the number 'step'"),
        (spoil('{"step": 1, "seconds": 1}\n'), "nothing to draw"),
    ],
)
def test_what_cannot_be_drawn_is_named(tmp_path, damage, words):
    folder = write(tmp_path / "run", lines())
    damage(folder)
    with pytest.raises(ValueError, match=words) as raised:
        report.report([folder])
    assert str(folder / "metrics.jsonl") in str(raised.value)


def test_no_run_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        report.report([])


def test_the_table_has_the_best_and_the_last_of_every_test(tmp_path):
    records = [
        line | {"test_accuracy": accuracy, "test_loss": loss}
        for line, accuracy, loss in zip(
            lines(), (0.1, 0.8, 0.9, 0.7, 0.6, 0.5), (0.9, 0.2, 0.3, 0.4, 0.5, 0.6), strict=True
        )
    ]
    runs = report.read_all(
        [write(tmp_path / "a" / "run", records), write(tmp_path / "b" / "run", lines(epochs=2))]
    )
    head, first, second = (line.split() for line in report.summary(runs).splitlines())
    assert head[:4] == ["run", "steps", "seconds", "final"]
    assert first[:4] == ["a/run", "132", "30.0", "0.3333"]
    assert first[4:8] == ["0.9000", "0.5000", "0.2000", "0.6000"]
    # The median of 101 ... 106 images/s, rounded to even; 1 - 0.25 s / 1 s is hidden.
    assert first[8:] == ["104", "18.0", "1.50", "75.0%"]
    assert second[4:8] == ["0.7500", "0.7500", "-", "-"]


def test_a_run_named_twice_is_drawn_once(tmp_path, drawn):
    folder = write(tmp_path / "run", lines())
    assert report.report([folder, f"{folder}/../run"]) == folder / "report.png"


def test_command(tmp_path, monkeypatch, capsys, drawn):
    folder = write(tmp_path / "run", lines())
    arguments = ["report.py", str(folder), "--out", str(tmp_path / "new" / "page.png")]
    monkeypatch.setattr(sys, "argv", arguments)
    report.main()
    table, path = capsys.readouterr().out.split("\n\n")
    assert table.splitlines()[1].startswith("run ")
    assert path == f"{tmp_path / 'new' / 'page.png'}\n"
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(SystemExit, match=r"report: .* does not exist"):
        report.main()


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    folder = write(tmp_path / "run", lines())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        report.report([folder])
