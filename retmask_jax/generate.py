"""The generate stage: answers of the model and of the model without its retrieval heads.

Both are rows of one decode batch over one set of weights. Prompts are cut into parts in file
order; a part is on disk whole or not at all, and parts that are there are not sampled again.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from retmask_jax import checkpoint_io, distributed, heads
from retmask_jax.chat import Chat
from retmask_jax.errors import UserError
from retmask_jax.mesh import sampling_mesh
from retmask_jax.parts import Job, absent, complete, cut, hold, unfinished
from retmask_jax.prompts import Prompt, read_prompts
from retmask_jax.sampler import Completion, Request, Sampler, request_seed
from retmask_jax.workdir import (
    PathLike,
    Workdir,
    part_path,
    read_part,
    write_json,
)

POLICIES = ("base", "retrieval")  # in the order of the sampler's bank of masks

_log = logging.getLogger("retmask")


def response(completion: Completion, chat: Chat, *, thinking: bool) -> dict[str, Any]:
    """Returns the fields of a row that come from sampling.

    "ids" are as sampled, with the stop token if there was one. "text" is the answer, without stop
    token and reasoning; the latter is "reasoning_content", None where there was none.
    """
    ids = [int(token) for token in completion.tokens]
    spoken = ids[:-1] if completion.finish_reason == "stop" else ids
    reasoning, answer = chat.split_reasoning(chat.decode(spoken), thinking=thinking)
    return {
        "ids": ids,
        "text": answer,
        "reasoning_content": reasoning,
        "finish_reason": completion.finish_reason,
    }


def run(config: ConfigDict, workdir: Workdir) -> None:
    """Samples what is missing in `workdir.generate` and writes its summary.

    The first process writes the summary when all parts are there.

    Raises:
        UserError: no head is selected yet, the prompts are unusable or not those of the parts on
            disk, all are too long, or the model is too short for the lengths asked for.
    """
    prompts, counts = read_prompts(config.prompts.path, config.prompts.limit)
    slices = cut(prompts, config.generate.prompts_per_part)
    folder = workdir.generate
    texts = json.dumps([(prompt.id, prompt.messages) for prompt in prompts]).encode()
    mask = heads.read_selection(workdir)
    begun = {
        "prompts": len(prompts),
        "prompts_sha256": hashlib.sha256(texts).hexdigest(),
        "heads": [heads.head_name(head) for head in mask.masked],
    }
    hold(folder / "plan.json", begun, "other prompts or heads")
    if (folder / "summary.json").exists() and not absent(folder, len(slices)):
        _log.info("generate: done already")
        return
    source = checkpoint_io.open_source(config.model.path)
    chat = Chat.load(source, date=config.chat.date)
    if todo := unfinished(folder, len(slices)):
        _sample(config, workdir, source, chat, mask.array, slices, todo)
    distributed.wait("generate: all parts written")
    if jax.process_index() == 0:
        write_json(folder / "summary.json", _summary(config, folder, chat, slices, counts))


def sampler_settings(options: ConfigDict) -> dict[str, Any]:
    """What the section `generate` says of the sampler, as its arguments."""
    return {
        "slots": options.slots,
        "max_length": options.max_prompt_tokens + options.max_new_tokens,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
    }


def _sample(
    config: ConfigDict,
    workdir: Workdir,
    source: checkpoint_io.Source,
    chat: Chat,
    keep: np.ndarray,
    slices: Sequence[Sequence[Prompt]],
    todo: Sequence[int],
) -> None:
    options = config.generate
    length = options.max_prompt_tokens + options.max_new_tokens
    if length > source.config.max_position:
        raise UserError(
            f"generate.max_prompt_tokens + generate.max_new_tokens is {length}, "
            f"but the model has {source.config.max_position} positions"
        )
    mesh = sampling_mesh(config, source.config)
    sampler = Sampler(
        checkpoint_io.load_model(source, dtype=config.model.dtype, mesh=mesh),
        bank=np.stack([np.ones_like(keep), keep]),
        stop_ids=chat.stop_ids,
        mesh=mesh,
        **sampler_settings(options),
    )
    complete(
        workdir.generate,
        len(slices),
        ((i, [job for prompt in slices[i] for job in _jobs(config, chat, prompt)]) for i in todo),
        sampler,
        n_rows=sum(len(slices[i]) for i in todo) * len(POLICIES) * options.samples,
        label="generate",
        unit="response",
    )


def _jobs(config: ConfigDict, chat: Chat, prompt: Prompt) -> Iterator[Job]:
    """The rows of a prompt: every policy and sample, or none if it is too long."""
    thinking = config.chat.thinking_generate
    try:
        ids = chat.encode(prompt.messages, thinking=thinking)
    except UserError as error:
        raise UserError(f"prompt {prompt.id!r}: {error}") from None
    if len(ids) > config.generate.max_prompt_tokens:
        return
    for policy, name in enumerate(POLICIES):
        for sample in range(config.generate.samples):
            row = {
                "id": prompt.id,
                "messages": list(prompt.messages),
                "policy": name,
                "sample": sample,
                "prompt_ids": list(ids),
            }
            seed = request_seed(config.seed, prompt.id, name, sample)
            request = Request(f"{prompt.id}/{name}/{sample}", ids, policy=policy, seed=seed)
            yield Job(request, partial(_row, row, chat, thinking))


def _row(row: dict, chat: Chat, thinking: bool, completion: Completion) -> dict:
    return row | response(completion, chat, thinking=thinking)


def _summary(
    config: ConfigDict,
    folder: PathLike,
    chat: Chat,
    slices: Sequence[Sequence[Prompt]],
    counts: Mapping[str, int],
) -> dict[str, Any]:
    """Counts what all parts hold; a prompt that has no response was too long."""
    too_long: list[str] = []
    finished = {name: Counter(stop=0, length=0) for name in POLICIES}
    tokens = Counter(dict.fromkeys(POLICIES, 0))
    for index, prompts in enumerate(slices):
        path = part_path(folder, index, len(slices))
        rows = read_part(path)
        found = {row["id"] for row in rows}
        too_long += [prompt.id for prompt in prompts if prompt.id not in found]
        for row in rows:
            finished[row["policy"]][row["finish_reason"]] += 1
            tokens[row["policy"]] += len(row["ids"])
    if len(too_long) == counts["kept"]:
        raise UserError(
            f"all {len(too_long)} prompts are longer than generate.max_prompt_tokens "
            f"({config.generate.max_prompt_tokens})"
        )
    return {
        "prompts": dict(counts),
        "sampled": counts["kept"] - len(too_long),
        "too_long": {
            "limit": config.generate.max_prompt_tokens,
            "count": len(too_long),
            "ids": too_long,
        },
        "finish_reasons": {name: dict(finished[name]) for name in POLICIES},
        "sampled_tokens": dict(tokens),
        "date": chat.date,
        "thinking": config.chat.thinking_generate,
        "stop_ids": list(chat.stop_ids),
    }
