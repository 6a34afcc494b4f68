"""Who of the workers is there: who has ended, died, or been silent for too long."""

from __future__ import annotations

from collections.abc import Callable


class Presence:
    """What the server has heard of each worker, and when.

    Args:
        workers: how many there are.
        describe: ``(worker) -> text``.
        gone_after: seconds of silence after which a worker counts as gone.
        now: seconds of any clock.

    >>> presence = Presence(2, "rank {}".format, gone_after=5, now=0)
    >>> presence.heard(0, now=4); presence.look(now=6)
    ['rank 1 has been silent for 5 s; the others go on']
    >>> presence.heard(1, now=7); presence.look(now=8)
    ['rank 1 is back']
    >>> presence.ends(0); presence.dies(1); presence.look(now=9)
    ['rank 1 has died; the others go on']
    >>> presence.over
    True
    """

    def __init__(self, workers: int, describe: Callable[[int], str], gone_after: float, now: float):
        self.ended: set[int] = set()
        self.failed: set[int] = set()
        self.gone: set[int] = set()
        self._died: set[int] = set()
        self._describe = describe
        self._gone_after = gone_after
        self._last = dict.fromkeys(range(workers), now)

    def heard(self, worker: int, now: float) -> None:
        """A worker has sent something."""
        self._last[worker] = now

    def ends(self, worker: int, failed: bool = False) -> None:
        """A worker has said that it ends, or failed, which is one way to end."""
        self.ended.add(worker)
        self.failed |= {worker} if failed else set()
        self.gone.discard(worker)

    def dies(self, worker: int) -> None:
        """A worker has died; any thread may say so."""
        self._died.add(worker)

    def look(self, now: float) -> list[str]:
        """What has changed, in words."""
        news = []
        for worker in sorted(self._last.keys() - self.ended):
            died, silent = worker in self._died, now - self._last[worker] > self._gone_after
            if (died or silent) and worker not in self.gone:
                self.gone.add(worker)
                how = "died" if died else f"been silent for {self._gone_after:g} s"
                news.append(f"{self._describe(worker)} has {how}; the others go on")
            elif not (died or silent) and worker in self.gone:
                self.gone.remove(worker)
                news.append(f"{self._describe(worker)} is back")
        return news

    @property
    def over(self) -> bool:
        """Whether nobody is left."""
        return self.left() == frozenset()

    def left(self) -> frozenset[int]:
        """Who has neither ended nor gone."""
        return frozenset(self._last) - self.ended - self.gone
