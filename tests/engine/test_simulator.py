"""The simulator. Golden: seconds of tiny traces added up by hand. Laws: what no link can change. Agreement: the
decision log of the other instruments, whatever the chunks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from policy_cases import BACKGROUND, FETCHING, IN_PLACE, POLICIES, TIMED, policy, residency
from trace_cases import Chunked, by_hand, stacked

import engine.clock
import engine.decision
import engine.scheduler
from engine.decision import ARRIVED, ISSUED, PROMOTED
from engine.errors import UserError
from engine.geometry import Geometry
from engine.host import load_hosts
from engine.log import count
from engine.residency import Demand
from engine.simulator import decide, miss_curves, open_loop_error, simulate
from engine.timing import Timing, limit_bytes_per_s, offload_links
from engine.trace import replay

ROOT = Path(__file__).parents[2]
HOSTS = load_hosts(ROOT / "config/hosts")
L, E, K, S = 3, 16, 4, 6
LEARNS = policy(
    id="learns",
    miss_rule="threshold",
    tau="inf",
    eviction="lru",
    standin="next_best",
    standin_weight="missing",
    standin_recency="yes",
    beta="0.25",
)


def timing(slots=S, top_k=K, **numbers):
    """Made-up seconds: a fetch costs as much as a layer, a background record twice that."""
    numbers = {
        "token_s": 1.0,
        "layer_s": 4.0,
        "event_s": 1.0,
        "experts_s": tuple(float(n) for n in range(top_k + 1)),
        "fetch_s": tuple(4.0 + n if n else 0.0 for n in range(top_k + 1)),
        "background_s": 8.0,
        "bandwidth_bytes_per_s": 1024.0,
        **numbers,
    }
    return Timing(host="made_up", link="line", slots=slots, expert_bytes=1024, **numbers)


FREE = {"fetch_s": (0.0,) * (K + 1), "background_s": 0.0, "bandwidth_bytes_per_s": np.inf}


def at_link(slower: float, **numbers):
    """fetch_s and background_s `slower` times as long."""
    plain = timing(**numbers)
    return replace(
        plain,
        fetch_s=tuple(slower * s for s in plain.fetch_s),
        background_s=slower * plain.background_s,
        bandwidth_bytes_per_s=plain.bandwidth_bytes_per_s / slower,
    )


@pytest.fixture(scope="module")
def trace(router_trace):
    return stacked([router_trace(seed, T=240) for seed in range(L)])


@pytest.fixture(scope="module")
def demand(trace):
    return trace.whole.demand()


def same(a, b):
    names = ("executed", "weights", "kind", "first", "g", "moves")
    return [name for name in names if getattr(a, name).tobytes() != getattr(b, name).tobytes()] == []


# ---- golden: E=8, K=2, S=4, one layer, experts 0 to 3 resident -------------------------------------------------------
SEATED = Demand(np.arange(8, 0, -1)[None], 8)
HAND = {"slots": 4, "top_k": 2, "fetch_s": (0.0, 8.0, 12.0)}  # a token without a wait: 4 + 1 + 2 + 1 = 8 seconds


def play(events, **numbers):
    trace = by_hand([[event] for event in events], 8)
    return simulate(trace, LEARNS, timing(**HAND, **numbers), demand=SEATED, keep_log=True)


def test_golden_foreground_transit_and_promotion():
    found = play(
        [
            {4: 0.75, 0: 0.25},  # 4 is fetched, 1 leaves: 8 of wait
            {0: 0.5, 5: 0.5},  # 2 stands in for 5, whose load (3 leaves) sets out with the head: 6.5 - 1 left
            {0: 0.75, 5: 0.25},  # 1.5 left when the layer has routed: 2 stands in again; it ends during the experts
            {5: 0.75, 0: 0.25},  # resident
            {6: 0.25, 0: 0.75},  # 2 stands in for 6, whose load sets out, 5.5 left
            {6: 0.75, 0: 0.25},  # 6 is first choice with 0.5 left after the decision: waited for
            {0: 0.75, 4: 0.25},  # 2 stands in for 4, whose load sets out
            {7: 0.75, 0: 0.25},  # 7 is fetched behind the 0.5 left of 4
            {0: 0.75, 4: 0.25},  # resident
        ],
        background_s=6.5,
    )
    assert found.stall_s.tolist() == [8, 0, 0, 0, 0, 0.5, 0, 8.5, 0]
    assert found.compute_s.tolist() == found.work_s.tolist() == [8] * 9
    assert found.delays.tolist() == [2, 2]
    assert found.kinds.tolist() == [[11, 3, 4, 0]]
    assert found.moves.tolist() == [[2, 1, 3, 2, 0]]
    assert found.loads == 5 and found.bytes == 5 * 1024 and found.waiting == 0
    assert found.foreground.tolist() == [1, 0, 0, 0, 0, 0, 0, 1, 0]


def test_golden_a_queued_load_that_is_needed_is_fetched_with_the_others():
    found = play(
        [
            {0: 0.75, 5: 0.25},  # 5 sets out: 99 left at the end
            {0: 0.75, 6: 0.25},  # 6 waits behind it: 91
            {6: 0.75, 0: 0.25},  # 86 left after the decision, then the fetch of 6
            {0: 0.75, 5: 0.25},  # resident three tokens after it was asked for
        ],
        background_s=100.0,
    )
    assert found.stall_s.tolist() == [0, 0, 86 + 8, 0]
    assert found.delays.tolist() == [3] and found.moves.tolist() == [[0, 1, 2, 1, 0]]
    assert found.foreground.sum() == 1 and found.loads == 2


def test_golden_a_queued_load_follows_the_foreground():
    """6 waits behind 5; 7 is fetched after 5 has ended and before 6 sets out."""
    found = play(
        [
            {0: 0.75, 5: 0.25},
            {0: 0.75, 6: 0.25},  # 5 has 91 left
            {7: 0.75, 0: 0.25},  # 86, then 8; 6 sets out beside the experts: 100 - 3 left at the end
            {0: 0.75, 5: 0.25},  # resident; 89 left
            {6: 0.75, 0: 0.25},  # 84 left after the decision
        ],
        background_s=100.0,
    )
    assert found.stall_s.tolist() == [0, 0, 94, 0, 84]


def test_golden_compute_and_transfer_slow_each_other_down():
    """Beside compute a record of 4 seconds takes 8, and 8 seconds of work take 16."""
    found = play(
        [{0: 0.75, 5: 0.25}, {0: 0.75, 1: 0.25}],
        background_s=4.0,
        slowdown_compute=2.0,
        slowdown_transfer=2.0,
    )
    assert found.compute_s.tolist() == [4 + 1 + 2 + 2, 6 + 1 + 1 + 2 + 1]  # 3 of the layer's 4 are done when it ends
    assert found.work_s.tolist() == [8, 8]
    assert found.stall_s.tolist() == [0, 0]


def test_golden_layers_share_the_link():
    """5 of layer 1 waits for 5 of layer 0; each arrives at its own layer's event."""
    events = [[{0: 0.75, 5: 0.25}] * 2, [{0: 0.75, 1: 0.25}] * 2, [{0: 0.75, 5: 0.25}] * 2]
    demand = Demand(np.tile(SEATED.counts, (2, 1)), 8)
    found = simulate(by_hand(events, 8), LEARNS, timing(**HAND, background_s=16.0), demand=demand, keep_log=True)
    # layer 0 issues at 7, layer 1 at 14: ends at 23 and 39; tokens begin at 0, 15, 30 and route 4 and 11 later
    assert found.delays.tolist() == [2, 2]
    slower = simulate(by_hand(events, 8), LEARNS, timing(**HAND, background_s=18.0), demand=demand, keep_log=True)
    assert slower.delays.tolist() == [2]  # 25 and 43, after layer 1 routed at 41
    assert slower.kinds[:, 0].tolist() == [5, 4]


