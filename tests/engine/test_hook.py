"""Attach: every score rule, the stock model untouched, a clean detach, and refusals that leave nothing behind."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.errors import UserError
from engine.hook import IMPLEMENTATION, SCORE_RULES, attach, stock_handler

IMPLEMENTATIONS = ["batched_mm", "eager", "grouped_mm"]


def record(attachment):
    """A handler that lets the stock experts run, and the list of calls it sees."""
    calls = []

    def handler(call):
        calls.append(call)
        return stock_handler(call)

    attachment.handler = handler
    return calls


def untouched(model):
    """Nothing of ours is left on the model."""
    return (
        not any("_expertmiss" in module.__dict__ for module in model.modules())
        and not any(module._forward_hooks for module in model.modules())
        and model.config._experts_implementation != IMPLEMENTATION
    )


# ---- accepted ---------------------------------------------------------------------------------------------------
def test_law_the_stock_handler_is_the_stock_model(family, tiny_moe, random_ids, score_rule):
    model, ids = tiny_moe(family), random_ids(40, seed=1)
    implementation = model.config._experts_implementation
    stock = model(ids).logits
    with attach(model) as attachment:
        assert attachment.rule_name == score_rule(family)
        assert (attachment.experts, attachment.top_k, len(attachment.layers)) == (16, 4, 2)
        assert torch.equal(model(ids).logits, stock)
    assert untouched(model)
    assert model.config._experts_implementation == implementation
    assert torch.equal(model(ids).logits, stock)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen3_moe"])
def test_law_every_stock_implementation_may_lie_underneath(implementation, family, tiny_moe, random_ids):
    model, ids = tiny_moe(family), random_ids(24, seed=2, rows=2)
    model.set_experts_implementation(implementation)
    stock = model(ids).logits
    with attach(model) as attachment:
        calls = record(attachment)
        assert torch.equal(model(ids).logits, stock)
        assert [call.layer for call in calls] == [0, 1]
    assert model.config._experts_implementation == implementation
    assert torch.equal(model(ids).logits, stock)


def test_law_a_call_carries_what_the_model_chose(family, tiny_moe, random_ids):
    """Chosen are the K best selection scores, which for DeepSeek's rule are not the K best logits."""
    model, ids = tiny_moe(family), random_ids(64, seed=3)
    with attach(model) as attachment:
        calls = record(attachment)
        model(ids)
        grouped = attachment.sigmoid
        assert all((layer._expertmiss.input, layer._expertmiss.output) == (None, None) for layer in attachment.layers)
    for call in calls:
        assert torch.equal(call.router_input, call.hidden)  # in these families; others norm one of them
        assert call.scores.shape == call.logits.shape == (64, 16)
        assert call.index.shape == call.weights.shape == (64, 4)
        chosen = call.index.sort(dim=-1).values
        assert torch.equal(chosen, call.scores.topk(4, dim=-1).indices.sort(dim=-1).values)
        first = call.scores.gather(1, call.index).argmax(dim=-1)
        assert torch.equal(call.index.gather(1, first[:, None])[:, 0], call.scores.argmax(dim=-1))
        by_logits = call.logits.topk(4, dim=-1).indices.sort(dim=-1).values
        assert torch.equal(chosen, by_logits) != grouped
        assert (torch.isinf(call.scores).sum(dim=-1) == (8 if grouped else 0)).all()  # two of four groups are out
    if grouped:  # the bias decides some first choices, and the weights know nothing of it
        moved = [call.scores.argmax(dim=-1) != call.logits.argmax(dim=-1) for call in calls]
        assert torch.cat(moved).any()


def test_law_sigmoid_weights_follow_the_logits_and_not_the_bias(tiny_moe, random_ids):
    model = tiny_moe("deepseek_v3")
    for layer in model.model.layers:
        assert layer.mlp.gate.e_score_correction_bias.abs().min() > 0
    with attach(model) as attachment:
        calls = record(attachment)
        model(random_ids(64, seed=4))
    for call in calls:
        weights = call.weights / call.weights.sum(dim=-1, keepdim=True)
        own = call.logits.gather(1, call.index).sigmoid()
        torch.testing.assert_close(weights, own / own.sum(dim=-1, keepdim=True))


