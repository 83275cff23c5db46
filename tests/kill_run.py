"""Kills `retmask run` again and again, and compares what it ends with to a run left alone.

python tests/kill_run.py FOLDER --config=… [--config.x=…]

It takes several times as long as the run itself, so it is no part of `make test`. Compared are all
files byte by byte, but for the log, TensorBoard's events (which hold the time of day) and the
checkpoints (the weights in them are compared as exported).
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

LEFT_OUT = ("retmask.log", ".lock", "train/checkpoints/", "train/tensorboard/")


def start(work: Path, flags: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "retmask_jax", "run", f"--workdir={work}", *flags]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)


def killed_run(work: Path, flags: list[str], longest: float, seed: int) -> int:
    """Runs to the end, however often it is killed; returns how often that was."""
    rng = random.Random(seed)
    kills = 0
    while True:
        process = start(work, flags)
        try:
            # More time after each kill, or a run whose start is slow would never get anywhere.
            status = process.wait(timeout=rng.uniform(2, longest * (1 + kills / 4)))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            continue
        if status:
            sys.exit(f"exit status {status} after {kills} kills")
        return kills


def files(work: Path) -> dict[str, bytes]:
    names = {str(p.relative_to(work)): p for p in work.rglob("*") if p.is_file()}
    return {n: p.read_bytes() for n, p in names.items() if not n.startswith(LEFT_OUT)}


def main() -> None:
    folder, *flags = sys.argv[1:]
    alone, killed = Path(folder) / "work", Path(folder) / "killed" / "work"
    begin = time.monotonic()
    if start(alone, flags).wait():
        sys.exit("the run left alone failed")
    seconds = time.monotonic() - begin
    kills = killed_run(killed, flags, longest=seconds / 4, seed=0)
    one, other = files(alone), files(killed)
    differ = sorted(n for n in one.keys() | other.keys() if one.get(n) != other.get(n))
    print(f"{kills} kills, {len(one)} files, {len(differ)} differ", *differ, sep="\n  ")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
