"""``python -m jdaso tune`` on several processes: what it prints, but no wall-clock times."""

import re

import pytest
from launch import Batch, mpiexec, passes

SMALL = ("--parameters", 60_000, "--repeats", 2)


WIRES = ("float32", "bfloat16", "int8", "float4")
THREE = Batch(
    3,
    {
        "bfloat16": ("command.py", "tune", *SMALL, "--wire", "bfloat16"),
        "float16": ("command.py", "tune", *SMALL, "--wire", "float16"),
    },
)


def test_what_is_measured_and_advised_is_printed_once():
    # So long a step hides every exchange, whatever the machine is doing.
    ended = mpiexec(2, "command.py", "tune", *SMALL, "--step-time", 6000)
    passes(ended)
    text = " ".join(ended.output.split())  # lines are as long as a terminal is wide
    number = 2 * (5 + len(WIRES) - 1)  # five sizes in float32, one on each other wire
    assert text.count(f"2 nodes; 60000 parameters, 0.24 MB in float32; {number} exchanges") == 1
    assert text.count("period 1, delay 0: a step takes 6e+03 s (+0.0%)") >= 1
    assert text.count("jdaso.local_sgd(exchange, period=1, delay=0, wire=") == 1
    assert "This did not measure a network: 2 nodes share 1 host," in text
    for wire in WIRES:
        (found,) = re.findall(rf"^{wire} +(\S+) +(\S+) +(\S+)$", ended.output, re.M)
        exchange, copies, slowdown = map(float, found)
        assert exchange > 0
        assert copies > 0
        assert slowdown >= 0
    known = "bandwidth  unknown" not in ended.output
    assert known == ("python -m jdaso predict --parameters 60000" in ended.output)


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_narrow_wires_and_no_step_time(wire):
    output = THREE.passes(wire)
    assert f"3 nodes; 60000 parameters, 0.12 MB in {wire}" in output
    assert output.count("give --step-time") == len(THREE.names)
    assert "Choose" not in output


def test_no_time_leaves_two_sizes_and_an_estimate():
    ended = mpiexec(2, "command.py", "tune", "--megabytes", 1, "--seconds", 1e-6, "--repeats", 1)
    passes(ended)
    number = 2 + len(WIRES) - 1
    assert f"1 MB in float32; {number} exchanges in the background" in ended.output
    assert "extrapolated from 0.0156 MB" in ended.output


def test_one_process_has_nothing_to_measure():
    ended = mpiexec(1, "command.py", "tune", *SMALL)
    assert ended.returncode != 0
    assert "nothing to measure, there is only one node" in ended.output


def test_wrong_numbers_are_an_error_before_anything_starts():
    ended = mpiexec(1, "command.py", "tune", "--parameters", 0)
    assert ended.returncode != 0
    assert "--parameters and --repeats must be at least 1" in ended.output
