"""Heartbeats without MPI. Connections are socket pairs, and aborts are recorded."""

import contextlib
import itertools
import json
import queue
import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdaso.cluster import heartbeat as heartbeat_module
from jdaso.cluster import links as links_module
from jdaso.cluster.ending import EXIT_NODE_LOST, DeathPolicy
from jdaso.cluster.heartbeat import Heartbeat, start_heartbeat
from jdaso.cluster.links import MAX_MESSAGE_BYTES, JsonSocket, connect
from jdaso.cluster.roll_call import Absent, Answer, Call

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


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Pairs:
    """In place of an Acceptor: connections that have been made already, by rank."""

    def __init__(self, ends):
        self.ends = ends
        self.reader, self.writer = socket.socketpair()
        self.writer.send(b"!")

    def fileno(self):
        return self.reader.fileno()

    def accept(self, allows):
        if self.ends:
            self.reader.recv(1)
        ends, self.ends = self.ends, {}
        assert all(map(allows, ends))
        return ends

    def refuse(self):
        pass


def beating(rank, *ends, size=4, abort=lambda *abort: None, describe="rank {}".format):
    """A heartbeat with some connections, each with the rank of its peer."""
    if rank == 0:
        acceptor = Pairs({peer: end for end, peer in ends})
        heartbeat = Heartbeat(0, size, describe, abort, acceptor)
    else:
        found = itertools.chain((end for end, _ in ends), itertools.repeat(None))
        heartbeat = Heartbeat(rank, size, describe, abort, connect=lambda: next(found))
    wait_until(lambda: len(heartbeat._peers) == min(len(ends), 1 if rank else size))
    return heartbeat


def dies(heartbeat):
    """What others see of a process that dies. It sends nothing any more."""
    heartbeat._closing, heartbeat._abort = True, lambda *_: None
    if heartbeat._acceptor is not None:
        heartbeat._acceptor.refuse()
    for peer in list(heartbeat._peers.values()):
        with contextlib.suppress(OSError):  # the peer has already closed it
            peer.connection.shutdown(socket.SHUT_RDWR)


