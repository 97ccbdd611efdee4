"""The public edge of the decision: what does not fit is refused before compiled code, which checks nothing, sees it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from policy_cases import POLICIES, residency

from engine.decision import FETCH, FETCHED, SUBSTITUTE, TAKEN
from engine.errors import UserError

CHOSEN = np.array([[0, 1, 2, 3], [4, 5, 6, 7]])
WEIGHTS = np.full((2, 4), 0.25, np.float32)
SCORES = np.tile(np.arange(16, 0, -1, dtype=np.float32), (2, 1))


def held(name="rule_015", **shape):
    return residency(POLICIES[name], 16, 4, 6, **shape)


# ---- refused ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("chosen", "weights", "scores"),
    [
        (CHOSEN[:, :3], WEIGHTS[:, :3], SCORES),
        (CHOSEN, WEIGHTS[:1], SCORES),
        (CHOSEN, WEIGHTS, SCORES[:, :15]),
        (CHOSEN, WEIGHTS, SCORES[:1]),
    ],
    ids=["top_k", "weights", "experts", "tokens"],
)
def test_shapes_that_do_not_fit(chosen, weights, scores):
    with pytest.raises(UserError, match="pass one layer's events"):
        held().decide(0, 0, chosen, weights, scores)


@pytest.mark.parametrize("weight", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(weight):
    weights = WEIGHTS.copy()
    weights[1, 2] = weight
    with pytest.raises(UserError, match=r"event 1 of layer 0: router output that is not finite"):
        held().decide(0, 0, CHOSEN, weights, SCORES)


def test_weights_that_sum_to_nothing():
    with pytest.raises(UserError, match="weights that sum to zero"):
        held().decide(0, 0, CHOSEN, WEIGHTS * 0, SCORES)


def test_scores_that_are_no_numbers():
    scores = SCORES.copy()
    scores[1, 9] = np.nan
    with pytest.raises(UserError, match=r"event 1 of layer 0: router output that is not finite"):
        held().decide(0, 0, CHOSEN, WEIGHTS, scores)


def test_a_rule_that_substitutes_needs_all_scores():
    for name in ("rule_015", "substitute_all", "mass_budget_random_lru"):
        with pytest.raises(UserError, match="no selection scores"):
            held(name).decide(0, 0, CHOSEN, WEIGHTS, None, chosen_scores=WEIGHTS)
    held("fetch_lru").decide(0, 0, CHOSEN, WEIGHTS, None, chosen_scores=WEIGHTS)
    held("drop_lru").decide(0, 0, CHOSEN, WEIGHTS, None, chosen_scores=WEIGHTS)


@pytest.mark.parametrize("name", ["fetch_lru", "substitute_all"])
@pytest.mark.parametrize("expert", [-1, 16])
def test_expert_ids_out_of_range(expert, name):
    with pytest.raises(UserError, match=rf"expert ids from .*{expert}.*; expected 0 to 15"):
        held(name).decide(0, 0, np.array([[0, 1, 2, expert]]), WEIGHTS[:1], SCORES[:1])


def test_a_refused_call_changes_no_state():
    state = held()
    with pytest.raises(UserError):
        state.decide(0, 0, CHOSEN, WEIGHTS * 0, SCORES)
    assert (state.state.rows["step"] == 0).all() and (state.state.slots["expert"] == -1).all()


def test_no_events_are_no_error():
    log, moves = held().decide(0, 0, CHOSEN[:0], WEIGHTS[:0], SCORES[:0])
    assert log.kind.shape == (0, 4) and len(moves) == 0


# ---- once bugs ---------------------------------------------------------------------------------------------------
def test_bug_an_expert_chosen_twice_is_refused():
    with pytest.raises(UserError, match="twice"):
        held().decide(0, 0, np.array([[0, 1, 2, 2]]), WEIGHTS[:1], SCORES[:1])


@pytest.mark.parametrize(("lane", "layer"), [(-1, 0), (0, -1), (0, 2)])
def test_bug_a_row_that_does_not_exist_is_refused(lane, layer):
    """(0, 2) of two layers and two lanes is lane 1's layer 0."""
    with pytest.raises(UserError, match=r"lane|layer"):
        held(layers=2, lanes=2).decide(lane, layer, CHOSEN, WEIGHTS, SCORES)


