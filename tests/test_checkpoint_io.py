"""Weights arrive in the right place, in any form and on any mesh; what is not whole is refused."""

import json
import math
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny_checkpoint
from benchmarks import import_memory
from conftest import TINY_NORMS, tiny_hf
from jax.sharding import AxisType
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import FAMILIES

from retmask_jax import checkpoint_io, safetensors_io, weight_layout
from retmask_jax.checkpoint_io import load_model, load_tokenizer, open_source
from retmask_jax.errors import UserError
from retmask_jax.mesh import shardings
from retmask_jax.models.decoder import parameters

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def make_mesh(**axes: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: math.prod(axes.values())]
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=devices)


def weights(model) -> dict[str, np.ndarray]:
    return {path: np.asarray(param[...]) for path, param in parameters(model).items()}


def assert_holds(model, tensors: dict[str, np.ndarray], hf: dict) -> None:
    """Compares with the stored tensors by the layout written out one weight at a time."""
    ours, config = weights(model), model.config
    n, k, h, d = config.n_heads, config.n_kv_heads, config.head_dim, config.d_model
    period = len(config.pattern)

    def same(value: np.ndarray, stored: np.ndarray) -> None:
        np.testing.assert_array_equal(value, stored.astype(value.dtype))

    same(ours["embed"], tensors["model.embed_tokens.weight"])
    same(ours["final_norm"], tensors["model.norm.weight"])
    assert ("lm_head" in ours) == (not hf["tie_word_embeddings"])
    if "lm_head" in ours:
        same(ours["lm_head"], tensors["lm_head.weight"])
    for layer in range(config.n_layers):
        block = {
            path.split(".", 2)[2]: value[layer // period]
            for path, value in ours.items()
            if path.startswith(f"blocks.{layer % period}.")
        }

        def stored(name: str, layer: int = layer) -> np.ndarray:
            return tensors[f"model.layers.{layer}.{name}.weight"]

        attention = {"q": (n, d), "k": (k, d), "v": (k, d)}
        for name, (heads, width) in attention.items():
            of_heads = stored(f"self_attn.{name}_proj").reshape(heads, h, width)
            same(block[f"attention.{name}"], of_heads.transpose(2, 0, 1))
        for head in range(n):
            columns = stored("self_attn.o_proj")[:, head * h : (head + 1) * h]
            same(block["attention.o"][head], columns.T)
        for name in ("gate", "up", "down"):
            same(block[f"mlp.{name}"], stored(f"mlp.{name}_proj").T)
        first, second, qk_norm = TINY_NORMS[config.family]
        same(block["attention_norm"], stored(first))
        same(block["mlp_norm"], stored(second))
        assert ("attention.q_norm" in block) == bool(qk_norm)
        if qk_norm:
            same(block["attention.q_norm"].reshape(-1), stored("self_attn.q_norm"))
            same(block["attention.k_norm"].reshape(-1), stored("self_attn.k_norm"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("axes", [{}, {"fsdp": 2}, {"tensor": 4}, {"fsdp": 2, "tensor": 4}])
def test_each_weight_is_where_it_belongs(tmp_path, family, axes):
    hf = tiny_hf(family, num_hidden_layers=8, torch_dtype="float32")  # two groups of Olmo's four
    tensors = tiny_checkpoint.write(tmp_path, hf, shards=3)
    model = load_model(
        open_source(str(tmp_path)), dtype="float32", mesh=make_mesh(**axes) if axes else None
    )
    assert_holds(model, tensors, hf)
    gate = parameters(model)["blocks.0.mlp.gate"][...]
    g, d, f = gate.shape
    local = (g, d // axes.get("fsdp", 1), f // axes.get("tensor", 1))
    assert {shard.data.shape for shard in gate.addressable_shards} == {local}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_stored_dtypes_and_both_compute_dtypes(tmp_path, family, dtype):
    tensors = tiny_checkpoint.write(tmp_path, family, dtype=dtype)
    source = open_source(str(tmp_path))
    assert source.dtype == dtype
    for wanted in ("float32", "bfloat16"):
        model = load_model(source, dtype=wanted)
        assert {str(x.dtype) for x in jax.tree.leaves(model)} == {wanted}
        assert_holds(model, tensors, tiny_hf(family))


def test_blocks_of_a_few_rows_give_the_same(tmp_path, monkeypatch):
    tensors = tiny_checkpoint.write(tmp_path, "qwen3")
    monkeypatch.setattr(weight_layout, "_BLOCK_BYTES", 1000)
    monkeypatch.setattr(weight_layout, "_TILE_ROWS", 3)
    assert_holds(load_model(open_source(str(tmp_path)), dtype="float32"), tensors, tiny_hf("qwen3"))


def test_a_folder_a_file_and_an_index_are_the_same_model(tmp_path):
    tensors = tiny_checkpoint.write(tmp_path / "single", "llama")
    tiny_checkpoint.write(tmp_path / "many", "llama", shards=2, tensors=tensors)
    shutil.copytree(tmp_path / "single", tmp_path / "named")
    (tmp_path / "named/model.safetensors").rename(tmp_path / "named/other.safetensors")
    paths = ("single", "single/model.safetensors", "many", f"many/{INDEX}", "named")
    for path in paths:
        source = open_source(str(tmp_path / path))
        assert source.kind == "hf"
        assert_holds(load_model(source, dtype="float32"), tensors, tiny_hf("llama"))


def test_a_path_relative_to_the_current_folder(tmp_path, monkeypatch):
    tensors = tiny_checkpoint.write(tmp_path / "the model", "llama")
    monkeypatch.chdir(tmp_path)
    source = open_source("the model")
    monkeypatch.chdir("/")
    assert_holds(load_model(source, dtype="float32"), tensors, tiny_hf("llama"))


def test_frequencies_that_old_checkpoints_carry_are_passed_over(tmp_path):
    tensors = tiny_checkpoint.random_tensors(tiny_hf("llama"))
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    tiny_checkpoint.write(tmp_path, tiny_hf("llama"), tensors=tensors | extra)
    assert_holds(load_model(open_source(str(tmp_path)), dtype="float32"), tensors, tiny_hf("llama"))


@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 8},
        {"fsdp": 4, "tensor": 2},
        {"data": 2, "tensor": 4},
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"fsdp": 2, "sequence": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_process_reads_what_its_devices_hold(tmp_path, monkeypatch, family, sizes):
    """A process of four devices of eight, as many bytes, whatever the mesh cuts; norms aside."""
    hf = tiny_hf(family, num_hidden_layers=8)
    tensors = tiny_checkpoint.write(tmp_path, hf)
    source = open_source(str(tmp_path))
    asked = 0
    rows, make = safetensors_io.SafeTensor.rows, jax.make_array_from_callback

    def counting(tensor, start, stop):
        nonlocal asked
        asked += tensor.nbytes * (stop - start) // tensor.shape[0] if len(tensor.shape) > 1 else 0
        return rows(tensor, start, stop)

    def as_process_of_four(shape, sharding, callback):
        with monkeypatch.context() as patch:
            patch.setattr(safetensors_io.SafeTensor, "rows", counting)
            index_of = sharding.devices_indices_map(shape)
            for device in jax.devices()[:4]:
                callback(index_of[device])
        return make(shape, sharding, callback)

    monkeypatch.setattr(jax, "make_array_from_callback", as_process_of_four)
    mesh = make_mesh(**sizes)
    model = load_model(source, dtype="float32", mesh=mesh)
    held = 0
    placement = jax.tree.leaves(shardings(model, mesh))
    for (path, weight), target in zip(parameters(model).items(), placement, strict=True):
        assert weight[...].sharding == target
        if not path.endswith("norm"):
            held += sum(shard.data.nbytes for shard in weight[...].addressable_shards[:4])
    assert asked == held
    assert_holds(model, tensors, hf)


@pytest.mark.parametrize(("devices", "mesh"), [(1, ""), (8, "fsdp=4,tensor=2")])
def test_peak_memory_is_little_more_than_the_weights(devices, mesh):
    measured = import_memory.run(600_000_000, devices, mesh)
    assert measured["held_bytes"] > 550_000_000
    assert measured["ratio"] <= 1.3


@pytest.mark.slow
def test_peak_memory_of_four_gigabytes(tmp_path):
    measured = import_memory.run(4_300_000_000, 8, "fsdp=8", str(tmp_path))
    assert measured["held_bytes"] > 4_000_000_000
    assert measured["ratio"] <= 1.3


def test_tokenizer_of_a_folder(tmp_path):
    tiny_checkpoint.write(tmp_path, "llama")
    tokenizer = load_tokenizer(open_source(str(tmp_path)))
    messages = [{"role": "user", "content": "hé"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<s>hé</s>"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    whole = (tmp_path / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"tokenizer files cannot be read .* download them again"):
        load_tokenizer(open_source(str(tmp_path)))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        load_tokenizer(open_source(str(tmp_path)))


# Refusals


def refused(path, *parts: str) -> None:
    """open_source refuses in one line that has all these parts."""
    with pytest.raises(UserError) as error:
        open_source(str(path))
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def edit_config(folder, **changes) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def test_nothing_there(tmp_path):
    refused(tmp_path / "no", "no such file or folder")
    refused("", "no such file")
    refused(tmp_path, "no config.json")
    tiny_checkpoint.write(tmp_path, "llama")
    refused(tmp_path / "tokenizer.json", "want a folder")
    (tmp_path / "model.safetensors").unlink()
    refused(tmp_path, str(tmp_path), "no weights")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    refused(tmp_path, "pickles", "safetensors")
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"")
    refused(tmp_path, "2 safetensors files", INDEX)


def test_a_config_that_is_not_json(tmp_path):
    tiny_checkpoint.write(tmp_path, "llama")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "config.json", "JSON")
    (tmp_path / "config.json").write_text("[]")
    refused(tmp_path, "config.json", "not a JSON object")


def test_unknown_architecture(tmp_path):
    tiny_checkpoint.write(tmp_path, "llama")
    edit_config(tmp_path, model_type="mamba", architectures=["MambaForCausalLM"])
    refused(tmp_path, "config.json", "MambaForCausalLM", "LlamaForCausalLM")


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq"])
def test_quantised_checkpoints(tmp_path, method):
    tiny_checkpoint.write(tmp_path, "llama")
    edit_config(tmp_path, quantization_config={"quant_method": method})
    refused(tmp_path, "quantization_config", method, "quantised")


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.int8])
def test_weights_that_are_not_plain_floats(tmp_path, dtype):
    tensors = tiny_checkpoint.random_tensors(tiny_hf("llama"))
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(dtype)
    tiny_checkpoint.write(tmp_path, tiny_hf("llama"), tensors=tensors)
    refused(tmp_path, "model.safetensors", name, "plain floats")


def test_pointer_instead_of_weights(tmp_path):
    tiny_checkpoint.write(tmp_path, "llama", shards=2)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n"
    (tmp_path / SHARDS[1]).write_text(pointer)
    refused(tmp_path, SHARDS[1], "git-lfs pointer", "git lfs pull")


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_truncated_shard(tmp_path, size):
    tiny_checkpoint.write(tmp_path, "llama", shards=2)
    data = (tmp_path / SHARDS[1]).read_bytes()
    (tmp_path / SHARDS[1]).write_bytes(data[:size])
    refused(tmp_path, SHARDS[1], "truncated" if size == -1 else "not a whole safetensors file")


def test_shard_that_is_too_long(tmp_path):
    tiny_checkpoint.write(tmp_path, "llama")
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.write(b"\0\0")
    refused(tmp_path, "model.safetensors", "too long")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{ no json", "unreadable"),
        (b"[1]", "unreadable"),
        (b'{"a":{"dtype":"F32","shape":[2]}}', "unreadable"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', "cannot lie"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', "cannot lie"),
    ],
)
def test_wrong_header(tmp_path, header, message):
    tiny_checkpoint.write(tmp_path, "llama")
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(data)
    refused(tmp_path, "model.safetensors", message)


