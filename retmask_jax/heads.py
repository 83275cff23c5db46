"""Retrieval heads: how they score, which of them are selected, and the mask made of them.

A score file is the format published with RetMask: one JSON object that maps "layer-head" to the
scores of that head, one for each trial that counts, zeros included.
"""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from retmask_jax.errors import UserError
from retmask_jax.workdir import PathLike, Workdir, atomic_write, read_json

Head = tuple[int, int]  # (layer, head)

RULES = ("threshold", "top", "random", "nonretrieval", "list")


@dataclass(frozen=True)
class HeadMask:
    """A static choice of attention heads: `keep[layer][head]` is False where a head is masked."""

    keep: tuple[tuple[bool, ...], ...]

    @classmethod
    def from_heads(cls, n_layers: int, n_heads: int, heads: Collection[Head]) -> Self:
        """Masks `heads` of a model with n_layers × n_heads of them.

        Raises:
            UserError: a head that the model does not have.
        """
        for layer, head in heads:
            if not (0 <= layer < n_layers and 0 <= head < n_heads):
                raise UserError(
                    f"head {layer}-{head}: the model has layers 0-{n_layers - 1} "
                    f"and heads 0-{n_heads - 1}"
                )
        masked = set(heads)
        return cls(
            tuple(tuple((i, j) not in masked for j in range(n_heads)) for i in range(n_layers))
        )

    @property
    def array(self) -> np.ndarray:
        """The mask as bool[L, N]."""
        return np.array(self.keep, dtype=bool)

    @property
    def masked(self) -> list[Head]:
        """The masked heads in order of (layer, head)."""
        return [(i, j) for i, row in enumerate(self.keep) for j, kept in enumerate(row) if not kept]


def head_name(head: Head) -> str:
    """Returns "layer-head"."""
    return f"{head[0]}-{head[1]}"


def parse_head(name: str) -> Head:
    """Reads "layer-head".

    Raises:
        UserError: anything else.
    """
    layer, dash, head = str(name).partition("-")
    if not (dash and layer.isdecimal() and head.isdecimal()):
        raise UserError(f"{name!r} is no head: write layer-head, such as 18-6")
    return int(layer), int(head)


def hits(
    prompt_ids: np.ndarray, span: tuple[int, int], generated: np.ndarray, top: np.ndarray
) -> np.ndarray:
    """Finds the steps at which heads copy from the answer.

    Args:
        prompt_ids: i[T], the prompt.
        span: tokens (start, end) of the answer in it.
        generated: i[S], the token that each step generated.
        top: i[S, L, N], the key position that each head attended to most at that step.

    Returns:
        i64[E, 4]: (step, layer, head, key position) of each hit, in this order.
    """
    prompt_ids, generated = np.asarray(prompt_ids), np.asarray(generated)
    inside = (top >= span[0]) & (top < span[1])
    step, layer, head = np.nonzero(inside)
    position = top[step, layer, head]
    same = prompt_ids[position] == generated[step]
    return np.stack([step, layer, head, position], axis=-1)[same].astype(np.int64)


def score_heads(
    prompt_ids: np.ndarray,
    span: tuple[int, int],
    generated: np.ndarray,
    top: np.ndarray,
    *,
    repeats: bool = False,
) -> np.ndarray:
    """Retrieval score of every head in one trial: the share of the answer's tokens it copied.

    Args:
        prompt_ids, span, generated, top: as for `hits`.
        repeats: count every hit, so that a token copied twice counts twice and a score can exceed
            1. This is how the scores published with the paper were made.

    Returns:
        f64[L, N].
    """
    found = hits(prompt_ids, span, generated, top)
    if not repeats:
        found = np.unique(found[:, 1:], axis=0)
    layer, head = (found[:, 1], found[:, 2]) if repeats else (found[:, 0], found[:, 1])
    scores = np.zeros(top.shape[1:])
    np.add.at(scores, (layer, head), 1)
    return scores / (span[1] - span[0])


def read_scores(path: PathLike) -> np.ndarray:
    """Reads a score file.

    Returns:
        f64[T, L, N]: T trials that count, L layers, N heads a layer.

    Raises:
        UserError: no such file, a head missing, heads with different numbers of trials, no trial
            at all, or a score that is not a finite number.
    """
    table = read_json(path)
    if not isinstance(table, dict) or not table:
        raise UserError(f"{path}: want an object that maps layer-head to a list of scores")
    heads = {parse_head(name): scores for name, scores in table.items()}
    n_layers = 1 + max(layer for layer, _ in heads)
    n_heads = 1 + max(head for _, head in heads)
    for layer in range(n_layers):
        for head in range(n_heads):
            if not isinstance(heads.get((layer, head)), list):
                raise UserError(f"{path}: head {layer}-{head} has no list of scores")
    counts = {len(scores) for scores in heads.values()}
    if counts == {0}:
        raise UserError(f"{path}: no trial counts in this file (every list is empty)")
    if len(counts) > 1:
        raise UserError(f"{path}: heads have different numbers of trials, {sorted(counts)}")
    try:
        scores = np.array([heads[head] for head in sorted(heads)], dtype=np.float64)
    except (TypeError, ValueError):
        raise UserError(f"{path}: a score is not a number") from None
    if not np.isfinite(scores).all():
        layer, head = divmod(int(np.argwhere(~np.isfinite(scores))[0, 0]), n_heads)
        raise UserError(f"{path}: head {layer}-{head} has a score that is not finite")
    return scores.T.reshape(-1, n_layers, n_heads)


