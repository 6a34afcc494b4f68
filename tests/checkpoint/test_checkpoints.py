"""Checkpoints in one process: what is kept, what is refused, what is never restored."""

import os
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdaso
from jdaso import JdasoError
from jdaso.checkpoint import Checkpoints, node_part
from jdaso.checkpoint.node_part import checksums
from jdaso.checkpoint.verify import verify

TOPOLOGY = jdaso.discover_topology()
EXCHANGE = jdaso.mpi_exchange(TOPOLOGY)


def state(value=0.0):
    """Leaves of several kinds, one without elements."""
    return {
        "layers": [jnp.full((2, 3), float(value)), jnp.full(3, value, jnp.bfloat16)],
        "empty": jnp.zeros((0, 3)),
        "mask": np.array([True, False]),
        "step": int(value),
        "seconds": float(value),
    }


def filled(folder, *steps):
    checkpoints = Checkpoints(folder, TOPOLOGY, EXCHANGE, keep=2)
    for step in steps:
        checkpoints.save(step, state(step))
    checkpoints.close()
    return Checkpoints(folder, TOPOLOGY, EXCHANGE, keep=2)


def test_state_comes_back_with_its_types_and_places(tmp_path):
    restored = filled(tmp_path, 3).restore(state())
    assert (restored.step, restored.num_nodes) == (3, 1)
    for want, got in zip(*map(jax.tree.leaves, (state(3), restored.state)), strict=True):
        assert type(want) is type(got)
        np.testing.assert_array_equal(want, got)
        assert np.asarray(want).dtype == np.asarray(got).dtype


def test_the_last_ones_stay(tmp_path):
    assert filled(tmp_path, 1, 2, 3, 4).steps() == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000003_step_3", "000004_step_4"]


def test_an_empty_folder_restores_nothing(tmp_path):
    assert Checkpoints(tmp_path / "new", TOPOLOGY, EXCHANGE).restore(state()) is None


def test_if_parts_of_all_are_lost_it_says_so_and_deletes_nothing(tmp_path, caplog):
    filled(tmp_path, 1, 2, 3).close()
    before = sorted(path.name for path in tmp_path.iterdir())
    assert len(before) > 1
    for part in tmp_path.glob("*/node_0_of_1"):
        part.rename(part.parent / "node_0_of_2")  # so node 1's is lost
    checkpoints = Checkpoints(tmp_path, TOPOLOGY, EXCHANGE, keep=1)
    assert checkpoints.restore(state()) is None
    message = "000003_step_3 (parts: node_0_of_2). Training starts at its first step."
    assert message in caplog.text
    for step in (1, 2):
        checkpoints.save(step, state())
    checkpoints.close()
    # And of the new ones the last stays.
    assert sorted(path.name for path in tmp_path.iterdir()) == [*before, "000005_step_2"]


def test_half_written_ones_are_never_taken(tmp_path):
    """A part under its temporary name, and a checkpoint without the part of one node."""
    checkpoints = filled(tmp_path, 3)
    part = tmp_path / "000001_step_3" / "node_0_of_1"
    shutil.copytree(part, tmp_path / "000002_step_4" / "node_0_of_1.orbax-checkpoint-tmp")
    shutil.copytree(part, tmp_path / "000003_step_5" / "node_1_of_2")
    (tmp_path / "notes").mkdir()
    assert checkpoints.steps() == [3]
    assert checkpoints.restore(state()).step == 3
    checkpoints.save(4, state(4))
    checkpoints.close()
    assert checkpoints.steps() == [3, 4]
    assert (tmp_path / "000004_step_4").is_dir()  # a number that nobody has used
    assert (tmp_path / "notes").is_dir()


