"""Laws of the decision, over every policy of the sheet and every miss rule x stand-in x eviction x admission.

Levers at zero are the baseline, bit for bit; levers at full visibly act; the books of the slots balance after every
event; and every decision equals that of a slow second reading of the design (section3.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policy_cases import (
    BACKGROUND,
    CAUSAL,
    FETCHING,
    IN_PLACE,
    LOSSY,
    POLICIES,
    demand_of,
    identical,
    join,
    policy,
    residency,
    run,
)
from section3 import SlowLayer

from engine import decision
from engine.decision import (
    ARRIVED,
    DROP,
    FETCH,
    FETCHED,
    HIT,
    ISSUED,
    NEVER,
    PROMOTED,
    SUBSTITUTE,
    complete_load,
)
from engine.policies import PAYING
from engine.residency import Demand

KINDS = {HIT: "hit", FETCH: "fetch", SUBSTITUTE: "substitute", DROP: "drop", decision.IN_PLACE: "in_place"}
CAUSES = {FETCHED: "fetched", PROMOTED: "promoted", ISSUED: "issued", ARRIVED: "arrived"}
SLOTS = 6  # of 16 experts, top-4: two loads may pend

over_policies = pytest.mark.parametrize("name", POLICIES)
over_causal = pytest.mark.parametrize("name", CAUSAL)
over_lossy = pytest.mark.parametrize("name", LOSSY)
over_in_place = pytest.mark.parametrize("name", IN_PLACE)
over_paying = pytest.mark.parametrize("name", [name for name, p in POLICIES.items() if p.miss_rule in PAYING])


def one(trace, t):
    """Event t of a trace, as arguments of `decide`."""
    return trace.chosen[t : t + 1], trace.weights[t : t + 1], trace.scores[t : t + 1]


def misses(log):
    return int((log.kind != HIT).sum())


def residents(held):
    return {int(e) for e in held.state.slots[0]["expert"] if e >= 0}


# ---- counting ---------------------------------------------------------------------------------------------------
@over_policies
def test_law_hits_and_misses_are_k_times_events(name, router_trace):
    log, moves, _ = run(POLICIES[name], router_trace(1), SLOTS)
    counts = [int((log.kind == kind).sum()) for kind in KINDS]
    assert sum(counts) == log.kind.size == 200 * 4
    assert 0 < counts[0] < log.kind.size  # both happen on this trace
    assert int((moves["cause"] == FETCHED).sum() + (moves["cause"] == PROMOTED).sum()) == counts[1]


@over_lossy
def test_law_a_lossy_policy_visibly_acts(name, router_trace):
    log, moves, _ = run(LOSSY[name], router_trace(1), SLOTS)
    acts = DROP if LOSSY[name].miss_rule == "drop" else SUBSTITUTE
    assert (log.kind == acts).sum() > 20
    assert not (log.executed == router_trace(1).chosen).all()
    if LOSSY[name].beta is not None:
        assert (moves["cause"] == ISSUED).sum() > 2
        assert (moves["cause"] == ARRIVED).sum() + (moves["cause"] == PROMOTED).sum() > 0


@over_policies
def test_law_an_untouched_event_keeps_the_models_bits(name, router_trace):
    trace = router_trace(2, norm=False)
    log, _, _ = run(POLICIES[name], trace, SLOTS)
    whole = np.isin(log.kind, (HIT, FETCH, decision.IN_PLACE)).all(axis=1)
    assert whole.any()
    assert log.weights[whole].tobytes() == trace.weights[whole].tobytes()
    assert (log.executed[whole] == trace.chosen[whole]).all()


@over_policies
def test_law_first_is_the_position_of_the_best_score(name, router_trace):
    trace = router_trace(3, steps=2)
    log, _, _ = run(POLICIES[name], trace, SLOTS)
    scores = np.take_along_axis(trace.scores, trace.chosen, axis=1)
    for t, first in enumerate(log.first):
        best = min(range(4), key=lambda k: (-scores[t, k], trace.chosen[t, k]))
        assert first == best


# ---- levers at their ends ---------------------------------------------------------------------------------------
@over_policies
def test_law_all_slots_is_the_stock_model(name, router_trace):
    """S = E, warm: all hits, and index and weights untouched."""
    trace = router_trace(4)
    log, moves, _ = run(POLICIES[name], trace, 16, demand=Demand(np.ones((1, 16), np.int64), 1))
    assert (log.kind == HIT).all()
    assert len(moves) == 0
    assert log.weights.tobytes() == trace.weights.tobytes()
    assert log.executed.tobytes() == trace.chosen.tobytes()


@pytest.mark.parametrize("eviction", ["fifo", "lfu", "lfu_decay", "lru", "random"])
@pytest.mark.parametrize("lever", ["tau", "share", "heavy", "light"])
def test_law_a_lossy_rule_with_its_lever_at_zero_is_fetch(lever, eviction, router_trace):
    fetch = FETCHING[f"fetch_{eviction}" if eviction != "lfu_decay" else "fetch_lfu_decay"]
    fetch = replace(fetch, eviction=eviction, half_life_tokens=16.0 if eviction == "lfu_decay" else None)
    rule = {
        "tau": {"miss_rule": "threshold", "tau": 1e-30},
        "share": {"miss_rule": "mass_budget", "share": 0.0},
        "heavy": {"miss_rule": "few_heavy", "tau": 0.1, "share": 0.0},
        "light": {"miss_rule": "many_light", "tau": 1.0, "share": 0.0},
    }
    lossy = replace(fetch, standin="next_best", standin_weight="own", standin_recency=True, **rule[lever])
    a, moves_a, held_a = run(fetch, router_trace(5), SLOTS)
    b, moves_b, held_b = run(lossy, router_trace(5), SLOTS)
    assert identical([*a, moves_a, *held_a.state], [*b, moves_b, *held_b.state])


@pytest.mark.parametrize("name", BACKGROUND)
@pytest.mark.parametrize("beta", [np.inf, 1e30])
def test_law_background_that_never_starts_is_no_background(name, beta, router_trace):
    a, moves_a, held_a = run(replace(BACKGROUND[name], beta=None), router_trace(6), SLOTS)
    b, moves_b, held_b = run(replace(BACKGROUND[name], beta=beta), router_trace(6), SLOTS)
    assert identical([*a, moves_a, *held_a.state], [*b, moves_b, *held_b.state])


@pytest.mark.parametrize("name", BACKGROUND)
def test_law_background_is_inert_where_slots_are_k(name, router_trace):
    a, moves_a, _ = run(replace(BACKGROUND[name], beta=None), router_trace(7), 4)
    b, moves_b, held = run(BACKGROUND[name], router_trace(7), 4)
    assert identical([*a, moves_a], [*b, moves_b])
    assert held.state.rows["pending"][0] == 0
    assert not (moves_b["cause"] == ISSUED).any()


def test_law_tau_infinite_fetches_first_choices_and_nothing_else(router_trace):
    """Warm, so that there are residents enough for every stand-in."""
    demand = Demand(np.ones((1, 16), np.int64), 1)
    log, _, _ = run(POLICIES["first_choice"], router_trace(8), SLOTS, demand=demand)
    is_first = np.arange(4) == log.first[:, None]
    assert np.isin(log.kind[is_first], (HIT, FETCH)).all()
    assert np.isin(log.kind[~is_first], (HIT, SUBSTITUTE)).all()
    assert (log.kind[is_first] == FETCH).any() and (log.kind[~is_first] == SUBSTITUTE).any()


def test_law_substitute_all_warm_never_loads(router_trace):
    demand = Demand(np.ones((1, 16), np.int64), 1)
    log, moves, _ = run(POLICIES["substitute_all"], router_trace(9), SLOTS, demand=demand)
    assert len(moves) == 0
    assert not (log.kind == FETCH).any()


# ---- accounts and frozen residents ------------------------------------------------------------------------------
@over_paying
def test_law_an_account_holds_what_was_paid_in_less_what_was_substituted(name, router_trace):
    log, _, held = run(POLICIES[name], router_trace(15), SLOTS)
    paid_out = np.where(log.kind == SUBSTITUTE, log.g, 0).sum(axis=1, dtype=np.float64)  # [T]
    account = np.cumsum(POLICIES[name].share - paid_out)
    assert account.min() > -1e-9
    assert held.state.rows["account"][0] == pytest.approx(account[-1], abs=1e-9)


@over_paying
@pytest.mark.parametrize("start", ["cold", "warm"])
def test_law_heavy_and_light_keep_to_their_side_of_tau_and_off_the_first_choice(name, start, router_trace):
    rule = replace(POLICIES[name], share=1.0)  # whatever it may substitute is paid for
    demand = Demand(np.ones((1, 16), np.int64), 1) if start == "warm" else None
    log, _, _ = run(rule, router_trace(16), SLOTS, demand=demand)
    substituted, tau = log.kind == SUBSTITUTE, np.float32(rule.tau)
    of_rule = log.g >= tau if rule.miss_rule == "few_heavy" else log.g < tau
    is_first = np.arange(4) == log.first[:, None]
    assert substituted.sum() > 20 and of_rule[substituted].all() and not (substituted & is_first).any()
    if start == "warm":  # residents enough for every stand-in: nothing else is left of what the rule takes
        assert np.isin(log.kind[of_rule & ~is_first], (HIT, SUBSTITUTE)).all()


@pytest.mark.parametrize("rule", PAYING)
def test_law_realised_mass_follows_the_level_while_the_supply_lasts(rule, router_trace):
    trace = router_trace(17, T=2000)
    arm = replace(IN_PLACE[f"{rule}_next_best_frozen"], tau=0.25)

    def mass(level):
        log, _, _ = run(replace(arm, share=level), trace, SLOTS)
        return float(np.where(log.kind == SUBSTITUTE, log.g, 0).sum(axis=1).mean())

    supply = mass(1.0)
    for share in (0.25, 0.5, 0.75):
        assert mass(share * supply) == pytest.approx(share * supply, abs=1 / 2000)  # less than one weight is left over
    assert mass(2 * supply) <= supply + 1e-9


@over_in_place
def test_law_frozen_residents_never_change(name, router_trace):
    for demand in (None, Demand(np.random.default_rng(3).integers(0, 50, (1, 16)), 50)):
        held = residency(IN_PLACE[name], 16, 4, SLOTS)
        if demand is not None:
            held.warm(demand)
        before = held.state.slots.copy()
        trace = router_trace(18)
        log, moves = held.decide(0, 0, trace.chosen, trace.weights, trace.scores)
        assert len(moves) == 0 and not (log.kind == FETCH).any()
        assert demand is not None or (log.kind == decision.IN_PLACE).any()  # cold, no miss finds a stand-in
        assert all((before[field] == held.state.slots[field]).all() for field in ("expert", "load"))
        assert (held.state.rows["free"] == (SLOTS if demand is None else 0)).all()


# ---- caches -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("warm", [False, True])
def test_law_lru_misses_never_rise_with_more_slots(seed, warm, router_trace):
    trace = router_trace(seed, T=300)
    demand = Demand(np.random.default_rng(seed).integers(0, 50, (1, 16)), 50) if warm else None
    counts = [misses(run(POLICIES["fetch_lru"], trace, slots, demand=demand)[0]) for slots in range(4, 17)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("slots", [4, 5, 8, 12, 15])
def test_law_belady_is_never_beaten(seed, slots, router_trace):
    trace = router_trace(seed, T=150, K=1 + seed % 4)
    demand = Demand(np.random.default_rng(seed).integers(0, 50, (1, 16)), 50) if seed % 2 else None
    bound = misses(run(POLICIES["fetch_belady"], trace, slots, demand=demand)[0])
    others = {n: misses(run(p, trace, slots, demand=demand)[0]) for n, p in FETCHING.items()}
    assert bound == min(others.values()), others


# ---- determinism and splitting ----------------------------------------------------------------------------------
@over_policies
def test_law_a_run_is_a_function_of_its_inputs(name, router_trace):
    a, moves_a, held_a = run(POLICIES[name], router_trace(10), SLOTS)
    b, moves_b, held_b = run(POLICIES[name], router_trace(10), SLOTS)
    assert identical([*a, moves_a, *held_a.state], [*b, moves_b, *held_b.state])


def test_law_the_random_parts_follow_their_seed(router_trace):
    for name in ("fetch_random", "substitute_all_random_lru"):
        a, moves_a, _ = run(POLICIES[name], router_trace(10), SLOTS)
        b, moves_b, _ = run(replace(POLICIES[name], seed=12345), router_trace(10), SLOTS)
        assert not identical([a.executed, moves_a["victim"]], [b.executed, moves_b["victim"]]), name


@over_causal
@pytest.mark.parametrize("pieces", [[1] * 60, [7, 1, 22, 30], [59, 1]])
def test_law_splitting_a_scan_changes_nothing(name, pieces, router_trace):
    trace = router_trace(11, T=60, topic_tokens=20)
    whole, moves_whole, held_whole = run(CAUSAL[name], trace, SLOTS, delay=3)
    held = residency(CAUSAL[name], 16, 4, SLOTS, delay=3)
    if CAUSAL[name].in_place:
        held.warm(demand_of(trace))
    logs, moves, start = [], [], 0
    for T in pieces:
        part = slice(start, start + T)
        log, moved = held.decide(0, 0, trace.chosen[part], trace.weights[part], trace.scores[part])
        logs.append(log)
        moves.append(moved)
        start += T
    assert start == 60
    assert identical([*whole, moves_whole], [*join(logs), np.concatenate(moves)])
    assert identical(held_whole.state, held.state)


def test_law_normalised_weights_do_not_depend_on_the_routers_order():
    """A float32 sum depends on its order; ten weights in another order gave another g in many events."""
    random = np.random.default_rng(5)
    scores = random.normal(0, 2, (400, 32)).astype(np.float32)
    chosen = np.argsort(-scores, axis=1)[:, :10]
    weights = np.exp(np.take_along_axis(scores, chosen, axis=1)).astype(np.float32)
    weights = random.permuted(weights, axis=1)  # heavier need not rank higher: a correction bias ranks by another score
    order = random.permuted(np.tile(np.arange(10), (400, 1)), axis=1)
    there, back = (np.take_along_axis(x, order, axis=1) for x in (chosen, weights))
    router_order = [np.cumsum(w, axis=1, dtype=np.float32)[:, -1] for w in (weights, back)]
    assert (router_order[0] != router_order[1]).any()
    a, b = (
        residency(POLICIES["fetch_lru"], 32, 10, 16).decide(0, 0, c, w, scores)[0]
        for c, w in ((chosen, weights), (there, back))
    )
    assert (np.take_along_axis(a.g, order, axis=1) == b.g).all()
    np.testing.assert_allclose(a.g.sum(axis=1), 1, rtol=1e-6)


@over_causal
def test_law_the_order_in_which_a_router_returns_its_choice_does_not_matter(name, router_trace):
    """Weights are in 64ths, so that their sum has the same bits in every order."""
    trace = router_trace(12, T=120, sorted=True)
    trace.weights = np.tile(np.float32([30, 18, 10, 6]) / 64, (120, 1))
    shuffled = np.random.default_rng(0).permuted(np.tile(np.arange(4), (120, 1)), axis=1)
    a, moves_a, held_a = run(CAUSAL[name], trace, SLOTS)
    trace.chosen = np.take_along_axis(trace.chosen, shuffled, axis=1)
    trace.weights = np.take_along_axis(trace.weights, shuffled, axis=1)
    b, moves_b, held_b = run(CAUSAL[name], trace, SLOTS)
    for x, y in ((a.executed, b.executed), (a.kind, b.kind)):
        assert (np.take_along_axis(x, shuffled, axis=1) == y).all()
    np.testing.assert_allclose(np.take_along_axis(a.weights, shuffled, axis=1), b.weights, rtol=1e-6)
    assert (shuffled[np.arange(120), b.first] == a.first).all()
    assert identical([moves_a, *held_a.state], [moves_b, *held_b.state])


def test_law_lanes_and_layers_are_independent(router_trace):
    """Three lanes of two layers, interleaved: each as alone (no random part, which knows its layer)."""
    p = POLICIES["speed_first"]
    held = residency(p, 16, 4, SLOTS, layers=2, lanes=3)
    rows = [(lane, layer, router_trace(20 + 2 * lane + layer, T=40)) for lane in range(3) for layer in range(2)]
    logs = {}
    for t in range(40):
        for lane, layer, trace in rows:
            logs.setdefault((lane, layer), []).append(held.decide(lane, layer, *one(trace, t))[0])
    for lane, layer, trace in rows:
        assert identical(run(p, trace, SLOTS)[0], join(logs[lane, layer]))


@pytest.mark.parametrize("name", [n for n, p in CAUSAL.items() if p.eviction == "lfu_decay"])
def test_law_rescaling_the_decayed_counters_changes_no_decision(name, router_trace):
    """The same state in another unit, chosen so that the kernel must rescale within the trace: the same decisions."""
    trace = router_trace(13)
    near, far = residency(CAUSAL[name], 16, 4, SLOTS), residency(CAUSAL[name], 16, 4, SLOTS)
    first = slice(0, 100)
    for held in (near, far):
        held.decide(0, 0, trace.chosen[first], trace.weights[first], trace.scores[first])
    up = 2.0 ** np.floor(499.9 - np.log2(near.state.rows["unit"][0]))
    near.state.rows["unit"] *= up
    near.state.experts["decayed"] *= up
    before = near.state.rows["unit"][0]
    rest = slice(100, 200)
    (a, moves_a), (b, moves_b) = (
        held.decide(0, 0, trace.chosen[rest], trace.weights[rest], trace.scores[rest]) for held in (near, far)
    )
    assert near.state.rows["unit"][0] < before, "the trace never reached the rescaling"
    assert identical([*a, moves_a], [*b, moves_b])
    ratio = near.state.rows["unit"][0] / far.state.rows["unit"][0]
    assert (near.state.experts["decayed"] == far.state.experts["decayed"] * ratio).all()


def test_law_a_decayed_counter_halves_in_its_half_life(router_trace):
    p = policy(id="x", miss_rule="fetch", eviction="lfu_decay", half_life_tokens="10")
    held = residency(p, 4, 1, 2)
    scores = np.zeros((11, 4), np.float32)
    chosen = np.array([[0]] + [[1]] * 10, np.int32)
    held.decide(0, 0, chosen, np.ones((11, 1), np.float32), scores)
    counter, unit = held.state.experts[0]["decayed"], held.state.rows["unit"][0]
    # ten events after its one demand, and one more after the last event
    assert counter[0] / unit == pytest.approx(2.0 ** (-11 / 10))
    assert counter[1] / unit == pytest.approx(sum(2.0 ** (-n / 10) for n in range(1, 11)))


# ---- books ------------------------------------------------------------------------------------------------------
def check_books(held, chosen, log):
    """What must hold of the state after an event: chosen [K], log of that event alone."""
    slots, experts, row = held.state.slots[0], held.state.experts[0], held.state.rows[0]
    in_slot = {int(e): s for s, e in enumerate(slots["expert"]) if e >= 0}
    loading = {int(e): s for s, e in enumerate(slots["load"]) if e >= 0}
    assert {e: int(s) for e, s in enumerate(experts["slot"]) if s >= 0} == in_slot
    assert {e: int(s) for e, s in enumerate(experts["load_slot"]) if s >= 0} == loading
    assert len(in_slot) == (slots["expert"] >= 0).sum(), "an expert in two slots"
    assert not set(in_slot) & set(loading)
    assert not set(in_slot.values()) & set(loading.values())
    assert row["free"] + len(in_slot) + len(loading) == held.slots
    assert row["pending"] == len(loading) <= held.slots - held.top_k
    assert sorted(slots["pending"][: row["pending"]]) == sorted(loading)
    heavy = set(np.flatnonzero(experts["missing_mass"] >= held.rule.beta).tolist())
    over = heavy - set(in_slot) - set(loading)
    assert sorted(experts["over"][: row["over"]]) == sorted(over)
    assert not over or row["pending"] == held.slots - held.top_k, "a load could have been queued"
    (executed,), (kinds,), (weights,) = log.executed, log.kind, log.weights
    ran = executed[executed >= 0].tolist()
    assert len(set(ran)) == len(ran) > 0
    assert set(executed[np.isin(kinds, (HIT, FETCH, SUBSTITUTE))]) <= set(in_slot), "ran without being resident"
    for e, runs, kind, weight in zip(chosen, executed, kinds, weights, strict=True):
        if kind in (HIT, FETCH, decision.IN_PLACE):
            assert runs == e
            assert kind != decision.IN_PLACE or e not in in_slot
        elif kind == SUBSTITUTE:
            assert runs not in chosen
        else:
            assert runs == -1 and weight == 0
    assert np.isfinite(weights).all() and (weights >= 0).all()


@st.composite
def situations(draw):
    """A policy, a small model, a short trace full of ties, slots, delay and a start."""
    E = draw(st.integers(2, 9))
    K = draw(st.integers(1, min(E, 4)))
    return {
        "policy": POLICIES[draw(st.sampled_from(sorted(POLICIES)))],
        "E": E,
        "K": K,
        "S": draw(st.integers(K, E)),
        "T": draw(st.integers(1, 25)),
        "delay": draw(st.integers(1, 4)),
        "beta": draw(st.sampled_from([0.25, 0.5, 1.0])),
        "seed": draw(st.integers(0, 10_000)),
        "norm": draw(st.booleans()),
        "steps": draw(st.sampled_from([None, 1, 4])),
        "warm": draw(st.booleans()),
    }


def prepared(situation, router_trace):
    s = situation
    p = s["policy"] if s["policy"].beta is None else replace(s["policy"], beta=s["beta"])
    trace = router_trace(s["seed"], s["T"], s["E"], s["K"], norm=s["norm"], steps=s["steps"], topic_tokens=8)
    if s["steps"]:  # equal weights too, and sums that are exact
        trace.weights = np.random.default_rng(s["seed"]).integers(1, 9, trace.weights.shape).astype(np.float32) / 8
    return p, trace


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(situations())
def test_law_the_books_of_the_slots_balance_after_every_event(router_trace, situation):
    p, trace = prepared(situation, router_trace)
    p = p if not p.clairvoyant else replace(p, eviction="lru")
    E, K, S = situation["E"], situation["K"], situation["S"]
    held = residency(p, E, K, S, delay=situation["delay"])
    if situation["warm"]:
        held.warm(Demand(np.random.default_rng(situation["seed"]).integers(0, 9, (1, E)), 9))
    for t in range(situation["T"]):
        log, _ = held.decide(0, 0, *one(trace, t))
        check_books(held, trace.chosen[t], log)


# ---- the second reading -----------------------------------------------------------------------------------------
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(situations())
def test_law_every_decision_is_that_of_the_design_read_slowly(router_trace, situation):
    p, trace = prepared(situation, router_trace)
    E, K, S, delay = (situation[n] for n in ("E", "K", "S", "delay"))
    slow = SlowLayer(p, E, K, S, delay)
    slow.future = [list(row) for row in trace.chosen]
    held = residency(p, E, K, S, delay=delay)
    if situation["warm"]:
        counts = np.random.default_rng(situation["seed"]).integers(0, 9, (1, E))
        held.warm(Demand(counts, 9))
        slow.resident = sorted(range(E), key=lambda e: (-counts[0, e], e))[:S]
        slow.demand = [float(n) for n in counts[0]]
        slow.decayed = held.state.experts["decayed"][0].tolist()
    if p.clairvoyant:
        log, moves = held.decide(0, 0, trace.chosen, trace.weights, trace.scores)
    for t in range(situation["T"]):
        kinds, executed, weights = slow.event(trace.chosen[t], trace.weights[t], trace.scores[t], trace.scores[t])
        if p.clairvoyant:
            row, seen = t, slow.moves
        else:
            log, moves = held.decide(0, 0, *one(trace, t))
            row, seen = 0, [m for m in slow.moves if m[0] == t]
        assert [KINDS[k] for k in log.kind[row]] == kinds, t
        assert log.executed[row].tolist() == executed, t
        np.testing.assert_allclose(log.weights[row], weights, rtol=1e-5, atol=1e-12)
        if not p.clairvoyant or t == situation["T"] - 1:
            got = [(*[int(x) for x in list(m)[:4]], CAUSES[m["cause"]]) for m in moves]
            assert sorted(got) == sorted(seen)
        if p.clairvoyant:
            continue
        experts = held.state.experts[0]
        assert residents(held) == slow.residents()
        assert {e for e in range(E) if experts["load_slot"][e] >= 0} == slow.pending()
        for field, expected in (
            ("missing_mass", slow.A),
            ("demand", slow.demand),
            ("decayed", slow.decayed if p.half_life_tokens else None),
            ("last_used", slow.last_use),
            ("loaded_at", slow.loaded_at),
        ):
            assert expected is None or experts[field].tolist() == expected, (t, field)
        assert held.state.rows["account"][0] == slow.account


# ---- completion told from outside -------------------------------------------------------------------------------
def test_law_completion_told_at_each_step_is_next_step(router_trace):
    """delay 0 with every load completed between the events decides as delay(1)."""
    trace = router_trace(14)
    p = POLICIES["speed_first"]
    whole, _, _ = run(p, trace, SLOTS)
    held = residency(p, 16, 4, SLOTS, delay=0)
    logs = []
    for t in range(200):
        logs.append(held.decide(0, 0, *one(trace, t))[0])
        state = held.state
        for e in np.flatnonzero(state.experts[0]["load_slot"] >= 0):
            assert state.experts[0]["due"][e] == NEVER
            assert complete_load(state.slots[0], state.experts[0], state.rows[0], e)
            assert not complete_load(state.slots[0], state.experts[0], state.rows[0], e), "completed twice"
    assert identical(whole, join(logs))
