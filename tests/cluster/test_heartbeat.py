"""Heartbeats without MPI. Connections are socket pairs, and aborts are recorded."""

import contextlib
import json
import queue
import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdaso.cluster import heartbeat as heartbeat_module
from jdaso.cluster import links as links_module
from jdaso.cluster.ending import EXIT_NODE_LOST, DeathPolicy
from jdaso.cluster.heartbeat import Heartbeat, start_heartbeat
from jdaso.cluster.links import MAX_MESSAGE_BYTES, JsonSocket, Links, connect

TIMEOUT = 20  # seconds, for a busy machine
STAR = np.zeros(4, int)  # all report to rank 0
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


def beating(rank, *peers, tree=STAR, abort=lambda *abort: None, describe="rank {}".format):
    """A heartbeat with some connections, each with the rank of its peer."""
    links = Links(rank, len(tree), describe(rank), [], None)
    for end, peer in peers:
        links._add(JsonSocket(end, peer))
    return Heartbeat(rank, np.array(tree), links, describe, abort)


def dies(heartbeat):
    """What others see of a process that dies. It sends nothing any more."""
    heartbeat._links.closing = True
    if heartbeat._links._acceptor is not None:
        heartbeat._links._acceptor.refuse()
    for peer in list(heartbeat._links.peers):
        with contextlib.suppress(OSError):  # the peer has already closed it
            peer.connection.shutdown(socket.SHUT_RDWR)


class Job:
    """Heartbeats of several processes as threads of this one, and the aborts of each."""

    def __init__(self, tree):
        ends = {rank: [] for rank in range(len(tree))}
        self.aborts = {rank: queue.Queue() for rank in range(len(tree))}
        for rank, parent in enumerate(tree[1:], 1):
            ours, theirs = socket.socketpair()
            ends[parent].append((ours, rank))
            ends[rank].append((theirs, parent))
        self.heartbeats = [
            beating(rank, *peers, tree=tree, abort=self.recorder(rank))
            for rank, peers in ends.items()
        ]

    def peers(self, rank):
        return self.heartbeats[rank]._links.peers

    def recorder(self, rank):
        return lambda *abort: self.aborts[rank].put(abort)

    def dies(self, rank):
        dies(self.heartbeats[rank])

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


def test_rank_0_tolerates_a_death_but_its_own_aborts_the_others():
    star, died = star_of(4), queue.Queue()
    star.heartbeats[0].follow(DeathPolicy(frozenset(), died.put))
    star.dies(2)
    assert died.get(timeout=TIMEOUT) == 2
    assert star.heartbeats[0].states(frozenset({2})) == "rank 2 (has died)"
    star.heartbeats[3].broadcast_abort("the reason", 7)
    assert star.abort(0) == star.abort(1) == ("the reason", 7)
    star.dies(0)
    assert star.abort(1)[0].startswith("rank 0 has died.")


def test_the_death_of_a_needed_rank_aborts_all_although_others_are_tolerated():
    star, died = star_of(4), queue.Queue()
    for heartbeat in star.heartbeats:
        heartbeat.follow(DeathPolicy(frozenset({0}), died.put))
    star.dies(2)
    for _ in (0, 1, 3):
        assert died.get(timeout=TIMEOUT) == 2
    assert all(aborts.empty() for aborts in star.aborts.values())
    star.dies(0)
    for rank in (1, 3):
        assert star.abort(rank)[0].startswith("rank 0 has died.")
    assert died.empty()


@pytest.mark.parametrize("tree", [[0] * 4, [0, 0, 0, 2]])
def test_a_death_aborts_all_if_a_process_that_does_not_notice_it_itself_needs_the_dead_one(tree):
    """All follow a center, and ranks 1 and 2 have an exchange of their own."""
    job, died = Job(tree), queue.Queue()
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
    star, died = star_of(3), queue.Queue()
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
    wait_until(lambda: not second._links.peers)
    if answers:
        assert aborts.get(timeout=TIMEOUT)[1] == EXIT_NODE_LOST
    else:
        time.sleep(0.2)
        assert aborts.empty()


