"""The mean of gradients over the devices of one node, and virtual CPU devices for tests."""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdaso.core.types import PyTree

LOCAL_AXIS = "local"
# XLA's CPU client takes the size of its thread pool from NPROC; the default is the number of cores.
# All-reduces between virtual devices wait for each other inside that pool, and host callbacks wait
# there for their operands. With the default, both can deadlock.
_POOL_THREADS = "16"
# XLA ends a process whose devices wait for each other for 40 s or so. But one may be waiting
# for another node, and then the exchange's timeout applies. JAX 0.10 to 0.12 know all of these
# flags. An unknown one would end the process.
_CPU_LIMITS = ("--xla_cpu_collective_call_terminate_timeout_seconds",)
_GPU_LIMITS = (
    "--xla_gpu_executable_terminate_timeout",
    "--xla_gpu_first_collective_call_terminate_timeout_seconds",
)
_LIMIT_SECONDS = 24 * 3600
_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def local_value_and_grad(
    loss_fn: Callable,
    mesh: Mesh,
    has_aux: bool = False,
    in_specs: Sequence[PartitionSpec] | None = None,
) -> Callable:
    """Like ``jax.value_and_grad``, averaged over the node's local devices.

    This is DASO's local synchronization (daso-journal Fig. 2). Each of L devices computes on its
    own part of the node's batch, and ``g = (1/L) sum_l g_l``. One collective averages the loss, the
    gradients and the floating-point leaves of aux. Integers of aux are summed over the devices, as
    counts of the examples of a batch are; those of less than 32 bits become int32 or uint32, and a
    boolean becomes the int32 number of devices on which it is True. Keep what is no count, such as
    the number of a step, out of aux. Random keys are returned as the first device has them.
    ``loss_fn`` runs inside ``shard_map`` with the axis ``"local"``, so a BatchNorm with
    ``axis_name="local"`` sees the process's whole batch.

    Args:
        loss_fn: ``(params, *args) -> loss`` or, with ``has_aux``, ``(loss, aux)``.
        mesh: ``topology.mesh``, one-dimensional, with the axis ``"local"``.
        has_aux: As in ``jax.value_and_grad``.
        in_specs: A ``PartitionSpec`` for each of args, e.g. ``(P(), P("local"))`` for a
            replicated model state and a batch; None to split all along their leading axis.

    Returns:
        ``(params, *args) -> (loss, grads)``, or ``((loss, aux), grads)``; all replicated.

    Raises:
        ValueError: If the mesh is not that of one node.

    >>> import jax.numpy as jnp, jdaso
    >>> mesh = jdaso.discover_topology().mesh
    >>> value_and_grad = local_value_and_grad(lambda w, x: jnp.mean((w * x) ** 2), mesh)
    >>> loss, grad = value_and_grad(jnp.float32(2.0), jnp.ones(4))
    >>> float(loss), float(grad)
    (4.0, 4.0)
    """
    if mesh.axis_names != (LOCAL_AXIS,):
        raise ValueError(
            f"mesh must have the one axis {LOCAL_AXIS!r}, got axes {mesh.axis_names}: "
            "use topology.mesh."
        )
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=has_aux)

    def on_device(params, *args):
        value, grads = value_and_grad(params, *args)
        return _over_devices((jax.tree.map(_countable, value), grads))

    def call(params, *args):
        specs = (PartitionSpec(LOCAL_AXIS),) * len(args) if in_specs is None else tuple(in_specs)
        if len(specs) != len(args):
            raise ValueError(
                f"in_specs must have {len(args)} specs, one per arg, got {len(specs)}."
            )
        # With check_vma=True the gradient of replicated parameters is already summed over the
        # devices, and its mean would be L times too large.
        return jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(PartitionSpec(), *specs),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(params, *args)

    return call


class LocalMeanState(NamedTuple):
    """State of ``pmean(every > 1)``: update calls so far."""

    step: jax.Array


