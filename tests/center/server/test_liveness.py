"""A silent worker that ends in the end is not gone: MPI can be finalized with it."""

from jdaso.center.server.liveness import Liveness


def test_a_silent_worker_that_ends_is_not_gone():
    liveness = Liveness(2, "rank {}".format, gone_after=5, now=0)
    liveness.message_from(0, now=6)
    assert liveness.update(now=6) == ["rank 1 has been silent for 5 s; the others continue"]
    assert liveness.gone == {1}
    liveness.set_ended(1, failed=True)
    assert liveness.update(now=6) == []
    assert (liveness.gone, liveness.ended, liveness.failed) == (set(), {1}, {1})
    assert liveness.active() == {0}
