"""What a compiled program does, read from its optimised HLO: products, traffic, collectives.

The compiler's own totals count the body of a loop once. Here each computation counts as often as
it runs, and every collective is found wherever the compiler put it.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from retmask_jax.collectives import COLLECTIVES, Collective, collective
from retmask_jax.hlo_text import Computation, Instruction, Shape, parse

_NO_TRAFFIC = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota",
    "partition-id", "replica-id", "copy-done", "async-done", "async-update", "opt-barrier",
    "send", "send-done", "recv", "recv-done",
}  # fmt: skip
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # in place; which operand is the update


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

    Args:
        text: of `jax.stages.Compiled.as_text()`.
        unknown_trips: how often loops run whose trip count is decided at run time: the outermost
            such loop, the one in it, and so on; the last holds for deeper ones. Default: once.
        kernel_share: part of the T x T scores that attention kernels compute.

    Attributes:
        computations: all of them, by name.
        entry: name of the one that is run.
        partitions: devices that run it together; with several slices, those of one slice.
    """

    def __init__(
        self, text: str, *, unknown_trips: Sequence[int] = (1,), kernel_share: float = 1.0
    ) -> None:
        header = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
        self.partitions = int(header.group(1)) if header else 1
        self.computations, self.entry = parse(text)
        self._unknown, self._share = tuple(unknown_trips), kernel_share

    def cost(self) -> Cost:
        """Adds up the whole program."""
        total = Cost()
        self._add(self.entry, total, 1.0, (), 0)
        return total

    def _add(
        self,
        name: str,
        total: Cost,
        times: float,
        loops: tuple[int, ...],
        unknown: int,
    ) -> None:
        """Adds a computation that runs `times` times, inside `unknown` loops of unknown count."""
        body = self.computations[name]
        for each in body.values():
            if each.opcode == "while":
                trips, deeper = self._trips(each), unknown
                if trips is None:
                    total.unknown_loops += 1
                    trips = self._unknown[min(unknown, len(self._unknown) - 1)]
                    deeper = unknown + 1
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

    def _add_branch(self, each: Instruction, total: Cost, times: float, *rest) -> None:
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
        if limit.opcode != "constant":
            return None
        return -(-int(limit.operands[0]) // self._step(loop, condition[test.operands[0]]))

    def _step(self, loop: Instruction, counter: Instruction) -> int:
        """What a loop adds to its counter each time; 1 where that is not plain to see."""
        place = counter.attribute(r"index=(\d+)")
        body = self.computations[loop.attribute(r"body=%([\w.\-]+)")]
        result = next(each for each in body.values() if each.root)
        if counter.opcode != "get-tuple-element" or result.opcode != "tuple":
            return 1
        grown = body[result.operands[int(place)]]
        added = [body[name] for name in grown.operands if name in body]
        steps = [int(each.operands[0]) for each in added if each.opcode == "constant"]
        return steps[0] if grown.opcode == "add" and steps else 1

    def _inner(self, each: Instruction) -> Computation:
        called = each.attribute(r"calls=%([\w.\-]+)")
        return self.computations.get(called, {}) if called else {}

    def _flops(self, each: Instruction, body: Computation) -> float:
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

    def _traffic(self, each: Instruction, body: Computation) -> float:
        """HBM bytes that one instruction reads and writes; collectives are counted elsewhere."""
        kind = each.opcode.removesuffix("-start").removesuffix("-done")
        if each.opcode in _NO_TRAFFIC or kind in COLLECTIVES:
            return 0
        if each.opcode == "fusion":
            return self._fusion_traffic(each, body)
        operands = [body[name].shapes for name in each.operands if name in body]
        if each.opcode in ("dynamic-slice", "slice", "gather"):
            return sum(s.bytes * (2 if s.hbm else 1) for s in each.shapes)
        if each.opcode in _UPDATES:
            return 2 * _hbm(operands[_UPDATES[each.opcode]])
        if each.opcode.endswith("-start"):
            # copy-start gives (destination, source, …), the others (source, destination, …).
            to, source = each.shapes[:2] if each.opcode == "copy-start" else each.shapes[1::-1]
            return to.bytes * (to.hbm + source.hbm)
        if each.opcode == "custom-call" and "tpu_custom_call" not in each.attributes:
            return 0
        return _hbm(each.shapes) + sum(_hbm(shapes) for shapes in operands)

    def _fusion_traffic(self, each: Instruction, body: Computation) -> float:
        """What a fusion reads of its operands and writes of its results.

        An operand that is only sliced counts as its slices; a result that is only updated in place
        as its update; what is handed through or belongs to a collective not at all.
        """
        inner, total = self._inner(each), 0.0
        for one in inner.values():
            if one.opcode == "parameter":
                outer = body[each.operands[int(one.operands[0])]]
                total += self._read(one, inner) if _hbm(outer.shapes) else 0
        for one, shape in zip(_results(inner), each.shapes, strict=False):
            total += self._written(one, inner) if shape.hbm else 0
        return total

    def _read(self, value: Instruction, body: Computation) -> float:
        """Bytes of a value that its users in a fused computation read; never more than all."""
        total = 0.0
        for user in body.values():
            if value.name not in user.operands or _hands_through(user):
                continue
            if user.opcode in ("dynamic-slice", "slice", "gather"):
                total += user.shapes[0].bytes if user.operands[0] == value.name else 0
            elif user.opcode == "bitcast":
                total += self._read(user, body)
            elif user.opcode == "fusion":
                inner = self._inner(user)
                place = str(user.operands.index(value.name))
                total += sum(
                    self._read(one, inner)
                    for one in inner.values()
                    if one.opcode == "parameter" and one.operands[0] == place
                )
            elif user.opcode not in _UPDATES or user.operands[0] != value.name:
                total += value.shapes[0].bytes
        return min(total, value.shapes[0].bytes)

    def _written(self, value: Instruction, body: Computation) -> float:
        """Bytes that a fused computation writes to make one of its results."""
        while value.opcode == "bitcast":
            value = body[value.operands[0]]
        if _hands_through(value):
            return 0
        if value.opcode == "fusion":
            inner = self._inner(value)
            return sum(self._written(one, inner) for one in _results(inner))
        if value.opcode in _UPDATES:
            return body[value.operands[_UPDATES[value.opcode]]].shapes[0].bytes
        return sum(shape.bytes for shape in value.shapes)

    def _collectives(self, each: Instruction) -> Iterator[Collective]:
        """The collectives of an instruction.

        One that the compiler spreads over other work appears in a fusion that starts it, in those
        that push it on and in one that ends it: the first counts.
        """
        if found := collective(each):
            yield found
        elif each.opcode in ("fusion", "async-start"):
            inner = self._inner(each)
            ends = any('"AsyncCollectiveDone"' in one.attributes for one in inner.values())
            if ends or "calls=%async_collective_fusion" in each.attributes:
                return
            sliced = {
                name
                for one in inner.values()
                if one.opcode == "dynamic-slice"
                for name in one.operands
            }
            for one in inner.values():
                for found in self._collectives(one):
                    scattered = found.kind == "all-reduce" and one.name in sliced
                    yield dataclasses.replace(
                        found,
                        kind="reduce-scatter" if scattered else found.kind,
                        op_name=found.op_name or each.op_name,
                    )


def _results(body: Computation) -> list[Instruction]:
    """The instructions that make a computation's result, or the elements of it."""
    root = next(one for one in body.values() if one.root)
    return [body[name] for name in root.operands] if root.opcode == "tuple" else [root]


def _hbm(shapes: Sequence[Shape]) -> int:
    return sum(shape.bytes for shape in shapes if shape.hbm)


def _hands_through(one: Instruction) -> bool:
    kind = one.opcode.removesuffix("-start")
    kinds = (*COLLECTIVES, "parameter", "tuple")
    return kind in kinds or "AsyncCollective" in one.attributes


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