def test_an_unsorted_choice_is_really_unsorted_here(tiny_moe, random_ids):
    """Else the tests of ranks over sigmoid families would say nothing."""
    model = tiny_moe("deepseek_v3")
    with attach(model) as attachment:
        calls = record(attachment)
        model(random_ids(64, seed=5))
    first = calls[0].scores.gather(1, calls[0].index).argmax(dim=-1)
    assert (first != 0).any()


def test_half_precision_is_recognised(family, tiny_moe, score_rule):
    with attach(tiny_moe(family).to(torch.bfloat16)) as attachment:
        assert attachment.rule_name == score_rule(family)


def test_a_layer_without_experts_is_no_layer(tiny_moe, random_ids):
    model = tiny_moe("deepseek_v3", first_k_dense_replace=1)
    with attach(model) as attachment:
        calls = record(attachment)
        model(random_ids(8, seed=6))
    assert [call.layer for call in calls] == [0]


def test_recorded_probabilities_are_understood(tiny_moe, random_ids):
    """A family whose recorded `router_logits` are softmax probabilities: another score rule, the same choice."""
    model, ids = tiny_moe("olmoe"), random_ids(32, seed=7)
    router = type(model.model.layers[0].mlp.gate)

    class Recording(router):
        def forward(self, hidden_states):
            logits, weights, index = super().forward(hidden_states)
            return logits.softmax(dim=-1), weights, index

    for layer in model.model.layers:
        layer.mlp.gate.__class__ = Recording
    stock = model(ids).logits
    with attach(model) as attachment:
        assert attachment.rule_name == "probabilities"
        calls = record(attachment)
        assert torch.equal(model(ids).logits, stock)
    for call in calls:
        own = call.logits.softmax(dim=-1).gather(1, call.index)
        torch.testing.assert_close(own, call.weights)


def best_group(scores):
    """Outside the better half of four groups, each as good as its best: nothing."""
    by_group = scores.view(len(scores), 4, 4)
    worse = by_group.max(-1).values.topk(2, largest=False).indices
    return by_group.scatter(1, worse[..., None].expand(-1, -1, 4), 0.0).reshape(scores.shape)


BIAS = torch.linspace(-0.3, 0.3, 16)[torch.randperm(16, generator=torch.Generator().manual_seed(30))]
# how a router may choose, over logits: score rule, what it ranks by, its weights, what it records
CHOOSERS = {
    "a bias on the logits": ("sigmoid_biased_logits", lambda x: x + BIAS, torch.sigmoid, lambda x: x),
    "a bias on the probabilities": ("softmax", lambda x: x.softmax(-1) + BIAS, lambda x: x.softmax(-1), lambda x: x),
    "a bias on the sigmoids": ("sigmoid", lambda x: x.sigmoid() + BIAS, torch.sigmoid, lambda x: x),
    "groups by their best": (
        "softmax_groups",
        lambda x: best_group(x.softmax(-1)),
        lambda x: x.softmax(-1),
        lambda x: x,
    ),
    "scaled experts": ("probabilities", lambda x: x, lambda x: x.softmax(-1) * (1 + BIAS), lambda x: x.softmax(-1)),
}


