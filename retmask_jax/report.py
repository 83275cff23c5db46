"""The report: what a run found, as a table on the terminal and as one HTML file with the plots.

Both are made from the artefacts in the work directory alone, at any time: what a stage has not
written yet is said to be missing.
"""

import base64
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jax
import jinja2
import numpy as np
from ml_collections import ConfigDict

from retmask_jax import heads, plots
from retmask_jax.workdir import (
    PathLike,
    Workdir,
    atomic_write,
    parts,
    read_json,
    read_jsonl,
    read_part,
)

TOP_HEADS = 20
SAMPLES = 3
SAMPLE_CHARACTERS = 1500  # of each text of a sample pair

CURVES = {
    "loss": "DPO loss",
    "rewards/margins": "reward margin",
    "rewards/accuracies": "pairs ranked right",
    "grad_norm": "gradient norm",
}


@dataclass(frozen=True)
class Table:
    """Cells as text. An empty header means that the first column names the rows."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def run(config: ConfigDict, workdir: Workdir) -> None:
    """Writes report.html into the work directory and prints the final table on stdout."""
    if jax.process_index() != 0:
        return
    path = workdir.root / "report.html"
    html = render(config, workdir)
    with atomic_write(path) as file:
        file.write(html)
    print(final_table(workdir))


def final_table(workdir: Workdir) -> str:
    """Returns the results as aligned text."""
    blocks = []
    for table in results(workdir):
        rows = [table.header, *table.rows] if table.header else table.rows
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )
        blocks.append("\n".join((table.title, *(f"  {line}" for line in lines))))
    return "\n\n".join((*blocks, f"Work directory: {workdir.root}"))


def render(config: ConfigDict, workdir: Workdir) -> str:
    """Returns report.html: no link leads out of it, and all text that came from a model or a user
    is escaped."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = resources.files("retmask_jax").joinpath("data", "report.html.j2")
    frozen = _read(workdir.root / "config.json") or config.to_dict()
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        model=frozen["model"]["path"],
        results=results(workdir),
        heads=_heads(workdir),
        niah=_niah(workdir),
        pass_recall=frozen["detect"]["pass_recall"],
        training=_training(workdir),
        samples=_samples(workdir),
        pairs_path=frozen["preferences"]["path"],
        config=json.dumps(frozen, indent=2, ensure_ascii=False),
    )


def results(workdir: Workdir) -> list[Table]:
    """The final table, in blocks."""
    return [
        _accuracy(workdir),
        _selection(workdir),
        _pairs(workdir),
        _steps(workdir),
        _files(workdir),
    ]


def _accuracy(workdir: Workdir) -> Table:
    title = "Needle accuracy"
    summary = _read(workdir.evaluate / "summary.json")
    if not summary:
        return _missing(title, "evaluate")
    rows = [
        (
            plots.label(name),
            _percent(found["accuracy"]),
            " – ".join(map(_percent, found["interval"])),
            f"{found['passed']} of {found['trials']}",
            str(len(found["masked"])),
            f"{found['mean_recall']:.3f}",
            str(found["cut"]),
        )
        for name, found in summary["policies"].items()
    ]
    if "trained" not in summary["policies"]:
        rows.append(("trained", "not yet: retmask train, then evaluate", *[""] * 5))
    header = ("model", "accuracy", "95% interval", "passed", "heads masked", "mean recall", "cut")
    return Table(title, header, rows)


def _selection(workdir: Workdir) -> Table:
    title = "Retrieval heads"
    found = _read(workdir.detect / "heads.json")
    if not found:
        return _missing(title, "detect")
    total = found["n_layers"] * found["n_heads"]
    tau = f"{found['asked']['tau']:g}"
    rule = {
        "threshold": f"score of at least {tau}",
        "top": "the best by score",
        "random": "drawn from all",
        "nonretrieval": f"drawn from those with a score below {tau}",
        "list": "listed by hand",
    }[found["asked"]["rule"]]
    rows = [("selected", f"{found['k']:,} of {total:,} ({_percent(found['k'] / total)}), {rule}")]
    if found["trials"]:
        rows.append(("trials passed", f"{found['passed']:,} of {found['trials']:,}"))
    return Table(title, (), rows)


def _pairs(workdir: Workdir) -> Table:
    title = "Preference pairs"
    found = _read(workdir.preferences / "summary.json")
    if not found:
        return _missing(title, "train")
    dropped = {reason: n for reason, n in found["dropped"].items() if n}
    why = ", ".join(f"{n:,} {reason.replace('_', ' ')}" for reason, n in dropped.items())
    cut = ", ".join(f"{n:,} {side}" for side, n in found["cut"].items())
    rows = []
    if answered := _read(workdir.generate / "summary.json"):
        too_long = answered["too_long"]["count"]
        rows.append(("prompts", f"{answered['sampled']:,} answered, {too_long:,} too long"))
    rows += [
        ("kept", f"{found['pairs']:,}"),
        ("dropped", f"{sum(dropped.values()):,}" + (f" ({why})" if why else "")),
        ("cut at the limit", cut),
    ]
    return Table(title, (), rows)


