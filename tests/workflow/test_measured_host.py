"""A measured host by hand: runs, their scores, tables, figure and import, on the tiny model. No time is asserted.

Laws: what is exact loses nothing, counts are K x events, both instruments decode the same tokens, nothing of a run is
lost or taken twice. Bad input: whatever is damaged is one line that names file and value, or a row with its reason.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from measured_cases import (
    LINKS,
    POLICIES,
    RUNS,
    SIZES,
    Case,
    made,
    measure,
    rename,
    renew_hashes,
    rewrite_json,
    rewrite_run,
)
from pictures import SCRIPTS, draw, legible_words, markers, module
from safetensors.numpy import load_file
from tiny import EXPERTS, LAYERS, ROOT, TEST, TOP_K, run_script

from engine import measured_import
from engine.errors import UserError
from engine.files import sha256
from engine.geometry import Geometry
from engine.host import main as host_main
from engine.host import parse_host
from engine.log import load_log
from engine.measured_run import cell_of, load_run, read_record, records
from engine.predictors import pairs, save_predictor
from engine.safetensors_files import weights_hash
from evals.measured_series import BOUNDS
from evals.measured_tables import read_documents, read_errors, read_measured

BASELINE = "fetch_lfu_decay"


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    case = measure(tmp_path_factory.mktemp("host"))
    made(case.tabulate())
    return case


@pytest.fixture
def own(case, tmp_path) -> Case:
    """A copy that the test may damage."""
    return case.copy(tmp_path)


def files(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): sha256(path) for path in folder.rglob("*") if path.is_file()}


def table(case: Case) -> pd.DataFrame:
    return read_measured(case.table("measured"))


def one(frame: pd.DataFrame, **cell) -> pd.Series:
    found = frame[np.logical_and.reduce([frame[name] == value for name, value in cell.items()])]
    assert len(found) == 1, (cell, len(found))
    return found.iloc[0]


# ---- runs ------------------------------------------------------------------------------------------------------------
def test_every_policy_but_the_clairvoyant_is_timed_over_every_link_as_often_as_asked(case):
    for size in SIZES:
        record = case.record(size)
        assert record["planned"] == len(record["cells"]) == sum(RUNS.values())
        assert all(row["status"] == "ok" and row["failed_loads"] == [] for row in record["cells"])
        assert set(record["policies"]) == set(POLICIES) and record["top_k"] == TOP_K
        for link, (documents, tokens, repeats) in LINKS.items():
            rows = [row for row in record["cells"] if row["link"] == link]
            assert {row["repeat"] for row in rows} == set(range(1, repeats + 1)) and len(rows) == RUNS[link]
            assert all(
                len(p) == documents and {n for *_, n in p} == {tokens} for p in record["passages"][link].values()
            )


def test_law_a_run_is_whole_and_its_counts_are_k_times_events(case):
    for record in records(case.folder):
        for row in record["cells"]:
            run = load_run(cell_of(record, row).path(case.folder))
            documents, tokens, _ = LINKS[row["link"]]
            assert run.log.kind.shape == (documents * tokens, LAYERS, TOP_K)
            assert run.starts.tolist() == [i * tokens for i in range(documents)]
            assert (run.stall_s <= run.token_s).all() and (run.stall_s >= 0).all()
            assert set(run.journal["bytes"]) <= {record["record_bytes"]}
            assert json.loads(run.facts["policy_row"]) == record["policies"][row["policy"]]


def test_the_policies_take_turns_in_every_round(case):
    rows = [row for row in case.record("own")["cells"] if row["link"] == "disk" and row["text"] == TEST[0]]
    rounds = [[row["policy"] for row in rows if row["repeat"] == repeat] for repeat in (1, 2)]
    assert all(sorted(names) == sorted(POLICIES) for names in rounds) and rounds[0] != rounds[1]


def test_a_second_measurement_takes_nothing_again(own, monkeypatch):
    from engine import harness

    before = files(own.folder)
    monkeypatch.setattr(harness, "decode", lambda *_: pytest.fail("a run was taken again"))
    made(own.measure("own"))
    after = files(own.folder)
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed <= {"tiny/own.json"} and after.keys() == before.keys()  # its null time and command are new


def test_another_policy_row_is_timed_anew_and_the_others_are_kept(own, tmp_path):
    sheet = tmp_path / "policies.tsv"
    text = (Path(__file__).parents[2] / "config" / "policies.tsv").read_text(encoding="utf-8")
    sheet.write_text(text.replace("rule_015\tthreshold\t0.15", "rule_015\tthreshold\t0.2"), encoding="utf-8")
    before = files(own.folder)
    made(own.measure("own", policies=sheet))
    after = files(own.folder)
    changed = {name for name in after if after[name] != before[name]} - {"tiny/own.json"}
    assert len(changed) == (LINKS["disk"][2] + LINKS["sdcard"][2]) * len(TEST)
    assert all("/rule_015/" in name for name in changed)


SHEETS = tuple(ROOT / "config" / name for name in ("policies.tsv", "prefetch.tsv"))
PREFETCHING = ("gate_replay", "spec_prefetch", "spec_always", "quality_first_prefetch", "prefetch_oracle")


@pytest.mark.parametrize("size", SIZES)
def test_policies_that_prefetch_are_timed_scored_and_accepted(own, size, tmp_path):
    """Beside the others, which are kept; their logs are those of the baseline, or are scored by themselves."""
    generator = torch.Generator().manual_seed(2)
    number, width = len(pairs(LAYERS)), Geometry.of_config(json.loads((own.model / "config.json").read_text())).width
    arrays = {"A": torch.randn(number, 3, width, generator=generator), "B": torch.zeros(number, EXPERTS, 3)}
    predictors = tmp_path / "predictors"
    hash = weights_hash(own.model)
    save_predictor(predictors / "spec_prefetch.safetensors", "spec_prefetch", arrays, {"model_hash": hash})
    before = files(own.folder)
    names = (*POLICIES, *PREFETCHING)
    made(own.measure(size, names=names, policies=SHEETS, predictors=predictors))
    made(own.score(size))
    after, record = files(own.folder), own.record(size)
    kept = [name for name in before if name.startswith(f"tiny/{size}/")]
    assert kept and all(after[name] == before[name] for name in kept)
    assert all(row["status"] == "ok" and not row["failed_loads"] for row in record["cells"])
    assert set(record["policies"]) == {*POLICIES, *PREFETCHING} - {"prefetch_oracle"}
    assert record["provenance"]["spec_prefetch_sha256"] == sha256(predictors / "spec_prefetch.safetensors")
    ahead = 0
    for row in record["cells"]:
        cell = cell_of(record, row)
        run, prefetch = load_run(cell.path(own.folder)), row["policy"] in PREFETCHING
        assert ("predictor_sha256" in run.facts) == (prefetch and row["policy"] != "gate_replay")
        ahead += run.prefetch_bytes
        assert prefetch or not run.prefetch_bytes
        if row["policy"] in ("gate_replay", "spec_prefetch", "spec_always"):
            plain = load_run(dataclasses.replace(cell, policy=BASELINE).path(own.folder))
            np.testing.assert_array_equal(run.losses, plain.losses)
            np.testing.assert_array_equal(run.log.executed, plain.log.executed)
    assert ahead > 0
    other = json.loads((own.folder / "tiny" / f"{size}_rescored.json").read_text(encoding="utf-8"))
    assert all(row["status"] == "ok" for row in other["cells"])
    if size == "own":  # float32
        assert all(row["differences"] == 0 for row in other["cells"])
    measured_import.accept(own.folder, tmp_path / "elsewhere", parse_host)


def test_a_policy_that_prefetches_asks_for_its_predictor(own, tmp_path):
    for flags in ({}, {"predictors": tmp_path}):
        ended = own.measure("own", names=("spec_prefetch",), policies=SHEETS, **flags)
        assert ended.code == 2 and "a trained spec_prefetch" in ended.err and ended.err.count("\n") == 1


def test_a_run_that_fails_keeps_its_reason_and_the_rest_goes_on(own, monkeypatch):
    from engine import harness

    decode, calls = harness.decode, []

    def faulty(model, engine, documents):
        calls.append(engine.policy.id)
        if engine.policy.id == "rule_015":
            raise MemoryError("the test wants this run to fail")
        return decode(model, engine, documents)

    monkeypatch.setattr(harness, "decode", faulty)
    shutil.rmtree(own.folder)
    made(own.measure("own", links={"disk": (3, 6, 2)}))
    failed = [row for row in own.record("own")["cells"] if row["status"] == "failed"]
    assert {row["policy"] for row in failed} == {"rule_015"} and len(failed) == 2 * len(TEST)
    assert all(row["reason"] == "MemoryError: the test wants this run to fail" for row in failed)
    made(own.score("own"))
    made(own.tabulate())
    lost = table(own).query("policy == 'rule_015' and instrument == 'engine'")
    assert set(lost["status"]) == {"failed"} and set(lost["text"]) == set(TEST)
    assert lost["token_s_mean"].isna().all() and lost["reason"].str.contains("the test wants").all()
    assert (
        table(own).query("policy == 'rule_015' and instrument == 'simulator' and text == 'all'")["status"].item()
        == "ok"
    )

    monkeypatch.setattr(harness, "decode", decode)
    made(own.measure("own", links={"disk": (3, 6, 2)}))
    assert {row["status"] for row in own.record("own")["cells"]} == {"ok"}


def test_a_link_that_the_profile_lacks_is_skipped_with_its_reason(own):
    shutil.rmtree(own.folder)
    made(own.measure("own", slots="s25=25", links={"disk": (2, 4, 1), "floppy": (2, 4, 1)}))
    record = own.record("own")
    assert set(record["links"]) == {"disk"} and record["skipped"] == {"floppy": "no such link in the profile of box"}
    assert record["slots"] == {"s25": {"percent": 25.0, "count": 4}}


BAD_MEASURE = {
    "a profile of another machine": (
        lambda case: edit_yaml(case.profile, fingerprint="0" * 16), {}, ["is of machine 0000000000000000", "probe"]
    ),
    "a profile of other threads": (lambda case: None, {"threads": 2}, ["probed with 1 threads", "the 2 of this run"]),
    "a store of other weights": (
        lambda case: None, {"store": "packed/512x64"}, ["tiny own with another store", "move the folder away"]
    ),
    "another profile than the runs were taken with": (
        lambda case: edit_yaml(case.profile, facts={"cpu": "another", "cores": 1, "ram_bytes": 1, "gpus": []}),
        {}, ["with another host_sha256", "move the folder away"],
    ),
    "a folder of another machine": (
        lambda case: rename(rename(case.folder, "x", "f" * 16), "box", "f" * 16), {}, ["tiny 512x64 with another host"]
    ),
    "more tokens than any document has": (lambda case: None, {"links": {"disk": (3, 500, 1)}}, ["has 500 tokens"]),
    "no link that is there": (lambda case: None, {"links": {"floppy": (3, 4, 1)}}, ["links floppy", "disk, sdcard"]),
}  # fmt: skip


def edit_yaml(path: Path, **fields) -> None:
    value = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump(value | fields, sort_keys=False), encoding="utf-8")


@pytest.mark.parametrize("name", BAD_MEASURE)
def test_what_cannot_be_measured_is_one_line_and_changes_nothing(own, name):
    damage, flags, says = BAD_MEASURE[name]
    damage(own)
    flags = {key: own.root / value if key == "store" else value for key, value in flags.items()}
    before = files(own.folder)
    message = own.measure("own", **flags).message
    assert all(words in message for words in says), message
    assert files(own.folder) == before


# ---- scores ----------------------------------------------------------------------------------------------------------
def test_agreement_in_float32_the_emulator_gives_every_run_its_own_losses_and_decisions(case):
    for size, slack in (("own", 1e-4), ("512x64", 0.1)):
        found = json.loads((case.folder / "tiny" / f"{size}_rescored.json").read_text(encoding="utf-8"))
        losses = load_file(case.folder / "tiny" / f"{size}_rescored.safetensors")
        assert len(losses) == len(found["cells"]) == sum(RUNS.values())
        for row in found["cells"]:
            assert row["status"] == "ok" and row["largest_loss_difference"] < slack
            assert row["hits"] + row["fetches"] + row["substitutions"] + row["drops"] == TOP_K * row["events"]
        if size == "own":
            assert found["differences"] == 0 and found["events"] > 0


def test_runs_that_decided_the_same_are_scored_once(case):
    found = json.loads((case.folder / "tiny" / "own_rescored.json").read_text(encoding="utf-8"))
    exact = {row["log"] for row in found["cells"] if row["policy"] == BASELINE and row["link"] == "disk"}
    assert len(exact) == len(TEST) and found["logs"] < len(found["cells"])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_losses_of_a_run_scored_again_that_are_nan_or_infinite_fail_their_cells(own, value, monkeypatch):
    """NaN stopped the script after all was scored: strict JSON has none, and no other cell was kept."""
    asked, right = [], torch.nn.functional.cross_entropy

    def first_is_none(*args, **options):
        asked.append(right(*args, **options))
        return asked[-1] * (value if len(asked) == 1 else 1)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", first_is_none)
    made(own.score("own"))
    found = json.loads((own.folder / "tiny" / "own_rescored.json").read_text(encoding="utf-8"))
    failed = [row for row in found["cells"] if row["status"] != "ok"]
    assert len(failed) == 1 and "losses are NaN or infinite" in failed[0]["reason"] and "hits" not in failed[0]
    assert len(load_file(own.folder / "tiny" / "own_rescored.safetensors")) == len(found["cells"]) - 1


# ---- tables ----------------------------------------------------------------------------------------------------------
def test_both_instruments_have_a_row_of_every_cell_and_of_all_texts(case):
    found = table(case)
    assert len(found) == len(SIZES) * len(LINKS) * (2 * len(POLICIES) + len(BOUNDS)) * (len(TEST) + 1)
    assert (found["status"] == "ok").all() and (found["reason"] == "").all()
    assert found["profile_quick"].all() and found["rehearsal"].all()
    assert dict(zip(found["link"], found["link_status"], strict=True)) == {"disk": "measured", "sdcard": "throttled"}


def test_law_times_add_up_and_speedups_join_on_the_same_cell(case):
    found = table(case)
    assert found["token_s_mean"].to_numpy() == pytest.approx(
        (found["compute_s_mean"] + found["stall_s_mean"]).to_numpy()
    )
    assert (found["limit_token_s"] <= found["ceiling_token_s"] * (1 + 1e-6)).all()
    assert (found["token_s_lowest_repeat"] <= found["token_s_highest_repeat"]).all()
    key = ["link", "size", "text", "instrument"]
    base = found[found["policy"] == BASELINE].set_index(key)
    assert (base["speedup"] == 1).all()
    for row in found.to_dict("records"):
        own = base.loc[tuple(row[name] for name in key)]
        assert row["speedup"] == pytest.approx(own["token_s_mean"] / row["token_s_mean"], rel=1e-6)
    demands = found[["hits", "fetches", "substitutions", "drops"]].sum(axis=1)
    assert (demands == TOP_K * found["events"]).all()


def test_law_what_knows_the_future_is_modelled_alone_and_faster_than_the_baseline(case):
    """Perfect prediction never makes a token slower, perfect eviction never makes more misses."""
    found = table(case).set_index("policy")
    bounds = found.loc[list(BOUNDS)]
    assert set(bounds["instrument"]) == {"simulator"} and bounds["lossless"].all()
    key = ["link", "size", "text"]
    base = found[found["instrument"] == "simulator"].loc[BASELINE].set_index(key)
    oracle, belady = (bounds.loc[name].set_index(key) for name in ("prefetch_oracle", "fetch_belady"))
    assert set(oracle["prefetch"] + oracle["schedule"]) == {"oraclepieces"} and set(belady["prefetch"]) == {""}
    assert (oracle["miss_rate"] == base["miss_rate"]).all()  # what is resident does not change
    assert (oracle["stall_s_mean"] <= base["stall_s_mean"] * (1 + 1e-9)).all()
    assert (belady["miss_rate"] <= base["miss_rate"]).all() and (belady["miss_rate"] < base["miss_rate"]).any()
    documents, errors = read_documents(case.table("measured_documents")), read_errors(case.table("engine_simulator"))
    assert not {*documents["policy"], *errors["policy"]} & set(BOUNDS)


def test_a_table_that_is_older_than_prefetching_is_read_and_drawn(case, tmp_path):
    own = pd.read_csv(case.table("measured"), dtype=str, keep_default_na=False)
    own = own[~own["policy"].isin(BOUNDS)].drop(columns=["prefetch", "schedule"])
    own.to_csv(tmp_path / "old.csv", index=False)
    figure, points = draw("measured_speedup", read_measured(tmp_path / "old.csv"))
    every = legible_words(figure)
    assert "modelled alone: none in this table" in every and set(points["policy"]) == set(POLICIES)


def test_bounds_cross_the_panel_and_every_policy_that_was_measured_is_shown(case, tmp_path):
    own = table(case)
    more = own[own["policy"] == BASELINE].assign(prefetch="spec_prefetch", schedule="pieces")
    more = [more.assign(policy="spec_prefetch"), more.assign(policy="spec_always", schedule="always")]
    figure, points = draw("measured_speedup", pd.concat([own, *more], ignore_index=True))
    every = legible_words(figure)
    assert set(points["policy"]) == {*POLICIES, *BOUNDS, "spec_prefetch", "spec_always"}
    assert "spec_prefetch" in every and "spec_always" in every
    bounds = points[points["policy"].isin(BOUNDS)]
    assert (bounds["delta_percent"] == 0).all() and set(bounds["instrument"]) == {"simulator"}
    assert all(every.count(f"{name}, exact (bound)") == len(SIZES) * len(LINKS) for name in BOUNDS)
    dashed = [line.get_ydata()[0] for ax in figure.axes for line in ax.lines if line.get_linestyle() == "--"]
    np.testing.assert_allclose(sorted(dashed), sorted(bounds["speedup"]))


def test_law_exact_policies_lose_nothing_and_the_simulator_has_no_losses(case):
    found = table(case)
    engine, modelled = (found[found["instrument"] == name] for name in ("engine", "simulator"))
    assert (engine.loc[engine["lossless"], "delta_percent"] == 0).all()
    assert engine.loc[~engine["lossless"], "delta_percent"].abs().max() > 0
    assert modelled["delta_percent"].isna().all() and modelled["rescored_events"].isna().all()


def test_agreement_a_policy_without_background_decides_the_same_in_both_instruments(case):
    """In float32, exact or not: the tiny model's two layers see what the recording saw, but for substitutions above."""
    found = table(case).query("size == 'own' and policy == @BASELINE")
    engine, modelled = (
        found[found["instrument"] == name].set_index(["link", "text"]) for name in ("engine", "simulator")
    )
    for name in ("hits", "fetches"):
        assert (engine[name] == modelled[name] * engine["repeats"]).all()
    assert engine["bytes_per_token"].to_dict() == pytest.approx(
        (modelled["bytes_per_token"] * 8192 / 6144).to_dict()  # the store's records are whole pages
    )


