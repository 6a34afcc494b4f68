"""Moves messages between processes over MPI, from a progress thread.

It imports ``exchange/host``, which must not import it. All other exchange code may, and the entries
that may import :mod:`jdaso.exchange`.

- ``mpi_transport``: posts and collects exchanges. ``statistics``: their timing.
- ``progress``: the thread that polls. ``operation``, ``request``, ``deadlines``: what it polls.
- ``collectives``: sums a staging buffer. ``handshake``: compares nodes before that.
- ``all_reduce``: the sum on MPI's collectives.
- ``host_collectives``: collective calls outside of exchanges.
- ``communicators``, ``membership``: the communicators.
- ``peers``: processes that are late, silent, or have exited.
"""
