"""The train stage: from pairs to checkpoints, killed and resumed, on any mesh, and its refusals."""

import json
import logging
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny_checkpoint
from training import mesh_of, options, random_pairs

from retmask_jax import dpo, train
from retmask_jax.checkpoint_io import open_source
from retmask_jax.errors import UserError
from retmask_jax.preferences import CHOSEN, REJECTED
from retmask_jax.workdir import Workdir, read_jsonl, write_part


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Runs of these tests share compiled programs, as runs of a user do not."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "llama"
    tiny_checkpoint.write(folder)
    return folder


@pytest.fixture
def setup(checkpoint, tmp_path, monkeypatch):
    """setup(name, pairs, mesh sizes, **train options) -> (config, Workdir) with responses."""
    on_mesh(monkeypatch, fsdp=1)

    def setup(root=tmp_path / "work", n_pairs=10, **changes):
        config = options(buckets=(32,), epochs=2, checkpoint_every=2, **changes)
        config.model.path = str(checkpoint)
        config.preferences.max_tokens = 32
        workdir = Workdir(root)
        write_part(workdir.generate, 0, 1, responses(n_pairs))
        return config, workdir

    return setup


def responses(count):
    pairs = random_pairs(count)
    for i in range(count):
        n_prompt = int(pairs.lengths[i, 0])
        for side, policy in ((CHOSEN, "base"), (REJECTED, "retrieval")):
            row = pairs.row(i, side).tolist()
            yield {
                "id": str(i),
                "sample": 0,
                "policy": policy,
                "prompt_ids": row[:n_prompt],
                "ids": row[n_prompt:],
                "text": str(row[n_prompt:]),
                "reasoning_content": None,
                "finish_reason": "stop",
            }


def on_mesh(monkeypatch, **sizes):
    monkeypatch.setattr(train.meshes, "make_mesh", lambda config: mesh_of(**sizes))


def metrics_of(workdir):
    return read_jsonl(workdir.train / "metrics.jsonl")


def summary_of(workdir):
    return json.loads((workdir.train / "summary.json").read_text())


def trained(config, workdir, dtype=jnp.float32, **mesh):
    source = open_source(config.model.path)
    return train.load_trained(config, workdir, source, mesh_of(**(mesh or {"fsdp": 1})), dtype)


def written_at(workdir):
    return {path: path.stat().st_mtime_ns for path in Path(workdir.root).rglob("*.*")}


def values(model):
    return {name: np.asarray(value) for name, value in dpo.as_params(model).items()}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


class Crash(Exception):
    pass


def crash_at(monkeypatch, where, name, call):
    """Lets `where.name` raise at its `call`-th call, before it does anything."""
    original, calls = getattr(where, name), []

    def wrapped(*args, **kwargs):
        calls.append(None)
        if len(calls) == call:
            raise Crash
        return original(*args, **kwargs)

    monkeypatch.setattr(where, name, wrapped)


def test_a_whole_run(setup):
    config, workdir = setup()
    train.run(config, workdir)
    rows = metrics_of(workdir)
    assert [row["step"] for row in rows] == list(range(1, 7))  # 10 pairs by 4, twice
    assert sorted(row["pairs"] for row in rows) == [2, 2, 4, 4, 4, 4]
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert rows[0]["learning_rate"] == rows[0]["update_norm"] == 0
    assert rows[-1]["loss"] < 0.65
    for row in rows:
        assert all(math.isfinite(value) for value in row.values())
    summary = summary_of(workdir)
    assert (summary["pairs"], summary["steps"], summary["skipped_steps"]) == (10, 6, 0)
    assert summary["first"]["loss"] == rows[0]["loss"]
    assert summary["last"]["rewards/margins"] == rows[-1]["rewards/margins"] > 0
    assert not summary["equals_reference"]
    steps = {path.name for path in (workdir.train / "checkpoints").iterdir()}
    assert steps == {"4", "6"}  # keep_checkpoints
    assert list((workdir.train / "tensorboard").iterdir())

    before = written_at(workdir)
    train.run(config, workdir)
    assert written_at(workdir) == before