def test_documents_sum_to_the_rows(case):
    documents = read_documents(case.table("measured_documents"))
    rows = table(case).query("instrument == 'engine' and text != 'all'")
    key = ["size", "link", "policy", "text"]
    for cell, own in documents.groupby(key):
        row = one(rows, **dict(zip(key, cell, strict=True)))
        assert own["time_s"].sum() / own["timed_tokens"].sum() == pytest.approx(row["token_s_mean"])
        assert own["tokens"].sum() == row["tokens"] and own["loss_nats"].notna().all()


def test_what_a_token_came_to_is_compared_with_the_baseline_bit_by_bit(case, own):
    documents = read_documents(case.table("measured_documents"))
    repeats = documents["link"].map({link: repeats for link, (*_, repeats) in LINKS.items()})
    assert (documents["compared"] == documents["tokens"] * repeats).all()
    exact = documents["policy"] == BASELINE
    assert (documents["identical"] == documents["compared"])[exact].all()
    assert (documents["identical"] < documents["compared"])[~exact].any()

    (changed, lost), where = TEST[:2], {"size": "512x64", "link": "disk", "policy": "quality_first"}
    base = own.folder / "tiny" / "512x64" / "disk"
    for policy in (BASELINE, "quality_first"):  # the same run twice, but for one bit of one weight
        shutil.copy(
            base / BASELINE / "s50" / changed / "2.safetensors", base / policy / "s50" / changed / "1.safetensors"
        )

    def flip(arrays, facts):
        arrays["weights"].view(np.uint32)[-1, 0, 0] ^= 1

    rewrite_run(base / "quality_first" / "s50" / changed / "1.safetensors", flip)
    (base / "quality_first" / "s50" / changed / "2.safetensors").unlink()
    for repeat, policy in ((1, BASELINE), (2, "quality_first")):
        (base / policy / "s50" / lost / f"{repeat}.safetensors").unlink()
    renew_hashes(own.folder)
    made(own.tabulate())
    found = read_documents(own.table("measured_documents")).query("size == '512x64' and link == 'disk'")
    of_run = found[(found["policy"] == where["policy"]) & (found["text"] == changed)]
    assert of_run["compared"].tolist() == of_run["tokens"].tolist()
    assert (of_run["compared"] - of_run["identical"]).tolist() == [0] * (len(of_run) - 1) + [1]
    assert (found[(found["policy"] == where["policy"]) & (found["text"] == lost)]["compared"] == 0).all()


