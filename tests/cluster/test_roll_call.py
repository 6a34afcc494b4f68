"""Who has not posted an operation: questions go up a tree of processes, and answers come down."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdaso.cluster.heartbeat import Reports
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


class Tree:
    """Processes that pass their reports on, until nothing is new."""

    def __init__(self, parents):
        self.parents = parents
        self.calls = [RollCall(rank, lambda: None) for rank in range(len(parents))]
        self.reports = [
            Reports(rank, np.array(parents), str, self.calls[rank]) for rank in range(len(parents))
        ]
        self.most = 0

    def peers(self, rank):
        below = [child for child, parent in enumerate(self.parents) if parent == rank != child]
        return below + [self.parents[rank]] * (self.parents[rank] != rank)

    def settle(self, silent=()):
        new = True
        while new:
            new = False
            for rank in set(range(len(self.parents))) - set(silent):
                reports = self.reports[rank]
                seen = frozenset(silent) & frozenset(self.peers(rank))
                parent = self.parents[rank] if rank else None
                for peer, message in reports.messages(parent, self.peers(rank), seen).items():
                    self.reports[peer].receive(rank, message)
                    self.most, new = max(self.most, len(str(message))), True


@pytest.mark.parametrize("parents", [[0, 0, 0, 0, 0], [0, 0, 0, 1, 3], [0, 0, 0, 2, 2]])
def test_all_learn_who_has_not_posted_what_one_waits_for(parents):
    tree = Tree(parents)
    first, *others = [calls.new_series(range(5)) for calls in tree.calls]
    assert others == [first] * 4
    asked = [calls.post(first) for calls in tree.calls[:3]]
    assert asked == [Call(first, 0)] * 3
    other = tree.calls[4].post(tree.calls[4].new_series(range(5)))
    tree.calls[4].wait(other, "a consensus")
    tree.calls[2].ask(asked[0])
    tree.settle()
    late = (Absent(3, False, None, ""), Absent(4, False, other, "a consensus"))
    for calls in tree.calls:
        assert calls.answer(asked[0]) == Answer(5, 2, late)
        # Nothing is known of the other three, which have posted an earlier operation.
        assert calls.answer(Call(first, 7)) == Answer(2, 2, late)
        assert calls.answer(Call(first + 1, 0)) == Answer()
    tree.calls[3].post(first)
    tree.settle()
    assert tree.calls[2].answer(asked[0]).absent == 1
    tree.calls[2].done(asked[0])
    tree.settle()
    assert all(not calls.answers for calls in tree.calls)


@pytest.mark.parametrize("parents", [[0, 0, 0, 0], [0, 0, 1, 2]])
def test_the_series_of_groups_do_not_mix(parents):
    """Each process has a series with all others, then one with its group, and one with all again.

    Both groups create theirs at the same time, as the groups of a parameter server do.
    """
    tree, groups = Tree(parents), [(0, 2), (1, 3)]
    for calls in tree.calls:
        calls.new_series(range(4))
    of_group = [calls.new_series(groups[rank % 2]) for rank, calls in enumerate(tree.calls)]
    of_all = {calls.new_series(range(4)) for calls in tree.calls}
    assert of_group[:2] == of_group[2:]
    assert len({*of_group, *of_all}) == 3
    asked = [tree.calls[rank].post(of_group[rank]) for rank in (0, 1, 2)]
    for rank in (0, 1):
        tree.calls[rank].ask(asked[rank])
    tree.settle()
    late = Absent(3, False, None, "")
    assert tree.calls[0].answer(asked[0]) == Answer(2)
    assert tree.calls[1].answer(asked[1]) == Answer(2, 1, (late,))


def test_silence_below_is_known_above_and_everywhere():
    tree = Tree([0, 0, 0, 1, 3])
    tree.settle(silent={4})
    assert all(reports.silent >= {4} for reports in tree.reports[:4])


def test_silence_above_is_known_below():
    tree = Tree([0, 0, 0, 1, 3])
    tree.settle()
    tree.settle(silent={1})
    assert all(tree.reports[rank].silent == {1} for rank in (0, 2, 3, 4))
    for rank, others in ((0, [2]), (2, [0]), (3, [4]), (4, [3])):
        reached = tree.reports[rank].connected().nonzero()[0]
        assert set(reached) == {rank, *others}


def test_messages_stay_short_with_many_processes():
    tree = Tree([0] * 400)
    for rank, calls in enumerate(tree.calls):
        series = [calls.new_series(range(400)) for _ in range(20)]
        calls.wait(calls.post(series[19]), "x" * 1000)
        assert rank == calls.answer_to(Call(series[0], 0)).names[0].rank
    for each in series:
        tree.calls[1].ask(Call(each, 3))
    tree.settle()
    (call, *_) = tree.calls[1].answers
    answer = tree.calls[1].answers[call]
    assert (answer.answered, answer.absent, len(answer.names)) == (400, 400, MAX_NAMES)
    assert len(tree.calls[1].answers) == MAX_QUESTIONS
    assert tree.most < 1 << 15


SMALL = st.integers(-2, 5)
CALLS = st.lists(st.lists(SMALL | ANYTHING, min_size=2, max_size=2))
ABSENT = st.tuples(SMALL, st.booleans(), SMALL, SMALL, st.text(max_size=3)).map(list)
ANSWERS = st.tuples(SMALL, SMALL, SMALL, SMALL, st.lists(ABSENT | ANYTHING)).map(list)
PAIRS = st.lists(st.lists(SMALL, min_size=2, max_size=2) | ANYTHING)
REPORTS = st.tuples(*[PAIRS] * 4, CALLS, st.lists(ANSWERS | ANYTHING))


@given(st.lists(st.tuples(st.sampled_from([0, 2, 3]), REPORTS.map(list) | ANYTHING), max_size=4))
def test_no_report_of_a_peer_makes_a_process_fail_or_name_a_rank_that_is_none(received):
    calls = RollCall(1, lambda: None)
    reports = Reports(1, np.array([0, 0, 1, 1]), "{:d}".format, calls)
    calls.ask(Call(0, 1))
    valid = [[[2, 2]], [], [], [], [], []]
    for peer, message in [*received, (2, valid)]:
        reports.receive(peer, message)
        sent = reports.messages(0, [0, 2, 3], frozenset())
        json.dumps(sent)
        people = [p for answer in calls.answers.values() for p in answer.names]
        ranks = reports.silent | reports.dead | reports.exited | {p.rank for p in people}
        assert all(type(rank) is int and 0 <= rank < 4 for rank in ranks)
        assert reports.states(frozenset(range(4)))
        assert all(p.name.isprintable() for p in people)
    reports.receive(3, valid)
    reports.repeat()
    assert 2 in decode_ranks(reports.messages(None, [3], frozenset())[3][0])


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