@pytest.mark.parametrize("where", ["handed", "inside"])
@pytest.mark.parametrize("name", CHOOSERS)
def test_agreement_every_way_to_choose_is_recognised(name, where, tiny_moe, random_ids):
    """A bias may lie in a module of the router, or be handed to it with each call."""
    rule, rank, weigh, recorded = CHOOSERS[name]
    model, ids, seen = tiny_moe("qwen3_moe"), random_ids(32, seed=12), []
    router = type(model.model.layers[0].mlp.gate)

    class Choosing(router):
        def forward(self, hidden, *handed):
            logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), self.weight)
            seen.append(rank(logits))
            index = rank(logits).topk(4, dim=-1, sorted=False).indices
            return recorded(logits), weigh(logits).gather(1, index), index

    for layer in model.model.layers:
        gate = layer.mlp.gate
        gate.__class__ = Choosing
        gate.num_group, gate.topk_group = (4, 2) if rule == "softmax_groups" else (1, 1)
        gate.per_expert_scale = 1 + BIAS
        if "bias" in name and where == "handed":
            gate.register_forward_pre_hook(lambda _gate, args: (*args, BIAS))
        elif "bias" in name:
            gate.statics = torch.nn.Module()
            gate.statics.e_score_correction_bias = torch.nn.Parameter(BIAS[None], requires_grad=False)
    with attach(model) as attachment:
        assert attachment.rule_name == rule and attachment.plain == (name == "scaled experts")
        calls = record(attachment)
        seen.clear()
        model(ids)
        for layer, (call, wanted) in enumerate(zip(calls, seen, strict=True)):
            assert torch.equal(call.scores.argmax(-1), wanted.argmax(-1))
            if rule != "probabilities":
                assert torch.equal(attachment.selection(layer, call.logits), call.scores)
            weights = call.weights / call.weights.sum(-1, keepdim=True)
            own = (call.logits.sigmoid() if attachment.sigmoid else call.logits.softmax(-1)).gather(1, call.index)
            torch.testing.assert_close(weights, own / own.sum(-1, keepdim=True))


def test_two_models_attached_at_once_do_not_mix(tiny_moe, random_ids):
    one, two, ids = tiny_moe("qwen3_moe"), tiny_moe("mixtral"), random_ids(12, seed=8)
    stock = one(ids).logits, two(ids).logits
    with attach(one) as first, attach(two) as second:
        calls_one, calls_two = record(first), record(second)
        assert torch.equal(one(ids).logits, stock[0]) and torch.equal(two(ids).logits, stock[1])
        assert len(calls_one) == len(calls_two) == 2
        second.detach()
        assert torch.equal(one(ids).logits, stock[0]) and torch.equal(two(ids).logits, stock[1])
        assert (len(calls_one), len(calls_two)) == (4, 2)
        second.detach()  # a second time does no harm


def test_detach_after_an_error_in_the_handler(tiny_moe, random_ids):
    model, ids = tiny_moe("qwen3_moe"), random_ids(12, seed=9)
    stock = model(ids).logits

    def broken(call):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), attach(model) as attachment:
        attachment.handler = broken
        model(ids)
    assert untouched(model)
    assert torch.equal(model(ids).logits, stock)


def test_attach_keeps_parameters_and_modes(tiny_moe):
    model = tiny_moe("qwen3_moe").train()
    before = copy.deepcopy(model.state_dict())
    with attach(model):
        assert model.training
        assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# ---- refused ----------------------------------------------------------------------------------------------------
def tamper(model, forward, layers=(0, 1)):
    """Routers of some layers get another forward: forward(logits, weights, index) -> the same three."""
    router = type(model.model.layers[0].mlp.gate)

    class Tampered(router):
        def forward(self, hidden_states):
            return forward(*super().forward(hidden_states))

    for layer in layers:
        model.model.layers[layer].mlp.gate.__class__ = Tampered
    return model


TAMPERED = {
    "weights_squared": lambda logits, weights, index: (logits, weights**2, index),
    "weights_equal": lambda logits, weights, index: (logits, torch.full_like(weights, 0.25), index),
    "weights_shuffled": lambda logits, weights, index: (logits, weights.flip(-1), index),
    "choice_shifted": lambda logits, weights, index: (logits, weights, (index + 1) % 16),
    "choice_repeated": lambda logits, weights, index: (logits, weights, index[:, :1].expand(-1, 4)),
    "logits_scaled": lambda logits, weights, index: (logits * 1.5, weights, index),
    "logits_not_finite": lambda logits, weights, index: (logits * torch.nan, weights, index),
}


