"""``python -m jdaso predict``: table, picture and errors. The report of ``tune``."""

import argparse

import pytest

from jdaso import __main__, perf
from jdaso.perf import predict_command as predict
from jdaso.perf import tune_command as tune
from jdaso.perf.predict_command import advice

MODEL = ("--parameters", "25.5e6", "--step-time", "0.5", "--bandwidth", "20")


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs ``python -m jdaso predict`` and returns what it printed, and the picture's path."""

    def run(*arguments, out=tmp_path / "scaling.png"):
        line = ["jdaso", "predict", *arguments, *(["--out", str(out)] if out else [])]
        monkeypatch.setattr("sys.argv", [*map(str, line)])
        __main__.main()
        return capsys.readouterr().out, out

    return run


def test_table_and_picture(command):
    pytest.importorskip("matplotlib")
    text, out = command(*MODEL, "--pattern", "tree")
    table, notes, path, advised, code = text.strip().split("\n\n")
    notes = " ".join(notes.split())  # lines are as long as a terminal is wide
    head, *rows = [line.split() for line in table.splitlines()]
    assert head == ["nodes", *predict.ALGORITHMS]
    assert [int(row[0]) for row in rows] == [2**k for k in range(14)]
    assert rows[0][1:] == ["0.5", "s", "100%"] * len(predict.ALGORITHMS)
    assert "With dasgd, an exchange over 8192 nodes takes 1.061 s, which is 2.1 steps" in notes
    assert "The period is 4, and 500 for diloco" in notes
    assert "--overhead and --slowdown are 0" in notes
    assert advised.startswith("With 8192 nodes:\nChoose daso with merge delta, wire int8, period")
    assert code == 'jdaso.daso(exchange, period=1, delay=1, merge="delta", wire="int8")'
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
        "daso": {"period": 8, "delay": 1, "blocking_share": 8 / 90},
        "diloco": {"period": 500},
    }
    for place, name in enumerate(predict.ALGORITHMS):
        found = perf.predict(name, 3, gpus_per_node=4, **model, **schedules[name])
        seconds, _, efficiency = last[1 + 3 * place : 4 + 3 * place]
        assert (seconds, efficiency) == (f"{found.step_time:.4g}", f"{found.efficiency:.0%}")


@pytest.mark.parametrize("moments", ["0", "2"])
def test_the_recommendation_is_for_the_exchange_of_the_table(moments):
    model = ("--parameters", "1e6", "--step-time", "0.01", "--bandwidth", "20", "--wire", "int8")
    model += ("--moments", moments)
    parser = argparse.ArgumentParser()
    predict.add_command(parser.add_subparsers())
    arguments = parser.parse_args(["predict", *model])
    (costs,) = predict.wire_costs(arguments).values()
    assert costs.exchange_time == predict.predict_all(arguments)["dasgd"][-1].exchange_time


def test_megabytes_are_those_of_float32_parameters():
    assert predict.megabytes("102") == predict.number("25.5e6")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*MODEL[:-1], 0), "network.bandwidth must be .* got 0.0"),
        ((*MODEL, "--gpus-per-node", 4), "--local-bandwidth require each other"),
        ((*MODEL, "--local-bandwidth", 4), "--local-bandwidth require each other"),
        ((*MODEL, "--period", 2, "--delay", 3), "delay must not exceed period"),
        (("--parameters", "1e308", *MODEL[2:]), r"num_parameters must be below 2\*\*63, got 10000"),
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


def test_a_picture_in_a_folder_that_does_not_exist_is_refused_and_makes_none(command, tmp_path):
    with pytest.raises(SystemExit, match=r"jdaso predict: --out must name a file in a folder that"):
        command(*MODEL, "--max-nodes", 2, out=tmp_path / "missing" / "scaling.png")
    assert not list(tmp_path.iterdir())


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
    costs = {"bfloat16": perf.WireCosts(exchange_time, overhead, slowdown)}
    return "\n".join(advice(step_time, costs, nodes=2))


def test_advice_says_what_to_choose_and_what_to_expect():
    text = advised(step_time=0.1, exchange_time=0.15, overhead=0.003)
    best, *_ = perf.recommend(0.1, {"bfloat16": perf.WireCosts(0.15, 0.003)}, nodes=2)
    assert text.startswith(
        "Choose daso with merge delta, wire bfloat16, period 2, delay 2: a step takes 0.102 s "
        f"(+1.5%) and is worth {best.progress:.2f} steps of synchronous training."
    )
    assert text.count("\nOr ") == 2
    assert text.endswith(f"\n\n{best.code}")
    for warning in ("extrapolation", "Posting", "Moving", "rounds"):
        assert warning not in text


