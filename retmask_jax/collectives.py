"""Collectives of an HLO module: what they move, among which devices, along which mesh axes."""

import dataclasses
import math
import re

import numpy as np

from retmask_jax.hlo_text import Instruction, Shape

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective as one device sees it.

    Attributes:
        kind: one of COLLECTIVES.
        shapes: of its larger side: what is gathered, or what is reduced before it is scattered.
        groups: partitions that exchange data, one group a row; pairs for collective-permute; the
            partition itself where the exchange is between slices.
        slices: how many slices exchange data with one another; 1: it is inside each slice.
        times: how often it runs.
        loops: trip counts of the loops around it, outermost first.
        op_name: where in the traced program it comes from.
    """

    kind: str
    shapes: tuple[Shape, ...]
    groups: np.ndarray
    op_name: str
    slices: int = 1
    times: float = 1.0
    loops: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of `shapes`, once."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def sent(self) -> float:
        """Bytes that a device sends in all runs, by the ring algorithms."""
        n = self.groups.shape[1] * self.slices
        share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}
        return self.times * self.bytes * share.get(self.kind, (n - 1) / n)


def collective(each: Instruction) -> Collective | None:
    """The collective that an instruction is, or starts; None: it is none."""
    if each.opcode == "send" and "_xla_megascale_transfer_type" in each.attributes:
        return _between_slices(each)
    kind = each.opcode.removesuffix("-start")
    if kind not in COLLECTIVES or "source_target_pairs={}" in each.attributes:
        return None
    shapes = each.shapes
    if each.opcode.endswith("-start") and len(shapes) > 1:  # (source, destination, …)
        shapes = shapes[1:2]
    groups = _pairs(each) if kind == "collective-permute" else _groups(each)
    if kind == "reduce-scatter":
        n = groups.shape[1]
        shapes = tuple(dataclasses.replace(s, dims=(n, *s.dims)) for s in shapes)
    return Collective(kind, shapes, groups, each.op_name)


def _between_slices(each: Instruction) -> Collective:
    """The sending half of an exchange between slices, such as `{1,2}x{0:3}`: slices 1 and 2."""
    kind = each.attribute(r'_xla_megascale_transfer_type="(\w+)"')
    kind = kind.lower().replace("_", "-").replace("one-to-one", "collective-permute")
    slices = 0
    for part in (each.attribute(r'_xla_megascale_target="?\{([\d,:]+)\}x') or "0,1").split(","):
        first, _, last = part.partition(":")
        slices += int(last or first) - int(first) + 1
    return Collective(kind, each.shapes[:1], np.zeros((1, 1), int), each.op_name, slices)


def _pairs(each: Instruction) -> np.ndarray:
    text = each.attribute(r"source_target_pairs=\{([\d,{}]*)\}")
    return np.array([[int(i) for i in pair.split(",")] for pair in re.findall(r"\{([^}]*)", text)])


def _groups(each: Instruction) -> np.ndarray:
    """Replica groups in any of HLO's three notations, int [groups, members]."""
    if text := each.attribute(r"replica_groups=\{(\{[\d,{}]*\})\}"):
        rows = re.findall(r"\{([\d,]*)\}", text)
        return np.array([[int(i) for i in row.split(",")] for row in rows])
    if text := each.attribute(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"):
        return _iota(text)
    text = each.attribute(r"replica_groups=(mesh\[[^\]]*\](?:, device_ids=\(\S*)? \{[^}]*\})")
    if text is None:
        raise ValueError(f"replica groups not understood: {each.attributes[:200]}")
    axes = re.findall(r"'([^']+)'=(\d+)", text)
    sizes = [int(size) for _, size in axes]
    order = re.search(r"device_ids=\((\[[\d,]+\](?:T\([\d,]+\))?)\)", text)
    ids = _iota(f"[{math.prod(sizes)}]<={order.group(1)}") if order else None
    ids = np.arange(math.prod(sizes)) if ids is None else ids
    ids = ids.reshape(sizes)
    # An axis may take part whole or, as 'axis':(before)size, in part: split it in three then.
    parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", text[text.rindex("{") :])
    shape, chosen = [], []
    for name, size in axes:
        pieces = [(int(a or 1), int(b or size)) for axis, a, b in parts if axis == name]
        done = 1
        for before, width in sorted(pieces):
            shape += [before // done, width]
            chosen.append(len(shape) - 1)
            done = before * width
        shape.append(int(size) // done)
    ids = ids.reshape(shape)
    return np.moveaxis(ids, chosen, range(-len(chosen), 0)).reshape(
        -1, math.prod(shape[i] for i in chosen)
    )


def _iota(text: str) -> np.ndarray:
    """`[2,4]<=[4,2]T(1,0)`: the numbers 0 to 7 as [4, 2], transposed, as [2, 4]."""
    shape, dims, order = re.fullmatch(
        r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text
    ).groups()
    numbers = [[int(i) for i in part.split(",")] for part in (shape, dims)]
    ids = np.arange(math.prod(numbers[1])).reshape(numbers[1])
    if order:
        ids = ids.transpose([int(i) for i in order.split(",")])
    return ids.reshape(numbers[0])


def mesh_axes(collective: Collective, shape: dict[str, int]) -> tuple[str, ...]:
    """The axes of a mesh along which a collective exchanges data.

    Args:
        shape: sizes of the mesh's axes in order; partition i is its i-th device.
    """
    coordinates = np.stack(np.unravel_index(collective.groups, tuple(shape.values())))
    differs = (coordinates != coordinates[..., :1]).any(axis=(1, 2))
    return tuple(axis for axis, moves in zip(shape, differs, strict=True) if moves)
