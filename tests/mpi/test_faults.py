"""What goes wrong between nodes ends with an error that says who and what, never in a hang."""

import os
import re

import pytest
from launch import BESIDE_PYTHON, Batch, mpiexec, passes, refuses, run

# case -> what the error must say. These are errors of every process, and nothing waits afterwards:
# they can follow each other in one job.
ERRORS_OF_ALL = {
    "other shape": ["parameters differ", "['kernel']: float32(4, 2)", "rank 1", "(4, 3)"],
    "other structure": ["parameters differ", "['bias']", "rank 1"],
    "other dtype": ["parameters differ", "bfloat16(3,)", "rank 1"],
    "other schedule": ["out of step", "step is", "1 in rank 0", "3 in rank 1", "(period 4, delay"],
    "other wire": ["the checksum of shapes and dtypes", "rank 1", "the same wire"],
    "other chunks": ["chunk_bytes must be the same", "16 in rank 0", "32 in rank 1"],
    "other delay": ["exchange 0: delay is", "1 in rank 0", "2 in rank 1", "same schedule"],
    "other plateau": ["the fingerprint of the schedule's state is", "in rank 0", "in rank 1"],
    "other center": ["disagree at exchange 0", "the shared state is", "rank 1", "same_bits=False"],
    "other anchor": ["disagree at exchange 0", "the shared state is", "rank 1", "broadcast("],
    "other parameters": ["disagree at exchange 0", "the shared state is", "rank 1", "broadcast("],
    "other mean of differences": ["the shared state is", "in rank 0", "in rank 1"],
    "other step at a consensus": ["out of step at a consensus", "3 in rank 0", "4 in rank 1"],
    "other schedule at a consensus": ["disagree at a consensus", "schedule's state is", "rank 1"],
    "broadcast of other trees": ["parameters differ", "['bias']", "rank 1"],
    "mask": ["the parameter ['mask'] is not finite", "equinox.partition"],
    "compiled mask": ["all nodes are not finite at exchange 0: ['mask']", "equinox.partition"],
    "in vain": ["the last 10 exchanges, up to exchange 9, have averaged nothing"],
    "inside vmap": ["dasgd: jax.vmap cannot contain an mpi_exchange", "pass jdaso.axis_exchange("],
    "drift inside vmap": ["jdaso.drift: jax.vmap cannot contain", "jdaso.axis_exchange("],
    "stepped twice": ["exchange 0 was posted twice", "rank"],
    "multi steps": ["exchange 0 was posted twice", "MultiSteps", "in the training step"],
    "stepped back": ["exchange 2 was posted twice", "call tx.init first"],
}
# These end the job, each in its own way; which process says it first, of itself and the other, is
# open.
ERRORS = {
    "other step at a consensus, two devices": ["step at a consensus", "3 in rank 0"],
    "stuck": ["exchange 0", "did not complete within 3 s", "nothing came from rank 1"],
    "stuck, two devices": ["did not complete within 3 s", "nothing came from rank 1"],
    "other number, two devices": [
        *("out of step", "number is", "0 in rank 0", "1 in rank 1"),
        *("incompatible devices for jitted computation", "Got argument "),
    ],
    "consensus beside an exchange": [
        "has not posted it and waits for",
        "the comparison of parameters in jdaso.consensus",
        "All nodes must make the same calls",
    ],
    "consensus beside a broadcast": ["as jdaso.consensus or jdaso.drift,", "jdaso.broadcast"],
    "exchanges in other orders": [
        *("jdaso.broadcast of 'inner', called by", "waits for", "jdaso.broadcast of 'outer'"),
        "All nodes must make the same calls in the same order",
    ],
    "exchanges in other orders, unnamed": ["are of different exchanges: give each a name="],
    "fewer steps": ["exchange 2", "rank 1", "or exited, without taking part"],
    "fewer steps, caught": ["exchange 2", "rank 1", "or exited, without taking part"],
    "exception": ["ZeroDivisionError", "rank 1", "ending all processes"],
    "exit in flight alone": ["exit with an exchange in flight", "rank 1", "without taking part"],
    "restored in flight": ["exchange 0 is not in flight", "drain", "resume=False"],
    "not finite, raise": ["parameters are not finite at step 0, namely ['bias'], ['kernel'], or"],
    "thread level": ["thread level SINGLE", "MPI_THREAD_MULTIPLE"],
    "no thread": ["rank 1", "its heartbeat cannot start: RuntimeError: can't start new thread"],
    "unequal devices": ["unequal numbers of devices", "node 0", "node 1", "CUDA_VISIBLE_DEVICES"],
}
ALL = Batch(2, {case: ("fault.py", case) for case in ERRORS_OF_ALL}, raises=True)