def test_engine_and_simulator_are_compared_over_all_texts(case):
    errors, rows = read_errors(case.table("engine_simulator")), table(case).query("text == 'all'")
    assert len(errors) == len(SIZES) * len(LINKS) * len(POLICIES) and (errors["reason"] == "").all()
    for row in errors.to_dict("records"):
        cell = {name: row[name] for name in ("size", "link", "policy")}
        engine, modelled = (one(rows, instrument=name, **cell) for name in ("engine", "simulator"))
        assert row["median_ratio"] == pytest.approx(modelled["token_s_median"] / engine["token_s_median"], rel=1e-6)
        assert row["p95_ratio"] == pytest.approx(modelled["token_s_p95"] / engine["token_s_p95"], rel=1e-6)
        assert row["token_bound_s"] > row["link_bound_s"] >= 0


def test_the_inflated_geometry_is_that_of_the_formulas(case):
    config = json.loads((case.model / "config.json").read_text(encoding="utf-8"))
    record = read_record(case.folder / "tiny" / "512x64.json")
    assert Geometry(**record["geometry"]) == Geometry.of_config(config, width=512, expert_width=64, dtype="bfloat16")
    assert record["geometry"]["expert_bytes"] == record["expert_bytes"]


def test_nothing_measured_is_tables_without_rows_and_a_figure_that_says_so(own):
    made(run_script(
        "tabulate_measured.py", "--hosts", "--traces", own.root / "traces" / "tiny", "--out", own.table("measured"),
        "--out-documents", own.table("measured_documents"), "--out-errors", own.table("engine_simulator"),
    ))  # fmt: skip
    assert table(own).empty and read_errors(own.table("engine_simulator")).empty
    figure, points = draw("measured_speedup", table(own))
    assert "No host is measured yet" in legible_words(figure) and points.empty


