"""Several processes as one run: the same artefacts as from one, and an end for all if one dies."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
import tiny_checkpoint
from conftest import tiny_hf
from jax._src import clusters

from retmask_jax import cli, distributed, mesh, train
from retmask_jax.configs import base
from retmask_jax.errors import UserError
from retmask_jax.models import config_from_hf
from retmask_jax.workdir import read_jsonl

LOST_AFTER = 10  # seconds
STOPS = list(range(3, 256, 12))  # many, so that random weights stop now and then
WORDS = "a b c d e f g h i j k l m n o p q r s t u v w x y z 0 1 2 3 4 5 6 7 8 9"
# With the time of day in it, or with numbers that depend a little on who adds them up.
LEFT_OUT = ("retmask.log", ".lock", "train/", "preferences/reference/", "export/", "report.html")
CONFIG = """
from retmask_jax.configs import base


def get_config():
    config = base.get_config()
    config.model.path, config.model.dtype = {model!r}, "float32"
    config.haystack.path, config.haystack.needles = {books!r}, {needles!r}
    config.detect.update(min_length=300, max_length=400, lengths=5, depths=4, slots=8)
    config.detect.update(max_new_tokens=12, pass_recall=0.0)
    config.evaluate.update(min_length=330, max_length=380, lengths=3, depths=3, slots=8)
    config.evaluate.update(max_new_tokens=6, random_seeds=1)
    config.heads.update(rule="top", k=3)
    config.prompts.path = {prompts!r}
    config.generate.update(max_prompt_tokens=40, max_new_tokens=12, slots=8, prompts_per_part=2)
    config.preferences.max_tokens = 64
    config.train.update(pairs_per_step=4, micro_pairs=2, learning_rate=1e-3, buckets=(64,))
    config.train.update(head_chunk=64, checkpoint_every=2)
    return config
"""
# The command line, in a process that is killed at a call of a function.
DIES = """
import os, signal, sys
from retmask_jax import cli, {0}
function, calls = {0}.{1}, []


def dies(*args, **kwargs):
    calls.append(None)
    if len(calls) == {2}:
        os.kill(os.getpid(), signal.{3})
    return function(*args, **kwargs)


{0}.{1} = dies
sys.exit(cli.main())
"""
# The command line where all processes of a run are one team, as those of a TPU slice are.
ONE_TEAM = """
import sys
from retmask_jax import cli, mesh

