"""Rates and delays of links: their notation, and the theoretical times of messages."""

from __future__ import annotations

import re

RATES = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
DELAYS = {"s": 1, "ms": 1e-3, "us": 1e-6}

# A full Ethernet frame carries 1448 bytes of data: 1500 bytes minus the headers of IP and TCP with
# time stamps. On the link it takes 1514 bytes.
PAYLOAD, FRAME = 1448, 1514
HEADERS = 66


def parse_rate(text: str) -> float:
    """The bits per second of "200mbit" or "1.5gbit". "0" means no limit."""
    return _parse(text, RATES, "a rate such as 200mbit or 1gbit")


def parse_delay(text: str) -> float:
    """The seconds of "1ms" or "200us". "0" means no delay."""
    return _parse(text, DELAYS, "a delay such as 1ms or 200us")


def _parse(text: str, units: dict[str, float], wanted: str) -> float:
    if text == "0":
        return 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text)
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r} is not {wanted}; 0 means none.")
    return float(match[1]) * units[match[2]]


def goodput(rate: float) -> float:
    """The bits per second of data over TCP on a link of this rate."""
    return rate * PAYLOAD / FRAME


def round_trip_seconds(rate: float, delay: float) -> float:
    """The time of one byte and its answer: twice the delay and the transmission time."""
    transmission = (HEADERS + 1) * 8 / rate if rate else 0.0
    return 2 * (delay + transmission)


def all_reduce_bytes(size: int, nodes: int) -> float:
    """The bytes that each node must send and receive for an all-reduce of ``size`` bytes."""
    return 2 * (nodes - 1) / nodes * size


def all_reduce_seconds(size: int, nodes: int, rate: float) -> float:
    """The shortest time of an all-reduce without delay, by a ring or by halving and doubling."""
    return all_reduce_bytes(size, nodes) * 8 / goodput(rate) if rate else 0.0
