"""Reading HLO text: what counts how often. Texts are small and made up, in the compiler's form."""

import types

import numpy as np
import pytest

from retmask_jax.chips import CHIPS, Links, links
from retmask_jax.collectives import collective, mesh_axes
from retmask_jax.hlo import Program
from retmask_jax.hlo_text import parse

MESH = {"data": 1, "fsdp": 4, "sequence": 1, "tensor": 2}

# What the loops carry: a counter, x, the layers' weights, a gradient.
_CARRY = "(s32[], bf16[64,32]{1,0}, bf16[3,32,16]{2,1,0}, /*index=3*/f32[8,16]{1,0})"
LOOPS = """HloModule jit_step, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%product (p: bf16[64,32], q: bf16[3,32,16], i: s32[]) -> bf16[64,16] {
  %p = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)
  %q = bf16[3,32,16]{2,1,0:T(8,128)(2,1)} parameter(1)
  %i = s32[]{:T(128)S(6)} parameter(2)
  %zero = s32[]{:T(128)} constant(0)
  %slice = bf16[1,32,16]{2,1,0} dynamic-slice(%q, %i, %zero, %zero), dynamic_slice_sizes={1,32,16}
  %flat = bf16[32,16]{1,0} bitcast(%slice)
  ROOT %conv = bf16[64,16]{1,0} convolution(%p, %flat), dim_labels=bf_io->bf
}

%scatter (g: f32[8,16]) -> f32[2,16] {
  %g = f32[8,16]{1,0} parameter(0)
  %sum.1 = f32[8,16]{1,0} all-reduce(%g), channel_id=2, FSDP, to_apply=%add
  %me = u32[] partition-id()
  %none = u32[] constant(0)
  ROOT %part = f32[2,16]{1,0} dynamic-slice(%sum.1, %me, %none), dynamic_slice_sizes={2,16}
}

%body (t: CARRY) -> CARRY {
  %t = CARRY parameter(0)
  %j = s32[]{:T(128)S(6)} get-tuple-element(%t), index=0
  %x = bf16[64,32]{1,0} get-tuple-element(%t), index=1
  %w = bf16[3,32,16]{2,1,0} get-tuple-element(%t), index=2
  %grad = f32[8,16]{1,0} get-tuple-element(%t), index=3
  %y = bf16[64,16]{1,0:T(8,128)(2,1)S(1)} fusion(%x, %w, %j), kind=kOutput, calls=%product
  %scattered = f32[2,16]{1,0:S(1)} fusion(%grad), calls=%scatter, metadata={op_name="step/grad"}
  %one = s32[]{:T(128)S(6)} constant(1)
  %next = s32[]{:T(128)S(6)} add(%j, %one)
  ROOT %out = CARRY tuple(%next, %x, %w, %grad)
}

%test (t.1: CARRY) -> pred[] {
  %t.1 = CARRY parameter(0)
  %k = s32[] get-tuple-element(%t.1), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%k, %three), direction=LT
}

%ask (t.2: CARRY) -> pred[] {
  %t.2 = CARRY parameter(0)
  %l = s32[] get-tuple-element(%t.2), index=0
  %m = s32[] get-tuple-element(%t.2), index=0
  ROOT %less.1 = pred[] compare(%l, %m), direction=LT
}

%outer (t.3: CARRY) -> CARRY {
  %t.3 = CARRY parameter(0)
  ROOT %while.1 = CARRY while(%t.3), condition=%test, body=%body
}

ENTRY %main (n: s32[], v: bf16[64,32], u: bf16[3,32,16], h: f32[8,16]) -> bf16[64,32] {
  %n = s32[] parameter(0)
  %v = bf16[64,32]{1,0} parameter(1)
  %u = bf16[3,32,16]{2,1,0} parameter(2)
  %h = f32[8,16]{1,0} parameter(3)
  %start = CARRY tuple(%n, %v, %u, %h)
  %while.2 = CARRY while(%start), condition=%ask, body=%outer
  ROOT %end = bf16[64,32]{1,0} get-tuple-element(%while.2), index=1
}
""".replace("CARRY", _CARRY).replace("FSDP", "replica_groups={{0,2,4,6},{1,3,5,7}}")


def instruction(line: str):
    computations, _ = parse("%only (p: f32[]) -> f32[] {\n  " + line + "\n}")
    return next(iter(computations["only"].values()))


def axes(groups: str, kind: str = "all-gather", of: str = "replica_groups") -> tuple[str, ...]:
    line = f"%x = bf16[8,4]{{1,0}} {kind}(%y), channel_id=1, {of}={groups}, dimensions={{0}}"
    return mesh_axes(collective(instruction(line)), MESH)


def test_a_loop_counts_as_often_as_it_runs():
    """The inner loop runs 3 times by its condition, the outer one as often as we are told."""
    program = Program(LOOPS, unknown_trips=(5,))
    cost = program.cost()
    assert program.partitions == 8
    assert cost.unknown_loops == 1
    assert cost.flops == 5 * 3 * (2 * 64 * 32 * 16)
    # x whole, one layer of w, and the sum's operand; what lies on the chip costs nothing.
    assert cost.hbm_bytes == 5 * 3 * (64 * 32 * 2 + 32 * 16 * 2 + 8 * 16 * 4)


