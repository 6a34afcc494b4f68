"""What an exchange notices about the nodes, without a network."""

from types import SimpleNamespace

import numpy as np
import pytest
from one_process import memory_of

from jdaso.core.exchange import UNCOUNTED
from jdaso.core.types import JdasoError
from jdaso.exchange.host.layout import LeafSpec
from jdaso.exchange.transport.handshake import Watch

TOPOLOGY = SimpleNamespace(rank=0, num_nodes=2)
SAME = "they seem to train on the same data"


def staged(*leaves, names=("['w']", "['b']")):
    leaves = [np.asarray(x, np.float32) for x in leaves]
    memory = memory_of([LeafSpec(x.shape, x.dtype) for x in leaves])
    memory.fill(leaves)
    for place, leaf in zip(memory.sums, leaves, strict=True):
        np.copyto(place, leaf)
    memory.layout = memory.layout._replace(names=names[: len(leaves)])
    return memory


def exchange(watch, number, *of_nodes):
    """An exchange to which each node contributes one leaf, or nothing."""
    memories = [staged([0.0] if x is None else x) for x in of_nodes]
    headers = [np.float32([x is not None]) for x in of_nodes]
    each = zip(headers, memories, strict=True)
    contents = np.array([[watch.content(number, header, one, 0) for header, one in each]])
    watch.compare(number, contents, TOPOLOGY, memories[0].layout)


RUNS = {
    "the same data": ([([1.0], [1.0]), ([2.0], [2.0])], True),
    "a skipped step between": ([([1.0], [1.0]), (None, [7.0]), ([2.0], [2.0])], True),
    "a first step that changes nothing": ([([1.0], [1.0]), ([2.0], [3.0]), ([4.0], [4.0])], False),
    "steps that change nothing": ([([1.0], [1.0])] * 9, False),
    "other data": ([([1.0], [2.0]), ([2.0], [2.0]), ([3.0], [3.0])], False),
    "no node is finite": ([(None, None)] * 3, False),
}


@pytest.mark.parametrize("case", RUNS)
def test_equal_parameters_after_steps_of_their_own_are_said_once(case, caplog):
    exchanges, expected = RUNS[case]
    watch = Watch()
    for number, of_nodes in enumerate(exchanges * 2):
        exchange(watch, number, *of_nodes)
    assert sum(SAME in text for text in caplog.messages) == expected


def test_gradients_and_later_exchanges_are_not_compared(caplog):
    gradients, later = Watch(gradients=True), Watch()
    for number in range(4):
        exchange(gradients, number, [float(number)], [float(number)])
        exchange(later, number + 8, [float(number)], [float(number)])
        exchange(later, UNCOUNTED, [float(number)], [float(number)])
    assert not caplog.messages


def test_parameters_of_all_nodes_that_are_not_finite_are_an_error_with_their_names():
    layout = staged([1.0], [2.0]).layout
    Watch().check_contributions(3, np.float32([-1, 0]), layout)
    Watch().check_contributions(3, np.float32([-1, 1]), layout)
    Watch(gradients=True).check_contributions(3, np.float32([-1, -2]), layout)
    with pytest.raises(JdasoError, match=r"of all nodes .* exchange 3: \['b'\], \['w'\]\. .*mask"):
        Watch().check_contributions(3, np.float32([-2, -1]), layout)


@pytest.mark.parametrize(("finite", "members"), [(True, 0.0), (False, 2.0)])
def test_ten_exchanges_in_a_row_that_average_nothing_are_an_error(finite, members):
    watch, memory = Watch(), staged([1.0])
    for number in [*range(9), *range(10, 19)]:
        watch.check_sums(number, finite, members, memory)
        watch.check_sums(UNCOUNTED, True, 2.0, memory)
        if number == 8:
            watch.check_sums(9, True, 1.0, memory)
    with pytest.raises(JdasoError, match="the last 10 exchanges, up to exchange 19, have averaged"):
        watch.check_sums(19, finite, members, memory)
    gradients = Watch(gradients=True)
    for number in range(20):
        gradients.check_sums(number, finite, members, memory)


def test_a_sum_that_overflows_is_said_with_its_name_ever_more_rarely(caplog):
    watch = Watch(gradients=True)
    for number in range(5):
        watch.check_sums(number, False, 2.0, staged([1.0], [np.inf]))
    assert [text.partition(",")[0] for text in caplog.messages] == [
        f"the sum over the nodes is not finite in exchange {number}: ['b']" for number in (0, 1, 3)
    ]
