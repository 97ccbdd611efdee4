"""Weights as codes and scales: quantised once, when a store is packed, and computed with where they lie.

    found = quantise(weight, bits=4, group=64)          # weight [..., O, I]
    found[rows].dequantise(torch.bfloat16)              # [..., O, I] again

The layout is the same on every machine (that of torch's own 4-bit kernel is not: it depends on the vectors a CPU has).
Of 8 bits a code is an int8 in its place. Of 4 bits each block of 64 neighbours is 32 bytes: byte j holds code j in its
low half and code j + 32 in its high half, both plus 8, so that a kernel takes either half of a vector of bytes without
moving elements about.

Laws, in float32 (tests/engine/test_quantised.py): no weight moves by more than half a step; what is zero stays zero;
quantising what was dequantised gives the same codes and scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 64  # codes whose halves share bytes
SCALE_DTYPES = {4: torch.bfloat16, 8: torch.float32}
CODE_DTYPES = {4: torch.uint8, 8: torch.int8}
_NOTHING = 2.0**-100  # a group whose largest weight is smaller is all zeros: scales stay normal numbers


@dataclass(frozen=True)
class Quantised:
    """One parameter of one expert or of many. transposed: the family keeps it [..., I, O]; here it is [..., O, I]."""

    codes: torch.Tensor  # [..., O, I * bits / 8]
    scales: torch.Tensor  # [..., O, I / group]
    transposed: bool = False

    @property
    def bits(self) -> int:
        return 4 if self.codes.dtype == CODE_DTYPES[4] else 8

    @property
    def outputs(self) -> int:
        return self.codes.shape[-2]

    @property
    def inputs(self) -> int:
        return self.codes.shape[-1] * 8 // self.bits

    @property
    def group(self) -> int:
        return self.inputs // self.scales.shape[-1]

    def __getitem__(self, rows) -> Quantised:
        """Experts of many, by what a tensor takes as index of its first axis."""
        return Quantised(self.codes[rows], self.scales[rows], self.transposed)

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """As the family keeps it, [..., O, I] or [..., I, O]; products in float32, then cast."""
        codes = self.codes if self.bits == 8 else _apart(self.codes)
        grouped = codes.unflatten(-1, (-1, self.group)).float()
        weight = grouped.mul_(self.scales.float().unsqueeze(-1)).flatten(-2).to(dtype)
        return weight.transpose(-1, -2) if self.transposed else weight


def quantise(weight: torch.Tensor, bits: int, group: int, *, transposed: bool = False) -> Quantised:
    """To the nearest code, ties to even. weight [..., O, I] (transposed: [..., I, O]), finite, `group` divides I.

    The steps of a group reach to its largest weight on one side, which is the last code of the longer side (-8 of -8 to
    7: a scale may be negative), where the other side needs no more than the half step that lies beyond its own last
    code; else to the last code on both sides. Scales are rounded up, so that nothing is cut off.
    """
    steps = 2 ** (bits - 1)
    weight = (weight.transpose(-1, -2) if transposed else weight).float()
    groups = weight.unflatten(-1, (-1, group))  # [..., O, I / group, group]
    low, high = groups.aminmax(dim=-1)
    far, near = torch.maximum(-low, high), torch.minimum(-low, high)
    both = near > far * ((steps - 0.5) / steps)
    scales = _rounded_up(torch.where(both, far / (steps - 1), far / steps), SCALE_DTYPES[bits])
    scales = torch.where(both | (-low >= high), scales, -scales).where(far >= _NOTHING, 0)
    divisors = scales.where(scales != 0, torch.inf)
    codes = (groups / divisors.unsqueeze(-1)).round_().clamp_(-steps, steps - 1).flatten(-2)
    codes = codes.to(CODE_DTYPES[8]) if bits == 8 else _together(codes.add_(8).to(torch.uint8))
    return Quantised(codes, scales.to(SCALE_DTYPES[bits]), transposed)


def _rounded_up(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The next number of dtype, still as float32; scales >= 0."""
    if dtype == torch.float32:
        return scales
    return ((scales.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)  # bfloat16 is the upper half


def _together(codes: torch.Tensor) -> torch.Tensor:
    """codes [..., I] of 0 to 15: [..., I / 2]."""
    low, high = codes.unflatten(-1, (-1, 2, BLOCK // 2)).unbind(-2)
    return (low | high << 4).flatten(-2)


def _apart(codes: torch.Tensor) -> torch.Tensor:
    """The inverse, of -8 to 7."""
    halves = codes.unflatten(-1, (-1, 1, BLOCK // 2))
    return torch.cat([halves & 15, halves >> 4], -2).flatten(-3).to(torch.int8) - 8
