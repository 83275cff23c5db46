"""Configs: find the file, apply the flags, refuse what cannot work before anything starts."""

import difflib
import importlib.util
import math
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

import retmask_jax.configs
from retmask_jax.configs.base import OPTIONS, Option
from retmask_jax.errors import UserError
from retmask_jax.workdir import absolute

# The options that a stage reads, by groups or one by one, for its `--help`.
GROUPS = {
    "detect": ("seed", "model", "chat", "mesh", "haystack", "detect", "heads"),
    "generate": ("seed", "model", "chat", "mesh", "prompts", "generate"),
    "train": ("seed", "model", "chat", "mesh", "preferences", "train"),
    "export": ("model", "mesh", "export"),
    "evaluate": (
        "seed",
        "model",
        "chat",
        "mesh",
        "haystack",
        "evaluate",
        "detect.prefill_chunk",
        "detect.pass_recall",
    ),
}
PATHS = ("haystack.path", "haystack.needles", "prompts.path", "preferences.path")


def load(spec: str, overrides: Sequence[str] = ()) -> ConfigDict:
    """Returns the locked config that a command line asks for, with absolute paths.

    Args:
        spec: FILE.py or the name of an installed config, each with an optional `:ARG` for its
            `get_config(arg)`.
        overrides: flags such as `--config.train.beta=0.2`.

    Raises:
        UserError: names the file or the field, and says what is allowed.
    """
    config = read(spec)
    override(config, overrides)
    validate(config)
    for name in PATHS:
        if value := _get(config, name):
            _set(config, name, str(absolute(value)))
    if not config.model.path.startswith("package:"):
        config.model.path = str(absolute(config.model.path))
    return config


