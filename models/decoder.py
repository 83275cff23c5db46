"""Tokens to hidden states: embedding, scanned blocks, final norm, and the KV cache.

Logits of a whole sequence are never formed here: `Decoder.logits` is for the few positions that
a caller picks.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from retmask_jax.models import attention
from retmask_jax.models.config import SLIDING, DecoderConfig
from retmask_jax.models.kernels import row_attention
from retmask_jax.models.layers import rms_norm, rope_table, scale, weight
from retmask_jax.models.partitioning import activation_spec, constrain

CACHE_BLOCK = 128  # the length of a cache is a multiple of it
CACHE_AXES = (None, "batch", None, "kv_heads", None)  # of each array of a cache


class KVCache(NamedTuple):
    """Keys (after rotary embedding) and values, one array for each position p of the pattern.

    k[p] and v[p] are [G, B, S, K, H]. In full layers slot s holds position s. In sliding layers
    S is at most the window and position x lies in slot x % S.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]


class Output(NamedTuple):
    """What a forward pass gives."""

    hidden: jax.Array  # [B, T, D], after the final norm
    cache: KVCache | None
    top: jax.Array | None  # int32 [L, B, T, N]


class Decoder(nnx.Module):
    """A decoder-only transformer of any family in `retmask_jax.models`.

    A pytree: it goes straight through jax.jit, jax.grad and optax. It computes in the dtype of
    its weights; norms, rotary tables, softmax and logits are float32.

    Args:
      config: dimensions.
      rngs: stream `params` initialises the weights.
      dtype: of the weights.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32
    ) -> None:
        from retmask_jax.models import FAMILIES

        block = FAMILIES[config.family].Block

        def stacked(layer_type: str) -> nnx.Module:
            keys = jax.random.split(rngs.params(), config.n_groups)
            return jax.vmap(lambda key: block(config, nnx.Rngs(params=key), dtype))(keys)

        self.config = config
        shape, axes = (config.vocab_size, config.d_model), ("vocab", "embed")
        self.embed = weight(rngs, shape, axes, dtype)
        self.blocks = nnx.List([stacked(layer_type) for layer_type in config.pattern])
        self.final_norm = scale((config.d_model,), dtype)
        if not config.tied:
            self.lm_head = weight(rngs, shape, axes, dtype)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        segments: jax.Array,
        *,
        cache: KVCache | None = None,
        rows: jax.Array | None = None,
        gates: jax.Array | None = None,
        report_top: bool = False,
        remat: bool = False,
        kernel: str = "blocks",
    ) -> Output:
        """Hidden states of a batch of rows.

        Args:
          tokens: int32 [B, T].
          positions: int32 [B, T], from 0 in each segment.
          segments: int32 [B, T]; 0 is padding. Tokens see only their own segment.
          cache: keys and values of earlier tokens. With it a row is one sequence: segments are 0
            or 1, positions are consecutive, padding is on the right. Real tokens are added.
          rows: int32 [B], the row of the cache that each row of the batch continues; default: as
            they come. Rows that are all padding write nothing.
          gates: [L, B or 1, N], factor on each head's output before the output projection:
            0 masks the head, 1 keeps it.
          report_top: also give, for each head, the key position with the largest probability.
          remat: recompute each layer in the backward pass instead of keeping its activations.
          kernel: one of `kernels.KERNELS`, for rows without a cache; where each head looks is
            always read from the blocks, whatever the kernel.
        """
        config, pattern = self.config, self.config.pattern
        tables = {
            layer_type: rope_table(config.rope_of(layer_type), config.head_dim, positions)
            for layer_type in set(pattern)
        }
        x = self._embed(tokens)

        def group(carry: tuple, scanned: tuple) -> tuple[tuple, jax.Array | None]:
            x, cache = carry
            blocks, gate, g = scanned
            tops = []
            for p, (layer_type, block) in enumerate(zip(pattern, blocks, strict=True)):
                window = config.sliding_window if layer_type == SLIDING else None
                store = None
                if cache is not None:
                    store = _Store(cache, rows, p, g, positions, segments, window)
                    attend = store.attend
                elif report_top:
                    attend = functools.partial(_attend_reporting, positions, segments, window)
                else:
                    attend = functools.partial(_attend, kernel, positions, segments, window)
                x, top = block(x, tables[layer_type], attend, None if gate is None else gate[p])
                cache = store.cache if store else None
                tops.append(top)
            return (x, cache), jnp.stack(tops) if report_top else None

        if remat:
            group = jax.checkpoint(group)
        if gates is not None:
            gates = gates.reshape(config.n_groups, len(pattern), *gates.shape[1:])
        groups = jnp.arange(config.n_groups)
        (x, cache), top = jax.lax.scan(group, (x, cache), (tuple(self.blocks), gates, groups))
        if top is not None:
            top = top.reshape(config.n_layers, *top.shape[2:])
        return Output(rms_norm(x, self.final_norm, config.norm_eps), cache, top)

    def _embed(self, tokens: jax.Array) -> jax.Array:
        # The table stays split along D; rows of all devices that share it are looked up at once
        # and exchanged, so that it is never gathered.
        tokens = constrain(tokens, "slice_batch", None)
        x = jnp.take(self.embed[...], tokens, axis=0)
        x = constrain(x, "slice_batch", None, "embed")
        return constrain(x, "batch", "length", None)

    def unembed(self) -> jax.Array:
        """The head's weight [V, D]; the embedding where they are tied."""
        return (self.embed if self.config.tied else self.lm_head)[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., D] -> logits float32 [..., V]."""
        return jnp.einsum(
            "...d,vd->...v", hidden, self.unembed(), preferred_element_type=jnp.float32
        )


def _attend(
    kernel: str,
    positions: jax.Array,
    segments: jax.Array,
    window: int | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> tuple[jax.Array, None]:
    return row_attention(kernel, q, k, v, positions, segments, window), None


def _attend_reporting(
    positions: jax.Array,
    segments: jax.Array,
    window: int | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    return attention.self_attention(q, k, v, positions, segments, window)


class _Store:
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

    def _attend_slots(
        self, q: jax.Array, held: jax.Array, *, slot_is_position: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Attention over the stored keys, whose positions are `held` [B or 1, S]."""
        k, v = self.cache.k[self.p], self.cache.v[self.p]
        _, b, slots, n_kv, h = k.shape
        size = next(n for n in (512, 256, CACHE_BLOCK, slots) if slots % n == 0)
        held = jnp.broadcast_to(held, (q.shape[0], slots))

        def read(store: jax.Array, j: jax.Array) -> jax.Array:
            start, shape = (self.g, 0, j * size, 0, 0), (1, b, size, n_kv, h)
            block = jax.lax.dynamic_slice(store, start, shape)[0]
            return (block if self.rows is None else block[self.rows]).astype(q.dtype)

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
        rows = slice(None) if self.rows is None else self.rows
        old_k, old_v = self.cache.k[self.p][self.g][rows], self.cache.v[self.p][self.g][rows]
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


