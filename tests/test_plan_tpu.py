"""Steps of every stage and family, compiled for TPU slices: what they take, what moves where.

Nothing runs on a TPU: the compiler in libtpu needs none.
"""

import functools

import pytest
from conftest import TINY_HF

from retmask_jax import plan
from retmask_jax.chips import open_slice
from retmask_jax.collectives import Collective, mesh_axes
from retmask_jax.configs import llama31_8b
from retmask_jax.errors import UserError
from retmask_jax.estimate import Estimate, estimates
from retmask_jax.models import config_from_hf
from retmask_jax.models.config import DecoderConfig
from retmask_jax.programs import read_model, stage_mesh

pytestmark = pytest.mark.slow

L, D, F, N, K, H, V = 2, 256, 384, 4, 2, 128, 640
MATRICES = D * H * (2 * N + 2 * K) + 3 * D * F  # of a layer
ROWS, LENGTH, MICRO = 8, 256, 2  # rows of a micro-batch, their length, micro-batches
FAMILIES = tuple(TINY_HF)


def small(family: str) -> DecoderConfig:
    """A model whose heads and rows the TPU's attention kernel takes."""
    hf = {
        "vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L,
        "num_attention_heads": N, "num_key_value_heads": K, "head_dim": H,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
    }  # fmt: skip
    changes = {"head_dim": H, "tie_word_embeddings": False}
    if family == "olmo3":
        changes |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128}
    return config_from_hf({**hf, **TINY_HF[family], **changes})


@functools.cache
def compiled(
    stage: str,
    family: str,
    topology: str = "v5e:2x2",
    slices: int = 1,
    rows: int = ROWS,
    **sizes: int,
) -> tuple[Estimate, ...]:
    """The programs of a stage, rows of a micro-batch each; sizes are those of the mesh."""
    config = llama31_8b.get_config()
    config.mesh.update(sizes)
    train = {"micro_pairs": rows // 2, "pairs_per_step": MICRO * rows // 2, "head_chunk": 128}
    config.train.update(train)
    config.generate.update({"slots": 8, "max_prompt_tokens": 512, "max_new_tokens": 512})
    config.detect.update({"slots": 4, "max_length": 950, "prefill_chunk": 256})
    where = open_slice(topology, slices)
    model = small(family)
    mesh = stage_mesh(config, model, where, stage)
    return tuple(estimates(config, where, stage, model, mesh, LENGTH))


def gathers(estimate: Estimate) -> list[Collective]:
    return [found for found in estimate.cost.collectives if found.kind == "all-gather"]


def moves(found: Collective, *dims: int) -> bool:
    """Whether it moves an array of these dimensions, leading ones of size 1 aside."""
    return any(tuple(d for d in shape.dims if d > 1) == dims for shape in found.shapes)


@pytest.mark.parametrize("family", FAMILIES)
def test_train(family):
    """By hand, within 5%: memory of the state, FLOPs, and what is gathered, on fsdp 4."""
    (one,) = compiled("train", family, fsdp=4)
    assert one.fits and one.cost.unknown_loops == 0
    weights = L * MATRICES + 2 * V * D
    assert one.work.state["weights"] == pytest.approx(4 * weights / 4, rel=0.05)
    assert one.work.state["optimizer"] == pytest.approx(8 * weights / 4, rel=0.05)
    # A layer runs forward twice (but for the last product of the second time) and backward; the
    # head's logits are computed twice; attention takes 2 products forward and 7 backward.
    tokens = MICRO * ROWS * LENGTH / 4
    layers = L * tokens * (2 * (4 * MATRICES - D * F) + 11 * 2 * N * H * LENGTH)
    assert one.cost.flops == pytest.approx(layers + tokens * 2 * 4 * V * D, rel=0.05)
    gathered = 2 * (MICRO * 2 * L * MATRICES + V * D)
    assert one.payload["all-gather", "fsdp"] == pytest.approx(gathered, rel=0.05)
    assert one.sent["all-gather", "fsdp"] == pytest.approx(gathered * 3 / 4, rel=0.05)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("stage", "sizes", "tokens"),
    [
        ("generate", {"data": 2, "fsdp": 2}, (8, 2 * 512)),
        ("detect", {"fsdp": 4}, (4, 2 * 256)),
        ("detect", {"data": 4}, (4, 4 * 256)),
    ],
)
def test_sampling(stage, sizes, tokens, family):
    """A step of decode reads all weights and the whole cache, and no keys or values are gathered.

    The cache's length, 1,024, is the size of no other array.
    """
    decode, prefill = compiled(stage, family, **sizes)
    assert decode.fits and prefill.fits
    assert (decode.work.tokens, prefill.work.tokens) == tokens
    for program in decode, prefill:
        moved = [found.shapes for found in program.cost.collectives]
        assert not any(1024 in shape.dims for shapes in moved for shape in shapes)
    table = 2 * V * D / (decode.mesh["fsdp"] * decode.mesh["tensor"])  # is only looked up in
    held = decode.work.state["weights"] - table + decode.work.state["cache"]
    assert 0.9 * held < decode.cost.hbm_bytes < 2 * held
    # A prefill that copied the cache in each layer would be far above this.
    assert prefill.cost.hbm_bytes < 5 * prefill.work.state["cache"]


