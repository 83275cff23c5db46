"""The plan stage: what a step would take on a TPU slice that need not be there.

The step that the stage runs is compiled for the slice by the TPU's own compiler, from shapes
alone. Memory is the compiler's figure; operations, traffic and collectives are read from the
program that it made (`hlo`); times are what the chip's public figures (`chips`) allow at best.
"""

import csv
import dataclasses
import importlib.util
import io
import itertools
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh
from ml_collections import ConfigDict

from retmask_jax import dpo, hlo, plots
from retmask_jax import mesh as meshes
from retmask_jax.batches import Batch
from retmask_jax.chips import CHIPS, Chip, host_bounds, links
from retmask_jax.errors import UserError
from retmask_jax.models import attention, config_from_hf
from retmask_jax.models.config import SLIDING, DecoderConfig
from retmask_jax.models.decoder import abstract
from retmask_jax.sampler import Sampler
from retmask_jax.workdir import atomic_write, read_json

STAGES = ("train", "generate", "detect")
GIB = 2**30
_TILE = 1024  # of the attention kernel, at most


@dataclasses.dataclass(frozen=True)
class Slice:
    """TPU slices of one shape, known to the compiler.

    Attributes:
        name: such as v5e:4x8.
        dims: chips along each dimension.
        count: how many such slices.
        devices: of all slices.
    """

    name: str
    chip: Chip
    dims: tuple[int, ...]
    count: int
    devices: list[jax.Device]


@dataclasses.dataclass(frozen=True)
class Work:
    """A program to be compiled, and what is known of it beforehand.

    Attributes:
        name: of the program.
        lower: traces it.
        state: bytes a device of each part of what it works on.
        model_flops: of one run on all devices, by formula; see `model_flops`.
        tokens: that one run works on.
        unit: what one run is.
        unknown_trips: see `hlo.Program.cost`.
        kernel_share: see `hlo.Program.cost`.
    """

    name: str
    lower: Callable[[], jax.stages.Lowered]
    state: dict[str, int]
    model_flops: float
    tokens: int
    unit: str
    unknown_trips: tuple[int, ...]
    kernel_share: float = 1.0


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
        sent: bytes sent, by kind of collective and axes of the mesh.
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
        for estimate in estimates(config, where, stage, model, row_length, export_hlo):
            print(report(estimate, where, stage, name, model), flush=True)
        return
    found: list[tuple[dict[str, int], list[Estimate] | UserError]] = []
    for shape in mesh_shapes(len(_stage_devices(where, stage)), where.count):
        config.mesh.update(shape)
        try:
            one = list(estimates(config, where, stage, model, row_length, export_hlo))
        except UserError as error:
            one = error
        found.append((shape, one))
        print(_sweep_line(shape, one), flush=True)
    _write_sweep(found, where, stage, name, Path(workdir))


def open_slice(topology: str, slices: int = 1) -> Slice:
    """Asks the TPU compiler for a slice such as v5e:4x8, or several of them.

    Raises:
        UserError: libtpu is not installed, or there is no such slice.
    """
    known = f"want CHIP:AxB or CHIP:AxBxC, CHIP one of {', '.join(CHIPS)}, e.g. v5e:4x8"
    name, _, shape = topology.partition(":")
    if name not in CHIPS or not re.fullmatch(r"\d+(x\d+){1,2}", shape):
        raise UserError(f"--topology={topology}: {known}")
    if slices < 1:
        raise UserError(f"--slices={slices}: at least 1")
    if not importlib.util.find_spec("libtpu"):
        raise UserError(
            "plan needs the TPU compiler: pip install 'retmask-jax[tpu]' (no TPU is needed)"
        )
    for variable, value in {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_MIN_LOG_LEVEL": "3",
    }.items():
        os.environ.setdefault(variable, value)
    chip, dims = CHIPS[name], tuple(int(d) for d in shape.split("x"))
    options = dict(chip.options, chips_per_host_bounds=host_bounds(dims))
    if slices > 1:
        options["num_slices"] = slices
    try:
        found = topologies.get_topology_desc(topology, "tpu", **options)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"--topology={topology}: {_one_line(error)}; {known}") from None
    return Slice(topology, chip, dims, slices, list(found.devices))


