"""Measures a step whose parameters are sharded over the devices of a node, beside replicated ones.

    python bench/sharded.py [--devices 2 4] [--case daso] [--pairs 32]

Two processes, each a node with virtual CPU devices on one core, train by SGD with momentum. Two
leaves of three are sharded, over a mesh with one axis or with two. The step is under jit, or inside
a ``shard_map`` of the user. For the compiled step, the table has the number of all-gathers and of
Python callbacks, and the bytes of temporary memory on one device. The times of a step with nothing
due, of one that posts and of one that merges are medians of differences from plain optax on the
same layout, in copies (memcpy) of the parameters of all devices of a node.
"""

from __future__ import annotations

import argparse
import sys

import jax
import mpi_job
import numpy as np
import pairs
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from machine import keep_memory, machine, own_core

import jdaso

ONE_AXIS = [P(), P("x"), P(None, "x")]
TWO_AXES = [P(), P("y", "x"), P(None, ("x", "y"))]
# Number of devices -> shapes of the mesh, with the layouts of three leaves.
LAYOUTS = {
    2: [((2,), [P()]), ((2,), ONE_AXIS)],
    4: [((4,), [P()]), ((4,), ONE_AXIS), ((2, 2), TWO_AXES)],
}
JOB_SECONDS = 300


def inside_shard_map(mesh, specs):
    """Returns a function that makes a step run inside ``shard_map`` over all axes of a mesh."""

    def wrap(step, opt_state):
        state = jax.tree.map(
            lambda x: x.sharding.spec if isinstance(x.sharding, NamedSharding) else P(), opt_state
        )
        return jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(specs, state, specs),
            out_specs=(specs, state),
            check_vma=False,
        )

    return wrap


def print_rows(devices, arguments):
    """Measures all layouts of a number of devices. It runs on every process."""
    own_core()
    keep_memory()
    jdaso.cluster.use_virtual_devices(devices)
    topology = jdaso.discover_topology(processes_per_node=1)
    for shape, specs in LAYOUTS[devices]:
        axes = ("x", "y")[: len(shape)]
        mesh = Mesh(
            np.array(topology.devices).reshape(shape), axes, axis_types=(AxisType.Auto,) * len(axes)
        )
        params, shardings = pairs.make_params(arguments.megabytes, arguments.leaves, mesh, specs)
        copy = pairs.copy_seconds(params)
        inside = inside_shard_map(mesh, [sharding.spec for sharding in shardings])
        for form, wrap in (("jit", {}), ("shard_map", {"wrap": inside})):
            exchange = jdaso.mpi_exchange(topology, shardings=shardings)
            tx = jdaso.chain(pairs.SGD, pairs.cases(exchange)[arguments.case])
            trained = pairs.Training(tx, params, **wrap)
            plain = pairs.Training(pairs.SGD, params, **wrap)
            extra = pairs.measure(exchange, plain, trained, arguments.pairs)
            exchange.close()
            text = trained.text
            cells = [
                " x ".join(map(str, shape)),
                "replicated" if len(specs) == 1 else "sharded",
                form,
                pairs.all_gathers(text),
                pairs.host_callbacks(text),
                trained.temporary,
                *pairs.in_copies(extra, copy),
            ]
            if topology.rank == 0:
                print(pairs.row(*cells), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--megabytes", type=float, default=16, help="size of the parameters")
    parser.add_argument("--leaves", type=int, default=30, help="number of leaves")
    parser.add_argument("--case", choices=pairs.CASES, default="daso")
    parser.add_argument("--pairs", type=int, default=32, help="pairs of steps")
    parser.add_argument("--rows", type=int, choices=LAYOUTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rows:
        print_rows(arguments.rows, arguments)
        return 0
    print(machine())
    print(
        f"2 processes, {arguments.megabytes:g} MB in {arguments.leaves} leaves, {arguments.case}; "
        f"{pairs.ABOUT}\n"
    )
    names = ("mesh", "parameters", "under", "all-gathers", "callbacks", "temporary, bytes")
    print(pairs.header(*names, "nothing due", "quartiles", "posts", "merges"))
    failed = False
    for devices in arguments.devices:
        job = mpi_job.run(2, JOB_SECONDS, __file__, *sys.argv[1:], "--rows", devices)
        print(job.stdout, end="", flush=True)
        if job.problem is not None:
            failed = True
            print(f"\n{devices} devices failed: {job.problem}", flush=True)
            print(job.stderr, file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
