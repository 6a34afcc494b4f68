"""Error feedback: what one exchange does to the means, the residual and the anchor."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdaso.core.error_feedback import decompress, decompress_part, init_feedback
from jdaso.core.exchange import FINITE, HEADER_SIZE, BoundExchange

NODES = 3
RESIDUAL, ANCHOR = [jnp.array([0.25, -0.5])], [jnp.array([4.0, -8.0])]
TOTAL = [jnp.array([127.0, 0.6])]  # a block with the step 1


def decompressed(members, bits, total=TOTAL, anchor=ANCHOR):
    arrived = jnp.float32(members), jnp.int32(bits)
    results = decompress(BoundExchange(), total, *arrived, RESIDUAL, anchor)
    return [[np.asarray(x) for x in leaves] for leaves in results]


@pytest.mark.parametrize(("bits", "rounded"), [(8, [127, 1]), (4, [128, 0])])
def test_a_rounded_sum_moves_the_anchor_and_leaves_its_rounding_error_in_the_residual(
    bits, rounded
):
    [mean], [residual], [anchor] = decompressed(NODES, bits)
    received = np.array(rounded)
    np.testing.assert_allclose(mean, ANCHOR[0] + received / NODES)
    np.testing.assert_allclose(residual, RESIDUAL[0] + TOTAL[0] - received)
    np.testing.assert_array_equal(anchor, mean)


def test_a_sum_of_the_leaves_themselves_becomes_the_anchor():
    [mean], [residual], [anchor] = decompressed(NODES, bits=0)
    np.testing.assert_allclose(mean, TOTAL[0] / NODES)
    np.testing.assert_array_equal(residual, RESIDUAL[0])
    np.testing.assert_array_equal(anchor, mean)


@pytest.mark.parametrize("bits", [8, 4, 0])
def test_the_anchor_stays_if_no_node_contributes_and_moves_if_one_does(bits):
    nothing = [jnp.zeros(2)]
    *_, [anchor] = decompressed(0, bits, nothing)
    np.testing.assert_array_equal(anchor, ANCHOR[0])
    [mean], _, [anchor] = decompressed(1, bits)
    np.testing.assert_array_equal(anchor, mean)
    assert (anchor != ANCHOR[0]).any()


def test_an_infinite_sum_does_not_stay_in_the_residual():
    _, [residual], _ = decompressed(NODES, 8, [jnp.array([jnp.inf, 0.6])])
    assert np.isfinite(residual).all()


def test_gradients_have_no_anchor():
    [mean], _, anchors = decompressed(NODES, 8, anchor=[])
    assert anchors == []
    np.testing.assert_allclose(mean * NODES, [127, 1])


def test_what_no_node_has_sent_leaves_residual_and_anchor_alone():
    params = [jnp.ones(64)]
    feedback = init_feedback(params, uses_anchor=True)._replace(
        residual=[jnp.full(64, 0.25)], anchor=[jnp.full(64, 2.0)], block_bits=jnp.int32(8)
    )
    header = jnp.zeros(HEADER_SIZE).at[FINITE].set(1)  # of an exchange that was abandoned
    sums = [jnp.linspace(-3, 5, 64)]
    _, (residual, anchor) = decompress_part(
        BoundExchange(), feedback, sums, header, slice(0, 1), feedback.anchor
    )
    np.testing.assert_array_equal(residual[0], feedback.residual[0])
    np.testing.assert_array_equal(anchor[0], feedback.anchor[0])
