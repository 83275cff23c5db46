"""The work directory and how files get into it: whole or not at all.

A file is written under a temporary name beside its target, flushed to the disk and renamed, so that
a process killed at any moment leaves the old file or the new one. On object stores (`gs://`) an
object appears whole when it is uploaded, which is the same promise.
"""

import codecs
import contextlib
import fcntl
import gzip
import io
import json
import logging
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, Any

from etils import epath
from ml_collections import ConfigDict

from retmask_jax.errors import UserError

PathLike = epath.PathLike

# Fields that may differ between two starts in one work directory, because they say where and how
# fast the work is done, not what comes out of it.
CHANGEABLE = (
    "mesh.data",
    "mesh.fsdp",
    "mesh.sequence",
    "mesh.tensor",
    "detect.slots",
    "detect.prefill_chunk",
    "generate.slots",
    "evaluate.slots",
    "train.checkpoint_every",
    "train.keep_checkpoints",
)

_SURROGATE = re.compile("[\ud800-\udfff]")
_log = logging.getLogger("retmask")


def is_local(path: PathLike) -> bool:
    """Tells a path of this machine's file system from one of an object store."""
    return "://" not in os.fspath(path)


def absolute(path: PathLike) -> epath.Path:
    """Returns `path` as it will still be found from another current directory."""
    return epath.Path(os.path.abspath(os.path.expanduser(path)) if is_local(path) else path)


