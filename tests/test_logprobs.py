"""The chunked head against logits of whole rows, on one device and on meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training import mesh_of, tiny

from retmask_jax.logprobs import reply_logprobs, token_logprobs

R, T, D, V = 4, 24, 16, 96


def plain(hidden, unembed, targets, mask):
    logits = jnp.einsum("rtd,vd->rtv", hidden, unembed, preferred_element_type=jnp.float32)
    at_target = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=2)
    return jnp.where(mask, at_target[..., 0], 0.0)


def in_chunks_of_8(hidden, unembed, targets, mask):
    return token_logprobs(hidden, unembed, targets, mask, 8)


@pytest.fixture
def inputs():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(R, T, D)).astype(np.float32)
    unembed = rng.normal(size=(V, D)).astype(np.float32)
    targets = rng.integers(0, V, (R, T)).astype(np.int32)
    at = np.arange(T)
    starts, ends = np.array([[3], [0], [9], [23]]), np.array([[9], [24], [10], [24]])
    return hidden, unembed, targets, (at >= starts) & (at < ends)


def value_and_grads(head, hidden, unembed, targets, mask):
    """Log-probs and gradients of a function that weighs each position differently."""

    def loss(hidden, unembed):
        logps = head(hidden, unembed, targets, mask)
        return jnp.sum(jnp.sin(logps) * (1 + jnp.arange(T))), logps

    (_, logps), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(hidden, unembed)
    return logps, *grads


@pytest.mark.parametrize("chunk", [1, 5, 24, 32, 1000])
def test_equals_log_softmax_of_whole_rows(inputs, chunk):
    chunked = value_and_grads(lambda *xs: token_logprobs(*xs, chunk), *inputs)
    for got, want in zip(chunked, value_and_grads(plain, *inputs), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6 * np.abs(want).max())


def test_nothing_scored_is_zero_with_zero_gradient(inputs):
    hidden, unembed, targets, mask = inputs
    results = value_and_grads(in_chunks_of_8, hidden, unembed, targets, np.zeros_like(mask))
    for result in results:
        assert not np.any(result)


def test_positions_that_are_not_scored_change_nothing(inputs):
    hidden, unembed, targets, mask = inputs
    spoiled = np.where(mask[..., None], hidden, 1e4).astype(np.float32)
    wrong = np.where(mask, targets, 0)
    clean = value_and_grads(in_chunks_of_8, hidden, unembed, targets, mask)
    for got, want in zip(
        value_and_grads(in_chunks_of_8, spoiled, unembed, wrong, mask), clean, strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_bfloat16_hidden_gives_float32_results(inputs):
    hidden, unembed, targets, mask = inputs
    low = jnp.asarray(hidden, jnp.bfloat16)
    logps, d_hidden, d_unembed = value_and_grads(in_chunks_of_8, low, unembed, targets, mask)
    assert (logps.dtype, d_hidden.dtype, d_unembed.dtype) == (
        jnp.float32,
        jnp.bfloat16,
        jnp.float32,
    )
    exact = plain(
        low.astype(jnp.float32),
        jnp.asarray(unembed, jnp.bfloat16).astype(jnp.float32),
        targets,
        mask,
    )
    # Products of bfloat16 numbers are exact in float32: only the order of sums differs.
    np.testing.assert_allclose(logps, exact, rtol=1e-4, atol=1e-4)


def test_no_array_as_large_as_the_logits(inputs):
    hidden, unembed, targets, mask = inputs

    def loss(hidden, unembed):
        return jnp.sum(token_logprobs(hidden, unembed, targets, mask, 8))

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, unembed).compile()
    assert f"[{R},{T},{V}]" not in compiled.as_text()
    assert f"[1,8,{V}]" in compiled.as_text()


@pytest.mark.parametrize(
    "axes",
    [{"fsdp": 2}, {"data": 2, "fsdp": 2}, {"tensor": 4}, {"fsdp": 2, "sequence": 2, "tensor": 2}],
)
def test_equals_one_device_on_a_mesh(inputs, axes):
    want = value_and_grads(in_chunks_of_8, *inputs)
    with jax.set_mesh(mesh_of(**axes)):
        got = value_and_grads(in_chunks_of_8, *inputs)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())


def test_head_is_gathered_outside_the_loop(inputs):
    """Under fsdp the loops over chunks hold no collective of the head or of its gradient."""
    hidden, unembed, targets, mask = inputs

    def loss(hidden, unembed):
        return jnp.sum(token_logprobs(hidden, unembed, targets, mask, 8))

    mesh = mesh_of(fsdp=4)
    rows = jax.NamedSharding(mesh, jax.P("fsdp"))
    split = jax.NamedSharding(mesh, jax.P(None, "fsdp"))
    with jax.set_mesh(mesh):
        step = jax.jit(
            jax.grad(loss, (0, 1)), in_shardings=(rows, split), out_shardings=(rows, split)
        )
        text = step.lower(hidden, unembed).compile().as_text()
    wide = [
        line
        for line in text.splitlines()
        if any(name in line for name in ("all-gather(", "all-reduce(", "reduce-scatter("))
        and str(V) in line.split("=")[1].split("(")[0]
    ]
    assert wide
    for line in wide:
        assert "while" not in line, line


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_c4_end_token_that_equals_padding_is_scored(side):
    """C4, D4: the mask comes from lengths; 'Yes' + eos padded to 8 has 2 positions to score."""
    model = tiny()
    eos = pad = 0
    reply = {"chosen": [17, eos], "rejected": [23, eos]}[side]
    tokens = np.array([[5, 6, *reply, pad, pad, pad, pad]], np.int32)
    total, logps = reply_logprobs(
        model, tokens, np.array([2]), np.array([4]), dtype=jnp.float32, chunk=4
    )
    positions, segments = np.arange(4)[None], np.ones((1, 4), np.int32)
    hidden = model(tokens[:, :4], positions, segments).hidden
    full = jax.nn.log_softmax(model.logits(hidden))[0]
    by_hand = [full[1, reply[0]], full[2, eos]]
    np.testing.assert_allclose(logps[0, 1:3], by_hand, rtol=1e-4)
    np.testing.assert_allclose(total[0], sum(by_hand), rtol=1e-4)
    assert np.flatnonzero(np.asarray(logps)).tolist() == [1, 2]


@pytest.mark.parametrize("family", ["llama", "olmo3"])
def test_a_row_is_the_same_padded_and_batched(family):
    model = tiny(family)
    rng = np.random.default_rng(1)
    lengths, prompts = np.array([9, 40, 17]), np.array([4, 1, 16])
    tokens = np.zeros((3, 40), np.int32)
    for row, length in zip(tokens, lengths, strict=True):
        row[:length] = rng.integers(1, 128, length)

    @jax.jit
    def score(*rows):
        return reply_logprobs(model, *rows, dtype=jnp.float32, chunk=7)[1]

    together = score(tokens, prompts, lengths)
    alone = score(tokens[:1, :9], prompts[:1], lengths[:1])
    np.testing.assert_allclose(together[:1, :9], alone, rtol=1e-4, atol=1e-4)
    for logps, prompt, length in zip(np.asarray(together), prompts, lengths, strict=True):
        assert np.flatnonzero(logps).tolist() == list(range(prompt - 1, length - 1))
