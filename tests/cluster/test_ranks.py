"""Ranks in messages and in texts."""

from hypothesis import given
from hypothesis import strategies as st

from jdaso.cluster.ranks import decode_ranks, encode_ranks


@given(st.sets(st.integers(0, 30)))
def test_ranks_arrive_as_they_were_sent(ranks):
    pairs = encode_ranks(ranks)
    assert decode_ranks(pairs, 31) == ranks
    assert decode_ranks([*pairs, *pairs], 31) == ranks
    assert decode_ranks(pairs, 10) == {r for a, b in pairs if b < 10 for r in range(a, b + 1)}
