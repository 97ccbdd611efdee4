"""The emulator: all weights are there, misses are pretended.

It turns what the model chose into what the policy executes and hands that to the model's own expert code. A text goes
layer by layer: a sequential scan of decisions over its tokens, then one batched expert call; generation goes token by
token through the same code. It can also be given a decision log and score exactly that (`Replayer`).

    with attach(model) as attachment:
        emulator = Emulator(attachment, policy, slots=64, demand=demand)
        with emulator.phase("decode"):
            model(input_ids)                       # [1, T]: T events a layer
    emulator.log()

Prefill is exact: the state follows the `fetch` decision, index and weights go through untouched.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.decision import MISS_RULES
from engine.errors import error
from engine.hook import Attachment, Call
from engine.log import DecisionLog, Executed, LogWriter
from engine.phase import PhasedHandler
from engine.policies import Policy
from engine.residency import Demand, Residency
from engine.trace import RouterTrace


class Emulator(PhasedHandler):
    """One policy at one slot budget over one attached model; holds the residency and the log of what it decided."""

    decodes_wide = True  # a scan over the tokens decides, then one expert call computes

    def __init__(
        self,
        attachment: Attachment,
        policy: Policy,
        *,
        slots: int,
        demand: Demand | None = None,
        lanes: int = 1,
        delay: int = 1,
    ) -> None:
        """demand: calibration demand for the warm start, None starts cold. delay: 1 is `next_step`, n is delay(n)."""
        if policy.clairvoyant:
            raise error(
                f"policy '{policy.id}' (it knows the future) in the emulator",
                "a policy that does not need the future",
                "replay it over a recorded trace (engine.trace)",
            )
        if policy.prefetch and not policy.lossless:
            raise error(
                f"policy '{policy.id}' (prefetch {policy.prefetch}) in the emulator",
                "a policy whose decisions do not depend on what arrives in time",
                "score the decision log of simulator or engine",
            )
        if delay < 1:
            raise error(
                f"a delay of {delay} tokens", "1 or more", "completion from outside belongs to the other instruments"
            )
        self.policy = policy
        self._attachment = attachment
        rule = policy.rule(sigmoid=attachment.sigmoid, delay=delay)
        self._prefill_rule = rule._replace(miss=MISS_RULES["fetch"])
        self.residency = Residency(
            layers=len(attachment.layers),
            experts=attachment.experts,
            top_k=attachment.top_k,
            slots=slots,
            rule=rule,
            lanes=lanes,
        )
        if demand is not None:
            self.residency.warm(demand)
        self._written = LogWriter(len(attachment.layers))
        attachment.handler = self._experts

    def restart(self) -> None:
        """Back to the start, warm or cold, in every lane. The log stays."""
        for lane in range(self.residency.lanes):
            self.residency.restart(lane)

    def follow(self, trace: RouterTrace) -> None:
        """As after the exact prefill of a prompt whose routing is recorded: lane 0, state alone, without the model."""
        for layer in range(self.residency.layers):
            chosen, weights, scores = (array[:, layer] for array in (trace.chosen, trace.weights, trace.chosen_scores))
            rule = self._prefill_rule
            self.residency.decide(0, layer, chosen, weights, None, chosen_scores=scores, rule=rule)

    # ---- log -------------------------------------------------------------------------------------------------------
    def clear_log(self) -> None:
        self._written.clear()

    def log(self, **provenance: str) -> DecisionLog:
        """Everything decided in decode phases since the last `clear_log`, in the order of the calls."""
        return self._written.log(**provenance)

    # ---- the handler -------------------------------------------------------------------------------------------------
    def _experts(self, call: Call) -> torch.Tensor:
        groups = self._rows_of_lanes(len(call.hidden))
        prefill = self._phase.kind == "prefill"
        index = call.index.cpu().numpy()  # [T, K]
        weights = call.weights.detach().float().cpu().numpy()
        scores = call.scores.detach().cpu().numpy()
        logits = scores if call.logits is call.scores else call.logits.detach().cpu().numpy()
        new_index, new_weights = index.copy(), weights.copy()
        for lane, rows in groups:
            decided, moves = self.residency.decide(
                lane,
                call.layer,
                index[rows],
                weights[rows],
                scores[rows],
                logits[rows],
                rule=self._prefill_rule if prefill else None,
            )
            if prefill:
                continue
            self._written.append(call.layer, decided, moves)
            new_index[rows], new_weights[rows] = computable(decided.executed), decided.weights
        if prefill:
            return call.compute(call.index, call.weights)
        return self._execute(call, new_index, new_weights)

    def _execute(self, call: Call, index: np.ndarray, weights: np.ndarray) -> torch.Tensor:
        """What was decided, by the model's own expert code. index, weights: [T, K]; for a subclass that looks on."""
        return call.compute(*_as_call(call, index, weights))


class Replayer(PhasedHandler):
    """Scores a given decision log: executes what it says, decides nothing. Rows are consumed in order, a layer each."""

    decodes_wide = True

    def __init__(self, attachment: Attachment, log: DecisionLog | Executed) -> None:
        layers, top_k = log.executed.shape[1:]
        if (layers, top_k) != (len(attachment.layers), attachment.top_k):
            raise error(
                f"a decision log of {layers} layers, top-{top_k}",
                f"{len(attachment.layers)} layers, top-{attachment.top_k}",
                "score it on the model that wrote it",
            )
        if log.executed.max() >= attachment.experts or log.executed.min() < -1:
            raise error(
                "a decision log with expert ids out of range", f"ids below {attachment.experts}", "check the file"
            )
        self._log = log
        self._next = [0] * layers
        attachment.handler = self._experts

    @property
    def finished(self) -> bool:
        return all(n == len(self._log.executed) for n in self._next)

    def _experts(self, call: Call) -> torch.Tensor:
        groups = self._rows_of_lanes(len(call.hidden))
        if self._phase.kind == "prefill":
            return call.compute(call.index, call.weights)
        index, weights = call.index.cpu().numpy().copy(), call.weights.float().cpu().numpy().copy()
        for _, rows in groups:
            start = self._next[call.layer]
            stop = start + len(index[rows])
            if stop > len(self._log.executed):
                raise error(f"a text of more than {len(self._log.executed)} tokens", "the log's own text", "check both")
            executed = self._log.executed[start:stop, call.layer].astype(np.int64)
            index[rows], weights[rows] = computable(executed), self._log.weights[start:stop, call.layer]
            self._next[call.layer] = stop
        return call.compute(*_as_call(call, index, weights))


def computable(executed: np.ndarray) -> np.ndarray:
    """executed [T, K] with -1 (dropped, weight 0) replaced by an expert the event runs anyway: nothing else is read."""
    dropped = executed < 0
    if not dropped.any():
        return executed
    any_kept = executed.max(axis=1, keepdims=True)
    return np.where(dropped, any_kept, executed)


def _as_call(call: Call, index: np.ndarray, weights: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """numpy back to the call's devices and types; an untouched weight keeps its bits: float32 holds every half type."""
    return (
        torch.from_numpy(np.ascontiguousarray(index)).to(call.index.device, call.index.dtype),
        torch.from_numpy(weights).to(call.weights.device, call.weights.dtype),
    )