def test_without_its_baseline_there_is_no_speedup_and_no_loss_but_a_reason(own):
    for size in SIZES:
        rewrite_json(own.folder / "tiny" / f"{size}.json", lambda record: record["policies"].pop(BASELINE))
    renew_hashes(own.folder)
    made(own.tabulate())
    found = table(own).query("instrument == 'engine'")
    assert not set(table(own)["policy"]) & set(BOUNDS)  # they are the baseline with one part changed
    assert found["token_s_mean"].notna().all() and found["speedup"].isna().all() and found["delta_percent"].isna().all()
    assert found["reason"].str.contains(f"no time of {BASELINE} on .*: no speedup").all()
    figure, points = draw("measured_speedup", table(own))
    assert points.empty and "no speedup" in legible_words(figure)


def test_a_host_whose_routing_is_not_here_is_not_modelled_and_says_why(own):
    made(own.tabulate(traces=False))
    found = table(own)
    absent = found[found["instrument"] == "simulator"]
    assert set(absent["status"]) == {"absent"} and absent["reason"].str.contains("no recorded routing of tiny").all()
    assert (found.loc[found["instrument"] == "engine", "status"] == "ok").all()
    errors = read_errors(own.table("engine_simulator"))
    assert errors["median_ratio"].isna().all() and errors["reason"].str.contains("no recorded routing").all()
    figure, points = draw("measured_speedup", found)
    assert "Not modelled on box: no recorded routing of tiny" in legible_words(figure) and set(
        points["instrument"]
    ) == {"engine"}
    for path in own.folder.glob("tiny/*.json"):
        if not path.stem.endswith("_rescored"):
            rewrite_json(path, lambda record: record["provenance"].update(model="another"))
    renew_hashes(own.folder)
    made(own.tabulate())
    assert table(own).query("instrument == 'simulator'")["reason"].str.contains("other weights").all()