def test_wrong_shape_names_both(tmp_path):
    tensors = tiny_checkpoint.random_tensors(tiny_hf("llama"))
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name][:-8]
    tiny_checkpoint.write(tmp_path, tiny_hf("llama"), tensors=tensors)
    refused(tmp_path, name, "[24, 64]", "[32, 64]")


def test_missing_and_extra_tensors_are_named(tmp_path):
    tensors = tiny_checkpoint.random_tensors(tiny_hf("llama"))
    name = "model.layers.1.self_attn.k_proj.weight"
    bias = "model.layers.0.self_attn.q_proj.bias"
    lacking = {key: value for key, value in tensors.items() if key != name}
    tiny_checkpoint.write(tmp_path, tiny_hf("llama"), tensors=lacking)
    refused(tmp_path, "missing", name)
    tiny_checkpoint.write(tmp_path, tiny_hf("llama"), tensors=tensors | {bias: tensors[name][0]})
    refused(tmp_path, "extra", bias)


@pytest.mark.parametrize("family", FAMILIES)
def test_w2_head_of_a_tied_and_of_an_untied_model(tmp_path, family):
    tied = tiny_hf(family, tie_word_embeddings=True)
    tensors = tiny_checkpoint.random_tensors(tied)
    embedding = tensors["model.embed_tokens.weight"]
    tiny_checkpoint.write(tmp_path, tied, tensors=tensors | {"lm_head.weight": embedding.copy()})
    assert_holds(load_model(open_source(str(tmp_path)), dtype="float32"), tensors, tied)
    other = embedding.copy()
    other[-1, -1] += 1
    tiny_checkpoint.write(tmp_path, tied, tensors=tensors | {"lm_head.weight": other})
    refused(tmp_path, "lm_head.weight", "tie_word_embeddings")
    tiny_checkpoint.write(tmp_path, tied | {"tie_word_embeddings": False}, tensors=tensors)
    refused(tmp_path, "missing", "lm_head.weight")


