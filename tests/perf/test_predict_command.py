"""``python -m jdaso predict``: table, picture and errors. The report of ``tune``."""

import argparse

import pytest

from jdaso import __main__, perf
from jdaso.perf import predict_command as predict
from jdaso.perf import tune_command as tune

MODEL = ("--parameters", "25.5e6", "--step-time", "0.5", "--bandwidth", "20")


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs ``python -m jdaso predict`` and returns what it printed, and the picture's path."""

    def run(*arguments, out=tmp_path / "folder" / "scaling.png"):
        line = ["jdaso", "predict", *arguments, *(["--out", str(out)] if out else [])]
        monkeypatch.setattr("sys.argv", [*map(str, line)])
        __main__.main()
        return capsys.readouterr().out, out

    return run


def test_table_and_picture(command):
    pytest.importorskip("matplotlib")
    text, out = command(*MODEL, "--pattern", "tree")
    table, notes, path = text.strip().split("\n\n")
    notes = " ".join(notes.split())  # lines are as long as a terminal is wide
    head, *rows = [line.split() for line in table.splitlines()]
    assert head == ["nodes", *predict.ALGORITHMS]
    assert [int(row[0]) for row in rows] == [2**k for k in range(13)]
    assert rows[0][1:] == ["0.5", "s", "100%"] * len(predict.ALGORITHMS)
    assert "With dasgd, an exchange over 4096 nodes takes 0.9792 s, which is 2 steps" in notes
    assert "The period is 3, and 500 for diloco" in notes
    assert "--overhead and --slowdown are 0" in notes
    assert path == f"picture: {out}"
    assert out.read_bytes().startswith(b"\x89PNG")


def test_numbers_are_those_of_perf(command, monkeypatch):
    monkeypatch.setattr(predict, "draw", lambda *arguments: "no picture")
    options = ("--gpus-per-node", 4, "--local-bandwidth", 400, "--latency", 1e-3)
    text, _ = command(*MODEL, *options, "--max-nodes", 3, "--period", 8, "--delay", 1)
    last = text.split("\n\n")[0].splitlines()[-1].split()
    assert last[0] == "3"
    network = perf.Network(1e-3, 2.5e9, local_bandwidth=50e9)
    model = {"num_parameters": 25_500_000, "step_time": 0.5, "network": network}
    schedules = {
        "allreduce_gradients": {},
        "local_sgd": {"period": 8},
        "dasgd": {"period": 8, "delay": 1},
        "easgd": {"period": 8},
        "daso": {"period": 8, "delay": 1, "blocking_share": 1 / 9},
        "diloco": {"period": 500},
    }
    for place, name in enumerate(predict.ALGORITHMS):
        found = perf.predict(name, 3, gpus_per_node=4, **model, **schedules[name])
        seconds, _, efficiency = last[1 + 3 * place : 4 + 3 * place]
        assert (seconds, efficiency) == (f"{found.step_time:.4g}", f"{found.efficiency:.0%}")


def test_megabytes_are_those_of_float32_parameters():
    assert predict.megabytes("102") == predict.number("25.5e6")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*MODEL[:-1], 0), "network.bandwidth must be .* got 0.0"),
        ((*MODEL, "--gpus-per-node", 4), "--local-bandwidth require each other"),
        ((*MODEL, "--local-bandwidth", 4), "--local-bandwidth require each other"),
        ((*MODEL, "--period", 2, "--delay", 3), "delay must not exceed period"),
    ],
)
def test_errors_are_one_line(command, arguments, message):
    with pytest.raises(SystemExit, match=f"jdaso predict: .*{message}"):
        command(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parameters", "many", *MODEL[2:]), "--parameters: invalid number value: 'many'"),
        ((*MODEL, "--max-nodes", 0), "--max-nodes: must be at least 1, got 0"),
        ((*MODEL, "--max-nodes", 1.5), "--max-nodes: invalid nodes value: '1.5'"),
    ],
)
def test_numbers_are_checked_by_option(command, capsys, arguments, message):
    with pytest.raises(SystemExit):
        command(*arguments)
    assert f"argument {message}" in capsys.readouterr().err


def test_a_picture_of_no_known_kind_is_an_error(command):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit, match=r"jdaso predict: .*'xyz' is not supported"):
        command(*MODEL, "--max-nodes", 2, out="figure.xyz")


def test_a_picture_that_was_asked_for_needs_matplotlib(command, monkeypatch):
    def draw(*_):
        raise ImportError("matplotlib")

    monkeypatch.setattr(predict, "draw", draw)
    text, _ = command(*MODEL, "--max-nodes", 2, out=None)
    assert "the picture requires matplotlib" in text
    with pytest.raises(SystemExit, match="jdaso predict: the picture requires matplotlib"):
        command(*MODEL, "--max-nodes", 2)


