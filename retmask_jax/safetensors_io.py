"""The safetensors format: headers that are checked, rows that are read one block at a time.

A file is 8 bytes of little-endian header length, the header (JSON: name -> dtype, shape, offsets)
and the data: https://github.com/huggingface/safetensors#format.
"""

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from retmask_jax.errors import UserError
from retmask_jax.workdir import is_local

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_POINTER = b"version https://git-lfs"
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library


def numpy_dtype(name: str) -> np.dtype:
    """float32, float16 or bfloat16 as a NumPy dtype."""
    return np.dtype(getattr(ml_dtypes, name, name))


@dataclasses.dataclass(frozen=True)
class SafeTensor:
    """One tensor of a safetensors file; nothing of it is in memory.

    Attributes:
      path: the file.
      offset: bytes from the start of the file to the first element.
      shape: its shape.
      dtype: float32, float16 or bfloat16.
    """

    path: epath.Path
    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop, [stop - start, ...]: of a local file, mapped and read when used."""
        dtype = numpy_dtype(self.dtype)
        width = math.prod(self.shape[1:])
        shape = (stop - start, *self.shape[1:])
        offset = self.offset + start * width * dtype.itemsize
        if is_local(self.path):
            return np.memmap(self.path, dtype, "r", offset, shape)
        with self.path.open("rb") as file:
            file.seek(offset)
            data = file.read((stop - start) * width * dtype.itemsize)
        return np.frombuffer(data, dtype).reshape(shape)


def check_not_pointer(path: epath.Path) -> None:
    """Refuses the text file that git leaves in place of weights kept in git-lfs.

    Raises:
      UserError: it is one.
    """
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise UserError(f"{path}: a git-lfs pointer, not weights; run `git lfs pull` there")


def read_header(path: epath.Path) -> dict[str, SafeTensor]:
    """The tensors of a file, from its header alone.

    Raises:
      UserError: a git-lfs pointer; a header that is no header; offsets that do not tile the data;
        a file shorter or longer than its header says; a dtype that is not a plain float.
    """
    check_not_pointer(path)
    size = path.stat().length
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise UserError(
                f"{path}: not a whole safetensors file: {size} bytes, header of {length}; download "
                "it again"
            )
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = sorted(
                (begin, end, name, entry["dtype"], tuple(int(n) for n in entry["shape"]))
                for name, entry in header.items()
                for begin, end in [entry["data_offsets"]]
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError(
                f"{path}: its safetensors header is unreadable; download it again"
            ) from None
    tensors, expected = {}, 0
    for begin, end, name, code, shape in entries:
        if code not in DTYPES:
            raise UserError(
                f"{path}: {name} is stored as {code}; only plain floats ({', '.join(DTYPES)}) can "
                "be read: use an unquantised checkpoint"
            )
        tensor = SafeTensor(path, 8 + length + begin, shape, DTYPES[code])
        if begin != expected or end - begin != tensor.nbytes:
            raise UserError(
                f"{path}: wrong header: {name} {list(shape)} {code} cannot lie at bytes {begin} to "
                f"{end}; download it again"
            )
        tensors[name], expected = tensor, end
    whole = 8 + length + expected
    if size != whole:
        kind = "truncated" if size < whole else "too long"
        raise UserError(
            f"{path}: {kind}: {size} bytes, its header describes {whole}; download it again"
        )
    return tensors


def header(tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> bytes:
    """The length and header of a file that holds these (name, shape, dtype) in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers 4 asks for it
    offset = 0
    for name, shape, dtype in tensors:
        end = offset + math.prod(shape) * numpy_dtype(dtype).itemsize
        entries[name] = {
            "dtype": _CODES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
