"""What does a stand-in give in place of the expert that is missing, for the same hidden state?

An emulator that looks on: of every n-th token of a text, wherever it substitutes, both experts are computed by the
model's own expert code and compared. Residents must be frozen, so that who could have stood in is known.

    watch = Watch(attachment, policy, slots=64, demand=demand)
    loss, log = run_emulator(model, watch, text, context=1024, bos=bos)
    mechanism([(watch, log)])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.decision import SUBSTITUTE
from engine.emulator import Emulator
from engine.hook import Attachment, Call
from engine.log import DecisionLog
from engine.policies import Policy

EVERY = 8  # of so many tokens one is looked at
SEEN = {  # what is noted of a substitution
    "standin_rank": "place of the stand-in by selection score among all experts that are not chosen, 1 the best",
    "standin_rank_residents": "the same among the residents that are not chosen",
    "difference_norm": "length of (output of the stand-in less that of the missing expert)",
    "difference_over_missing": "the same over the length of the missing expert's output",
    "difference_over_layer": "the same over the length of what all executed experts of the layer give together",
    "weighted_over_layer": "the last one times g",
}


class Watch(Emulator):
    """An emulator of a policy with frozen residents; `seen` [N, len(SEEN)] of what it looked at."""

    def __init__(self, attachment: Attachment, policy: Policy, *, every: int = EVERY, **options) -> None:
        if not policy.in_place:
            raise ValueError(f"policy '{policy.id}' moves its residents")
        super().__init__(attachment, policy, **options)
        self._every = every
        self._tokens = [0] * len(attachment.layers)  # so far
        self._parts: list[np.ndarray] = []

    @property
    def seen(self) -> np.ndarray:
        return np.concatenate([np.empty((0, len(SEEN))), *self._parts])

    def _execute(self, call: Call, index: np.ndarray, weights: np.ndarray) -> torch.Tensor:
        output = super()._execute(call, index, weights)  # [T, D]
        tokens = np.arange(-self._tokens[call.layer] % self._every, len(index), self._every)
        self._tokens[call.layer] += len(index)
        chosen = call.index.cpu().numpy()
        row, place = np.nonzero(index[tokens] != chosen[tokens])
        if len(row):
            token = tokens[row]  # [N]
            self._parts.append(self._look(call, token, place, chosen[token, place], index[token, place], output))
        return output

    def _look(self, call, token, place, missing, standin, output) -> np.ndarray:
        """[N, len(SEEN)] of N substitutions: token and place among the chosen, who is missing, who stands in."""
        both = torch.from_numpy(np.concatenate([standin, missing])).to(call.index)[:, None]  # [2N, 1]
        hidden = call.hidden[np.concatenate([token, token])]  # [2N, D]
        alone = torch.ones_like(both, dtype=call.weights.dtype)
        ours, theirs = replace(call, hidden=hidden).compute(both, alone).double().chunk(2)
        difference = (ours - theirs).norm(dim=1)
        layer = output[token].double().norm(dim=1)
        weights = call.weights[token].double()  # [N, K]
        g = weights[np.arange(len(token)), place] / weights.sum(dim=1)
        columns = (*self._ranks(call, token, standin), difference, difference / theirs.norm(dim=1))
        columns += (difference / layer, g * difference / layer)
        return torch.stack([column.double().cpu() for column in columns], dim=1).numpy()

    def _ranks(self, call: Call, token: np.ndarray, standin: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Place of each stand-in among all that are not chosen, and among the residents of these; ties: lower id."""
        scores = call.scores[token]  # [N, E]
        ids = torch.arange(scores.shape[1], device=scores.device)
        own = torch.from_numpy(standin).to(call.index)[:, None]
        of_own = scores.gather(1, own)
        ahead = (scores > of_own) | ((scores == of_own) & (ids < own))
        ahead &= torch.ones_like(ahead).scatter(1, call.index[token], False)
        resident = torch.from_numpy(self.residency.state.experts[call.layer]["slot"] >= 0).to(scores.device)
        return 1 + ahead.sum(1), 1 + (ahead & resident).sum(1)


def mechanism(runs: Sequence[tuple[Watch, DecisionLog]]) -> dict[str, float | int | str | None]:
    """How often, how heavy and how far off: counts over all events of the runs, means over what was looked at."""
    seen = np.concatenate([np.empty((0, len(SEEN))), *(watch.seen for watch, _ in runs)])
    substituted = [log.kind == SUBSTITUTE for _, log in runs]
    number = sum(int(part.sum()) for part in substituted)
    mass = sum(float(log.g[part].sum(dtype=np.float64)) for (_, log), part in zip(runs, substituted, strict=True))
    return {
        "substitutions": number,
        "events_with_substitution": sum(int(part.any(axis=2).sum()) for part in substituted),
        "g_mean": mass / number if number else None,
        "looked_at": len(seen),
        "of_tokens": f"every {EVERY}th of a text",
        **{name: float(column.mean()) if len(seen) else None for name, column in zip(SEEN, seen.T, strict=True)},
    }
