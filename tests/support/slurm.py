"""A real Slurm with several virtual nodes on one machine, in namespaces of its own.

All daemons, jobs and tasks run in one process namespace. Its first process is killed when the
process that created it ends, and all others with it. Network, host names and configuration are
separate, so a Slurm of the machine is not affected.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SEARCH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
PACKAGES = {
    **dict.fromkeys(("slurmctld", "slurmd", "sbatch"), "slurm-wlm"),
    **{"munged": "munge", "ip": "iproute2", "mount": "mount", "hostname": "hostname"},
    **dict.fromkeys(("unshare", "nsenter", "setpriv"), "util-linux"),
}
NAMESPACES = ["--mount", "--net", "--uts", "--ipc"]
NETWORK = "10.79.0"
CONTROL = f"{NETWORK}.1"
READY_SECONDS = 60

# A requeued job starts again after its old credentials have expired, hence cred_expire. Nodes
# claim more cores than exist. When a step loses a task, the others are killed after KillWait.
CONFIGURATION = """\
ClusterName=virtual
SlurmctldHost=control({control})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
ReturnToService=2
MailProg=/bin/true
KillWait=3
MinJobAge=3600
SlurmdTimeout=20
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=normal Nodes=ALL Default=YES State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=ALL State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
"""
NODE = "NodeName={name} NodeAddr={address} CPUs=4"

# The shell keeps running, because the first process of a namespace must reap orphans. The file
# "nodes" lists nodes and addresses. Each node has its own network namespace on a common bridge.
START = """set -e
cd "$1"
mount --bind hosts /etc/hosts
mount -t tmpfs tmpfs /run
hostname control
ip link set lo up
ip link add bridge0 type bridge
ip address add "$2/24" dev bridge0
ip link set bridge0 up
munged --foreground --force --key-file="$1/munge.key" --socket="$1/munge.socket" \
    --pid-file="$1/munge.pid" --log-file="$1/munge.log" --seed-file="$1/munge.seed" &
while [ ! -S munge.socket ]; do sleep 0.05; done
slurmctld -D -f "$SLURM_CONF" > slurmctld.log 2>&1 &
while read -r address node; do
    ip netns add "$node"
    ip link add "port-$node" type veth peer name eth0 netns "$node"
    ip link set "port-$node" master bridge0 up
    ip -n "$node" link set lo up
    ip -n "$node" address add "$address/24" dev eth0
    ip -n "$node" link set eth0 up
    nsenter --net="/run/netns/$node" unshare --uts --ipc --mount sh -c '
        mount -t tmpfs tmpfs /dev/shm
        hostname "$1"
        exec slurmd -D -f "$SLURM_CONF" -N "$1" > "slurmd.$1.log" 2>&1' sh "$node" &
