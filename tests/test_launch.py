"""launch/: the commands that the scripts print, what they refuse, and how they start again."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parent.parent / "launch"
ROOT = str(LAUNCH.parent)
SCRIPTS = ("gke.sh", "slurm.sh", "tpu.sh")
STAGE = ("train", "--config=configs/llama31_8b.py", "--workdir=gs://bucket/a run's")
TPUS = ["gcloud", "compute", "tpus", "queued-resources"]
ALL = ["--worker=all", "--node=all", "--zone=here"]
ARCHIVE = "retmask_jax.tar.gz"


def call(script: str, *args: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [LAUNCH / script, *args],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"TMPDIR": "/tmp"} | env,
    )


def printed(script: str, *args: str) -> list[list[str]]:
    """The commands of a dry run, as words."""
    done = call(script, "--dry-run", *args)
    assert (done.returncode, done.stderr) == (0, "")
    return [shlex.split(line) for line in done.stdout.splitlines()]


def tpu(action: str, *args: str) -> list[list[str]]:
    return printed("tpu.sh", action, "mine", "--zone=here", *args)


def remote(command: list[str]) -> str:
    """What a worker's shell gets."""
    (text,) = [word for word in command if word.startswith("--command=")]
    return text.removeprefix("--command=")


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_every_option(script):
    done = call(script, "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: launch/{script}")
    text = (LAUNCH / script).read_text().replace("\\\n", "")
    names = " ".join(re.search(r'^parse "(.*?)"\s+"(.*?)"', text, re.MULTILINE).groups()).split()
    assert len(names) > 7
    for name in [*names, "dry-run"]:
        assert f"--{name}" in done.stdout
    assert "--dry-run" in done.stdout and "set -euo" not in done.stdout


@pytest.mark.parametrize(
    ("type_", "image"),
    [
        ("v4-8", "tpu-ubuntu2204-base"),
        ("v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v5p-8", "v2-alpha-tpuv5"),
        ("v6e-16", "v2-alpha-tpuv6e"),
    ],
)
def test_create_takes_the_image_of_the_type(type_, image):
    (command,) = tpu("create", f"--type={type_}")
    assert command[4:] == [
        *["create", "mine", f"--runtime-version={image}", "--node-id=mine"],
        *[f"--accelerator-type={type_}", "--zone=here"],
    ]


def test_create_several_spot_slices():
    (command,) = tpu(
        "create",
        "--type=v6e-16",
        "--slices=4",
        "--spot",
        "--project=ours",
        "--create-flags=--network=net --reserved",
    )
    assert command == [
        *[*TPUS, "create", "mine", "--runtime-version=v2-alpha-tpuv6e", "--node-count=4"],
        *["--node-prefix=mine", "--accelerator-type=v6e-16", "--spot", "--network=net"],
        *["--reserved", "--zone=here", "--project=ours"],
    ]


def test_a_vm_without_the_queue():
    (command,) = tpu("create", "--type=new-1", "--runtime=image", "--vm")
    assert command[3:] == [
        *["tpu-vm", "create", "mine", "--version=image", "--accelerator-type=new-1"],
        "--zone=here",
    ]
    (command,) = tpu("delete", "--vm")
    assert command[3:] == ["tpu-vm", "delete", "mine", "--quiet", "--zone=here"]
    (command,) = tpu("stop", "--vm")
    assert "--worker=all" in command and "--node=all" not in command


def test_copy_installs_as_the_readme_does():
    pack, send, install = tpu("copy")
    assert pack[:3] == ["tar", "-czf", f"/tmp/{ARCHIVE}"]
    sources = pack[pack.index("--exclude=__pycache__") + 1 :]
    assert all((LAUNCH.parent / name).exists() for name in sources)
    assert send == [*TPUS, "scp", f"/tmp/{ARCHIVE}", "mine:", *ALL]
    assert install[:6] == [*TPUS, "ssh", "mine"] and install[-3:] == ALL
    assert remote(install).endswith("--editable '.[tpu]'")


