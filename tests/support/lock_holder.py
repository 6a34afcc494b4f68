"""Acquires a lock and is killed with it, or releases it when its input ends."""

import os
import signal
import sys

import numpy as np

from jdaso.passm.memory import Locks

path, case = sys.argv[1:]
holders = np.memmap(path, np.int64, "r+", shape=(2,))
locks = Locks(os.open(path, os.O_RDWR), holders, rank=1, describe="rank {}".format, timeout=1.0)
with locks.acquire(0):
    print("holds", flush=True)
    sys.stdin.read()
    if case == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
print("ended", flush=True)
