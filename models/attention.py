"""Attention in blocks: memory linear in length, and where each head looks most.

Keys are visited block by block with a running maximum and sum (online softmax, arXiv 1805.02867),
so that no T x S matrix exists, forward or backward (arXiv 2205.14135). The running maximum also
gives the position of the key that a head attends to most: the largest score is the largest
probability.

Shapes inside: q is grouped, [B, t, K, G, H] with N = K * G; a tile of scores is [B, K, G, t, s].
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 512  # queries, and keys, in one tile of scores
_NEVER = -1e30  # score of an invisible key: finite, so that differences are never NaN


class Keys(NamedTuple):
    """A block of keys: k and v [B, s, K, H], positions and segments int32 [B, s]."""

    k: jax.Array
    v: jax.Array
    positions: jax.Array
    segments: jax.Array


class _Queries(NamedTuple):
    q: jax.Array  # [B, t, K, G, H]
    positions: jax.Array
    segments: jax.Array


class _Swept(NamedTuple):
    out: jax.Array  # [B, t, K, G, H] float32
    lse: jax.Array  # [B, t, K, G] float32
    top: jax.Array  # [B, t, K, G] int32


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def self_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    window: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of sequences over themselves; differentiable in q, k and v.

    A query sees the keys of its own non-zero segment at positions up to its own and, with a
    window, fewer than `window` back. Queries of segment 0 (padding) get zeros.

    Args:
      q: [B, T, N, H]; N is a multiple of K.
      k: [B, T, K, H].
      v: [B, T, K, H].
      positions: int32 [B, T], rising along each segment.
      segments: int32 [B, T].
      window: the sliding window in tokens, or None.

    Returns:
      The output [B, T, N, H] in q's dtype, and the top-attended key position int32 [B, T, N]
      (-1 where a query sees no key).
    """
    swept = _self_sweep(q, k, v, positions, segments, window)
    return _ungroup(swept.out).astype(q.dtype), _ungroup(swept.top)


