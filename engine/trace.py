"""Router traces: what a model chose over a text, and policies replayed over them without the model.

A policy that always fetches changes nothing the model sees, so its residency can be replayed over one recording; the
clairvoyant bound must be, because it needs the future. `Recorder` is the handler that records while the stock model
runs. As a file a trace has a public schema (engine/trace_file.py). torch is not imported here: who replays a trace
needs no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import error
from engine.log import DecisionLog, join_moves
from engine.policies import Policy
from engine.residency import Demand, Residency

if TYPE_CHECKING:
    import torch

    from engine.hook import Attachment, Call


@dataclass(frozen=True)
class RouterTrace:
    """Consecutive tokens of one text: what the router chose, in the model's own order, and what it ranked by.

    Without scores a trace decides every rule but those that need a stand-in (docs/router_traces.md).
    """

    chosen: np.ndarray  # [T, L, K] int16
    weights: np.ndarray  # [T, L, K] float32
    chosen_scores: np.ndarray  # [T, L, K] float32, selection scores of the chosen
    experts: int  # E
    scores: np.ndarray | None = None  # [T, L, E] float32, selection scores
    logits: np.ndarray | None = None  # [T, L, E] float32, router logits; None: the scores are the logits
    top_m: int = 0  # only so many scores of an event are known, -inf stands for the others; 0: all are

    @property
    def g(self) -> np.ndarray:
        """Normalised gate weights [T, L, K]."""
        return self.weights / self.weights.sum(axis=-1, keepdims=True)

    def demand(self) -> Demand:
        """How often each expert is chosen: counts [L, E]."""
        layers = self.chosen.shape[1]
        counts = [np.bincount(self.chosen[:, layer].ravel(), minlength=self.experts) for layer in range(layers)]
        return Demand(np.stack(counts), len(self.chosen))


def join(chunks: Iterable[RouterTrace]) -> RouterTrace:
    """Traces that follow each other as one."""
    chunks = list(chunks)
    first = chunks[0]
    arrays = {
        name: np.concatenate([getattr(chunk, name) for chunk in chunks])
        for name in ("chosen", "weights", "chosen_scores", "scores", "logits")
        if getattr(first, name) is not None
    }
    return RouterTrace(**arrays, experts=first.experts, top_m=first.top_m)


class Recorder:
    """Handler: runs the stock experts and notes what they were asked for.

    sink: takes the RouterTrace of each pass of the model as soon as its last layer is asked, so that one pass alone is
    held; without one all of them are kept for `trace()`. scores: the scores of all E experts too, and the router logits
    where those are something else.
    """

    def __init__(
        self, attachment: Attachment, sink: Callable[[RouterTrace], None] | None = None, *, scores: bool = False
    ) -> None:
        self._layers, self._experts_count = len(attachment.layers), attachment.experts
        self._scores = scores
        self._pass: dict[str, np.ndarray] = {}
        self._asked = 0  # layers of this pass so far
        self._kept: list[RouterTrace] = []
        self._sink = self._kept.append if sink is None else sink
        attachment.handler = self._experts

    def _experts(self, call: Call) -> torch.Tensor:
        chosen_scores = call.scores.gather(1, call.index)
        arrays = {"chosen": call.index, "weights": call.weights.float(), "chosen_scores": chosen_scores}
        if self._scores:
            arrays["scores"] = call.scores
            if call.logits is not call.scores:
                arrays["logits"] = call.logits
        for name, array in arrays.items():  # [T, width]
            if not self._asked:
                shape = (len(array), self._layers, array.shape[1])
                self._pass[name] = np.empty(shape, np.int16 if name == "chosen" else np.float32)
            self._pass[name][:, call.layer] = array.detach().cpu().numpy()  # a copy: the model may write over its own
        self._asked += 1
        if self._asked == self._layers:
            self._sink(RouterTrace(**self._pass, experts=self._experts_count))
            self._pass, self._asked = {}, 0
        return call.compute(call.index, call.weights)

    def trace(self) -> RouterTrace:
        """All passes so far, where there is no sink."""
        return join(self._kept)


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
