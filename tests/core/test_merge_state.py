"""What a merge computes from what, and its state in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdaso.algorithms.daso import _merge as daso_merge
from jdaso.algorithms.diloco import NESTEROV, _outer_merge
from jdaso.algorithms.easgd import _elastic_merge
from jdaso.core import Merge
from jdaso.core.merge_state import Dependence, dependence, split_state

PARAMS = {"a": jnp.ones((2, 3)), "b": {"c": jnp.ones(4), "n": jnp.arange(2)}}
LEAVES = [PARAMS["a"], PARAMS["b"]["c"]]
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.7))
SUMS_OF_ALL = Merge(
    lambda params: (), lambda x, arrival, state: ([y + arrival.total[0][0, 0] for y in x], state)
)
COUNTED = Merge(lambda params: jnp.zeros(()), lambda x, arrival, state: (x, state + jnp.sum(x[1])))


@pytest.mark.parametrize(
    ("merge", "expected"),
    {
        "daso": (Merge(lambda params: (), daso_merge), Dependence(True, True)),
        "easgd": (_elastic_merge(0.1), Dependence(True, True)),
        "diloco, nesterov": (_outer_merge(NESTEROV, 0.5), Dependence(True, False)),
        "diloco, adam": (_outer_merge(optax.adam(0.1), 0.0), Dependence(True, False)),
        "diloco, clipped": (_outer_merge(CLIPPED, 0.0), Dependence(False, False)),
        "a sum of another leaf": (SUMS_OF_ALL, Dependence(False, True)),
        "a scalar of a leaf": (COUNTED, Dependence(False, True)),
    }.values(),
)
def test_dependence(merge, expected):
    assert dependence(merge, LEAVES, split_state(merge.init, merge.init(PARAMS))) == expected


def test_split_state_finds_all_arrays_and_rebuilds_them():
    merge = _outer_merge(optax.adam(0.1), 0.0)
    state = merge.init(PARAMS)
    split = split_state(merge.init, state)
    # The anchor, and Adam's m and v; integers are not exchanged. Adam's step count is the rest.
    assert [[x.shape for x in each] for each in split.lists] == [[(2, 3), (4,)]] * 3
    assert [x.shape for x in split.rest] == [()]
    rebuilt = split.rebuild([[x + 1 for x in each] for each in split.lists], split.rest)
    assert jax.tree.structure(rebuilt) == jax.tree.structure(state)
    np.testing.assert_array_equal(rebuilt.anchor["b"]["c"], 2 * np.ones(4))


def test_a_part_of_a_state_has_the_leaves_of_the_part():
    merge = _outer_merge(NESTEROV, 0.0)
    split = split_state(merge.init, merge.init(PARAMS))
    of_second = split.rebuild([each[1:] for each in split.lists], split.rest, slice(1, 2))
    assert [x.shape for x in jax.tree.leaves(of_second)] == [(4,)] * 2
    assert isinstance(of_second.anchor["a"], optax.MaskedNode)
