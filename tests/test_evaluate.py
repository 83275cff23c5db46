"""Needle accuracy: who is asked what, how it is summed up, and restarts at any moment."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import chat_families
import jax
import numpy as np
import pytest

from retmask_jax import checkpoint_io, detect, evaluate, heads, train
from retmask_jax.chat import Chat
from retmask_jax.configs import base
from retmask_jax.errors import UserError
from retmask_jax.haystack import read_haystack
from retmask_jax.sampler import Completion, Request, Sampler
from retmask_jax.workdir import Workdir, parts, read_json, read_parts, write_json

STOPS = list(range(0, 256, 12))  # many, so that random weights stop now and then
NEEDLES = (
    {"needle": "The cat is red.", "question": "Which cat?", "answer": "red"},
    {"needle": "The dog is in the pond.", "question": "Where is it?", "answer": "in the pond"},
)
TEXT = "One is here. Two are there. Three went away. Four stayed at home. Five sang. Six slept. "


@pytest.fixture
def setup(tiny_model, tmp_path, monkeypatch):
    """setup(name, **evaluate options) -> (config, Workdir) of a tiny model that can run."""
    model, model_config = tiny_model("llama", vocab_size=288)
    trained, _ = tiny_model("llama", seed=7, vocab_size=288)
    source = SimpleNamespace(
        config=model_config, generation_config={"eos_token_id": STOPS}, hf_config={}
    )
    monkeypatch.setattr(checkpoint_io, "open_source", lambda path: source)
    monkeypatch.setattr(checkpoint_io, "load_tokenizer", lambda source: chat_families.llama())
    monkeypatch.setattr(checkpoint_io, "load_model", lambda *args, **options: model)
    monkeypatch.setattr(train, "load_trained", lambda *args: trained)
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    (tmp_path / "needles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in NEEDLES))
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text(TEXT * 3)

    def setup(name="work", is_trained=True, **options):
        config = base.get_config()
        config.haystack.path = str(tmp_path / "books")
        config.haystack.needles = str(tmp_path / "needles.jsonl")
        defaults = {
            "min_length": 330,
            "max_length": 420,
            "lengths": 2,
            "depths": 2,
            "max_new_tokens": 6,
            "slots": 8,
            "random_seeds": 1,
        }
        for key, value in {**defaults, **options}.items():
            config.evaluate[key] = value
        workdir = Workdir(tmp_path / name)
        selection = {"heads": ["0-1", "2-5", "3-0"], "n_layers": 4, "n_heads": 8}
        write_json(workdir.detect / "heads.json", selection)
        if is_trained:
            write_json(workdir.train / "summary.json", {})
        return config, workdir

    return setup


def contents(workdir: Workdir) -> dict[str, bytes]:
    folder = Path(workdir.evaluate)
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


_left_alone: dict[str, bytes] = {}


@pytest.fixture
def left_alone(setup, monkeypatch):
    """The contents of the work directory after a run that nothing disturbed, in parts of 3."""
    monkeypatch.setattr(evaluate, "PART_TRIALS", 3)
    if not _left_alone:
        config, workdir = setup(name="left_alone")
        evaluate.run(config, workdir)
        _left_alone.update(contents(workdir))
    return _left_alone


def make_trial(index: int = 0) -> detect.Trial:
    return detect.Trial(f"8-0-{index}", (5, 6, index), (0, 1), "in the pond", 8, 0.0, index)


# ------------------------------------------------------------------------------------- the stage


def test_every_policy_answers_every_trial(setup, tiny_model):
    config, workdir = setup()
    evaluate.run(config, workdir)
    chat = Chat.load(checkpoint_io.open_source(""), date=config.chat.date)
    rows = read_parts(workdir.evaluate / "initial") + read_parts(workdir.evaluate / "trained")
    summary = read_json(workdir.evaluate / "summary.json")["policies"]
    assert list(summary) == ["base", "retrieval", "random-1", "trained"]
    for policy in summary:
        keys = [
            (row["length"], row["depth"], row["needle"]) for row in rows if row["policy"] == policy
        ]
        assert keys == [(n, d, i) for n in (330, 420) for d in (0, 100) for i in (0, 1)]
        assert (workdir.evaluate / f"{policy}.png").read_bytes().startswith(b"\x89PNG")
        assert summary[policy]["trials"] == 8
        assert summary[policy]["cut"] == sum(
            row["finish_reason"] == "length" for row in rows if row["policy"] == policy
        )
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}

    text = evaluate.from_the_middle(read_haystack(config.haystack.path))
    prompts = {
        t.id: t.prompt_ids for t in detect.niah_trials(config, chat, "evaluate", text).trials
    }
    for policy, found in summary.items():
        masked = [heads.parse_head(name) for name in found["masked"]]
        mask = heads.HeadMask.from_heads(4, 8, masked)
        model, _ = tiny_model("llama", seed=7 * (policy == "trained"), vocab_size=288)
        alone = Sampler(
            model,
            bank=mask.array[None],
            slots=8,
            max_length=max(map(len, prompts.values())) + 6,
            max_new_tokens=6,
            stop_ids=chat.stop_ids,
        )
        asked = [Request(name, ids) for name, ids in prompts.items()]
        answers = {completion.id: list(completion.tokens) for completion in alone(asked)}
        assert answers == {row["id"]: row["ids"] for row in rows if row["policy"] == policy}


def test_masks_of_the_policies(setup):
    selected = heads.HeadMask.from_heads(4, 8, [(0, 1), (2, 5), (3, 0)])
    masks = evaluate.initial_masks(selected, 3, seed=0)
    assert list(masks) == ["base", "retrieval", "random-1", "random-2", "random-3"]
    assert [len(mask.masked) for mask in masks.values()] == [0, 3, 3, 3, 3]
    assert masks["retrieval"] == selected
    assert len(set(masks.values())) == 5
    assert evaluate.initial_masks(selected, 3, seed=0) == masks
    assert evaluate.initial_masks(selected, 1, seed=0)["random-1"] == masks["random-1"]
    assert evaluate.initial_masks(selected, 1, seed=1)["random-1"] != masks["random-1"]


def test_prompts_are_not_those_of_detection(setup):
    config, _ = setup()
    for name in ("min_length", "max_length", "lengths", "depths"):
        config.detect[name] = config.evaluate[name]
    chat = Chat.load(checkpoint_io.open_source(""), date=config.chat.date)
    text = evaluate.from_the_middle(read_haystack(config.haystack.path))
    seen = {trial.prompt_ids for trial in detect.niah_trials(config, chat).trials}
    asked = {
        trial.prompt_ids for trial in detect.niah_trials(config, chat, "evaluate", text).trials
    }
    assert len(asked) == len(seen) == 8
    assert not asked & seen


def test_from_the_middle():
    text = "One is here. Two are there.\n\nThree went. Four stayed."
    assert (
        evaluate.from_the_middle(text) == "Three went. Four stayed.\n\nOne is here. Two are there."
    )
    for text in ("no end of a sentence", "One sentence.", "An end. no end"):
        assert sorted(evaluate.from_the_middle(text).split()) == sorted(text.split())


def test_without_trained_weights_the_rest_is_done_and_the_next_start_adds_them(setup, left_alone):
    config, workdir = setup(is_trained=False)
    evaluate.run(config, workdir)
    early = contents(workdir)
    policies = read_json(workdir.evaluate / "summary.json")["policies"]
    assert list(policies) == ["base", "retrieval", "random-1"]
    evaluate.run(config, workdir)
    assert contents(workdir) == early
    write_json(workdir.train / "summary.json", {})
    evaluate.run(config, workdir)
    assert contents(workdir) == left_alone


def test_kills_lose_only_unfinished_parts(setup, left_alone, monkeypatch):
    """Killed again and again, each time after some more answers, the run ends the same."""
    config, workdir = setup()
    sample = Sampler.__call__

    def killed_after(answers: int):
        def killed(self, requests):
            for count, completion in enumerate(sample(self, requests)):
                if count == answers:
                    raise KeyboardInterrupt
                yield completion

        return killed

    finished = []
    for answers in (0, 20, 7, 1):
        with monkeypatch.context() as patch:
            patch.setattr(Sampler, "__call__", killed_after(answers))
            with pytest.raises(KeyboardInterrupt):
                evaluate.run(config, workdir)
        left = contents(workdir)
        assert "summary.json" not in left
        assert left.items() <= left_alone.items()
        finished.append(len(parts(workdir.evaluate / "initial")))
    assert finished[0] == 0 < finished[1] <= finished[2] <= finished[3]
    evaluate.run(config, workdir)
    assert contents(workdir) == left_alone


def test_refusals(setup, left_alone, tmp_path):
    config, workdir = setup(max_length=510, max_new_tokens=6)
    with pytest.raises(UserError, match=r"evaluate\.max_length .* but the model has 512 positions"):
        evaluate.run(config, workdir)
    config, workdir = setup()
    (workdir.detect / "heads.json").unlink()
    with pytest.raises(UserError, match="run the detect stage first"):
        evaluate.run(config, workdir)
    config, workdir = setup()
    workdir.evaluate.mkdir(parents=True)
    (workdir.evaluate / "plan.json").write_bytes(left_alone["plan.json"])
    (tmp_path / "books" / "b.txt").write_text("More to read.")
    with pytest.raises(UserError, match="begun with other trials"):
        evaluate.run(config, workdir)


# ------------------------------------------------------------------------------------ the answers


@pytest.fixture(scope="module")
def thinker():
    return Chat(chat_families.qwen3(), date="26 Jul 2024")


@pytest.mark.parametrize(
    ("text", "finish_reason", "thinking", "recall"),
    [
        ("It is in the pond.", "stop", False, 1.0),
        ("It is in the", "length", False, 2 / 3),
        ("<think>maybe in the pond, or", "length", True, 0.0),
        ("<think>not in the pond</think>\n\nNowhere.", "stop", True, 0.0),
        ("<think>hm</think>\n\nIn the pond.", "stop", True, 1.0),
    ],
)
def test_e1_only_the_answer_counts(thinker, text, finish_reason, thinking, recall):
    """E1: reasoning that was never closed is no answer: recall 0, and the row says it was cut."""
    ids = thinker.tokenizer.encode(text, add_special_tokens=False)
    if finish_reason == "stop":
        ids = [*ids, thinker.end_id]
    completion = Completion("x", tuple(ids), finish_reason)
    row = evaluate.row(thinker, thinking, make_trial(), "base", completion)
    assert row["recall"] == pytest.approx(recall, abs=1e-6)
    assert row["finish_reason"] == finish_reason
    assert row["ids"] == ids
    assert (row["id"], row["policy"]) == ("8-0-0", "base")


def rows_of(cells: dict[tuple[int, float], str]) -> list[dict]:
    """One row a letter: p(assed), f(ailed), c(ut and failed)."""
    return [
        {
            "length": length,
            "depth": depth,
            "recall": 0.75 if letter == "p" else 0.5,
            "finish_reason": "length" if letter == "c" else "stop",
        }
        for (length, depth), letters in cells.items()
        for letter in letters
    ]


def test_summary_counts_by_cell():
    found = evaluate.summarise(
        rows_of({(200, 0.0): "pc", (100, 50.0): "ppf", (100, 0.0): "f"}), pass_recall=0.5
    )
    assert (found["trials"], found["passed"], found["cut"]) == (6, 3, 1)
    assert found["accuracy"] == 0.5
    assert found["mean_recall"] == 0.625
    assert found["grid"] == {
        "lengths": [100, 200],
        "depths": [0.0, 50.0],
        "passed": [[0, 2], [1, 0]],
        "trials": [[1, 3], [2, 0]],
    }
    by_length = [(cell["length"], cell["passed"], cell["trials"]) for cell in found["by_length"]]
    assert by_length == [(100, 2, 4), (200, 1, 2)]
    by_depth = [(cell["depth"], cell["passed"], cell["trials"]) for cell in found["by_depth"]]
    assert by_depth == [(0.0, 1, 3), (50.0, 2, 3)]
    assert found["by_depth"][1]["accuracy"] == pytest.approx(2 / 3, abs=1e-6)
    json.dumps(found)


@pytest.mark.parametrize(("passed", "trials"), [(0, 7), (7, 7), (1, 7), (45, 90), (89, 90), (0, 1)])
def test_wilson_interval_is_where_the_score_test_is_at_its_limit(passed, trials):
    """Its ends are the shares p at which |passed/trials - p| is 1.96 standard errors of p."""
    low, high = evaluate.wilson(passed, trials)
    assert 0 <= low <= passed / trials <= high <= 1
    for end in {low, high} - {0.0, 1.0}:
        z = abs(passed / trials - end) / math.sqrt(end * (1 - end) / trials)
        assert z == pytest.approx(1.959964, rel=1e-6)
    assert (low == 0) == (passed == 0)
    assert (high == 1) == (passed == trials)


def test_mean_of_shares_is_over_trials_not_cells():
    """E4: a cell with fewer trials does not weigh more."""
    found = evaluate.summarise(rows_of({(1, 0.0): "p", (1, 1.0): "fff"}), pass_recall=0.5)
    assert found["accuracy"] == 0.25
    assert np.array(found["grid"]["trials"]).sum() == found["trials"] == 4
