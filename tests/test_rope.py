"""Rotary embedding: frequencies and tables against transformers, and every form of its config.

And which configs are refused.
"""

import copy
import json

import jax
import numpy as np
import pytest
import tiny_checkpoint
import transformers
from conftest import tiny_hf
from tiny_checkpoint import FAMILIES

from retmask_jax.checkpoint_io import load_model, open_source
from retmask_jax.export import export_model
from retmask_jax.models import config_from_hf
from retmask_jax.models.config import DecoderConfig, RopeConfig
from retmask_jax.models.layers import rope_inverse_frequencies, rope_table

FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
QWEN3_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def published(family: str, theta: float, scaling: dict | None, **dimensions: int) -> dict:
    """The parts of a released model's `config.json` that its rotary embedding depends on."""
    return tiny_hf(family, rope_theta=theta, rope_scaling=scaling, **dimensions)


WIDE = {"hidden_size": 4096, "num_attention_heads": 32}
MODELS = {
    "Llama-3.1-8B-Instruct": published(
        "llama", 500000.0, LLAMA3, **WIDE, num_key_value_heads=8, max_position_embeddings=131072
    ),
    "Llama-3.2-3B-Instruct": published(
        "llama",
        500000.0,
        {**LLAMA3, "factor": 32.0},
        hidden_size=3072,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
    ),
    "SmolLM2-135M-Instruct": published(
        "llama",
        100000.0,
        None,
        hidden_size=576,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
    ),
    "Qwen3-8B": published(
        "qwen3", 1000000.0, None, **WIDE, head_dim=128, max_position_embeddings=40960
    ),
    "Qwen3-8B, stretched": published(
        "qwen3", 1000000.0, QWEN3_YARN, **WIDE, head_dim=128, max_position_embeddings=131072
    ),
    "YaRN, ends of the ramp not rounded": published(
        "llama", 500000.0, {**YARN, "truncate": False}, **WIDE, max_position_embeddings=65536
    ),
    "YaRN, other ends of the ramp": published(
        "llama",
        500000.0,
        {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
        **WIDE,
        max_position_embeddings=65536,
    ),
    "Olmo-3-7B": published(
        "olmo3",
        500000.0,
        YARN,
        **WIDE,
        num_key_value_heads=32,
        sliding_window=4096,
        max_position_embeddings=65536,
    ),
}
LAYERS = [(name, FULL) for name in MODELS] + [("Olmo-3-7B", SLIDING)]


def rope_of(config: DecoderConfig, layer_type: str) -> RopeConfig:
    return config.rope_of({FULL: "full", SLIDING: "sliding"}[layer_type])


def theirs(hf: dict):
    """transformers' rotary embedding for this config."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    kinds = {
        "llama": LlamaRotaryEmbedding,
        "qwen3": Qwen3RotaryEmbedding,
        "olmo3": Olmo3RotaryEmbedding,
    }
    fields = copy.deepcopy(hf)  # transformers adds to the dicts that it is given
    fields.pop("architectures")
    return kinds[hf["model_type"]](transformers.AutoConfig.for_model(**fields))


def their_name(hf: dict, name: str, layer_type: str) -> str:
    return f"{layer_type}_{name}" if hf["model_type"] == "olmo3" else name


@pytest.mark.torch
@pytest.mark.parametrize(("name", "layer_type"), LAYERS)
def test_frequencies_and_attention_factor(name, layer_type):
    """W6 among them: Olmo-3's sliding layers are plain, its full layers YaRN with its factor."""
    hf = MODELS[name]
    config = config_from_hf(hf)
    rope, reference = rope_of(config, layer_type), theirs(hf)
    frequencies = rope_inverse_frequencies(rope, config.head_dim)
    expected = getattr(reference, their_name(hf, "inv_freq", layer_type)).numpy()
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6, atol=0)
    factor = getattr(reference, their_name(hf, "attention_scaling", layer_type))
    assert rope.attention_factor == pytest.approx(factor, rel=1e-6)