@pytest.mark.parametrize("layers", [(0, 1), (1,)])
@pytest.mark.parametrize("fault", TAMPERED)
def test_a_router_that_no_rule_explains_is_refused(fault, layers, tiny_moe, random_ids):
    model, ids = tamper(tiny_moe("qwen3_moe"), TAMPERED[fault], layers), random_ids(16, seed=10)
    implementation = model.config._experts_implementation
    stock = model(ids).logits
    with pytest.raises(UserError, match="'qwen3_moe' is refused"):
        attach(model)
    assert untouched(model)
    assert model.config._experts_implementation == implementation
    assert torch.equal(model(ids).logits.nan_to_num(), stock.nan_to_num())


def test_a_correction_bias_the_router_hides_is_refused(tiny_moe):
    """Chosen with a bias that no rule can read: the set does not follow from the logits."""
    model = tiny_moe("deepseek_v3")
    for layer in model.model.layers:
        hidden = layer.mlp.gate.e_score_correction_bias.clone()
        del layer.mlp.gate.e_score_correction_bias
        layer.mlp.gate.register_forward_pre_hook(
            lambda gate, _, bias=hidden: setattr(gate, "e_score_correction_bias", bias)
        )
        layer.mlp.gate.register_forward_hook(lambda gate, *_: delattr(gate, "e_score_correction_bias"))
    with pytest.raises(UserError, match="'deepseek_v3' is refused"):
        attach(model)


def test_a_dense_family_is_refused():
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    with pytest.raises(UserError, match="'llama' is refused: no experts module"):
        attach(LlamaForCausalLM(config))


def test_layers_of_different_top_k_are_refused(tiny_moe):
    model = tiny_moe("qwen3_moe")
    model.model.layers[1].mlp.gate.top_k = 3
    with pytest.raises(UserError, match="layers differ in experts or top-K"):
        attach(model)
    assert untouched(model)


def test_a_router_class_the_family_does_not_name_is_refused(tiny_moe):
    """The recorder names a class; a layer whose router is another has none beside its experts."""
    model = tiny_moe("qwen3_moe")
    gate = model.model.layers[1].mlp.gate

    class Foreign(torch.nn.Module):
        forward = type(gate).forward

    gate.__class__ = Foreign
    with pytest.raises(UserError, match=r"0 routers that record their logits beside model\.layers\.1\.mlp\.experts"):
        attach(model)
    assert untouched(model)


def test_a_model_that_cannot_run_is_left_as_it_was(tiny_moe):
    model = tiny_moe("qwen3_moe")

    def broken(*_):
        raise ZeroDivisionError

    handle = model.model.layers[1].self_attn.register_forward_pre_hook(broken)
    with pytest.raises(ZeroDivisionError):
        attach(model)
    handle.remove()
    assert untouched(model)


def test_bug_a_failed_attach_keeps_the_training_mode(tiny_moe):
    model = tiny_moe("qwen3_moe").train()
    handle = model.model.layers[1].self_attn.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        attach(model)
    handle.remove()
    assert model.training


def test_bug_attach_keeps_the_mode_of_every_module(tiny_moe):
    model = tiny_moe("qwen3_moe").train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    with attach(model):
        assert [module.training for module in model.modules()] == modes


def test_bug_attaching_twice_is_refused_and_the_first_goes_on(tiny_moe, random_ids):
    model, ids = tiny_moe("qwen3_moe"), random_ids(12, seed=11)
    stock = model(ids).logits
    with attach(model) as attachment:
        with pytest.raises(UserError, match="attached"):
            attach(model)
        calls = record(attachment)
        assert torch.equal(model(ids).logits, stock)
        assert len(calls) == 2
    assert untouched(model)


def test_the_registry_keeps_one_function_for_all(tiny_moe):
    with attach(tiny_moe("qwen3_moe")):
        first = ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION]
    with attach(tiny_moe("mixtral")):
        assert ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] is first
    assert list(SCORE_RULES) == sorted(SCORE_RULES)