def test_without_rank_0_a_rank_that_does_not_connect_to_another_one_is_silent(fast):
    job, died = Job([0, 0, 0, 1]), queue.Queue()
    job.heartbeats[1].follow(DeathPolicy(frozenset(), died.put))
    job.dies(0)
    assert died.get(timeout=TIMEOUT) == 0
    wait_until(lambda: job.heartbeats[1].silent_ranks() == {2})
    states = job.heartbeats[1].states(frozenset({0, 2}))
    assert states.startswith("rank 0 (has died); rank 2 (silent")


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
    for rank, peer in ((1, star.peers(0)[0]), (0, star.peers(2)[0])):
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
    heartbeat._reports.unconnected = frozenset({1})
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


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=50) | LINES | MESSAGES.map(str.encode), max_size=20))
def test_no_bytes_of_a_peer_stop_a_heartbeat(pieces):
    (ours, theirs), aborts = socket.socketpair(), queue.Queue()
    heartbeat = beating(0, (ours, 1), abort=lambda *abort: aborts.put(abort))
    with theirs:
        theirs.sendall(b"\n".join([*pieces, b'["end", "a message", 3]', b""]))
        while (abort := aborts.get(timeout=TIMEOUT)) != ("a message", 3):
            assert isinstance(abort[0], str)
            assert 0 <= abort[1] < 256
        assert heartbeat.states(frozenset(range(4)))


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
            np.zeros(size, int),
            "rank {}".format,
            lambda *abort: aborts[rank].put(abort),
        )

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    for heartbeat in heartbeats.values():
        wait_until(lambda h=heartbeat: (h._reports._parent is None) == (h._links.parent is None))
    return heartbeats, aborts


@pytest.mark.parametrize(("size", "group"), [(4, 32), (8, 2)])
def test_processes_connect_to_each_other(caplog, monkeypatch, size, group):
    monkeypatch.setattr(links_module, "GROUP", group)
    heartbeats, aborts = started(size)
    assert max(len(heartbeat._links.peers) for heartbeat in heartbeats.values()) <= group + 1
    last, links = size - 1, [heartbeat._links for heartbeat in heartbeats.values()]
    wait_until(lambda: sum(len(each.peers) for each in links) == 2 * last)  # both ends have it
    wait_until(lambda: "unknown" not in heartbeats[last].states(frozenset(range(last))))
    assert heartbeats[last].broadcast_abort("the reason", 5)
    for rank in range(last):
        assert aborts[rank].get(timeout=TIMEOUT) == ("the reason", 5)
        assert "(alive" in heartbeats[rank].states(frozenset(range(size)) - {rank})
    assert caplog.text == ""


def parent_of(heartbeat):
    parent = heartbeat._links.parent
    return parent.rank if parent else None


def all_alive(heartbeat, ranks):
    """Whether all are. On a busy machine, some may be silent or unknown for a while before."""
    states = heartbeat.states(ranks)
    return "(alive" in states and ";" not in states


def test_those_below_a_dead_process_report_to_the_next_one_above_it(fast, monkeypatch, caplog):
    monkeypatch.setattr(links_module, "GROUP", 2)
    heartbeats, aborts = started(9)  # 1 and 2 report to 0, 3 and 4 to 1, 5 and 6 to 2, 7 and 8 to 3
    told, left = {rank: queue.Queue() for rank in heartbeats}, set(heartbeats)
    for rank, heartbeat in heartbeats.items():
        heartbeat.follow(DeathPolicy(frozenset(), told[rank].put))
    # Each with those that report to another process then. At last nobody above them is left.
    deaths = [({1}, {3: 0, 4: 0}), ({7}, {}), ({3}, {8: 0})]
    deaths += [({0, 2}, {4: None, 5: 4, 6: 4, 8: 4}), ({6}, {})]
    for dead, parents in deaths:
        for rank in dead:
            dies(heartbeats[rank])
        left -= dead
        for rank in left:
            assert {told[rank].get(timeout=TIMEOUT) for _ in dead} == dead
        for rank, parent in parents.items():
            wait_until(lambda rank=rank, parent=parent: parent_of(heartbeats[rank]) == parent)
        for rank in left:
            others = frozenset(left) - {rank}
            wait_until(lambda h=heartbeats[rank], o=others: all_alive(h, o))
            assert heartbeats[rank].states(frozenset(dead)).endswith("(has died)")
    assert all(told[rank].empty() and aborts[rank].empty() for rank in left)
    assert caplog.text == ""


@pytest.mark.parametrize("rank", [0, 1, 3, 2**32 - 1])
def test_only_ranks_that_are_not_connected_may_connect(rank, caplog):
    heartbeats, aborts = started(3)
    wait_until(lambda: len(heartbeats[0]._links.peers) == 2)
    contact = heartbeats[1]._links.contacts[0]
    assert connect(*contact[1:], rank, 0.1) is None
    assert len(heartbeats[0]._links.peers) == 2
    assert all(messages.empty() for messages in aborts.values())


def test_one_that_connects_and_sends_nothing_is_closed_soon(fast, monkeypatch):
    monkeypatch.setattr(links_module, "_REPLY_SECONDS", 0.2)
    heartbeats, _ = started(2)
    port = heartbeats[1]._links.contacts[0].port
    with socket.create_connection(("127.0.0.1", port), TIMEOUT) as stranger:
        assert stranger.recv(1) == b""


