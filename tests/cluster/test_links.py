"""Connections of the heartbeat: addresses, the secret, and strangers."""

import secrets
import select
import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdaso.cluster import links as module
from jdaso.cluster.links import (
    Acceptor,
    addresses,
    connect,
    listen,
)

TIMEOUT = 20  # seconds, for a busy machine
FIRST = b"\n"


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
