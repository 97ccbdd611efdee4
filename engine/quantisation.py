"""What an expert weighs in 4 or 8 bits. A placeholder with the signature of the module that packs such records.

record_bytes([(1024, 2048), (2048, 512)], bits=4, group=64, dtype_bytes=2)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PAGE = 4096


def record_bytes(shapes: Sequence[tuple[int, ...]], bits: int, group: int, dtype_bytes: int) -> int:
    """Of matrices (O, I): codes, and per group of inputs a scale and a zero point; of biases (O,) the dtype."""
    total = 0
    for shape in shapes:
        if len(shape) == 1:
            total += shape[0] * dtype_bytes
        else:
            outputs, inputs = shape
            total += outputs * math.ceil(inputs / group) * (group * bits // 8 + 2 * dtype_bytes)
    return math.ceil(total / PAGE) * PAGE
