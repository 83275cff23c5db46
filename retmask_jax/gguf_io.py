"""GGUF files of the Llama architecture, seen as a Hugging Face checkpoint.

The format is described in ggml's `docs/gguf.md`. Tensors are dequantised to float32 a block of rows
at a time. llama.cpp stores the rows of the query and key projections so that the two halves of a
rotated pair lie next to each other; here they are put back to where Hugging Face has them.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from retmask_jax.errors import UserError

MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Kinds of token, llama.cpp's `llama_token_type`.
CONTROL, USER_DEFINED = 3, 4


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """One tensor under its Hugging Face shape and row order.

    Attributes:
      shape: Hugging Face shape.
      dtype: "float32", what `rows` returns.
      packed: the bytes in the file, [rows, bytes of a row] (or [1, bytes] of a vector).
      kind: ggml's quantisation type.
      order: the file's row of each of our rows; None where they are the same.
    """

    shape: tuple[int, ...]
    packed: np.ndarray
    kind: Any
    order: np.ndarray | None = None
    dtype: str = "float32"

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop, float32 [stop - start, ...]."""
        from gguf.quants import dequantize

        if len(self.shape) == 1:
            return dequantize(self.packed, self.kind).reshape(self.shape)[start:stop]
        rows = slice(start, stop) if self.order is None else self.order[start:stop]
        return dequantize(self.packed[rows], self.kind)


@dataclasses.dataclass(frozen=True)
class Gguf:
    """What a GGUF file holds, in Hugging Face's terms."""

    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: Mapping[str, GgufTensor]
    files: Mapping[str, bytes]  # tokenizer files


def open_gguf(path: str) -> Gguf:
    """Reads the header of a local GGUF file; weights stay on the disk until asked for.

    Raises:
      UserError: not a whole GGUF file, an architecture other than llama, scaled RoPE, or a
        tokenizer that is not a known byte-level BPE.
    """
    try:
        import gguf
    except ImportError:
        raise UserError(
            f"{path}: reading GGUF needs the gguf package: pip install 'retmask-jax[quickstart]'"
        ) from None
    try:
        reader = gguf.GGUFReader(path)
        values = {name: field.contents() for name, field in reader.fields.items()}
        stored = {tensor.name: tensor for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: not a whole GGUF file ({reason}); download it again") from None

    metadata = _Metadata(path, values)
    config = _config(metadata, tied="output.weight" not in stored)
    if "rope_freqs.weight" in stored:
        raise UserError(_scaled_rope(path))
    head_dim = config["head_dim"]
    tensors = {}
    for name, tensor in stored.items():
        shape = tuple(int(size) for size in reversed(tensor.shape))
        hf_name = _hf_name(name)
        paired = hf_name.endswith(("q_proj.weight", "k_proj.weight"))
        order = _pair_order(shape[0], head_dim) if paired else None
        packed = tensor.data if tensor.data.ndim > 1 else tensor.data[None]
        tensors[hf_name] = GgufTensor(shape, packed, tensor.tensor_type, order)
    return Gguf(config, _generation_config(config), tensors, _tokenizer_files(metadata))


class _Metadata:
    """The key-value part of a GGUF file; complains by file and key."""

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            raise UserError(f"{self.path}: metadata {key!r} is missing")
        return self._values[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)


def _scaled_rope(path: str) -> str:
    return f"{path}: scaled RoPE in GGUF is not supported; use the Hugging Face folder"


def _hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown name stays as it is."""
    if name in MODEL_NAMES:
        return MODEL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name


def _pair_order(rows: int, head_dim: int) -> np.ndarray:
    """For each row of a Hugging Face q or k projection, its row in the file.

    Within a head llama.cpp has row 2i + j where Hugging Face has row j * H/2 + i.
    """
    if rows % head_dim:
        return np.arange(rows)  # a wrong shape, which the caller reports by name
    return np.arange(rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _config(metadata: _Metadata, *, tied: bool) -> dict[str, Any]:
    """The `config.json` of the model, with theta where transformers 4 and 5 look for it."""
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise UserError(
            f"{metadata.path}: unknown GGUF architecture {architecture!r}; known: llama"
        )
    if metadata.get("llama.rope.scaling.type", "none") != "none":
        raise UserError(_scaled_rope(metadata.path))
    n_heads = metadata["llama.attention.head_count"]
    d_model = metadata["llama.embedding_length"]
    theta = metadata.get("llama.rope.freq_base", 10_000.0)  # the format's default
    ids = {
        f"{role}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id")
        for role, key in (("bos", "bos"), ("pad", "padding"))
    }
    stops = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    stops = list(dict.fromkeys(i for i in stops if i is not None))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": d_model,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": n_heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", n_heads),
        "head_dim": metadata.get("llama.attention.key_length", d_model // n_heads),
        "max_position_embeddings": metadata["llama.context_length"],
        # Stored as float32; the shortest decimal that gives the same float32 was meant.
        "rms_norm_eps": float(str(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_cache": True,
        "torch_dtype": "float32",
        **ids,
        "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
    }


def _generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: config[key] for key in keys if config[key] is not None}


def _tokenizer_files(metadata: _Metadata) -> dict[str, bytes]:
    """`tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` from the metadata."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    def byte_level() -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)

    known = {
        "gpt-2": byte_level,
        "smollm": lambda: pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level()]
        ),
    }
    kind, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in known:
        raise UserError(
            f"{metadata.path}: unknown GGUF tokenizer {kind!r} with pre-tokenizer {pre!r}; known: "
            f"gpt2 with {', '.join(known)}"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = known[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])

    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {role: metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in roles.items()}
    named = {f"{role}_token": tokens[i] for role, i in ids.items() if i is not None}
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", False))
    if add_bos:
        bos = tokens[metadata["tokenizer.ggml.bos_token_id"]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocabulary[bos])]
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        **named,
    }
    files = {"tokenizer.json": tokenizer.to_str(pretty=True).encode()}
    template = metadata.get("tokenizer.chat_template")
    if template:
        files["chat_template.jinja"] = template.encode()
    files["tokenizer_config.json"] = dump(config)
    return files


def dump(obj: Any) -> bytes:
    """JSON as it lies in a Hugging Face folder."""
    return (json.dumps(obj, indent=2, ensure_ascii=False) + "\n").encode()