done < nodes
wait
"""


def missing() -> str | None:
    """One line that names what this machine lacks and how to install it; None if nothing."""
    if not sys.platform.startswith("linux"):
        return "a virtual Slurm requires Linux"
    if os.geteuid() != 0:
        return "a virtual Slurm requires root: run it with sudo"
    tools = [name for name in PACKAGES if shutil.which(name, path=SEARCH) is None]
    if tools:
        packages = " ".join(sorted({PACKAGES[name] for name in tools}))
        return (
            f"a virtual Slurm requires {', '.join(tools)}: "
            f"apt-get install --no-install-recommends {packages}"
        )
    if not os.path.ismount("/sys/fs/cgroup"):
        return "a virtual Slurm requires control groups, which slurmd looks for in /sys/fs/cgroup"
    links = "ip link add bridge0 type bridge && ip link add port type veth peer name eth0"
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "--pid", "--fork", "--mount-proc", "sh", "-c", links],
        env={**os.environ, "PATH": SEARCH},
        capture_output=True,
        text=True,
    )
    if tried.returncode != 0:
        return f"a virtual Slurm cannot create namespaces and links: {tried.stderr.strip()}"
    return None


class Cluster(NamedTuple):
    """A running Slurm.

    Attributes:
        folder: Folder of its configuration and logs.
        holder: First process of its namespaces.
    """

    folder: Path
    holder: subprocess.Popen

    def run(self, *command: object, timeout: float = 60, **env: str) -> subprocess.CompletedProcess:
        """Runs a command, such as sbatch or srun, in the namespaces of Slurm."""
        enter = ["nsenter", f"--target={self.holder.pid}", "--mount", "--net", "--uts"]
        return subprocess.run(
            [*enter, f"--wd={os.getcwd()}", *map(str, command)],
            env={**environment(self.folder), **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )

    def submit(self, script: str, folder: Path, *arguments: object, **env: str) -> str:
        """Submits a job that writes to ``folder/job.log``; returns its number."""
        (folder / "job.sh").write_text(script)
        options = ["--parsable", f"--chdir={folder}", f"--output={folder}/job.log"]
        done = self.run("sbatch", *options, folder / "job.sh", *arguments, **env)
        assert done.returncode == 0, done.stdout
        return done.stdout.strip()

    def show(self, job: str) -> dict[str, str]:
        """What Slurm reports about a job, by name: JobState, Restarts, ExitCode and so on."""
        done = self.run("scontrol", "--oneliner", "show", "job", job)
        assert done.returncode == 0, done.stdout
        return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)

    def wait(self, job: str, *states: str, timeout: float) -> dict[str, str]:
        """What :meth:`show` returns once a job is in one of these states."""
        deadline = time.monotonic() + timeout
        while (found := self.show(job))["JobState"] not in states:
            if time.monotonic() > deadline:
                log = Path(found["StdOut"])
                printed = log.read_text() if log.exists() else "nothing"
                raise AssertionError(f"not {states} after {timeout} s: {found}\n{printed}")
            time.sleep(0.25)
        return found

    def fail(self, node: str) -> None:
        """Kills all processes of a node, as a power failure would."""
        found = {pid: _read(pid, "cmdline") for pid in processes(self.folder)}
        daemons = [p for p, line in found.items() if line.endswith(f"\0-N\0{node}\0".encode())]
        here = {os.readlink(f"/proc/{pid}/ns/uts") for pid in daemons}
        assert len(here) == 1, found
        for pid in found:
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/uts") in here:
                    os.kill(pid, signal.SIGKILL)


def processes(folder: Path | str) -> list[int]:
    """The daemons, jobs and tasks that use the configuration in a folder."""
    wanted = f"SLURM_CONF={folder}/slurm.conf".encode()
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if wanted in _read(pid, "environ").split(b"\0")]


def _read(pid: int, file: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except OSError:  # it has ended
        return b""


def environment(folder: Path) -> dict[str, str]:
    """The environment variables of Slurm's commands and jobs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return {**kept, "PATH": SEARCH, "SLURM_CONF": str(folder / "slurm.conf")}


@contextlib.contextmanager
def start(nodes: int) -> Iterator[Cluster]:
    """A Slurm with nodes node0, node1 and so on, for the duration of a ``with`` block."""
    names = [f"node{i}" for i in range(nodes)]
    folder = Path(tempfile.mkdtemp(prefix="jdaso-slurm-"))
    try:
        _configure(folder, names)
        tied = ["setpriv", "--pdeathsig", "KILL", "unshare", *NAMESPACES]
        first = ["--pid", "--fork", "--kill-child=KILL", "--mount-proc", "sh", "-c", START]
        holder = subprocess.Popen(
            [*tied, *first, "sh", str(folder), CONTROL],
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=(folder / "start.log").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            cluster = Cluster(folder, holder)
            _wait_until_ready(cluster, nodes)
            yield cluster
        finally:
            holder.kill()
            holder.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path, names: list[str]) -> None:
    folder.chmod(0o755)
    for name in names:
        (folder / f"tmp.{name}").mkdir()
    addresses = {name: f"{NETWORK}.{10 + i}" for i, name in enumerate(names)}
    lines = [NODE.format(name=name, address=address) for name, address in addresses.items()]
    text = CONFIGURATION.format(folder=folder, control=CONTROL, nodes="\n".join(lines))
    (folder / "slurm.conf").write_text(text)
    nodes = "".join(f"{address} {name}\n" for name, address in addresses.items())
    (folder / "nodes").write_text(nodes)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{CONTROL} control\n{nodes}")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)


def _wait_until_ready(cluster: Cluster, nodes: int) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        done = cluster.run("sinfo", "-h", "-N", "-p", "normal", "-t", "idle", "-o", "%N")
        if done.returncode == 0 and len(done.stdout.split()) == nodes:
            return
        if cluster.holder.poll() is not None or time.monotonic() > deadline:
            logs = sorted(cluster.folder.glob("*.log"))
            tails = [f"{log.name}:\n{log.read_text(errors='replace')[-2000:]}" for log in logs]
            raise RuntimeError("\n".join(["Slurm did not start", done.stdout, *tails]))
        time.sleep(0.1)
