"""Parity with the CPU and speed of one accelerator; `gpu.sh` beside it says more."""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from retmask_jax import dpo
from retmask_jax.batches import Batch
from retmask_jax.configs import base
from retmask_jax.mesh import make_mesh
from retmask_jax.models import config_from_hf
from retmask_jax.models.config import DecoderConfig
from retmask_jax.models.decoder import Decoder, abstract, cast, parameters
from retmask_jax.models.layers import Scale
from retmask_jax.sampler import Request, Sampler

# Dense bf16 FLOP/s and bytes/s of memory by name; NVIDIA's data sheets, October 2025.
CHIPS = {
    "GH200": (989e12, 4.0e12),
    "H200": (989e12, 4.8e12),
    "H100 PCIe": (756e12, 2.0e12),
    "H100 NVL": (835e12, 3.9e12),
    "H100": (989e12, 3.35e12),
    "B200": (2250e12, 8.0e12),
    "A100-SXM4-80GB": (312e12, 2.04e12),
    "A100": (312e12, 1.56e12),
    "L40S": (362e12, 0.86e12),
    "L4": (121e12, 0.3e12),
}

# d_model, d_ff, layers, heads, key heads, vocabulary, tied; the last four are the shapes of
# SmolLM2-360M, Llama-3.2-1B, Llama-3.2-3B and Llama-3.1-8B.
SHAPES = {
    "tiny": (256, 512, 2, 4, 2, 512, True),
    "360m": (960, 2560, 32, 15, 5, 49152, True),
    "1b": (2048, 8192, 16, 32, 8, 128256, True),
    "3b": (3072, 8192, 28, 24, 8, 128256, True),
    "8b": (4096, 14336, 32, 32, 8, 128256, False),
}


class Work(NamedTuple):
    """How much is timed: tokens, rows and counts."""

    micro_steps: int
    rows: int
    row_length: int
    slots: int
    prompt: int
    new: tuple[int, int]  # decode steps of a short and a long run
    context: int  # of the prefill


WORK = Work(4, 16, 1024, 16, 512, (64, 256), 16384)
TINY_WORK = Work(2, 4, 64, 4, 33, (4, 12), 96)


class Check(NamedTuple):
    """A comparison with the CPU: how far off, and how far off it may be."""

    name: str
    difference: float
    limit: float

    @property
    def passed(self) -> bool:
        """Not a number is not a pass."""
        return self.difference <= self.limit


def shape_config(name: str) -> DecoderConfig:
    """The dimensions of one of SHAPES."""
    d_model, d_ff, layers, heads, kv_heads, vocab, tied = SHAPES[name]
    return config_from_hf(
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocab,
            "hidden_size": d_model,
            "intermediate_size": d_ff,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "tie_word_embeddings": tied,
        }
    )


def weight_count(config: DecoderConfig) -> int:
    """All weights, the embedding too."""
    return sum(math.prod(p.shape) for p in parameters(abstract(config)).values())


def matrix_count(config: DecoderConfig) -> int:
    """Weights of the layers' matrices: each is a multiplication and an addition a token."""
    return sum(
        math.prod(p.shape)
        for name, p in parameters(abstract(config)).items()
        if name.startswith("blocks.") and not isinstance(p, Scale)
    )


def forward_flops(config: DecoderConfig, length: int, scored: int) -> float:
    """FLOPs of a row of `length` tokens, causal, with logits at `scored` positions."""
    attention = 2 * config.n_layers * config.n_heads * config.head_dim * length**2
    head = 2 * config.vocab_size * config.d_model * scored
    return 2 * matrix_count(config) * length + attention + head


def decode_bytes(config: DecoderConfig, rows: int, context: float) -> float:
    """Bytes that a decode step has to read in bf16: weights once, keys and values of each row."""
    weights = weight_count(config)
    if not config.tied:
        weights -= config.vocab_size * config.d_model  # of the embedding only the rows looked up
    cached = 2 * config.n_layers * config.n_kv_heads * config.head_dim
    return 2 * (weights + rows * context * cached)


def largest(memory: float, bytes_a_weight: float) -> str:
    """The largest of SHAPES that takes at most three quarters of the memory."""
    fitting = [n for n in SHAPES if weight_count(shape_config(n)) * bytes_a_weight < 0.75 * memory]
    return fitting[-1]


