#!/usr/bin/env python3
"""Runs MPI jobs on several virtual hosts of one machine, with links of a given rate and delay.

    python bench/lab/lab.py up --nodes 4 --rate 200mbit --delay 1ms
    python bench/lab/lab.py run --pin -- python prog.py      an MPI job, a process on each node
    python bench/lab/lab.py each -- python peer.py           with the variables of torch.distributed
    python bench/lab/lab.py exec 0 -- ip addr
    python bench/lab/lab.py status
    python bench/lab/lab.py down
    python bench/lab/lab.py check --nodes 2 --rate 200mbit --delay 1ms

The rate is that of a node's link in each direction. The delay is one way from node to node. 0 means
no limit and no delay. ``up`` replaces the cluster that is up, unless a job runs on it. ``check``
creates a cluster of its own and compares its measurements with the theoretical values. A benchmark
creates its own clusters, any number at the same time, which end with it:

    with lab.up(nodes=2, rate="200mbit", delay="1ms") as cluster:
        print(cluster.run([sys.executable, "prog.py"], pin=True, timeout=60).stdout)

The lab needs Linux, root, iproute2, iptables and a C compiler. If one is missing, the program
prints what to install and exits with status 77, and :func:`missing` returns that text. After a
timeout the status is 124. The nodes share the cores and the memory of the machine, and their links
have no other traffic, so the lab does not replace tests on a real network.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import links
from hosts import HERE, Cluster, start
from needs import LabError, Missing, missing

__all__ = ["Cluster", "LabError", "Missing", "missing", "start", "up"]

STATE = Path("/run/jdaso-lab.json")  # the cluster of "up"; /run is emptied at a reboot
SKIPPED, TIMED_OUT = 77, 124


@contextlib.contextmanager
def up(nodes: int = 2, rate: str = "0", delay: str = "0") -> Iterator[Cluster]:
    """A cluster that ends with the ``with`` block. Use it in the main thread of the program."""
    cluster = start(nodes, rate, delay)
    try:
        yield cluster
    finally:
        cluster.down()


def load() -> Cluster | None:
    """The cluster that "up" created, or None. The rest of a broken cluster is removed."""
    if not STATE.exists():
        return None
    state = json.loads(STATE.read_text())
    since = state.pop("started")
    cluster = Cluster(**state)
    pids = [cluster.switch, *cluster.nodes]
    alive = [pid for pid, then in zip(pids, since, strict=True) if started(pid) == then]
    if alive == pids:
        return cluster
    Cluster(0, 0, nodes=alive).down()
    STATE.unlink()
    return None


def save(cluster: Cluster) -> None:
    """Records the cluster for later calls of the program."""
    state = {name: getattr(cluster, name) for name in ("rate", "delay", "switch", "nodes")}
    state["started"] = [started(pid) for pid in (cluster.switch, *cluster.nodes)]
    STATE.write_text(json.dumps(state))


def started(pid: int) -> int | None:
    """The start time of a running process, which distinguishes it from a later one with its id."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def check(nodes: int, rate: str, delay: str) -> None:
    """Prints the measured times of the links and the theoretical ones."""
    with up(nodes, rate, delay) as cluster:
        print(f"{nodes} nodes, {rate}, {delay}")
        probe = [sys.executable, str(HERE / "probe.py")]
        before = cluster.bytes_sent()
        tcp = answer(cluster.each([*probe, "tcp"], timeout=300)[0])
        sent = cluster.bytes_sent()[1] - before[1]
        trips, size, seconds = tcp["round_trips"], tcp["bytes"], tcp["seconds"]
        expected = links.round_trip_seconds(cluster.rate, cluster.delay)
        print(
            f"round trip of 1 byte    {1e3 * statistics.median(trips):8.3f} ms median, "
            f"{1e3 * min(trips):.3f} least; links alone {1e3 * expected:.3f} ms"
        )
        compare("TCP", size, seconds, size * 8 / links.goodput(cluster.rate or 1), cluster.rate)
        print(f"  node 1 sent {sent / 1e6:.2f} MB through eth0")
        if importlib.util.find_spec("mpi4py") is None:
            print("all-reduce: not measured, because mpi4py is not installed")
            return
        found = answer(cluster.run([*probe, "all-reduce"], pin=True, timeout=300))
        size, seconds = found["bytes"], statistics.median(found["seconds"])
        least = links.all_reduce_seconds(size, nodes, cluster.rate)
        compare("all-reduce", size, seconds, least, cluster.rate)
        print(
            f"  every node sent {found['sent'] / 1e6:.2f} MB through eth0 for it, "
            f"{links.all_reduce_bytes(size, nodes) / 1e6:.2f} MB are needed; {found['mpi']}"
        )