def test_one_that_can_report_to_nobody_says_so_and_is_not_called_alive(fast, monkeypatch, caplog):
    monkeypatch.setattr(links_module, "GROUP", 1)
    heartbeats, _ = started(4)  # a chain
    monkeypatch.setattr(links_module, "connect", lambda *_: time.sleep(0.01))
    monkeypatch.setattr(links_module, "CONNECT_SECONDS", 0.1)
    for heartbeat in heartbeats.values():
        heartbeat.follow(DeathPolicy(frozenset(), lambda rank: None))
    dies(heartbeats[1])
    wait_until(lambda: heartbeats[0].silent_ranks() == {2})
    assert heartbeats[0].states(frozenset({2, 3})) == (
        "rank 2 (silent: stopped, or its host or link is down); "
        "rank 3 (unknown: no heartbeat connection leads to it)"
    )
    assert heartbeats[2].states(frozenset({0})).startswith("rank 0 (unknown")
    assert "(alive" in heartbeats[2].states(frozenset({3}))
    wait_until(lambda: "rank 2 has no heartbeat: the process to which it" in caplog.text)


def test_a_parent_that_exits_says_who_below_it_has_exited(monkeypatch):
    monkeypatch.setattr(links_module, "GROUP", 1)
    heartbeats, _ = started(4)  # a chain
    heartbeats[3].close()
    wait_until(lambda: 3 in heartbeats[2]._exited)
    for rank in (2, 1):  # before their next reports
        heartbeats[rank].close()
        wait_until(lambda rank=rank: {rank, 3} <= heartbeats[rank - 1]._exited)
    wait_until(lambda: heartbeats[0].exited_ranks() == {1, 2, 3})


def test_one_whose_parent_has_exited_may_have_exited_and_is_not_called_silent(fast, monkeypatch):
    monkeypatch.setattr(links_module, "GROUP", 1)
    heartbeats, _ = started(3)  # a chain
    monkeypatch.setattr(links_module, "connect", lambda *_: time.sleep(0.01))
    heartbeats[1].close()
    unknown = "rank 2 (unknown: no heartbeat connection leads to it)"
    wait_until(lambda: heartbeats[0].states(frozenset({2})) == unknown)
    assert heartbeats[0].silent_ranks() == frozenset()


def test_one_that_reports_to_another_process_than_expected_is_not_called_silent(fast, monkeypatch):
    monkeypatch.setattr(links_module, "GROUP", 2)
    heartbeats, _ = started(9)  # 1 and 2 report to 0, 3 and 4 to 1, 7 and 8 to 3
    contacts = heartbeats[7]._links.contacts
    heartbeats[7]._links.contacts = [contact for contact in contacts if contact.rank == 2]
    for heartbeat in heartbeats.values():
        heartbeat.follow(DeathPolicy(frozenset(), lambda rank: None))
    dies(heartbeats[3])
    wait_until(lambda: parent_of(heartbeats[7]) == 2)
    time.sleep(1)  # so that rank 1, which expects it, has missed it for long
    left = frozenset(heartbeats) - {3}
    for rank in left:
        wait_until(lambda h=heartbeats[rank], o=left - {rank}: all_alive(h, o))
        wait_until(lambda h=heartbeats[rank]: h.silent_ranks() == frozenset())


def test_an_exit_is_told_to_all_and_those_below_report_to_another_one(fast, monkeypatch, caplog):
    monkeypatch.setattr(links_module, "GROUP", 2)
    heartbeats, aborts = started(7)
    for exited, parents in ((5, {}), (1, {3: 0, 4: 0}), (0, {2: None, 3: 2, 4: 2})):
        heartbeats[exited].close()
        left = [rank for rank, heartbeat in heartbeats.items() if not heartbeat._links.closing]
        for rank, parent in parents.items():
            wait_until(lambda rank=rank, parent=parent: parent_of(heartbeats[rank]) == parent)
        for rank in left:
            wait_until(lambda rank=rank, exited=exited: exited in heartbeats[rank].exited_ranks())
            assert heartbeats[rank].states(frozenset({exited})) == f"rank {exited} (has exited)"
            others = frozenset(left) - {rank}
            wait_until(lambda h=heartbeats[rank], o=others: all_alive(h, o))
        if exited == 1:
            dies(heartbeats[1])  # its connections are closed only then
    assert all(messages.empty() for messages in aborts.values())
    dies(heartbeats[3])
    for rank in (2, 4, 6):
        assert aborts[rank].get(timeout=TIMEOUT)[0].startswith("rank 3 has died.")
    assert caplog.text == ""


def test_a_rank_that_cannot_connect_is_named_and_not_called_alive(monkeypatch, caplog):
    def fail_for_rank_2(hosts, port, secret, rank, seconds):
        return None if rank == 2 else connect(hosts, port, secret, rank, seconds)

    monkeypatch.setattr(links_module, "connect", fail_for_rank_2)
    monkeypatch.setattr(links_module, "CONNECT_SECONDS", 1.0)
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


def test_with_a_silent_rank_0_the_states_of_others_are_unknown():
    heartbeat = beating(1)
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
