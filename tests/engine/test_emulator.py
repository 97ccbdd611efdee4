"""The emulator over whole models: laws at S = E, the experts really computed, wide against step by step, phases, lanes.

Small seeded models in float32, where one wide pass and cached decoding agree to rounding; that no decision hangs on
rounding is asserted, not hoped for.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from policy_cases import CAUSAL, LOSSY, POLICIES

from engine.decision import HIT, SUBSTITUTE
from engine.emulator import Emulator, Replayer
from engine.errors import UserError
from engine.hook import attach
from engine.log import count
from engine.residency import Residency
from engine.trace import Recorder, replay

SLOTS = 6  # of 16 experts, top-4
TOKENS = 48
LOG_ARRAYS = ("executed", "weights", "kind", "first", "g")
DENSE = ["deepseek_v3", "glm4_moe", "granitemoe", "mixtral", "olmoe", "qwen3_moe", "qwen3_next"]  # halves [gate; up]
# threshold, stand-ins, background and a decayed counter at once; half-life and beta small, so that all of it happens
BUSY = replace(POLICIES["quality_first"], half_life_tokens=16.0, beta=0.25)


def decode(emulator, model, ids, **inputs):
    with emulator.phase("decode"):
        return model(ids, **inputs).logits


def decode_by_steps(handler, model, ids):
    """One token a call through the KV cache, every call a phase of its own."""
    logits, cache = [], None
    for t in range(ids.shape[1]):
        with handler.phase("decode"):
            out = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
        logits.append(out.logits)
        cache = out.past_key_values
    return torch.cat(logits, dim=1)


def calibrate(attachment, model, ids):
    recorder = Recorder(attachment)
    model(ids)
    return recorder.trace()


def same_log(a, b):
    return all(getattr(a, name).tobytes() == getattr(b, name).tobytes() for name in (*LOG_ARRAYS, "moves"))


def watch(attachment):
    """From here on, every call and what the handler returned for it."""
    seen, inner = [], attachment.handler

    def handler(call):
        out = inner(call)
        seen.append((call, out))
        return out

    attachment.handler = handler
    return seen


# ---- all slots: the stock model ---------------------------------------------------------------------------------
def test_law_all_slots_is_the_stock_model_under_every_policy(tiny_moe, random_ids):
    model, ids = tiny_moe("qwen3_moe_raw"), random_ids(TOKENS, seed=1)
    stock = model(ids).logits
    with attach(model) as attachment:
        demand = calibrate(attachment, model, ids).demand()
        for name, policy in CAUSAL.items():
            emulator = Emulator(attachment, policy, slots=16, demand=demand)
            assert torch.equal(decode(emulator, model, ids), stock), name
            counts = count(emulator.log())
            assert counts["hits"] == counts["demands"] == TOKENS * 2 * 4, name
            assert counts["loads"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_law_all_slots_is_the_stock_model_in_every_family(family, dtype, tiny_moe, random_ids):
    model, ids = tiny_moe(family).to(dtype), random_ids(TOKENS, seed=2)
    stock = model(ids).logits
    with attach(model) as attachment:
        trace = calibrate(attachment, model, ids)
        emulator = Emulator(attachment, BUSY, slots=16, demand=trace.demand())
        assert torch.equal(decode(emulator, model, ids), stock)
        log = emulator.log()
    assert (log.kind == HIT).all()
    assert log.executed.tobytes() == trace.chosen.tobytes()
    assert log.weights.tobytes() == trace.weights.tobytes()


def test_law_a_lossless_policy_is_the_stock_model_at_any_slots(family, tiny_moe, random_ids):
    model, ids = tiny_moe(family), random_ids(TOKENS, seed=3)
    stock = model(ids).logits
    with attach(model) as attachment:
        emulator = Emulator(attachment, POLICIES["fetch_lfu_decay"], slots=4)
        assert torch.equal(decode(emulator, model, ids), stock)
        counts = count(emulator.log())
    assert 0 < counts["hits"] < counts["demands"]
    assert counts["fetches"] == counts["loads"] == counts["demands"] - counts["hits"]


def test_law_misses_computed_in_place_are_the_stock_model(family, tiny_moe, random_ids):
    model, ids = tiny_moe(family), random_ids(TOKENS, seed=3)
    stock = model(ids).logits
    with attach(model) as attachment:
        demand = calibrate(attachment, model, ids).demand()
        emulator = Emulator(attachment, POLICIES["fetch_frozen"], slots=SLOTS, demand=demand)
        assert torch.equal(decode(emulator, model, ids), stock)
        counts = count(emulator.log())
    assert 0 < counts["hits"] < counts["demands"] and counts["fetches"] == counts["loads"] == 0
    assert counts["in_place"] == counts["demands"] - counts["hits"]


def test_weights_that_want_gradients_stopped_the_emulator(tiny_moe, random_ids):
    """As from_pretrained gives them to whoever forgets torch.no_grad()."""
    model, ids = tiny_moe("qwen3_moe_raw").requires_grad_(True), random_ids(TOKENS, seed=3)
    with attach(model) as attachment:
        emulator = Emulator(attachment, POLICIES["rule_015"], slots=8)
        assert decode(emulator, model, ids).isfinite().all() and emulator.log().events


# ---- a lossy policy acts, on the experts it says ----------------------------------------------------------------
def test_law_a_lossy_policy_visibly_acts(family, tiny_moe, random_ids):
    model, ids = tiny_moe(family), random_ids(TOKENS, seed=4)
    stock = model(ids).logits
    with attach(model) as attachment:
        demand = calibrate(attachment, model, ids).demand()
        names = ("first_choice", "substitute_all", "drop_lru", "mass_budget_random_lru_background")
        for name in (*names, "few_heavy_next_best_frozen", "many_light_random_frozen"):
            emulator = Emulator(attachment, LOSSY[name], slots=SLOTS, demand=demand)
            logits = decode(emulator, model, ids)
            counts = count(emulator.log())
            assert counts["substitutions"] + counts["drops"] > 0, name
            assert counts["substituted_mass"] + counts["dropped_mass"] > 0, name
            assert (logits - stock).abs().max() > 1e-2, name
            assert logits.isfinite().all()


def dense_experts(call, executed, weights):
    """The sum over k of weight x down(silu(gate) x up) of the executed experts, one token and expert at a time."""
    experts, act = call.module, torch.nn.functional.silu
    out = torch.zeros_like(call.hidden)
    for t, hidden in enumerate(call.hidden):
        for e, weight in zip(executed[t].tolist(), weights[t].tolist(), strict=True):
            if e >= 0:
                gate, up = (experts.gate_up_proj[e] @ hidden).chunk(2)
                out[t] += weight * (experts.down_proj[e] @ (act(gate) * up))
    return out


@pytest.mark.parametrize("name", ["substitute_all", "drop_lru", "first_choice"])
@pytest.mark.parametrize("family", DENSE)
def test_the_experts_computed_are_those_of_the_log(family, name, tiny_moe, random_ids):
    model, ids = tiny_moe(family), random_ids(16, seed=5)
    with attach(model) as attachment:
        demand = calibrate(attachment, model, ids).demand()
        emulator = Emulator(attachment, LOSSY[name], slots=SLOTS, demand=demand)
        seen = watch(attachment)
        decode(emulator, model, ids)
        log = emulator.log()
        assert len(seen) == 2
        for call, out in seen:
            chosen, weights = call.index.numpy(), call.weights.numpy()
            expected = dense_experts(call, log.executed[:, call.layer], log.weights[:, call.layer])
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
            # and it could not have been what the router asked for
            assert (out - dense_experts(call, chosen, weights)).abs().max() > 1e-3


def test_log_says_which_experts_were_wanted_and_how_much(tiny_moe, random_ids):
    """g is normalised over the chosen although the router's weights are not."""
    model, ids = tiny_moe("qwen3_moe_raw"), random_ids(TOKENS, seed=6)
    with attach(model) as attachment:
        emulator = Emulator(attachment, LOSSY["substitute_all"], slots=SLOTS)
        seen = watch(attachment)
        decode(emulator, model, ids)
        log = emulator.log()
    for call, _ in seen:
        raw = call.weights.sum(dim=-1)
        assert (raw < 0.999).any()
        g = log.g[:, call.layer]
        np.testing.assert_allclose(g.sum(axis=-1), 1, rtol=1e-6)
        np.testing.assert_allclose(g * raw.numpy()[:, None], call.weights.numpy(), rtol=1e-6)
        kept = np.isin(log.kind[:, call.layer], (0, 1))
        assert (log.executed[:, call.layer][kept] == call.index.numpy()[kept]).all()


