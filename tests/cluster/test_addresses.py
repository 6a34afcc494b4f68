"""Addresses of this host, and a listener that all of them reach."""

import socket

import pytest

from jdaso.cluster import addresses as module
from jdaso.cluster.addresses import addresses, listen

# As in /proc/net/if_inet6: a global, a loopback and a link-local address.
TABLE = """\
20010db8000000000000000000000002 04 40 00 82     eth0
00000000000000000000000000000001 01 80 10 80       lo
fe8000000000000000fc00fffe000001 04 40 20 80     eth0
"""


def refuse(*_, **__):
    raise OSError("not here")


def test_a_host_with_ipv6_alone_has_an_address(monkeypatch, tmp_path):
    table = tmp_path / "if_inet6"
    table.write_text(TABLE)
    monkeypatch.setattr(module, "_IPV6_TABLE", table)
    monkeypatch.setattr(module, "_ipv4_of_interfaces", list)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert addresses() == ["2001:db8::2", "127.0.0.1", "::1"]


def test_a_host_with_ipv4_alone_has_an_address(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_IPV6_TABLE", tmp_path / "none")
    monkeypatch.setattr(module, "_ipv4_of_interfaces", lambda: ["127.0.0.1", "192.0.2.1"])
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert addresses() == ["192.0.2.1", "127.0.0.1", "::1"]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_listener_is_reached_by_both_versions(address):
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    with listen(1) as listener, socket.create_connection((address, listener.getsockname()[1]), 5):
        pass


def test_without_ipv6_the_listener_has_ipv4(monkeypatch):
    create = socket.create_server

    def without_ipv6(*arguments, family=socket.AF_INET, **options):
        return refuse() if family == socket.AF_INET6 else create(*arguments, **options)

    monkeypatch.setattr(socket, "create_server", without_ipv6)
    with listen(1) as listener:
        assert listener.family == socket.AF_INET