def answer(done: subprocess.CompletedProcess) -> dict:
    """The results of the probe, from its last line on the first node."""
    if done.returncode != 0:
        raise LabError(f"the probe failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(name: str, size: int, seconds: float, least: float, rate: float) -> None:
    line = f"{f'{name} of {size / 1e6:g} MB':22}  {seconds:8.3f} s"
    if rate:
        line += f"; links alone {least:.3f} s, ratio {seconds / least:.2f}"
    print(line)


def status() -> None:
    """Prints the cluster that is up, and the bytes that each node has sent."""
    cluster = load()
    if cluster is None:
        print("no cluster is up")
        return
    print(about(cluster))
    for address, holder, sent in zip(
        cluster.addresses, cluster.nodes, cluster.bytes_sent(), strict=True
    ):
        print(f"{address}  process {holder}  sent {sent / 1e6:.2f} MB")


def about(cluster: Cluster) -> str:
    """A text with the size, rate and delay of a cluster."""
    return f"{len(cluster.nodes)} nodes, {cluster.rate / 1e6:g} Mbit/s, {1e3 * cluster.delay:g} ms"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name in ("up", "check"):
        sub = commands.add_parser(name)
        sub.add_argument("--nodes", type=int, default=2, choices=range(2, 9), metavar="2..8")
        sub.add_argument("--rate", type=valid(links.parse_rate), default="0")
        sub.add_argument("--delay", type=valid(links.parse_delay), default="0")
    for name in ("run", "each", "exec"):
        sub = commands.add_parser(name)
        if name == "run":
            sub.add_argument("--processes-per-node", type=int, default=1)
        if name == "exec":
            sub.add_argument("node", type=int)
        else:
            sub.add_argument("--pin", action="store_true", help="run node i on core i only")
        sub.add_argument("--timeout", type=float, metavar="SECONDS", help="time limit of the job")
        sub.add_argument("command", nargs="+", help="the command and its arguments, after --")
    for name in ("status", "down"):
        commands.add_parser(name)
    return parser.parse_args(arguments)


def valid(parser):
    """Makes a type for argparse that checks a text with ``parser`` and returns it unchanged."""

    def option(text: str) -> str:
        try:
            parser(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return option


def act(options: argparse.Namespace) -> int:
    """Carries out the command line and returns the exit status."""
    if (lacking := missing()) is not None:
        raise Missing(lacking)
    if options.action == "check":
        check(options.nodes, options.rate, options.delay)
    elif options.action == "status":
        status()
    elif options.action in ("up", "down"):
        if (old := load()) is not None:
            if options.action == "up" and old.busy():
                raise LabError("a job runs on the cluster that is up; lab.py down ends both")
            old.down()
            if options.action == "up":
                print(f"replaced {about(old)}")
        STATE.unlink(missing_ok=True)
        if options.action == "up":
            cluster = start(options.nodes, options.rate, options.delay, keep=True)
            try:
                save(cluster)
            except BaseException:
                cluster.down()
                raise
    else:
        cluster = load()
        if cluster is None:
            raise LabError(
                "no cluster is up; start one: lab.py up --nodes 2 --rate 200mbit --delay 1ms"
            )
        same = {"timeout": options.timeout, "capture": False}
        if options.action == "exec":
            if not 0 <= options.node < len(cluster.nodes):
                raise LabError(
                    f"node must be below {len(cluster.nodes)}, the number of nodes, got "
                    f"{options.node}"
                )
            return cluster.exec(options.node, options.command, **same).returncode
        if options.action == "each":
            ended = cluster.each(options.command, pin=options.pin, **same)
            return next((done.returncode for done in ended if done.returncode), 0)
        processes = options.processes_per_node
        return cluster.run(
            options.command, processes_per_node=processes, pin=options.pin, **same
        ).returncode
    return 0


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return act(parse())
    except Missing as error:
        print(f"lab: skipped: {error}", file=sys.stderr)
        return SKIPPED
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except subprocess.TimeoutExpired as error:
        print(f"lab: killed after {error.timeout:g} s", file=sys.stderr)
        return TIMED_OUT
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
