"""Loads with a worker process: under MPI, through signals, and until this process is killed."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "papers"))

import batches
import data

STEPS = 40


def load(index, rng):
    if "mpi4py.MPI" in sys.modules:
        raise RuntimeError("a worker is about to initialise MPI")
    return np.zeros((1, 1, 1), np.uint8), np.int32(index)


def main(ending: str) -> None:
    rank, num_ranks = 0, 1
    if ending == "regular":
        from mpi4py import MPI

        rank, num_ranks = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    split = data.Split(STEPS * num_ranks, load)
    feed = batches.train_batches(split, rank, num_ranks, 1, epochs=1, seed=0, workers=1)
    next(feed)
    (worker,) = multiprocessing.active_children()
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(worker.pid, number)
    assert sum(1 for _ in feed) == STEPS - 1


if __name__ == "__main__":
    main(sys.argv[1])
