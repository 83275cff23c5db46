"""The chat module on the real vocabularies of Llama 3 and Qwen; rows C1 and C2 among it."""

import functools
import itertools
import unicodedata

import chat_families
import pytest
import real_tokenizers
import regex
from chat_families import DATE
from test_chat import TEXTS, apply_template, assistant, system, token, user

from retmask_jax.chat import Chat

pytestmark = pytest.mark.slow

LLAMA_EOS = (128001, 128008, 128009)  # of Llama 3.1's generation_config.json
CONTROL = {
    "llama": real_tokenizers.LLAMA_SPECIAL,
    "qwen3": (*real_tokenizers.QWEN_SPECIAL, *real_tokenizers.QWEN_PLAIN),
    "olmo3": (*real_tokenizers.QWEN_SPECIAL, *real_tokenizers.QWEN_PLAIN),
}


@functools.cache
def of(family: str) -> Chat:
    """The family's template on its own vocabulary; Olmo-3's on Qwen's."""
    if family == "llama":
        return Chat(real_tokenizers.llama(), date=DATE, eos_ids=LLAMA_EOS)
    template = {"qwen3": chat_families.QWEN3, "olmo3": chat_families.OLMO3}[family]
    return Chat(real_tokenizers.qwen3(template), date=DATE)


@pytest.fixture(params=CONTROL)
def family(request) -> str:
    return request.param


@pytest.fixture
def chat(family) -> Chat:
    return of(family)


def merged(ranks: dict[bytes, int], piece: bytes) -> list[int]:
    """Byte-pair encoding as it is defined: the pair of lowest rank is merged until none is left."""
    parts = [bytes([byte]) for byte in piece]
    while len(parts) > 1 and piece not in ranks:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        if min(pairs) == len(ranks):
            break
        at = pairs.index(min(pairs))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ranks[piece]] if piece in ranks else [ranks[part] for part in parts]


@pytest.mark.parametrize("family", ["llama", "qwen3"], indirect=True)
def test_plain_text_is_encoded_by_the_vocabulary(family, chat):
    llama = family == "llama"
    ranks = real_tokenizers.llama_ranks() if llama else real_tokenizers.qwen_ranks()
    pattern = real_tokenizers.LLAMA_PATTERN if llama else real_tokenizers.QWEN_PATTERN
    texts = [*TEXTS, "In 1234567 days, don't", f"a{chat.tokenizer.eos_token}b <think></think>"]
    for text in texts:
        normal = text if llama else unicodedata.normalize("NFC", text)
        expected = [i for p in regex.findall(pattern, normal) for i in merged(ranks, p.encode())]
        assert list(chat.encode_text(text)) == expected
    assert chat.encode_text("hello world") == ((15339, 1917) if llama else (14990, 1879))


def test_control_tokens_have_the_ids_of_the_released_models():
    llama, qwen = of("llama"), of("qwen3")
    assert (llama.bos_id, llama.end_id, llama.stop_ids) == (128000, 128009, LLAMA_EOS)
    assert [token(llama, f"<|{n}_header_id|>") for n in ("start", "end")] == [128006, 128007]
    assert len(llama.tokenizer) == 128256
    assert (qwen.bos_id, qwen.end_id, qwen.stop_ids) == (None, 151645, (151645,))
    names = ("<|endoftext|>", "<|im_start|>", "<tool_call>", "<think>", "</think>")
    assert [token(qwen, n) for n in names] == [151643, 151644, 151657, 151667, 151668]
    assert of("olmo3").stop_ids == (151645,)


@pytest.mark.parametrize("thinking", [False, True])
def test_ordinary_text_is_encoded_as_transformers_does(chat, thinking):
    for text in TEXTS:
        for messages in (
            [user(text)],
            [system(text), user("hi"), assistant(text), user(text)],
            [user("hi"), assistant("<think>\nwell\n</think>\n\nyes"), user(text)],
        ):
            ids = chat.encode(messages, thinking=thinking)
            assert list(ids) == apply_template(chat, messages, thinking)


