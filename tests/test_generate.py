"""Both kinds of answer from one batch: the rows, what is too long, restarts at any moment."""

import json
from types import SimpleNamespace

import chat_families
import jax
import pytest

from retmask_jax import checkpoint_io, generate, mesh
from retmask_jax.chat import Chat
from retmask_jax.configs import base
from retmask_jax.errors import UserError
from retmask_jax.sampler import Completion, Request, Sampler, request_seed
from retmask_jax.workdir import Workdir, parts, read_json, read_part, read_parts, write_json

STOPS = list(range(0, 256, 12))  # many, so that random weights stop now and then


@pytest.fixture
def setup(tiny_model, tmp_path, monkeypatch):
    """setup(prompts, name, **options) -> (config, Workdir) of a tiny model that can run."""
    model, model_config = tiny_model("llama", vocab_size=288)
    source = SimpleNamespace(
        config=model_config, generation_config={"eos_token_id": STOPS}, hf_config={}
    )
    monkeypatch.setattr(checkpoint_io, "open_source", lambda path: source)
    monkeypatch.setattr(checkpoint_io, "load_tokenizer", lambda source: chat_families.llama())
    monkeypatch.setattr(checkpoint_io, "load_model", lambda *args, **options: model)
    one = jax.devices()[:1]
    monkeypatch.setattr(
        generate, "sampling_mesh", lambda config, model: mesh.make_mesh(config.mesh, one)
    )

    def setup(prompts=tuple("abcdefg"), name="work", **options):
        file = tmp_path / f"{name}.jsonl"
        rows = [{"id": f"p{i}", "prompt": text} for i, text in enumerate(prompts)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = base.get_config()
        config.prompts.path = str(file)
        defaults = {
            "max_prompt_tokens": 150,
            "max_new_tokens": 8,
            "slots": 4,
            "prompts_per_part": 3,
        }
        for key, value in {**defaults, **options}.items():
            config.generate[key] = value
        workdir = Workdir(tmp_path / name)
        selection = {"heads": ["0-1", "2-5", "3-0"], "n_layers": 4, "n_heads": 8}
        write_json(workdir.detect / "heads.json", selection)
        return config, workdir

    return setup


def contents(workdir: Workdir) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in workdir.generate.iterdir()}


def prompt_length(text: str) -> int:
    chat = Chat(chat_families.llama(), date="26 Jul 2024")
    return len(chat.encode([{"role": "user", "content": text}], thinking=True))


def test_rows_and_summary(setup):
    config, workdir = setup(samples=2)
    generate.run(config, workdir)
    assert [len(read_part(path)) for path in parts(workdir.generate)] == [12, 12, 4]
    rows = read_parts(workdir.generate)
    keys = [(row["id"], row["policy"], row["sample"]) for row in rows]
    assert keys == [
        (f"p{i}", policy, sample)
        for i in range(7)
        for policy in ("base", "retrieval")
        for sample in range(2)
    ]
    chat = Chat.load(checkpoint_io.open_source(""), date=config.chat.date)
    for row in rows:
        assert row["messages"] == [{"role": "user", "content": "abcdefg"[int(row["id"][1:])]}]
        assert tuple(row["prompt_ids"]) == chat.encode(row["messages"], thinking=True)
        assert row["finish_reason"] == ("stop" if row["ids"][-1] in chat.stop_ids else "length")
        assert not set(row["ids"][:-1]) & set(chat.stop_ids)
        assert len(row["ids"]) == 8 or row["finish_reason"] == "stop"
        spoken = row["ids"][:-1] if row["finish_reason"] == "stop" else row["ids"]
        assert row["text"] == chat.decode(spoken)
        assert row["reasoning_content"] is None
    assert len({tuple(row["ids"]) for row in rows}) > len(rows) / 2  # samples and policies differ
    summary = read_json(workdir.generate / "summary.json")
    reasons = summary["finish_reasons"]
    for policy in ("base", "retrieval"):
        mine = [row for row in rows if row["policy"] == policy]
        for reason in ("stop", "length"):
            count = sum(row["finish_reason"] == reason for row in mine)
            assert reasons[policy][reason] == count > 0
        assert summary["sampled_tokens"][policy] == sum(len(row["ids"]) for row in mine)
    assert summary["date"] == "26 Jul 2024"
    assert (summary["sampled"], summary["too_long"]["ids"]) == (7, [])


