"""The configuration of a run: defaults, a configuration file, and the command line.

The file overrides the defaults, and the command line overrides both. A configuration file is a
Python program that sets keys, such as ``epochs = 90``. Names that start with an underscore are not
keys. The program executes the file, so do not use files from strangers. A key that does not exist,
has a wrong value, or belongs to an algorithm, an optimizer or a decay that was not chosen is an
error before anything starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import runpy
import sys
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

WIRES = ("float32", "bfloat16", "float16", "int8", "float4")

DELAYED = {"fragments": 1, "wire": None, "moments": "local"}
OUTER = {"outer_rate": 0.7, "outer_momentum": 0.9, "outer_warmup": 10}
#: The values of sync, with the keys that each algorithm uses and their defaults.
SYNC = {
    "daso": {"period": 4, "delay": 2, "cooldown_epochs": 3, **DELAYED},
    "dasgd": {"period": 4, "delay": 2, "own_weight": 0.25, **DELAYED},
    "local_sgd": {"period": 4, "wire": None, "moments": "local"},
    "post_local_sgd": {"period": 4, "wire": None, "moments": "local"},
    "delta_rule": {"period": 4, "delay": 2, "fragments": 1, "wire": None},
    "easgd": {"period": 4, "wire": None},
    "eamsgd": {"period": 4, "wire": None},
    "diloco": {"period": 4, "delay": 2, "own_weight": 0.5, **OUTER, **DELAYED},
    "allreduce_gradients": {"wire": None},
    "none": {},
}
#: The same for algorithms in which processes of one machine share one model.
SHARED = {
    "assm": {"processes": None},
    "passm": {"processes": None},
    "passm_plus": {"processes": None, "switches": ()},
}
#: The same for the local optimizer.
OPTIMIZERS = {
    "sgd": {"momentum": 0.9},
    "adamw": {"beta1": 0.9, "beta2": 0.99},
}
#: The same for the decay of the learning rate.
DECAY = {
    "cosine": {"decay_floor": 0.0},
    "plateau": {"decay_factor": 0.5, "decay_patience": 5, "decay_threshold": 0.05},
    "step": {"decay_factor": 0.1, "decay_epochs": ()},
    "constant": {},
}
#: The period that the first steps of the run choose, see auto_period.py.
AUTO: Any = "auto"
#: Keys that do not change the result. A resumed run may change them.
MAY_CHANGE = {"data", "workers", "out", "keep", "save_every", "resume", "tensorboard"}

#: Keys that are paths, or the name of a built-in choice.
PATHS = {"out", "data", "tokenizer"}


def key(default: Any, text: str, valid: str | tuple[str, ...] = "") -> Any:
    """A field with its help text and its choices or, for numbers, the interval of valid values."""
    return dataclasses.field(default=default, metadata={"help": text, "valid": valid})


@dataclass(frozen=True)
class Config:
    """The keys of every program. None stands for the default of the algorithm.

    A program adds the keys of its data and its models in a subclass. It may replace ``CHOOSERS``:
    for each key that chooses an algorithm its values, each with the keys that it uses and their
    defaults.
    """

    CHOOSERS: ClassVar[dict[str, dict[str, dict[str, Any]]]] = {
        "sync": SYNC | SHARED,
        "optimizer": OPTIMIZERS,
        "decay": DECAY,
    }

    workers: int = key(0, "worker processes that load data; 0 loads with threads", "[0, inf)")
    compute_dtype: str = key("float32", "dtype of activations", ("float32", "bfloat16"))
    epochs: int = key(24, "passes over the data", "[1, inf)")
    batch_size: int = key(16, "images or sequences per device and step", "[1, inf)")
    accumulate: int = key(1, "micro-batches into which a device's batch is cut", "[1, inf)")
    shard: bool = key(False, "spread parameters and optimizer state over a node's devices")
    optimizer: str = key("sgd", "optimizer of a node", tuple(OPTIMIZERS))
    learning_rate: float = key(0.025, "adamw: peak; sgd: peak for each device", "(0, inf)")
    warmup_epochs: int = key(3, "epochs in which the rate rises and daso blocks", "[0, inf)")
    cooldown_epochs: int | None = key(None, "epochs at the end in which daso blocks", "[0, inf)")
    decay: str = key("cosine", "decay of the learning rate after warm-up", tuple(DECAY))
    decay_floor: float | None = key(None, "fraction of the peak where cosine ends", "[0, 1)")
    decay_factor: float | None = key(None, "factor of a decay", "(0, 1)")
    decay_patience: int | None = key(None, "stable epochs before a decay", "[1, inf)")
    decay_threshold: float | None = key(None, "smallest progress, relative to the loss", "(0, 1)")
    decay_epochs: tuple[int, ...] = key((), "epochs at which step decays", "[1, inf)")
    momentum: float | None = key(None, "momentum", "[0, 1)")
    beta1: float | None = key(None, "decay of the mean of gradients", "[0, 1)")
    beta2: float | None = key(None, "decay of the mean of squares", "[0, 1)")
    clip: float | None = key(
        None, "largest norm of a node's gradients; without it, no limit", "(0, inf)"
    )
    nesterov: bool = key(False, "use Nesterov's momentum")
    weight_decay: float = key(1e-4, "decay of weights, not of norms and biases", "[0, inf)")
    seed: int = key(0, "seed of parameters, order and augmentation", "[0, inf)")

    sync: str = key("daso", "algorithm between nodes or processes", (*SYNC, *SHARED))
    period: int | None = key(None, "steps between two exchanges, or auto", "[1, inf)")
    delay: int | None = key(None, "steps until a merge", "[0, inf)")
    own_weight: float | None = key(None, "xi of dasgd, mix of diloco", "[0, 1]")
    fragments: int | None = key(None, "parts of the model", "[1, inf)")
    outer_rate: float | None = key(None, "outer learning rate", "(0, inf)")
    outer_momentum: float | None = key(None, "outer Nesterov momentum", "[0, 1)")
    outer_warmup: int | None = key(None, "first rounds of plain averaging; papers: 0", "[0, inf)")
    wire: str | None = key(None, "dtype on the wire; without it, that of the algorithm", WIRES)
    moments: str | None = key(None, "momenta at a merge", ("local", "average", "reset"))

    processes: int | None = key(None, "processes to start (assm, passm, passm_plus)", "[1, inf)")
    switches: tuple[int, ...] = key((), "epochs at which passm_plus switches", "[1, inf)")

    devices: int = key(0, "virtual CPU devices per process; 0 uses the real devices", "[0, inf)")
    processes_per_node: int | None = key(None, "default: detected", "[1, inf)")
    join_processes: bool = key(False, "make the processes of a node one JAX program")
    out: str = key("runs/train", "folder for metrics, plot, checkpoints and the final model")
    keep: int = key(3, "number of checkpoints to keep", "[1, inf)")
    save_every: int = key(0, "steps between checkpoints; 0 saves after each epoch", "[0, inf)")
    resume: bool = key(False, "continue from the last checkpoint in the folder")
    tensorboard: bool = key(False, "write files for TensorBoard")


DEFAULTS = Config()


def parse(
    argv: list[str] | None = None, description: str = "", defaults: Config = DEFAULTS
) -> Config:
    """Reads the configuration from the command line.

    Args:
        argv: The arguments, by default those of the program.
        description: Description of the program for ``--help``.
        defaults: The values of keys that neither the file nor an option sets.

    Returns:
        A configuration of the type of ``defaults``, completed by :func:`complete`.

    Raises:
        SystemExit: If an option or the file is wrong. The message names the option, or the file
            and the key, the value, and what is required.
    """
    parser = argparse.ArgumentParser(
        description=description,
        usage="%(prog)s [--config FILE] [--KEY VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", default=None, help="Python file that sets keys")
    own, all_programs = (
        {name for users in choosers.values() for name in _keys_of(users)}
        for choosers in (defaults.CHOOSERS, Config.CHOOSERS)
    )
    for field, kind, optional in _keys(defaults):
        valid = field.metadata["valid"]
        text = f"{field.metadata['help']} {_default(defaults, field.name)}"
        text = argparse.SUPPRESS if field.name in all_programs - own else text.strip()
        how: dict[str, Any] = {"type": _or_none(kind) if optional else kind}
        if isinstance(valid, tuple):
            how["metavar"] = "{" + ",".join(valid) + "}"
        if kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        elif kind == tuple[int, ...]:
            how = {"type": int, "nargs": "*"}
        parser.add_argument(option(field.name), help=text, **how)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        names = [option(field.name) for field in dataclasses.fields(defaults)]
        raise SystemExit(
            f"{unknown[0]} is not an option; {_nearest(unknown[0].split('=')[0], names)}"
        )
    given = vars(known)
    path = given.pop("config")
    path = None if path is None else str(_path("config", path))
    from_file = {} if path is None else read(path, defaults)
    if path is not None and is_json(path) and given.get("resume") and "out" not in given:
        raise SystemExit(
            f"--resume continues the run in --out, which {path} does not set; pass --out "
            f"{Path(path).parent}."
        )
    return complete(dataclasses.replace(defaults, **from_file | given))


def _keys_of(users: dict[str, dict[str, Any]]) -> list[str]:
    """The keys that algorithms, optimizers or decays use, in their order."""
    return list(dict.fromkeys(name for options in users.values() for name in options))


def _default(defaults: Config, name: str) -> str:
    """The default of a key for ``--help``: its value, or the values of those that use the key."""
    value = getattr(defaults, name)
    if value not in (None, ()):
        return f"({value})"
    users: dict[Any, list[str]] = {}
    for chosen in defaults.CHOOSERS.values():
        for user, options in chosen.items():
            if options.get(name) not in (None, ()):
                users.setdefault(options[name], []).append(user)
    texts = [f"{value} for {', '.join(names)}" for value, names in users.items()]
    return f"({'; '.join(texts)})" if texts else ""


def read(path: str, defaults: Config = DEFAULTS) -> dict[str, Any]:
    """Reads the keys that a configuration file sets. Raises SystemExit if one of them is wrong."""
    if not os.path.isfile(path):
        raise SystemExit(f"--config: the file {path} does not exist.")
    try:
        names = _saved(path) if is_json(path) else runpy.run_path(path)
    except Exception as error:
        raise SystemExit(f"{path}: {type(error).__name__}: {error}") from error
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in names.items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    if is_json(path):  # saved by a run, whose folder must not be reused
        values = {name: value for name, value in values.items() if name not in ("out", "resume")}
    if not values:
        raise SystemExit(f"{path} sets no key; add lines such as: epochs = 90")
    keys = {field.name: (field, *kind) for field, *kind in _keys(defaults)}
    for name, value in values.items():
        if name not in keys:
            raise SystemExit(f"{path}: {name} = {value!r} is not a key; {_nearest(name, keys)}")
    return {name: _checked(f"{path}: {name}", v, *keys[name]) for name, v in values.items()}


def _path(name: str, given: str) -> Path:
    """The path that a key gives. Raises SystemExit if it is none of this machine."""
    if given and not given.startswith("~") and ":/" not in given:
        return Path(given)  # without the import of jdaso, and so of JAX, which takes a second
    from jdaso.core.command_line import local_path

    try:
        return local_path(given, option(name))
    except ValueError as error:
        raise SystemExit(str(error)) from error


def is_json(path: str) -> bool:
    """Whether a path is that of a file written by :func:`save`."""
    return path.endswith(".json")


def complete(config: Config) -> Config:
    """Fills in the defaults of the algorithm. Raises SystemExit for keys that do not fit."""
    values = {
        field.name: _checked(option(field.name), getattr(config, field.name), field, *kind)
        for field, *kind in _keys(config)
    }
    for name in PATHS & values.keys():
        _path(name, values[name])
    if values["period"] == AUTO and values["delay"] is not None:
        raise SystemExit(
            "--period auto chooses the delay as well; leave --delay out, or set it to none if a "
            "file sets it."
        )
    for chooser, users in config.CHOOSERS.items():
        own = users[values[chooser]]
        # Keys of algorithms that only other programs have are refused as well.
        for name in [*_keys_of(users), *_keys_of(Config.CHOOSERS.get(chooser, {}))]:
            if values[name] in (None, ()):
                values[name] = own.get(name, values[name])
            elif name not in own:
                raise SystemExit(
                    f"{option(name)} has no effect with {option(chooser)} {values[chooser]}; "
                    "leave it out, or set it to none if a file sets it."
                )
    if values["period"] == AUTO:
        values["delay"] = None
    config = dataclasses.replace(config, **values)
    _check_together(config)
    return config


def save(config: Config, path: str | Path) -> None:
    """Writes all keys to a JSON file, atomically."""
    new = Path(path).with_suffix(".new")
    new.write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    os.replace(new, path)


def differences(config: Config, path: str | Path) -> list[str]:
    """The keys that differ from a saved configuration and change the result.

    Args:
        config: A completed configuration.
        path: A file written by :func:`save`.

    Returns:
        Texts such as ``"epochs (24, now 30)"``. The list is empty if the run may be resumed.
    """
    saved = _saved(path)
    now = json.loads(json.dumps(dataclasses.asdict(config)))
    names = [name for name in now | saved if name not in MAY_CHANGE]
    pairs = [(name, saved.get(name, "not set"), now.get(name, "not a key")) for name in names]
    return [f"{name} ({old}, now {new})" for name, old, new in pairs if old != new]


def _saved(path: str | Path) -> dict[str, Any]:
    """Reads a file written by :func:`save`. Raises ValueError if it is something else."""
    try:
        names = json.loads(Path(path).read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a configuration: {error}") from error
    if not isinstance(names, dict):
        raise ValueError(f"{path} must have keys and their values, got {names!r:.80}.")
    return names


def option(name: str) -> str:
    """The name of a key's option on the command line."""
    return "--" + name.replace("_", "-")


