"""What mpi4jax cannot send is refused before anything is sent."""

import jax
import jax.numpy as jnp
import pytest

from jdaso.exchange import mpi4jax as module


@pytest.mark.parametrize("dtype", [jnp.bfloat16, bool])
def test_more_elements_than_mpi4jax_can_count_are_an_error(dtype):
    def lowered(size):
        return jax.eval_shape(module._bits, jax.ShapeDtypeStruct((size,), dtype))

    assert lowered(2**31 - 1).shape == (2**31 - 1,)
    with pytest.raises(ValueError, match="2147483647 elements of a dtype, got 2147483648: use mpi"):
        lowered(2**31)
