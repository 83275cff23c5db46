"""Olmo-3-7B, Instruct or Think.

retmask run --config=configs/olmo3.py:think --workdir=out/olmo3_think \\
    --config.model.path=Olmo-3-7B-Think --config.prompts.path=prompts.jsonl

The argument is instruct (where there is none) or think.
"""

from ml_collections import ConfigDict

from retmask_jax.configs import base


def get_config(arg: str = "instruct") -> ConfigDict:
    """Returns the config of one variant."""
    if arg not in ("instruct", "think"):
        raise ValueError(f"no Olmo-3 called {arg!r}; it is instruct or think")
    config = base.thinking() if arg == "think" else base.get_config()
    config.model.path = f"Olmo-3-7B-{arg.capitalize()}"
    config.heads.tau = 0.05
    return config
