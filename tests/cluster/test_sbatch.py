"""``python -m jdaso sbatch``: what its script passes to bash, srun and scontrol."""

import itertools
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jdaso import __main__
from jdaso.cluster import EXIT_TRY_AGAIN
from jdaso.cluster.sbatch import JobOptions, job_script, parse_time

ROOT = Path(__file__).parents[2]
JOB = JobOptions(nodes=4, time="04:00:00", command=["python", "train.py", "--resume"])
# Write their arguments to files, each followed by a NUL. srun exits with STATUS.
STUBS = """
srun() { printf '%s\\0' "$@" > srun; return "$STATUS"; }
scontrol() { printf '%s\\0' "$@" > scontrol; }
"""


def run(text, folder, status=0, arguments=()):
    """Runs a job script without Slurm; returns the arguments of srun and scontrol, or None."""
    (folder / "job.sh").write_text(STUBS + text)
    for name in ("srun", "scontrol"):
        (folder / name).unlink(missing_ok=True)
    ended = subprocess.run(
        ["bash", "job.sh", *arguments],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "STATUS": str(status), "SLURM_JOB_ID": "42"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == status
    assert ended.stderr in ("", "given up after 2 retries, see slurm-42.failures\n")
    files = [folder / name for name in ("srun", "scontrol")]
    return [file.read_text().split("\0")[:-1] if file.exists() else None for file in files]


def directives(text):
    """The directives that sbatch reads. It stops at the first line that is not a comment."""
    head = itertools.takewhile(lambda line: not line or line.startswith("#"), text.split("\n"))
    return [line for line in head if line.startswith("#SBATCH")]


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs ``python -m jdaso sbatch`` and returns what it printed."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["jdaso", "sbatch", *arguments])
        __main__.main()
        return capsys.readouterr().out

    return run


def test_one_process_per_node(command, tmp_path):
    text = command(
        *("--nodes", "4", "--gpus-per-node", "4", "--cpus-per-task", "32", "--time", "1-12"),
        *("--signal", "120", "--partition", "gpu,long", "--account", "me", "--job-name", "x"),
        *("--mpi", "pmix", "--", "python", "train.py", "--", "a b"),
    )
    assert set(directives(text)) == {
        *("#SBATCH --job-name=x", "#SBATCH --partition=gpu,long", "#SBATCH --account=me"),
        *("#SBATCH --nodes=4", "#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=4"),
        *("#SBATCH --cpus-per-task=32", "#SBATCH --time=1-12", "#SBATCH --signal=USR1@120"),
        *("#SBATCH --requeue", "#SBATCH --open-mode=append"),
    }
    given, _ = run(text, tmp_path, arguments=["--out", "c d"])
    assert given == [
        *("--kill-on-bad-exit=1", "--mpi=pmix", "--cpus-per-task=32"),
        *("python", "train.py", "--", "a b", "--out", "c d"),
    ]


def test_one_process_per_device():
    text = job_script(JOB._replace(ntasks_per_node=4, gpus_per_node=4))
    assert "#SBATCH --ntasks-per-node=4" in directives(text)
    assert "#SBATCH --gpus-per-task=1" in directives(text)
    assert "gpus-per-node=" not in text


def test_min_nodes_is_a_range(command):
    text = command("--nodes", "4", "--min-nodes", "2", "--time", "60", "--", "python", "x.py")
    assert "#SBATCH --nodes=2-4" in directives(text)
    assert "ntasks" not in text


@pytest.mark.parametrize("status", [0, 1, 2])
def test_job_that_finished_or_failed_is_not_started_again(tmp_path, status):
    assert run(job_script(JOB), tmp_path, status)[1] is None


def test_job_that_saved_is_started_again(tmp_path):
    assert run(job_script(JOB), tmp_path, EXIT_TRY_AGAIN)[1] == ["requeue", "42"]


@pytest.mark.parametrize("status", [14, 69, 137, 139])
def test_job_that_was_killed_is_retried(tmp_path, status):
    text = job_script(JOB._replace(retries=2))
    again = ["requeue", "42"]
    assert [run(text, tmp_path, status)[1] for _ in range(4)] == [again, again, None, None]
    assert (
        run(text, tmp_path, EXIT_TRY_AGAIN)[1] == again
    )  # it has made progress, so the count starts again
    assert [run(text, tmp_path, status)[1] for _ in range(3)] == [again, again, None]


@pytest.mark.parametrize("status", [0, EXIT_TRY_AGAIN, 137])
def test_without_requeue(tmp_path, status):
    text = job_script(JOB._replace(requeue=False))
    assert "#SBATCH --no-requeue" in directives(text)
    assert run(text, tmp_path, status)[1] is None


words = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))