def test_archive_and_image_hold_what_the_package_needs():
    (copied,) = [c for c in tpu("copy") if c[0] == "tar"]
    sources = set(copied[copied.index("--exclude=__pycache__") + 1 :])
    dockerfile = (LAUNCH / "Dockerfile").read_text()
    in_image = {
        word
        for line in re.findall(r"^COPY (.*) \S+$", dockerfile, re.MULTILINE)
        for word in line.split()
    }
    project = (LAUNCH.parent / "pyproject.toml").read_text()
    for name in ("README.md", "LICENSE", '"models"', '"configs"'):
        assert name in project
    needed = {"pyproject.toml", "README.md", "LICENSE", "retmask_jax", "models", "configs"}
    assert sources == in_image == needed
    for extra in ("tpu", "cuda13"):
        assert f'\n{extra} = ["jax[{extra}]"' in project
    assert "ARG EXTRA=tpu\n" in dockerfile and '--editable ".[${EXTRA}]"' in dockerfile


def test_a_stage_reaches_the_workers_word_for_word(tmp_path):
    (command,) = tpu("run", "--", *STAGE, "--config.heads.list=('1-2', \"3-4\")", "")
    text = remote(command)
    assert command[-3:] == ALL
    # Port: JAX's default is closed between the hosts of v6e slices.
    assert "JAX_COORDINATOR_PORT=8476 nohup .venv/bin/retmask train " in text
    program = tmp_path / "retmask_jax" / ".venv" / "bin" / "retmask"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "$JAX_COORDINATOR_PORT"; printf "<%s>" "$@"\n')
    program.chmod(0o755)
    subprocess.run(["bash", "-c", text + " wait"], cwd=tmp_path, check=True)
    words = "".join(f"<{word}>" for word in [*STAGE, "--config.heads.list=('1-2', \"3-4\")", ""])
    assert (tmp_path / "retmask_jax" / "retmask.log").read_text() == "8476\n" + words


def test_logs_of_one_worker_or_all():
    follow = "--command=tail -n 100 -F retmask_jax/retmask.log"
    (command,) = tpu("logs")
    assert command == [*TPUS, "ssh", "mine", follow, "--worker=0", "--zone=here"]
    (command,) = tpu("logs", "--worker=all", "--ssh-flags=--internal-ip")
    assert command == [*TPUS, "ssh", "mine", follow, *ALL[:2], "--internal-ip", "--zone=here"]


def test_delete_and_status():
    (command,) = tpu("delete")
    assert command == [*TPUS, "delete", "mine", "--force", "--quiet", "--zone=here"]
    (command,) = tpu("status")
    assert command == [*TPUS, "describe", "mine", "--zone=here"]


def test_keep_shows_one_round():
    commands = tpu("keep", "--type=v6e-16", "--slices=2", "--spot", "--", *STAGE)
    verbs = [command[4] if command[0] == "gcloud" else command[0] for command in commands]
    assert verbs == ["list", "create", "tar", "scp", "ssh", "ssh", "ssh"]
    assert "JAX_COORDINATOR_PORT=8476" in remote(commands[-1])
    assert "set -o pipefail" in remote(commands[-1])


# gcloud as keep sees it: each call takes the next line of `script` for its verb (the status it ends
# with, or what `list` prints; the last line again and again) and leaves its verb in `calls`.
GCLOUD = """#!/bin/bash
here=$(dirname "$0")
verb=$4
case "$*" in *bin/retmask\\ train*) verb=stage ;; esac
echo "$verb" >>"$here/calls"
line=$(head -n 1 "$here/$verb.script" 2>/dev/null)
[ "$(wc -l <"$here/$verb.script" 2>/dev/null)" = 1 ] || sed -i 1d "$here/$verb.script" 2>/dev/null
if [ "$verb" = list ]; then echo "$line"; else exit "${line:-0}"; fi
"""


