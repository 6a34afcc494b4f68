"""Checkpoints and metrics of runs of the examples, to compare two runs bit for bit."""

import json

import numpy as np
import orbax.checkpoint


def saved(out, step, nodes=2):
    """The arrays of each node's part of the checkpoint at a step, by name."""
    (folder,) = (out / "checkpoints").glob(f"*_step_{step}")
    with orbax.checkpoint.StandardCheckpointer() as reader:
        parts = [reader.restore(folder / f"node_{n}_of_{nodes}") for n in range(nodes)]
    arrays = [part["state"] | part.get("in_flight", {}) for part in parts]
    return [{name: x for name, x in one.items() if name != "totals"} for one in arrays]


def lines(out):
    """The metrics of each epoch."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out):
    """Step, loss and test accuracy of each epoch."""
    return [(line["step"], line["loss"], line["test_accuracy"]) for line in lines(out)]


def assert_same_run(out, other, step):
    """Asserts that two runs saved the same bits at a step and had the same losses."""
    for mine, theirs in zip(saved(out, step), saved(other, step), strict=True):
        assert mine.keys() == theirs.keys()
        for name, array in mine.items():
            np.testing.assert_array_equal(array, theirs[name], err_msg=name)
    assert losses(out) == losses(other)
