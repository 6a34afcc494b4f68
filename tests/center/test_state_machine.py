"""The server without a network: it survives every invalid message."""

import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdaso.center import frames
from jdaso.center.async_easgd import elastic_rule
from jdaso.center.downpour import averaging_rule, summing_rule
from jdaso.center.frames import (
    EXCHANGE,
    JOIN,
    READ,
    REFUSAL,
    REPLY,
    WRITE,
    pack,
    unpack,
)
from jdaso.center.server import CenterServer
from jdaso.core.tree import outline

PARAMS = {"b": np.float32([1, 2, 3]), "w": np.float32(4)}
LEAVES = [PARAMS["b"], np.asarray(PARAMS["w"])]
MESSAGE = [np.float32([5, 6, 7]), np.float32(8)]


def ask(server, worker, frame):
    """Kind and content of the reply to the worker."""
    ((receiver, reply),) = server.handle(worker, unpack(frame))
    assert receiver == worker
    parsed = unpack(reply)
    assert parsed.request == unpack(frame).request
    return parsed.kind, parsed.content()


def refusal(server, worker, frame):
    kind, content = ask(server, worker, frame)
    assert kind == REFUSAL
    return content


def exchange(rule, message=MESSAGE, contributes=True):
    return pack(EXCHANGE, 3, (rule.name, contributes, message))


def joining(rule, params=PARAMS, leaves=None):
    return pack(JOIN, 2, (rule.name, outline(params), leaves, None))


def raw(kind, text=b"", arrays=b""):
    """A frame of any text and bytes."""
    head = frames._HEAD.pack(frames._MAGIC, kind, 3, len(text), len(arrays))
    return np.frombuffer(head + text + arrays, np.uint8)


def server_of(rule, **options):
    server = CenterServer(3, "rank {}".format, **options)
    server.rule = rule
    kind, _ = ask(server, 0, joining(rule, leaves=LEAVES))
    assert kind == REPLY
    return server


def state(server):
    kind, content = ask(server, 1, pack(READ, 4, outline(PARAMS)))
    assert kind == REPLY
    return frames.to_state(content)


def test_an_exchange_is_the_rule():
    rule, log = elastic_rule(0.5), []
    server = server_of(rule, record=lambda worker, message: log.append((worker, message)))
    kind, content = ask(server, 1, exchange(rule))
    assert kind == REPLY
    assert [x.tolist() for x in content] == [[1, 2, 3], 4]  # the old center
    assert np.concatenate([np.ravel(x) for x in state(server).center]).tolist() == [3, 4, 5, 6]
    assert [(worker, message[0].tolist()) for worker, message in log] == [(1, [5, 6, 7])]
    assert server.exchanges == {0: 0, 1: 1, 2: 0}


def test_a_worker_that_does_not_contribute_gets_the_center_and_changes_nothing():
    rule = averaging_rule()
    server = server_of(rule)
    nothing = [np.full(3, np.nan, np.float32), np.float32(0)]
    kind, content = ask(server, 1, exchange(rule, nothing, contributes=False))
    assert (kind, [x.tolist() for x in content]) == (REPLY, [[1, 2, 3], 4])
    assert int(state(server).clock) == 0


RULE = elastic_rule(0.5)
OBJECT = b'{"dtype": "O", "shape": [1]}'


def written(**fields):
    """A frame that writes another state."""
    return pack(WRITE, 3, state(server_of(RULE))._replace(**fields))


