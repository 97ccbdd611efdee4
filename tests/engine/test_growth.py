"""Agreement and laws: the jobs of a configuration on paper are those that Snakemake would start; none runs here."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from engine import plan
from engine.cluster import SMALL_MB, SMALL_MINUTES
from engine.errors import UserError
from engine.host import load_hosts
from engine.host_facts import digest
from engine.plan_build import read_config, read_setting
from engine.plan_growth import MOVE_BYTES, STORE, Growth, Job, _cluster_jobs
from engine.plan_growth import _longest as longest
from engine.plan_growth_page import as_json, page_of
from evals.settings import LOCAL, find_hosts

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "results" / "published" / "tables"
FIGURES = len(list((ROOT / "workflow" / "scripts").glob("plot_*.py")))
CLUSTER, ALL = "results/measured/cluster", "results/all"
SUBMITTING = re.search(r"^localrules:\n((?: +\w+,\n)+)", (ROOT / "Snakefile").read_text(encoding="utf-8"), re.MULTILINE)
FOLLOWS = {"tabulate_claims", "write_answer"}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of the project in which nothing is made; the test runs in it."""
    for name in ("config", "engine", "evals", "models", "profiles", "workflow"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "Snakefile", tmp_path / "Snakefile")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def add_nodes(folder: Path, *names: str) -> None:
    """Measured profiles that name their node, each another machine."""
    profile = yaml.safe_load((ROOT / "results/measured/epyc_2core_vm/host.yaml").read_text(encoding="utf-8"))
    for name in names:
        own = {"id": name, "fingerprint": digest(name), "slurm": {"constraint": name}}
        (folder / "config/hosts" / f"{name}.yaml").write_text(yaml.safe_dump(profile | own), encoding="utf-8")


def planned(folder: Path, *arguments: str) -> tuple[Counter[str], dict[str, float]]:
    """Jobs by rule and the hours that they ask for by kind of node, of a dry run with the defaults of a cluster."""
    defaults = ("--default-resources", f"mem_mb={SMALL_MB}", f"runtime={SMALL_MINUTES}")
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "-n", *arguments, *defaults]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    told = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    jobs: Counter[str] = Counter()
    minutes: Counter[str] = Counter()
    for rule, said in re.findall(r"^(?:local)?rule (\w+):\n((?: +\w+: .*\n)+)", told.stdout, re.MULTILINE):
        jobs[rule] += 1
        if rule not in SUBMITTING[1].replace(",", " ").split():
            mb = int(re.search(r"\bmem_mb=(\d+)", said)[1])
            node = f"{mb / 1e3:.0f} GB" if mb else "host " + re.search(r"\bhost=(\w+)", said)[1]
            minutes[node] += int(re.search(r"\bruntime=(\d+)", said)[1])
    return jobs, {node: asked / 60 for node, asked in minutes.items()}


def gathered(jobs: Counter[str]) -> dict[str, int]:
    """As a plan counts them: tables, and what follows from them, together."""
    result: Counter[str] = Counter()
    for rule, count in jobs.items():
        result["claims" if rule in FOLLOWS else "tabulate" if rule.startswith("tabulate_") else rule] += count
    return result


def overlay(name: str) -> tuple[str, ...]:
    return () if name == "config" else ("--configfile", f"config/{name}.yaml")


@pytest.mark.parametrize("name", ["config", "paper", "small"])
def test_agreement_with_a_dry_run(project, name):
    growth = Growth.of(f"config/{name}.yaml", FIGURES, TABLES)
    jobs, hours = planned(project, ALL, *overlay(name))
    assert growth.jobs == gathered(jobs)
    assert growth.asked_hours == pytest.approx(hours)