def write_scores(path: PathLike, scores: np.ndarray) -> None:
    """Writes f[T, L, N] as a score file, atomically, with the published 6 decimals."""
    _, n_layers, n_heads = scores.shape
    table = {
        f"{i}-{j}": [round(float(score), 6) for score in scores[:, i, j]]
        for i in range(n_layers)
        for j in range(n_heads)
    }
    with atomic_write(path) as file:
        json.dump(table, file)


def confidence(scores: np.ndarray, seed: int, draws: int = 1000) -> np.ndarray:
    """95% bootstrap interval of each head's mean score, trials drawn with replacement.

    Args:
        scores: f[T, L, N].
        seed: makes the interval reproducible.
        draws: number of bootstrap samples.

    Returns:
        f64[2, L, N]: the 2.5th and the 97.5th percentile of the resampled means.
    """
    n_trials = len(scores)
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(n_trials, np.full(n_trials, 1 / n_trials), size=draws) / n_trials
    means = np.tensordot(weights, scores, axes=1)
    return np.percentile(means, [2.5, 97.5], axis=0)


def ranked(means: np.ndarray) -> list[Head]:
    """All heads, best mean first; equal ones in order of (layer, head)."""
    order = np.argsort(-means, axis=None, kind="stable")
    return [divmod(int(index), means.shape[1]) for index in order]


def select(
    means: np.ndarray,
    *,
    rule: str,
    tau: float,
    k: int | None = None,
    heads: Sequence[Head] = (),
    seed: int = 0,
) -> list[Head]:
    """Selects the heads to mask.

    Args:
        means: f[L, N], mean score of each head.
        rule: "threshold": mean >= tau; "top": the k best; "random": any k; "nonretrieval": any k of
            those with mean < tau; "list": `heads`.
        tau: threshold of the mean score.
        k: number of heads; None means as many as reach tau.
        heads: the heads of rule "list".
        seed: of the random rules.

    Returns:
        Heads in order of (layer, head).

    Raises:
        UserError: nothing to select, k out of range, an unknown rule.
    """
    if rule == "list":
        if not heads:
            raise UserError("heads.rule is 'list' but heads.list is empty")
        return HeadMask.from_heads(*means.shape, heads).masked
    retrieval = [head for head in ranked(means) if means[head] >= tau]
    if rule == "threshold" or k is None:
        if not retrieval:
            raise UserError(_none_above(means, tau))
        k = len(retrieval)
    if rule == "threshold":
        return sorted(retrieval)
    if rule == "top":
        check_k(k, means.size)
        return sorted(ranked(means)[:k])
    if rule in ("random", "nonretrieval"):
        exclude = retrieval if rule == "nonretrieval" else ()
        return random_heads(*means.shape, k, seed, exclude)
    raise UserError(f"heads.rule is {rule!r}: want one of {', '.join(RULES)}")


def random_heads(
    n_layers: int, n_heads: int, k: int, seed: int, exclude: Collection[Head] = ()
) -> list[Head]:
    """Draws k different heads, none of `exclude`, each set equally likely.

    Raises:
        UserError: k <= 0 or more than there are.
    """
    pool = sorted({(i, j) for i in range(n_layers) for j in range(n_heads)} - set(exclude))
    check_k(k, len(pool))
    chosen = np.random.default_rng(seed).choice(len(pool), size=k, replace=False)
    return sorted(pool[index] for index in chosen)


def read_selection(workdir: Workdir) -> HeadMask:
    """Returns the mask of the heads that the detect stage selected.

    Raises:
        UserError: the stage has not ended yet.
    """
    path = workdir.detect / "heads.json"
    if not path.exists():
        raise UserError(f"{path} is missing: run the detect stage first")
    selection = read_json(path)
    heads = [parse_head(name) for name in selection["heads"]]
    return HeadMask.from_heads(selection["n_layers"], selection["n_heads"], heads)


def check_k(k: int, pool: int) -> None:
    """Refuses a number of heads to select that `pool` heads do not have.

    Raises:
        UserError: names both.
    """
    if not 0 < k <= pool:
        raise UserError(f"heads.k is {k}: want 1 to {pool}, the number of heads to choose from")


def _none_above(means: np.ndarray, tau: float) -> str:
    best = np.sort(means, axis=None)[::-1]
    hints = []
    for count in (1, 10, 30):
        if count <= len(best) and best[count - 1] > 0:
            lower = math.floor(best[count - 1] * 1e6) / 1e6
            hints.append(f"{lower:g} would give {(means >= lower).sum()}")
    if not hints:
        return f"no head reaches heads.tau = {tau:g}: every score is 0; try other or shorter trials"
    return (
        f"no head reaches heads.tau = {tau:g}: the largest mean score is {best[0]:.6g}; "
        f"as heads.tau, {', '.join(hints)}"
    )