def _check_together(config: Config) -> None:
    """Raises SystemExit for keys that do not fit together."""
    epochs, warmup, cooldown = config.epochs, config.warmup_epochs, config.cooldown_epochs or 0
    if warmup >= epochs:
        raise SystemExit(f"--warmup-epochs must be less than --epochs {epochs}, got {warmup}.")
    if warmup + cooldown > epochs:
        raise SystemExit(
            f"--warmup-epochs plus --cooldown-epochs must not exceed --epochs {epochs}, got "
            f"{warmup} + {cooldown}."
        )
    if config.period == AUTO and config.sync not in ("daso", "dasgd"):
        raise SystemExit(f"--period auto needs --sync daso or dasgd, got {config.sync}.")
    if config.delay is not None and config.period != AUTO and config.delay > config.period:
        raise SystemExit(f"--delay must not exceed --period {config.period}, got {config.delay}.")
    steps = list(config.decay_epochs)
    if config.decay == "step" and not steps:
        raise SystemExit("--decay step needs --decay-epochs, such as 30 60 80.")
    if steps != sorted({epoch for epoch in steps if warmup <= epoch < epochs}):
        raise SystemExit(f"--decay-epochs must increase within [{warmup}, {epochs}), got {steps}.")
    if config.moments == "reset" and (config.fragments or 1) > 1:
        raise SystemExit(
            f"--moments reset needs --fragments 1, got {config.fragments}: each merge "
            "would reset all moments."
        )
    if config.batch_size % config.accumulate:
        raise SystemExit(
            f"--batch-size must be a multiple of --accumulate {config.accumulate}, got "
            f"{config.batch_size}."
        )
    if config.optimizer != "sgd" and config.sync in ("eamsgd", *SHARED):
        raise SystemExit(f"--sync {config.sync} needs --optimizer sgd, got {config.optimizer}.")
    if config.sync in SHARED:
        for name in ("shard", "clip", "accumulate", "nesterov"):
            if getattr(config, name) != getattr(Config, name):
                raise SystemExit(
                    f"{option(name)} has no effect with --sync {config.sync}; leave it out."
                )
    if config.nesterov and config.optimizer != "sgd":
        raise SystemExit(
            f"--nesterov has no effect with --optimizer {config.optimizer}; leave it out."
        )
    if config.nesterov and config.sync == "eamsgd":
        raise SystemExit(
            "--nesterov has no effect with --sync eamsgd, which uses Nesterov's momentum."
        )
    if list(config.switches) != sorted({epoch for epoch in config.switches if epoch < epochs}):
        switches = list(config.switches)
        raise SystemExit(f"--switches must increase within [1, {epochs}), got {switches}.")
    if config.nesterov and config.momentum == 0:
        raise SystemExit("--nesterov needs a --momentum above 0, got 0.")


