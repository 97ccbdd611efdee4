"""What does a router multiply its input by, and what distribution over the experts is meant by the product?

Found without knowing the family: the one parameter of shape [E, D] of the router's module, and the bias beside it where
there is one. Whether that is all the router does, a recording of inputs and logits shows (evals/predictor_training.py).

    routers = routers_of(attachment)
    log_distribution(logits_of(routers[3], x), attachment.sigmoid)

Axes: T tokens, D width, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from engine.errors import error
from engine.hook import Attachment


class Router(NamedTuple):
    """What a router multiplies its input by. weight [E, D], bias [E] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


def routers_of(attachment: Attachment) -> list[Router]:
    """Every layer's. UserError on a router whose logits are not one product with its input."""
    found = []
    for layer, module in enumerate(attachment.routers):
        parts = {name: p.detach() for name, p in module.named_parameters()}
        weights = [p for p in parts.values() if p.ndim == 2 and len(p) == attachment.experts]
        biases = [p for name, p in parts.items() if name.split(".")[-1] == "bias" and p.shape == (attachment.experts,)]
        if len(weights) != 1 or len(biases) > 1:
            shapes = ", ".join(f"{name} {list(p.shape)}" for name, p in parts.items())
            raise error(
                f"layer {layer}: router {type(module).__name__} with {shapes or 'no parameters'}",
                f"exactly one parameter [E = {attachment.experts}, D], and at most one bias",
                "this model's routing cannot be predicted: leave prefetching out",
            )
        found.append(Router(weights[0], biases[0] if biases else None))
    return found


def log_distribution(logits: torch.Tensor, sigmoid: bool) -> torch.Tensor:
    """What a predictor is trained towards and by [.., E]: log of the softmax, or of sigmoids over their sum."""
    return (functional.logsigmoid(logits) if sigmoid else logits).log_softmax(-1)


def logits_of(router: Router, x: torch.Tensor) -> torch.Tensor:
    """[.., E] float32 of inputs x [.., D]."""
    return functional.linear(x.float(), router.weight.float(), None if router.bias is None else router.bias.float())
