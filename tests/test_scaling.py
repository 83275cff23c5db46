"""The scaling study in launch/: its tables show its data, and what it says of them holds."""

from pathlib import Path

import pytest
from benchmarks import scaling

PAGE = (Path(__file__).parents[1] / "launch" / "SCALING.md").read_text()
ROWS = {tuple(row[name] for name in scaling.KEY): row for row in scaling.rows()}
CASES = {case.key: case for case in scaling.cases()}


def fsdp(model: str, chip: str, n: int) -> dict[str, str]:
    """The row of a mesh of fsdp alone on n chips."""
    return ROWS[model, f"{chip}:{scaling.SLICES[chip][n]}", "1", "1", "1", "1"]


def test_every_case_is_there_and_the_page_shows_it():
    assert ROWS.keys() == CASES.keys()
    assert scaling.tables() in PAGE


def test_the_page_shows_the_commands():
    shown = [line for line in PAGE.splitlines() if line.startswith("retmask plan")]
    assert shown and set(shown) <= {case.command() for case in CASES.values()}


@pytest.mark.parametrize("model", scaling.CONFIGS)
@pytest.mark.parametrize("chip", scaling.SLICES)
def test_weak_scaling_from_32_to_256_chips(model, chip):
    """What is exchanged stays within 10%, what is held beside the state too or falls."""
    few, many = fsdp(model, chip, 32), fsdp(model, chip, 256)
    assert float(many["payload_gb"]) == pytest.approx(float(few["payload_gb"]), rel=0.1)
    assert float(many["temporary_gib"]) <= 1.1 * float(few["temporary_gib"])
    assert float(many["weights_gib"]) == pytest.approx(float(few["weights_gib"]) / 8, rel=0.02)


@pytest.mark.parametrize("model", scaling.CONFIGS)
def test_512_pairs_on_32_chips(model):
    few = fsdp(model, "v5e", 32)
    assert few["fits"] == "True" and float(few["needed_gib"]) < float(few["available_gib"]) == 16
    assert float(fsdp(model, "v5p", 32)["mfu"]) >= 0.5


def test_the_smallest_slices():
    fits = {n: fsdp("Llama-3.1-8B", "v5e", n)["fits"] for n in (8, 16, 32)}
    assert fits == {8: "False", 16: "True", 32: "True"}
