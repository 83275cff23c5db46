"""Tokenizer and chat template: the only module that turns messages into token ids and back.

Control tokens are written by the template, never by what somebody typed. A message that contains
the text of an added token (`<|eot_id|>`, `</think>`) has it replaced by a placeholder before the
template is rendered; the rendered text is cut at the added tokens that are left, which are the
template's own; and what lies between is encoded, placeholders put back, by a copy of the tokenizer
that has no control tokens at all.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import jinja2
import tokenizers
from transformers import PreTrainedTokenizerFast

from retmask_jax import checkpoint_io
from retmask_jax.errors import UserError

Message = Mapping[str, str]
Offsets = tuple[tuple[int, int], ...]

# A reply's own reasoning. Its markers are the model's, not typed text; the end may be missing.
_REASONING = re.compile(r"(\s*<think>)(.*?)(</think>|\Z)", re.DOTALL)
# What plain text must survive on its way through template and tokenizer; see `Chat`.
_PROBE = (
    {"role": "user", "content": "Prüfe  2 + 2 = 4,\n\n\tçava?\n我们 👍🏽 e\u0301 '' don't"},
    {"role": "assistant", "content": "   Yes:\t４ \n\n• one\n"},
    {"role": "user", "content": "\n Why?  "},
)


class Chat:
    """A tokenizer with its chat template.

    Attributes:
        tokenizer: the transformers tokenizer.
        bos_id: the token that this tokenizer puts before a text, None if it puts none.
        end_id: the token that ends a reply at the end of a conversation.
        stop_ids: every token at which sampling ends, `end_id` among them, in increasing order.
        date: the date printed by a template that prints one; None if this one does not.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, *, date: str, eos_ids: Iterable[int] = ()
    ):
        """Prepares `tokenizer` for use.

        Args:
            tokenizer: a byte-level BPE tokenizer with a chat template.
            date: given to the template as today's date, e.g. "26 Jul 2024".
            eos_ids: further tokens that end a reply, e.g. those of `generation_config.json`.

        Raises:
            UserError: there is no chat template, or the tokenizer works in a way in which plain
                text cannot be told from control tokens.
        """
        self.tokenizer = tokenizer
        try:
            self._template = tokenizer.get_chat_template()
        except ValueError:
            raise UserError("the tokenizer has no chat template; use an instruct model") from None
        prints_date = re.search(r"\b(date_string|strftime_now)\b", self._template)
        self.date = date if prints_date else None
        self._template_args = {"date_string": date}
        if "strftime_now" in self._template:
            clock = "{% macro strftime_now(format) %}{{ pinned_date }}{% endmacro %}"
            self._template = clock + self._template
            self._template_args["pinned_date"] = date

        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        added = [token for token in backend["added_tokens"] if token["content"].strip()]
        self._ids = {token["content"].strip(): token["id"] for token in added}
        self._names = sorted((token["content"] for token in added), key=len, reverse=True)
        self._typed = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        written = sorted(added, key=lambda token: len(token["content"]), reverse=True)
        self._written = re.compile("|".join(map(_written_form, written)) or r"(?!)")
        self._plain = _without_control_tokens(backend, self._names)
        self._check_plain()

        first = tokenizer("a").input_ids[:1]
        self.bos_id = first[0] if first and first[0] == tokenizer.bos_token_id else None
        ends = self._turn_ends()
        if tokenizer.eos_token_id is not None:
            ends.append(tokenizer.eos_token_id)
        if not ends:
            raise UserError("neither chat template nor tokenizer has a token that ends a turn")
        self.end_id = ends[0]
        self.stop_ids = tuple(sorted({*ends, *eos_ids}))

        self._opened = {on: _opens_reasoning(self._render(_PROBE, on)) for on in (False, True)}
        expected = tuple(self._apply_template(_PROBE, True, tokenize=True, return_dict=False))
        if self.bos_id is not None and expected[:1] != (self.bos_id,):
            expected = (self.bos_id, *expected)
        if self.encode(_PROBE, thinking=True) != expected:
            raise UserError(
                "this tokenizer encodes a text otherwise than its parts between control tokens; "
                "such tokenizers are not supported"
            )

    @classmethod
    def load(cls, source: checkpoint_io.Source, *, date: str) -> Self:
        """Reads the tokenizer of `source`; see `Chat` for `date` and the errors raised."""
        eos_ids: list[int] = []
        for config in (source.generation_config, source.hf_config):
            found = config.get("eos_token_id")
            eos_ids += [] if found is None else [found] if isinstance(found, int) else found
        return cls(checkpoint_io.load_tokenizer(source), date=date, eos_ids=eos_ids)

    def encode(self, messages: Sequence[Message], *, thinking: bool) -> tuple[int, ...]:
        """Returns the prompt for the next reply: the conversation and the reply's header.

        Args:
            messages: rows of "role", "content" and, in old replies, "reasoning_content". A reply
                whose content opens with `<think>` counts as carrying its reasoning.
            thinking: whether the model shall reason first, where the template leaves a choice.

        Raises:
            UserError: the template refuses the conversation.
        """
        return self.encode_with_offsets(messages, thinking=thinking)[0]

    def encode_with_offsets(
        self, messages: Sequence[Message], *, thinking: bool
    ) -> tuple[tuple[int, ...], str, Offsets]:
        """Returns the ids of `encode`, the text of the prompt, and each id's place in the text.

        A place is (first character, one past the last); characters of several tokens belong to
        each of them. A first token that the template does not print has the place (0, 0).
        """
        mark = _unused_character(text or "" for row in messages for text in row.values())
        hidden = [self._hide_message(message, mark) for message in messages]
        ids, text, offsets = self._encode_rendered(self._render(hidden, thinking), mark)
        if self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids, offsets = [self.bos_id, *ids], [(0, 0), *offsets]
        return tuple(ids), text, tuple(offsets)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Encodes `text` as plain text, control tokens in it included, and adds nothing."""
        return tuple(self._plain.encode(text).ids)

    def encode_raw(self, text: str) -> tuple[int, ...]:
        """Encodes a prompt that uses no template: plain text after the tokenizer's first token."""
        return (() if self.bos_id is None else (self.bos_id,)) + self.encode_text(text)

    def encode_completion(
        self, messages: Sequence[Message], reply: str, *, thinking: bool = False
    ) -> tuple[int, ...]:
        """Returns `reply` as the model would have sampled it after `encode(messages)`.

        Reasoning at the start (`<think>…</think>`) keeps its markers, but for an opening that the
        prompt has printed already; a reply without reasoning then ends it at once. `end_id` comes
        once, at the end.
        """
        mark = _unused_character([reply])
        if _opens_reasoning(self._render(messages, thinking)):
            reply = re.sub(r"\A\s*<think>", "", reply)
            reasoning, end, answer = reply.partition("</think>")
            if not end:
                reasoning, end, answer = "\n", "</think>", f"\n\n{reply}"
            hidden = self._hide(reasoning, mark) + end + self._hide(answer, mark)
        else:
            hidden = self._hide_reply(reply, mark)
        return (*self._encode_rendered(hidden, mark)[0], self.end_id)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids` without special tokens. `<think>` and its end are kept."""
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def split_reasoning(self, text: str, *, thinking: bool = True) -> tuple[str | None, str]:
        """Splits a reply, once, into (reasoning, answer).

        The reasoning is None where there is none. A reply cut before `</think>` is all reasoning
        and has an empty answer.

        Args:
            text: a decoded reply.
            thinking: as given to `encode`: some templates open `<think>` in the prompt.
        """
        start = re.match(r"\s*<think>", text)
        if not start and not self._opened[thinking]:
            return None, text
        reasoning, _, answer = text[start.end() if start else 0 :].partition("</think>")
        return reasoning.strip(), answer.lstrip()

    def _apply_template(self, messages: Sequence[Message], thinking: bool, **options):
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._template,
                enable_thinking=thinking,
                **self._template_args,
                **{"add_generation_prompt": True, **options},
            )
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template refuses the conversation: {error}") from None

    def _render(self, messages: Sequence[Message], thinking: bool, **options) -> str:
        return self._apply_template(messages, thinking, tokenize=False, **options)

    def _hide(self, text: str, mark: str) -> str:
        """Replaces each added token that `text` spells by its number between two marks."""
        return self._typed.sub(lambda match: f"{mark}{self._names.index(match[0])}{mark}", text)

    def _show(self, text: str, mark: str) -> str:
        return re.sub(f"{mark}(\\d+){mark}", lambda match: self._names[int(match[1])], text)

    def _hide_reply(self, text: str, mark: str) -> str:
        reasoning = _REASONING.match(text)
        if not reasoning:
            return self._hide(text, mark)
        start, inner, end = reasoning.groups()
        return start + self._hide(inner, mark) + end + self._hide(text[reasoning.end() :], mark)

    def _hide_message(self, message: Message, mark: str) -> dict[str, str]:
        message = {key: value for key, value in message.items() if value is not None}
        hidden = {key: self._hide(value, mark) for key, value in message.items()}
        if message["role"] == "assistant" and "reasoning_content" not in message:
            hidden["content"] = self._hide_reply(message["content"], mark)
        return hidden

    def _encode_rendered(
        self, text: str, mark: str
    ) -> tuple[list[int], str, list[tuple[int, int]]]:
        """Encodes rendered text: its added tokens are real ones, what lies between is plain."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        shown = ""

        def add_plain(piece: str) -> None:
            nonlocal shown
            piece = self._show(piece, mark)
            encoding = self._plain.encode(piece)
            ids.extend(encoding.ids)
            offsets.extend((len(shown) + a, len(shown) + b) for a, b in encoding.offsets)
            shown += piece

        end = 0
        for match in self._written.finditer(text):
            add_plain(text[end : match.start()])
            ids.append(self._ids[match[0].strip()])
            offsets.append((len(shown), len(shown) + len(match[0])))
            shown += match[0]
            end = match.end()
        add_plain(text[end:])
        return ids, shown, offsets

    def _turn_ends(self) -> list[int]:
        """Finds the control tokens that end a reply: as the last turn, and before another turn."""
        reply = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "REPLY"}]
        ends = []
        for conversation in (reply, [*reply, {"role": "user", "content": "a"}]):
            text = self._render(conversation, False, add_generation_prompt=False)
            rest = text.rpartition("REPLY")[2].lstrip()
            if match := self._written.match(rest):
                ends.append(self._ids[match[0].strip()])
        return ends

    def _check_plain(self) -> None:
        control = set(self._ids.values())
        for name in self._names:
            if not control.isdisjoint(self._plain.encode(name).ids):
                raise UserError(f"the tokenizer encodes typed text as the control token {name}")


def _written_form(token: Mapping) -> str:
    """Returns the pattern of an added token where the tokenizer would find it."""
    name = re.escape(token["content"])
    if token["single_word"]:
        name = rf"(?<!\w){name}(?!\w)"
    return (r"\s*" if token["lstrip"] else "") + name + (r"\s*" if token["rstrip"] else "")


def _without_control_tokens(backend: Mapping, names: Iterable[str]) -> tokenizers.Tokenizer:
    """Returns the tokenizer that knows none of `names`, not even as a word of its vocabulary.

    The ids stay: such words are kept under a name that no text can spell in byte-level BPE.
    """
    model = backend["model"]
    if model["type"] != "BPE":
        raise UserError(f"the tokenizer is of type {model['type']}; only BPE is supported")
    names = set(names)
    vocab = {f"\0{word}" if word in names else word: i for word, i in model["vocab"].items()}
    merges = [pair for pair in model["merges"] if names.isdisjoint((*pair, "".join(pair)))]
    plain = {
        **backend,
        "model": {**model, "vocab": vocab, "merges": merges, "unk_token": None},
        "added_tokens": [t for t in backend["added_tokens"] if t["content"] not in names],
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    return tokenizers.Tokenizer.from_str(json.dumps(plain))


def _unused_character(texts: Iterable[str]) -> str:
    """Returns a private-use character that occurs in none of `texts`."""
    used = set().union(*texts)
    return next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used)


def _opens_reasoning(prompt: str) -> bool:
    return prompt.rstrip().endswith("<think>")
