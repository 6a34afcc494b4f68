"""Every path that a user gives is one of a file system, or an error that says what to do."""

import argparse
from pathlib import Path

import pytest

import jdaso
from jdaso.checkpoint import Checkpoints
from jdaso.checkpoint.verify import add_command
from jdaso.core.command_line import local_path
from jdaso.perf import predict_command


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("runs/x", "runs/x"),
        (Path("/runs/x"), "/runs/x"),
        ("~/runs", "/home/someone/runs"),
        (Path("~/runs"), "/home/someone/runs"),
        ("runs/~", "runs/~"),
        ("file:///data/x", "/data/x"),
        ("FILE:///data/x", "/data/x"),
        ("file://localhost/data/x", "/data/x"),
        (Path("file:///data/x"), "/data/x"),  # has become file:/data/x
        ("file:///data/a%20b", "/data/a b"),
        ("file:///data/a?b#c", "/data/a?b#c"),
        ("runs/x:/y", "runs/x:/y"),
        ("a:b", "a:b"),
    ],
)
def test_a_path_is_read(given, path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert local_path(given) == Path(path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("s3://b/run", r"out must be a path in a file system, got 's3://b/run'.* Mount that"),
        (Path("gs://b/run"), "got 'gs:/b/run', and jdaso opens no URL of the scheme gs://"),
        ("abfs+x://b", "scheme abfs[+]x://"),
        ("file://runs/x", "a file on the host 'runs'. Write the absolute path after file://"),
        ("~no-such-user/x", "user of this machine, got '~no-such-user/x'"),
        ("", "empty"),
    ],
)
def test_what_is_no_path_of_this_machine_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        local_path(given, "out")


def test_checkpoints_in_object_storage_are_refused_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    topology = jdaso.discover_topology()
    for directory in ("s3://b/run", "gs://b/run"):
        with pytest.raises(ValueError, match="directory must be a path in a file system"):
            Checkpoints(directory, topology, jdaso.single_exchange())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("directory", ["~/run", "file://{home}/run"])
def test_checkpoints_go_where_the_path_says(directory, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    directory = directory.format(home=tmp_path)
    checkpoints = Checkpoints(directory, jdaso.discover_topology(), jdaso.single_exchange())
    checkpoints.save(1, {"x": 1})
    checkpoints.close()
    assert (tmp_path / "run" / "000001_step_1").is_dir()


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (add_command, ["verify", "s3://b/run"]),
        (
            predict_command.add_command,
            ["predict", "--parameters=1", "--step-time=1", "--bandwidth=1", "--out=s3://b/x.png"],
        ),
    ],
)
def test_commands_refuse_urls(module, arguments, capsys):
    parser = argparse.ArgumentParser()
    module(parser.add_subparsers())
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(arguments)
    assert "must be a path in a file system, got 's3://b/" in capsys.readouterr().err
