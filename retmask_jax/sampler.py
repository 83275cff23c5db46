"""Sampling from one set of weights under several head masks, in one decode batch.

A fixed number of slots decodes in a compiled loop. Slots that finish are refilled while the others
decode; prompts are prefilled a chunk at a time straight into their slots' rows of the KV cache.
Every row has its own mask (a policy out of a bank) and its own random key, so that a response does
not depend on what else is in the batch.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from retmask_jax.models.decoder import CACHE_AXES, Decoder, KVCache, init_cache
from retmask_jax.models.partitioning import activation_spec

_MAX_STEPS = 64  # decode steps in one compiled call, so that finished rows are seen in time
_MIN_CHUNK = 32  # narrowest prefill; widths double from here, which bounds the compilations


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to be continued.

    `policy` is a row of the sampler's bank; `seed` (64 bit) is this row's random key, see
    `request_seed`.
    """

    id: str
    tokens: tuple[int, ...]
    policy: int = 0
    seed: int = 0
    max_new_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """A sampled continuation.

    `tokens` includes the id that stopped it. `top` int32 [steps, L, N], where asked for: the key
    position that each head attended to most in the step that chose tokens[step].
    """

    id: str
    tokens: tuple[int, ...]
    finish_reason: str  # "stop" or "length"
    top: np.ndarray | None = None


