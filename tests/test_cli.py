import errno
import os
import subprocess
import sys
import types

import pytest

from retmask_jax import cli
from retmask_jax.errors import UserError
from retmask_jax.workdir import write_json

CONFIG = "--config=smollm2_135m"


@pytest.fixture
def stage(monkeypatch):
    """Puts a function in the place of the stage detect, and leaves the early checks out."""

    def put(run):
        monkeypatch.setitem(sys.modules, "retmask_jax.detect", types.SimpleNamespace(run=run))
        monkeypatch.setattr(cli, "_check", lambda stage, config: None)

    return put


def fails(capsys, *argv):
    """Runs a command line that fails; returns its status and its one line."""
    status = cli.main(list(argv))
    err = capsys.readouterr().err.splitlines()
    assert status and err and err[-1].startswith("retmask: error: ")
    assert not any("Traceback" in line for line in err)
    return status, err[-1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "which stage?"),
        (["rum"], "rum: no such stage; it is one of run, detect, "),
        (["run", "--workdir=w"], "--config=FILE is missing"),
        (["run", CONFIG], "--workdir=DIR is missing"),
        (["run", CONFIG, "--workdir="], "--workdir=DIR is missing"),
        (["run", CONFIG, "--wrokdir=w"], "'wrokdir'. Did you mean: workdir"),
        (["run", CONFIG, "--workdir=w", "extra"], "extra: not understood"),
        (["run", CONFIG, "--workdir=w", "--masked"], "--masked goes with the stage export only"),
        (["run", CONFIG, "--workdir=w", "--masked=perhaps"], "masked"),
        (["run", "--config=none.py", "--workdir=w"], "none.py: no such config file"),
        (["run", CONFIG, "--workdir=w", "--config.seet=1"], "did you mean seed"),
        (["run", CONFIG, "--workdir=w", "--config.seed"], "--config.seed="),
        (["run", CONFIG, "--workdir=w", "--config.mesh.tensor=0"], "at least 1"),
        (["run", CONFIG, "--workdir=w", "--config.mesh.tensor=7"], "mesh"),
        (["run", CONFIG, "--workdir=w", "--config.model.path=nowhere"], "nowhere"),
        (["run", CONFIG, "--workdir=w", "--config.prompts.path=none.jsonl"], "none.jsonl"),
        (["detect", CONFIG, "--workdir=w", "--config.evaluate.max_length=9000"], "8192 positions"),
    ],
)
def test_a_mistake_gets_one_line_and_starts_nothing(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, line = fails(capsys, *argv)
    assert status == 2 and message in line
    assert not list(tmp_path.iterdir())


def test_the_whole_program_says_one_line_only(tmp_path):
    """Nothing that is imported on the way adds a line of its own."""
    command = [sys.executable, "-m", "retmask_jax", "run", CONFIG, "--workdir=w"]
    done = subprocess.run(
        [*command, "--config.model.path=nowhere"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "nowhere" in done.stderr
    assert not list(tmp_path.iterdir())


def test_help(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in cli.STAGES)
    assert cli.main(["export", "--help"]) == 0
    text = capsys.readouterr().out
    assert (
        "--masked" in text and "--config.export.max_shard_bytes=5000000000\n      bytes: " in text
    )
    assert cli.main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--masked" not in text and "--config.train.learning_rate=5e-07\n" in text


def test_flags_in_every_form():
    line = "--config f.py --workdir w --masked --config.seed 3 --noconfig.train.remat"
    args = [*line.split(), "--config.train.remat", "-config.train.beta=1"]
    values, overrides = cli.parse("export", args)
    assert (values.config, values.workdir, values.masked) == ("f.py", "w", True)
    assert overrides == [
        "--config.seed=3",
        "--noconfig.train.remat",
        "--config.train.remat",
        "-config.train.beta=1",
    ]


def test_a_dash_in_a_flag_is_an_underscore():
    values, _ = cli.parse("plan", ["--config=a-b.py", "--row-length=64", "--export-hlo", "x-y"])
    assert (values.config, values.row_length, values.export_hlo) == ("a-b.py", 64, "x-y")


def test_a_stage_gets_its_config_and_leaves_a_log(stage, tmp_path, capsys):
    seen = []
    stage(lambda config, workdir: seen.append((config.train.beta, str(workdir.root))))
    argv = ["detect", CONFIG, f"--workdir={tmp_path}", "--config.train.beta=0.2"]
    assert cli.main(argv) == 0
    assert seen == [(0.2, str(tmp_path))]
    assert "detect: done in 0s, peak memory " in capsys.readouterr().err
    assert "INFO detect: done in 0s" in (tmp_path / "retmask.log").read_text()
    (tmp_path / "detect").mkdir()
    status, line = fails(capsys, *argv[:-1])
    assert status == 2 and "train.beta: 0.2 → 0.1" in line


def test_t2_a_relative_workdir_goes_on_from_another_folder(stage, tmp_path, monkeypatch):
    def run(config, workdir):
        folders.append(str(workdir.detect))
        monkeypatch.chdir("/")
        write_json(workdir.detect / "x.json", config.haystack.path)

    folders = []
    stage(run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    argv = ["detect", CONFIG, "--config.haystack.path=texts", "--workdir=out/run 1"]
    assert cli.main(argv) == 0
    assert (tmp_path / "out" / "run 1" / "detect" / "x.json").read_text() == f'"{tmp_path}/texts"\n'
    argv[2:] = [f"--config.haystack.path={tmp_path}/texts", f"--workdir={tmp_path}/out/run 1"]
    assert cli.main(argv) == 0
    assert folders == [str(tmp_path / "out" / "run 1" / "detect")] * 2


def test_only_one_process_works_in_a_workdir(stage, tmp_path, capsys):
    argv = ["detect", CONFIG, f"--workdir={tmp_path}"]
    stage(lambda config, workdir: fails(capsys, *argv)[1].index("in use by another"))
    assert cli.main(argv) == 0


def test_a_full_disk_gets_one_line(stage, tmp_path, capsys):
    def run(config, workdir):
        workdir.detect.mkdir(exist_ok=True)
        os.symlink("/dev/full", workdir.detect / ".x.json.tmp")
        write_json(workdir.detect / "x.json", "x" * 100_000)

    stage(run)
    status, line = fails(capsys, "detect", CONFIG, f"--workdir={tmp_path}")
    assert status == 1 and f"{tmp_path}/detect/x.json: No space left on device; make room" in line
    assert not list((tmp_path / "detect").iterdir())
    assert "Traceback" in (tmp_path / "retmask.log").read_text()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        ValueError("RESOURCE_EXHAUSTED: writing x: [OS error 28: ENOSPC No space left on device]"),
    ],
)
def test_t4_a_full_disk_below_other_errors_is_told(stage, tmp_path, capsys, error):
    def run(config, workdir):
        try:
            raise error
        except Exception as cause:
            raise RuntimeError("checkpoint failed") from cause

    stage(run)
    status, line = fails(capsys, "detect", CONFIG, f"--workdir={tmp_path}")
    assert status == 1 and "make room" in line


def test_other_ends(stage, tmp_path, capsys):
    def ends_with(error):
        def run(config, workdir):
            raise error

        stage(run)
        return fails(capsys, "detect", CONFIG, f"--workdir={tmp_path}")

    assert ends_with(UserError("a\nb")) == (2, "retmask: error: a b")
    assert ends_with(KeyboardInterrupt())[0] == 130
    assert ends_with(PermissionError(errno.EACCES, "Permission denied", "/x/y")) == (
        1,
        "retmask: error: /x/y: Permission denied",
    )
    with pytest.raises(ZeroDivisionError):
        ends_with(ZeroDivisionError())
    assert "ZeroDivisionError" in (tmp_path / "retmask.log").read_text()


def test_peak_memory_is_of_the_stage():
    hundred = bytearray(os.urandom(1)) * (100 << 20)
    del hundred
    before = cli._peak_memory()
    small = before()
    hundred = bytearray(os.urandom(1)) * (100 << 20)
    assert 90 << 20 < before() - small < 200 << 20
    del hundred
