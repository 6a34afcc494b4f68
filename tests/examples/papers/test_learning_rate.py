"""The learning rate against formulas, and the epochs of plateaus."""

import dataclasses
import math

import jax
import learning_rate
import numpy as np
import pytest
from config import Config, complete

WARMUP, EPOCHS, DEVICES, STEPS = 5, 30, 16, 7  # steps of an epoch
PEAK = 0.0125 * DEVICES


def configured(**keys):
    config = Config(learning_rate=0.0125, warmup_epochs=WARMUP, epochs=EPOCHS)
    return complete(dataclasses.replace(config, **keys))


def rates(config, state=None):
    schedule = learning_rate.create(config, DEVICES)
    state = schedule.init() if state is None else state
    return [schedule.at(state, step / STEPS) for step in range(EPOCHS * STEPS + 1)]


SHAPES = {
    "cosine": lambda e: 0.5 * (1 + np.cos(np.pi * (e - WARMUP) / (EPOCHS - WARMUP))),
    "step": lambda e: np.where(e < 10, 1, np.where(e < 20, 0.1, 0.01)),
    "plateau": lambda e: np.ones_like(e),  # no loss has been seen
    "constant": lambda e: np.ones_like(e),
}


@pytest.mark.parametrize("decay", SHAPES)
def test_warm_up_is_linear_and_decay_follows_its_formula(decay):
    steps = {"decay_epochs": (10, 20)} if decay == "step" else {}
    found = rates(configured(decay=decay, **steps))
    epochs = np.arange(EPOCHS * STEPS + 1) / STEPS
    expected = PEAK * np.where(epochs < WARMUP, epochs / WARMUP, SHAPES[decay](epochs))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert all(type(rate) is float for rate in found)
    rising = found[: WARMUP * STEPS + 1]
    assert rising == sorted(set(rising))
    assert rising[0] == 0
    assert rising[-1] == max(found) == pytest.approx(PEAK)


@pytest.mark.parametrize("devices", [1, 4, 256])
def test_the_peak_is_scaled_by_the_devices(devices):
    for warmup in (0, WARMUP):
        schedule = learning_rate.create(configured(warmup_epochs=warmup), devices)
        assert schedule.at(schedule.init(), warmup) == pytest.approx(0.0125 * devices)


def test_no_epoch_beyond_the_last_one_raises_the_cosine_again():
    schedule = learning_rate.create(configured(), 1)
    assert schedule.at((), EPOCHS + 3.0) == pytest.approx(0, abs=1e-12)


def scales(losses, patience, threshold, factor):
    """A plain implementation of the decays after each epoch's loss."""
    best, bad, scale, found = math.inf, 0, 1.0, []
    for epoch, loss in enumerate(losses):
        if epoch >= WARMUP:
            better = loss < best * (1 - threshold)
            best, bad = (loss, 0) if better else (best, bad + 1)
            if bad == patience:
                scale, bad = scale * factor, 0
        found.append(scale)
    return found


def observed(schedule, losses, state=None, first=0):
    """Learning rates after each epoch, and the last state."""
    state, found = schedule.init() if state is None else state, []
    for epoch, loss in enumerate(losses, start=first):
        state = schedule.observe(state, loss, epoch)
        found.append(schedule.at(state, max(epoch + 1.0, WARMUP)))
    return found, state


def test_a_stable_loss_halves_the_rate_after_five_epochs_and_not_one_earlier():
    schedule = learning_rate.create(configured(decay="plateau"), DEVICES)
    falling = [2.0 * 0.9**epoch for epoch in range(10)]
    stable = [falling[-1] * 0.96] * 12  # 4 % less: stable, with a threshold of 5 %
    found, _ = observed(schedule, falling + stable)
    expected = [1.0] * 14 + [0.5] * 5 + [0.25] * 3
    np.testing.assert_allclose(found, PEAK * np.array(expected), rtol=1e-6)


def test_a_loss_that_falls_by_more_than_the_threshold_once_is_not_stable():
    schedule = learning_rate.create(configured(decay="plateau"), DEVICES)
    found, _ = observed(schedule, [2.0] * 9 + [1.89] + [1.89] * 4)  # stable for 4, then 4 epochs
    assert found == pytest.approx([PEAK] * 14)


def test_epochs_of_the_warm_up_do_not_count():
    """Warm-up epochs count neither as stable epochs nor as the best loss."""
    schedule = learning_rate.create(configured(decay="plateau"), DEVICES)
    found, state = observed(schedule, [0.1] * WARMUP)
    assert jax.tree.all(jax.tree.map(np.array_equal, state, schedule.init()))
    found, _ = observed(schedule, [2.0, 1.8, 1.6, 1.4, 1.2], state, first=WARMUP)
    assert found == pytest.approx([PEAK] * 5)


@pytest.mark.parametrize("seed", range(3))
def test_any_losses_decay_as_the_plain_recursion(seed):
    rng = np.random.default_rng(seed)
    losses = np.float32(2 * 0.97 ** np.arange(60) * rng.uniform(0.9, 1.1, 60)).tolist()
    losses[20] = math.nan  # no progress, and no best
    keys = {"decay_factor": 0.75, "decay_patience": 3, "decay_threshold": 0.03}
    schedule = learning_rate.create(configured(decay="plateau", **keys), DEVICES)
    found, _ = observed(schedule, losses)
    expected = scales(losses, patience=3, threshold=0.03, factor=0.75)
    assert 0 < expected[-1] < 0.75  # more than one decay
    np.testing.assert_allclose(found, PEAK * np.array(expected), rtol=1e-5)


def test_a_state_that_was_saved_goes_on_to_the_bit(tmp_path):
    config = configured(decay="plateau")
    losses = np.random.default_rng(0).uniform(1, 1.2, 40).tolist()
    whole, _ = observed(learning_rate.create(config, DEVICES), losses)
    first = learning_rate.create(config, DEVICES)
    before, state = observed(first, losses[:17])
    leaves, treedef = jax.tree.flatten(state)
    np.savez(tmp_path / "state.npz", *leaves)
    with np.load(tmp_path / "state.npz") as saved:
        restored = jax.tree.unflatten(treedef, [saved[name] for name in saved.files])
    after, _ = observed(learning_rate.create(config, DEVICES), losses[17:], restored, first=17)
    assert before + after == whole
    assert len(set(whole)) > 3


def test_the_state_keeps_its_shapes_and_dtypes():
    schedule = learning_rate.create(configured(decay="plateau"), DEVICES)
    start = schedule.init()
    state = observed(schedule, [1.0] * 12)[1]
    kinds = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (start, state)]
    assert kinds[0] == kinds[1]
    assert jax.tree.leaves(learning_rate.create(configured(), 1).init()) == []
