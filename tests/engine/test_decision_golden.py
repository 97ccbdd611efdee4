"""Golden: exact decisions on tiny traces, worked out by hand from section 3 of the design.

Every event is written as {expert: gate weight} in the order in which the router returns it. Unless a trace gives its
own scores, the selection score of a chosen expert is its weight, that of any other is -1 - id: the best stand-in is
the lowest id. Layers start with the named experts seated in slots 0, 1, ... and all counts at zero. Weights are sums of
powers of two wherever a bound is met exactly.

Kinds, in the router's order: H hit, F fetch, S substitute, D drop, P computed in place. Moves: (step, expert, slot,
victim, cause), causes: fetched, promoted, issued, arrived; victim -1 is nobody.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from policy_cases import identical, policy

from engine.decision import ARRIVED, DROP, FETCH, FETCHED, HIT, IN_PLACE, ISSUED, PROMOTED, SUBSTITUTE, complete_load
from engine.residency import Demand, Residency

LETTER = {HIT: "H", FETCH: "F", SUBSTITUTE: "S", DROP: "D", IN_PLACE: "P"}
CAUSE = {FETCHED: "fetched", PROMOTED: "promoted", ISSUED: "issued", ARRIVED: "arrived"}

STANDIN = {"standin": "next_best", "standin_weight": "missing", "standin_recency": "yes"}
OWN = {**STANDIN, "standin_weight": "own"}
FETCHES = {"id": "fetch", "miss_rule": "fetch", "eviction": "lru"}
FIRST = {"id": "first", "miss_rule": "threshold", "tau": "inf", "eviction": "lru", **STANDIN}
SUBSTITUTES = {"id": "all", "miss_rule": "substitute_all", "eviction": "lru", **STANDIN}
HEAVY = {"id": "heavy", "miss_rule": "few_heavy", "eviction": "frozen", **STANDIN}
LIGHT = {"id": "light", "miss_rule": "many_light", "eviction": "frozen", **STANDIN}


class Layer:
    """One layer of E experts, top-K, S slots under the sheet row `cells`."""

    def __init__(self, cells, E, K, S, seated=(), delay=1, sigmoid=False):
        rule = policy(**cells).rule(delay=delay, sigmoid=sigmoid)
        self.held = Residency(layers=1, experts=E, top_k=K, slots=S, rule=rule)
        state = self.held.state
        for slot, expert in enumerate(seated):
            state.slots["expert"][0, slot] = expert
            state.experts["slot"][0, expert] = slot
            state.rows["free"] -= 1

    def play(self, *events, scores=None, logits=None):
        """Decide the events in order. scores, logits: one row [E] an event."""
        chosen = np.array([list(event) for event in events], np.int32)
        weights = np.array([list(event.values()) for event in events], np.float32)
        if scores is None:
            scores = np.tile(-1.0 - np.arange(self.held.experts), (len(events), 1))
            np.put_along_axis(scores, chosen.astype(np.int64), weights, axis=1)
        log, moves = self.held.decide(0, 0, chosen, weights, np.array(scores, np.float32), logits)
        return SimpleNamespace(
            kinds=["".join(LETTER[k] for k in row) for row in log.kind],
            executed=log.executed.tolist(),
            weights=log.weights.tolist(),
            first=log.first.tolist(),
            moves=[(*(int(x) for x in list(move)[:4]), CAUSE[move["cause"]]) for move in moves],
        )

    @property
    def residents(self):
        return self.held.state.slots["expert"][0].tolist()

    @property
    def account(self):
        return float(self.held.state.rows["account"][0])

    def expert(self, field):
        return self.held.state.experts[field][0].tolist()


# ---- ranks and miss rules ---------------------------------------------------------------------------------------
def test_golden_threshold_on_an_unsorted_choice():
    # Scores: 3 (.75), 0 (.1875), 4 (.0625), so the first choice is 3, at position 2. Residents 0 1 2: 0 is a hit.
    # 3 misses: first choice, fetched. 4 misses, .0625 < .15: substituted by 1, the best of the unused 1 and 2.
    # Victim for 3: not 0 (hit), not 1 (stand-in): 2, in slot 2.
    layer = Layer({**FIRST, "tau": "0.15"}, E=6, K=3, S=3, seated=[0, 1, 2])
    seen = layer.play({4: 0.0625, 0: 0.1875, 3: 0.75})
    assert seen.first == [2]
    assert seen.kinds == ["SHF"]
    assert seen.executed == [[1, 0, 3]]
    assert seen.weights == [[0.0625, 0.1875, 0.75]]
    assert seen.moves == [(0, 3, 2, 2, "fetched")]
    assert layer.residents == [0, 1, 3]


def test_golden_threshold_fetches_what_weighs_exactly_tau():
    # g of 3 is .125 = tau: fetched. g of 4 is .0625: substituted. All of 1, 3 and 4 miss; 0 and 2 are seated.
    # 1 takes the victim: 4 is stood in for by 0 first (stand-ins precede fetches), so the victims are 2, then nobody
    # seated: the free slots 2 and 3 come before any victim.
    layer = Layer({**FIRST, "tau": "0.125"}, E=6, K=3, S=4, seated=[0, 2])
    seen = layer.play({1: 0.8125, 3: 0.125, 4: 0.0625})
    assert seen.kinds == ["FFS"]
    assert seen.executed == [[1, 3, 0]]
    assert seen.moves == [(0, 1, 2, -1, "fetched"), (0, 3, 3, -1, "fetched")]
    assert layer.residents == [0, 2, 1, 3]


def test_golden_threshold_reads_normalised_weights():
    # Raw weights sum to one half: 4 weighs .0625 raw, g = .125 >= tau = .125: fetched, although the raw weight is less.
    layer = Layer({**FIRST, "tau": "0.125"}, E=6, K=2, S=3, seated=[0, 1, 2])
    seen = layer.play({0: 0.4375, 4: 0.0625})
    assert seen.kinds == ["HF"]
    assert seen.weights == [[0.4375, 0.0625]]
    assert seen.moves == [(0, 4, 1, 1, "fetched")]


def test_golden_equal_scores_rank_by_lower_id():
    # 5 and 3 tie: 3 is the first choice, so 3 is fetched and 5 substituted, by 0; 3 takes the slot of 1.
    layer = Layer(FIRST, E=6, K=2, S=2, seated=[0, 1])
    seen = layer.play({5: 0.5, 3: 0.5})
    assert seen.first == [1]
    assert seen.kinds == ["SF"]
    assert seen.executed == [[0, 3]]
    assert seen.moves == [(0, 3, 1, 1, "fetched")]


def test_golden_substitute_all_takes_the_first_choice_too():
    # Both miss. Rank 0 (3) gets the best resident by score, 1; rank 1 (2) the next, 0. Nothing moves.
    layer = Layer(SUBSTITUTES, E=4, K=2, S=2, seated=[0, 1])
    seen = layer.play({2: 0.25, 3: 0.75}, scores=[[-5, -4, 0.25, 0.75]])
    assert seen.kinds == ["SS"]
    assert seen.executed == [[0, 1]]
    assert seen.moves == []
    assert layer.residents == [0, 1]


def test_golden_fetch_takes_every_miss_in_rank_order():
    # Ranks: 4 (.5), 5 (.375), 3 (.125). 3 is a hit in slot 0. 4 takes the first victim, 1 (never used, lowest id),
    # 5 takes 2.
    layer = Layer(FETCHES, E=6, K=3, S=3, seated=[3, 1, 2])
    seen = layer.play({5: 0.375, 3: 0.125, 4: 0.5})
    assert seen.kinds == ["FHF"]
    assert seen.moves == [(0, 4, 1, 1, "fetched"), (0, 5, 2, 2, "fetched")]


def test_golden_mass_budget_substitutes_the_lightest_first():
    # All four miss: g = .5, .25, .125, .125; share .25. The lighter of equals is the lower rank's neighbour: 7 (rank 3,
    # sum .125), 6 (rank 2, sum .25, just within), then .25 more would pass. 4 and 5 are fetched: not over the stand-ins
    # 0 (for rank 2, 6) and 1 (for rank 3, 7), so over 2 and 3.
    layer = Layer({**SUBSTITUTES, "miss_rule": "mass_budget", "share": "0.25"}, E=8, K=4, S=4, seated=[0, 1, 2, 3])
    seen = layer.play({4: 0.5, 5: 0.25, 6: 0.125, 7: 0.125})
    assert seen.kinds == ["FFSS"]
    assert seen.executed == [[4, 5, 0, 1]]
    assert seen.moves == [(0, 4, 2, 2, "fetched"), (0, 5, 3, 3, "fetched")]


def test_golden_mass_budget_of_equals_keeps_the_lower_rank():
    # g = .5, .25, .125, .125; share .2: 7 (rank 3) is substituted, .125 more would make .25.
    layer = Layer({**SUBSTITUTES, "miss_rule": "mass_budget", "share": "0.2"}, E=8, K=4, S=4, seated=[0, 1, 2, 3])
    assert layer.play({4: 0.5, 5: 0.25, 7: 0.125, 6: 0.125}).kinds == ["FFSF"]


def test_golden_mass_budget_may_take_the_first_choice():
    # Only the first choice 2 misses (g = .625); share .75 covers it.
    layer = Layer({**SUBSTITUTES, "miss_rule": "mass_budget", "share": "0.75"}, E=4, K=2, S=3, seated=[0, 1, 3])
    assert layer.play({0: 0.375, 2: 0.625}).executed == [[0, 1]]


@pytest.mark.parametrize(("renormalise", "weights"), [("yes", [1.0, 0.0, 0.0]), ("no", [0.5, 0.0, 0.0])])
def test_golden_drop(renormalise, weights):
    # 0 is a hit (rank 0), 3 and 4 are dropped; renormalised, 0 carries the row's former sum of 1.
    cells = {"id": "d", "miss_rule": "drop", "renormalise": renormalise, "eviction": "lru"}
    layer = Layer(cells, E=5, K=3, S=3, seated=[0, 1, 2])
    seen = layer.play({0: 0.5, 3: 0.25, 4: 0.25})
    assert seen.kinds == ["HDD"]
    assert seen.executed == [[0, -1, -1]]
    assert seen.weights == [weights]
    assert seen.moves == []
    assert layer.expert("missing_mass") == [0, 0, 0, 0.25, 0.25]


def test_golden_drop_keeps_raw_sums_when_it_renormalises():
    # Raw weights .25, .125, .125 (their sum, one half, is kept): the hit carries all of it.
    cells = {"id": "d", "miss_rule": "drop", "renormalise": "yes", "eviction": "lru"}
    layer = Layer(cells, E=5, K=3, S=3, seated=[0, 1, 2])
    assert layer.play({0: 0.25, 3: 0.125, 4: 0.125}).weights == [[0.5, 0.0, 0.0]]


def test_golden_drop_never_drops_all():
    # No hit: the first choice 4 is fetched over 0 (all unused and equal: lowest id); 3 is dropped.
    cells = {"id": "d", "miss_rule": "drop", "renormalise": "yes", "eviction": "lru"}
    layer = Layer(cells, E=5, K=2, S=3, seated=[0, 1, 2])
    seen = layer.play({3: 0.25, 4: 0.75})
    assert seen.kinds == ["DF"]
    assert seen.executed == [[-1, 4]]
    assert seen.weights == [[0.0, 1.0]]
    assert seen.moves == [(0, 4, 0, 0, "fetched")]
    assert layer.expert("missing_mass") == [0, 0, 0, 0.25, 0]


# ---- an account of mass, and residents that stay ----------------------------------------------------------------
def test_golden_few_heavy_waits_until_the_account_pays_for_the_heaviest():
    # All miss; 4 is the first choice, 5 (.3125) and 6 (.25) weigh tau and more. Event 0: .28125 does not pay for 5, and
    # 6, which it would pay for, is not reached. Event 1: .5625 pays for 5, the .25 that is left for 6, exactly.
    layer = Layer({**HEAVY, "tau": "0.25", "share": "0.28125"}, E=8, K=4, S=4, seated=[0, 1, 2, 3])
    event = {4: 0.375, 5: 0.3125, 6: 0.25, 7: 0.0625}
    seen = layer.play(event, event)
    assert seen.kinds == ["PPPP", "PSSP"]
    assert seen.executed == [[4, 5, 6, 7], [4, 0, 1, 7]]
    assert seen.moves == [] and layer.account == 0.0


def test_golden_many_light_takes_the_lightest_the_account_pays_for():
    # tau .25: 6 and 7 (.125 each) are light, 5 (.25) is not. Event 0: .1875 pays for one of the equals, the higher rank
    # 7. Event 1: .0625 + .1875 pay for both; the stand-ins go out in rank order: 0 for 6, 1 for 7.
    layer = Layer({**LIGHT, "tau": "0.25", "share": "0.1875"}, E=8, K=4, S=4, seated=[0, 1, 2, 3])
    event = {4: 0.5, 5: 0.25, 6: 0.125, 7: 0.125}
    seen = layer.play(event, event)
    assert seen.kinds == ["PPPS", "PPSS"]
    assert seen.executed == [[4, 5, 6, 0], [4, 5, 0, 1]]
    assert layer.account == 0.0


@pytest.mark.parametrize(("cells", "tau"), [(HEAVY, "0.25"), (LIGHT, "1")])
def test_golden_of_equals_the_first_choice_is_kept(cells, tau):
    # Four equal weights: 4, the lowest id, is the first choice. The others are taken: .75 of the 1 that was paid in.
    layer = Layer({**cells, "tau": tau, "share": "1"}, E=8, K=4, S=4, seated=[0, 1, 2, 3])
    assert layer.play({5: 0.25, 4: 0.25, 7: 0.25, 6: 0.25}).kinds == ["SPSS"]
    assert layer.account == 0.25


@pytest.mark.parametrize(("eviction", "kinds", "residents"), [("frozen", "PSPP", [0, -1]), ("lru", "FSFF", [0, 4])])
def test_golden_what_finds_no_stand_in_is_not_paid_for(eviction, kinds, residents):
    # One resident, 0. 5 (.25) and 6 (.125) are both to be substituted: 0 stands in for 5, the lower rank, nobody for 6.
    # Of the 1 that was paid in .25 is spent. Frozen, the three free slots stay free; lru fills them in rank order.
    layer = Layer({**HEAVY, "eviction": eviction, "tau": "0.125", "share": "1"}, E=8, K=4, S=4, seated=[0])
    assert layer.play({4: 0.5625, 5: 0.25, 6: 0.125, 7: 0.0625}).kinds == [kinds]
    assert layer.account == 0.75
    assert layer.residents[:2] == residents


def test_golden_an_event_without_a_miss_pays_in_too():
    # 0 and 1 are hits, twice: .125 + .125. Then 2 (.25, light) misses: .375 less .25.
    layer = Layer({**LIGHT, "tau": "0.5", "share": "0.125"}, E=4, K=2, S=3, seated=[0, 1, 3])
    assert layer.play({0: 0.5, 1: 0.5}, {1: 0.5, 0: 0.5}, {0: 0.75, 2: 0.25}).kinds == ["HH", "HH", "HS"]
    assert layer.account == 0.125


def test_golden_frozen_computes_a_miss_where_it_lies():
    # Fetch rule: 4 misses twice and stays out, though slot 2 is free: no move, weights untouched. It ran, but not from
    # a slot: its last use is the step, A grows to .25 + .25. Of the resident 0 the hit keeps A at zero.
    layer = Layer({**FETCHES, "eviction": "frozen"}, E=6, K=2, S=3, seated=[0, 1])
    seen = layer.play({0: 0.75, 4: 0.25}, {4: 0.25, 0: 0.75})
    assert seen.kinds == ["HP", "PH"]
    assert seen.executed == [[0, 4], [4, 0]] and seen.weights == [[0.75, 0.25], [0.25, 0.75]]
    assert seen.moves == [] and layer.residents == [0, 1, -1]
    assert layer.expert("last_used") == [1, -1, -1, -1, 1, -1]
    assert layer.expert("missing_mass") == [0, 0, 0, 0, 0.5, 0]


# ---- stand-ins --------------------------------------------------------------------------------------------------
def test_golden_stand_ins_go_out_in_rank_order():
    # Residents 0 1 2 3, scores -1 -3 -2 -4. 1 is chosen and a hit. Misses by rank: 5, 4. Best unused resident 0 for 5,
    # then 2 for 4 (1 is chosen, 3 is worse).
    layer = Layer(SUBSTITUTES, E=6, K=3, S=4, seated=[0, 1, 2, 3])
    seen = layer.play({4: 0.25, 5: 0.5, 1: 0.25}, scores=[[-1, 0.2, -2, -4, 0.25, 0.5]])
    assert seen.kinds == ["SSH"]
    assert seen.executed == [[2, 0, 1]]


def test_golden_equal_stand_ins_by_lower_id():
    # 3, 1 and 2 are seated in this order, all with score -1: rank 0 gets 1, rank 1 gets 2.
    layer = Layer(SUBSTITUTES, E=6, K=2, S=3, seated=[3, 1, 2])
    assert layer.play({4: 0.75, 5: 0.25}, scores=[[-1, -1, -1, -1, 0.75, 0.25]]).executed == [[1, 2]]


def test_golden_a_stand_in_outside_the_best_groups_may_serve():
    # A group-limited router scores every other group -inf: still the best there is, by lower id.
    layer = Layer(SUBSTITUTES, E=6, K=2, S=3, seated=[2, 1, 0])
    minus = -math.inf
    seen = layer.play({4: 0.75, 5: 0.25}, scores=[[minus, minus, minus, minus, 0.75, 0.25]])
    assert seen.executed == [[0, 1]]


def test_golden_no_stand_in_left_is_a_fetch():
    # Only 0 is seated, two slots are free. Rank 0 (1) gets 0; ranks 1 (2) and 2 (3) find nobody: fetched, free slots.
    layer = Layer(SUBSTITUTES, E=5, K=3, S=3, seated=[0])
    seen = layer.play({1: 0.5, 2: 0.25, 3: 0.125})
    assert seen.kinds == ["SFF"]
    assert seen.executed == [[0, 2, 3]]
    assert seen.moves == [(0, 2, 1, -1, "fetched"), (0, 3, 2, -1, "fetched")]


def test_golden_cold_substitution_fetches_first():
    # Cold, S = 3: nobody to stand in, both fetched. Then 0 hits and 1 stands in for 2.
    layer = Layer(SUBSTITUTES, E=4, K=2, S=3)
    seen = layer.play({0: 0.5, 1: 0.5}, {0: 0.5, 2: 0.25})
    assert seen.kinds == ["FF", "HS"]
    assert seen.executed == [[0, 1], [0, 1]]


def test_golden_a_stand_in_is_no_hit_and_no_demand():
    layer = Layer(SUBSTITUTES, E=4, K=2, S=2, seated=[0, 1])
    assert layer.play({0: 0.75, 3: 0.25}).kinds == ["HS"]  # 1 stands in for 3
    assert layer.expert("demand") == [1, 0, 0, 1]
    assert layer.expert("missing_mass") == [0, 0, 0, 0.25]


@pytest.mark.parametrize(("recency", "victim", "slot"), [("yes", 2, 2), ("no", 1, 1)])
def test_golden_recency_of_stand_ins(recency, victim, slot):
    # Event 0: 1 stands in for 4. Event 1: first choice 5 is fetched; unused are 1 and 2. With the flag 1 was used at
    # step 0, so 2 (never) leaves; without it both were never used, and the lower id leaves.
    layer = Layer({**FIRST, "standin_recency": recency}, E=6, K=2, S=3, seated=[0, 1, 2])
    seen = layer.play({0: 0.75, 4: 0.25}, {5: 0.75, 0: 0.25})
    assert seen.executed == [[0, 1], [5, 0]]
    assert seen.moves == [(1, 5, slot, victim, "fetched")]


# ---- evictions --------------------------------------------------------------------------------------------------
EVICTION_TRACE = [0, 1, 0, 2, 1, 0, 3, 0, 1]  # K = 1, S = 2, cold: 0 and 1 fill the free slots, 0 hits


@pytest.mark.parametrize(
    ("eviction", "kinds", "victims"),
    [
        # 3: never demanded again 0 (next 5) is farther than 1 (next 4): 0 leaves; 1 hits; 0 over 2 (never again); 3
        # over 1 (next 8; 0 is next at 7); 0 hits; 1: 3 and 0 are both never demanded again: least recent use, 3
        # (step 6).
        ("belady", "FFHFHFFHF", [-1, -1, 0, 2, 1, 3]),
        # 3: 0 entered first, leaves; 1 hits; 0 over 1 (entered at 1, 2 at 3); 3 over 2; 0 hits; 1 over 0 (5, 3 at 6).
        ("fifo", "FFHFHFFHF", [-1, -1, 0, 1, 2, 0]),
        # 3: demands 0: 2, 1: 1, so 1 leaves; 1 over 2 (1 against 2); 0 hits; 3 over 1 (2 against 3); 0 hits; 1 over 3.
        ("lfu", "FFHFFHFHF", [-1, -1, 1, 2, 1, 3]),
        # 3: last uses 0: 2, 1: 1, so 1 leaves; 1 over 0 (2 against 3); 0 over 2; 3 over 1; 0 hits; 1 over 3.
        ("lru", "FFHFFFFHF", [-1, -1, 1, 0, 2, 1, 3]),
    ],
)
def test_golden_evictions(eviction, kinds, victims):
    layer = Layer({**FETCHES, "eviction": eviction}, E=4, K=1, S=2)
    seen = layer.play(*({e: 1.0} for e in EVICTION_TRACE))
    assert "".join(seen.kinds) == kinds
    assert [victim for *_, victim, _ in seen.moves] == victims


def test_golden_belady_sees_the_demand_of_whole_events():
    # K = 2, S = 3. Event 1 needs a slot for 3; unused is 2 alone of 0 1 2 (0 is chosen, 1 is demanded at 2, 2 at 3):
    # 2, the farther, leaves. Event 2 hits both. Event 3: 2 over 3 (never again) rather than 0 (demanded at 4).
    layer = Layer({**FETCHES, "eviction": "belady"}, E=4, K=2, S=3, seated=[0, 1, 2])
    seen = layer.play(
        {0: 0.5, 1: 0.5}, {0: 0.5, 3: 0.5}, {1: 0.5, 0: 0.5}, {1: 0.5, 2: 0.5}, {0: 0.5, 1: 0.5}
    )  # fmt: skip
    assert seen.kinds == ["HH", "HF", "HH", "HF", "HH"]
    assert seen.moves == [(1, 3, 2, 2, "fetched"), (3, 2, 2, 3, "fetched")]


def test_golden_lfu_decay_forgets():
    # Half-life 2 events: a demand at step t weighs 2^(t/2). 0 0 0 0 1: 0 has 1 + 1.41 + 2 + 2.83 = 7.24, 1 has 4: at 5
    # the expert 2 takes the slot of 1 (least recent use would evict 0). 2 2: 5.66 + 8 = 13.66. At 7 the expert 1 takes
    # the slot of 0 (7.24 < 13.66; by plain counts, 4 against 2, it would be 2).
    layer = Layer({**FETCHES, "eviction": "lfu_decay", "half_life_tokens": "2"}, E=3, K=1, S=2)
    seen = layer.play(*({e: 1.0} for e in [0, 0, 0, 0, 1, 2, 2, 1]))
    assert "".join(seen.kinds) == "FHHHFFHF"
    assert [victim for *_, victim, _ in seen.moves] == [-1, -1, 1, 0]


def test_golden_demand_is_kept_across_evictions():
    # K = 1, S = 1, lfu: counts go on growing for whoever is out.
    layer = Layer({**FETCHES, "eviction": "lfu"}, E=3, K=1, S=1)
    layer.play(*({e: 1.0} for e in [0, 1, 0, 2, 0]))
    assert layer.expert("demand") == [3, 1, 1]


@pytest.mark.parametrize("eviction", ["fifo", "lfu", "lru"])
def test_golden_equal_victims_by_lower_id(eviction):
    # 2, 0 and 1 are seated in this order with nothing to choose between them: 0, in slot 1, leaves.
    layer = Layer({**FETCHES, "eviction": eviction}, E=4, K=1, S=3, seated=[2, 0, 1])
    assert layer.play({3: 1.0}).moves == [(0, 3, 1, 0, "fetched")]


def test_golden_equal_victims_by_last_use_before_id():
    # lfu, S = 2: 1 then 0, one demand each: 1 was used longer ago and leaves, although 0 has the lower id.
    layer = Layer({**FETCHES, "eviction": "lfu"}, E=3, K=1, S=2)
    assert layer.play({1: 1.0}, {0: 1.0}, {2: 1.0}).moves[-1] == (2, 2, 0, 1, "fetched")


def test_golden_the_event_in_progress_loses_no_slot():
    # lru, residents 0 1 2, used in this order. Event 3 chooses 0 (a hit, but the least recently used), 3 and 4: 3 takes
    # the slot of 1, 4 that of 2.
    layer = Layer(FETCHES, E=5, K=3, S=3, seated=[0, 1, 2])
    for e in range(3):
        layer.held.state.experts["last_used"][0, e] = e
    layer.held.state.rows["step"] = 3
    seen = layer.play({3: 0.5, 4: 0.375, 0: 0.125})
    assert seen.kinds == ["FFH"]
    assert seen.moves == [(3, 3, 1, 1, "fetched"), (3, 4, 2, 2, "fetched")]


# ---- background admission ---------------------------------------------------------------------------------------
def background(beta, delay=1, E=5, seated=(0, 1, 2, 3), cells=FIRST):
    """Top-2 layer, four slots: two loads may pend."""
    return Layer({**cells, "beta": str(beta)}, E=E, K=2, S=len(seated), seated=seated, delay=delay)


MISSED = {0: 0.75, 4: 0.25}  # 0 hits; 4 weighs a quarter: substituted by 1
CALLED = {4: 0.75, 0: 0.25}  # 4 is the first choice


def test_golden_background_queues_at_the_threshold_and_arrives_at_the_next_step():
    # Step 0: A[4] = .25 < .5. Step 1: .5, queued at its end; 0 and 1 are in use, 2 leaves (never used, lower id than
    # 3). Step 2: arrived before the event, a hit.
    layer = background(0.5)
    seen = layer.play(MISSED, MISSED, CALLED)
    assert seen.kinds == ["HS", "HS", "HH"]
    assert seen.executed == [[0, 1], [0, 1], [4, 0]]
    assert seen.moves == [(1, 4, 2, 2, "issued"), (2, 4, 2, -1, "arrived")]
    assert layer.residents == [0, 1, 4, 3]
    assert layer.expert("missing_mass")[4] == 0


def test_golden_background_with_a_delay_of_three():
    # Issued at step 0 (A = .25 = beta, then cleared), due at 3. At 1 and 2 it is a miss and A grows to .5, above beta,
    # but it is not queued again. At 3 it hits, which clears A.
    layer = background(0.25, delay=3)
    seen = layer.play(MISSED, MISSED, MISSED)
    assert seen.kinds == ["HS", "HS", "HS"]
    assert seen.moves == [(0, 4, 2, 2, "issued")]
    assert layer.expert("missing_mass")[4] == 0.5
    assert layer.expert("due")[4] == 3
    seen = layer.play(MISSED)
    assert seen.kinds == ["HH"]
    assert seen.moves == [(3, 4, 2, -1, "arrived")]
    assert layer.expert("missing_mass")[4] == 0


def test_golden_arrival_alone_does_not_clear_the_missing_mass():
    # A grows to .25 while the load pends (step 1); at 2 it arrives unasked for.
    layer = background(0.25, delay=2)
    layer.play(MISSED, MISSED, {0: 0.75, 1: 0.25})
    assert layer.residents == [0, 1, 4, 3]
    assert layer.expert("missing_mass")[4] == 0.25


def test_golden_the_victim_leaves_when_the_load_is_issued():
    # 2 left at step 0, though 4 arrives at 3 only: at 1 the first choice 2 misses. It is fetched over 1 or 3: 1 was
    # used at 0 (stand-in), 3 never: 3, slot 3.
    layer = background(0.25, delay=3)
    seen = layer.play(MISSED, {2: 0.75, 0: 0.25})
    assert seen.kinds == ["HS", "FH"]
    assert seen.moves == [(0, 4, 2, 2, "issued"), (1, 2, 3, 3, "fetched")]


def test_golden_fetching_a_pending_load_promotes_it():
    # Issued at 0, due at 3. At 1 it is the first choice: a miss, fetched by promotion into the slot that waits, nobody
    # leaves. It does not arrive again at 3.
    layer = background(0.25, delay=3)
    seen = layer.play(MISSED, CALLED, CALLED, CALLED)
    assert seen.kinds == ["HS", "FH", "HH", "HH"]
    assert seen.executed[1] == [4, 0]
    assert seen.moves == [(0, 4, 2, 2, "issued"), (1, 4, 2, -1, "promoted")]
    assert layer.residents == [0, 1, 4, 3]
    assert layer.held.state.rows["pending"][0] == 0


def test_golden_a_fetch_clears_the_missing_mass():
    # Step 0: A[4] = .25. Step 1: fetched (first choice): cleared; 2 leaves. Step 2: 5 is fetched; 4, 0 used at 1, 1 at
    # 0, 3 never: 3 leaves. Steps 3 and 4: 0 and 5 hit. Then evict 4 by hand of use: 3 again over the least recent, 1
    # (step 0); 2 over 4 (step 1, lower than 0 and 5 at 4). Step 7: 4 misses with .25: A = .25 < .5, nothing is queued.
    layer = background(0.5, E=6)
    seen = layer.play(MISSED, CALLED, {5: 0.75, 0: 0.25}, {0: 0.5, 5: 0.5}, {0: 0.5, 5: 0.5})
    assert seen.kinds == ["HS", "FH", "FH", "HH", "HH"]
    assert layer.expert("missing_mass")[4] == 0
    seen = layer.play({3: 0.75, 0: 0.25}, {2: 0.75, 0: 0.25}, MISSED)
    assert seen.kinds == ["FH", "FH", "HS"]
    assert seen.moves == [(5, 3, 1, 1, "fetched"), (6, 2, 2, 4, "fetched")]
    assert layer.expert("missing_mass")[4] == 0.25


def test_golden_at_most_slots_minus_k_loads_pend():
    # S = 3, K = 2: one load. Both misses have A = .5 >= .25: equal, so the lower id 5 is queued, into the slot of 2 (0
    # and 1 stand in). 6 waits, and at the end of step 1 it is queued without another miss; 0 and 1 are in use, so 5,
    # just arrived and never used, leaves.
    layer = background(0.25, E=8, seated=(0, 1, 2), cells=SUBSTITUTES)
    seen = layer.play({6: 0.5, 5: 0.5}, {0: 0.5, 1: 0.5}, {0: 0.5, 6: 0.5})
    assert seen.kinds == ["SS", "HH", "HH"]
    assert seen.executed[0] == [1, 0]
    assert seen.moves == [
        (0, 5, 2, 2, "issued"),
        (1, 5, 2, -1, "arrived"),
        (1, 6, 2, 5, "issued"),
        (2, 6, 2, -1, "arrived"),
    ]


def test_golden_a_dropped_expert_leaves_no_room_for_another_load():
    # S = 3, K = 2: one load. Step 0 drops 4 and queues it (1 leaves), due at 3. Step 1 drops 5, A = .5: slot 2 is
    # unused, but a load pends already.
    cells = {"id": "d", "miss_rule": "drop", "renormalise": "no", "eviction": "lru"}
    layer = background(0.25, delay=3, E=6, seated=(0, 1, 2), cells=cells)
    seen = layer.play({0: 0.5, 4: 0.5}, {0: 0.5, 5: 0.5})
    assert seen.kinds == ["HD", "HD"]
    assert seen.moves == [(0, 4, 1, 1, "issued")]
    assert layer.expert("missing_mass") == [0, 0, 0, 0, 0, 0.5]


def test_golden_the_most_missed_expert_is_queued_first():
    # As above, with A[6] = .75 and A[5] = .25: 6 first, in spite of its id.
    layer = background(0.25, E=8, seated=(0, 1, 2), cells=SUBSTITUTES)
    assert layer.play({5: 0.25, 6: 0.75}).moves == [(0, 6, 2, 2, "issued")]


def test_golden_background_prefers_a_free_slot():
    layer = Layer({**FIRST, "beta": "0.25"}, E=5, K=2, S=4, seated=[0, 1, 2])
    assert layer.play(MISSED).moves == [(0, 4, 3, -1, "issued")]


def test_golden_background_is_inert_where_slots_are_k():
    # A grows past beta for ever, nothing can pend.
    layer = background(0.25, E=5, seated=(0, 1))
    seen = layer.play(*[MISSED] * 4)
    assert seen.kinds == ["HS"] * 4
    assert seen.moves == []
    assert layer.expert("missing_mass")[4] == 1.0


def test_golden_dropped_experts_are_queued_too():
    # A dropped expert did not run either: A[4] = .25 = beta.
    cells = {"id": "d", "miss_rule": "drop", "renormalise": "no", "eviction": "lru"}
    layer = background(0.25, cells=cells)
    seen = layer.play(MISSED, CALLED)
    assert seen.kinds == ["HD", "HH"]
    assert seen.moves == [(0, 4, 1, 1, "issued"), (1, 4, 1, -1, "arrived")]


def test_golden_an_evicted_expert_with_missing_mass_left_is_queued_again():
    # Delay 2: issued at 0 (2 leaves), missed at 1 (A = .25 = beta, pending: not queued), arrives at 2, unused. At 2 the
    # first choice 5 evicts the never used 3 (lower id than 4). At 3 the first choice 2 evicts 4, never used. A[4] is
    # still .25 >= beta: at the end of 3 it is queued again; 0 and 2 are in use, 1 was last used at 1, 5 at 2: 1 leaves.
    layer = background(0.25, delay=2, E=6)
    seen = layer.play(MISSED, MISSED, {5: 0.75, 0: 0.25}, {2: 0.75, 0: 0.25})
    assert seen.moves == [
        (0, 4, 2, 2, "issued"),
        (2, 4, 2, -1, "arrived"),
        (2, 5, 3, 3, "fetched"),
        (3, 2, 2, 4, "fetched"),
        (3, 4, 1, 1, "issued"),
    ]


def test_golden_completion_told_from_outside():
    # delay 0: the load never falls due by itself.
    layer = background(0.25, delay=0)
    assert layer.play(*[MISSED] * 9).moves == [(0, 4, 2, 2, "issued")]
    state = layer.held.state
    assert complete_load(state.slots[0], state.experts[0], state.rows[0], 4)
    assert not complete_load(state.slots[0], state.experts[0], state.rows[0], 4)
    assert layer.play(CALLED).kinds == ["HH"]


# ---- combine weights --------------------------------------------------------------------------------------------
def test_golden_missing_weights():
    # The stand-in inherits; the row keeps its bits, normalised or not.
    layer = Layer(SUBSTITUTES, E=5, K=2, S=2, seated=[0, 1])
    assert layer.play({0: 0.5, 4: 0.3}).weights == [[0.5, float(np.float32(0.3))]]


def test_golden_own_weights_of_a_softmax():
    # Logits are the logarithms of .75 (0), .25 (4) and .125 (1, the stand-in): own weight .125. Row .875, was 1:
    # .75 / .875 = 6/7 and .125 / .875 = 1/7.
    layer = Layer({**SUBSTITUTES, **OWN}, E=5, K=2, S=2, seated=[0, 1])
    seen = layer.play({0: 0.75, 4: 0.25}, scores=[np.log([0.75, 0.125, 0.01, 0.01, 0.25])])
    assert seen.executed == [[0, 1]]
    assert seen.weights[0] == pytest.approx([6 / 7, 1 / 7], rel=1e-6)


def test_golden_own_weights_of_a_softmax_without_normalisation():
    # Raw weights .375 and .125 sum to .5. Own: .125 * (.0625 / .125) = .0625; row .4375, was .5: scaled by 8/7.
    layer = Layer({**SUBSTITUTES, **OWN}, E=5, K=2, S=2, seated=[0, 1])
    seen = layer.play({0: 0.375, 4: 0.125}, scores=[np.log([0.375, 0.0625, 0.01, 0.01, 0.125])])
    assert seen.weights[0] == pytest.approx([3 / 7, 1 / 14], rel=1e-6)


def test_golden_own_weights_of_a_sigmoid():
    # Sigmoids: 0 (log 3) .75, 4 (0) .5, the stand-in 1 (-log 3) .25; the router's weights are the sigmoids. Own .25;
    # row 1.0, was 1.25: .9375 and .3125. Selection scores carry a bias and must not enter the weight.
    layer = Layer({**SUBSTITUTES, **OWN}, E=5, K=2, S=2, seated=[0, 1], sigmoid=True)
    logits = np.array([[math.log(3), -math.log(3), -5, -5, 0]], np.float32)
    seen = layer.play({0: 0.75, 4: 0.5}, scores=[[9, 3, 0, 0, 8]], logits=logits)
    assert seen.executed == [[0, 1]]
    assert seen.weights[0] == pytest.approx([0.9375, 0.3125], rel=1e-6)


def test_golden_own_weights_leave_events_without_substitution_alone():
    layer = Layer({**SUBSTITUTES, **OWN}, E=5, K=2, S=2, seated=[0, 1])
    assert layer.play({1: 0.3, 0: 0.4}).weights == [[float(np.float32(0.3)), float(np.float32(0.4))]]


# ---- starts -----------------------------------------------------------------------------------------------------
def test_golden_warm_start():
    # The three most demanded of [2 5 5 1 9]: 4, then 1 before 2 (tie: lower id), in slots 0 1 2. Plain counts are the
    # calibration's; a decayed one holds rate / (1 - 1/growth): half-life 1 halves every event, so twice the rate.
    rule = policy(**{**FETCHES, "eviction": "lfu_decay", "half_life_tokens": "1"}).rule()
    held = Residency(layers=1, experts=5, top_k=2, slots=3, rule=rule)
    held.warm(Demand(np.array([[2, 5, 5, 1, 9]]), 10))
    experts = held.state.experts[0]
    assert held.state.slots["expert"][0].tolist() == [4, 1, 2]
    assert experts["slot"].tolist() == [-1, 1, 2, -1, 0]
    assert experts["demand"].tolist() == [2, 5, 5, 1, 9]
    assert experts["decayed"].tolist() == pytest.approx([0.4, 1.0, 1.0, 0.2, 1.8])
    assert experts["missing_mass"].tolist() == [0] * 5
    assert held.state.rows["free"][0] == 0


def test_golden_restart_gives_a_lane_its_warm_start_back():
    rule = policy(**FETCHES).rule()
    held = Residency(layers=2, experts=6, top_k=1, slots=2, rule=rule, lanes=2)
    held.warm(Demand(np.array([[5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5]]), 5))
    start = [array.copy() for array in held.state]
    for lane in range(2):
        for layer in range(2):
            held.decide(lane, layer, np.array([[2], [3]]), np.ones((2, 1)), np.zeros((2, 6)))
    moved = [array.copy() for array in held.state]
    held.restart(1)
    assert identical([array[2:] for array in held.state], [array[2:] for array in start])
    assert identical([array[:2] for array in held.state], [array[:2] for array in moved])
    assert not identical(start, moved)
