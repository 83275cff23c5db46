"""Llama-3.2-3B-Instruct: the paper's recipe on a smaller Llama.

retmask run --config=configs/llama32_3b.py --workdir=out/llama32_3b \\
    --config.model.path=Llama-3.2-3B-Instruct --config.prompts.path=prompts.jsonl
"""

from ml_collections import ConfigDict

from retmask_jax.configs import base


def get_config(arg: str = "") -> ConfigDict:
    """Returns the config; `arg` must be empty."""
    config = base.get_config(arg)
    config.model.path = "Llama-3.2-3B-Instruct"
    config.heads.tau = 0.1
    return config
