"""Peak host memory of an import, over the bytes that this host's devices hold.

    python tests/benchmarks/import_memory.py --gigabytes=4 [--devices=8] [--mesh=fsdp=8]

Writes a random bf16 checkpoint of that size in shards to a temporary folder (--folder), loads it in
a fresh process and prints one JSON line. The ratio leaves out what the process weighs before the
import begins.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

GIB = 1 << 30


def write_checkpoint(folder: Path, size: int, shard_bytes: int) -> None:
    """A Llama checkpoint of about `size` bytes, bf16, in shards of at most `shard_bytes`."""
    from retmask_jax import safetensors_io
    from retmask_jax.checkpoint_io import INDEX
    from retmask_jax.models import config_from_hf, weight_names
    from retmask_jax.models.decoder import abstract, parameters
    from retmask_jax.weight_layout import hf_shape

    width = 2048 if size >= GIB else 512
    hf = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32 * width,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    layer_bytes = 2 * width * width * (3 + 12)
    hf["num_hidden_layers"] = max(1, (size - 2 * 2 * 32 * width * width) // layer_bytes)
    config = config_from_hf(hf)
    params = parameters(abstract(config))
    tensors = [
        (s.name, hf_shape(params[s.path].shape, s), "bfloat16") for s in weight_names(config)
    ]
    shards, filled = [[]], 0
    for name, shape, dtype in tensors:
        nbytes = 2 * int(np.prod(shape))
        if filled + nbytes > shard_bytes and shards[-1]:
            shards.append([])
            filled = 0
        shards[-1].append((name, shape, dtype))
        filled += nbytes
    rng, weight_map = np.random.default_rng(0), {}
    noise = rng.integers(0, 1 << 16, 1 << 22, np.uint16) & 0x3FFF  # finite, small, positive
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= {tensor: name for tensor, _, _ in shard}
        with (folder / name).open("wb") as file:
            file.write(safetensors_io.header(shard))
            for _, shape, _ in shard:
                left = int(np.prod(shape))
                while left:
                    part = noise[: min(left, noise.size)]
                    file.write(part.tobytes())
                    left -= part.size
    (folder / "config.json").write_text(json.dumps(hf))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def peak_bytes() -> int:
    """VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def measure(folder: str, mesh_axes: dict[str, int]) -> dict[str, float]:
    """Loads in this process; the peak is counted from before the import."""
    import time

    import jax

    from retmask_jax.checkpoint_io import load_model, open_source

    mesh = None
    if mesh_axes:
        types = (jax.sharding.AxisType.Auto,) * len(mesh_axes)
        mesh = jax.make_mesh(tuple(mesh_axes.values()), tuple(mesh_axes), axis_types=types)
    jax.block_until_ready(jax.numpy.zeros(8))
    source = open_source(folder)
    before, start = peak_bytes(), time.perf_counter()
    model = jax.block_until_ready(load_model(source, dtype="bfloat16", mesh=mesh))
    seconds, after = time.perf_counter() - start, peak_bytes()
    held = sum(s.data.nbytes for x in jax.tree.leaves(model) for s in x.addressable_shards)
    return {
        "held_bytes": held,
        "peak_bytes": after - before,
        "ratio": (after - before) / held,
        "seconds": seconds,
    }


def run(size: int, devices: int, mesh: str, folder: str | None = None) -> dict[str, float]:
    """Writes the checkpoint and measures its import in a fresh process."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        write_checkpoint(Path(place), size, max(size // 4, 1))
        flags = f"--xla_force_host_platform_device_count={devices}"
        env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        command = [sys.executable, __file__, "--measure", place, f"--mesh={mesh}"]
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
        return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--mesh", default="", help="fsdp=4,tensor=2; empty: one device, no mesh")
    parser.add_argument("--folder", help="where to put the checkpoint")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        axes = dict(part.split("=") for part in args.mesh.split(",") if part)
        print(json.dumps(measure(args.measure, {k: int(v) for k, v in axes.items()})))
    else:
        print(json.dumps(run(int(args.gigabytes * 1e9), args.devices, args.mesh, args.folder)))


if __name__ == "__main__":
    main()