def test_bug_chosen_scores_that_are_no_numbers():
    scores = np.array([[0.4, np.nan, 0.2, 0.1]], np.float32)
    with pytest.raises(UserError, match="not finite"):
        held("fetch_lru").decide(0, 0, CHOSEN[:1], WEIGHTS[:1], None, chosen_scores=scores)


def test_bug_a_cold_start_can_be_restarted():
    state = held()
    state.decide(0, 0, CHOSEN, WEIGHTS, SCORES)
    state.restart(0)
    assert (state.state.slots["expert"] == -1).all()


def test_bug_a_weight_of_exactly_tau_in_float32_is_fetched():
    """Section 3: decisions are float32, fetch if g >= tau. None of the sheet's or the sweep's taus is of this kind."""
    weights = np.array([[0.1, 0.05, 0.15, 0.7]], np.float32)
    assert weights.sum() == np.float32(1)
    state = residency(replace(POLICIES["first_choice"], tau=0.7), 16, 4, 6)
    state.decide(0, 0, CHOSEN[1:], WEIGHTS[1:], SCORES[1:])  # 4 5 6 7 resident
    log, _ = state.decide(0, 0, CHOSEN[:1], weights, SCORES[:1])  # 3 weighs 0.7 and ranks last
    assert log.kind[0, 3] == 1


# ---- what a prefetch has brought -------------------------------------------------------------------------------------
@pytest.mark.parametrize("staged", [np.zeros((3, 4)), np.full((2, 4), 16), np.full((2, 4), -2)])
def test_staged_records_that_do_not_fit(staged):
    with pytest.raises(UserError, match="pass one row an event"):
        held().decide(0, 0, CHOSEN, WEIGHTS, SCORES, staged=staged)


def test_golden_only_as_many_are_staged_as_there_are_rows_and_residents_do_not_count():
    """Cold, substitute_all: event 0 fills the slots. Of event 1's list, 9 and 8 are not there; 0 to 3 are resident."""
    one = held("substitute_all")
    _, moves = one.decide(0, 0, CHOSEN[:1], WEIGHTS[:1], SCORES[:1])
    assert set(moves["cause"]) == {FETCHED}  # nobody could stand in
    event = [np.array([[4, 5, 6, 7]]), WEIGHTS[:1], SCORES[:1]]
    staged = np.array([[0, 1, 2, 9, 8, -1, 10, 4, 5]])  # 4 is the fourth that is not resident, 5 the fifth
    log, moves = one.decide(0, 0, *event, staged=staged)
    assert [(int(m["expert"]), int(m["cause"])) for m in moves] == [(4, TAKEN)]
    assert log.kind.tolist() == [[FETCH, SUBSTITUTE, SUBSTITUTE, SUBSTITUTE]]


@pytest.mark.parametrize("name", [name for name, p in POLICIES.items() if p.lossless and p.eviction != "belady"])
def test_law_under_fetch_nothing_but_the_cause_of_a_move_knows_what_was_staged(name, router_trace):
    trace = router_trace(5, T=200)
    plain, with_them = held(name), held(name)
    staged = np.random.default_rng(3).integers(-1, 16, (200, 4))
    log, moves = plain.decide(0, 0, trace.chosen, trace.weights, trace.scores)
    other, moved = with_them.decide(0, 0, trace.chosen, trace.weights, trace.scores, staged=staged)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(log, other, strict=True))
    for column in ("step", "expert", "slot", "victim"):
        assert (moves[column] == moved[column]).all()
    if not POLICIES[name].in_place:
        assert TAKEN in moved["cause"] and TAKEN not in moves["cause"]
