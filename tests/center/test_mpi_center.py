"""Arguments that mpi_center refuses. tests/mpi/test_center.py tests everything else."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jdaso
from jdaso.center.async_easgd import elastic_rule
from jdaso.center.downpour import momentum_rule
from jdaso.center.mpi_center import _check_keeps_dtypes


@pytest.mark.parametrize(
    ("changes", "options", "match"),
    [
        ({}, {"timeout": 0}, "timeout must be a finite number above 0, got 0"),
        ({}, {"gone_after": -1}, "gone_after must be a finite number above 0, got -1"),
        ({"comm": None}, {}, "requires MPI"),
        ({"comm": "some", "processes_per_node": 2}, {}, "needs one process per node, got 2"),
    ],
)
def test_bad_arguments_are_named(changes, options, match):
    topology = dataclasses.replace(jdaso.discover_topology(), **changes)
    with pytest.raises(ValueError, match=match):
        jdaso.center.mpi_center(topology, **options)


def test_the_server_refuses_numbers_of_jax_and_numpy():
    _check_keeps_dtypes(momentum_rule(0.1, 0.9))
    with pytest.raises(ValueError, match="returned JAX arrays or changed a dtype"):
        _check_keeps_dtypes(elastic_rule(jnp.float32(0.1)))
    with pytest.raises(ValueError, match="make its hyperparameters Python floats"):
        _check_keeps_dtypes(elastic_rule(np.float64(0.1)))


def test_numbers_of_numpy_become_python_numbers():
    rules = []
    center = jdaso.center.simulated_center(2)
    make = center.make_exchange
    center.make_exchange = lambda rule: (rules.append(rule), make(rule))[1]
    jdaso.center.async_easgd(center, np.int64(16))
    jdaso.center.async_easgd(center, 4, alpha=np.float64(0.3))
    jdaso.center.mdownpour(center, np.float64(0.1), np.float64(0.9))
    for rule in rules:
        _check_keeps_dtypes(rule)
