"""The same models in PyTorch (transformers), for comparing. Needs torch, a test extra."""

import numpy as np
import torch
import transformers

from retmask_jax.models import weight_names
from retmask_jax.models.decoder import Decoder, parameters


def state_dict(model: Decoder) -> dict[str, torch.Tensor]:
    """Our weights under their Hugging Face names, float32."""
    params = parameters(model)
    tensors = {}
    for slot in weight_names(model.config):
        value = np.asarray(params[slot.path][...], np.float32)
        value = value if slot.group is None else value[slot.group]
        if slot.transpose and slot.path.endswith(".o"):
            value = value.reshape(-1, value.shape[-1]).T
        elif slot.transpose:
            value = value.reshape(value.shape[0], -1).T
        elif value.ndim > 1 and "norm" in slot.path:
            value = value.reshape(-1)
        tensors[slot.name] = torch.from_numpy(np.array(value, order="C"))
    return tensors


def torch_model(model: Decoder, hf: dict) -> transformers.PreTrainedModel:
    """transformers' model of this Hugging Face config with our weights; eager attention."""
    fields = {key: value for key, value in hf.items() if key not in ("model_type", "architectures")}
    config = transformers.AutoConfig.for_model(hf["model_type"], **fields)
    config._attn_implementation = "eager"
    reference = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    missing, unexpected = reference.load_state_dict(state_dict(model), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"} and (not missing or model.config.tied)
    reference.tie_weights()
    return reference


def mask_heads(reference: transformers.PreTrainedModel, keep: np.ndarray, head_dim: int) -> None:
    """Zeroes the columns of o_proj that belong to masked heads; keep is bool [L, N]."""
    with torch.no_grad():
        for layer, row in zip(reference.model.layers, keep, strict=True):
            for head in np.flatnonzero(~row):
                layer.self_attn.o_proj.weight[:, head * head_dim : (head + 1) * head_dim] = 0.0
