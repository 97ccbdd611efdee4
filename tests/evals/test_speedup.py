"""Law: an interval of a speedup stays a number that the readers of tables take, however little the documents know."""

from __future__ import annotations

import numpy as np

from evals.speed import SMALLEST
from evals.speedup import speedup


def test_documents_that_contradict_each_other_give_a_wide_and_finite_interval():
    own = np.repeat([0.01, 1.0, 80.0], 2)
    parts = [(f"t{i}", [("a", 2), ("b", 2), ("c", 2)], np.ones(6), own) for i in range(2)]
    found = speedup(parts, level=0.95, replicates=199, seed=1)
    assert SMALLEST < found["speedup_low"] < found["speedup"] < found["speedup_high"] < np.inf
