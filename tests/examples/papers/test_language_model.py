"""The example of a language model: its model, its text, and whole runs on two processes."""

import functools
import re
import shutil
from pathlib import Path

import config
import final_model
import jax
import jax.numpy as jnp
import language_model
import numpy as np
import pytest
from batches import train_indices
from flax import nnx
from language import text, transformer
from launch import mpiexec
from saved import lines, saved

SHAPE = transformer.Shape(vocabulary=256, layers=4, width=16, heads=2, hidden=24)
TINY = {"layers": 2, "width": 16, "heads": 2, "hidden": 24, "context": 16, "batch_size": 4}
STEPS = 12  # 2 epochs of 6 steps, each of 2 nodes x 2 devices x 4 sequences x 16 tokens
RUN = [
    "--devices 2 --epochs 2 --epoch-tokens 1536 --test-tokens 512 --save-every 3",
    "--sync streaming_diloco --period 4 --delay 2 --warmup-epochs 1",
    "--outer-warmup 1",  # the outer momentum is then not zero
    *(f"--{name.replace('_', '-')} {value}" for name, value in TINY.items()),
]


def parsed(**keys):
    options = [x for k, v in {**TINY, **keys}.items() for x in (config.option(k), str(v))]
    return config.parse(options, defaults=language_model.DEFAULTS)


def model(**options):
    return transformer.Transformer(SHAPE, nnx.Rngs(0), **options)


def tokens(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 256, shape), jnp.int32)


def test_a_prediction_does_not_depend_on_what_follows():
    ours, x, y = model(), tokens(0, 2, 12), tokens(1, 2, 12)
    mixed = jnp.concatenate([x[:, :7], y[:, 7:]], axis=1)
    difference = jnp.abs(ours(x) - ours(mixed)).max(axis=(0, 2))
    assert (difference[:7] < 1e-5).all()
    assert (difference[7:] > 1e-3).all()


def test_a_rotation_keeps_lengths_and_depends_on_the_distance_only():
    q, k = np.random.default_rng(0).normal(size=(2, 8)).astype("f4")

    def rotated(x):
        return np.asarray(transformer.rotated(jnp.asarray(np.tile(x, (1, 9, 1, 1)))))[0, :, 0]

    products = rotated(q) @ rotated(k).T
    np.testing.assert_allclose((rotated(q) ** 2).sum(-1), (q**2).sum(), rtol=1e-5)
    for distance in range(-8, 9):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-4)
    assert np.ptp(products) > 0.1


def test_logits_of_16_bit_activations_have_32_bits():
    ours, x = model(dtype=jnp.bfloat16), tokens(0, 2, 12)
    logits, more_precise = ours(x), model()(x)
    assert logits.dtype == jnp.float32
    assert (logits != logits.astype(jnp.bfloat16)).mean() > 0.9
    np.testing.assert_allclose(logits, more_precise, atol=0.05 * jnp.abs(more_precise).max())


def test_remat_computes_blocks_again_and_changes_no_gradient():
    def gradient(remat):
        graphdef, params = nnx.split(model(remat=remat))
        loss = lambda p: nnx.merge(graphdef, p)(tokens(0, 2, 9), train=True).var()  # noqa: E731
        blocks = re.findall(r"= (?:remat2?|checkpoint)\[", str(jax.make_jaxpr(loss)(params)))
        assert len(blocks) == (SHAPE.layers if remat else 0)
        return jax.jit(jax.grad(loss))(params)

    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)  # noqa: E731
    jax.tree.map(same, gradient(False), gradient(True))


@pytest.mark.parametrize(
    ("name", "vocabulary", "millions"),
    [
        ("text_35m_diloco", 32_000, 35),
        ("text_35m_diloco", 256, 19),
        ("text_150m_streaming", 32_000, 144),
        ("text_150m_streaming", 256, 116),
    ],
)
def test_configurations_have_the_sizes_that_they_name(name, vocabulary, millions):
    path = Path(language_model.__file__).with_name("configs") / f"{name}.py"
    keys = config.parse(["--config", str(path)], defaults=language_model.DEFAULTS)
    create = functools.partial(language_model.create_model, keys, vocabulary)
    params = nnx.state(nnx.eval_shape(create), nnx.Param)  # allocates nothing
    assert round(sum(x.size for x in jax.tree.leaves(params)) / 1e6) == millions
    assert keys.remat == (keys.layers == 12)
    assert f"{millions} M" in path.read_text()