def read(spec: str) -> ConfigDict:
    """Runs the `get_config` of a config file; see `load` for `spec` and errors."""
    name, _, arg = spec.partition(":")
    path = _find(name)
    loader = importlib.util.spec_from_file_location("retmask_config", path)
    module = importlib.util.module_from_spec(loader)
    try:
        loader.loader.exec_module(module)
        config = module.get_config(arg) if arg else module.get_config()
    except SyntaxError as error:
        raise UserError(f"{path}, line {error.lineno}: {error.msg}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f.lineno for f in frames if f.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        raise UserError(f"{where}: {one_line(error) or type(error).__name__}") from None
    if not isinstance(config, ConfigDict):
        raise UserError(f"{path}: get_config() must return an ml_collections ConfigDict")
    return config.lock()


def override(config: ConfigDict, overrides: Sequence[str]) -> None:
    """Sets fields from flags such as `--config.train.beta=0.2`; see `load` for errors."""
    for flag in overrides:
        name = flag.partition("=")[0].lstrip("-").removeprefix("no").removeprefix("config.")
        if name not in OPTIONS:
            raise UserError(f"--config.{name}: no such option{near(name, OPTIONS)}")
    values = flags.FlagValues()
    argv = ["retmask", *overrides]
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
    try:
        rest = values(argv)[1:]
    except (flags.Error, ValueError, TypeError) as error:
        raise UserError(one_line(error)) from None
    if rest:
        raise UserError(f"{rest[0]}: not understood")


def validate(config: ConfigDict) -> None:
    """Checks every value on its own and those that must fit one another.

    Raises:
        UserError: names the first field at fault.
    """
    names = set(_names(config))
    for name in sorted(names - OPTIONS.keys()):
        raise UserError(f"config.{name}: no such option{near(name, OPTIONS)}")
    for name, option in OPTIONS.items():
        if name not in names:
            raise UserError(f"config.{name}: missing; start from retmask_jax.configs.base")
        _check(name, option, _get(config, name))

    if not config.model.path:
        raise UserError("config.model.path is empty; give the weights' folder or file")
    if list(config.mesh.values()).count(-1) > 1:
        raise UserError("config.mesh: only one of its sizes may be -1")
    if 0 in config.mesh.values():
        raise UserError("config.mesh: a size must be -1 or at least 1")
    for stage in (config.detect, config.evaluate):
        which = "detect" if stage is config.detect else "evaluate"
        if stage.min_length > stage.max_length or (
            stage.min_length == stage.max_length and stage.lengths > 1
        ):
            raise UserError(
                f"config.{which}: no {stage.lengths} lengths lie between min_length "
                f"{stage.min_length} and max_length {stage.max_length}"
            )
    if config.heads.rule == "top" and config.heads.k is None:
        raise UserError("config.heads.k is not set; the rule 'top' needs it")
    if config.heads.rule == "list" and not config.heads.list:
        raise UserError("config.heads.list is empty; the rule 'list' needs it")
    for head in config.heads.list:
        if not (isinstance(head, str) and re.fullmatch(r"\d+-\d+", head)):
            raise UserError(f"config.heads.list: {head!r} is not a 'layer-head' such as '18-6'")
    train = config.train
    if train.pairs_per_step % train.micro_pairs:
        raise UserError(
            f"config.train.micro_pairs is {train.micro_pairs}; it must divide "
            f"train.pairs_per_step ({train.pairs_per_step})"
        )
    if not train.buckets or list(train.buckets) != sorted(set(train.buckets)):
        raise UserError(f"config.train.buckets is {train.buckets}; it must ascend")
    if train.buckets[-1] < config.preferences.max_tokens:
        raise UserError(
            f"config.train.buckets ends at {train.buckets[-1]}; rows of preferences.max_tokens "
            f"({config.preferences.max_tokens}) must fit"
        )


def describe(stage: str) -> str:
    """Returns the options that `stage` (or `run`: any stage) reads, one a line, with defaults."""
    groups = GROUPS.get(stage)
    lines = []
    for name, option in OPTIONS.items():
        if groups is None or not {name, name.split(".")[0]}.isdisjoint(groups):
            default = None if isinstance(option.default, type) else option.default
            choices = f" [{' | '.join(option.choices)}]" if option.choices else ""
            lines.append(f"  --config.{name}={default}\n      {option.help}{choices}")
    return "\n".join(lines)


def near(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean …?" for the known names like `name`, or nothing."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    last = name.rpartition(".")[2]
    close += [k for k in known if k.rpartition(".")[2] == last and k not in close]
    return f"; did you mean {' or '.join(close[:3])}?" if close else ""


def is_switch(name: str) -> bool:
    """Tells whether a flag's name, without dashes, is one of a yes-or-no option."""
    option = OPTIONS.get(name.removeprefix("no").removeprefix("config."))
    return option is not None and isinstance(option.default, bool)


def one_line(error: BaseException) -> str:
    """Returns the message of an exception without line breaks."""
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return " ".join(str(text).split())


def _find(name: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path.absolute()
    installed = {p.stem: p for p in Path(retmask_jax.configs.__path__[0]).glob("[a-z]*.py")}
    if name in installed:
        return installed[name]
    if path.is_dir():
        raise UserError(f"{name}: a folder; --config takes a file")
    raise UserError(
        f"{name}: no such config file; the installed configs are {', '.join(sorted(installed))}"
    )


def _check(name: str, option: Option, value: Any) -> None:
    optional = isinstance(option.default, type)
    if optional and value is None:
        return
    kind = option.default if optional else type(option.default)
    number = (int, float) if kind is float else kind
    if not isinstance(value, number) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"config.{name} is {value!r}; it must be of type {kind.__name__}")
    if option.choices and value not in option.choices:
        raise UserError(f"config.{name} is {value!r}; it must be {' or '.join(option.choices)}")
    items = value if isinstance(value, tuple) else (value,)
    for item in items if option.low is not None else ():
        if kind is tuple and type(item) is not int:
            raise UserError(f"config.{name} holds {item!r}; whole numbers are needed")
        if not math.isfinite(item) or item < option.low:
            raise UserError(f"config.{name} is {value}; the least is {option.low} ({option.help})")
        if option.high is not None and item > option.high:
            raise UserError(f"config.{name} is {value}; the most is {option.high} ({option.help})")


def _names(config: ConfigDict, prefix: str = "") -> Iterator[str]:
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            yield from _names(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _get(config: ConfigDict, name: str) -> Any:
    for part in name.split("."):
        config = config[part]
    return config


def _set(config: ConfigDict, name: str, value: Any) -> None:
    group, _, field = name.rpartition(".")
    _get(config, group)[field] = value
