"""The KV cache: keys and values of earlier tokens, written and attended to one layer at a time.

Full layers keep every position, sliding layers a ring no longer than the window. On a mesh rows and
heads are split over devices, and no device sees another's.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from retmask_jax.models import attention
from retmask_jax.models.config import SLIDING, DecoderConfig
from retmask_jax.models.partitioning import activation_spec, constrain

_BLOCKS = (512, 256, 128)  # slots that are attended to at once
CACHE_AXES = (None, "batch", None, "kv_heads", None)  # of each array of a cache


class KVCache(NamedTuple):
    """Keys (after rotary embedding) and values, one array for each position p of the pattern.

    k[p] and v[p] are [G, B, S, K, H]. In full layers slot s holds position s. In sliding layers
    S is at most the window and position x lies in slot x % S.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]


def init_cache(config: DecoderConfig, batch: int, length: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache for `batch` rows of up to `length` tokens."""
    multiple = _BLOCKS[0] if length > _BLOCKS[0] else _BLOCKS[-1]
    full = -(-length // multiple) * multiple

    def zeros() -> tuple[jax.Array, ...]:
        arrays = []
        for layer_type in config.pattern:
            slots = min(config.sliding_window, full) if layer_type == SLIDING else full
            shape = (config.n_groups, batch, slots, config.n_kv_heads, config.head_dim)
            array = jnp.zeros(shape, dtype)
            arrays.append(constrain(array, *CACHE_AXES))
        return tuple(arrays)

    return KVCache(zeros(), zeros())


def block_size(slots: int) -> int:
    """How many slots of a cache of `slots` are attended to at once."""
    return next((n for n in _BLOCKS if slots % n == 0), slots)


class LayerCache:
    """The cache of one layer during one forward pass: writes new keys, then attends over all."""

    def __init__(
        self,
        cache: KVCache,
        rows: jax.Array | None,
        p: int,
        g: jax.Array,
        positions: jax.Array,
        segments: jax.Array,
        window: int | None,
    ) -> None:
        self.cache, self.rows, self.p, self.g = cache, rows, p, g
        self.positions, self.segments, self.window = positions, segments, window

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        slots = self.cache.k[self.p].shape[2]
        if self.window is None:
            self._write(k, v)
            return self._attend_slots(q, jnp.arange(slots)[None], slot_is_position=True)
        first = self.positions[:, :1]
        if q.shape[1] == 1:
            # The one key that is overwritten has just left the window.
            self._write(k, v)
            return self._attend_slots(q, _held(first, slots), slot_is_position=False)
        return self._attend_ring(q, k, v, _held(first - 1, slots))

    def _write(self, k: jax.Array, v: jax.Array) -> None:
        """Stores the real tokens; of those that share a slot of a ring, the last."""
        p, put = self.p, self._put_token if k.shape[1] == 1 else self._put_tokens
        stores = put((self.cache.k[p], self.cache.v[p]), (k, v))
        self.cache = KVCache(
            *((*old[:p], new, *old[p + 1 :]) for old, new in zip(self.cache, stores, strict=True))
        )

    def _put_token(self, stores: tuple, new: tuple) -> tuple[jax.Array, ...]:
        slots = stores[0].shape[2]
        rows = jnp.arange(self.positions.shape[0]) if self.rows is None else self.rows
        at = jnp.where(self.segments != 0, self.positions % slots, slots)  # slots: not written
        return tuple(
            store.at[self.g, rows[:, None], at].set(x.astype(store.dtype), mode="drop")
            for store, x in zip(stores, new, strict=True)
        )

    def _put_tokens(self, stores: tuple, new: tuple) -> tuple[jax.Array, ...]:
        """Row by row, a stretch of slots at once: on TPU a scatter would copy the cache."""
        slots, n = stores[0].shape[2], self.positions.shape[1]
        width = min(n, slots) if self.window is None else slots
        real, first = self.segments != 0, self.positions[:, 0]
        begin = jnp.clip(first, 0, slots - width)
        last = first + jnp.sum(real, axis=1, dtype=jnp.int32) - 1
        written = begin[:, None] + jnp.arange(width)
        token = last[:, None] - (last[:, None] - written) % slots - first[:, None]  # for each slot
        keep = (token < 0) | ~jnp.any(real, axis=1, keepdims=True)
        index = jnp.clip(token, 0)[:, :, None, None]
        fresh = tuple(jnp.take_along_axis(x, index, axis=1) for x in new)
        rows = jnp.arange(first.shape[0]) if self.rows is None else self.rows
        return _put_rows(stores, fresh, self.g, rows, begin, keep)

    def _of_rows(self, stored: jax.Array) -> jax.Array:
        """[rows of the cache, S, K, H] -> [B, S, K, H]."""
        return stored if self.rows is None else _take_rows(stored, self.rows)

    def _attend_slots(
        self, q: jax.Array, held: jax.Array, *, slot_is_position: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Attention over the stored keys, whose positions are `held` [B or 1, S]."""
        k, v = self.cache.k[self.p], self.cache.v[self.p]
        _, b, slots, n_kv, h = k.shape
        size = block_size(slots)
        held = jnp.broadcast_to(held, (q.shape[0], slots))

        def read(store: jax.Array, j: jax.Array) -> jax.Array:
            start, shape = (self.g, 0, j * size, 0, 0), (1, b, size, n_kv, h)
            block = jax.lax.dynamic_slice(store, start, shape)[0]
            return self._of_rows(block).astype(q.dtype)

        def fetch(j: jax.Array) -> attention.Keys:
            block = jax.lax.dynamic_slice_in_dim(held, j * size, size, axis=1)
            return attention.Keys(read(k, j), read(v, j), block, (block >= 0).astype(jnp.int32))

        return attention.cached_attention(
            q,
            fetch,
            slots // size,
            self.positions,
            self.segments,
            self.window,
            slot_is_position=slot_is_position,
        )

    def _attend_ring(
        self, q: jax.Array, k: jax.Array, v: jax.Array, held: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Several new queries: over the stored keys and the new ones, then the last are stored."""
        old_k = self._of_rows(self.cache.k[self.p][self.g])
        old_v = self._of_rows(self.cache.v[self.p][self.g])
        keys = attention.Keys(
            jnp.concatenate([old_k.astype(k.dtype), k], axis=1),
            jnp.concatenate([old_v.astype(v.dtype), v], axis=1),
            jnp.concatenate([held, self.positions], axis=1),
            jnp.concatenate([(held >= 0).astype(jnp.int32), self.segments], axis=1),
        )
        length = keys.k.shape[1]
        size = min(length, attention.BLOCK)
        fetch = attention.fetcher(*keys, size)
        out = attention.cached_attention(
            q,
            fetch,
            -(-length // size),
            self.positions,
            self.segments,
            self.window,
            slot_is_position=False,
        )
        self._write(k, v)
        return out


def _take_rows(stored: jax.Array, rows: jax.Array) -> jax.Array:
    """stored [B, S, K, H], rows [R] -> [R, S, K, H]; each device takes rows that it holds."""

    def local(stored: jax.Array, rows: jax.Array, first: jax.Array | int) -> jax.Array:
        return stored[rows - first]

    split = _Split.of(stored.shape, rows)
    return split(local, (split.of_rows, PartitionSpec(split.batch)), split.of_rows)(stored, rows)


def _put_rows(
    stores: tuple[jax.Array, ...],
    fresh: tuple[jax.Array, ...],
    g: jax.Array,
    rows: jax.Array,
    begin: jax.Array,
    keep: jax.Array,
) -> tuple[jax.Array, ...]:
    """Writes fresh [R, W, K, H] to slots begin [R] .. of rows [R] in group g of stores.

    Slots that `keep` bool [R, W] marks stay as they are. Each device writes the rows that it holds.
    """

    def local(
        stores: tuple[jax.Array, ...],
        fresh: tuple[jax.Array, ...],
        g: jax.Array,
        rows: jax.Array,
        begin: jax.Array,
        keep: jax.Array,
        first: jax.Array | int,
    ) -> tuple[jax.Array, ...]:
        def put(r: jax.Array, stores: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            def one(store: jax.Array, x: jax.Array) -> jax.Array:
                start = (g, rows[r] - first, begin[r], 0, 0)
                old = jax.lax.dynamic_slice(store, start, (1, 1, *x.shape[1:]))
                new = jnp.where(keep[r][:, None, None], old, x[r].astype(store.dtype))
                return jax.lax.dynamic_update_slice(store, new, start)

            return tuple(one(store, x) for store, x in zip(stores, fresh, strict=True))

        return jax.lax.fori_loop(0, rows.shape[0], put, stores)

    split = _Split.of(stores[0].shape[1:], rows)
    store, new = PartitionSpec(None, *split.of_rows), split.of_rows
    row = PartitionSpec(split.batch)
    specs = ((store, store), (new, new), PartitionSpec(), row, row, row)
    return split(local, specs, (store, store))(stores, fresh, g, rows, begin, keep)


class _Split(NamedTuple):
    """How the rows and heads of a cache lie on the mesh, for work that each device does alone."""

    batch: str | tuple[str, ...] | None
    heads: str | tuple[str, ...] | None
    n_rows: int  # that a device holds

    @classmethod
    def of(cls, shape: Sequence[int], rows: jax.Array) -> "_Split":
        """Of a cache [B, S, K, H] of which `rows` [R] are wanted.

        Raises:
          ValueError: B is split over devices, but they do not divide R.
        """
        mesh = jax.sharding.get_abstract_mesh()
        _, batch, _, heads, _ = activation_spec(CACHE_AXES, (1, *shape), mesh)
        ways = math.prod(mesh.shape[axis] for axis in jax.tree.leaves(batch))
        if rows.shape[0] % ways:
            raise ValueError(f"{ways} devices cannot share {rows.shape[0]} rows of a cache")
        return cls(batch, heads, shape[0] // ways)

    @property
    def of_rows(self) -> PartitionSpec:
        return PartitionSpec(self.batch, None, self.heads, None)

    def __call__(self, local: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """`local` on each device; its last argument is the first row that the device holds."""
        if self.batch is None and self.heads is None:
            return functools.partial(local, first=0)

        def own(*args: Any) -> Any:
            return local(*args, jax.lax.axis_index(self.batch) * self.n_rows if self.batch else 0)

        return jax.shard_map(own, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _held(last: jax.Array, slots: int) -> jax.Array:
    """Position in each slot of a ring written up to position `last` [B, 1]; negative if none."""
    return last - (last - jnp.arange(slots)[None]) % slots
