"""Heartbeats without MPI. Connections are socket pairs, and aborts are recorded."""

import contextlib
import json
import queue
import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdaso.cluster import heartbeat as heartbeat_module
from jdaso.cluster.heartbeat import EXIT_NODE_LOST, Heartbeat, start_heartbeat
from jdaso.cluster.json_socket import MAX_MESSAGE_BYTES, JsonSocket
from jdaso.cluster.rendezvous import accept_peers, connect, new_secret

TIMEOUT = 20  # seconds, for a busy machine
STAR = np.zeros(4, int)  # all report to rank 0
UNKNOWN = "unknown: no heartbeat connection leads to it"
MALFORMED = [
    b"",
    b"\n",
    b"\xff" * 100,
    b"[" * 100_000,
    b"x" * (3 * MAX_MESSAGE_BYTES),
    b'{"beat": 1}\n',
    b"[]\n[[]]\n[null]\n12\n",
    b'["end"]\n["end", 1, 2]\n["end", "why", "when"]\n["beat"]\n["beat", 3]\n["beat", ["a"]]\n',
]


class Job:
    """Heartbeats of several processes as threads of this one, and the aborts of each."""

    def __init__(self, tree):
        self.tree = np.array(tree)
        self.sockets = {rank: [] for rank in range(len(tree))}
        self.aborts = {rank: queue.Queue() for rank in range(len(tree))}
        for rank, parent in enumerate(tree[1:], 1):
            ours, theirs = socket.socketpair()
            self.sockets[parent].append(JsonSocket(ours, rank))
            self.sockets[rank].append(JsonSocket(theirs, parent))
        self.heartbeats = [
            Heartbeat(rank, self.tree, sockets, "rank {}".format, self.recorder(rank))
            for rank, sockets in self.sockets.items()
        ]

    def recorder(self, rank):
        return lambda *abort: self.aborts[rank].put(abort)

    def dies(self, rank):
        self.heartbeats[rank]._closing = True  # a dead process sends nothing
        for peer in self.sockets[rank]:
            with contextlib.suppress(OSError):  # the peer has already closed it
                peer.connection.shutdown(socket.SHUT_RDWR)

    def abort(self, rank):
        """The reason and the status with which a process was aborted."""
        return self.aborts[rank].get(timeout=TIMEOUT)


def star_of(size):
    return Job([0] * size)


# Two levels below the first process: 1 and 2 report to it, 3 and 4 to 1, and 5 to 2.
DEEP = [0, 0, 0, 1, 1, 2]


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(heartbeat_module, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(heartbeat_module, "SILENT_SECONDS", 0.5)


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("tree", "dead"), [([0] * 4, 1), ([0] * 3, 0)] + [(DEEP, r) for r in (0, 1, 4)]
)
def test_a_death_aborts_all(tree, dead):
    job = Job(tree)
    job.dies(dead)
    for rank in set(range(len(tree))) - {dead}:
        reason, status = job.abort(rank)
        assert reason.startswith(f"rank {dead} has died. Look for the cause")
        assert status == EXIT_NODE_LOST


def test_all_that_are_connected_learn_of_a_death_that_they_tolerate():
    job, died = Job(DEEP), {rank: queue.Queue() for rank in range(6)}
    for rank, heartbeat in enumerate(job.heartbeats):
        heartbeat.tolerate_deaths(died[rank].put, silence=True, needed=frozenset({0}))
    job.dies(4)
    for rank in (0, 1, 2, 3, 5):
        assert died[rank].get(timeout=TIMEOUT) == 4
        assert "(unknown: no heartbeat" in job.heartbeats[rank].states(frozenset({4}))
        assert "(alive" in job.heartbeats[rank].states(frozenset({0, 1, 2, 3, 5} - {rank}))
    job.dies(1)  # rank 3 is on its own now
    for rank in (0, 2, 3, 5):
        assert died[rank].get(timeout=TIMEOUT) == 1
        unknown = job.heartbeats[rank].states(frozenset({1, 3} if rank != 3 else {0, 1, 2, 4, 5}))
        assert "(unknown: no heartbeat" in unknown
        assert "alive" not in unknown
    job.dies(0)  # which is needed
    for rank in (2, 5):
        assert job.abort(rank)[0].startswith("rank 0 has died.")
    assert job.aborts[3].empty()
    assert all(queue.empty() for queue in died.values())


