"""Preference pairs: the base model's response is chosen, the ablated model's is rejected.

The token ids that were sampled are what is trained on; text is only compared. Pairs that came from
elsewhere (a JSONL of conversations) are tokenised here, prompt and reply apart.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from retmask_jax import distributed
from retmask_jax.chat import Chat
from retmask_jax.checkpoint_io import Source
from retmask_jax.errors import UserError
from retmask_jax.prompts import FIELDS, ROLES
from retmask_jax.workdir import (
    PathLike,
    Workdir,
    atomic_write,
    finished_parts,
    read_json,
    read_jsonl,
    read_part,
    write_json,
)

CHOSEN, REJECTED = 0, 1
POLICIES = ("base", "retrieval")  # of the chosen and of the rejected side

_log = logging.getLogger("retmask")


@dataclass(frozen=True)
class Pairs:
    """P preference pairs.

    Attributes:
        tokens: i32 [sum of lengths]: prompt, chosen and rejected reply of pair 0, then of pair 1, …
        lengths: i32 [P, 3]: tokens of the prompt, the chosen and the rejected reply.
        names: str [P]: "prompt id/sample".
    """

    tokens: np.ndarray
    lengths: np.ndarray
    names: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.lengths.reshape(-1), dtype=np.int64).reshape(-1, 3)

    @cached_property
    def row_lengths(self) -> np.ndarray:
        """i32 [P]: tokens of prompt and reply, of the longer side."""
        return self.lengths[:, 0] + self.lengths[:, 1:].max(axis=1)

    def row(self, pair: int, side: int) -> np.ndarray:
        """i32 [prompt + reply] of one side (CHOSEN or REJECTED) of a pair."""
        n_prompt = self.lengths[pair, 0]
        n_reply = self.lengths[pair, 1 + side]
        prompt_end, end = self._ends[pair, 0], self._ends[pair, 1 + side]
        return np.concatenate(
            [self.tokens[prompt_end - n_prompt : prompt_end], self.tokens[end - n_reply : end]]
        )


class PairCollector:
    """Takes pairs one by one, keeps those one can learn from and counts the others.

    Dropped: `identical` (same ids, or the same text but for spaces at its ends), `too_long` (never
    cut: a reply without its prompt, or without its end, is another reply), `empty` (a side without
    a token), `missing_side`, `different_prompt`. Replies that ended at the sampling limit are kept
    and counted in `cut`.
    """

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.counts = {
            "pairs": 0,
            "dropped": dict.fromkeys(
                ("identical", "too_long", "empty", "missing_side", "different_prompt"), 0
            ),
            "cut": {"chosen": 0, "rejected": 0},
            "tokens": {"prompt": 0, "chosen": 0, "rejected": 0},
        }
        self._names: list[str] = []
        self._tokens: list[np.ndarray] = []

    def drop(self, reason: str, count: int = 1) -> None:
        self.counts["dropped"][reason] += count

    def add(
        self,
        name: str,
        prompt: list[int],
        replies: tuple[list[int], list[int]],
        texts: tuple[str, str],
        cut: tuple[bool, bool] = (False, False),
    ) -> None:
        """Adds the pair `name`; `replies`, `texts` and `cut` are (chosen, rejected)."""
        if not prompt or not all(replies):
            return self.drop("empty")
        if replies[0] == replies[1] or texts[0].strip() == texts[1].strip():
            return self.drop("identical")
        if len(prompt) + max(map(len, replies)) > self.max_tokens:
            return self.drop("too_long")
        self.counts["pairs"] += 1
        for side, was_cut in zip(("chosen", "rejected"), cut, strict=True):
            self.counts["cut"][side] += was_cut
        for part, ids in zip(("prompt", "chosen", "rejected"), (prompt, *replies), strict=True):
            self.counts["tokens"][part] += len(ids)
            self._tokens.append(np.array(ids, dtype=np.int32))
        self._names.append(name)

    def pairs(self) -> Pairs:
        """Returns the pairs kept.

        Raises:
            UserError: there is none; says why each was dropped.
        """
        if not self._names:
            why = ", ".join(f"{n} {reason}" for reason, n in self.counts["dropped"].items() if n)
            raise UserError(f"no preference pair is left to train on ({why or 'there was none'})")
        return Pairs(
            tokens=np.concatenate(self._tokens),
            lengths=np.array([len(ids) for ids in self._tokens], np.int32).reshape(-1, 3),
            names=np.array(self._names),
        )


def from_responses(rows: Iterable[dict], max_tokens: int) -> PairCollector:
    """Pairs the two policies' responses to the same prompt and sample.

    Args:
        rows: what the generate stage wrote; only two responses of a pair are held at a time where
            they are near each other.
        max_tokens: longest prompt with reply.

    Raises:
        UserError: two responses of one policy to the same prompt and sample, or unlike prompts.
    """
    collector = PairCollector(max_tokens)
    waiting: dict[tuple[str, int], dict] = {}
    for row in rows:
        if row["policy"] not in POLICIES:
            continue
        key = row["id"], row["sample"]
        other = waiting.pop(key, None)
        if other is None:
            waiting[key] = row
            continue
        name = f"{row['id']}/{row['sample']}"
        if other["policy"] == row["policy"]:
            raise UserError(f"generate: two {row['policy']!r} responses to {name}")
        base, ablated = sorted((row, other), key=lambda side: POLICIES.index(side["policy"]))
        if base["prompt_ids"] != ablated["prompt_ids"]:
            raise UserError(f"generate: the two responses to {name} have different prompts")
        collector.add(
            name,
            base["prompt_ids"],
            (base["ids"], ablated["ids"]),
            (_full_text(base), _full_text(ablated)),
            (base["finish_reason"] == "length", ablated["finish_reason"] == "length"),
        )
    collector.drop("missing_side", len(waiting))
    return collector


def _full_text(row: dict) -> str:
    return f"{row.get('reasoning_content') or ''}\n{row['text']}"


def from_conversations(
    path: PathLike, chat: Chat, *, thinking: bool, max_tokens: int
) -> PairCollector:
    """Reads pairs that came from elsewhere.

    Args:
        path: JSONL of {"chosen": [messages], "rejected": [messages]}; both end in an assistant's
            message and are equal before it. A reply's reasoning is its "reasoning_content", or in
            its "content" between `<think>` and `</think>`.
        chat: tokenises them: the prompt as for sampling, the reply apart, with one terminator.
        thinking: as in Chat.encode.
        max_tokens: longest prompt with reply.

    Returns:
        The collector with the pairs.

    Raises:
        UserError: a row of another shape, named by its number.
    """
    collector = PairCollector(max_tokens)
    for number, row in enumerate(read_jsonl(path), 1):
        where = f"{path}, row {number}"
        chosen, rejected = (_conversation(row, side, where) for side in ("chosen", "rejected"))
        if chosen is None or rejected is None:
            collector.drop("missing_side")
            continue
        prompt = chosen[:-1]
        if prompt != rejected[:-1]:
            collector.drop("different_prompt")
            continue
        texts = _reply_text(chosen[-1]), _reply_text(rejected[-1])
        if not all(text.strip() for text in texts):
            collector.drop("empty")
            continue
        try:
            prompt_ids = list(chat.encode(prompt, thinking=thinking))
            replies = tuple(
                list(chat.encode_completion(prompt, text, thinking=thinking)) for text in texts
            )
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        collector.add(str(number), prompt_ids, replies, texts)
    return collector


def _reply_text(reply: dict) -> str:
    """A reply as the models that reason write it."""
    if "reasoning_content" not in reply:
        return reply["content"]
    reasoning, answer = reply["reasoning_content"].strip(), reply["content"].strip()
    return f"<think>\n{reasoning}\n</think>\n\n{answer}"


def _conversation(row: dict, side: str, where: str) -> list[dict] | None:
    messages = row.get(side)
    if not messages:
        return None
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise UserError(
            f"{where}: {side!r} must be a list of messages with role ({', '.join(ROLES)}) and "
            "content, a text"
        )
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise UserError(f"{where}: {side!r} must end in an assistant's message after a prompt")
    return [
        {field: message[field] for field in FIELDS if message.get(field) is not None}
        for message in messages
    ]


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in ROLES
        and isinstance(message.get("content"), str)
        and isinstance(message.get("reasoning_content", ""), str | None)
    )


def build(config: ConfigDict, workdir: Workdir, source: Source) -> tuple[Pairs, dict]:
    """Returns the run's pairs and what was counted, made from the responses at the first call.

    Of several processes the first one makes them.

    Raises:
        UserError: the generate stage has not ended, or no pair is left.
    """
    folder = workdir.preferences
    if jax.process_index() == 0 and not (folder / "summary.json").exists():
        collector = _collect(config, workdir, source)
        try:
            pairs = collector.pairs()
        except UserError as error:
            raise UserError(f"{config.preferences.path or workdir.generate}: {error}") from None
        with atomic_write(folder / "pairs.npz", "wb") as file:
            np.savez(file, tokens=pairs.tokens, lengths=pairs.lengths, names=pairs.names)
        write_json(folder / "summary.json", collector.counts)
        dropped = ", ".join(f"{n} {why}" for why, n in collector.counts["dropped"].items() if n)
        _log.info("preferences: %d pairs (dropped: %s)", len(pairs), dropped or "none")
    distributed.wait("pairs written")
    with (folder / "pairs.npz").open("rb") as file, np.load(file) as arrays:
        return Pairs(**arrays), read_json(folder / "summary.json")


def _collect(config: ConfigDict, workdir: Workdir, source: Source) -> PairCollector:
    limit = config.preferences.max_tokens
    if not config.preferences.path:
        parts = finished_parts(workdir.generate)
        return from_responses((row for part in parts for row in read_part(part)), limit)
    chat = Chat.load(source, date=config.chat.date)
    thinking = config.chat.thinking_generate
    return from_conversations(config.preferences.path, chat, thinking=thinking, max_tokens=limit)
