"""What jdaso uses of an mpi4py communicator, as a protocol.

Type checkers know mpi4py only where it is installed, and most of jdaso must import without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class MpiRequest(Protocol):
    """A pending non-blocking operation, ``mpi4py.MPI.Request``."""

    def Test(self) -> bool:
        """Whether the operation has completed; makes progress."""

    def Testany(self, requests: Sequence[Any], /) -> tuple[int, bool]:
        """The index of a completed request, and whether there is one."""


class Comm(Protocol):
    """A communicator, ``mpi4py.MPI.Intracomm``; buffers are NumPy arrays."""

    def Get_rank(self) -> int:
        """The rank of this process."""

    def Get_size(self) -> int:
        """The number of processes."""

    def Dup(self) -> Comm:
        """A communicator over the same processes with messages of its own; collective."""

    def Split(self, color: int, key: int) -> Comm:
        """A communicator over the processes of the same color; collective."""

    def Split_type(self, split_type: int, key: int = 0) -> Comm:
        """A communicator over the processes that share a resource; collective."""

    def Free(self) -> None:
        """Frees the communicator; collective."""

    def Barrier(self) -> None:
        """Waits for all processes."""

    def Ibarrier(self) -> MpiRequest:
        """Starts a barrier."""

    def Ibcast(self, buffer: Any, /, root: int) -> MpiRequest:
        """Starts a broadcast of ``buffer`` from rank ``root``."""

    def Iallgather(self, send: Any, receive: Any, /) -> MpiRequest:
        """Starts to send ``send`` to all processes, and to receive theirs, by rank."""

    def Ialltoallv(self, send: Any, receive: Any, /) -> MpiRequest:
        """Starts to send a piece to each process, and to receive one from each.

        Buffers are lists: array, (counts, starts) and the name of a datatype.
        """

    def Iallgatherv(self, send: Any, receive: Any, /) -> MpiRequest:
        """Starts to send the own piece of ``receive`` to all, if ``send`` is None."""

    def Isend(self, buffer: Any, /, dest: int, tag: int) -> MpiRequest:
        """Starts sending ``buffer``."""

    def Irecv(self, buffer: Any, /, source: int, tag: int) -> MpiRequest:
        """Starts receiving into ``buffer``."""

    def Improbe(self, source: int, tag: int, status: Any) -> Any:
        """A message that has arrived, or None."""

    def Iprobe(self) -> bool:
        """Whether a message has arrived; makes progress."""

    def Allgather(self, send: Any, receive: Any, /) -> None:
        """Sends ``send`` to all processes, and receives theirs, by rank."""

    def gather(self, value: Any, /) -> list[Any] | None: ...
    def allgather(self, value: Any, /) -> list[Any]:
        """The picklable value of every process, by rank."""

    def bcast(self, value: Any, /, root: int = 0) -> Any:
        """The picklable value of rank ``root``."""

    def Abort(self, errorcode: int) -> None:
        """Ends all processes of the job."""
