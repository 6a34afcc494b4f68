"""Heartbeats without MPI. Connections are socket pairs, and aborts are recorded."""

import contextlib
import json
import queue
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdaso.cluster import heartbeat as heartbeat_module
from jdaso.cluster.heartbeat import EXIT_NODE_LOST, Heartbeat, start_heartbeat
from jdaso.cluster.json_socket import MAX_MESSAGE_BYTES, JsonSocket
from jdaso.cluster.rendezvous import accept_peers, connect, new_secret

TIMEOUT = 20  # seconds, for a busy machine
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


class Star:
    """Heartbeats of several processes as threads of this one, and the aborts of each."""

    def __init__(self, size):
        self.size = size
        pairs = {rank: socket.socketpair() for rank in range(1, size)}
        self.aborts = {rank: queue.Queue() for rank in range(size)}
        self.heartbeats = [
            self.heartbeat(0, [JsonSocket(ours, r) for r, (ours, _) in pairs.items()])
        ]
        self.heartbeats += [
            self.heartbeat(r, [JsonSocket(theirs, 0)]) for r, (_, theirs) in pairs.items()
        ]

    def heartbeat(self, rank, sockets):
        self.sockets = {**getattr(self, "sockets", {}), rank: sockets}
        return Heartbeat(
            rank, sockets, "rank {}".format, lambda *abort: self.aborts[rank].put(abort)
        )

    def dies(self, rank):
        self.heartbeats[rank]._closing = True  # a dead process sends nothing
        for peer in self.sockets[rank]:
            with contextlib.suppress(OSError):  # the peer has already closed it
                peer.connection.shutdown(socket.SHUT_RDWR)

    def abort(self, rank):
        """The reason and the status with which a process was aborted."""
        return self.aborts[rank].get(timeout=TIMEOUT)


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(heartbeat_module, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(heartbeat_module, "SILENT_SECONDS", 0.5)


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("dead", [1, 2])
def test_a_death_aborts_all(dead):
    star = Star(4)
    star.dies(dead)
    for rank in {0, 1, 2, 3} - {dead}:
        reason, status = star.abort(rank)
        assert reason.startswith(f"rank {dead} has died. Look for the cause")
        assert status == EXIT_NODE_LOST


def test_the_death_of_rank_0_aborts_all():
    star = Star(3)
    star.dies(0)
    for rank in (1, 2):
        reason, status = star.abort(rank)
        assert reason.startswith("rank 0 has died.")
        assert status == EXIT_NODE_LOST


def test_rank_0_tolerates_a_death_but_its_own_aborts_the_others():
    star, died = Star(4), queue.Queue()
    star.heartbeats[0].tolerate_deaths(died.put, silence=False)
    star.dies(2)
    assert died.get(timeout=TIMEOUT) == 2
    assert "it has no heartbeat connection" in star.heartbeats[0].states(frozenset({2}))
    star.heartbeats[3].broadcast_abort("the reason", 7)
    assert star.abort(0) == star.abort(1) == ("the reason", 7)
    star.dies(0)
    assert star.abort(1)[0].startswith("rank 0 has died.")


def test_a_long_silence_is_tolerated(fast, monkeypatch):
    monkeypatch.setattr(heartbeat_module, "LOST_SECONDS", 0.6)
    (ours, _theirs), aborts, died = socket.socketpair(), queue.Queue(), queue.Queue()
    first = Heartbeat(0, [JsonSocket(ours, 1)], "rank {}".format, lambda *abort: aborts.put(abort))
    first.tolerate_deaths(died.put, silence=True)
    wait_until(lambda: first.silent_ranks() == {1})
    time.sleep(0.5)
    assert aborts.empty()
    assert died.empty()


def test_a_process_that_announced_its_exit_is_not_silent(fast, monkeypatch):
    """It may wait for others long after its heartbeat has closed down."""
    monkeypatch.setattr(heartbeat_module, "LOST_SECONDS", 0.6)
    (ours, theirs), aborts = socket.socketpair(), queue.Queue()
    first = Heartbeat(0, [JsonSocket(ours, 1)], "rank {}".format, lambda *abort: aborts.put(abort))
    JsonSocket(theirs, 0).send("bye")
    time.sleep(1.0)
    assert first.silent_ranks() == set()
    assert aborts.empty()


def test_a_long_silence_is_not_tolerated_where_only_deaths_are(fast, monkeypatch):
    monkeypatch.setattr(heartbeat_module, "LOST_SECONDS", 0.6)
    (ours, _theirs), aborts = socket.socketpair(), queue.Queue()
    first = Heartbeat(0, [JsonSocket(ours, 1)], "rank {}".format, lambda *abort: aborts.put(abort))
    first.tolerate_deaths(lambda rank: None, silence=False)
    assert aborts.get(timeout=TIMEOUT)[1] == EXIT_NODE_LOST


def test_without_rank_0_the_states_of_others_are_unknown():
    star, died = Star(3), queue.Queue()
    star.heartbeats[1].tolerate_deaths(died.put, silence=False)
    star.dies(0)
    assert died.get(timeout=TIMEOUT) == 0
    assert star.heartbeats[1].silent_ranks() == {0}
    assert "rank 2 (unknown" in star.heartbeats[1].states(frozenset({2}))


def test_an_abort_reaches_all_with_its_status():
    star = Star(3)
    star.heartbeats[2].broadcast_abort("the reason", 7)
    assert star.abort(0) == star.abort(1) == ("the reason", 7)


def test_a_long_reason_is_shortened():
    star = Star(2)
    star.heartbeats[1].broadcast_abort("\u00fc" * MAX_MESSAGE_BYTES + " at last", 1)
    reason, _ = star.abort(0)
    assert reason.endswith(" at last")


def test_a_process_that_exits_normally_has_not_died():
    star = Star(3)
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
        Heartbeat(0, [JsonSocket(pairs[0][0], 1), JsonSocket(pairs[1][0], 2)], str, aborts.put),
        Heartbeat(1, [JsonSocket(pairs[0][1], 0)], str, aborts.put),
    ]
    for heartbeat in heartbeats:
        wait_until(lambda heartbeat=heartbeat: heartbeat.silent_ranks() == {2})
        assert heartbeat.states(frozenset({2})).startswith("2 (silent")
        assert "(alive" in heartbeat.states(frozenset({0, 2}))
    Heartbeat(2, [JsonSocket(pairs[1][1], 0)], str, aborts.put)
    for heartbeat in heartbeats:
        wait_until(lambda heartbeat=heartbeat: heartbeat.silent_ranks() == frozenset())
    assert aborts.empty()


