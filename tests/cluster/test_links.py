"""Connections of the heartbeat: their tree, addresses, and secret, and how they are made again."""

import secrets
import select
import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdaso.cluster import links as module
from jdaso.cluster.links import (
    Acceptor,
    Contact,
    Links,
    addresses,
    ancestors,
    connect,
    connected,
    listen,
    make_links,
    parents,
    without,
)

TIMEOUT = 20  # seconds, for a busy machine
FIRST = b"\n"


def groups(hosts):
    """For each rank, the smallest rank of its host."""
    return np.array([hosts.index(host) for host in hosts])


@given(st.lists(st.integers(0, 20), min_size=1, max_size=200), st.integers(1, 4))
def test_every_process_reaches_the_first_one_and_has_few_that_report_to_it(hosts, group):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GROUP", group)
        found = parents(groups(hosts))
    assert found[0] == 0
    assert connected(found, 0, [], []).all()
    assert np.bincount(found).max() <= 2 * group + 1  # and rank 0 itself
    leaves = [rank for rank in range(1, len(hosts)) if hosts[found[rank]] != hosts[rank]]
    assert len(leaves) == len(set(hosts)) - 1  # one connection to each other host


@given(st.lists(st.integers(0, 9), min_size=1, max_size=50), st.integers(1, 4), st.data())
def test_without_some_ranks_each_reports_to_the_next_above_or_to_the_lowest(hosts, group, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GROUP", group)
        found = parents(groups(hosts))
    ranks = range(len(hosts))
    gone = data.draw(st.sets(st.sampled_from(ranks), max_size=len(hosts) - 1))
    left = [rank for rank in ranks if rank not in gone]
    repaired = without(found, gone)
    for rank in left:
        above = [other for other in ancestors(found, rank) if other not in gone]
        assert repaired[rank] == (above or left)[0]
        assert repaired[rank] < rank or rank == left[0]
    assert connected(repaired, left[0], [], gone)[left].all()


def test_thousands_of_nodes_are_a_few_levels():
    found = parents(8 * (np.arange(8 * 8192) // 8))
    top, levels = found, 1
    while top.any():
        top, levels = found[top], levels + 1
    assert levels == 4
    assert np.bincount(found).max() <= 2 * module.GROUP + 1


@given(st.lists(st.integers(0, 5), min_size=2, max_size=30), st.data())
def test_connected_are_those_that_a_message_reaches(hosts, data):
    found = parents(groups(hosts))
    ranks = st.integers(0, len(hosts) - 1)
    rank, gone = data.draw(ranks), data.draw(st.sets(ranks, max_size=3))
    unconnected = data.draw(st.sets(ranks, max_size=3))
    reached, new = {rank}, [rank]
    while new:
        new = [
            other
            for other in range(len(hosts))
            for low, high in ((rank, found[rank]), *((r, found[r]) for r in range(len(hosts))))
            if other not in reached
            and low not in unconnected
            and not {low, high} & gone
            and ((low == other and high in reached) or (high == other and low in reached))
        ]
        reached |= set(new)
    assert set(np.flatnonzero(connected(found, rank, unconnected, gone))) == reached


# As in /proc/net/if_inet6: a global, a loopback and a link-local address.
IPV6_TABLE = """\
20010db8000000000000000000000002 04 40 00 82     eth0
00000000000000000000000000000001 01 80 10 80       lo
fe8000000000000000fc00fffe000001 04 40 20 80     eth0
"""


def refuse(*_, **__):
    raise OSError("not here")


# As in /proc/net/fib_trie: a loopback and another address of this host, and two of its network.
IPV4_TABLE = """\
Local:
  +-- 0.0.0.0/0 3 0 5
     +-- 127.0.0.0/31 1 0 0
        |-- 127.0.0.1
           /32 host LOCAL
        |-- 192.0.2.0
           /24 link UNICAST
        |-- 192.0.2.1
           /32 host LOCAL
        |-- 192.0.2.255
           /32 link BROADCAST
"""


def has_tables(monkeypatch, folder, ipv4="", ipv6=""):
    """Lets the files of Linux have these texts; "" stands for no file."""
    for name, text in {"_IPV4_TABLE": ipv4, "_IPV6_TABLE": ipv6}.items():
        monkeypatch.setattr(module, name, folder / name)
        if text:
            (folder / name).write_text(text)


def test_a_host_with_ipv6_alone_has_an_address(monkeypatch, tmp_path):
    has_tables(monkeypatch, tmp_path, ipv6=IPV6_TABLE)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert addresses() == ["2001:db8::2", "127.0.0.1", "::1"]


def test_a_host_with_ipv4_alone_has_an_address(monkeypatch, tmp_path):
    has_tables(monkeypatch, tmp_path, ipv4=IPV4_TABLE)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert addresses() == ["192.0.2.1", "127.0.0.1", "::1"]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_listener_is_reached_by_both_versions(address):
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    with listen() as listener, socket.create_connection((address, listener.getsockname()[1]), 5):
        pass


def test_without_ipv6_the_listener_has_ipv4(monkeypatch):
    create = socket.create_server

    def without_ipv6(*arguments, family=socket.AF_INET, **options):
        return refuse() if family == socket.AF_INET6 else create(*arguments, **options)

    monkeypatch.setattr(socket, "create_server", without_ipv6)
    with listen() as listener:
        assert listener.family == socket.AF_INET


def new_secret():
    return secrets.token_bytes(32)


def listening():
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, listener.getsockname()[1]


def accept(acceptor, ranks, seconds=TIMEOUT):
    """Connections by rank, when all ranks have connected or the time is over."""
    accepted, until = {}, time.monotonic() + seconds
    while accepted.keys() != ranks and time.monotonic() < until:
        select.select([acceptor], [], [], 0.05)
        accepted |= acceptor.accept(lambda rank: rank in ranks)
    return accepted


def connecting(port, secret, rank, found):
    """A thread that connects, and sends the first byte of a message."""

    def run():
        found[rank] = connect(["127.0.0.1"], port, secret, rank, TIMEOUT)
        found[rank].sendall(FIRST)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_unknown_peers_are_closed_and_delay_nobody():
    listener, port = listening()
    secret, other = new_secret(), new_secret()
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
    requests = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n" * 50,
        bytes(20),
        secret[:16],
        other[:16] + (1).to_bytes(4, "big") + bytes(32) + FIRST,
    ]
    for stranger, request in zip(strangers, requests, strict=False):
        stranger.sendall(request)
    strangers[-1].close()
    unknown = bytes(16) + (9).to_bytes(4, "big")  # with a rank of nobody
    strangers[-2].sendall(unknown + FIRST)
    connected, acceptor = {}, Acceptor(listener, secret)
    threads = [connecting(port, secret, rank, connected) for rank in (1, 2)]
    accepted = accept(acceptor, {1, 2})
    for thread in threads:
        thread.join()
    assert accepted.keys() == {1, 2}
    for rank, connection in accepted.items():
        assert connection.getpeername() == connected[rank].getsockname()
        connection.close()
        connected[rank].close()
    acceptor.refuse()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    acceptor.close()
    for stranger in strangers:
        stranger.close()


class Comm:
    """The communicator of one of two processes, whose places are known."""

    def __init__(self, rank, secret, places):
        self.rank, self.secret, self.places = rank, secret, places

    def Get_rank(self):
        return self.rank

    def bcast(self, own):
        return self.secret

    def allgather(self, own):
        self.own = own
        return self.places


def test_the_listener_of_another_rank_is_not_taken_for_that_of_the_parent(monkeypatch):
    monkeypatch.setattr(module, "CONNECT_SECONDS", 0.1)
    secret, tree = new_secret(), np.array([0, 0, 0])
    comm = Comm(1, secret, [([], 0)] * 3)
    other = make_links(comm, tree, "rank 1")
    place = ["127.0.0.1"], comm.own[1]
    links = make_links(Comm(2, secret, [place] * 3), tree, "rank 2")  # 0 has the port of 1
    of_first, of_second = links.contacts
    assert connect(*of_first[1:], rank=2, seconds=0.3) is None

    found = []
    thread = threading.Thread(
        target=lambda: found.append(connect(*of_second[1:], rank=2, seconds=TIMEOUT))
    )
    thread.start()
    while thread.is_alive():
        other.wait(0.05, [])
    assert found[0] is not None
    found[0].close()
    for each in (links, other):
        each.close()


def test_a_stranger_who_says_nothing_does_not_keep_a_peer_from_the_next_address(monkeypatch):
    monkeypatch.setattr(module, "_REPLY_SECONDS", 1000 * TIMEOUT)
    listener, port = listening()
    secret, connected = new_secret(), {}
    acceptor = Acceptor(listener, secret)

    def run():
        connected[1] = connect(["127.0.0.2", "127.0.0.1"], port, secret, 1, TIMEOUT)
        connected[1].sendall(FIRST)

    with socket.create_server(("127.0.0.2", port)):
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert accept(acceptor, {1}).keys() == {1}
        thread.join()
    connected[1].close()
    acceptor.close()


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=40), st.booleans(), st.integers(2, 2**32 - 1))
def test_no_bytes_but_the_secret_and_a_known_rank_connect(data, knows, rank):
    listener, port = listening()
    secret = new_secret()
    acceptor, connected = Acceptor(listener, secret), {}
    request = bytes(16) + rank.to_bytes(4, "big") + FIRST if knows else b""
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(request + data)
        thread = connecting(port, secret, 1, connected)
        accepted = accept(acceptor, {1})
        thread.join()
    assert accepted.keys() == {1}
    for connection in (*connected.values(), *accepted.values()):
        connection.close()
    acceptor.close()


