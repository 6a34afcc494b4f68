"""Finds the processes that have not posted a collective operation for which others wait.

MPI's collectives do not tell which process is late. Every process therefore counts the operations
that it has posted, in series that are the same on all processes. A process that waits for an
operation asks with its heartbeats which processes have not posted it. All members of the series
answer, and rank 0 merges the answers, so that messages stay short however many processes there are.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

#: The most processes that a text names.
MAX_NAMES = 8
#: The most questions in a message.
MAX_QUESTIONS = 8
_MAX_TEXT = 100
_COUNT_BITS = 20  # of the number of a series


class Call(NamedTuple):
    """An operation, by its series and its place in it, the same on all processes."""

    series: int
    number: int


class Absent(NamedTuple):
    """A process that has not posted an operation.

    Attributes:
        closed: Whether it will never post it.
        awaited: The operation for which its program waits now, or None, and the name of that.
    """

    rank: int
    closed: bool
    awaited: Call | None
    name: str


class Answer(NamedTuple):
    """Counts the processes that have answered, and those that have not posted; names a few."""

    answered: int = 0
    absent: int = 0
    names: tuple[Absent, ...] = ()


def merge(answers: Iterable[Answer]) -> Answer:
    """Returns the answer of several groups of processes together.

    >>> late = Absent(3, False, None, "")
    >>> merge([Answer(2), Answer(1, 1, (late,))])
    Answer(answered=3, absent=1, names=(Absent(rank=3, closed=False, awaited=None, name=''),))
    """
    answered, absent, names = zip(*answers, strict=True)
    by_rank = sorted(sum(names, ()), key=lambda process: process.rank)
    return Answer(sum(answered), sum(absent), tuple(by_rank[:MAX_NAMES]))


class RollCall:
    """Records what this process has posted and waits for, and the answers to its questions.

    The program and the progress threads of exchanges call it, and the thread of the heartbeat reads
    it. It needs no lock: each series is posted by one thread, and readers copy a collection first.

    Args:
        on_question: Called from the thread that has a new question.

    Attributes:
        asked: Operations about which this process asks the others.
        answers: Answers of all processes, replaced as a whole.
    """

    def __init__(self, rank: int, on_question: Callable[[], None]):
        self._rank, self._on_question = rank, on_question
        self._posted: Counter[int] = Counter()
        self._series: set[int] = set()
        self._created: Counter[int] = Counter()  # series, by the checksum of their members
        self._closed: set[int] = set()
        self.asked: set[Call] = set()
        self._awaited: dict[Call, str] = {}
        self.answers: Mapping[Call, Answer] = {}

    def new_series(self, members: Sequence[int]) -> int:
        """Returns a new series, with the same number on all its members, which are ranks.

        All members must create the series that they have together in the same order. Series of
        other members, which some of them create meanwhile, have other numbers.
        """
        group = zlib.crc32(repr([*members]).encode())
        self._created[group] += 1
        series = (group << _COUNT_BITS) + self._created[group]
        self._series.add(series)
        return series

    def post(self, series: int) -> Call:
        """Counts an operation."""
        self._posted[series] += 1
        return Call(series, self._posted[series] - 1)

    def has_posted(self, call: Call) -> bool:
        return self._posted[call.series] > call.number

    def close(self, series: int) -> None:
        """Records that this process will post no more operations in a series."""
        self._closed.add(series)

    def ask(self, call: Call) -> None:
        """Asks all processes whether they have posted an operation, until it is ``done``."""
        if call not in self.asked:
            self.asked.add(call)
            self._on_question()

    def wait(self, call: Call, name: str) -> None:
        """Records that the program waits for an operation, until it is ``done``."""
        self._awaited[call] = name[:_MAX_TEXT]

    def done(self, call: Call) -> None:
        self.asked.discard(call)
        self._awaited.pop(call, None)

    def answer_to(self, call: Call) -> Answer:
        """Returns the answer of this process alone to a question; empty if it is no member."""
        if call.series not in self._series:
            return Answer()
        if self.has_posted(call):
            return Answer(1)
        awaited, name = next(iter(list(self._awaited.items())), (None, ""))
        return Answer(1, 1, (Absent(self._rank, call.series in self._closed, awaited, name),))

    def answer(self, call: Call) -> Answer:
        """Returns the merged answers of all processes so far.

        A process that has not posted an earlier operation of the series has not posted this one, so
        the latest answered operation up to this one is used. The others may have posted this one or
        not, so they do not count as answers.
        """
        answers = self.answers
        known = [c for c in answers if c.series == call.series and c.number <= call.number]
        if not known:
            return Answer()
        answer = answers[max(known)]
        return answer if max(known) == call else answer._replace(answered=answer.absent)


def earliest(calls: Iterable[Call]) -> list[Call]:
    """Returns the earliest call of each series, for at most ``MAX_QUESTIONS`` series.

    >>> earliest([Call(0, 3), Call(0, 2), Call(1, 7)])
    [Call(series=0, number=2), Call(series=1, number=7)]
    """
    numbers: dict[int, int] = {}
    for series, number in calls:
        numbers[series] = min(number, numbers.get(series, number))
    return [Call(*item) for item in sorted(numbers.items())[:MAX_QUESTIONS]]


# What a message of a heartbeat holds: lists of numbers and texts, which a reader checks first.

_NUMBERS, _NOTHING = range(1 << 53), -1
CALL = (_NUMBERS, _NUMBERS)


def fits(value: Any, shape: Any) -> bool:
    """Returns whether a part of a message has a shape.

    The shape of an integer is the range that it is in, and that of a text or a truth value is its
    type. A list with one shape stands for any number of such parts, and a tuple for one of each.

    >>> pairs = [(range(6), str)]
    >>> fits([[0, "a"], [5, "b"]], pairs), fits([[6, "a"]], pairs), fits([[0]], pairs)
    (True, False, False)
    """
    if isinstance(shape, range):
        return type(value) is int and value in shape
    if isinstance(shape, type):
        return type(value) is shape
    if isinstance(shape, tuple):
        same = isinstance(value, list) and len(value) == len(shape)
        return same and all(map(fits, value, shape))
    return isinstance(value, list) and all(fits(each, shape[0]) for each in value)


def answers_shape(size: int) -> Any:
    """Returns the shape of what :func:`encode` makes, for ``size`` processes."""
    absent = (range(size), bool, range(_NOTHING, _NUMBERS.stop), _NUMBERS, str)
    return [(*CALL, range(size + 1), range(size + 1), [absent])]


def encode(answers: Mapping[Call, Answer]) -> list[Any]:
    """Returns answers as lists of numbers and texts.

    >>> answers = {Call(0, 3): Answer(2, 1, (Absent(1, False, Call(0, 2), "exchange 2"),))}
    >>> message = encode(answers)
    >>> fits(message, answers_shape(4)), decode(message) == answers
    (True, True)
    """
    return [
        [*call, answered, absent, [[rank, closed, *(awaited or (_NOTHING, 0)), name]
                                   for rank, closed, awaited, name in names]]
        for call, (answered, absent, names) in answers.items()
    ]  # fmt: skip


def decode(message: list[Any]) -> dict[Call, Answer]:
    """Inverts :func:`encode`. Texts are shortened to what can be printed."""
    answers = {}
    for series, number, answered, absent, people in message[:MAX_QUESTIONS]:
        names = []
        for rank, closed, *awaited, name in people[:MAX_NAMES]:
            text = "".join(filter(str.isprintable, name))[:_MAX_TEXT]
            names.append(
                Absent(rank, closed, Call(*awaited) if awaited[0] != _NOTHING else None, text)
            )
        answers[Call(series, number)] = Answer(answered, absent, tuple(names))
    return answers


def ranks_shape(size: int) -> Any:
    """Returns the shape of what :func:`encode_ranks` makes, for ``size`` processes."""
    return [(range(size), range(size))]


def encode_ranks(ranks: Collection[int]) -> list[list[int]]:
    """Returns ranks as pairs of the first and the last of consecutive ones.

    >>> encode_ranks({1, 2, 3, 7})
    [[1, 3], [7, 7]]
    """
    pairs: list[list[int]] = []
    for rank in sorted(ranks):
        if pairs and pairs[-1][1] == rank - 1:
            pairs[-1][1] = rank
        else:
            pairs.append([rank, rank])
    return pairs


def decode_ranks(message: list[Any]) -> frozenset[int]:
    """Inverts :func:`encode_ranks`, without pairs that are not in order."""
    ranks = [-1]
    for first, last in message:
        ranks += range(max(first, ranks[-1] + 1), last + 1)
    return frozenset(ranks[1:])


def name_ranks(ranks: Collection[int], describe: Callable[[int], str]) -> str:
    """Names a few of some ranks, and says how many others there are.

    >>> name_ranks({3, 1}, "rank {}".format), name_ranks(range(20), str)
    ('rank 1, rank 3', '0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    named = ", ".join(map(describe, sorted(ranks)[:MAX_NAMES]))
    return named + f" and {len(ranks) - MAX_NAMES} more" * (len(ranks) > MAX_NAMES)
