"""Who has not posted an operation: what each process answers, and the answers together."""

from hypothesis import given
from hypothesis import strategies as st

from jdaso.cluster.roll_call import (
    MAX_NAMES,
    MAX_QUESTIONS,
    Absent,
    Answer,
    Call,
    RollCall,
    answers_shape,
    decode,
    decode_ranks,
    earliest,
    encode,
    encode_ranks,
    fits,
    merge,
    ranks_shape,
)

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda children: st.lists(children, max_size=5),
    max_leaves=20,
)


def answers_of(calls):
    """The answers of all processes to what some of them ask."""
    return {
        call: merge([each.answer_to(call) for each in calls])
        for call in earliest(call for each in calls for call in each.asked)
    }


def test_the_series_of_groups_do_not_mix():
    """Each process has a series with all others, then one with its group, and one with all again.

    Both groups create theirs at the same time, as the groups of a parameter server do.
    """
    calls, groups = [RollCall(rank, lambda: None) for rank in range(4)], [(0, 2), (1, 3)]
    for each in calls:
        each.new_series(range(4))
    of_group = [each.new_series(groups[rank % 2]) for rank, each in enumerate(calls)]
    of_all = {each.new_series(range(4)) for each in calls}
    assert of_group[:2] == of_group[2:]
    assert len({*of_group, *of_all}) == 3
    asked = [calls[rank].post(of_group[rank]) for rank in (0, 1, 2)]
    for rank in (0, 1):
        calls[rank].ask(asked[rank])
    late = Absent(3, False, None, "")
    assert answers_of(calls) == {asked[0]: Answer(2), asked[1]: Answer(2, 1, (late,))}


def test_messages_stay_short_with_many_processes():
    calls = [RollCall(rank, lambda: None) for rank in range(400)]
    for rank, each in enumerate(calls):
        series = [each.new_series(range(400)) for _ in range(20)]
        each.wait(each.post(series[19]), "x" * 1000)
        assert rank == each.answer_to(Call(series[0], 0)).names[0].rank
    for each in series:
        calls[1].ask(Call(each, 3))
    answers = answers_of(calls)
    assert len(answers) == MAX_QUESTIONS
    for answer in answers.values():
        assert (answer.answered, answer.absent, len(answer.names)) == (400, 400, MAX_NAMES)
    assert len(str(encode(answers))) < 1 << 15


SMALL = st.integers(-2, 5)
ABSENT = st.tuples(SMALL, st.booleans(), SMALL, SMALL, st.text(max_size=3)).map(list)
ANSWERS = st.tuples(SMALL, SMALL, SMALL, SMALL, st.lists(ABSENT | ANYTHING)).map(list)


@given(st.lists(ANSWERS | ANYTHING, max_size=5))
def test_what_fits_is_decoded(message):
    valid = {Call(1, 2): merge([Answer(1), Answer(1, 1, (Absent(3, True, Call(0, 1), "a"),))])}
    message = [*message, *encode(valid)]
    if fits(message, answers_shape(4)):
        decoded = decode(message)
        assert all(isinstance(answer, Answer) for answer in decoded.values())
        assert len(message) > MAX_QUESTIONS or decoded[Call(1, 2)] == valid[Call(1, 2)]


@given(st.sets(st.integers(0, 30)))
def test_ranks_arrive_as_they_were_sent(ranks):
    pairs = encode_ranks(ranks)
    assert fits(pairs, ranks_shape(31))
    assert fits(pairs, ranks_shape(10)) == (max(ranks, default=0) < 10)
    assert decode_ranks(pairs) == decode_ranks([*pairs, *pairs]) == ranks
