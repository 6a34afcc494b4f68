"""Finds the processes that have not posted a collective operation for which others wait.

MPI's collectives do not tell which process is late. Every process therefore counts the operations
that it has posted, in series that are the same on all processes. A process that waits for an
operation asks with its heartbeats which processes have not posted it. All processes answer, and
the answers are merged on their way, so that messages stay short however many processes there are.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

#: The most processes that a text names.
MAX_NAMES = 8
#: The most questions in a message.
MAX_QUESTIONS = 8
_MAX_TEXT = 100
_MOST_CALLS = 1 << 53
_NOTHING = -1


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
    it. It needs no lock: each series is posted by one thread, and readers copy a dictionary first.

    Args:
        on_question: Called from the thread that has a new question.
    """

    def __init__(self, rank: int, on_question: Callable[[], None]):
        self._rank, self._on_question = rank, on_question
        self._posted: Counter[int] = Counter()
        self._closed: set[int] = set()
        self._asked: dict[Call, None] = {}
        self._awaited: dict[Call, str] = {}
        self._num_series = 0
        #: Answers of all processes, replaced as a whole.
        self.answers: Mapping[Call, Answer] = {}

    def new_series(self) -> int:
        """Returns a new series, which has the same number on all processes.

        All processes must create all series in the same order.
        """
        self._num_series += 1
        return self._num_series - 1

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
        if call not in self._asked:
            self._asked[call] = None
            self._on_question()

    def wait(self, call: Call, name: str) -> None:
        """Records that the program waits for an operation, until it is ``done``."""
        self._awaited[call] = name[:_MAX_TEXT]

    def done(self, call: Call) -> None:
        self._asked.pop(call, None)
        self._awaited.pop(call, None)

    def questions(self) -> list[Call]:
        """Returns the earliest question of each series."""
        return earliest(list(self._asked))

    def answer_to(self, call: Call) -> Answer:
        """Returns the answer of this process alone to a question."""
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


def encode(answers: Mapping[Call, Answer]) -> list[Any]:
    """Returns answers as lists of numbers and texts, for a message."""
    return [
        [*call, answered, absent, [[rank, closed, *(awaited or (_NOTHING, 0)), name]
                                   for rank, closed, awaited, name in names]]
        for call, (answered, absent, names) in answers.items()
    ]  # fmt: skip


def decode(message: list[Any], size: int) -> dict[Call, Answer]:
    """Inverts :func:`encode`, without what is not an answer of ``size`` processes.

    >>> answers = {Call(0, 3): Answer(2, 1, (Absent(1, False, Call(0, 2), "exchange 2"),))}
    >>> decode(encode(answers), 4) == answers, decode([1, [0, 3, "x", 1, []]], 4)
    (True, {})
    """
    answers = {}
    for entry in message[:MAX_QUESTIONS]:
        match entry:
            case [series, number, answered, absent, [*names]] if (
                _is_call(series, number)
                and is_number(answered, size + 1)
                and is_number(absent, size + 1)
            ):
                people = tuple(p for each in names[:MAX_NAMES] if (p := _decode_absent(each, size)))
                answers[Call(series, number)] = Answer(answered, absent, people)
    return answers


def _decode_absent(message: Any, size: int) -> Absent | None:
    match message:
        case [rank, bool(closed), series, number, str(name)] if (
            is_number(rank, size)
            and (series == _NOTHING or _is_call(series, number))
            and name.isprintable()
        ):
            awaited = None if series == _NOTHING else Call(series, number)
            return Absent(rank, closed, awaited, name[:_MAX_TEXT])
    return None


def decode_calls(message: list[Any]) -> list[Call]:
    """Returns the calls in a message of pairs of numbers."""
    found = []
    for entry in message[:MAX_QUESTIONS]:
        match entry:
            case [series, number] if _is_call(series, number):
                found.append(Call(series, number))
    return found


def _is_call(series: Any, number: Any) -> bool:
    return is_number(series, _MOST_CALLS) and is_number(number, _MOST_CALLS)


# Ranks in messages and in texts.


def is_number(value: Any, limit: int) -> bool:
    """Returns whether a part of a message is an integer in [0, limit)."""
    return type(value) is int and 0 <= value < limit


def encode_ranks(ranks: Collection[int]) -> list[list[int]]:
    """Returns ranks as pairs of the first and the last of consecutive ones, for a message.

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


def decode_ranks(message: list[Any], size: int) -> frozenset[int]:
    """Inverts :func:`encode_ranks`, without what is not a pair of ranks in order."""
    ranks = [-1]
    for pair in message:
        match pair:
            case [first, last] if is_number(first, size) and is_number(last, size):
                ranks += range(max(first, ranks[-1] + 1), last + 1)
    return frozenset(ranks[1:])


def name_ranks(ranks: Collection[int], describe: Callable[[int], str]) -> str:
    """Names a few of some ranks, and says how many others there are.

    >>> name_ranks({3, 1}, "rank {}".format), name_ranks(range(20), str)
    ('rank 1, rank 3', '0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    named = ", ".join(map(describe, sorted(ranks)[:MAX_NAMES]))
    return named + f" and {len(ranks) - MAX_NAMES} more" * (len(ranks) > MAX_NAMES)