@settings(max_examples=30)
@given(words)
@example(["'", '"', "$HOME", "$(touch x)", "`touch x`", "a\n#SBATCH --nodes=9", "\\", "", "--x=*"])
def test_arguments_are_quoted(tmp_path_factory, words):
    folder = tmp_path_factory.getbasetemp() / "quoting"
    folder.mkdir(exist_ok=True)
    job = JOB._replace(command=["python", *words])
    text = job_script(job)
    assert directives(text) == directives(job_script(JOB))
    subprocess.run(["bash", "-n"], input=text.encode(), check=True)
    given, _ = run(text, folder)
    assert given == ["--kill-on-bad-exit=1", "--mpi=pmi2", *job.command]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "--nodes must be an integer >= 1, got 0"),
        ({"min_nodes": 0}, "--min-nodes must be an integer >= 1, got 0"),
        (
            {"nodes": 2, "min_nodes": 1, "ntasks_per_node": 2},
            "--min-nodes requires --ntasks-per-node 1, got 2",
        ),
        ({"nodes": 2, "min_nodes": 3}, "--min-nodes must be at most --nodes (2), got 3"),
        (
            {"ntasks_per_node": 2, "gpus_per_node": 4},
            "--ntasks-per-node must be 1 or --gpus-per-node (4), got 2",
        ),
        ({"gpus_per_node": -1}, "--gpus-per-node must be"),
        ({"cpus_per_task": 0}, "--cpus-per-task must be"),
        ({"retries": -1}, "--retries must be"),
        ({"time": "tomorrow"}, "--time must be at least a minute"),
        ({"time": "-5"}, "got '-5'"),
        ({"time": "0"}, "--time must be at least a minute"),
        ({"time": "1:2:3:4"}, "--time must be"),
        ({"time": "1", "signal": 60}, "must be less than the time limit of 60 s"),
        ({"time": "2"}, "--signal must be less than the time limit of 120 s"),
        (
            {"requeue": False, "retries": 5},
            "remove --retries 5, which has no effect with --no-requeue",
        ),
        ({"mpi": "openmpi"}, "got the MPI library 'openmpi': use pmix"),
        ({"time": "9-0", "signal": 70000}, "at most 65535"),
        ({"mpi": "none"}, "--mpi must not be none"),
        ({"mpi": "pmi2 --overlap"}, "--mpi must consist of letters"),
        ({"partition": "a\n#SBATCH --nodes=9"}, "--partition must consist of letters"),
        ({"account": ""}, "--account must consist of letters"),
        ({"job_name": "-x"}, "--job-name must consist of letters"),
        ({"command": ["/usr/bin/srun", "python"]}, "The script starts it with srun"),
        ({"command": ["--resume"]}, "must be the program that each process runs"),
        ({"command": []}, "must be the program that each process runs"),
        ({"command": [""]}, "must be the program that each process runs"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        job_script(JOB._replace(**options))


@pytest.mark.parametrize("wrong", [["python", "x.py", "--resume"], ["--node", "3", "--", "x"]])
def test_unknown_options_are_an_error_that_mentions_the_separator(command, capsys, wrong):
    with pytest.raises(SystemExit, match="2"):
        command("--nodes", "2", "--time", "60", *wrong)
    error = capsys.readouterr().err
    assert f"unrecognized arguments: {' '.join(w for w in wrong if w[0] == '-')[:6]}" in error
    assert "put -- before the program" in error


def test_command_line_errors_have_no_traceback(command):
    with pytest.raises(SystemExit, match=r"^jdaso sbatch: --mpi must not be none"):
        command("--nodes", "2", "--time", "60", "--mpi", "none", "--", "python", "x.py")


@given(st.integers(0, 99), st.integers(0, 23), st.integers(0, 59), st.integers(1, 59))
def test_times(days, hours, minutes, rest):
    total = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    if total >= 60:
        assert parse_time(f"{days}-{hours}:{minutes:02}:{rest:02}") == total
        assert parse_time(f"{days * 24 + hours}:{minutes}:{rest}") == total
        assert parse_time(f"{total // 60}:{rest}") == total
        if total - rest >= 60:
            assert parse_time(f"{days}-{hours}:{minutes}") == total - rest
            assert parse_time(f"{total // 60}") == total - rest


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples" / "slurm").glob("*")), ids=lambda p: p.name
)
def test_examples_are_up_to_date(path, command):
    text = path.read_text()
    (line,) = [line for line in text.split("\n") if line.startswith("#     python -m jdaso")]
    assert command(*shlex.split(line)[5:]) == text
