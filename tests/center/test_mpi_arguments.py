"""What mpi_center refuses before it starts anything; the rest is in tests/mpi/test_center.py."""

import dataclasses

import jax.numpy as jnp
import numpy as np
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
    with pytest.raises(ValueError, match="got those of JAX or NumPy"):
        _check_plain(elastic_rule(np.float64(0.1)))


def test_numbers_of_numpy_become_plain_ones():
    rules = []
    simulated = jdaso.simulated_center(2)
    center = simulated._replace(serve=lambda rule: (rules.append(rule), simulated.serve(rule))[1])
    jdaso.async_easgd(center, np.int64(16))
    jdaso.async_easgd(center, 4, alpha=np.float64(0.3))
    jdaso.mdownpour(center, np.float64(0.1), np.float64(0.9))
    for rule in rules:
        _check_plain(rule)
