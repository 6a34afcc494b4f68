"""Joins the processes of a node into one JAX program."""

import os
import secrets

import jax

from jdaso.cluster.heartbeat import LOST_SECONDS
from jdaso.cluster.mpi_types import Comm
from jdaso.cluster.placement import Placement

# A process that exits waits this long for the others of its node.
_SHUTDOWN_SECONDS = 1800
_PROXY = "grpc_proxy"  # gRPC reads this variable first


def join_node(comm: Comm, placement: Placement, per_node: int) -> None:
    """Calls ``jax.distributed.initialize`` for the processes of this node; collective over all.

    The coordinator is the first process of the node. It listens at a socket of the host, because
    another program may use any port.
    """
    if per_node == 1 or jax.distributed.is_initialized():
        return
    local_rank = placement.local_rank
    within_node = comm.Split(color=placement.node, key=local_rank)
    address = f"unix-abstract:jdaso-{within_node.bcast(secrets.token_hex(8))}"
    within_node.Free()
    # JAX's preemption service would handle SIGTERM, which is up to jdaso.cluster.Preemption.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_check_proxy_envs", False)
    proxy = os.environ.get(_PROXY)
    os.environ[_PROXY] = ""  # no proxy within the host
    jax.distributed.initialize(
        address,
        per_node,
        local_rank,
        local_device_ids=_device_ids(local_rank, per_node),
        cluster_detection_method="deactivate",
        # jdaso's own heartbeat detects a death earlier than this timeout.
        heartbeat_timeout_seconds=int(LOST_SECONDS),
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        coordinator_bind_address=address,
    )
    del os.environ[_PROXY]
    if proxy is not None:
        os.environ[_PROXY] = proxy


def _device_ids(local_rank: int, per_node: int) -> list[int] | None:
    """The device of a process; None if the launcher shows it to this process only."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    bound = visible is not None and len(visible.split(",")) < per_node
    return None if bound else [local_rank]