def test_thresholds_read_normalised_weights(tiny_moe, random_ids):
    """norm_topk_prob false: raw weights fall below tau long before g does."""
    model, ids = tiny_moe("qwen3_moe_raw"), random_ids(TOKENS, seed=7)
    tau = LOSSY["rule_015"].tau
    with attach(model) as attachment:
        demand = calibrate(attachment, model, ids).demand()
        emulator = Emulator(attachment, LOSSY["rule_015"], slots=SLOTS, demand=demand)
        seen = watch(attachment)
        decode(emulator, model, ids)
        log = emulator.log()
    between = 0
    for call, _ in seen:
        layer, first = call.layer, np.arange(4) == log.first[:, call.layer, None]
        substituted = log.kind[:, layer] == SUBSTITUTE
        missed = log.kind[:, layer] != HIT
        assert (substituted == (missed & ~first & (log.g[:, layer] < tau))).all()
        between += (missed & ~first & (log.g[:, layer] >= tau) & (call.weights.numpy() < tau)).sum()
    assert between > 0, "this model could not tell"


def test_law_the_order_in_which_the_router_returns_its_choice_does_not_matter(tiny_moe, random_ids):
    model, ids = tiny_moe("qwen3_moe"), random_ids(TOKENS, seed=8)
    with attach(model) as attachment:
        demand = calibrate(attachment, model, ids).demand()
        straight = Emulator(attachment, BUSY, slots=SLOTS, demand=demand)
        logits = decode(straight, model, ids)
        emulator = Emulator(attachment, BUSY, slots=SLOTS, demand=demand)
        inner, order = attachment.handler, {}

        def shuffled(call):
            p = torch.rand(call.index.shape, generator=torch.Generator().manual_seed(call.layer)).argsort(dim=-1)
            order[call.layer] = p.numpy()
            return inner(replace(call, index=call.index.gather(1, p), weights=call.weights.gather(1, p)))

        attachment.handler = shuffled
        torch.testing.assert_close(decode(emulator, model, ids), logits, rtol=1e-4, atol=1e-4)
        a, b = straight.log(), emulator.log()
    for layer, p in order.items():
        for name in ("executed", "kind"):
            sorted_of_a = np.take_along_axis(getattr(a, name)[:, layer], p, axis=1)
            assert (sorted_of_a == getattr(b, name)[:, layer]).all()
        assert (p[np.arange(TOKENS), b.first[:, layer]] == a.first[:, layer]).all()
    assert (a.moves == b.moves).all()


