"""Weights in few bits. Laws: no weight moves by more than half a step, zeros stay, quantising again changes nothing, a
record holds what was put there. Agreement: products out of codes are those of the dequantised weights, and of torch's
own kernels. Golden: bits a weight, bytes of a record, one group by hand.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import UserError
from engine.kernels import quantised_products, set_threads
from engine.quantisation import BITS, GROUPS, check_group, effective_bits, record_bytes
from engine.quantised import Quantised, quantise
from engine.record import Layout, page_aligned

EXACT = {"rtol": 0, "atol": 0}
MIXED = {"gate_up_proj": (6, 128), "gate_up_proj_bias": (6,), "down_proj": (3, 256)}


@st.composite
def weights(draw):
    """[O, I] of groups that differ: in size, in how far each side reaches, some of them all zeros or constant."""
    outputs, inputs = draw(st.integers(1, 5)), draw(st.sampled_from([128, 256]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    groups = torch.randn(outputs, inputs // 64, 64, generator=generator)
    kinds = torch.randint(0, 6, groups.shape[:2], generator=generator)[..., None]
    one = groups[..., :1]
    shapes = [groups, groups.abs(), -groups.abs(), torch.zeros_like(groups), one.expand_as(groups), one * groups.sign()]
    chosen = sum(shape * (kinds == kind) for kind, shape in enumerate(shapes))
    scale = 10.0 ** torch.randint(-20, 20, (*groups.shape[:2], 1), generator=generator)
    return (chosen * scale).flatten(-2)


def steps_of(found: Quantised) -> torch.Tensor:
    """[O, I]: how far two codes are apart."""
    return found.scales.float().abs().repeat_interleave(found.group, -1)


@settings(max_examples=60, deadline=None)
@given(weights(), st.sampled_from(BITS), st.sampled_from(GROUPS), st.sampled_from([torch.float32, torch.bfloat16]))
def test_no_weight_moves_by_more_than_half_a_step_and_again_by_nothing(weight, bits, group, dtype):
    weight = weight.to(dtype).float()
    found = quantise(weight, bits, group)
    back = found.dequantise(torch.float32)
    assert ((back - weight).abs() <= steps_of(found) * (0.5 + 1e-4)).all()
    assert (back[weight == 0] == 0).all() and torch.isfinite(back).all()
    again = quantise(back, bits, group)
    assert torch.equal(again.codes, found.codes) and torch.equal(again.scales, found.scales)


@settings(max_examples=30, deadline=None)
@given(weights(), st.sampled_from(BITS), st.sampled_from(GROUPS))
def test_steps_reach_no_further_than_the_weights(weight, bits, group):
    """What makes the error small: a group's largest weight takes its last code, one side's or both sides'."""
    found = quantise(weight, bits, group)
    codes = found.dequantise(torch.float32).div(steps_of(found).where(steps_of(found) > 0, 1)).abs()
    largest = codes.unflatten(-1, (-1, group)).amax(-1)[found.scales != 0]
    assert ((largest - 2 ** (bits - 1)).abs() < 1.01).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.75, 3e-30, -2e30])
def test_a_constant_matrix_is_exact(bits, value):
    weight = torch.full((3, 128), value).bfloat16()
    torch.testing.assert_close(quantise(weight, bits, 64).dequantise(torch.bfloat16), weight, **EXACT)


@pytest.mark.parametrize(
    ("values", "codes", "scale"),
    [
        ([-8.0, 7.0, 3.6, -0.4, 7.5], [-8, 7, 4, 0, 7], 1.0),  # the half step beyond the last code
        ([16.0, -15.0, 1.0], [-8, 7, 0], -2.0),  # the longer side is the positive: the scale is negative
        ([7.0, -7.0, 2.5, 3.5], [7, -7, 2, 4], 1.0),  # both sides as far: one code less; ties to even
    ],
)
def test_one_group_by_hand(values, codes, scale):
    weight = torch.tensor([values + [0.0] * (64 - len(values))])
    found = quantise(weight, 4, 64)
    assert found.scales.tolist() == [[scale]]
    assert (found.dequantise(torch.float32) / scale)[0, : len(codes)].tolist() == codes
    low, high = found.codes[0] & 15, found.codes[0] >> 4  # where they lie
    assert (low[: len(codes)].int() - 8).tolist() == codes and (high == 8).all()


@pytest.mark.parametrize("bits", BITS)
def test_inputs_are_grouped_whichever_way_round_a_family_keeps_them(bits):
    weight = torch.randn(5, 70, 128, generator=torch.Generator().manual_seed(2))
    found, other = quantise(weight, bits, 64), quantise(weight.transpose(1, 2).contiguous(), bits, 64, transposed=True)
    assert torch.equal(found.codes, other.codes) and torch.equal(found.scales, other.scales)
    torch.testing.assert_close(
        other.dequantise(torch.float32).transpose(1, 2), found.dequantise(torch.float32), **EXACT
    )


