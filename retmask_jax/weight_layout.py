"""How our stacked weights lie in stored tensors, and parts of them read straight into place."""

import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from retmask_jax import safetensors_io
from retmask_jax.models import weight_names
from retmask_jax.models.config import DecoderConfig
from retmask_jax.models.naming import Slot

_BLOCK_BYTES = 8 << 20
_TILE_ROWS = 16


class StoredTensor(Protocol):
    """One tensor on the disk, under its Hugging Face name, shape and row order."""

    shape: tuple[int, ...]
    dtype: str

    def rows(self, start: int, stop: int) -> np.ndarray: ...


def slots_by_path(config: DecoderConfig) -> dict[str, list[Slot]]:
    """For each weight the stored tensors it is made of, in the order of its axis G."""
    found: dict[str, list[Slot]] = {}
    for slot in weight_names(config):
        found.setdefault(slot.path, []).append(slot)
    return found


def input_axes(slot: Slot) -> int:
    """How many leading axes of our weight (without G) are the input side: 0, 1, or 2 for o."""
    if not slot.transpose:
        return 0
    return 2 if slot.path.endswith("attention.o") else 1


def hf_shape(shape: tuple[int, ...], slot: Slot) -> tuple[int, ...]:
    """The Hugging Face shape of the tensor at `slot` of a weight of this (stacked) shape."""
    shape = shape[0 if slot.group is None else 1 :]
    split = input_axes(slot)
    if split:
        return math.prod(shape[split:]), math.prod(shape[:split])
    return shape if slot.group is None else (math.prod(shape),)


def read_slice(
    tensors: Mapping[str, StoredTensor],
    slots: list[Slot],
    shape: tuple[int, ...],
    dtype: np.dtype,
    index: tuple[slice, ...],
) -> np.ndarray:
    """The part `index` of a stacked weight of this shape, gathered into one array."""
    spans = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    out = _aligned_empty(tuple(stop - start for start, stop in spans), dtype)
    if slots[0].group is None:
        _read_into(out, tensors[slots[0].name], shape, spans, input_axes(slots[0]))
    else:
        for layer, slot in zip(out, slots[slice(*spans[0])], strict=True):
            tensor = tensors[slot.name]
            _read_into(layer, tensor, shape[1:], spans[1:], input_axes(slot))
    return out


def _read_into(
    out: np.ndarray,
    tensor: StoredTensor,
    shape: tuple[int, ...],
    spans: list[tuple[int, int]],
    split: int,
) -> None:
    """Fills `out` with the part `spans` of our weight of this shape, a block of rows at a time.

    The stored tensor is our weight with its first `split` axes moved to the end, flattened to two
    dimensions. Its rows are therefore the output axes, of which the first is cut into blocks.
    """
    moved = [*range(split, len(shape)), *range(split)]
    shape, spans = [shape[i] for i in moved], [spans[i] for i in moved]
    target = out.transpose(moved)
    (first, last), rest = spans[0], tuple(slice(*span) for span in spans[1:])
    rows = tensor.shape[0] // shape[0]  # stored rows to one step of the first axis
    # A transposing copy stays in the processor's cache if it is a few rows high.
    tile = max(1, _TILE_ROWS // rows) if split else last - first
    for start, stop in row_blocks(first, last, tensor, rows):
        block = tensor.rows(start * rows, stop * rows).reshape(stop - start, *shape[1:])
        part = target[start - first : stop - first]
        for at in range(0, len(part), tile):
            part[at : at + tile] = block[(slice(at, at + tile), *rest)]


def row_blocks(
    start: int, stop: int, tensor: StoredTensor, rows: int = 1
) -> Iterator[tuple[int, int]]:
    """Cuts start..stop, each step of it `rows` rows of the tensor, into blocks of megabytes."""
    row_bytes = math.prod(tensor.shape[1:]) * safetensors_io.numpy_dtype(tensor.dtype).itemsize
    step = max(1, _BLOCK_BYTES // (rows * row_bytes))
    for at in range(start, stop, step):
        yield at, min(at + step, stop)


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype, alignment: int = 64) -> np.ndarray:
    """Uninitialised memory that the CPU backend can take over as it is, without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + alignment, np.uint8)
    skip = -memory.ctypes.data % alignment
    return memory[skip : skip + size].view(dtype).reshape(shape)
