"""Log-probs of replies without logits: the head works on a few positions at a time."""

import functools
import math

import jax
import jax.numpy as jnp

from retmask_jax.models.decoder import Decoder, cast
from retmask_jax.models.partitioning import RULES, constrain


def reply_logprobs(
    model: Decoder,
    tokens: jax.Array,
    prompt_lengths: jax.Array,
    lengths: jax.Array,
    *,
    dtype: jnp.dtype,
    chunk: int,
    remat: bool = False,
    kernel: str = "blocks",
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of each row's reply; which tokens are scored follows from lengths alone.

    Args:
        model: float32 master weights.
        tokens: i32 [R, T], right-padded.
        prompt_lengths: i32 [R], at least 1.
        lengths: i32 [R], prompt and reply.
        dtype: of the computation.
        chunk: see `token_logprobs`.
        remat, kernel: see `Decoder`.

    Returns:
        f32 [R], the sum over the reply's tokens, and f32 [R, T], the terms: at t that of token
        t + 1, 0 unless prompt_length <= t + 1 < length.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    decoder = cast(model, dtype)
    hidden = decoder(tokens, positions, segments, remat=remat, kernel=kernel).hidden
    targets = jnp.roll(tokens, -1, axis=1)
    following = positions + 1
    scored = (following >= prompt_lengths[:, None]) & (following < lengths[:, None])
    by_token = token_logprobs(hidden, model.unembed(), targets, scored, chunk)
    return _sum_in_pairs(constrain(by_token, "batch", None)), by_token


def _sum_in_pairs(x: jax.Array) -> jax.Array:
    """[R, T] -> [R], in an order that no compiler changes.

    The reference's and the policy's log-probs come from different programs; before the first
    update they must be equal to the last bit.
    """
    while (length := x.shape[1]) > 1:
        half = (length + 1) // 2
        x = x[:, :half] + jnp.pad(x[:, half:], [(0, 0), (0, length % 2)])
    return x[:, 0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def token_logprobs(
    hidden: jax.Array, unembed: jax.Array, targets: jax.Array, mask: jax.Array, chunk: int
) -> jax.Array:
    """Log-probs of target tokens; the logits of a few positions at a time are all that ever exists.

    Each device takes its own positions `chunk` by `chunk`, in the backward pass again. Chunks
    without a position to score are left out. Matrix products are in hidden's dtype with float32
    accumulation; log-sum-exp, result and the gradient of `unembed` are float32.

    Args:
        hidden: [R, T, D].
        unembed: [V, D], the head's weight, in float32 where its gradient matters.
        targets: i32 [R, T], the token that each position predicts.
        mask: bool [R, T], which positions are scored.
        chunk: positions whose logits a device holds at one time.

    Returns:
        f32 [R, T], 0 where not scored. Differentiable in hidden and unembed.
    """
    return _score(hidden, unembed, targets, mask, chunk)[0]


def _score(
    hidden: jax.Array, unembed: jax.Array, targets: jax.Array, mask: jax.Array, chunk: int
) -> tuple[jax.Array, tuple]:
    weight = _whole(unembed, hidden.dtype)
    chunks = _Chunks(hidden.shape[:2], chunk)

    def body(_: None, xs: tuple) -> tuple[None, tuple[jax.Array, jax.Array]]:
        h, target, scored = xs

        def score() -> tuple[jax.Array, jax.Array]:
            logits = _logits(h, weight)
            lse = jax.nn.logsumexp(logits, axis=-1)
            at_target = jnp.sum(jnp.where(_is_target(logits, target), logits, 0.0), axis=-1)
            return at_target, lse

        def nothing() -> tuple[jax.Array, jax.Array]:
            zeros = jnp.zeros(target.shape, jnp.float32)
            return zeros, zeros

        return None, jax.lax.cond(jnp.any(scored), score, nothing)

    xs = chunks.split(hidden), chunks.split(targets), chunks.split(mask)
    # Subtracted here, so that the loop is the same program with and without a backward pass.
    _, (at_target, lse) = jax.lax.scan(body, None, xs)
    logps = jnp.where(mask, chunks.join(at_target) - chunks.join(lse), 0.0)
    return logps, (hidden, unembed, targets, mask, lse)


def _score_backward(chunk: int, saved: tuple, g: jax.Array) -> tuple[jax.Array | None, ...]:
    """d log p(target) / d logits = onehot(target) - softmax(logits)."""
    hidden, unembed, targets, mask, lse = saved
    weight = _whole(unembed, hidden.dtype)
    chunks = _Chunks(hidden.shape[:2], chunk)

    def body(d_weight: jax.Array, xs: tuple) -> tuple[jax.Array, jax.Array]:
        h, target, scored, lse, g = xs

        def add() -> tuple[jax.Array, jax.Array]:
            logits = _logits(h, weight)
            onehot = _is_target(logits, target).astype(jnp.float32)
            d_logits = (onehot - jnp.exp(logits - lse[..., None])) * g[..., None]
            d_logits = d_logits.astype(h.dtype)
            d_h = jnp.einsum("gcv,vd->gcd", d_logits, weight)
            return d_weight + jnp.einsum(
                "gcv,gcd->gvd", d_logits, h, preferred_element_type=jnp.float32
            ), d_h

        def nothing() -> tuple[jax.Array, jax.Array]:
            return d_weight, jnp.zeros_like(h)

        return jax.lax.cond(jnp.any(scored), add, nothing)

    # One sum a group of devices: they are added up once, after the loop.
    start = jnp.zeros((chunks.groups, *unembed.shape), jnp.float32)
    start = constrain(start, "position", "vocab", None)
    g = chunks.split(jnp.where(mask, g, 0.0))
    xs = chunks.split(hidden), chunks.split(targets), chunks.split(mask), lse, g
    d_weight, d_hidden = jax.lax.scan(body, start, xs)
    d_weight = constrain(jnp.sum(d_weight, axis=0), "vocab", "embed").astype(unembed.dtype)
    return chunks.join(d_hidden), d_weight, None, None


token_logprobs.defvjp(_score, _score_backward)


def _whole(unembed: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The head in the compute dtype, gathered over fsdp before the loop; still split by vocab."""
    return constrain(unembed.astype(dtype), "vocab", None)


def _logits(h: jax.Array, weight: jax.Array) -> jax.Array:
    logits = jnp.einsum("gcd,vd->gcv", h, weight, preferred_element_type=jnp.float32)
    return constrain(logits, "position", None, "vocab")


def _is_target(logits: jax.Array, target: jax.Array) -> jax.Array:
    # A comparison, not a gather: it stays local where the vocabulary is split.
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == target[..., None]


class _Chunks:
    """[R, T, …] <-> [C, G, chunk, …]: G groups of devices with their own positions, C chunks."""

    def __init__(self, shape: tuple[int, int], chunk: int):
        rows, length = shape
        self.ways = _ways("batch", rows), _ways("length", length)
        self.groups = math.prod(self.ways)
        self.local = rows // self.ways[0], length // self.ways[1]
        self.positions = math.prod(self.local)
        self.chunk = min(chunk, self.positions)

    def split(self, x: jax.Array) -> jax.Array:
        (a, s), (r, t), rest = self.ways, self.local, x.shape[2:]
        x = x.reshape(a, r, s, t, *rest)
        x = jnp.moveaxis(x, 2, 1).reshape(self.groups, self.positions, *rest)
        spare = -self.positions % self.chunk
        x = jnp.pad(x, [(0, 0), (0, spare)] + [(0, 0)] * len(rest))
        x = jnp.moveaxis(x.reshape(self.groups, -1, self.chunk, *rest), 1, 0)
        return constrain(x, None, "position", None, *[None] * len(rest))

    def join(self, x: jax.Array) -> jax.Array:
        (a, s), (r, t), rest = self.ways, self.local, x.shape[3:]
        x = jnp.moveaxis(x, 0, 1).reshape(self.groups, -1, *rest)[:, : self.positions]
        x = jnp.moveaxis(x.reshape(a, s, r, t, *rest), 1, 2).reshape(a * r, s * t, *rest)
        return constrain(x, "batch", "length", *[None] * len(rest))


def _ways(axis: str, size: int) -> int:
    shape = jax.sharding.get_abstract_mesh().shape
    ways = math.prod(shape.get(name, 1) for name in RULES[axis])
    return ways if size % ways == 0 else 1
