"""The engine over checkpoints on disk, family by family and layout by layout: the table of what is promised of each.

A row is a family in a layout that its files can have, on disk and opened as a user would (engine.offload_model):

    attach passes                                   the score rule is the family's
    S = E is the stock model                        prefill and two decode steps with the model's cache; K hits an event
    a lossy policy acts                             in the engine as in the emulator: substitutions, another output
    the first choice is the true one                by the family's own selection score, worked out here
    shared experts are computed and never counted

Laws, but for the first choice, which is agreement with scores that no code of the engine makes.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoint_cases import reference, save, tensors_of

from engine.decision import SUBSTITUTE
from engine.emulator import Emulator
from engine.harness import decode
from engine.hook import attach
from engine.log import count
from engine.offload_model import OpenModel
from engine.residency import Demand
from tests.conftest import FAMILIES
from tests.engine.engine_cases import POLICIES, text

LAYOUTS = ("fused", "original")
ONE_LAYOUT = {"gpt_oss"}  # its files hold the experts of a layer in one tensor, and so does the model
ROWS = [(family, layout) for family in FAMILIES for layout in LAYOUTS if (family, layout) != ("gpt_oss", "original")]
SHARED = {"deepseek_v3", "glm4_moe", "qwen3_next"}  # families with shared experts
CAUSAL = {name: policy for name, policy in POLICIES.items() if not policy.clairvoyant and not policy.prefetch}
LOSSY = [name for name, policy in CAUSAL.items() if not policy.lossless]
E, K, L = 16, 4, 2
WARM = Demand(np.ones((L, E), np.int64), 1)


@pytest.fixture(scope="module", params=ROWS, ids="-".join)
def row(request, tiny_moe, tmp_path_factory):
    """family, stock (from_pretrained of the folder) and the folder opened; engine(policy, slots) makes one."""
    family, layout = request.param
    folder = save(tiny_moe(family), tmp_path_factory.mktemp(family), layout)
    with OpenModel(folder, torch.float32) as opened, torch.inference_mode():

        def engine(policy, slots=E):
            made = opened.engine(slots=slots, demand=WARM)
            made.use(CAUSAL[policy])
            return made

        yield SimpleNamespace(
            family=family, opened=opened, engine=engine, model=opened.model, stock=reference(folder, torch.float32)
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_two_layouts_of_a_family_are_two(family, tiny_moe):
    model = tiny_moe(family)
    fused, original = (set(tensors_of(model, layout)) for layout in LAYOUTS)
    assert (fused != original) == (family not in ONE_LAYOUT)


def test_attach_knows_the_family(row, score_rule):
    attachment = row.opened.attachment
    assert attachment.rule_name == score_rule(row.family)
    assert (attachment.experts, attachment.top_k, len(attachment.layers)) == (E, K, L)


# ---- S = E is the stock model ----------------------------------------------------------------------------------------
def steps(model, prompt, tokens, engine=None):
    """Logits [1, T, V] of a prompt and of the tokens after it, one by one; in an engine's phases if there is one."""
    found, cache = [], None
    for ids, phase in ((prompt, "prefill"), *(([token], "decode") for token in tokens)):
        with engine.phase(phase) if engine else nullcontext():
            output = model(input_ids=torch.tensor([ids]), cache=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    return torch.cat(found, 1)


@pytest.fixture(scope="module")
def stock_steps(row):
    """Prompt, tokens, and what stock says step by step.

    It is what stock says of the whole text, and not of the last token alone: its cache is in use, recurrent state too.
    """
    prompt, tokens = text(12), text(2, seed=3)
    logits = steps(row.stock, prompt, tokens)
    torch.testing.assert_close(logits, row.stock(torch.tensor([prompt + tokens])).logits, rtol=1e-3, atol=1e-3)
    assert (logits[0, -1] - row.stock(torch.tensor([tokens[-1:]])).logits[0, -1]).abs().max() > 0.1
    return prompt, tokens, logits


@pytest.mark.parametrize("policy", CAUSAL)
def test_law_all_experts_resident_is_the_stock_model(row, stock_steps, policy):
    prompt, tokens, wanted = stock_steps
    engine = row.engine(policy)
    torch.testing.assert_close(steps(row.model, prompt, tokens, engine), wanted, rtol=1e-4, atol=1e-4)
    counts = count(engine.log())
    assert counts["hits"] == counts["demands"] == K * len(tokens) * L
    assert counts["loads"] == 0


# ---- S < E -----------------------------------------------------------------------------------------------------------
def losses_of(logits, ids):
    return -logits[0].log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]].numpy()


