"""Which Hugging Face tensor holds which weight."""

import dataclasses

from retmask_jax.models.config import DecoderConfig


@dataclasses.dataclass(frozen=True)
class WeightName:
    """A weight's path in a block (or the decoder) and its Hugging Face name.

    `transpose`: Hugging Face stores [out, in] where we have [in, out], with all of one side's
    dimensions flattened into one; otherwise the order is the same and only flattened.
    """

    path: str
    name: str
    transpose: bool = False


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where one Hugging Face tensor goes: `group` indexes the leading axis of a stacked weight."""

    path: str
    group: int | None
    name: str
    transpose: bool


# Every family here names its projections as Llama does.
PROJECTIONS = (
    WeightName("blocks.attention.q", "model.layers.{layer}.self_attn.q_proj.weight", True),
    WeightName("blocks.attention.k", "model.layers.{layer}.self_attn.k_proj.weight", True),
    WeightName("blocks.attention.v", "model.layers.{layer}.self_attn.v_proj.weight", True),
    WeightName("blocks.attention.o", "model.layers.{layer}.self_attn.o_proj.weight", True),
    WeightName("blocks.mlp.gate", "model.layers.{layer}.mlp.gate_proj.weight", True),
    WeightName("blocks.mlp.up", "model.layers.{layer}.mlp.up_proj.weight", True),
    WeightName("blocks.mlp.down", "model.layers.{layer}.mlp.down_proj.weight", True),
    WeightName("embed", "model.embed_tokens.weight"),
    WeightName("final_norm", "model.norm.weight"),
    WeightName("lm_head", "lm_head.weight"),
)


def slots(weights: tuple[WeightName, ...], config: DecoderConfig) -> list[Slot]:
    """Every Hugging Face tensor of a model, in the order of layers."""
    period = len(config.pattern)
    found = []
    for weight in weights:
        if weight.path == "lm_head" and config.tied:
            continue
        if not weight.path.startswith("blocks."):
            found.append(Slot(weight.path, None, weight.name, weight.transpose))
            continue
        for layer in range(config.n_layers):
            path = weight.path.replace("blocks.", f"blocks.{layer % period}.", 1)
            name = weight.name.format(layer=layer)
            found.append(Slot(path, layer // period, name, weight.transpose))
    return found
