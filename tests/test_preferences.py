"""Which responses become pairs, and that their ids are the sampled ones."""

import json

import chat_families
import numpy as np
import pytest
from training import options

from retmask_jax import preferences
from retmask_jax.chat import Chat
from retmask_jax.errors import UserError
from retmask_jax.preferences import CHOSEN, REJECTED
from retmask_jax.workdir import Workdir, write_part

PROMPT = [1, 11, 12]


def response(policy, ids, text, id="a", sample=0, finish="stop", **changes):
    return {
        "id": id,
        "messages": [{"role": "user", "content": "?"}],
        "policy": policy,
        "sample": sample,
        "prompt_ids": PROMPT,
        "ids": ids,
        "text": text,
        "reasoning_content": None,
        "finish_reason": finish,
        **changes,
    }


def two(id, base, ablated, **changes):
    return [
        response("base", *base, id=id, **changes),
        response("retrieval", *ablated, id=id, **changes),
    ]


def collect(rows, max_tokens=100):
    return preferences.from_responses(rows, max_tokens)


def test_base_is_chosen_and_retrieval_masked_is_rejected():
    rows = [
        *two("a", ([4, 2], "four"), ([5, 6, 2], "five")),
        *two("b", ([7, 2], "b0"), ([8, 2], "b1"))[::-1],
        *two("b", ([9, 2], "b2"), ([3, 2], "b3"), sample=1),
        response("random", [3], "not used"),
    ]
    pairs = collect(rows).pairs()
    assert pairs.names.tolist() == ["a/0", "b/0", "b/1"]
    assert pairs.row(0, CHOSEN).tolist() == [*PROMPT, 4, 2]
    assert pairs.row(0, REJECTED).tolist() == [*PROMPT, 5, 6, 2]
    assert pairs.row(1, CHOSEN).tolist() == [*PROMPT, 7, 2]
    assert pairs.row(2, REJECTED).tolist() == [*PROMPT, 3, 2]
    assert pairs.row_lengths.tolist() == [6, 5, 5]


def test_c12_identical_pairs_are_dropped_and_counted():
    """C12: 5 pairs, one identical, one that differs only by spaces at the end."""
    rows = [
        *two("0", ([4, 2], "yes"), ([5, 2], "no")),
        *two("1", ([4, 2], "yes"), ([4, 2], "yes")),
        *two("2", ([4, 2], "yes"), ([4, 9, 2], "yes  \n")),
        *two("3", ([4, 2], "yes"), ([6, 2], "nay")),
        *two("4", ([6, 2], "nay"), ([4, 2], "yes")),
    ]
    collector = collect(rows)
    assert collector.counts["pairs"] == 3
    assert collector.counts["dropped"]["identical"] == 2
    assert collector.pairs().names.tolist() == ["0/0", "3/0", "4/0"]


def test_replies_that_differ_in_their_reasoning_are_a_pair():
    rows = two("a", ([4, 2], "yes"), ([5, 2], "yes"))
    rows[1]["reasoning_content"] = "hm"
    assert collect(rows).counts["pairs"] == 1


def test_d2_too_long_is_dropped_not_cut():
    """D2: prompt of 100, completion of 5, at most 64: no row loses a token."""
    rows = [
        *two("long", ([4] * 5, "x"), ([5] * 5, "y"), prompt_ids=[1] * 100),
        *two("fits", ([4] * 61, "x"), ([5, 2], "y")),
        *two("side", ([4, 2], "x"), ([5] * 62, "y")),
    ]
    collector = collect(rows, max_tokens=64)
    assert collector.counts["dropped"]["too_long"] == 2
    pairs = collector.pairs()
    assert pairs.names.tolist() == ["fits/0"]
    assert len(pairs.row(0, CHOSEN)) == 64


def test_cut_replies_are_kept_and_counted():
    rows = two("a", ([4, 5], "x"), ([6, 7], "y"))
    rows[1]["finish_reason"] = "length"
    counts = collect(rows).counts
    assert counts["pairs"] == 1
    assert counts["cut"] == {"chosen": 0, "rejected": 1}
    assert counts["tokens"] == {"prompt": 3, "chosen": 2, "rejected": 2}


def test_missing_and_empty_sides_are_counted():
    rows = [
        response("base", [4], "x", id="alone"),
        *two("none", ([], ""), ([4], "x")),
        *two("good", ([4], "x"), ([5], "y")),
    ]
    dropped = collect(rows).counts["dropped"]
    assert (dropped["missing_side"], dropped["empty"]) == (1, 1)


def test_nothing_left_is_one_clear_line():
    collector = collect(two("1", ([4, 2], "yes"), ([4, 2], "yes")))
    with pytest.raises(UserError, match=r"no preference pair is left .*1 identical"):
        collector.pairs()


def test_unlike_prompts_and_doubles_are_refused():
    rows = two("a", ([4], "x"), ([5], "y"))
    rows[1]["prompt_ids"] = [1]
    with pytest.raises(UserError, match="a/0"):
        collect(rows)
    with pytest.raises(UserError, match="two 'base' responses to a/0"):
        collect([response("base", [4], "x"), response("base", [5], "y")])


