"""How a process ends: once, whoever of its threads asks for it, and with the status that it has."""

import subprocess
import sys

TWO_THREADS = """
import os, threading, time
from jdaso._ending import end

class Comm:
    def Abort(self, status):
        print("aborted", flush=True)
        time.sleep(1)  # so long another thread could come
        os._exit(status)

both = threading.Barrier(2)

def ask(status):
    both.wait()
    end(Comm(), f"status {status}", status)

threading.Thread(target=ask, args=(70,)).start()
ask(71)
"""


def test_of_two_threads_one_ends_the_process():
    done = subprocess.run(
        [sys.executable, "-c", TWO_THREADS], capture_output=True, text=True, timeout=60
    )
    assert done.returncode in (70, 71)
    assert done.stdout == "aborted\n"
    assert done.stderr == f"jdaso: ending all processes: status {done.returncode}\n"
