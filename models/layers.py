"""The parts that the families share: norms, rotary embedding, projections, gated MLP."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from retmask_jax.models.config import DecoderConfig, RopeConfig
from retmask_jax.models.partitioning import constrain


def weight(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: jnp.dtype
) -> nnx.Param:
    """A projection, normal with standard deviation 0.02, that carries its logical axes."""
    value = 0.02 * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(value.astype(dtype), axes=axes)


class Scale(nnx.Param):
    """The scale of a norm: a parameter that is no matrix, whatever its rank."""


def scale(
    shape: tuple[int, ...], dtype: jnp.dtype, axes: tuple[str | None, ...] | None = None
) -> Scale:
    """The scale of a norm, ones."""
    return Scale(jnp.ones(shape, dtype), axes=axes or (None,) * len(shape))


def logical_axes(param: nnx.Param) -> tuple[str | None, ...]:
    """The logical axis of each dimension; stacked blocks have `layers` in front."""
    axes = param.get_metadata()["axes"]
    return ("layers",) * (len(param.shape) - len(axes)) + axes


def gathered(param: nnx.Param) -> jax.Array:
    """A weight with its `embed` axis whole on every device, other axes as they are stored.

    Called inside the layer, so that under fsdp one layer's weights are whole at a time.
    """
    axes = logical_axes(param)
    if axes[-1] == "embed":
        # Gradients are scattered along a leading axis, which the TPU does without a full sum.
        front = _gather(jnp.moveaxis(param[...], -1, 0), (axes[-1], *axes[:-1]))
        return jnp.moveaxis(front, 0, -1)
    return _gather(param[...], axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """x with its `embed` axis whole.

    Where copies of the model share out the batch its gradient lies as x does: they would sum whole
    gradients otherwise before each keeps its part.
    """
    return constrain(x, *_whole(axes))


def _gather_forward(x: jax.Array, axes: tuple[str | None, ...]) -> tuple[jax.Array, None]:
    return _gather(x, axes), None


def _gather_backward(axes: tuple[str | None, ...], _: None, g: jax.Array) -> tuple[jax.Array]:
    copies = jax.sharding.get_abstract_mesh().shape.get("data", 1) > 1
    return (constrain(g, *(axes if copies else _whole(axes))),)


_gather.defvjp(_gather_forward, _gather_backward)


def _whole(axes: tuple[str | None, ...]) -> tuple[str | None, ...]:
    return tuple(None if axis == "embed" else axis for axis in axes)


def rms_norm(x: jax.Array, scale: nnx.Param, eps: float, axes: int | tuple = -1) -> jax.Array:
    """x / rms(x) * scale over `axes`, computed in float32, returned in x's dtype.

    Root mean square layer normalisation, arXiv 1910.07467.
    """
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=axes, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean + eps)
    return (normed * scale[...].astype(jnp.float32)).astype(x.dtype)


def rope_inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of each of the H/2 rotated pairs, float32 [H/2].

    `llama3`: the smoothed scaling of Llama 3.1. `yarn`: NTK-by-parts of arXiv 2309.00071,
    section 3.2, with the ramp between the dimensions that turn beta_fast and beta_slow times
    within the original context.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return plain.astype(np.float32)
    stretched = plain / rope.factor
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / plain
        turns = rope.original_max_position / wavelength
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return ((1 - smooth) * stretched + smooth * plain).astype(np.float32)

    def dimension(turns: float) -> float:
        return (
            head_dim
            * math.log(rope.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return (stretched * ramp + plain * (1 - ramp)).astype(np.float32)


def rope_table(
    rope: RopeConfig, head_dim: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [B, T, H/2], for positions int32 [B, T]; YaRN's factor is in both."""
    frequencies = jnp.asarray(rope_inverse_frequencies(rope, head_dim))
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary embedding of x [B, T, N, H]: pair i is (x[i], x[i + H/2]), as Hugging Face has it."""
    cos, sin = (part[:, :, None, :] for part in table)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention: the four projections and, where the family has them, q/k norms.

    Args:
      qk_norm: `""` (none), `head` (over each head's H, Qwen3) or `width` (over all heads, Olmo).
    """

    def __init__(
        self, config: DecoderConfig, rngs: nnx.Rngs, dtype: jnp.dtype, qk_norm: str = ""
    ) -> None:
        d, n, k, h = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
        self.q = weight(rngs, (d, n, h), ("embed", "heads", "head_dim"), dtype)
        self.k = weight(rngs, (d, k, h), ("embed", "kv_heads", "head_dim"), dtype)
        self.v = weight(rngs, (d, k, h), ("embed", "kv_heads", "head_dim"), dtype)
        self.o = weight(rngs, (n, h, d), ("heads", "head_dim", "embed"), dtype)
        if qk_norm == "head":
            self.q_norm = scale((h,), dtype)
            self.k_norm = scale((h,), dtype)
        elif qk_norm == "width":
            self.q_norm = scale((n, h), dtype, ("heads", "head_dim"))
            self.k_norm = scale((k, h), dtype, ("kv_heads", "head_dim"))
        self.qk_norm = qk_norm
        self.eps = config.norm_eps

    def __call__(
        self,
        x: jax.Array,
        table: tuple[jax.Array, jax.Array],
        attend: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array | None]],
        gate: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """x [B, T, D] -> output [B, T, D] and what `attend` reports.

        `gate` [B or 1, N] multiplies each head's output before the output projection: with 0 the
        projection's block W_o[n] (H x D) counts as zero, with 1 nothing changes.
        """
        q = jnp.einsum("btd,dnh->btnh", x, gathered(self.q))
        k = jnp.einsum("btd,dkh->btkh", x, gathered(self.k))
        v = jnp.einsum("btd,dkh->btkh", x, gathered(self.v))
        if self.qk_norm:
            over = -1 if self.qk_norm == "head" else (-2, -1)
            q = rms_norm(q, self.q_norm, self.eps, over)
            k = rms_norm(k, self.k_norm, self.eps, over)
        q = constrain(rotate(q, table), "batch", "length", "heads", None)
        k = constrain(rotate(k, table), "batch", None, "kv_heads", None)
        v = constrain(v, "batch", None, "kv_heads", None)
        out, top = attend(q, k, v)
        if gate is not None:
            out = out * gate[:, None, :, None].astype(out.dtype)
        out = jnp.einsum("btnh,nhd->btd", out, gathered(self.o))
        return constrain(out, "batch", "length", None), top


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), arXiv 2002.05202."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        d, f = config.d_model, config.d_ff
        self.gate = weight(rngs, (d, f), ("embed", "mlp"), dtype)
        self.up = weight(rngs, (d, f), ("embed", "mlp"), dtype)
        self.down = weight(rngs, (f, d), ("mlp", "embed"), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B, T, D] -> [B, T, D]."""
        inner = jax.nn.silu(x @ gathered(self.gate)) * (x @ gathered(self.up))
        inner = constrain(inner, "batch", "length", "mlp")
        return constrain(inner @ gathered(self.down), "batch", "length", None)
