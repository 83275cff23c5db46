"""Tiny Hugging Face checkpoints with random weights, written with numpy and safetensors alone."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from conftest import TINY_HF, TINY_NORMS, tiny_hf
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FAMILIES = tuple(TINY_HF)
STOPS = [2, 5, 7]
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"


def random_tensors(hf: dict, dtype: str = "float32", seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor that a config of ours has, by Hugging Face name and shape."""
    d, f = hf["hidden_size"], hf["intermediate_size"]
    n, k = hf["num_attention_heads"], hf["num_key_value_heads"]
    h = hf.get("head_dim") or d // n
    attention_norm, mlp_norm, qk_norm = TINY_NORMS[hf["model_type"]]
    norms = {attention_norm: d, mlp_norm: d}
    if qk_norm:
        whole = qk_norm == "all heads"
        norms |= {"self_attn.q_norm": n * h if whole else h}
        norms |= {"self_attn.k_norm": k * h if whole else h}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (hf["vocab_size"], d)}
    for i in range(hf["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{i}.self_attn.q_proj.weight": (n * h, d),
            f"model.layers.{i}.self_attn.k_proj.weight": (k * h, d),
            f"model.layers.{i}.self_attn.v_proj.weight": (k * h, d),
            f"model.layers.{i}.self_attn.o_proj.weight": (d, n * h),
            f"model.layers.{i}.mlp.gate_proj.weight": (f, d),
            f"model.layers.{i}.mlp.up_proj.weight": (f, d),
            f"model.layers.{i}.mlp.down_proj.weight": (d, f),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": (size,) for name, size in norms.items()}
    shapes["model.norm.weight"] = (d,)
    if not hf["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (hf["vocab_size"], d)
    rng = np.random.default_rng(seed)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return {
        name: (0.2 * rng.standard_normal(shape) + (len(shape) == 1)).astype(kind)
        for name, shape in shapes.items()
    }


def write(
    folder: Path,
    hf: dict | str = "llama",
    *,
    dtype: str = "float32",
    shards: int = 1,
    tensors: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Writes a checkpoint (`hf`: a config or a family) with tokenizer; returns its tensors."""
    if isinstance(hf, str):
        hf = tiny_hf(hf, eos_token_id=STOPS, torch_dtype=dtype)
    tensors = random_tensors(hf, dtype) if tensors is None else tensors
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": STOPS, "pad_token_id": 0, "top_p": 0.9})
    )
    write_tokenizer(folder)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return tensors
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of the 256 bytes and three control tokens, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i + 3 for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
