"""The addresses at which other hosts can reach this one, found without configuration."""

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

# From <linux/sockios.h>. The address follows the interface name and the address family.
_SIOCGIFADDR = 0x8915
_REQUEST_BYTES, _ADDRESS = 256, slice(20, 24)
_IPV6_TABLE = Path("/proc/net/if_inet6")


def addresses() -> list[str]:
    """IPv4 and IPv6 addresses of this host, loopback addresses last.

    They are those of its interfaces and of its host name. Link-local addresses are left out,
    because they are valid with the name of an interface of the other host only.

    >>> "127.0.0.1" in addresses()
    True
    """
    found = [*_ipv4_of_interfaces(), *_ipv6_of_interfaces()]
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)]
    parsed = [ipaddress.ip_address(text.partition("%")[0]) for text in [*found, "127.0.0.1", "::1"]]
    usable = [address for address in dict.fromkeys(parsed) if not address.is_link_local]
    usable.sort(key=lambda address: (address.is_loopback, address.version))
    return [str(address) for address in usable]


def listen(backlog: int) -> socket.socket | None:
    """A socket that listens at all addresses of this host; None without a network."""
    for family in (socket.AF_INET6, socket.AF_INET):
        both = family == socket.AF_INET6
        with contextlib.suppress(OSError, ValueError):  # this host has no IPv6
            return socket.create_server(
                ("", 0), family=family, backlog=backlog, dualstack_ipv6=both
            )
    return None


def _ipv4_of_interfaces() -> list[str]:
    found = []
    with (
        contextlib.suppress(OSError),  # no IPv4, or no permission
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket,
    ):
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack(f"{_REQUEST_BYTES}s", name.encode())
                reply = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(reply[_ADDRESS]))
    return found


def _ipv6_of_interfaces() -> list[str]:
    with contextlib.suppress(OSError, ValueError):  # no IPv6
        lines = _IPV6_TABLE.read_text().splitlines()
        return [str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))) for line in lines]
    return []
