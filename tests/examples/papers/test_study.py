"""Trainings on a virtual cluster: the counts, and agreement with one node."""

import functools
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import study

import jdaso
from jdaso.core.block_format import FORMATS

MODEL = study.SmallCNN(widths=(4,))  # compiles fast
PARAMETERS = (9 * 4 + 4) + (4 * 4 * 4 * 10 + 10)
DEFAULT_PARAMETERS = 6090  # of the network that compare trains on digits


@pytest.fixture(scope="module")
def data():
    pytest.importorskip("sklearn")
    return study.digits()


def local(averaging, *args, **kwargs):
    return lambda exchange: jdaso.chain(optax.sgd(0.05, 0.9), averaging(exchange, *args, **kwargs))


train = functools.partial(study.train, model=MODEL)


def test_synchronous_nodes_are_one_node_with_all_of_their_images(data):
    def make_optimizer(exchange):
        return jdaso.chain(
            optax.sgd(0.05, 0.9), jdaso.allreduce_gradients(exchange, wire="float32")
        )

    two = train(data, make_optimizer, nodes=2, batch_size=32, epochs=2)
    one = train(data, make_optimizer, nodes=1, batch_size=64, epochs=2)
    np.testing.assert_allclose(two.losses, one.losses, rtol=2e-4)
    assert two.accuracy == pytest.approx(one.accuracy, abs=1 / 360)
    assert one.bytes_sent[-1] == 0


def test_every_node_takes_its_own_images_once_in_an_epoch():
    order = study.batches(num_images=100, nodes=4, batch_size=8, epochs=3, seed=1)
    for epoch in np.split(order, 3):
        assert len(np.unique(epoch)) == epoch.size == 96
    assert (order[:3] != order[3:6]).any()
    joint = study.batches(num_images=100, nodes=1, batch_size=32, epochs=3, seed=1)
    np.testing.assert_array_equal(order.reshape(9, 32), joint[:, 0])