@pytest.mark.parametrize("family", FAMILIES)
def test_w3_index_and_shards_disagree(tmp_path, family):
    tiny_checkpoint.write(tmp_path, family, shards=2)
    index = json.loads((tmp_path / INDEX).read_text())

    def write_index(weight_map: dict[str, str]) -> None:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    write_index(index["weight_map"] | {"model.layers.9.x": SHARDS[0]})
    refused(tmp_path, "model.layers.9.x", SHARDS[0])
    moved = next(name for name, shard in index["weight_map"].items() if shard == SHARDS[0])
    write_index(index["weight_map"] | {moved: SHARDS[1]})
    refused(tmp_path, moved, SHARDS[0])
    write_index(index["weight_map"])
    (tmp_path / SHARDS[1]).unlink()
    refused(tmp_path, SHARDS[1], "missing")


def test_index_without_a_map(tmp_path):
    tiny_checkpoint.write(tmp_path, "llama", shards=2)
    for text in ("{}", '{"weight_map": {"a": 1}}'):
        (tmp_path / INDEX).write_text(text)
        refused(tmp_path, INDEX, "weight_map")


@pytest.mark.parametrize(
    "entry", ["../other.safetensors", "/etc/hostname", "a/../../b", "s3://x/y"]
)
def test_index_entry_that_leads_out_of_the_folder(tmp_path, entry):
    folder = tmp_path / "model"
    tiny_checkpoint.write(folder, "llama", shards=2)
    shutil.copy(folder / SHARDS[0], tmp_path / "other.safetensors")
    names = load_file(folder / SHARDS[0])
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    (folder / INDEX).write_text(
        json.dumps({"weight_map": weight_map | dict.fromkeys(names, entry)})
    )
    refused(folder, repr(entry), "leads out of the folder")


