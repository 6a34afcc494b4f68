"""Inside a node: the mean of gradients over its devices, taken in one place."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jdaso._base import PyTree

LOCAL_AXIS = "local"
# XLA's CPU client takes the size of its thread pool from NPROC. All-reduces between virtual
# devices wait for each other inside that pool, and so do host callbacks for their operands: with
# as many threads as cores, which is the default, both can wait for ever.
_POOL_THREADS = "16"
# XLA ends a process whose virtual devices wait for each other for 40 s; but one of them may be
# waiting for another node, for which the exchange's own deadline holds.
_COLLECTIVE_FLAG = "--xla_cpu_collective_call_terminate_timeout_seconds"
_COLLECTIVE_SECONDS = 24 * 3600


def local_value_and_grad(
    loss_fn: Callable,
    mesh: Mesh,
    has_aux: bool = False,
    in_specs: Sequence[PartitionSpec] | None = None,
    across: Callable[[PyTree], PyTree] | None = None,
) -> Callable:
    """Like ``jax.value_and_grad``, averaged over the node's local devices.

    DASO's local synchronization (daso-journal Fig. 2): with L devices, each on its own part of
    the node's batch, ``g = (1/L) sum_l g_l``. Loss, gradients and the floating-point leaves of
    aux cross the devices in one collective. ``loss_fn`` runs inside ``shard_map`` with the axis
    ``"local"`` bound, so a BatchNorm with ``axis_name="local"`` sees the process's whole batch.

    Args:
        loss_fn: ``(params, *args) -> loss`` or, with ``has_aux``, ``(loss, aux)``.
        mesh: ``topology.mesh``, one-dimensional, with the axis ``"local"``.
        has_aux: as in ``jax.value_and_grad``.
        in_specs: a ``PartitionSpec`` for each of args, e.g. ``(P(), P("local"))`` for a
            replicated model state and a batch; None: all are split along their leading axis.
        across: where one node is several processes, ``jdaso.process_mean(topology)``; it takes
            the mean on over them.

    Returns:
        ``(params, *args) -> (loss, grads)``, or ``((loss, aux), grads)``; all replicated.

    Raises:
        ValueError: if the mesh is not that of one node.

    >>> import jax.numpy as jnp, jdaso
    >>> mesh = jdaso.discover_topology().mesh
    >>> value_and_grad = local_value_and_grad(lambda w, x: jnp.mean((w * x) ** 2), mesh)
    >>> loss, grad = value_and_grad(jnp.float32(2.0), jnp.ones(4))
    >>> float(loss), float(grad)
    (4.0, 4.0)
    """
    if mesh.axis_names != (LOCAL_AXIS,):
        raise ValueError(
            f"mesh must have the one axis {LOCAL_AXIS!r}, got axes {mesh.axis_names}; "
            "use topology.mesh."
        )
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=has_aux)

    def on_device(params, *args):
        value, grads = value_and_grad(params, *args)
        return _mean((value, grads), lambda tree: lax.pmean(tree, LOCAL_AXIS))

    def call(params, *args):
        specs = (PartitionSpec(LOCAL_AXIS),) * len(args) if in_specs is None else tuple(in_specs)
        if len(specs) != len(args):
            raise ValueError(f"in_specs must name each of {len(args)} args, got {len(specs)}.")
        # With check_vma=True the gradient of replicated parameters would arrive already summed
        # over the devices, and a mean on top of it would be L times too large.
        averaged = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(PartitionSpec(), *specs),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(params, *args)
        return averaged if across is None else _mean(averaged, across)

    return call


class LocalMeanState(NamedTuple):
    """Steps taken; only a mean that is skipped on some of them needs to know."""

    step: jax.Array


def pmean(axis_name: str = LOCAL_AXIS, every: int = 1) -> optax.GradientTransformation:
    """Averages updates over a named axis; first in a chain, inside ``shard_map`` or ``pmap``.

    The same mean as :func:`local_value_and_grad`, for those who write their own shard_map; call
    it with ``check_vma=False``, or the gradient arrives already summed.

    Args:
        axis_name: the axis of the node's local devices.
        every: take the mean at every n-th step only, and let the devices go their own ways in
            between, as Heat's ``local_skip`` does. The parameters are then no longer replicated
            (shard them over ``axis_name``); ``pmean`` of the parameters brings them together.

    Returns:
        An optax transformation; stateless for ``every=1``.

    Raises:
        ValueError: for ``every`` below 1.

    >>> import jax, jax.numpy as jnp, jdaso
    >>> tx = jdaso.pmean("local")
    >>> mean = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="local")
    >>> mean(jnp.array([1.0, 3.0])).tolist()
    [2.0, 2.0]
    """
    if every < 1:
        raise ValueError(f"every must be at least 1 step, got {every}.")
    if every == 1:
        return optax.stateless(lambda updates, params: lax.pmean(updates, axis_name))

    def init(params):
        del params
        return LocalMeanState(jnp.zeros((), jnp.int32))

    def update(updates, state, params=None):
        del params
        step = state.step + 1
        updates = lax.cond(
            step % every == 0, lambda u: lax.pmean(u, axis_name), lambda u: u, updates
        )
        return updates, LocalMeanState(step)

    return optax.GradientTransformation(init, update)


def use_virtual_devices(num_devices: int) -> None:
    """Makes this process see several CPU devices, and gives XLA the threads they need.

    Args:
        num_devices: how many; they share the process's cores.

    Raises:
        ValueError: for fewer than one.
        RuntimeError: from JAX, if its devices are already in use.
    """
    if num_devices < 1:
        raise ValueError(f"num_devices must be at least 1, got {num_devices}.")
    use_enough_threads()
    if _COLLECTIVE_FLAG not in (flags := os.environ.get("XLA_FLAGS", "")):
        os.environ["XLA_FLAGS"] = f"{flags} {_COLLECTIVE_FLAG}={_COLLECTIVE_SECONDS}".strip()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def use_enough_threads() -> None:
    """Gives XLA's CPU client a thread pool in which host callbacks cannot starve.

    Works as long as no device is in use; an ``NPROC`` of the user's is respected.
    """
    os.environ.setdefault("NPROC", _POOL_THREADS)


def _mean(tree: PyTree, mean: Callable[[PyTree], PyTree]) -> PyTree:
    """Applies a mean to the floating-point leaves of a tree, all of them at once."""
    leaves, treedef = jax.tree.flatten(tree)
    floating = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves]
    means = iter(mean([x for x, is_float in zip(leaves, floating, strict=True) if is_float]))
    merged = [next(means) if f else x for x, f in zip(leaves, floating, strict=True)]
    return jax.tree.unflatten(treedef, merged)