def test_a_long_silence_aborts_all(fast, monkeypatch):
    monkeypatch.setattr(heartbeat_module, "LOST_SECONDS", 1.0)
    pairs = [socket.socketpair() for _ in range(2)]
    aborts = [queue.Queue(), queue.Queue()]
    Heartbeat(
        0,
        [JsonSocket(pairs[0][0], 1), JsonSocket(pairs[1][0], 2)],
        str,
        lambda *e: aborts[0].put(e),
    )
    Heartbeat(1, [JsonSocket(pairs[0][1], 0)], str, lambda *e: aborts[1].put(e))
    for received in aborts:
        reason, status = received.get(timeout=TIMEOUT)
        assert reason.startswith("2 was silent for 1 s. Check whether")
        assert status == EXIT_NODE_LOST


def test_a_rank_without_a_connection_is_not_called_alive():
    heartbeat = Heartbeat(0, [], "rank {}".format, lambda *abort: None, frozenset({1}))
    assert heartbeat.states(frozenset({1})) == "rank 1 (unknown: it has no heartbeat connection)"
    assert heartbeat.states(frozenset()) == "the other processes"


@pytest.mark.parametrize("data", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_messages_are_ignored(data):
    ours, theirs = socket.socketpair()
    aborts = queue.Queue()
    Heartbeat(0, [JsonSocket(ours, 1)], str, lambda *abort: aborts.put(abort))
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

    A broadcast completes only when rank 0 calls MPI again, as with OFI's sockets.
    """

    def __init__(self, rank, barrier, given, called):
        self.rank, self.barrier, self.given, self.called = rank, barrier, given, called

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.barrier.parties

    def allgather(self, value):
        self.given[self.rank] = value
        self.barrier.wait(TIMEOUT)
        values = [self.given[rank] for rank in range(self.barrier.parties)]
        self.barrier.wait(TIMEOUT)
        return values

    def bcast(self, value):
        received = self.allgather(value)[0]
        assert self.rank == 0 or self.called.wait(TIMEOUT)
        return received

    def Iprobe(self):
        self.called.set()


def started(size):
    """Heartbeats by rank, and the aborts of each."""
    barrier, given, heartbeats, called = threading.Barrier(size), {}, {}, threading.Event()
    aborts = {rank: queue.Queue() for rank in range(size)}

    def start(rank):
        heartbeats[rank] = start_heartbeat(
            Comm(rank, barrier, given, called),
            "rank {}".format,
            lambda *abort: aborts[rank].put(abort),
        )

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    return heartbeats, aborts


def test_processes_connect_to_each_other(caplog):
    heartbeats, aborts = started(4)
    heartbeats[3].broadcast_abort("the reason", 5)
    for rank in range(3):
        assert aborts[rank].get(timeout=TIMEOUT) == ("the reason", 5)
        assert "alive" in heartbeats[rank].states(frozenset({0, 1, 2, 3} - {rank}))
    assert caplog.text == ""


def test_a_rank_that_cannot_connect_is_named_and_not_called_alive(monkeypatch, caplog):
    def fail_for_rank_2(hosts, port, secret, rank, seconds):
        return None if rank == 2 else connect(hosts, port, secret, rank, seconds)

    monkeypatch.setattr(heartbeat_module, "connect", fail_for_rank_2)
    monkeypatch.setattr(heartbeat_module, "_CONNECT_SECONDS", 1.0)
    heartbeats, aborts = started(3)
    assert "no heartbeat from rank 2: they could not connect to rank 0 at port" in caplog.text
    assert (
        heartbeats[0].states(frozenset({2})) == "rank 2 (unknown: it has no heartbeat connection)"
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
    heartbeat = Heartbeat(1, [], "rank {}".format, lambda *abort: None)
    heartbeat._reports.silent = frozenset({0})
    assert heartbeat.states(frozenset({2})).startswith("rank 2 (unknown: rank 0, which forwards")
    assert "rank 0 (silent" in heartbeat.states(frozenset({0, 2}))


def test_without_a_network_a_warning_is_logged(monkeypatch, caplog):
    def refuse(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(socket, "create_server", refuse)

    class Comm:
        def __init__(self, rank):
            self.rank, self.size = rank, 2

        def Get_rank(self):
            return self.rank

        def Get_size(self):
            return self.size

        def bcast(self, value):
            return None

        def allgather(self, value):
            return [True, False]

    for rank in (0, 1):
        heartbeat = start_heartbeat(Comm(rank), "rank {}".format, lambda *abort: None)
        assert "no heartbeat" in heartbeat.states(frozenset({1 - rank}))
    assert "no heartbeat from rank 1" in caplog.text
