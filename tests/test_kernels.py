"""The kernels against each other and against attention written out with its T x T matrix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_decoder
from jax.sharding import AxisType

from retmask_jax.mesh import AXES
from retmask_jax.models import attention
from retmask_jax.models.kernels import kernel_of, row_attention

# Odd and even group sizes, lengths off the block, packed and padded rows.
SEGMENTS = {
    "one": [[1] * 300],
    "padded": [[1] * 211 + [0] * 89, [0] * 45 + [1] * 255],
    "packed": [[1] * 100 + [2] * 37 + [3] * 101 + [0] * 62],
}


def inputs(segments: list[list[int]], n: int = 6, k: int = 2, h: int = 16, length: int = 0):
    segments = np.asarray(segments, np.int32)
    if length:
        segments = np.pad(segments, ((0, 0), (0, length - segments.shape[1])))
    positions = np.zeros_like(segments)
    for row, ids in zip(positions, segments, strict=True):
        for segment in set(ids) - {0}:
            row[ids == segment] = np.arange(np.sum(ids == segment))
    b, t = segments.shape
    keys = jax.random.split(jax.random.key(0), 3)
    q, k_, v = (
        jax.random.normal(key, (b, t, heads, h)) for key, heads in zip(keys, (n, k, k), strict=True)
    )
    return q, k_, v, jnp.asarray(positions), jnp.asarray(segments)


def written_out(q, k, v, positions, segments, window):
    """Probabilities [B, N, T, T] and the output."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    score = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    back = positions[:, :, None] - positions[:, None, :]
    seen = (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] != 0)
    seen &= back >= 0
    if window is not None:
        seen &= back < window
    p = jax.nn.softmax(jnp.where(seen[:, None], score, -jnp.inf), axis=-1)
    p = jnp.where(seen[:, None], p, 0.0)
    return p, jnp.einsum("bnts,bsnh->btnh", p, v)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("shape", sorted(SEGMENTS))
def test_blocks(monkeypatch, shape, window):
    monkeypatch.setattr(attention, "BLOCK", 128)
    q, k, v, positions, segments = inputs(SEGMENTS[shape])
    p, expected = written_out(q, k, v, positions, segments, window)
    run = functools.partial(
        attention.self_attention, positions=positions, segments=segments, window=window
    )
    out, top = jax.jit(lambda q, k, v: run(q, k, v))(q, k, v)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    real = np.asarray(segments) != 0
    best = np.moveaxis(np.asarray(jnp.argmax(p, axis=-1)), 1, 2)
    at = np.take_along_axis(np.asarray(positions)[:, None], np.moveaxis(best, 1, 2), axis=2)
    np.testing.assert_array_equal(np.asarray(top)[real], np.moveaxis(at, 1, 2)[real])
    assert (np.asarray(top)[~real] == -1).all()


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("shape", sorted(SEGMENTS))
def test_gradients_of_blocks(monkeypatch, shape, window):
    monkeypatch.setattr(attention, "BLOCK", 128)
    q, k, v, positions, segments = inputs(SEGMENTS[shape])
    probe = jax.random.normal(jax.random.key(9), q.shape)

    def ours(q, k, v):
        return jnp.sum(probe * attention.self_attention(q, k, v, positions, segments, window)[0])

    def theirs(q, k, v):
        return jnp.sum(probe * written_out(q, k, v, positions, segments, window)[1])

    for got, expected in zip(
        jax.jit(jax.grad(ours, argnums=(0, 1, 2)))(q, k, v),
        jax.jit(jax.grad(theirs, argnums=(0, 1, 2)))(q, k, v),
        strict=True,
    ):
        np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("ways", [1, 4])
def test_splash(ways, window):
    args = inputs([*SEGMENTS["packed"], *SEGMENTS["one"]], n=4, k=2, h=128, length=384)
    q, k, v, positions, segments = args
    probe = jax.random.normal(jax.random.key(9), q.shape) * (segments != 0)[..., None, None]

    def value(kernel, q, k, v):
        out = row_attention(kernel, q, k, v, positions, segments, window)
        return jnp.sum(probe * out), out * (segments != 0)[..., None, None]

    def both(kernel):
        grad = jax.grad(functools.partial(value, kernel), argnums=(0, 1, 2), has_aux=True)
        return jax.jit(grad)(q, k, v)

    expected = both("blocks")
    shape = (1, ways // min(ways, 2), 1, min(ways, 2))
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 4, devices=jax.devices()[:ways])
    with jax.set_mesh(mesh):
        got = both("splash:interpret")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5)


def test_shapes_that_a_kernel_does_not_take_fall_to_the_blocks():
    args = inputs(SEGMENTS["padded"])
    expected = row_attention("blocks", *args, None)
    for kernel in ("splash", "cudnn"):
        np.testing.assert_array_equal(row_attention(kernel, *args, None), expected)


def test_kernel_of_a_platform():
    assert [kernel_of(name) for name in ("tpu", "gpu", "cpu")] == ["splash", "cudnn", "blocks"]


def test_h7_where_heads_look_is_reported_whatever_the_kernel():
    model = tiny_decoder("llama", head_dim=128)
    tokens = np.random.default_rng(0).integers(3, 128, (1, 128)).astype(np.int32)
    positions = np.arange(128, dtype=np.int32)[None]
    ones = np.ones_like(tokens)
    run = jax.jit(
        lambda kernel: model(tokens, positions, ones, report_top=True, kernel=kernel).top,
        static_argnums=0,
    )
    plain, fused = run("blocks"), run("splash")
    np.testing.assert_array_equal(plain, fused)
    assert plain.shape == (4, 1, 128, 8)
    assert (plain >= 0).all() and (plain <= positions[..., None]).all()
    assert jax.eval_shape(lambda: model(tokens, positions, ones)).top is None