# ---- laws ------------------------------------------------------------------------------------------------------------
CAUSAL = {name: p for name, p in TIMED.items() if not p.clairvoyant}
over_causal = pytest.mark.parametrize("name", CAUSAL)
over_all = pytest.mark.parametrize("name", TIMED)


@over_all
def test_law_on_a_free_link_a_token_is_compute_alone(name, trace, demand):
    found = simulate(trace, POLICIES[name], timing(**FREE), demand=demand)
    assert (found.stall_s == 0).all()
    assert found.token_s.tobytes() == found.work_s.tobytes()
    dropped = found.kinds[:, 3].sum()
    assert found.token_s.sum() == trace.tokens * (1 + L * (4 + 1 + K)) - dropped


@over_all
def test_law_everything_resident_never_waits(name, trace, demand):
    found = simulate(trace, POLICIES[name], timing(slots=E), demand=demand)
    assert (found.stall_s == 0).all() and found.loads == 0
    assert found.kinds[:, 0].tolist() == [K * trace.tokens] * L


@over_all
def test_law_counts_and_bytes(name, trace, demand):
    found = simulate(trace, POLICIES[name], timing(), demand=demand, keep_log=True)
    counts = count(found.log)
    assert found.kinds.sum(axis=1).tolist() == [K * trace.tokens] * L
    assert found.bytes == counts["loads"] * 1024
    names = ("hits", "fetches", "substitutions", "drops")
    assert dict(zip(names, found.kinds.sum(axis=0), strict=True)) == {n: counts[n] for n in names}
    assert found.mass.sum(axis=0) / counts["events"] == pytest.approx(
        [counts["substituted_mass"], counts["dropped_mass"]]
    )
    issued, promoted, arrived = (found.moves[:, cause].sum() for cause in (ISSUED, PROMOTED, ARRIVED))
    assert issued - promoted - arrived == found.waiting + _arriving(found)
    assert found.foreground.sum() + issued - promoted <= found.loads + promoted


