"""Any command line and any saved configuration is either read or refused with a message."""

import json
import string

import config
import pytest
from classification import Classification as Config
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

KEYS = list(Config.__dataclass_fields__)
WORDS = st.one_of(
    st.sampled_from([config.option(key) for key in KEYS]),
    st.sampled_from(["--config", "--", "-", "--resume=1", "none", "daso", "step", "1e999", "-0"]),
    st.integers().map(str),
    st.floats().map(str),
    st.text(string.printable + "\u0667\0", max_size=20),
)
NUMBERS = st.integers() | st.floats() | st.just(10**400) | st.just(-(10**400))
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=10),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3),
    max_leaves=5,
)
many = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def assert_right_or_refused(argv):
    """Asserts that the result is a complete configuration, or an exit with a message."""
    try:
        parsed = config.parse(argv, "", Config())
    except SystemExit as ended:
        # argparse exits with 0 for --help, and with 2 for errors that it has printed.
        if ended.code not in (0, 2) and not (isinstance(ended.code, str) and ended.code.strip()):
            raise AssertionError(f"ended with {ended.code!r}") from ended
    else:
        assert config.complete(parsed) == parsed


@many
@example(["--config", "\0"])
@example(["--config", "x" * 5000])
@example(["--epochs", "9" * 5000])
@given(st.lists(WORDS, max_size=6))
def test_any_command_line(capsys, argv):
    assert_right_or_refused(argv)


@many
@example("[]")
@example("7")
@example("[" * 100_000)
@example('{"learning_rate": 1' + "0" * 400 + "}")
@example('{"epochs": ' + "9" * 5000 + "}")
@given(
    st.one_of(
        st.text(),
        VALUES.map(json.dumps),
        st.dictionaries(st.sampled_from(KEYS), VALUES).map(json.dumps),
    )
)
def test_any_saved_configuration(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert_right_or_refused(["--config", str(path)])
    try:  # like train.py with --resume
        found = config.differences(config.parse([], "", Config()), path)
    except ValueError as error:
        found = [str(error)]
    assert all(isinstance(text, str) and text for text in found)


@pytest.mark.parametrize("content", [bytes(range(256)), b"[1, 2]", b"{", b""])
def test_a_file_that_is_none_is_named(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(SystemExit, match=r"config\.json"):
        config.parse(["--config", str(path)], "", Config())
    with pytest.raises(ValueError, match=r"config\.json"):
        config.differences(Config(), path)