def test_reference_is_scored_once_and_kept(setup, monkeypatch):
    """Crashes in the second of three parts: the first is not computed again."""
    monkeypatch.setattr(train, "BATCHES_PER_PART", 2)
    config, workdir = setup()
    crash_at(monkeypatch, train.batches, "make_batch", 4)
    with pytest.raises(Crash):
        train.run(config, workdir)
    monkeypatch.undo()
    assert len(list((workdir.preferences / "reference").iterdir())) == 1
    on_mesh(monkeypatch, fsdp=1)
    monkeypatch.setattr(train, "BATCHES_PER_PART", 2)
    first = written_at(workdir)
    train.run(config, workdir)
    parts = sorted((workdir.preferences / "reference").iterdir())
    assert len(parts) == 3
    assert first.items() <= written_at(workdir).items()
    rows = metrics_of(workdir)
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize(
    ("where", "name", "call"),
    [
        (train, "append_jsonl", 1),
        (train, "append_jsonl", 4),  # step 4 done but nowhere written
        (train, "_save", 2),  # metrics of step 4 written, its checkpoint not
        (train, "write_json", 1),  # all done but the summary
    ],
)
def test_resumed_run_equals_one_left_alone(setup, tmp_path, monkeypatch, where, name, call):
    config, alone = setup(tmp_path / "alone")
    train.run(config, alone)
    config, workdir = setup(tmp_path / "crashed")
    with monkeypatch.context() as patch:
        crash_at(patch, where, name, call)
        with pytest.raises(Crash):
            train.run(config, workdir)
    train.run(config, workdir)
    for file in ("train/metrics.jsonl", "train/summary.json", "preferences/pairs.npz"):
        assert (workdir.root / file).read_bytes() == (alone.root / file).read_bytes(), file
    assert_equal(values(trained(config, workdir)), values(trained(config, alone)))


