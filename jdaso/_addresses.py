"""At which addresses a host can be reached, without asking anybody to configure it."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

# Of <linux/sockios.h>; the address lies behind the name and the family.
_SIOCGIFADDR = 0x8915
_REQUEST, _ADDRESS = 256, slice(20, 24)


def addresses() -> list[str]:
    """IPv4 addresses of this host's interfaces and those of its name, loopback last.

    >>> addresses()[-1].startswith("127.")
    True
    """
    found = []
    with (
        contextlib.suppress(OSError),  # no IPv4, or nobody may look
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anything,
    ):
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack(f"{_REQUEST}s", name.encode())
                answer = fcntl.ioctl(anything, _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[_ADDRESS]))
    with contextlib.suppress(OSError):
        of_name = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        found += [str(info[4][0]) for info in of_name]
    unique = [*dict.fromkeys([*found, "127.0.0.1"])]
    return sorted(unique, key=lambda address: address.startswith("127."))
