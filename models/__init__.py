"""Decoder families in flax nnx. Imports nothing from the stages."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from retmask_jax.models import llama, naming, olmo3, qwen3
from retmask_jax.models.config import DecoderConfig

# Hugging Face `model_type` -> the module of its family.
FAMILIES: dict[str, ModuleType] = {"llama": llama, "qwen3": qwen3, "olmo3": olmo3}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Hugging Face `config.json`.

    Raises:
      ValueError: the architecture is unknown, or its family refuses the config.
    """
    family = FAMILIES.get(hf.get("model_type", ""))
    known = ", ".join(name for module in FAMILIES.values() for name in module.ARCHITECTURES)
    architectures = hf.get("architectures") or []
    if family is None or not set(architectures) <= set(family.ARCHITECTURES):
        asked = ", ".join(architectures) or f"model_type {hf.get('model_type')!r}"
        raise ValueError(f"unknown architecture {asked}; known: {known}")
    return family.decoder_config(hf)


def weight_names(config: DecoderConfig) -> list[naming.Slot]:
    """Every Hugging Face tensor of the model and where it goes."""
    return naming.slots(FAMILIES[config.family].WEIGHTS, config)
