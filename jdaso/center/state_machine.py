"""The server's state machine: handles the frames of workers in the order of their arrival.

It does not use the network. An invalid frame is refused and does not affect other workers.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from jdaso.center import frames
from jdaso.center.frames import Frame
from jdaso.center.types import CenterState, ServerRule
from jdaso.exchange.host.layout import LeafSpec, memory_of
from jdaso.exchange.transport.collectives import check_alike

# Frames to send, each with its receiver.
Replies = list[tuple[int, np.ndarray]]
# Called with a worker and its message.
Record = Callable[[int, list[np.ndarray]], None]


class CenterServer:
    """The state of the center, and the number of exchanges of each worker.

    ``describe(worker)`` names a worker in errors. ``record(worker, message)`` is called in order
    for each message that the rule has applied.
    """

    def __init__(
        self, num_workers: int, describe: Callable[[int], str], record: Record | None = None
    ):
        self.rule: ServerRule | None = None
        self.exchanges = dict.fromkeys(range(num_workers), 0)
        self._describe = describe
        self._record = record
        self._state: CenterState | None = None
        self._outline: list[str] = []
        self._fingerprint = 0
        self._memory = memory_of([])
        # Requests to join that arrived before that of node 0.
        self._early_joins: list[tuple[int, Frame]] = []

    def handle(self, worker: int, frame: Frame) -> Replies:
        """Executes or refuses a request, and returns the replies to send."""
        try:
            if frame.kind == frames.JOIN:
                return self._join(worker, frame)
            return [(worker, _reply(frame, self._execute(worker, frame)))]
        except Exception as error:
            text = f"the center refuses a message of {self._describe(worker)}: {error}"
            return [(worker, frames.pack(frames.REFUSAL, frame.request, frames.encode(text)))]

    def _execute(self, worker: int, frame: Frame) -> list[np.ndarray]:
        """Executes any other request than to join, and returns the content of the reply."""
        if self._state is None or self.rule is None:
            raise ValueError("there is no center yet; call center.join(params) first.")
        if frame.kind == frames.EXCHANGE:
            return self._exchange(worker, frame, self._state, self.rule)
        if frame.kind == frames.READ:
            self._check_outline(worker, frames.decode(frame.content))
            return frames.encode(self._state)
        if frame.kind == frames.WRITE:
            self._state = _checked(frames.to_state(frames.decode(frame.content)), self._state)
            return []
        raise ValueError(f"the message is of the unknown kind {frame.kind}.")

    def _exchange(
        self, worker: int, frame: Frame, state: CenterState, rule: ServerRule
    ) -> list[np.ndarray]:
        expected = sum(vector.nbytes for vector, _ in self._memory.pairs)
        size = len(frame.content)
        if frame.fingerprint != self._fingerprint or size != expected:
            same = "the same size, but another rule or other shapes"
            raise ValueError(
                f"rule or shapes are not those of the center ({rule.name}; {len(self._outline)} "
                f"leaves, {expected} bytes), got {same if size == expected else f'{size} bytes'}. "
                "Use the same model and the same arguments on all workers."
            )
        reply = state.center
        if frame.contributes:
            frames.copy_content(frame.content, [vector for vector, _ in self._memory.pairs])
            if lost := self._not_finite(self._memory.leaves):
                raise ValueError(
                    f"it has numbers that are not finite, in {lost}. It was ignored: lower the "
                    "learning rate."
                )
            with np.errstate(over="ignore", invalid="ignore"):
                updated, reply = rule.update(state, self._memory.leaves)
            if lost := self._not_finite(updated.center):
                raise ValueError(
                    f"the center would overflow with this worker's message, in {lost}. The message "
                    "was ignored: lower the learning rate or alpha."
                )
            if self._record is not None:
                self._record(worker, [leaf.copy() for leaf in self._memory.leaves])
            self._state = updated
        self.exchanges[worker] += 1
        for place, leaf in zip(self._memory.sums, reply, strict=True):
            np.copyto(place, leaf)
        return [sums for _, sums in self._memory.pairs]

    def _join(self, worker: int, frame: Frame) -> Replies:
        """Replies with the current center, also to workers that asked before it was created."""
        rule_name, outline, leaves, saved = frames.decode(frame.content)
        if self.rule is not None and rule_name != self.rule.name:
            raise ValueError(
                f"its rule is '{rule_name}', that of the center is '{self.rule.name}'. Use the "
                "same algorithm with the same arguments on all workers."
            )
        if self._state is None and (leaves is None or worker != frames.SERVER):
            self._early_joins.append((worker, frame))
            return []
        if self._state is None:
            assert self.rule is not None  # the request is from the process of the server
            self._outline = outline
            specs = [LeafSpec(leaf.shape, leaf.dtype) for leaf in leaves]
            self._fingerprint = frames.fingerprint(rule_name, specs)
            self._memory = memory_of(specs)
            first = self.rule.init(leaves)
            self._state = first if saved is None else _checked(frames.to_state(saved), first)
        elif saved is not None:
            self._state = _checked(frames.to_state(saved), self._state)
        self._check_outline(worker, outline)
        replies = [(worker, _reply(frame, frames.encode(self._state.center)))]
        early, self._early_joins = self._early_joins, []
        for other, request in early:
            replies += self.handle(other, request)
        return replies

    def _not_finite(self, leaves: Sequence[np.ndarray]) -> str:
        """The names of the leaves that are not finite, or ""."""
        texts = (text.rpartition(": ") for text in self._outline)
        names = [name for name, _, dtype in texts if "float" in dtype]
        lost = [i for i, leaf in enumerate(leaves) if not np.isfinite(leaf).all()]
        return ", ".join(names[i] for i in lost[:4])

    def _check_outline(self, worker: int, outline: list[str]) -> None:
        check_alike([self._outline, outline], lambda index: self._describe((0, worker)[index]))


def _reply(frame: Frame, parts: list[np.ndarray]) -> np.ndarray:
    return frames.pack(frames.REPLY, frame.request, parts)


def _checked(new: CenterState, old: CenterState) -> CenterState:
    """The new state; raises ValueError unless it is finite and has the old shapes and dtypes."""

    def named(state: CenterState) -> dict[str, np.ndarray]:
        leaves = jax.tree_util.tree_leaves_with_path(state)
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}

    given, required = (
        [(name, x.shape, x.dtype.name) for name, x in named(state).items()] for state in (new, old)
    )
    if given != required:
        raise ValueError(
            f"the saved state must have the shapes and dtypes of the center, {required}, got "
            f"{given}. Pass what center.read returned for the same model."
        )
    lost = [name for name, x in named(new).items() if not np.isfinite(x).all()]
    if lost or new.clock < 0:
        raise ValueError(
            f"the saved state must be finite, and its clock at least 0, got clock {new.clock}"
            f"{' and not finite ' * bool(lost)}{', '.join(lost[:4])}."
        )
    return new