# ---- wide against step by step ----------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe"])
def test_agreement_of_wide_pass_and_step_by_step_decoding(family, tiny_moe, random_ids):
    """float32, a lossy policy with background: decisions equal, logits to rounding, and no near-tie to flip them."""
    model, ids = tiny_moe(family), random_ids(TOKENS, seed=9)
    with attach(model) as attachment:
        demand = calibrate(attachment, model, ids).demand()
        policy = replace(BUSY, tau=0.25) if attachment.sigmoid else BUSY  # four sigmoids are nearly equal
        runs = []
        for play in (decode, decode_by_steps):
            emulator = Emulator(attachment, policy, slots=SLOTS, demand=demand, delay=2)
            seen = watch(attachment)
            logits = play(emulator, model, ids)
            scores = [torch.cat([call.scores for call, _ in seen if call.layer == layer]) for layer in range(2)]
            runs.append((logits, emulator.log(), torch.stack(scores)))
    (wide, wide_log, wide_scores), (step, step_log, step_scores) = runs
    counts = count(wide_log)
    assert min(counts[n] for n in ("substitutions", "fetches", "background_arrived")) > 0
    finite = wide_scores.isfinite()
    rounding = (wide_scores - step_scores)[finite].abs().max()
    assert torch.equal(finite, step_scores.isfinite())
    gaps = wide_scores.masked_fill(~finite, 1e9).sort(dim=-1).values.diff(dim=-1)
    assert gaps[gaps > 0].min() > 10 * rounding, "choose another model seed: a decision hangs on rounding"
    assert np.abs(wide_log.g - policy.tau).min() > 1e-5
    for name in ("executed", "kind", "first"):
        assert (getattr(wide_log, name) == getattr(step_log, name)).all(), name
    assert (wide_log.moves == step_log.moves).all()
    np.testing.assert_allclose(wide_log.weights, step_log.weights, atol=1e-5)
    torch.testing.assert_close(wide, step, rtol=1e-4, atol=1e-4)


