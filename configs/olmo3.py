"""Olmo-3-7B, Instruct or Think, as in the RetMask paper.

retmask run --config=configs/olmo3.py:think --workdir=out/olmo3_think \\
    --config.model.path=Olmo-3-7B-Think --config.prompts.path=prompts.jsonl

The argument is instruct (where there is none) or think. Think reasons before every answer, in
detection too: its chat template leaves no choice.
"""

from ml_collections import ConfigDict

from retmask_jax.configs import base


def get_config(arg: str = "instruct") -> ConfigDict:
    """Returns the config of one variant."""
    if arg not in ("instruct", "think"):
        raise ValueError(f"no Olmo-3 called {arg!r}; it is instruct or think")
    config = base.thinking() if arg == "think" else base.get_config()
    config.model.path = f"Olmo-3-7B-{arg.capitalize()}"
    config.mesh.fsdp = -1
    config.heads.tau = 0.05
    config.detect.max_length = 50_000
    if arg == "think":
        # With the paper's 50 tokens it seldom gets to the answer: 30 of 600 trials counted.
        config.detect.max_new_tokens = 512
    # Up to the 65,536 tokens that the model is made for, less the answer.
    config.evaluate.min_length = 8_000
    config.evaluate.max_length = 62_000
    return config
