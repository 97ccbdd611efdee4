"""Law: an interval of a speedup stays a number that the readers of tables take, however little the documents know."""

from __future__ import annotations

import numpy as np

from evals.speed import SMALLEST
from evals.speedup import speedup


def test_two_documents_that_contradict_each_other_give_a_wide_and_finite_interval():
    base, own = np.array([1.0, 1.0, 1.0, 1.0]), np.array([0.1, 0.1, 30.0, 30.0])
    found = speedup([("topic", [("a", 2), ("b", 2)], base, own)], level=0.95, replicates=199, seed=1)
    if "speedup_low" in found:
        assert SMALLEST < found["speedup_low"] <= found["speedup"] <= found["speedup_high"] < np.inf
    several = [(f"t{i}", [("a", 2), ("b", 2), ("c", 2)], np.ones(6), np.repeat([0.01, 1.0, 80.0], 2)) for i in range(2)]
    found = speedup(several, level=0.95, replicates=199, seed=1)
    assert SMALLEST < found["speedup_low"] <= found["speedup"] <= found["speedup_high"] < np.inf
