"""examples/papers/language_model.py with SIGNAL and PAUSE of training.py; takes its options."""

import sys

import training  # isort: skip  # so that examples/ can be imported

import config
import jax
import language_model
import loop

set_up = loop.set_up


def checked_set_up(keys, topology, task):
    """Checks after each step that --shard has cut the parameters and the optimizer's state."""
    setup, state = set_up(keys, topology, task)

    def train_step(*arguments):
        state, *others = setup.train_step(*arguments)
        tables = [
            (jax.tree_util.keystr(path), x)
            for path, x in jax.tree_util.tree_leaves_with_path((state.params, state.opt_state))
            if x.ndim > 1
        ]
        of_params = sum(x.ndim > 1 for x in jax.tree.leaves(state.params))
        assert sum(".mu" in name or ".nu" in name for name, _ in tables) == 2 * of_params
        cut = [x.addressable_shards[0].data.size < x.size for _, x in tables]
        assert all(cut) if keys.shard else not any(cut)
        return state, *others

    return setup._replace(train_step=train_step), state


loop.set_up = checked_set_up

if __name__ == "__main__":
    sys.exit(training.main(config.parse(defaults=language_model.DEFAULTS), language_model.task))
