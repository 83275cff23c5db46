"""The plan stage: memory, collectives and speed of a step on a TPU slice, before it is paid for."""

import csv
import io
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from retmask_jax import mesh as meshes
from retmask_jax import plots
from retmask_jax.chips import Slice, open_slice
from retmask_jax.errors import UserError
from retmask_jax.estimate import Estimate, estimates
from retmask_jax.models.config import DecoderConfig
from retmask_jax.models.decoder import abstract
from retmask_jax.programs import STAGES, read_model, stage_devices, stage_mesh
from retmask_jax.workdir import atomic_write

GIB = 2**30


def run(
    config: ConfigDict,
    *,
    topology: str,
    slices: int = 1,
    stage: str = "train",
    model_config: str = "",
    row_length: int = 0,
    sweep: bool = False,
    export_hlo: str = "",
    workdir: str = "",
) -> None:
    """Prints the plan of a stage; see the options in `retmask plan --help`.

    Raises:
        UserError: an unknown topology, no TPU compiler, no dimensions of the model, or a mesh that
            is impossible. A program that does not fit is a result.
    """
    if stage not in STAGES:
        raise UserError(f"--stage={stage}: it is one of {', '.join(STAGES)}")
    if sweep and not workdir:
        raise UserError("--sweep writes a table and a plot; give --workdir=DIR")
    jax.config.update("jax_platforms", "cpu")  # the slice is not there, and nothing is computed
    model, name = read_model(config, model_config)
    where = open_slice(topology, slices)
    if not sweep:
        mesh = stage_mesh(config, model, where, stage)
        for one in estimates(config, where, stage, model, mesh, row_length, export_hlo):
            print(report(one, where, name, model), flush=True)
        return
    found: list[tuple[dict[str, int], list[Estimate] | UserError]] = []
    devices = stage_devices(where, stage)
    for shape in mesh_shapes(len(devices), where.count if stage == "train" else 1):
        try:
            mesh = meshes.make_mesh(ConfigDict(shape), devices)
            result = list(estimates(config, where, stage, model, mesh, row_length, export_hlo))
        except UserError as error:
            result = error
        found.append((shape, result))
        print(_sweep_line(shape, result), flush=True)
    _write_sweep(found, where, stage, name, Path(workdir))


def mesh_shapes(n_devices: int, slices: int) -> Iterator[dict[str, int]]:
    """Every mesh of `n_devices` whose data axis runs across the slices."""
    divisors = [n for n in range(1, n_devices + 1) if n_devices % n == 0]
    for sizes in itertools.product(divisors, repeat=len(meshes.AXES)):
        shape = dict(zip(meshes.AXES, sizes, strict=True))
        if math.prod(sizes) == n_devices and shape["data"] % slices == 0:
            yield shape


def report(estimate: Estimate, where: Slice, name: str, model: DecoderConfig) -> str:
    """The plan of one program as text."""
    work = estimate.work
    n = math.prod(estimate.mesh.values())
    slices = f"{where.count} x " if where.count > 1 else ""
    weights = sum(math.prod(x.shape) for x in jax.tree.leaves(abstract(model)))
    lines = [
        f"{work.name} on {slices}{where.name}, {n} of {len(where.devices)} devices: "
        + " ".join(f"{axis}={size}" for axis, size in estimate.mesh.items()),
        f"  model         {name}, {weights / 1e9:.2f} B weights",
        f"  one run       {work.unit}: {work.tokens:,} tokens",
        "  memory        " + _memory(estimate),
    ]
    if not estimate.fits:
        return "\n".join([*lines, "  DOES NOT FIT"])
    cost, seconds = estimate.cost, estimate.seconds
    lines += [
        f"  FLOPs         model {work.model_flops:.3e} on all devices; compiled "
        f"{cost.flops:.3e} a device, {cost.flops * n / work.model_flops:.2f} x the model's",
        f"  HBM traffic   {cost.hbm_bytes / 1e9:.1f} GB a device",
        "  collectives   a device, by kind and axis of the mesh: size of the arrays, bytes sent",
        *(
            f"    {kind:<18} {axes:<14} {estimate.payload[kind, axes] / 1e9:10.3f} GB"
            f"{sent / 1e9:11.3f} GB"
            for (kind, axes), sent in sorted(estimate.sent.items(), key=lambda item: -item[1])
            if sent > 1e5
        ),
        "  at best       "
        + ", ".join(f"{what} {_seconds(value)}" for what, value in seconds.items()),
        f"                for {_speeds(where)}",
        f"  bound by      {estimate.bound}: {_seconds(estimate.step_seconds)} a run, "
        f"{work.tokens / estimate.step_seconds:,.0f} tokens/s, MFU {estimate.mfu:.1%} "
        f"({estimate.mfu_serial:.1%} if no exchange overlaps with work)",
        f"  compiled in   {estimate.compile_seconds:.0f} s",
    ]
    return "\n".join(lines)