def advised(step_time, exchange_time, overhead=0.0, slowdown=0.0):
    return "\n".join(tune.advice(step_time, exchange_time, overhead, slowdown, "bfloat16"))


def test_advice_says_what_to_choose_and_what_to_expect():
    text = advised(step_time=0.1, exchange_time=0.25, overhead=0.004)
    expected = (
        "Choose period 4, delay 3, as in jdaso.dasgd(exchange, period=4, delay=3, wire='bfloat16')"
    )
    assert expected in text
    assert "An exchange takes 2.5 steps" in text
    assert "then takes 0.101 s (+1.0%)" in text
    assert "0.354 s (+254.0%) with period 1, and 0.1635 s (+63.5%) with period 4" in text
    for warning in ("not worthwhile", "may cost accuracy: ", "Copies", "Moving"):
        assert warning not in text


def test_expected_is_slower_only_while_an_exchange_is_in_flight():
    # With period 4 and delay 3 computing overlaps the whole exchange, with delay 0 none of it.
    text = advised(step_time=0.1, exchange_time=0.25, overhead=0.004, slowdown=0.008)
    assert "then takes 0.103 s (+3.0%)" in text
    assert "0.354 s (+254.0%) with period 1, and 0.1635 s (+63.5%) with period 4" in text


@pytest.mark.parametrize(
    ("times", "warning"),
    [
        (
            (1.0, 0.009),
            "not worthwhile: with an exchange at every step (period 1, delay 0) a step takes",
        ),
        ((0.1, 0.05, 0.0, 0.06), "Choose period 2, delay 0: 0.125 s (+25.0%)"),
        ((0.1, 0.45), "that cost little accuracy in the papers (DASO, Table 2: up to 4)"),
        ((0.1, 0.75), "DASO, Table 2: up to 4; DaSGD, Fig. 6(e): up to 7"),
        ((0.1, 0.05, 0.04), "Copies to and from the host lengthen steps by 20.0% on average"),
        (
            (0.1, 0.05, 0.0, 0.03),
            "messages on the same cores lengthens steps by 15.0% on average",
        ),
    ],
)
def test_advice_says_when_a_delay_is_not_worthwhile(times, warning):
    assert warning in advised(*times)


def test_advice_counts_what_every_exchange_costs():
    """Short exchanges with a large overhead are better made rarely than at every step."""
    text = advised(step_time=0.5, exchange_time=0.004, overhead=0.05)
    assert "Choose period 2, delay 1" in text
    assert "then takes 0.525 s (+5.0%)" in text
    assert "0.554 s (+10.8%) with period 1" in text
    assert "not worthwhile" not in text


def report(measured, hosts=("a", "b"), **changes):
    """The report of tune on measured exchanges of 1000 parameters."""
    defaults = {"parameters": 1000, "wire": "float32", "step_time": None}
    topology = argparse.Namespace(
        num_nodes=len(hosts), processes=[argparse.Namespace(host=host) for host in hosts]
    )
    arguments = argparse.Namespace(**(defaults | changes))
    found = tune.Measured(measured, overhead=0.001, slowdown=0.002)
    return "\n".join(tune.report(arguments, topology, found))


def test_tune_prints_the_network_and_the_next_command():
    text = report([(1000, 0.002), (4000, 0.005), (4000, 0.0051)], step_time=0.01)
    assert "latency    0.000492 s" in text
    assert "exchange   0.00505 s\n" in text
    assert "copies     0.001 s per exchange" in text
    assert "slowdown   0.002 s of computing" in text
    assert "--overhead 0.001 --slowdown 0.002 --period 2 --delay 1\n" in f"{text}\n"
    assert "python -m jdaso predict --parameters 1000 --step-time 0.01 --bandwidth 0.00787" in text
    assert "Unreliable" not in text
    assert "did not measure" not in text


def test_tune_extrapolates_what_it_had_no_time_for():
    text = report([(500, 0.002), (1000, 0.003)])
    assert "exchange   0.009 s, extrapolated from 0.001 MB" in text
    assert "copies     0.004 s" in text
    assert "slowdown   0.008 s" in text
    assert "1 for steps above 0.009 s, 2 for steps above 0.0045 s" in text


def test_tune_warns_of_unreliable_measurements():
    text = report([(1000, 0.002), (4000, 0.005), (4000, 0.009)], hosts=("a", "a", "b"))
    assert "Unreliable: equal exchanges took 0.005 to 0.009 s" in text
    assert "This did not measure a network: 3 nodes share 2 hosts" in text


def test_tune_goes_on_without_a_bandwidth():
    text = report([(1000, 0.005), (4000, 0.005)], step_time=0.1)
    assert "bandwidth  unknown: measured: times do not grow" in text
    assert "Choose period 2, delay 1" in text
    assert "jdaso predict" not in text