@pytest.mark.parametrize("policy", LOSSY)
def test_law_a_lossy_policy_acts(row, policy):
    """In both instruments alike, and what it does shows."""
    ids, engine = text(), row.engine(policy, slots=6)
    timed, log = decode(row.model, engine, [ids]), engine.log()
    wide = torch.tensor([ids[:-1]])
    stock = losses_of(row.stock(wide).logits, ids)
    with attach(row.stock) as attachment:
        emulator = Emulator(attachment, CAUSAL[policy], slots=6, demand=WARM)
        with emulator.phase("decode"):
            emulated = losses_of(row.stock(wide).logits, ids)
    for found, losses in ((log, timed.losses), (emulator.log(), emulated)):
        counts = count(found)
        assert counts["substitutions"] + counts["drops"] > 0
        assert counts["substituted_mass"] + counts["dropped_mass"] > 0
        assert np.isfinite(losses).all() and np.abs(losses - stock).max() > 1e-2
    np.testing.assert_array_equal(log.executed, emulator.log().executed)
    np.testing.assert_allclose(timed.losses, emulated, rtol=1e-4, atol=1e-4)


# ---- the first choice ------------------------------------------------------------------------------------------------
def routers_of(model):
    return [module for name, module in model.named_modules() if name.endswith((".gate", ".router"))]


def own_scores(router, hidden, config):
    """[T, E] by the definition of each kind of router, one token at a time; those outside the best groups are out."""
    logits = hidden.reshape(-1, hidden.shape[-1]).float() @ router.weight.float().T
    bias = getattr(router, "bias", None)
    logits = logits if bias is None else logits + bias
    if not hasattr(router, "e_score_correction_bias"):
        return logits.numpy()
    assert router.e_score_correction_bias.abs().min() > 0 and config.n_group > 1
    scores = (1 / (1 + (-logits).exp()) + router.e_score_correction_bias).numpy()
    size = E // config.n_group
    for token in scores:
        groups = [np.sort(token[g * size : (g + 1) * size])[-2:].sum() for g in range(config.n_group)]
        for g in np.argsort(groups)[: config.n_group - config.topk_group]:
            token[g * size : (g + 1) * size] = -np.inf
    return scores


def test_agreement_the_first_choice_is_the_best_by_the_family_s_own_score(row):
    ids, seen = text(), []
    hooks = [m.register_forward_hook(lambda m, args, _: seen.append((m, args[0]))) for m in routers_of(row.stock)]
    row.stock(input_ids=torch.tensor([ids[:-1]]))
    for hook in hooks:
        hook.remove()
    scores = np.stack([own_scores(router, hidden, row.stock.config) for router, hidden in seen], axis=1)  # [T, L, E]
    engine = row.engine("first_choice")
    decode(row.model, engine, [ids])
    log = engine.log()
    first = np.take_along_axis(log.executed, log.first[..., None].astype(np.int64), -1)[..., 0]  # [T, L]
    np.testing.assert_array_equal(first, scores.argmax(-1))
    engine = row.engine("first_choice", slots=6)
    decode(row.model, engine, [ids])
    log = engine.log()
    ranked = np.take_along_axis(log.kind, log.first[..., None].astype(np.int64), -1)
    assert (log.kind == SUBSTITUTE).any() and not (ranked == SUBSTITUTE).any()
    first = np.take_along_axis(log.executed, log.first[..., None].astype(np.int64), -1)[..., 0]
    np.testing.assert_array_equal(first[:, 0], scores[:, 0].argmax(-1))  # what is lost shows behind the first layer


# ---- shared experts --------------------------------------------------------------------------------------------------
def test_law_shared_experts_are_computed_and_never_counted(row):
    """On every token, as from_pretrained has them; events are of routed experts alone."""
    shared = {n: m for n, m in row.model.named_modules() if n.endswith(("shared_expert", "shared_experts"))}
    assert len(shared) == (L if row.family in SHARED else 0)
    ids, seen = text(9), []
    engine = row.engine("substitute_all", slots=K)
    hooks = [m.register_forward_hook(lambda m, args, out: seen.append((m, args[0], out))) for m in shared.values()]
    decode(row.model, engine, [ids])
    for hook in hooks:
        hook.remove()
    stock = dict(zip(shared.values(), (row.stock.get_submodule(name) for name in shared), strict=True))
    assert len(seen) == len(shared) * (len(ids) - 1)
    for module, hidden, out in seen:
        assert out.abs().max() > 0
        torch.testing.assert_close(out, stock[module](hidden))
    log = engine.log()
    assert log.executed.shape == (len(ids) - 1, L, K) and (log.executed < E).all()
    counts = count(log)
    names = ("hits", "fetches", "substitutions")
    assert counts["events"] * K == counts["demands"] == sum(counts[name] for name in names)
