"""The evaluate stage: needle accuracy of the base, masked, random-masked and trained model.

The masked models are rows of the base model's decode batch: one set of weights, a bank of masks.
Answers are greedy. The prompts are not those of detection even where the grids are equal: the
haystack is read from the sentence in its middle on, and what comes before that follows at its end.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from retmask_jax import checkpoint_io, detect, distributed, heads, plots, train
from retmask_jax.chat import Chat
from retmask_jax.detect import Trial
from retmask_jax.errors import UserError
from retmask_jax.generate import response
from retmask_jax.haystack import read_haystack, sentence_ends
from retmask_jax.heads import HeadMask
from retmask_jax.mesh import sampling_mesh
from retmask_jax.models.decoder import Decoder
from retmask_jax.parts import Job, complete, cut, hold, unfinished
from retmask_jax.sampler import Completion, Request, Sampler, request_seed
from retmask_jax.workdir import (
    PathLike,
    Workdir,
    atomic_write,
    read_json,
    read_parts,
    write_json,
)

PART_TRIALS = 8  # trials in one output file, each under every policy: what a kill can lose
Z95 = 1.959964  # two-sided 95% point of the normal distribution

_log = logging.getLogger("retmask.evaluate")


@dataclass(frozen=True)
class Group:
    """One set of weights, and the policies that are rows of its decode batch.

    Attributes:
        name: its folder's.
        masks: policy → the heads it keeps.
        load: reads the weights.
    """

    name: str
    masks: dict[str, HeadMask]
    load: Callable[[], Decoder]


def run(config: ConfigDict, workdir: Workdir) -> None:
    """Asks every trial of the grid under every policy, and sums up the answers.

    Writes into `workdir.evaluate`: plan.json; initial/ and trained/, the answers of the source's
    and of the trained weights in parts (what resumes); a heatmap POLICY.png each; summary.json
    last. Where the weights are not trained yet, it does the rest; a later start adds them.

    Raises:
        UserError: no head is selected yet, a length that the model or the question does not fit,
            or the trials differ from those that the work directory was begun with.
    """
    folder, path = workdir.evaluate, workdir.evaluate / "summary.json"
    is_trained = (workdir.train / "summary.json").exists()
    if path.exists() and ("trained" in read_json(path)["policies"] or not is_trained):
        _log.info("evaluate: done already")
        return
    selected = heads.read_selection(workdir)
    source = checkpoint_io.open_source(config.model.path)
    chat = Chat.load(source, date=config.chat.date)
    text = from_the_middle(read_haystack(config.haystack.path))
    plan = detect.niah_trials(config, chat, "evaluate", text)
    longest = max(len(trial.prompt_ids) for trial in plan.trials) + config.evaluate.max_new_tokens
    if longest > source.config.max_position:
        raise UserError(
            f"evaluate.max_length and evaluate.max_new_tokens ask for {longest} tokens, "
            f"but the model has {source.config.max_position} positions"
        )
    names = [heads.head_name(head) for head in selected.masked]
    hold(folder / "plan.json", {**plan.summary(), "heads": names}, detect.TRIALS_CHANGED)

    mesh, dtype = sampling_mesh(config, source.config), config.model.dtype
    masks = initial_masks(selected, config.evaluate.random_seeds, config.seed)
    load = partial(checkpoint_io.load_model, source, dtype=dtype, mesh=mesh)
    groups = [Group("initial", masks, load)]
    if is_trained:
        load = partial(train.load_trained, config, workdir, source, mesh, dtype)
        groups.append(Group("trained", {"trained": masks["base"]}, load))
    else:
        _log.warning("evaluate: no trained weights yet; run train, then evaluate again")
    for group in groups:
        _answer(config, group, plan.trials, chat, longest, mesh, folder / group.name)
    distributed.wait("evaluate: all parts written")
    if jax.process_index() == 0:
        assemble(config, folder, groups)


def _answer(
    config: ConfigDict,
    group: Group,
    trials: Sequence[Trial],
    chat: Chat,
    longest: int,
    mesh: Mesh,
    folder: epath.Path,
) -> None:
    """Asks the trials of the parts that are missing under every policy of a group."""
    slices = cut(trials, PART_TRIALS)
    missing = unfinished(folder, len(slices))[::-1]  # the longest trials first
    if not missing:
        return
    sampler = Sampler(
        group.load(),
        bank=np.stack([mask.array for mask in group.masks.values()]),
        slots=config.evaluate.slots,
        max_length=longest,
        max_new_tokens=config.evaluate.max_new_tokens,
        stop_ids=chat.stop_ids,
        prefill_chunk=config.detect.prefill_chunk,
        mesh=mesh,
    )
    thinking = config.chat.thinking_evaluate

    def jobs(i: int) -> list[Job]:
        return [
            Job(
                Request(f"{trial.id}/{policy}", trial.prompt_ids, policy=number),
                partial(row, chat, thinking, trial, policy),
            )
            for trial in slices[i]
            for number, policy in enumerate(group.masks)
        ]

    complete(
        folder,
        len(slices),
        ((i, jobs(i)) for i in missing),
        sampler,
        n_rows=sum(len(slices[i]) for i in missing) * len(group.masks),
        label=f"evaluate {group.name}",
        unit="answer",
    )


def from_the_middle(text: str) -> str:
    """Turns a text round so that it begins with the sentence in its middle."""
    ends = sentence_ends(text)
    start = ends[(len(ends) - 1) // 2] if ends else 0
    return f"{text[start:].strip()}\n\n{text[:start].strip()}".strip()


def initial_masks(selected: HeadMask, random_seeds: int, seed: int) -> dict[str, HeadMask]:
    """The policies of the untrained weights, by name.

    Returns:
        "base" (keeps all heads), "retrieval" (`selected`), and "random-1", "random-2", …: as many
        heads as are masked in `selected`, drawn from all, by a seed of their own.
    """
    shape = selected.array.shape
    masks = {"base": HeadMask.from_heads(*shape, ()), "retrieval": selected}
    for i in range(1, random_seeds + 1):
        own_seed = request_seed(seed, "random", i)
        drawn = heads.random_heads(*shape, len(selected.masked), own_seed)
        masks[f"random-{i}"] = HeadMask.from_heads(*shape, drawn)
    return masks


def row(
    chat: Chat, thinking: bool, trial: Trial, policy: str, completion: Completion
) -> dict[str, Any]:
    """Returns the row of a finished trial.

    What counts is the answer, as far as it got: of an answer cut at the limit what is there, of
    one cut while still reasoning nothing.
    """
    answer = response(completion, chat, thinking=thinking)
    return {
        "id": trial.id,
        "policy": policy,
        "length": trial.length,
        "depth": trial.depth,
        "needle": trial.needle,
        **answer,
        "recall": round(detect.recall(trial.answer, answer["text"]), 6),
    }


def assemble(config: ConfigDict, folder: PathLike, groups: Sequence[Group]) -> None:
    """Turns the finished parts into the heatmaps and summary.json."""
    summary: dict[str, Any] = {"pass_recall": config.detect.pass_recall, "policies": {}}
    for group in groups:
        rows = read_parts(folder / group.name)
        for policy, mask in group.masks.items():
            mine = [row for row in rows if row["policy"] == policy]
            found = summarise(mine, config.detect.pass_recall)
            summary["policies"][policy] = {
                "masked": [heads.head_name(head) for head in mask.masked],
                **found,
            }
            title = f"{plots.label(policy)}: {found['passed']} of {found['trials']} trials passed"
            with atomic_write(folder / f"{policy}.png", "wb") as file:
                file.write(plots.niah_heatmap(**found["grid"], title=title))
            _log.info("evaluate: %s", title)
    write_json(folder / "summary.json", summary)


def summarise(rows: Sequence[dict], pass_recall: float) -> dict[str, Any]:
    """Sums up the rows of one policy.

    Returns:
        trials, passed, accuracy with its 95% interval, mean_recall, cut (answers that ended at the
        limit); the first four again by_length and by_depth; grid, the counts indexed
        [length][depth].
    """
    lengths = sorted({row["length"] for row in rows})
    depths = sorted({row["depth"] for row in rows})
    counts = np.zeros((2, len(lengths), len(depths)), int)
    for row in rows:
        cell = lengths.index(row["length"]), depths.index(row["depth"])
        counts[:, *cell] += 1, detect.passed(row, pass_recall)
    trials, passed = counts

    def share(n_passed: int, n_trials: int) -> dict[str, Any]:
        return {
            "trials": int(n_trials),
            "passed": int(n_passed),
            "accuracy": round(float(n_passed / n_trials), 6),
            "interval": [round(bound, 6) for bound in wilson(int(n_passed), int(n_trials))],
        }

    return {
        **share(passed.sum(), trials.sum()),
        "mean_recall": round(math.fsum(row["recall"] for row in rows) / len(rows), 6),
        "cut": sum(row["finish_reason"] == "length" for row in rows),
        "by_length": [
            {"length": length, **share(*both)}
            for length, *both in zip(lengths, passed.sum(1), trials.sum(1), strict=True)
        ],
        "by_depth": [
            {"depth": depth, **share(*both)}
            for depth, *both in zip(depths, passed.sum(0), trials.sum(0), strict=True)
        ],
        "grid": {
            "lengths": lengths,
            "depths": depths,
            "passed": passed.tolist(),
            "trials": trials.tolist(),
        },
    }


def wilson(passed: int, trials: int) -> tuple[float, float]:
    """95% score interval of a share (Wilson 1927), 0 to 1; it also holds at 0 and at all passed."""
    share, z2 = passed / trials, Z95**2
    centre = share + z2 / (2 * trials)
    margin = Z95 * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    scale = 1 + z2 / trials
    return max(0.0, (centre - margin) / scale), min(1.0, (centre + margin) / scale)