def test_layers_are_dealt_to_fragments_in_turn():
    params = nnx.state(model(), nnx.Param)
    fragment = transformer.strided_fragments(2)
    by_layer = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        layer = re.search(r"'layers'\]\[(\d)\]", jax.tree_util.keystr(path))
        by_layer.setdefault(layer and int(layer[1]), set()).add(fragment(path))
    assert by_layer == {None: {0}, 0: {0}, 1: {1}, 2: {0}, 3: {1}}


@pytest.fixture
def folder(tmp_path):
    """Three text files, a binary one and a hidden one."""
    for name in "abc":
        (tmp_path / name).write_text(name * 1000)
    (tmp_path / "binary").write_bytes(b"x\0y")
    (tmp_path / ".hidden").write_text("z" * 1000)
    return tmp_path


def test_text_is_split_in_a_training_part_and_one_held_out(folder):
    loaded = text.load(str(folder), text.byte_tokenizer())
    both = np.concatenate([loaded.train, loaded.test])
    assert len(loaded.test) == 3002 // 20
    assert {chr(x): int((both == x).sum()) for x in set(both.tolist())} == {
        **dict.fromkeys("abc", 1000),
        "\n": 2,
    }
    assert loaded.bytes_per_token == 1


@pytest.fixture
def tokenizer_file(tmp_path_factory):
    """Writes a tokenizer of bytes as a file, with all that may change the number of tokens."""
    tokenizers = pytest.importorskip("tokenizers")

    def write(**parts):
        letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        merges = [("d", "e"), ("de", "f")]
        known = dict(zip(letters, range(10, 266), strict=True)) | {"de": 300, "def": 301}
        made = tokenizers.Tokenizer(tokenizers.models.BPE(known, merges))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        made.add_special_tokens(["<s>"])
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
        made.enable_truncation(8)
        made.enable_padding(length=8, pad_token="<s>")
        for name, part in parts.items():
            setattr(made, name, part)
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        made.save(str(path))
        return str(path)

    return write


def test_a_tokenizer_encodes_the_whole_text_and_nothing_else(tokenizer_file, folder):
    tokenizer = text.tokenizer(tokenizer_file())
    tokens = tokenizer.encode("def é: <s>".encode())
    assert tokens[0] == 301
    assert len(tokens) == 1 + len(" é: ".encode()) + 1  # "<s>" is written in the text
    assert max(tokens) < tokenizer.vocabulary
    assert tokenizer.decode(tokens) == "def é: <s>".encode()
    for name in "abc":  # the text held out would begin within a character
        (folder / name).write_text("€" * 1010)
    loaded = text.load(str(folder), tokenizer)
    both = tokenizer.decode(np.concatenate([loaded.train, loaded.test])).decode()
    assert both == "\n".join(["€" * 1010] * 3)
    assert loaded.bytes_per_token == 1


def test_a_tokenizer_that_loses_text_is_refused(tokenizer_file, folder):
    import tokenizers

    (folder / "a").write_text("A" * 2000)
    (folder / "b").write_text("B" * 2000)
    (folder / "c").write_text("C" * 2000)
    small = text.tokenizer(tokenizer_file(normalizer=tokenizers.normalizers.Lowercase()))
    with pytest.raises(
        ValueError, match=r"300 bytes.* bits per byte would be wrong.*became b'[abc]"
    ):
        text.load(str(folder), small)


def test_a_file_that_a_tokenizer_cannot_encode_is_named(tokenizer_file, folder):
    (folder / "b").write_bytes(b"b" * 9 + b"\xff")  # most of the text is for training
    text.load(str(folder), text.byte_tokenizer())
    with pytest.raises(ValueError, match=r"/b is not UTF-8 at byte 9.*--tokenizer bytes"):
        text.load(str(folder), text.tokenizer(tokenizer_file()))


def test_nodes_never_train_on_the_same_text_and_never_on_the_test():
    loaded = text.Text(np.arange(5000), np.arange(5000, 5300), 1.0, 0)
    data = text.dataset(loaded, context=16, epoch_tokens=640, test_tokens=160)
    seen = []
    for part in range(2):
        indices = [train_indices(40, part, 2, 4, 0, epoch, own_parts=True) for epoch in range(30)]
        rngs = map(np.random.default_rng, range(10**6))
        loaded = [data.train.load(i, next(rngs)) for i in np.concatenate(indices).ravel()]
        assert all((labels == inputs + 1).all() for inputs, labels in loaded)
        seen.append(set(np.concatenate([np.append(x, y[-1]) for x, y in loaded]).tolist()))
    assert not seen[0] & seen[1]
    assert max(seen[0] | seen[1]) < 5000
    tests = [data.test.load(i, None)[0] for i in range(data.test.size)]
    assert data.test.size == 10
    assert np.unique(tests).size == 160
    assert np.min(tests) == 5000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "nowhere"}, "nowhere does not exist"),
        ({"test_tokens": 8}, "--test-tokens"),
        ({"context": 10**6}, "--context"),
        ({"heads": 3}, "width must be a multiple of 2 \\* heads"),
        ({"tokenizer": "nothing.json"}, "tokenizer"),
        ({"sync": "streaming_diloco", "fragments": 3}, "--fragments"),
    ],
)
def test_wrong_keys_are_named(folder, changes, message):
    keys = {"data": str(folder), "epoch_tokens": 64, "test_tokens": 64, **changes}
    with pytest.raises((ValueError, ImportError, SystemExit), match=message):
        language_model.task(parsed(**keys))