@pytest.mark.parametrize("damage", ["cut", "gone", "faster than its link", "scored before"])
def test_a_damaged_run_has_a_reason_and_no_speed(own, damage):
    path = own.folder / "tiny" / "own" / "disk" / "rule_015" / "s50" / TEST[0] / "1.safetensors"
    other = path.with_name("2.safetensors")
    expected = "is not the run of the record"
    for run in (path, other):
        if damage == "cut":
            run.write_bytes(run.read_bytes()[:1000])
        elif damage == "gone":
            run.unlink()
        elif damage == "faster than its link":
            rewrite_run(run, lambda arrays, _: arrays["journal_end_s"].__isub__(0.9999999 * arrays["journal_end_s"]))
            rewrite_run(run, lambda arrays, _: arrays["journal_begin_s"].fill(0))
            expected = "the page cache answered"
    if damage == "scored before":
        rewrite_json(own.folder / "tiny" / "own_rescored.json", lambda f: f["provenance"].update(record_sha256="0"))
        expected = "own_rescored.json is of another record"
    else:
        renew_hashes(own.folder) if damage == "faster than its link" else None
    made(own.tabulate())
    row = one(table(own), size="own", link="disk", policy="rule_015", text=TEST[0], instrument="engine")
    assert expected in row["reason"], row["reason"]
    if damage == "scored before":
        assert row["status"] == "ok" and np.isnan(row["delta_percent"]) and row["speedup"] > 0
    else:
        assert row["status"] == "failed" and np.isnan(row["token_s_mean"]) and np.isnan(row["speedup"])


