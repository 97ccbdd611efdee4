"""Prefetching in the simulator. Golden: seconds added up by hand. Laws: a fetch rule decides as if there were none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from policy_cases import POLICIES, policy
from trace_cases import by_hand, stacked

from engine.decision import FETCHED, TAKEN
from engine.errors import UserError
from engine.policies import SCHEDULES
from engine.residency import Demand
from engine.simulator import simulate
from engine.timing import Timing

FETCH = policy(id="fetch", miss_rule="fetch", eviction="lru")
LOSSY = policy(
    id="lossy",
    miss_rule="threshold",
    tau="inf",
    eviction="lru",
    standin="next_best",
    standin_weight="missing",
    standin_recency="yes",
)
SEATED = Demand(np.tile(np.arange(8, 0, -1), (2, 1)), 8)  # E = 8, S = 4: experts 0 to 3 resident in both layers


class Said:
    """names[t][layer]: lists for layer + 1 and layer + 2."""

    def __init__(self, names, width=10):
        self.ids = np.full((len(names), len(names[0]), 2, width), -1, np.int32)
        for t, token in enumerate(names):
            for layer, by_horizon in enumerate(token):
                for h, ids in enumerate(by_horizon):
                    self.ids[t, layer, h, : len(ids)] = ids
        self.claims = np.where(self.ids >= 0, 1.0 / (1 + np.arange(width)), 0.0)

    def chunks(self, tokens):
        for first in range(0, len(self.ids), tokens):
            yield self.ids[first : first + tokens], self.claims[first : first + tokens]


def timing(piece=(1, 6.0), slots=4, top_k=2, **numbers):
    """From the end of an event's fetches to the next routing: 2 of experts and 4 of the layer."""
    numbers = {"experts_s": (0.0, 1.0, 2.0), "fetch_s": (0.0, 8.0, 12.0), **numbers}
    return Timing(
        host="made_up",
        link="line",
        slots=slots,
        expert_bytes=1200,
        token_s=1.0,
        layer_s=4.0,
        event_s=1.0,
        background_s=8.0,
        bandwidth_bytes_per_s=1024.0,
        pieces_s=(piece,),
        **numbers,
    )


def play(events, names, own=FETCH, schedule="pieces", **numbers):
    own = replace(own, prefetch="gate_replay", schedule=schedule)
    trace = by_hand(events, 8)
    return simulate(trace, own, timing(**numbers), demand=SEATED, named=Said(names), keep_log=True)


STILL = {0: 0.75, 1: 0.25}
WANTS_5 = [[STILL, {5: 0.75, 0: 0.25}]]
SAYS_5 = [[[[5], []], [[], []]]]
SAYS_6 = [[[[6], []], [[], []]]]


# ---- golden ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("names", "schedule", "piece", "stall_s", "foreground", "prefetched"),
    [
        (SAYS_5, "pieces", (1, 6.0), 0.0, 0.0, [1, 1]),  # it ends as the layer has routed
        (SAYS_6, "pieces", (1, 6.0), 8.0, 1.0, [1, 0]),  # in vain, and nobody waits for it
        (SAYS_5, "pieces", (2, 4.0), 4.0, 0.5, [0.5, 0.5]),  # one piece of two fits; the other is fetched
        (SAYS_5, "pieces", (1, 7.0), 8.0, 1.0, [0, 0]),  # late
        (SAYS_5, "window", (1, 7.0), 8.0, 1.0, [0, 0]),
        (SAYS_5, "always", (1, 7.0), 0.0, 0.0, [1, 1]),  # 0 left after the decision
        (SAYS_5, "always", (1, 9.0), 2.0, 0.0, [1, 1]),  # 2 left are waited for
        (SAYS_6, "always", (1, 9.0), 10.0, 1.0, [1, 0]),  # 2 left of what nobody wants, then the fetch
    ],
)
def test_golden_one_prefetch(names, schedule, piece, stall_s, foreground, prefetched):
    found = play(WANTS_5, names, schedule=schedule, piece=piece)
    assert found.stall_s.tolist() == [stall_s] and found.foreground.tolist() == [foreground]
    assert found.compute_s.tolist() == [15.0] and found.kinds.tolist() == [[2, 0, 0, 0], [1, 1, 0, 0]]
    assert found.prefetched.tolist() == prefetched
    assert found.bytes == 1200 * (foreground + prefetched[0])
    assert found.summary()["prefetched_taken"] == prefetched[1]


def test_golden_a_record_that_came_in_time_is_taken_and_one_in_part_is_fetched():
    causes = [play(WANTS_5, SAYS_5, piece=piece).log.moves[:, -1].tolist() for piece in ((1, 6.0), (2, 4.0))]
    assert causes == [[TAKEN], [FETCHED]]


