"""The links of the lab in numbers: rates and delays as people write them, and what to expect."""

from __future__ import annotations

import re

RATES = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
DELAYS = {"s": 1, "ms": 1e-3, "us": 1e-6}

# A full Ethernet frame carries 1448 bytes of a program's data: 1500 less the headers of IP and
# TCP, the latter with time stamps. On the link it counts 1514.
PAYLOAD, FRAME = 1448, 1514
HEADERS = 66


def parse_rate(text: str) -> float:
    """Bits per second of "200mbit" or "1.5gbit"; "0" is a link without a limit."""
    return _parse(text, RATES, "a rate such as 200mbit or 1gbit")


def parse_delay(text: str) -> float:
    """Seconds of "1ms" or "200us"; "0" is a link without delay."""
    return _parse(text, DELAYS, "a delay such as 1ms or 200us")


def _parse(text: str, units: dict[str, float], wanted: str) -> float:
    if text == "0":
        return 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text)
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r} is not {wanted}, or 0 for none.")
    return float(match[1]) * units[match[2]]


def goodput(rate: float) -> float:
    """Bits per second of a program's own data over TCP on a link of this rate."""
    return rate * PAYLOAD / FRAME


def round_trip_seconds(rate: float, delay: float) -> float:
    """Of one byte and its answer: the delay and the time on the line, there and back."""
    on_the_line = (HEADERS + 1) * 8 / rate if rate else 0.0
    return 2 * (delay + on_the_line)


def all_reduce_bytes(size: int, nodes: int) -> float:
    """What each node must send, and receive, for the sum of arrays of this many bytes."""
    return 2 * (nodes - 1) / nodes * size


def all_reduce_seconds(size: int, nodes: int, rate: float) -> float:
    """The least time for it, were there no delay: a ring, or halving and doubling."""
    return all_reduce_bytes(size, nodes) * 8 / goodput(rate) if rate else 0.0
