"""Programs of an exchange along an axis do not grow; exchanges of one node say that they are."""

import re

import jax
import jax.numpy as jnp
import pytest

import jdaso
from jdaso.exchange import mpi


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16", "int8"])
def test_leaves_of_more_than_2_to_the_31_numbers_are_lowered_without_large_constants(wire):
    tx = jdaso.dasgd(jdaso.axis_exchange("node", 2), 4, 3, wire=wire)
    shapes = {"long": (2, 2**31 + 8), "matrix": (2, 2**16 + 1, 2**15), "small": (2, 3)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    state = jax.eval_shape(jax.vmap(tx.init), params)
    step = jax.jit(jax.vmap(tx.update, axis_name="node"))
    assert len(step.lower(params, state, params).as_text()) < 1e6


def test_no_operation_of_a_compiled_step_reads_one_number_of_each_leaf():
    """XLA takes a time like the cube of their number to fuse it."""
    tx = jdaso.daso(jdaso.axis_exchange("node", 2), 4, 1)
    params = [jnp.ones((2, 40)) for _ in range(150)]
    state = jax.vmap(tx.init)(params)
    step = jax.jit(jax.vmap(tx.update, axis_name="node"))
    text = step.lower(params, state, params).compile().as_text()
    fusions = re.findall(r" fusion\(([^)]*)\)", text)
    assert max(operands.count("%") for operands in fusions) < 150


def test_single_exchange_says_that_it_does_not_connect_the_processes_of_a_job(caplog, monkeypatch):
    jdaso.single_exchange()
    assert not caplog.records
    monkeypatch.setenv("PMI_SIZE", "3")
    monkeypatch.setenv("MPI_LOCALNRANKS", "3")
    jdaso.single_exchange()
    assert "this job has 3 processes, but single_exchange does not connect" in caplog.text


def test_mpi_exchange_says_once_that_there_is_one_node(caplog):
    mpi._say_alone.cache_clear()
    for _ in range(2):
        jdaso.mpi_exchange(jdaso.discover_topology())
    assert [record.getMessage()[:7] for record in caplog.records] == ["1 node:"]