def timed(function: Callable[[], Any], repeats: int = 3) -> float:
    """Median seconds; the first call, which compiles, is left out."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(function())
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[1:]))


def ceilings(tiny: bool) -> tuple[float, float]:
    """Measured FLOP/s of a large bf16 product, and bytes/s of reading and writing an array."""
    n = 512 if tiny else 8192
    square = jnp.ones((n, n), jnp.bfloat16)
    multiply = jax.jit(jnp.matmul)
    flops = 2 * n**3 / timed(lambda: multiply(square, square))
    array = jnp.ones((1 << (22 if tiny else 28),), jnp.float32)
    add = jax.jit(lambda x: x + 1)
    return flops, 2 * array.nbytes / timed(lambda: add(array))


def random_model(config: DecoderConfig, dtype: Any) -> Decoder:
    """Random weights, made on the device."""
    return jax.jit(lambda: Decoder(config, rngs=nnx.Rngs(params=0), dtype=dtype))()


def random_tokens(config: DecoderConfig, *shape: int) -> np.ndarray:
    """int32 ids."""
    return np.random.default_rng(0).integers(0, config.vocab_size, shape, np.int32)


def random_requests(config: DecoderConfig, n: int, length: int, new: int) -> list[Request]:
    """Prompts of one length, alternately of the two policies."""
    rows = random_tokens(config, n, length).tolist()
    return [Request(str(i), tuple(row), i % 2, i, new) for i, row in enumerate(rows)]


def random_bank(config: DecoderConfig) -> np.ndarray:
    """Two policies: all heads, and one head in eight masked."""
    keep = np.ones((2, config.n_layers, config.n_heads), bool)
    keep[1].flat[::8] = False
    return keep


class Step:
    """The train step on one device, with its state, which it carries along.

    The weights are a copy of `model`, or random ones that are made on the device.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: Any,
        work: Work,
        device: jax.Device,
        model: Decoder | None = None,
    ) -> None:
        train = base.get_config().train
        self.mesh = make_mesh(base.get_config().mesh, [device])
        like = abstract(config, jnp.float32)
        tx = dpo.optimizer(train, 100, like)
        placed = dpo.state_shardings(like, tx, self.mesh)
        self.function = dpo.make_step(like, tx, train, 100, dtype, self.mesh)
        shape = (work.micro_steps, work.rows)
        self.scored = work.row_length - work.row_length // 8
        batch = Batch(
            tokens=random_tokens(config, *shape, work.row_length),
            prompt_lengths=np.full(shape, work.row_length - self.scored, np.int32),
            lengths=np.full(shape, work.row_length, np.int32),
            reference_logps=np.zeros(shape, np.float32),
            weights=np.ones((work.micro_steps, work.rows // 2), np.float32),
        )
        self.batch = jax.device_put(batch, dpo.batch_shardings(self.mesh))
        if model is None:
            make = jax.jit(
                lambda: dpo.as_params(Decoder(config, rngs=nnx.Rngs(params=0))),
                out_shardings=placed.params,
            )
            params = make()
        else:
            params = jax.tree.map(np.array, dpo.as_params(model))
            params = jax.device_put(params, placed.params)
        init = jax.jit(
            lambda params: dpo.init_state(params, tx), out_shardings=placed, donate_argnums=0
        )
        self.state = init(params)

    def __call__(self) -> dict[str, jax.Array]:
        with jax.set_mesh(self.mesh):
            self.state, metrics = self.function(self.state, self.batch)
        return metrics


def numbers(model: Decoder, device: jax.Device) -> dict[str, np.ndarray]:
    """What is compared, computed on a device: logits, a train step's metrics, greedy tokens."""
    config, work = model.config, TINY_WORK
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        model = jax.device_put(model, device)
        tokens = jnp.asarray(random_tokens(config, 2, 256))
        at = jnp.broadcast_to(jnp.arange(256), tokens.shape)

        @jax.jit
        def logits(model: Decoder) -> jax.Array:
            return model.logits(model(tokens, at, jnp.ones_like(tokens)).hidden)

        metrics = Step(config, jnp.float32, work, device, model)()
        sampler = Sampler(
            model,
            bank=random_bank(config),
            slots=work.slots,
            max_length=work.prompt + work.new[1],
            max_new_tokens=work.new[1],
        )
        done = sampler(random_requests(config, work.slots, work.prompt, work.new[1]))
        return {
            "logits float32": np.asarray(logits(model)),
            "logits bfloat16": np.asarray(logits(cast(model, jnp.bfloat16))),
            "step loss": np.asarray(metrics["loss"]),
            "step gradient": np.asarray(metrics["grad_norm"]),
            "greedy tokens": np.asarray([c.tokens for c in sorted(done, key=lambda c: c.id)]),
        }


def compare(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> list[Check]:
    """Largest differences over the largest value; bf16 is held against the CPU's float32."""
    limits = {
        "logits float32": 1e-4,
        "logits bfloat16": 3e-2,
        "step loss": 1e-4,
        "step gradient": 1e-3,
    }
    checks = []
    for name, limit in limits.items():
        reference = want[name.replace("bfloat16", "float32")]
        off = np.max(np.abs(got[name] - reference)) / np.max(np.abs(reference))
        checks.append(Check(name, float(off), limit))
    wrong = np.mean(got["greedy tokens"] != want["greedy tokens"])
    return [*checks, Check("greedy tokens", float(wrong), 0.0)]


def time_step(name: str, work: Work, device: jax.Device, peak: float) -> dict[str, float]:
    """Seconds, tokens a second and MFU of a train step; FLOPs of recomputation do not count."""
    config = shape_config(name)
    step = Step(config, jnp.bfloat16, work, device)
    seconds = timed(step, 2)
    rows = work.micro_steps * work.rows
    flops = 3 * rows * forward_flops(config, work.row_length, step.scored)
    return {
        "step_seconds": seconds,
        "step_tokens_per_second": rows * work.row_length / seconds,
        "step_mfu": flops / seconds / peak,
    }


def time_decode(model: Decoder, work: Work, bandwidth: float) -> dict[str, float]:
    """A decode step's seconds and bandwidth share, from the difference of two lengths."""
    config, (short, long) = model.config, work.new
    sampler = Sampler(
        model,
        bank=random_bank(config),
        slots=work.slots,
        max_length=work.prompt + long,
        max_new_tokens=long,
    )

    def run(new: int) -> Callable[[], list]:
        requests = random_requests(config, work.slots, work.prompt, new)
        return lambda: list(sampler(requests))

    seconds = (timed(run(long), 2) - timed(run(short), 2)) / (long - short)
    needed = decode_bytes(config, work.slots, work.prompt + (short + long) / 2)
    return {
        "decode_step_seconds": seconds,
        "decode_tokens_per_second": work.slots / seconds,
        "decode_bandwidth_share": needed / seconds / bandwidth,
    }


def time_prefill(model: Decoder, work: Work, peak: float) -> dict[str, float]:
    """Seconds, tokens a second and MFU of reading one long prompt."""
    config = model.config
    sampler = Sampler(
        model,
        bank=random_bank(config),
        slots=1,
        max_length=work.context + 1,
        max_new_tokens=1,
        prefill_chunk=2048,
    )
    requests = random_requests(config, 1, work.context, 1)
    seconds = timed(lambda: list(sampler(requests)), 2)
    return {
        "prefill_seconds": seconds,
        "prefill_tokens_per_second": work.context / seconds,
        "prefill_mfu": forward_flops(config, work.context, 1) / seconds / peak,
    }


def measure(size: str | None) -> Iterator[dict[str, Any]]:
    """Yields the figures, group by group."""
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    memory = 0 if on_cpu else (device.memory_stats() or {}).get("bytes_limit", 16e9)
    size = size or ("tiny" if on_cpu else None)
    train_size, serve_size = size or largest(memory, 24), size or largest(memory, 4)
    tiny = size == "tiny"
    work = TINY_WORK if tiny else WORK
    flops, bandwidth = ceilings(tiny)
    yield {
        "device": device.device_kind,
        "memory_gib": memory / 2**30,
        "measured_tflops": flops / 1e12,
        "measured_gb_per_second": bandwidth / 1e9,
    }
    for name, known in CHIPS.items():
        if name in device.device_kind:
            flops, bandwidth = known
            break
    yield {"peak_tflops": flops / 1e12, "peak_gb_per_second": bandwidth / 1e9}

    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        model = random_model(shape_config("tiny"), jnp.float32)
    got = numbers(model, device)
    checks = compare(got, got if on_cpu else numbers(model, cpu))
    yield {"parity": {c.name: {**c._asdict(), "passed": c.passed} for c in checks}}

    yield {"step_model": train_size} | time_step(train_size, work, device, flops)
    model = random_model(shape_config(serve_size), jnp.bfloat16)
    yield {"decode_model": serve_size} | time_decode(model, work, bandwidth)
    yield {"prefill_model": serve_size} | time_prefill(model, work, flops)


def show(figures: dict[str, Any]) -> None:
    """A line for each figure."""
    for name, value in figures.items():
        if name == "parity":
            for check in value.values():
                verdict = "ok" if check["passed"] else "DIFFERS"
                name = f"parity: {check['name']}"
                print(f"{name:<28} {check['difference']:<12.3g} <= {check['limit']:g} {verdict}")
        else:
            print(f"{name:<28} {value if isinstance(value, str) else f'{value:.4g}'}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SHAPES, help="default: the largest that fits")
    everything: dict[str, Any] = {}
    for figures in measure(parser.parse_args().size):
        show(figures)
        everything |= figures
    print(json.dumps(everything))
    return 0 if all(check["passed"] for check in everything["parity"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
