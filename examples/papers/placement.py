"""Where the arrays of a training lie: a copy on each device of a node, or spread over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdaso

#: Returns the sharding of an array, or of the outline of an array.
Placement = Callable[[Any], NamedSharding]


def replicated(topology: jdaso.Topology) -> Placement:
    """Each device of the node has a copy of each array."""
    return lambda x: NamedSharding(topology.mesh, P())


def sharded(topology: jdaso.Topology) -> Placement:
    """Arrays are spread over the devices of the node, as in fully sharded data parallelism (FSDP).

    An array with two axes or more is cut along the longest axis that the number of devices
    divides. All others are replicated. The sharding depends on the shape only, so the optimizer's
    moments lie beside their parameters.
    """
    mesh = topology.mesh

    def place(x: Any) -> NamedSharding:
        shape = np.shape(x)
        axes = [i for i, size in enumerate(shape) if size % mesh.size == 0]
        if len(shape) < 2 or not axes:
            return NamedSharding(mesh, P())
        longest = max(axes, key=lambda i: shape[i])
        return NamedSharding(mesh, P(*[None] * longest, "local"))

    return place