def _arriving(found):
    """Loads whose transfer has ended in an event after which their layer had none: what the three counts leave."""
    left = found.moves[:, ISSUED].sum() - found.moves[:, PROMOTED].sum() - found.moves[:, ARRIVED].sum()
    assert 0 <= left - found.waiting <= L * (S - K)
    return left - found.waiting


@pytest.mark.parametrize("name", FETCHING)
def test_law_a_slower_link_is_never_faster(name, trace, demand):
    """Under a policy whose decisions do not depend on the clock, token by token."""
    times = [simulate(trace, POLICIES[name], at_link(x), demand=demand).token_s for x in (0.5, 1.0, 2.0, 4.0)]
    assert all((slower >= faster).all() for faster, slower in pairwise(times))
    assert times[0].sum() < times[-1].sum()


@pytest.mark.parametrize("slower", [0.0, 0.25, 1.0, 20.0])
@over_causal
def test_law_no_token_beats_its_ceiling(name, slower, trace, demand):
    found = simulate(trace, CAUSAL[name], at_link(slower) if slower else timing(**FREE), demand=demand)
    assert (found.token_s >= found.ceiling_s * (1 - 1e-12)).all()


@pytest.mark.parametrize("name", BACKGROUND)
def test_law_the_clock_with_a_fast_link_is_next_step(name, trace, demand):
    found = simulate(trace, POLICIES[name], timing(**FREE), demand=demand, keep_log=True)
    expected = decide(trace, POLICIES[name], slots=S, demand=demand)
    assert len(found.delays) and (found.delays == 1).all()
    for field in ("executed", "weights", "kind", "first", "g"):
        assert getattr(found.log, field).tobytes() == getattr(expected, field).tobytes(), field
    assert sorted(map(tuple, found.log.moves)) == sorted(map(tuple, expected.moves))  # arrivals of a step: any order


@pytest.mark.parametrize("name", BACKGROUND)
def test_law_background_that_never_starts_costs_what_none_costs(name, trace, demand):
    a = simulate(trace, replace(POLICIES[name], beta=None), timing(), demand=demand, keep_log=True)
    b = simulate(trace, replace(POLICIES[name], beta=1e30), timing(), demand=demand, keep_log=True)
    assert same(a.log, b.log)
    assert a.stall_s.tobytes() == b.stall_s.tobytes() and a.foreground.tobytes() == b.foreground.tobytes()
    assert a.compute_s == pytest.approx(b.compute_s)


def test_law_a_slower_link_delays_background_loads(trace, demand):
    delays = [
        np.median(simulate(trace, POLICIES["quality_first"], at_link(x), demand=demand).delays) for x in (0.1, 5, 20)
    ]
    assert delays == sorted(delays) and delays[0] == 1 and delays[-1] > 1


