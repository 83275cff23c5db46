"""Every family against transformers in PyTorch, on tiny random weights in float32.

Lengths go past Olmo-3's sliding window (16 here) and past the original context of llama3 and YaRN
scaling (32 here).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_decoder, tiny_hf

from retmask_jax.mesh import AXES, shardings
from retmask_jax.models.decoder import Decoder, init_cache

torch = pytest.importorskip("torch")
from torch_reference import mask_heads, torch_model  # noqa: E402

pytestmark = pytest.mark.torch

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "llama": {"rope_scaling": LLAMA3},
    "qwen3": {},
    "olmo3": {},
}
LENGTH = 75


@pytest.fixture(params=sorted(CASES))
def pair(request):
    """(our model, the same in PyTorch) of a family."""
    family = request.param
    changes = CASES[family]
    model = tiny_decoder(family, **changes)
    return model, torch_model(model, tiny_hf(family, **changes))


def tokens_of(seed: int, batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 128, (batch, length)).astype(np.int32)


def torch_logits(reference, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return reference(torch.from_numpy(tokens).long()).logits.float().numpy()


@jax.jit
def forward(model: Decoder, tokens, positions, segments, gates=None):
    return model.logits(model(tokens, positions, segments, gates=gates).hidden)


def logits_of(model: Decoder, tokens: np.ndarray, gates=None) -> jax.Array:
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return forward(model, tokens, positions, np.ones_like(tokens), gates)


@jax.jit
def continue_cache(model: Decoder, tokens, positions, segments, cache):
    output = model(tokens, positions, segments, cache=cache, report_top=True)
    return model.logits(output.hidden), output.cache, output.top


def cached_logits(model: Decoder, tokens: np.ndarray, widths: list[int]) -> np.ndarray:
    cache = init_cache(model.config, len(tokens), tokens.shape[1], jnp.float32)
    parts, start = [], 0
    for width in widths:
        chunk = tokens[:, start : start + width]
        positions = np.broadcast_to(np.arange(start, start + width, dtype=np.int32), chunk.shape)
        logits, cache, _ = continue_cache(model, chunk, positions, np.ones_like(chunk), cache)
        parts.append(np.asarray(logits))
        start += width
    assert start == tokens.shape[1]
    return np.concatenate(parts, axis=1)


def test_whole_sequence(pair):
    model, reference = pair
    tokens = tokens_of(0, 3, LENGTH)
    np.testing.assert_allclose(
        logits_of(model, tokens), torch_logits(reference, tokens), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("widths", [[30, 1, 20, 24], [1] * LENGTH], ids=["chunks", "one by one"])
def test_through_the_cache(pair, widths):
    model, reference = pair
    tokens = tokens_of(1, 2, LENGTH)
    np.testing.assert_allclose(
        cached_logits(model, tokens, widths), torch_logits(reference, tokens), atol=1e-4, rtol=0
    )


def test_a_cache_of_a_sliding_layer_is_no_longer_than_the_window():
    model = tiny_decoder("olmo3")
    cache = init_cache(model.config, 2, 400, jnp.float32)
    assert [k.shape[2] for k in cache.k] == [16, 16, 16, 512]


def test_masked_heads(pair):
    model, reference = pair
    config = model.config
    keep = np.random.default_rng(2).random((config.n_layers, config.n_heads)) < 0.6
    tokens = tokens_of(3, 2, 41)
    whole = torch_logits(reference, tokens)
    mask_heads(reference, keep, config.head_dim)
    expected = torch_logits(reference, tokens)
    assert np.abs(whole - expected).max() > 0.1
    gates = jnp.asarray(keep, jnp.float32)[:, None]
    np.testing.assert_allclose(logits_of(model, tokens, gates), expected, atol=1e-4, rtol=0)
    # One row under the mask, one without it, in one batch.
    both = jnp.stack([jnp.asarray(keep, jnp.float32), jnp.ones(keep.shape)], axis=1)
    mixed = logits_of(model, tokens, both)
    np.testing.assert_allclose(mixed[0], expected[0], atol=1e-4, rtol=0)
    np.testing.assert_allclose(mixed[1], whole[1], atol=1e-4, rtol=0)


def test_padding_on_either_side_changes_nothing(pair):
    model, _ = pair
    lengths = [7, 40, 23]
    rows = [tokens_of(4 + n, 1, n)[0] for n in lengths]
    width = 47
    for side in ("left", "right"):
        tokens, positions, segments = (np.zeros((3, width), np.int32) for _ in range(3))
        for i, row in enumerate(rows):
            at = slice(width - len(row), width) if side == "left" else slice(0, len(row))
            tokens[i, at], positions[i, at], segments[i, at] = row, np.arange(len(row)), 1
        padded = np.asarray(forward(model, tokens, positions, segments))
        for i, row in enumerate(rows):
            alone = logits_of(model, row[None])[0]
            np.testing.assert_allclose(padded[i][segments[i] == 1], alone, atol=2e-5, rtol=0)


def test_packed_sequences_do_not_see_each_other(pair):
    model, _ = pair
    rows = [tokens_of(20 + n, 1, n)[0] for n in (9, 33, 21)]
    tokens = np.concatenate(rows)[None]
    positions = np.concatenate([np.arange(len(row)) for row in rows])[None].astype(np.int32)
    segments = np.repeat([1, 2, 3], [len(row) for row in rows])[None].astype(np.int32)
    packed = np.asarray(forward(model, tokens, positions, segments))[0]
    for i, row in enumerate(rows, start=1):
        alone = logits_of(model, row[None])[0]
        np.testing.assert_allclose(packed[segments[0] == i], alone, atol=2e-5, rtol=0)


def test_top_attended_key_of_a_decode_of_50_steps(pair):
    model, reference = pair
    config = model.config
    tokens = tokens_of(5, 1, 20)
    cache = init_cache(config, 1, 80, jnp.float32)
    ours, steps = [], 50
    chunk = tokens[:, :-1]
    positions = np.arange(19, dtype=np.int32)[None]
    _, cache, _ = continue_cache(model, chunk, positions, np.ones_like(chunk), cache)
    ids = list(tokens[0])
    for step in range(steps):
        one = np.asarray([[ids[-1]]], np.int32)
        at = np.asarray([[19 + step]], np.int32)
        logits, cache, top = continue_cache(model, one, at, np.ones_like(one), cache)
        ids.append(int(np.argmax(logits[0, 0])))
        ours.append(np.asarray(top)[:, 0, 0])
    with torch.no_grad():
        out = reference(torch.tensor([ids[:-1]]), output_attentions=True)
    attention = np.stack([layer[0].numpy() for layer in out.attentions])  # [L, N, T, T]
    expected = attention[:, :, 19:, :].argmax(-1).transpose(2, 0, 1)
    np.testing.assert_array_equal(np.stack(ours), expected)
    np.testing.assert_array_equal(ids[20:], np.argmax(out.logits[0, 19:].numpy(), -1))


def test_gradients(pair):
    model, reference = pair
    tokens = tokens_of(6, 2, 50)
    labels = np.roll(tokens, -1, axis=1)
    positions = np.broadcast_to(np.arange(50, dtype=np.int32), tokens.shape)

    @jax.jit
    def gradient(model):
        def loss(model):
            hidden = model(tokens, positions, np.ones_like(tokens), remat=True).hidden
            logp = jax.nn.log_softmax(model.logits(hidden))
            picked = jnp.take_along_axis(logp, labels[..., None], axis=-1)
            return picked.sum(axis=(1, 2))[0] - picked.sum(axis=(1, 2))[1]

        return jax.grad(lambda m: jax.nn.softplus(-0.1 * loss(m)))(model)

    from torch_reference import state_dict

    ours = state_dict(gradient(model))
    logp = torch.log_softmax(reference(torch.from_numpy(tokens).long()).logits, -1)
    picked = logp.gather(-1, torch.from_numpy(labels).long()[..., None]).sum(dim=(1, 2))
    torch.nn.functional.softplus(-0.1 * (picked[0] - picked[1])).backward()
    for name, parameter in reference.named_parameters():
        expected = parameter.grad.numpy()
        error = np.abs(ours[name].numpy() - expected).max()
        assert error <= 1e-3 * np.abs(expected).max(), name


@pytest.mark.parametrize(
    "sizes",
    [{"fsdp": 2}, {"tensor": 2}, {"fsdp": 4}, {"fsdp": 2, "tensor": 2}, {"fsdp": 4, "tensor": 2}],
    ids=str,
)
@pytest.mark.parametrize("family", sorted(CASES))
def test_meshes(family, sizes):
    model = tiny_decoder(family, **CASES[family])
    tokens = tokens_of(7, 8, 45)
    alone = logits_of(model, tokens)
    shape = [sizes.get(axis, 1) for axis in AXES]
    n = int(np.prod(shape))
    mesh = jax.make_mesh(
        shape, AXES, axis_types=(jax.sharding.AxisType.Auto,) * 4, devices=jax.devices()[:n]
    )
    placed = jax.device_put(model, shardings(model, mesh))
    with jax.set_mesh(mesh):
        spread = logits_of(placed, tokens)
        keep = jnp.asarray(np.arange(32).reshape(4, 1, 8) % 3 > 0, jnp.float32)
        masked = logits_of(placed, tokens, keep)
    np.testing.assert_allclose(spread, alone, atol=2e-5, rtol=0)
    np.testing.assert_allclose(masked, logits_of(model, tokens, keep), atol=2e-5, rtol=0)