def test_a_peer_without_the_secret_learns_nothing_with_which_it_could_connect():
    listener, port = listening()
    secret = new_secret()
    acceptor = Acceptor(listener, secret)
    for answer in (bytes(32), None):  # None sends the proof of the listener back
        with socket.create_connection(("127.0.0.1", port), TIMEOUT) as stranger:
            stranger.sendall(bytes(16) + (1).to_bytes(4, "big"))
            assert accept(acceptor, {1}, 0.1) == {}
            reply = stranger.recv(100)
            assert len(reply) == 48
            assert secret not in reply
            stranger.sendall((answer or reply[16:]) + FIRST)
            assert accept(acceptor, {1}, 0.1) == {}
            assert stranger.recv(1) == b""  # closed
    acceptor.close()


def test_a_listener_without_the_secret_gets_no_proof():
    stranger, port = listening()
    found = []
    thread = threading.Thread(
        target=lambda: found.append(connect(["127.0.0.1"], port, new_secret(), 1, 0.3))
    )
    thread.start()
    connection, _ = stranger.accept()
    connection.sendall(bytes(48))
    heard = b""
    while received := connection.recv(100):
        heard += received
    assert len(heard) == 20  # a challenge and a rank
    stranger.close()
    thread.join()
    connection.close()
    assert found == [None]


