"""Qwen3, as in the RetMask paper: detects with thinking off, answers and evaluates with it on.

retmask run --config=configs/qwen3.py:8b --workdir=out/qwen3_8b \\
    --config.model.path=Qwen3-8B --config.prompts.path=prompts.jsonl

The argument is 0.6b, 1.7b, 4b, 8b (where there is none) or 32b.
"""

from ml_collections import ConfigDict

from retmask_jax.configs import base

SIZES = {"0.6b": "0.6B", "1.7b": "1.7B", "4b": "4B", "8b": "8B", "32b": "32B"}


def get_config(arg: str = "8b") -> ConfigDict:
    """Returns the config of one size."""
    if arg not in SIZES:
        raise ValueError(f"no Qwen3 of size {arg!r}; it is one of {', '.join(SIZES)}")
    config = base.thinking()
    config.model.path = f"Qwen3-{SIZES[arg]}"
    config.mesh.fsdp = -1
    config.heads.tau = 0.05
    # The models are made for 32,768 tokens, answer and reasoning included.
    config.detect.max_length = 32_000
    config.evaluate.min_length = 2_000
    config.evaluate.max_length = 30_000
    return config
