"""Attention of whole rows by the fastest kernel of the chip: splash (TPU), cuDNN (GPU), blocks.

All give the same numbers, to rounding. None keeps a T x T matrix. A shape or dtype that a kernel
does not take falls to the blocks of `attention`, which run anywhere and alone report where each
head looks.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec

from retmask_jax.models.attention import self_attention
from retmask_jax.models.partitioning import activation_spec

KERNELS = ("blocks", "splash", "cudnn")
_LANES = 128  # T and H are multiples of it in splash attention
_TILE = 1024  # the largest tile of splash attention


def kernel_of(platform: str) -> str:
    """The kernel for a jax.Device's `platform`."""
    return {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn"}.get(platform, "blocks")


def splash_tile(length: int) -> int:
    """Queries, and keys, of a tile of splash attention; 0: it does not take rows of this length."""
    return next((n for n in (_TILE, 512, 256, _LANES) if length % n == 0), 0)


def row_attention(
    kernel: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    window: int | None,
) -> jax.Array:
    """Causal attention of rows over themselves, differentiable.

    Args:
      kernel: one of KERNELS; a name ending in `:interpret` runs splash attention's code as plain
        operations, for tests on any chip.
      q, k, v, positions, segments, window: as in `attention.self_attention`. cuDNN takes rows of
        one segment padded on the right.

    Returns:
      [B, T, N, H]; what padding gets is undefined.
    """
    name, _, interpret = kernel.partition(":")
    _, length, _, width = q.shape
    if name == "splash" and splash_tile(length) and width % _LANES == 0:
        return _splash(q, k, v, segments, window, bool(interpret))
    if name == "cudnn" and q.dtype in (jnp.bfloat16, jnp.float16) and width % 8 == 0:
        return _cudnn(q, k, v, segments, window)
    return self_attention(q, k, v, positions, segments, window)[0]


def _splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    window: int | None,
    interpret: bool,
) -> jax.Array:
    """Splash attention, one call a row and key head, on each device's own rows and heads."""
    b, t, n, h = q.shape
    n_kv = k.shape[2]

    def local(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        kernel = _splash_kernel(t, q.shape[1], window, interpret)

        def row(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
            return kernel(q, k, v, segment_ids=splash.SegmentIds(ids, ids))

        q = (q * h**-0.5).astype(q.dtype)
        return jax.vmap(row)(q, k, v, segments)

    q = q.reshape(b, t, n_kv, n // n_kv, h).transpose(0, 2, 3, 1, 4)
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
    mesh = jax.sharding.get_abstract_mesh()
    per_key_head = jax.vmap(local, in_axes=(1, 1, 1, None), out_axes=1)
    if not mesh.empty and mesh.size > 1:
        heads = activation_spec(("batch", "kv_heads", None, None), k.shape, mesh)
        rows = PartitionSpec(heads[0], None)
        grouped = PartitionSpec(*heads[:2], None, None, None)
        per_key_head = jax.shard_map(
            per_key_head,
            in_specs=(grouped, heads, heads, rows),
            out_specs=grouped,
            check_vma=False,
        )
    out = per_key_head(q, k, v, segments)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)


def _splash_kernel(
    length: int, n_queries: int, window: int | None, interpret: bool
) -> Callable[..., jax.Array]:
    """The kernel of n_queries heads that share one key head."""
    shape = (length, length)
    if window is None:
        mask = splash.CausalMask(shape)
    else:
        mask = splash.LocalMask(shape, (window - 1, 0), 0)
    tile = splash_tile(length)
    sizes = splash.BlockSizes(
        block_q=tile,
        block_kv=tile,
        block_q_dkv=tile,
        block_kv_dkv=tile,
        block_q_dq=tile,
        block_kv_dq=tile,
    )
    return splash.make_splash_mqa_single_device(
        splash.MultiHeadMask([mask] * n_queries), block_sizes=sizes, interpret=interpret
    )


def _cudnn(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, window: int | None
) -> jax.Array:
    lengths = jnp.sum(segments != 0, axis=1, dtype=jnp.int32)
    attend = functools.partial(
        jax.nn.dot_product_attention,
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    return attend(q, k, v)