@pytest.mark.torch
@pytest.mark.parametrize(("name", "layer_type"), LAYERS)
def test_tables_at_all_positions(name, layer_type):
    import torch

    hf = MODELS[name]
    config = config_from_hf(hf)
    rope, reference = rope_of(config, layer_type), theirs(hf)
    frequencies = rope_inverse_frequencies(rope, config.head_dim)
    setattr(reference, their_name(hf, "inv_freq", layer_type), torch.from_numpy(frequencies))
    positions = np.arange(131_072, dtype=np.int32)[None]
    more = (layer_type,) if hf["model_type"] == "olmo3" else ()
    expected = reference(torch.zeros(1), torch.from_numpy(positions), *more)
    ours = jax.jit(lambda p: rope_table(rope, config.head_dim, p))(positions)
    for table, both_halves in zip(ours, expected, strict=True):
        half = both_halves.numpy()[..., : config.head_dim // 2]
        np.testing.assert_allclose(table, half, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rope", [RopeConfig("default", 1e6), RopeConfig("yarn", 5e5, 8.0, 8192)])
def test_tables_are_exact_for_float32_angles(rope):
    positions = np.arange(0, 131_072, 3, dtype=np.int32)
    angles = (positions[:, None].astype(np.float32) * rope_inverse_frequencies(rope, 64)).astype(
        np.float64
    )
    cos, sin = jax.jit(lambda p: rope_table(rope, 64, p))(positions[None])
    np.testing.assert_allclose(cos[0], np.cos(angles), rtol=0, atol=1e-6)
    np.testing.assert_allclose(sin[0], np.sin(angles), rtol=0, atol=1e-6)


def test_w6_olmo3_has_yarn_on_its_full_layers_only():
    config = config_from_hf(MODELS["Olmo-3-7B"])
    assert config.layer_types == ("sliding", "sliding", "sliding", "full")
    assert rope_of(config, SLIDING) == RopeConfig("default", 500000.0)
    full = rope_of(config, FULL)
    assert (full.kind, full.factor, full.attention_factor) == ("yarn", 8.0, 1.2079441541679836)
    # What transformers 5 writes, nested by layer type, with and without the old fields beside it.
    nested = {
        FULL: {**YARN, "rope_theta": 500000},
        SLIDING: {"rope_type": "default", "rope_theta": 500000},
    }
    new = {**MODELS["Olmo-3-7B"], "rope_parameters": nested}
    assert config_from_hf(new) == config
    del nested[SLIDING]["rope_type"]
    assert config_from_hf(new) == config
    old = {"rope_theta": None, "rope_scaling": None}
    assert config_from_hf({**new, **old}) == config
    with pytest.raises(ValueError, match=FULL):
        config_from_hf({**new, **old, "rope_parameters": {SLIDING: nested[SLIDING]}})


# Forms of the config

SCALINGS = {"default": {}, "llama3": LLAMA3, "yarn": YARN}
ABSENT = {"rope_theta": None, "rope_scaling": None, "rope_parameters": None}


def forms(scaling: dict) -> dict[str, dict]:
    """The fields of each form that says theta 500,000 and this scaling."""
    kind = scaling.get("rope_type", "default")
    numbers = {key: value for key, value in scaling.items() if key != "rope_type"}
    new = {"rope_type": kind, "rope_theta": 500000, **numbers}
    old = {"rope_theta": 500000.0, "rope_scaling": scaling or None}
    return {
        "transformers 5": {"rope_parameters": new},
        "transformers 4": old,
        "kind called type": {**old, "rope_scaling": {"type": kind, **numbers}},
        "theta outside": {"rope_theta": 500000.0, "rope_parameters": {**numbers, "type": kind}},
        "both": {**old, "rope_parameters": new},
    }


FORMS = tuple(forms({}))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_w5_every_form_is_the_same(family, kind, form):
    scaling = SCALINGS[kind]
    config = config_from_hf(tiny_hf(family, **ABSENT) | forms(scaling)[form])
    assert (config.rope.kind, config.rope.theta) == (kind, 500000.0)
    usual = config_from_hf(tiny_hf(family, **ABSENT) | forms(scaling)["transformers 4"])
    assert config == usual
    # The frequency of the slowest pair, by hand: theta ** -(14 / 16), divided by the factor.
    slowest = 500000.0 ** -(1 - 2 / config.head_dim) / scaling.get("factor", 1.0)
    assert rope_inverse_frequencies(config.rope, config.head_dim)[-1] == pytest.approx(slowest)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        ({"rope_scaling": LLAMA3}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "banana", "rope_theta": 1e4}}, "banana"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "original_max"),
        ({"rope_theta": 1e4, "rope_scaling": {**LLAMA3, "factor": None}}, "factor"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_w5_nothing_has_a_silent_default(family, fields, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(tiny_hf(family, **ABSENT) | fields)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"attention_bias": True}, "attention_bias=true"),
        ("llama", {"mlp_bias": True}, "mlp_bias=true"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads=8 is not a multiple of"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ("llama", {"rope_scaling": {**YARN, "mscale": 0.7}}, "mscale"),
        ("llama", {"rope_scaling": {**YARN, "mscale_all_dim": 0.7}}, "mscale"),
        ("qwen3", {"head_dim": None}, "head_dim is missing"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16}, "needs layer_types"),
        (
            "qwen3",
            {"use_sliding_window": True, "layer_types": [FULL, SLIDING] * 2},
            "sliding_window is not set",
        ),
        ("olmo3", {"sliding_window": None}, "sliding_window is missing"),
        ("olmo3", {"sliding_window": 0}, "sliding_window is not set"),
        ("olmo3", {"layer_types": ["linear_attention"] * 4}, "layer_types has 'linear_attention'"),
        ("olmo3", {"layer_types": [FULL] * 3}, "names 3 layers, num_hidden_layers is 4"),
    ],
)
def test_what_no_family_computes_is_refused(family, fields, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(tiny_hf(family, **fields))


@pytest.mark.parametrize("form", ("nested", *FORMS))
@pytest.mark.parametrize("family", FAMILIES)
def test_w5_transformers_reads_the_exported_config_alike(tmp_path, family, form):
    """By version 5 itself, and by the two fields that version 4 reads."""
    if form == "nested":
        plain = {"rope_type": "default", "rope_theta": 500000}
        both = {FULL: {**YARN, "rope_theta": 500000}, SLIDING: plain}
        fields = {"rope_parameters": both if family == "olmo3" else both[FULL]}
    else:
        fields = forms(YARN)[form]
    hf = tiny_hf(family, **ABSENT) | fields
    hf = {key: value for key, value in hf.items() if value is not None}
    tiny_checkpoint.write(tmp_path / "source", hf)
    source = open_source(str(tmp_path / "source"))
    export_model(load_model(source, dtype="float32"), source, tmp_path / "out")
    read = transformers.AutoConfig.from_pretrained(tmp_path / "out").rope_parameters
    if family == "olmo3":
        assert read[SLIDING] == {"rope_type": "default", "rope_theta": 500000.0}
        read = read[FULL]
    numbers = {key: value for key, value in read.items() if key != "type"}
    assert numbers == {**YARN, "rope_theta": 500000.0}
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["rope_theta"] == 500000.0
    assert {key: value for key, value in written["rope_scaling"].items() if key != "type"} == YARN
    assert open_source(str(tmp_path / "out")).config == source.config
