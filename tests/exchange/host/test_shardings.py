"""What users may pass as shardings, and which names of a parameter are one."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdaso.core.types import ParamsWithMoments
from jdaso.exchange.host.layout import Shardings

PARAMS = {"bias": np.zeros(3, np.float32), "kernel": np.zeros((4, 3), np.float32)}
NAMES = ["['bias']", "['kernel']"]
SPECS = [P(), P("local")]


def shardings(given):
    return Shardings(given, Mesh(jax.devices()[:1], ("local",)))


def registered(given, tree=None):
    found = shardings(given)
    found.register(PARAMS if tree is None else tree)
    return found


@jax.tree_util.register_pytree_node_class
class Module(dict):
    """A tree that can be called, as modules of equinox are."""

    def __call__(self, *arguments):
        raise AssertionError("it is a tree")

    def tree_flatten(self):
        return tuple(self[name] for name in sorted(self)), tuple(sorted(self))

    @classmethod
    def tree_unflatten(cls, names, children):
        return cls(zip(names, children, strict=True))


@pytest.mark.parametrize(
    "given",
    [
        {"bias": P(), "kernel": P("local")},
        {"bias": None, "kernel": P("local")},  # None stands for a leaf that is replicated
        lambda path, leaf: P("local") if leaf.ndim == 2 else P(),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_a_tree_and_a_function_say_the_same(given, inside):
    leaves = jax.tree.leaves(PARAMS)
    assert registered(given).specs(NAMES, leaves, inside) == SPECS


def test_a_tree_that_can_be_called_is_a_tree():
    given, tree = Module(w=P("local")), Module(w=PARAMS["kernel"])
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert registered(given, tree).specs(names, [tree["w"]]) == [P("local")]


def test_a_variable_of_nnx_and_its_array_have_one_name():
    found = registered({"bias": P(), "kernel": P("local")})
    leaves = jax.tree.leaves(PARAMS)
    assert found.specs([f"{name}.value" for name in NAMES], leaves, inside=True) == SPECS


def test_parameters_are_known_with_their_moments_and_without():
    tree = ParamsWithMoments(PARAMS, [PARAMS])
    found = registered({"bias": P(), "kernel": P("local")}, tree)
    for prefix in ("", ".params", ".moments[0]"):
        names = [prefix + name for name in NAMES]
        assert found.specs(names, jax.tree.leaves(PARAMS), inside=True) == SPECS


def test_inside_shard_map_a_leaf_of_another_name_is_refused():
    leaf = PARAMS["kernel"]
    assert shardings(None).specs(["['other']"], [leaf], inside=True) == [P()]
    with pytest.raises(ValueError, match=r"how \['other'\] of 2 axes is sharded: pass a tree"):
        registered({"bias": P(), "kernel": P("local")}).specs(["['other']"], [leaf], inside=True)
