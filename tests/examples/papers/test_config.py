"""Keys come from defaults, a file and the command line. Errors name the wrong key."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import config
import language_model
import models
import pytest
from classification import Classification as Config
from segment import Segmentation

EXAMPLES = Path(config.__file__).parent
FILES = sorted((EXAMPLES / "configs").glob("*.py"))


def parse(argv=(), description="", defaults=Config()):  # noqa: B008, frozen
    """The configuration of train.py."""
    return config.parse(list(argv), description, defaults)


@pytest.fixture
def file(tmp_path):
    """Writes a configuration file and returns its path."""

    def write(text):
        path = tmp_path / "experiment.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def refused():
    """The message with which a call ends the program."""

    def message(function, *args):
        with pytest.raises(SystemExit) as ended:
            function(*args)
        return str(ended.value)

    return message


def test_without_arguments_everything_has_its_default():
    parsed = parse([])
    own = {"period": 4, "delay": 2, "cooldown_epochs": 3, "fragments": 1, "moments": "local"}
    own |= {"momentum": 0.9, "decay_floor": 0.0}
    assert parsed == dataclasses.replace(Config(), **own)
    assert config.complete(parsed) == parsed


def test_files_go_over_defaults_and_options_over_files(file):
    path = file("import math as _math\nepochs = 3 * int(_math.sqrt(900))\nmomentum = 0\nseed = 1")
    parsed = parse(
        ["--config", path, "--seed", "2", "--keep", "9"],
        defaults=dataclasses.replace(Config(), keep=5, batch_size=7),
    )
    found = [parsed.epochs, parsed.momentum, parsed.seed, parsed.keep, parsed.batch_size]
    assert found == [90, 0.0, 2, 9, 7]
    assert type(parsed.momentum) is float


def other(field):
    """A value that is not the default of a key, and its notation on the command line."""
    valid, default = field.metadata["valid"], field.default
    if isinstance(default, bool):
        return not default, ["--no-" * default or f"--{field.name}".replace("_", "-")]
    if isinstance(valid, tuple):
        value = next(choice for choice in valid if choice != default)
    else:
        value = {
            "data": "images",
            "out": "elsewhere",
            "decay_epochs": (4, 12),
            "switches": (4, 12),
            "own_weight": 0.75,
            "decay_factor": 0.25,
            "decay_threshold": 0.125,
            "min_area": 0.5,
            "momentum": 0.5,
            "label_smoothing": 0.5,
            "learning_rate": 0.5,
            "weight_decay": 0.5,
            **dict.fromkeys(("decay_floor", "beta1", "beta2", "clip"), 0.5),
            **dict.fromkeys(("outer_rate", "outer_momentum"), 0.5),
            "accumulate": 4,
        }.get(field.name, 2 if default != 2 else 3)
    words = value if isinstance(value, tuple) else (value,)
    return value, [config.option(field.name), *map(str, words)]


# Options that a key needs to have an effect.
BESIDE = {
    "decay_factor": ["--decay", "plateau"],
    "decay_patience": ["--decay", "plateau"],
    "decay_threshold": ["--decay", "plateau"],
    "decay_epochs": ["--decay", "step"],
    "decay": [],
    "own_weight": ["--sync", "dasgd"],
    **{key: ["--sync", "diloco"] for key in ("outer_rate", "outer_momentum", "outer_warmup")},
    **{key: ["--optimizer", "adamw"] for key in ("beta1", "beta2")},
    "processes": ["--sync", "passm"],
    "switches": ["--sync", "passm_plus"],
    "epochs": ["--warmup-epochs", "1", "--cooldown-epochs", "1"],
}


@pytest.mark.parametrize("field", dataclasses.fields(Config), ids=lambda field: field.name)
def test_every_key_is_an_option(field):
    value, words = other(field)
    parsed = parse([*BESIDE.get(field.name, []), *words])
    assert getattr(parsed, field.name) == value != getattr(Config(), field.name)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("epoch = 90", ["epoch = 90", "did you mean epochs?"]),
        ("learningrate = 0.1", ["learningrate = 0.1", "did you mean learning_rate?"]),
        ("epochs = '90'", ["epochs must be an integer, got '90'"]),
        ("epochs = True", ["epochs must be an integer, got True"]),
        ("epochs = 90.0", ["epochs must be an integer, got 90.0"]),
        ("epochs = None", ["epochs must be an integer, got None"]),
        ("epochs = 0", ["epochs must be an integer in [1, inf), got 0"]),
        ("nesterov = 1", ["nesterov must be True or False, got 1"]),
        ("learning_rate = '0.1'", ["learning_rate must be a number, got '0.1'"]),
        ("learning_rate = float('nan')", ["learning_rate must be a number in (0, inf), got nan"]),
        ("decay_epochs = 30", ["decay_epochs must be integers, got 30"]),
        ("decay_epochs = 30, 0", ["decay_epochs must be integers in [1, inf), got (30, 0)"]),
        ("model = 'resnet52'", ["model must be one of", "resnet50", "got 'resnet52'"]),
        ("data = 7", ["data must be a string, got 7"]),
        ("_epochs = 90", ["sets no key"]),
        ("epochs = ninety", ["NameError", "ninety"]),
        ("epochs = = 90", ["SyntaxError"]),
    ],
)
def test_what_is_wrong_in_a_file_is_named(file, refused, text, named):
    path = file(text)
    message = refused(parse, ["--config", path])
    assert all(part in message for part in [path, *named]), message


def test_a_file_that_is_missing_is_named(refused, tmp_path):
    for path in (tmp_path / "none.py", tmp_path):
        assert f"the file {path} does not exist" in refused(parse, ["--config", str(path)])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--epoch 3", "--epoch is not an option; did you mean --epochs?"),
        ("--learning-rat=0.1", "did you mean --learning-rate?"),
        ("--momentum 1", "--momentum must be a number in [0, 1), got 1.0."),
        ("--momentum nan", "--momentum must be a number in [0, 1), got nan."),
        ("--label-smoothing 1", "--label-smoothing must be a number in [0, 1), got 1.0."),
        ("--min-area 0", "--min-area must be a number in (0, 1], got 0.0."),
        ("--batch-size 0", "--batch-size must be an integer in [1, inf), got 0."),
        ("--sync dazo", "--sync must be one of daso, dasgd"),
        ("--epochs 3", "--warmup-epochs must be less than --epochs 3, got 3."),
        ("--epochs 5", "must not exceed --epochs 5, got 3 + 3."),
        ("--period 4 --delay 5", "--delay must not exceed --period 4, got 5."),
        (
            "--period auto --delay 5",
            "--period auto chooses the delay as well; leave --delay out, or set it to none if a "
            "file sets it.",
        ),
        ("--period auto --sync easgd", "--period auto needs --sync daso or dasgd, got easgd."),
        ("--fragments auto", "--fragments must be an integer, got 'auto'."),
        ("--period 0", "--period must be an integer in [1, inf), got 0."),
        ("--decay step", "--decay step needs --decay-epochs"),
        ("--decay step --decay-epochs 12 6", "--decay-epochs must increase within [3, 24)"),
        ("--decay step --decay-epochs 2 6", "--decay-epochs must increase within [3, 24)"),
        ("--decay step --decay-epochs 6 24", "--decay-epochs must increase within [3, 24)"),
        ("--decay-factor 0.5", "--decay-factor has no effect with --decay cosine"),
        ("--decay plateau --decay-epochs 6", "--decay-epochs has no effect with --decay plateau"),
        ("--sync easgd --delay 2", "--delay has no effect with --sync easgd"),
        (
            "--sync dasgd --cooldown-epochs 1",
            "--cooldown-epochs has no effect with --sync dasgd",
        ),
        ("--own-weight 0", "--own-weight has no effect with --sync daso"),
        ("--sync none --wire float32", "--wire has no effect with --sync none"),
        ("--sync allreduce_gradients --period 4", "--period has no effect with --sync allreduce"),
        ("--sync eamsgd --nesterov", "--nesterov has no effect with --sync eamsgd"),
        ("--sync passm --nesterov", "--nesterov has no effect with --sync passm"),
        ("--processes 4", "--processes has no effect with --sync daso"),
        ("--sync passm --switches 3", "--switches has no effect with --sync passm"),
        ("--sync passm_plus --switches 9 4", "--switches must increase within [1, 24), got [9, 4]"),
        ("--sync passm_plus --switches 24", "--switches must increase within [1, 24), got [24]"),
        ("--sync passm --period 4", "--period has no effect with --sync passm"),
        ("--momentum 0 --nesterov", "--nesterov needs a --momentum above 0"),
        ("--optimizer adamw --momentum 0", "--momentum has no effect with --optimizer adamw"),
        ("--optimizer adamw --nesterov", "--nesterov has no effect with --optimizer adamw"),
        ("--optimizer adamw --sync eamsgd", "--sync eamsgd needs --optimizer sgd, got adamw"),
        ("--sync passm --shard", "--shard has no effect with --sync passm"),
        ("--sync passm --clip 1", "--clip has no effect with --sync passm"),
        ("--accumulate 3", "--batch-size must be a multiple of --accumulate 3, got 16."),
        ("--outer-rate 1", "--outer-rate has no effect with --sync daso"),
    ],
)
def test_options_that_do_not_fit_are_named(refused, line, message):
    assert message in refused(parse, line.split())


def test_a_value_of_another_type_is_named_by_its_option(capsys, refused):
    refused(parse, ["--epochs", "many"])
    assert "--epochs: invalid int value: 'many'" in capsys.readouterr().err


def test_every_model_can_be_chosen():
    (field,) = (field for field in dataclasses.fields(Config) if field.name == "model")
    assert set(field.metadata["valid"]) == set(models.IMAGE_SIZE)


def test_each_algorithm_has_its_own_defaults():
    weights = {sync: parse(["--sync", sync]).own_weight for sync in config.SYNC}
    assert weights == dict.fromkeys(config.SYNC) | {"dasgd": 0.25, "diloco": 0.5}
    factors = [
        parse(["--decay", "plateau"]).decay_factor,
        parse(["--decay", "step", "--decay-epochs", "9"]).decay_factor,
        parse([]).decay_factor,
    ]
    assert factors == [0.5, 0.1, None]


def test_none_takes_back_what_a_file_says(file):
    path = file("period = 8\ndelay = 3\ndecay = 'step'\ndecay_epochs = 9, 12")
    words = ["--sync", "easgd", "--delay", "none", "--decay", "constant", "--decay-epochs"]
    parsed = parse(["--config", path, *words])
    assert (parsed.period, parsed.delay, parsed.decay_epochs) == (8, None, ())


def test_a_file_can_leave_the_period_to_the_run(file):
    parsed = parse(["--config", file("period = 'auto'")])
    assert (parsed.period, parsed.delay) == (config.AUTO, None)
    assert config.complete(parsed) == parsed


def test_what_is_saved_is_the_resolved_configuration_in_its_order(tmp_path):
    parsed = parse(["--decay", "step", "--decay-epochs", "9", "12", "--own-weight", "none"])
    config.save(parsed, tmp_path / "config.json")
    text = (tmp_path / "config.json").read_text()
    assert list(json.loads(text)) == [field.name for field in dataclasses.fields(Config)]
    assert '\n  "decay_factor": 0.1,\n' in text
    values = json.loads(text)
    for name in ("decay_epochs", "switches"):
        values[name] = tuple(values[name])
    assert Config(**values) == parsed


def test_differences_that_matter_are_named_with_both_values(tmp_path):
    path = tmp_path / "config.json"
    step = ["--decay", "step", "--decay-epochs", "9", "12"]
    config.save(parse([*step, "--out", "a", "--data", "here", "--keep", "1"]), path)
    same = parse([*step, "--resume", "--out", "b", "--data", "there", "--workers", "2"])
    assert config.differences(same, path) == []
    other = parse([*step, "--epochs", "30", "--seed", "1"])
    assert config.differences(other, path) == ["epochs (24, now 30)", "seed (0, now 1)"]


def test_keys_of_another_version_are_differences(tmp_path):
    path = tmp_path / "config.json"
    config.save(parse([]), path)
    values = json.loads(path.read_text())
    del values["seed"]
    path.write_text(json.dumps(values | {"adaptive": "adam"}))
    found = config.differences(parse([]), path)
    assert found == ["seed (not set, now 0)", "adaptive (adam, now not a key)"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_published_experiment_is_read(path):
    data, model, sync = path.stem.split("_", maxsplit=2)
    program = {"cityscapes": Segmentation(), "text": language_model.DEFAULTS}.get(data, Config())
    parsed = parse(["--config", str(path)], defaults=program)
    assert data == "text" or parsed.model == model
    sync = {"streaming": "streaming_diloco"}.get(sync, sync)
    assert parsed.sync == {"synchronous": "allreduce_gradients"}.get(sync, sync)


def test_baselines_differ_in_what_happens_between_nodes_only():
    for name in ("imagenet_resnet50", "cifar10_resnet20"):
        files = (EXAMPLES / "configs" / f"{name}_{sync}.py" for sync in ("daso", "synchronous"))
        daso, baseline = (config.read(str(file), Config()) for file in files)
        different = {key for key in daso | baseline if daso.get(key) != baseline.get(key)}
        assert different <= {"sync", "wire", "period", "delay", "cooldown_epochs"}


@dataclasses.dataclass(frozen=True)
class Other(Config):
    """The keys of another program, with another model and an additional key."""

    model: str = config.key("unet", "", ("unet",))
    crop: int | None = config.key(None, "pixels", "[1, inf)")


def test_another_program_may_have_other_keys(file, refused):
    parsed = parse(["--config", file("crop = 64")], defaults=Other())
    assert parsed == dataclasses.replace(config.complete(Other()), crop=64)
    message = refused(parse, ["--model", "resnet20"], "", Other())
    assert message == "--model must be one of unet, got 'resnet20'."


@pytest.mark.parametrize("sync", language_model.SYNC_OF_TEXT)
def test_every_algorithm_has_defaults_for_text(sync):
    parsed = parse(["--sync", sync], defaults=language_model.DEFAULTS)
    assert (parsed.optimizer, parsed.decay_floor) == ("adamw", 0.05)
    assert (parsed.fragments or 1) == {"streaming_diloco": 2}.get(sync, 1)


@pytest.mark.parametrize("line", ["--processes 2", "--switches 1"])
def test_keys_of_algorithms_that_a_program_does_not_have_are_refused(refused, line):
    message = refused(lambda: parse(line.split(), defaults=language_model.DEFAULTS))
    assert f"{line.split()[0]} has no effect with --sync diloco" in message


def test_help_has_the_defaults_of_the_algorithms_of_the_program(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"], defaults=language_model.DEFAULTS)
    text = " ".join(capsys.readouterr().out.split())
    assert "until a merge (0 for diloco; 5 for streaming_diloco; 1 for daso, dasgd," in text
    assert "gradients; without it, no limit (1.0)" in text
    assert "passm" not in text


def test_arguments_are_read_without_jax():
    code = "import sys, config; config.parse([]); sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, check=True, timeout=60)


def test_what_a_run_has_saved_is_a_configuration(tmp_path):
    parsed = parse(["--epochs", "7", "--sync", "local_sgd", "--out", "a", "--resume"])
    config.save(parsed, tmp_path / "config.json")
    again = parse(["--config", str(tmp_path / "config.json"), "--out", "a", "--resume"])
    assert again == parsed
    assert not parse(["--config", str(tmp_path / "config.json")]).resume
    with pytest.raises(SystemExit, match=f"does not set; pass --out {tmp_path}"):
        parse(["--config", str(tmp_path / "config.json"), "--resume"])


@pytest.mark.parametrize("key", ["out", "data", "config"])
def test_a_url_is_refused_before_anything_starts(key):
    with pytest.raises(SystemExit, match=rf"--{key} must be a path in a file system, got 's3://b"):
        parse([f"--{key}", "s3://b/x.py"])


def test_a_configuration_in_the_home_folder_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "keys.py").write_text("epochs = 90")
    assert parse(["--config=~/keys.py"]).epochs == 90