def test_base_row_is_the_model_alone(setup, tiny_model):
    """The base policy is the unmasked model; the other one is not."""
    config, workdir = setup(temperature=0.0)
    generate.run(config, workdir)
    rows = {(row["id"], row["policy"]): row for row in read_parts(workdir.generate)}
    model, _ = tiny_model("llama", vocab_size=288)
    stop_ids = read_json(workdir.generate / "summary.json")["stop_ids"]
    sampler = Sampler(model, slots=1, max_length=158, max_new_tokens=8, stop_ids=tuple(stop_ids))
    requests = [Request(f"p{i}", tuple(rows[f"p{i}", "base"]["prompt_ids"])) for i in range(7)]
    alone = {completion.id: list(completion.tokens) for completion in sampler(requests)}
    assert alone == {f"p{i}": rows[f"p{i}", "base"]["ids"] for i in range(7)}
    assert alone != {f"p{i}": rows[f"p{i}", "retrieval"]["ids"] for i in range(7)}


def test_s2_prompts_at_the_limit(setup):
    """S2: limit and limit - 1 are answered; limit + 1 is counted, not sampled; the rest finish."""
    limit = prompt_length("x" * 20)
    texts = ["a", "x" * 19, "x" * 20, "x" * 21, "y" * 300, "b", "z" * 300, "z" * 300, "z" * 300]
    config, workdir = setup(texts, max_prompt_tokens=limit)
    generate.run(config, workdir)
    rows = read_parts(workdir.generate)
    assert {row["id"] for row in rows} == {"p0", "p1", "p2", "p5"}
    assert len(rows) == 8
    assert all(row["ids"] for row in rows)
    assert [len(read_part(path)) for path in parts(workdir.generate)] == [6, 2, 0]
    summary = read_json(workdir.generate / "summary.json")
    ids = ["p3", "p4", "p6", "p7", "p8"]
    assert summary["too_long"] == {"limit": limit, "count": 5, "ids": ids}
    assert summary["sampled"] == 4


def test_all_prompts_too_long(setup):
    config, workdir = setup(max_prompt_tokens=10)
    with pytest.raises(UserError, match=r"all 7 prompts are longer than generate\.max_prompt_tok"):
        generate.run(config, workdir)


def test_same_bytes_whatever_the_batch_and_the_restart(setup, monkeypatch):
    config, workdir = setup()
    generate.run(config, workdir)
    expected = contents(workdir)
    assert set(expected) == {
        "part-00000-of-00003.jsonl.gz",
        "part-00001-of-00003.jsonl.gz",
        "part-00002-of-00003.jsonl.gz",
        "plan.json",
        "summary.json",
    }
    config, other = setup(name="other", slots=2)
    generate.run(config, other)
    assert contents(other) == expected

    (other.generate / "part-00001-of-00003.jsonl.gz").unlink()
    (other.generate / "summary.json").unlink()
    generate.run(config, other)
    assert contents(other) == expected

    def refuse(*args, **options):
        raise AssertionError("loaded the model though all is done")

    monkeypatch.setattr(checkpoint_io, "load_model", refuse)
    (other.generate / "summary.json").unlink()
    generate.run(config, other)
    generate.run(config, other)
    assert contents(other) == expected


@pytest.mark.parametrize("after", [0, 5, 6, 9, 13])
def test_a_kill_loses_only_unfinished_parts(setup, monkeypatch, after):
    config, workdir = setup()
    generate.run(config, workdir)
    expected = contents(workdir)
    config, other = setup(name="other", slots=2)
    sample = Sampler.__call__

    def killed(self, requests):
        for count, completion in enumerate(sample(self, requests)):
            if count == after:
                raise KeyboardInterrupt
            yield completion

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "__call__", killed)
        with pytest.raises(KeyboardInterrupt):
            generate.run(config, other)
    left = contents(other) if other.generate.exists() else {}
    assert "summary.json" not in left
    assert left.items() <= expected.items()
    assert len(left) >= (after >= 9)
    generate.run(config, other)
    assert contents(other) == expected


