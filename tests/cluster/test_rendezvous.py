"""Connections between processes: who does not know the secret is sent away and delays nobody."""

import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdaso.cluster import rendezvous
from jdaso.cluster.rendezvous import Acceptor, connect, new_secret

TIMEOUT = 20  # seconds, for a busy machine
FIRST = b"\n"


def listening():
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, listener.getsockname()[1]


def accept(acceptor, ranks, seconds=TIMEOUT):
    """Connections by rank, when all ranks have connected or the time is over."""
    accepted, until = {}, time.monotonic() + seconds
    while accepted.keys() != ranks and time.monotonic() < until:
        accepted |= acceptor.accept(lambda rank: rank in ranks, 0.05)
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
        secret.request,
        other.request + bytes(4),
    ]
    for stranger, request in zip(strangers, requests, strict=False):
        stranger.sendall(request)
    strangers[-1].close()
    unknown = secret.request + (9).to_bytes(4, "big")  # the secret, with a rank of nobody
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


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=40), st.booleans(), st.integers(2, 2**32 - 1))
def test_no_bytes_but_the_secret_and_a_known_rank_connect(data, knows, rank):
    listener, port = listening()
    secret = new_secret()
    acceptor, connected = Acceptor(listener, secret), {}
    request = secret.request + rank.to_bytes(4, "big") + FIRST if knows else b""
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(request + data)
        thread = connecting(port, secret, 1, connected)
        accepted = accept(acceptor, {1})
        thread.join()
    assert accepted.keys() == {1}
    for connection in (*connected.values(), *accepted.values()):
        connection.close()
    acceptor.close()


def test_a_peer_that_gives_up_before_its_first_message_is_no_peer(monkeypatch):
    monkeypatch.setattr(rendezvous, "_REPLY_SECONDS", 0.2)
    listener, port = listening()
    secret = new_secret()
    acceptor = Acceptor(listener, secret)
    left = socket.create_connection(("127.0.0.1", port))
    left.sendall(secret.request + (1).to_bytes(4, "big"))
    assert accept(acceptor, {1}, 0.1) == {}
    assert left.recv(16) == secret.reply
    left.close()
    silent = socket.create_connection(("127.0.0.1", port))
    assert accept(acceptor, {1}, 0.5) == {}
    assert silent.recv(1) == b""  # closed
    silent.close()
    acceptor.close()


def test_the_oldest_of_too_many_that_send_nothing_are_closed(monkeypatch):
    monkeypatch.setattr(rendezvous, "_MOST_PENDING", 3)
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
    monkeypatch.setattr(rendezvous, "_REPLY_SECONDS", 0.2)
    found = {}
    hosts = ["127.0.0.2", "127.0.0.1"]
    thread = threading.Thread(
        target=lambda: found.update(connection=connect(hosts, port, secret, 1, TIMEOUT))
    )
    thread.start()
    acceptor = Acceptor(listener, secret)
    while thread.is_alive():
        assert acceptor.accept(lambda rank: True, 0.05) == {}
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
