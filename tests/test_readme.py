"""The commands that README and CONTRIBUTING show, up to the start of a stage; .ci/run goes on."""

import re
import shlex
from pathlib import Path

import pytest

from retmask_jax import cli
from retmask_jax import config as cfg

ROOT = Path(__file__).parent.parent
CI = (ROOT / ".ci" / "run").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def commands(page: str) -> list[list[str]]:
    """Returns the words of each command in the ```sh blocks of a page."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", "").splitlines()
    return [shlex.split(re.sub(r"^XLA_FLAGS=\S+ ", "", line), comments=True) for line in lines]


README = commands("README.md")
RETMASK = [line for line in README if line[0] == "retmask"]


def test_two_commands_come_first():
    assert README[:2] == [["make", "quickstart"], ["make", "test"]]


def test_every_command_is_run_by_ci():
    assert {line[0] for line in README} == {"make", "retmask", ".", "mkdir", "cp"}
    assert "source <(sed -n '/^```sh$/,/^```$/{/^```/d;p}' \"$root/README.md\")" in CI
    for command, target in [line for line in README if line[0] == "make"]:
        assert command == "make" and f"\nmake {target}" in CI
    not_here = [line for line in RETMASK if "llama31" in str(line) or "qwen3" in str(line)]
    assert len(not_here) == 2 < len(RETMASK)


def test_contributing_names_make_targets():
    for command, target in commands("CONTRIBUTING.md"):
        assert command == "make" and re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


@pytest.mark.parametrize("line", [line for line in RETMASK if "--help" in line], ids=" ".join)
def test_help_is_shown(line, capsys):
    assert cli.main(line[1:]) == 0
    assert capsys.readouterr().out.startswith("usage: retmask")


@pytest.mark.parametrize("line", [line for line in RETMASK if "--help" not in line], ids=" ".join)
def test_a_stage_is_started_as_shown(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    started = []
    monkeypatch.setattr(cli, "_run", lambda *args: started.append(args))
    assert cli.main(line[1:]) == 0
    (stage, config, _, options) = started[0]
    assert stage == line[1] and config.is_locked
    assert options == ({"masked": True} if "--masked" in line else {})


def test_options_named_in_the_text_exist():
    named = re.findall(
        r"`((?:heads|haystack|model|preferences)\.[a-z]+)`", (ROOT / "README.md").read_text()
    )
    assert {"heads.rule", "haystack.path", "model.path", "preferences.path"} <= set(named)
    assert set(named) - {"heads.json", "heads.png"} <= cfg.OPTIONS.keys()
