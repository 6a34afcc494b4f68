"""Children are programs that tests start under mpiexec; pytest must not import them."""

collect_ignore_glob = ["mpi/children/*"]
