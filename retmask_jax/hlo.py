"""What a compiled program does, read from its optimised HLO text: loops, products, collectives.

The compiler's own totals count the body of a loop once. Here each computation counts as often as
it runs, and every collective is found wherever the compiler put it.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_BYTES = {"token": 0, "pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "s4": 0.5, "u4": 0.5}
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^{}]*)\})?")
_NO_TRAFFIC = {
    "send", "send-done", "recv", "recv-done",
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota",
    "partition-id", "replica-id", "copy-done", "async-done", "async-update", "opt-barrier",
}  # fmt: skip


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
    """One line of HLO; `called` are its computations, `attributes` the text after the operands."""

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


@dataclasses.dataclass
class Cost:
    """What one device does in one run of the program.

    Attributes:
        flops: of matrix products (a multiply-add is 2), attention kernels included.
        hbm_bytes: read and written by instructions outside on-chip memories.
        collectives: every collective.
        unknown_loops: loops whose trip count is decided at run time.
    """

    flops: float = 0.0
    hbm_bytes: float = 0.0
    collectives: list[Collective] = dataclasses.field(default_factory=list)
    unknown_loops: int = 0


class Program:
    """An optimised HLO module.

    Attributes:
        computations: instructions by name, by computation.
        entry: name of the computation that is run.
        partitions: devices that run it together; with several slices, those of one slice.
    """

    def __init__(self, text: str) -> None:
        """Reads the text of `jax.stages.Compiled.as_text()`."""
        header = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
        self.partitions = int(header.group(1)) if header else 1
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        body: dict[str, Instruction] = {}
        for line in text.splitlines():
            if line.endswith("{") and (start := re.match(r"(ENTRY )?%([\w.\-]+) \(", line)):
                body = self.computations[start.group(2)] = {}
                self.entry = start.group(2) if start.group(1) else self.entry
            elif found := re.match(r"\s+(ROOT )?%([\w.\-]+) = ", line):
                instruction = _instruction(found.group(2), line[found.end() :], bool(found[1]))
                body[instruction.name] = instruction

    def cost(self, unknown_trips: Sequence[int] = (), kernel_share: float = 1.0) -> Cost:
        """Adds up the program.

        Args:
            unknown_trips: how often loops run whose trip count is decided at run time: the
                outermost such loop, the one in it, and so on; the last holds for deeper ones.
            kernel_share: part of the T x T scores that attention kernels compute.
        """
        total = Cost()
        self._share = kernel_share
        self._add(self.entry, total, 1.0, (), tuple(unknown_trips))
        return total

    def _add(
        self,
        name: str,
        total: Cost,
        times: float,
        loops: tuple[int, ...],
        unknown: tuple[int, ...],
    ) -> None:
        body = self.computations[name]
        for each in body.values():
            if each.opcode == "while":
                trips, deeper = self._trips(each), unknown
                if trips is None:
                    total.unknown_loops += 1
                    trips = unknown[0] if unknown else 1
                    deeper = unknown[1:] or unknown
                inside = each.attribute(r"body=%([\w.\-]+)")
                self._add(inside, total, times * trips, (*loops, trips), deeper)
            elif each.opcode == "conditional":
                self._add_branch(each, total, times, loops, unknown)
            elif each.opcode == "call":
                inside = each.attribute(r"to_apply=%([\w.\-]+)")
                self._add(inside, total, times, loops, unknown)
            else:
                total.flops += times * self._flops(each, body)
                total.hbm_bytes += times * self._traffic(each, body)
                for found in self._collectives(each):
                    total.collectives.append(dataclasses.replace(found, times=times, loops=loops))
                    total.hbm_bytes += times * sum(s.bytes for s in found.shapes if s.hbm)

    def _add_branch(self, each: Instruction, total: Cost, times: float, *rest: tuple) -> None:
        """The branch with the most products: what is bounded is the worst case."""
        text = each.attribute(r"branch_computations=\{([^}]*)\}") or " ".join(
            re.findall(r"(?:true|false)_computation=(%[\w.\-]+)", each.attributes)
        )
        branches = []
        for name in re.findall(r"%([\w.\-]+)", text):
            branches.append(Cost())
            self._add(name, branches[-1], times, *rest)
        costliest = max(branches, key=lambda cost: (cost.flops, cost.hbm_bytes))
        total.flops += costliest.flops
        total.hbm_bytes += costliest.hbm_bytes
        total.collectives += costliest.collectives
        total.unknown_loops += costliest.unknown_loops

    def _trips(self, loop: Instruction) -> int | None:
        """The trip count of a loop that counts from 0 up to a constant; None: not known."""
        if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
            return int(known)
        condition = self.computations[loop.attribute(r"condition=%([\w.\-]+)")]
        test = next(each for each in condition.values() if each.root)
        if test.opcode != "compare" or "direction=LT" not in test.attributes:
            return None
        limit = condition[test.operands[1]]
        return int(limit.operands[0]) if limit.opcode == "constant" else None

    def _inner(self, each: Instruction) -> dict[str, Instruction]:
        called = each.attribute(r"calls=%([\w.\-]+)")
        return self.computations.get(called, {}) if called else {}

    def _flops(self, each: Instruction, body: dict[str, Instruction]) -> float:
        if each.opcode in ("fusion", "async-start"):
            inner = self._inner(each)
            return sum(self._flops(one, inner) for one in inner.values())
        if each.opcode == "convolution":
            return _convolution_flops(each, *(body[name].shapes[0] for name in each.operands))
        if each.opcode == "dot":
            contracted = each.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
            lhs = body[each.operands[0]].shapes[0].dims
            inner_size = math.prod(lhs[int(i)] for i in contracted.split(",") if i)
            return 2.0 * each.shapes[0].size * inner_size
        if each.opcode == "custom-call" and "tpu_custom_call" in each.attributes:
            return self._share * _kernel_flops(
                each, [body[name].shapes[0] for name in each.operands]
            )
        return 0.0

    def _traffic(self, each: Instruction, body: dict[str, Instruction]) -> float:
        """HBM bytes that one instruction reads and writes; collectives are counted elsewhere."""
        kind = each.opcode.removesuffix("-start").removesuffix("-done")
        if each.opcode in _NO_TRAFFIC or kind in COLLECTIVES:
            return 0
        if each.opcode == "fusion":
            return self._fusion_traffic(each, body)
        operands = [body[name].shapes for name in each.operands if name in body]
        if each.opcode in ("dynamic-slice", "slice", "gather"):
            return sum(s.bytes * (2 if s.hbm else 1) for s in each.shapes)
        if each.opcode == "dynamic-update-slice":
            return 2 * _hbm(operands[1])
        if each.opcode in ("copy-start", "async-start"):  # (destination, source, …)
            return _hbm(each.shapes[:1]) + sum(s.bytes for s in each.shapes[:1])
        if each.opcode == "custom-call" and "tpu_custom_call" not in each.attributes:
            return 0
        return _hbm(each.shapes) + sum(_hbm(shapes) for shapes in operands)

    def _fusion_traffic(self, each: Instruction, body: dict[str, Instruction]) -> float:
        """What a fusion reads of its parameters and writes of its results.

        A parameter that is only sliced counts as its slices; a result that is only updated in
        place as its update; what is handed through or belongs to a collective not at all.
        """
        inner = self._inner(each)
        users: dict[str, list[Instruction]] = {}
        for one in inner.values():
            for name in one.operands:
                users.setdefault(name, []).append(one)
        total = 0.0
        for one in inner.values():
            if one.opcode != "parameter":
                continue
            outer = body[each.operands[int(one.operands[0])]]
            if not any(shape.hbm for shape in outer.shapes):
                continue
            total += sum(self._read(one, user, inner) for user in users.get(one.name, ()))
        root = next(one for one in inner.values() if one.root)
        results = [inner[n] for n in root.operands] if root.opcode == "tuple" else [root]
        for one, shape in zip(results, each.shapes, strict=False):
            if not shape.hbm or _hands_through(one):
                continue
            while one.opcode == "bitcast":
                one = inner[one.operands[0]]
            updated = one.opcode == "dynamic-update-slice"
            total += inner[one.operands[1]].shapes[0].bytes if updated else shape.bytes
        return total

    def _read(self, one: Instruction, user: Instruction, inner: dict[str, Instruction]) -> float:
        """Bytes of a fusion's parameter that one of its users reads."""
        if (user.root and user.opcode == "tuple") or _hands_through(user):
            return 0
        if user.opcode in ("dynamic-slice", "slice", "gather"):
            return user.shapes[0].bytes if user.operands[0] == one.name else 0
        if user.opcode == "dynamic-update-slice" and user.operands[0] == one.name:
            return 0
        if user.opcode == "bitcast":
            after = [other for other in inner.values() if user.name in other.operands]
            return sum(self._read(user, other, inner) for other in after)
        return one.shapes[0].bytes

    def _collectives(self, each: Instruction) -> Iterator[Collective]:
        """The collectives of an instruction.

        One that the compiler spreads over other work appears in a fusion that starts it, in those
        that push it on and in one that ends it: the first counts.
        """
        kind = each.opcode.removesuffix("-start")
        if each.opcode == "send" and "_xla_megascale_transfer_type" in each.attributes:
            yield _between_slices(each)
        elif kind in COLLECTIVES and "source_target_pairs={}" not in each.attributes:
            yield _collective(kind, each)
        elif each.opcode in ("fusion", "async-start"):
            inner = self._inner(each)
            ends = any('"AsyncCollectiveDone"' in one.attributes for one in inner.values())
            if ends or "calls=%async_collective_fusion" in each.attributes:
                return
            for one in inner.values():
                for found in self._collectives(one):
                    sliced = (
                        other.opcode == "dynamic-slice" and one.name in other.operands
                        for other in inner.values()
                    )
                    scattered = found.kind == "all-reduce" and any(sliced)
                    yield dataclasses.replace(
                        found,
                        kind="reduce-scatter" if scattered else found.kind,
                        op_name=found.op_name or each.op_name,
                    )


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