def _put_rows(
    stores: tuple[jax.Array, ...],
    fresh: tuple[jax.Array, ...],
    g: jax.Array,
    rows: jax.Array,
    begin: jax.Array,
    keep: jax.Array,
) -> tuple[jax.Array, ...]:
    """Writes fresh [R, W, K, H] to slots begin [R] .. of rows [R] in group g of stores.

    Slots that `keep` bool [R, W] marks stay as they are. Each device writes the rows that it has.
    """

    def local(
        stores: tuple[jax.Array, ...],
        fresh: tuple[jax.Array, ...],
        g: jax.Array,
        rows: jax.Array,
        begin: jax.Array,
        keep: jax.Array,
        axes: tuple[str, ...] = (),
    ) -> tuple[jax.Array, ...]:
        held = stores[0].shape[1]
        rows = rows - (jax.lax.axis_index(axes) * held if axes else 0)
        keep = keep | ((rows < 0) | (rows >= held))[:, None]
        rows = jnp.clip(rows, 0, held - 1)

        def put(r: jax.Array, stores: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            def one(store: jax.Array, x: jax.Array) -> jax.Array:
                start = (g, rows[r], begin[r], 0, 0)
                old = jax.lax.dynamic_slice(store, start, (1, 1, *x.shape[1:]))
                new = jnp.where(keep[r][:, None, None], old, x[r].astype(store.dtype))
                return jax.lax.dynamic_update_slice(store, new, start)

            return tuple(one(store, x) for store, x in zip(stores, fresh, strict=True))

        return jax.lax.fori_loop(0, rows.shape[0], put, stores)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return local(stores, fresh, g, rows, begin, keep)
    spec = activation_spec(CACHE_AXES, stores[0].shape, mesh)
    new, whole = PartitionSpec(None, None, spec[3], None), PartitionSpec()
    return jax.shard_map(
        functools.partial(local, axes=spec[1] or ()),
        in_specs=((spec, spec), (new, new), whole, whole, whole, whole),
        out_specs=(spec, spec),
        check_vma=False,
    )(stores, fresh, g, rows, begin, keep)


def _held(last: jax.Array, slots: int) -> jax.Array:
    """Position in each slot of a ring written up to position `last` [B, 1]; negative if none."""
    return last - (last - jnp.arange(slots)[None]) % slots


def init_cache(config: DecoderConfig, batch: int, length: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache for `batch` rows of up to `length` tokens."""
    full = -(-length // CACHE_BLOCK) * CACHE_BLOCK

    def zeros() -> tuple[jax.Array, ...]:
        arrays = []
        for layer_type in config.pattern:
            slots = min(config.sliding_window, full) if layer_type == SLIDING else full
            shape = (config.n_groups, batch, slots, config.n_kv_heads, config.head_dim)
            array = jnp.zeros(shape, dtype)
            arrays.append(constrain(array, *CACHE_AXES))
        return tuple(arrays)

    return KVCache(zeros(), zeros())


def parameters(model: Decoder) -> dict[str, nnx.Param]:
    """The weights by path, such as `blocks.0.attention.q`, in a fixed order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        model, is_leaf=lambda node: isinstance(node, nnx.Param)
    )
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def abstract(config: DecoderConfig, dtype: jnp.dtype = jnp.float32) -> Decoder:
    """The model with jax.ShapeDtypeStruct in place of arrays: nothing is allocated."""
    return jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(params=0), dtype=dtype))


def cast(model: Decoder, dtype: jnp.dtype) -> Decoder:
    """The model with every weight in `dtype`."""
    return jax.tree.map(lambda x: x.astype(dtype), model)