def test_advice_takes_four_bits_only_where_they_help():
    slow = {"int8": perf.WireCosts(0.2), "float4": perf.WireCosts(0.1)}
    text = "\n".join(advice(0.1, slow, nodes=2))
    assert text.startswith("Choose daso with merge delta, wire float4, period 1, delay 1")
    assert "float4 rounds changes to 4 bits" in text
    assert "Without this rounding" not in text  # every other wire rounds as well
    more = "\n".join(advice(0.1, {"bfloat16": perf.WireCosts(0.4), **slow}, nodes=2))
    assert "Without this rounding, choose daso with merge delta, wire bfloat16" in more
    fast = {"int8": perf.WireCosts(0.001, 0.001), "float4": perf.WireCosts(0.001, 0.001)}
    assert "float4" not in advice(0.1, fast, nodes=2)[0]


@pytest.mark.parametrize(
    ("times", "line"),
    [
        ((1.0, 0.009), '\njdaso.local_sgd(exchange, period=1, delay=0, wire="bfloat16")'),
        ((0.1, 0.85), "Progress was measured up to period 8 and 8 nodes."),
        ((0.1, 0.05, 0.1), "Posting and merging lengthen steps by "),
        ((0.1, 0.05, 0.0, 0.1), "Moving messages on the same cores lengthens steps by "),
    ],
)
def test_advice_warns(times, line):
    assert line in advised(*times)


def report(measured, hosts=("a", "b"), noise=0.0, **changes):
    """The report of tune on measured exchanges of 1000 parameters."""
    defaults = {"parameters": 1000, "step_time": None, "moments": 0, "moments_wire": "float32"}
    topology = argparse.Namespace(
        num_nodes=len(hosts), processes=[argparse.Namespace(host=host) for host in hosts]
    )
    arguments = argparse.Namespace(**(defaults | changes))
    found = tune.Measured(measured, overhead=0.001, slowdown=0.002, noise=noise)
    return "\n".join(tune.report(arguments, topology, {"float32": found}))


def costs_in(text):
    """The last line of the table of wires."""
    return next(line.split() for line in text.splitlines() if line.startswith("float32 "))


def test_tune_prints_the_network_and_the_next_command():
    text = report([(1000, 0.002), (4000, 0.005), (4000, 0.0051)], step_time=0.01)
    assert "latency    0.000492 s" in text
    assert costs_in(text) == ["float32", "0.00505", "0.001", "0.002"]
    assert text.endswith("--overhead 0.001 --slowdown 0.002 --max-nodes 8")
    assert "python -m jdaso predict --parameters 1000 --step-time 0.01 --bandwidth 0.00787" in text
    assert "Unreliable" not in text
    assert "did not measure" not in text


def test_commands_count_averaged_moments(command, monkeypatch):
    """With two moments in bfloat16, 8 bytes for each parameter in float32."""
    text = report(
        [(1000, 0.002), (8000, 0.005)], step_time=0.01, moments=2, moments_wire="bfloat16"
    )
    assert "1000 parameters with 2 moments of each in bfloat16, 0.008 MB in float32" in text
    assert "extrapolated" not in text
    assert text.endswith("--max-nodes 8 --moments 2 --moments-wire bfloat16")
    monkeypatch.setattr(predict, "draw", lambda *arguments: "no picture")
    options = ("--max-nodes", 2, "--period", 4, "--delay", 0, "--moments", 2)
    text, _ = command(*MODEL, *options)
    step = 0.5 + (3 * 4 * 25.5e6 / 2.5e9 + 2 * 3e-7) / 4
    assert f"{step:.4g} s" in text.split("\n\n")[0].splitlines()[-1]
    assert "Exchanges have 2 moments of each parameter in float32" in " ".join(text.split())


def test_tune_extrapolates_what_it_had_no_time_for():
    text = report([(500, 0.002), (1000, 0.003)])
    assert "extrapolated from 0.001 MB" in text
    assert costs_in(text) == ["float32", "0.009", "0.004", "0.008"]
    assert "1 for steps above 0.009 s, 2 for steps above 0.0045 s" in text


def test_tune_warns_of_unreliable_measurements():
    text = report([(1000, 0.002), (4000, 0.005), (4000, 0.009)], hosts=("a", "a", "b"))
    assert "Unreliable: equal exchanges in float32 took 0.005 to 0.009 s" in text
    assert "This did not measure a network: 3 nodes share 2 hosts" in text


def test_tune_warns_if_computing_was_disturbed():
    assert "Unreliable" not in report([(1000, 0.002), (4000, 0.005)], noise=0.002)
    text = report([(1000, 0.002), (4000, 0.005)], noise=0.003)
    assert "Unreliable: equal computations with float32 differed by 0.003 s, because" in text


def test_tune_goes_on_without_a_bandwidth():
    text = report([(1000, 0.005), (4000, 0.005)], step_time=0.1)
    assert "bandwidth  unknown: measured: times do not grow" in text
    assert "Choose local_sgd, wire float32, period 2, delay 0" in text
    assert "jdaso predict" not in text
