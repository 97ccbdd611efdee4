"""The baseline's continuation forced upon every policy: as if each read the prompt, and exact where none is missed."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from adapter_cases import LOSSY, POLICIES, SLOTS, WARM, adapter, ask, generation, settings

from engine.emulator import Emulator
from engine.errors import UserError
from engine.generate import forced
from engine.hook import attach
from engine.log import count
from engine.residency import Demand
from evals import agreement as of_agreement
from evals.agreement import NOTHING, agreement, agreements, continuation, read_prompt
from evals.generation import KeepingLM

EXPERTS, NEW_TOKENS = 16, 24


@pytest.fixture(scope="module")
def setting(tiny_moe):
    return settings(tiny_moe)


@pytest.fixture
def attached(tiny_moe, family):
    """A model of every family, with a prompt and what it says to it."""
    model = tiny_moe(family)
    with attach(model) as attachment:
        ids = torch.randint(0, 128, (11,), generator=torch.Generator().manual_seed(3)).tolist()
        yield model, attachment, ids, continuation(model, attachment, ids, NEW_TOKENS)


def emulator(attachment, policy="substitute_all", slots=SLOTS) -> Emulator:
    return Emulator(attachment, POLICIES[policy], slots=slots, demand=WARM)


# ---- against the plain way -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["substitute_all", "quality_first", "speed_first"])
def test_agreement_with_a_prompt_read_anew_and_the_continuation_forced_after_it(policy, attached):
    """Reading a prompt once for all policies changes nothing: engine.generate.forced reads it for one."""
    model, attachment, ids, said = attached
    prompt = read_prompt(model, attachment, ids)
    for _ in range(2):  # the prompt is not used up
        found = agreement(model, emulator(attachment, policy), prompt, said)
    plain = emulator(attachment, policy)
    logits, tokens = zip(*forced(model, plain, ids, said), strict=True)
    same = (torch.cat(logits).argmax(-1) == torch.cat(tokens))[1:]
    assert found["positions"] == len(said) - 1 and found["agreed"] == int(same.sum())
    assert found["common_prefix"] == (len(same) if same.all() else int(same.int().argmin()))
    counts = count(plain.log())
    assert {name: found[name] for name in NOTHING} == {name: counts[name] for name in NOTHING}
    assert found["substitutions"] > 0


def test_law_a_followed_prompt_leaves_the_residents_that_a_read_one_leaves(attached):
    model, attachment, ids, _ = attached
    read, followed = emulator(attachment, "quality_first"), emulator(attachment, "quality_first")
    followed.follow(read_prompt(model, attachment, ids).routing)
    attachment.handler = read._experts
    with torch.inference_mode(), read.phase("prefill"):
        model(torch.tensor([ids]))
    for one, other in zip(read.residency.state, followed.residency.state, strict=True):
        assert one.tobytes() == other.tobytes()
    assert read.residency.state.rows["step"].min() == len(ids)


def test_agreement_of_the_continuation_with_what_the_baseline_writes(setting):
    """It is what lm-eval gets from it, and goes on where a stop string cuts that."""
    s = setting()
    lm = KeepingLM(s.model, adapter(s, "fetch_lfu_decay").handler, s.tokenizer, max_length=64)
    for until in (["\n"], [" "]):
        lm.said = []
        ask(lm, "generate_until", generation(["the river ran"], until=until))
        (said,) = lm.said
        whole = continuation(s.model, s.attachment, said.prompt, 12)
        assert tuple(whole[: len(said.tokens)]) == said.tokens
    assert len(whole) == 12 or whole[-1] == s.tokenizer.eos_token_id


def test_a_continuation_ends_with_the_end_of_text_token(setting):
    s, ids = setting(), [5, 6, 7]
    whole = continuation(s.model, s.attachment, ids, NEW_TOKENS)
    own = s.model.generation_config
    kept, own.eos_token_id = own.eos_token_id, [whole[4], 10**6]
    try:
        assert continuation(s.model, s.attachment, ids, NEW_TOKENS) == whole[: whole.index(whole[4]) + 1]
    finally:
        own.eos_token_id = kept


# ---- laws ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_law_with_all_experts_resident_every_policy_agrees_everywhere(policy, setting):
    s = setting()
    policies = [POLICIES[policy]]
    rows = list(rows_of(s, policies, slots=EXPERTS))
    assert [row["status"] for row in rows] == ["ok"] * len(PROMPTS)
    for row in rows:
        assert row["positions"] == row["agreed"] == row["common_prefix"] == NEW_TOKENS - 1
        assert row["substitutions"] == row["substituted_mass"] == row["first_choices_changed"] == 0


@pytest.mark.parametrize("policy", LOSSY)
def test_law_positions_are_all_but_the_first_token_and_each_is_an_event_a_layer(policy, setting):
    s = setting()
    for row in rows_of(s, [POLICIES[policy]]):
        assert 0 <= row["common_prefix"] <= row["agreed"] <= row["positions"] == NEW_TOKENS - 1
        assert row["events"] == len(s.attachment.layers) * row["positions"]
        assert row["substitutions"] > 0 and 0 < row["substituted_mass"] < 1
        if policy in ("first_choice", "quality_first", "rule_015", "speed_first"):
            assert row["first_choices_changed"] == 0


def test_law_a_lossless_policy_agrees_everywhere_and_substituting_all_does_not(setting):
    rows = list(rows_of(setting(), [POLICIES["fetch_lru"], POLICIES["substitute_all"]]))
    agreed = {name: sum(r["agreed"] for r in rows if r["policy"] == name) for name in ("fetch_lru", "substitute_all")}
    assert agreed["substitute_all"] < agreed["fetch_lru"] == (NEW_TOKENS - 1) * len(PROMPTS)


def test_law_every_problem_begins_from_the_warm_start(setting):
    """Order and company change nothing."""
    s = setting()
    both = {(row["problem"], row["policy"]): row for row in rows_of(s, [POLICIES[name] for name in LOSSY])}
    for name in reversed(LOSSY):
        for row in rows_of(s, [POLICIES[name]], dict(reversed(PROMPTS.items()))):
            assert row == both[row["problem"], name]


PROMPTS = {"a": [5, 6, 7, 8], "b": list(range(20, 40)), "c": [1]}


def rows_of(s, policies, prompts=None, slots=SLOTS, demand=WARM, new_tokens=NEW_TOKENS):
    options = {"new_tokens": new_tokens, "slots": slots, "demand": demand, "delay": 1}
    return agreements(s.model, s.attachment, policies, prompts or PROMPTS, **options)


# ---- what fails ------------------------------------------------------------------------------------------------------
def test_a_policy_that_fails_is_a_reason_in_its_rows_and_the_others_go_on(setting):
    s = setting()
    clairvoyant = replace(POLICIES["fetch_lru"], id="fetch_belady", eviction="belady")
    rows = list(rows_of(s, [clairvoyant, POLICIES["rule_015"]]))
    assert [row["status"] for row in rows] == ["failed", "ok"] * len(PROMPTS)
    assert rows[0]["reason"].startswith("UserError: policy 'fetch_belady'") and "positions" not in rows[0]
    other = Demand(np.ones((3, EXPERTS), np.int64), 1)
    assert {row["status"] for row in rows_of(s, [POLICIES["rule_015"]], demand=other)} == {"failed"}


def test_a_prompt_that_cannot_be_read_is_a_reason_in_all_its_rows(setting):
    rows = list(rows_of(setting(), [POLICIES["rule_015"]] * 2, {"a": [5], "empty": [], "b": [7]}))
    assert [row["status"] for row in rows] == ["ok"] * 2 + ["failed"] * 2 + ["ok"] * 2
    assert all("an empty prompt" in row["reason"] for row in rows[2:4])


def test_logits_that_are_not_finite_are_never_counted_as_disagreement(setting, monkeypatch):
    s = setting()
    prompt = read_prompt(s.model, s.attachment, [5, 6])
    said = continuation(s.model, s.attachment, [5, 6], 4)

    def broken(*arguments):
        for logits, tokens in forced_after(*arguments):
            yield torch.full_like(logits, torch.nan), tokens

    forced_after = of_agreement.forced_after
    monkeypatch.setattr(of_agreement, "forced_after", broken)
    with pytest.raises(UserError, match="logits that are not finite"):
        agreement(s.model, emulator(s.attachment), prompt, said)


def test_golden_a_continuation_of_one_token_has_no_position(setting):
    s = setting()
    prompt = read_prompt(s.model, s.attachment, [5, 6])
    before = copy.deepcopy(prompt.routing)
    found = agreement(s.model, emulator(s.attachment), prompt, [9])
    assert found == {"positions": 0, "agreed": 0, "common_prefix": 0, **NOTHING}
    assert (prompt.routing.chosen == before.chosen).all()
