"""Router traces: what a model chose over a text, and policies replayed over them without the model.

A policy that always fetches changes nothing the model sees, so its residency can be replayed over one recording; the
clairvoyant bound must be, because it needs the future. `Recorder` is the handler that records while the stock model
runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.errors import error
from engine.hook import Attachment, Call
from engine.log import DecisionLog, join_moves
from engine.policies import Policy
from engine.residency import Demand, Residency


@dataclass(frozen=True)
class RouterTrace:
    """One text under exact execution: chosen int16, weights, chosen_scores float32 [T, L, K] in the model's order.

    Where they were recorded: scores, logits [T, L, E] float32; logits None are the scores.
    """

    chosen: np.ndarray
    weights: np.ndarray
    chosen_scores: np.ndarray
    experts: int  # E
    scores: np.ndarray | None = None
    logits: np.ndarray | None = None

    @property
    def g(self) -> np.ndarray:
        """Normalised gate weights [T, L, K]."""
        return self.weights / self.weights.sum(axis=-1, keepdims=True)

    def demand(self) -> Demand:
        """How often each expert is chosen: counts [L, E]."""
        layers = self.chosen.shape[1]
        counts = [np.bincount(self.chosen[:, layer].ravel(), minlength=self.experts) for layer in range(layers)]
        return Demand(np.stack(counts), len(self.chosen))


class Recorder:
    """Handler: runs the stock experts and keeps what they were asked for."""

    def __init__(self, attachment: Attachment) -> None:
        self._calls: list[list[tuple[np.ndarray, ...]]] = [[] for _ in attachment.layers]
        self._experts_count = attachment.experts
        attachment.handler = self._experts

    def _experts(self, call: Call) -> torch.Tensor:
        self._calls[call.layer].append(
            (
                call.index.to(torch.int16).cpu().numpy(),
                call.weights.float().cpu().numpy(),
                call.scores.gather(1, call.index).cpu().numpy(),
            )
        )
        return call.compute(call.index, call.weights)

    def trace(self) -> RouterTrace:
        arrays = [
            np.stack([np.concatenate([part[i] for part in layer]) for layer in self._calls], axis=1) for i in range(3)
        ]
        return RouterTrace(*arrays, experts=self._experts_count)


def replay(trace: RouterTrace, policy: Policy, *, slots: int, demand: Demand | None) -> DecisionLog:
    """A fetching policy over a recorded text, one lane, `stream` continuity: its decision log."""
    if not policy.lossless:
        raise error(
            f"policy '{policy.id}' (miss rule {policy.miss_rule}) over a trace recorded under exact execution",
            "miss rule fetch (a lossy rule changes what the next layers choose)",
            "run it in the emulator",
        )
    layers, top_k = trace.chosen.shape[1:]
    residency = Residency(layers=layers, experts=trace.experts, top_k=top_k, slots=slots, rule=policy.rule())
    if demand is not None:
        residency.warm(demand)
    logs, moves = [], []
    for layer in range(layers):
        log, moved = residency.decide(
            0, layer, trace.chosen[:, layer], trace.weights[:, layer], None, chosen_scores=trace.chosen_scores[:, layer]
        )
        logs.append(log)
        moves.append([moved])
    executed, weights, kind, first, g = (
        np.stack([getattr(log, name) for log in logs], axis=1) for name in logs[0]._fields
    )
    return DecisionLog(executed.astype(np.int16), weights, kind, first, g, join_moves(moves))
