"""Virtual hosts on one machine: their namespaces, their network, and the jobs on them.

Each node is a network, UTS, IPC and mount namespace with an eth0 that is connected to one bridge.
The bridge has a namespace of its own, so the network of the machine is neither visible nor
changed. The namespaces have no names. Each belongs to a process and ends with this process. A job
has a process namespace, so killing its first process ends the job on all nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from links import parse_delay, parse_rate
from needs import NAMESPACES, SEARCH, LabError, Missing, missing, tool, which

HERE = Path(__file__).parent
NETWORK = "10.77.0"

# The kernel kills the process when the thread that started it ends, even if that was by SIGKILL.
TIED_TO_THIS_PROCESS = ["setpriv", "--pdeathsig", "KILL"]

# The bucket passes packets of 64 KB, as TCP hands them to the card, without splitting them.
# Splitting them into frames would cost processor time and reduce the rate.
BURST, BACKLOG = 80_000, 1_000_000
ARRIVING_WAITS = shlex.split("--wait -t mangle -A PREROUTING -i eth0 -j NFQUEUE --queue-num 0")

# Each node has its own /dev/shm. Otherwise MPI could use it instead of the network.
BECOME_NODE = """set -e
hostname "$1"
{ echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; } 2>/dev/null || true
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2" /etc/hosts
shift 2
exec "$@"
"""

# MPICH uses TCP on eth0 only. UCX would detect that there is one machine and use shared memory.
MPICH_OVER_TCP = {
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": "eth0",
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "eth0",
}
# Open MPI must yield, because its polling would take the core that the network needs.
OPEN_MPI_OVER_TCP = shlex.split(
    f"--allow-run-as-root --bind-to none --prtemca prte_if_include {NETWORK}.0/24 "
    f"--mca pml ob1 --mca btl tcp,self,sm --mca btl_tcp_if_include {NETWORK}.0/24 "
    "--mca mpi_yield_when_idle 1 --mca mpi_event_tick_rate 1"
)


@dataclasses.dataclass
class Cluster:
    """Running nodes, created by :func:`start`. ``down`` ends them and everything on them."""

    rate: float
    delay: float
    switch: int = 0  # id of the process that holds the bridge
    nodes: list[int] = dataclasses.field(
        default_factory=list
    )  # ids of the processes that hold the nodes
    _children: list[subprocess.Popen] = dataclasses.field(default_factory=list, repr=False)

    def run(
        self,
        command: list[str],
        *,
        processes_per_node: int = 1,
        pin: bool = False,
        timeout: float | None = None,
        env: dict[str, str] | None = None,
        capture: bool = True,
    ) -> subprocess.CompletedProcess:
        """Runs an MPI job on all nodes, started on the first node.

        Args:
            command: The program and its arguments.
            processes_per_node: Number of processes on each node.
            pin: Whether node i runs on core i only. More nodes than cores share cores.
            timeout: Time limit in seconds.
            env: Additional environment variables.
            capture: Whether the output is captured.

        Raises:
            subprocess.TimeoutExpired: If the job was killed at its time limit.
        """
        mpiexec = which("mpiexec")
        if mpiexec is None:
            raise LabError("mpiexec is not on PATH: pip install mpich")
        shell = str(HERE / "remote_shell.sh")
        hosts = ",".join(f"{address}:{processes_per_node}" for address in self.addresses)
        count = ["-n", str(processes_per_node * len(self.nodes))]
        version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
        if "HYDRA" in version:
            launch = ["-launcher", "ssh", "-launcher-exec", shell, "-hosts", hosts]
        else:
            launch = [*OPEN_MPI_OVER_TCP, "--prtemca", "plm_ssh_agent", shell, "--host", hosts]
        nodes = "\n".join(shlex.join(self._enter(node, pin)) for node in range(len(self.nodes)))
        environment = {**MPICH_OVER_TCP, **os.environ, **(env or {}), "LAB_NODES": nodes}
        # The job has its own process ids, and its own /proc to find them in.
        inside = ["unshare", "--mount-proc", *command]
        job = self._job(0, [mpiexec, *launch, *count, *inside], pin)
        return finish([(job, environment)], timeout, capture)[0]

    def each(
        self,
        command: list[str],
        *,
        pin: bool = False,
        timeout: float | None = None,
        env: dict[str, str] | None = None,
        capture: bool = True,
    ) -> list[subprocess.CompletedProcess]:
        """Runs a command on every node, with the variables of torch.distributed.

        If the command fails on one node, it is killed on the other nodes, which would wait for it.
        """
        jobs = []
        for node in range(len(self.nodes)):
            place = {
                **{"RANK": str(node), "WORLD_SIZE": str(len(self.nodes)), "LOCAL_RANK": "0"},
                **{"MASTER_ADDR": self.addresses[0], "MASTER_PORT": "29555"},
                "GLOO_SOCKET_IFNAME": "eth0",
            }
            environment = {**os.environ, **place, **(env or {})}
            jobs.append((self._job(node, command, pin), environment))
        return finish(jobs, timeout, capture)

    def exec(
        self, node: int, command: list[str], *, timeout: float | None = None, capture: bool = True
    ) -> subprocess.CompletedProcess:
        """Runs a command on one node."""
        return finish([(self._job(node, command, False), os.environ)], timeout, capture)[0]

    def cut(self, node: int) -> None:
        """Cuts the link of a node."""
        _setup(["ip", "link", "set", f"port{node}", "down"], self.switch)

    @property
    def addresses(self) -> list[str]:
        return [f"{NETWORK}.{node + 1}" for node in range(len(self.nodes))]

    def bytes_sent(self) -> list[int]:
        """The bytes that each node has sent through its eth0 so far."""
        sent = []
        for holder in self.nodes:
            lines = Path(f"/proc/{holder}/net/dev").read_text().splitlines()
            counters = next(line.split(":")[1] for line in lines if line.strip().startswith("eth0"))
            sent.append(int(counters.split()[8]))
        return sent

    def busy(self) -> bool:
        """Whether a job runs on a node."""
        return bool(set(self._inside()) - {self.switch, *self.nodes})

    def _inside(self) -> list[int]:
        """All processes in the cluster's namespaces, including those that hold them."""
        ours = {_network(holder) for holder in [self.switch, *self.nodes]} - {None}
        return [pid for pid in _processes() if _network(pid) in ours]

    def down(self) -> None:
        """Kills all processes in the cluster's namespaces, including those that hold them."""
        while found := self._inside():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        for child in self._children:
            end(child)
        self._children.clear()

    def _enter(self, node: int, pin: bool) -> list[str]:
        """The prefix of a command that makes it run on a node."""
        cores = sorted(os.sched_getaffinity(0))
        allowed = [cores[node % len(cores)]] if pin else cores
        files = [f"--{k}=/proc/{self.nodes[node]}/ns/{file}" for k, file in NAMESPACES.items()]
        return ["nsenter", *files, "taskset", "-c", ",".join(map(str, allowed))]

    def _job(self, node: int, command: list[str], pin: bool) -> list[str]:
        # The shell is the first process of the job's namespace. It reaps orphans, and a signal that
        # a program sends to itself has its usual effect.
        first = ["unshare", "--pid", "--fork", "--kill-child=KILL"]
        shell = ["sh", "-c", '"$@"; exit $?', "job"]
        inside = [*self._enter(node, pin), "env", f"--chdir={os.getcwd()}"]
        return [*TIED_TO_THIS_PROCESS, *first, *shell, *inside, *command]

    def _hold(self, command: list[str], keep: bool) -> int:
        """Starts a process with its own namespaces. Returns its id when it has printed "ready"."""
        child = subprocess.Popen(
            [*([] if keep else TIED_TO_THIS_PROCESS), "unshare", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PATH": SEARCH},
        )
        self._children.append(child)
        assert child.stdout is not None
        with child.stdout:
            output = []
            for line in child.stdout:
                if line == "ready\n":
                    return child.pid
                output.append(line)
        raise LabError("".join(output).strip() or "a process of the lab ended at once")


def start(nodes: int, rate: str = "0", delay: str = "0", *, keep: bool = False) -> Cluster:
    """Creates a cluster.

    Args:
        nodes: Number of nodes, 2 to 8.
        rate: Rate of each node's link in each direction, such as ``"200mbit"``. 0 is no limit.
        delay: One-way delay between two nodes, such as ``"1ms"``.
        keep: Whether the cluster stays up when this process ends, until ``down``.

    Raises:
        Missing: If the machine lacks something that the lab needs.
    """
    cluster = Cluster(parse_rate(rate), parse_delay(delay))
    if not 2 <= nodes <= 8:
        raise ValueError(f"nodes must be 2 to 8, got {nodes}.")
    if (lacking := missing()) is not None:
        raise Missing(lacking)
    try:
        with tempfile.TemporaryDirectory(prefix="jdaso-lab-") as folder:
            _start(cluster, nodes, Path(folder), keep)
    except BaseException:
        cluster.down()
        raise
    return cluster


def _start(cluster: Cluster, nodes: int, folder: Path, keep: bool) -> None:
    # The nodes keep using both files after the folder has been removed.
    program, hosts = folder / "delay", folder / "hosts"
    _setup(["cc", "-O2", "-o", str(program), str(HERE / "delay.c")])
    names = [f"{NETWORK}.{node + 1} node{node}\n" for node in range(nodes)]
    hosts.write_text("127.0.0.1 localhost\n" + "".join(names))
    waits = [f"{cluster.delay * 1e6:g}", f"{cluster.rate:.0f}"]
    shape = f"root tbf rate {cluster.rate:.0f}bit burst {BURST} limit {BACKLOG}"

    cluster.switch = cluster._hold(["--net", "sh", "-c", "echo ready; exec sleep infinity"], keep)
    bridge = ["link add bridge0 type bridge", "link set bridge0 up"]
    _setup(["ip", "-batch", "-"], cluster.switch, bridge)
    for node in range(nodes):
        become = ["sh", "-c", BECOME_NODE, "become", f"node{node}", str(hosts)]
        options = [f"--{kind}" for kind in NAMESPACES]
        holder = cluster._hold([*options, *become, str(program), *waits], keep)
        cluster.nodes.append(holder)
        port = [
            f"link add port{node} type veth peer name eth0 netns {holder}",
            f"link set port{node} master bridge0 up",
        ]
        card = ["link set lo up", f"addr add {NETWORK}.{node + 1}/24 dev eth0", "link set eth0 up"]
        _setup(["ip", "-batch", "-"], cluster.switch, port)
        _setup(["ip", "-batch", "-"], holder, card)
        if cluster.rate:
            _setup(["tc", "qdisc", "add", "dev", f"port{node}", *shape.split()], cluster.switch)
            _setup(["tc", "qdisc", "add", "dev", "eth0", *shape.split()], holder)
        if cluster.rate or cluster.delay:
            _setup(["iptables", *ARRIVING_WAITS], holder)


def _setup(command: list[str], holder: int | None = None, lines: list[str] | None = None) -> None:
    """Runs a command with ``lines`` as its input, in the network of process ``holder`` if given."""
    within = [] if holder is None else [tool("nsenter"), f"--net=/proc/{holder}/ns/net"]
    whole = [*within, tool(command[0]), *command[1:]]
    done = subprocess.run(whole, input="\n".join(lines or []), capture_output=True, text=True)
    if done.returncode != 0:
        raise LabError(f"{shlex.join(command)}: {(done.stderr or done.stdout).strip()}")


def _processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _network(pid: int) -> str | None:
    """The network namespace of a running process, or None if it is that of this process."""
    try:
        found = os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None
    return None if found == os.readlink("/proc/self/ns/net") else found


# ------------------------------------------------------- Jobs with a time limit, which end together


def finish(
    jobs: list[tuple[list[str], dict[str, str]]], timeout: float | None, capture: bool
) -> list[subprocess.CompletedProcess]:
    """Runs jobs at the same time. Kills all of them if one fails, or at the time limit."""
    processes, outputs = [], []
    deadline = None if timeout is None else time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        for command, environment in jobs:
            files = [None, None]
            if capture:  # files instead of pipes, which would have to be read during the job
                files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in files]
            outputs.append(files)
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=files[0],
                stderr=files[1],
                start_new_session=True,
                env={**environment, "PATH": SEARCH},
            )
            stack.callback(end, process)
            processes.append(process)
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(jobs[0][0], timeout, *map(_read, outputs[0]))
            time.sleep(0.02)
        for process in processes:
            end(process)
        return [
            subprocess.CompletedProcess(process.args, process.returncode, *map(_read, files))
            for process, files in zip(processes, outputs, strict=True)
        ]


def end(process: subprocess.Popen) -> None:
    """Kills the outermost process of a job, with which all of its processes end."""
    process.kill()
    process.wait()


def _read(file) -> str | None:
    if file is None:
        return None
    file.seek(0)
    return file.read()
