"""The server without a network: whatever is wrong with a message, it goes on."""

import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdaso._leaves import outline
from jdaso.algorithms._center_rules import averaging_rule, elastic_rule, summing_rule
from jdaso.center import _protocol as protocol
from jdaso.center._protocol import (
    ANSWER,
    EXCHANGE,
    JOIN,
    READ,
    REFUSAL,
    WRITE,
    packed,
    spoken,
    unpacked,
)
from jdaso.center._server import Server
from jdaso.exchange._staging import Spec

PARAMS = {"b": np.float32([1, 2, 3]), "w": np.float32(4)}
LEAVES = [PARAMS["b"], np.asarray(PARAMS["w"])]
SPECS = [Spec(leaf.shape, leaf.dtype) for leaf in LEAVES]
MESSAGE = [np.float32([5, 6, 7]), np.float32([8])]


def ask(server, worker, frame):
    """What the worker gets: kind and content."""
    ((receiver, answer),) = server.take(worker, unpacked(frame))
    assert receiver == worker
    read = unpacked(answer)
    assert read.question == unpacked(frame).question
    return read.kind, read.content


def refusal(server, worker, frame):
    kind, content = ask(server, worker, frame)
    assert kind == REFUSAL
    return protocol.heard(content)


def exchange(rule, message=MESSAGE, **options):
    options = {"fingerprint": protocol.fingerprint(rule.name, SPECS), **options}
    return packed(EXCHANGE, 3, message, **options)


def joining(rule, params=PARAMS, leaves=None):
    return packed(JOIN, 2, spoken((rule.name, outline(params), leaves, None)))


def founded(rule, **options):
    server = Server(3, "rank {}".format, **options)
    server.rule = rule
    kind, _ = ask(server, 0, joining(rule, leaves=LEAVES))
    assert kind == ANSWER
    return server


def state(server):
    kind, content = ask(server, 1, packed(READ, 4, spoken(outline(PARAMS))))
    assert kind == ANSWER
    return protocol.heard_state(content)


def test_an_exchange_is_the_rule():
    rule, log = elastic_rule(0.5), []
    server = founded(rule, record=lambda worker, message: log.append((worker, message)))
    kind, content = ask(server, 1, exchange(rule))
    assert kind == ANSWER
    assert content.view(np.float32).tolist() == [1, 2, 3, 4]  # the old centre
    assert np.concatenate([np.ravel(x) for x in state(server).center]).tolist() == [3, 4, 5, 6]
    assert [(worker, message[0].tolist()) for worker, message in log] == [(1, [5, 6, 7])]
    assert server.exchanges == {0: 0, 1: 1, 2: 0}


def test_a_worker_without_sound_numbers_gets_the_centre_and_changes_nothing():
    rule = averaging_rule()
    server = founded(rule)
    nothing = [np.full(3, np.nan, np.float32), np.zeros(1, np.float32)]
    kind, content = ask(server, 1, exchange(rule, nothing, contributes=False))
    assert (kind, content.view(np.float32).tolist()) == (ANSWER, [1, 2, 3, 4])
    assert int(state(server).clock) == 0


RULE = elastic_rule(0.5)
TEXT = b'{"dtype": "O", "shape": [1]}'
OBJECT = [np.array([len(TEXT)]), np.frombuffer(TEXT, np.uint8), np.zeros(8, np.uint8)]


def written(**fields):
    """A frame that writes another state."""
    return packed(WRITE, 3, spoken(state(founded(RULE))._replace(**fields)))


