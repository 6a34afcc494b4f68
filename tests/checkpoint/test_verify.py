"""``python -m jdaso verify`` names every defect of a checkpoint and reports no other."""

import argparse
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdaso
from jdaso.checkpoint.node_part import checkpointer, part_tree, to_host_arrays
from jdaso.checkpoint.verify import run, verify
from jdaso.core.exchange import HEADER_SIZE, HostState, PostedExchange
from jdaso.core.wire import block_bits

NODES = 2
PARAMS = {"w": jnp.linspace(-1, 1, 6).reshape(2, 3), "half": jnp.ones(3, jnp.bfloat16)}
AT = "opt_state.1."


def state(node, wire):
    """EASGD with an exchange in flight over MPI. Parameters, counts and losses differ by node."""
    averaging = jdaso.easgd(jdaso.single_exchange(), period=4, wire=wire)
    optimizer, state = optax.chain(optax.sgd(0.1, momentum=0.9), averaging).init(PARAMS)
    fragment = state.fragments[0]._replace(posted=jnp.array(True), exchange=HostState(jnp.int32(0)))
    if wire == "int8":
        fragment = fragment._replace(feedback=fragment.feedback._replace(block_bits=jnp.int32(8)))
    state = state._replace(
        step=jnp.int32(9),
        exchanges=jnp.int32(2),
        skipped=jnp.int32(node),
        losses=jnp.array([node, 1.0]),
        fragments=(fragment._replace(number=jnp.int32(1)),),
    )
    params = {name: x * (1 + node) for name, x in PARAMS.items()}
    return to_host_arrays(
        {"params": params, "opt_state": (optimizer, state), "best": np.nan, "seed": 7}
    )


def posted(wire):
    leaves, header = [np.ones((2, 3), np.float32)], np.ones(HEADER_SIZE, np.float32)
    return {(0, 1): PostedExchange(8, header, leaves, (block_bits(wire),))}


def write(
    folder, change=lambda arrays, posted: None, name="000003_step_9", wire: str | None = None
):
    """Writes a checkpoint of two nodes with a change in the second part."""
    writer = checkpointer()
    for node in range(NODES):
        arrays, in_flight = state(node, wire), posted(wire)
        if node == 1:
            change(arrays, in_flight)
        tree = part_tree(arrays, in_flight, ["params.w", "params.half"])
        writer.save(folder / name / f"node_{node}_of_{NODES}", tree)
    writer.close()
    return folder / name


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return write(tmp_path_factory.mktemp("checkpoints"))


def test_a_sound_checkpoint_has_no_defect(sound):
    for path in (sound, sound.parent):
        table, defects = verify(path)
        assert defects == []
        head, *rows = table.splitlines()[1:]
        assert head.split()[:4] == ["node", "arrays", "MB", "step"]
        assert [row.split()[0] for row in rows] == ["0", "1"]
        assert [row.split()[3:] for row in rows] == [
            ["9", "2", "1", str(node), "0", "yes"] for node in range(NODES)
        ]


def put(name, value):
    def change(arrays, posted):
        del posted
        assert name in arrays
        arrays[name] = np.asarray(value(arrays[name]), arrays[name].dtype)

    return change


