"""Warnings reach stderr without any configuration. JDASO_DEBUG and JDASO_LOG add to that."""

import os
import socket
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


def test_all_that_is_said_also_goes_to_the_file_of_the_host(tmp_path):
    code = LOG + "; from jdaso.cluster.ending import abort_alone; import threading;"
    code += "threading.Thread(target=abort_alone, args=['the reason']).start()"
    ended = subprocess.run(
        [sys.executable, "-c", code], env={"JDASO_LOG": f"{tmp_path}/log"}, timeout=60
    )
    assert ended.returncode == 1
    lines = (tmp_path / f"log.{socket.gethostname()}").read_text().splitlines()
    said = [line.partition(": ")[2] for line in lines]
    assert said == ["x is late", "ending this process: the reason"]


def test_the_file_stays_the_same_when_the_program_changes_its_folder(tmp_path):
    run("import os, jdaso; os.chdir('/');" + LOG, JDASO_LOG=os.path.relpath(tmp_path / "log"))
    assert (tmp_path / f"log.{socket.gethostname()}").read_text().endswith(": x is late\n")


def test_a_file_that_cannot_be_written_is_said():
    said = run(LOG, JDASO_LOG="/nonexistent/log")
    assert said.startswith("jdaso: JDASO_LOG: /nonexistent/log.")
    assert said.endswith("cannot be written: No such file or directory.\njdaso: x is late\n")
