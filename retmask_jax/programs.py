"""The programs that the stages run, to be compiled from shapes alone; see `estimate`."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from retmask_jax import detect, dpo, generate
from retmask_jax import mesh as meshes
from retmask_jax.batches import Batch
from retmask_jax.chips import Slice
from retmask_jax.errors import UserError
from retmask_jax.models import attention, config_from_hf
from retmask_jax.models.cache import block_size
from retmask_jax.models.config import SLIDING, DecoderConfig
from retmask_jax.models.decoder import abstract
from retmask_jax.models.kernels import splash_tile
from retmask_jax.sampler import Sampler
from retmask_jax.workdir import read_json

STAGES = ("train", "generate", "detect")


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
        unknown_trips: see `hlo.Program`.
        kernel_share: see `hlo.Program`.
    """

    name: str
    lower: Callable[[], jax.stages.Lowered]
    state: dict[str, int]
    model_flops: float
    tokens: int
    unit: str
    unknown_trips: tuple[int, ...]
    kernel_share: float = 1.0


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
    tiles = length // (splash_tile(length) or length)
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
        settings = detect.sampler_settings(options)
        settings["max_length"] = options.max_length + options.max_new_tokens
    else:
        settings = generate.sampler_settings(options)
        masks = (len(generate.POLICIES), model.n_layers, model.n_heads)
        settings["bank"] = np.ones(masks, bool)
    like = abstract(model, jnp.dtype(config.model.dtype))
    like = _placed(like, meshes.shardings(like, mesh))
    sampler = Sampler(like, stop_ids=(0,), mesh=mesh, **settings)
    length = settings["max_length"]
    cache = sampler.abstract_slots().cache
    state = {"weights": _device_bytes(like), "cache": _device_bytes(cache)}
    blocks = max(x.shape[2] // block_size(x.shape[2]) for x in cache.k)
    slots, (rows, chunk) = sampler.slots, sampler.prefill_shape
    keys = {kind: _visible(model, kind, length) for kind in set(model.layer_types)}

    def work(name: str, lower: Callable, tokens: int, scored: int, unit: str, *trips: int) -> Work:
        flops = model_flops(model, tokens, keys, passes=1, scored=scored)
        return Work(f"{stage}-{name}", lower, state, flops, tokens, unit, trips)

    return [
        work(
            "decode", sampler.lower_decode, slots, slots,
            f"step of {slots} rows ({options.slots} a process) that are {length} tokens long",
            1, blocks,
        ),
        work(
            "prefill", sampler.lower_prefill, rows * chunk, 0,
            f"chunk of {chunk} tokens of {rows} prompts, up to token {length}", blocks,
        ),
    ]  # fmt: skip


def stage_mesh(config: ConfigDict, model: DecoderConfig, where: Slice, stage: str) -> Mesh:
    """The mesh that the stage makes: one of all slices for train, else one of the first.

    Raises:
        UserError: see `mesh.make_mesh`.
    """
    if stage == "train":
        return meshes.make_mesh(config.mesh, where.devices)
    devices = stage_devices(where, stage)
    return meshes.sampling_mesh(config, model, devices, len(where.devices))


def stage_devices(where: Slice, stage: str) -> list[jax.Device]:
    """What a program of the stage runs on: all devices for train, else those of a team."""
    if stage == "train":
        return where.devices
    first = meshes.team(where.devices[0])
    return [device for device in where.devices if meshes.team(device) == first]


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