_KINDS = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    tuple[int, ...]: "integers",
}


def _keys(config: Config) -> list[tuple[dataclasses.Field, Any, bool]]:
    """Each field with its type, and whether it may be None."""
    hints = typing.get_type_hints(type(config))
    keys = []
    for field in dataclasses.fields(config):
        kinds = typing.get_args(hints[field.name])
        optional = type(None) in kinds
        keys.append((field, kinds[0] if optional else hints[field.name], optional))
    return keys


def _checked(where: str, value: Any, field: dataclasses.Field, kind: Any, optional: bool) -> Any:
    """Converts the value to its type. Raises SystemExit if it does not fit."""
    if (value is None and optional) or (value == AUTO and field.name == "period"):
        return value
    if not _fits(value, kind):
        raise SystemExit(f"{where} must be {_KINDS[kind]}, got {value!r}.")
    valid = field.metadata["valid"]
    if isinstance(valid, tuple) and value not in valid:
        raise SystemExit(f"{where} must be one of {', '.join(valid)}, got {value!r}.")
    each = value if kind == tuple[int, ...] else (value,)
    if isinstance(valid, str) and valid and not all(_within(x, valid) for x in each):
        raise SystemExit(f"{where} must be {_KINDS[kind]} in {valid}, got {value!r}.")
    return kind(value)


def _fits(value: Any, kind: Any) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind == tuple[int, ...]:
        return isinstance(value, tuple | list) and all(_fits(x, int) for x in value)
    if kind is float and isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return isinstance(value, kind)


def _within(value: float, interval: str) -> bool:
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    return above and (value <= high if interval[-1] == "]" else value < high)


def _or_none(kind: type) -> Any:
    """Reads ``none`` as None, so that an option can undo what a file sets, and ``auto``."""

    def read_option(text: str) -> Any:
        if text == "none":
            return None
        return AUTO if text == AUTO else kind(text)

    read_option.__name__ = kind.__name__  # argparse prints this name in errors
    return read_option


def _nearest(name: str, names: typing.Iterable[str]) -> str:
    return f"did you mean {difflib.get_close_matches(name, names, n=1, cutoff=0)[0]}?"
