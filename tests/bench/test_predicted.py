"""What bench/predicted.py reads in the report of ``python -m jdaso tune``."""

import argparse

import predicted
import pytest

from jdaso import perf
from jdaso.core.command_line import wrapped
from jdaso.perf import tune_command as tune


def test_the_report_of_tune_has_the_arguments_of_predict():
    hosts = [argparse.Namespace(host=host) for host in "ab"]
    topology = argparse.Namespace(num_nodes=2, processes=hosts)
    arguments = argparse.Namespace(
        parameters=1000, step_time=0.01, moments=0, moments_wire="float32"
    )
    exchanges = [(1000, 0.002), (4000, 0.005), (4000, 0.0051)]
    measured = {
        "float32": tune.Measured(exchanges, overhead=0.001, slowdown=2e-05),
        "bfloat16": tune.Measured([(2000, 0.003)], overhead=0.003, slowdown=0.004),
    }
    found = predicted.measured_by_tune(
        wrapped("\n".join(tune.report(arguments, topology, measured)))
    )
    network, fitted = found.pop("network"), perf.fit(exchanges, 2)
    assert found == {"overhead": 0.001, "slowdown": 2e-05}
    assert network.latency == pytest.approx(fitted.latency, rel=0.01)
    assert network.bandwidth == pytest.approx(fitted.bandwidth, rel=0.01)


def test_a_report_without_the_wire_is_an_error():
    with pytest.raises(SystemExit, match="tune did not print latency"):
        predicted.measured_by_tune("2 nodes")
