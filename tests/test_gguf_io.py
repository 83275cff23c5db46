"""GGUF files: rows where Hugging Face has them, the tokenizer's exact ids, clear refusals."""

import builtins
import json
import sys
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
import tiny_checkpoint
from conftest import tiny_hf
from gguf import GGMLQuantizationType
from test_checkpoint_io import assert_holds, make_mesh, refused, weights
from tokenizers import pre_tokenizers

from retmask_jax.checkpoint_io import load_model, load_tokenizer, open_source

DATA = Path(__file__).parent / "data"
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    parts = name.removesuffix(".weight").removeprefix("model.layers.").split(".", 1)
    if parts[0].isdecimal():
        return f"blk.{parts[0]}.{NAMES[parts[1]]}.weight"
    return f"{NAMES['.'.join(parts)]}.weight"


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter reorders q and k: the halves of each head interleaved."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, shape[1]).swapaxes(1, 2).reshape(shape)


def write(
    path: Path,
    hf: dict,
    tensors: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    quantised: bool = False,
    pre: str = "smollm",
    leave_out: tuple[str, ...] = (),
    extra: tuple[str, ...] = (),
    **metadata: object,
) -> None:
    """Writes a GGUF file as llama.cpp's converter does; `metadata` sets tokenizer.ggml keys."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    if "rope" not in leave_out:
        writer.add_rope_freq_base(hf["rope_theta"])
    if "rope scaling" in extra:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|pad|>", "<|start|>", "<|end|>", "<|turn|>", *alphabet, "ab", "<think>"]
    tokens += [f"unused{i}" for i in range(hf["vocab_size"] - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    if "tokens" not in leave_out:
        writer.add_token_list(tokens)
    kinds = {0: 3, 1: 3, 2: 3, 3: 3, tokens.index("<think>"): 4}
    writer.add_token_types([kinds.get(i, 1) for i in range(len(tokens))])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(tiny_checkpoint.TEMPLATE)
    for key, value in metadata.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{key}", value)
    heads = {"q_proj": hf["num_attention_heads"], "k_proj": hf["num_key_value_heads"]}
    for name, value in tensors.items():
        for kind, count in heads.items():
            if kind in name:
                value = permuted(value, count)
        if quantised and value.ndim == 2:
            packed = gguf.quants.quantize(value, GGMLQuantizationType.Q8_0)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(gguf_name(name), value)
    if "rope_freqs" in extra:
        writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))
    if "bias" in extra:
        writer.add_tensor("blk.0.attn_q.bias", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def tiny(tmp_path):
    """tiny(**options) -> (path, Hugging Face config, tensors) of a tiny GGUF file."""

    def build(tied: bool = True, **options):
        hf = tiny_hf("llama", vocab_size=288, tie_word_embeddings=tied)
        tensors = tiny_checkpoint.random_tensors(hf)
        write(tmp_path / "tiny.gguf", hf, tensors, **options)
        return tmp_path / "tiny.gguf", hf, tensors

    return build


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("axes", [{}, {"fsdp": 2, "tensor": 4}])
def test_rows_are_where_hugging_face_has_them(tiny, tied, axes):
    path, hf, tensors = tiny(tied)
    source = open_source(str(path))
    assert (source.kind, source.dtype) == ("gguf", "float32")
    assert source.config.tied == tied
    model = load_model(source, dtype="float32", mesh=make_mesh(**axes) if axes else None)
    assert_holds(model, tensors, hf)


def test_quantised_rows_are_dequantised(tiny):
    path, hf, tensors = tiny(quantised=True)
    kind = GGMLQuantizationType.Q8_0
    rounded = {
        name: gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
        if value.ndim == 2
        else value
        for name, value in tensors.items()
    }
    name = "model.layers.0.self_attn.q_proj.weight"
    assert 0 < np.abs(rounded[name] - tensors[name]).max() < 0.01
    assert_holds(load_model(open_source(str(path)), dtype="float32"), rounded, hf)


def test_config_has_all_stop_ids_and_theta_for_both_versions(tiny):
    source = open_source(str(tiny(eot_token_id=3)[0]))
    hf = source.hf_config
    assert hf["eos_token_id"] == [2, 3]
    assert source.generation_config == {
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "pad_token_id": 0,
    }
    assert hf["rope_theta"] == hf["rope_parameters"]["rope_theta"] == 10000.0
    assert hf["rms_norm_eps"] == 1e-5
    assert json.loads(source.read_file("config.json")) == hf


def test_theta_left_out_is_the_default_of_the_format(tiny):
    assert open_source(str(tiny(leave_out=("rope",))[0])).config.rope.theta == 10000.0


def test_kinds_of_tokens(tiny):
    tokenizer = load_tokenizer(open_source(str(tiny()[0])))
    ids = tokenizer.encode("<think>ab</think><|end|>")
    assert ids[:2] == tokenizer.convert_tokens_to_ids(["<think>", "ab"])
    assert ids[-1] == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>ab</think>"


def test_start_token_is_added_only_if_the_file_says_so(tiny):
    for add in (True, False):
        source = open_source(str(tiny(add_bos_token=add)[0]))
        ids = load_tokenizer(source).encode("ab")
        assert (ids[0] == 1, len(ids)) == (add, 1 + add)


def test_digits_stand_alone_for_smollm_only(tiny):
    for pre, pieces in (("smollm", [1, 1, 1]), ("gpt-2", [3])):
        tokenizer = load_tokenizer(open_source(str(tiny(pre=pre)[0])))
        found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("123")
        assert [len(text) for text, _ in found] == pieces


def test_smollm2_ids_equal_those_of_the_original_tokenizer(smollm2_source):
    tokenizer = load_tokenizer(smollm2_source)
    rows = [json.loads(line) for line in (DATA / "smollm2_chat.jsonl").open(encoding="utf-8")]
    assert any(not row["reply"].isascii() for row in rows)
    for row in rows:
        ids = tokenizer.apply_chat_template(
            row["messages"], add_generation_prompt=True, return_dict=False
        )
        assert list(ids) == row["prompt_ids"], row["id"]
        assert tokenizer.encode(row["reply"] + "<|im_end|>") == row["reply_ids"], row["id"]
        assert tokenizer.decode(row["reply_ids"], skip_special_tokens=True) == row["reply"]


def test_smollm2_is_what_its_authors_published(smollm2_source, smollm2):
    config = smollm2_source.config
    assert (config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.d_model, config.d_ff, config.vocab_size) == (576, 1536, 49152)
    assert (config.rope.theta, config.norm_eps, config.tied) == (100000.0, 1e-5, True)
    assert smollm2_source.hf_config["eos_token_id"] == 2
    assert sum(x.size for x in jax.tree.leaves(smollm2[0])) == 134_515_008
    assert all(np.isfinite(value).all() for value in weights(smollm2[0]).values())


# Refusals


def test_unknown_architecture(tiny):
    path = tiny(architecture="mamba")[0]
    refused(path, str(path), "architecture 'mamba'", "llama")


@pytest.mark.parametrize("kept", [0, 3, 100, 20_000, -1000])
def test_truncated_file(tiny, kept):
    path = tiny()[0]
    path.write_bytes(path.read_bytes()[:kept])
    refused(path, str(path), "not a whole GGUF file")


def test_another_file_under_the_name(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    refused(path, str(path), "git-lfs pointer")
    path.write_bytes(b"PK\3\4" * 100)
    refused(path, str(path), "not a whole GGUF file")


@pytest.mark.parametrize("what", ["rope scaling", "rope_freqs"])
def test_scaled_rope(tiny, what):
    refused(tiny(extra=(what,))[0], "scaled RoPE")


def test_tokenizer_of_another_kind(tiny):
    refused(tiny(pre="deepseek")[0], "tokenizer", "deepseek", "smollm")


def test_metadata_that_is_missing(tiny):
    refused(tiny(leave_out=("tokens",))[0], "tokenizer.ggml.tokens")


def test_extra_tensor_is_named(tiny):
    refused(tiny(extra=("bias",))[0], "extra", "model.layers.0.self_attn.q_proj.bias")


def test_without_the_gguf_package(tiny, monkeypatch):
    path, load = tiny()[0], builtins.__import__

    def without(name, *args, **options):
        if name == "gguf":
            raise ImportError(name)
        return load(name, *args, **options)

    monkeypatch.delitem(sys.modules, "gguf")
    monkeypatch.setattr(builtins, "__import__", without)
    refused(path, "gguf package", "pip install 'retmask-jax[quickstart]'")