def pmean(axis_name: str = LOCAL_AXIS, every: int = 1) -> optax.GradientTransformation:
    """Averages updates over a named axis. Use it first in a chain, in ``shard_map`` or ``pmap``.

    It takes the same mean as :func:`local_value_and_grad`, inside a shard_map that you write
    yourself. Call shard_map with ``check_vma=False``; otherwise the gradient is already summed.

    Args:
        axis_name: Axis of the node's local devices.
        every: Steps between means. The devices diverge in between, as with Heat's ``local_skip``.
            The parameters are then no longer replicated, so shard them over ``axis_name``. A
            ``pmean`` of the parameters makes them equal again.

    Returns:
        An optax transformation; stateless for ``every=1``.

    Raises:
        ValueError: If ``every`` is below 1.

    >>> import jax, jax.numpy as jnp, jdaso
    >>> tx = jdaso.cluster.pmean("local")
    >>> mean = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="local")
    >>> mean(jnp.array([1.0, 3.0])).tolist()
    [2.0, 2.0]
    """
    if every < 1:
        raise ValueError(f"every must be at least 1 step, got {every}.")
    if every == 1:
        return optax.stateless(lambda updates, params: lax.pmean(updates, axis_name))

    def update(updates, state, params=None):
        step = state.step + 1
        mean = functools.partial(lax.pmean, axis_name=axis_name)
        return lax.cond(step % every == 0, mean, lambda u: u, updates), LocalMeanState(step)

    return optax.GradientTransformation(lambda params: LocalMeanState(jnp.int32(0)), update)


def devices_are_busy() -> bool:
    """Returns whether the devices still execute programs, which may post exchanges.

    The results of these programs are arrays that are not ready.
    """
    try:
        return not all(array.is_deleted() or array.is_ready() for array in jax.live_arrays())
    except RuntimeError:  # another thread has deleted one meanwhile
        return True


def await_programs(devices: Sequence[jax.Device]) -> None:
    """Waits until devices have executed all programs that were dispatched; ignores their errors.

    The results of these programs need not exist any more. Each device executes what this thread
    dispatches in order, so another program on all of them comes last.
    """
    with contextlib.suppress(Exception):
        jax.effects_barrier()
    with contextlib.suppress(Exception):  # those that other threads have dispatched
        jax.block_until_ready([x for x in jax.live_arrays() if not x.is_deleted()])
    with contextlib.suppress(Exception):
        mesh = Mesh(np.array(devices), "all")
        zeros = jax.device_put(np.zeros(len(devices)), NamedSharding(mesh, PartitionSpec("all")))
        jax.block_until_ready(jax.jit(jnp.negative)(zeros))


def use_virtual_devices(num_devices: int) -> None:
    """Gives this process several CPU devices, and XLA the threads that they need.

    Args:
        num_devices: Number of devices. They share the cores of the process.

    Raises:
        ValueError: If ``num_devices`` is below 1.
        RuntimeError: From JAX, if its devices are already in use.
    """
    if num_devices < 1:
        raise ValueError(f"num_devices must be at least 1, got {num_devices}.")
    prepare_devices()
    _raise_limits(_CPU_LIMITS)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def prepare_devices() -> None:
    """Gives XLA's CPU client enough threads for host callbacks, and GPUs time to wait for nodes.

    It has an effect only before the first use of a device. It keeps what the environment sets.
    """
    os.environ.setdefault("NPROC", _POOL_THREADS)
    if any(map(importlib.util.find_spec, _CUDA_PLUGINS)):
        _raise_limits(_GPU_LIMITS)


def _raise_limits(names: Sequence[str]) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    flags += "".join(f" {name}={_LIMIT_SECONDS}" for name in names if name not in flags)
    os.environ["XLA_FLAGS"] = flags.strip()


def _over_devices(tree: PyTree) -> PyTree:
    """Returns the means of floating-point numbers, by one collective, and the sums of integers."""

    def is_inexact(x: jax.Array) -> bool:
        return jnp.issubdtype(x.dtype, jnp.inexact)

    means = iter(lax.pmean([*filter(is_inexact, jax.tree.leaves(tree))], LOCAL_AXIS))

    def reduced(x: jax.Array) -> jax.Array:
        if is_inexact(x):
            return next(means)
        # Keys are no numbers.
        return lax.psum(x, LOCAL_AXIS) if jnp.issubdtype(x.dtype, jnp.integer) else x

    return jax.tree.map(reduced, tree)


def _countable(leaf: jax.Array) -> jax.Array:
    """Widens a boolean or a narrow integer to 32 bits, in which counts do not overflow."""
    leaf = jnp.asarray(leaf)
    if leaf.dtype != bool and not jnp.issubdtype(leaf.dtype, jnp.integer):
        return leaf
    unsigned = jnp.issubdtype(leaf.dtype, jnp.unsignedinteger)
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.uint32 if unsigned else jnp.int32))
