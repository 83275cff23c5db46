"""The export stage: a model becomes a Hugging Face folder that transformers and vLLM load.

Weights go out one tensor at a time: brought together from all devices, turned into Hugging Face's
layout there, written. Everything else is the source's, byte for byte. The folder is written under
a temporary name and renamed: it is whole or it is absent.
"""

import collections
import dataclasses
import functools
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from ml_collections import ConfigDict

from retmask_jax import __version__, distributed, gguf_io, safetensors_io
from retmask_jax.checkpoint_io import (
    INDEX,
    SINGLE,
    Source,
    load_model,
    open_source,
)
from retmask_jax.errors import UserError
from retmask_jax.heads import head_name, read_selection
from retmask_jax.mesh import make_mesh
from retmask_jax.models import weight_names
from retmask_jax.models.decoder import Decoder, parameters
from retmask_jax.models.naming import Slot
from retmask_jax.weight_layout import hf_shape, input_axes
from retmask_jax.workdir import Workdir, absolute, is_local

MAX_SHARD_BYTES = 5_000_000_000
_log = logging.getLogger("retmask")


def run(config: ConfigDict, workdir: Workdir, masked: bool = False) -> None:
    """Writes the trained model to `export`, or the ablated base model to `export_masked`.

    One that is there already stays.
    """
    out = workdir.root / "export_masked" if masked else workdir.export
    if is_whole(out):
        _log.info("%s is there already", out)
        return
    source, mesh = open_source(config.model.path), make_mesh(config.mesh)
    keep = None
    if masked:
        mask = read_selection(workdir)
        stored = {tensor.dtype for tensor in source.tensors.values()}
        exact = "float32" if len(stored) > 1 else source.dtype
        model, keep = load_model(source, dtype=exact, mesh=mesh), mask.array
        done = "The base model with its retrieval heads masked; it was not trained."
    else:
        from retmask_jax.train import load_trained

        model = load_trained(config, workdir, source, mesh, "float32")
        done = (
            f"Trained with DPO (beta {config.train.beta:g}, {config.train.epochs} epochs, peak "
            f"learning rate {config.train.learning_rate:g}) to prefer the responses of the base "
            "model over those of the same model with its retrieval heads masked. All heads are in "
            "use."
        )
    export_model(
        model,
        source,
        out,
        dtype=config.export.dtype,
        keep=keep,
        max_shard_bytes=int(config.export.max_shard_bytes),
        done=done,
    )
    _log.info("wrote %s", out)


def is_whole(folder: epath.PathLike) -> bool:
    """Whether an export has ended: a folder gets its name, or on `gs://` its config.json, last."""
    return (absolute(folder) / "config.json").exists()


def export_model(
    model: Decoder,
    source: Source,
    out_dir: epath.PathLike,
    *,
    dtype: str | None = None,
    keep: np.ndarray | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    done: str = "Exported unchanged.",
) -> None:
    """Writes a model as a Hugging Face folder.

    In a job of several processes all of them call this; the first one writes.

    Args:
      model: of the source's config, in any dtype and sharding.
      source: where it came from: tensor names, config and tokenizer files are taken from there.
      out_dir: a folder that does not exist yet.
      dtype: of the weights; None: each tensor as the source has it.
      keep: bool [L, N]; where False, the head's block of `o_proj` is written as zeros.
      max_shard_bytes: the largest weights file, unless one tensor alone is larger.
      done: what was done to the model, for the model card.

    Raises:
      UserError: `out_dir` exists.
    """
    out = absolute(out_dir)
    if out.exists() and (is_local(out) or is_whole(out)):
        raise UserError(f"{out}: already exists; export to another folder or remove it")
    params = parameters(model)
    tensors = [
        _Tensor(
            slot,
            hf_shape(params[slot.path].shape, slot),
            dtype or source.tensors[slot.name].dtype,
            None if keep is None else _keep_of(slot, keep, len(source.config.pattern)),
        )
        for slot in weight_names(source.config)
    ]
    shards = _shards(tensors, max_shard_bytes)
    writes = jax.process_index() == 0
    distributed.wait(f"{out.name} not there yet")
    temporary = out.parent / f".{out.name}.tmp" if is_local(out) else out
    try:
        if writes:
            if temporary.exists():
                temporary.rmtree()
            temporary.mkdir(parents=True, exist_ok=True)
        for name, shard in shards.items():
            arrays = (_hf_array(params[tensor.slot.path][...], tensor) for tensor in shard)
            if writes:
                header = safetensors_io.header((t.slot.name, t.shape, t.dtype) for t in shard)
                _write(temporary / name, itertools.chain([header], map(_bytes, arrays)))
            else:
                collections.deque(arrays, maxlen=0)  # the others only take part in the gathering
        if writes:
            for name, data in _text_files(source, dtype, shards, keep, done):
                _write(temporary / name, [data])
            if is_local(out):
                temporary.rename(out)
    except BaseException:
        if writes and temporary.exists():
            temporary.rmtree()
        raise
    distributed.wait(f"{out.name} written")


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One tensor as it will be stored."""

    slot: Slot
    shape: tuple[int, ...]
    dtype: str
    keep: np.ndarray | None  # bool [N]: heads of this layer that stay, for a masked `o_proj`

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * safetensors_io.numpy_dtype(self.dtype).itemsize


def _keep_of(slot: Slot, keep: np.ndarray, period: int) -> np.ndarray | None:
    if not slot.path.endswith("attention.o"):
        return None
    return np.asarray(keep, bool)[slot.group * period + int(slot.path.split(".")[1])]


def _shards(tensors: list[_Tensor], max_bytes: int) -> dict[str, list[_Tensor]]:
    """File name -> its tensors, in order, each file filled up to `max_bytes`."""
    shards: list[list[_Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    total = len(shards)
    return {f"model-{i:05d}-of-{total:05d}.safetensors": s for i, s in enumerate(shards, 1)}


def _hf_array(weight: jax.Array, tensor: _Tensor) -> jax.Array:
    """One tensor in Hugging Face's layout, whole on every device."""
    sharding = weight.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    split = input_axes(tensor.slot)
    return _converter(split, tensor.shape, tensor.dtype, sharding)(
        weight, tensor.slot.group, tensor.keep
    )


