"""The detect stage: which attention heads copy the answer out of a long context.

Each trial hides a needle in a haystack, asks for it, and decodes greedily. A head scores at a step
when the key position it attends to most lies in the answer and holds the very token that the step
generates (arXiv 2601.11020; each position of the answer counts once, as in the paper's formula).
"""

import functools
import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from rouge_score.rouge_scorer import RougeScorer

from retmask_jax import checkpoint_io, distributed, heads, plots
from retmask_jax.chat import Chat
from retmask_jax.errors import UserError
from retmask_jax.haystack import Haystack, Needle, read_haystack, read_needles
from retmask_jax.mesh import sampling_mesh
from retmask_jax.parts import Job, complete, cut, hold, unfinished
from retmask_jax.sampler import Completion, Request, Sampler
from retmask_jax.workdir import (
    Workdir,
    atomic_write,
    dump_row,
    read_json,
    read_parts,
    write_json,
)

TRIALS_CHANGED = (
    "other trials or heads (the haystack, the needles, the tokenizer, the heads or the version of "
    "Python has changed since)"
)
PART_TRIALS = 16  # trials in one output file: what a kill can lose

_log = logging.getLogger("retmask.detect")


@dataclass(frozen=True)
class Trial:
    """One prompt with a needle in it.

    Attributes:
        id: "length-depth-needle", unique in a grid.
        prompt_ids: the whole prompt.
        span: tokens (start, end) of the prompt that hold the answer.
        answer: the answer, as text.
        length: tokens wanted, at most, of the whole prompt.
        depth: percent of the context before the needle.
        needle: index of the needle in its file.
    """

    id: str
    prompt_ids: tuple[int, ...]
    span: tuple[int, int]
    answer: str
    length: int
    depth: float
    needle: int


@dataclass(frozen=True)
class Plan:
    """The trials of a grid and what was left out of it.

    Attributes:
        trials: in order of length, depth, needle.
        duplicates: cells of the grid whose prompt another cell has already.
        rejected: number of cells by reason.
        haystack_sha256: fingerprint of the haystack's text.
    """

    trials: tuple[Trial, ...]
    duplicates: int
    rejected: dict[str, int]
    haystack_sha256: str

    def summary(self) -> dict[str, Any]:
        """The plan in short, with a fingerprint of every prompt and span."""
        prompts = json.dumps([asdict(trial) for trial in self.trials]).encode()
        return {
            "trials": len(self.trials),
            "duplicates": self.duplicates,
            "rejected": self.rejected,
            "haystack_sha256": self.haystack_sha256,
            "trials_sha256": hashlib.sha256(prompts).hexdigest(),
        }


def niah_prompt(context: str, question: str) -> str:
    """Returns the user's turn of a trial."""
    return (
        f"<book>{context}</book>\nBased on the content of the book, Question: {question}\nAnswer:"
    )


def niah_trials(
    config: ConfigDict, chat: Chat, stage: str = "detect", text: str | None = None
) -> Plan:
    """Makes the trials of a stage's grid of lengths × depths × needles.

    The haystack is cut so that the whole prompt has as many tokens as the length says, or a few
    less. A prompt that is equal to an earlier one is left out and counted.

    Args:
        config: whole configuration; section `stage` has the grid.
        chat: tokenizer and template.
        stage: "detect" or "evaluate".
        text: the haystack; None: the configured one.

    Raises:
        UserError: a length too short for the question alone, unreadable files, no trial left.
    """
    grid = config[stage]
    thinking = config.chat[f"thinking_{stage}"]
    needles = read_needles(config.haystack.needles)
    text = text or read_haystack(config.haystack.path)
    if grid.min_length > grid.max_length:
        raise UserError(f"{stage}.min_length {grid.min_length} is above {stage}.max_length")
    lengths = [round(x) for x in np.linspace(grid.min_length, grid.max_length, grid.lengths)]
    depths = [round(float(x), 2) for x in np.linspace(0, 100, grid.depths)]
    haystack = Haystack(text, chat.tokenizer.backend_tokenizer, max(lengths))
    trials: dict[tuple[int, ...], Trial] = {}
    duplicates, rejected = 0, Counter()
    for length in sorted(set(lengths)):
        for depth in depths:
            for index, needle in enumerate(needles):
                where = f"{stage}.min_length {length}"
                ids, span = _prompt(chat, haystack, needle, length, depth, thinking, where)
                if isinstance(span, str):
                    rejected[f"needle {index}: {span}"] += 1
                elif ids in trials:
                    duplicates += 1
                else:
                    name = f"{length}-{depth:g}-{index}"
                    trials[ids] = Trial(name, ids, span, needle.answer, length, depth, index)
    for reason, count in rejected.items():
        _log.warning("%s: rejected %d trials, %s", stage, count, reason)
    if not trials:
        raise UserError(f"{stage}: no trial is left; {next(iter(rejected))}")
    sha256 = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    return Plan(tuple(trials.values()), duplicates, dict(rejected), sha256)