def test_c1_no_control_token_can_be_typed(family, chat):
    """C1: for every control token of the vocabulary, in a question and in an old reply."""
    controls = {token(chat, name) for name in CONTROL[family]}
    assert len(controls) == len(CONTROL[family])

    def counts(question: str, reply: str) -> list[int]:
        ids = chat.encode([user(question), assistant(reply), user("so?")], thinking=True)
        return sorted(i for i in ids if i in controls)

    expected = counts("hi bye", "hi bye")
    plain = [i for i in chat.encode_completion([user("hi")], "hi bye") if i in controls]
    for name in CONTROL[family]:
        assert controls.isdisjoint(chat.encode_text(f"hi{name}bye"))
        assert chat.decode(chat.encode_text(f"hi{name}bye")) == f"hi{name}bye"
        assert counts(f"hi{name}bye", f"hi{name}bye") == expected, name
        if (family, name) == ("olmo3", "</think>"):
            continue  # here it ends the reasoning that the prompt has opened
        reply = chat.encode_completion([user("hi")], f"hi{name}bye")
        assert [i for i in reply if i in controls] == plain, name


def test_c1_the_rows_own_examples():
    llama, qwen = of("llama"), of("qwen3")
    turns = llama.encode([user("hi<|eot_id|>bye")], thinking=False)
    assert turns.count(128009) == 2  # the system turn, which Llama 3.1 always has, and the user's
    turns = qwen.encode([user("hi<|im_end|>bye</think>")], thinking=True)
    assert (turns.count(151645), turns.count(151644), turns.count(151668)) == (1, 2, 0)


def test_c2_one_first_token():
    """C2: exactly one 128000, at index 0, in prompts, raw prompts and pairs; Qwen has none."""
    llama, qwen = of("llama"), of("qwen3")
    conversation = [system("Be brief."), user("hi"), assistant("yes"), user("why?")]
    for ids in (
        llama.encode([user("hi")], thinking=False),
        llama.encode(conversation, thinking=False),
        llama.encode([user("<|begin_of_text|>hi")], thinking=False),
        llama.encode_raw("<|begin_of_text|>hi"),
        llama.encode_raw("hi"),
        llama.encode([user("a")], thinking=False) + llama.encode_completion([user("a")], "b"),
    ):
        assert (ids.index(128000), ids.count(128000)) == (0, 1)
    assert qwen.encode_raw("hi") == qwen.encode_text("hi")
    assert qwen.encode([user("hi")], thinking=False)[0] == 151644


def test_date_line_is_pinned():
    llama = of("llama")
    ids, text, offsets = llama.encode_with_offsets([user("hi")], thinking=False)
    start = text.index("Today Date: 26 Jul 2024\n")
    line = [i for i, (a, b) in zip(ids, offsets, strict=True) if a >= start and b <= start + 23]
    assert llama.decode(line) == "Today Date: 26 Jul 2024"
    assert llama.date == DATE


def test_thinking_on_off_and_opened():
    qwen, olmo = of("qwen3"), of("olmo3")
    on, off = (qwen.encode([user("hi")], thinking=thinking) for thinking in (True, False))
    newlines = qwen.encode_text("\n\n")
    assert off == (*on, 151667, *newlines, 151668, *newlines)
    opened = olmo.encode([user("hi")], thinking=True)
    assert opened[-1] == 151667
    sampled = (*olmo.encode_text("well\n"), 151668, *olmo.encode_text("\n\nYes."), olmo.end_id)
    assert olmo.split_reasoning(olmo.decode(sampled)) == ("well", "Yes.")
    assert olmo.encode_completion([user("hi")], "well\n</think>\n\nYes.", thinking=True) == sampled
    sampled = (151667, *qwen.encode_text("\nwell\n"), 151668, *qwen.encode_text("\n\nYes."), 151645)
    assert qwen.encode_completion([user("hi")], "<think>\nwell\n</think>\n\nYes.") == sampled
    assert qwen.split_reasoning(qwen.decode(sampled)) == ("well", "Yes.")


def test_history_drops_old_reasoning():
    qwen = of("qwen3")
    thought = [user("hi"), assistant("<think>\nwell\n</think>\n\nyes"), user("why?")]
    plain = [user("hi"), assistant("yes"), user("why?")]
    ids = qwen.encode(thought, thinking=True)
    assert ids == qwen.encode(plain, thinking=True)
    assert 151668 not in ids


def test_offsets_of_a_needle(chat):
    needle = "The best thing to do in San Francisco is eat a sandwich."
    ids, text, offsets = chat.encode_with_offsets(
        [user(f"Zoë said: 你好 {needle} 👍🏽 …")], thinking=False
    )
    start = text.index(needle)
    stop = start + len(needle)
    span = [i for i, (a, b) in zip(ids, offsets, strict=True) if a < stop and b > start]
    assert needle in chat.decode(span)
    assert len(chat.decode(span)) <= len(needle) + 1
