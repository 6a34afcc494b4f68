"""The centre of all workers: takes frames in the order of their arrival, and answers them.

It knows no network, and what is wrong with a frame is told to who sent it, and to nobody else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jdaso._center import CenterState, Rule
from jdaso.center import _protocol as protocol
from jdaso.center._protocol import Frame
from jdaso.exchange._operations import check_alike
from jdaso.exchange._staging import Spec, Staging

# Frames to be sent, with the worker that each is for.
Answers = list[tuple[int, np.ndarray]]


class Server:
    """The centre, and what it knows of its workers.

    Args:
        num_workers: p in the papers.
        describe: ``(worker) -> text``, names it in errors.
        record: ``(worker, message)``, called for each message that the rule has taken, in order.
    """

    def __init__(
        self,
        num_workers: int,
        describe: Callable[[int], str],
        record: Callable[[int, list[np.ndarray]], None] | None = None,
    ):
        self.rule: Rule | None = None
        self.exchanges = dict.fromkeys(range(num_workers), 0)
        self._describe = describe
        self._record = record
        self._state: CenterState | None = None
        self._outline: list[str] = []
        self._fingerprint = 0
        self._staging = Staging([])
        # Until the centre is founded.
        self._waiting: list[tuple[int, Frame]] = []

    def take(self, worker: int, frame: Frame) -> Answers:
        """Does what a frame says, or refuses it; returns what is to be sent."""
        try:
            if frame.kind == protocol.JOIN:
                return self._join(worker, frame)
            return [(worker, _answer(frame, self._done(worker, frame)))]
        except Exception as error:
            return [(worker, self._refusal(worker, frame, error))]

    def _done(self, worker: int, frame: Frame) -> list[np.ndarray]:
        """The content of the answer."""
        if self._state is None or self.rule is None:
            raise ValueError("there is no centre yet; call center.join(params) first.")
        if frame.kind == protocol.EXCHANGE:
            return self._exchange(worker, frame, self._state, self.rule)
        if frame.kind == protocol.READ:
            self._check_outline(worker, protocol.heard(frame.content))
            return protocol.spoken(self._state)
        if frame.kind == protocol.WRITE:
            self._state = _like(protocol.heard_state(frame.content), self._state)
            return []
        raise ValueError(f"a message of the kind {frame.kind} is unknown.")

    def _exchange(
        self, worker: int, frame: Frame, state: CenterState, rule: Rule
    ) -> list[np.ndarray]:
        expected = sum(vector.nbytes for vector, _ in self._staging.pairs)
        if frame.fingerprint != self._fingerprint or len(frame.content) != expected:
            raise ValueError(
                f"rule or shapes are not those of the centre ({rule.name}; {len(self._outline)} "
                f"leaves, {expected} bytes), got {len(frame.content)} bytes. All workers need "
                "the same model and the same arguments."
            )
        reply = state.center
        if frame.contributes:
            protocol.unfold(frame.content, [vector for vector, _ in self._staging.pairs])
            if not all(np.isfinite(leaf).all() for leaf in self._staging.leaves):
                raise ValueError("its numbers are not finite.")
            with np.errstate(over="ignore", invalid="ignore"):
                moved, reply = rule.update(state, self._staging.leaves)
            if not all(np.isfinite(leaf).all() for leaf in moved.center):
                raise ValueError("with its numbers the centre would not be finite.")
            if self._record is not None:
                self._record(worker, [leaf.copy() for leaf in self._staging.leaves])
            self._state = moved
        self.exchanges[worker] += 1
        for place, leaf in zip(self._staging.sums, reply, strict=True):
            np.copyto(place, leaf)
        return [sums for _, sums in self._staging.pairs]

    def _join(self, worker: int, frame: Frame) -> Answers:
        """The centre as it is now, also to those who were earlier than its founder."""
        rule_name, outline, leaves, saved = protocol.heard(frame.content)
        if self.rule is not None and rule_name != self.rule.name:
            raise ValueError(
                f"it joins as '{rule_name}', the centre is '{self.rule.name}'. All workers need "
                "the same algorithm with the same arguments."
            )
        if self._state is None and (leaves is None or worker != protocol.SERVER):
            self._waiting.append((worker, frame))
            return []
        if self._state is None:
            assert self.rule is not None  # it is the founder's own
            self._outline = outline
            specs = [Spec(leaf.shape, leaf.dtype) for leaf in leaves]
            self._fingerprint = protocol.fingerprint(rule_name, specs)
            self._staging = Staging(specs)
            founded = self.rule.init(leaves)
            self._state = founded if saved is None else _like(protocol.state_of(saved), founded)
        elif saved is not None:
            self._state = _like(protocol.state_of(saved), self._state)
        self._check_outline(worker, outline)
        answers = [(worker, _answer(frame, protocol.spoken(self._state.center)))]
        waiting, self._waiting = self._waiting, []
        for earlier, asked in waiting:
            try:
                answers += self._join(earlier, asked)
            except Exception as error:
                answers.append((earlier, self._refusal(earlier, asked, error)))
        return answers

    def _check_outline(self, worker: int, outline: list[str]) -> None:
        check_alike([self._outline, outline], lambda place: self._describe((0, worker)[place]))

    def _refusal(self, worker: int, frame: Frame, error: Exception) -> np.ndarray:
        text = f"the centre refuses what {self._describe(worker)} sent: {error}"
        return protocol.packed(protocol.REFUSAL, frame.question, protocol.spoken(text))


def _answer(frame: Frame, parts: list[np.ndarray]) -> np.ndarray:
    return protocol.packed(protocol.ANSWER, frame.question, parts)


def _like(new: CenterState, old: CenterState) -> CenterState:
    """The new state, if it has the shapes and dtypes of the old one."""

    def outline(state: Any) -> list[tuple[Any, ...]]:
        return [
            (jax.tree_util.keystr(path), np.shape(leaf), np.asarray(leaf).dtype.name)
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        ]

    if outline(new) != outline(old):
        raise ValueError(
            f"what is written is not like the centre's state: got {outline(new)}, expected "
            f"{outline(old)}."
        )
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new)) or new.clock < 0:
        raise ValueError("what is written must be finite, and its clock at least 0.")
    return new
