"""Connections between processes that report to each other."""

import threading

from jdaso.cluster.links import Contact, Links


def test_a_search_that_cannot_have_a_thread_is_tried_again(monkeypatch):
    """Otherwise all processes would wait for the first connection of this one."""
    starts = []

    def refuse(thread):
        starts.append(thread.name)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    links = Links(1, 2, "rank 1", [], [Contact(0, ["127.0.0.1"], 1, "secret")], None)
    assert links.settled.is_set()
    assert links.parent is None
    links.search(gone=())
    assert len(starts) == 2
