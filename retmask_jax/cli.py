"""The command line: `retmask STAGE --config=FILE[:arg] --workdir=DIR [--config.x.y=…]`."""

import contextlib
import errno
import importlib
import importlib.util
import logging
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict
from tqdm import tqdm

from retmask_jax import config as configs
from retmask_jax.errors import UserError
from retmask_jax.progress import clock
from retmask_jax.workdir import Workdir, is_local

# What each stage runs, in order: modules of this package with a `run(config, workdir)`.
PARTS = {
    "detect": ("detect",),
    "generate": ("generate",),
    "train": ("train",),
    "export": ("export",),
    "evaluate": ("evaluate", "report"),
}
STAGES = {"run": tuple(module for modules in PARTS.values() for module in modules), **PARTS}

# The options of `plan`, which runs nothing: default and meaning.
PLAN = {
    "topology": ("", "TPU slice: CHIP:AxB or AxBxC, CHIP v4, v5e, v5p, v6e or tpu7x (v5e:4x8)"),
    "slices": (1, "number of such slices; mesh.data runs across them"),
    "stage": ("train", "what to plan: train, generate or detect"),
    "model_config": ("", "config.json of the model; empty: model.path's, or built-in dimensions"),
    "row_length": (0, "tokens of a training row; 0: the longest of train.buckets"),
    "sweep": (False, "try every mesh; a table and a plot go to --workdir"),
    "export_hlo": ("", "folder for the text of the compiled programs; empty: none"),
}

# The options of all other stages that say which processes make up a run: default and meaning.
RUN = {
    "coordinator": ("", "HOST:PORT of process 0, where the processes of a run meet"),
    "processes": (0, "number of processes of the run; 1: this one alone; 0: find out"),
    "process": (-1, "which of them this is, from 0"),
    "lost_after": (60, "seconds without a sign of life until a process counts as lost"),
}
RUN_HELP = """\
Several hosts: on Cloud TPU slices, under Slurm and under mpirun the processes find one another;
elsewhere start the same command on each, with --coordinator, --processes and --process."""

HELP = """\
usage: retmask STAGE --config=FILE[:ARG] --workdir=DIR [--config.GROUP.NAME=VALUE …]

stages
  run        all of the below, in this order
  detect     score every head by how it looks up needles in long contexts; pick heads to mask
  generate   answer prompts with and without those heads, in one decode batch
  train      prefer the answers with the heads to those without (DPO)
  export     write the trained weights as a Hugging Face folder (--masked: the source's weights
             with the picked heads zeroed)
  evaluate   needle accuracy of base, masked, random-masked and trained model; report.html
  plan       memory, collectives and speed of a stage on a TPU slice that need not be there

A stage skips what is done in --workdir and goes on with what is not.
`retmask STAGE --help` lists the stage's options."""

