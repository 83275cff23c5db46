"""haystack.py: texts, needles and where they go. Fault table rows: C7, C9, H2."""

import json
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from retmask_jax.errors import UserError
from retmask_jax.haystack import Haystack, Needle, read_haystack, read_needles, sentence_ends

NEEDLE = "The kettle sings at noon."


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """A tokenizer for which every word and every mark of punctuation is a token."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text).ids)


def test_built_in_haystack_is_prose():
    text = read_haystack()
    paragraphs = text.split("\n\n")
    assert len(text) > 80_000
    assert len(set(paragraphs)) == len(paragraphs)
    assert all(len(paragraph) > 60 and paragraph[-1] in '.!?)"' for paragraph in paragraphs)
    assert "::=" not in text and "\n " not in text and "  " not in text and "**Changed" not in text
    letters = sum(character.isalpha() or character.isspace() for character in text)
    assert letters > 0.93 * len(text)
    assert len(sentence_ends(text)) > 700


def test_built_in_haystack_does_not_depend_on_the_hash_seed():
    code = "from retmask_jax.haystack import read_haystack as r; print(hash(r()) * 0 + len(r()), "
    code += "__import__('hashlib').sha256(r().encode()).hexdigest())"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(runs) == 1


def test_folder_is_read_in_sorted_order(tmp_path):
    """C9: a byte-order mark is no text."""
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfSecond.\r\nStill second.\n")
    (tmp_path / "a.txt").write_text("First.\n")
    (tmp_path / "a10.txt").write_text("Between.")
    (tmp_path / "notes.md").write_text("Not this.")
    (tmp_path / "c.txt").write_text("  \n")
    assert read_haystack(tmp_path) == "First.\n\nBetween.\n\nSecond.\nStill second."


def test_bad_folders_are_refused(tmp_path):
    with pytest.raises(UserError, match="nowhere: no such folder"):
        read_haystack(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no \.txt file in this folder"):
        read_haystack(tmp_path)
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(UserError, match=r"its \.txt files are empty"):
        read_haystack(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"latin\.txt: not UTF-8 \(byte 3\)"):
        read_haystack(tmp_path)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three?", ["One.", " Two!", " Three?"]),
        ('He said "go." Then left.', ['He said "go."', " Then left."]),
        ("Mr. Green met Dr. A. Blue, e.g. Ann. Yes.", 2),
        ("It costs 3.14 pounds... and more. Done.", 2),
        ("A list.\n\nAnother.", 2),
        ("今日は。明日も！", ["今日は。", "明日も！"]),
        ("no end here", []),
    ],
)
def test_sentence_ends(text, sentences):
    ends = sentence_ends(text)
    if isinstance(sentences, int):
        assert len(ends) == sentences
    else:
        assert [text[a:b] for a, b in zip([0, *ends], ends, strict=False)] == sentences


@pytest.mark.parametrize("depth", range(101))
def test_needle_goes_to_the_sentence_end_nearest_to_its_depth(words, depth):
    """At every depth, not only at 100 (token ids of full stops differ between tokenizers)."""
    text = read_haystack()
    tokens = 700
    context, start = Haystack(text, words, 2000).context(tokens, depth, NEEDLE)
    assert context[start : start + len(NEEDLE)] == NEEDLE
    assert abs(count(words, context) - count(words, NEEDLE) - tokens) <= 1
    before, after = context[:start].strip(), context[start + len(NEEDLE) :].strip()
    assert count(words, before + " " + after) == tokens
    if depth == 0:
        assert before == ""
    elif depth == 100:
        assert after == ""
    else:
        assert before == "" or before[-1] in '.!?)"”'
        whole = text[: len(before) + len(after) + 2]
        target = tokens * depth / 100
        distances = [
            abs(count(words, whole[:end]) - target)
            for end in [0, *sentence_ends(whole)]
            if end <= len(before) + len(after) + 1
        ]
        # Nearest in characters: a neighbour may be nearer in tokens, but not by much.
        assert abs(count(words, before) - target) <= min(distances) + 6


def test_short_haystack_is_repeated(words):
    haystack = Haystack("One two three. Four five six.", words, 100)
    context, start = haystack.context(100, 50, NEEDLE)
    assert count(words, context) == 100 + count(words, NEEDLE)
    assert context[:start].count("One two three.") >= 6
    assert "six.\n\nOne" in context


def test_text_without_sentences_takes_the_needle_at_its_start(words):
    context, start = Haystack("all one line " * 50, words, 100).context(100, 60, NEEDLE)
    assert start == 0 and context.startswith(NEEDLE + " all one line")


def test_no_haystack_at_all(words):
    assert Haystack("Some text.", words, 10).context(0, 50, NEEDLE) == (NEEDLE, 0)


def test_longer_haystack_is_only_tokenised_as_far_as_needed(words):
    haystack = Haystack("A short sentence. " * 200_000, words, 50)
    assert len(haystack._text) <= 1000


def test_built_in_needles():
    needles = read_needles()
    assert len(needles) >= 6 and len(set(needles)) == len(needles)
    haystack = read_haystack()
    for needle in needles:
        assert needle.answer in needle.needle and needle.question.endswith("?")
        assert needle.answer not in needle.question and needle.answer not in haystack
        assert sentence_ends(needle.needle) == [len(needle.needle)]


@pytest.mark.parametrize(
    ("needle", "answer", "found"),
    [
        ("Ms Blue is late because her tyre is flat.", "Because her tyre is flat.", (16, 41)),
        ("Ms Blue is late because\n her  tyre is flat.", "Because her tyre is flat.", (16, 43)),
        ("It costs $4 (four).", "$4 (four)", (9, 18)),
        ("Ms Blue is late.", "Because her tyre is flat.", None),
    ],
)
def test_answers_are_found_ignoring_case_and_kind_of_space(needle, answer, found):
    """H2: answer keys that differ from the needle's text in case or white space."""
    assert Needle(needle, "Why?", answer).find_answer() == found