def test_golden_a_lossy_rule_fetches_what_has_been_brought_and_substitutes_the_rest():
    light = [[STILL, {0: 0.75, 5: 0.25}]]
    assert play(light, SAYS_5, LOSSY).kinds.tolist() == [[2, 0, 0, 0], [1, 1, 0, 0]]
    assert play(light, SAYS_6, LOSSY).kinds.tolist() == [[2, 0, 0, 0], [1, 0, 1, 0]]
    assert play(light, SAYS_5, LOSSY, piece=(2, 4.0)).kinds.tolist() == [[2, 0, 0, 0], [1, 0, 1, 0]]  # half is not all


def test_golden_what_a_predictor_takes_is_compute():
    found = play(WANTS_5, SAYS_5, predict_s=(("gate_replay", 0.5),))
    assert found.compute_s.tolist() == [15.5]  # once: no layer follows the last one
    busy = [[{6: 0.75, 0: 0.25}, {5: 0.75, 0: 0.25}]]
    assert play(busy, SAYS_5, predict_s=(("gate_replay", 0.5),)).compute_s.tolist() == [15.0]  # while 6 is fetched


# ---- laws ------------------------------------------------------------------------------------------------------------
L, E, K, S = 3, 16, 4, 6


@pytest.fixture(scope="module")
def trace(router_trace):
    return stacked([router_trace(seed, T=160) for seed in range(L)])


def told(trace, kind, seed=0):
    """Predictions of this trace: the truth, its opposite (what is not chosen), or random ids."""
    rng = np.random.default_rng(seed)
    chosen = trace.whole.chosen
    names = []
    for t in range(trace.tokens):
        token = []
        for layer in range(L):
            ahead = []
            for h in (1, 2):
                if layer + h >= L:
                    ahead.append([])
                elif kind == "random":
                    ahead.append(rng.permutation(E)[:K])
                else:
                    own = chosen[t, layer + h].tolist()
                    ahead.append(own if kind == "truth" else [e for e in range(E) if e not in own][:10])
            token.append(ahead)
        names.append(token)
    return Said(names)


PLAIN = [name for name, p in POLICIES.items() if p.lossless and not p.clairvoyant and not p.prefetch and not p.in_place]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["truth", "opposite", "random"])
@pytest.mark.parametrize("name", PLAIN)
def test_law_a_fetch_rule_decides_the_same_whatever_is_prefetched(trace, name, kind, schedule):
    at = timing(slots=S, top_k=K, piece=(1, 2.0), experts_s=(0, 1, 2, 3, 4), fetch_s=(0, 5, 6, 7, 8))
    demand = trace.whole.demand()
    plain = simulate(trace, POLICIES[name], at, demand=demand, keep_log=True)
    own = replace(POLICIES[name], prefetch="gate_replay", schedule=schedule)
    found = simulate(trace, own, at, demand=demand, named=told(trace, kind), keep_log=True)
    for array in ("executed", "weights", "kind", "first", "g"):
        assert getattr(found.log, array).tobytes() == getattr(plain.log, array).tobytes()
    assert found.log.moves[:, :-1].tobytes() == plain.log.moves[:, :-1].tobytes()  # victims and slots too
    taken = found.moves[:, TAKEN].sum()
    assert found.prefetched[0] > 0 and (taken > 0) == (kind != "opposite")
    assert found.prefetched[1] <= found.prefetched[0]
    if kind == "truth":
        assert found.stall_s.sum() < plain.stall_s.sum()


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_law_chunks_change_nothing(trace, tokens):
    own = replace(LOSSY, prefetch="gate_replay", schedule="pieces", beta=0.25)
    at = timing(slots=S, top_k=K, piece=(3, 2.0), experts_s=(0, 1, 2, 3, 4), fetch_s=(0, 5, 6, 7, 8))
    whole, parts = (
        simulate(trace, own, at, named=told(trace, "random"), keep_log=True, chunk_tokens=n) for n in (None, tokens)
    )
    assert whole.token_s.tolist() == parts.token_s.tolist()
    assert whole.log.moves.tobytes() == parts.log.moves.tobytes()


def test_a_policy_that_prefetches_needs_predictions_of_this_trace(trace):
    own = replace(FETCH, prefetch="gate_replay", schedule="pieces")
    at = timing(slots=S, top_k=K, experts_s=(0, 1, 2, 3, 4), fetch_s=(0, 5, 6, 7, 8))
    with pytest.raises(UserError, match="without predictions"):
        simulate(trace, own, at)
    with pytest.raises(UserError, match="as the trace"):
        simulate(trace, own, at, named=Said(SAYS_5))
