"""Moves messages between processes over MPI, from a progress thread.

It imports ``exchange/host``, which must not import it. All other exchange code but ``axis`` may,
and the entries that may import :mod:`jdaso.exchange`.

- ``progress``: operations, their deadlines, and the thread that advances them.
- ``collectives``: the sums and other collective operations. ``handshake``: what nodes compare.
- ``mpi_transport``: the communicators, and the exchanges of a process over them.
"""