def test_law_background_alone_hides_behind_compute(trace, demand):
    """substitute_all waits for nothing, and what it loads in the background costs no time."""
    rule = replace(POLICIES["substitute_all"], beta=0.5)
    found = simulate(trace, rule, at_link(0.5), demand=demand)
    assert found.loads > 100
    assert found.stall_s.sum() == 0 and found.token_s.tolist() == pytest.approx(found.work_s.tolist())


# ---- agreement -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("delay", [1, 5])
@over_causal
def test_agreement_decisions_are_the_emulators(name, delay, trace, demand):
    """Layer after layer, as the emulator decides."""
    found = decide(trace, CAUSAL[name], slots=S, demand=demand, delay=delay, chunk_tokens=50)
    held = residency(CAUSAL[name], E, K, S, delay=delay, layers=L)
    held.warm(demand)
    whole = trace.whole
    for layer in range(L):
        log, moves = held.decide(0, layer, whole.chosen[:, layer], whole.weights[:, layer], whole.scores[:, layer])
        for field in ("executed", "weights", "kind", "first", "g"):
            assert (getattr(found, field)[:, layer] == getattr(log, field)).all(), field
        table = found.moves[found.moves[:, 0] == layer]
        assert (table[:, 1:] == np.stack([moves[n] for n in moves.dtype.names], axis=1)).all()


@pytest.mark.parametrize("name", FETCHING)
def test_agreement_a_fetching_policy_is_the_replay(name, trace, demand):
    expected = replay(trace.whole, FETCHING[name], slots=S, demand=demand)
    assert same(decide(trace, FETCHING[name], slots=S, demand=demand, chunk_tokens=7), expected)
    assert same(simulate(trace, FETCHING[name], timing(), demand=demand, keep_log=True).log, expected)


@pytest.mark.parametrize("chunk", [1, 17, 240])
@over_all
def test_agreement_chunks_change_nothing(name, chunk, trace):
    whole = simulate(trace, POLICIES[name], timing(), keep_log=True)
    parts = simulate(trace, POLICIES[name], timing(), keep_log=True, chunk_tokens=chunk)
    assert same(whole.log, parts.log)
    for field in ("work_s", "compute_s", "stall_s", "kinds", "mass", "moves", "foreground", "delays"):
        assert getattr(whole, field).tobytes() == getattr(parts, field).tobytes(), field


def test_agreement_recorded_logits_weigh_the_standins(trace):
    """A model whose selection scores are not its logits: own weights follow the logits."""
    whole = trace.whole
    logits = np.flip(whole.scores, axis=2).copy()
    other = Chunked(whole.chosen, whole.weights, whole.scores, logits=logits)
    ours = decide(other, POLICIES["rule_015"], slots=S)
    held = residency(POLICIES["rule_015"], E, K, S, layers=L)
    log, _ = held.decide(0, 1, whole.chosen[:, 1], whole.weights[:, 1], whole.scores[:, 1], logits[:, 1])
    assert ours.weights[:, 1].tobytes() == np.ascontiguousarray(log.weights).tobytes()
    assert not same(ours, decide(trace, POLICIES["rule_015"], slots=S))


def test_the_open_loop_error_is_a_table_of_counts(trace):
    ours = decide(trace, POLICIES["rule_015"], slots=S)
    theirs = decide(trace, POLICIES["rule_015"], slots=S + 2)
    table = open_loop_error(ours, theirs)
    assert table["hits"]["error"] == count(ours)["hits"] - count(theirs)["hits"] < 0
    assert all(row["error"] == 0 for row in open_loop_error(ours, ours).values())
    with pytest.raises(UserError, match="one text"):
        open_loop_error(ours, replace(theirs, kind=theirs.kind[1:]))


# ---- miss-ratio curves -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("warm", [False, True])
def test_curves_share_one_read_and_keep_the_laws(warm, trace, demand):
    budgets = range(K, E + 1)
    reads = trace.reads
    rows = miss_curves(
        trace,
        [p for name, p in FETCHING.items() if not p.clairvoyant],
        budgets,
        demand=demand if warm else None,
        chunk_tokens=50,
    )
    assert trace.reads == reads + 1
    rows += miss_curves(trace, [POLICIES["fetch_belady"]], budgets, demand=demand if warm else None, chunk_tokens=50)
    assert trace.reads == reads + 3  # the future is a read of its own
    misses = {(row["policy"], row["slots"]): row["misses"] for row in rows}
    lru = [misses["fetch_lru", slots] for slots in budgets]
    assert lru == sorted(lru, reverse=True) and lru[0] > lru[-1]
    for slots in budgets:
        assert misses["fetch_belady", slots] == min(misses[name, slots] for name in FETCHING)
    assert {row["loads"] == row["fetches"] == row["misses"] for row in rows} == {True}


