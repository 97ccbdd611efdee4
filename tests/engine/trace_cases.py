"""A trace in memory that is read in chunks, as the simulator reads one from disk."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.trace import RouterTrace


class Chunked:
    """chosen [T, L, K], weights [T, L, K], scores [T, L, E] (None: no scores, chosen_scores instead)."""

    sigmoid = False

    def __init__(self, chosen, weights, scores, *, chosen_scores=None, logits=None):
        if chosen_scores is None:
            chosen_scores = np.take_along_axis(scores, chosen.astype(np.int64), axis=2)
        self.whole = RouterTrace(
            chosen.astype(np.int16), weights, chosen_scores, experts=scores.shape[2], scores=scores, logits=logits
        )
        self.tokens, self.layers, self.top_k = chosen.shape
        self.experts = scores.shape[2]
        self.reads = 0

    def chunks(self, tokens: int = 2048) -> Iterator[RouterTrace]:
        self.reads += 1
        whole = self.whole
        for start in range(0, self.tokens, tokens):
            part = slice(start, start + tokens)
            yield RouterTrace(
                whole.chosen[part],
                whole.weights[part],
                whole.chosen_scores[part],
                experts=self.experts,
                scores=None if whole.scores is None else whole.scores[part],
                logits=None if whole.logits is None else whole.logits[part],
            )


def by_hand(events: list[list[dict[int, float]]], experts: int) -> Chunked:
    """events[t][layer]: {expert: gate weight} in the router's order. Scores: a chosen one's weight, else -1 - id."""
    chosen = np.array([[list(event) for event in token] for token in events])
    weights = np.array([[list(event.values()) for event in token] for token in events], np.float32)
    scores = np.broadcast_to(-1.0 - np.arange(experts, dtype=np.float32), (*chosen.shape[:2], experts)).copy()
    np.put_along_axis(scores, chosen, weights, axis=2)
    return Chunked(chosen, weights, scores)


def stacked(layers: list) -> Chunked:
    """Traces of one layer each (fixture router_trace) as one."""
    return Chunked(*(np.stack([getattr(t, name) for t in layers], axis=1) for name in ("chosen", "weights", "scores")))
