"""Was it really decided so? A run's decision log, executed again by the emulator and decided again from what it saw.

The log is forced upon the model, so the text's losses are those of the decisions that were timed. While it runs, every
router's output is noted; afterwards the decision is made anew from it, loads arriving when the log says, and prefetched
those that were taken (no other changes a decision). In float32 no event may differ. In bfloat16 a wide pass and cached
decoding round differently: near ties are chosen otherwise, what is resident follows, and a third of the events may
differ. A background load that failed is no move of the log, so a run with failed loads cannot be decided again.

    recheck = Recheck(attachment, log, policy, slots=64, demand=demand)
    with recheck.phase("decode"):
        losses(model, documents, ...)
    recheck.differences()
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch

from engine.decision import ARRIVED, MOVE, TAKEN, complete_load
from engine.emulator import Replayer
from engine.hook import Attachment, Call
from engine.log import DecisionLog
from engine.policies import Policy
from engine.residency import Demand, Residency


class Recheck(Replayer):
    """A Replayer that notes what the routers ask for."""

    def __init__(
        self, attachment: Attachment, log: DecisionLog, policy: Policy, *, slots: int, demand: Demand | None
    ) -> None:
        super().__init__(attachment, log)
        rule = policy.rule(sigmoid=attachment.sigmoid, delay=0)  # arrivals are the log's, whatever completed them
        shape = {"layers": len(attachment.layers), "experts": attachment.experts, "top_k": attachment.top_k}
        self.residency = Residency(**shape, slots=slots, rule=rule)
        if demand is not None:
            self.residency.warm(demand)
        self._seen: list[list[tuple[np.ndarray, ...]]] = [[] for _ in attachment.layers]

    def _experts(self, call: Call) -> torch.Tensor:
        if self._phase is not None and self._phase.kind == "decode":
            arrays = (call.index, call.weights.float(), call.scores, call.logits)
            self._seen[call.layer].append(tuple(array.detach().cpu().numpy().copy() for array in arrays))
        return super()._experts(call)

    def differences(self) -> int:
        """Events whose kinds or executed experts another decision would have made, of `log.events`. Once a log."""
        if not self._seen:
            raise RuntimeError("the log was decided again already")
        found = sum(self._layer(layer) for layer in range(self.residency.layers))
        self._seen = []
        return found

    def _layer(self, layer: int) -> int:
        arrivals = self._experts_by_step(layer, ARRIVED)
        taken = self._experts_by_step(layer, TAKEN)
        state = self.residency.state
        differing = 0
        index, weights, scores, logits = (np.concatenate(parts) for parts in zip(*self._seen[layer], strict=True))
        for t in range(len(index)):
            for expert in arrivals[t]:
                complete_load(state.slots[layer], state.experts[layer], state.rows[layer], expert)
            event = slice(t, t + 1)
            staged = np.array([taken[t]], np.int32)  # [1, N]
            arrays = (index[event], weights[event], scores[event], logits[event])
            decided, _ = self.residency.decide(0, layer, *arrays, staged=staged)
            same = (decided.kind[0] == self._log.kind[t, layer]).all()
            same &= (decided.executed[0] == self._log.executed[t, layer]).all()
            differing += not same
        return differing

    def _experts_by_step(self, layer: int, cause: int) -> dict[int, list[int]]:
        """Experts of the layer's moves of one cause, by event."""
        moves, found = self._log.moves, defaultdict(list)
        for move in moves[(moves[:, 0] == layer) & (moves[:, 1 + MOVE.names.index("cause")] == cause)]:
            found[int(move[1])].append(int(move[2]))
        return found