def test_the_head_is_gathered_once_and_never_along_the_vocabulary():
    (one,) = compiled("train", "llama", fsdp=4)
    whole = [found for found in gathers(one) if moves(found, V, D)]
    assert len(whole) == 1 and whole[0].times == 1
    (split,) = compiled("train", "llama", fsdp=2, tensor=2)
    shape = {"data": 1, "fsdp": 2, "sequence": 1, "tensor": 2}
    head = [found for found in gathers(split) if moves(found, V // 2, D)]
    assert len(head) == 1 and head[0].times == 1 and mesh_axes(head[0], shape) == ("fsdp",)
    assert not any(V in dims for found in gathers(split) for s in found.shapes for dims in [s.dims])
    assert not any("tensor" in mesh_axes(found, shape) for found in gathers(split))


@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"fsdp": 2, "tensor": 2}])
def test_the_layers_weights_are_gathered_in_the_layer_loop(sizes):
    """One layer at a time: twice a micro-batch, forward and backward, and nowhere else."""
    (one,) = compiled("train", "llama", **sizes)
    t = sizes.get("tensor", 1)
    for dims in ((D, F // t), (F // t, D), (D, N // t, H), (N // t, H, D)):
        dims = tuple(d for d in dims if d > 1)
        found = [each for each in gathers(one) if moves(each, *dims)]
        alike = 2 if dims == (D, F // t) else 1  # gate and up
        assert sum(each.times for each in found) == 2 * alike * MICRO * L
        assert not any(moves(each, L, *dims) for each in gathers(one))


def test_copies_along_data_add_up_their_parts_of_the_layers_gradients():
    """And not whole gradients; the head's is added up whole."""
    (one,) = compiled("train", "llama", topology="v5e:2x4", data=2, fsdp=4)
    assert one.payload["all-reduce", "data+fsdp"] == pytest.approx(MICRO * 4 * V * D, rel=0.01)
    parts = MICRO * 2 * L * MATRICES / 4 + 4 * V * D / 4  # the other table's at the step's end
    assert one.payload["all-reduce", "data"] == pytest.approx(parts, rel=0.01)


def test_two_slices_exchange_gradients_over_the_network_alone():
    (one,) = compiled("train", "llama", slices=2, data=2)
    (alone,) = compiled("train", "llama", fsdp=4)
    assert {kind for kind, axes in one.sent if axes == "slices"} <= {
        "all-reduce", "collective-permute"
    }  # fmt: skip
    layers, head = 2 * L * MATRICES / 4, 4 * V * D / 4  # bytes of gradients, bfloat16 and float32
    assert MICRO * layers < one.sent["all-reduce", "slices"] < MICRO * (layers + 3 * head)
    assert one.seconds["network"] > 0 and alone.seconds["network"] == 0
    assert one.cost.flops == pytest.approx(alone.cost.flops / 2, rel=0.01)


def test_no_room_for_the_state():
    config, where = llama31_8b.get_config(), open_slice("v5e:2x2")
    model, name = read_model(config)
    mesh = stage_mesh(config, model, where, "train")
    (one,) = estimates(config, where, "train", model, mesh)
    assert not one.fits and one.needed > one.available == 16 * 2**30
    assert plan.report(one, where, name, model).endswith("DOES NOT FIT")


def test_no_room_for_the_activations():
    """131,072 pairs at once on one chip: 34 GB for each layer's input. The compiler says so."""
    config, where = llama31_8b.get_config(), open_slice("v5e:1x1")
    config.train.update({"micro_pairs": 2**17, "pairs_per_step": 2**17})
    mesh = stage_mesh(config, small("llama"), where, "train")
    (one,) = estimates(config, where, "train", small("llama"), mesh, LENGTH)
    assert not one.fits and one.needed > 34e9
    assert one.available == pytest.approx(15.75 * 2**30, rel=0.02)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 3}, "does not fit 4 devices"),
        ({"tensor": 4}, "mesh axis tensor of 4 does not divide the logical axis 'kv_heads'"),
    ],
)
def test_a_mesh_that_cannot_be(sizes, message):
    with pytest.raises(UserError, match=message):
        compiled("train", "llama", **sizes)


@pytest.mark.parametrize(
    ("topology", "devices"),
    [
        ("v4:2x2x1", 4), ("v5e:1x1", 1), ("v5e:2x4", 8), ("v5e:4x8", 32), ("v5e:16x16", 256),
        ("v5p:2x4x4", 32), ("v6e:8x16", 128), ("tpu7x:2x2x1", 8),
    ],
)  # fmt: skip
def test_slices_of_every_chip(topology, devices):
    where = open_slice(topology)
    assert len(where.devices) == devices
    assert where.devices[0].platform == "tpu"


def test_a_slice_that_the_compiler_refuses():
    with pytest.raises(UserError, match=r"--topology=v5e:3x7: .*want CHIP:AxB"):
        open_slice("v5e:3x7")


def test_weak_scaling():
    """With as many rows a device, fsdp exchanges as much on more devices, and each does as much."""
    (few,) = compiled("train", "llama", fsdp=4)
    (many,) = compiled("train", "llama", topology="v5e:2x4", rows=2 * ROWS, fsdp=8)
    assert sum(many.payload.values()) == pytest.approx(sum(few.payload.values()), rel=0.1)
    assert many.cost.flops == pytest.approx(few.cost.flops, rel=0.01)
    assert many.work.state["weights"] == pytest.approx(few.work.state["weights"] / 2, rel=0.05)


def test_a_slice_samples_as_one():
    """A part of a v5e slice is refused by the compiler; two key/value heads become tensor 2, and
    the weights are small enough to be copied."""
    config, where = llama31_8b.get_config(), open_slice("v5e:2x4", 2)
    config.mesh.data = 2
    assert dict(stage_mesh(config, small("llama"), where, "train").shape)["fsdp"] == 8
    mesh = stage_mesh(config, small("llama"), where, "detect")
    assert tuple(mesh.shape.values()) == (4, 1, 1, 2)
    assert {device.slice_index for device in mesh.devices.flat} == {0}


def test_two_slices():
    where = open_slice("v5e:4x4", 2)
    assert [len(where.devices), where.devices[-1].slice_index] == [32, 1]
