"""What all tests share."""

from hypothesis import settings

# The same examples in every run: what fails in CI fails everywhere, and because of the change.
settings.register_profile("deterministic", derandomize=True, deadline=None)
settings.load_profile("deterministic")

# Children are programs that tests start under mpiexec; pytest must not import them.
collect_ignore_glob = ["mpi/children/*", "shared/holder.py"]
