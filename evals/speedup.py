"""How many times faster, with an interval: mean seconds a token of the baseline over the policy's, on the same tokens.

The interval is that of every difference (evals/stats.py): documents are drawn within topics. It is of the logarithm,
linearised at the estimate.

    speedup([(topic, [(document, tokens), ...], baseline_s, policy_s), ...], level=0.95)     # both [T], by text
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evals.quality import paired_interval

Part = tuple[str, list[tuple[str, int]], np.ndarray, np.ndarray]


def speedup(parts: Sequence[Part], **options) -> dict[str, float]:
    """speedup and, where there is an interval, speedup_low and speedup_high."""
    base, own = (np.concatenate([part[i] for part in parts]) for i in (2, 3))
    mean = own.mean(dtype=np.float64)
    ratio = base.mean(dtype=np.float64) / mean
    found = paired_interval([(t, c, base_s / (ratio * mean), own_s / mean) for t, c, base_s, own_s in parts], **options)
    if found.low is None:
        return {"speedup": ratio}
    low, high = np.exp(np.clip([found.low, found.high], -20, 20))  # few documents know next to nothing
    return {"speedup": ratio, "speedup_low": ratio * low, "speedup_high": ratio * high}
