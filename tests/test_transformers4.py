"""Exports as the last transformers of version 4 reads them, in a process of its own.

`make test` puts it beside the tests' own transformers, into `transformers4/` of the environment.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_checkpoint
from conftest import tiny_hf
from tiny_checkpoint import FAMILIES

from retmask_jax.checkpoint_io import load_model, open_source
from retmask_jax.export import export_model

pytestmark = pytest.mark.torch

HOME = Path(sys.prefix) / "transformers4"
THETA, FACTOR = 500000.0, 8.0
YARN = {"rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": 32}
TOKENS = np.random.default_rng(0).integers(3, 128, (1, 60))
READ = """
import sys, json, numpy, torch, transformers
found = {"version": transformers.__version__}
tokens = torch.tensor(json.loads(sys.stdin.read()))
for folder in sys.argv[1:]:
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    numpy.save(folder + "/logits.npy", model(tokens).logits.detach().numpy())
    found[folder] = [config.rope_theta, config.rope_scaling]
print(json.dumps(found))
"""


def sources(family):
    """What config.json has of RoPE in versions 4 and 5, plain and scaled; and its kind."""
    plain = {"rope_type": "default", "rope_theta": THETA}
    both = {"full_attention": YARN | {"rope_theta": THETA}, "sliding_attention": plain}
    v4 = {"rope_theta": THETA, "rope_scaling": None}
    v5 = {"rope_theta": None, "rope_scaling": None}
    yarn = both if family == "olmo3" else both["full_attention"]
    return {
        "v4": (v4, None),
        "v4 yarn": (v4 | {"rope_scaling": YARN}, "yarn"),
        "v5": (v5 | {"rope_parameters": plain}, None),
        "v5 yarn": (v5 | {"rope_parameters": yarn}, "yarn"),
    }


@pytest.mark.skipif(not HOME.exists(), reason="`make test` installs transformers 4")
def test_w5_version_4_reads_the_same_theta_and_gives_the_same_logits(tmp_path):
    expected = {}
    for family in FAMILIES:
        for name, (changes, kind) in sources(family).items():
            hf = tiny_hf(family, **changes)
            hf = {key: value for key, value in hf.items() if value is not None}
            folder = tmp_path / family / name
            tiny_checkpoint.write(folder / "source", hf)
            source = open_source(str(folder / "source"))
            model = load_model(source, dtype="float32")
            export_model(model, source, folder / "out")
            positions = jnp.arange(TOKENS.shape[1])[None]
            output = model(TOKENS, positions, jnp.ones_like(positions))
            expected[str(folder / "out")] = kind, np.asarray(model.logits(output.hidden))
    done = subprocess.run(
        [sys.executable, "-c", READ, *expected],
        env=os.environ | {"PYTHONPATH": str(HOME), "HF_HUB_OFFLINE": "1"},
        input=json.dumps(TOKENS.tolist()),
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"].startswith("4.57.")
    for folder, (kind, logits) in expected.items():
        theta, scaling = found[folder]
        assert theta == THETA, folder
        assert (scaling or {}).get("rope_type") == kind, folder
        assert (scaling or {}).get("factor") == (FACTOR if kind else None), folder
        assert np.abs(np.load(f"{folder}/logits.npy") - logits).max() <= 1e-4, folder