def test_curves_count_what_a_run_counts(trace, demand):
    for row in miss_curves(trace, [POLICIES["fetch_lru"], POLICIES["quality_first"]], [5, 9], demand=demand):
        counts = count(decide(trace, POLICIES[row["policy"]], slots=row["slots"], demand=demand))
        assert (row["misses"], row["loads"]) == (counts["demands"] - counts["hits"], counts["loads"])
        assert row["miss_rate"] == pytest.approx(counts["miss_rate"])


# ---- numbers of a host -----------------------------------------------------------------------------------------------
CONFIG = json.loads((ROOT / "models/reference/config.json").read_text())


def test_golden_what_the_reference_model_weighs():
    own = Geometry.of_config(CONFIG)
    assert (own.layers, own.experts, own.top_k) == (4, 256, 10)
    assert own.expert_bytes == 3 * 256 * 32 * 2
    assert own.dense_bytes == 2 * (2 * 4 * 64 * 256 + 2 * 2 * 64 * 256 + 256 * 256 + 2 * 256 + 2 * 64)
    assert own.kv_bytes == 2 * 2 * 64 * 2
    assert own.head_bytes == 4096 * 256 * 2
    wide = Geometry.of_config(CONFIG, width=1024, expert_width=512, dtype="float32")
    assert wide.expert_bytes == 3 * 1024 * 512 * 4
    assert wide.dense_bytes == 4 * (2 * 16 * 64 * 1024 + 2 * 8 * 64 * 1024 + 256 * 1024 + 2 * 1024 + 2 * 64)
    assert wide.kv_bytes == 2 * 8 * 64 * 4 and wide.head_bytes == 4096 * 1024 * 4


@pytest.mark.parametrize(
    ("change", "sizes", "match"),
    [
        ({}, {"width": 512}, "power of four"),
        ({}, {"width": 300}, "power of four"),
        ({}, {"expert_width": 16}, "at least"),
        ({}, {"dtype": "bfloat"}, "bfloat16"),
        ({"n_shared_experts": 1}, {"width": 1024}, "n_shared_experts, inflated"),
        ({"model_type": "olmoe"}, {"expert_width": 64}, "model_type, inflated"),
        ({"num_experts": None}, {"width": 1024}, "no routed experts, inflated"),
    ],
    ids=["ratio", "fraction", "narrow", "dtype", "shared", "family", "dense"],
)
def test_a_model_that_the_formulas_do_not_cover_is_not_inflated(change, sizes, match):
    config = {name: value for name, value in {**CONFIG, **change}.items() if value is not None}
    with pytest.raises(UserError, match=match):
        Geometry.of_config(config, **sizes)


def test_golden_times_of_a_shipped_host():
    geometry = Geometry.of_config(CONFIG, width=1024, expert_width=512)
    found = Timing.of(HOSTS["rtx3090_pcie4"], "pcie", geometry, 64)
    assert found.fetch_s[3] == pytest.approx(6e-6 + 3 * geometry.expert_bytes / 25e9)
    assert found.background_s == found.fetch_s[1] == pytest.approx(6e-6 + geometry.expert_bytes / 25e9)
    assert found.fetch_s[0] == found.experts_s[0] == 0
    assert found.layer_s == pytest.approx(1e-3 + geometry.dense_bytes / 782e9)
    longer = Timing.of(HOSTS["rtx3090_pcie4"], "pcie", geometry, 64, context_tokens=1000)
    assert longer.layer_s - found.layer_s == pytest.approx(1000 * geometry.kv_bytes / 782e9)


def test_golden_from_disk_to_gpu_a_record_passes_two_links():
    geometry = Geometry.of_config(CONFIG, width=1024, expert_width=512)
    found = Timing.of(HOSTS["rtx3090_nvme_16gb"], "disk", geometry, 64)
    disk, pcie = geometry.expert_bytes / 7e9, geometry.expert_bytes / 25e9
    assert found.fetch_s[3] == pytest.approx(4.5e-5 + 3 * disk + 6e-6 + pcie)  # the disk is the slower
    assert found.background_s == pytest.approx(4.5e-5 + disk + 6e-6 + pcie)
    assert found.bandwidth_bytes_per_s == 7e9