def read_model(config: ConfigDict, model_config: str = "") -> tuple[DecoderConfig, str]:
    """The model's dimensions and name; no weights are needed.

    They come from the file `model_config`, else from model.path where it is there, else from the
    dimensions that this package holds of the models that its configs name.

    Raises:
        UserError: there are none, or they are not understood.
    """
    path = Path(model_config or config.model.path)
    if path.is_dir():
        path /= "config.json"
    table = resources.files("retmask_jax") / "data" / "model_configs.json"
    builtin = json.loads(table.read_text())
    try:
        if path.suffix == ".json" and path.is_file():
            name = path.parent.name if path.name == "config.json" else path.stem
            return config_from_hf(read_json(path)), name
        if not model_config and path.name in builtin:
            return config_from_hf(builtin[path.name]), path.name
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    if model_config:
        raise UserError(f"--model_config={model_config}: no such file or folder")
    from retmask_jax.checkpoint_io import open_source

    try:
        return open_source(config.model.path).config, path.name
    except UserError as error:
        raise UserError(
            f"{error}; to plan without the weights give --model_config=FILE, their config.json, or "
            f"a model.path that ends in one of {', '.join(builtin)}"
        ) from None


def estimates(
    config: ConfigDict,
    where: Slice,
    stage: str,
    model: DecoderConfig,
    row_length: int = 0,
    export_hlo: str = "",
) -> Iterator[Estimate]:
    """Compiles the programs of a stage on the configured mesh, and reads them.

    Args:
        row_length: tokens of a training row; 0: the longest bucket.
        export_hlo: folder for the programs' text, "" for none.

    Raises:
        UserError: the mesh is impossible for the slice or the model; names the axis and numbers.
    """
    mesh = meshes.make_mesh(config.mesh, _stage_devices(where, stage))
    if stage == "train":
        works = [train_work(config, model, mesh, row_length)]
    else:
        works = sampler_works(config, model, mesh, stage)
    for work in works:
        sizes = "-".join(str(size) for size in mesh.shape.values())
        file = f"{work.name}-{where.name.replace(':', '-')}-{where.count}-{sizes}.hlo.txt"
        yield _compile(work, where, mesh, Path(export_hlo) / file if export_hlo else None)


def mesh_shapes(n_devices: int, slices: int) -> Iterator[dict[str, int]]:
    """Every mesh of `n_devices` whose data axis runs across the slices."""
    divisors = [n for n in range(1, n_devices + 1) if n_devices % n == 0]
    for sizes in itertools.product(divisors, repeat=len(meshes.AXES)):
        shape = dict(zip(meshes.AXES, sizes, strict=True))
        if math.prod(sizes) == n_devices and shape["data"] % slices == 0:
            yield shape


def model_flops(
    config: DecoderConfig, tokens: float, keys: Mapping[str, float], *, passes: int, scored: float
) -> float:
    """FLOPs that the model needs, whatever the program does: 2 for each weight and token, and
    4 N H for each query and key that it sees, in a layer.

    Args:
        tokens: that go through the layers.
        keys: how many keys a token sees on average in a layer of each type.
        passes: 1 forward, 3 forward and backward.
        scored: tokens whose logits are computed.
    """
    d, f, n, k, h = (
        config.d_model, config.d_ff, config.n_heads, config.n_kv_heads, config.head_dim
    )  # fmt: skip
    layer = d * h * (2 * n + 2 * k) + 3 * d * f
    attended = sum(keys[layer_type] for layer_type in config.layer_types)
    forward = 2 * tokens * config.n_layers * layer + 4 * tokens * n * h * attended
    return passes * (forward + 2 * scored * config.vocab_size * d)


# ------------------------------------------------------------------------------------- programs