def keep(folder: Path, *args: str, **script: str) -> tuple[int, list[str], str]:
    """Status, verbs called and messages of a keep whose gcloud answers as scripted."""
    for name, text in {"gcloud": GCLOUD, "sleep": "#!/bin/sh\n", "tar": "#!/bin/sh\n"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for verb, lines in script.items():
        (folder / f"{verb}.script").write_text("".join(f"{x}\n" for x in lines.split(",")))
    args = ("keep", "mine", "--zone=here", "--type=v6e-16", "--spot", *args, "--", *STAGE)
    done = call("tpu.sh", *args, PATH=f"{folder}:{os.environ['PATH']}")
    return done.returncode, (folder / "calls").read_text().split(), done.stderr


def test_keep_starts_again_after_a_preemption(tmp_path):
    status, calls, said = keep(
        tmp_path,
        list=",WAITING_FOR_RESOURCES,PROVISIONING,ACTIVE,SUSPENDING,SUSPENDED,,ACTIVE",
        stage="255,0",
    )
    assert status == 0, said
    setup = ["scp", "ssh", "ssh", "stage"]
    assert calls == [
        *["list", "create", "list", "list", "list", *setup],
        *["list", "list", "delete", "list", "create", "list", *setup],
    ]
    assert "starting again, 1 of 100" in said


def test_keep_goes_on_when_a_slice_dies_under_its_hands(tmp_path):
    status, calls, said = keep(tmp_path, list="ACTIVE", stage="1,0", scp="0,1,0")
    assert status == 0, said
    rounds = [verb for verb in calls if verb in ("scp", "stage")]
    assert rounds == ["scp", "stage", "scp", "scp", "stage"]


def test_keep_stops_at_a_mistake(tmp_path):
    status, calls, said = keep(tmp_path, list="ACTIVE", stage="2")
    assert (status, calls.count("stage")) == (2, 1)
    assert "refused to start" in said


@pytest.mark.parametrize("verb", ["create", "scp"])
def test_keep_stops_if_it_never_gets_to_the_stage(tmp_path, verb):
    status, calls, said = keep(tmp_path, list=",ACTIVE", **{verb: "2"})
    assert status == 1 and calls[-1] == verb and "could not be set up" in said


def test_keep_gives_up_in_the_end(tmp_path):
    status, calls, said = keep(tmp_path, "--restarts=2", list="ACTIVE", stage="1")
    assert (status, calls.count("stage")) == (1, 3) and "gave up after 2 restarts" in said


def test_gke_builds_and_pushes_the_image():
    assert printed("gke.sh", "image", "--image=place/retmask") == [
        ["docker", "build", "--tag=place/retmask", f"--file={LAUNCH}/Dockerfile", ROOT],
        ["docker", "push", "place/retmask"],
    ]


def test_gke_runs_a_stage():
    (command,) = printed(
        "gke.sh",
        "run",
        "mine",
        "--cluster=pods",
        "--image=place/retmask",
        "--type=v6e-32",
        "--slices=2",
        "--restarts=7",
        "--zone=here",
        "--project=ours",
        "--xpk-flags=--spot --priority=high",
        "--",
        *STAGE,
    )
    assert command == [
        *["xpk", "workload", "create", "--workload=mine", "--docker-image=place/retmask"],
        *["--tpu-type=v6e-32", "--num-slices=2", "--max-restarts=7", "--restart-on-exit-codes=1"],
        "--env=JAX_COORDINATOR_PORT=8476",
        command[10],
        *["--spot", "--priority=high", "--cluster=pods", "--zone=here", "--project=ours"],
    ]
    assert shlex.split(remote(command)) == ["retmask", *STAGE]


def test_gke_logs_status_delete():
    (command,) = printed("gke.sh", "logs", "mine")
    assert command[:3] == ["kubectl", "logs", "--follow"]
    assert command[-1] == "--selector=jobset.sigs.k8s.io/jobset-name=mine"
    assert printed("gke.sh", "status", "--cluster=pods") == [
        ["xpk", "workload", "list", "--cluster=pods"]
    ]
    assert printed("gke.sh", "delete", "mine", "--cluster=pods") == [
        ["xpk", "workload", "delete", "--workload=mine", "--force", "--cluster=pods"]
    ]


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 4), (16, 8)])
def test_slurm_starts_one_process_a_gpu(nodes, gpus):
    (command,) = printed(
        "slurm.sh",
        f"--nodes={nodes}",
        f"--gpus={gpus}",
        "--time=1:00:00",
        "--account=ours",
        "--venv=/shared/my venv",
        "--sbatch-flags=--qos=high --constraint=h100",
        "--",
        *STAGE,
    )
    assert command[:-1] == [
        *["sbatch", "--job-name=retmask", f"--nodes={nodes}", f"--ntasks-per-node={gpus}"],
        *[f"--gpus-per-node={gpus}", "--cpus-per-task=8", "--time=1:00:00", "--account=ours"],
        *["--output=retmask-%j.log", "--open-mode=append", "--requeue"],
        *["--qos=high", "--constraint=h100"],
    ]
    assert command[-1].startswith("--wrap=")
    assert shlex.split(command[-1].removeprefix("--wrap=")) == [
        *["srun", "--kill-on-bad-exit=1", "--gpu-bind=none", "--cpus-per-task=8"],
        *["/shared/my venv/bin/retmask", *STAGE],
    ]