def test_needle_files(tmp_path):
    """C9, C7: byte-order mark, lone surrogates; the published name of the answer's field."""
    path = tmp_path / "needles.jsonl"
    rows = [
        {"needle": "A is B.", "question": "What is A?", "answer": "B"},
        {"needle": "C is D.", "question": "What is C?", "real_needle": "D"},
    ]
    lines = [json.dumps(row) for row in rows]
    lines.append('{"needle": "E is \\ud83d F.", "question": "What is E?", "answer": "F"}')
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode() + b"\n")
    assert read_needles(path) == [
        Needle("A is B.", "What is A?", "B"),
        Needle("C is D.", "What is C?", "D"),
        Needle("E is \ufffd F.", "What is E?", "F"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no needles in this file"),
        ('{"needle": "A.", "question": "B?"}\n', 'row 1: needs text in "answer"'),
        ('{"needle": "A.", "question": " ", "answer": "A"}\n', 'row 1: needs text in "question"'),
        ('{"needle": 3, "question": "B?", "answer": "A"}\n', 'row 1: needs text in "needle"'),
        ('{"needle": "日。", "question": "B?", "answer": "日"}\n', "no Latin letter or digit"),
    ],
)
def test_bad_needle_files_are_refused(tmp_path, text, message):
    path = tmp_path / "needles.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_needles(path)


def test_context_offsets_are_right_for_any_text(words):
    rng = np.random.default_rng(0)
    alphabet = list("aZé. !?\n“”。")
    for _ in range(200):
        text = "".join(rng.choice(alphabet, size=rng.integers(5, 200))).strip() + " word"
        haystack = Haystack(text, words, 40)
        context, start = haystack.context(int(rng.integers(0, 41)), rng.random() * 100, NEEDLE)
        assert context[start:].startswith(NEEDLE)