def test_agreement_of_the_emulator_and_the_replay_of_a_trace(tiny_moe, random_ids):
    """The same router trace, next_step: decisions bit-equal."""
    model, ids = tiny_moe("deepseek_v3"), random_ids(TOKENS, seed=10)
    with attach(model) as attachment:
        trace = calibrate(attachment, model, ids)
        for name in ("fetch_lfu_decay", "fetch_lru", "fetch_fifo", "fetch_frozen", "fetch_random"):
            emulator = Emulator(attachment, POLICIES[name], slots=SLOTS, demand=trace.demand())
            decode(emulator, model, ids)
            assert same_log(emulator.log(), replay(trace, POLICIES[name], slots=SLOTS, demand=trace.demand())), name


def test_generation_goes_through_the_same_code(tiny_moe, random_ids):
    """model.generate under one decode phase: greedy, and the same as a loop of our own; every token but the last an
    event."""
    model, ids = tiny_moe("qwen3_moe"), random_ids(10, seed=11)
    with attach(model) as attachment:
        emulator = Emulator(attachment, BUSY, slots=SLOTS)
        with emulator.phase("decode"):
            made = model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0)
        log = emulator.log()
        assert made.shape == (1, 22) and log.executed.shape == (21, 2, 4)
        again = Emulator(attachment, BUSY, slots=SLOTS)
        logits = decode_by_steps(again, model, made[:, :-1])
    assert torch.equal(logits[0, 9:].argmax(dim=-1), made[0, 10:])
    assert (again.log().executed == log.executed).all()


# ---- replaying a decision log -----------------------------------------------------------------------------------
@pytest.mark.parametrize("play", [decode, decode_by_steps])
@pytest.mark.parametrize("name", ["drop_lru_background", "speed_first", "substitute_all"])
def test_agreement_of_a_run_and_its_log_scored_again(name, play, family, tiny_moe, random_ids):
    model, ids = tiny_moe(family), random_ids(24, seed=12)
    with attach(model) as attachment:
        emulator = Emulator(attachment, LOSSY[name], slots=SLOTS)
        logits = play(emulator, model, ids)
        log = emulator.log()
        replayer = Replayer(attachment, log)
        assert not replayer.finished
        assert torch.equal(play(replayer, model, ids), logits)
        assert replayer.finished
        with pytest.raises(UserError, match="a text of more than 24 tokens"):
            decode(replayer, model, ids[:, :1])


