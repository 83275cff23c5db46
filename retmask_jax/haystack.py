"""Needles in a haystack: prose cut to a number of tokens, with an odd sentence at some depth."""

import importlib
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from etils import epath
from tokenizers import Tokenizer

from retmask_jax.errors import UserError
from retmask_jax.workdir import PathLike, read_jsonl

BUILT_IN_NEEDLES = Path(__file__).parent / "data" / "needles.jsonl"

# Where a sentence ends: its closing mark with any quotes or brackets after it, then either white
# space before something that is no small letter, or the end; CJK marks need no space.
_SENTENCE_END = re.compile(
    r"""[.!?…]["'”’»)\]]*(?=\s+[^\sa-zà-öø-ÿ]|\s*\Z)|[。！？]["'”’»」』）]*"""
)
_ABBREVIATION = re.compile(r"(?:\b(?:[A-Z]|Mr|Mrs|Ms|Dr|St|No|vs|cf|etc|e\.g|i\.e))\.\Z")


@dataclass(frozen=True)
class Needle:
    """A fact to hide, a question about it, and the part of it that answers the question."""

    needle: str
    question: str
    answer: str

    def find_answer(self) -> tuple[int, int] | None:
        """Returns the characters (start, end) of the answer in the needle.

        Case does not count and white space is as good as other white space, because needle files
        in use differ from their own answers in just that. None where it is not there.
        """
        words = r"\s+".join(re.escape(word) for word in self.answer.split())
        found = re.search(words, self.needle, re.IGNORECASE)
        return found.span() if found else None


def read_needles(path: PathLike = "") -> list[Needle]:
    """Reads a JSONL file of needles, or the built-in one where `path` is empty.

    A row has the strings "needle", "question" and "answer" ("real_needle" in published files).

    Raises:
        UserError: unreadable file, no row, or a row without one of these, or whose answer has no
            word in it that ROUGE counts (Latin letters or digits).
    """
    path = path or BUILT_IN_NEEDLES
    needles = []
    for number, row in enumerate(read_jsonl(path), 1):
        row = {"answer": row.get("real_needle"), **row}
        texts = []
        for field in ("needle", "question", "answer"):
            text = row[field] if isinstance(row.get(field), str) else ""
            if not text.strip():
                raise UserError(f'{path}, row {number}: needs text in "{field}"')
            texts.append(text.strip())
        if not re.search("[a-z0-9]", texts[-1].lower()):
            raise UserError(f"{path}, row {number}: the answer has no Latin letter or digit")
        needles.append(Needle(*texts))
    if not needles:
        raise UserError(f"{path}: no needles in this file")
    return needles


def read_haystack(path: PathLike = "") -> str:
    """Reads a folder of .txt files in sorted order, or the built-in text where `path` is empty.

    The built-in text is the prose of the language reference that comes with CPython (module
    `pydoc_data.topics`), so it differs a little from one version of Python to the next.

    Raises:
        UserError: no such folder, no .txt file in it, nothing but white space in them, a file that
            is not UTF-8.
    """
    if not path:
        return "\n\n".join(_python_prose())
    folder = epath.Path(path)
    if not folder.is_dir():
        raise UserError(f"haystack.path {path}: no such folder")
    files = sorted(file for file in folder.iterdir() if file.name.endswith(".txt"))
    if not files:
        raise UserError(f"haystack.path {path}: no .txt file in this folder")
    texts = []
    for file in files:
        try:
            text = file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: not UTF-8 (byte {error.start}); save it as UTF-8") from None
        texts.append(text.replace("\r\n", "\n").strip())
    text = "\n\n".join(filter(None, texts))
    if not text:
        raise UserError(f"haystack.path {path}: its .txt files are empty")
    return text


class Haystack:
    """A text that contexts of up to `tokens` tokens are cut from; repeated where it is shorter.

    Args:
        text: any prose.
        tokenizer: counts the tokens (no special ones are added).
        tokens: length of the longest context wanted.
    """

    def __init__(self, text: str, tokenizer: Tokenizer, tokens: int):
        size = 8 * tokens
        while True:
            copies = math.ceil(size / (len(text) + 2))
            self._text = "\n\n".join([text] * copies)[:size]
            offsets = tokenizer.encode(self._text, add_special_tokens=False).offsets
            if len(offsets) >= tokens:
                break
            size *= 2
        self._token_ends = np.array([0, *(end for _, end in offsets)])
        self._sentence_ends = np.array([0, *sentence_ends(self._text)])

    def context(self, tokens: int, depth: float, needle: str) -> tuple[str, int]:
        """Cuts the text to a number of tokens and puts the needle in.

        Args:
            tokens: length of the context without the needle.
            depth: percent of the context's tokens that come before the needle. 0 is the very start
                and 100 the very end; in between the needle goes to the nearest end of a sentence.
            needle: the sentence to hide.

        Returns:
            The context, and the index of the needle's first character in it.
        """
        cut = int(self._token_ends[tokens])
        if depth <= 0:
            at = 0
        elif depth >= 100:
            at = cut
        else:
            ends = self._sentence_ends[self._sentence_ends <= cut]
            target = self._token_ends[round(tokens * depth / 100)]
            at = int(ends[np.argmin(np.abs(ends - target))])
        before, after = self._text[:at], self._text[at:cut]
        if before and not before[-1].isspace():
            before += " "
        if after and not after[0].isspace():
            after = " " + after
        return before + needle + after, len(before)


def sentence_ends(text: str) -> list[int]:
    """Returns the index of the character after each sentence of `text`, in order."""
    return [
        found.end()
        for found in _SENTENCE_END.finditer(text)
        if not _ABBREVIATION.search(text, max(0, found.start() - 5), found.start() + 1)
    ]


def _python_prose() -> list[str]:
    """The paragraphs of running text in CPython's language reference, without its markup."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        raise UserError(
            "this Python lacks pydoc_data.topics, the built-in haystack; set haystack.path to a "
            "folder of .txt files"
        ) from None
    blocks = (block for _, text in sorted(topics.items()) for block in text.split("\n\n"))
    return list(dict.fromkeys(filter(None, map(_paragraph, blocks))))


def _paragraph(block: str) -> str:
    """Returns a block of reST as one line of plain prose; empty if it is anything else."""
    lines = block.strip("\n").split("\n")
    if len(lines) < 3 or any(not line or line[0] in " *+-=|~^.:[#" for line in lines):
        return ""
    if re.match(r"(New|Added|Changed|Deprecated) (in|since) version", lines[0]):
        return ""
    text = re.sub(r"(?<=\w-) (?=\w)", "", " ".join(lines))
    text = re.sub(r"\s*\[\d+\]", "", text)
    text = re.sub(r"(\*\*?)(?=\w)([^*\"]+)(?<=\w)\1", r"\2", text)
    text = re.sub(r"\s+", " ", text).strip()
    return text if re.search(r"[.!?][)\"]?\Z", text) else ""
