"""Warnings reach stderr without any configuration, and JDASO_DEBUG adds the exchanges."""

import subprocess
import sys

import pytest

CONFIGURED = "import logging; logging.basicConfig(format='mine %(message)s');"
LOG = "from jdaso.core.log import logger; logger.warning('%s is late', 'x'); logger.debug('posted')"


def run(code, **env):
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    assert ended.stdout == ""
    return ended.stderr


def test_warnings_go_to_stderr():
    assert run(LOG) == "jdaso: x is late\n"


def test_a_root_logger_that_a_library_has_configured_changes_nothing():
    assert run(CONFIGURED + LOG) == "jdaso: x is late\n"


def test_a_program_can_take_the_records():
    take = "logging.getLogger('jdaso').handlers[:] = logging.root.handlers;"
    assert run(CONFIGURED + "import jdaso;" + take + LOG) == "mine x is late\n"


@pytest.mark.parametrize(("value", "seen"), [("1", True), ("0", False), ("", False)])
def test_jdaso_debug_adds_debug_records(value, seen):
    assert ("jdaso: posted\n" in run(LOG, JDASO_DEBUG=value)) == seen


def test_a_closed_stderr_is_no_error():
    assert run("import sys; sys.stderr.close();" + LOG) == ""