def train(out, *options, processes=2, **env):
    command = " ".join([*RUN, *options]).split()
    return mpiexec(processes, "language.py", "--out", out, *command, timeout=300, **env)


def passed(out, *options, **env):
    ended = train(out, *options, **env)
    assert ended.returncode == 0, ended.output
    return ended.output


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A run with parameters spread over two devices."""
    out = tmp_path_factory.mktemp("language") / "sharded"
    passed(out, "--shard", "--accumulate 2")
    return out


def test_sharded_and_replicated_parameters_give_the_same_losses(sharded, tmp_path):
    output = passed(tmp_path)
    assert re.search(r"test loss \d\.\d{4}, test bits per byte", output), output
    assert (tmp_path / "report.png").stat().st_size > 1000
    for mine, theirs in zip(lines(tmp_path), lines(sharded), strict=True):
        for key in ("loss", "test_loss", "test_bits_per_byte"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-4)
        assert mine["bytes_sent"] == theirs["bytes_sent"]
        assert mine["tokens_per_second"] > 0
    assert "the outer optimizer" not in output


def final_loss(out):
    """Asserts that the final model of a run has its last test loss."""
    task = language_model.task(parsed(epoch_tokens=1536, test_tokens=512))
    tests = [task.dataset.test.load(i, None) for i in range(task.dataset.test.size)]
    inputs, labels = map(np.stack, zip(*tests, strict=True))
    model, tokenizer = language_model.load(out)
    assert tokenizer.vocabulary == 256
    score = task.score(np.asarray(task.counts(model(inputs), labels)))
    assert score["test_loss"] == pytest.approx(lines(out)[-1]["test_loss"], rel=1e-5)


def test_the_final_model_is_the_one_that_was_evaluated(sharded):
    final_loss(sharded)
    with pytest.raises(ValueError, match=r"checkpoints/model does not exist"):
        final_model.load(sharded / "checkpoints", model())


def test_a_run_without_a_final_model_writes_it_when_it_is_resumed(sharded):
    shutil.rmtree(sharded / "model")
    output = passed(sharded, "--shard", "--accumulate 2", "--resume")
    assert f"resumed at step {STEPS} of {STEPS}, bit for bit; no steps are left" in output
    final_loss(sharded)


def test_joined_processes_share_the_parameters_of_their_node(sharded, tmp_path):
    """Two nodes of two processes, each with one device, instead of one process with two."""
    joined = "--devices 0 --processes-per-node 2 --join-processes"
    passed(tmp_path, "--shard", "--accumulate 2", joined, processes=4)
    final_loss(tmp_path)
    for mine, theirs in zip(lines(tmp_path), lines(sharded), strict=True):
        # The sequences are other ones, from the same parts of the text.
        assert mine["test_loss"] == pytest.approx(theirs["test_loss"], rel=0.01)
        assert mine["exchanges"] == theirs["exchanges"]


def test_a_sharded_run_that_was_killed_resumes_bit_for_bit(sharded, tmp_path):
    """Killed while it saves step 9. Step 6 is complete, unless the other node is late."""
    out = tmp_path / "killed"
    options = ("--shard", "--accumulate 2")
    ended = train(out, *options, SIGNAL="SIGKILL:000003_*/node_1_of_2.*tmp:0", PAUSE="0.1")
    assert ended.returncode != 0, ended.output
    output = passed(out, *options, "--resume")
    assert re.search(rf"resumed at step [36] of {STEPS}, bit for bit", output), output
    for mine, theirs in zip(saved(out, STEPS), saved(sharded, STEPS), strict=True):
        assert mine.keys() == theirs.keys()
        for name, array in mine.items():
            np.testing.assert_array_equal(array, theirs[name], err_msg=name)
    kept = ("step", "loss", "test_loss")
    outcomes = [[[x.get(key) for key in kept] for x in lines(run)] for run in (out, sharded)]
    assert outcomes[0] == outcomes[1]