@pytest.mark.parametrize("family", FAMILIES)
def test_w5_theta_in_every_form_or_an_error(tmp_path, family):
    plain = {"rope_theta": None, "rope_scaling": None, "rope_parameters": None}
    forms = [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}},
        {"rope_theta": 500000.0},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "default"}},
    ]
    tiny_checkpoint.write(tmp_path, family)
    for form in forms:
        edit_config(tmp_path, **plain)
        edit_config(tmp_path, **form)
        assert open_source(str(tmp_path)).config.rope.theta == 500000.0
    edit_config(tmp_path, **plain)
    refused(tmp_path, "config.json", "rope_theta")
    edit_config(tmp_path, rope_theta=1e4, rope_scaling={"rope_type": "banana"})
    refused(tmp_path, "config.json", "banana")


def test_package_without_one_gguf(tmp_path, monkeypatch):
    refused("package:no_such_package", "package:no_such_package", "not installed")
    refused("package:json", "package:json", "one .gguf", "none")
    (tmp_path / "two_models").mkdir()
    (tmp_path / "two_models/__init__.py").write_text("raise RuntimeError('imported')")
    for name in ("a", "b"):
        (tmp_path / f"two_models/{name}.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    refused("package:two-models", "a.gguf, b.gguf")


def test_header_is_what_the_safetensors_library_writes(tmp_path):
    tensors = {"a": np.ones((2, 3), np.float32), "b": np.zeros(5, ml_dtypes.bfloat16)}
    save_file(tensors, tmp_path / "theirs.safetensors")
    found = safetensors_io.read_header(checkpoint_io.epath.Path(tmp_path / "theirs.safetensors"))
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == {
        "a": ((2, 3), "float32"),
        "b": ((5,), "bfloat16"),
    }
    entries = [(name, array.shape, str(array.dtype)) for name, array in tensors.items()]
    data = safetensors_io.header(entries) + b"".join(a.tobytes() for a in tensors.values())
    (tmp_path / "ours.safetensors").write_bytes(data)
    loaded = load_file(tmp_path / "ours.safetensors")
    for name, array in tensors.items():
        np.testing.assert_array_equal(loaded[name], array)
