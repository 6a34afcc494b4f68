"""Exchanges between nodes: on a virtual cluster or mesh, over MPI, and over mpi4jax.

This entry imports :mod:`jdaso.cluster` and :mod:`jdaso.core`. The entries :mod:`jdaso.center`,
:mod:`jdaso.passm` and :mod:`jdaso.perf` may import it. The folder ``transport/`` moves messages
over MPI, and ``host/`` moves arrays between devices and host memory.
"""

from jdaso.core.exchange import BoundExchange, ExchangeRecord, changed
from jdaso.exchange.mpi4jax import mpi4jax_exchange

__all__ = ["BoundExchange", "ExchangeRecord", "changed", "mpi4jax_exchange"]