def test_a_loop_may_count_by_more_than_one():
    """Such as those in which products and exchanges overlap."""
    by_two = LOOPS.replace("constant(1)", "constant(2)")
    assert Program(by_two).cost().flops == 2 * (2 * 64 * 32 * 16)


def test_a_sum_of_which_a_slice_is_kept_is_a_reduce_scatter():
    (found,) = Program(LOOPS).cost().collectives
    assert (found.kind, found.loops, found.times) == ("reduce-scatter", (1, 3), 3)
    assert found.bytes == 8 * 16 * 4
    assert found.sent == 3 * 8 * 16 * 4 * 3 / 4
    assert found.op_name == "step/grad"
    assert mesh_axes(found, MESH) == ("fsdp",)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,2,4,6},{1,3,5,7}}", ("fsdp",)),
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("[4,2]<=[8]", ("tensor",)),
        ("[2,4]<=[4,2]T(1,0)", ("fsdp",)),
        ("[1,8]<=[8]", ("fsdp", "tensor")),
        ("mesh['a'=1,'b'=4,'c'=2] {'b'}", ("fsdp",)),
        ("mesh['a'=4,'b'=2] {'a','b'}", ("fsdp", "tensor")),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", ("tensor",)),
        ("mesh['a'=8] {'a':(4)2}", ("tensor",)),
        ("mesh['a'=8] {'a':(1)4}", ("fsdp",)),
    ],
)
def test_replica_groups_in_every_notation(groups, expected):
    assert axes(groups) == expected


def test_pairs_of_a_permutation():
    pairs = "{{0,2},{2,4},{4,6},{6,0}}"
    assert axes(pairs, "collective-permute", "source_target_pairs") == ("fsdp",)
    line = "%x = f32[2]{0} collective-permute(%y), channel_id=1, source_target_pairs={}"
    assert collective(instruction(line)) is None


def test_exchange_between_slices():
    line = (
        "%s = (bf16[24,8]{1,0}, u32[], token[]) send(%x, %y), channel_id=2, is_host_transfer=true, "
        'frontend_attributes={_xla_megascale_target="{1:2,4}x{0:3}",'
        '_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    found = collective(instruction(line))
    assert (found.kind, found.slices, found.bytes) == ("all-reduce", 3, 24 * 8 * 2)
    assert found.sent == 24 * 8 * 2 * 2 * 2 / 3


@pytest.mark.parametrize(
    ("shapes", "attributes", "flops"),
    [
        # x [2, 1024, 64] by w [64, 8, 16] as a convolution over the 8 heads, padded by 7.
        (
            ("bf16[2,1024,8,16]", "bf16[2,1024,64,1]", "bf16[8,64,16,1]"),
            "window={size=1x8 pad=0_0x7_7 rhs_reversal=0x1}, dim_labels=0bf1_1io0->0b1f",
            2 * 2 * 1024 * 64 * 8 * 16,
        ),
        # A batch of 8 products [128, 32] by [32, 16]: each output sees one tap only.
        (
            ("f32[8,128,16]", "f32[8,128,32]", "f32[8,32,16]"),
            "window={size=8 stride=7 pad=0_0 lhs_dilate=8}, dim_labels=0bf_0io->0bf",
            2 * 8 * 128 * 32 * 16,
        ),
    ],
)
def test_products_written_as_convolutions(shapes, attributes, flops):
    out, left, right = shapes
    text = f"""HloModule m

ENTRY %main (a: {left}, b: {right}) -> {out} {{
  %a = {left} parameter(0)
  %b = {right} parameter(1)
  ROOT %c = {out} convolution(%a, %b), {attributes}
}}
"""
    assert Program(text).cost().flops == flops


def slice_of(*dims: int) -> np.ndarray:
    devices = np.empty(dims, object)
    for where in np.ndindex(*dims):
        devices[where] = types.SimpleNamespace(coords=[*where, 0][:3])
    return devices


def test_links_of_a_slice():
    """v5e closes to rings from 16 chips on, v5p where every dimension is a multiple of 4."""
    flat, cube, thin = slice_of(4, 16), slice_of(4, 4, 4), slice_of(2, 4, 4)
    v5e, v5p = CHIPS["v5e"], CHIPS["v5p"]
    assert links(v5e, (4, 16), flat[0, :]) == Links(2 * 45e9, 16, 2 * 45e9)
    assert links(v5e, (4, 16), flat[:, 0]) == Links(45e9, 4, 45e9)
    assert links(v5e, (4, 16), flat.reshape(-1)) == Links(3 * 45e9, 16, 2 * 45e9)
    assert links(v5e, (4, 16), flat[0, :8]) == Links(45e9, 8, 45e9)
    assert links(v5p, (4, 4, 4), cube.reshape(-1)).bandwidth == 6 * 90e9
    assert links(v5p, (2, 4, 4), thin.reshape(-1)).bandwidth == 3 * 90e9
