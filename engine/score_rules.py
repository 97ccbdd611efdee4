"""What do a router's logits mean: by which scores does it choose experts, and by which logits does it weigh them?

Families differ in a few ways only, and each is a row of SCORE_RULES. Which one a model follows is not looked up but
tried (engine/hook.py): it must give the chosen experts and their weights, layer by layer. Rows read what routers call
their parts (groups, scales); a correction bias is found by the caller, who knows what the router was handed.

    selection, logits = SCORE_RULES["sigmoid"].scores(router, output, bias)
    chooses(selection, index) and weighs(logits, index, weights, sigmoid=True)

Axes: T tokens, E experts, K chosen a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

CORRECTION = "e_score_correction_bias"  # what routers call a bias that is for choosing alone
PLAIN = ("probabilities", "softmax")  # rules that choose by the softmax alone, where there is no such bias
Scores = tuple[torch.Tensor, torch.Tensor]  # selection scores, and the logits behind the weights: [T, E] float32


@dataclass(frozen=True)
class ScoreRule:
    """scores(router, output, bias) -> Scores; sigmoid: weights follow a sigmoid of the logits, not a softmax.

    output [T, E] is what the family records as router logits, bias [E] what it adds before the best are taken, or None.
    """

    scores: Callable[[nn.Module, torch.Tensor, torch.Tensor | None], Scores]
    sigmoid: bool


def _probabilities(router: nn.Module, output: torch.Tensor, bias: torch.Tensor | None) -> Scores:
    """The family records softmax probabilities as its router logits, and may scale the weight of each expert."""
    selection = output.float().log()
    scale = getattr(router, "per_expert_scale", None)
    return selection, selection if scale is None else selection + scale.float().log()


def _sigmoid(router: nn.Module, output: torch.Tensor, bias: torch.Tensor | None) -> Scores:
    """Sigmoid, plus the correction bias and within the groups whose best two are best, where the router has them."""
    logits = output.float()
    selection = logits.sigmoid()
    if bias is not None:
        selection = selection + bias.float()
    return _within_groups(router, selection, best=2), logits


def _sigmoid_biased_logits(router: nn.Module, output: torch.Tensor, bias: torch.Tensor | None) -> Scores:
    """Sigmoid weights, but the bias is added to the logits."""
    logits = output.float()
    return (logits if bias is None else logits + bias.float()).sigmoid(), logits


def _softmax(router: nn.Module, output: torch.Tensor, bias: torch.Tensor | None) -> Scores:
    """The best logits; a correction bias is added to the probabilities."""
    logits = output.float()
    return logits if bias is None else logits.softmax(-1) + bias.float(), logits


def _softmax_groups(router: nn.Module, output: torch.Tensor, bias: torch.Tensor | None) -> Scores:
    """The best probabilities of the groups whose best is best."""
    logits = output.float()
    return _within_groups(router, logits.softmax(-1), best=1), logits


def _within_groups(router: nn.Module, selection: torch.Tensor, best: int) -> torch.Tensor:
    """selection [T, E], -inf outside the groups with the largest sums of so many scores."""
    groups = getattr(router, "num_group", None) or getattr(router, "n_group", None) or 1
    if groups == 1:
        return selection
    by_group = selection.view(len(selection), groups, -1)  # [T, groups, E / groups]
    inside = by_group.topk(best, dim=-1).values.sum(-1).topk(router.topk_group, dim=-1).indices
    keep = torch.zeros(by_group.shape[:2], dtype=torch.bool, device=selection.device).scatter_(1, inside, True)
    return by_group.masked_fill(~keep[..., None], -torch.inf).reshape(selection.shape)


SCORE_RULES: dict[str, ScoreRule] = {
    "probabilities": ScoreRule(_probabilities, sigmoid=False),
    "sigmoid": ScoreRule(_sigmoid, sigmoid=True),
    "sigmoid_biased_logits": ScoreRule(_sigmoid_biased_logits, sigmoid=True),
    "softmax": ScoreRule(_softmax, sigmoid=False),
    "softmax_groups": ScoreRule(_softmax_groups, sigmoid=False),
}


def scores_of(rule: ScoreRule, router: nn.Module, output: torch.Tensor, bias: torch.Tensor | None) -> Scores | None:
    """None where the router lacks what the rule reads."""
    try:
        return rule.scores(router, output, bias)
    except (AttributeError, RuntimeError):
        return None


def chooses(selection: torch.Tensor, index: torch.Tensor) -> bool:
    """Whether the best scores [T, E] are the experts that were chosen [T, K], up to exact ties."""
    if torch.isnan(selection).any():
        return False
    inside = selection.gather(1, index).min(-1).values
    outside = selection.scatter(1, index, -torch.inf).max(-1).values
    distinct = index.sort(-1).values.diff(dim=-1).gt(0).all()
    slack = 1e-5 * (1.0 + inside.abs())
    return bool(distinct and (inside >= outside - slack).all())


def weighs(logits: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, sigmoid: bool) -> bool:
    """Whether the logits [T, E] of the chosen [T, K] give their weights [T, K], both normalised."""
    own = logits.gather(1, index)
    own = own.sigmoid() if sigmoid else own.softmax(-1)
    found = weights.float()
    tolerance = 1e-4 if weights.dtype == torch.float32 else 2e-2
    return torch.allclose(own / own.sum(-1, keepdim=True), found / found.sum(-1, keepdim=True), atol=tolerance)