@pytest.mark.parametrize("case", ERRORS_OF_ALL)
def test_error_of_all_names_who_and_what(case):
    errors = ALL.raised(case)
    for text in ERRORS_OF_ALL[case]:
        assert text in errors


@pytest.mark.parametrize("case", ERRORS)
def test_error_names_who_and_what(case):
    ended = mpiexec(2, "fault.py", case, timeout=120)
    refuses(ended, ERRORS[case])
    if case in IN_A_STEP:
        check_first_and_last(ended.output)


# In a program of one device, whose error XLA words in its own way and raises later.
IN_A_STEP = ("fewer steps", "restored in flight", "stuck")


def check_first_and_last(output):
    """Each process prints the plain message first, and once."""
    lines = output.splitlines()
    said = [line for line in lines if re.match(r"jdaso: rank \d \(.*\) failed: JdasoError: ", line)]
    assert 1 <= len(said) == len({line.split()[2] for line in said}), output
    ending = [line for line in lines if line.startswith("jdaso: ending all processes: ")]
    assert len(ending) >= 1, output
    messages = [line.removeprefix("jdaso: ") for line in said]
    for line in ending:
        last = line.removeprefix("jdaso: ending all processes: ")
        assert last in messages or last.endswith(" failed: see the error above"), output
    cause = messages[0].partition(" failed: ")[2]
    assert output.count(cause) <= 2, output  # in one process, and as the reason of the other
    # The launcher may print what one process was told before what the other has said.
    first = next(line for line in lines if "JdasoError: " in line and line not in ending)
    assert first in said, output


# The last one exits with an exchange in flight.
JOBS_THAT_END = ["begun anew in flight", "not finite, skip", "other center, other hardware"]
JOBS_THAT_END += ["other parameters, other hardware", "devices behind their program"]
JOBS_THAT_END += ["skipped together", "useless averages", "exit in flight"]
ENDS_WELL = Batch(2, {case: ("fault.py", case) for case in JOBS_THAT_END})


@pytest.mark.parametrize("case", JOBS_THAT_END)
def test_job_ends_well(case):
    ENDS_WELL.passes(case)
    passes(ENDS_WELL.ended())


def test_uneven_nodes_are_named():
    ended = mpiexec(3, "fault.py", "uneven nodes")
    assert ended.returncode != 0
    assert (
        "nodes of 2 processes require a multiple of 2 processes on every host, got 3 on"
        in ended.output
    )


PMIX = {
    "PMIX_RANK": "0",
    "PMIX_NAMESPACE": "job-1@1",
    "PMIX_SERVER_URI41": "job-1@0.0;tcp4://127.0.0.1:9",
}
OF_SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("variables", "advice"),
    [({"OMPI_COMM_WORLD_SIZE": "2"}, "use the mpiexec of this MPI"), (OF_SLURM, "--mpi=pmi2")],
)
def test_a_launcher_that_mpich_cannot_talk_to_is_named_before_mpi_starts(variables, advice):
    path = os.pathsep.join([BESIDE_PYTHON, os.defpath])
    environment = {"PATH": path, "JAX_PLATFORMS": "cpu", **PMIX, **variables}
    ended = run([f"{BESIDE_PYTHON}/python", "-m", "jdaso", "doctor"], environment, 60)
    assert ended.returncode == 1, ended.output
    assert "cannot connect this one with the others" in ended.output
    assert advice in ended.output


@pytest.mark.parametrize("imported", ["", "imported"])
def test_mpi_that_mpi4py_has_not_initialized_is_initialized_and_finalized(imported):
    passes(mpiexec(2, "fault.py", f"not initialized {imported}", forked=False))


def test_a_process_that_is_late_to_discover_topology_is_told_from_those_that_wait():
    ended = mpiexec(2, "fault.py", "late to discover_topology")
    passes(ended)
    (said,) = [line for line in ended.output.splitlines() if "waiting in discover_topology" in line]
    assert said.startswith("jdaso: rank 0 (")
    assert "Those of the 2 processes that do not say this have not called it yet" in said


def test_launcher_without_its_mpi_plugin_is_detected():
    """Under srun without a matching --mpi every process is alone, and would train alone."""
    environment = {
        "PATH": os.pathsep.join([BESIDE_PYTHON, os.defpath]),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "JAX_PLATFORMS": "cpu",
    }
    ended = run([f"{BESIDE_PYTHON}/python", "-m", "jdaso", "doctor"], environment, 60)
    assert ended.returncode != 0
    assert "srun started 4 processes" in ended.output
    assert "--mpi=pmi2" in ended.output
