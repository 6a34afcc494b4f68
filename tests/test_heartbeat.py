"""Heartbeats without MPI: lines are socket pairs, and an end is written down."""

import contextlib
import json
import queue
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdaso import _heartbeat
from jdaso._heartbeat import EXIT_NODE_LOST, Heartbeat, start_heartbeat
from jdaso._line import LONGEST_BYTES, Line
from jdaso._sockets import admit, join, new_secret

PATIENCE = 20  # seconds until a test gives up, on a machine that is busy
STRANGE = [
    b"",
    b"\n",
    b"\xff" * 100,
    b"[" * 100_000,
    b"x" * (3 * LONGEST_BYTES),
    b'{"beat": 1}\n',
    b"[]\n[[]]\n[null]\n12\n",
    b'["end"]\n["end", 1, 2]\n["end", "why", "when"]\n["beat"]\n["beat", 3]\n["beat", ["a"]]\n',
]


class Star:
    """Heartbeats of several processes as threads of this one, and why they were told to end."""

    def __init__(self, size):
        self.size = size
        pairs = {rank: socket.socketpair() for rank in range(1, size)}
        self.ends = {rank: queue.Queue() for rank in range(size)}
        self.beats = [self.heartbeat(0, [Line(ours, r) for r, (ours, _) in pairs.items()])]
        self.beats += [self.heartbeat(r, [Line(theirs, 0)]) for r, (_, theirs) in pairs.items()]

    def heartbeat(self, rank, lines):
        self.lines = {**getattr(self, "lines", {}), rank: lines}
        return Heartbeat(rank, lines, "rank {}".format, lambda *end: self.ends[rank].put(end))

    def socket(self, rank):
        return self.lines[rank][0].connection

    def dies(self, rank):
        self.beats[rank]._closing = True  # who is dead tells nobody what it sees
        for line in self.lines[rank]:
            with contextlib.suppress(OSError):  # the other one is gone already
                line.connection.shutdown(socket.SHUT_RDWR)

    def told(self, rank):
        return self.ends[rank].get(timeout=PATIENCE)


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(_heartbeat, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(_heartbeat, "SILENT_SECONDS", 0.5)


def eventually(condition):
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("dead", [1, 2])
def test_all_are_told_of_a_death(dead):
    star = Star(4)
    star.dies(dead)
    for rank in {0, 1, 2, 3} - {dead}:
        assert star.told(rank) == (f"rank {dead} has died.", EXIT_NODE_LOST)


def test_death_of_the_first_is_seen_by_all():
    star = Star(3)
    star.dies(0)
    assert star.told(1) == star.told(2) == ("rank 0 has died.", EXIT_NODE_LOST)


def test_who_is_outlived_ends_nobody_but_the_first_cannot_be():
    star, died = Star(4), queue.Queue()
    star.beats[0].outlive(died.put, silence=False)
    star.dies(2)
    assert died.get(timeout=PATIENCE) == 2
    assert "it has no heartbeat" in star.beats[0].states(frozenset({2}))
    star.beats[3].tell("the reason", 7)
    assert star.told(0) == star.told(1) == ("the reason", 7)
    star.dies(0)
    assert star.told(1) == ("rank 0 has died.", EXIT_NODE_LOST)


def test_long_silence_of_who_is_outlived_ends_nobody(fast, monkeypatch):
    monkeypatch.setattr(_heartbeat, "LOST_SECONDS", 0.6)
    (ours, _theirs), ends, died = socket.socketpair(), queue.Queue(), queue.Queue()
    first = Heartbeat(0, [Line(ours, 1)], "rank {}".format, lambda *end: ends.put(end))
    first.outlive(died.put, silence=True)
    eventually(lambda: first.silent() == {1})
    time.sleep(0.5)
    assert ends.empty()
    assert died.empty()


def test_long_silence_is_not_outlived_where_only_deaths_are(fast, monkeypatch):
    monkeypatch.setattr(_heartbeat, "LOST_SECONDS", 0.6)
    (ours, _theirs), ends = socket.socketpair(), queue.Queue()
    first = Heartbeat(0, [Line(ours, 1)], "rank {}".format, lambda *end: ends.put(end))
    first.outlive(lambda rank: None, silence=False)
    assert ends.get(timeout=PATIENCE)[1] == EXIT_NODE_LOST


def test_when_the_first_is_outlived_nothing_is_known_of_others():
    star, died = Star(3), queue.Queue()
    star.beats[1].outlive(died.put, silence=False)
    star.dies(0)
    assert died.get(timeout=PATIENCE) == 0
    assert star.beats[1].silent() == {0}
    assert "rank 2 (unknown" in star.beats[1].states(frozenset({2}))


def test_end_is_told_to_all_with_its_status():
    star = Star(3)
    star.beats[2].tell("the reason", 7)
    assert star.told(0) == star.told(1) == ("the reason", 7)


def test_long_reason_is_cut_and_arrives():
    star = Star(2)
    star.beats[1].tell("\u00fc" * LONGEST_BYTES + " at last", 1)
    reason, _ = star.told(0)
    assert reason.endswith(" at last")


def test_who_says_goodbye_has_not_died():
    star = Star(3)
    for rank, line in ((1, star.lines[0][0]), (0, star.lines[2][0])):
        star.beats[rank].close()
        eventually(lambda line=line: line.over)
        star.dies(rank)
        eventually(lambda line=line: line.connection.fileno() == -1)
    assert all(ends.empty() for ends in star.ends.values())


def test_silence_is_noticed_passed_on_and_forgiven(fast):
    pairs = [socket.socketpair() for _ in range(2)]
    ends = queue.Queue()
    heartbeats = [
        Heartbeat(0, [Line(pairs[0][0], 1), Line(pairs[1][0], 2)], str, ends.put),
        Heartbeat(1, [Line(pairs[0][1], 0)], str, ends.put),
    ]
    for heartbeat in heartbeats:
        eventually(lambda heartbeat=heartbeat: heartbeat.silent() == {2})
        assert heartbeat.states(frozenset({2})).startswith("2 (silent")
        assert "(alive" in heartbeat.states(frozenset({0, 2}))
    Heartbeat(2, [Line(pairs[1][1], 0)], str, ends.put)
    for heartbeat in heartbeats:
        eventually(lambda heartbeat=heartbeat: heartbeat.silent() == frozenset())
    assert ends.empty()


def test_long_silence_ends_all(fast, monkeypatch):
    monkeypatch.setattr(_heartbeat, "LOST_SECONDS", 1.0)
    pairs = [socket.socketpair() for _ in range(2)]
    ends = [queue.Queue(), queue.Queue()]
    Heartbeat(0, [Line(pairs[0][0], 1), Line(pairs[1][0], 2)], str, lambda *e: ends[0].put(e))
    Heartbeat(1, [Line(pairs[0][1], 0)], str, lambda *e: ends[1].put(e))
    for told in ends:
        assert told.get(timeout=PATIENCE) == ("nothing was heard from 2 for 1 s.", EXIT_NODE_LOST)


def test_who_has_no_line_is_not_called_alive():
    heartbeat = Heartbeat(0, [], "rank {}".format, lambda *end: None, frozenset({1}))
    assert heartbeat.states(frozenset({1})) == "rank 1 (it has no heartbeat here)"
    assert heartbeat.states(frozenset()) == "the other processes"


@pytest.mark.parametrize("data", STRANGE, ids=range(len(STRANGE)))
def test_what_is_no_message_ends_nothing(data):
    ours, theirs = socket.socketpair()
    ends = queue.Queue()
    Heartbeat(0, [Line(ours, 1)], str, lambda *end: ends.put(end))
    theirs.sendall(data)
    theirs.sendall(b'\n["end", "a message", 3]\n')
    assert ends.get(timeout=PATIENCE) == ("a message", 3)


@given(st.lists(st.binary(max_size=200), max_size=5), st.lists(st.integers(), max_size=3))
def test_message_arrives_after_any_bytes_in_any_pieces(pieces, numbers):
    ours, theirs = socket.socketpair()
    line, messages = Line(ours, 1), []
    message = json.dumps(["beat", numbers]).encode()
    with ours, theirs:
        for piece in [*pieces, b"\n", message[:4], message[4:], b"\n"]:
            theirs.sendall(piece)
            messages += line.read()
        theirs.close()
        messages += line.read()
    assert messages[-1] == ["beat", numbers]
    assert all(isinstance(message, list) for message in messages)
    assert line.closed


def test_line_that_nobody_reads_does_not_block():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = Line(ours, 1)
        for _ in range(2000):
            line.send("end", "x" * 1000, 1)


class Comm:
    """The methods of a communicator that are needed, for threads of one process.

    What the first has broadcast arrives only when it calls MPI again, as with OFI's sockets.
    """

    def __init__(self, rank, barrier, given, called):
        self.rank, self.barrier, self.given, self.called = rank, barrier, given, called

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.barrier.parties

    def allgather(self, value):
        self.given[self.rank] = value
        self.barrier.wait(PATIENCE)
        values = [self.given[rank] for rank in range(self.barrier.parties)]
        self.barrier.wait(PATIENCE)
        return values

    def bcast(self, value):
        received = self.allgather(value)[0]
        assert self.rank == 0 or self.called.wait(PATIENCE)
        return received

    def Iprobe(self):
        self.called.set()


def started(size):
    """Heartbeats by rank, and what each was told to end for."""
    barrier, given, heartbeats, called = threading.Barrier(size), {}, {}, threading.Event()
    ends = {rank: queue.Queue() for rank in range(size)}

    def start(rank):
        heartbeats[rank] = start_heartbeat(
            Comm(rank, barrier, given, called), "rank {}".format, lambda *end: ends[rank].put(end)
        )

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return heartbeats, ends


def test_processes_find_each_other(capsys):
    heartbeats, ends = started(4)
    heartbeats[3].tell("the reason", 5)
    for rank in range(3):
        assert ends[rank].get(timeout=PATIENCE) == ("the reason", 5)
        assert "alive" in heartbeats[rank].states(frozenset({0, 1, 2, 3} - {rank}))
    assert capsys.readouterr().err == ""


def test_who_cannot_connect_is_named_and_not_called_alive(monkeypatch, capsys):
    def not_the_second(hosts, port, secret, rank, seconds):
        return None if rank == 2 else join(hosts, port, secret, rank, seconds)

    monkeypatch.setattr(_heartbeat, "join", not_the_second)
    monkeypatch.setattr(_heartbeat, "_CONNECT_SECONDS", 1.0)
    heartbeats, ends = started(3)
    assert "no heartbeat from rank 2: no connection to rank 0 at port" in capsys.readouterr().err
    assert heartbeats[0].states(frozenset({2})) == "rank 2 (it has no heartbeat here)"
    assert "alive" in heartbeats[1].states(frozenset({0}))
    assert "alive" not in heartbeats[2].states(frozenset({0, 1}))
    heartbeats[1].tell("the reason", 5)
    assert ends[0].get(timeout=PATIENCE) == ("the reason", 5)


def listening():
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, listener.getsockname()[1]


def test_strangers_are_sent_away_and_delay_nobody():
    listener, port = listening()
    secret, other = new_secret(), new_secret()
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
    said = [b"", b"GET / HTTP/1.1\r\n\r\n" * 50, bytes(20), secret.hello, other.hello + bytes(4)]
    for stranger, words in zip(strangers, said, strict=False):
        stranger.sendall(words)
    strangers[-1].close()
    strangers[-2].sendall(secret.hello + (9).to_bytes(4, "big"))  # of ours, but no rank of ours
    joined = {}

    def come(rank):
        joined[rank] = join(["127.0.0.1"], port, secret, rank, PATIENCE)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    admitted = admit(listener, secret, {1, 2}, PATIENCE)
    for thread in threads:
        thread.join()
    assert admitted.keys() == {1, 2}
    for rank, connection in admitted.items():
        assert connection.getpeername() == joined[rank].getsockname()
        connection.close()
        joined[rank].close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    for stranger in strangers:
        stranger.close()


def test_nobody_is_waited_for_longer_than_that():
    listener, _ = listening()
    assert admit(listener, new_secret(), {1}, 0.1) == {}


def test_another_server_at_the_same_port_is_passed_over(monkeypatch):
    stranger = socket.create_server(("127.0.0.2", 0))
    port = stranger.getsockname()[1]
    listener = socket.create_server(("127.0.0.1", port))
    secret = new_secret()
    monkeypatch.setattr("jdaso._sockets._ANSWER_SECONDS", 0.2)
    found = {}
    hosts = ["127.0.0.2", "127.0.0.1"]
    thread = threading.Thread(
        target=lambda: found.update(joined=join(hosts, port, secret, 1, PATIENCE))
    )
    thread.start()
    admitted = admit(listener, secret, {1}, PATIENCE)
    thread.join()
    assert found["joined"].getpeername() == ("127.0.0.1", port)
    for connection in (stranger, found["joined"], *admitted.values()):
        connection.close()


def test_nowhere_to_join():
    listener, port = listening()
    listener.close()
    assert join(["127.0.0.1"], port, new_secret(), 1, 0.3) is None


def test_of_what_a_silent_first_one_passes_on_nothing_is_known():
    heartbeat = Heartbeat(1, [], "rank {}".format, lambda *end: None)
    heartbeat._silent = frozenset({0})
    assert heartbeat.states(frozenset({2})).startswith("rank 2 (unknown, as rank 0 is silent")
    assert "rank 0 (silent" in heartbeat.states(frozenset({0, 2}))


def test_without_a_network_training_goes_on_with_a_warning(monkeypatch, capsys):
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
        heartbeat = start_heartbeat(Comm(rank), "rank {}".format, lambda *end: None)
        assert "no heartbeat" in heartbeat.states(frozenset({1 - rank}))
    assert "no heartbeat from rank 1" in capsys.readouterr().err
