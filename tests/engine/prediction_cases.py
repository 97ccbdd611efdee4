"""Made-up predictions over made-up traces: what tests of the simulator and of the reader share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.predictions import HORIZONS, from_trace, save_predictions
from engine.trace_file import TraceFile

PREDICTIONS_SEED = 71


def made_up(tokens: int, layers: int, experts: int, names: int, seed: int = PREDICTIONS_SEED):
    """(ids, claims) [T, L, H, N] without regard to what is chosen: random names, falling claims."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((tokens, layers, HORIZONS, experts)), axis=-1)[..., :names].astype(np.int16)
    claims = -np.sort(-rng.dirichlet(np.ones(names), ids.shape[:-1])).astype(np.float16)
    for horizon in range(1, HORIZONS + 1):
        ids[:, max(layers - horizon, 0) :, horizon - 1], claims[:, max(layers - horizon, 0) :, horizon - 1] = -1, 0
    return ids, claims


def write_predictions(path: Path, trace: TraceFile, names: int, predictor: str = "random", **facts: str) -> Path:
    """Predictions over a trace's text: `oracle` names what it chose, any other name is made up."""
    if predictor == "oracle":
        routing = trace.read(scores=False)
        ids, claims = from_trace(routing.chosen, routing.chosen_scores, names)
    else:
        ids, claims = made_up(trace.tokens, trace.layers, trace.experts, names)
    own = {
        name: trace.provenance[name]
        for name in ("model", "model_hash", "text", "text_sha256")
        if name in trace.provenance
    }
    save_predictions(path, ids, claims, experts=trace.experts, provenance=own | {"predictor": predictor} | facts)
    return path
