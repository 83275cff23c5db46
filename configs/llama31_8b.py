"""Llama-3.1-8B-Instruct, as in the RetMask paper.

retmask run --config=configs/llama31_8b.py --workdir=out/llama31_8b \\
    --config.model.path=Llama-3.1-8B-Instruct --config.prompts.path=prompts.jsonl
"""

from ml_collections import ConfigDict

from retmask_jax.configs import base


def get_config(arg: str = "") -> ConfigDict:
    """Returns the config; `arg` must be empty."""
    config = base.get_config(arg)
    config.model.path = "Llama-3.1-8B-Instruct"
    config.mesh.fsdp = -1
    config.heads.tau = 0.1
    config.detect.max_length = 50_000
    # Up to the 131,072 tokens that the model is made for, less the answer.
    config.evaluate.min_length = 8_000
    config.evaluate.max_length = 128_000
    return config
