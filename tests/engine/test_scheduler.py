"""The scheduler. Golden: plans worked out by hand. Laws: what no plan may do, over random situations."""

from __future__ import annotations

import numpy as np
import pytest

from engine.decision import EXPERT
from engine.scheduler import Window, new_entries, plan

L, E, R = 4, 16, 4


def experts(resident=(), pending=()):
    """State's experts [L, E] with (layer, expert) pairs resident or pending."""
    found = np.zeros((L, E), EXPERT)
    found["slot"] = found["load_slot"] = -1
    for layer, e in resident:
        found[layer, e]["slot"] = 0
    for layer, e in pending:
        found[layer, e]["load_slot"] = 0
    return found


def named(*by_horizon):
    """names [H, N] and falling claims [H, N] of lists of ids."""
    width = max(map(len, by_horizon))
    ids = np.full((len(by_horizon), width), -1, np.int32)
    for h, names in enumerate(by_horizon):
        ids[h, : len(names)] = names
    return ids, np.where(ids >= 0, 1.0 / (1 + np.arange(width)), 0.0)


def window(window_s=(6.0, 6.0), piece_s=1.0, pieces=4, names=8, bounded=True):
    return Window(np.array(window_s), piece_s, pieces, names, bounded)


def holds(entries):
    """{(layer, expert): (left, granted)} of the rows that are not free."""
    rows = entries[entries["layer"] >= 0]
    return {(int(r["layer"]), int(r["expert"])): (int(r["left"]), int(r["granted"])) for r in rows}


# ---- golden ----------------------------------------------------------------------------------------------------------
def test_golden_the_nearer_layer_first_then_by_claim_and_nothing_that_is_there():
    entries = new_entries(R)
    ids, claims = named([3, 5, 7, 9], [4])
    plan(experts(resident=[(1, 3)], pending=[(1, 7)]), 0, ids, claims, window(), entries)
    # six pieces fit: four of 5, two of 9; none is left for layer 2
    assert holds(entries) == {(1, 5): (4, 4), (1, 9): (4, 2)}
    assert entries["order"][:2].tolist() == [1, 3]


def test_golden_what_is_there_in_part_goes_on_and_a_farther_layer_takes_the_rest():
    entries = new_entries(R)
    ids, claims = named([5], [6, 8])
    plan(experts(), 0, ids, claims, window((3.0, 3.0)), entries)
    assert holds(entries) == {(1, 5): (4, 3)}
    entries["left"][0] = 1  # three have passed
    plan(experts(), 0, ids, claims, window((3.0, 3.0)), entries)
    assert holds(entries) == {(1, 5): (1, 1), (2, 6): (4, 2)}


def test_golden_whole_records_count_against_the_window_of_their_own_layer():
    entries = new_entries(R)
    ids, claims = named([5, 6], [7, 8])
    plan(experts(), 0, ids, claims, window((1.0, 3.5), pieces=1), entries)
    assert holds(entries) == {(1, 5): (1, 1), (2, 7): (1, 1), (2, 8): (1, 1)}


def test_golden_without_a_window_every_row_is_filled():
    entries = new_entries(R)
    ids, claims = named([1, 2, 3], [4, 5, 6])
    plan(experts(), 0, ids, claims, window((0.0, 0.0), pieces=1, bounded=False), entries)
    assert set(holds(entries)) == {(1, 1), (1, 2), (1, 3), (2, 4)}


def test_golden_a_row_goes_to_the_higher_claim_and_never_to_a_lower():
    entries = new_entries(2)
    plan(experts(), 0, *named([], [4, 5]), window((9.0, 9.0)), entries)
    assert set(holds(entries)) == {(2, 4), (2, 5)}
    plan(experts(), 1, *named([4, 5, 6]), window((9.0,)), entries)  # both are still wanted, by higher claims than 6's
    assert set(holds(entries)) == {(2, 4), (2, 5)}
    plan(experts(), 1, *named([6, 5, 4]), window((9.0,)), entries)  # 4 has the lowest claim now
    assert set(holds(entries)) == {(2, 6), (2, 5)}
    plan(experts(), 1, *named([7, 8]), window((9.0,)), entries)  # nobody names the old ones any more
    assert set(holds(entries)) == {(2, 7), (2, 8)}


def test_golden_what_costs_the_compute_beside_it_more_than_it_is_expected_to_save_is_left_out():
    entries = new_entries(R)
    ids, claims = named([5, 6, 7])  # claims 1, 1/2, 1/3
    plan(experts(), 0, ids, claims, window((99.0,))._replace(saved_s=1.0, cost_s=0.4), entries)
    assert set(holds(entries)) == {(1, 5), (1, 6)}
    plan(experts(), 0, ids, claims, window((99.0,), bounded=False)._replace(saved_s=1.0, cost_s=0.4), entries)
    assert set(holds(entries)) == {(1, 5), (1, 6), (1, 7)}  # `always` asks for nothing of the kind


def test_nothing_is_planned_beyond_the_last_layer_or_beyond_what_is_named():
    entries = new_entries(R)
    plan(experts(), L - 1, *named([1, 2], [3]), window(), entries)
    assert holds(entries) == {}
    plan(experts(), 0, *named([1, 2, 3], []), window(names=2, window_s=(99.0, 99.0)), entries)
    assert set(holds(entries)) == {(1, 1), (1, 2)}


# ---- laws ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(30))
def test_law_no_plan_exceeds_its_window_or_brings_what_is_there(seed):
    rng = np.random.default_rng(seed)
    entries = new_entries(R)
    for layer in (0, 1, 2):
        state = experts(
            resident=[(layer + 1, e) for e in rng.permutation(E)[:5]],
            pending=[(min(layer + 2, L - 1), e) for e in rng.permutation(E)[:2]],
        )
        ids = np.stack([rng.permutation(E)[:6] for _ in range(2)]).astype(np.int32)
        claims = np.sort(rng.random((2, 6)))[:, ::-1].copy()
        kept = {key: left for key, (left, _) in holds(entries).items()}
        given = window(
            tuple(np.sort(rng.uniform(0, 9, 2))), piece_s=rng.uniform(0.3, 2), pieces=int(rng.integers(1, 6))
        )
        entries["left"] = np.minimum(entries["left"], given.pieces)
        plan(state, layer, ids, claims, given, entries)
        rows = entries[entries["granted"] > 0]
        rows = rows[np.argsort(rows["order"])]
        ends = np.cumsum(rows["granted"]) * given.piece_s
        assert (ends <= given.window_s[rows["layer"] - layer - 1] + 1e-9).all()
        assert (rows["granted"] <= rows["left"]).all() and (rows["left"] <= given.pieces).all()
        for row in rows:
            expert = state[row["layer"], row["expert"]]
            assert expert["slot"] < 0 and expert["load_slot"] < 0
        found = holds(entries)
        assert len(found) == (entries["layer"] >= 0).sum()  # no expert twice
        for key in kept.keys() & found.keys():
            assert found[key][0] == min(kept[key], given.pieces)  # what has passed is not forgotten
        entries["left"] -= entries["granted"]


def test_law_a_wider_window_brings_no_less():
    ids, claims = named(list(range(8)), list(range(8, 16)))
    brought = []
    for width in np.linspace(0, 20, 41):
        entries = new_entries(R)
        plan(experts(), 0, ids, claims, window((width, width)), entries)
        brought.append(int(entries["granted"].sum()))
    assert brought == sorted(brought) and brought[0] == 0 and brought[-1] == 4 * R
