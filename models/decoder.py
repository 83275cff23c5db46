"""Tokens to hidden states: embedding, scanned blocks, final norm.

Logits of a whole sequence are never formed here: `Decoder.logits` is for the few positions that
a caller picks.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from retmask_jax.models import attention
from retmask_jax.models.cache import KVCache, LayerCache
from retmask_jax.models.config import SLIDING, DecoderConfig
from retmask_jax.models.kernels import row_attention
from retmask_jax.models.layers import rms_norm, rope_table, scale, weight
from retmask_jax.models.partitioning import constrain


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
            they come. Rows that are all padding write nothing. Where the cache's rows are split
            over devices, B is too, and each device's part of `rows` names rows that it holds.
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
                    store = LayerCache(cache, rows, p, g, positions, segments, window)
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