@contextlib.contextmanager
def atomic_write(path: PathLike, mode: str = "w") -> Iterator[IO]:
    """Opens `path` for writing; the file is there, whole, only if the block ends without an error.

    Args:
        path: local or `gs://` path; missing folders are made.
        mode: "w" (UTF-8 text, newlines as written) or "wb".
    """
    path = epath.Path(path)
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    path.parent.mkdir(parents=True, exist_ok=True)
    if not is_local(path):
        buffer = io.BytesIO()
        file = io.TextIOWrapper(buffer, **text) if text else buffer
        yield file
        file.flush()
        path.write_bytes(buffer.getvalue())
        return
    temporary = path.parent / f".{path.name}.tmp"
    try:
        with open(temporary, mode, **text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise


def dump_row(row: Any, **options: Any) -> str:
    """Returns `row` as JSON text that is always valid UTF-8: lone surrogates become U+FFFD."""
    return _SURROGATE.sub("\ufffd", json.dumps(row, ensure_ascii=False, **options))


def write_json(path: PathLike, obj: Any) -> None:
    """Writes `obj` as indented JSON, atomically."""
    with atomic_write(path) as file:
        file.write(dump_row(obj, indent=2) + "\n")


def read_json(path: PathLike) -> Any:
    """Reads a JSON file (UTF-8, with or without a byte-order mark).

    Raises:
        UserError: the file is missing or not JSON.
    """
    text = _decode(_read_bytes(path), str(path))
    try:
        return _clean(json.loads(text))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON, line {error.lineno}: {error.msg}") from None


def read_jsonl(path: PathLike) -> list[dict]:
    """Reads a file with one JSON object a line.

    A byte-order mark and blank lines do not count, lone surrogates become U+FFFD, and a last line
    that was torn while it was written (no newline, does not parse) is dropped with a warning.

    Raises:
        UserError: the file is missing, or a row (named by its line number) is not UTF-8, not JSON
            or not an object.
    """
    return _rows(_read_bytes(path), str(path))


def append_jsonl(path: PathLike, row: dict) -> None:
    """Appends a row to a file that only ever grows, such as a log of metrics.

    A tail torn by an earlier kill is repaired first: cut away if it does not parse, ended with a
    newline if it does. If the row cannot be written whole, nothing of it stays.
    """
    path = epath.Path(path)
    line = (dump_row(row) + "\n").encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    if not is_local(path):
        path.write_bytes((_whole_rows(path.read_bytes()) if path.exists() else b"") + line)
        return
    with open(path, "a+b", buffering=0) as file:
        start = _last_line_start(file)
        file.seek(start)
        tail = file.read()
        file.truncate(start)
        line = _whole_rows(tail) + line
        try:
            while line:
                line = line[file.write(line) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(start)
            raise


def part_path(folder: PathLike, index: int, total: int) -> epath.Path:
    """Returns the path of part `index` (from 0) of `total` in `folder`."""
    return epath.Path(folder) / f"part-{index:05d}-of-{total:05d}.jsonl.gz"


def write_part(folder: PathLike, index: int, total: int, rows: Iterable[dict]) -> None:
    """Writes one part, atomically; the same rows always give the same bytes."""
    with (
        atomic_write(part_path(folder, index, total), "wb") as file,
        gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as packed,
    ):
        for row in rows:
            packed.write((dump_row(row) + "\n").encode())


def read_part(path: PathLike) -> list[dict]:
    """Reads the rows of one part.

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        data = gzip.decompress(_read_bytes(path))
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise UserError(f"{path}: damaged; delete it and start again") from None
    return _rows(data, str(path))


def parts(folder: PathLike) -> list[epath.Path]:
    """Returns the parts that are there, in order."""
    return sorted(epath.Path(folder).glob("part-?????-of-?????.jsonl.gz"))


def finished_parts(folder: PathLike) -> list[epath.Path]:
    """Returns all parts of a finished folder, in order, to be read one by one.

    Raises:
        UserError: there is none, or one is missing.
    """
    found = parts(folder)
    if not found:
        raise UserError(f"{folder}: no part-*.jsonl.gz here; run the stage that writes it first")
    total = int(found[0].name.split("-")[3].split(".")[0])
    for index in range(total):
        if part_path(folder, index, total) not in found:
            missing = part_path(folder, index, total)
            raise UserError(f"{missing}: missing; run the stage that writes it again")
    return found


def read_parts(folder: PathLike) -> list[dict]:
    """Reads the rows of all parts of a finished folder, in order.

    Raises:
        UserError: there is none, or one is missing.
    """
    return [row for path in finished_parts(folder) for row in read_part(path)]


class Workdir:
    """The folder that holds a run's artefacts, one sub-folder a stage.

    Attributes:
        root: absolute path, local or `gs://`, fixed when the object is made.
        detect, generate, preferences, train, export, evaluate: its sub-folders.
    """

    def __init__(self, root: PathLike):
        self.root = absolute(root)
        self.detect = self.root / "detect"
        self.generate = self.root / "generate"
        self.preferences = self.root / "preferences"
        self.train = self.root / "train"
        self.export = self.root / "export"
        self.evaluate = self.root / "evaluate"

    def freeze(self, config: ConfigDict) -> None:
        """Writes `config.json` at the first start and holds later starts to it.

        As long as no stage has written anything, it is written anew.

        Raises:
            UserError: the work directory was made with other values; names each field that
                differs. Fields in `CHANGEABLE` may differ.
        """
        path = self.root / "config.json"
        new = json.loads(dump_row(config.to_dict()))
        stages = (self.detect, self.generate, self.preferences, self.train, self.export)
        begun = any(folder.exists() for folder in (*stages, self.evaluate))
        if not (begun and path.exists()):
            write_json(path, new)
            return
        old_flat, new_flat = _flatten(read_json(path)), _flatten(new)
        changes = [
            f"{name}: {_show(old_flat, name)} → {_show(new_flat, name)}"
            for name in sorted(old_flat.keys() | new_flat.keys())
            if name not in CHANGEABLE and _show(old_flat, name) != _show(new_flat, name)
        ]
        if changes:
            raise UserError(
                f"{self.root} was made with another config ({'; '.join(changes)}); "
                "use the old values or another --workdir"
            )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps a second process out of a local work directory for the length of the block.

        The lock is the kernel's, so it ends with the process that holds it, however that dies.

        Raises:
            UserError: another process holds it.
        """
        if not is_local(self.root):
            yield
            return
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / ".lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{self.root} is in use by another retmask process; "
                    "wait for it or use another --workdir"
                ) from None
            yield


def _read_bytes(path: PathLike) -> bytes:
    path = epath.Path(path)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: a folder where a file is needed") from None
    except PermissionError:
        raise UserError(f"{path}: cannot be read (permission denied)") from None


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 (byte {error.start}); save it as UTF-8") from None


def _clean(obj: Any) -> Any:
    """Replaces lone surrogates anywhere in a parsed JSON value by U+FFFD."""
    text = json.dumps(obj, ensure_ascii=False)
    return json.loads(dump_row(obj)) if _SURROGATE.search(text) else obj


def _rows(data: bytes, where: str) -> list[dict]:
    """Parses JSON lines; `where` names the file in errors."""
    *lines, last = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            rows.append(_row(line, f"{where}, row {number}"))
    if last.strip():
        try:
            rows.append(_row(last, f"{where}, row {len(lines) + 1}"))
        except UserError as error:
            if _parses(last):
                raise
            _log.warning("dropped a torn last line (%s)", error)
    return rows


def _row(line: bytes, where: str) -> dict:
    text = _decode(line, where)
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg}, column {error.colno})") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: a JSON object is needed, not {text.strip()[:40]}")
    return _clean(row) if "\\u" in text else row


def _parses(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _whole_rows(data: bytes) -> bytes:
    """Returns `data` ending in a newline: a torn last line is cut, a whole one is ended."""
    start = data.rfind(b"\n") + 1
    tail = data[start:]
    if not tail:
        return data
    return data + b"\n" if _parses(tail) else data[:start]


def _last_line_start(file: io.FileIO, block: int = 65536) -> int:
    """Returns the offset of the text after the last newline of an open file."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - block)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


def _flatten(tree: dict, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _show(flat: dict[str, Any], name: str) -> str:
    return json.dumps(flat[name], ensure_ascii=False) if name in flat else "(absent)"