def test_two_hosts_stand_side_by_side(own):
    second = own.root / "second"
    shutil.copytree(own.folder, second / "box")
    made(own.tabulate(own.folder, rename(second / "box", "other", "f" * 16)))
    found = table(own)
    assert set(found["host"]) == {"box", "other"} and found["fingerprint"].nunique() == 2
    figure, points = draw("measured_speedup", found)
    every = legible_words(figure)
    assert "other, sdcard (throttled link): tiny, own size" in every and set(points["host"]) == {"box", "other"}


# ---- figure ----------------------------------------------------------------------------------------------------------
def test_measured_points_are_filled_modelled_ones_open_and_all_are_in_the_csv(case, tmp_path):
    made(run_script("plot_measured_speedup.py", "--table", case.table("measured"), "--out-prefix", tmp_path / "a"))
    made(run_script("plot_measured_speedup.py", "--table", case.table("measured"), "--out-prefix", tmp_path / "b"))
    for suffix in ("csv", "png", "svg"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    figure, _ = draw("measured_speedup", table(case))
    every = legible_words(figure)
    for words in (
        "rehearsal",
        "box, disk (measured link): tiny, 512x64",
        "box, sdcard (throttled link): tiny, own size",
    ):
        assert words in every
    assert "disk: 6 documents, 36 tokens, runs: 2" in every and "s50: 50 % resident (8 of 16 experts)" in every
    written = pd.read_csv(tmp_path / "a.csv")
    assert len(written) == len(SIZES) * len(LINKS) * (2 * len(POLICIES) + len(BOUNDS))
    drawn = np.array(sorted(markers(figure)))
    np.testing.assert_allclose(
        drawn, written[["delta_percent", "speedup"]].sort_values(["delta_percent", "speedup"]), rtol=1e-6
    )
    lines = [line for ax in figure.axes for line in ax.lines]
    assert all(line.get_markerfacecolor() == line.get_color() for line in lines if line.get_marker() == "D")
    assert {line.get_markerfacecolor() for line in lines if line.get_marker() == "s"} == {"white"}


# ---- index and answer ------------------------------------------------------------------------------------------------
def test_the_index_says_which_hosts_were_measured_and_how_far_the_simulator_is_off(case):
    index = module(SCRIPTS / "write_index.py")
    lines = index.measured_lines(table(case), read_errors(case.table("engine_simulator")))
    text = "\n".join(lines)
    for size in ("own size", "512x64"):
        assert (
            f"- box over disk, tiny, {size}, s50: 4 of 4 policies over all texts; 6 documents, 36 tokens, 2 runs"
            in text
        )
    assert "0 decided otherwise" in text or re.search(r"events, \d+ decided otherwise", text)
    errors = read_errors(case.table("engine_simulator"))
    furthest = errors.loc[np.log(errors["median_ratio"]).abs().idxmax()]
    assert f"median time a token: furthest from 1 at {furthest['median_ratio']:.3f} ({furthest['policy']} over" in text
    assert "none yet" in "\n".join(index.measured_lines(read_measured(None), read_errors(None)))


def test_the_answer_has_a_table_of_every_measured_machine(case):
    answer = module(SCRIPTS / "write_answer.py")
    text = "\n".join(answer.measured_section(table(case)))
    for link, status in (("disk", "measured"), ("sdcard", "throttled")):
        assert f"### box over {link} (link {status}), tiny, own size (rehearsal: a small embedded model), s50" in text
    assert text.count("| exact output | fetch_lfu_decay |") == 4 and "(measured)" in text
    assert answer.measured_section(read_measured(None)) == []


def test_publishing_names_the_measured_hosts(case):
    publish = module(SCRIPTS / "publish.py")
    assert publish.measured_hosts(case.table("measured")) == ["box"]
    assert publish.measured_hosts(case.table("nowhere")) == []


# ---- import ----------------------------------------------------------------------------------------------------------
def accept(folder: Path, into: Path, monkeypatch, capsys) -> str:
    monkeypatch.setattr("sys.argv", ["engine.host", "import", str(folder), "--into", str(into)])
    host_main()
    return capsys.readouterr().out


def test_a_sound_folder_is_copied_whole_and_collects_as_it_did(own, monkeypatch, capsys):
    (own.folder / "tiny" / "notes.txt").write_text("not named by a record")
    into = own.root / "imported"
    said = accept(own.folder, into, monkeypatch, capsys)
    assert f"{2 * sum(RUNS.values())} runs of tiny 512x64, tiny own" in said
    assert files(into / "box") == {
        name: digest for name, digest in files(own.folder).items() if name != "tiny/notes.txt"
    }
    made(own.tabulate())
    before = own.table("measured").read_bytes()
    made(own.tabulate(into / "box"))
    assert own.table("measured").read_bytes() == before


def first_run(case: Case, policy: str = "rule_015", text: str = TEST[0]) -> Path:
    return case.folder / "tiny" / "own" / "disk" / policy / "s50" / text / "1.safetensors"


def profile(case: Case) -> Path:
    return case.folder / "host.yaml"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:999])


