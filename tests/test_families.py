"""Every family against transformers in PyTorch, on tiny random weights in float32.

Lengths go past Olmo-3's sliding window (16 here) and past the original context of llama3 and YaRN
scaling (32 here). Compiling is what takes time here, so the tests of a family share their shapes:
ROWS x LENGTH for whole sequences, CACHE_ROWS x (CHUNK or 1) through the cache.
"""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import TINY_HF, tiny_decoder, tiny_hf
from torch_reference import mask_heads, state_dict, torch_model

from retmask_jax.mesh import AXES, shardings
from retmask_jax.models.cache import init_cache
from retmask_jax.models.decoder import Decoder

pytestmark = pytest.mark.torch

FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SLIDING_QWEN3 = {
    "use_sliding_window": True,
    "sliding_window": 16,
    "layer_types": [FULL, SLIDING] * 2,
}
CASES = {
    **{family: {} for family in TINY_HF},
    "llama": {"rope_scaling": LLAMA3},
    "olmo3": {"layer_types": [SLIDING, FULL] * 2},
}
ROWS, LENGTH = 8, 75
CACHE_ROWS, CHUNK = 2, 25


@pytest.fixture(scope="module", params=sorted(CASES))
def pair(request):
    """(our model, the same in PyTorch) of a family."""
    family = request.param
    changes = CASES[family]
    model = tiny_decoder(family, **changes)
    return model, torch_model(model, tiny_hf(family, **changes))


@contextlib.contextmanager
def masked(reference, keep: np.ndarray, head_dim: int) -> Iterator[None]:
    """The model in PyTorch with heads masked, for a while."""
    saved = {key: value.clone() for key, value in reference.state_dict().items()}
    mask_heads(reference, keep, head_dim)
    yield
    reference.load_state_dict(saved)


def tokens_of(seed: int, batch: int = ROWS, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 128, (batch, length)).astype(np.int32)


def random_mask(config, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).random((config.n_layers, config.n_heads)) < 0.6


def torch_logits(reference, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return reference(torch.from_numpy(tokens).long()).logits.float().numpy()


@jax.jit
def forward(model: Decoder, tokens, positions, segments, gates=None):
    return model.logits(model(tokens, positions, segments, gates=gates).hidden)


def logits_of(model: Decoder, tokens: np.ndarray, gates=None) -> np.ndarray:
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return np.asarray(forward(model, tokens, positions, np.ones_like(tokens), gates))


@jax.jit
def continue_cache(model: Decoder, tokens, positions, segments, cache, gates=None):
    output = model(tokens, positions, segments, cache=cache, gates=gates, report_top=True)
    return model.logits(output.hidden), output.cache, output.top


def advance(model: Decoder, tokens: np.ndarray, start: int, cache, gates=None):
    """Feeds tokens [B, n] from position `start`, alone or padded to CHUNK."""
    n = tokens.shape[1]
    padding = [(0, 0), (0, 0 if n == 1 else CHUNK - n)]
    chunk, segments = (np.pad(x, padding) for x in (tokens, np.ones_like(tokens)))
    positions = np.broadcast_to(start + np.arange(chunk.shape[1], dtype=np.int32), chunk.shape)
    logits, cache, top = continue_cache(model, chunk, positions, segments, cache, gates)
    return np.asarray(logits)[:, :n], cache, np.asarray(top)[:, :, :n]


def cached_logits(model: Decoder, tokens: np.ndarray, widths: list[int], gates=None) -> np.ndarray:
    cache = init_cache(model.config, len(tokens), LENGTH, jnp.float32)
    parts, start = [], 0
    for width in widths:
        logits, cache, _ = advance(model, tokens[:, start : start + width], start, cache, gates)
        parts.append(logits)
        start += width
    assert start == tokens.shape[1]
    return np.concatenate(parts, axis=1)


def test_whole_sequence(pair):
    model, reference = pair
    tokens = tokens_of(0)
    np.testing.assert_allclose(
        logits_of(model, tokens), torch_logits(reference, tokens), atol=1e-4, rtol=0
    )


CHUNKS = [CHUNK, 1, 7, 16, 1, CHUNK]


@pytest.mark.parametrize("widths", [CHUNKS, [1] * LENGTH], ids=["chunks", "one by one"])
def test_through_the_cache(pair, widths):
    """One row under a mask, one without."""
    model, reference = pair
    keep = random_mask(model.config)
    tokens = tokens_of(1, CACHE_ROWS)
    expected = torch_logits(reference, tokens)
    with masked(reference, keep, model.config.head_dim):
        expected[0] = torch_logits(reference, tokens[:1])
    logits = cached_logits(model, tokens, widths, mixed_gates(keep)[:, :CACHE_ROWS])
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "changes", "pattern"),
    [
        ("olmo3", {}, "sssf"),
        ("olmo3", {"num_hidden_layers": 6}, "sssfss"),
        ("olmo3", {"layer_types": [FULL, SLIDING, SLIDING, SLIDING]}, "fsss"),
        ("olmo3", {"layer_types": [SLIDING] * 4}, "s"),
        ("qwen3", SLIDING_QWEN3, "fs"),
    ],
)
def test_w6_patterns_of_layers(family, changes, pattern):
    """W6: Olmo-3 as released, and others; past the window, whole and cached."""
    model = tiny_decoder(family, **changes)
    assert "".join(layer_type[0] for layer_type in model.config.pattern) == pattern
    tokens = tokens_of(8, CACHE_ROWS)
    expected = torch_logits(torch_model(model, tiny_hf(family, **changes)), tokens)
    np.testing.assert_allclose(logits_of(model, tokens), expected, atol=1e-4, rtol=0)
    np.testing.assert_allclose(cached_logits(model, tokens, CHUNKS), expected, atol=1e-4, rtol=0)


