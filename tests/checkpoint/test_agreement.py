"""What fails on one process is an error of all. A few of many are quoted."""

import pytest

from jdaso import JdasoError
from jdaso.checkpoint.checkpoints import on_all
from jdaso.cluster import Group


class Comm:
    """Fifty processes, of which the others find what this one finds."""

    def Get_rank(self):
        return 0

    def Get_size(self):
        return 50

    def Ibarrier(self):
        return self

    def Test(self):
        return True

    def allgather(self, value):
        return [value] * 50


def fail():
    raise OSError("the disk is full")


def test_an_error_of_many_processes_is_short():
    group = Group(Comm(), "rank 0", states=str)
    assert on_all(group, "a test", lambda: "result") == "result"
    with pytest.raises(JdasoError) as error:
        on_all(group, "a test", fail)
    assert str(error.value).startswith("rank 0: the disk is full; ")
    assert str(error.value).endswith("; and 42 more processes")
    assert str(error.value).count("the disk is full") == 8
