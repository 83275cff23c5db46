"""heads.py: score files, selection rules, masks. Fault table row: H1."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from retmask_jax import heads
from retmask_jax.errors import UserError
from retmask_jax.heads import HeadMask, score_heads
from retmask_jax.workdir import Workdir

MEANS = np.array([[0.4, 0.05, 0.4], [0.0, 0.2, 0.05]])

REFERENCE = (
    Path(os.environ.get("RETMASK_ORACLE", Path(__file__).parents[2] / "shared" / "oracle"))
    .resolve()
    .with_name("reference")
    / "head_score"
)
PUBLISHED = {
    "Llama-3.1-8B-Instruct.json": ((342, 32, 32), {0.1: 33, 0.05: 64}),
    "Qwen3-8B.json": ((600, 36, 32), {0.05: 98}),
    "Olmo-3-7B-Think.json": ((30, 32, 32), {0.05: 113}),
}


def brute_force(prompt, span, generated, top, repeats) -> np.ndarray:
    """The definition, word by word."""
    scores = np.zeros(top.shape[1:])
    for layer, head in np.ndindex(scores.shape):
        copied = [
            top[step, layer, head]
            for step in range(len(generated))
            if span[0] <= top[step, layer, head] < span[1]
            and prompt[top[step, layer, head]] == generated[step]
        ]
        scores[layer, head] = len(copied if repeats else set(copied)) / (span[1] - span[0])
    return scores


def test_score_of_a_small_example():
    prompt = [5, 6, 7, 8, 7, 9]
    generated = [6, 7, 7, 8, 9]
    top = np.array([1, 2, 2, 4, 7])[:, None, None]  # position 7 is a token generated earlier
    assert score_heads(prompt, (1, 5), generated, top) == 0.5
    assert score_heads(prompt, (1, 5), generated, top, repeats=True) == 0.75
    assert score_heads(prompt, (2, 5), generated, top) == pytest.approx(1 / 3)
    assert score_heads(prompt, (5, 6), generated, top) == 0


@pytest.mark.parametrize("repeats", [False, True])
def test_scores_follow_the_definition(repeats):
    rng = np.random.default_rng(0)
    for _ in range(20):
        prompt = rng.integers(0, 6, 30)
        generated = rng.integers(0, 6, 12)
        top = rng.integers(0, 42, (12, 3, 5))
        span = (8, 8 + int(rng.integers(1, 15)))
        np.testing.assert_allclose(
            score_heads(prompt, span, generated, top, repeats=repeats),
            brute_force(prompt, span, generated, top, repeats),
        )


def test_no_steps_give_scores_of_zero():
    top = np.zeros((0, 3, 5), np.int32)
    np.testing.assert_array_equal(score_heads([1, 2], (0, 1), [], top), np.zeros((3, 5)))


def write(path: Path, table: object) -> Path:
    path.write_text(json.dumps(table))
    return path


def test_score_file_in_the_published_format(tmp_path):
    table = {"0-0": [0, 0.117647], "0-1": [0.5, 1.0], "1-0": [0, 0], "1-1": [0.25, 0]}
    scores = heads.read_scores(write(tmp_path / "in.json", table))
    assert scores.shape == (2, 2, 2)
    np.testing.assert_allclose(scores.mean(0), [[0.0588235, 0.75], [0, 0.125]])
    heads.write_scores(tmp_path / "out.json", scores)
    assert json.loads((tmp_path / "out.json").read_text()) == table
    assert list(json.loads((tmp_path / "out.json").read_text())) == list(table)


if REFERENCE.is_dir():  # the files themselves are too large to ship

    @pytest.mark.parametrize("name", PUBLISHED)
    def test_published_score_files(name):
        shape, counts = PUBLISHED[name]
        scores = heads.read_scores(REFERENCE / name)
        assert scores.shape == shape
        for tau, count in counts.items():
            assert len(heads.select(scores.mean(0), rule="threshold", tau=tau)) == count


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "want an object"),
        ([1], "want an object"),
        ({"0-0": [], "0-1": []}, "no trial counts"),
        ({"0-0": [1.0], "0-1": [1.0, 0.5]}, r"different numbers of trials, \[1, 2\]"),
        ({"0-0": [1.0], "1-1": [1.0]}, "head 0-1 has no list"),
        ({"0-0": [1.0], "0-1": 3}, "head 0-1 has no list"),
        ({"0-0": ["a"]}, "not a number"),
        ({"0-0": [1.0], "0-1": [float("nan")]}, "head 0-1 has a score that is not finite"),
        ({"zero": [1.0]}, "'zero' is no head"),
    ],
)
def test_bad_score_files_are_refused(tmp_path, table, message):
    """H1: an empty or broken score file says so; it never becomes NaN means."""
    with pytest.raises(UserError, match=message):
        heads.read_scores(write(tmp_path / "scores.json", table))


def test_threshold_includes_tau_itself():
    assert heads.select(MEANS, rule="threshold", tau=0.2) == [(0, 0), (0, 2), (1, 1)]


def test_top_breaks_ties_by_layer_then_head():
    assert heads.select(MEANS, rule="top", tau=9, k=1) == [(0, 0)]
    assert heads.select(MEANS, rule="top", tau=9, k=4) == [(0, 0), (0, 1), (0, 2), (1, 1)]
    assert heads.ranked(MEANS) == [(0, 0), (0, 2), (1, 1), (0, 1), (1, 2), (1, 0)]


def test_top_takes_its_number_from_the_retrieval_set():
    assert heads.select(MEANS, rule="top", tau=0.2) == [(0, 0), (0, 2), (1, 1)]


@pytest.mark.parametrize("k", [0, -1, 7])
def test_impossible_numbers_of_heads_are_refused(k):
    with pytest.raises(UserError, match=rf"heads\.k is {k}: want 1 to 6"):
        heads.select(MEANS, rule="top", tau=0.2, k=k)
    with pytest.raises(UserError, match=rf"heads\.k is {k}: want 1 to 6"):
        heads.random_heads(2, 3, k, seed=0)


def test_random_heads_are_seeded_and_without_repeats():
    draws = [tuple(heads.random_heads(4, 8, 5, seed)) for seed in range(50)]
    assert draws == [tuple(heads.random_heads(4, 8, 5, seed)) for seed in range(50)]
    assert len(set(draws)) == 50
    assert all(len(set(draw)) == 5 and list(draw) == sorted(draw) for draw in draws)
    assert {head for draw in draws for head in draw} == {(i, j) for i in range(4) for j in range(8)}


def test_nonretrieval_heads_are_all_below_tau():
    drawn = {
        tuple(heads.select(MEANS, rule="nonretrieval", tau=0.2, k=2, seed=seed))
        for seed in range(40)
    }
    assert drawn == {((0, 1), (1, 0)), ((0, 1), (1, 2)), ((1, 0), (1, 2))}
    with pytest.raises(UserError, match="want 1 to 3"):
        heads.select(MEANS, rule="nonretrieval", tau=0.2, k=4)


def test_random_rule_masks_as_many_heads_as_reach_tau():
    assert len(heads.select(MEANS, rule="random", tau=0.2, seed=3)) == 3


def test_a_list_of_heads():
    assert heads.select(MEANS, rule="list", tau=9, heads=[(1, 2), (0, 1)]) == [(0, 1), (1, 2)]
    with pytest.raises(UserError, match="head 2-0: the model has layers 0-1 and heads 0-2"):
        heads.select(MEANS, rule="list", tau=9, heads=[(2, 0)])
    with pytest.raises(UserError, match=r"heads\.list is empty"):
        heads.select(MEANS, rule="list", tau=9)


@pytest.mark.parametrize("name", ["18", "a-b", "-1-2", "18-6-2", "18-", 3])
def test_names_of_heads(name):
    assert heads.parse_head("18-6") == (18, 6)
    assert heads.head_name((18, 6)) == "18-6"
    with pytest.raises(UserError, match="is no head"):
        heads.parse_head(name)


def test_no_head_above_tau_says_which_tau_would_do():
    means = np.linspace(0.31, 0.0, 32).reshape(4, 8)
    with pytest.raises(UserError) as error:
        heads.select(means, rule="threshold", tau=0.5)
    assert str(error.value) == (
        "no head reaches heads.tau = 0.5: the largest mean score is 0.31; "
        "as heads.tau, 0.31 would give 1, 0.22 would give 10, 0.02 would give 30"
    )
    for tau, count in ((0.31, 1), (0.22, 10), (0.02, 30)):
        assert len(heads.select(means, rule="threshold", tau=tau)) == count
    with pytest.raises(UserError, match="every score is 0"):
        heads.select(np.zeros((2, 2)), rule="threshold", tau=0.1)


def test_unknown_rule():
    with pytest.raises(UserError, match=r"heads\.rule is 'best': want one of threshold, top"):
        heads.select(MEANS, rule="best", tau=0.1, k=1)


def test_mask():
    mask = HeadMask.from_heads(2, 3, [(1, 2), (0, 1)])
    np.testing.assert_array_equal(mask.array, [[True, False, True], [True, True, False]])
    assert mask.array.dtype == bool
    assert mask.masked == [(0, 1), (1, 2)]
    assert hash(mask) == hash(HeadMask.from_heads(2, 3, [(0, 1), (1, 2)]))


def test_confidence_interval_holds_the_true_mean_about_19_times_in_20():
    rng = np.random.default_rng(1)
    scores = rng.random((80, 10, 40))
    low, high = heads.confidence(scores, seed=0)
    assert 0.90 < ((low <= 0.5) & (high >= 0.5)).mean() < 0.99
    assert (low < scores.mean(0)).all() and (scores.mean(0) < high).all()
    np.testing.assert_array_equal(heads.confidence(scores, seed=0), [low, high])


def test_selection_is_read_back(tmp_path):
    workdir = Workdir(tmp_path)
    with pytest.raises(UserError, match="run the detect stage first"):
        heads.read_selection(workdir)
    workdir.detect.mkdir(parents=True)
    write(tmp_path / "detect/heads.json", {"n_layers": 2, "n_heads": 3, "heads": ["0-1", "1-2"]})
    assert heads.read_selection(workdir) == HeadMask.from_heads(2, 3, [(0, 1), (1, 2)])