BAD = {
    "too short": (exchange(RULE, MESSAGE[:1]), "rule or shapes are not those of the centre"),
    "another rule": (exchange(RULE, fingerprint=1), "rule or shapes are not those"),
    "not finite": (exchange(RULE, [np.float32([np.inf, 0, 0]), MESSAGE[1]]), "not finite"),
    "no such kind": (packed(99, 3, MESSAGE), "kind 99 is unknown"),
    "no content": (packed(READ, 3, MESSAGE), "cannot be read"),
    "a pickle": (packed(READ, 3, [np.frombuffer(pickle.dumps(1), np.uint8)]), "cannot be read"),
    "too long": (packed(READ, 3, [*spoken("text"), *MESSAGE]), "16 bytes too many"),
    "an object": (packed(WRITE, 3, OBJECT), "cannot be read"),
    "other parameters": (
        packed(READ, 3, spoken(outline({"b": np.zeros(2)}))),
        r"rank 0 has .*\(3,\), rank 1 has .*\(2,\)",
    ),
    "not finite, written": (
        written(center=[np.full(3, np.nan, np.float32), np.zeros((), np.float32)]),
        "be finite",
    ),
    "a clock below 0, written": (written(clock=np.int32(-1)), "clock at least 0"),
    "other shapes written": (packed(WRITE, 3, spoken(None)), "not like the centre's state"),
    "joins with another shape": (
        joining(RULE, {**PARAMS, "b": np.zeros(2, np.float32)}),
        r"parameters differ: rank 0 has .*\(3,\), rank 1 has .*\(2,\)",
    ),
    "joins with another alpha": (joining(elastic_rule(0.25)), "alpha=0.25.*alpha=0.5"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_message_is_refused_and_changes_nothing(case):
    frame, match = BAD[case]
    server = founded(RULE)
    before = state(server)
    text = refusal(server, 1, frame)
    assert "the centre refuses what rank 1 sent" in text
    assert re.search(match, text), text
    after = state(server)
    assert [x.tolist() for x in before.center] == [x.tolist() for x in after.center]
    assert ask(server, 1, exchange(RULE))[0] == ANSWER


def test_numbers_that_lead_out_of_range_are_refused():
    rule = summing_rule()
    server = founded(rule)
    large = [np.full(3, 3e38, np.float32), np.zeros(1, np.float32)]
    assert ask(server, 1, exchange(rule, large))[0] == ANSWER
    assert "the centre would not be finite" in refusal(server, 2, exchange(rule, large))
    assert np.isfinite(state(server).center[0]).all()
    assert server.exchanges == {0: 0, 1: 1, 2: 0}


@given(kind=st.integers(0, 9), content=st.binary(max_size=60))
def test_any_message_leaves_the_server_alive(kind, content):
    server = founded(RULE)
    ask(server, 1, packed(kind, 3, [np.frombuffer(content, np.uint8)]))
    server.take(2, unpacked(packed(JOIN, 3, [np.frombuffer(content, np.uint8)])))
    assert ask(server, 1, exchange(RULE))[0] == ANSWER


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
def test_any_content_leaves_the_server_alive(content):
    server = founded(RULE)
    for kind in (JOIN, READ, WRITE):
        server.take(1, unpacked(packed(kind, 3, spoken(content))))
    assert ask(server, 1, exchange(RULE))[0] == ANSWER


def test_before_there_is_a_centre_who_joins_waits_and_who_sends_is_refused():
    server = Server(3, "rank {}".format)
    assert server.take(2, unpacked(joining(RULE))) == []
    assert server.take(1, unpacked(joining(elastic_rule(0.1)))) == []
    assert "call center.join" in refusal(server, 1, exchange(RULE))
    server.rule = RULE
    answers = server.take(0, unpacked(joining(RULE, leaves=LEAVES)))
    assert [(worker, unpacked(frame).kind) for worker, frame in answers] == [
        (0, ANSWER),
        (2, ANSWER),
        (1, REFUSAL),
    ]
    assert protocol.heard(unpacked(answers[1][1]).content)[0].tolist() == [1, 2, 3]


def test_what_is_read_can_be_written():
    rule = averaging_rule()
    server = founded(rule)
    ask(server, 1, exchange(rule))
    saved = state(server)
    ask(server, 1, exchange(rule))
    assert ask(server, 2, packed(WRITE, 5, spoken(saved)))[0] == ANSWER
    again = state(server)
    assert int(again.clock) == 1
    assert again.center[0].tolist() == saved.center[0].tolist()
    assert again.average[0].tolist() == saved.average[0].tolist()


@pytest.mark.parametrize("size", [0, 7, 31, 100])
def test_what_is_no_frame_is_none(size):
    with pytest.raises(ValueError, match=f"a message of {size} bytes"):
        unpacked(np.zeros(size, np.uint8))


def test_a_frame_of_another_length_than_it_says_is_none():
    with pytest.raises(ValueError, match="not what its head says"):
        unpacked(packed(EXCHANGE, 1, MESSAGE)[:-1])
