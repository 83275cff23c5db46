"""SmolLM2-135M-Instruct against transformers' LlamaForCausalLM in PyTorch, float32.

The reference reads the same GGUF by transformers' own code. Tolerance: max |difference| 1e-3.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from torch_reference import mask_heads
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from retmask_jax.haystack import read_haystack
from retmask_jax.mesh import AXES, shardings
from retmask_jax.models.cache import init_cache

pytestmark = pytest.mark.torch
TOLERANCE = dict(atol=1e-3, rtol=0)


@pytest.fixture(scope="module")
def reference(smollm2_source):
    path = str(smollm2_source.path)
    config = transformers.AutoConfig.from_pretrained(
        smollm2_source.path.parent, gguf_file=smollm2_source.path.name
    )
    config._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(config).eval().float()
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def tokens(smollm2_chat):
    """2,000 tokens of prose."""
    ids = smollm2_chat.encode_text(read_haystack("")[:20000])
    return np.asarray(ids[:2000], np.int32)


@pytest.fixture(scope="module")
def expected(reference, tokens):
    """Logits of the whole prompt by PyTorch, [2000, V]."""
    with torch.no_grad():
        return reference(torch.from_numpy(tokens[None]).long()).logits[0].numpy()


@jax.jit
def hidden_of(model, tokens, positions, segments, gates=None):
    return model(tokens, positions, segments, gates=gates).hidden


@jax.jit
def logits_of(model, hidden):
    return model.logits(hidden)


@jax.jit
def continue_cache(model, tokens, positions, cache):
    output = model(tokens, positions, jnp.ones_like(tokens), cache=cache)
    return output.hidden, output.cache


def close(model, hidden: jax.Array, expected: np.ndarray) -> None:
    """Compares [T, D] with logits [T, V], 250 positions at a time."""
    assert len(hidden) == len(expected)
    for at in range(0, len(hidden), 250):
        here = slice(at, at + 250)
        np.testing.assert_allclose(logits_of(model, hidden[here]), expected[here], **TOLERANCE)


def row(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tokens[None], np.arange(len(tokens), dtype=np.int32)[None], np.ones_like(tokens)[None]


@pytest.mark.parametrize("length", [1, 17, 500, 2000])
def test_whole_prompt(smollm2, tokens, expected, length):
    model, _ = smollm2
    close(model, hidden_of(model, *row(tokens[:length]))[0], expected[:length])


@pytest.mark.parametrize(
    "widths",
    [[1] * 17, [500], [512, 512, 512, 400] + [1] * 64],
    ids=["17 one by one", "500 at once", "2000 in chunks, the end one by one"],
)
def test_through_the_cache(smollm2, tokens, expected, widths):
    model, config = smollm2
    length = sum(widths)
    cache = init_cache(config, 1, length, jnp.float32)
    parts, start = [], 0
    for width in widths:
        ids, positions, _ = row(tokens[:length])
        here = slice(start, start + width)
        hidden, cache = continue_cache(model, ids[:, here], positions[:, here], cache)
        parts.append(np.asarray(hidden[0]))
        start += width
    close(model, np.concatenate(parts), expected[:length])


def test_padded_rows(smollm2, tokens, expected):
    model, _ = smollm2
    lengths = [17, 1, 60]
    for side in ("left", "right"):
        ids, positions, segments = (np.zeros((3, 64), np.int32) for _ in range(3))
        for i, n in enumerate(lengths):
            at = slice(64 - n, 64) if side == "left" else slice(0, n)
            ids[i, at], positions[i, at], segments[i, at] = tokens[:n], np.arange(n), 1
        hidden = np.asarray(hidden_of(model, ids, positions, segments))
        for i, n in enumerate(lengths):
            close(model, hidden[i][segments[i] == 1], expected[:n])


def test_random_mask(smollm2, reference, tokens, expected):
    model, config = smollm2
    keep = np.random.default_rng(0).random((config.n_layers, config.n_heads)) < 0.8
    gates = jnp.asarray(keep, jnp.float32)[:, None]
    hidden = hidden_of(model, *row(tokens[:200]), gates)[0]
    saved = {key: value.clone() for key, value in reference.state_dict().items() if "o_proj" in key}
    try:
        mask_heads(reference, keep, config.head_dim)
        with torch.no_grad():
            masked = reference(torch.from_numpy(tokens[None, :200]).long()).logits[0].numpy()
    finally:
        reference.load_state_dict(saved, strict=False)
    assert np.abs(masked - expected[:200]).max() > 1
    close(model, hidden, masked)


@pytest.mark.parametrize("sizes", [{"fsdp": 2}, {"fsdp": 4}, {"fsdp": 8}, {"tensor": 3}], ids=str)
def test_meshes(smollm2, tokens, expected, sizes):
    model, _ = smollm2
    shape = [sizes.get(axis, 1) for axis in AXES]
    mesh = jax.make_mesh(
        shape,
        AXES,
        axis_types=(jax.sharding.AxisType.Auto,) * 4,
        devices=jax.devices()[: int(np.prod(shape))],
    )
    placed = jax.device_put(model, shardings(model, mesh))
    with jax.set_mesh(mesh):
        batch = [np.repeat(x, 8, axis=0) for x in row(tokens[:33])]
        hidden = hidden_of(placed, *batch)
        logits = np.asarray(logits_of(placed, hidden))
    for each in logits:
        np.testing.assert_allclose(each, expected[:33], **TOLERANCE)