def test_links_that_lead_nowhere_are_named_with_their_reason():
    simulated, skipped = offload_links(HOSTS["rtx3090_pcie4"])
    assert list(simulated) == ["pcie"] and "no way onto the GPU" in skipped["memory"]
    geometry = Geometry.of_config(CONFIG)
    with pytest.raises(UserError, match="no way onto the GPU"):
        Timing.of(HOSTS["rtx3090_pcie4"], "memory", geometry, 64)
    with pytest.raises(UserError, match="did you mean 'pcie'"):
        Timing.of(HOSTS["rtx3090_pcie4"], "pci", geometry, 64)


def test_a_profile_says_behind_which_links_experts_wait():
    host = HOSTS["rtx3090_nvme_16gb"]
    simulated, skipped = offload_links(host)
    assert list(simulated) == ["disk"] and "as the profile says" in skipped["pcie"]
    assert (
        limit_bytes_per_s(host, "disk") == host.links["disk"].limit_bytes_per_s < host.links["pcie"].limit_bytes_per_s
    )
    both, _ = offload_links(dataclasses.replace(host, offload=None))
    assert list(both) == ["disk", "pcie"]


def test_a_summary_is_a_record(trace, demand):
    summary = simulate(trace, POLICIES["quality_first"], timing(), demand=demand).summary()
    json.dumps(summary, allow_nan=False)
    assert summary["median_token_s"] <= summary["p95_token_s"]
    assert summary["ceiling_token_s"] <= summary["mean_token_s"]
    assert summary["mean_token_s"] == pytest.approx(summary["mean_compute_s"] + summary["mean_stall_s"])
    assert sum(summary["hits_by_layer"]) == summary["hits"]
    assert summary["open_loop"] and summary["background_arrived"] > 0


# ---- refused ---------------------------------------------------------------------------------------------------------
def test_a_rule_that_substitutes_needs_scores(trace):
    whole = trace.whole
    bare = Chunked(whole.chosen, whole.weights, whole.scores)
    bare.whole = replace(whole, scores=None)
    for name in ("rule_015", "quality_first"):
        with pytest.raises(UserError, match="no selection scores"):
            simulate(bare, POLICIES[name], timing())
    simulate(bare, POLICIES["fetch_lru"], timing())


@pytest.mark.parametrize("name", ["rule_015", "quality_first"])
def test_an_event_that_is_not_finite_is_named(name, trace):
    whole = trace.whole
    scores = whole.scores.copy()
    scores[5, 2, 3] = np.nan
    with pytest.raises(UserError, match="event 5 of layer 2: router output that is not finite"):
        simulate(Chunked(whole.chosen, whole.weights, scores), POLICIES[name], timing())


def test_times_of_another_model_are_refused(trace):
    with pytest.raises(UserError, match="K = 4"):
        simulate(trace, POLICIES["fetch_lru"], timing(top_k=2, slots=S))
    with pytest.raises(UserError, match="delay of 0"):
        decide(trace, POLICIES["fetch_lru"], slots=S, delay=0)


def test_the_compiled_clock_is_bound_to_the_decision():
    """numba's cache on disk does not see that a called file has changed; the hash in the closure makes it look anew."""
    closure = [cell.cell_contents for cell in engine.clock.run.py_func.__closure__]
    sources = (Path(module.__file__).read_bytes() for module in (engine.decision, engine.scheduler))
    assert closure == [hashlib.sha256(b"".join(sources)).hexdigest()]


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_policy_that_computes_in_place_is_refused_by_name(name, trace, demand):
    said = rf"^policy '{name}' \(eviction frozen\) in the simulator; expected a policy that fetches .*; run it in the"
    for run in (
        lambda: simulate(trace, IN_PLACE[name], timing(), demand=demand),
        lambda: decide(trace, IN_PLACE[name], slots=S, demand=demand),
        lambda: miss_curves(trace, [IN_PLACE[name]], [S], demand=demand),
    ):
        with pytest.raises(UserError, match=said):
            run()