def test_rank_0_tolerates_a_death_but_its_own_aborts_the_others():
    star, died = star_of(4), queue.Queue()
    star.heartbeats[0].tolerate_deaths(died.put, silence=False)
    star.dies(2)
    assert died.get(timeout=TIMEOUT) == 2
    assert "(unknown: no heartbeat connection" in star.heartbeats[0].states(frozenset({2}))
    star.heartbeats[3].broadcast_abort("the reason", 7)
    assert star.abort(0) == star.abort(1) == ("the reason", 7)
    star.dies(0)
    assert star.abort(1)[0].startswith("rank 0 has died.")


def test_a_long_silence_is_tolerated(fast, monkeypatch):
    monkeypatch.setattr(heartbeat_module, "LOST_SECONDS", 0.6)
    (ours, _theirs), aborts, died = socket.socketpair(), queue.Queue(), queue.Queue()
    first = Heartbeat(
        0, STAR, [JsonSocket(ours, 1)], "rank {}".format, lambda *abort: aborts.put(abort)
    )
    first.tolerate_deaths(died.put, silence=True)
    wait_until(lambda: first.silent_ranks() == {1})
    time.sleep(0.5)
    assert aborts.empty()
    assert died.empty()


def test_a_process_that_announced_its_exit_is_not_silent(fast, monkeypatch):
    """It may wait for others long after its heartbeat has closed down."""
    monkeypatch.setattr(heartbeat_module, "LOST_SECONDS", 0.6)
    (ours, theirs), aborts = socket.socketpair(), queue.Queue()
    first = Heartbeat(
        0, STAR, [JsonSocket(ours, 1)], "rank {}".format, lambda *abort: aborts.put(abort)
    )
    JsonSocket(theirs, 0).send("bye")
    time.sleep(1.0)
    assert first.silent_ranks() == set()
    assert aborts.empty()


def test_a_long_silence_is_not_tolerated_where_only_deaths_are(fast, monkeypatch):
    monkeypatch.setattr(heartbeat_module, "LOST_SECONDS", 0.6)
    (ours, _theirs), aborts = socket.socketpair(), queue.Queue()
    first = Heartbeat(
        0, STAR, [JsonSocket(ours, 1)], "rank {}".format, lambda *abort: aborts.put(abort)
    )
    first.tolerate_deaths(lambda rank: None, silence=False)
    assert aborts.get(timeout=TIMEOUT)[1] == EXIT_NODE_LOST


def test_without_rank_0_the_states_of_others_are_unknown():
    star, died = star_of(3), queue.Queue()
    star.heartbeats[1].tolerate_deaths(died.put, silence=False)
    star.dies(0)
    assert died.get(timeout=TIMEOUT) == 0
    assert "rank 0, rank 2 (unknown" in star.heartbeats[1].states(frozenset({0, 2}))


def test_an_abort_reaches_all_with_its_status():
    star = star_of(3)
    star.heartbeats[2].broadcast_abort("the reason", 7)
    assert star.abort(0) == star.abort(1) == ("the reason", 7)


def test_a_long_reason_is_shortened():
    star = star_of(2)
    star.heartbeats[1].broadcast_abort("\u00fc" * MAX_MESSAGE_BYTES + " at last", 1)
    reason, _ = star.abort(0)
    assert reason.endswith(" at last")


def test_a_process_that_exits_normally_has_not_died():
    star = star_of(3)
    for rank, peer in ((1, star.sockets[0][0]), (0, star.sockets[2][0])):
        star.heartbeats[rank].close()
        wait_until(lambda peer=peer: peer.exiting)
        star.dies(rank)
        wait_until(lambda peer=peer: peer.connection.fileno() == -1)
    assert all(aborts.empty() for aborts in star.aborts.values())


def test_silence_is_noticed_forwarded_and_over(fast):
    pairs = [socket.socketpair() for _ in range(2)]
    aborts = queue.Queue()
    heartbeats = [
        Heartbeat(
            0, STAR, [JsonSocket(pairs[0][0], 1), JsonSocket(pairs[1][0], 2)], str, aborts.put
        ),
        Heartbeat(1, STAR, [JsonSocket(pairs[0][1], 0)], str, aborts.put),
    ]
    for heartbeat in heartbeats:
        wait_until(lambda heartbeat=heartbeat: heartbeat.silent_ranks() == {2})
        assert heartbeat.states(frozenset({2})).startswith("2 (silent")
        assert "(alive" in heartbeat.states(frozenset({0, 2}))
    Heartbeat(2, STAR, [JsonSocket(pairs[1][1], 0)], str, aborts.put)
    for heartbeat in heartbeats:
        wait_until(lambda heartbeat=heartbeat: heartbeat.silent_ranks() == frozenset())
    assert aborts.empty()


