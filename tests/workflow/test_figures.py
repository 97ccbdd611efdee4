"""Figures and indexes on a synthetic table, end to end: all is drawn, gaps are named, bytes repeat."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from experiment_cases import made_up
from pictures import ROOT, SCRIPTS, draw, legible_words, markers, module, script, shown_words

from engine.decision import MISS_RULES
from engine.errors import UserError
from engine.files import sha256
from engine.policies import Policy, load_policies
from evals.figures import COLOURS, POOLED, looks, read_table, save

FIGURES = ("loss_and_misses_by_slots", "loss_by_bundle", "loss_by_mass")
TEXTS = {"wiki_test": "encyclopaedic", "code_test": "code", "bible_test": "scripture"}
SLOTS = {"s12": (12.5, 4), "s25": (25.0, 8), "s50": (50.0, 16)}
BASE_LOSS = {"substitute_all": 9.0, "rule_015": 0.45, "first_choice": 2.1, "quality_first": 0.3, "speed_first": 1.6}
FAILED = ("first_choice", "s12", "code_test")  # one cell
NOTHING = ("quality_first", "s50")  # lossy, but nothing was substituted
NO_INTERVAL = ("speed_first", "s25", "bible_test")


def synthetic_table(failed: tuple | None = FAILED) -> pd.DataFrame:
    """As tabulate_quality.py writes it, with a failed cell, one without effect and one without an interval."""
    rng = np.random.default_rng(3)
    rows = []
    for policy in load_policies(ROOT / "config" / "policies.tsv").values():
        for slots, (percent, count) in SLOTS.items():
            cells = [cell(rng, policy, slots, percent, count, text, failed) for text in (*TEXTS, POOLED)]
            if any(row["status"] == "failed" for row in cells):
                cells = [row for row in cells if row["text"] != POOLED]
            rows += cells
    return pd.DataFrame(rows)


def cell(rng, policy: Policy, slots: str, percent: float, count: int, text: str, failed) -> dict:
    row = {
        "model": "reference",
        "policy": policy.id,
        "miss_rule": policy.miss_rule,
        "eviction": policy.eviction,
        "beta": policy.beta,
        "instrument": "emulator",
        "experts": 32,
        "rehearsal": True,
        "slots": slots,
        "slots_percent": percent,
        "slots_count": count,
        "text": text,
        "topic": TEXTS.get(text, "all"),
    }
    if (policy.id, slots, text) == failed:
        return row | {"status": "failed", "reason": "RuntimeError: 3 losses are NaN; expected finite losses"}
    documents = 24 if text != POOLED else 24 * len(TEXTS)
    miss = {"lru": 0.5, "belady": 0.3}.get(policy.eviction, 0.44) * (1 - percent / 100)
    loss = BASE_LOSS.get(policy.id, 0.0) * (12.5 / percent) ** 1.3 * rng.uniform(0.8, 1.2)
    mass = 0.0 if policy.lossless else miss * {"threshold": 0.35, "substitute_all": 1.0}[policy.miss_rule]
    mass *= {None: 1.0}.get(policy.beta, 0.8) * (1.0 if policy.tau != 0.15 else 0.4)
    if (policy.id, slots) == NOTHING:
        loss = mass = 0.0
    half = 0.3 * loss + (0.05 if loss else 0.0)
    row |= {
        "status": "ok",
        "tokens": 600 * documents,
        "documents": documents,
        "token_perplexity": 20 * (1 + loss / 100),
        "delta_percent": loss,
        "delta_percent_low": loss - half,
        "delta_percent_high": loss + half,
        "detectable_percent": 1.4 * half,
        "miss_rate": miss,
        "substituted_share": miss if mass else 0.0,
        "substituted_mass": mass,
        "dropped_mass": 0.0,
        "lossless": policy.lossless,
        "lossy_without_effect": not policy.lossless and mass == 0,
        "background_inert": False,
    }
    if (policy.id, slots, text) == NO_INTERVAL:
        row |= {"delta_percent_low": None, "delta_percent_high": None, "detectable_percent": None}
    return row


@pytest.fixture(scope="module")
def table_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("table") / "quality.csv"
    synthetic_table().to_csv(path, index=False, float_format="%.8g")
    return path


@pytest.fixture(scope="module")
def pictures(table_path) -> Path:
    """Folder of all figures, drawn by the scripts as a user runs them."""
    folder = table_path.parent / "plots"
    jobs = [
        subprocess.Popen([sys.executable, script(name), "--table", table_path, "--out-prefix", folder / name])
        for name in FIGURES
    ]
    assert [job.wait() for job in jobs] == [0] * len(FIGURES)
    return folder


def run(path: Path, *arguments: str | Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [path.name, *map(str, arguments)])
    module(path).main()


# ---- figures ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FIGURES)
def test_csv_holds_the_plotted_points_bytes_repeat_and_no_words_overlap(name, table_path, pictures, tmp_path):
    figure, _ = draw(name, read_table(table_path))
    every = legible_words(figure)
    assert "rehearsal" in every and "72 documents, 43,200 scored tokens" in every
    assert "first_choice s12 code_test" in every

    save(*draw(name, read_table(table_path)), tmp_path / name)
    for suffix in ("csv", "png", "svg"):
        assert sha256(tmp_path / f"{name}.{suffix}") == sha256(pictures / f"{name}.{suffix}"), suffix
    assert "<text" in (pictures / f"{name}.svg").read_text()

    written = pd.read_csv(pictures / f"{name}.csv")
    xy = {
        "loss_by_mass": lambda: written[["substituted_mass", "delta_percent"]],
        "loss_and_misses_by_slots": lambda: written.assign(
            y=written["delta_percent"].fillna(written["miss_rate_percent"])
        )[["slots_percent", "y"]],
        "loss_by_bundle": lambda: written[["delta_percent"]],
    }[name]()
    drawn = np.array(sorted(markers(figure)))[:, : xy.shape[1]]
    np.testing.assert_allclose(drawn[np.lexsort(drawn.T[::-1])], xy.sort_values([*xy.columns]), rtol=1e-6)


def test_a_lossy_policy_without_effect_is_a_cross_and_only_fetch_is_exact(table_path):
    figure, points = draw("loss_by_bundle", read_table(table_path))
    crosses = [line for ax in figure.axes for line in ax.lines if line.get_marker() == "x"]
    exact = [word for word, _ in shown_words(figure) if word == "exact"]
    assert len(crosses) == points["lossy_without_effect"].sum() == len(TEXTS) + 1
    assert len(exact) == points["lossless"].sum() == 3 * len(SLOTS) * (len(TEXTS) + 1)


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_but_failures_is_drawn_as_gaps(name, tmp_path):
    table = synthetic_table()
    kept = [c for c in table.columns if table.loc[table["status"] == "failed", c].notna().any()]
    table[kept].query("text != @POOLED").assign(status="failed", reason="OutOfMemoryError").to_csv(tmp_path / "q.csv")
    figure, points = draw(name, read_table(tmp_path / "q.csv"))
    words = " ".join(word for word, _ in shown_words(figure))
    assert points.empty and "Without a result" in words and "): exact" not in words


@pytest.mark.parametrize("name", FIGURES)
def test_two_models_have_panels_of_their_own(name, tmp_path):
    one = synthetic_table()
    pd.concat([one, one.assign(model="larger", rehearsal=False)]).to_csv(tmp_path / "q.csv")
    figure, points = draw(name, read_table(tmp_path / "q.csv"))
    assert set(points["model"]) == {"reference", "larger"}
    figure.canvas.draw()


def test_every_miss_rule_has_a_colour_and_every_policy_its_own_look(table_path):
    assert set(MISS_RULES) <= set(COLOURS) and len(set(COLOURS.values())) == len(COLOURS)
    style = looks(read_table(table_path))
    assert len(set(style.values())) == len(style)
    assert [policy for policy, look in style.items() if look.pattern == "--"] == ["fetch_belady"]


CORRUPT = {
    "empty": lambda text: "",
    "only a header": lambda text: text.splitlines()[0],
    "cut": lambda text: text[: len(text) // 2].rsplit(",", 30)[0],
    "not a table": lambda text: "\x00\x01" * 50,
    "column gone": lambda text: text.replace("miss_rate", "missed"),
    "word for a number": lambda text: text.replace("12.5,4,", "12.5,four,", 1),
    "infinite": lambda text: text.replace("12.5,4,", "inf,4,", 1),
    "unknown miss rule": lambda text: text.replace("substitute_all,lfu_decay", "guess,lfu_decay", 1),
    "row twice": lambda text: text + text.splitlines()[1] + "\n",
    "unknown status": lambda text: text.replace(",ok,", ",fine,", 1),
}


@pytest.mark.parametrize("damage", CORRUPT)
def test_a_corrupt_table_is_a_user_error(damage, table_path, tmp_path):
    (tmp_path / "q.csv").write_text(CORRUPT[damage](table_path.read_text()))
    with pytest.raises(UserError, match=r"q\.csv.*; expected .*; "):
        read_table(tmp_path / "q.csv")


def test_a_missing_table_leaves_one_line_exit_code_2_and_nothing_written(tmp_path):
    command = [sys.executable, script("loss_by_mass"), "--table", tmp_path / "none.csv", "--out-prefix", tmp_path / "x"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


# ---- indexes and publishing ------------------------------------------------------------------------------------------
def finished_run(root: Path, table: pd.DataFrame, pictures: Path, absent: bool = False) -> list[str]:
    """A results folder with everything results/all reads. Returns the flags of write_index.py."""
    tables, plots = root / "tables" / "local", root / "plots" / "local"
    for folder in (tables, plots, root / "texts", root / "gate"):
        folder.mkdir(parents=True)
    table.to_csv(tables / "quality.csv", index=False)
    (tables / "bundles.md").write_text("# Bundles\n")
    (tables / "differences.csv").write_text("model,slots\n")
    table.to_csv(tables / "sweep.csv", index=False)
    experiment = made_up(tables / "experiment_b.csv")
    for name in ("pilot.json", "few_heavy_low.json", "few_heavy_low.safetensors", "arms.tsv"):
        path = root / "experiment_b" / "reference" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    for picture in pictures.iterdir():
        (plots / picture.name).write_bytes(picture.read_bytes())
    for text, topic in TEXTS.items():
        value = {"status": "ok", "id": text, "topic": topic, "role": "test", "sha256": "0" * 64, "documents": [{}] * 30}
        if absent and text == "bible_test":
            value = {"status": "absent", "reason": "its wheel is not there", "id": text, "topic": topic, "role": "test"}
        (root / "texts" / f"{text}.json").write_text(json.dumps(value))
    checks = [{"name": "the miss rate", "passed": False}, {"name": "another", "passed": True}]
    gate = {"model": "reference", "fit": False, "events": 9000, "checks": checks}
    (root / "gate" / "reference.json").write_text(json.dumps(gate))
    (root / "gate" / "reference.md").write_text("# Fitness of reference\n")
    for policy in [*table["policy"].unique(), "left_the_sheet"]:
        record = root / "quality" / "reference" / policy / "perplexity.json"
        record.parent.mkdir(parents=True)
        record.write_text(json.dumps({"policy": policy}))
        swept = root / "sweep" / "reference" / f"{policy}.json"
        swept.parent.mkdir(parents=True, exist_ok=True)
        swept.write_text(json.dumps({"policy": policy, "cells": []}))
        swept.with_suffix(".safetensors").write_bytes(b"losses")
    files = [*sorted(tables.iterdir()), root / "gate" / "reference.md", *sorted(plots.iterdir())]
    flags = ["--table", tables / "quality.csv", "--files", *files]
    flags += ["--gates", root / "gate" / "reference.json", "--texts", *sorted((root / "texts").iterdir())]
    flags += ["--sweep", tables / "sweep.csv", "--experiment-b", experiment, "--folders", path.parent]
    return [str(flag) for flag in flags]


def test_index_of_a_partial_run_names_files_numbers_gaps_and_the_retry(pictures, tmp_path, monkeypatch, capfd):
    flags = finished_run(tmp_path, synthetic_table(), pictures, absent=True)
    run(SCRIPTS / "write_index.py", "--title", "Results", *flags, "--out", tmp_path / "all", monkeypatch=monkeypatch)
    index = (tmp_path / "all").read_text()
    for path in [*pictures.iterdir(), tmp_path / "tables" / "local" / "quality.csv"]:
        assert f"{path.name}) | {sha256(path)} |" in index
    assert "Status: partial (cells without a result: 2, texts absent: 1)" in index
    assert "Status: partial (cells without a result: 2, texts absent: 1); the reasons" in capfd.readouterr().err
    for policy in ("first_choice", "first_choice (sweep)"):
        assert f"- reference, {policy}, s12, code_test: failed, RuntimeError: 3 losses are NaN" in index
    assert "- reference: refused, it decides no claim: the miss rate (9,000 events)" in index
    assert "`make retry`" in index and "bible_test (test, scripture): absent, its wheel is not there" in index
    assert "reference (rehearsal: a small embedded model)" in index
    assert "- reference: few_heavy against many_light at the middle level: +1.68 % (+1.20 to +2.40), realised" in index
    assert "- reference_b: not run: the foreseen power at the middle level is 0.41, below 0.8" in index
    assert "Arm few_heavy_low of experiment B on reference." in index
    assert "code_test (test, code): 30 documents, the first 24 scored" in index
    row = synthetic_table().query("policy == 'rule_015' and slots == 's25' and text == @POOLED").iloc[0]
    numbers = f"{row['delta_percent']:+.3f} ({row['delta_percent_low']:+.3f} to {row['delta_percent_high']:+.3f})"
    line = next(line for line in index.splitlines() if line.startswith("rule_015") and numbers in line)
    assert all(f"{row[name]:.4f}" in line for name in ("substituted_share", "substituted_mass", "miss_rate"))
    assert "quality_first    no effect: nothing replaced" in index and str(tmp_path) not in index

    publish = SCRIPTS / "publish.py"
    with pytest.raises(UserError, match="partial"):
        run(publish, "--results", tmp_path, monkeypatch=monkeypatch)
    assert not (tmp_path / "published").exists()
    run(publish, "--results", tmp_path, "--partial", monkeypatch=monkeypatch)
    assert (tmp_path / "published" / "tables" / "quality.csv").is_file()


def test_a_complete_run_is_published_whole_repeatably_and_only_as_indexed(pictures, tmp_path, monkeypatch):
    flags = finished_run(tmp_path, synthetic_table(failed=None), pictures)
    index, publish = SCRIPTS / "write_index.py", SCRIPTS / "publish.py"
    run(index, "--title", "Results", *flags, "--out", tmp_path / "all", monkeypatch=monkeypatch)
    assert "Status: complete" in (tmp_path / "all").read_text()
    stale = tmp_path / "published" / "plots" / "old.svg"
    kept = tmp_path / "published" / "claims.csv"
    stale.parent.mkdir(parents=True)
    stale.write_text("old")
    kept.write_text("kept")
    found = []
    for _ in range(2):
        run(publish, "--results", tmp_path, monkeypatch=monkeypatch)
        files = sorted(p for p in (tmp_path / "published").rglob("*") if p.is_file())
        found.append({str(p.relative_to(tmp_path / "published")): sha256(p) for p in files})
    assert found[0] == found[1] and kept.is_file() and not stale.exists()
    for folder in ("quality", "sweep"):
        own = {name for name in found[0] if name.startswith(f"{folder}/")}
        assert own == {f"{folder}/reference/{policy}.json" for policy in synthetic_table()["policy"].unique()}
    own = {name for name in found[0] if name.startswith("experiment_b/")}
    assert own == {f"experiment_b/reference/{name}.json" for name in ("few_heavy_low", "pilot")}  # no arrays
    plots = {name for name in found[0] if name.startswith("plots/")}
    assert plots == {f"plots/{figure}.{suffix}" for figure in FIGURES for suffix in ("csv", "png", "svg")}

    (tmp_path / "tables" / "local" / "bundles.md").write_text("# Another run\n")
    with pytest.raises(UserError, match=r"bundles\.md is not the file"):
        run(publish, "--results", tmp_path, monkeypatch=monkeypatch)
