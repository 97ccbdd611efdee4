"""Laws and agreement: the engine executes what the emulator executes, out of slots that really hold it."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from engine.emulator import Emulator
from engine.errors import UserError
from engine.generate import generate
from engine.harness import decode
from engine.hook import attach
from engine.log import count
from engine.recheck import Recheck
from engine.slots import Slots
from tests.engine.engine_cases import POLICIES, Both, check_slots_hold_their_experts, text

NAMES = [name for name, policy in POLICIES.items() if not policy.clairvoyant and not policy.prefetch]


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture
def both(tiny_moe):
    made = Both(tiny_moe)
    yield made
    if hasattr(made, "link"):
        made.link.close()


def emulated(model, policy: str, slots: int, ids: list[int]):
    """Losses and log of the same tokens, in one wide pass."""
    with attach(model) as attachment:
        emulator = Emulator(attachment, POLICIES[policy], slots=slots)
        with emulator.phase("decode"):
            logits = model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0]
        return -logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]].numpy(), emulator.log()


@pytest.mark.parametrize("slots", [4, 6, 16])
@pytest.mark.parametrize("policy", NAMES)
def test_the_engine_decides_and_computes_as_the_emulator(both, policy, slots):
    """Agreement (a) and (b): next_step, one random text; bit-equal decisions, losses up to rounding."""
    engine = both.engine(policy, slots)
    ids = text()
    timed = decode(both.model, engine, [ids])
    losses, wanted = emulated(both.whole, policy, slots, ids)
    found = engine.log()
    for name in ("executed", "kind", "first"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), name)
    np.testing.assert_allclose(found.weights, wanted.weights, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found.moves[np.lexsort(found.moves.T)], wanted.moves[np.lexsort(wanted.moves.T)])
    np.testing.assert_allclose(timed.losses, losses, rtol=1e-4, atol=1e-4)


def test_slots_hold_what_the_decision_says(both):
    engine = both.engine("quality_first", 6)
    decode(both.model, engine, [text()])
    engine.restart()
    decode(both.model, engine, [text(seed=2)])
    check_slots_hold_their_experts(both, engine)


@pytest.mark.parametrize("slots", [4, 7, 15])
def test_prefill_is_exact_and_leaves_the_scans_residents(both, slots):
    """Two prompts after one another: in the second some are here, some move to another slot, some come and go."""
    engine, prompts = both.engine("speed_first", slots), [text(9, seed=8), text(30)]
    for prompt in prompts:
        both.store.reads.clear()
        here = engine.slots.held[engine.slots.row_of_slot]  # [L, S]
        with engine.phase("prefill"):
            found = both.model(input_ids=torch.tensor([prompt])).logits
        wanted = both.whole(input_ids=torch.tensor([prompt])).logits
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        for layer in range(both.store.layers):  # each at most once a layer call, and none that is here
            read = [expert for where, expert in both.store.reads if where == layer]
            assert len(read) == len(set(read)) and not set(read) & set(here[layer])
    with attach(both.whole) as attachment:
        emulator = Emulator(attachment, POLICIES["speed_first"], slots=slots)
        for prompt in prompts:
            with emulator.phase("prefill"):
                both.whole(input_ids=torch.tensor([prompt]))
    np.testing.assert_array_equal(engine.residency.state.slots["expert"], emulator.residency.state.slots["expert"])
    check_slots_hold_their_experts(both, engine)


@pytest.mark.parametrize("completion", ["next_step", "real"])
def test_a_load_issued_and_completed_within_a_prefill_is_read(both, completion):
    """What decoding left waiting may be queued by a prefill's scan, and be due before the scan ends."""
    engine = both.engine("speed_first", 5, completion, beta=0.05)
    both.slow_background(0.005)
    for turn in range(40):
        decode(both.model, engine, [text(9, seed=20 + turn)])
        with engine.phase("prefill"):
            both.model(input_ids=torch.tensor([text(2 + turn % 2, seed=40 + turn)]))
        check_slots_hold_their_experts(both, engine)


@pytest.mark.parametrize("completion", ["next_step", "real"])
@pytest.mark.parametrize("policy", NAMES)
def test_generation_after_a_prompt_goes_on_from_its_slots(both, policy, completion):
    engine = both.engine(policy, 6, completion)
    tokens = list(generate(both.model, engine, text(20), max_new_tokens=20))
    check_slots_hold_their_experts(both, engine)
    if POLICIES[policy].lossless:
        whole = both.whole
        ids = text(20)
        for token in tokens:
            assert token == int(whole(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)


@pytest.mark.parametrize("completion", ["next_step", "real"])
@pytest.mark.parametrize("policy", NAMES)
def test_a_timed_runs_log_is_decided_again_without_a_difference(both, policy, completion):
    """Whole logs re-scored: losses of the forced log are the run's own, and no event would be decided otherwise."""
    engine = both.engine(policy, 6, completion)
    ids = text()
    timed = decode(both.model, engine, [ids])
    with attach(both.whole) as attachment:
        recheck = Recheck(attachment, engine.log(), POLICIES[policy], slots=6, demand=None)
        with recheck.phase("decode"):
            logits = both.whole(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0]
    assert recheck.finished and recheck.differences() == 0
    losses = -logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]].numpy()
    np.testing.assert_allclose(timed.losses, losses, rtol=1e-4, atol=1e-4)