def test_a_cache_of_a_sliding_layer_is_no_longer_than_the_window():
    model = tiny_decoder("olmo3")
    cache = init_cache(model.config, 2, 400, jnp.float32)
    assert [k.shape[2] for k in cache.k] == [16, 16, 16, 512]


def test_masked_heads(pair):
    model, reference = pair
    config = model.config
    keep = random_mask(config)
    tokens = tokens_of(3)
    whole = torch_logits(reference, tokens)
    with masked(reference, keep, config.head_dim):
        expected = torch_logits(reference, tokens)
    assert np.abs(whole - expected).max() > 0.1
    gates = jnp.asarray(keep, jnp.float32)[:, None]
    np.testing.assert_allclose(logits_of(model, tokens, gates), expected, atol=1e-4, rtol=0)
    # Rows under the mask and rows without it in one batch.
    mixed = logits_of(model, tokens, mixed_gates(keep))
    np.testing.assert_allclose(mixed[::2], expected[::2], atol=1e-4, rtol=0)
    np.testing.assert_allclose(mixed[1::2], whole[1::2], atol=1e-4, rtol=0)


def mixed_gates(keep: np.ndarray) -> np.ndarray:
    """The mask for even rows, no mask for odd ones: float32 [L, ROWS, N]."""
    both = np.stack([keep, np.ones_like(keep)], axis=1).astype(np.float32)
    return np.tile(both, (1, ROWS // 2, 1))


def test_padding_on_either_side_changes_nothing(pair):
    model, _ = pair
    rows = tokens_of(4)
    alone = logits_of(model, rows)  # what comes later changes nothing either
    lengths = [7, 40, 23, LENGTH, 1, 16, 17, LENGTH - 1]
    for side in ("left", "right"):
        tokens, positions, segments = (np.zeros((ROWS, LENGTH), np.int32) for _ in range(3))
        for i, n in enumerate(lengths):
            at = slice(LENGTH - n, LENGTH) if side == "left" else slice(0, n)
            tokens[i, at], positions[i, at], segments[i, at] = rows[i, :n], np.arange(n), 1
        padded = np.asarray(forward(model, tokens, positions, segments))
        for i, n in enumerate(lengths):
            np.testing.assert_allclose(padded[i][segments[i] == 1], alone[i, :n], atol=2e-5, rtol=0)


def test_packed_sequences_do_not_see_each_other(pair):
    model, _ = pair
    rows = tokens_of(20)
    alone = logits_of(model, rows)
    lengths = [9, 33, 21]
    packed = [np.roll(np.arange(ROWS), -i)[:3] for i in range(ROWS)]  # row i holds these three
    tokens, positions, segments = (np.zeros((ROWS, LENGTH), np.int32) for _ in range(3))
    filled = sum(lengths)
    positions[:, :filled] = np.concatenate([np.arange(n) for n in lengths])
    segments[:, :filled] = np.repeat([1, 2, 3], lengths)
    for i, members in enumerate(packed):
        tokens[i, :filled] = np.concatenate(
            [rows[j, :n] for j, n in zip(members, lengths, strict=True)]
        )
    logits = np.asarray(forward(model, tokens, positions, segments))
    for i, members in enumerate(packed):
        for segment, (j, n) in enumerate(zip(members, lengths, strict=True), start=1):
            found = logits[i][segments[i] == segment]
            np.testing.assert_allclose(found, alone[j, :n], atol=2e-5, rtol=0)


def test_top_attended_key_of_a_decode_of_50_steps(pair):
    model, reference = pair
    prompt = 20
    tokens = tokens_of(5, CACHE_ROWS, prompt)
    cache = init_cache(model.config, CACHE_ROWS, LENGTH, jnp.float32)
    _, cache, _ = advance(model, tokens[:, :-1], 0, cache)
    tops = []
    for position in range(prompt - 1, prompt + 49):
        logits, cache, top = advance(model, tokens[:, -1:], position, cache)
        tokens = np.append(tokens, logits.argmax(-1).astype(np.int32), axis=1)
        tops.append(top[:, :, 0])
    with torch.no_grad():
        out = reference(torch.from_numpy(tokens[:, :-1]).long(), output_attentions=True)
    attention = np.stack([layer.numpy() for layer in out.attentions])  # [L, B, N, T, T]
    expected = attention[:, :, :, prompt - 1 :].argmax(-1)
    np.testing.assert_array_equal(np.stack(tops, axis=-1), expected)
    np.testing.assert_array_equal(tokens[:, prompt:], out.logits[:, prompt - 1 :].argmax(-1))


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

    ours = state_dict(gradient(model))
    logp = torch.log_softmax(reference(torch.from_numpy(tokens).long()).logits, -1)
    picked = logp.gather(-1, torch.from_numpy(labels).long()[..., None]).sum(dim=(1, 2))
    reference.zero_grad()
    torch.nn.functional.softplus(-0.1 * (picked[0] - picked[1])).backward()
    for name, parameter in reference.named_parameters():
        expected = parameter.grad.numpy()
        error = np.abs(ours[name].numpy() - expected).max()
        assert error <= 1e-3 * np.abs(expected).max(), name


@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 2},
        {"tensor": 2},
        {"fsdp": 4},
        {"tensor": 4},
        {"fsdp": 8},
        {"fsdp": 2, "tensor": 2},
        {"fsdp": 4, "tensor": 2},
    ],
    ids=str,
)
def test_meshes(pair, sizes):
    model, _ = pair
    tokens, gates = tokens_of(7), mixed_gates(random_mask(model.config))
    shape = [sizes.get(axis, 1) for axis in AXES]
    mesh = jax.make_mesh(
        shape,
        AXES,
        axis_types=(jax.sharding.AxisType.Auto,) * 4,
        devices=jax.devices()[: int(np.prod(shape))],
    )
    placed = jax.device_put(model, shardings(model, mesh))
    with jax.set_mesh(mesh):
        spread = logits_of(placed, tokens, gates)
    np.testing.assert_allclose(spread, logits_of(model, tokens, gates), atol=2e-5, rtol=0)
    np.testing.assert_allclose(spread[1::2], logits_of(model, tokens)[1::2], atol=2e-5, rtol=0)
