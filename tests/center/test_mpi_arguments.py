"""What mpi_center refuses before it starts anything; the rest is in tests/mpi/test_center.py."""

import dataclasses

import jax.numpy as jnp
import pytest

import jdaso
from jdaso.algorithms._center_rules import elastic_rule, momentum_rule
from jdaso.center._mpi import _check_plain


@pytest.mark.parametrize(
    ("changes", "options", "match"),
    [
        ({}, {"timeout": 0}, "timeout must be a finite number above 0, got 0"),
        ({}, {"gone_after": -1}, "gone_after must be a finite number above 0, got -1"),
        ({"comm": None}, {}, "needs MPI"),
        ({"comm": "some", "processes_per_node": 2}, {}, "needs one process per node, got 2"),
    ],
)
def test_bad_arguments_are_named(changes, options, match):
    topology = dataclasses.replace(jdaso.discover_topology(), **changes)
    with pytest.raises(ValueError, match=match):
        jdaso.mpi_center(topology, **options)


def test_the_server_computes_with_plain_numbers():
    _check_plain(momentum_rule(0.1, 0.9))
    with pytest.raises(ValueError, match="needs plain Python numbers, got those of JAX"):
        _check_plain(elastic_rule(jnp.float32(0.1)))
