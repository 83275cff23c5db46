"""What a decoder is made of, as numbers and names. Imports nothing from the project."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

FULL, SLIDING = "full", "sliding"
_HF_LAYER_TYPES = {"full_attention": FULL, "sliding_attention": SLIDING}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one kind of layer: `default`, `llama3` or `yarn`.

    `theta` is the base. The other fields are those of the Hugging Face `rope_parameters` of that
    kind and unused by the others.
    """

    kind: str
    theta: float
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Dimensions of a decoder-only transformer. Hashable: part of the compiled program."""

    family: str
    vocab_size: int  # V
    d_model: int  # D
    d_ff: int  # F
    n_layers: int  # L
    n_heads: int  # N
    n_kv_heads: int  # K
    head_dim: int  # H
    norm_eps: float
    tied: bool
    max_position: int
    layer_types: tuple[str, ...]
    rope: RopeConfig
    sliding_rope: RopeConfig | None = None
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.n_heads} is not a multiple of "
                f"num_key_value_heads={self.n_kv_heads}"
            )
        if len(self.layer_types) != self.n_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, num_hidden_layers is "
                f"{self.n_layers}"
            )
        if SLIDING in self.layer_types and not self.sliding_window:
            raise ValueError("layer_types has sliding layers but sliding_window is not set")

    @property
    def pattern(self) -> tuple[str, ...]:
        """The smallest period of `layer_types` that divides the depth."""
        for period in range(1, self.n_layers + 1):
            head = self.layer_types[:period]
            if self.n_layers % period == 0 and head * (self.n_layers // period) == self.layer_types:
                return head
        raise AssertionError("unreachable: the whole depth is a period")

    @property
    def n_groups(self) -> int:
        """G, how often the pattern repeats: the length of the scan over layers."""
        return self.n_layers // len(self.pattern)

    def rope_of(self, layer_type: str) -> RopeConfig:
        """The rotary embedding that layers of this type use."""
        return self.sliding_rope or self.rope if layer_type == SLIDING else self.rope


def hf_layer_types(hf: Mapping[str, Any], default: tuple[str, ...]) -> tuple[str, ...]:
    """`layer_types` of a Hugging Face config in our names; `default` where it has none.

    Raises:
      ValueError: a layer type is neither full nor sliding attention.
    """
    names = hf.get("layer_types")
    if names is None:
        return default
    unknown = sorted(set(names) - set(_HF_LAYER_TYPES))
    if unknown:
        raise ValueError(f"layer_types has {unknown[0]!r}; known: {', '.join(_HF_LAYER_TYPES)}")
    return tuple(_HF_LAYER_TYPES[name] for name in names)


def hf_rope(hf: Mapping[str, Any], layer_type: str | None = None) -> RopeConfig:
    """Rotary parameters of a Hugging Face config, in any of the forms that exist.

    transformers 5 keeps them in `rope_parameters` (one dict, or one a layer type); transformers 4
    in `rope_theta` and `rope_scaling`, whose kind is called `rope_type` or, older, `type`.

    Args:
      hf: the parsed `config.json`.
      layer_type: `full_attention` or `sliding_attention`, for configs nested by layer type.

    Raises:
      ValueError: theta is absent, the kind is unknown, or a number that the kind needs is absent.
    """
    given = hf.get("rope_parameters") or {}
    if layer_type is not None and isinstance(given.get(layer_type), Mapping):
        given = given[layer_type]
    elif any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError(f"rope_parameters is nested by layer type but has no {layer_type!r}")
    scaling = hf.get("rope_scaling") or {}
    merged = {**scaling, **given}
    kind = merged.get("rope_type", merged.get("type", "default"))
    theta = merged.get("rope_theta", hf.get("rope_theta"))
    if theta is None:
        raise ValueError("no rope_theta, neither in rope_parameters nor at the top level")
    if merged.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    theta = float(theta)

    def number(name: str) -> float:
        if merged.get(name) is None:
            raise ValueError(f"rope type {kind!r} needs {name}")
        return float(merged[name])

    if kind == "default":
        return RopeConfig("default", theta)
    if kind == "llama3":
        return RopeConfig(
            "llama3",
            theta,
            factor=number("factor"),
            original_max_position=int(number("original_max_position_embeddings")),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
        )
    if kind == "yarn":
        if merged.get("mscale") or merged.get("mscale_all_dim"):
            raise ValueError("rope type 'yarn' with mscale is not supported")
        factor = number("factor")
        attention_factor = merged.get("attention_factor")
        if attention_factor is None:
            # YaRN (arXiv 2309.00071), section 3.4: sqrt(1/t) = 0.1 ln(s) + 1.
            attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return RopeConfig(
            "yarn",
            theta,
            factor=factor,
            original_max_position=int(number("original_max_position_embeddings")),
            attention_factor=float(attention_factor),
            beta_fast=float(merged.get("beta_fast") or 32.0),
            beta_slow=float(merged.get("beta_slow") or 1.0),
            truncate=bool(merged.get("truncate", True)),
        )
    raise ValueError(f"unknown rope type {kind!r}; known: default, llama3, yarn")


def hf_common(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that every family reads the same way, as keyword arguments of DecoderConfig.

    Raises:
      ValueError: a field is absent, or asks for something that no family here computes.
    """

    def field(name: str) -> Any:
        if hf.get(name) is None:
            raise ValueError(f"{name} is missing")
        return hf[name]

    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={hf['hidden_act']!r} is not supported; only 'silu' is")
    for bias in ("attention_bias", "mlp_bias"):
        if hf.get(bias):
            raise ValueError(f"{bias}=true is not supported")
    n_heads = int(field("num_attention_heads"))
    d_model = int(field("hidden_size"))
    return dict(
        vocab_size=int(field("vocab_size")),
        d_model=d_model,
        d_ff=int(field("intermediate_size")),
        n_layers=int(field("num_hidden_layers")),
        n_heads=n_heads,
        n_kv_heads=int(hf.get("num_key_value_heads") or n_heads),
        head_dim=int(hf.get("head_dim") or d_model // n_heads),
        norm_eps=float(field("rms_norm_eps")),
        tied=bool(hf.get("tie_word_embeddings", False)),
        max_position=int(field("max_position_embeddings")),
    )
