"""Predictors from training to table, by the scripts' own command lines on a tiny model of three layers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tiny
from safetensors.numpy import load_file
from tiny import CALIBRATION, CONTEXT, EXPERTS, TEST, TOP_K, TOPICS, Ended, run_script, write_model, write_text_file

from engine.decision import HIT
from engine.files import sha256
from engine.log import load_log
from engine.policies import BASELINE
from engine.predictions import Predictions
from engine.predictors import TRAINED, multiply_adds, pairs, parameters
from engine.trace_file import open_trace

LAYERS, NAMES, RANK = 3, 8, 4
PREDICTED = {"gate_replay", "markov", "mlp", "oracle", "spec_prefetch"}


def ran(script: str, *arguments) -> None:
    ended = run_script(script, *arguments)
    assert ended.code == 0, ended.err


def refused(script: str, *arguments) -> str:
    """The last line of a command that ends with an error; lines of progress may come before."""
    ended = run_script(script, *arguments)
    return Ended(ended.code, ended.out, ended.err.strip().splitlines()[-1]).message


def model_flags(folder: Path) -> tuple:
    return "--model", "tiny", "--model-dir", folder / "model", "--context", CONTEXT, "--threads", 1


def train(folder: Path, out: Path, *flags) -> tuple:
    return "--texts", folder / f"{CALIBRATION}.json", "--rank", RANK, "--learning-rate", 0.01, "--out", out, *flags


def predict(folder: Path, out: Path, *flags) -> tuple:
    folders = ("--predictors", folder / "predictors", "--traces", folder / "traces", "--decisions", folder / BASELINE)
    texts = ("--texts", *(folder / f"{text}.json" for text in TEST))
    return *folders, *texts, "--slots", "s50", "--names", NAMES, "--out", out, *flags


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Calibrated, recorded, the baseline scored, predictors trained and asked, recall tabulated."""
    folder = tmp_path_factory.mktemp("predictors")
    write_model(folder / "model", num_hidden_layers=LAYERS)
    for number, (text, topic) in enumerate(TOPICS.items()):
        docs = tiny.documents(topic, 5, first=5 * number)
        write_text_file(folder / f"{text}.json", text, topic, docs, "calibration" if text == CALIBRATION else "test")
    model, texts = model_flags(folder), ("--texts", *(folder / f"{text}.json" for text in TEST))
    demand = ("--out-demand", folder / "demand.safetensors", "--out", folder / "calibration.json")
    ran("calibrate_model.py", *model[2:], "--texts", folder / f"{CALIBRATION}.json", *demand)
    ran("record_routing.py", *model, *texts, "--out", folder / "traces")
    score = ("--policy", BASELINE, "--policies", tiny.ROOT / "config/policies.tsv", "--slots", "s50=50")
    score += ("--demand", folder / "demand.safetensors", "--traces", folder / "traces", "--out", folder / "record.json")
    ran("score_policy.py", *model, *texts, *score, "--out-losses", folder / "l", "--out-decisions", folder / BASELINE)
    ran("train_predictors.py", *model, *train(folder, folder / "predictors"))
    ran("predict_experts.py", *model, *predict(folder, folder / "predictions"))
    statistics = ("--replicates", 199, "--seed", 1, "--out", folder / "recall.csv")
    ran("tabulate_recall.py", "--records", folder / "predictions/recall.json", *statistics)
    return folder


@pytest.fixture(scope="module")
def table(made) -> pd.DataFrame:
    return pd.read_csv(made / "recall.csv").set_index(["predictor", "horizon", "layer", "topic"]).sort_index()


# ---- end to end ------------------------------------------------------------------------------------------------------
def test_every_file_is_there(made):
    assert {p.name for p in (made / "predictors").iterdir()} == {f"{k}.safetensors" for k in TRAINED} | {"README.md"}
    found = {p.relative_to(made / "predictions").as_posix() for p in (made / "predictions").rglob("*") if p.is_file()}
    assert found == {f"{kind}/{text}.safetensors" for kind in PREDICTED for text in TEST} | {"recall.json"}


def test_law_predictions_lie_beside_their_trace_and_name_without_repeats(made):
    for kind in PREDICTED:
        for text in TEST:
            trace = open_trace(made / "traces" / f"{text}.safetensors")
            predictions = Predictions(made / "predictions" / kind / f"{text}.safetensors")
            predictions.check(trace)
            assert predictions.predictor == kind and predictions.names == NAMES
            for ids, _ in predictions.chunks(16):  # checks what it reads
                known = (ids >= 0).sum(-1)
                assert set(np.unique(known[:, 0, 0])) <= {0, TOP_K, NAMES}


def test_law_the_table_says_what_the_files_say(made, table):
    """Recall of the adapter one layer ahead, from predictions, traces and the baseline's log."""
    found = names = missed = found_missed = events = 0
    for text in TEST:
        chosen = open_trace(made / "traces" / f"{text}.safetensors").read().chosen
        (ids, _), *_ = Predictions(made / "predictions/spec_prefetch" / f"{text}.safetensors").chunks(10**6)
        kind = load_log(made / BASELINE / "s50" / f"{text}.safetensors").kind
        for token, layer in np.ndindex(len(chosen), LAYERS - 1):
            wanted, said = chosen[token, layer + 1].tolist(), ids[token, layer, 0].tolist()
            gone = {e for e, k in zip(wanted, kind[token, layer + 1], strict=True) if k != HIT}
            found += len(set(wanted) & set(said[:TOP_K]))
            names += len(set(wanted) & set(said))
            missed, found_missed, events = missed + len(gone), found_missed + len(gone & set(said)), events + 1
    row = table.loc["spec_prefetch", 1, "all", "all"]
    assert row["events"] == events and row["recall"] == pytest.approx(found / (TOP_K * events))
    assert row["recall_names"] == pytest.approx(names / (TOP_K * events)) and row["missed"] == missed > 0
    assert row["recall_missed_names"] == pytest.approx(found_missed / missed)


