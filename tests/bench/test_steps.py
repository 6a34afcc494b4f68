"""Scripts of bench/ run to their end. The sizes are tiny."""

import argparse
import os
import subprocess
import sys
import types
from pathlib import Path

import equal_tokens
import faults
import numpy as np
import pytest
from launch import BESIDE_PYTHON, passes, run
from machine import Results
from mpi_job import Ended
from PIL import Image

BENCH = Path(__file__).parents[2] / "bench"
TIMEOUT = 240
SMALL = "--megabytes 0.1 --leaves 6 --pairs 8"
SHORT = "--megabytes 0.04 --leaves 4 --seconds 0.001"
TOKENS = "--nodes 2 --seeds 1 --steps 30 --layers 1 --width 8 --heads 1 --context 8 --batch-size 2"
TOKENS += " --test-tokens 64 --warmup 0 --only data|local|^DiLoCo"
MODEL = "--layers 2 --width 16 --context 8 --batch-size 2 --period 6 --pairs 1 --only local"
# Script and its part -> number of processes, arguments, and rows of the table.
SCRIPTS = {
    "tax.py": (2, f"{SMALL} --only daso", 1),
    "tax.py layouts": (2, f"{SMALL} --devices 2", 4),
    "overlap.py free": (2, f"{SHORT} --pairs 2 --wires bfloat16", 2),
    "overlap.py tcp": (2, f"{SHORT} --pairs 1", 3),
    "equal_tokens.py": (1, TOKENS, 3),
    "equal_tokens.py speed": (2, MODEL, 1),
    "gpu.py": (1, "--sections shared", 2),  # one row is about the section
}
SLOW = {
    "tax.py network": (1, "--megabytes 0.1 --rows 8 --pairs 2", 1),
    "overlap.py": (2, f"{SHORT} --pairs 1", 6),
    "exchange.py": (2, "--megabytes 0.1 --leaves 2 --pairs 1", 1),
    "exchange.py parts": (2, f"{SHORT} --exchanges 2", 7),
    "exchange.py wires": (2, "--megabytes 0.01 --exchanges 1", 5),
    "formats.py": (1, "--megabytes 1", 6),
    "scale.py": (2, "--kilobytes 4 --rounds 2", 1),
    "scale.py start": (1, "--processes 2 --rounds 1", 1),
}


def ended(script, processes, arguments):
    """How a script ended."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment["PATH"] = os.pathsep.join([BESIDE_PYTHON, environment.get("PATH", "")])
    environment["OMPI_ALLOW_RUN_AS_ROOT"] = environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    environment["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    launcher = ["mpiexec", "-n", str(processes)] if processes > 1 else []
    name, *part = script.split()
    command = [*launcher, sys.executable, str(BENCH / name), *part, *arguments.split()]
    return run(command, environment, TIMEOUT)


def rows(output):
    """The number of rows of all tables, without their headers."""
    lines = [line for line in output.splitlines() if line.startswith("|")]
    return len(lines) - 2 * sum(set(line) == set("|-") for line in lines)


@pytest.mark.parametrize(
    "script", [*SCRIPTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_script_prints_its_table(script):
    processes, arguments, expected = (SCRIPTS | SLOW)[script]
    job = ended(script, processes, arguments)
    passes(job)
    assert rows(job.output) == expected, job.output


@pytest.mark.slow
def test_accuracy_trains_what_the_file_of_results_lacks(tmp_path):
    for folder in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / folder).mkdir(parents=True)
        for i in range(20):
            pixels = np.full((4, 4, 3), 200 * (folder[-1] == "a") + i, np.uint8)
            Image.fromarray(pixels).save(tmp_path / folder / f"{i}.png")
    arguments = f"--data {tmp_path} --nodes 2 --batch-size 1 --epochs 2 --size 8 --seeds 1"
    arguments += f" --results {tmp_path / 'results'} --only"
    first = ended("accuracy.py", 1, f"{arguments} synchronous|float4")
    assert rows(first.output) == 2, first.output
    again = ended("accuracy.py", 1, f"{arguments} float4|int8")
    assert rows(again.output) == 3, again.output
    assert [line for line in first.output.splitlines() if line.startswith("|")][2] in again.output


def test_results_are_kept(tmp_path):
    path, keys = tmp_path / "results", [{"name": "DiLoCo", "seed": seed} for seed in range(3)]
    first = Results(path)
    assert first.get(keys[0]) is None
    first.add(keys[0], [1.5, None])
    Results(path).add(keys[1], [1.5, 1.25])
    again = Results(path)
    assert [again.get(key) for key in keys] == [[1.5, None], [1.5, 1.25], None]
    path.write_text(path.read_text()[:-5])  # stopped while it wrote the last line
    Results(path).add(keys[2], [1.0, None])
    again = Results(path)
    assert [again.get(key) for key in keys] == [[1.5, None], None, [1.0, None]]


def test_results_of_equal_tokens_belong_to_their_text():
    options = argparse.Namespace(**dict.fromkeys(equal_tokens.SIZES, 1))
    keys = []
    for fingerprint in (1, 2):
        text = types.SimpleNamespace(fingerprint=fingerprint)
        problem = types.SimpleNamespace(options=options, text=text)
        keys.append(equal_tokens.description(equal_tokens.data_parallel(), 2, 0, problem))
    assert keys[0] != keys[1]


def test_a_job_without_a_fault_is_a_row_of_the_table(monkeypatch):
    monkeypatch.setattr(faults, "watch", lambda *_, **__: Ended(None, [], 0))
    options = argparse.Namespace(group=2, processes=16)
    assert faults.measure_told(options, 1, 9) == ["the job did not start", "-", "-"]


@pytest.mark.slow
def test_a_report_without_a_gpu_says_what_it_skips():
    job = ended("gpu.py", 1, "--sections copies sanitizer idle forms ends")
    passes(job)
    assert "Skipped, because JAX finds no GPU" in job.output
    assert "Skipped, because there is no GPU" in job.output
    assert job.output.count("| complete |") == 5, job.output
    assert "the other one says so and ends" in job.output


def test_a_section_that_fails_is_a_row_of_the_report():
    job = ended("gpu.py", 1, "--sections tax shared --limit 0.2")
    assert job.returncode == 1, job.output
    assert job.output.count("| did not end within 0.2 s |") == 2, job.output


def test_a_job_that_fails_is_described_in_one_line():
    program = "import mpi_job; print(mpi_job.run(2, 60, '-c', 'raise ValueError(3)').problem)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=BENCH, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.stdout == "status 1: ValueError: 3\n", done
