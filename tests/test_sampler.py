"""The sampler: same text whatever the batch, every stop id, nucleus edges, masks row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY_HF, tiny_decoder
from ml_collections import ConfigDict

from retmask_jax import sampler
from retmask_jax.mesh import AXES, make_mesh, shardings
from retmask_jax.sampler import Completion, Request, Sampler, choose, request_seed

BANK = np.ones((2, 4, 8), bool)
BANK[1, 1:, ::2] = False


def requests(n: int, **changes) -> list[Request]:
    rng = np.random.default_rng(0)
    rows = []
    for i in range(n):
        tokens = tuple(int(x) for x in rng.integers(3, 128, rng.integers(1, 90)))
        rows.append(Request(f"r{i}", tokens, policy=i % 2, seed=request_seed(0, i), **changes))
    return rows


def run(model, rows: list[Request], **options) -> dict[str, Completion]:
    options = {"slots": 4, "max_length": 128, "max_new_tokens": 12, "bank": BANK, **options}
    done = {completion.id: completion for completion in Sampler(model, **options)(rows)}
    assert sorted(done) == sorted(row.id for row in rows)
    return done


@pytest.mark.parametrize("family", ["llama", "olmo3"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_s4_the_batch_does_not_change_the_text(family, temperature):
    model, rows = tiny_decoder(family), requests(7)
    options = dict(temperature=temperature, top_p=0.9, stop_ids=(2, 5), report_top=True)
    alone = run(model, rows, slots=1, **options)
    for slots, chunk in ((2, 32), (8, 64)):
        batch = run(model, list(reversed(rows)), slots=slots, prefill_chunk=chunk, **options)
        for name, completion in alone.items():
            assert batch[name].tokens == completion.tokens
            np.testing.assert_array_equal(batch[name].top, completion.top)


@pytest.mark.parametrize("family", TINY_HF)
def test_greedy_equals_a_plain_forward_pass_of_the_growing_text(family):
    model, request = tiny_decoder(family), requests(4)[3]
    done = run(model, [request], report_top=True)[request.id]
    gates = jnp.asarray(BANK[request.policy], jnp.float32)[:, None]

    @jax.jit
    def last(tokens, n):
        positions = jnp.arange(tokens.shape[1])[None]
        segments = (positions < n).astype(jnp.int32)
        output = model(tokens, positions, segments, gates=gates, report_top=True)
        return model.logits(output.hidden[:, n - 1]), output.top[:, 0, n - 1]

    text = list(request.tokens)
    for step, token in enumerate(done.tokens):
        padded = np.zeros((1, 128), np.int32)
        padded[0, : len(text)] = text
        logits, top = last(padded, len(text))
        assert int(jnp.argmax(logits)) == token
        np.testing.assert_array_equal(done.top[step], top)
        text.append(token)


def test_policies_give_different_text():
    model = tiny_decoder("llama")
    tokens = requests(1)[0].tokens
    rows = [Request("kept", tokens, policy=0), Request("masked", tokens, policy=1)]
    done = run(model, rows)
    assert done["kept"].tokens != done["masked"].tokens
    assert done["kept"].tokens == run(model, rows[:1], bank=None)["kept"].tokens


def test_s1_every_stop_id_stops():
    model, row = tiny_decoder("llama"), requests(1)
    free = run(model, row)["r0"]
    assert (free.finish_reason, len(free.tokens)) == ("length", 12)
    for step in (0, 3, 7):
        stop = free.tokens[step]
        first = free.tokens.index(stop)
        done = run(model, row, stop_ids=(126, stop, 127))["r0"]
        assert done.finish_reason == "stop"
        assert done.tokens == free.tokens[: first + 1]


def test_limits_of_length():
    model = tiny_decoder("llama")
    short = run(model, requests(3, max_new_tokens=2))
    assert {len(done.tokens) for done in short.values()} == {2}
    fits = Request("fits", (7,) * 116)
    assert len(run(model, [fits])["fits"].tokens) == 12
    for row in (Request("long", (7,) * 117), Request("empty", ())):
        with pytest.raises(ValueError, match=row.id):
            run(model, [row])


def test_a_seed_is_a_row_s_own():
    assert request_seed(0, "a", 1) == request_seed(0, "a", 1)
    seeds = {request_seed(s, p, n) for s in range(3) for p in "ab" for n in range(3)}
    assert len(seeds) == 18
    model = tiny_decoder("llama")
    tokens = requests(1)[0].tokens
    rows = [Request(str(seed), tokens, seed=request_seed(seed)) for seed in range(4)]
    texts = {done.tokens for done in run(model, rows, temperature=1.0).values()}
    assert len(texts) == 4


def draws(p: list[float], top_p: float, temperature: float = 1.0, dtype=jnp.float32) -> set[int]:
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(p)).astype(dtype), (400, len(p)))
    keys = jax.random.split(jax.random.key(0), 400)
    chosen = choose(logits, keys, temperature=temperature, top_p=top_p)
    assert chosen.dtype == jnp.int32
    return set(np.asarray(chosen).tolist())


def test_s3_edges_of_temperature_and_nucleus():
    assert draws([0.2, 0.5, 0.3], top_p=1.0, temperature=0) == {1}
    assert draws([0.5, 0.41, 0.09], top_p=0.9) == {0, 1}
    assert draws([0.09, 0.5, 0.41], top_p=0.9) == {1, 2}
    assert draws([0.5, 0.41, 0.09], top_p=1.0) == {0, 1, 2}
    for top_p in (0.0, 1e-4):
        assert draws([0.3, 0.4, 0.3], top_p=top_p, dtype=jnp.bfloat16) == {1}
    assert draws([0.5, 0.5], top_p=1.0, temperature=1e-4) <= {0, 1}


def test_sampled_frequencies_follow_the_probabilities():
    p = np.asarray([0.1, 0.6, 0.3])
    n = 20000
    logits = jnp.broadcast_to(jnp.log(p), (n, 3))
    chosen = choose(logits, jax.random.split(jax.random.key(1), n), temperature=0.5, top_p=1.0)
    seen = np.bincount(np.asarray(chosen), minlength=3) / n
    np.testing.assert_allclose(seen, p**2 / np.sum(p**2), atol=0.015)


@pytest.mark.parametrize(
    ("family", "axes", "slots"),
    [
        ("llama", {"fsdp": 4}, 1),
        ("llama", {"tensor": 4}, 4),
        ("llama", {"data": 2, "tensor": 2}, 6),
        ("olmo3", {"data": 2, "fsdp": 2}, 16),
        ("olmo3", {"fsdp": 2, "tensor": 2}, 8),
    ],
    ids=str,
)
def test_a_mesh_changes_nothing(family, axes, slots):
    model, rows = tiny_decoder(family), requests(9)
    options = {"temperature": 0.8, "prefill_chunk": 32, "report_top": True}
    alone = run(model, rows, **options)
    sizes = {axis: axes.get(axis, 1) for axis in AXES}
    mesh = make_mesh(ConfigDict(sizes), jax.devices()[:4])
    placed = jax.device_put(model, shardings(model, mesh))
    spread = run(placed, rows, slots=slots, mesh=mesh, **options)
    assert {k: v.tokens for k, v in spread.items()} == {k: v.tokens for k, v in alone.items()}
    for name, completion in alone.items():
        np.testing.assert_array_equal(spread[name].top, completion.top)


def test_one_compilation_on_a_mesh():
    """Slots come out of every program as they went in."""
    mesh = make_mesh(ConfigDict({"data": 2, "fsdp": 2, "sequence": 1, "tensor": 2}))
    model = tiny_decoder("llama")
    placed = jax.device_put(model, shardings(model, mesh))
    before = sampler._decode._cache_size(), sampler._seat._cache_size()
    run(placed, requests(9), slots=8, max_new_tokens=11, mesh=mesh)
    assert (sampler._decode._cache_size(), sampler._seat._cache_size()) == (
        before[0] + 1,
        before[1] + 1,
    )
