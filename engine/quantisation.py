"""What does an expert weigh in 4 or 8 bits, and which sizes can be packed so? Numbers alone, without torch.

A matrix of an expert is [O, I], whichever way round its family keeps it: I is the axis that a product sums over. Every
`group` neighbours on it share one scale:

    weight = scale * code        codes -8 .. 7 or -128 .. 127, scales bfloat16 or float32
    effective bits a weight = bits + 8 * SCALE_BYTES[bits] / group

A scale is as precise as its codes need: rounding a bfloat16 moves the far end of 16 steps by a fraction of a step, that
of 256 by a whole one. Biases stay in the dtype of the run. Sizes that a group does not divide are refused: padding
would read, and count, weights that are not there.

    record_bytes([(1024, 2048), (2048, 512)], bits=4, group=64, dtype_bytes=2)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from engine.errors import error

BITS = (4, 8)
GROUPS = (64, 128)
SCALE_BYTES = {4: 2, 8: 4}
PAGE = 4096  # bytes: alignment of memory, offset and length under O_DIRECT
ALIGNED = 64  # bytes: a cache line, and what vector loads like


def part_bytes(shape: Sequence[int], bits: int | None, group: int | None, dtype_bytes: int) -> tuple[int, ...]:
    """Of one parameter of one expert: (codes, scales) of a matrix (O, I) in few bits, (all,) of everything else."""
    if bits is None or len(shape) < 2:
        return (math.prod(shape) * dtype_bytes,)
    weights = math.prod(shape)
    return weights * bits // 8, weights // group * SCALE_BYTES[bits]


def record_bytes(shapes: Iterable[Sequence[int]], bits: int | None, group: int | None, dtype_bytes: int) -> int:
    """Of one expert with these parameters, matrices (O, I) and biases, in a slot or a store; bits None: as they are."""
    return up(sum(up(sum(part_bytes(shape, bits, group, dtype_bytes)), ALIGNED) for shape in shapes), PAGE)


def effective_bits(bits: int, group: int) -> float:
    """Bits that one weight of a matrix takes, its share of a scale included."""
    return bits + 8 * SCALE_BYTES[bits] / group


def check_group(name: str, inputs: int, bits: int, group: int) -> None:
    """UserError where a matrix of so many inputs cannot be packed so."""
    if bits not in BITS:
        raise error(f"{bits} bits", " or ".join(map(str, BITS)), "choose one of them")
    if group not in GROUPS:
        raise error(f"groups of {group}", " or ".join(map(str, GROUPS)), "choose one of them")
    if inputs % group:
        fitting = sorted((g for g in GROUPS if inputs % g == 0), key=lambda g: abs(g - group))
        todo = f"choose --group {fitting[0]}" if fitting else "pack it without --bits"
        raise error(f"{name}: {inputs:,} inputs in groups of {group}", "sizes that the group divides", todo)


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
