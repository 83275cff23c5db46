"""The parts of a block, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_hf
from flax import nnx

from retmask_jax.models import config_from_hf
from retmask_jax.models.kernels import row_attention
from retmask_jax.models.layers import Attention, rope_table


@pytest.mark.parametrize("head_dim", [4, 8])
def test_h3_a_masked_head_loses_its_block_of_the_output_projection(head_dim):
    """H3: D = 8, two heads; the mask acts on the projection's input, whatever H is."""
    hf = tiny_hf(
        "llama",
        hidden_size=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=head_dim,
    )
    config = config_from_hf(hf)
    layer = Attention(config, nnx.Rngs(params=0), jnp.float32)
    x = jax.random.normal(jax.random.key(1), (1, 5, 8))
    positions = jnp.arange(5)[None]
    table = rope_table(config.rope, head_dim, positions)
    heads = {}

    def attend(q, k, v):
        out = row_attention("blocks", q, k, v, positions, jnp.ones_like(positions), None)
        heads["out"] = out  # [B, T, N, H], before the mask
        return out, None

    full, _ = layer(x, table, attend, None)
    masked, _ = layer(x, table, attend, jnp.asarray([[0.0, 1.0]]))
    lost = heads["out"][:, :, 0] @ layer.o[...][0]  # head 0 times its block W_o[0], H x D
    assert np.abs(lost).max() > 1e-5
    np.testing.assert_allclose(masked, full - lost, atol=1e-7)
    kept, _ = layer(x, table, attend, jnp.ones((1, 2)))
    np.testing.assert_array_equal(kept, full)
