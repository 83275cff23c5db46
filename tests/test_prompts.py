"""Prompt files as people have them: shapes of rows, damage, and errors that name the row."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from retmask_jax.errors import UserError
from retmask_jax.prompts import Prompt, read_prompts

HI = {"role": "user", "content": "hi"}
YES = {"role": "assistant", "content": "yes"}
WHY = {"role": "user", "content": "why?"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture
def write(tmp_path) -> Callable[..., Path]:
    def write(*rows: dict | str, prefix: bytes = b"") -> Path:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / "prompts.jsonl"
        path.write_bytes(prefix + "".join(line + "\n" for line in lines).encode())
        return path

    return write


def test_built_in_prompts():
    prompts, counts = read_prompts("")
    assert counts == {"rows": 96, "redacted": 0, "not_english": 0, "kept": 96}
    assert len({prompt.id for prompt in prompts}) == 96
    texts = [prompt.messages[0]["content"] for prompt in prompts]
    assert len(set(texts)) == 96
    assert all(
        len(prompt.messages) == 1 and len(text) < 400
        for prompt, text in zip(prompts, texts, strict=True)
    )
    assert sum("Passage:" in text for text in texts) >= 8


def test_shapes_of_rows(write):
    path = write(
        {"id": "a", "messages": [SYSTEM, HI, YES, WHY, YES]},
        {"conversation_id": "b", "conversation": [SYSTEM, HI, YES, WHY], "language": "English"},
        {"prompt": " text "},
        {"id": 7, "messages": [HI, {**YES, "reasoning_content": "hm", "extra": 1}, WHY]},
    )
    assert read_prompts(path)[0] == [
        Prompt("a", (SYSTEM, HI, YES, WHY)),
        Prompt("b", (SYSTEM, HI)),
        Prompt("3", ({"role": "user", "content": " text "},)),
        Prompt("7", (HI, {**YES, "reasoning_content": "hm"}, WHY)),
    ]


def test_lmsys_rows(write):
    path = write(
        {
            "conversation_id": "1",
            "conversation": [HI, YES],
            "language": "English",
            "redacted": False,
        },
        {
            "conversation_id": "2",
            "conversation": [HI, YES],
            "language": "German",
            "redacted": False,
        },
        {
            "conversation_id": "3",
            "conversation": [HI, YES],
            "language": "English",
            "redacted": True,
        },
        {
            "conversation_id": "4",
            "conversation": [WHY, YES],
            "language": "English",
            "redacted": False,
        },
    )
    prompts, counts = read_prompts(path)
    assert prompts == [Prompt("1", (HI,)), Prompt("4", (WHY,))]
    assert counts == {"rows": 4, "redacted": 1, "not_english": 1, "kept": 2}


def test_limit_counts_kept_prompts(write):
    german = {"prompt": "nein", "language": "German"}
    path = write(german, {"prompt": "a"}, german, {"prompt": "b"}, {"prompt": "c"})
    prompts, counts = read_prompts(path, 2)
    assert [prompt.id for prompt in prompts] == ["2", "4"]
    assert counts == {"rows": 4, "redacted": 0, "not_english": 2, "kept": 2}
    assert len(read_prompts(path, 100)[0]) == 3


def test_c9_byte_order_mark(write):
    """C9: a file that begins with EF BB BF has the same records as one without."""
    rows = [{"id": str(i), "prompt": f"text {i}"} for i in range(3)]
    plain = read_prompts(write(*rows))
    assert len(plain[0]) == 3
    assert read_prompts(write(*rows, prefix=b"\xef\xbb\xbf")) == plain


def test_c7_lone_surrogate(write):
    r"""C7: the JSON escape \ud83d alone becomes U+FFFD; a whole pair stays what it is."""
    path = write(r'{"prompt": "ok \ud83d end"}', r'{"prompt": "\ud83d\ude00"}')
    texts = [prompt.messages[0]["content"] for prompt in read_prompts(path)[0]]
    assert texts == ["ok \ufffd end", "😀"]


def test_c7_goes_through_the_tokenizer(write, smollm2_chat):
    """C7: the repaired row can be encoded and decoded."""
    prompt = read_prompts(write(r'{"prompt": "ok \ud83d end"}'))[0][0]
    ids = smollm2_chat.encode(prompt.messages, thinking=False)
    assert "ok \ufffd end" in smollm2_chat.decode(ids)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [SYSTEM]}, "row 2: has no user turn"),
        ({"messages": [SYSTEM, YES]}, "row 2: has no user turn"),
        ({"conversation": []}, "row 2: has no user turn"),
        ({"conversation": [YES]}, "row 2: has no user turn"),
        ({"messages": "hi"}, 'row 2: "messages" must be a list'),
        ({"messages": {"role": "user"}}, 'row 2: "messages" must be a list'),
        ({"conversation": ["hi"]}, 'row 2: "conversation" must be a list'),
        (
            {"messages": [HI, {"role": "bot", "content": "x"}]},
            "row 2, message 2: unknown role 'bot'",
        ),
        ({"messages": [{"content": "x"}]}, "row 2, message 1: unknown role None"),
        ({"messages": [{"role": "user", "content": " \n"}]}, 'row 2, message 1: "content" must be'),
        ({"messages": [HI, {"role": "assistant", "content": ""}, WHY]}, "row 2, message 2"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, 'row 2, message 1: "content" must be'),
        ({"messages": [{"role": "user"}]}, 'row 2, message 1: "content" must be'),
        ({"messages": [{**HI, "reasoning_content": 3}]}, '"reasoning_content" must be a text'),
        ({"prompt": ""}, 'row 2, message 1: "content" must be'),
        ({"prompt": 5}, 'row 2, message 1: "content" must be'),
        ({"text": "hi"}, "row 2: needs one of"),
        ({"id": "1", "prompt": "again"}, "row 2: the id '1' is that of row 1"),
        ({"id": None, "prompt": "x"}, "row 2: the id must be"),
        ({"id": "", "prompt": "x"}, "row 2: the id must be"),
    ],
)
def test_malformed_rows_are_named(write, row, message):
    path = write({"prompt": "fine"}, row)
    with pytest.raises(UserError) as error:
        read_prompts(path)
    assert f"{path}" in str(error.value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_files_without_a_prompt(write, tmp_path):
    with pytest.raises(UserError, match="no prompt in it"):
        read_prompts(write())
    with pytest.raises(UserError, match=r"no prompt in it \(2 rows, 1 redacted, 1 not English\)"):
        read_prompts(write({"prompt": "a", "redacted": True}, {"prompt": "b", "language": "Thai"}))
    with pytest.raises(UserError, match="no such file"):
        read_prompts(tmp_path / "absent.jsonl")
