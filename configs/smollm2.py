"""SmolLM2-Instruct, 360M or 1.7B, on one accelerator; for a CPU see smollm2_135m.

retmask run --config=configs/smollm2.py:1.7b --workdir=out/smollm2_1.7b \\
    --config.model.path=SmolLM2-1.7B-Instruct --config.prompts.path=prompts.jsonl

The argument is 360m or 1.7b (where there is none).
"""

from ml_collections import ConfigDict

from retmask_jax.configs import base

SIZES = {"360m": "360M", "1.7b": "1.7B"}


def get_config(arg: str = "1.7b") -> ConfigDict:
    """Returns the config of one size."""
    if arg not in SIZES:
        raise ValueError(f"no SmolLM2 of size {arg!r}; it is one of {', '.join(SIZES)}")
    config = base.get_config()
    config.model.path = f"SmolLM2-{SIZES[arg]}-Instruct"
    config.mesh.fsdp = -1
    config.heads.tau = 0.1
    # The models are made for 8,192 tokens, the answer included.
    config.detect.max_length = config.evaluate.max_length = 8000
    return config