def test_a_log_of_another_model_is_refused(tiny_moe, random_ids):
    ids = random_ids(8, seed=13)
    model = tiny_moe("qwen3_moe")
    with attach(model) as attachment:
        emulator = Emulator(attachment, LOSSY["speed_first"], slots=SLOTS)
        decode(emulator, model, ids)
        log = emulator.log()
    others = {
        "layers": ({"num_hidden_layers": 3}, "a decision log of 2 layers, top-4; expected 3 layers, top-4"),
        "top_k": ({"num_experts_per_tok": 2}, "a decision log of 2 layers, top-4; expected 2 layers, top-2"),
        "experts": ({"num_experts": 8}, "expert ids out of range; expected ids below 8"),
    }
    for configuration, said in others.values():
        with attach(tiny_moe("qwen3_moe", **configuration)) as attachment, pytest.raises(UserError, match=said):
            Replayer(attachment, log)


# ---- phases -----------------------------------------------------------------------------------------------------
def test_law_prefill_is_exact_and_moves_the_state_as_fetch(tiny_moe, random_ids):
    model, ids = tiny_moe("qwen3_moe"), random_ids(TOKENS + 1, seed=14)
    stock = model(ids[:, :TOKENS]).logits
    with attach(model) as attachment:
        trace = calibrate(attachment, model, ids[:, :TOKENS])
        for name in ("speed_first", "substitute_all", "drop_lru", "fetch_lru", "few_heavy_next_best_frozen"):
            policy = POLICIES[name]
            emulator = Emulator(attachment, policy, slots=SLOTS)
            with emulator.phase("prefill"):
                assert torch.equal(model(ids[:, :TOKENS]).logits, stock), name
            with pytest.raises(RuntimeError, match="nothing was decided"):
                emulator.log()
            fetch = policy.rule()._replace(miss=POLICIES["fetch_lru"].rule().miss)
            scan = Residency(layers=2, experts=16, top_k=4, slots=SLOTS, rule=fetch)
            for layer in range(2):
                scan.decide(
                    0, layer, trace.chosen[:, layer], trace.weights[:, layer], None,
                    chosen_scores=trace.chosen_scores[:, layer],
                )  # fmt: skip
            for field in ("expert", "load"):
                assert (emulator.residency.state.slots[field] == scan.state.slots[field]).all(), name
            for field in ("last_used", "demand", "decayed", "missing_mass"):
                assert (emulator.residency.state.experts[field] == scan.state.experts[field]).all(), name


@pytest.mark.parametrize("name", ["few_heavy_next_best_frozen", "fetch_frozen", "many_light_next_best_frozen"])
def test_law_a_prefill_of_frozen_residents_changes_none_and_pays_nothing_in(name, tiny_moe, random_ids):
    model, ids = tiny_moe("qwen3_moe"), random_ids(TOKENS, seed=14)
    stock = model(ids).logits
    with attach(model) as attachment:
        emulator = Emulator(attachment, POLICIES[name], slots=SLOTS, demand=calibrate(attachment, model, ids).demand())
        before = emulator.residency.state.slots["expert"].copy()
        with emulator.phase("prefill"):
            assert torch.equal(model(ids).logits, stock)
        state = emulator.residency.state
        assert (state.slots["expert"] == before).all() and (state.rows["step"] == TOKENS).all()
        assert (state.rows["account"] == 0).all()


def test_law_prefill_makes_the_continuation_hit(tiny_moe, random_ids):
    """The same continuation twice: the same chosen experts, fewer misses after the prefill than from cold."""
    model, ids = tiny_moe("qwen3_moe"), random_ids(TOKENS, seed=15)
    with attach(model) as attachment:
        counts = []
        for prefill in (True, False):
            emulator = Emulator(attachment, POLICIES["fetch_lru"], slots=8)
            if prefill:
                with emulator.phase("prefill"):
                    model(ids)
            decode(emulator, model, ids[:, -1:])
            counts.append(count(emulator.log()))
    assert counts[0]["events"] == counts[1]["events"] == 2
    assert counts[0]["hits"] > counts[1]["hits"] == 0


