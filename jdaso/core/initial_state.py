"""The state of the engine before the first step."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jdaso.core.engine_config import EngineConfig, planned
from jdaso.core.error_feedback import init_feedback
from jdaso.core.fragments import cut, part
from jdaso.core.state import AveragingState, FragmentState
from jdaso.core.tree import check_arrays, check_finite, float_leaves, is_placeholder
from jdaso.core.types import ParamsWithMoments, PyTree
from jdaso.core.validation import check_fragments
from jdaso.core.wire import block_bits


def init_state(config: EngineConfig, params: PyTree) -> AveragingState:
    check_arrays(f"{config.name}: init", params)
    if not is_placeholder(params):
        if not float_leaves(params):
            raise ValueError(
                f"{config.name}: params must have at least one floating-point leaf to average."
            )
        if not config.sync_target.of_gradients:  # a gradient of such a parameter may be finite
            _check_finite(config, params)
    parts = cut(params, config.fragments)
    check_fragments(len(parts), config.schedule)
    zero = jnp.zeros((), jnp.int32)
    schedule_state = config.schedule.init()
    state = AveragingState(
        step=zero,
        exchanges=zero,
        skipped=zero,
        left_out=zero,
        merged=jnp.zeros((), bool),
        plan=planned(config, schedule_state, zero)[0],
        losses=jnp.zeros((2,), jnp.float32),
        schedule=schedule_state,
        fragments=tuple(_init_fragment(config, part(params, positions)) for positions in parts),
    )
    if not is_placeholder(params):
        # What all nodes share, such as a center, is compared at each exchange, which is an error.
        gradients = config.sync_target.of_gradients
        compared = None if gradients or config.merge.shared else _params(params)
        config.exchange.begin_run(config.schedule.total, compared, gradients)
    # Each field needs a buffer of its own, or the state could not be donated.
    return jax.tree.map(lambda x: jnp.array(x, copy=True), state)


def _params(tree: PyTree) -> PyTree:
    return tree.params if isinstance(tree, ParamsWithMoments) else tree


def _check_finite(config: EngineConfig, tree: PyTree) -> None:
    name, num_nodes = f"{config.name}: init", config.exchange.num_nodes
    check_finite(name, "parameter", _params(tree), num_nodes)
    if isinstance(tree, ParamsWithMoments):
        check_finite(name, "moment", tree.moments, num_nodes)


def _init_fragment(config: EngineConfig, tree: PyTree) -> FragmentState:
    params = _params(tree)
    rounds = any(map(block_bits, (config.wire, config.blocking_wire)))
    uses_anchor = config.sync_target.uses_anchor and config.merge.base is None
    zero = jnp.zeros((), jnp.int32)
    return FragmentState(
        posted=jnp.zeros((), bool),
        age=zero,
        delay=zero,
        number=zero,
        sound=jnp.ones((), bool),
        exchange=config.exchange.init(tree),
        merge=config.merge.init(params),
        feedback=init_feedback(params, uses_anchor) if rounds else (),
    )