REFUSED = {
    "tpu.sh": "ACTION NAME",
    "tpu.sh create": "ACTION NAME",
    "tpu.sh create mine": "--zone=… is missing",
    "tpu.sh create mine --zone": "--zone wants a value",
    "tpu.sh create mine --zone=": "--zone wants a value",
    "tpu.sh create mine --zone=z": "--type=… is missing",
    "tpu.sh create mine --zone=z --type=v9-8": "--runtime=VERSION is missing",
    "tpu.sh create mine --zone=z --type=v6e-8 --slices=two": "--slices=two",
    "tpu.sh create mine --zone=z --type=v6e-8 --slices=2 --vm": "one slice",
    "tpu.sh create mine yours --zone=z": "yours",
    "tpu.sh create mine --zone=z --spots": "--spots: no such option",
    "tpu.sh create mine --zone=z --spot=1": "--spot=1: no such option",
    "tpu.sh make mine --zone=z": "make: no such action",
    "tpu.sh run mine --zone=z": "which stage?",
    "tpu.sh keep mine --zone=z --type=v6e-8": "which stage?",
    "tpu.sh keep mine --zone=z --type=v6e-8 --vm -- train": "--vm",
    "gke.sh": "what to do?",
    "gke.sh stop": "stop: no such action",
    "gke.sh image": "--image=… is missing",
    "gke.sh run": "which workload?",
    "gke.sh run mine --image=i --type=v6e-8 -- train": "--cluster=… is missing",
    "gke.sh run mine --cluster=c --image=i --type=v6e-8": "which stage?",
    "gke.sh run mine --cluster=c --image=i --type=v6e-8 --restarts=-1 -- train": "--restarts=-1",
    "gke.sh status": "--cluster=… is missing",
    "slurm.sh": "which stage?",
    "slurm.sh train": "a stage comes after --",
    "slurm.sh --nodes=0 -- train": "--nodes=0",
    "slurm.sh -n4 -- train": "-n4: no such option",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_mistake_is_one_clear_line(line):
    script, *args = line.split()
    done = call(script, "--dry-run", *args)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"{script}: error: ") and done.stderr.count("\n") == 1
    assert REFUSED[line] in done.stderr


def test_the_page_shows_what_works():
    page = (LAUNCH / "README.md").read_text()
    (block,) = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    env = os.environ | {"ZONE": "here", "BUCKET": "ours"}
    done = subprocess.run(
        ["bash", "-c", block], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert "train --config=configs/llama31_8b.py --workdir=gs://ours/llama31_8b" in done.stdout
    assert all(f"`{script}`" in page for script in SCRIPTS)


def test_no_project_zone_or_bucket_is_baked_in():
    for file in LAUNCH.iterdir():
        place = r"gs://[a-z]|\.pkg\.dev|gcr\.io|\b(us|europe|asia)-[a-z]+\d"
        assert not re.search(place, file.read_text()), file