mesh.team = lambda device: 0
sys.exit(cli.main())
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a model, texts, prompts, a config, and room for compiled programs."""
    folder = tmp_path_factory.mktemp("files")
    model = tiny_hf("llama", vocab_size=288, eos_token_id=STOPS, torch_dtype="float32")
    tiny_checkpoint.write(folder / "model", model)
    (folder / "books").mkdir()
    text = "One is here. Two are there. Three went away. Four stayed at home. Five sang. "
    (folder / "books" / "a.txt").write_text(text * 5)
    needle = {"needle": f"It is {WORDS}.", "question": "What is it?", "answer": WORDS}
    (folder / "needles.jsonl").write_text(json.dumps(needle))
    prompts = [json.dumps({"prompt": f"Tell me about {n}."}) for n in range(12)]
    (folder / "prompts.jsonl").write_text("\n".join(prompts))
    names = {"model": "model", "books": "books", "needles": "needles.jsonl"}
    names["prompts"] = "prompts.jsonl"
    paths = {key: str(folder / name) for key, name in names.items()}
    (folder / "config.py").write_text(CONFIG.format(**paths))
    return folder


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def processes(files, work, n, n_devices, stage, dies=None, extra=None, program=None):
    """Starts n processes of a run.

    dies: process -> (module, function, at which call of it, by which signal).
    extra: process -> more options.
    program: to start instead of the command line.
    """
    port = free_port()
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={n_devices}"}
    started = []
    for i in range(n):
        start = ["-c", program] if program else ["-m", "retmask_jax"]
        if i in (dies or {}):
            start = ["-c", DIES.format(*dies[i])]
        run = [f"--coordinator=localhost:{port}", f"--processes={n}", f"--process={i}"]
        command = [sys.executable, *start, *args(files, work, stage), *run]
        command += [f"--lost_after={LOST_AFTER}", *(extra or {}).get(i, ())]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env))
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def args(files, work, stage):
    return [stage, f"--config={files}/config.py", f"--workdir={work}"]


def together(files, work, n, n_devices, stage, program=None):
    """A run of n processes to its end."""
    with processes(files, work, n, n_devices, stage, program=program) as started:
        for process in started:
            _, errors = process.communicate(timeout=400)
            assert process.returncode == 0, errors


def survivor(started, victim, by=signal.SIGKILL):
    """How the other of two processes ends: its status, its last line, and seconds after."""
    assert started[victim].wait(timeout=400) == -by
    begin = time.monotonic()
    _, errors = started[1 - victim].communicate(timeout=400)
    seconds = time.monotonic() - begin
    assert "Traceback" not in errors
    print(f"the other one ended {seconds:.1f} s after process {victim}")
    return started[1 - victim].returncode, errors.splitlines()[-1], seconds


@contextlib.contextmanager
def four_devices():
    """This process as a run: four of its devices, two of them for what parts are made on."""
    with pytest.MonkeyPatch.context() as patch:
        four = jax.devices()[:4]
        patch.setattr(mesh.jax, "devices", lambda: four)
        patch.setattr(mesh.jax, "device_count", lambda: 4)
        patch.setattr(mesh, "team_devices", lambda: four[:2])
        yield patch


def artefacts(work):
    found = {str(p.relative_to(work)): p for p in Path(work).rglob("*") if p.is_file()}
    return {n: p.read_bytes() for n, p in found.items() if not n.startswith(LEFT_OUT)}


def assert_same_training(work, other):
    rows, others = (read_jsonl(w / "train" / "metrics.jsonl") for w in (work, other))
    assert len(rows) == len(others) == 6
    for row, expected in zip(rows, others, strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-5)
    worst = max(abs(a[k] - b[k]) for a, b in zip(rows, others, strict=True) for k in a)
    print(f"largest difference in the metrics: {worst:.1e}")


@pytest.fixture(scope="module")
def left_alone(files, tmp_path_factory):
    """The work directory of a run of one process that nothing disturbed."""
    work = tmp_path_factory.mktemp("alone") / "work"
    with four_devices():
        assert cli.main(args(files, work, "run")) == 0
    return work


@pytest.mark.slow
def test_four_processes_train_as_one(files, left_alone, tmp_path):
    for folder in ("detect", "generate"):
        shutil.copytree(left_alone / folder, tmp_path / folder)
    together(files, tmp_path, 4, 1, "train")
    assert_same_training(tmp_path, left_alone)
    assert (tmp_path / "train" / "summary.json").exists()


@pytest.mark.slow
def test_processes_that_sample_as_one_team(files, left_alone, tmp_path):
    """Row by row what processes sample that work alone, on a mesh of another shape."""
    together(files, tmp_path, 2, 2, "detect", ONE_TEAM)
    together(files, tmp_path, 2, 2, "generate", ONE_TEAM)
    found = artefacts(tmp_path)
    assert {name.split("/")[0] for name in found} == {"config.json", "detect", "generate"}
    expected = artefacts(left_alone)
    for name, content in found.items():
        assert content == expected[name], name


@pytest.mark.slow
def test_killed_and_gone_on_with_by_other_numbers_of_processes(files, left_alone, tmp_path):
    """Two processes, then one, then two: the artefacts are those of one that nothing disturbed."""
    dies = {1: ("parts", "write_part", 4, "SIGKILL")}
    with processes(files, tmp_path, 2, 2, "run", dies) as started:
        status, line, seconds = survivor(started, victim=1)
    assert status == 1 and line == f"retmask: error: {distributed._LOST}"
    assert seconds < 2 * LOST_AFTER + 10
    assert (tmp_path / "detect" / "heads.json").exists()
    assert 0 < len(list((tmp_path / "generate").glob("part-*"))) < 6

    class Killed(Exception):
        pass

    def append(path, row):
        if row["step"] == 4:
            raise Killed
        train_append(path, row)

    train_append = train.append_jsonl
    with four_devices() as patch, pytest.raises(Killed):
        patch.setattr(train, "append_jsonl", append)
        cli.main(args(files, tmp_path, "run"))
    assert len(read_jsonl(tmp_path / "train" / "metrics.jsonl")) == 3

    together(files, tmp_path, 2, 2, "run")
    assert artefacts(tmp_path) == artefacts(left_alone)
    assert_same_training(tmp_path, left_alone)
    exported, expected = (w / "export" / "model.safetensors" for w in (tmp_path, left_alone))
    assert exported.stat().st_size == expected.stat().st_size


def test_the_first_process_is_killed(files, tmp_path):
    """Also: SIGTERM ends a process at once."""
    dies = {0: ("detect", "hold", 1, "SIGTERM")}
    with processes(files, tmp_path, 2, 1, "detect", dies) as started:
        status, line, seconds = survivor(started, 0, by=signal.SIGTERM)
    assert status == 1 and line == f"retmask: error: {distributed._LOST}"
    assert seconds < 10


def test_listed_heads_are_written_by_one_of_two(files, tmp_path):
    """The other may find them there already: neither waits for what the other does not come to."""
    listed = ["--config.heads.rule=list", "--config.heads.list=('0-1',)"]
    with processes(files, tmp_path, 2, 1, "detect", extra={0: listed, 1: listed}) as started:
        for process in started:
            _, errors = process.communicate(timeout=100)
            assert process.returncode == 0, errors
    assert (tmp_path / "detect" / "heads.json").exists()


def test_a_process_that_fails_tells_the_others(files, tmp_path):
    extra = {1: ["--config.prompts.path=none.jsonl"]}
    with processes(files, tmp_path, 2, 1, "generate", extra=extra) as started:
        lines = [process.communicate(timeout=400)[1].splitlines()[-1] for process in started]
        assert [process.returncode for process in started] == [2, 2]
    for line, what in zip(lines, ("error: process 1 failed: ", "error: "), strict=True):
        assert line.startswith(f"retmask: {what}") and "none.jsonl" in line


# ------------------------------------------------------------------------------------- who it is


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


def test_slurm_with_several_tasks_is_one_run(monkeypatch):
    assert distributed._find("", 0, -1) is None
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert distributed._find("", 0, -1) is None
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert distributed._find("", 0, -1) == {"cluster_detection_method": "slurm"}
    assert distributed._find("", 1, -1) is None  # --processes=1


@pytest.mark.parametrize(
    ("workers", "slices", "several"), [(1, 1, False), (2, 1, True), (1, 2, True)]
)
def test_all_workers_of_all_slices_are_one_run(monkeypatch, workers, slices, several):
    cluster = clusters.GkeTpuCluster
    monkeypatch.setattr("jax._src.clusters.cloud_tpu_cluster.running_in_cloud_tpu_vm", True)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", ",".join(["host"] * workers))
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", str(slices))
    found = {"cluster_detection_method": cluster.name} if several else None
    assert distributed._find("", 0, -1) == found


@pytest.mark.parametrize(
    "options",
    [
        ["--processes=2"],
        ["--process=0"],
        ["--coordinator=host:1"],
        ["--coordinator=host", "--processes=2", "--process=0"],
        ["--coordinator=host:1", "--processes=2", "--process=2"],
        ["--coordinator=host:1", "--processes=2", "--process=-2"],
        ["--lost_after=0"],
    ],
)
def test_mistakes_in_the_options(options, capsys, tmp_path):
    assert cli.main(["detect", "--config=smollm2_135m", f"--workdir={tmp_path}/w", *options]) == 2
    assert options[0].split("=")[0] in capsys.readouterr().err
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("run", "n_own", "own"),
    [
        ({"fsdp": 8}, 8, (2, 1, 1, 4)),
        ({"data": 2, "fsdp": -1}, 4, (1, 1, 1, 4)),
        ({"fsdp": 4, "tensor": 2}, 4, (1, 1, 1, 4)),
        ({"fsdp": 4, "tensor": 2}, 8, (2, 1, 1, 4)),
        ({"tensor": 8}, 2, (1, 1, 1, 2)),
        ({"data": 2, "sequence": 2, "fsdp": 2}, 8, (2, 1, 2, 2)),
        ({"data": -1}, 2, (2, 1, 1, 1)),
    ],
)
def test_the_mesh_of_a_team(run, n_own, own):
    """Four key/value heads: fsdp becomes tensor up to that, and data."""
    config = base.get_config()
    config.mesh.update({axis: run.get(axis, 1) for axis in mesh.AXES})
    model = config_from_hf(tiny_hf("llama", num_key_value_heads=4))
    found = mesh.sampling_mesh(config, model, jax.devices()[:n_own], 8)
    assert tuple(found.shape.values()) == own


@pytest.mark.parametrize(
    ("change", "own"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, (8, 1, 1, 1)),
        ({"intermediate_size": 98, "num_key_value_heads": 8}, (4, 1, 1, 2)),
        ({"vocab_size": 126, "num_key_value_heads": 8}, (4, 1, 1, 2)),
        ({"vocab_size": 2**17 - 1, "hidden_size": 2**14}, (2, 4, 1, 1)),  # 8 GiB of tables
        ({"vocab_size": 2**17, "hidden_size": 2**20}, (1, 2, 1, 4)),  # more than all can hold
    ],
)
def test_a_team_splits_what_can_be_split(change, own):
    config = base.get_config()
    config.mesh.fsdp = 8
    model = config_from_hf(tiny_hf("llama", **change))
    assert tuple(mesh.sampling_mesh(config, model, jax.devices(), 8).shape.values()) == own


def test_the_mesh_of_a_team_wants_a_mesh_of_the_run():
    config = base.get_config()
    config.mesh.fsdp = 4
    model = config_from_hf(tiny_hf("llama"))
    with pytest.raises(UserError, match="does not fit 8 devices"):
        mesh.sampling_mesh(config, model, jax.devices()[:4], 8)


class Device(NamedTuple):
    platform: str
    process_index: int
    slice_index: int = 0


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("gpu", [(4, 0, True), (4, 1, True), (4, 2, True), (4, 3, True)]),
        ("tpu", [(2, 0, True), (2, 0, False), (2, 1, True), (2, 1, False)]),
    ],
)
def test_teams(monkeypatch, platform, expected):
    """Two slices of two processes each sample by slice on TPU, else by process."""
    devices = [Device(platform, n // 2, n // 4) for n in range(8)]
    monkeypatch.setattr(mesh.jax, "devices", lambda: devices)
    for process, teams in enumerate(expected):
        monkeypatch.setattr(mesh.jax, "process_index", lambda process=process: process)
        own = [device for device in devices if device.process_index == process]
        monkeypatch.setattr(mesh.jax, "local_devices", lambda own=own: own)
        assert tuple(mesh.teams()) == teams
        assert len(mesh.team_devices()) == 8 // teams[0]