def test_build_writes_once_and_reads_back(tmp_path):
    workdir = Workdir(tmp_path)
    rows = [
        *two("a", ([4, 2], "four"), ([5, 6, 2], "five")),
        *two("ü", ([7, 2], "b0"), ([8, 2], "b1")),
    ]
    write_part(workdir.generate, 0, 2, rows[:1])
    with pytest.raises(UserError, match="part-00001-of-00002"):
        preferences.build(options(), workdir, None)
    write_part(workdir.generate, 1, 2, rows[1:])
    first, counts = preferences.build(options(), workdir, None)
    files = {path: path.read_bytes() for path in workdir.preferences.iterdir()}
    (workdir.preferences / "summary.json").unlink()
    again, _ = preferences.build(options(), workdir, None)
    assert counts["pairs"] == 2
    assert {path: path.read_bytes() for path in workdir.preferences.iterdir()} == files
    for name in ("tokens", "lengths", "names"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    assert first.names.tolist() == ["a/0", "ü/0"]


# --------------------------------------------------------------------------- pairs from elsewhere


def conversations(tmp_path, *rows):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ask(question, reply):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]


def test_d4_prompt_and_reply_are_tokenised_apart(tmp_path, smollm2_chat):
    """D4: same prompt ids in both, the first answer token kept, one terminator at the end."""
    question = "How much is 40 and 6? Answer: "
    path = conversations(
        tmp_path, {"chosen": ask(question, "46"), "rejected": ask(question, "$46")}
    )
    collector = preferences.from_conversations(path, smollm2_chat, thinking=False, max_tokens=99)
    pairs = collector.pairs()
    prompt = list(smollm2_chat.encode(ask(question, "")[:1], thinking=False))
    for side, reply in ((CHOSEN, "46"), (REJECTED, "$46")):
        row = pairs.row(0, side).tolist()
        assert row[: len(prompt)] == prompt
        assert row[len(prompt) :] == [*smollm2_chat.encode_text(reply), smollm2_chat.end_id]
        assert row.count(smollm2_chat.end_id) == prompt.count(smollm2_chat.end_id) + 1


def test_d4_one_token_answer(tmp_path, smollm2_chat):
    """D4: a one-token answer and its end are both there to be scored."""
    path = conversations(tmp_path, {"chosen": ask("?", "No"), "rejected": ask("?", "Yes, it is.")})
    pairs = preferences.from_conversations(
        path, smollm2_chat, thinking=False, max_tokens=99
    ).pairs()
    assert pairs.lengths[0, 1] == 2
    assert pairs.row(0, CHOSEN)[-2:].tolist() == [
        *smollm2_chat.encode_text("No"),
        smollm2_chat.end_id,
    ]


def test_conversations_that_do_not_pair_are_counted(tmp_path, smollm2_chat):
    path = conversations(
        tmp_path,
        {"chosen": ask("a", "x"), "rejected": ask("b", "y")},
        {"chosen": ask("a", "x")},
        {"chosen": ask("a", "x"), "rejected": ask("a", "x ")},
        {"chosen": ask("a", " "), "rejected": ask("a", "y")},
        {"chosen": [turn | {"weight": 1} for turn in ask("a", "x")], "rejected": ask("a", "y")},
    )
    collector = preferences.from_conversations(path, smollm2_chat, thinking=False, max_tokens=99)
    dropped = {name: count for name, count in collector.counts["dropped"].items() if count}
    assert dropped == {"different_prompt": 1, "missing_side": 1, "identical": 1, "empty": 1}
    assert collector.counts["pairs"] == 1


@pytest.mark.parametrize(
    ("family", "opened"), [("qwen3", False), ("olmo3", True)], ids=["qwen3", "olmo3"]
)
def test_reasoning_of_a_reply_is_trained_on(tmp_path, family, opened):
    """It counts as part of the reply, and is written as the model writes it."""
    question = {"role": "user", "content": "Why?"}
    replies = [{"role": "assistant", "content": "Yes."} for _ in range(3)]
    replies[0]["reasoning_content"], replies[1]["reasoning_content"] = "I know.", "I guess."
    ends = [[question, reply] for reply in replies]
    path = conversations(
        tmp_path,
        {"chosen": ends[0], "rejected": ends[1]},
        {"chosen": ends[0], "rejected": ends[2]},
        {"chosen": ends[0], "rejected": ends[0]},
    )
    chat = Chat(getattr(chat_families, family)(), date=chat_families.DATE)
    collector = preferences.from_conversations(path, chat, thinking=True, max_tokens=999)
    assert (collector.counts["pairs"], collector.counts["dropped"]["identical"]) == (2, 1)
    pairs, start = collector.pairs(), "" if opened else "<think>"
    prompt = len(chat.encode([question], thinking=True))

    def text(pair: int, side: int) -> str:
        return chat.tokenizer.decode(pairs.row(pair, side)[prompt:-1])

    assert text(0, CHOSEN) == f"{start}\nI know.\n</think>\n\nYes."
    assert text(0, REJECTED) == f"{start}\nI guess.\n</think>\n\nYes."
    assert text(1, REJECTED) == ("\n</think>\n\nYes." if opened else "Yes.")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("text", "list of messages"),
        ([{"role": "tool", "content": "hi"}, *ask("a", "x")], "list of messages with role"),
        ([{"content": "hi"}, *ask("a", "x")], "list of messages with role"),
        ([*ask("a", "x")[:1], ask("a", "x")[1] | {"reasoning_content": 1}], "list of messages"),
        ([{"role": "user", "content": 3}], "list of messages"),
        ([{"role": "user", "content": "hi"}], "assistant"),
        (ask("a", "x")[1:], "assistant"),
    ],
)
def test_rows_of_another_shape_are_named(tmp_path, smollm2_chat, bad, message):
    good = {"chosen": ask("a", "x"), "rejected": ask("a", "y")}
    path = conversations(tmp_path, good, {**good, "rejected": bad})
    with pytest.raises(UserError, match=f"pairs.jsonl, row 2: 'rejected' .*{message}"):
        preferences.from_conversations(path, smollm2_chat, thinking=False, max_tokens=99)
