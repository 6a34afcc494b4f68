"""Error feedback: what one exchange does to the means, the residual and the anchor."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdaso.core.error_feedback import decompress
from jdaso.core.wire import rounded

NODES = 3
RESIDUAL, ANCHOR = [jnp.array([0.25, -0.5])], [jnp.array([4.0, -8.0])]
TOTAL = [jnp.array([127.0, 0.6])]  # a block with the step 1


def decompressed(members, quantized, total=TOTAL, anchor=ANCHOR):
    results = decompress(total, jnp.float32(members), jnp.array(quantized), RESIDUAL, anchor)
    return [[np.asarray(x) for x in leaves] for leaves in results]


def test_a_quantized_sum_moves_the_anchor_and_leaves_its_rounding_error_in_the_residual():
    [mean], [residual], [anchor] = decompressed(NODES, quantized=True)
    received = np.array(rounded(TOTAL[0]))
    assert received.tolist() == [127, 1]
    np.testing.assert_allclose(mean, ANCHOR[0] + received / NODES)
    np.testing.assert_allclose(residual, RESIDUAL[0] + TOTAL[0] - received)
    np.testing.assert_array_equal(anchor, mean)


def test_a_sum_of_the_leaves_themselves_becomes_the_anchor():
    [mean], [residual], [anchor] = decompressed(NODES, quantized=False)
    np.testing.assert_allclose(mean, TOTAL[0] / NODES)
    np.testing.assert_array_equal(residual, RESIDUAL[0])
    np.testing.assert_array_equal(anchor, mean)


@pytest.mark.parametrize("quantized", [True, False])
def test_the_anchor_stays_if_no_node_contributes_and_moves_if_one_does(quantized):
    nothing = [jnp.zeros(2)]
    *_, [anchor] = decompressed(0, quantized, nothing)
    np.testing.assert_array_equal(anchor, ANCHOR[0])
    [mean], _, [anchor] = decompressed(1, quantized)
    np.testing.assert_array_equal(anchor, mean)
    assert (anchor != ANCHOR[0]).all()


def test_an_infinite_sum_does_not_stay_in_the_residual():
    _, [residual], _ = decompressed(NODES, True, [jnp.array([jnp.inf, 0.6])])
    assert np.isfinite(residual).all()


def test_gradients_have_no_anchor():
    [mean], _, anchors = decompressed(NODES, True, anchor=[])
    assert anchors == []
    np.testing.assert_allclose(mean * NODES, rounded(TOTAL[0]))