class Star:
    """Heartbeats of several processes as threads of this one, and the aborts of each."""

    def __init__(self, size):
        pairs = {rank: socket.socketpair() for rank in range(1, size)}
        self.aborts = {rank: queue.Queue() for rank in range(size)}

        def start(rank, *ends):
            abort = self.aborts[rank]
            return beating(rank, *ends, size=size, abort=lambda *given: abort.put(given))

        first = start(0, *((ours, rank) for rank, (ours, _) in pairs.items()))
        self.heartbeats = [first, *(start(rank, (end, 0)) for rank, (_, end) in pairs.items())]

    def dies(self, rank):
        dies(self.heartbeats[rank])

    def abort(self, rank):
        """The reason and the status with which a process was aborted."""
        return self.aborts[rank].get(timeout=TIMEOUT)


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(heartbeat_module, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(heartbeat_module, "SILENT_SECONDS", 0.5)


@pytest.mark.parametrize("dead", [0, 1, 3])
def test_a_death_aborts_all(dead):
    star = Star(4)
    star.dies(dead)
    for rank in set(range(4)) - {dead}:
        reason, status = star.abort(rank)
        assert reason.startswith(f"rank {dead} has died. Look for the cause")
        assert status == EXIT_NODE_LOST


def test_rank_0_tolerates_a_death_of_another_process():
    star, died = Star(4), queue.Queue()
    star.heartbeats[0].follow(DeathPolicy(frozenset(), died.put))
    star.dies(2)
    assert died.get(timeout=TIMEOUT) == 2
    assert star.heartbeats[0].states(frozenset({2})) == "rank 2 (has died)"
    star.heartbeats[3].broadcast_abort("the reason", 7)
    assert star.abort(0) == star.abort(1) == ("the reason", 7)


@pytest.mark.parametrize("needed", [{0}, set()])
def test_the_death_of_rank_0_aborts_all_although_others_are_tolerated(needed):
    star, died = Star(4), queue.Queue()
    for heartbeat in star.heartbeats:
        heartbeat.follow(DeathPolicy(frozenset(needed), died.put))
    star.dies(2)
    for _ in (0, 1, 3):
        assert died.get(timeout=TIMEOUT) == 2
    assert all(aborts.empty() for aborts in star.aborts.values())
    star.dies(0)
    for rank in (1, 3):
        assert star.abort(rank)[0].startswith("rank 0 has died.")
    assert died.empty()


def test_a_death_aborts_all_if_a_process_that_does_not_notice_it_itself_needs_the_dead_one():
    """All follow a center, and ranks 1 and 2 have an exchange of their own."""
    job, died = Star(4), queue.Queue()
    for heartbeat in job.heartbeats:
        heartbeat.follow(DeathPolicy(frozenset({0}), died.put))
    for rank in (1, 2):
        job.heartbeats[rank].follow(DeathPolicy(frozenset({1, 2})))
    job.dies(3)
    for _ in range(3):
        assert died.get(timeout=TIMEOUT) == 3
    assert all(aborts.empty() for aborts in job.aborts.values())
    job.dies(2)
    for rank in (0, 1):
        assert job.abort(rank)[0].startswith("rank 2 has died.")


def test_a_death_aborts_all_when_an_exchange_needs_the_dead_process_later():
    star, died = Star(3), queue.Queue()
    for heartbeat in star.heartbeats:
        heartbeat.follow(DeathPolicy(frozenset({0}), died.put))
    leave = star.heartbeats[1].follow(DeathPolicy(frozenset({1, 2})))
    leave()
    star.dies(2)
    for _ in range(2):
        assert died.get(timeout=TIMEOUT) == 2
    assert all(aborts.empty() for aborts in star.aborts.values())
    star.heartbeats[1].follow(DeathPolicy(frozenset({1, 2})))
    for rank in (0, 1):
        assert star.abort(rank)[0].startswith("rank 2 has died.")


def test_a_long_silence_is_tolerated(fast, monkeypatch):
    monkeypatch.setattr(heartbeat_module, "LOST_SECONDS", 0.6)
    (ours, _theirs), aborts, died = socket.socketpair(), queue.Queue(), queue.Queue()
    first = beating(0, (ours, 1), abort=lambda *abort: aborts.put(abort))
    first.follow(DeathPolicy(frozenset(), died.put))
    wait_until(lambda: first.silent_ranks() == {1})
    time.sleep(0.5)
    assert aborts.empty()
    assert died.empty()


def test_a_process_that_announced_its_exit_is_not_silent(fast, monkeypatch):
    """It may wait for others long after its heartbeat has closed down."""
    monkeypatch.setattr(heartbeat_module, "LOST_SECONDS", 0.6)
    (ours, theirs), aborts = socket.socketpair(), queue.Queue()
    first = beating(0, (ours, 1), abort=lambda *abort: aborts.put(abort))
    JsonSocket(theirs, 0).send("bye")
    time.sleep(1.0)
    assert first.silent_ranks() == set()
    assert aborts.empty()


@pytest.mark.parametrize("answers", [False, True])
def test_a_process_that_closes_a_connection_before_its_first_message_is_not_dead(answers):
    """It has not accepted the connection, perhaps because this process was paused for long."""
    (ours, theirs), aborts = socket.socketpair(), queue.Queue()
    second = beating(1, (ours, 0), abort=lambda *abort: aborts.put(abort))
    if answers:
        JsonSocket(theirs, 1).send("here")
    theirs.close()
    wait_until(lambda: not second._peers)
    if answers:
        assert aborts.get(timeout=TIMEOUT)[1] == EXIT_NODE_LOST
    else:
        time.sleep(0.2)
        assert aborts.empty()
        assert second.states(frozenset({0})).startswith("rank 0 (unknown")


def test_a_process_whose_connection_was_not_accepted_connects_again():
    (first, refused), (second, accepted) = socket.socketpair(), socket.socketpair()
    heartbeat = beating(1, (first, 0), (second, 0))
    refused.close()
    JsonSocket(accepted, 1).send("beat", [[2, 2]], [], [], [], [])
    wait_until(lambda: heartbeat.silent_ranks() == {2})


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
    for rank, other in ((1, 0), (0, 2)):
        peer = star.heartbeats[other]._peers[rank]
        star.heartbeats[rank].close()
        wait_until(lambda peer=peer: peer.exiting)
        star.dies(rank)
        wait_until(lambda peer=peer: peer.connection.fileno() == -1)
    assert all(aborts.empty() for aborts in star.aborts.values())


def test_silence_is_noticed_forwarded_and_over(fast):
    pairs = [socket.socketpair() for _ in range(2)]
    aborts = queue.Queue()
    heartbeats = [
        beating(0, (pairs[0][0], 1), (pairs[1][0], 2), abort=aborts.put),
        beating(1, (pairs[0][1], 0), abort=aborts.put),
    ]
    for heartbeat in heartbeats:
        wait_until(lambda heartbeat=heartbeat: heartbeat.silent_ranks() == {2})
        assert heartbeat.states(frozenset({2})).startswith("rank 2 (silent")
        assert "(alive" in heartbeat.states(frozenset({0, 2}))
    beating(2, (pairs[1][1], 0), abort=aborts.put)
    for heartbeat in heartbeats:
        wait_until(lambda heartbeat=heartbeat: heartbeat.silent_ranks() == frozenset())
    assert aborts.empty()


def test_a_long_silence_aborts_all(fast, monkeypatch):
    monkeypatch.setattr(heartbeat_module, "LOST_SECONDS", 1.0)
    pairs = [socket.socketpair() for _ in range(2)]
    aborts = [queue.Queue(), queue.Queue()]
    beating(0, (pairs[0][0], 1), (pairs[1][0], 2), abort=lambda *e: aborts[0].put(e))
    beating(1, (pairs[0][1], 0), abort=lambda *e: aborts[1].put(e))
    for received in aborts:
        reason, status = received.get(timeout=TIMEOUT)
        assert reason.startswith("rank 2 was silent for 1 s. Check whether")
        assert status == EXIT_NODE_LOST


def test_a_rank_without_a_connection_is_not_called_alive():
    heartbeat = beating(0)
    heartbeat.unconnected = frozenset({1})
    unknown = "rank 1 (unknown: no heartbeat connection leads to it)"
    assert heartbeat.states(frozenset({1})) == unknown
    assert heartbeat.states(frozenset()) == "the other processes"


@pytest.mark.parametrize("data", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_messages_are_ignored(data):
    ours, theirs = socket.socketpair()
    aborts = queue.Queue()
    beating(0, (ours, 1), abort=lambda *abort: aborts.put(abort))
    theirs.sendall(data)
    theirs.sendall(b'\n["end", "a message", 3]\n')
    assert aborts.get(timeout=TIMEOUT) == ("a message", 3)


KINDS = st.sampled_from(["beat", "bye", "end", "here"])
PARTS = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.text(max_size=3),
    lambda parts: st.lists(parts, max_size=5),
    max_leaves=20,
)
LINES = st.lists(PARTS, max_size=5).map(json.dumps).map(str.encode)
MESSAGES = st.tuples(KINDS, st.lists(PARTS, max_size=5)).map(lambda x: json.dumps([x[0], *x[1]]))


@pytest.mark.parametrize("rank", [0, 1])
@settings(max_examples=25, deadline=None)
@given(pieces=st.lists(st.binary(max_size=50) | LINES | MESSAGES.map(str.encode), max_size=20))
def test_no_bytes_of_a_peer_stop_a_heartbeat(rank, pieces):
    (ours, theirs), aborts = socket.socketpair(), queue.Queue()
    heartbeat = beating(rank, (ours, 1 - rank), abort=lambda *abort: aborts.put(abort))
    with theirs:
        theirs.sendall(b"\n".join([*pieces, b'["end", "a message", 3]', b""]))
        while (abort := aborts.get(timeout=TIMEOUT)) != ("a message", 3):
            assert isinstance(abort[0], str)
            assert 0 <= abort[1] < 256
        assert heartbeat.states(frozenset(range(4)))


SMALL = st.integers(-2, 5)
PAIRS = st.lists(st.lists(SMALL, min_size=2, max_size=2) | PARTS)
CALLS = st.lists(st.lists(SMALL | PARTS, min_size=2, max_size=2))
ABSENT = st.tuples(SMALL, st.booleans(), SMALL, SMALL, st.text(max_size=3)).map(list)
ANSWERS = st.tuples(SMALL, SMALL, SMALL, SMALL, st.lists(ABSENT | PARTS)).map(list)
REPORTS = st.tuples(*[PAIRS] * 3, CALLS, st.lists(ANSWERS | PARTS)).map(list)


@settings(max_examples=25, deadline=None)
@given(st.lists(REPORTS | st.lists(PARTS, max_size=6), max_size=4))
def test_no_report_makes_a_process_name_a_rank_that_is_none(reports):
    ours, theirs = socket.socketpair()
    heartbeat = beating(1, (ours, 0))
    valid = [[[2, 2]], [], [], [], [[0, 1, 4, 1, [[3, False, -1, 0, "a"]]]]]
    expected = {Call(0, 1): Answer(4, 1, (Absent(3, False, None, "a"),))}
    with theirs:
        for report in [*reports, valid]:
            JsonSocket(theirs, 1).send("beat", *report)
        wait_until(lambda: heartbeat.roll_call.answers == expected)
        known = heartbeat.silent_ranks() | heartbeat._dead | heartbeat.exited_ranks()
        assert all(type(rank) is int and 0 <= rank < 4 for rank in known)
        assert 2 in heartbeat.silent_ranks()


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
    """A communicator of threads of one process, with the methods that the heartbeat uses."""

    def __init__(self, rank, barrier, given):
        self.rank, self.barrier, self.given = rank, barrier, given

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.barrier.parties

    def bcast(self, value):
        return self.allgather(value)[0]

    def allgather(self, value):
        self.given[self.rank] = value
        self.barrier.wait(TIMEOUT)
        values = [self.given[rank] for rank in range(self.barrier.parties)]
        self.barrier.wait(TIMEOUT)
        return values

    def Iprobe(self):
        self.polled = True


def started(size):
    """Heartbeats by rank, and the aborts of each. All processes are on one host."""
    barrier, given, heartbeats = threading.Barrier(size), {}, {}
    aborts = {rank: queue.Queue() for rank in range(size)}

    def start(rank):
        heartbeats[rank] = start_heartbeat(
            Comm(rank, barrier, given),
            "rank {}".format,
            lambda *abort: aborts[rank].put(abort),
        )

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    connected = sum(heartbeats[rank].is_connected() for rank in range(1, size))
    wait_until(lambda: len(heartbeats[0]._peers) == connected)
    return heartbeats, aborts


def test_processes_connect_to_each_other(caplog):
    heartbeats, aborts = started(6)
    wait_until(lambda: "alive" in heartbeats[5].states(frozenset(range(5))))
    assert heartbeats[5].broadcast_abort("the reason", 5)
    for rank in range(5):
        assert aborts[rank].get(timeout=TIMEOUT) == ("the reason", 5)
        assert "(alive" in heartbeats[rank].states(frozenset(range(6)) - {rank})
    assert caplog.text == ""


def all_alive(heartbeat, ranks):
    """Whether all are. On a busy machine, some may be silent for a while before."""
    states = heartbeat.states(frozenset(ranks))
    return "(alive" in states and ";" not in states


def test_a_death_that_is_tolerated_is_told_to_all(fast, caplog):
    heartbeats, aborts = started(5)
    told, left = {rank: queue.Queue() for rank in heartbeats}, set(heartbeats)
    for rank, heartbeat in heartbeats.items():
        heartbeat.follow(DeathPolicy(frozenset({0}), told[rank].put))
    for dead in ({1}, {2, 4}):
        for rank in dead:
            dies(heartbeats[rank])
        left -= dead
        for rank in left:
            assert {told[rank].get(timeout=TIMEOUT) for _ in dead} == dead
            wait_until(lambda h=heartbeats[rank], o=left - {rank}: all_alive(h, o))
            assert heartbeats[rank].states(frozenset(dead)).endswith("(has died)")
    assert all(told[rank].empty() and aborts[rank].empty() for rank in left)
    assert caplog.text == ""


def test_all_learn_who_has_not_posted_what_one_waits_for(fast):
    calls = [heartbeat.roll_call for _, heartbeat in sorted(started(5)[0].items())]
    first, *others = [each.new_series(range(5)) for each in calls]
    assert others == [first] * 4
    asked = [each.post(first) for each in calls[:3]]
    assert asked == [Call(first, 0)] * 3
    other = calls[4].post(calls[4].new_series(range(5)))
    calls[4].wait(other, "a consensus")
    calls[2].ask(asked[0])
    late = (Absent(3, False, None, ""), Absent(4, False, other, "a consensus"))
    for each in calls:
        wait_until(lambda each=each: each.answer(asked[0]) == Answer(5, 2, late))
        # Nothing is known of the other three, which have posted an earlier operation.
        assert each.answer(Call(first, 7)) == Answer(2, 2, late)
        assert each.answer(Call(first + 1, 0)) == Answer()
    calls[3].post(first)
    wait_until(lambda: calls[2].answer(asked[0]).absent == 1)
    calls[2].done(asked[0])
    wait_until(lambda: not any(each.answers for each in calls))


def contact(first):
    """The port of rank 0, and the secret."""
    return first._acceptor._listener.getsockname()[1], first._acceptor._secret


@pytest.mark.parametrize("rank", [0, 1, 3, 2**32 - 1])
def test_only_ranks_that_are_not_connected_may_connect(rank, caplog):
    heartbeats, aborts = started(3)
    assert connect(["127.0.0.1"], *contact(heartbeats[0]), rank, 0.1) is None
    assert len(heartbeats[0]._peers) == 2
    assert all(messages.empty() for messages in aborts.values())


def test_one_that_connects_and_sends_nothing_is_closed_soon(fast, monkeypatch):
    monkeypatch.setattr(links_module, "_REPLY_SECONDS", 0.2)
    heartbeats, _ = started(2)
    port, _ = contact(heartbeats[0])
    with socket.create_connection(("127.0.0.1", port), TIMEOUT) as stranger:
        assert stranger.recv(1) == b""


def test_an_exit_is_told_to_all(fast, caplog):
    heartbeats, aborts = started(4)
    heartbeats[2].close()
    for rank in (0, 1, 3):
        wait_until(lambda rank=rank: heartbeats[rank].exited_ranks() == {2})
        assert heartbeats[rank].states(frozenset({2})) == "rank 2 (has exited)"
        wait_until(lambda h=heartbeats[rank], o={0, 1, 3} - {rank}: all_alive(h, o))
    dies(heartbeats[2])  # its connection is closed only then
    heartbeats[0].close()
    wait_until(lambda: heartbeats[3].exited_ranks() == {0, 2})
    assert heartbeats[3].states(frozenset({1})).startswith("rank 1 (unknown")
    assert all(messages.empty() for messages in aborts.values())
    assert caplog.text == ""


def test_rank_0_hears_of_a_death_until_the_last_exit(fast):
    heartbeats, aborts = started(4)
    died = queue.Queue()
    for heartbeat in heartbeats.values():
        heartbeat.follow(DeathPolicy(frozenset({0}), died.put))
    closing = threading.Thread(target=heartbeats[0].close_at_exit, daemon=True)
    closing.start()
    for rank in (1, 2, 3):
        wait_until(lambda rank=rank: heartbeats[rank].exited_ranks() == {0})
        assert heartbeats[rank].states(frozenset({0})) == "rank 0 (has exited)"
    dies(heartbeats[1])
    for _ in (0, 2, 3):
        assert died.get(timeout=TIMEOUT) == 1
    assert closing.is_alive()
    for rank in (2, 3):
        threading.Thread(target=heartbeats[rank].close_at_exit, daemon=True).start()
    closing.join(TIMEOUT)
    assert not closing.is_alive()
    assert all(messages.empty() for messages in aborts.values())


def test_those_that_have_said_goodbye_hear_of_the_death_of_rank_0(fast):
    heartbeats, aborts = started(3)
    for rank in (1, 2):
        threading.Thread(target=heartbeats[rank].close_at_exit, daemon=True).start()
        wait_until(lambda rank=rank: rank in heartbeats[0].exited_ranks())
    time.sleep(1)
    assert heartbeats[1].silent_ranks() == frozenset()
    dies(heartbeats[0])
    for rank in (1, 2):
        assert aborts[rank].get(timeout=TIMEOUT)[0].startswith("rank 0 has died.")
        heartbeats[rank]._dead = frozenset({0})  # ends its thread


def test_mpi_makes_progress_while_processes_wait_for_each_other_at_exit(fast):
    """Some MPI libraries send only while they are called."""
    heartbeats, polled = {}, {}
    ours, theirs = socket.socketpair()
    for rank, connections in (
        (0, {"acceptor": Pairs({1: ours})}),
        (1, {"connect": lambda: theirs}),
    ):
        polled[rank] = threading.Event()
        heartbeats[rank] = Heartbeat(
            rank, 2, str, lambda *_: None, **connections, progress=polled[rank].set
        )
        assert heartbeats[rank].settled.wait(TIMEOUT) or rank == 0
    wait_until(lambda: len(heartbeats[0]._peers) == 1)
    first, second = (threading.Thread(target=heartbeats[rank].close_at_exit) for rank in (0, 1))
    first.start()
    assert polled[0].wait(TIMEOUT)
    second.start()
    for thread in (first, second):
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def test_a_rank_that_cannot_connect_is_named_and_not_called_alive(monkeypatch, caplog):
    def fail_for_rank_2(hosts, port, secret, rank, seconds):
        return None if rank == 2 else connect(hosts, port, secret, rank, seconds)

    monkeypatch.setattr(heartbeat_module, "connect", fail_for_rank_2)
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


def test_with_a_silent_rank_0_the_states_of_others_are_unknown(fast):
    ours, theirs = socket.socketpair()
    heartbeat = beating(1, (ours, 0))
    JsonSocket(theirs, 1).send("beat", [[3, 3]], [], [], [], [])
    wait_until(lambda: heartbeat.silent_ranks() == {3})
    wait_until(lambda: heartbeat.silent_ranks() == {0})
    assert heartbeat.states(frozenset({2})).startswith("rank 2 (unknown: no heartbeat connection")
    assert "rank 0 (silent" in heartbeat.states(frozenset({0, 2}))
    JsonSocket(theirs, 1).send("beat", [], [], [], [], [])
    wait_until(lambda: "rank 2 (alive" in heartbeat.states(frozenset({2})))


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