def test_a_peer_that_gives_up_before_its_first_message_is_no_peer(monkeypatch):
    monkeypatch.setattr(module, "_REPLY_SECONDS", 0.2)
    listener, port = listening()
    secret = new_secret()
    acceptor = Acceptor(listener, secret)
    left = socket.create_connection(("127.0.0.1", port))
    left.sendall(bytes(16) + (1).to_bytes(4, "big"))
    assert accept(acceptor, {1}, 0.1) == {}
    assert len(left.recv(100)) == 48
    left.close()
    silent = socket.create_connection(("127.0.0.1", port))
    assert accept(acceptor, {1}, 0.5) == {}
    assert silent.recv(1) == b""  # closed
    silent.close()
    acceptor.close()


def test_the_oldest_of_too_many_that_send_nothing_are_closed(monkeypatch):
    monkeypatch.setattr(module, "_MOST_PENDING", 3)
    listener, port = listening()
    secret = new_secret()
    acceptor, connected = Acceptor(listener, secret), {}
    strangers = [socket.create_connection(("127.0.0.1", port), TIMEOUT) for _ in range(9)]
    thread = connecting(port, secret, 1, connected)
    accepted = accept(acceptor, {1})
    thread.join()
    for stranger in strangers[:6]:
        assert stranger.recv(1) == b""  # closed
    strangers[-1].setblocking(False)
    with pytest.raises(BlockingIOError):
        strangers[-1].recv(1)
    for connection in (*strangers, *accepted.values(), *connected.values()):
        connection.close()
    acceptor.close()


def test_another_server_at_the_same_port_is_skipped(monkeypatch):
    stranger = socket.create_server(("127.0.0.2", 0))
    port = stranger.getsockname()[1]
    listener = socket.create_server(("127.0.0.1", port))
    secret = new_secret()
    monkeypatch.setattr(module, "_REPLY_SECONDS", 0.2)
    found = {}
    hosts = ["127.0.0.2", "127.0.0.1"]
    thread = threading.Thread(
        target=lambda: found.update(connection=connect(hosts, port, secret, 1, TIMEOUT))
    )
    thread.start()
    acceptor = Acceptor(listener, secret)
    while thread.is_alive():
        select.select([acceptor], [], [], 0.05)
        assert acceptor.accept(lambda rank: True) == {}
    assert found["connection"].getpeername() == ("127.0.0.1", port)
    found["connection"].sendall(FIRST)
    accepted = accept(acceptor, {1})
    for connection in (stranger, found["connection"], *accepted.values()):
        connection.close()
    acceptor.close()


def test_connecting_times_out():
    listener, port = listening()
    listener.close()
    assert connect(["127.0.0.1"], port, new_secret(), 1, 0.3) is None


def test_a_search_that_cannot_have_a_thread_is_tried_again(monkeypatch):
    """Otherwise all processes would wait for the first connection of this one."""
    starts = []

    def refuse(thread):
        starts.append(thread.name)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    links = Links(1, 2, "rank 1", [Contact(0, ["127.0.0.1"], 1, "secret")], None)
    assert links.settled.is_set()
    assert links.parent is None
    links.search(gone=())
    assert len(starts) == 2