def test_a_damaged_one_is_skipped_for_the_one_before(tmp_path, caplog):
    filled(tmp_path, 3, 4).close()
    newest = tmp_path / "000002_step_4" / "node_0_of_1" / "manifest.ocdbt"
    newest.write_bytes(b"nothing")
    checkpoints = Checkpoints(tmp_path, TOPOLOGY, EXCHANGE, keep=2)
    assert checkpoints.restore(state()).step == 3
    assert "000002_step_4 is skipped: rank 0" in caplog.text
    assert checkpoints.steps() == [3]
    for step in (5, 6):
        checkpoints.save(step, state(step))
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000003_step_5", "000004_step_6"]


def test_none_to_go_on_from_is_an_error(tmp_path):
    filled(tmp_path, 3, 4).close()
    for manifest in tmp_path.glob("*/*/manifest.ocdbt"):
        manifest.write_bytes(b"nothing")
    with pytest.raises(JdasoError, match=r"000002_step_4.* cannot be read.*000001_step_3"):
        Checkpoints(tmp_path, TOPOLOGY, EXCHANGE).restore(state())


def test_what_is_saved_is_what_was_there_at_the_call(tmp_path):
    """The next step may reuse the memory of this one while a thread writes it."""
    checkpoints = Checkpoints(tmp_path, TOPOLOGY, EXCHANGE)
    values = np.zeros(1000)
    checkpoints.save(1, {"x": values})
    values += 1
    checkpoints.close()
    restored = Checkpoints(tmp_path, TOPOLOGY, EXCHANGE).restore({"x": values})
    assert not restored.state["x"].any()


def test_folder_of_another_training_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds checkpoints of a training.* call restore"):
        filled(tmp_path, 3).save(4, state())


def test_a_job_does_not_save_beside_newer_checkpoints_than_those_it_found(tmp_path):
    """Its own would have lower numbers, and be deleted as the oldest."""
    first, second = (Checkpoints(tmp_path, TOPOLOGY, EXCHANGE) for _ in range(2))
    first.save(1, state(1))
    first.wait()
    second.restore(state())
    for step in (2, 3, 4, 5):
        first.save(step, state(step))
    first.close()
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"newer checkpoints, up to 000005, .* up to 000001: ano"):
        second.save(2, state(2))
    assert second.restore(state()).step == 5
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "lock") == before
    second.save(6, state(6))
    second.close()
    assert second.steps() == [4, 5, 6]


def test_unfinished_checkpoints_of_another_training_are_not_completed(tmp_path):
    (tmp_path / "000001_step_5" / "node_1_of_2").mkdir(parents=True)
    with pytest.raises(ValueError, match="call restore first"):
        Checkpoints(tmp_path, TOPOLOGY, EXCHANGE).save(5, state())


def test_checkpoints_of_another_format_are_refused_by_name(tmp_path, monkeypatch):
    filled(tmp_path, 3)
    with monkeypatch.context() as newer:
        newer.setattr(node_part, "FORMAT", 9)
        later = Checkpoints(tmp_path, TOPOLOGY, EXCHANGE)
        with pytest.raises(ValueError, match=r"000001_step_3/node_0_of_1 has the format 2, .* 9"):
            later.restore(state())
        later.save(4, state(4))
        later.close()
    # The earlier one is not taken in its place: nothing is damaged, and the user decides.
    message = r"000002_step_4/node_0_of_1 has the format 9, and this version of jdaso .* format 2\."
    with pytest.raises(ValueError, match=message):
        Checkpoints(tmp_path, TOPOLOGY, EXCHANGE).restore(state())
    _, (defect,) = verify(tmp_path)
    assert "has the format 9" in defect


def test_checkpoints_without_a_format_are_refused_by_name(tmp_path):
    """Those of version 0.2.0, before formats were numbered."""
    tree = node_part.part_tree({"x": np.ones(3)}, {})
    del tree["about"]
    tree["checksums"] = checksums({"state": tree["state"]})
    with node_part.checkpointer() as writer:
        writer.save(tmp_path / "000001_step_3" / "node_0_of_1", tree)
    with pytest.raises(ValueError, match=r"000001_step_3/node_0_of_1 has no format number"):
        Checkpoints(tmp_path, TOPOLOGY, EXCHANGE).restore({"x": np.ones(3)})