def in_run(change, **which):
    """Damage one run, and name its new hash in the record, as a forger would."""

    def damage(case: Case) -> None:
        rewrite_run(first_run(case, **which), change)
        renew_hashes(case.folder)

    return damage


def in_record(change, renewed: bool = True):
    def damage(case: Case) -> None:
        rewrite_json(case.folder / "tiny" / "own.json", change)
        if renewed:
            renew_hashes(case.folder)

    return damage


def put(name: str, value, at=0):
    """Set one element of an array of a run."""

    def change(arrays, _):
        arrays[name].reshape(-1)[at] = value

    return change


def substitute_heavy(arrays, _):
    """A heavy expert that is not the first choice becomes a substituted one."""
    kind, g = arrays["kind"], arrays["g"]
    first = arrays["first"].astype(int)[..., None]
    masked = np.where(np.arange(g.shape[-1]) == first, 0, g)
    at = np.unravel_index(masked.argmax(), g.shape)
    kind[at] = 2


def no_time(arrays, _):
    arrays["journal_end_s"][:] = arrays["journal_begin_s"] + 1e-12


def less_stall(arrays, _):
    arrays["stall_s"][:] = 1e-15


FORGED = {
    "no profile": (lambda case: profile(case).unlink(), ["no host.yaml"]),
    "a profile that is none": (lambda case: edit_yaml(profile(case), links={}), ["links", "disk"]),
    "a folder of another name": (lambda case: edit_yaml(profile(case), id="other"), ["id 'other'", "'box'"]),
    "another profile": (lambda case: edit_yaml(profile(case), fingerprint="0" * 16), ["512x64.json: host_sha256"]),
    "no record": (lambda case: [path.unlink() for path in case.folder.glob("tiny/*.json")], ["no record"]),
    "a record cut": (in_record(lambda record: record.pop("top_k"), False), ["own.json", "top_k"]),
    "a record of another schema": (in_record(lambda record: record.update(schema="measured-0"), False), ["measured-0"]),
    "a run cut": (lambda case: cut(first_run(case)), ["1.safetensors: ", "the run of the record"]),
    "a run cut and its hash renewed": (
        lambda case: (cut(first_run(case)), renew_hashes(case.folder)), ["1.safetensors: ", "a whole decision log"]
    ),
    "a run that is gone": (lambda case: first_run(case).unlink(), ["1.safetensors: absent"]),
    "a run of another policy": (
        in_run(lambda _, facts: facts.update(policy="first_choice")), ["policy first_choice", "rule_015"]
    ),
    "a run on another machine": (in_run(lambda _, facts: facts.update(host="0" * 16)), ["host 0000000000000000"]),
    "a run of another text": (in_run(lambda _, facts: facts.update(text_sha256="0" * 64)), ["text_sha256 0000"]),
    "two texts of one name": (
        in_record(lambda record: record["texts"][TEST[0]].update(sha256="0" * 64)), [f"{TEST[0]} of 0000000000000000"]
    ),
    "two sets of weights": (in_record(lambda record: record["provenance"].update(model="x")), ["tiny of x"]),
    "a store that no run was read from": (in_record(lambda record: record["provenance"].update(store="x")), ["store "]),
    "a dtype that is not its geometry's": (in_record(lambda record: record.update(dtype="float16")), ["dtype float16"]),
    "experts of another size": (in_record(lambda record: record.update(expert_bytes=1)), ["expert_bytes 1; expected"]),
    "records that are no pages": (
        in_record(lambda record: record.update(record_bytes=record["record_bytes"] + 1)), ["whole pages of 4096"]
    ),
    "no versions": (in_record(lambda record: record["provenance"].update(versions="torch=2")), ["no version of tr"]),
    "not finished": (in_record(lambda record: record["cells"].pop()), ["23 of 24 runs", "results/measured/box"]),
    "a cell twice": (in_record(lambda r: r["cells"].__setitem__(1, r["cells"][0])), ["a cell twice"]),
    "a path out of the folder": (in_record(lambda r: r["cells"][0].update(text="../../x"), False), ["../../x"]),
    "a policy that is no row": (in_record(lambda r: r["policies"]["rule_015"].update(tau="nan"), False), ["tau 'nan'"]),
    "faster than the link": (in_run(no_time), ["over link disk", "page cache"]),
    "less waiting than the link needs": (in_run(less_stall), ["what was waited for", "page cache"]),
    "no time at all": (in_run(put("token_s", 0.0)), ["seconds or losses that cannot be"]),
    "a loss that is no number": (in_run(put("losses", np.nan)), ["seconds or losses that cannot be"]),
    "records of another size": (in_run(put("journal_bytes", 4096)), ["records of other sizes"]),
    "a fetch that was never read": (in_run(put("journal_foreground", 0)), ["records fetched"]),
    "an expert that there is none of": (in_run(put("executed", 99)), ["expert 99"]),
    "an unknown kind": (in_run(put("kind", 9)), ["kinds [0, 1, 2, 9]"]),
    "a drop where nothing drops": (in_run(put("kind", 3)), ["those of miss rule threshold"]),
    "a substitution by a policy that fetches": (in_run(put("kind", 2), policy=BASELINE), ["those of miss rule fetch"]),
    "a heavy expert substituted": (in_run(substitute_heavy), ["substitut", "tau"]),
    "weights that are no numbers": (in_run(put("weights", np.inf)), ["weights that are not finite"]),
    "gate weights that do not add up": (in_run(put("g", 2.0)), ["do not sum to 1"]),
    "a move of a slot that there is none of": (in_run(put("moves", 77, at=3)), ["a move of slot [77]"]),
    "background loads without background": (in_run(put("moves", 2, at=5)), ["background loads", "rule_015"]),
    "prefetched by a policy that does not": (in_run(put("moves", 4, at=5)), ["prefetched experts", "rule_015"]),
    "pieces of a policy that does not prefetch": (
        in_run(lambda arrays, _: arrays.update(journal_prefetch=np.ones_like(arrays["journal_foreground"]))),
        ["pieces came ahead", "rule_015"],
    ),
    "a demand that was exchanged": (
        lambda case: (case.folder / "tiny" / "demand.safetensors").write_bytes(
            (case.root / "demand.safetensors").read_bytes()[:-8] + bytes(8)
        ),
        ["demand.safetensors: sha256"],
    ),
    "no scores": (lambda case: (case.folder / "tiny/own_rescored.json").unlink(), ["own_rescored.json is not there"]),
    "scores of another record": (
        in_record(lambda record: record.update(null_s=1.0), False), ["own_rescored.json: scores of record"]
    ),
    "losses that were exchanged": (
        lambda case: shutil.copy(
            case.folder / "tiny" / "512x64_rescored.safetensors", case.folder / "tiny" / "own_rescored.safetensors"
        ),
        ["own_rescored.safetensors: sha256"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_folder_that_contradicts_itself_is_refused_by_name_and_nothing_is_copied(own, name, monkeypatch, capsys):
    damage, says = FORGED[name]
    damage(own)
    into = own.root / "imported"
    with pytest.raises(UserError) as caught:
        accept(own.folder, into, monkeypatch, capsys)
    message = str(caught.value)
    assert message.count("; expected ") == 1 and "\n" not in message and "box" in message
    assert all(words in message for words in says), message
    assert not list(into.glob("*")) if into.exists() else True


@pytest.mark.parametrize(("name", "fingerprint"), [("box", "f" * 16), ("other", None)])
def test_a_second_folder_of_an_id_or_of_a_machine_is_refused(own, name, fingerprint, monkeypatch, capsys):
    into = own.root / "imported"
    accept(own.folder, into, monkeypatch, capsys)
    mark = fingerprint or own.record("own")["host"]["fingerprint"]
    other = rename(own.folder, "elsewhere", mark)
    folder = rename(other, name, mark)
    with pytest.raises(UserError, match=f"host {name} with fingerprint {mark}; expected another than .*imported/box"):
        accept(folder, into, monkeypatch, capsys)
    assert [path.name for path in into.iterdir()] == ["box"]


def test_a_machine_without_a_name_is_asked_for_one(own, monkeypatch, capsys):
    with pytest.raises(UserError, match="host 'local'; expected a name of its own"):
        accept(rename(own.folder, "local", "f" * 16), own.root / "imported", monkeypatch, capsys)


def test_another_machine_is_accepted_beside_this_one(own, monkeypatch, capsys):
    into = own.root / "imported"
    accept(own.folder, into, monkeypatch, capsys)
    accept(rename(own.folder, "other", "f" * 16), into, monkeypatch, capsys)
    assert sorted(path.name for path in into.iterdir()) == ["box", "other"]
    assert load_log(next((into / "other").rglob("1.safetensors"))).provenance["host"] == "f" * 16