def _prompt(
    chat: Chat,
    haystack: Haystack,
    needle: Needle,
    length: int,
    depth: float,
    thinking: bool,
    where: str,
) -> tuple[tuple[int, ...], tuple[int, int] | str]:
    """Returns prompt ids of at most `length` tokens, and the answer's span or why there is none."""
    answer = needle.find_answer()
    if answer is None:
        return (), "its answer is not in its text"
    budget = length
    while True:
        context, start = haystack.context(budget, depth, needle.needle)
        content = niah_prompt(context, needle.question)
        messages = [{"role": "user", "content": content}]
        ids, text, offsets = chat.encode_with_offsets(messages, thinking=thinking)
        if len(ids) <= length:
            break
        if budget == 0:
            raise UserError(f"{where} is too short: a prompt without any haystack has {len(ids)}")
        budget = max(0, budget - (len(ids) - length))
    base = text.find(content)
    if base < 0:
        return tuple(ids), "the chat template changes its text"
    start += base + content.index(context)
    return tuple(ids), _token_span(offsets, start + answer[0], start + answer[1])


def _token_span(offsets: Iterable[tuple[int, int]], start: int, end: int) -> tuple[int, int] | str:
    """Returns the tokens that hold characters [start, end), or why they cannot be told."""
    starts, ends = np.array(offsets, dtype=np.int64).T
    inside = np.flatnonzero((starts < end) & (ends > start) & (ends > starts))
    if not len(inside) or starts[inside[0]] > start or ends[inside[-1]] < end:
        return "the tokens of its answer cannot be told from their offsets"
    return int(inside[0]), int(inside[-1]) + 1


@functools.cache
def _rouge() -> RougeScorer:
    return RougeScorer(["rouge1"], use_stemmer=True)


def recall(answer: str, response: str) -> float:
    """ROUGE-1 recall of the answer's stemmed words in the response, 0 to 1."""
    return float(_rouge().score(answer, response)["rouge1"].recall)


def passed(row: dict[str, Any], pass_recall: float) -> bool:
    """Tells whether a trial's answer was found: its recall is above `pass_recall`."""
    return row["recall"] > pass_recall


def score(chat: Chat, trial: Trial, completion: Completion) -> dict[str, Any]:
    """Returns the row of a finished trial; "scores" has the heads that are not zero."""
    scores = heads.score_heads(trial.prompt_ids, trial.span, completion.tokens, completion.top)
    response = chat.decode(completion.tokens)
    return {
        "id": trial.id,
        "length": trial.length,
        "depth": trial.depth,
        "needle": trial.needle,
        "prompt_len": len(trial.prompt_ids),
        "span": trial.span,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "response": response,
        "recall": round(recall(trial.answer, response), 6),
        "scores": {
            heads.head_name((i, j)): round(float(scores[i, j]), 6)
            for i, j in np.argwhere(scores).tolist()
        },
    }


def run(config: ConfigDict, workdir: Workdir) -> None:
    """Detects the retrieval heads of the model and selects those to mask.

    Writes into `workdir.detect`: plan.json and parts/ (what resumes), then trials.jsonl,
    head_scores.json, heads.png, and heads.json last. Does nothing where heads.json is there and was
    selected as the config asks. Heads that are listed need no trials.

    Raises:
        UserError: no trial passed, no head reaches the threshold, a length that the model or the
            question does not fit, or the trials differ from those that the work directory was
            begun with.
    """
    folder, path = workdir.detect, workdir.detect / "heads.json"
    if path.exists() and read_json(path).get("asked") == asked(config):
        _log.info("detect: done already")
        return
    source = checkpoint_io.open_source(config.model.path)
    shape = (source.config.n_layers, source.config.n_heads)
    check_selection(config, shape)
    if config.heads.rule == "list":
        if jax.process_index() == 0:
            select(config, folder, np.zeros((0, *shape)), {"trials": 0, "passed": 0})
        return
    chat = Chat.load(source, date=config.chat.date)
    plan = niah_trials(config, chat)
    hold(folder / "plan.json", plan.summary(), TRIALS_CHANGED)
    longest = max(len(trial.prompt_ids) for trial in plan.trials) + config.detect.max_new_tokens
    if longest > source.config.max_position:
        raise UserError(
            f"detect.max_length and detect.max_new_tokens ask for {longest} tokens, "
            f"but the model has {source.config.max_position} positions"
        )
    slices = cut(plan.trials, PART_TRIALS)
    missing = unfinished(folder / "parts", len(slices))[::-1]  # the longest trials first
    if missing:
        mesh = sampling_mesh(config, source.config)
        model = checkpoint_io.load_model(source, dtype=config.model.dtype, mesh=mesh)
        sampler = Sampler(
            model,
            max_length=longest,
            stop_ids=chat.stop_ids,
            mesh=mesh,
            **sampler_settings(config.detect),
        )

        def jobs(i: int) -> list[Job]:
            return [
                Job(Request(trial.id, trial.prompt_ids), functools.partial(score, chat, trial))
                for trial in slices[i]
            ]

        complete(
            folder / "parts",
            len(slices),
            ((i, jobs(i)) for i in missing),
            sampler,
            n_rows=sum(len(slices[i]) for i in missing),
            label="detect",
            unit="trial",
        )
    distributed.wait("detect: all parts written")
    if jax.process_index() == 0:
        assemble(config, folder, plan, shape)


