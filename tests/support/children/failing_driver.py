"""A failing call of the CUDA driver is an error that names it, and ends no exchange in silence.

    python failing_driver.py LIBRARY DEVICES CALL ...

Each CALL is ``function:n``, the n-th call of a function after the first two exchanges. With several
devices, the program may hang, because the other devices wait for the one that has failed. Then the
error that the progress thread gets ends the process, as it does in a training.
"""

import contextlib
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[1]))
from one_process import HEADER, served_table, use_stand_in

from jdaso.exchange.host.layout import Shardings
from jdaso.exchange.host.program import Program, ProgramLeaves

library, devices, *calls = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", int(devices))
stand_in = use_stand_in(library, int(devices))


def end_with(problem):
    if int(devices) > 1:
        print(problem, flush=True)
        os._exit(3)


def make_step():
    """A step that posts leaves and collects them in two parts."""
    table = served_table(end_with)
    mesh = Mesh(np.array(jax.local_devices()), ("local",))
    program = Program(table, True, Shardings(None, mesh), contextlib.nullcontext)
    program.pins = True

    def step(number, leaves):
        bound, sums = ProgramLeaves(program, (), leaves), []
        token, _ = bound.post(jnp.int32(0), number, 0, leaves, jnp.asarray(HEADER), None)
        for part in (slice(0, 1), slice(1, 3)):
            like = leaves[part]
            more, _, token = bound.collect(token, number, like, part)
            token, [more] = bound.after(token, part, [more])
            sums += more
        return sums

    specs = PartitionSpec()
    if int(devices) > 1:
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    return jax.jit(step)


leaves = [jnp.arange(100.0), jnp.ones((0, 3)), jnp.full((4, 5), 2.0)]
for call in calls:
    name, n = call.split(":")
    step = make_step()
    for number in range(2):
        for x, y in zip(leaves, step(number, leaves), strict=True):
            np.testing.assert_array_equal(x, y)
    stand_in.stand_in_fail(name.encode(), int(n))
    message = f"JdasoError: {name}.*: refused by the simulated driver"
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(step(2, leaves))
    stand_in.stand_in_fail(b"", 0)
    # What was not posted is not in flight. The device can be used by another exchange.
    make_step()(0, leaves)
print("ok")
