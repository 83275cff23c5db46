"""Sampling from one set of weights under several head masks, in one decode batch.

A fixed number of slots decodes in a compiled loop. Slots that finish are refilled while the others
decode; prompts are prefilled a chunk at a time straight into their slots' rows of the KV cache.
Every row has its own mask (a policy out of a bank) and its own random key, so that a response does
not depend on what else is in the batch.

On a mesh each device prefills and decodes slots of its own. The processes that share a mesh make
the same calls with the same requests, and each gets all completions.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from retmask_jax.mesh import batch_ways
from retmask_jax.models.cache import CACHE_AXES, KVCache, init_cache
from retmask_jax.models.config import DecoderConfig
from retmask_jax.models.decoder import Decoder
from retmask_jax.models.partitioning import activation_spec, constrain

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
      slots: rows that decode together, for each process of the mesh. Rounded up to a number of rows
        B that the mesh's data axes share out evenly.
      max_length: longest prompt and response together, in tokens.
      max_new_tokens: M, longest response.
      temperature: 0 is greedy.
      top_p: nucleus.
      stop_ids: tokens that end a response.
      report_top: completions tell where each head looked.
      prefill_chunk: prompt tokens of a row in one forward pass.
      mesh: where the weights lie; rows are split over data and fsdp.
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
        self._bank = None if bank is None else np.asarray(bank, np.float32)
        self._ways, n_processes = 1, 1
        if mesh is not None:
            self._ways = batch_ways(mesh)
            n_processes = len({device.process_index for device in mesh.devices.flat})
        self._own = -(-slots * n_processes // self._ways)  # slots of each of the ways
        self._refill = max(1, self._own // 4)  # of those, prefilled at once
        self.slots, self._max_length = self._own * self._ways, max_length
        self._chunk = max(prefill_chunk, _MIN_CHUNK)
        self._spec = _Spec(max_new_tokens, temperature, top_p, tuple(stop_ids), report_top)
        self._top_shape = (max_new_tokens, config.n_layers, self.slots, config.n_heads)

    def __call__(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Completions in the order in which they end.

        Raises:
          ValueError: a request is empty or longer than the sampler was made for; callers filter.
        """
        waiting = iter(requests)
        running: dict[int, Request] = {}
        free = set(range(self.slots))
        with jax.set_mesh(self._mesh) if self._mesh is not None else nullcontext():
            slots = self._empty()
            exhausted = False
            while running or not exhausted:
                while free and not exhausted:
                    rows = self._next_rows(free)
                    group = list(itertools.islice(waiting, len(rows)))
                    exhausted = len(group) < len(rows)
                    if group:
                        admitted = dict(zip(rows, group, strict=False))
                        running.update(admitted)
                        free.difference_update(admitted)
                        slots = self._admit(slots, admitted)
                if not running:
                    break
                enough = self.slots if exhausted else self._refill * self._ways
                slots = _decode(self._model, slots, self._bank, np.int32(enough), self._spec)
                active = np.asarray(slots.active)
                done = [row for row in running if not active[row]]
                if done:
                    yield from self._collect(slots, [(row, running.pop(row)) for row in done])
                    free.update(done)

    @property
    def prefill_shape(self) -> tuple[int, int]:
        """Rows and tokens of the widest prefill."""
        return self._refill * self._ways, self._chunk

    def abstract_slots(self) -> _Slots:
        """The decode batch as shapes placed on the mesh, which there must be."""

        def place(x: jax.ShapeDtypeStruct, *axes: str | None) -> jax.ShapeDtypeStruct:
            spec = activation_spec(axes, x.shape, self._mesh)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self._mesh, spec))

        return _by_axes(place, jax.eval_shape(self._empty))

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
        dtype = jax.tree.leaves(self._model)[0].dtype
        top = self._top_shape if self._spec.report_top else (0,)
        new = self._spec.max_new_tokens
        return _empty(self._model.config, self.slots, self._max_length, new, top, dtype)

    def _next_rows(self, free: set[int]) -> list[int]:
        """The free slots that one prefill fills: as many of each way as it has places for."""
        ranked = []
        for way in range(self._ways):
            own = sorted(row for row in free if row // self._own == way)
            ranked += [(place, row) for place, row in enumerate(own[: self._refill])]
        return [row for _, row in sorted(ranked)]

    def _admit(self, slots: _Slots, group: dict[int, Request]) -> _Slots:
        """Prefills all but the last token of each slot's prompt; the first decode step feeds that.

        A prefill has `_refill` places for slots of each way.
        """
        limits = []
        for request in group.values():
            limit = self._spec.max_new_tokens
            if request.max_new_tokens is not None:
                limit = min(limit, request.max_new_tokens)
            if not request.tokens or len(request.tokens) + limit > self._max_length:
                raise ValueError(
                    f"{request.id}: {len(request.tokens)} prompt tokens and {limit} new ones do "
                    f"not fit 1..{self._max_length}"
                )
            limits.append(limit)
        n = self._refill * self._ways
        taken = Counter()
        places = []
        for slot in group:
            way = slot // self._own
            places.append(way * self._refill + taken[way])
            taken[way] += 1

        def column(values: Iterable, dtype: type = np.int32, width: tuple = ()) -> np.ndarray:
            filled = np.zeros((n, *width), dtype)
            filled[places] = list(values)
            return filled

        lengths = column(len(request.tokens) - 1 for request in group.values())
        tokens = np.zeros((n, -(-max(1, lengths.max()) // self._chunk) * self._chunk), np.int32)
        for place, request in zip(places, group.values(), strict=True):
            tokens[place, : lengths[place]] = request.tokens[:-1]
        rows = np.repeat(np.arange(self._ways, dtype=np.int32) * self._own, self._refill)
        rows[places] = list(group)
        where = np.full(n, self.slots, np.int32)  # out of bounds: a place that is not used
        where[places] = list(group)
        policies = column(request.policy for request in group.values())
        cache = slots.cache
        for start in range(0, int(lengths.max()), self._chunk):
            width = _bucket(min(int(lengths.max()) - start, self._chunk), self._chunk)
            cache = _prefill(
                self._model,
                cache,
                tokens[:, start : start + width],
                np.int32(start),
                lengths,
                rows,
                policies,
                self._bank,
            )
        seeds = (divmod(request.seed % 2**64, 2**32) for request in group.values())
        return _seat(
            slots._replace(cache=cache),
            where,
            column(request.tokens[-1] for request in group.values()),
            lengths,
            column(limits),
            policies,
            column(seeds, np.uint32, (2,)),
        )

    def _collect(self, slots: _Slots, done: list[tuple[int, Request]]) -> Iterator[Completion]:
        fields = (slots.sampled, slots.stopped, slots.out, slots.top)
        sampled, stopped, out, top = (np.asarray(x) for x in fields)
        for row, request in done:
            n = int(sampled[row])
            yield Completion(
                id=request.id,
                tokens=tuple(int(token) for token in out[row, :n]),
                finish_reason="stop" if stopped[row] else "length",
                top=top[:n, :, row] if self._spec.report_top else None,
            )


def _bucket(n: int, most: int) -> int:
    width = _MIN_CHUNK
    while width < n:
        width *= 2
    return min(width, most)


def _by_axes(place: Callable, slots: _Slots) -> _Slots:
    """Calls `place` with each array and its logical axes.

    All but the cache is whole everywhere, so that every process can read it.
    """
    cache = jax.tree.map(lambda x: place(x, *CACHE_AXES), slots.cache)
    rest = jax.tree.map(lambda x: place(x, *(None,) * x.ndim), slots._replace(cache=None))
    return rest._replace(cache=cache)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def _empty(
    config: DecoderConfig,
    b: int,
    max_length: int,
    max_new_tokens: int,
    top_shape: tuple[int, ...],
    dtype: jnp.dtype,
) -> _Slots:
    ints = functools.partial(jnp.zeros, dtype=jnp.int32)
    slots = _Slots(
        cache=init_cache(config, b, max_length, dtype),
        token=ints((b,)),
        position=ints((b,)),
        sampled=ints((b,)),
        limit=ints((b,)),
        active=jnp.zeros((b,), bool),
        stopped=jnp.zeros((b,), bool),
        policy=ints((b,)),
        key=jnp.zeros((b, 2), jnp.uint32),
        out=ints((b, max_new_tokens)),
        top=ints(top_shape),
    )
    return _by_axes(constrain, slots)


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

    slots = slots._replace(
        token=put(slots.token, token),
        position=put(slots.position, position),
        sampled=put(slots.sampled, 0),
        limit=put(slots.limit, limit),
        active=put(slots.active, limit > 0),
        stopped=put(slots.stopped, False),
        policy=put(slots.policy, policy),
        key=put(slots.key, key),
    )
    return _by_axes(constrain, slots)


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

    return _by_axes(constrain, jax.lax.while_loop(going, step, (jnp.int32(0), slots))[1])
