"""A training that was killed or stopped and then resumed ends with the same bits."""

import re
import shutil

import numpy as np
import pytest
from launch import mpiexec
from saved import assert_same_run, saved

import jdaso

OPTIONS = ("--devices", "2", "--epochs", "3", "--warmup-epochs", "1", "--cooldown-epochs", "1")
TOTAL = 66  # 22 steps of 2 x 2 x 16 of 1437 images


def train(out, *options, nodes=2, **env):
    return mpiexec(
        nodes,
        "training.py",
        *OPTIONS,
        "--save-every",
        5,
        "--out",
        out,
        *options,
        timeout=300,
        **env,
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run without interruption."""
    out = tmp_path_factory.mktemp("run") / "straight"
    ended = train(out)
    assert ended.returncode == 0, ended.output
    assert re.search(r"test accuracy 0\.\d{4}  \(sync=daso, 2 nodes x 2 devices", ended.output)
    return out


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run that was killed while it saved step 40, so step 35 is the last complete one."""
    out = tmp_path_factory.mktemp("run") / "killed"
    # Pauses let the other node finish writing step 35 before.
    ended = train(out, SIGNAL="SIGKILL:000008_*/node_1_of_2.*tmp:0", PAUSE="0.1")
    assert ended.returncode != 0, ended.output
    assert any(name[0].isdigit() for name in saved(out, 35)[0])  # numbers of exchanges
    return out


def check_resumed(out, at, straight):
    ended = train(out, "--resume")
    assert ended.returncode == 0, ended.output
    assert re.search(rf"resumed at step {at} of {TOTAL}, bit for bit", ended.output), ended.output
    assert_same_run(out, straight, TOTAL)


def test_killed_while_saving(killed, straight, tmp_path):
    out = tmp_path / "killed"
    shutil.copytree(killed, out)
    check_resumed(out, 35, straight)


@pytest.mark.slow
def test_killed_between_two_saves(tmp_path, straight):
    seconds = np.random.default_rng().uniform(0, 0.2)
    ended = train(tmp_path, SIGNAL=f"SIGKILL:000006_*/node_1_of_2:{seconds}")
    assert ended.returncode != 0, f"after {seconds} s: {ended.output}"
    check_resumed(tmp_path, r"\d+", straight)


@pytest.mark.slow
def test_other_number_of_nodes_says_so_and_goes_on(killed, tmp_path):
    """Step 35 is the 13th of its epoch. With three nodes an epoch has 14 steps instead of 22."""
    out = tmp_path / "killed"
    shutil.copytree(killed, out)
    ended = train(out, "--resume", nodes=3)
    assert ended.returncode == 0, ended.output
    step = 14 + 13 * 64 // 96
    assert f"resumed at step {step} of 42, from the mean over the 2 nodes" in ended.output
    assert "test accuracy" in ended.output
    assert len(saved(out, 42, nodes=3)) == 3


def test_signal_saves_and_ends_with_a_status_of_its_own(tmp_path, straight):
    ended = train(tmp_path, SIGNAL="SIGUSR1:000003_*/node_1_of_2:0")
    assert ended.returncode == jdaso.cluster.EXIT_TRY_AGAIN, ended.output
    (step,) = re.findall(r"stopped by a signal and saved at step (\d+) of 66", ended.output)
    check_resumed(tmp_path, step, straight)


def test_processes_of_one_node_stop_together(tmp_path):
    node = ("--join-processes", "--devices", 1, "--accumulate", 2)
    ended = train(tmp_path, *node, SIGNAL="SIGUSR1:000002_*/node_0_of_1:0")
    assert ended.returncode == jdaso.cluster.EXIT_TRY_AGAIN, ended.output
    ended = train(tmp_path, *node, "--resume")
    assert ended.returncode == 0, ended.output
    assert "bit for bit" in ended.output


def test_folder_of_a_run_is_not_taken_by_another(straight):
    """The first process finds out, whatever the number of nodes."""
    ended = train(straight, nodes=1)
    assert ended.returncode != 0
    assert "already has a run; continue it with --resume" in ended.output
    ended = train(straight, "--resume", "--momentum", "0.8", nodes=1)
    assert ended.returncode != 0
    assert "momentum (0.9, now 0.8)" in ended.output


def test_other_images_are_not_taken_for_the_same(straight, tmp_path):
    out = tmp_path / "straight"
    shutil.copytree(straight, out)
    ended = train(out, "--resume", FEWER="1")
    assert ended.returncode != 0
    assert "the run to resume has 1437 images for training, now there are 1436" in ended.output