def test_recheck_sees_a_forged_log(both):
    engine = both.engine("rule_015", 6)
    ids = text()
    decode(both.model, engine, [ids])
    log = engine.log()
    log.kind[17, 1, 2] ^= 1
    with attach(both.whole) as attachment:
        recheck = Recheck(attachment, log, POLICIES["rule_015"], slots=6, demand=None)
        with recheck.phase("decode"):
            both.whole(input_ids=torch.tensor([ids[:-1]]), use_cache=False)
    assert recheck.differences() >= 1


# ---- faults ----------------------------------------------------------------------------------------------------------
def test_a_failed_read_stops_the_engine_until_it_is_restarted(both):
    engine = both.engine("fetch_lfu_decay", 4)
    both.store.broken = {(1, expert) for expert in range(16)}
    with pytest.raises(UserError, match="layer 1, expert"):
        decode(both.model, engine, [text()])
    both.store.broken = set()
    with pytest.raises(UserError, match="restart"):
        decode(both.model, engine, [text()])
    engine.restart()
    ids = text()
    timed = decode(both.model, engine, [ids])
    np.testing.assert_allclose(timed.losses, emulated(both.whole, "fetch_lfu_decay", 4, ids)[0], rtol=1e-4, atol=1e-4)
    check_slots_hold_their_experts(both, engine)


@pytest.mark.parametrize("completion", ["next_step", "real"])
def test_a_failed_background_load_is_reported_and_no_slot_claims_it(both, completion):
    engine = both.engine("speed_first", 6, completion)
    read = both.store.read
    tried = []

    def once_broken(layer, expert, target):
        """Every background load fails; the same expert can then be fetched."""
        if "background" in threading.current_thread().name:
            tried.append((layer, expert))
            raise OSError(5, "Input/output error")
        return read(layer, expert, target)

    def issue_and_begin(place):
        """A load that has not begun would be fetched in the foreground instead."""
        transfer = issue(place)
        while transfer.state == "queued":
            time.sleep(1e-4)
        return transfer

    issue, both.link.issue = both.link.issue, issue_and_begin
    both.store.read = once_broken
    decode(both.model, engine, [text(60)])
    engine.restart()  # all transfers have ended
    assert tried and engine.failures and "Input/output error" in engine.failures[0]
    assert not both.link.journal()["bytes"][~both.link.journal()["foreground"]].any()
    decode(both.model, engine, [text(60, seed=5)])
    check_slots_hold_their_experts(both, engine)


def test_all_experts_in_memory_failed_for_want_of_a_staging_buffer(both):
    """Who fills every slot at once, to score a log, needs no room to stage."""
    slots = Slots(both.store.layout, layers=2, slots=both.experts, staging=0)
    assert slots.bytes == 2 * both.experts * both.store.layout.record_bytes


def test_a_load_that_is_due_is_waited_for(both):
    """next_step: a background read that is slow holds the next event of its layer up, and nothing wrong is computed."""
    engine = both.engine("speed_first", 6)
    both.slow_background(0.02)
    ids = text()
    timed = decode(both.model, engine, [ids])
    losses, wanted = emulated(both.whole, "speed_first", 6, ids)
    assert count(wanted)["background_arrived"] > 0
    np.testing.assert_allclose(timed.losses, losses, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("slots", [0, 1, 3, 17])
def test_slots_that_cannot_be_are_refused(both, slots):
    with pytest.raises(UserError, match=f"{slots} slots a layer"):
        both.engine("rule_015", slots)


def test_a_policy_that_computes_in_place_is_refused_by_name(both):
    with pytest.raises(UserError, match=r"policy 'first_choice' \(eviction frozen\) in the engine; expected"):
        both.engine("first_choice", 6, eviction="frozen", half_life_tokens=None)


def test_belady_is_refused_by_name(both):
    with pytest.raises(UserError, match="belady"):
        both.engine("fetch_belady", 6)


def test_several_tokens_in_one_decode_step_are_refused(both):
    engine = both.engine("rule_015", 6)
    with pytest.raises(UserError, match="3 tokens in one decode step"), engine.phase("decode"):
        both.model(input_ids=torch.tensor([[1, 2, 3]]))
