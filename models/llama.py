"""Llama: pre-norm blocks, grouped-query attention, gated MLP (arXiv 2407.21783).

Llama 2 to 3.x and what shares their architecture, such as SmolLM2.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from retmask_jax.models.config import FULL, DecoderConfig, hf_common, hf_rope
from retmask_jax.models.layers import Attention, GatedMLP, rms_norm, scale
from retmask_jax.models.naming import PROJECTIONS, WeightName

ARCHITECTURES = ("LlamaForCausalLM",)

WEIGHTS = (
    *PROJECTIONS,
    WeightName("blocks.attention_norm", "model.layers.{layer}.input_layernorm.weight"),
    WeightName("blocks.mlp_norm", "model.layers.{layer}.post_attention_layernorm.weight"),
)


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Hugging Face `config.json` of `model_type` llama.

    Raises:
      ValueError: a field is absent or asks for something that Llama here does not compute.
    """
    common = hf_common(hf)
    layer_types = (FULL,) * common["n_layers"]
    return DecoderConfig(family="llama", layer_types=layer_types, rope=hf_rope(hf), **common)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        self.attention_norm = scale((config.d_model,), dtype)
        self.attention = Attention(config, rngs, dtype)
        self.mlp_norm = scale((config.d_model,), dtype)
        self.mlp = GatedMLP(config, rngs, dtype)
        self.eps = config.norm_eps

    def __call__(
        self, x: jax.Array, table: tuple, attend: Callable, gate: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """x [B, T, D] -> x [B, T, D], top-attended positions [B, T, N]."""
        y, top = self.attention(rms_norm(x, self.attention_norm, self.eps), table, attend, gate)
        x = x + y
        return x + self.mlp(rms_norm(x, self.mlp_norm, self.eps)), top