_log = logging.getLogger("retmask")
_NO_ROOM = {
    errno.ENOSPC: "No space left on device",
    errno.EDQUOT: "Disk quota exceeded",
    errno.EFBIG: "File too large",
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command line and returns its exit status: 0, 1 (failed) or 2 (user's mistake)."""
    try:
        _command(sys.argv[1:] if argv is None else argv)
    except (Exception, KeyboardInterrupt) as error:
        line, status = _explain(error)
        if not line:
            raise
        print(f"retmask: error: {' '.join(line.split())}", file=sys.stderr)
        return status
    return 0


def _explain(error: BaseException) -> tuple[str, int]:
    """Returns the line to say and the exit status; no line where the error is not foreseen."""
    if isinstance(error, UserError):
        return str(error), 2
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; the same command goes on where it stopped", 130
    if full := no_room(error):
        return f"{full}; make room, then the same command goes on where it stopped", 1
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}", 1
    return "", 1


def no_room(error: BaseException | None) -> str:
    """Returns what to say if `error` or one it came from means a full disk, else ""."""
    while error is not None:
        where = getattr(error, "filename", None)
        for number, text in _NO_ROOM.items():
            if getattr(error, "errno", None) == number or text.lower() in str(error).lower():
                return f"{where}: {text}" if where else text
        error = error.__cause__ or error.__context__
    return ""


def _command(argv: list[str]) -> None:
    if not argv:
        raise UserError(f"which stage? {' | '.join(STAGES)} (retmask --help says more)")
    stage, *args = argv
    if stage in ("--help", "-h", "help"):
        print(HELP)
        return
    if stage not in (*STAGES, "plan"):
        raise UserError(f"{stage}: no such stage; it is one of {', '.join((*STAGES, 'plan'))}")
    if "--help" in args or "-h" in args:
        if stage == "plan":
            print("usage: retmask plan --config=FILE[:ARG] --topology=CHIP:AxB [option …]\n")
            for name, (default, text) in PLAN.items():
                print(f"  --{name}={default}\n      {text}")
            print(configs.describe("run"))
            return
        print(f"usage: retmask {stage} --config=FILE[:ARG] --workdir=DIR [option …]\n")
        if stage == "export":
            print("  --masked\n      write the source's weights, masked, not the trained ones")
        for name, (default, text) in RUN.items():
            print(f"  --{name}={default}\n      {text}")
        print(configs.describe(stage))
        print(f"\n{RUN_HELP}")
        return
    values, overrides = parse(stage, args)
    config = configs.load(values.config, overrides)
    _quiet()
    if stage == "plan":
        from retmask_jax import plan

        options = {name: values[name].value for name in PLAN}
        plan.run(config, workdir=values.workdir or "", **options)
        return
    from retmask_jax import distributed

    _check_store(values.workdir, config)
    joining = {name: values[name].value for name in RUN}
    with distributed.together(_explain, **joining):
        _run(stage, config, Workdir(values.workdir), {"masked": True} if values.masked else {})


def parse(stage: str, args: list[str]) -> tuple[flags.FlagValues, list[str]]:
    """Splits the arguments of a stage into our own flags and those of the config."""
    values = flags.FlagValues()
    flags.DEFINE_string("config", None, "config file or name", flag_values=values)
    flags.DEFINE_string("workdir", None, "work directory", flag_values=values)
    flags.DEFINE_boolean("masked", False, "export the masked weights", flag_values=values)
    for name, (default, text) in (PLAN if stage == "plan" else RUN).items():
        define = {bool: flags.DEFINE_boolean, int: flags.DEFINE_integer, str: flags.DEFINE_string}
        define[type(default)](name, default, text, flag_values=values)
    own, overrides = [], []
    rest = iter(args)
    for arg in rest:
        flag, equals, value = arg.partition("=")
        name = flag.lstrip("-")
        if not name.removeprefix("no").startswith("config."):
            dashed = flag.startswith("--")
            own.append(f"--{name.replace('-', '_')}{equals}{value}" if dashed else arg)
        elif "=" in arg or configs.is_switch(name):
            overrides.append(arg)
        else:
            overrides.append(f"{arg}={next(rest, '')}")
    try:
        positional = values(["retmask", *own])[1:]
    except flags.Error as error:
        raise UserError(configs.one_line(error)) from None
    if positional:
        raise UserError(f"{positional[0]}: not understood; options begin with --")
    if not values.config:
        raise UserError("--config=FILE is missing, e.g. --config=configs/smollm2_135m.py")
    if not values.workdir and stage != "plan":
        raise UserError("--workdir=DIR is missing, e.g. --workdir=out")
    if values.masked and stage != "export":
        raise UserError("--masked goes with the stage export only")
    return values, overrides


def _quiet() -> None:
    """Silences libraries that talk about what this program never uses. Before jax is imported."""
    for name, value in {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "HF_HUB_OFFLINE": "1",
    }.items():
        os.environ.setdefault(name, value)


def _run(stage: str, config: ConfigDict, workdir: Workdir, options: dict[str, bool]) -> None:
    _check(stage, config)
    import jax

    from retmask_jax import distributed

    first = jax.process_index() == 0  # of the processes of one job, which share the work directory
    with contextlib.ExitStack() as stack:
        if first:
            stack.enter_context(workdir.lock())
            workdir.freeze(config)
        distributed.wait("work directory is ours")
        stack.enter_context(_logging(workdir, first))
        for name in STAGES[stage]:
            module = importlib.import_module(f"retmask_jax.{name}")
            _log.info("%s: started", name)
            start = time.monotonic()
            peak = _peak_memory()
            module.run(config, workdir, **options)
            distributed.wait(f"{name}: done")
            seconds = clock(time.monotonic() - start)
            _log.info("%s: done in %s, peak memory %.2f GiB", name, seconds, peak() / 2**30)


def _check_store(workdir: str, config: ConfigDict) -> None:
    """Refuses paths on `gs://` where the package that reads them is missing."""
    values = [
        value for part in config.values() if isinstance(part, ConfigDict) for value in part.values()
    ]
    paths = [workdir, *(value for value in values if isinstance(value, str))]
    remote = next((path for path in paths if path.startswith("gs://")), None)
    if remote and not importlib.util.find_spec("gcsfs"):
        raise UserError(f"{remote}: needs gcsfs; pip install 'retmask-jax[gcs]'")


def _check(stage: str, config: ConfigDict) -> None:
    """Raises the errors that can be found before anything is written."""
    from retmask_jax.checkpoint_io import open_source
    from retmask_jax.mesh import make_mesh
    from retmask_jax.prompts import read_prompts

    make_mesh(config.mesh)
    positions = open_source(config.model.path).config.max_position
    for name in ("detect", "evaluate"):
        longest = config[name].max_length + config[name].max_new_tokens
        if longest > positions:
            raise UserError(
                f"config.{name}: max_length + max_new_tokens is {longest}, but the model has "
                f"{positions} positions"
            )
    if stage in ("run", "generate"):
        read_prompts(config.prompts.path, config.prompts.limit)


@contextlib.contextmanager
def _logging(workdir: Workdir, first: bool) -> Iterator[None]:
    """Sends the log to stderr and, from the first process, to the work directory's retmask.log.

    Of the other processes' only warnings are shown.
    """
    logging.raiseExceptions = False  # a full disk is reported once, not once a line
    console = _Console()
    console.setLevel(logging.INFO if first else logging.WARNING)
    handlers: list[logging.Handler] = [console]
    if first and is_local(workdir.root):
        file = logging.FileHandler(workdir.root / "retmask.log", encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        handlers.append(file)
    _log.setLevel(logging.DEBUG)
    _log.propagate = False
    for handler in handlers:
        _log.addHandler(handler)
    try:
        yield
    except BaseException:
        _log.debug("stopped", exc_info=True)
        raise
    finally:
        _log.propagate = True
        for handler in handlers:
            _log.removeHandler(handler)
            with contextlib.suppress(OSError):
                handler.close()


class _Console(logging.Handler):
    """Writes to stderr without tearing the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != "retmask.progress" or not sys.stderr.isatty():
            tqdm.write(self.format(record), file=sys.stderr)


def _peak_memory() -> Callable[[], int]:
    """Returns a function that gives the peak resident memory from now on, in bytes.

    Where the kernel cannot reset its mark (not Linux), it is the peak since the process began.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return lambda: next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    )