def test_parts_of_other_prompts_are_refused(setup):
    config, workdir = setup()
    generate.run(config, workdir)
    config, workdir = setup(prompts="abcdefghijkl")
    with pytest.raises(UserError, match=r"plan\.json: .* begun with other prompts"):
        generate.run(config, workdir)
    config, workdir = setup()
    file = config.prompts.path
    with open(file) as lines:
        text = lines.read().replace('"p5"', '"q5"')
    with open(file, "w") as lines:
        lines.write(text)
    with pytest.raises(UserError, match=r"plan\.json: .* begun with other prompts"):
        generate.run(config, workdir)


def test_a_lost_part_is_made_again(setup):
    config, workdir = setup()
    generate.run(config, workdir)
    expected = contents(workdir)
    (workdir.generate / "part-00001-of-00003.jsonl.gz").unlink()
    generate.run(config, workdir)
    assert contents(workdir) == expected


def test_parts_of_other_heads_are_refused(setup):
    config, workdir = setup()
    generate.run(config, workdir)
    selection = {"heads": ["0-1"], "n_layers": 4, "n_heads": 8}
    write_json(workdir.detect / "heads.json", selection)
    with pytest.raises(UserError, match="other prompts or heads"):
        generate.run(config, workdir)


def test_refusals(setup, monkeypatch):
    config, workdir = setup(max_prompt_tokens=500, max_new_tokens=13)
    with pytest.raises(UserError, match="is 513, but the model has 512 positions"):
        generate.run(config, workdir)
    config, workdir = setup()
    (workdir.detect / "heads.json").unlink()
    with pytest.raises(UserError, match="run the detect stage first"):
        generate.run(config, workdir)
    template = "{% if messages[0].content == 'c' %}{{ raise_exception('no c') }}{% endif %}"
    tokenizer = chat_families.llama()
    tokenizer.chat_template = template + tokenizer.chat_template
    monkeypatch.setattr(checkpoint_io, "load_tokenizer", lambda source: tokenizer)
    config, workdir = setup(name="refused")
    with pytest.raises(UserError, match=r"prompt 'p2': .*no c"):
        generate.run(config, workdir)


def test_s1_every_end_token_stops_and_is_not_text():
    """S1: each of several end ids gives reason "stop" and stays out of the text."""
    chat = Chat(chat_families.qwen3(), date="26 Jul 2024", eos_ids=[65, 66])
    assert {65, 66} < set(chat.stop_ids)
    ids = chat.encode_text("Yes.")
    for end in chat.stop_ids:
        row = generate.response(Completion("x", (*ids, end), "stop"), chat, thinking=True)
        assert row == {
            "ids": [*ids, end],
            "text": "Yes.",
            "reasoning_content": None,
            "finish_reason": "stop",
        }
    row = generate.response(Completion("x", ids, "length"), chat, thinking=True)
    assert (row["text"], row["finish_reason"]) == ("Yes.", "length")


def test_reasoning_is_kept_apart():
    chat = Chat(chat_families.qwen3(), date="26 Jul 2024")
    ids = chat.encode_completion(
        [{"role": "user", "content": "a"}], "<think>\nhm\n</think>\n\nYes."
    )
    row = generate.response(Completion("x", ids, "stop"), chat, thinking=True)
    assert (row["reasoning_content"], row["text"]) == ("hm", "Yes.")
    row = generate.response(Completion("x", ids[:4], "length"), chat, thinking=True)
    assert (row["reasoning_content"], row["text"]) == ("hm", "")


def test_seeds_depend_on_the_row_alone(setup, monkeypatch):
    """The key of a row comes from the run's seed, the prompt, the policy and the sample."""
    config, workdir = setup(prompts="ab", samples=2)
    seen = {}
    sample = Sampler.__call__

    def spy(self, requests):
        def noted():
            for request in requests:
                seen[request.id] = (request.seed, request.policy)
                yield request

        return sample(self, noted())

    monkeypatch.setattr(Sampler, "__call__", spy)
    generate.run(config, workdir)
    assert seen == {
        f"{name}/{policy}/{i}": (request_seed(0, name, policy, i), policy == "retrieval")
        for name in ("p0", "p1")
        for policy in ("base", "retrieval")
        for i in range(2)
    }