def test_law_the_oracle_is_always_right(table):
    oracle = table.loc["oracle"]
    assert (oracle[["recall", "recall_names", "exact", "recall_missed", "recall_missed_names"]] == 1).all(axis=None)


def test_every_predictor_horizon_layer_and_topic_has_a_row(table):
    places = [(1, "1"), (1, "2"), (1, "all"), (2, "2"), (2, "all")]
    topics = ("literary", "word_problems", "all")
    assert set(table.index) == {(kind, *place, topic) for kind in PREDICTED for place in places for topic in topics}
    everything = table.xs("all", level="topic")
    assert (everything["recall_low"].fillna(0) <= everything["recall"]).all()
    assert (table.loc["gate_replay", "over_replay"] == 0).all()
    difference = everything.loc["spec_prefetch", 1, "all"]["recall"] - everything.loc["gate_replay", 1, "all"]["recall"]
    assert everything.loc["spec_prefetch", 1, "all"]["over_replay"] == pytest.approx(difference)


def test_the_table_counts_parameters_and_costs(table):
    for kind in PREDICTED:
        row = table.loc[kind, 1, "all", "all"]
        assert row["parameters"] == parameters(kind, LAYERS, 32, EXPERTS, RANK)
        assert row["multiply_adds_a_token"] == multiply_adds(kind, LAYERS, 32, EXPERTS, TOP_K)
    assert table["rehearsal"].all()


def test_the_card_says_what_and_how_well(made):
    card = (made / "predictors" / "README.md").read_text(encoding="utf-8")
    assert card.startswith("# Predictors of tiny\n") and CALIBRATION in card and "No test text was read" in card
    assert f"| spec_prefetch | {parameters('spec_prefetch', LAYERS, 32, EXPERTS, RANK):,} |" in card
    assert sum(line.startswith(f"| {a} | {h} | ") for a, h in pairs(LAYERS) for line in card.splitlines()) == 3


def test_law_the_same_command_trains_the_same_bits(made, tmp_path):
    ran("train_predictors.py", *model_flags(made), *train(made, tmp_path))
    for kind in TRAINED:  # the headers tell the command, and so the folder
        one, other = (load_file(folder / f"{kind}.safetensors") for folder in (tmp_path, made / "predictors"))
        assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
    assert sha256(tmp_path / "README.md") == sha256(made / "predictors/README.md")


# ---- bad input -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rank", [0, 33])
def test_a_rank_that_cannot_be_is_refused(rank, made, tmp_path):
    message = refused("train_predictors.py", *model_flags(made), *train(made, tmp_path, "--rank", rank))
    assert f"rank {rank}; expected from 1 to D = 32" in message and not list(tmp_path.iterdir())


def test_a_rate_that_ruins_the_loss_is_refused(made, tmp_path):
    message = refused("train_predictors.py", *model_flags(made), *train(made, tmp_path, "--learning-rate", 1e30))
    assert "a loss of" in message and not list(tmp_path.iterdir())


def test_one_document_a_text_leaves_nothing_to_hold_out(made, tmp_path):
    message = refused("train_predictors.py", *model_flags(made), *train(made, tmp_path, "--documents", 1))
    assert "0 of 30 tokens held out; expected some, not all; give two documents" in message


@pytest.mark.parametrize("names", [TOP_K - 1, EXPERTS + 1])
def test_names_that_cannot_be_are_refused(names, made, tmp_path):
    ended = run_script("predict_experts.py", *model_flags(made), *predict(made, tmp_path, "--names", names))
    assert f"{names} names of {EXPERTS} experts, K = {TOP_K}" in ended.message and not list(tmp_path.iterdir())


def test_predictors_of_another_model_are_refused(made, tmp_path):
    shutil.copytree(made / "predictors", tmp_path / "predictors")
    write_model(tmp_path / "other", num_hidden_layers=LAYERS, rms_norm_eps=1e-3, initializer_range=0.1)
    flags = ("--model-dir", tmp_path / "other")
    ended = run_script("predict_experts.py", *model_flags(made), *predict(made, tmp_path / "out", *flags))
    assert "a predictor of model" in ended.message and not (tmp_path / "out").exists()


def test_decisions_over_other_tokens_are_refused(made, tmp_path):
    other = tmp_path / "s50" / f"{TEST[0]}.safetensors"
    other.parent.mkdir()
    for text in TEST:
        shutil.copy(made / BASELINE / "s50" / f"{TEST[1]}.safetensors", other.with_stem(text))
    ended = run_script(
        "predict_experts.py", *model_flags(made), *predict(made, tmp_path / "o", "--decisions", tmp_path)
    )
    assert f"decisions {[*load_log(other).kind.shape]} of {TEST[0]}" in ended.message


@pytest.mark.parametrize("text", ["", "{}", json.dumps({"cells": [], "clusters": {}})])
def test_a_record_of_something_else_is_refused(text, tmp_path):
    (tmp_path / "recall.json").write_text(text)
    flags = ("--records", tmp_path / "recall.json", "--out", tmp_path / "recall.csv")
    assert "recall.json: " in run_script("tabulate_recall.py", *flags).message