def sampler_settings(options: ConfigDict) -> dict[str, Any]:
    """What the section `detect` says of the sampler, as its arguments."""
    return {
        "slots": options.slots,
        "max_new_tokens": options.max_new_tokens,
        "prefill_chunk": options.prefill_chunk,
        "report_top": True,
    }


def assemble(config: ConfigDict, folder: Any, plan: Plan, shape: tuple[int, int]) -> None:
    """Turns the finished parts into trials.jsonl, head_scores.json, heads.png and heads.json.

    Raises:
        UserError: no trial passed, or no head to select.
    """
    rows = read_parts(folder / "parts")
    rows = [row | {"passed": passed(row, config.detect.pass_recall)} for row in rows]
    with atomic_write(folder / "trials.jsonl") as file:
        file.writelines(dump_row(row) + "\n" for row in rows)
    counted = [row for row in rows if row["passed"]]
    again = f"in another --workdir, with a copy of {folder} in it to keep the trials"
    if not counted:
        best = max(row["recall"] for row in rows)
        raise UserError(
            f"detect: 0 of {len(rows)} trials passed (largest recall {best:.2f}, "
            f"detect.pass_recall {config.detect.pass_recall:g}); try shorter contexts "
            "(detect.min_length, detect.max_length), more detect.max_new_tokens or other needles, "
            f"or a lower detect.pass_recall {again}"
        )
    scores = np.zeros((len(counted), *shape))
    for trial, row in enumerate(counted):
        for name, value in row["scores"].items():
            scores[trial][heads.parse_head(name)] = value
    heads.write_scores(folder / "head_scores.json", scores)
    try:
        select(config, folder, scores, {**plan.summary(), "passed": len(counted)})
    except UserError as error:
        raise UserError(f"detect: {error} ({again})") from None


def asked(config: ConfigDict) -> dict[str, Any]:
    """What heads.json depends on besides the scores."""
    rule = config.heads
    return {
        "rule": rule.rule,
        "tau": rule.tau,
        "k": rule.k,
        "list": list(rule.list),
        "seed": config.seed,
    }


def check_selection(config: ConfigDict, shape: tuple[int, int]) -> None:
    """Refuses heads that a model with `shape` [L, N] does not have, before any trial is run.

    Raises:
        UserError: names the head or the number.
    """
    heads.HeadMask.from_heads(*shape, [heads.parse_head(name) for name in config.heads.list])
    if config.heads.k is not None:
        heads.check_k(config.heads.k, math.prod(shape))


def select(config: ConfigDict, folder: Any, scores: np.ndarray, counts: dict[str, Any]) -> None:
    """Selects heads by their scores and writes heads.json, and where there are scores heads.png.

    Args:
        scores: f[T, L, N] of the trials that count; T may be 0 for heads that are listed.
        counts: of the trials, for heads.json.

    Raises:
        UserError: no head to select.
    """
    rule, shape = config.heads, scores.shape[1:]
    means = scores.mean(0) if len(scores) else np.zeros(shape)
    selected = heads.select(
        means,
        rule=rule.rule,
        tau=rule.tau,
        k=rule.k,
        heads=[heads.parse_head(name) for name in rule.list],
        seed=config.seed,
    )
    low = high = means
    if len(scores):
        with atomic_write(folder / "heads.png", "wb") as file:
            file.write(plots.head_heatmap(means, selected))
        low, high = heads.confidence(scores, config.seed)
    write_json(
        folder / "heads.json",
        {
            "asked": asked(config),
            "k": len(selected),
            "heads": [heads.head_name(head) for head in selected],
            "n_layers": shape[0],
            "n_heads": shape[1],
            **counts,
            "scores": {
                heads.head_name(head): {
                    "mean": round(float(means[head]), 6),
                    "low": round(float(low[head]), 6),
                    "high": round(float(high[head]), 6),
                }
                for head in heads.ranked(means)
                if means[head] > 0
            },
        },
    )
    _log.info(
        "detect: %d of %d trials passed; %d heads selected (%s)",
        counts["passed"], counts["trials"], len(selected), rule.rule,
    )  # fmt: skip
