"""Speed and memory of the chunked log-prob head against logits of the whole batch.

    python tests/benchmarks/logprob_head.py [--rows 8 --length 256 --vocab 49152 --width 576]

Prints, for each chunk size and for the plain head, the milliseconds of forward and backward pass
and the megabytes of temporary memory that the compiled program asks for.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from retmask_jax.logprobs import token_logprobs


def plain(
    hidden: jax.Array, unembed: jax.Array, targets: jax.Array, mask: jax.Array, _: int
) -> jax.Array:
    """The same log-probs from logits [R, T, V]."""
    weight = unembed.astype(hidden.dtype)
    logits = jnp.einsum("rtd,vd->rtv", hidden, weight, preferred_element_type=jnp.float32)
    logps = jax.nn.log_softmax(logits)
    return jnp.where(mask, jnp.take_along_axis(logps, targets[..., None], 2)[..., 0], 0.0)


def measure(head, args: argparse.Namespace, chunk: int) -> tuple[float, float, jax.Array]:
    """Milliseconds forward and backward, megabytes of temporaries, norm of the gradient."""
    keys = jax.random.split(jax.random.key(0), 3)
    dtype = jnp.dtype(args.dtype)
    hidden = jax.random.normal(keys[0], (args.rows, args.length, args.width), dtype)
    unembed = 0.02 * jax.random.normal(keys[1], (args.vocab, args.width))
    targets = jax.random.randint(keys[2], (args.rows, args.length), 0, args.vocab)
    at = jnp.arange(args.length)
    mask = jnp.broadcast_to(
        (at >= args.length * args.prompt) & (at < args.length * args.filled), targets.shape
    )

    def loss(hidden: jax.Array, unembed: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(head(hidden, unembed, targets, mask, chunk)))

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, unembed).compile()
    grads = jax.block_until_ready(compiled(hidden, unembed))
    times = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(hidden, unembed))
        times.append(time.perf_counter() - start)
    temporary = compiled.memory_analysis().temp_size_in_bytes / 1e6
    return 1e3 * float(np.median(times)), temporary, jnp.linalg.norm(grads[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompt", type=float, default=0.25, help="share of a row not scored")
    parser.add_argument("--filled", type=float, default=0.75, help="share of a row not padding")
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"{'head':>10} {'ms':>9} {'temporary MB':>13} {'|dW|':>12}")
    for chunk in args.chunks:
        took, memory, norm = measure(token_logprobs, args, chunk)
        print(f"{chunk:>10} {took:>9.1f} {memory:>13.1f} {norm:>12.6f}")
    took, memory, norm = measure(plain, args, 0)
    print(f"{'plain':>10} {took:>9.1f} {memory:>13.1f} {norm:>12.6f}")


if __name__ == "__main__":
    main()