@pytest.mark.parametrize("name", ["config", "laptop", "paper"])
def test_agreement_with_a_dry_run_of_two_nodes(project, name):
    """An inflated size beside the own one; the own alone, in the dtype; the own alone, which results/all packs too."""
    path = f"config/{name}.yaml"
    without = Growth.of(path, FIGURES, TABLES)
    assert not {"inflate_model", "measure_host", "rescore_runs"} & set(without.jobs)
    add_nodes(project, "node_a", "node_b")
    growth = Growth.of(path, FIGURES, TABLES)
    first, _ = planned(project, CLUSTER, *overlay(name))
    counted = set(_cluster_jobs(list(read_setting(path).models.values()), read_config(path)))
    assert Counter(job.rule for job in counted) == gathered(first)
    jobs, hours = planned(project, CLUSTER, ALL, *overlay(name))
    assert growth.jobs == gathered(jobs)
    assert growth.asked_hours == pytest.approx(hours)
    assert {"host node_a", "host node_b"} < set(growth.asked_hours)
    assert growth.jobs["measure_host"] == growth.jobs["rescore_runs"] == (4 if name == "config" else 2)
    assert growth.chain_minutes > without.chain_minutes
    again = {rule for rule, times in Counter(growth.chain).items() if times > 1}
    assert again == ({"unpack_model"} if name == "config" else set()), "reference_b is not measured"


def test_what_is_not_measured_is_no_job_of_a_cluster(project):
    add_nodes(project, "node_a")
    measure = {
        "models": ["reference_b"],
        "slots": ["s25"],
        "prefetch": [],
        "links": {"disk": {"documents": 1, "tokens": 8, "repeats": 1}},
    }
    own = write_config(project, models=["reference"], measure=measure)
    assert "measure_host" not in Growth.of(own, FIGURES, TABLES).jobs
    own = write_config(project, measure=measure)
    assert Growth.of(own, FIGURES, TABLES).jobs["measure_host"] == 2
    own = write_config(project, measure=measure | {"slots": ["s1"]})
    assert "measure_host" not in Growth.of(own, FIGURES, TABLES).jobs


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
    assert growth.texts.of_kind("unknown") == ["no_such_text"]


def test_texts_that_are_not_resolved_are_unknown_and_their_command_resolves_them(project):
    growth = Growth.of("config/paper.yaml", FIGURES, TABLES)
    assert (growth.trace_bytes, growth.decision_bytes) == (None, None)
    page = page_of(growth)
    assert page.count("unknown, ") == 2 and "0.0 GB" not in page
    assert growth.resolve in page
    assert growth.trace_bytes_a_token == 48 * (4 * 512 + 10 * 10) + 4, "Qwen3-Next: 48 layers, 512 experts, 10 chosen"
    command = shlex.split(growth.resolve)
    jobs, _ = planned(project, *command[command.index("1") + 1 :])
    assert jobs == {"resolve_text": 3}
    assert "--configfile" not in Growth.of(write_texts(project), FIGURES, TABLES, base=project / "own.yaml").resolve


def write_texts(folder: Path) -> Path:
    whole = yaml.safe_load((ROOT / "config/config.yaml").read_text(encoding="utf-8"))
    return write_config(folder, **whole | {"texts": whole["texts"] | {"test": ["humaneval"]}})


