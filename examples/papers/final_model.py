"""The model that a training ends with, in a folder of its own.

It is what was evaluated last: the mean of the nodes, and with EASGD and EAMSGD the center. With
``--sync none`` nodes are not averaged, and it is the model of the first node.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.experimental.multihost_utils import process_allgather

import jdaso
from jdaso.checkpoint.node_part import checkpointer
from jdaso.core.command_line import local_path

FOLDER = "model"


def save(out: Path, topology: jdaso.Topology, params: Any, stats: Any) -> None:
    """Writes parameters and batch statistics with orbax. The first process writes.

    Args:
        out: The folder of the training.
        topology: The nodes that are left.
        params: The parameters, an ``nnx.State``.
        stats: The batch statistics, an ``nnx.State``.
    """
    if topology.node > 0:
        return
    tree = [params, stats]
    if topology.joined:  # each process may hold shards only
        tree = process_allgather(tree, tiled=True)
    if topology.local_rank == 0:
        with checkpointer() as writer:
            writer.save(out.absolute() / FOLDER, tree, force=True)


def load(out: Path | str, model: nnx.Module) -> nnx.Module:
    """Returns a model with the parameters and batch statistics that a training ended with.

    Args:
        out: The folder of the training.
        model: A model of the same configuration, or its outline by ``nnx.eval_shape``.

    Raises:
        ValueError: If the folder has no final model.
    """
    folder = local_path(out, "out").absolute() / FOLDER
    if not folder.is_dir():
        raise ValueError(f"out: {folder} does not exist; a training writes it when it ends.")
    graphdef, *states = nnx.split(model, nnx.Param, nnx.BatchStat)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    outline = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), states
    )
    with checkpointer() as reader:
        return nnx.merge(graphdef, *reader.restore(folder, outline))
