"""The decision log and the replay of traces: counts by hand, round trip, and files that are cut, foreign or wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from policy_cases import FETCHING, IN_PLACE, LOSSY, POLICIES, run
from safetensors.numpy import save_file

from engine import decision
from engine.decision import ARRIVED, DROP, FETCH, FETCHED, HIT, ISSUED, PROMOTED, SUBSTITUTE
from engine.errors import UserError
from engine.log import DecisionLog, add_counts, count, load_log
from engine.trace import RouterTrace, replay

ARRAYS = ("executed", "weights", "kind", "first", "g", "moves")


def small_log(**provenance):
    """Two events of one layer, top-3.

    Event 0: hit (g .5), substituted (.375), fetched (.125); the first choice is position 0. Event 1: dropped (.5, the
    first choice), hit (.25), substituted (.25). Moves: one fetch, one load issued and arrived, one issued and promoted.
    """
    return DecisionLog(
        executed=np.array([[[0, 1, 2]], [[-1, 0, 1]]], np.int16),
        weights=np.array([[[0.5, 0.375, 0.125]], [[0, 0.25, 0.25]]], np.float32),
        kind=np.array([[[HIT, SUBSTITUTE, FETCH]], [[DROP, HIT, SUBSTITUTE]]], np.int8),
        first=np.array([[0], [0]], np.int8),
        g=np.array([[[0.5, 0.375, 0.125]], [[0.5, 0.25, 0.25]]], np.float32),
        moves=np.array(
            [
                [0, 0, 2, 2, 5, FETCHED],
                [0, 0, 7, 1, 6, ISSUED],
                [0, 0, 8, 0, 9, ISSUED],
                [0, 1, 7, 1, -1, ARRIVED],
                [0, 1, 8, 0, -1, PROMOTED],
            ],
            np.int32,
        ),
        provenance=provenance,
    )


def test_law_counts_of_two_logs_are_those_of_both_together():
    """The second is longer, so that a mean of means would show."""
    one, other = small_log(), small_log()
    other = replace(other, **{name: np.concatenate([getattr(other, name)] * 3)[1:] for name in ARRAYS})
    both = replace(one, **{name: np.concatenate([getattr(one, name), getattr(other, name)]) for name in ARRAYS})
    assert count(one)["substituted_mass"] != count(other)["substituted_mass"]
    assert add_counts(count(one), count(other)) == pytest.approx(count(both))


def test_golden_what_is_computed_in_place_is_no_fetch_and_no_load():
    # The fetch of the small log becomes IN_PLACE (4), its move goes: a miss still, two loads.
    log = small_log()
    kind = np.where(log.kind == FETCH, np.int8(decision.IN_PLACE), log.kind)
    counts = count(replace(log, kind=kind, moves=log.moves[1:]))
    assert {name: counts[name] for name in ("hits", "fetches", "in_place", "loads")} == {
        "hits": 2,
        "fetches": 0,
        "in_place": 1,
        "loads": 2,
    }
    assert counts["miss_rate"] == pytest.approx(4 / 6)


def test_bug_counts_of_an_older_record_have_no_in_place():
    old = count(small_log())
    del old["in_place"]
    for one, other in ((old, count(small_log())), (count(small_log()), old), (old, old)):
        both = add_counts(one, other)
        assert both["fetches"] == 2 and both.get("in_place", 0) == 0


def test_golden_counts():
    # Six demands: two hits, a fetch, two substitutions (.375 and .25 over two events: .3125), one drop (.5: .25). Of
    # the two first choices one was dropped. Loads: one fetched, two issued; the promoted one was issued before.
    assert count(small_log()) == {
        "events": 2,
        "demands": 6,
        "hits": 2,
        "fetches": 1,
        "substitutions": 2,
        "drops": 1,
        "in_place": 0,
        "first_choices_changed": 1,
        "miss_rate": pytest.approx(4 / 6),
        "substituted_share": pytest.approx(2 / 6),
        "substituted_mass": 0.3125,
        "dropped_mass": 0.25,
        "background_issued": 2,
        "background_arrived": 1,
        "promoted": 1,
        "prefetched": 0,
        "loads": 3,
    }


@pytest.mark.parametrize("name", POLICIES)
def test_law_what_is_loaded_was_missed(name, router_trace):
    """Loads are fetches and issues; every promotion or arrival was issued once; the rest still pends."""
    trace = router_trace(30)
    log, moves, held = run(POLICIES[name], trace, 7, delay=3)
    g = trace.weights / trace.weights.sum(axis=1, keepdims=True)
    table = np.stack([np.zeros(len(moves), np.int32), *(moves[field] for field in moves.dtype.names)], axis=1)
    whole = DecisionLog(
        log.executed[:, None], log.weights[:, None], log.kind[:, None], log.first[:, None], g[:, None], table
    )
    counts = count(whole)
    kinds = ("hits", "fetches", "substitutions", "drops", "in_place")
    assert sum(counts[name] for name in kinds) == counts["demands"] == 800
    assert counts["fetches" if name in IN_PLACE else "in_place"] == 0
    pending = int(held.state.rows["pending"][0])
    assert counts["background_issued"] == counts["background_arrived"] + counts["promoted"] + pending
    assert counts["loads"] == counts["fetches"] - counts["promoted"] + counts["background_issued"]
    lossy = counts["substituted_mass"] + counts["dropped_mass"]
    assert lossy > 0 if name in LOSSY else lossy == 0


# ---- files ------------------------------------------------------------------------------------------------------
@pytest.fixture
def written(tmp_path):
    path = tmp_path / "run.safetensors"
    small_log(policy="rule_015", commit="abc").save(path)
    return path


def test_a_saved_log_loads_again(written):
    log, expected = load_log(written), small_log()
    assert log.provenance == {"policy": "rule_015", "commit": "abc"}
    for name in ARRAYS:
        assert getattr(log, name).dtype == getattr(expected, name).dtype
        assert (getattr(log, name) == getattr(expected, name)).all()
    assert count(log) == count(expected)
    assert [p.name for p in written.parent.iterdir()] == [written.name]


def test_a_log_cut_anywhere_is_refused(written):
    whole = written.read_bytes()
    for size in (0, 4, 8, 20, len(whole) // 2, len(whole) - 1):
        written.write_bytes(whole[:size])
        with pytest.raises(UserError) as raised:
            load_log(written)
        assert str(raised.value).startswith(f"{written}: ")
        assert "expected a whole decision log" in str(raised.value)


def test_a_foreign_file_is_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    path.write_text("id\tmiss_rule\n")
    with pytest.raises(UserError, match=r"other\.safetensors"):
        load_log(path)
    save_file({"executed": np.zeros((2, 1, 3), np.int16)}, path)
    with pytest.raises(UserError, match=r"other\.safetensors is not a decision log"):
        load_log(path)
    save_file({"executed": np.zeros((2, 1, 3), np.int16)}, path, metadata={"expertmiss": "decision-log-0"})
    with pytest.raises(UserError, match=r"other\.safetensors is not a decision log"):
        load_log(path)
    save_file(
        {"executed": np.zeros((2, 1, 3), np.int16)}, path, metadata={"expertmiss": '{"schema": "decision-log-1"}'}
    )
    with pytest.raises(UserError, match=r"other\.safetensors: .*weights"):
        load_log(path)


def test_an_absent_log_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"absent\.safetensors"):
        load_log(tmp_path / "absent.safetensors")


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("executed", np.zeros((2, 1, 3), np.int32)),
        ("weights", np.zeros((2, 1, 3), np.float64)),
        ("kind", np.zeros((2, 1, 2), np.int8)),
        ("first", np.zeros((3, 1), np.int8)),
        ("g", np.zeros((2, 3), np.float32)),
        ("moves", np.zeros((5, 5), np.int32)),
    ],
)
def test_arrays_that_do_not_fit_are_refused(name, array, written):
    arrays = {n: getattr(small_log(), n) for n in ARRAYS} | {name: array}
    save_file(arrays, written, metadata={"expertmiss": '{"schema": "decision-log-1"}'})
    with pytest.raises(UserError, match=rf"run\.safetensors: .*{name}.* of another type or shape"):
        load_log(written)


def test_a_log_that_cannot_be_written_leaves_nothing(tmp_path):
    path = tmp_path / "run.safetensors"
    path.write_text("old")
    broken = small_log()
    object.__setattr__(broken, "g", np.array([object()]))
    with pytest.raises(Exception, match="object"):
        broken.save(path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_provenance_is_plain_text_in_the_header(written):
    raw = written.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header["__metadata__"].keys() == {"expertmiss"}  # one key: the same log gives the same bytes
    facts = json.loads(header["__metadata__"]["expertmiss"])
    assert facts == {"schema": "decision-log-1", "policy": "rule_015", "commit": "abc"}


# ---- replay -----------------------------------------------------------------------------------------------------
def as_router_trace(traces):
    scores = [np.take_along_axis(t.scores, t.chosen, axis=1) for t in traces]
    columns = ([t.chosen.astype(np.int16) for t in traces], [t.weights for t in traces], scores)
    return RouterTrace(*(np.stack(column, axis=1) for column in columns), experts=16)


@pytest.mark.parametrize("name", FETCHING)
def test_law_a_replay_decides_as_the_decision_does(name, router_trace):
    traces = [router_trace(seed, T=100) for seed in (40, 41)]
    log = replay(as_router_trace(traces), FETCHING[name], slots=6, demand=None)
    for layer, trace in enumerate(traces):
        if FETCHING[name].eviction == "random" and layer:
            continue  # it depends on the layer's number
        alone, moves, _ = run(FETCHING[name], trace, 6)
        assert (log.executed[:, layer] == alone.executed).all() and (log.kind[:, layer] == alone.kind).all()
        assert (log.executed[:, layer] == trace.chosen).all()
        assert log.weights[:, layer].tobytes() == trace.weights.tobytes()
        own = log.moves[log.moves[:, 0] == layer]
        assert (own[:, 1:] == np.stack([moves[field] for field in moves.dtype.names], axis=1)).all()


def test_a_lossy_policy_over_a_trace_is_refused(router_trace):
    trace = as_router_trace([router_trace(42)])
    with pytest.raises(UserError, match=r"policy 'rule_015' \(miss rule threshold\) over a trace"):
        replay(trace, POLICIES["rule_015"], slots=6, demand=None)
    with pytest.raises(UserError, match="3 slots a layer"):
        replay(trace, POLICIES["fetch_lru"], slots=3, demand=None)


def test_golden_demand_of_a_trace():
    # Expert 0 is chosen in all three events, 1 twice, 3 once; E = 4.
    chosen = np.array([[[0, 1]], [[1, 0]], [[0, 3]]], np.int16)
    flat = np.full((3, 1, 2), 0.5, np.float32)
    demand = RouterTrace(chosen, flat, flat, experts=4).demand()
    assert demand.counts.tolist() == [[3, 2, 0, 1]]
    assert demand.events == 3
    assert demand.rate[0].tolist() == pytest.approx([1, 2 / 3, 0, 1 / 3])
