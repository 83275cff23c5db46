"""tests/benchmarks/gpu.sh: its figures on the CPU, its counts, and that it notices differences."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parent / "benchmarks"
GIB = 2**30

spec = importlib.util.spec_from_file_location("gpu_benchmark", BENCHMARKS / "gpu.py")
gpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu)


def call(*args: str, **env: str) -> subprocess.CompletedProcess:
    command = [BENCHMARKS / "gpu.sh", *args]
    env = os.environ | {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"} | env
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=480)


@pytest.mark.slow
def test_all_figures_on_the_cpu():
    done = call(XLA_FLAGS="--xla_backend_optimization_level=0")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    figures = json.loads(last)
    shown = [name for name in figures if name != "parity"]
    assert [line.split()[0] for line in lines if not line.startswith("parity:")] == shown
    assert sum(line.endswith(" ok") for line in lines) == len(figures["parity"]) == 5
    for group in ("step", "decode", "prefill"):
        assert figures[f"{group}_model"] == "tiny"
        assert figures[f"{group}_tokens_per_second"] > 0
    for ratio in ("step_mfu", "prefill_mfu", "decode_bandwidth_share"):
        assert math.isfinite(figures[ratio]) and figures[ratio] > 0
    assert 0 < figures["parity"]["logits bfloat16"]["difference"] < 3e-2


def test_help():
    done = call("--help", PYTHON="/nowhere")
    assert done.returncode == 0 and done.stdout.startswith("usage: tests/benchmarks/gpu.sh")


def test_shapes_are_those_of_the_models():
    counts = {name: gpu.weight_count(gpu.shape_config(name)) for name in gpu.SHAPES}
    del counts["tiny"]
    assert counts == {
        "360m": 361_821_120,
        "1b": 1_235_814_400,
        "3b": 3_212_749_824,
        "8b": 8_030_261_248,
    }


def test_flops_and_bytes_by_hand():
    config = gpu.shape_config("8b")
    matrices = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
    assert gpu.matrix_count(config) == matrices
    head = 2 * 128256 * 4096 * 100
    scores_and_values = 2 * 2 * 32 * 32 * 128 * 1024**2 / 2  # half of them are causal
    assert gpu.forward_flops(config, 1024, 100) == 2 * matrices * 1024 + head + scores_and_values
    norms = 65 * 4096
    cache = 16 * 640 * 32 * 2 * 8 * 128
    assert gpu.decode_bytes(config, 16, 640) == 2 * (matrices + 128256 * 4096 + norms + cache)


@pytest.mark.parametrize(
    ("gib", "train", "serve"), [(24, "360m", "3b"), (80, "1b", "8b"), (139, "3b", "8b")]
)
def test_the_largest_model_that_fits(gib, train, serve):
    assert (gpu.largest(gib * GIB, 24), gpu.largest(gib * GIB, 4)) == (train, serve)


def test_differences_are_noticed():
    want = {
        "logits float32": np.linspace(-3, 3, 8),
        "step loss": np.array(0.7),
        "step gradient": np.array(2.0),
        "greedy tokens": np.arange(6).reshape(2, 3),
    }
    right = {**want, "logits bfloat16": want["logits float32"] + 0.01}
    assert all(check.passed for check in gpu.compare(right, want))
    wrong = {
        "logits float32": want["logits float32"] + 1e-3,
        "logits bfloat16": want["logits float32"] + 0.2,
        "step loss": np.array(math.nan),
        "step gradient": np.array(2.01),
        "greedy tokens": want["greedy tokens"] + [[0, 0, 0], [0, 0, 1]],
    }
    for name, value in wrong.items():
        failed = [c.name for c in gpu.compare({**right, name: value}, want) if not c.passed]
        assert failed == [name]
