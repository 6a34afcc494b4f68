"""Loss, counts and score of the training script."""

import classification
import jax.numpy as jnp
import numpy as np
import pytest
from config import complete

CLASSES = 10


@pytest.fixture(scope="module")
def task():
    return classification.task(complete(classification.Classification(label_smoothing=0.1)))


def test_a_part_of_each_label_is_spread_over_all_classes(task):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(5, CLASSES)), rng.integers(0, CLASSES, 5)
    log_shares = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    target = 0.9 * np.eye(CLASSES)[labels] + 0.1 / CLASSES
    expected = -(target * log_shares).sum(axis=1).mean()
    found = task.loss(jnp.asarray(logits, jnp.float32), jnp.asarray(labels))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_what_only_fills_a_batch_counts_nothing(task):
    logits = jnp.eye(CLASSES)[jnp.array([3, 4, 9, 9])]
    counts = task.counts(logits, jnp.array([3, 5, 9, -1]))
    assert counts.tolist() == [2, 3]
    assert task.score(np.asarray(counts)) == {"test_accuracy": pytest.approx(2 / 3)}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"padding": 4}, "--padding has no effect with --augment random_resized_crop; leave"),
        ({"num_classes": 10}, "--num-classes has no effect with --data digits; leave it out"),
        ({"synthetic_images": 9}, "--synthetic-images has no effect with --data digits; leave"),
    ],
)
def test_keys_of_other_data_are_refused(keys, message):
    with pytest.raises(SystemExit, match=message):
        classification.task(complete(classification.Classification(**keys)))
