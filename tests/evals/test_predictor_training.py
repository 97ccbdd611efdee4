"""Training of predictors on made-up problems whose answer is known, recall by hand, and intervals by document."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.errors import UserError
from engine.predictors import pairs
from engine.routers import Router, log_distribution
from evals import predictor_training
from evals.perplexity import TokenizedDocument
from evals.predictor_recall import COUNTS, count, count_text, recall_rows
from evals.predictor_training import Recorded, count_following, hold_out, join, previous_of, train
from evals.quality import Text

T, L, D, E, K, RANK = 1200, 3, 12, 8, 2, 4
OPTIONS = {"level": 0.95, "replicates": 199, "seed": 1}


@pytest.fixture(autouse=True)
def threads():
    """`train` leaves torch on one thread."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def routers():
    generator = torch.Generator().manual_seed(1)
    return [Router(torch.randn(E, D, generator=generator), None) for _ in range(L)]


@pytest.fixture
def data(routers):
    """Every layer turns its input by a map of rank two; documents of 100 tokens, every fourth held out."""
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(T, D, generator=generator)]
    for _ in range(L - 1):
        left, right = torch.randn(D, 2, generator=generator), torch.randn(2, D, generator=generator)
        inputs.append(inputs[-1] + 0.3 * (inputs[-1] @ left) @ right)
    logits = torch.stack([x @ router.weight.T for x, router in zip(inputs, routers, strict=True)], 1)  # [T, L, E]
    token = np.arange(T)
    chosen = logits.topk(K).indices.to(torch.int16).numpy()
    return Recorded(torch.stack(inputs, 1).numpy(), logits.numpy(), chosen, token % 100 == 0, token // 100 % 4 == 1)


def learn(kind, data, routers, sigmoid=False, **options):
    return train(kind, data, routers, sigmoid, **({"rank": RANK, "learning_rate": 0.02} | options))


# ---- training --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("kind", ["mlp", "spec_prefetch"])
def test_law_training_lowers_the_loss_on_documents_held_out(kind, sigmoid, data, routers):
    found = learn(kind, data, routers, sigmoid)
    assert 1 <= found.epochs <= found.tried <= predictor_training.EPOCHS[kind]
    assert len(found.before) == len(found.after) == len(pairs(L))
    assert all(after < 0.7 * before for before, after in zip(found.before, found.after, strict=True))


def test_law_an_adapter_begins_as_gate_replay_and_is_kept_so_where_training_harms(data, routers):
    """A rate that ruins every epoch: the weights of the beginning stay."""
    found = learn("spec_prefetch", data, routers, learning_rate=50.0)
    assert found.epochs == 0 and found.tried == predictor_training.PATIENCE and found.after == found.before
    assert (found.arrays["B"] == 0).all()


def test_golden_the_loss_of_gate_replay(data, routers):
    found = learn("spec_prefetch", data, routers, learning_rate=1e-9)
    x, logits = torch.from_numpy(data.inputs[data.held]), torch.from_numpy(data.logits[data.held])
    for (anchor, horizon), before in zip(pairs(L), found.before, strict=True):
        p = logits[:, anchor + horizon].double().softmax(-1)
        q = (x[:, anchor] @ routers[anchor + horizon].weight.T).double().softmax(-1)
        assert (p * (p / q).log()).sum(-1).mean().item() == pytest.approx(before, rel=1e-4)


@pytest.mark.parametrize("kind", ["mlp", "spec_prefetch"])
def test_law_the_same_seeds_give_the_same_bits(kind, data, routers, monkeypatch):
    runs = [learn(kind, data, routers) for _ in range(2)]
    assert all(torch.equal(runs[0].arrays[name], runs[1].arrays[name]) for name in runs[0].arrays)
    monkeypatch.setattr(predictor_training, "ORDER_SEED", 5)
    other = learn(kind, data, routers)
    assert not all(torch.equal(runs[0].arrays[name], other.arrays[name]) for name in other.arrays)


@pytest.mark.parametrize("kind", ["mlp", "spec_prefetch"])
def test_law_what_is_held_out_is_not_learned_from(kind, data, routers, monkeypatch):
    monkeypatch.setitem(predictor_training.EPOCHS, kind, 1)
    inputs, logits = data.inputs.copy(), data.logits.copy()
    inputs[data.held], logits[data.held] = inputs[data.held] * 0.5, logits[data.held] * 0.5
    one, other = learn(kind, data, routers), learn(kind, replace(data, inputs=inputs, logits=logits), routers)
    assert one.epochs == other.epochs == 1 and one.after != other.after
    assert all(torch.equal(one.arrays[name], other.arrays[name]) for name in one.arrays)


@pytest.mark.parametrize("rank", [0, -1, D + 1])
def test_a_rank_that_cannot_be_is_refused(rank, data, routers):
    with pytest.raises(UserError, match=f"rank {rank}; expected from 1 to D = {D}"):
        learn("spec_prefetch", data, routers, rank=rank)


@pytest.mark.parametrize("held", [True, False])
def test_nothing_held_out_or_nothing_left_is_refused(held, data, routers):
    with pytest.raises(UserError, match="tokens held out; expected some, not all"):
        learn("mlp", replace(data, held=np.full(T, held)), routers)


def test_a_loss_that_is_no_number_is_refused(data, routers):
    inputs = data.inputs.copy()
    inputs[700, 0, 0] = np.nan
    with pytest.raises(UserError, match="mlp: a loss of nan in epoch 1"):
        learn("mlp", replace(data, inputs=inputs), routers)


def test_a_router_that_does_more_than_multiply_is_refused(data, routers):
    logits = data.logits.copy()
    logits[:, 1] **= 2
    with pytest.raises(UserError, match="layer 1: a router whose logits are not its weight times its input"):
        learn("mlp", replace(data, logits=logits), routers)


def test_the_distribution_of_sigmoids_is_theirs_over_their_sum():
    logits = torch.tensor([[0.0, 1.0, -2.0]])
    wanted = logits.sigmoid() / logits.sigmoid().sum()
    assert torch.allclose(log_distribution(logits, sigmoid=True).exp(), wanted)


# ---- documents -------------------------------------------------------------------------------------------------------
def test_golden_every_fourth_cluster_is_held_out_with_all_its_parts():
    names = ["a", "b/1", "b/2", "c", "d", "e", "f"]
    text = Text("t", "topic", "0", tuple(TokenizedDocument(n, (1, 2), 1, 1) for n in names), (2,) * 6 + (3,))
    assert hold_out(text).tolist() == [False] * 2 + [True] * 4 + [False] * 6 + [True] * 3


def test_golden_transitions_are_counted_within_documents_and_smoothed():
    """Two experts, one chosen: 0 0 1 | 1 0, the last document held out."""
    chosen = np.zeros((5, 2, 1), np.int16)
    chosen[[2, 3], 1, 0] = 1
    first, held = np.array([1, 0, 0, 1, 0], bool), np.array([0, 0, 0, 1, 1], bool)
    data = Recorded(np.zeros((5, 2, 3), np.float32), np.zeros((5, 2, 2), np.float32), chosen, first, held)
    assert previous_of(chosen, first)[:, 1, 0].tolist() == [-1, 0, 0, -1, 1]
    s = predictor_training.SMOOTHING
    wanted = [[(1 + s * 2 / 3) / (2 + s), (1 + s / 3) / (2 + s)], [2 / 3, 1 / 3]]  # nothing followed on 1
    np.testing.assert_allclose(count_following(data)[0].numpy(), wanted, rtol=1e-6)


def test_law_texts_joined_do_not_follow_on_each_other(data):
    joined = join([data, data])
    assert len(joined.chosen) == 2 * T and (joined.previous[T] == -1).all()


# ---- recall ----------------------------------------------------------------------------------------------------------
def test_golden_counts_of_a_case_by_hand():
    """K = 2, N = 3, three tokens in documents of two and one."""
    ids = np.array([[4, 7, 1], [0, 1, 2], [5, -1, -1]])
    chosen = np.array([[7, 4], [2, 0], [3, 6]])
    missed = np.array([[True, False], [True, True], [False, True]])
    assert count(ids, chosen, missed, np.array([0, 2])) == {
        "events": [2, 1],
        "found": [3, 0],  # both, and 0 of the second
        "found_names": [4, 0],
        "exact": [1, 0],
        "missed": [3, 1],
        "found_missed": [2, 0],  # 7, and 0
        "found_missed_names": [3, 0],
    }


def test_golden_a_text_is_counted_at_the_layer_that_is_foretold():
    ids = np.full((2, 3, 2, 2), -1)
    ids[:, 0, 0], ids[:, 0, 1], ids[:, 1, 0] = [1, 2], [5, 6], [5, 7]
    chosen = np.array([[[9, 8], [1, 2], [5, 6]]] * 2)
    cells = count_text(ids, chosen, np.zeros_like(chosen, bool), [2])
    assert [(c["anchor"], c["horizon"], c["found"]) for c in cells] == [(0, 1, [4]), (0, 2, [4]), (1, 1, [2])]


def test_fewer_names_than_are_chosen_are_refused():
    with pytest.raises(UserError, match="1 names; expected at least K = 2"):
        count(np.zeros((3, 1)), np.zeros((3, 2)), np.zeros((3, 2), bool), np.array([0]))


def made_up_record(better: float) -> dict:
    """Two predictors on two texts of six documents: the second finds `better` more of the K = 2 chosen an event."""
    rng, cells = np.random.default_rng(3), []
    same = {"events": [100] * 6, "found_names": [150] * 6, "missed": [40] * 6, "found_missed": [10] * 6}
    for text, topic in (("one", "literary"), ("two", "code")):
        found = rng.integers(60, 90, 6)
        for predictor, more in (("gate_replay", 0.0), ("spec_prefetch", better)):
            for horizon in (1, 2):
                place = {"predictor": predictor, "text": text, "topic": topic, "anchor": 0, "horizon": horizon}
                own = {name: [0] * 6 for name in COUNTS} | same | {"found": [int(f + 100 * more) for f in found]}
                cells.append(place | own)
    parts = ("a/1", "a/2", "b/1", "b/2", "c", "d")
    return {
        "model": "m",
        "experts": E,
        "top_k": 2,
        "names": 3,
        "expert_bytes": 1,
        "predictors": {n: {"parameters": 5, "multiply_adds_a_token": 7} for n in ("gate_replay", "spec_prefetch")},
        "clusters": {text: [[part.split("/")[0], 100] for part in parts] for text in ("one", "two")},
        "cells": cells,
    }


def test_golden_rows_of_a_made_up_record():
    rows = recall_rows(made_up_record(0.2), OPTIONS)
    assert len(rows) == 2 * 2 * 2 * 3  # predictors, horizons, a layer and all, topics and all
    at = {(r["predictor"], r["horizon"], r["layer"], r["topic"]): r for r in rows}
    row, replay = at["spec_prefetch", 1, 1, "all"], at["gate_replay", 1, 1, "all"]
    assert row["events"] == 1200 and row["documents"] == 8  # of each text, four parts are two documents
    assert row["recall"] - replay["recall"] == pytest.approx(0.1) == row["over_replay"]
    assert row["recall_low"] < row["recall"] < row["recall_high"]
    assert row["over_replay_low"] == row["over_replay_high"] == pytest.approx(0.1)  # the same in every document
    assert (replay["over_replay"], replay["over_replay_low"]) == (0, 0)
    assert row["recall_names"] == pytest.approx(0.75)
    assert row["recall_missed"] == row["recall_missed_low"] == row["recall_missed_high"] == pytest.approx(0.25)
    assert row["parameters"] == 5 and row["rehearsal"] and row["level"] == 0.95


def test_where_nothing_missed_there_is_no_recall_of_what_did():
    record = made_up_record(0.2)
    for cell in record["cells"]:
        cell["missed"] = cell["found_missed"] = [0] * 6
    assert all(row["missed"] == 0 and row["recall_missed"] is None for row in recall_rows(record, OPTIONS))


def test_a_table_without_gate_replay_has_no_difference():
    record = made_up_record(0.2)
    record["cells"] = [cell for cell in record["cells"] if cell["predictor"] != "gate_replay"]
    rows = recall_rows(record, OPTIONS)
    assert rows and not any("over_replay" in row for row in rows)