def test_a_long_silence_aborts_all(fast, monkeypatch):
    monkeypatch.setattr(heartbeat_module, "LOST_SECONDS", 1.0)
    pairs = [socket.socketpair() for _ in range(2)]
    aborts = [queue.Queue(), queue.Queue()]
    Heartbeat(
        0,
        STAR,
        [JsonSocket(pairs[0][0], 1), JsonSocket(pairs[1][0], 2)],
        str,
        lambda *e: aborts[0].put(e),
    )
    Heartbeat(1, STAR, [JsonSocket(pairs[0][1], 0)], str, lambda *e: aborts[1].put(e))
    for received in aborts:
        reason, status = received.get(timeout=TIMEOUT)
        assert reason.startswith("2 was silent for 1 s. Check whether")
        assert status == EXIT_NODE_LOST


def test_a_rank_without_a_connection_is_not_called_alive():
    heartbeat = Heartbeat(0, STAR, [], "rank {}".format, lambda *abort: None, frozenset({1}))
    assert (
        heartbeat.states(frozenset({1})) == "rank 1 (unknown: no heartbeat connection leads to it)"
    )
    assert heartbeat.states(frozenset()) == "the other processes"


@pytest.mark.parametrize("data", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_messages_are_ignored(data):
    ours, theirs = socket.socketpair()
    aborts = queue.Queue()
    Heartbeat(0, STAR, [JsonSocket(ours, 1)], str, lambda *abort: aborts.put(abort))
    theirs.sendall(data)
    theirs.sendall(b'\n["end", "a message", 3]\n')
    assert aborts.get(timeout=TIMEOUT) == ("a message", 3)


@given(st.lists(st.binary(max_size=200), max_size=5), st.lists(st.integers(), max_size=3))
def test_a_message_arrives_after_any_bytes_in_any_pieces(pieces, numbers):
    ours, theirs = socket.socketpair()
    receiver, messages = JsonSocket(ours, 1), []
    message = json.dumps(["beat", numbers]).encode()
    with ours, theirs:
        for piece in [*pieces, b"\n", message[:4], message[4:], b"\n"]:
            theirs.sendall(piece)
            messages += receiver.read()
        theirs.close()
        messages += receiver.read()
    assert messages[-1] == ["beat", numbers]
    assert all(isinstance(message, list) for message in messages)
    assert receiver.closed


def test_a_line_that_is_too_long_is_no_message():
    ours, theirs = socket.socketpair()
    receiver, messages = JsonSocket(ours, 1), []
    line = json.dumps(["beat", "x" * 2 * MAX_MESSAGE_BYTES]).encode() + b"\n"
    with ours, theirs:
        for piece in [line[: len(line) // 2], line[len(line) // 2 :], b'["bye"]\n']:
            theirs.sendall(piece)
            for _ in range(3):  # a call reads at most MAX_MESSAGE_BYTES
                messages += receiver.read()
    assert messages == [["bye"]]


def test_sending_does_not_block_if_the_peer_does_not_read():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = JsonSocket(ours, 1)
        for _ in range(2000):
            sender.send("end", "x" * 1000, 1)


class Comm:
    """A communicator of threads of one process, with the methods that the heartbeat uses.

    A message arrives only when its sender calls MPI again, as with OFI's sockets.
    """

    def __init__(self, rank, barrier, given, sent):
        self.rank, self.barrier, self.given, self.sent = rank, barrier, given, sent
        self.posted = []

    def Get_rank(self):
        return self.rank

    def Allgather(self, own, received):
        self.given[self.rank] = own[0]
        self.barrier.wait(TIMEOUT)
        received[:] = [self.given[rank] for rank in range(self.barrier.parties)]

    def isend(self, value, dest):
        self.posted.append((dest, value))
        return self

    def recv(self, source):
        self.Iprobe()
        return self.sent[self.rank].get(timeout=TIMEOUT)

    def Iprobe(self):
        while self.posted:
            rank, value = self.posted.pop()
            self.sent[rank].put(value)

    wait = Iprobe


def started(size):
    """Heartbeats by rank, and the aborts of each. All processes are on one host."""
    barrier, given, heartbeats = threading.Barrier(size), {}, {}
    aborts = {rank: queue.Queue() for rank in range(size)}
    sent = {rank: queue.Queue() for rank in range(size)}

    def start(rank):
        heartbeats[rank] = start_heartbeat(
            Comm(rank, barrier, given, sent),
            np.zeros(size, int),
            "rank {}".format,
            lambda *abort: aborts[rank].put(abort),
        )

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    return heartbeats, aborts


@pytest.mark.parametrize(("size", "group"), [(4, 32), (8, 2)])
def test_processes_connect_to_each_other(caplog, monkeypatch, size, group):
    monkeypatch.setattr("jdaso.cluster.tree.GROUP", group)
    heartbeats, aborts = started(size)
    assert max(len(heartbeat._sockets) for heartbeat in heartbeats.values()) <= group + 1
    last = size - 1
    assert heartbeats[last].broadcast_abort("the reason", 5)
    for rank in range(last):
        assert aborts[rank].get(timeout=TIMEOUT) == ("the reason", 5)
        assert "(alive" in heartbeats[rank].states(frozenset(range(size)) - {rank})
    assert caplog.text == ""


def test_a_rank_that_cannot_connect_is_named_and_not_called_alive(monkeypatch, caplog):
    def fail_for_rank_2(hosts, port, secret, rank, seconds):
        return None if rank == 2 else connect(hosts, port, secret, rank, seconds)

    monkeypatch.setattr(heartbeat_module, "connect", fail_for_rank_2)
    monkeypatch.setattr(heartbeat_module, "_CONNECT_SECONDS", 1.0)
    heartbeats, aborts = started(3)
    assert "no heartbeat from rank 2: rank 2 could not connect to rank 0 at port" in caplog.text
    assert (
        heartbeats[0].states(frozenset({2}))
        == "rank 2 (unknown: no heartbeat connection leads to it)"
    )
    assert "alive" in heartbeats[1].states(frozenset({0}))
    assert "alive" not in heartbeats[2].states(frozenset({0, 1}))
    heartbeats[1].broadcast_abort("the reason", 5)
    assert aborts[0].get(timeout=TIMEOUT) == ("the reason", 5)


def listening():
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, listener.getsockname()[1]


def test_unknown_peers_are_closed_and_delay_nobody():
    listener, port = listening()
    secret, other = new_secret(), new_secret()
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
    requests = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n" * 50,
        bytes(20),
        secret.request,
        other.request + bytes(4),
    ]
    for stranger, request in zip(strangers, requests, strict=False):
        stranger.sendall(request)
    strangers[-1].close()
    strangers[-2].sendall(
        secret.request + (9).to_bytes(4, "big")
    )  # the secret, with an unknown rank
    connected = {}

    def connect_to_root(rank):
        connected[rank] = connect(["127.0.0.1"], port, secret, rank, TIMEOUT)

    threads = [threading.Thread(target=connect_to_root, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    accepted = accept_peers(listener, secret, {1, 2}, TIMEOUT)
    for thread in threads:
        thread.join()
    assert accepted.keys() == {1, 2}
    for rank, connection in accepted.items():
        assert connection.getpeername() == connected[rank].getsockname()
        connection.close()
        connected[rank].close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    for stranger in strangers:
        stranger.close()


def test_accepting_peers_times_out():
    listener, _ = listening()
    assert accept_peers(listener, new_secret(), {1}, 0.1) == {}


def test_another_server_at_the_same_port_is_skipped(monkeypatch):
    stranger = socket.create_server(("127.0.0.2", 0))
    port = stranger.getsockname()[1]
    listener = socket.create_server(("127.0.0.1", port))
    secret = new_secret()
    monkeypatch.setattr("jdaso.cluster.rendezvous._REPLY_SECONDS", 0.2)
    found = {}
    hosts = ["127.0.0.2", "127.0.0.1"]
    thread = threading.Thread(
        target=lambda: found.update(connection=connect(hosts, port, secret, 1, TIMEOUT))
    )
    thread.start()
    accepted = accept_peers(listener, secret, {1}, TIMEOUT)
    thread.join()
    assert found["connection"].getpeername() == ("127.0.0.1", port)
    for connection in (stranger, found["connection"], *accepted.values()):
        connection.close()


def test_connecting_times_out():
    listener, port = listening()
    listener.close()
    assert connect(["127.0.0.1"], port, new_secret(), 1, 0.3) is None


def test_with_a_silent_rank_0_the_states_of_others_are_unknown():
    heartbeat = Heartbeat(1, STAR, [], "rank {}".format, lambda *abort: None)
    heartbeat._reports.silent = frozenset({0})
    assert heartbeat.states(frozenset({2})).startswith("rank 2 (unknown: no heartbeat connection")
    assert "rank 0 (silent" in heartbeat.states(frozenset({0, 2}))


def test_without_a_network_a_warning_is_logged(monkeypatch, caplog):
    def refuse(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(socket, "create_server", refuse)

    heartbeats, _ = started(3)
    for rank, heartbeat in heartbeats.items():
        others = heartbeat.states(frozenset({0, 1, 2}) - {rank})
        assert "no heartbeat connection" in others
        assert "alive" not in others
    assert "no heartbeat from rank 1, rank 2: rank 1 could not connect to rank 0" in caplog.text
