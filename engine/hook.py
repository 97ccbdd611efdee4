"""Attach to any transformers MoE: who chose what, in which layer, and a handler in place of the experts' computation.

transformers sends every MoE family through one registry of experts functions. `attach` registers one of ours, writes
layer number and state on each experts module, takes the router's logits by a forward hook on the module that the
family itself names in `_can_record_outputs["router_logits"]`, and then proves on 256 random tokens that it
understands the family: from the logits alone one of SCORE_RULES (engine/score_rules.py) must give the chosen set and
weights that the experts really got. A family that passes none is refused by name. There is no file per family.

    with attach(model) as attachment:
        attachment.handler = my_handler        # handler(call: Call) -> hidden [T, D]
        model(input_ids)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.utils.output_capturing import OutputRecorder

from engine.errors import error
from engine.score_rules import CORRECTION, PLAIN, SCORE_RULES, chooses, scores_of, weighs

IMPLEMENTATION = "expertmiss"
_CHECK_TOKENS = 256


@dataclass(frozen=True)
class Call:
    """One call of one layer's experts. index, weights: [T, K] as the model chose; scores, logits: [T, E] float32."""

    layer: int
    module: nn.Module
    hidden: torch.Tensor  # [T, D]
    index: torch.Tensor
    weights: torch.Tensor
    scores: torch.Tensor  # selection scores: what the router ranks by
    logits: torch.Tensor  # router logits: what the weights are made of
    router_input: torch.Tensor  # [T, D], what the router module was given: a view, for the length of the call
    stock: Callable[..., torch.Tensor]  # the implementation in use before attach

    def compute(self, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The model's own expert code on another index and weights."""
        return self.stock(self.module, self.hidden, index, weights)


Handler = Callable[[Call], torch.Tensor]


def stock_handler(call: Call) -> torch.Tensor:
    return call.compute(call.index, call.weights)


# ---- attach ---------------------------------------------------------------------------------------------------------
@dataclass
class _Layer:
    """What is written on an experts module."""

    attachment: Attachment
    number: int
    router: nn.Module
    stock: Callable[..., torch.Tensor]
    corrected: nn.Module | None  # who has the correction bias, of the router's modules
    bias: torch.Tensor | None = None  # [E], of the last call; where no module of the router has it, it is handed to it
    output: torch.Tensor | None = None  # the router's last recorded output
    input: torch.Tensor | None = None  # what it was given


class Attachment:
    """The hold on one model: `handler` is called in place of its experts until `detach`. One a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.handler: Handler = stock_handler
        self.rule_name = ""
        self.layers: list[nn.Module] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._stock_name = model.config._experts_implementation

    @property
    def sigmoid(self) -> bool:
        return SCORE_RULES[self.rule_name].sigmoid

    @property
    def experts(self) -> int:
        return self._experts

    @property
    def routers(self) -> list[nn.Module]:
        """The router of every layer."""
        return [module._expertmiss.router for module in self.layers]

    def selection(self, layer: int, output: torch.Tensor) -> torch.Tensor:
        """Selection scores [T, E] that the router of this layer makes of other logits [T, E]."""
        of_layer: _Layer = self.layers[layer]._expertmiss
        return SCORE_RULES[self.rule_name].scores(of_layer.router, output, of_layer.bias)[0]

    @property
    def plain(self) -> bool:
        """Whether experts are chosen by their softmax alone."""
        return self.rule_name in PLAIN and all(module._expertmiss.bias is None for module in self.layers)

    @property
    def top_k(self) -> int:
        return self._top_k

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Give the model back as it was."""
        for hook in self._hooks:
            hook.remove()
        for module in self.layers:
            del module.__dict__["_expertmiss"]
        self.model.set_experts_implementation(self._stock_name)
        self.layers, self._hooks = [], []


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of routed experts by its path in the model, in the order of the layers."""
    return {path: module for path, module in model.named_modules() if hasattr(module, "_is_expert_parallel")}


def attach(model: nn.Module) -> Attachment:
    """Hook a loaded model. UserError names a family that is refused, and why; the model is left as it was.

    The experts' parameters may be on the meta device (engine.skeleton): while the family is recognised such experts
    give zeros, and the routers see what attention and the shared experts leave.
    """
    family = getattr(model.config, "model_type", type(model).__name__)
    if any("_expertmiss" in module.__dict__ for module in model.modules()):
        raise error(f"a model of family '{family}' that is attached already", "a free model", "detach it first")
    attachment = Attachment(model)
    pairs = _pair_routers(model, family)
    for number, (experts, router, index) in enumerate(pairs):
        stock = ALL_EXPERTS_FUNCTIONS.get(attachment._stock_name) or type(experts).forward.__wrapped__
        corrected = next((module for module in router.modules() if hasattr(module, CORRECTION)), None)
        layer = _Layer(attachment, number, router, stock, corrected)
        experts.__dict__["_expertmiss"] = layer  # not a submodule: kept out of parameters and state
        attachment.layers.append(experts)
        attachment._hooks.append(router.register_forward_hook(_keep(layer, index), with_kwargs=True))
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)
    model.set_experts_implementation(IMPLEMENTATION)
    try:
        _recognise(attachment, family)
    except Exception:
        attachment.detach()
        raise
    return attachment


def _refuse(family: str, why: str) -> Exception:
    return error(
        f"model family '{family}' is refused: {why}",
        "a router one of the score rules explains",
        "docs/families.md lists the families that work",
    )


def _pair_routers(model: nn.Module, family: str) -> list[tuple[nn.Module, nn.Module, int]]:
    """Every experts module with its router (the nearest module of the named class) and the index of its logits."""
    recorders: list[OutputRecorder] = []
    for module in model.modules():
        named = getattr(module, "_can_record_outputs", None) or {}
        found = named.get("router_logits", [])
        recorders += [r for r in (found if isinstance(found, list) else [found]) if isinstance(r, OutputRecorder)]
    experts = experts_modules(model)
    if not experts:
        raise _refuse(family, "no experts module uses transformers' experts interface")
    routers = [
        (name, m, r.index) for name, m in model.named_modules() for r in recorders[:1] if isinstance(m, r.target_class)
    ]
    pairs = []
    for path, module in experts.items():
        block = path.rpartition(".")[0]
        near = [(m, i) for name, m, i in routers if name.rpartition(".")[0] == block]
        if len(near) != 1:
            raise _refuse(family, f"{len(near)} routers that record their logits beside {path}")
        pairs.append((module, *near[0]))
    return pairs


def _absent(experts: nn.Module) -> bool:
    """Whether the weights of an experts module are elsewhere."""
    return any(parameter.is_meta for parameter in experts.parameters())


def _keep(layer: _Layer, index: int) -> Callable[..., None]:
    def keep(_module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        layer.input, *others = (*args, *kwargs.values())
        layer.output = output[index] if isinstance(output, tuple | list) else output
        if layer.corrected is not None:
            layer.bias = getattr(layer.corrected, CORRECTION).view(-1)
        elif others:
            experts = layer.output.shape[-1:]
            layer.bias = next((o for o in others if isinstance(o, torch.Tensor) and o.shape == experts), None)

    return keep


def _experts_forward(
    module: nn.Module, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What transformers calls for every layer's experts, once registered under IMPLEMENTATION."""
    layer: _Layer = module._expertmiss
    output = layer.output.reshape(len(hidden), -1)  # [T, E]
    router_input = layer.input.reshape(len(hidden), -1)  # [T, D]
    layer.input = layer.output = None
    attachment = layer.attachment
    scores = logits = output
    if attachment.rule_name:
        scores, logits = SCORE_RULES[attachment.rule_name].scores(layer.router, output, layer.bias)
    chosen = (top_k_index, top_k_weights)
    return attachment.handler(Call(layer.number, module, hidden, *chosen, scores, logits, router_input, layer.stock))


@torch.no_grad()
def _recognise(attachment: Attachment, family: str) -> None:
    """Find the one score rule that explains every layer on random tokens; refuse the family otherwise."""
    model = attachment.model
    calls: list[Call] = []

    def listen(call: Call) -> torch.Tensor:
        calls.append(call)
        return torch.zeros_like(call.hidden) if _absent(call.module) else stock_handler(call)

    attachment.handler = listen
    text = model.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, text.vocab_size, (1, _CHECK_TOKENS), generator=generator).to(model.device)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        for module, training in modes:
            module.training = training
        attachment.handler = stock_handler
    if sorted(c.layer for c in calls) != list(range(len(attachment.layers))):
        raise _refuse(family, f"{len(calls)} expert calls for {len(attachment.layers)} layers in one pass")
    if any(c.index.shape != calls[0].index.shape or c.scores.shape != calls[0].scores.shape for c in calls):
        raise _refuse(family, "layers differ in experts or top-K")
    chosen = []  # rules that give the experts, if not their weights
    for name, rule in SCORE_RULES.items():
        found = [scores_of(rule, c.module._expertmiss.router, c.scores, c.module._expertmiss.bias) for c in calls]
        if not all(one and chooses(one[0], c.index) for one, c in zip(found, calls, strict=True)):
            continue
        chosen.append(name)
        if all(weighs(one[1], c.index, c.weights, rule.sigmoid) for one, c in zip(found, calls, strict=True)):
            attachment.rule_name = name
            attachment._top_k, attachment._experts = calls[0].index.shape[1], calls[0].scores.shape[1]
            return
    if chosen:
        raise _refuse(family, f"{', '.join(chosen)} give its chosen experts but not their weights")
    raise _refuse(family, f"none of {', '.join(SCORE_RULES)} gives its chosen experts")
