"""Collectives of a node's processes."""

import numpy as np
import pytest

from jdaso.core.block_format import FORMATS
from jdaso.core.wire import wire_shape
from jdaso.exchange.host.layout import LeafSpec, memory_of
from jdaso.exchange.transport import collectives
from jdaso.exchange.transport.operation import run


class Complete:
    """A request that has completed."""

    def Test(self):
        return True


@pytest.mark.parametrize("name", FORMATS)
def test_the_own_sums_are_broadcast_in_pieces_that_mpi_can_count(monkeypatch, name):
    pytest.importorskip("mpi4py")
    sent = []

    class Comm:
        def Ibcast(self, buffer, root):
            sent.append(buffer.copy() if isinstance(buffer, np.ndarray) else None)
            return Complete()

    monkeypatch.setattr(collectives, "_BROADCAST_BYTES", 1000)
    dtype = FORMATS[name].dtype
    memory = memory_of([LeafSpec(wire_shape((1000,), dtype), dtype)])
    (_, sums), *_ = memory.pairs
    sums[:] = np.arange(sums.size, dtype=np.float32).reshape(sums.shape)
    run(collectives.share_sums(Comm(), memory, 0, node=1, nodes=2, index=0, parts=1))
    pieces = [piece for piece in sent if piece is not None]
    assert max(piece.nbytes for piece in pieces) == 1000
    own = np.concatenate(pieces).view(np.float32)
    np.testing.assert_array_equal(own, sums[len(sums) // 2 :].reshape(-1))
