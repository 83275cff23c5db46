"""The prompts that generate answers: read from JSON lines, checked row by row."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from retmask_jax.errors import UserError
from retmask_jax.workdir import PathLike, read_jsonl

ROLES = ("system", "user", "assistant")
FIELDS = ("role", "content", "reasoning_content")  # of a message


@dataclass(frozen=True)
class Prompt:
    """A conversation to be answered; its last message is the user's.

    Attributes:
        id: unique in its file.
        messages: rows of "role", "content" and perhaps, in old replies, "reasoning_content".
    """

    id: str
    messages: tuple[dict[str, str], ...]


def read_prompts(path: PathLike, limit: int | None = None) -> tuple[list[Prompt], dict[str, int]]:
    """Reads prompts in the order of their rows.

    A row is one of

    - `{"messages": [...]}`: answered after its last user turn; later messages are left out;
    - `{"conversation": [...]}`, as in LMSYS-Chat-1M: its first user turn is answered;
    - `{"prompt": "text"}`.

    The row's "id" or "conversation_id" names it, else its number. Rows with a "language" other
    than English and rows with "redacted": true are dropped.

    Args:
        path: a JSONL file, or "" for the prompts that come with the package.
        limit: largest number of prompts to return; rows after that are not looked at.

    Returns:
        The prompts, and counts of the rows looked at: "rows", "redacted", "not_english", "kept".

    Raises:
        UserError: no row is left, or a row (named by its number) is malformed or repeats an id.
    """
    label = path or "the built-in prompts"
    if not path:
        with resources.as_file(resources.files("retmask_jax") / "data" / "prompts.jsonl") as file:
            rows = read_jsonl(file)
    else:
        rows = read_jsonl(path)
    counts = Counter(rows=0, redacted=0, not_english=0, kept=0)
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, row in enumerate(rows, 1):
        if limit is not None and len(prompts) == limit:
            break
        counts["rows"] += 1
        if reason := _dropped(row):
            counts[reason] += 1
            continue
        where = f"{label}, row {number}"
        prompt = _prompt(row, number, where)
        if prompt.id in seen:
            raise UserError(f"{where}: the id {prompt.id!r} is that of row {seen[prompt.id]}")
        seen[prompt.id] = number
        prompts.append(prompt)
    counts["kept"] = len(prompts)
    if not prompts:
        dropped = f"{counts['redacted']} redacted, {counts['not_english']} not English"
        raise UserError(f"{label}: no prompt in it ({counts['rows']} rows, {dropped})")
    return prompts, dict(counts)


def _dropped(row: Mapping[str, Any]) -> str | None:
    """Names the reason for which `row` is left out, if there is one."""
    if row.get("redacted") is True:
        return "redacted"
    language = row.get("language")
    if isinstance(language, str) and language.lower() not in ("english", "en"):
        return "not_english"
    return None


def _prompt(row: Mapping[str, Any], number: int, where: str) -> Prompt:
    name = row.get("id", row.get("conversation_id", number))
    if not isinstance(name, str | int) or name == "":
        raise UserError(f"{where}: the id must be a text or a whole number, not {name!r}")
    if "messages" in row:
        turns = _turns(row["messages"], "messages", where)
        last = max((i for i, turn in enumerate(turns) if turn.get("role") == "user"), default=-1)
        turns = turns[: last + 1]
    elif "conversation" in row:
        turns = _turns(row["conversation"], "conversation", where)
        roles = [turn.get("role") for turn in turns]
        first = roles.index("user") if "user" in roles else -1
        turns = [turn for turn in turns[: first + 1] if turn.get("role") != "assistant"]
    elif "prompt" in row:
        turns = [{"role": "user", "content": row["prompt"]}]
    else:
        raise UserError(f'{where}: needs one of "messages", "conversation", "prompt"')
    if not turns:
        raise UserError(f"{where}: has no user turn")
    return Prompt(
        str(name), tuple(_message(turn, f"{where}, message {i}") for i, turn in enumerate(turns, 1))
    )


def _turns(value: Any, field: str, where: str) -> list[dict]:
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise UserError(f'{where}: "{field}" must be a list of {{"role", "content"}} objects')
    for i, turn in enumerate(value, 1):
        if turn.get("role") not in ROLES:
            raise UserError(
                f"{where}, message {i}: unknown role {turn.get('role')!r}; use {', '.join(ROLES)}"
            )
    return value


def _message(turn: Mapping[str, Any], where: str) -> dict[str, str]:
    content = turn.get("content")
    if not isinstance(content, str) or not content.strip():
        raise UserError(f'{where}: "content" must be a text that is not empty')
    message = {"role": turn["role"], "content": content}
    reasoning = turn.get("reasoning_content")
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise UserError(f'{where}: "reasoning_content" must be a text')
        message["reasoning_content"] = reasoning
    return message