def test_a_request_is_prefill_and_then_decoding(tiny_moe, random_ids):
    """Context and continuation through one cache: only the continuation is decided, on the state the context left."""
    model, ids = tiny_moe("qwen3_moe"), random_ids(TOKENS, seed=16)
    with attach(model) as attachment:
        demand = calibrate(attachment, model, ids).demand()
        emulator = Emulator(attachment, BUSY, slots=SLOTS, demand=demand)
        with emulator.phase("prefill"):
            out = model(ids[:, :30], use_cache=True)
        with emulator.phase("decode"):
            rest = model(ids[:, 30:], past_key_values=out.past_key_values).logits
        log = emulator.log()
        assert log.executed.shape[0] == TOKENS - 30
        assert (emulator.residency.state.rows["step"] == TOKENS).all()
        replayer = Replayer(attachment, log)
        with replayer.phase("prefill"):
            out = model(ids[:, :30], use_cache=True)
        with replayer.phase("decode"):
            assert torch.equal(model(ids[:, 30:], past_key_values=out.past_key_values).logits, rest)
        assert replayer.finished


def test_running_outside_a_phase_or_in_two_is_an_error(tiny_moe, random_ids):
    model, ids = tiny_moe("qwen3_moe"), random_ids(4, seed=17)
    with attach(model) as attachment:
        emulator = Emulator(attachment, BUSY, slots=SLOTS)
        with pytest.raises(RuntimeError, match="outside a phase"):
            model(ids)
        with emulator.phase("decode"), pytest.raises(RuntimeError, match="already open"), emulator.phase("decode"):
            pass
        with pytest.raises(UserError, match="phase 'prefil'; expected prefill or decode"), emulator.phase("prefil"):
            pass
        with pytest.raises(UserError, match="lanes with no valid mask"), emulator.phase("decode", lanes=[0]):
            pass
        with (
            pytest.raises(UserError, match=r"a valid mask of \(1, 5\); expected 4 tokens"),
            emulator.phase("decode", valid=np.ones((1, 5), bool)),
        ):
            model(ids)
        decode(emulator, model, ids)  # and it goes on


def test_an_impossible_emulator_is_refused(tiny_moe):
    with attach(tiny_moe("qwen3_moe")) as attachment:
        with pytest.raises(UserError, match="3 slots a layer; expected from K = 4"):
            Emulator(attachment, BUSY, slots=3)
        with pytest.raises(UserError, match="17 slots a layer"):
            Emulator(attachment, BUSY, slots=17)
        with pytest.raises(UserError, match=r"policy 'fetch_belady' \(it knows the future\) in the emulator"):
            Emulator(attachment, POLICIES["fetch_belady"], slots=SLOTS)
        with pytest.raises(UserError, match="a delay of 0 tokens"):
            Emulator(attachment, BUSY, slots=SLOTS, delay=0)


def test_a_router_that_breaks_later_is_an_error(tiny_moe, random_ids):
    model, ids = tiny_moe("qwen3_moe"), random_ids(4, seed=18)
    with attach(model) as attachment:
        emulator = Emulator(attachment, BUSY, slots=SLOTS)
        model.model.layers[0].mlp.gate.weight[3, 3] = torch.nan
        with pytest.raises(UserError, match="event 0 of layer 0: router output that is not finite"):
            decode(emulator, model, ids)


