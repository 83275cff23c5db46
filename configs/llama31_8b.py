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
    config.heads.tau = 0.1
    return config