CHANGES = {
    "step": (
        put(AT + "step", lambda x: x + 1),
        f"node 1 differs from node 0: {AT}step is 10, not 9",
    ),
    "center": (
        put(AT + "fragments.0.merge.center.w", lambda x: x + 1e-7),
        f"node 1 differs from node 0: {AT}fragments.0.merge.center.w is",
    ),
    "plan": (put(AT + "plan.period", lambda x: x + 1), f"{AT}plan.period is 5, not 4"),
    "nan": (put("params.w", lambda x: x * np.nan), "node 1: params.w is not finite"),
    "infinite": (put("params.half", lambda x: x * np.inf), "node 1: params.half is not finite"),
    "missing": (lambda arrays, _: arrays.pop("seed"), "seed is missing, not int64()"),
    "shape": (
        lambda arrays, _: arrays.update({"params.w": np.ones((3, 2), np.float32)}),
        "params.w is float32(3, 2), not float32(2, 3)",
    ),
    "exchange": (
        lambda _, posted: posted.clear(),
        "node 1: a state waits for exchange 1, which is not in flight",
    ),
    "other exchange": (
        lambda _, posted: posted.update({(0, 2): posted[0, 1]}),
        "node 1: exchange 2 is in flight, and no state waits for it",
    ),
    "another exchange": (
        lambda _, posted: posted.update({(1, 1): posted.pop((0, 1))}),
        "node 1: exchange 1 of the exchange at position 1 is in flight, and no state waits",
    ),
    "exchange of another shape": (
        lambda _, posted: posted.update(
            {(0, 1): posted[0, 1]._replace(leaves=posted[0, 1].leaves * 2, block_bits=(0, 0))}
        ),
        "node 1 differs from node 0: the exchanges in flight are {'0.1': 'step 8, ",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_defect_is_named(tmp_path, case):
    change, message = CHANGES[case]
    _, defects = verify(write(tmp_path, change))
    assert any(message in defect for defect in defects), defects


@pytest.mark.parametrize(("wire", "said", "bits"), [(None, 0, 8), ("int8", 8, 4)])
def test_an_exchange_of_other_bits_than_its_state_says_is_named(tmp_path, wire, said, bits):
    def change(_, posted):
        posted[0, 1] = posted[0, 1]._replace(block_bits=(bits,))

    assert verify(write(tmp_path / "sound", wire=wire))[1] == []
    _, defects = verify(write(tmp_path / "changed", change, wire=wire))
    text = f"node 1: exchange 1 has block_bits of {bits}, {AT}fragments.0 of {said}"
    assert text in defects


def test_a_missing_part_is_named_and_the_checkpoint_before_is_chosen(tmp_path, sound):
    shutil.copytree(sound, tmp_path / sound.name)
    newer = tmp_path / "000004_step_12"
    shutil.copytree(sound / "node_1_of_2", newer / "node_1_of_2")
    _, (defect,) = verify(newer)
    assert "000004_step_12 (parts: node_1_of_2) is not complete" in defect
    table, defects = verify(tmp_path)
    assert sound.name in table
    assert "newer, 000004_step_12 (parts: node_1_of_2) is not complete" in table
    assert not defects
    shutil.rmtree(tmp_path / sound.name)
    _, (defect,) = verify(tmp_path)
    assert "000004_step_12 (parts: node_1_of_2) is not complete" in defect


def test_a_damaged_part_is_named_and_the_others_are_checked(tmp_path, sound):
    copy = tmp_path / sound.name
    shutil.copytree(sound, copy)
    (copy / "node_0_of_2" / "manifest.ocdbt").write_bytes(b"nothing")
    table, (defect,) = verify(copy)
    assert f"{copy / 'node_0_of_2'} cannot be read; it is damaged" in defect
    assert len(table.splitlines()) == 3


def command(path):
    ended = subprocess.run(
        [sys.executable, "-m", "jdaso", "verify", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_the_exit_status_tells(tmp_path, sound):
    status, output = command(sound)
    assert (status, "A training can continue from this checkpoint." in output) == (0, True), output
    shutil.copytree(sound / "node_0_of_2", tmp_path / sound.name / "node_0_of_2")
    status, output = command(tmp_path)
    assert (status, "jdaso verify: " in output) == (1, True), output
    assert "is not complete" in output


def test_the_one_that_is_sound_is_named(tmp_path, sound, capsys):
    shutil.copytree(sound, tmp_path / "000001_step_3")
    for name in ("000002_step_6", "000003_step_9"):
        shutil.copytree(sound, tmp_path / name)
        (tmp_path / name / "node_0_of_2" / "manifest.ocdbt").write_bytes(b"nothing")
    with pytest.raises(SystemExit, match=r"damaged(.|\n)*without a defect is 000001_step_3"):
        run(argparse.Namespace(checkpoint=tmp_path))
    assert "000003_step_9" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["none", "empty"])
def test_a_folder_without_checkpoints_is_named(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=rf"{name} is not a checkpoint|the folder .*{name}"):
        verify(tmp_path / name)