# ---- lanes and continuity ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("lanes", [[0, 1], [1, 0], [3, 1]])
def test_law_batched_lanes_are_each_sequence_alone(lanes, tiny_moe, random_ids):
    """Two sequences of different length, padded to one batch: the decisions of each alone; padding is no event."""
    model = tiny_moe("qwen3_moe")
    lengths = [TOKENS, 29]
    ids = random_ids(TOKENS, seed=19, rows=2)
    valid = np.arange(TOKENS) < np.array(lengths)[:, None]
    with attach(model) as attachment:
        demand = calibrate(attachment, model, ids[:1]).demand()
        batched = Emulator(attachment, BUSY, slots=SLOTS, demand=demand, lanes=4)
        with batched.phase("decode", lanes=lanes, valid=valid):
            logits = model(ids, attention_mask=torch.from_numpy(valid).long()).logits
        log = batched.log()
        assert log.executed.shape[0] == sum(lengths)
        start = 0
        for row in sorted(range(2), key=lambda row: lanes[row]):  # the log goes by lane
            alone = Emulator(attachment, BUSY, slots=SLOTS, demand=demand)
            own = decode(alone, model, ids[row : row + 1, : lengths[row]])
            part = slice(start, start + lengths[row])
            for name in ("executed", "kind", "first"):
                assert (getattr(alone.log(), name) == getattr(log, name)[part]).all()
            torch.testing.assert_close(logits[row : row + 1, : lengths[row]], own, rtol=1e-3, atol=1e-3)
            start += lengths[row]
        untouched = set(range(4)) - set(lanes)
        steps = batched.residency.state.rows["step"].reshape(4, 2)
        assert (steps[list(untouched)] == 0).all()
        replayer = Replayer(attachment, log)
        with replayer.phase("decode", lanes=lanes, valid=valid):
            again = model(ids, attention_mask=torch.from_numpy(valid).long()).logits
        assert torch.equal(again[torch.from_numpy(valid)], logits[torch.from_numpy(valid)])


def test_law_restart_forgets_and_stream_does_not(tiny_moe, random_ids):
    model = tiny_moe("qwen3_moe")
    one, two = random_ids(TOKENS, seed=20), random_ids(TOKENS, seed=21)
    with attach(model) as attachment:
        demand = calibrate(attachment, model, one).demand()
        logs, logits = {}, {}
        for continuity in ("alone", "restart", "stream"):
            emulator = Emulator(attachment, BUSY, slots=SLOTS, demand=demand)
            if continuity != "alone":
                decode(emulator, model, one)
                emulator.clear_log()
            if continuity == "restart":
                emulator.restart()
            logits[continuity] = decode(emulator, model, two)
            logs[continuity] = emulator.log()
    assert same_log(logs["alone"], logs["restart"]) and torch.equal(logits["alone"], logits["restart"])
    assert not same_log(logs["alone"], logs["stream"]) and not torch.equal(logits["alone"], logits["stream"])


def test_law_restart_is_of_every_lane(tiny_moe, random_ids):
    model, ids = tiny_moe("qwen3_moe"), random_ids(TOKENS, seed=22, rows=3)
    valid = np.ones(ids.shape, bool)
    with attach(model) as attachment:
        demand = calibrate(attachment, model, ids[:1]).demand()
        emulator = Emulator(attachment, BUSY, slots=SLOTS, demand=demand, lanes=3)
        start = [array.tobytes() for array in emulator.residency.state]
        with emulator.phase("decode", lanes=[0, 1, 2], valid=valid):
            model(ids)
        assert (emulator.residency.state.rows["step"] == TOKENS).all()
        emulator.restart()
        assert [array.tobytes() for array in emulator.residency.state] == start


@pytest.mark.parametrize("lane", [-1, -2])
def test_bug_a_lane_that_does_not_exist_is_refused(lane, tiny_moe, random_ids):
    model, ids = tiny_moe("qwen3_moe"), random_ids(4, seed=22)
    with attach(model) as attachment:
        emulator = Emulator(attachment, BUSY, slots=SLOTS, lanes=2)
        with pytest.raises(UserError, match="lane"), emulator.phase("decode", lanes=[lane], valid=np.ones((1, 4))):
            model(ids)


def test_bug_lanes_that_do_not_fit_the_batch_are_refused(tiny_moe, random_ids):
    model, ids = tiny_moe("qwen3_moe"), random_ids(4, seed=23, rows=2)
    with attach(model) as attachment:
        emulator = Emulator(attachment, BUSY, slots=SLOTS, lanes=2)
        try:
            with emulator.phase("decode", lanes=[0], valid=np.ones((2, 4))):
                model(ids)
        except UserError:
            return
    pytest.fail("accepted")
