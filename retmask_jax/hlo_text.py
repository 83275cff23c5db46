"""The text of an optimised HLO module, as computations of instructions."""

import dataclasses
import math
import re

_BYTES = {"token": 0, "pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "s4": 0.5, "u4": 0.5}
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^{}]*)\})?")


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array; `hbm` is false where the compiler keeps it in an on-chip memory."""

    dtype: str
    dims: tuple[int, ...]
    hbm: bool

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes without the padding of tiles."""
        if self.dtype not in _BYTES:
            return self.size * int(re.search(r"\d+", self.dtype).group()) // 8
        return int(self.size * _BYTES[self.dtype])


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO.

    Attributes:
        shapes: of its result; of each element if that is a tuple.
        operands: their names; the literal of a constant, the number of a parameter.
        attributes: the text after the operands.
        root: whether its result is the computation's.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    def attribute(self, pattern: str) -> str | None:
        """The first group of a pattern in the attributes."""
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else None

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from."""
        return self.attribute(r'op_name="([^"]*)"') or ""


Computation = dict[str, Instruction]  # by name, in order


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """All computations by name, and the name of the one that is run."""
    computations: dict[str, Computation] = {}
    body, entry = {}, ""
    for line in text.splitlines():
        if line.endswith("{") and (start := re.match(r"(ENTRY )?%([\w.\-]+) \(", line)):
            body = computations[start.group(2)] = {}
            entry = start.group(2) if start.group(1) else entry
        elif found := re.match(r"\s+(ROOT )?%([\w.\-]+) = ", line):
            body[found[2]] = _instruction(found[2], line[found.end() :], bool(found[1]))
    return computations, entry


def _instruction(name: str, text: str, root: bool) -> Instruction:
    """Parses `TYPE opcode(operands), attributes`."""
    if text.startswith("("):
        end = _close(text, 0)
    else:
        end = text.index(" ")
    kind, _, rest = text[end:].lstrip().partition("(")
    stop = _close("(" + rest, 0) - 1
    operands, attributes = rest[: stop - 1], rest[stop:]
    names = re.findall(r"%([\w.\-]+)", operands) or [operands]
    shapes = tuple(
        Shape(dtype, tuple(int(d) for d in dims.split(",") if d), "S(" not in layout)
        for dtype, dims, layout in _SHAPE.findall(text[:end])
    )
    return Instruction(name, kind.strip(), shapes, tuple(names), attributes, root)


def _close(text: str, start: int) -> int:
    """The place behind the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"unbalanced: {text[start : start + 80]}")