def test_a_damaged_checkpoint_is_named(setup):
    config, workdir = setup()
    train.run(config, workdir)
    folder = Path(workdir.train / "checkpoints")
    newest = max(ocp.utils.checkpoint_steps(folder))
    biggest = max(
        (folder / str(newest) / "params").rglob("*"), key=lambda path: path.stat().st_size
    )
    biggest.write_bytes(biggest.read_bytes()[: biggest.stat().st_size // 2])
    message = rf"checkpoints/{newest}: this checkpoint cannot be read .* delete it"
    with pytest.raises(UserError, match=message):
        trained(config, workdir)


def test_killed_run_resumes_from_another_directory(setup, tmp_path, monkeypatch):
    """T2: SIGKILL in a run with a relative folder that has a space in its name."""
    config, alone = setup(tmp_path / "alone")
    train.run(config, alone)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    config, workdir = setup("out/run 1")
    assert workdir.root.is_absolute()
    program = f"""
import os, signal
from pathlib import Path
import pytest
from retmask_jax import train
from retmask_jax.workdir import Workdir
from training import mesh_of, options
train.meshes.make_mesh = lambda config: mesh_of(fsdp=1)
append = train.append_jsonl
def append_then_die(path, row):
    append(path, row)
    if row["step"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
train.append_jsonl = append_then_die
config = options(buckets=(32,), epochs=2, checkpoint_every=2)
config.model.path = {config.model.path!r}
config.preferences.max_tokens = 32
train.run(config, Workdir("out/run 1"))
"""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert len(metrics_of(workdir)) == 3
    monkeypatch.chdir(tmp_path / "elsewhere")
    train.run(config, workdir)
    for file in ("train/metrics.jsonl", "train/summary.json"):
        assert (workdir.root / file).read_bytes() == (alone.root / file).read_bytes(), file


@pytest.mark.parametrize("target", [{"fsdp": 1}, {"fsdp": 4}, {"tensor": 4}], ids=str)
def test_t1_restores_on_another_mesh(setup, monkeypatch, target):
    """T1: saved on 2x2, loaded and gone on with on 1 and on 4x1 devices."""
    on_mesh(monkeypatch, fsdp=2, tensor=2)
    config, workdir = setup()
    with monkeypatch.context() as patch:
        crash_at(patch, train, "append_jsonl", 3)
        with pytest.raises(Crash):
            train.run(config, workdir)
    saved = trained(config, workdir, fsdp=2, tensor=2)
    model = trained(config, workdir, **target)
    assert_equal(values(model), values(saved))
    gate = dpo.as_params(model)["blocks.0.mlp.gate"]
    assert (
        gate.sharding
        == dpo.as_params(train.meshes.shardings(model, mesh_of(**target)))["blocks.0.mlp.gate"]
    )
    on_mesh(monkeypatch, **target)
    train.run(config, workdir)
    assert len(metrics_of(workdir)) == 6
    assert metrics_of(workdir)[-1]["loss"] < 0.65


def test_load_trained_casts(setup):
    config, workdir = setup()
    with pytest.raises(UserError, match="no checkpoint; run the train stage first"):
        trained(config, workdir)
    assert not workdir.train.exists()
    train.run(config, workdir)
    wide, low = trained(config, workdir), trained(config, workdir, jnp.bfloat16)
    assert_equal(values(low), {k: v.astype(jnp.bfloat16) for k, v in values(wide).items()})


def test_t4_full_disk_is_seen_before_the_save(setup, monkeypatch):
    config, workdir = setup()
    usage = shutil.disk_usage(workdir.root)._replace(free=1_000_000)
    monkeypatch.setattr(train.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"takes 0.00 GB, 0.00 GB are free\); there is none yet"):
        train.run(config, workdir)
    assert not list((workdir.train / "checkpoints").iterdir())


@pytest.mark.parametrize("background", [False, True])
def test_t4_failed_last_save_ends_the_run_with_a_message(setup, monkeypatch, background):
    """T4: the disk takes no more before the last save; the checkpoint before stays usable."""
    config, workdir = setup()
    chosen = train.ocp.CheckpointManagerOptions
    monkeypatch.setattr(
        train.ocp,
        "CheckpointManagerOptions",
        lambda **kinds: chosen(**kinds | {"enable_async_checkpointing": background}),
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    save = train._save

    def limited(manager, step, *args):
        if step == 6:
            manager.wait_until_finished()
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
        save(manager, step, *args)

    with monkeypatch.context() as patch:
        patch.setattr(train, "_save", limited)
        try:
            with pytest.raises(UserError) as error:
                train.run(config, workdir)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "a checkpoint could not be saved" in str(error.value)
    assert "that of step 4 is intact" in str(error.value)
    assert "\n" not in str(error.value)
    assert not (workdir.train / "summary.json").exists()
    trained(config, workdir)
    train.run(config, workdir)
    assert len(metrics_of(workdir)) == 6
    assert (workdir.train / "summary.json").exists()


def test_t8_stops_when_too_many_steps_in_a_row_are_bad(setup, monkeypatch):
    """T8: 6 bad steps with limit 5: none applied, the run stops, the last checkpoint stays."""
    config, workdir = setup(n_pairs=40)  # 10 steps an epoch
    place, steps = train._place, []

    def spoiled(batch, shardings):
        if len(batch.tokens) == 2:  # a step's, not the reference's
            steps.append(None)
            if len(steps) > 4:
                batch.reference_logps[1] = np.nan
        return place(batch, shardings)

    monkeypatch.setattr(train, "_place", spoiled)
    with pytest.raises(UserError, match=r"6 steps in a row, up to step 10,.*max_bad_steps"):
        train.run(config, workdir)
    rows = metrics_of(workdir)
    assert [row["bad_steps"] for row in rows] == [0, 0, 0, 0, 1, 2, 3, 4, 5, 6]
    assert "loss" not in rows[-1]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    steps = {path.name for path in (workdir.train / "checkpoints").iterdir()}
    assert steps == {"6", "8"}
    model = trained(config, workdir)
    assert all(np.isfinite(value).all() for value in values(model).values())


def test_d1_a_run_that_learned_nothing_says_so(setup, caplog):
    """D1: at learning rate 0 the policy stays the reference."""
    config, workdir = setup(learning_rate=0.0)
    with caplog.at_level(logging.WARNING, "retmask"):
        train.run(config, workdir)
    assert "the policy still equals the reference" in caplog.text
    summary = summary_of(workdir)
    assert summary["equals_reference"]
    assert summary["last"]["loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_d2_long_replies_never_reach_training(setup):
    """D2: pairs beyond the limit are dropped and counted; every metric is finite."""
    config, workdir = setup(n_pairs=30)
    config.preferences.max_tokens = 16
    train.run(config, workdir)
    counts = summary_of(workdir)
    assert counts["dropped"]["too_long"] > 5
    assert counts["pairs"] + counts["dropped"]["too_long"] == 30
    for row in metrics_of(workdir):
        assert {"loss", "grad_norm", "logps/chosen"} <= row.keys()
        assert all(math.isfinite(value) for value in row.values())


def test_rows_that_the_mesh_cannot_share_are_refused(setup, monkeypatch):
    on_mesh(monkeypatch, data=2, fsdp=4)
    config, workdir = setup()
    with pytest.raises(UserError, match=r"micro_pairs is 2: its 4 rows .* 2 x 4 = 8 devices"):
        train.run(config, workdir)
    assert not workdir.train.exists()