# ---- records ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", BITS)
def test_a_record_holds_what_was_put_there_and_weighs_what_it_says(bits, group, transposed):
    shapes = {name: shape[::-1] if transposed else shape for name, shape in MIXED.items()}
    layout = Layout(tuple(shapes), tuple(shapes.values()), torch.bfloat16, bits, group, transposed)
    assert layout.record_bytes == record_bytes(MIXED.values(), bits, group, 2)
    generator = torch.Generator().manual_seed(3)
    drawn = {name: torch.randn(4, *shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    few = {name: quantise(drawn[name], bits, group, transposed=transposed) for name in layout.matrices}
    buffer = page_aligned(4, layout.record_bytes)
    views = layout.views(buffer)
    views["gate_up_proj_bias"].copy_(drawn["gate_up_proj_bias"])
    for name, found in few.items():
        views[name].codes.copy_(found.codes)
        views[name].scales.copy_(found.scales)
    again = layout.views(buffer.clone())
    assert torch.equal(again["gate_up_proj_bias"], drawn["gate_up_proj_bias"])
    for name, found in few.items():
        wanted = found.dequantise(torch.bfloat16)
        assert wanted.shape == drawn[name].shape and torch.equal(again[name].dequantise(torch.bfloat16), wanted)
        assert torch.equal(again[name][2].dequantise(torch.bfloat16), wanted[2])


@pytest.mark.parametrize(
    ("bits", "group", "matrix", "effective"),
    [(4, 64, 8192 * 4.25, 4.25), (4, 128, 8192 * 4.125, 4.125), (8, 64, 8192 * 8.5, 8.5), (8, 128, 8192 * 8.25, 8.25)],
)
def test_bytes_and_bits_by_hand(bits, group, matrix, effective):
    """Two matrices of 64 x 128 and a bias of 64 in two bytes: whole cache lines each, whole pages together."""
    assert effective_bits(bits, group) == effective
    whole = 2 * matrix / 8 + 128
    assert record_bytes([(64, 128), (64,), (64, 128)], bits, group, 2) == -(-whole // 4096) * 4096
    assert record_bytes([(64, 128), (64,), (64, 128)], None, None, 2) == 36864  # 32,896 in whole pages


@pytest.mark.parametrize(
    ("inputs", "bits", "group", "message"),
    [
        (
            192,
            4,
            128,
            "down_proj: 192 inputs in groups of 128; expected sizes that .* divides; choose --group 64",
        ),
        (96, 8, 64, "down_proj: 96 inputs in groups of 64; expected .*; pack it without --bits"),
        (128, 4, 32, "groups of 32; expected 64 or 128"),
        (128, 3, 64, "3 bits; expected 4 or 8"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(inputs, bits, group, message):
    with pytest.raises(UserError, match=message):
        check_group("down_proj", inputs, bits, group)


def test_sizes_need_no_torch():
    code = "import sys, engine.quantisation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- products --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("inputs", [1, 4])
@pytest.mark.parametrize(("outputs", "width"), [(1, 128), (63, 128), (130, 384), (700, 1024)])  # one thread, and all
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", BITS)
def test_products_are_those_of_the_dequantised_weights(bits, group, outputs, width, inputs):
    set_threads()
    layout = Layout(("bias", "w"), ((5,), (outputs, width)), torch.bfloat16, bits, group)
    weight = layout.views(page_aligned(6, layout.record_bytes))["w"]  # strided, as slots have them
    generator = torch.Generator().manual_seed(outputs)
    found = quantise(torch.randn(6, outputs, width, generator=generator), bits, group)
    weight.codes.copy_(found.codes)
    weight.scales.copy_(found.scales)
    x = torch.randn(inputs, width, generator=generator)
    rows = np.array([5, 0, 3, 3])
    wanted = torch.einsum("koi,ki->ko", found.dequantise(torch.float32)[rows], x.expand(4, -1))
    torch.testing.assert_close(quantised_products(weight, rows, x), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("group", GROUPS)
def test_torchs_own_kernel_of_4_bits_says_the_same(group):
    """The reference: torch's codes are 0 to 15 about 8, its layout that of this CPU."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(5)).bfloat16()
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(6)).bfloat16()
    found = quantise(weight, 4, group)
    scales = found.scales.float().repeat_interleave(group, -1)
    codes = (found.dequantise(torch.float32) / scales).round().int() + 8
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    zeros = torch.stack([found.scales, torch.zeros_like(found.scales)], -1).transpose(0, 1).contiguous()
    wanted = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, zeros).float()
    ours = quantised_products(found[None], np.array([0]), x)
    assert (ours - wanted).abs().max() <= 1e-2 * wanted.abs().max()


def test_torchs_own_kernel_of_8_bits_says_the_same():
    """It has one scale an output: a matrix of one group."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(6)).bfloat16()
    found = quantise(weight, 8, 128)
    wanted = torch.ops.aten._weight_int8pack_mm(x, found.codes, found.scales[:, 0].bfloat16()).float()
    ours = quantised_products(found[None], np.array([0]), x)
    assert (ours - wanted).abs().max() <= 1e-2 * wanted.abs().max()
