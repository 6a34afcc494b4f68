"""``python -m jdaso predict``: its table, its picture, its errors; and what ``tune`` advises."""

import argparse

import pytest

from jdaso import __main__, _predict, _tune, perf

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
    head, *rows = [line.split() for line in table.splitlines()]
    assert head == ["nodes", *_predict.DRAWN]
    assert [int(row[0]) for row in rows] == [2**k for k in range(13)]
    assert rows[0][1:] == ["0.5", "s", "100%"] * len(_predict.DRAWN)
    assert "over 4096 nodes takes 0.9792 s with dasgd, which is 2 steps" in notes
    assert "The period is 3, of diloco 500" in notes
    assert "--overhead and --slowdown are 0" in notes
    assert path == f"picture: {out}"
    assert out.read_bytes().startswith(b"\x89PNG")


def test_numbers_are_those_of_perf(command, monkeypatch):
    monkeypatch.setattr(_predict, "draw", lambda *arguments: "no picture")
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
    for place, name in enumerate(_predict.DRAWN):
        found = perf.predict(name, 3, gpus_per_node=4, **model, **schedules[name])
        seconds, _, efficiency = last[1 + 3 * place : 4 + 3 * place]
        assert (seconds, efficiency) == (f"{found.step_time:.4g}", f"{found.efficiency:.0%}")


def test_megabytes_are_those_of_float32_parameters():
    assert _predict.megabytes("102") == _predict.number("25.5e6")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*MODEL[:-1], 0), "network.bandwidth must be .* got 0.0"),
        ((*MODEL, "--gpus-per-node", 4), "--local-bandwidth belong together"),
        ((*MODEL, "--local-bandwidth", 4), "--local-bandwidth belong together"),
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

    monkeypatch.setattr(_predict, "draw", draw)
    text, _ = command(*MODEL, "--max-nodes", 2, out=None)
    assert "no picture without matplotlib" in text
    with pytest.raises(SystemExit, match="jdaso predict: no picture without matplotlib"):
        command(*MODEL, "--max-nodes", 2)


def advised(step_time, exchange_time, overhead=0.0, slowdown=0.0):
    return "\n".join(_tune.advice(step_time, exchange_time, overhead, slowdown, "bfloat16"))


def test_advice_says_what_to_choose_and_what_to_expect():
    text = advised(step_time=0.1, exchange_time=0.25, overhead=0.004)
    expected = (
        "Choose period 4, delay 3, as in jdaso.dasgd(exchange, period=4, delay=3, wire='bfloat16')"
    )
    assert expected in text
    assert "an exchange takes 2.5 steps" in text
    assert "then takes 0.101 s (+1.0%)" in text
    assert "0.354 s (+254.0%) with one at every step, 0.1635 s (+63.5%) with period 4" in text
    for warning in ("not help", "accuracy: ", "Copies", "Moving"):
        assert warning not in text


def test_expected_is_slower_only_while_an_exchange_flies():
    # Period 4, delay 3: all of it flies beside computing. With delay 0 nothing does.
    text = advised(step_time=0.1, exchange_time=0.25, overhead=0.004, slowdown=0.008)
    assert "then takes 0.103 s (+3.0%)" in text
    assert "0.354 s (+254.0%) with one at every step, 0.1635 s (+63.5%) with period 4" in text


@pytest.mark.parametrize(
    ("times", "warning"),
    [
        ((1.0, 0.009), "It will not help: a step takes 1.009 s (+0.9%) if an exchange is waited"),
        ((0.1, 0.05, 0.0, 0.06), "Wait for them, with period 2, delay 0: 0.125 s (+25.0%)"),
        ((0.1, 0.45), "than their period did in the papers (DASO, Table 2: up to 4)"),
        ((0.1, 0.75), "DASO, Table 2: up to 4; DaSGD, Fig. 6(e): up to 7"),
        ((0.1, 0.05, 0.04), "Copies to and from the host lengthen steps by 20.0% on average"),
        ((0.1, 0.05, 0.0, 0.03), "Moving messages lengthens steps by 15.0% on average"),
    ],
)
def test_advice_says_when_it_will_not_help(times, warning):
    assert warning in advised(*times)


def test_advice_counts_what_every_exchange_costs():
    """Short ones that cost much: the fewer the better, so not one at every step."""
    text = advised(step_time=0.5, exchange_time=0.004, overhead=0.05)
    assert "Choose period 2, delay 1" in text
    assert "then takes 0.525 s (+5.0%)" in text
    assert "0.554 s (+10.8%) with one at every step" in text
    assert "not help" not in text


def lines(measured, hosts=("a", "b"), **changes):
    """What tune prints of so many exchanges of 1000 parameters."""
    defaults = {"parameters": 1000, "wire": "float32", "pattern": "direct", "step_time": None}
    topology = argparse.Namespace(
        num_nodes=len(hosts), processes=[argparse.Namespace(host=host) for host in hosts]
    )
    arguments = argparse.Namespace(**(defaults | changes))
    found = _tune.Measured(measured, overhead=0.001, slowdown=0.002)
    return "\n".join(_tune.lines(arguments, topology, found))


def test_tune_prints_the_network_and_the_next_command():
    text = lines([(1000, 0.002), (4000, 0.005), (4000, 0.0051)], step_time=0.01)
    assert "latency    0.000492 s" in text
    assert "exchange   0.00505 s\n" in text
    assert "copies     0.001 s per exchange" in text
    assert "slowdown   0.002 s of computing" in text
    assert "--overhead 0.001 --slowdown 0.002 --period 2 --delay 1\n" in f"{text}\n"
    assert "python -m jdaso predict --parameters 1000 --step-time 0.01 --bandwidth 0.00787" in text
    assert "Not " not in text


def test_tune_names_another_pattern():
    text = lines([(1000, 0.002), (4000, 0.005)], hosts="abcd", pattern="ring")
    assert "jdaso predict --parameters 1000 --pattern ring --step-time SECONDS" in text


def test_tune_extrapolates_what_it_had_no_time_for():
    text = lines([(500, 0.002), (1000, 0.003)])
    assert "exchange   0.009 s, extrapolated from 0.001 MB" in text
    assert "copies     0.004 s" in text
    assert "slowdown   0.008 s" in text
    assert "1 for steps above 0.009 s, 2 for steps above 0.0045 s" in text


def test_tune_says_what_not_to_trust():
    text = lines([(1000, 0.002), (4000, 0.005), (4000, 0.009)], hosts=("a", "a", "b"))
    assert "Not to be trusted: the same exchange took 0.005 to 0.009 s" in text
    assert "Not a network: 3 nodes share 2 hosts" in text


def test_tune_goes_on_without_a_bandwidth():
    text = lines([(1000, 0.005), (4000, 0.005)], step_time=0.1)
    assert "bandwidth  unknown: measured: times do not grow" in text
    assert "Choose period 2, delay 1" in text
    assert "jdaso predict" not in text