def _steps(workdir: Workdir) -> Table:
    title = "Training"
    metrics = _metrics(workdir)
    measured = [row for row in metrics if "loss" in row]
    if not measured:
        return _missing(title, "train")
    ends = measured[0], measured[-1]
    rows = [
        ("loss", *(f"{row['loss']:.4f}" for row in ends)),
        ("reward margin", *(f"{row['rewards/margins']:.4g}" for row in ends)),
        ("pairs ranked right", *(_percent(row["rewards/accuracies"]) for row in ends)),
    ]
    if skipped := metrics[-1]["skipped"]:
        rows.append(("steps skipped (not finite)", "", str(skipped)))
    if not any(row["update_norm"] for row in metrics):
        rows.append(("no weight has changed: this is still the base model", "", ""))
    return Table(title, ("", *(f"step {row['step']}" for row in ends)), rows)


def _files(workdir: Workdir) -> Table:
    names = {
        "head scores": "detect/head_scores.json",
        "responses": "generate",
        "training metrics": "train/metrics.jsonl",
        "trained weights": "export",
        "evaluation": "evaluate/summary.json",
    }
    rows = [(label, name) for label, name in names.items() if (workdir.root / name).exists()]
    return Table("Files in the work directory", (), [("report", "report.html"), *rows])


def _heads(workdir: Workdir) -> dict[str, Any] | None:
    found = _read(workdir.detect / "heads.json")
    if not found or not found["trials"]:
        return None
    selected = [heads.parse_head(name) for name in found["heads"]]
    means = np.zeros((found["n_layers"], found["n_heads"]))
    for name, score in found["scores"].items():
        means[heads.parse_head(name)] = score["mean"]
    rows = [
        (
            str(rank),
            *name.split("-"),
            f"{score['mean']:.3f}",
            f"{score['low']:.3f} – {score['high']:.3f}",
            "yes" if name in found["heads"] else "",
        )
        for rank, (name, score) in enumerate(found["scores"].items(), 1)
    ]
    header = ("rank", "layer", "head", "mean score", "95% interval", "selected")
    tau = found["asked"]["tau"] if found["asked"]["rule"] == "threshold" else None
    return {
        "trials": found["passed"],
        "heatmap": _embedded((workdir.detect / "heads.png").read_bytes()),
        "distribution": _embedded(plots.score_distribution(means, selected, tau)),
        "table": Table("Heads with the largest scores", header, rows[:TOP_HEADS]),
    }


def _niah(workdir: Workdir) -> list[tuple[str, str]]:
    """(policy, heatmap) of each policy evaluated."""
    summary = _read(workdir.evaluate / "summary.json") or {"policies": {}}
    return [
        (name, _embedded((workdir.evaluate / f"{name}.png").read_bytes()))
        for name in summary["policies"]
    ]


def _training(workdir: Workdir) -> str | None:
    metrics = _metrics(workdir)
    if not metrics:
        return None
    curves = {label: [row.get(name, math.nan) for row in metrics] for name, label in CURVES.items()}
    return _embedded(plots.training_curves([row["step"] for row in metrics], curves))


def _samples(workdir: Workdir) -> list[dict[str, Any]]:
    """The first prompts to which the two policies gave different answers."""
    samples: list[dict[str, Any]] = []
    for chosen, rejected in _answers(workdir):
        if chosen["text"].strip() != rejected["text"].strip():
            samples.append(
                {
                    "id": chosen["id"],
                    "prompt": _shortened(chosen["messages"][-1]["content"]),
                    "chosen": _shortened(chosen["text"]),
                    "chosen_cut": chosen["finish_reason"] == "length",
                    "rejected": _shortened(rejected["text"]),
                    "rejected_cut": rejected["finish_reason"] == "length",
                }
            )
        if len(samples) == SAMPLES:
            break
    return samples


def _answers(workdir: Workdir) -> Iterator[tuple[dict, dict]]:
    for path in parts(workdir.generate):
        rows = {(row["id"], row["sample"], row["policy"]): row for row in read_part(path)}
        for (name, sample, policy), row in rows.items():
            other = rows.get((name, sample, "retrieval"))
            if policy == "base" and other:
                yield row, other


def _metrics(workdir: Workdir) -> list[dict[str, Any]]:
    path = workdir.train / "metrics.jsonl"
    return read_jsonl(path) if path.exists() else []


def _read(path: PathLike) -> Any:
    """Returns a JSON file's content, or None where it does not exist yet."""
    return read_json(path) if path.exists() else None


def _missing(title: str, stage: str) -> Table:
    return Table(title, (), [("not there yet", f"retmask {stage}")])


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _embedded(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _shortened(text: str) -> str:
    text = text.strip()
    return text if len(text) <= SAMPLE_CHARACTERS else f"{text[:SAMPLE_CHARACTERS]} …"
