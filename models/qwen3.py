"""Qwen3 (dense): Llama's block with a norm on every head's query and key (arXiv 2505.09388)."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from retmask_jax.models.config import FULL, DecoderConfig, hf_common, hf_layer_types, hf_rope
from retmask_jax.models.layers import Attention, GatedMLP, rms_norm, scale
from retmask_jax.models.naming import PROJECTIONS, WeightName

ARCHITECTURES = ("Qwen3ForCausalLM",)

WEIGHTS = (
    *PROJECTIONS,
    WeightName("blocks.attention_norm", "model.layers.{layer}.input_layernorm.weight"),
    WeightName("blocks.mlp_norm", "model.layers.{layer}.post_attention_layernorm.weight"),
    WeightName("blocks.attention.q_norm", "model.layers.{layer}.self_attn.q_norm.weight"),
    WeightName("blocks.attention.k_norm", "model.layers.{layer}.self_attn.k_norm.weight"),
)


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Hugging Face `config.json` of `model_type` qwen3.

    The width of a head is `head_dim`, not D / N.

    Raises:
      ValueError: a field is absent or asks for something that Qwen3 here does not compute.
    """
    if hf.get("head_dim") is None:
        raise ValueError("head_dim is missing")
    common = hf_common(hf)
    window, layer_types = None, (FULL,) * common["n_layers"]
    if hf.get("use_sliding_window"):
        if hf.get("layer_types") is None:
            raise ValueError("use_sliding_window=true needs layer_types")
        window, layer_types = hf.get("sliding_window"), hf_layer_types(hf, layer_types)
    return DecoderConfig(
        family="qwen3", layer_types=layer_types, rope=hf_rope(hf), sliding_window=window, **common
    )


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); q and k are normed head by head."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        self.attention_norm = scale((config.d_model,), dtype)
        self.attention = Attention(config, rngs, dtype, qk_norm="head")
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
