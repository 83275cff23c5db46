"""The scaling study of launch/SCALING.md: train steps compiled for TPU slices that nobody holds.

    python tests/benchmarks/scaling.py            # plans what launch/scaling.csv lacks
    python tests/benchmarks/scaling.py --tables   # prints the tables of launch/SCALING.md

16 pairs of 1,024-token rows a chip and step, one at a time: 512 pairs on 32 chips. A plan takes the
TPU compiler about a minute.
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from retmask_jax import config as configs
from retmask_jax import plan
from retmask_jax.chips import open_slice
from retmask_jax.estimate import estimates
from retmask_jax.programs import read_model, stage_mesh

TABLE = Path(__file__).parents[2] / "launch" / "scaling.csv"
CONFIGS = {"Llama-3.1-8B": "llama31_8b", "Qwen3-8B": "qwen3:8b", "Olmo-3-7B": "olmo3:instruct"}
SLICES = {  # chips -> shape
    "v5e": {8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
    "v5p": {4: "2x2x1", 32: "2x4x4", 256: "4x8x8"},
    "v6e": {4: "2x2", 8: "2x4", 32: "4x8", 256: "16x16"},
}
MESHES = (  # of 32 chips
    {"tensor": 2}, {"tensor": 4}, {"sequence": 2}, {"data": 2}, {"data": 2, "tensor": 2},
)  # fmt: skip
PAIRS, LENGTH = 16, 1024
KEY = ("model", "topology", "slices", "data", "sequence", "tensor")
FIELDS = (
    "model", "topology", "slices", "data", "fsdp", "sequence", "tensor", "fits", "needed_gib",
    "available_gib", "weights_gib", "temporary_gib", "payload_gb", "sent_gb", "compute_s",
    "memory_s", "interconnect_s", "network_s", "step_s", "bound", "mfu", "mfu_serial", "compile_s",
)  # fmt: skip
HEADER = (
    "| slice | data x fsdp x sequence x tensor | GiB a chip | temporary | moved | sent | step | MFU"
    " | bound by |\n|---|---|---|---|---|---|---|---|---|"
)


class Case(NamedTuple):
    """One plan."""

    model: str
    topology: str
    slices: int
    mesh: dict[str, int]

    @property
    def key(self) -> tuple[str, ...]:
        axes = {"data": 1, "sequence": 1, "tensor": 1} | self.mesh
        return tuple(str((self._asdict() | axes)[name]) for name in KEY)

    def overrides(self) -> list[str]:
        name, _, shape = self.topology.partition(":")
        chips = self.slices * next(n for n, dims in SLICES[name].items() if dims == shape)
        return [
            f"--config.train.micro_pairs={chips}",
            f"--config.train.pairs_per_step={PAIRS * chips}",
            *(f"--config.mesh.{axis}={size}" for axis, size in self.mesh.items()),
        ]

    def command(self) -> str:
        slices = [f"--slices={self.slices}"] if self.slices > 1 else []
        options = [f"--config={CONFIGS[self.model]}", f"--topology={self.topology}", *slices]
        options += [f"--row_length={LENGTH}", *self.overrides()]
        return " ".join(["retmask plan", *options])

    def plan(self) -> dict[str, Any]:
        """What that command finds, as a row of the table."""
        config = configs.load(CONFIGS[self.model], self.overrides())
        model, _ = read_model(config)
        where = open_slice(self.topology, self.slices)
        mesh = stage_mesh(config, model, where, "train")
        (one,) = estimates(config, where, "train", model, mesh, LENGTH)
        return self._asdict() | plan.row(one)


def cases() -> Iterator[Case]:
    """All plans of the study, those that carry its conclusions first."""
    for model in CONFIGS:
        for chip, shapes in SLICES.items():
            for n in (32, 256):
                yield Case(model, f"{chip}:{shapes[n]}", 1, {})
    for model in CONFIGS:
        for chip, shapes in SLICES.items():
            yield Case(model, f"{chip}:{shapes[256]}", 2, {"data": 2})
            for n in sorted(shapes.keys() - {32, 64, 128, 256}):
                yield Case(model, f"{chip}:{shapes[n]}", 1, {})
    for n in (64, 128):
        yield Case("Llama-3.1-8B", f"v5e:{SLICES['v5e'][n]}", 1, {})
    for mesh in MESHES:
        yield Case("Llama-3.1-8B", f"v5e:{SLICES['v5e'][32]}", 1, mesh)


def rows() -> list[dict[str, str]]:
    """What has been planned."""
    if not TABLE.exists():
        return []
    with TABLE.open() as file:
        return list(csv.DictReader(file))


def plan_missing() -> None:
    done = {tuple(row[name] for name in KEY) for row in rows()}
    for case in cases():
        if case.key in done:
            continue
        print(case.command(), flush=True)
        found = case.plan()
        new = not TABLE.exists()
        with TABLE.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, extrasaction="ignore", lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(found)


def tables() -> str:
    """The study as Markdown, a table for each model and chip."""
    text = []
    for model in CONFIGS:
        for chip in SLICES:
            text += [f"### {model} on {chip}", "", HEADER]
            text += [
                line(row)
                for row in sorted(rows(), key=lambda row: (chips(row), row["data"], row["tensor"]))
                if row["model"] == model and row["topology"].startswith(chip)
            ]
            text.append("")
    return "\n".join(text)


def chips(row: dict[str, str]) -> int:
    n = 1
    for axis in ("data", "fsdp", "sequence", "tensor"):
        n *= int(row[axis])
    return n


def line(row: dict[str, str]) -> str:
    """A row of the table as Markdown."""
    mesh = " x ".join(row[axis] for axis in ("data", "fsdp", "sequence", "tensor"))
    shape = f"{row['slices']} x {row['topology']}" if row["slices"] != "1" else row["topology"]
    start = f"| {shape} | {mesh} |"
    if row["fits"] != "True":
        needed = f"{float(row['needed_gib']):.1f}, too much" if row["needed_gib"] else "too much"
        return f"{start} {needed} | | | | | | |"
    return (
        f"{start} {float(row['needed_gib']):.2f} | {float(row['temporary_gib']):.2f} | "
        f"{float(row['payload_gb']):.0f} GB | {float(row['sent_gb']):.0f} GB | "
        f"{float(row['step_s']):.2f} s | "
        f"{float(row['mfu_serial']):.0%} to {float(row['mfu']):.0%} | {row['bound']} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tables", action="store_true", help="print the tables")
    if parser.parse_args().tables:
        print(tables())
    else:
        plan_missing()


if __name__ == "__main__":
    main()