def cached_attention(
    q: jax.Array,
    fetch: Callable[[jax.Array], Keys],
    n_blocks: int,
    positions: jax.Array,
    segments: jax.Array,
    window: int | None,
    *,
    slot_is_position: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attention of T new queries over a store of keys that is read block by block.

    Args:
      q: [B, T, N, H].
      fetch: gives block j of the store, j int32 below `n_blocks`.
      n_blocks: blocks in the store.
      positions: int32 [B, T] of the queries.
      segments: int32 [B, T]; 0 is padding, 1 is real.
      window: the sliding window in tokens, or None.
      slot_is_position: the key in slot s of the store has position s, so that blocks behind the
        last query are not read.

    Returns:
      As `self_attention`.
    """
    shape = jax.eval_shape(fetch, jnp.int32(0)).k.shape
    queries, size = _query_blocks(q, positions, segments, shape[2])

    def one(block: _Queries) -> _Swept:
        hi = jnp.int32(n_blocks)
        if slot_is_position:
            last = jnp.max(jnp.where(block.segments != 0, block.positions, -1))
            hi = jnp.minimum(last // shape[1] + 1, hi).astype(jnp.int32)
        return _sweep(block, fetch, window, jnp.int32(0), hi)

    swept = _stitch(_map(one, queries), size, q.shape[1])
    return _ungroup(swept.out).astype(q.dtype), _ungroup(swept.top)


def _sweep(
    queries: _Queries,
    fetch: Callable[[jax.Array], Keys],
    window: int | None,
    lo: jax.Array,
    hi: jax.Array,
) -> _Swept:
    """One block of queries over key blocks lo .. hi - 1."""
    b, t, k, g, h = queries.q.shape

    def visit(j: jax.Array, carry: tuple) -> tuple:
        peak, total, acc, top = carry
        keys = fetch(j)
        score, seen = _scores(queries, keys, window)
        best = jnp.max(score, axis=-1)
        where = jnp.argmax(score, axis=-1)  # [B, K, G, t]
        position = jnp.take_along_axis(keys.positions[:, None, None, :], where, axis=-1)
        top = jnp.where(best > peak, position, top)
        new = jnp.maximum(peak, best)
        shrink = jnp.exp(peak - new)
        p = jnp.where(seen, jnp.exp(score - new[..., None]), 0.0)
        total = total * shrink + jnp.sum(p, axis=-1)
        mixed = jnp.einsum(
            "bkgts,bskh->bkgth",
            p.astype(keys.v.dtype),
            keys.v,
            preferred_element_type=jnp.float32,
        )
        return new, total, acc * shrink[..., None] + mixed, top

    start = (
        jnp.full((b, k, g, t), _NEVER, jnp.float32),
        jnp.zeros((b, k, g, t), jnp.float32),
        jnp.zeros((b, k, g, t, h), jnp.float32),
        jnp.full((b, k, g, t), -1, jnp.int32),
    )
    peak, total, acc, top = jax.lax.fori_loop(lo, hi, visit, start)
    total = jnp.where(total == 0.0, 1.0, total)
    out, lse = acc / total[..., None], peak + jnp.log(total)
    return _Swept(*(jnp.moveaxis(x, 3, 1) for x in (out, lse, top)))


def _scores(queries: _Queries, keys: Keys, window: int | None) -> tuple[jax.Array, jax.Array]:
    """Scaled scores float32 [B, K, G, t, s], and which are visible, bool [B, 1, 1, t, s]."""
    q, q_pos, q_seg = queries
    seen = (keys.segments[:, None, :] == q_seg[:, :, None]) & (q_seg[:, :, None] != 0)
    back = q_pos[:, :, None] - keys.positions[:, None, :]
    seen &= back >= 0
    if window is not None:
        seen &= back < window
    seen = seen[:, None, None]
    score = jnp.einsum("btkgh,bskh->bkgts", q, keys.k, preferred_element_type=jnp.float32)
    return jnp.where(seen, score * q.shape[-1] ** -0.5, _NEVER), seen


def _self_sweep(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    window: int | None,
) -> _Swept:
    queries, size = _query_blocks(q, positions, segments, k.shape[2])
    fetch = fetcher(k, v, positions, segments, size)
    n = queries.q.shape[0]

    def one(item: tuple[jax.Array, _Queries]) -> _Swept:
        i, block = item
        return _sweep(block, fetch, window, *_causal_bounds(i, size, window))

    return _stitch(_map(one, (jnp.arange(n), queries)), size, q.shape[1])


def _causal_bounds(i: jax.Array, size: int, window: int | None) -> tuple[jax.Array, jax.Array]:
    """Key blocks that queries of block i can see: within a row, keys never lie behind queries.

    In a packed or padded row too: a later index is a later position or another segment, and
    within a segment a distance in index is a distance in position.
    """
    first = jnp.int32(0) if window is None else jnp.maximum(i * size - window + 1, 0) // size
    return first.astype(jnp.int32), (i + 1).astype(jnp.int32)


def _self_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    window: int | None,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    swept = _self_sweep(q, k, v, positions, segments, window)
    out = _ungroup(swept.out).astype(q.dtype)
    return (out, _ungroup(swept.top)), (q, k, v, positions, segments, out, swept.lse)


def _self_backward(
    window: int | None, saved: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    """Probabilities again, tile by tile, from the saved log-sum-exp (arXiv 2205.14135, alg. 4)."""
    q, k, v, positions, segments, out, lse = saved
    length, n_kv = q.shape[1], k.shape[2]
    d_out = cotangents[0]
    queries, size = _query_blocks(q, positions, segments, n_kv)
    fetch = fetcher(k, v, positions, segments, size)
    split = functools.partial(_split, size=size)
    d_outs = split(_group(d_out.astype(jnp.float32), n_kv))
    # Sum over s of p * dp, which every ds subtracts.
    deltas = split(_group(jnp.sum(d_out.astype(jnp.float32) * out, axis=-1), n_kv))
    lses = split(lse)
    shrink = q.shape[-1] ** -0.5
    padded = queries.q.shape[0] * size

    def one(carry: tuple[jax.Array, jax.Array], item: tuple) -> tuple[tuple, jax.Array]:
        i, block, do, delta, lse_i = item
        do_t, delta_t, lse_t = (jnp.moveaxis(x, 1, 3) for x in (do, delta, lse_i))

        def visit(j: jax.Array, inner: tuple) -> tuple:
            dq, dk, dv = inner
            keys = fetch(j)
            score, seen = _scores(block, keys, window)
            p = jnp.where(seen, jnp.exp(score - lse_t[..., None]), 0.0)
            dp = jnp.einsum("bkgth,bskh->bkgts", do_t, keys.v.astype(jnp.float32))
            ds = p * (dp - delta_t[..., None]) * shrink
            dq += jnp.einsum("bkgts,bskh->btkgh", ds, keys.k.astype(jnp.float32))
            dk_j = jnp.einsum("bkgts,btkgh->bskh", ds, block.q.astype(jnp.float32))
            dv_j = jnp.einsum("bkgts,bkgth->bskh", p, do_t)
            return dq, _add_block(dk, dk_j, j * size), _add_block(dv, dv_j, j * size)

        dq = jnp.zeros(block.q.shape, jnp.float32)
        lo, hi = _causal_bounds(i, size, window)
        dq, *carry = jax.lax.fori_loop(lo, hi, visit, (dq, *carry))
        return tuple(carry), dq

    b, _, _, h = k.shape
    zeros = jnp.zeros((b, padded, n_kv, h), jnp.float32)
    items = (jnp.arange(queries.q.shape[0]), queries, d_outs, deltas, lses)
    (dk, dv), dq = jax.lax.scan(one, (zeros, zeros), items)
    dq = _ungroup(_stitch(dq, size, length))
    return (
        dq.astype(q.dtype),
        dk[:, :length].astype(k.dtype),
        dv[:, :length].astype(v.dtype),
        None,
        None,
    )


self_attention.defvjp(_self_forward, _self_backward)


def _add_block(total: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
    old = jax.lax.dynamic_slice_in_dim(total, start, block.shape[1], axis=1)
    return jax.lax.dynamic_update_slice_in_dim(total, old + block, start, axis=1)


def fetcher(
    k: jax.Array, v: jax.Array, positions: jax.Array, segments: jax.Array, size: int
) -> Callable[[jax.Array], Keys]:
    arrays = Keys(*(_pad(x, size) for x in (k, v, positions, segments)))

    def fetch(j: jax.Array) -> Keys:
        return Keys(*(jax.lax.dynamic_slice_in_dim(x, j * size, size, axis=1) for x in arrays))

    return fetch


def _query_blocks(
    q: jax.Array, positions: jax.Array, segments: jax.Array, n_kv: int
) -> tuple[_Queries, int]:
    """Queries split into blocks [n, B, size, ...], and the block size."""
    size = min(q.shape[1], BLOCK)
    grouped = _Queries(_group(q, n_kv), positions, segments)
    return _Queries(*(_split(x, size) for x in grouped)), size


def _group(x: jax.Array, n_kv: int) -> jax.Array:
    """[B, T, N, ...] -> [B, T, K, G, ...]."""
    return x.reshape(*x.shape[:2], n_kv, x.shape[2] // n_kv, *x.shape[3:])


def _ungroup(x: jax.Array) -> jax.Array:
    """[B, T, K, G, ...] -> [B, T, N, ...]."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])


def _pad(x: jax.Array, size: int) -> jax.Array:
    """Fills axis 1 with zeros up to a multiple of `size`; segment 0 hides them."""
    missing = -x.shape[1] % size
    if not missing:
        return x
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))


def _split(x: jax.Array, size: int) -> jax.Array:
    """[B, T, ...] -> [n, B, size, ...]."""
    x = _pad(x, size)
    blocks = x.reshape(x.shape[0], x.shape[1] // size, size, *x.shape[2:])
    return jnp.moveaxis(blocks, 1, 0)


def _stitch(blocks: Any, size: int, length: int) -> Any:
    """Arrays [n, B, size, ...] -> [B, length, ...]."""

    def join(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], x.shape[1] * size, *x.shape[3:])[:, :length]

    return jax.tree.map(join, blocks)


def _map(one: Callable, blocks: tuple) -> _Swept:
    """`one` over the leading axis, without a loop where there is one block."""
    if jax.tree.leaves(blocks)[0].shape[0] == 1:
        return jax.tree.map(lambda x: x[None], one(jax.tree.map(lambda x: x[0], blocks)))
    return jax.lax.map(one, blocks)
