"""Exports: the same bytes and logits, whole or absent, loadable by transformers."""

import errno
import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_checkpoint
import transformers
from conftest import tiny_hf
from safetensors.numpy import load_file
from test_checkpoint_io import make_mesh, weights
from tiny_checkpoint import FAMILIES, STOPS

from retmask_jax import export
from retmask_jax.checkpoint_io import COMPANIONS, load_model, load_tokenizer, open_source
from retmask_jax.configs import base
from retmask_jax.errors import UserError
from retmask_jax.export import export_model
from retmask_jax.heads import HeadMask
from retmask_jax.models.decoder import Decoder
from retmask_jax.workdir import Workdir, write_json

HEADS = [(0, 1), (2, 5), (2, 6), (3, 0)]


def stored(folder: Path) -> dict[str, np.ndarray]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def assert_same_bytes(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert found[name].tobytes() == value.tobytes(), name


def logits(model: Decoder, tokens: np.ndarray, gates: jax.Array | None = None) -> np.ndarray:
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)

    @jax.jit
    def forward(model, tokens, positions):
        return model.logits(model(tokens, positions, jnp.ones_like(tokens), gates=gates).hidden)

    return np.asarray(forward(model, tokens, positions))


def torch_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    import torch

    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 50_000])
def test_import_export_import_is_bit_identical(tmp_path, family, max_shard_bytes):
    tensors = tiny_checkpoint.write(tmp_path / "source", family, dtype="bfloat16", shards=2)
    source = open_source(str(tmp_path / "source"))
    model = load_model(source, dtype="bfloat16")
    out = tmp_path / "out"
    export_model(model, source, out, max_shard_bytes=max_shard_bytes)
    assert_same_bytes(stored(out), tensors)
    again = load_model(open_source(str(out)), dtype="bfloat16")
    assert_same_bytes(weights(again), weights(model))
    files = sorted(out.glob("*.safetensors"))
    assert (len(files) == 1) == (max_shard_bytes == 10**9)
    if len(files) > 1:
        assert files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
        assert all(sum(x.nbytes for x in load_file(f).values()) <= 50_000 for f in files)
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
        assert index["weight_map"] == {name: f.name for f in files for name in load_file(f)}


