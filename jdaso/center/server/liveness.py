"""Which workers are active, and which have ended, died, or been silent for too long."""

from collections.abc import Callable


class Liveness:
    """The state of each worker, from its messages and its exit.

    A worker counts as gone after ``gone_after`` seconds of silence. Times are those of any clock.

    >>> liveness = Liveness(2, "rank {}".format, gone_after=5, now=0)
    >>> liveness.message_from(0, now=4); liveness.update(now=6)
    ['rank 1 has been silent for 5 s; the others continue']
    >>> liveness.message_from(1, now=7); liveness.update(now=8)
    ['rank 1 is back']
    >>> liveness.set_ended(0); liveness.set_died(1); liveness.update(now=9)
    ['rank 1 has died; the others continue']
    >>> liveness.active()
    frozenset()
    """

    def __init__(self, workers: int, describe: Callable[[int], str], gone_after: float, now: float):
        self.ended: set[int] = set()
        self.failed: set[int] = set()
        self.gone: set[int] = set()
        self._died: set[int] = set()
        self._describe = describe
        self._gone_after = gone_after
        self._last_message = dict.fromkeys(range(workers), now)

    def message_from(self, worker: int, now: float) -> None:
        self._last_message[worker] = now

    def set_ended(self, worker: int, failed: bool = False) -> None:
        """Records that a worker has ended by itself, normally or by an exception (``failed``)."""
        self.ended.add(worker)
        self.failed |= {worker} if failed else set()
        self.gone.discard(worker)

    def set_died(self, worker: int) -> None:
        """Records that a worker has died; called by any thread."""
        self._died.add(worker)

    def update(self, now: float) -> list[str]:
        """Updates which workers are gone, and returns descriptions of the changes."""
        changes = []
        for worker in sorted(self._last_message.keys() - self.ended):
            died, silent = worker in self._died, now - self._last_message[worker] > self._gone_after
            if (died or silent) and worker not in self.gone:
                self.gone.add(worker)
                how = "died" if died else f"been silent for {self._gone_after:g} s"
                changes.append(f"{self._describe(worker)} has {how}; the others continue")
            elif not (died or silent) and worker in self.gone:
                self.gone.remove(worker)
                changes.append(f"{self._describe(worker)} is back")
        return changes

    def active(self) -> frozenset[int]:
        """The workers that have neither ended nor gone."""
        return frozenset(self._last_message) - self.ended - self.gone