def _speeds(where: Slice) -> str:
    """What the times assume of a device."""
    chip = where.chip
    return (
        f"{chip.flops / 1e12:.0f} TFLOP/s, {chip.hbm_bandwidth / 1e9:.0f} GB/s of HBM, "
        f"{chip.link_bandwidth / 1e9:g} GB/s a link and way, "
        f"{chip.network_bandwidth / 1e9:.3g} GB/s between slices"
    )


def _memory(estimate: Estimate) -> str:
    parts = [f"{part} {_gib(size)}" for part, size in estimate.work.state.items()]
    if estimate.fits:
        parts.append(f"temporary {_gib(estimate.temporary)}")
    needed = "more" if estimate.needed is None else _gib(estimate.needed)
    at_least = "" if estimate.fits else "at least "
    return f"{', '.join(parts)}; peak {at_least}{needed} of {_gib(estimate.available)} GiB a device"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


COLUMNS = (
    "program", *meshes.AXES, "fits", "needed_gib", "available_gib", "weights_gib",
    "temporary_gib", "model_flops", "device_flops", "hbm_gb", "payload_gb", "sent_gb",
    "compute_s", "memory_s", "interconnect_s", "network_s", "step_s", "mfu", "mfu_serial",
    "bound", "compile_s", "note",
)  # fmt: skip


def row(estimate: Estimate) -> dict[str, Any]:
    """An estimate as a row of COLUMNS."""
    found: dict[str, Any] = {
        "program": estimate.work.name,
        **estimate.mesh,
        "fits": estimate.fits,
        "needed_gib": round((estimate.needed or 0) / GIB, 3),
        "available_gib": round(estimate.available / GIB, 3),
        "weights_gib": round(estimate.work.state["weights"] / GIB, 3),
        "model_flops": f"{estimate.work.model_flops:.6g}",
    }
    if not estimate.fits:
        return found
    return found | {
        "temporary_gib": round(estimate.temporary / GIB, 3),
        "device_flops": f"{estimate.cost.flops:.6g}",
        "hbm_gb": round(estimate.cost.hbm_bytes / 1e9, 3),
        "payload_gb": round(sum(estimate.payload.values()) / 1e9, 3),
        "sent_gb": round(sum(estimate.sent.values()) / 1e9, 3),
        **{f"{what}_s": f"{value:.4g}" for what, value in estimate.seconds.items()},
        "step_s": f"{estimate.step_seconds:.4g}",
        "mfu": round(estimate.mfu, 4),
        "mfu_serial": round(estimate.mfu_serial, 4),
        "bound": estimate.bound,
        "compile_s": round(estimate.compile_seconds, 1),
    }


def _sweep_line(shape: dict[str, int], found: list[Estimate] | UserError) -> str:
    mesh = " ".join(f"{axis}={size}" for axis, size in shape.items())
    if isinstance(found, UserError):
        return f"{mesh}: impossible: {found}"
    lines = []
    for one in found:
        if one.fits:
            result = (
                f"{_seconds(one.step_seconds)} a run, MFU {one.mfu:.1%}, bound by {one.bound}, "
                f"{_gib(one.needed)} GiB"
            )
        else:
            result = f"does not fit: {_memory(one)}"
        lines.append(f"{mesh} {one.work.name}: {result}")
    return "\n".join(lines)


def _write_sweep(
    found: list[tuple[dict[str, int], list[Estimate] | UserError]],
    where: Slice,
    stage: str,
    name: str,
    folder: Path,
) -> None:
    """Ranks the meshes, fastest first, and writes CSV and PNG into `folder`/plan."""
    rows = []
    for shape, one in found:
        if isinstance(one, UserError):
            rows.append({"program": stage, **shape, "fits": False, "note": str(one)})
        else:
            rows += [row(estimate) for estimate in one]
    rows.sort(key=lambda r: (r["program"], not r["fits"], float(r.get("step_s", math.inf))))
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    base = f"{stage}-{name}-{where.name.replace(':', '-')}-{where.count}"
    with atomic_write(folder / "plan" / f"{base}.csv") as file:
        file.write(text.getvalue())
    title = f"{stage}, {name}, {where.count} x {where.name}"
    with atomic_write(folder / "plan" / f"{base}.png", "wb") as file:
        file.write(plots.mesh_bars([r for r in rows if r["fits"]], title))
    print(f"\n{'rank':>4}  {'program':<16} {'data x fsdp x sequence x tensor':<34} step, MFU, GiB")
    for rank, one in enumerate((r for r in rows if r["fits"]), 1):
        mesh = " x ".join(str(one[axis]) for axis in meshes.AXES)
        print(
            f"{rank:>4}  {one['program']:<16} {mesh:<34} {one['step_s']} s, {one['mfu']:.1%}, "
            f"{one['needed_gib']}"
        )
    print(f"{folder / 'plan' / base}.csv and .png")