def test_a_resolved_text_is_estimated_and_said_to_be(tmp_path):
    """Those that a run counted have 3.1 bytes a token or so; an absent one has no tokens, and no command is left."""
    for name, value in {
        "humaneval": {"status": "ok", "documents": [{"id": "a", "text": "é" * 500}, {"id": "b", "text": "x" * 2000}]},
        "gsm8k_test": {"status": "absent"},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    texts = {"calibration": ["bible_calibration"], "test": ["humaneval", "gsm8k_test"]}
    growth = Growth.of(write_config(tmp_path, models=["reference"], texts=texts), FIGURES, TABLES, resolved=tmp_path)
    assert growth.texts.kinds == {"humaneval": "estimated", "gsm8k_test": "absent"}
    assert 2 < growth.texts.bytes_a_token < 4
    assert growth.texts.tokens == round(3000 / growth.texts.bytes_a_token)
    assert growth.trace_bytes == growth.texts.tokens * growth.trace_bytes_a_token
    page = page_of(growth)
    assert "estimated for humaneval" in page and "nothing for gsm8k_test" in page and "unknown" not in page
    (tmp_path / "humaneval.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"humaneval\.json"):
        Growth.of(tmp_path / "own.yaml", FIGURES, TABLES, resolved=tmp_path)


def run(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["plan", *words])
    plan.main()


@pytest.mark.parametrize(
    "words",
    [
        ("--model", "reference"),
        ("--host", "rtx3090_pcie4"),
        ("--slots", "25%"),
        ("--context", "512"),
        ("--fast-memory", "8"),
        ("--counts", "reference_b"),
        ("--check", "results/measured/epyc_2core_vm"),
    ],
    ids=lambda words: words[0],
)
def test_what_growth_does_not_heed_is_refused(monkeypatch, capsys, words):
    expected = rf"{words[0]} beside --growth; expected --config, --tables, --json alone; leave it out"
    if words[0] == "--check":
        expected = "--growth beside --check; expected --tables alone"
    with pytest.raises(UserError, match=expected) as caught:
        run(monkeypatch, "--growth", *words)
    assert "\n" not in str(caught.value) and not capsys.readouterr().out


def test_refused_words_end_a_command_with_one_line_and_exit_code_2():
    command = [sys.executable, "-m", "engine.plan", "--growth", "--model", "reference"]
    told = subprocess.run(command, capture_output=True, text=True)
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.startswith("error: --model beside --growth;") and told.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["config", "paper"])
def test_numbers_of_growth_for_programs(monkeypatch, capsys, name):
    run(monkeypatch, "--growth", "--json", "--config", f"config/{name}.yaml")
    (line,) = capsys.readouterr().out.splitlines()
    growth = Growth.of(f"config/{name}.yaml", FIGURES, TABLES)
    found = json.loads(line)
    assert found == json.loads(json.dumps(as_json(growth)))
    assert found["jobs"] == growth.jobs and found["node_hours"]["asked"] == growth.asked_hours
    assert found["chain"] == {"rules": list(growth.chain), "asked_hours": growth.chain_minutes / 60}
    assert (found["written_at_most"]["trace_bytes"] is None) == (name == "paper")
    run(monkeypatch, "--growth", "--config", f"config/{name}.yaml")
    page = capsys.readouterr().out
    for number in (*found["jobs"].values(), *found["node_hours"]["asked"].values(), found["chain"]["asked_hours"]):
        assert re.search(rf" {number:,.0f}\b", page)


def test_hours_are_said_to_be_limits_and_no_forecast():
    growth = Growth.of("config/config.yaml", FIGURES, TABLES)
    (line,) = (line for line in page_of(growth).splitlines() if line.startswith("Node hours"))
    for said in (line, as_json(growth)["node_hours"]["are"]):
        assert "limits that jobs ask for" in said and "not a forecast" in said


def test_the_longest_chain_is_that_of_its_jobs():
    jobs = [Job(rule, minutes=100) for rule in ("calibrate_model", "score_policy", "score_delayed")]
    jobs += [Job(rule, minutes=60) for rule in ("simulate_host", "tabulate", "claims")]
    names, minutes = longest([*jobs, Job("index_results"), Job("gate_model", minutes=250)])
    assert names == (
        *("calibrate_model", "score_policy", "simulate_host"),
        *("score_delayed", "tabulate", "claims", "index_results"),
    )
    assert minutes == 3 * 100 + 3 * 60
    names, _ = longest([*jobs, Job("gate_model", minutes=261)])
    assert names == ("calibrate_model", "gate_model", "tabulate", "claims")


def test_a_store_of_a_size_holds_up_its_measurement_alone():
    jobs = [Job("calibrate_model", minutes=10), Job("measure_host", minutes=30), Job("rescore_runs", minutes=5)]
    store = Job("pack_store", minutes=20, step=STORE)
    assert longest([*jobs, store]) == (("pack_store", "measure_host", "rescore_runs"), 55)
    assert longest([*jobs, Job("pack_store", minutes=20)])[1] == 20 + 10 + 30 + 5, "in bits: every job reads it"


def test_hosts_are_counted_as_a_run_finds_them():
    hosts, _ = find_hosts("config/hosts", "config")
    assert len(hosts) == len(load_hosts("config/hosts")) + (LOCAL in hosts)
    assert Growth.of("config/config.yaml", FIGURES, TABLES).jobs["simulate_host"] == 2 * len(hosts)