def train_work(config: ConfigDict, model: DecoderConfig, mesh: Mesh, row_length: int = 0) -> Work:
    """The step of the train stage, `dpo.make_step`, on rows of `row_length` (0: the longest)."""
    train = config.train
    length = row_length or train.buckets[-1]
    rows, micro = 2 * train.micro_pairs, train.pairs_per_step // train.micro_pairs
    if rows % meshes.batch_ways(mesh):
        raise UserError(
            f"config.train.micro_pairs is {train.micro_pairs}: its {rows} rows cannot be shared by "
            f"{meshes.batch_ways(mesh)} devices (mesh.data x mesh.fsdp)"
        )
    like = abstract(model)
    tx = dpo.optimizer(train, 1000, like)
    shapes = jax.eval_shape(lambda params: dpo.init_state(params, tx), dpo.as_params(like))
    state = _placed(shapes, dpo.state_shardings(like, tx, mesh))

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((micro, *shape), dtype)

    batch = Batch(
        tokens=array(jnp.int32, rows, length),
        prompt_lengths=array(jnp.int32, rows),
        lengths=array(jnp.int32, rows),
        reference_logps=array(jnp.float32, rows),
        weights=array(jnp.float32, rows // 2),
    )
    step = dpo.make_step(like, tx, train, 1000, jnp.dtype(config.model.dtype), mesh)
    tokens = 2 * train.pairs_per_step * length
    tiles = -(-length // _TILE)
    blocks = -(-length // attention.BLOCK)
    return Work(
        name="train",
        lower=lambda: step.lower(state, batch),
        state={
            "weights": _device_bytes(state.params),
            "optimizer": _device_bytes(state._replace(params=None)),
        },
        model_flops=model_flops(
            model, tokens, _causal_keys(model, length), passes=3, scored=tokens
        ),
        tokens=tokens,
        unit=f"step of {train.pairs_per_step} pairs of {length}-token rows",
        unknown_trips=(-(-(blocks + 1) // 2),),
        kernel_share=(tiles + 1) / (2 * tiles),
    )


def sampler_works(config: ConfigDict, model: DecoderConfig, mesh: Mesh, stage: str) -> list[Work]:
    """The programs of the sampler as detect or generate sets it up, caches full."""
    options = config[stage]
    if stage == "detect":
        bank, length = None, options.max_length + options.max_new_tokens
        settings = {"report_top": True, "prefill_chunk": options.prefill_chunk}
    else:
        bank = np.ones((2, model.n_layers, model.n_heads), bool)
        length = options.max_prompt_tokens + options.max_new_tokens
        settings = {"temperature": options.temperature, "top_p": options.top_p}
    like = abstract(model, jnp.dtype(config.model.dtype))
    like = _placed(like, meshes.shardings(like, mesh))
    sampler = Sampler(
        like,
        bank=bank,
        slots=options.slots,
        max_length=length,
        max_new_tokens=options.max_new_tokens,
        stop_ids=(0,),
        mesh=mesh,
        **settings,
    )
    cache = sampler.abstract_slots().cache
    state = {"weights": _device_bytes(like), "cache": _device_bytes(cache)}
    blocks = max(-(-x.shape[2] // attention.BLOCK) for x in cache.k)
    rows, chunk = sampler.prefill_shape
    keys = {kind: _visible(model, kind, length) for kind in set(model.layer_types)}

    def work(name: str, lower: Callable, tokens: int, scored: int, unit: str, *trips: int) -> Work:
        flops = model_flops(model, tokens, keys, passes=1, scored=scored)
        return Work(f"{stage}-{name}", lower, state, flops, tokens, unit, trips)

    return [
        work(
            "decode", sampler.lower_decode, options.slots, options.slots,
            f"step of {options.slots} rows that are {length} tokens long", 1, blocks,
        ),
        work(
            "prefill", sampler.lower_prefill, rows * chunk, 0,
            f"chunk of {chunk} tokens of {rows} prompts, up to token {length}", blocks,
        ),
    ]  # fmt: skip


def _stage_devices(where: Slice, stage: str) -> list[jax.Device]:
    """All of them for train; detect and generate run on each host by itself."""
    if stage == "train":
        return where.devices
    first = where.devices[0].process_index
    return [device for device in where.devices if device.process_index == first]


def _visible(model: DecoderConfig, layer_type: str, length: int) -> int:
    return min(length, model.sliding_window) if layer_type == SLIDING else length


def _causal_keys(model: DecoderConfig, length: int) -> dict[str, float]:
    """Keys that a token of a row of `length` sees on average."""
    keys = {}
    for kind in set(model.layer_types):
        window = _visible(model, kind, length)
        keys[kind] = (window * (window + 1) / 2 + (length - window) * window) / length
    return keys


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def _device_bytes(tree: Any) -> int:
    """Bytes of the arrays of a tree on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


# ------------------------------------------------------------------------------------ estimates


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
            needed, available = _exhausted(str(error))
            return Estimate(work, shape, needed, available, fits=False)
        seconds = time.monotonic() - start
    memory = compiled.memory_analysis()
    temporary = memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    needed = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + temporary
    )
    text = compiled.as_text()
    if export:
        with atomic_write(export) as file:
            file.write(text)
    program = hlo.Program(text)
    cost = program.cost(work.unknown_trips, work.kernel_share)
    devices = mesh.devices.reshape(-1)[: program.partitions]
    inside = shape | {"data": shape["data"] * program.partitions // mesh.size}  # one slice's mesh
    sent, ici, network = Counter(), 0.0, 0.0
    for collective in cost.collectives:
        if collective.slices > 1:
            axes = "slices"
            network += collective.sent / chip.network_bandwidth
        else:
            axes = "+".join(hlo.mesh_axes(collective, inside))
            ici += _link_seconds(collective, where, devices)
        sent[collective.kind, axes] += collective.sent
    return Estimate(
        work=work,
        mesh=shape,
        needed=needed,
        available=chip.hbm_bytes,
        fits=True,
        temporary=needed - state,
        cost=cost,
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


def _exhausted(message: str) -> tuple[int | None, int]:
    """Needed and available bytes out of the compiler's message.

    Raises:
        UserError: the message is about something else.
    """
    found = re.search(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm", message)
    if not found:
        raise UserError(f"the TPU compiler failed: {_one_line(message)}")
    unit = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    used, used_unit, room, room_unit = found.groups()
    return int(float(used) * unit[used_unit]), int(float(room) * unit[room_unit])


def _link_seconds(collective: hlo.Collective, where: Slice, devices: np.ndarray) -> float:
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


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]


# -------------------------------------------------------------------------------------- reports


def report(estimate: Estimate, where: Slice, stage: str, name: str, model: DecoderConfig) -> str:
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
        "  sent          a device, by collective and axis of the mesh:",
        *(
            f"    {kind:<18} {axes:<12} {sent / 1e9:10.3f} GB"
            for (kind, axes), sent in sorted(estimate.sent.items(), key=lambda item: -item[1])
            if sent > 1e5
        ),
        "  at best       "
        + ", ".join(f"{what} {_seconds(value)}" for what, value in seconds.items()),
        f"  bound by      {estimate.bound}: {_seconds(estimate.step_seconds)} a run, "
        f"{work.tokens / estimate.step_seconds:,.0f} tokens/s, MFU {estimate.mfu:.1%} "
        f"({work.model_flops / (estimate.serial_seconds * estimate.peak_flops):.1%} if nothing "
        "overlaps)",
        f"  compiled in   {estimate.compile_seconds:.0f} s",
    ]
    return "\n".join(lines)


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
    "temporary_gib", "model_flops", "device_flops", "hbm_gb", "sent_gb", "compute_s", "memory_s",
    "interconnect_s", "network_s", "step_s", "mfu", "bound", "compile_s", "note",
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
        "sent_gb": round(sum(estimate.sent.values()) / 1e9, 3),
        **{f"{what}_s": f"{value:.4g}" for what, value in estimate.seconds.items()},
        "step_s": f"{estimate.step_seconds:.4g}",
        "mfu": round(estimate.mfu, 4),
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