@pytest.mark.parametrize("axes", [{"fsdp": 2}, {"tensor": 4}, {"fsdp": 2, "tensor": 4}])
def test_sharded_weights_give_the_same_bytes(tmp_path, axes):
    tensors = tiny_checkpoint.write(tmp_path / "source", "qwen3", dtype="bfloat16")
    source = open_source(str(tmp_path / "source"))
    model = load_model(source, dtype="float32", mesh=make_mesh(**axes))
    export_model(model, source, tmp_path / "out")
    assert_same_bytes(stored(tmp_path / "out"), tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_w1_companion_files_are_the_sources_byte_for_byte(tmp_path, family):
    tiny_checkpoint.write(tmp_path / "source", family, dtype="bfloat16")
    for name in ("config.json", "generation_config.json"):  # spacing that a rewrite would lose
        path = tmp_path / "source" / name
        path.write_text(json.dumps(json.loads(path.read_text()), indent=7))
    for name in COMPANIONS:
        path = tmp_path / "source" / name
        if not path.exists():
            path.write_bytes(f"\r\n{name}\0".encode() + b"\xff\xfe")
    (tmp_path / "source/README.md").write_text("the source's card")
    (tmp_path / "source/optimizer.pt").write_text("not ours to copy")
    source = open_source(str(tmp_path / "source"))
    export_model(load_model(source, dtype="float32"), source, tmp_path / "out")
    for name in COMPANIONS:
        copied = (tmp_path / "out" / name).read_bytes()
        assert copied == (tmp_path / "source" / name).read_bytes(), name
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {*COMPANIONS, "model.safetensors", "README.md"}
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == STOPS
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == STOPS
    assert open_source(str(tmp_path / "out")).generation_config == source.generation_config


@pytest.mark.parametrize("family", FAMILIES)
def test_w2_tied_export_has_no_head(tmp_path, family):
    hf = tiny_hf(family, tie_word_embeddings=True)
    tensors = tiny_checkpoint.random_tensors(hf)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    tiny_checkpoint.write(tmp_path / "source", hf, tensors=tensors | head)
    source = open_source(str(tmp_path / "source"))
    export_model(load_model(source, dtype="float32"), source, tmp_path / "out")
    assert_same_bytes(stored(tmp_path / "out"), tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_w5_theta_of_a_version_5_config_is_there_for_version_4_too(tmp_path, family):
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    both = {"rope_type": "default", "rope_theta": 500000.0}
    for rope in (both, scaled | {"rope_theta": 500000.0}):
        new = {"full_attention": rope, "sliding_attention": both} if family == "olmo3" else rope
        hf = tiny_hf(family, rope_parameters=new)
        hf.pop("rope_theta")
        hf.pop("rope_scaling", None)
        folder = tmp_path / f"{rope['rope_type']}"
        tiny_checkpoint.write(folder / "source", hf)
        source = open_source(str(folder / "source"))
        export_model(load_model(source, dtype="float32"), source, folder / "out")
        written = json.loads((folder / "out/config.json").read_text())
        assert written["rope_theta"] == 500000.0
        assert written.get("rope_scaling") == (scaled if rope["rope_type"] == "yarn" else None)
        assert written["rope_parameters"] == new
        assert open_source(str(folder / "out")).config == source.config
        theirs = transformers.AutoConfig.from_pretrained(folder / "out").rope_parameters
        if family == "olmo3":
            assert theirs["sliding_attention"]["rope_theta"] == 500000.0
            theirs = theirs["full_attention"]
        assert {key: theirs[key] for key in rope} == rope


@pytest.mark.parametrize(
    ("stated", "asked", "written"),
    [
        ({"torch_dtype": "bfloat16"}, "float32", {"torch_dtype": "float32"}),
        ({"dtype": "bfloat16"}, "float32", {"dtype": "float32"}),
        ({"dtype": "float32"}, None, {"dtype": "bfloat16"}),
        ({}, None, {}),
        ({}, "float32", {"torch_dtype": "float32"}),
    ],
)
def test_config_states_the_dtype_that_is_stored(tmp_path, stated, asked, written):
    hf = tiny_hf("llama", **stated)
    tensors = tiny_checkpoint.random_tensors(hf, "bfloat16")
    tiny_checkpoint.write(tmp_path / "source", hf, tensors=tensors)
    source = open_source(str(tmp_path / "source"))
    export_model(load_model(source, dtype="bfloat16"), source, tmp_path / "out", dtype=asked)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config == {**hf, **written}
    wanted = {name: value.astype(asked or value.dtype) for name, value in tensors.items()}
    assert_same_bytes(stored_ := stored(tmp_path / "out"), wanted)
    assert {str(value.dtype) for value in stored_.values()} == {asked or "bfloat16"}


def test_masked_heads_are_zero_columns_and_nothing_else_changes(tmp_path):
    tensors = tiny_checkpoint.write(tmp_path / "source", "qwen3", dtype="bfloat16")
    source = open_source(str(tmp_path / "source"))
    keep = HeadMask.from_heads(4, 8, HEADS).array
    export_model(load_model(source, dtype="bfloat16"), source, tmp_path / "out", keep=keep)
    width = source.config.head_dim
    assert width * 8 != source.config.d_model
    for layer, head in HEADS:
        columns = slice(head * width, (head + 1) * width)
        tensors[f"model.layers.{layer}.self_attn.o_proj.weight"][:, columns] = 0
    assert_same_bytes(stored(tmp_path / "out"), tensors)
    card = (tmp_path / "out/README.md").read_text()
    assert "4 of 32: 0-1, 2-5, 2-6, 3-0" in card


def test_model_card_says_what_was_done(tmp_path):
    tiny_checkpoint.write(tmp_path / "a model", "llama")
    source = open_source(str(tmp_path / "a model"))
    export_model(load_model(source, dtype="float32"), source, tmp_path / "out", done="Trained.")
    card = (tmp_path / "out/README.md").read_text()
    assert "\nTrained.\n" in card
    assert "`a model`" in card
    assert "float32" in card
    assert str(tmp_path) not in card


def test_a_failed_export_leaves_nothing(tmp_path, monkeypatch):
    tiny_checkpoint.write(tmp_path / "source", "llama")
    source = open_source(str(tmp_path / "source"))
    model, write, calls = load_model(source, dtype="float32"), export._write, []

    def full_disk(path, chunks):
        calls.append(path.name)
        write(path, chunks)
        if path.name.startswith("model-00002"):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export, "_write", full_disk)
    with pytest.raises(OSError, match="No space left"):
        export_model(model, source, tmp_path / "out", max_shard_bytes=50_000)
    assert calls[-1].startswith("model-00002")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_a_killed_export_left_is_replaced_and_a_whole_folder_is_not(tmp_path):
    tensors = tiny_checkpoint.write(tmp_path / "source", "llama")
    source = open_source(str(tmp_path / "source"))
    model = load_model(source, dtype="float32")
    (tmp_path / ".out.tmp").mkdir()
    (tmp_path / ".out.tmp/model-00009-of-00009.safetensors").write_bytes(b"half")
    export_model(model, source, tmp_path / "out")
    assert_same_bytes(stored(tmp_path / "out"), tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    with pytest.raises(UserError, match="already exists"):
        export_model(model, source, tmp_path / "out")


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """(config, workdir, source, tensors) of a tiny model whose training doubled every weight."""
    tensors = tiny_checkpoint.write(tmp_path / "source", "llama", dtype="bfloat16")
    config, workdir = base.get_config(), Workdir(tmp_path / "work")
    config.model.path = str(tmp_path / "source")
    selection = {"heads": [f"{i}-{j}" for i, j in HEADS], "n_layers": 4, "n_heads": 8}
    write_json(workdir.detect / "heads.json", selection)

    def load_trained(config, workdir, source, mesh, dtype):
        return jax.tree.map(lambda x: 2 * x, load_model(source, dtype=dtype, mesh=mesh))

    trained = SimpleNamespace(load_trained=load_trained)
    monkeypatch.setitem(sys.modules, "retmask_jax.train", trained)
    return config, workdir, tensors


def test_stage_writes_the_trained_model_once(stage):
    config, workdir, tensors = stage
    export.run(config, workdir)
    out = Path(workdir.export)
    assert_same_bytes(stored(out), {name: 2 * value for name, value in tensors.items()})
    assert "DPO (beta 0.1, 2 epochs" in (out / "README.md").read_text()
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    export.run(config, workdir)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_stage_keeps_norms_that_are_stored_wider(stage):
    config, workdir, tensors = stage
    name = "model.layers.1.input_layernorm.weight"
    tensors[name] = np.linspace(0.9, 1.1, 64, dtype=np.float32)
    tiny_checkpoint.write(Path(config.model.path), "llama", dtype="bfloat16", tensors=tensors)
    export.run(config, workdir, masked=True)
    assert_same_bytes(
        {name: stored(Path(workdir.root) / "export_masked")[name]}, {name: tensors[name]}
    )


def test_stage_writes_the_masked_base_model(stage):
    config, workdir, tensors = stage
    config.export.dtype = "float32"
    export.run(config, workdir, masked=True)
    out = Path(workdir.root) / "export_masked"
    wanted = {name: value.astype(np.float32) for name, value in tensors.items()}
    for layer, head in HEADS:
        wanted[f"model.layers.{layer}.self_attn.o_proj.weight"][:, head * 8 : head * 8 + 8] = 0
    assert_same_bytes(stored(out), wanted)
    assert "not trained" in (out / "README.md").read_text()
    assert not workdir.export.exists()


PROCESS = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
port, index, source, out = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", 2, int(index))
from retmask_jax.checkpoint_io import load_model, open_source
from retmask_jax.export import export_model
source = open_source(source)
mesh = jax.make_mesh((2, 2), ("tensor", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
export_model(load_model(source, dtype="float32", mesh=mesh), source, out, max_shard_bytes=50_000)
"""


def test_two_processes_write_one_folder(tmp_path):
    tensors = tiny_checkpoint.write(tmp_path / "source", "olmo3", dtype="bfloat16")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    arguments = [str(tmp_path / "source"), str(tmp_path / "out")]
    command = [sys.executable, "-c", PROCESS, port]
    processes = [
        subprocess.Popen([*command, str(i), *arguments], stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert_same_bytes(stored(tmp_path / "out"), tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


# transformers


@pytest.mark.torch
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("masked", [False, True])
def test_transformers_gives_the_same_logits(tmp_path, family, masked):
    tiny_checkpoint.write(tmp_path / "source", tiny_hf(family, num_hidden_layers=8))
    source = open_source(str(tmp_path / "source"))
    model = load_model(source, dtype="float32")
    keep = HeadMask.from_heads(8, 8, [*HEADS, (4, 7), (5, 3), (7, 2)]).array if masked else None
    export_model(model, source, tmp_path / "out", keep=keep, max_shard_bytes=100_000)
    tokens = np.random.default_rng(0).integers(0, 128, (2, 70), np.int32)
    gates = None if keep is None else jnp.asarray(keep[:, None], jnp.float32)
    ours = logits(model, tokens, gates)
    theirs = torch_logits(tmp_path / "out", tokens)
    assert np.abs(theirs).max() > 1
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    if masked:
        assert np.abs(logits(model, tokens) - theirs).max() > 0.1


@pytest.mark.torch
def test_smollm2_from_gguf_loads_in_transformers(tmp_path, smollm2, smollm2_source):
    out = tmp_path / "out"
    export_model(smollm2[0], smollm2_source, out)
    assert_same_bytes(
        weights(load_model(open_source(str(out)), dtype="float32")), weights(smollm2[0])
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == load_tokenizer(smollm2_source).chat_template
    messages = [{"role": "user", "content": "Name 3 rivers of Köln and Kyōto. " * 4}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    tokens = np.array([ids], np.int32)
    difference = np.abs(logits(smollm2[0], tokens) - torch_logits(out, tokens)).max()
    assert difference <= 1e-3