# In int8 and float4 each leaf fills whole blocks of 64 numbers. The leaves have 36, 4, 640 and 10
# numbers.
@pytest.mark.parametrize(
    ("nodes", "wire", "size"),
    [
        (2, "float32", 4 * PARAMETERS),
        (4, "bfloat16", 2 * PARAMETERS),
        (2, "int8", 13 * 65),
        (2, "float4", 13 * 33),
    ],
)
def test_bytes_are_those_of_an_all_reduce(data, nodes, wire, size):
    result = train(data, local(jdaso.dasgd, 4, 1, wire=wire), nodes, 64, epochs=1)
    exchanges = len(result.losses) // 4
    assert (result.exchanges, result.waits) == (exchanges, 0)
    expected = np.repeat(np.arange(exchanges + 1), 4)[1 : len(result.losses) + 1]
    first = 4 * PARAMETERS if wire in FORMATS else size  # the first mean is sent in float32
    expected = np.where(expected > 0, first + (expected - 1) * size, 0)
    np.testing.assert_array_equal(result.bytes_sent, 2 * (nodes - 1) * expected // nodes)


def test_fragments_send_only_their_own_bytes(data):
    options = {"delay": 1, "mix": 0.5, "fragments": 2}
    result = train(data, local(jdaso.diloco, 4, **options), 2, 64, epochs=1)
    assert len(result.losses) == 11
    posts = np.diff(result.bytes_sent, prepend=0)
    assert posts.nonzero()[0].tolist() == [1, 3, 5, 7, 9]
    assert posts[1] + posts[3] == PARAMETERS * 4
    assert result.exchanges == 5


def test_blocking_phases_send_on_their_own_wire_and_wait(data):
    schedule = jdaso.cycling(period=4, warmup=11, cooldown=0, total=22, epoch=11, delay=2)
    result = train(data, local(jdaso.daso, schedule=schedule), 2, 64, epochs=2)
    posts = np.diff(result.bytes_sent, prepend=0) / PARAMETERS
    # 11 blocking exchanges in bfloat16. Two delayed ones and the mean of the epoch in float32.
    assert posts.tolist() == [2] * 11 + [0, 0, 0, 4, 0, 0, 0, 4, 0, 0, 4]
    assert (result.exchanges, result.waits) == (14, 12)


def test_bytes_are_counted_beyond_32_bits(data, monkeypatch):
    # Each exchange sends 3/4 of 2^32 bytes, so the counter overflows at the second one.
    wide = np.dtype([("", "u1", (3 * 2**30 // PARAMETERS,))])
    monkeypatch.setattr(study, "wire_dtypes", lambda dtypes, wire: [wide] * len(dtypes))
    result = train(data, local(jdaso.local_sgd, 4), 2, 64, epochs=1)
    assert result.bytes_sent[-1] == 2 * PARAMETERS * wide.itemsize > 2**32


def test_a_node_that_talks_to_nobody_sends_nothing_and_may_be_evaluated_alone(data):
    result = train(
        data,
        lambda _: jdaso.chain(optax.sgd(0.05), jdaso.local_sgd(jdaso.single_exchange(), 100)),
        nodes=2,
        batch_size=64,
        epochs=1,
        evaluated=lambda opt_state, params: params,
    )
    assert (result.exchanges, result.waits, result.bytes_sent[-1]) == (0, 0, 0)


def test_what_is_in_flight_at_the_end_is_merged(data):
    def zeros_unless_posted(opt_state, params):
        posted = jdaso.core.averaging_state(opt_state).fragments[0].posted
        return jax.tree.map(lambda x: x * posted, params)

    # There are 11 steps. The exchange posted at the 8th would be merged at the 16th.
    result = train(data, local(jdaso.dasgd, 8, 8), 4, 32, 1, evaluated=zeros_unless_posted)
    assert result.exchanges == 1
    assert result.accuracy == pytest.approx(np.mean(data.test_labels == 0))


def test_too_few_images_are_refused(data):
    with pytest.raises(
        ValueError, match=r"at most 179, because 8 nodes .* share 1437 images, got 500"
    ):
        study.batches(len(data.labels), nodes=8, batch_size=500, epochs=1)


def test_a_folder_of_images(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for side, number in (("train", 3), ("val", 1)):
        for label in ("cat", "dog"):
            (tmp_path / side / label).mkdir(parents=True)
            for i in range(number):
                pixels = np.full((4, 6, 3), 10 * i, np.uint8)
                image.fromarray(pixels).save(tmp_path / side / label / f"{i}.png")
    data = study.folder(tmp_path, size=8)
    assert data.images.shape == (6, 8, 8, 3)
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.images[:, 0, 0, 0].tolist() == [0, 10, 20] * 2
    assert data.test_labels.tolist() == [0, 1]
    (tmp_path / "val" / "dog").rename(tmp_path / "val" / "bird")
    with pytest.raises(ValueError, match="the same classes"):
        study.folder(tmp_path)


def test_a_folder_without_images_is_refused(tmp_path):
    with pytest.raises(ValueError, match=rf"found no {tmp_path / 'train'}/<class>/"):
        study.folder(tmp_path)


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="pip install scikit-learn"):
        study.digits()


def test_convolution_is_that_of_lax():
    from small_cnn import Convolution

    images = jax.random.normal(jax.random.key(0), (2, 8, 6, 3))
    ours, variables = Convolution(5).init_with_output(jax.random.key(1), images)
    kernel = variables["params"]["kernel"].reshape(3, 3, 3, 5)
    # Rows and columns 0, 2, 4 ... are the centers of the windows.
    theirs = jax.lax.conv_general_dilated(
        images, kernel, (2, 2), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.slow
def test_compare_runs_from_end_to_end(tmp_path, data):
    options = ["--nodes=2", "--batch-size=128", "--epochs=2", "--period=2", f"--out={tmp_path}"]
    ended = subprocess.run(
        [sys.executable, str(Path(study.__file__).with_name("compare.py")), *options],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stderr
    lines = {line[:30].strip(): line.split() for line in ended.stdout.splitlines()}
    steps = 10
    sync = [f"{steps}", f"{steps}", f"{4 * DEFAULT_PARAMETERS}", "1.000"]
    assert lines["sync, float32"][-4:] == sync
    assert lines["sync, bfloat16"][-1] == "0.500"
    assert lines["none"][-4:] == ["0", "0", "0", "0.000"]
    for name in ("local_sgd", "dasgd", "easgd", "eamsgd", "diloco", "daso, cycling"):
        assert any(line.startswith(name) for line in lines), ended.stdout
    assert "has blocking phases only: choose at least 3" in ended.stdout
    assert (tmp_path / "plot.png").stat().st_size > 1000
