"""Exchanges in flight are compared with the state before they are posted again."""

import jax.numpy as jnp
import numpy as np
import pytest

import jdaso
from jdaso.checkpoint.node_part import check_leaves, exchanges_in_flight
from jdaso.core.exchange import HEADER_SIZE, PostedExchange, SentLeaf

KEY = (0, 7)
SENT = [SentLeaf("w", (2, 3), np.dtype("float32")), SentLeaf("b", (3,), np.dtype("float16"))]


def check(*leaves):
    header, bits = np.zeros(HEADER_SIZE, np.float32), (0,) * len(leaves)
    posted = {KEY: PostedExchange(5, header, list(leaves), bits)}
    check_leaves([(KEY, SENT)], posted, "the checkpoint")


@pytest.mark.parametrize("wire", ["float32", jnp.bfloat16, "float16"])
def test_leaves_of_the_same_shapes_may_be_on_any_wire(wire):
    check(np.ones((2, 3), wire), np.ones(3, "float16"))


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ([np.ones((2, 3), "f4")], "has 1 leaves, the state sends 2"),
        (
            [np.ones((3, 2), "f4"), np.ones(3, "f2")],
            r"has w as float32\(3, 2\), the state sends float32\(2, 3\)",
        ),
        (
            [np.ones((2, 3), "f4"), np.ones(3, "i4")],
            r"has b as int32\(3,\), the state sends float16\(3,\)",
        ),
    ],
)
def test_other_leaves_are_named(leaves, message):
    with pytest.raises(ValueError, match=f"the checkpoint does not fit .* exchange 7.*{message}"):
        check(*leaves)


def test_an_exchange_with_a_center_is_refused():
    state = jdaso.dasgd(jdaso.single_exchange(), 4, 3).init({"w": jnp.ones(3)})
    for posted in (False, True):
        fragment = state.fragments[0]._replace(posted=jnp.array(posted), exchange=jnp.int32(0))
        waiting = state._replace(fragments=(fragment,))
        if posted:
            with pytest.raises(jdaso.JdasoError, match=r"center, .* call jdaso.drain before"):
                exchanges_in_flight(waiting, [])
        else:
            assert exchanges_in_flight(waiting, []) == {}
