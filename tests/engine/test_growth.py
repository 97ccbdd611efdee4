"""Agreement and laws: the jobs of a configuration on paper are those that Snakemake would start; none runs here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from engine.host import load_hosts
from engine.plan_growth import MOVE_BYTES, SMALL, Growth
from engine.plan_growth import _longest as longest
from evals.settings import LOCAL, find_hosts

ROOT = Path(__file__).parents[2]
TABLES = "results/published/tables"
FIGURES = len(list((ROOT / "workflow" / "scripts").glob("plot_*.py")))
FOLLOWS = {"tabulate_claims", "write_answer", "write_pages", "write_provenance"}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.chdir(ROOT)


def planned(folder: Path, *arguments: str) -> dict[str, int]:
    """Jobs by rule, in a copy of the project in which nothing is made."""
    for name in ("config", "engine", "evals", "models", "profiles", "workflow"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "Snakefile", folder / "Snakefile")
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "-n", "results/all", *arguments]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    told = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    table = told.stdout.split("Job stats:")[1].split("total")[0]
    return {rule: int(count) for rule, count in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE)}


def gathered(jobs: dict[str, int]) -> dict[str, int]:
    """As a plan counts them: tables, and what follows from them, together."""
    result: dict[str, int] = {}
    for rule, count in jobs.items():
        name = "claims" if rule in FOLLOWS else "tabulate" if rule.startswith("tabulate_") else rule
        result[name] = result.get(name, 0) + count
    return result


@pytest.mark.parametrize("name", ["config", "paper", "small"])
def test_agreement_with_a_dry_run(tmp_path, name):
    growth = Growth.of(f"config/{name}.yaml", FIGURES, TABLES)
    overlay = () if name == "config" else ("--configfile", f"config/{name}.yaml")
    assert {rule: count for rule, count in growth.jobs.items() if count} == gathered(planned(tmp_path, *overlay))


def write_config(folder: Path, **changes) -> Path:
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(changes), encoding="utf-8")
    return path


def test_jobs_grow_with_models_and_policies_alone_where_they_must(tmp_path):
    base = Growth.of("config/config.yaml", FIGURES, TABLES)
    one = Growth.of(write_config(tmp_path, models=["reference"]), FIGURES, TABLES)
    few = Growth.of(write_config(tmp_path, policies=["fetch_lfu_decay", "rule_015"]), FIGURES, TABLES)
    assert base.jobs["score_policy"] == 2 * one.jobs["score_policy"] == 4 * few.jobs["score_policy"]
    assert base.jobs["simulate_host"] == 2 * one.jobs["simulate_host"] == few.jobs["simulate_host"]
    changed = {rule for rule in base.jobs if base.jobs[rule] != few.jobs[rule]}
    assert changed == {"score_policy"}
    assert (few.trace_bytes, 4 * few.decision_bytes) == (base.trace_bytes, base.decision_bytes)


def test_bytes_of_one_text_worked_out_by_hand(tmp_path):
    """16 343 tokens of wikipedia_test (quality.csv), 4 layers, 256 experts, 10 chosen; one policy, one budget."""
    texts = {"calibration": ["bible_calibration"], "test": ["wikipedia_test", "no_such_text"]}
    own = write_config(tmp_path, models=["reference"], policies=["fetch_lfu_decay"], texts=texts, slots={"s25": 25})
    growth = Growth.of(own, FIGURES, TABLES)
    assert growth.trace_bytes == 16_343 * 4 * (256 * 4 + 10 * 10) + 16_343 * 4
    assert growth.decision_bytes == 16_343 * 4 * (10 * 11 + 1 + 10 * MOVE_BYTES)
    assert growth.unknown_texts == ("no_such_text",)


def test_the_longest_chain_is_that_of_its_jobs():
    jobs = dict.fromkeys(["calibrate_model", "score_policy", "tabulate", "score_delayed", *SMALL], 1)
    jobs |= dict.fromkeys(
        ["unpack_model", "fetch_model", "pack_store", "record_routing", "train_predictors", "predict_experts"], 0
    )
    names, minutes = longest(100, jobs)
    assert names[:3] == ("calibrate_model", "score_policy", "simulate_host")
    assert minutes == 3 * 100 + 5 * 60, "calibrate, score, score delayed; simulate, tables, claims, figures, index"


def test_hosts_are_counted_as_a_run_finds_them():
    hosts, _ = find_hosts("config/hosts", "config")
    assert len(hosts) == len(load_hosts("config/hosts")) + (LOCAL in hosts)
    assert Growth.of("config/config.yaml", FIGURES, TABLES).jobs["simulate_host"] == 2 * len(hosts)