@functools.cache
def _converter(
    split: int, shape: tuple[int, ...], dtype: str, sharding: Sharding
) -> Callable[[jax.Array, int | None, np.ndarray | None], jax.Array]:
    def convert(weight: jax.Array, group: jax.Array | None, keep: jax.Array | None) -> jax.Array:
        if group is not None:
            weight = jax.lax.dynamic_index_in_dim(weight, group, keepdims=False)
        if keep is not None:
            weight = jnp.where(keep[:, None, None], weight, 0)
        if split:
            weight = weight.reshape(shape[::-1]).T
        return weight.reshape(shape).astype(dtype)

    return jax.jit(convert, out_shardings=sharding)


def _bytes(array: jax.Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _write(path: epath.Path, chunks: Iterable[bytes | memoryview]) -> None:
    try:
        with path.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            if is_local(path):
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


# Text files


def _text_files(
    source: Source,
    dtype: str | None,
    shards: dict[str, list[_Tensor]],
    keep: np.ndarray | None,
    done: str,
) -> list[tuple[str, bytes]]:
    """Everything but the weights: file names and contents, config.json last."""
    files = {name: source.read_file(name) for name in source.files}
    changes = _config_changes(source, dtype)
    if changes:
        files["config.json"] = gguf_io.dump(source.hf_config | changes)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(t.nbytes for shard in shards.values() for t in shard)},
            "weight_map": {t.slot.name: name for name, shard in shards.items() for t in shard},
        }
        files[INDEX] = gguf_io.dump(index)
    files["README.md"] = _model_card(source, dtype or source.dtype, keep, done).encode()
    return sorted(files.items(), key=lambda file: file[0] == "config.json")


def _config_changes(source: Source, dtype: str | None) -> dict[str, Any]:
    """What `config.json` must say otherwise than the source's; nothing, as a rule.

    The dtype, if it is stored in another than the source says; and RoPE in a form that
    transformers 4 and 5 both read. Version 4 passes over `rope_parameters` in silence; version 5,
    for a family that has other parameters in its sliding layers, over parameters that are not
    nested by layer type and over a kind that is called `type`.
    """
    config, changes = source.hf_config, {}
    stated, stored = config.get("dtype", config.get("torch_dtype")), dtype or source.dtype
    if stated != stored and (stated is not None or stored != source.dtype):
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
        changes |= dict.fromkeys(keys, stored)
    return changes | _rope_changes(source)


def _rope_changes(source: Source) -> dict[str, Any]:
    config, changes = source.hf_config, {}
    rope, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if source.config.sliding_rope and rope and "full_attention" not in rope:
        plain = {"rope_type": "default", "rope_theta": source.config.sliding_rope.theta}
        changes["rope_parameters"] = {"full_attention": rope, "sliding_attention": plain}
    rope = rope.get("full_attention", rope)
    if rope.get("rope_theta") is not None and config.get("rope_theta") is None:
        changes["rope_theta"] = rope["rope_theta"]
    if source.config.rope.kind != "default" and "rope_type" not in scaling:
        numbers = scaling or {k: v for k, v in rope.items() if k != "rope_theta"}
        changes["rope_scaling"] = {"rope_type": source.config.rope.kind, **numbers}
    return changes


def _model_card(source: Source, dtype: str, keep: np.ndarray | None, done: str) -> str:
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        "- retmask",
        "---",
        "",
        f"# {source.path.stem if source.kind == 'gguf' else source.path.name}, by RetMask",
        "",
        done,
        "",
        f"- Source: `{source.path.name}`",
        f"- Weights: {dtype}",
        f"- Written by: retmask-jax {__version__}",
    ]
    if keep is not None:
        heads = [head_name((int(i), int(j))) for i, j in np.argwhere(~np.asarray(keep, bool))]
        lines += [
            f"- Masked heads (layer-head), {len(heads)} of {keep.size}: {', '.join(heads)}",
            "",
            "For each masked head n the columns n*H to (n+1)*H of its layer's `o_proj.weight` are "
            "zero (H is the head width), so the head adds nothing.",
        ]
    return "\n".join(lines) + "\n"
