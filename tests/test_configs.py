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


@pytest.mark.parametrize(
    ("spec", "tau"), [("llama31_8b", 0.1), ("qwen3", 0.05), ("olmo3:think", 0.05)]
)
def test_the_papers_thresholds(spec, tau):
    assert cfg.load(spec).heads.tau == tau
