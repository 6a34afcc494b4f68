"""The parameter server over MPI: its processes, its messages, and its workers' side.

Only :mod:`jdaso.center`, ``jdaso/__init__.py`` and ``__main__.py`` may import it.

- ``mpi_center``: the public function, which starts the server on node 0.
- ``state_machine``: the server's replies to frames. ``frames``: their wire format.
- ``event_loop``: receives the frames of all workers and sends the replies.
- ``worker_transport``, ``connection``: a worker's messages, heartbeats and exit.
- ``liveness``, ``worker_exit``: the states of the workers, and how they exit.
"""
