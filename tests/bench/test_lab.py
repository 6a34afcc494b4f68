"""The network lab: its formulas, and its links where the machine can have them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "lab"))

import lab
import links

TIMEOUT = 60  # of every job
MEGABYTE = 1_000_000

HELLO = f"""
import socket
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
message = np.zeros({MEGABYTE}, np.uint8)
if comm.rank == 0:
    comm.Send(message, dest=1)
else:
    comm.Recv(message, source=0)
names = comm.gather((socket.gethostname(), comm.Split_type(MPI.COMM_TYPE_SHARED).size))
if comm.rank == 0:
    print(names)
"""


@pytest.mark.parametrize(
    ("text", "rate"), [("200mbit", 2e8), ("1gbit", 1e9), ("1.5kbit", 1500), ("8bit", 8), ("0", 0)]
)
def test_rates(text, rate):
    assert links.parse_rate(text) == rate


@pytest.mark.parametrize(
    ("text", "delay"), [("1ms", 1e-3), ("200us", 2e-4), ("0.5s", 0.5), ("0", 0)]
)
def test_delays(text, delay):
    assert links.parse_delay(text) == pytest.approx(delay)


@pytest.mark.parametrize("text", ["", "200", "200mb", "mbit", "-1mbit", "1 gbit"])
def test_what_is_no_rate(text):
    with pytest.raises(ValueError, match="is not a rate"):
        links.parse_rate(text)


def test_theory():
    assert links.goodput(200e6) == pytest.approx(191.3e6, rel=1e-3)
    assert links.round_trip_seconds(0, 1e-3) == 2e-3
    assert links.round_trip_seconds(1e6, 0) == pytest.approx(2 * 67 * 8 / 1e6)
    assert links.all_reduce_bytes(100, 2) == 100
    assert links.all_reduce_bytes(100, 4) == 150
    assert links.all_reduce_seconds(40_000_000, 2, 200e6) == pytest.approx(1.673, rel=1e-3)
    assert links.all_reduce_seconds(40_000_000, 2, 0) == 0


def test_command_line():
    options = lab.parse(["up", "--nodes", "4", "--rate", "200mbit", "--delay", "1ms"])
    assert (options.nodes, options.rate, options.delay) == (4, "200mbit", "1ms")
    options = lab.parse(["run", "--pin", "--", "python", "prog.py", "--steps", "3"])
    assert options.command == ["python", "prog.py", "--steps", "3"]
    assert (options.pin, options.processes_per_node, options.timeout) == (True, 1, None)
    options = lab.parse(["exec", "1", "--", "ip", "addr"])
    assert (options.node, options.command) == (1, ["ip", "addr"])


@pytest.mark.parametrize(
    "arguments", [["up", "--nodes", "9"], ["up", "--rate", "fast"], ["run"], ["sideways"]]
)
def test_a_wrong_command_line_ends_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        lab.parse(arguments)
    assert ended.value.code == 2
    capsys.readouterr()


def test_a_machine_without_root_is_told_so(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["lab.py", "status"])
    lab.missing.cache_clear()
    try:
        assert lab.main() == lab.SKIPPED
    finally:
        lab.missing.cache_clear()
    assert capsys.readouterr().err == "lab: skipped: the network lab needs root: run it with sudo\n"


@pytest.fixture(scope="module")
def cluster():
    if (lacking := lab.missing()) is not None:
        pytest.skip(lacking)
    with lab.up(nodes=2, rate="200mbit", delay="1ms") as made:
        yield made


def test_a_job_runs_on_all_nodes_and_sends_over_their_links(cluster):
    pytest.importorskip("mpi4py")
    before = cluster.bytes_sent()
    start = time.perf_counter()
    done = cluster.run([sys.executable, "-c", HELLO], timeout=TIMEOUT)
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "[('node0', 1), ('node1', 1)]\n"
    sent = [after - first for after, first in zip(cluster.bytes_sent(), before, strict=True)]
    # Starting and ending the job sends some ten kilobytes over the link as well.
    assert MEGABYTE < sent[0] < 1.1 * MEGABYTE
    assert sent[1] < 0.1 * MEGABYTE
    assert seconds > MEGABYTE * 8 / links.goodput(cluster.rate)


def test_every_node_has_the_variables_of_torch_distributed(cluster):
    show = 'echo $RANK of $WORLD_SIZE at $MASTER_ADDR on "$(hostname)"'
    done = cluster.each(["sh", "-c", show], timeout=TIMEOUT)
    assert [one.stdout for one in done] == [
        "0 of 2 at 10.77.0.1 on node0\n",
        "1 of 2 at 10.77.0.1 on node1\n",
    ]


def test_a_hanging_job_is_killed_with_all_its_processes(cluster):
    sleep = ["sh", "-c", "echo started; sleep 86399 & sleep 86399"]
    with pytest.raises(subprocess.TimeoutExpired) as error:
        cluster.run(sleep, timeout=2)
    assert "started" in error.value.output
    gone_within(5, lambda: running("sleep", "86399"))


def test_a_failure_on_one_node_ends_the_others(cluster):
    done = cluster.each(["sh", "-c", "[ $RANK = 1 ] && exit 3; sleep 86398"], timeout=TIMEOUT)
    assert done[1].returncode == 3


def test_nothing_stays_behind_when_its_owner_is_killed(cluster):
    program = "import lab, time\nwith lab.up() as c: print(*c.nodes, flush=True); time.sleep(600)"
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=lab.HERE
    )
    with owner:
        try:
            nodes = owner.stdout.readline().split()
            assert len(nodes) == 2
        finally:
            owner.send_signal(signal.SIGKILL)
    gone_within(5, lambda: [pid for pid in nodes if lab.started(int(pid)) is not None])
    assert (
        cluster.exec(0, ["true"], timeout=TIMEOUT).returncode == 0
    )  # another cluster is not affected


def running(*command: str) -> list[str]:
    """The ids of the processes with this command line."""
    wanted = "\0".join([*command, ""])
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_text() == wanted:
                found.append(folder.name)
        except OSError:
            continue
    return found


def gone_within(seconds: float, left) -> None:
    """Asserts that nothing is left after ``seconds`` at the latest."""
    deadline = time.monotonic() + seconds
    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left()
