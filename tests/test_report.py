import base64
import re
import struct

import numpy as np
import pytest

from retmask_jax import plots, report
from retmask_jax.configs import base
from retmask_jax.evaluate import summarise
from retmask_jax.workdir import Workdir, append_jsonl, atomic_write, write_json, write_part

EVIL = "<script>alert('é')</script> & </div>"


def png_size(data: bytes) -> tuple[int, int]:
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A work directory in which every stage has ended; tests do not write into it."""
    workdir = Workdir(tmp_path_factory.mktemp("full"))
    for add in STAGES.values():
        add(workdir)
    return workdir


@pytest.fixture
def config():
    config = base.get_config()
    config.model.path = f"/models/{EVIL}"
    return config


def add_detect(workdir: Workdir) -> None:
    means = np.arange(6.0).reshape(3, 2) / 10
    with atomic_write(workdir.detect / "heads.png", "wb") as file:
        file.write(plots.head_heatmap(means, [(2, 0), (2, 1)]))
    write_json(
        workdir.detect / "heads.json",
        {
            "asked": {"rule": "threshold", "tau": 0.4},
            "k": 2,
            "heads": ["2-0", "2-1"],
            "n_layers": 3,
            "n_heads": 2,
            "trials": 12,
            "passed": 9,
            "scores": {
                f"{i}-{j}": {"mean": means[i, j], "low": means[i, j] / 2, "high": means[i, j] * 2}
                for i, j in [(2, 1), (2, 0), (1, 1), (1, 0), (0, 1)]
            },
        },
    )


def add_generate(workdir: Workdir) -> None:
    def row(name: str, policy: str, text: str, finish_reason: str = "stop") -> dict:
        return {
            "id": name,
            "messages": [{"role": "user", "content": f"question {name} {EVIL}"}],
            "policy": policy,
            "sample": 0,
            "text": text,
            "finish_reason": finish_reason,
        }

    same = [row("same", policy, "just the same") for policy in ("base", "retrieval")]
    write_part(workdir.generate, 0, 2, same)
    rows = [row("a", "retrieval", "bad" + EVIL, "length"), row("a", "base", "good" + EVIL)]
    write_part(workdir.generate, 1, 2, rows)
    summary = {"sampled": 1236, "too_long": {"count": 2}}
    write_json(workdir.generate / "summary.json", summary)


def add_train(workdir: Workdir) -> None:
    write_json(
        workdir.preferences / "summary.json",
        {
            "pairs": 1234,
            "dropped": {"identical": 3, "too_long": 0, "missing_side": 1},
            "cut": {"chosen": 5, "rejected": 7},
        },
    )
    for step, loss in enumerate((0.6931, 0.68, 0.5), 1):
        metrics = {
            "step": step,
            "loss": loss,
            "rewards/margins": 0.7 - loss,
            "rewards/accuracies": 0.5,
            "grad_norm": 2.0,
            "update_norm": 0.1,
            "skipped": 0,
        }
        append_jsonl(workdir.train / "metrics.jsonl", metrics)


def add_evaluate(workdir: Workdir, policies=("base", "retrieval", "random-1", "trained")) -> None:
    summary = {}
    for policy in policies:
        recall = 0.2 if policy == "retrieval" else 0.8
        rows = [
            {"length": 64, "depth": depth, "recall": recall, "finish_reason": "stop"}
            for depth in (0.0, 50.0)
        ]
        summary[policy] = {"masked": [], **summarise(rows, 0.5)}
        with atomic_write(workdir.evaluate / f"{policy}.png", "wb") as file:
            file.write(plots.niah_heatmap(**summary[policy]["grid"], title=policy))
    write_json(workdir.evaluate / "summary.json", {"policies": summary})


STAGES = {
    "detect": add_detect,
    "generate": add_generate,
    "train": add_train,
    "evaluate": add_evaluate,
}


def words(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_final_table_says_what_came_out(full):
    lines = words(report.final_table(full))
    for line in (
        "base 100.0% 34.2% – 100.0% 2 of 2 0 0.800 0",
        "retrieval-masked 0.0% 0.0% – 65.8% 0 of 2 0 0.200 0",
        "random-masked-1 100.0% 34.2% – 100.0% 2 of 2 0 0.800 0",
        "trained 100.0% 34.2% – 100.0% 2 of 2 0 0.800 0",
        "selected 2 of 6 (33.3%), score of at least 0.4",
        "trials passed 9 of 12",
        "prompts 1,236 answered, 2 too long",
        "kept 1,234",
        "dropped 4 (3 identical, 1 missing side)",
        "cut at the limit 5 chosen, 7 rejected",
        "step 1 step 3",
        "loss 0.6931 0.5000",
        "reward margin 0.0069 0.2",
        "report report.html",
        f"Work directory: {full.root}",
    ):
        assert line in lines, line


def test_columns_of_the_final_table_are_aligned(tmp_path):
    workdir = Workdir(tmp_path)
    add_evaluate(workdir)
    header, base_row, masked_row = report.final_table(workdir).splitlines()[1:4]
    assert header.index("accuracy") == base_row.index("100.0%") == masked_row.index("0.0%")


@pytest.mark.parametrize("left_out", STAGES)
def test_report_says_which_stage_is_missing(tmp_path, config, left_out):
    workdir = Workdir(tmp_path)
    for stage, add in STAGES.items():
        if stage != left_out:
            add(workdir)
    html = report.render(config, workdir)
    assert re.findall("the stage <code>(.*?)</code>", html) == [left_out]


def test_report_of_an_empty_work_directory(tmp_path, config, capsys):
    report.run(config, Workdir(tmp_path))
    html = (tmp_path / "report.html").read_text()
    assert re.findall("the stage <code>(.*?)</code>", html) == [
        "detect", "evaluate", "train", "generate",
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert "retmask detect" in out and "retmask train" in out and "retmask evaluate" in out


def test_final_table_before_the_weights_are_trained(tmp_path):
    workdir = Workdir(tmp_path)
    add_evaluate(workdir, ("base", "retrieval"))
    assert "trained not yet: retmask train, then evaluate" in words(report.final_table(workdir))


def test_report_escapes_every_text_and_links_nowhere(full, config):
    html = report.render(config, full)
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(&#39;é&#39;)&lt;/script&gt; &amp; &lt;/div&gt;") >= 5
    assert not re.findall(r"(?:href|src)=\"(?!data:image/png;base64,)", html)
    assert 'name="viewport"' in html


def test_report_embeds_the_plots(full, config):
    html = report.render(config, full)
    images = [base64.b64decode(data) for data in re.findall(r"base64,([^\"]*)", html)]
    assert len(images) == 7  # heads, their distribution, four policies, training
    assert all(min(png_size(image)) > 200 for image in images)
    assert images[0] == (full.root / "detect" / "heads.png").read_bytes()


def test_report_is_the_same_bytes_again(tmp_path, config):
    workdir = Workdir(tmp_path)
    for add in STAGES.values():
        add(workdir)
    report.run(config, workdir)
    first = (tmp_path / "report.html").read_bytes()
    report.run(config, workdir)
    assert (tmp_path / "report.html").read_bytes() == first


def test_steps_that_were_skipped_and_weights_that_did_not_move(tmp_path, config):
    """T8: a step with no finite loss leaves a gap, not a crash. D1: weights that stay say so."""
    workdir = Workdir(tmp_path)
    row = {"loss": 0.69, "rewards/margins": 0.0, "rewards/accuracies": 0.0, "grad_norm": 1.0}
    for step in (1, 2):
        same = {"update_norm": 0.0, "skipped": step - 1}
        rest = row if step == 1 else {}
        append_jsonl(workdir.train / "metrics.jsonl", {"step": step, **rest, **same})
    lines = words(report.final_table(workdir))
    assert "loss 0.6900 0.6900" in lines
    assert "steps skipped (not finite) 1" in lines
    assert "no weight has changed: this is still the base model" in lines
    assert "Training curves" in report.render(config, workdir)


def test_samples_are_pairs_that_differ(tmp_path, config):
    workdir = Workdir(tmp_path)
    add_generate(workdir)
    html = report.render(config, workdir)
    assert "just the same" not in html
    assert re.search(r"chosen</b><br>good&lt;", html)
    assert re.search(r"rejected</b> \(cut at the limit\)<br>bad&lt;", html)


def test_pairs_from_elsewhere_are_named(tmp_path, config):
    config.preferences.path = f"/pairs/{EVIL}.jsonl"
    html = report.render(config, Workdir(tmp_path))
    assert "The pairs are those of <code>/pairs/&lt;script&gt;" in html
    assert "<code>generate</code>" not in html


def test_top_heads_have_intervals(tmp_path, config):
    workdir = Workdir(tmp_path)
    add_detect(workdir)
    cells = re.findall(r"<td>(.*?)</td>", report.render(config, workdir))
    at = cells.index("0.250 – 1.000")
    assert cells[at - 4 : at + 2] == ["1", "2", "1", "0.500", "0.250 – 1.000", "yes"]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plots.head_heatmap(np.eye(4), [(1, 1)]),
        lambda: plots.score_distribution(np.zeros((2, 3))),
        lambda: plots.score_distribution(np.eye(4), [(0, 0)], 0.5),
        lambda: plots.niah_heatmap([8], [0.0], [[0]], [[0]]),
        lambda: plots.niah_heatmap(range(40), range(30), np.ones((40, 30)), np.ones((40, 30))),
        lambda: plots.training_curves([1], {"a": [0.5]}),
        lambda: plots.training_curves(range(60), dict.fromkeys("abc", np.linspace(0, 1, 60))),
    ],
)
def test_plots_are_the_same_bytes_again(draw):
    assert min(png_size(draw())) > 200
    assert draw() == draw()
