"""Programs compiled for TPU slices that need not be there, and what they take.

The step that a stage runs is compiled for the slice by the TPU's own compiler, from shapes alone.
Memory is the compiler's figure; operations, traffic and collectives are read from the program that
it made (`hlo`); times are what the chip's public figures (`chips`) allow at best.
"""

import dataclasses
import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from retmask_jax import hlo
from retmask_jax.chips import Slice, links, one_line
from retmask_jax.collectives import Collective, mesh_axes
from retmask_jax.errors import UserError
from retmask_jax.models.config import DecoderConfig
from retmask_jax.programs import Work, sampler_works, train_work
from retmask_jax.workdir import atomic_write


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What one program takes on one mesh; bytes and FLOPs are of one device.

    Attributes:
        work: the program.
        mesh: sizes of the mesh's axes.
        needed: bytes at the peak, None where the compiler did not say.
        available: bytes that the compiler had.
        fits: whether it compiled.
        temporary: bytes besides `work.state`.
        cost: operations, traffic and collectives; None where it does not fit.
        payload: bytes of the arrays that are gathered, summed or exchanged, by kind of collective
            and axes of the mesh: what the mesh asks for, whatever algorithm the compiler chooses.
        sent: bytes that this algorithm sends.
        seconds: lower bounds of one run: compute, memory, interconnect, network.
        peak_flops: per second of all devices.
        compile_seconds: of the compiler.
    """

    work: Work
    mesh: dict[str, int]
    needed: int | None
    available: int
    fits: bool
    temporary: int = 0
    cost: hlo.Cost | None = None
    payload: Counter = dataclasses.field(default_factory=Counter)
    sent: Counter = dataclasses.field(default_factory=Counter)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    peak_flops: float = math.inf
    compile_seconds: float = 0.0

    @property
    def step_seconds(self) -> float:
        """One run if all that can overlap does."""
        return max(self.seconds.values(), default=math.inf)

    @property
    def serial_seconds(self) -> float:
        """One run if no exchange of data overlaps with anything."""
        busy = max(self.seconds["compute"], self.seconds["memory"])
        return busy + self.seconds["interconnect"] + self.seconds["network"]

    @property
    def bound(self) -> str:
        """What takes longest."""
        return max(self.seconds, key=self.seconds.get)

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the chips could do in `step_seconds` (arXiv 2204.02311, app. B)."""
        return self.work.model_flops / (self.step_seconds * self.peak_flops)

    @property
    def mfu_serial(self) -> float:
        """The same of `serial_seconds`."""
        return self.work.model_flops / (self.serial_seconds * self.peak_flops)


def estimates(
    config: ConfigDict,
    where: Slice,
    stage: str,
    model: DecoderConfig,
    mesh: Mesh,
    row_length: int = 0,
    export_hlo: str = "",
) -> Iterator[Estimate]:
    """Compiles the programs of a stage on a mesh over devices of the slice, and reads them.

    Args:
        mesh: see `programs.stage_mesh`.
        row_length: tokens of a training row; 0: the longest bucket.
        export_hlo: folder for the programs' text, "" for none.

    Raises:
        UserError: the mesh is impossible for the model; names the axis and numbers.
    """
    if stage == "train":
        works = [train_work(config, model, mesh, row_length)]
    else:
        works = sampler_works(config, model, mesh, stage)
    for work in works:
        sizes = "-".join(str(size) for size in mesh.shape.values())
        file = f"{work.name}-{where.name.replace(':', '-')}-{where.count}-{sizes}.hlo.txt"
        yield _compile(work, where, mesh, Path(export_hlo) / file if export_hlo else None)


def _compile(work: Work, where: Slice, mesh: Mesh, export: Path | None) -> Estimate:
    """Compiles and reads a program."""
    chip, shape = where.chip, dict(mesh.shape)
    state = sum(work.state.values())
    if state > chip.hbm_bytes:  # nothing that the compiler does can help
        return Estimate(work, shape, state, chip.hbm_bytes, fits=False)
    with jax.set_mesh(mesh):
        lowered = work.lower()
        start = time.monotonic()
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            needed, available = exhausted(str(error))
            return Estimate(work, shape, needed, available or chip.hbm_bytes, fits=False)
        seconds = time.monotonic() - start
    needed = compiled.memory_analysis().peak_memory_in_bytes
    text = compiled.as_text()
    if export:
        with atomic_write(export) as file:
            file.write(text)
    program = hlo.Program(text, unknown_trips=work.unknown_trips, kernel_share=work.kernel_share)
    cost = program.cost()
    devices = mesh.devices.reshape(-1)[: program.partitions]
    inside = shape | {"data": shape["data"] * program.partitions // mesh.size}  # one slice's mesh
    payload, sent, ici, network = Counter(), Counter(), 0.0, 0.0
    for collective in cost.collectives:
        if collective.slices > 1:
            axes = "slices"
            network += collective.sent / chip.network_bandwidth
        else:
            axes = "+".join(mesh_axes(collective, inside))
            ici += _link_seconds(collective, where, devices)
        payload[collective.kind, axes] += collective.times * collective.bytes
        sent[collective.kind, axes] += collective.sent
    return Estimate(
        work=work,
        mesh=shape,
        needed=needed,
        available=chip.hbm_bytes,
        fits=True,
        temporary=max(0, needed - state),  # a program may leave out weights that it does not use
        cost=cost,
        payload=payload,
        sent=sent,
        seconds={
            "compute": cost.flops / chip.flops,
            "memory": cost.hbm_bytes / chip.hbm_bandwidth,
            "interconnect": ici,
            "network": network,
        },
        peak_flops=chip.flops * mesh.size,
        compile_seconds=seconds,
    )


def exhausted(message: str) -> tuple[int | None, int | None]:
    """Needed and available bytes as the compiler's message has them, None where it does not.

    Raises:
        UserError: the message is about something else.
    """
    if not message.startswith("RESOURCE_EXHAUSTED"):
        raise UserError(f"the TPU compiler failed: {one_line(message)}")
    size = r"([\d.]+)([KMGT]?)"
    found = re.search(rf"Used {size} of {size} hbm", message) or re.search(
        rf"\({size}\) exceeds available HBM \({size}\)", message
    )
    if not found:
        return None, None
    used, used_unit, room, room_unit = found.groups()
    unit = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    return int(float(used) * unit[used_unit]), int(float(room) * unit[room_unit])


def _link_seconds(collective: Collective, where: Slice, devices: np.ndarray) -> float:
    """Seconds on the links of a slice.

    Gathers and sums run as rings along all dimensions of the slice that the group spans at once;
    in an all-to-all half of the data crosses the middle of the longest dimension.
    """
    if collective.kind == "collective-permute":
        return collective.sent / where.chip.link_bandwidth
    speed = links(where.chip, where.dims, list(devices[collective.groups[0]]))
    if collective.kind == "all-to-all":
        moved = collective.times * collective.bytes
        return moved * speed.longest / (4 * speed.longest_bandwidth)
    return collective.sent / speed.bandwidth