def request_seed(seed: int, *parts: object) -> int:
    """A 64-bit key that depends on the run's seed and on what a row is, and on nothing else."""
    text = "\x1f".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def choose(logits: jax.Array, keys: jax.Array, *, temperature: float, top_p: float) -> jax.Array:
    """The next token of each row.

    Nucleus sampling (arXiv 1904.09751): of the tokens sorted by probability, those before which
    less than `top_p` has been seen; always at least the first.

    Args:
      logits: float32 [B, V].
      keys: one typed PRNG key a row, [B].
      temperature: 0 takes the largest logit.
      top_p: in [0, 1].

    Returns:
      int32 [B].
    """
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits.astype(jnp.float32) / temperature
    draw = jax.vmap(jax.random.categorical)
    if top_p >= 1:
        return draw(keys, logits).astype(jnp.int32)
    order = jnp.argsort(logits, axis=-1, descending=True)
    logits = jnp.take_along_axis(logits, order, axis=-1)
    p = jax.nn.softmax(logits, axis=-1)
    before = jnp.cumsum(p, axis=-1) - p
    kept = (before < top_p).at[:, 0].set(True)
    rank = draw(keys, jnp.where(kept, logits, -jnp.inf))
    return jnp.take_along_axis(order, rank[:, None], axis=-1)[:, 0].astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What the compiled programs depend on besides shapes."""

    max_new_tokens: int
    temperature: float
    top_p: float
    stop_ids: tuple[int, ...]
    report_top: bool


class _Slots(NamedTuple):
    """The decode batch, [B] each: the token to feed next, its position, what has been sampled."""

    cache: KVCache
    token: jax.Array
    position: jax.Array
    sampled: jax.Array  # how many tokens so far
    limit: jax.Array  # how many at the most
    active: jax.Array
    stopped: jax.Array
    policy: jax.Array
    key: jax.Array  # uint32 [B, 2]
    out: jax.Array  # int32 [B, M]
    top: jax.Array  # int32 [M, L, B, N], or empty


class Sampler:
    """Continues prompts; see the module's text.

    Args:
      model: the weights, for every policy.
      bank: bool [P, L, N], the heads that each policy keeps; None: one policy that keeps all.
      slots: rows B that decode together.
      max_length: longest prompt and response together, in tokens.
      max_new_tokens: M, longest response.
      temperature: 0 is greedy.
      top_p: nucleus.
      stop_ids: tokens that end a response.
      report_top: completions tell where each head looked.
      prefill_chunk: prompt tokens of a row in one forward pass.
      mesh: where the weights lie; rows are split over its data axes.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        bank: np.ndarray | None = None,
        slots: int,
        max_length: int,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop_ids: tuple[int, ...] = (),
        report_top: bool = False,
        prefill_chunk: int = 512,
        mesh: Mesh | None = None,
    ) -> None:
        config = model.config
        self._model, self._mesh = model, mesh
        self._bank = None if bank is None else jnp.asarray(bank, jnp.float32)
        self._slots, self._max_length = slots, max_length
        self._refill = max(1, slots // 4)
        self._chunk = max(prefill_chunk, _MIN_CHUNK)
        self._spec = _Spec(max_new_tokens, temperature, top_p, tuple(stop_ids), report_top)
        self._top_shape = (max_new_tokens, config.n_layers, slots, config.n_heads)

    def __call__(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Completions in the order in which they end.

        Raises:
          ValueError: a request is empty or longer than the sampler was made for; callers filter.
        """
        waiting = iter(requests)
        running: dict[int, Request] = {}
        free = list(range(self._slots))
        with jax.set_mesh(self._mesh) if self._mesh is not None else nullcontext():
            slots = self._empty()
            exhausted = False
            while running or not exhausted:
                while free and not exhausted:
                    group = _take(waiting, min(self._refill, len(free)))
                    exhausted = len(group) < min(self._refill, len(free))
                    if group:
                        rows = [free.pop(0) for _ in group]
                        running.update(zip(rows, group, strict=True))
                        slots = self._admit(slots, rows, group)
                if not running:
                    break
                enough = self._slots if exhausted else len(free) + self._refill
                slots = _decode(self._model, slots, self._bank, jnp.int32(enough), self._spec)
                active = np.asarray(slots.active)
                done = [row for row in running if not active[row]]
                if done:
                    yield from self._collect(slots, [(row, running.pop(row)) for row in done])
                    free = sorted(free + done)

    @property
    def prefill_shape(self) -> tuple[int, int]:
        """Rows and tokens of the widest prefill."""
        return self._refill, self._chunk

    def abstract_slots(self) -> _Slots:
        """The decode batch as shapes, the cache placed on the mesh, which there must be."""
        slots = jax.eval_shape(self._empty)

        def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            spec = activation_spec(CACHE_AXES, x.shape, self._mesh)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self._mesh, spec))

        return slots._replace(cache=jax.tree.map(place, slots.cache))

    def lower_decode(self) -> jax.stages.Lowered:
        """Traces the decode loop; the model and the mesh's devices may be abstract."""
        with jax.set_mesh(self._mesh):
            return _decode.lower(
                self._model, self.abstract_slots(), self._bank, np.int32(1), self._spec
            )

    def lower_prefill(self) -> jax.stages.Lowered:
        """Traces the widest prefill; the model and the mesh's devices may be abstract."""
        n, chunk = self.prefill_shape
        column = jax.ShapeDtypeStruct((n,), jnp.int32)
        tokens = jax.ShapeDtypeStruct((n, chunk), jnp.int32)
        cache = self.abstract_slots().cache
        with jax.set_mesh(self._mesh):
            return _prefill.lower(
                self._model, cache, tokens, np.int32(0), column, column, column, self._bank
            )

    def _empty(self) -> _Slots:
        b, spec = self._slots, self._spec
        dtype = jax.tree.leaves(self._model)[0].dtype
        ints = functools.partial(jnp.zeros, dtype=jnp.int32)
        return _Slots(
            cache=_new_cache(self._model.config, b, self._max_length, dtype),
            token=ints((b,)),
            position=ints((b,)),
            sampled=ints((b,)),
            limit=ints((b,)),
            active=jnp.zeros((b,), bool),
            stopped=jnp.zeros((b,), bool),
            policy=ints((b,)),
            key=jnp.zeros((b, 2), jnp.uint32),
            out=ints((b, spec.max_new_tokens)),
            top=ints(self._top_shape if spec.report_top else (0,)),
        )

    def _admit(self, slots: _Slots, rows: list[int], group: list[Request]) -> _Slots:
        """Prefills all but the last token of each prompt, which the first decode step feeds."""
        limits = []
        for request in group:
            limit = self._spec.max_new_tokens
            if request.max_new_tokens is not None:
                limit = min(limit, request.max_new_tokens)
            if not request.tokens or len(request.tokens) + limit > self._max_length:
                raise ValueError(
                    f"{request.id}: {len(request.tokens)} prompt tokens and {limit} new ones do "
                    f"not fit 1..{self._max_length}"
                )
            limits.append(limit)
        n = self._refill
        lengths = np.zeros(n, np.int32)
        lengths[: len(group)] = [len(request.tokens) - 1 for request in group]
        tokens = np.zeros((n, -(-max(1, lengths.max()) // self._chunk) * self._chunk), np.int32)
        for i, request in enumerate(group):
            tokens[i, : lengths[i]] = request.tokens[:-1]
        where = np.full(n, self._slots, np.int32)  # out of bounds: a row of padding
        where[: len(rows)] = rows
        policies = np.zeros(n, np.int32)
        policies[: len(group)] = [request.policy for request in group]
        cache = slots.cache
        for start in range(0, int(lengths.max()), self._chunk):
            width = _bucket(min(int(lengths.max()) - start, self._chunk), self._chunk)
            cache = _prefill(
                self._model,
                cache,
                tokens[:, start : start + width],
                np.int32(start),
                lengths,
                np.minimum(where, self._slots - 1),
                policies,
                self._bank,
            )

        def column(values: list, dtype: type = np.int32, width: tuple = ()) -> np.ndarray:
            filled = np.zeros((n, *width), dtype)
            filled[: len(group)] = values
            return filled

        return _seat(
            slots._replace(cache=cache),
            where,
            column([request.tokens[-1] for request in group]),
            lengths,
            column(limits),
            policies,
            column([divmod(r.seed % 2**64, 2**32) for r in group], np.uint32, (2,)),
        )

    def _collect(self, slots: _Slots, done: list[tuple[int, Request]]) -> Iterator[Completion]:
        sampled, stopped, out = (np.asarray(x) for x in (slots.sampled, slots.stopped, slots.out))
        for row, request in done:
            n = int(sampled[row])
            yield Completion(
                id=request.id,
                tokens=tuple(int(token) for token in out[row, :n]),
                finish_reason="stop" if stopped[row] else "length",
                top=np.asarray(slots.top[:n, :, row]) if self._spec.report_top else None,
            )


def _take(requests: Iterator[Request], n: int) -> list[Request]:
    return [request for _, request in zip(range(n), requests, strict=False)]


def _bucket(n: int, most: int) -> int:
    width = _MIN_CHUNK
    while width < n:
        width *= 2
    return min(width, most)


_new_cache = jax.jit(init_cache, static_argnums=(0, 1, 2, 3))


def _gates(bank: jax.Array | None, policy: jax.Array) -> jax.Array | None:
    """Bank [P, L, N] and policies [B] -> gates [L, B, N]."""
    return None if bank is None else jnp.moveaxis(bank[policy], 0, 1)


@functools.partial(jax.jit, donate_argnums=(1,))
def _prefill(
    model: Decoder,
    cache: KVCache,
    tokens: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    rows: jax.Array,
    policy: jax.Array,
    bank: jax.Array | None,
) -> KVCache:
    """Adds tokens [R, T] at positions start .. to the cache's `rows` [R], up to `lengths` [R]."""
    positions = start + jnp.arange(tokens.shape[1])[None]
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    positions = jnp.broadcast_to(positions, tokens.shape)
    gates = _gates(bank, policy)
    return model(tokens, positions, segments, cache=cache, rows=rows, gates=gates).cache


@functools.partial(jax.jit, donate_argnums=(0,))
def _seat(
    slots: _Slots,
    where: jax.Array,
    token: jax.Array,
    position: jax.Array,
    limit: jax.Array,
    policy: jax.Array,
    key: jax.Array,
) -> _Slots:
    def put(old: jax.Array, new: jax.Array | int | bool) -> jax.Array:
        return old.at[where].set(new, mode="drop")

    return slots._replace(
        token=put(slots.token, token),
        position=put(slots.position, position),
        sampled=put(slots.sampled, 0),
        limit=put(slots.limit, limit),
        active=put(slots.active, limit > 0),
        stopped=put(slots.stopped, False),
        policy=put(slots.policy, policy),
        key=put(slots.key, key),
    )


@functools.partial(jax.jit, static_argnums=(4,), donate_argnums=(1,))
def _decode(
    model: Decoder, slots: _Slots, bank: jax.Array | None, enough: jax.Array, spec: _Spec
) -> _Slots:
    """Decodes until `enough` slots are free, none is active, or _MAX_STEPS have passed."""
    gates = _gates(bank, slots.policy)
    keys = jax.random.wrap_key_data(slots.key, impl="threefry2x32")

    def going(carry: tuple[jax.Array, _Slots]) -> jax.Array:
        steps, s = carry
        free = jnp.sum(~s.active)
        return (steps < _MAX_STEPS) & (free < enough) & jnp.any(s.active)

    def step(carry: tuple[jax.Array, _Slots]) -> tuple[jax.Array, _Slots]:
        steps, s = carry
        live = s.active.astype(jnp.int32)
        output = model(
            s.token[:, None],
            s.position[:, None],
            live[:, None],
            cache=s.cache,
            gates=gates,
            report_top=spec.report_top,
        )
        logits = model.logits(output.hidden[:, 0])
        step_keys = jax.vmap(jax.random.fold_in)(keys, s.sampled)
        token = choose(logits, step_keys, temperature=spec.temperature, top_p=spec.top_p)
        rows = jnp.arange(token.shape[0])
        at = jnp.where(s.active, s.sampled, spec.max_new_tokens)  # out of bounds: not written
        top = s.top
        if spec.report_top:
            top = top.at[at, :, rows].set(jnp.moveaxis(output.top[:, :, 0], 1, 0), mode="drop")
        stop = jnp.isin(token, jnp.asarray(spec.stop_ids, jnp.int32)) & s.active
        sampled = s.sampled + live
        return steps + 1, s._replace(
            cache=output.cache,
            token=jnp.where(s.active, token, s.token),
            position=s.position + live,
            sampled=sampled,
            active=s.active & ~stop & (sampled < s.limit),
            stopped=s.stopped | stop,
            out=s.out.at[rows, at].set(token, mode="drop"),
            top=top,
        )

    return jax.lax.while_loop(going, step, (jnp.int32(0), slots))[1]
