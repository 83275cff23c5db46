"""Weights and work directory on `gs://`: an object store in memory stands in for Google's."""

import json
import os

import fsspec
import numpy as np
import pytest
import tiny_checkpoint
from conftest import tiny_hf
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.numpy import load_file

from retmask_jax import checkpoint_io, cli, export
from retmask_jax.errors import UserError

CONFIG = """
from retmask_jax.configs import base


def get_config():
    config = base.get_config()
    config.model.path, config.model.dtype = "gs://bucket/model", "float32"
    config.haystack.path, config.haystack.needles = "gs://bucket/books", "gs://bucket/needles.jsonl"
    config.detect.update(min_length=300, max_length=400, lengths=3, depths=4, slots=8)
    config.detect.update(max_new_tokens=12, pass_recall=0.0)
    config.evaluate.update(min_length=300, max_length=400, lengths=1, depths=2, slots=4)
    config.evaluate.update(max_new_tokens=4, random_seeds=1)
    config.heads.update(rule="top", k=2)
    config.prompts.path = "gs://bucket/prompts.jsonl"
    config.generate.update(max_prompt_tokens=99, max_new_tokens=8, slots=4, prompts_per_part=2)
    return config
"""


class Store(MemoryFileSystem):
    """Objects in memory under `gs://`."""

    protocol = ("gcs", "gs")
    store, pseudo_dirs = {}, [""]

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("gs://").strip("/")


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(cli, "_check_store", lambda *args: None)
    for protocol in Store.protocol:
        fsspec.register_implementation(protocol, Store, clobber=True)
    monkeypatch.setattr(Store, "store", {})
    monkeypatch.setattr(Store, "pseudo_dirs", [""])
    return Store()


def upload(store, folder, to):
    for path in folder.rglob("*"):
        if path.is_file():
            store.pipe(f"{to}/{path.relative_to(folder)}", path.read_bytes())


@pytest.mark.slow
def test_sampling_and_export(store, tmp_path, capsys):
    hf = tiny_hf("llama", vocab_size=288, eos_token_id=list(range(3, 256, 12)))
    tensors = tiny_checkpoint.write(tmp_path / "model", hf, shards=2)
    upload(store, tmp_path / "model", "gs://bucket/model")
    store.pipe("gs://bucket/books/a.txt", b"One is here. Two are there. Three went away. " * 20)
    words = " ".join("abcdefghijklmnopqrstuvwxyz0123456789")
    needle = {"needle": f"It is {words}.", "question": "What is it?", "answer": words}
    store.pipe("gs://bucket/needles.jsonl", json.dumps(needle).encode())
    rows = [json.dumps({"prompt": f"Tell me about {n}."}) for n in range(3)]
    store.pipe("gs://bucket/prompts.jsonl", "\n".join(rows).encode())
    (tmp_path / "config.py").write_text(CONFIG)
    options = [f"--config={tmp_path}/config.py", "--workdir=gs://bucket/work"]
    for stage in ("detect", "generate", "evaluate"):
        assert cli.main([stage, *options]) == 0, capsys.readouterr().err
    assert cli.main(["export", "--masked", *options]) == 0, capsys.readouterr().err
    masked = json.loads(store.cat("gs://bucket/work/detect/heads.json"))["heads"]
    assert len(masked) == 2
    for name in store.ls("gs://bucket/work/export_masked", detail=False):
        (tmp_path / os.path.basename(name)).write_bytes(store.cat(name))
    found = load_file(tmp_path / "model.safetensors")
    changed = {name for name in tensors if not np.array_equal(found[name], tensors[name])}
    layers = {head.split("-")[0] for head in masked}
    assert changed == {f"model.layers.{layer}.self_attn.o_proj.weight" for layer in layers}


@pytest.mark.parametrize("where", ["--workdir=gs://bucket/work", "--config.model.path=gs://b/m"])
def test_without_gcsfs(monkeypatch, capsys, tmp_path, where):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    options = [f"--workdir={tmp_path}", where]
    assert cli.main(["detect", "--config=smollm2_135m", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"retmask: error: {where.split('=')[1]}: needs gcsfs; pip install")
    assert error.count("\n") == 1


def test_a_killed_export_is_made_again(store, tmp_path, monkeypatch):
    """`config.json` is the last object: without it the folder is not whole."""
    tensors = tiny_checkpoint.write(tmp_path / "model", "qwen3")
    source = checkpoint_io.open_source(str(tmp_path / "model"))
    model = checkpoint_io.load_model(source, dtype="float32")
    write, written = export._write, []

    def dies(path, chunks):
        if path.name == "config.json":
            raise KeyboardInterrupt
        written.append(path.name)
        write(path, chunks)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(export, "_write", dies)
        export.export_model(model, source, "gs://bucket/out")
    assert "model.safetensors" in written
    assert not export.is_whole("gs://bucket/out")
    export.export_model(model, source, "gs://bucket/out")
    assert export.is_whole("gs://bucket/out")
    again = checkpoint_io.open_source("gs://bucket/out")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(again.tensors[name].rows(0, len(tensor)), tensor)
    with pytest.raises(UserError, match="already exists"):
        export.export_model(model, source, "gs://bucket/out")