BAD = {
    "too short": (exchange(RULE, MESSAGE[:1]), "rule or shapes are not those of the center"),
    "another rule": (
        exchange(elastic_rule(0.25)),
        "rule or shapes are not those of the center: it has elastic, alpha=0.5, got .*0.25",
    ),
    "other shapes": (exchange(RULE, MESSAGE[::-1]), r"it has float32\(3,\), got float32\(\)"),
    "not finite": (exchange(RULE, [np.float32([np.inf, 0, 0]), MESSAGE[1]]), r"in \['\w'\]"),
    "no such kind": (pack(99, 3, MESSAGE), "unknown kind 99"),
    "no content": (raw(READ), "cannot be decoded"),
    "a pickle": (raw(READ, pickle.dumps(1)), "cannot be decoded"),
    "too long": (raw(READ, b'"text"', bytes(16)), "16 bytes too long"),
    "an object": (raw(WRITE, OBJECT, bytes(8)), "cannot be decoded"),
    "an array that is cut": (
        raw(WRITE, OBJECT.replace(b"O", b"float64"), bytes(4)),
        "cannot be decoded",
    ),
    "other parameters": (
        pack(READ, 3, outline({"b": np.zeros(2)})),
        r"rank 0 has .*\(3,\), rank 1 has .*\(2,\)",
    ),
    "not finite, written": (
        written(center=[np.full(3, np.nan, np.float32), np.zeros((), np.float32)]),
        "be finite",
    ),
    "a clock below 0, written": (written(clock=np.int32(-1)), "clock at least 0"),
    "other shapes written": (pack(WRITE, 3, None), "does not contain a state"),
    "joins with another shape": (
        joining(RULE, {**PARAMS, "b": np.zeros(2, np.float32)}),
        r"parameters differ: rank 0 has .*\(3,\), rank 1 has .*\(2,\)",
    ),
    "joins with another alpha": (joining(elastic_rule(0.25)), "alpha=0.25.*alpha=0.5"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_message_is_refused_and_changes_nothing(case):
    frame, match = BAD[case]
    server = server_of(RULE)
    before = state(server)
    text = refusal(server, 1, frame)
    assert "the center refuses a message of rank 1" in text
    assert re.search(match, text), text
    after = state(server)
    assert [x.tolist() for x in before.center] == [x.tolist() for x in after.center]
    assert ask(server, 1, exchange(RULE))[0] == REPLY


def test_an_update_that_overflows_is_refused():
    rule = summing_rule()
    server = server_of(rule)
    large = [np.full(3, 3e38, np.float32), np.float32(0)]
    assert ask(server, 1, exchange(rule, large))[0] == REPLY
    assert "the center would overflow with this worker's message" in refusal(
        server, 2, exchange(rule, large)
    )
    assert np.isfinite(state(server).center[0]).all()
    assert server.exchanges == {0: 0, 1: 1, 2: 0}


@given(kind=st.integers(0, 9), text=st.binary(max_size=60), arrays=st.binary(max_size=20))
def test_the_server_survives_any_message(kind, text, arrays):
    server = server_of(RULE)
    ask(server, 1, raw(kind, text, arrays))
    server.handle(2, unpack(raw(JOIN, text, arrays)))
    assert ask(server, 1, exchange(RULE))[0] == REPLY


SHAPES = st.lists(st.integers(), max_size=3) | st.text(max_size=3)


@given(
    content=st.recursive(
        st.none() | st.integers() | st.text(max_size=3) | st.just(np.float32([1, 2])),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.fixed_dictionaries({"dtype": st.text(max_size=3), "shape": SHAPES})
        ),
        max_leaves=8,
    )
)
def test_the_server_survives_any_content(content):
    server = server_of(RULE)
    for kind in (EXCHANGE, JOIN, READ, WRITE):
        server.handle(1, unpack(pack(kind, 3, content)))
    assert ask(server, 1, exchange(RULE))[0] == REPLY


def test_before_the_center_exists_joins_wait_and_exchanges_are_refused():
    server = CenterServer(3, "rank {}".format)
    assert server.handle(2, unpack(joining(RULE))) == []
    assert server.handle(1, unpack(joining(elastic_rule(0.1)))) == []
    assert "call center.join" in refusal(server, 1, exchange(RULE))
    server.rule = RULE
    replies = server.handle(0, unpack(joining(RULE, leaves=LEAVES)))
    assert [(worker, unpack(frame).kind) for worker, frame in replies] == [
        (0, REPLY),
        (2, REPLY),
        (1, REFUSAL),
    ]
    assert unpack(replies[1][1]).content()[0].tolist() == [1, 2, 3]


def test_a_state_that_was_read_can_be_written():
    rule = averaging_rule()
    server = server_of(rule)
    ask(server, 1, exchange(rule))
    saved = state(server)
    ask(server, 1, exchange(rule))
    assert ask(server, 2, pack(WRITE, 5, saved))[0] == REPLY
    again = state(server)
    assert int(again.clock) == 1
    assert again.center[0].tolist() == saved.center[0].tolist()
    assert again.average[0].tolist() == saved.average[0].tolist()


def test_a_reply_that_mpi_cannot_count_is_refused(monkeypatch):
    rule, params = averaging_rule(), {"b": np.zeros(300, np.float32)}
    server = CenterServer(3, "rank {}".format)
    server.rule = rule
    request = joining(rule, params, leaves=[params["b"]])
    monkeypatch.setattr(frames, "_MOST_BYTES", 1000)
    monkeypatch.setattr(frames, "_has_large_counts", lambda: False)
    assert "bytes, and this MPI sends at most 1000: use" in refusal(server, 0, request)
    with pytest.raises(ValueError, match="would have 1200 bytes"):
        exchange(rule, [params["b"]])
    monkeypatch.setattr(frames, "_has_large_counts", lambda: True)
    assert ask(server, 0, request)[0] == REPLY


@pytest.mark.parametrize("size", [0, 7, 31, 100])
def test_a_message_that_is_no_frame_is_an_error(size):
    with pytest.raises(ValueError, match=f"a message of {size} bytes"):
        unpack(np.zeros(size, np.uint8))


def test_a_frame_with_a_wrong_length_is_an_error():
    with pytest.raises(ValueError, match="does not match its head"):
        unpack(pack(EXCHANGE, 1, MESSAGE)[:-1])
