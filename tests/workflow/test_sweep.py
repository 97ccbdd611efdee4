"""Tables and figures of the sweep on made-up records, and its script on a tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import sweep_cases
from matplotlib.collections import PathCollection
from pictures import draw, legible_words, markers, module, script
from safetensors.numpy import load_file
from sweep_cases import DOCUMENTS, LAYERS, MODELS, SHEET, TEXTS, TOKENS, TOP_K, changed_of, write_records
from tiny import run_script

from engine.errors import UserError
from engine.files import sha256
from engine.policies import BASELINE, load_policies
from evals.stats import holm

SWEEP = load_policies(SHEET)
BINS = [(0, 15), (16, 31), (32, 63), (64, 127), (128, 191), (192, 319)]
FAILED = "mass_050"  # one text of the first model
TABLES = {"sweep_loss_by_mass": "sweep", "topic_changes": "topic_changes", "loss_by_document": "documents"}


def tabulate(paths: list[Path], folder: Path) -> Path:
    flags = ("--out-sweep", folder / "sweep.csv", "--out-topics", folder / "topic_changes.csv")
    flags += ("--out-standins", folder / "standins.csv", "--replicates", 199)
    ended = run_script("tabulate_sweep.py", "--records", *paths, *flags)
    assert ended.code == 0, ended.err
    return folder


def fail(path: Path, text: str) -> None:
    """As if the cell of that text had failed."""
    record = json.loads(path.read_text())
    kept = ("slots", "slots_percent", "slots_count", "text", "topic")
    for number, cell in enumerate(record["cells"]):
        if cell["text"] == text:
            failed = {name: cell[name] for name in kept} | {"status": "failed", "reason": "MemoryError: no room"}
            record["cells"][number] = failed | {"wall_s": 1.0}
    path.write_text(json.dumps(record))


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> Path:
    """All rows of the sheet on two models, a failed cell; and the bundles as documents."""
    folder = tmp_path_factory.mktemp("sweep")
    paths = write_records(folder)
    fail(next(path for path in paths if path.stem == FAILED and path.parent.name == MODELS[0]), "bible_test")
    tabulate(paths, folder)
    bundles = write_records(folder / "bundles", sheet=SHEET.with_name("policies.tsv"))
    ended = run_script(
        "tabulate_documents.py", "--records", *bundles, "--slots", "s25", "--out", folder / "documents.csv"
    )
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture(scope="module")
def sweep(tables) -> pd.DataFrame:
    return pd.read_csv(tables / "sweep.csv")


@pytest.fixture(scope="module")
def topics(tables) -> pd.DataFrame:
    return pd.read_csv(tables / "topic_changes.csv")


# ---- every policy ----------------------------------------------------------------------------------------------------
def test_every_policy_has_a_row_a_text_and_a_pooled_one_unless_a_text_failed(sweep):
    pooled = sweep[sweep["text"] == "all"]
    missing = {(model, policy) for model in MODELS for policy in SWEEP} - {
        *zip(pooled["model"], pooled["policy"], strict=True)
    }
    assert missing == {(MODELS[0], FAILED)}
    assert len(sweep) == len(MODELS) * len(SWEEP) * (len(TEXTS) + 1) - 1
    (lost,) = sweep[sweep["status"] == "failed"].to_dict("records")
    assert (lost["policy"], lost["text"], lost["reason"]) == (FAILED, "bible_test", "MemoryError: no room")
    assert math.isnan(lost["delta_percent"]) and "substituted_mass_by_document" not in sweep


def test_a_row_has_the_columns_of_the_sheet_and_says_from_counts_whether_first_choices_are_fetched(sweep):
    for row in sweep[sweep["text"] == "all"].to_dict("records"):
        policy = SWEEP[row["policy"]]
        assert row["miss_rule"] == policy.miss_rule and row["eviction"] == policy.eviction
        for name in ("tau", "share", "beta", "seed"):
            assert row[name] == getattr(policy, name) or (math.isnan(row[name]) and getattr(policy, name) is None)
        assert row["first_choices_changed"] == len(TEXTS) * changed_of(policy)
        assert row["protects_first"] == (changed_of(policy) == 0)
    assert set(sweep["protects_first"].dropna()) == {True, False}


def test_golden_loss_of_a_policy_is_the_mean_over_the_tokens_of_all_texts(tables, sweep):
    arrays = {
        policy: load_file(tables / "sweep" / MODELS[1] / f"{policy}.safetensors") for policy in (BASELINE, "tau_inf")
    }
    delta = [arrays["tau_inf"][f"s25/{t}"].astype(float) - arrays[BASELINE][f"s25/{t}"] for t in TEXTS]
    row = sweep.query("model == @MODELS[1] and policy == 'tau_inf' and text == 'all'").iloc[0]
    assert row["delta_percent"] == pytest.approx(100 * math.expm1(np.concatenate(delta).mean()), rel=1e-6)
    assert row["documents"] == len(TEXTS) * DOCUMENTS and row["tokens"] == len(TEXTS) * DOCUMENTS * TOKENS
    assert row["delta_percent_low"] < row["delta_percent"] < row["delta_percent_high"]


# ---- after a change of topic -----------------------------------------------------------------------------------------
def test_golden_bins_hold_the_tokens_of_that_place_in_every_document(topics):
    assert list(topics[["from_token", "to_token"]].drop_duplicates().itertuples(index=False, name=None)) == BINS
    sizes = (topics["to_token"] - topics["from_token"] + 1) * DOCUMENTS * len(TEXTS)
    assert (topics["tokens"] == sizes).all() and (topics["documents"] == DOCUMENTS * len(TEXTS)).all()
    assert len(topics) == (len(MODELS) * len(SWEEP) - 1) * len(BINS)
    assert FAILED not in set(topics.query("model == @MODELS[0]")["policy"])


def test_golden_numbers_of_a_bin(tables, topics):
    """Tokens 32 to 63 of every document, by hand from the arrays."""
    arrays = {
        policy: load_file(tables / "sweep" / MODELS[0] / f"{policy}.safetensors")
        for policy in (BASELINE, "tau_inf", "tau_inf_beta_050")
    }

    def of_bin(policy: str, name: str = "") -> np.ndarray:
        parts = [arrays[policy][f"s25/{text}{name}"].reshape(DOCUMENTS, TOKENS)[:, 32:64] for text in TEXTS]
        return np.concatenate(parts).astype(np.float64)

    row = topics.query("model == @MODELS[0] and policy == 'tau_inf_beta_050' and from_token == 32").iloc[0]
    own = of_bin("tau_inf_beta_050")
    assert row["delta_percent"] == pytest.approx(100 * math.expm1((own - of_bin(BASELINE)).mean()), rel=1e-6)
    assert row["against"] == "tau_inf"
    assert row["background_percent"] == pytest.approx(100 * math.expm1((own - of_bin("tau_inf")).mean()), rel=1e-6)
    assert row["hit_rate"] == pytest.approx(of_bin("tau_inf_beta_050", "/hits").mean() / (LAYERS * TOP_K), rel=1e-6)
    assert row["substituted_mass"] == pytest.approx(of_bin("tau_inf_beta_050", "/mass").mean(), rel=1e-6)


def test_only_background_admission_is_paired_with_the_rule_without_it(topics):
    pairs = topics[["policy", "against"]].drop_duplicates().set_index("policy")["against"]
    for policy, against in pairs.items():
        if SWEEP[policy].beta is None:
            assert pd.isna(against)
        else:
            assert against == policy.partition("_beta_")[0]
    assert (topics[topics["policy"] == BASELINE]["delta_percent"] == 0).all()
    assert topics["background_percent"].notna().equals(topics["against"].notna())


def test_a_document_shorter_than_a_bin_is_left_out_of_it(tmp_path):
    """Texts of 20 and of 70 tokens a document: the first has none in the last bins."""
    short, long = (write_records(tmp_path / name, ["m"], [text], 3, n) for name, text, n in SIZES)
    for one, other in zip(short, long, strict=True):
        record, more = (json.loads(path.read_text()) for path in (one, other))
        record["cells"] += more["cells"]
        record["clusters"] |= more["clusters"]
        one.write_text(json.dumps(record))
        arrays = load_file(one.with_suffix(".safetensors")) | load_file(other.with_suffix(".safetensors"))
        sweep_cases.save_file(arrays, one.with_suffix(".safetensors"))
    table = pd.read_csv(tabulate(short, tmp_path) / "topic_changes.csv").query("policy == 'tau_inf'")
    assert list(table["to_token"]) == [15, 31, 63, 69]
    assert list(table["documents"]) == [6, 6, 3, 3] and list(table["tokens"]) == [96, 3 * 4 + 3 * 16, 96, 18]


SIZES = (("short", "boltons_test", 20), ("long", "bible_test", 70))


# ---- stand-ins -------------------------------------------------------------------------------------------------------
def test_golden_pairs_of_stand_ins_differ_in_one_column_and_are_corrected_together(tables):
    table = pd.read_csv(tables / "standins.csv")
    for model, own in table.groupby("model"):
        pairs = set(own[["column", "policy", "base"]].itertuples(index=False, name=None))
        random = ("substitute_all", "mass_010", "mass_025", "mass_050", "mass_075", "tau_015", "tau_inf")
        expected = {("standin", f"{base}_random", base) for base in random}
        for base in ("tau_015", "tau_inf"):
            expected |= {("standin_weight", f"{base}_missing", base)}
            expected |= {("standin_recency", f"{base}_recency_no", base)}
        assert pairs == expected
        p_values = {name: None if pd.isna(p) else p for name, p in zip(own["policy"], own["p_value"], strict=True)}
        found = dict(zip(own["policy"], own["p_holm"], strict=True))
        for name, p in holm(p_values).items():
            assert (p is None and pd.isna(found[name])) or found[name] == pytest.approx(p), (model, name)
    lost = table[table["status"] == "failed"]
    assert list(lost[["model", "policy"]].itertuples(index=False, name=None)) == [(MODELS[0], f"{FAILED}_random")]
    assert lost["reason"].iloc[0] == f"{FAILED}: MemoryError: no room"
    (random,) = table.query("model == @MODELS[1] and policy == 'tau_inf_random'").to_dict("records")
    assert random["difference_percent_low"] > 0 and random["base_substituted_mass"] < random["substituted_mass"]
    assert (random["value"], random["base_value"]) == ("random", "next_best")


# ---- documents -------------------------------------------------------------------------------------------------------
def test_golden_loss_and_mass_of_documents(tables):
    table = pd.read_csv(tables / "documents.csv")
    lossy = [policy for policy in load_policies(SHEET.with_name("policies.tsv")).values() if not policy.lossless]
    assert len(table) == len(MODELS) * len(lossy) * len(TEXTS) * DOCUMENTS
    folder = tables / "bundles" / "sweep" / MODELS[0]
    loss = load_file(folder / "rule_015.safetensors")["s25/bible_test"][2 * TOKENS : 3 * TOKENS].astype(float)
    base = load_file(folder / f"{BASELINE}.safetensors")["s25/bible_test"][2 * TOKENS : 3 * TOKENS]
    row = table.query("model == @MODELS[0] and policy == 'rule_015' and document == 'bible_test_2'").iloc[0]
    assert row["delta_nll"] == pytest.approx((loss - base).mean(), rel=1e-6) and row["tokens"] == TOKENS
    cells = json.loads((folder / "rule_015.json").read_text())["cells"]
    (cell,) = [cell for cell in cells if cell["text"] == "bible_test"]
    assert row["substituted_mass"] == pytest.approx(cell["substituted_mass_by_document"][2], rel=1e-6)


def test_golden_parts_of_one_article_are_one_document():
    documents = module(script("loss_by_document").with_name("tabulate_documents.py")).documents
    found = documents([("a", 1), ("b", 2), ("a", 3)], [0.1, 0.4, 0.3], np.array([1.0, 2, 4, 0, 1, 2]))
    assert list(found["document"]) == ["a", "b"] and list(found["tokens"]) == [4, 2]
    assert list(found["substituted_mass"]) == [pytest.approx((0.1 + 3 * 0.3) / 4), pytest.approx(0.4)]
    assert list(found["delta_nll"]) == [pytest.approx(1.0), pytest.approx(3.0)]


def test_documents_without_the_baseline_are_refused(tables, tmp_path):
    record = tables / "bundles" / "sweep" / MODELS[0] / "rule_015.json"
    ended = run_script("tabulate_documents.py", "--records", record, "--slots", "s25", "--out", tmp_path / "d.csv")
    assert f"no record of {BASELINE}" in ended.message and not list(tmp_path.iterdir())


# ---- figures ---------------------------------------------------------------------------------------------------------
def table_of(name: str, tables: Path) -> pd.DataFrame:
    loaded = module(script(name))
    return (loaded.read_sweep if name == "sweep_loss_by_mass" else loaded.read_points)(tables / f"{TABLES[name]}.csv")


POINTS = {
    "loss_by_document": lambda written: written[["substituted_mass", "delta_percent"]],
    "sweep_loss_by_mass": lambda written: written[["substituted_mass", "delta_percent"]],
}


@pytest.mark.parametrize("name", TABLES)
def test_a_figure_is_legible_names_what_it_must_and_repeats_to_the_byte(name, tables, tmp_path):
    figure, points = draw(name, table_of(name, tables))
    words = legible_words(figure)
    assert "rehearsal" in words and "25 % resident" in words and set(points["model"]) == set(MODELS)
    for prefix in ("one", "two"):
        flags = ("--table", tables / f"{TABLES[name]}.csv", "--out-prefix", tmp_path / prefix)
        assert run_script(f"plot_{name}.py", *flags).code == 0
    for suffix in ("csv", "png", "svg"):
        assert sha256(tmp_path / f"one.{suffix}") == sha256(tmp_path / f"two.{suffix}"), suffix
    written = pd.read_csv(tmp_path / "one.csv")
    assert len(written) == len(points)
    if name in POINTS:
        xy = POINTS[name](written)
        drawn = np.array(sorted(markers(figure)))
        np.testing.assert_allclose(drawn, xy.sort_values([*xy.columns]), rtol=1e-6)


def test_the_sweep_is_drawn_apart_by_what_the_counts_say(tables):
    table = table_of("sweep_loss_by_mass", tables)
    figure, points = draw("sweep_loss_by_mass", table)
    words = legible_words(figure)
    assert "Without a result: mass_050 s25 bible_test" in words
    assert not points["policy"].str.contains("missing|recency").any() and BASELINE not in set(points["policy"])
    left, right = (figure.axes[number].get_title(loc="left") for number in (0, 1))
    assert left == f"{MODELS[0]}: first choices always fetched" and right == f"{MODELS[0]}: first choices replaced"
    counted = {True: 0, False: 0}
    for ax in figure.axes:
        for artist in ax.collections:
            if isinstance(artist, PathCollection):
                counted["always fetched" in ax.get_title(loc="left")] += len(artist.get_offsets())
    assert counted == points["protects_first"].value_counts().to_dict()


def test_points_after_a_change_are_the_background_sweep_of_two_thresholds(tables):
    figure, points = draw("topic_changes", table_of("topic_changes", tables))
    lossy = {"tau_015", "tau_inf"} | {f"tau_{t}_beta_{b}" for t in ("015", "inf") for b in ("025", "050", "100")}
    assert set(points["policy"]) == lossy | {BASELINE}
    assert len(points) == len(MODELS) * len(BINS) * (len(lossy) + 1)
    words = legible_words(figure)
    assert all(word in words for word in ("192-319", "beta 0.25", "no background", "hit rate"))
    heights = sorted(y for _, y in markers(figure))
    both = points.query("policy != @BASELINE")
    hits = [points["hit_rate"], points.query("policy == @BASELINE")["hit_rate"]]  # the baseline's in both columns
    drawn = [both["delta_percent"], both["background_percent"].dropna(), *hits, both["substituted_mass"]]
    np.testing.assert_allclose(heights, sorted(pd.concat(drawn)), rtol=1e-6)


@pytest.mark.parametrize("name", TABLES)
def test_nothing_to_draw_is_said_on_the_picture(name, tables):
    table = table_of(name, tables)
    figure, points = draw(name, table[table["policy"] == BASELINE])
    assert "no result" in legible_words(figure) or "has a result" in legible_words(figure)
    assert points.empty or set(points["policy"]) == {BASELINE}


def test_a_run_in_which_every_cell_failed_has_tables_and_pictures(tmp_path):
    paths = write_records(tmp_path, [MODELS[0]], ["bible_test"], 2, 20)
    for path in paths:
        fail(path, "bible_test")
    tabulate(paths, tmp_path)
    assert pd.read_csv(tmp_path / "topic_changes.csv").empty
    assert set(pd.read_csv(tmp_path / "standins.csv")["status"]) == {"failed"}
    for name in ("sweep_loss_by_mass", "topic_changes"):
        figure, points = draw(name, table_of(name, tmp_path))
        assert points.empty and "result" in legible_words(figure)


BROKEN = {
    "sweep_loss_by_mass": lambda text: text.replace("protects_first", "protects"),
    "topic_changes": lambda text: text.replace(",0.65", ",soon", 1),
    "loss_by_document": lambda text: text.replace("threshold", "guess", 1),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_corrupt_table_is_a_user_error(name, tables, tmp_path):
    source = tables / f"{TABLES[name]}.csv"
    text = BROKEN[name](source.read_text())
    assert text != source.read_text()
    (tmp_path / source.name).write_text(text)
    with pytest.raises(UserError, match=rf"{source.name}.*; expected .*; delete it and run again"):
        table_of(name, tmp_path)