def test_parts_of_two_jobs_are_no_checkpoint(tmp_path, caplog):
    """Their steps and arrays agree: only the jobs that saved them differ."""
    writer = node_part.checkpointer()
    for number, runs in enumerate([(5, 5), (6, 7)], start=1):
        for node, run in enumerate(runs):
            tree = node_part.part_tree({"x": np.full(3, float(number))}, {}, run=run)
            writer.save(tmp_path / f"00000{number}_step_{number}" / f"node_{node}_of_2", tree)
    writer.close()
    restored = Checkpoints(tmp_path, TOPOLOGY, EXCHANGE).restore({"x": np.ones(3)})
    assert restored.step == 1
    assert "000002_step_2 has parts of 2 jobs, which wrote to this folder" in caplog.text
    _, (defect,) = verify(tmp_path)
    assert defect.startswith("node 1 differs from node 0: another job saved it")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": [jnp.ones((2, 3))]}, r"layers\.1 is not in the state"),
        ({"layers": [jnp.ones((2, 4)), jnp.ones(3, jnp.bfloat16)]}, r"layers\.0 is .*\(2, 3\)"),
        ({"layers": [jnp.ones((2, 3)), jnp.ones(3)]}, r"layers\.1 is bfloat16\(3,\), .* float32"),
        ({"momentum": jnp.ones(3)}, "momentum is not in the checkpoint"),
    ],
)
def test_state_that_does_not_fit_is_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        filled(tmp_path, 3).restore({**state(), **change})


@pytest.mark.parametrize(
    ("leaf", "message"), [(jax.random.key(0), "typed random key"), ("text", "must be an array")]
)
def test_leaf_that_cannot_be_saved_is_named(tmp_path, leaf, message):
    with pytest.raises(ValueError, match=f"bad.*{message}"):
        Checkpoints(tmp_path, TOPOLOGY, EXCHANGE).save(1, {"bad": leaf})


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="keep"):
        Checkpoints(tmp_path, TOPOLOGY, EXCHANGE, keep=0)


FULL_DISK = """
import resource, signal, sys, numpy as np, jdaso
from jdaso.checkpoint import Checkpoints

topology = jdaso.discover_topology()
checkpoints = Checkpoints(sys.argv[1], topology, jdaso.mpi_exchange(topology))
checkpoints.save(1, {"x": np.random.default_rng(1).normal(size=100_000)})
checkpoints.wait()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is then an error
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
checkpoints.save(2, {"x": np.random.default_rng(2).normal(size=100_000)})
checkpoints.wait()
"""


def test_full_disk_is_an_error_that_keeps_the_previous_one(tmp_path):
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1, ended.stderr
    assert "could not be written by rank 0" in ended.stderr
    assert "which are kept: steps [1]." in ended.stderr
    checkpoints = Checkpoints(tmp_path, TOPOLOGY, EXCHANGE)
    assert checkpoints.steps() == [1]
    x = checkpoints.restore({"x": np.zeros(100_000)}).state["x"]
    np.testing.assert_array_equal(x, np.random.default_rng(1).normal(size=100_000))


@pytest.fixture
def handler():
    """The handler of SIGUSR1 during the test; the previous one is restored after it."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    yield signal.SIG_IGN
    signal.signal(signal.SIGUSR1, before)


def test_handlers_are_put_back(handler):
    with jdaso.cluster.Preemption() as preemption:
        assert signal.getsignal(signal.SIGUSR1) is not handler
        assert not preemption.requested(EXCHANGE)
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_a_warning_after_the_last_step_kills_nobody(handler):
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    with jdaso.cluster.Preemption() as preemption:
        assert not preemption.requested(EXCHANGE)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_is_noticed_and_ignored_afterwards(handler):
    with jdaso.cluster.Preemption([signal.SIGUSR1]) as preemption:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert preemption.requested(EXCHANGE)
    assert signal.getsignal(signal.SIGUSR1) is not handler
    os.kill(os.getpid(), signal.SIGUSR1)
