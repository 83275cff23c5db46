"""Olmo 3: norms after attention and MLP, q/k norm over all heads, sliding and full layers.

Sliding layers rotate with plain RoPE; full layers with what `rope_scaling` asks for (YaRN in the
released models).
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from retmask_jax.models.config import (
    FULL,
    SLIDING,
    DecoderConfig,
    RopeConfig,
    hf_common,
    hf_layer_types,
    hf_rope,
)
from retmask_jax.models.layers import Attention, GatedMLP, rms_norm, scale
from retmask_jax.models.naming import PROJECTIONS, WeightName

ARCHITECTURES = ("Olmo3ForCausalLM",)

WEIGHTS = (
    *PROJECTIONS,
    WeightName("blocks.attention_norm", "model.layers.{layer}.post_attention_layernorm.weight"),
    WeightName("blocks.mlp_norm", "model.layers.{layer}.post_feedforward_layernorm.weight"),
    WeightName("blocks.attention.q_norm", "model.layers.{layer}.self_attn.q_norm.weight"),
    WeightName("blocks.attention.k_norm", "model.layers.{layer}.self_attn.k_norm.weight"),
)


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Hugging Face `config.json` of `model_type` olmo3.

    Raises:
      ValueError: a field is absent or asks for something that Olmo 3 here does not compute.
    """
    common = hf_common(hf)
    if hf.get("sliding_window") is None:
        raise ValueError("sliding_window is missing")
    # Without layer_types every fourth layer is full, as Olmo3Config of transformers has it.
    default = tuple(FULL if i % 4 == 3 else SLIDING for i in range(common["n_layers"]))
    full = hf_rope(hf, "full_attention")
    if isinstance((hf.get("rope_parameters") or {}).get("sliding_attention"), Mapping):
        sliding = hf_rope({**hf, "rope_scaling": None}, "sliding_attention")
    else:
        sliding = RopeConfig("default", full.theta)
    return DecoderConfig(
        family="olmo3",
        layer_types=hf_layer_types(hf, default),
        rope=full,
        sliding_rope=sliding,
        sliding_window=int(hf["sliding_window"]),
        **common,
    )


class Block(nnx.Module):
    """x + norm(attention(x)), then x + norm(mlp(x)); q and k are normed over all heads at once."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        self.attention = Attention(config, rngs, dtype, qk_norm="width")
        self.attention_norm = scale((config.d_model,), dtype)
        self.mlp = GatedMLP(config, rngs, dtype)
        self.mlp_norm = scale((config.d_model,), dtype)
        self.eps = config.norm_eps

    def __call__(
        self, x: jax.Array, table: tuple, attend: Callable, gate: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """x [B, T, D] -> x [B, T, D], top-attended positions [B, T, N]."""
        y, top = self.attention(x, table, attend, gate)
        x = x + rms_norm(y, self.attention_norm, self.eps)
        return x + rms_norm(self.mlp(x), self.mlp_norm, self.eps), top
