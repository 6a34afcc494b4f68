"""README's program, as it stands there: two nodes learn more in as many steps than one."""

import re

import pytest
from launch import mpiexec
from pages import ROOT


def test_its_errors_are_those_of_the_text(tmp_path):
    text = (ROOT / "README.md").read_text()
    program = tmp_path / "train.py"
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    program.write_text(block)
    said = re.search(r"the error of their mean, ([\d.]+)\. One .* ends at ([\d.]+)", text)
    two, one = (float(number) for number in said.groups())
    assert two < 0.8 * one
    for nodes, expected in ((2, two), (1, one)):
        job = mpiexec(nodes, program)
        assert job.returncode == 0, job.output
        errors = re.findall(rf"node \d of {nodes}: error ([\d.]+)", job.output)
        assert [float(error) for error in errors] == [pytest.approx(expected, abs=2e-3)] * nodes