def _hbm(shapes: Sequence[Shape]) -> int:
    return sum(shape.bytes for shape in shapes if shape.hbm)


def _hands_through(one: Instruction) -> bool:
    kind = one.opcode.removesuffix("-start")
    return kind in (*COLLECTIVES, "parameter") or "AsyncCollective" in one.attributes


def _convolution_flops(each: Instruction, lhs: Shape, rhs: Shape) -> float:
    """Multiply-adds that touch real elements, times 2: a matrix product is such a convolution."""
    labels = each.attribute(r"dim_labels=(\w+->\w+)").replace("->", "_").split("_")
    (left, right, out) = (dict(zip(names, range(99), strict=False)) for names in labels)
    window = each.attribute(r"window=\{([^}]*)\}") or ""

    def field(name: str, default: str) -> list[str]:
        found = re.search(rf"\b{name}=(\S+)", window)
        spatial = len(labels[2]) - 2
        return found.group(1).split("x") if found else [default] * spatial

    groups = int(each.attribute(r"batch_group_count=(\d+)") or 1)
    flops = 2.0 * lhs.dims[left["b"]] / groups
    flops *= rhs.dims[right["o"]] * rhs.dims[right["i"]]
    names = zip(
        field("stride", "1"), field("pad", "0_0"), field("lhs_dilate", "1"),
        field("rhs_dilate", "1"), strict=True,
    )  # fmt: skip
    for i, (stride, pad, lhs_dilate, rhs_dilate) in enumerate(names):
        outputs = np.arange(each.shapes[0].dims[out[str(i)]])[:, None] * int(stride)
        taps = np.arange(rhs.dims[right[str(i)]])[None] * int(rhs_dilate)
        places = outputs + taps - int(pad.split("_")[0])
        last = (lhs.dims[left[str(i)]] - 1) * int(lhs_dilate)
        real = (places >= 0) & (places <= last) & (places % int(lhs_dilate) == 0)
        flops *= int(real.sum())
    return flops


def _kernel_flops(each: Instruction, operands: list[Shape]) -> float:
    """Splash attention: 2 products forward, 3 for dq, 4 for dk and dv, each over T x T scores."""
    products = {"fwd": 2, "dq": 3, "dkv": 4}
    kind = re.search(r"splash_m[hq]a_(fwd|dq|dkv)", each.name)
    if not kind:
        return 0.0
    q, k, *_ = (shape for shape in operands if shape.dtype[0] not in "su")
    return 2.0 * products[kind.group(1)] * q.size * k.dims[-2]


def _collective(kind: str, each: Instruction) -> Collective:
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
