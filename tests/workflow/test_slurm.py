"""End to end: the tiny pipeline on a real cluster of two nodes, and all that can happen to it there.

The run is killed; a node is lost while a policy is scored, another while a host is measured; the controller is away;
a job is over its time, and another over its memory in every attempt.
`story` runs it once and keeps what it found; the tests read it. Both nodes are this machine, so of the two profiles
that name a node one is true and the other must be refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import pytest
from hosts import runs, write_profile, written
from same_on_cluster import contents
from slurm import Cluster, why_not
from tiny import CALIBRATION, TEST, Ended, Scratch

from engine.host_facts import fingerprint

pytestmark = pytest.mark.slurm
SNAKEMAKE = (sys.executable, "-m", "snakemake", "--profile", "workflow/profiles/slurm")
IMPATIENT = ("--slurm-init-seconds-before-status-checks", "1", "--slurm-status-command", "squeue")
IMPATIENT += ("--latency-wait", "5", "--retries", "0")
TARGET, MEASURED = "results/tables/local/quality.csv", "results/measured/cluster"
SCORE = "workflow/scripts/score_policy.py"
VICTIM = [SCORE, "rule_015"]  # of lost nodes
TIMED = ["workflow/scripts/measure_host.py", "config/hosts/true_host.yaml"]
KILLED_IN_RUN = 4  # a warm-up and two runs are done
AWAY_S = 15.0  # longer than the plugin asks before it forgets its jobs
FIGURE = "results/plots/local/loss_and_misses_by_slots"
SLOW, GLUTTON = "speed_first", "quality_first"
# in each attempt so many minutes, and less than the glutton takes but in the fourth, which records that it was lost
LIMITS = ("--set-resources", "score_policy:runtime=attempt", "score_policy:mem_mb=attempt*1200", "--retries", "3")
GLUTTON_MB = 3600
ANOTHER = "0" * 16  # a fingerprint that no machine has
SAME = ("calibration", "decisions", "losses", "quality", "tables", "traces")
LIMIT_S = 120.0


@dataclass
class Story:
    local: dict[str, object] = field(default_factory=dict)  # by name what every file holds
    cluster: dict[str, object] = field(default_factory=dict)
    left_behind: list[str] = field(default_factory=list)  # ids of jobs that the killed run left running
    after_them: dict[str, str] = field(default_factory=dict)  # jobs that run in the next call, and where
    lost: str = ""  # the node
    scores: list[str] = field(default_factory=list)  # of the victim, in all calls
    ended: Ended | None = None
    again: Ended | None = None
    kept: dict[str, int] = field(default_factory=dict)  # runs of the host that a lost node left, and when written
    whole: dict[str, int] = field(default_factory=dict)  # all runs in the end
    memory: set[str] = field(default_factory=set)  # that the measurement asks its node for
    record: dict = field(default_factory=dict)  # of the host that was measured
    refusal: str = ""  # what the job of the other says
    limited: Ended | None = None  # the run with jobs over their time and memory
    over_memory: set[str] = field(default_factory=set)  # ids of jobs
    attempts: dict[str, list[str]] = field(default_factory=dict)  # by policy
    table: pd.DataFrame | None = None
    figure: str = ""


def scratch_at(folder: Path) -> Scratch:
    scratch = Scratch(folder)
    row = "tiny\tmodels/tiny\t-\tfloat32\t-\t-\t-\t-"  # timed at its own size alone
    sheet = scratch.path("config/models.tsv")
    sheet.write_text(f"{sheet.read_text(encoding='utf-8').splitlines()[0]}\n{row}\n", encoding="utf-8")
    for path in scratch.path("config/hosts").glob("*.yaml"):
        path.unlink()
    write_profile(scratch.path("config/hosts"), "true_host", slurm={"constraint": "hosta"})
    write_profile(scratch.path("config/hosts"), "other_host", slurm={"constraint": "hostb"}, fingerprint=ANOTHER)
    links = {"disk": {"documents": 1, "tokens": 4, "repeats": 1}}
    scratch.configure(
        policies=["fetch_lfu_decay", "rule_015"],
        texts={"calibration": [CALIBRATION], "test": list(TEST)},
        measure={"models": ["tiny"], "slots": ["s50"], "prefetch": [], "links": links},
        tasks=scratch.configuration["tasks"] | {"ids": ["humaneval"]},
    )
    return scratch


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> Story:
    if reason := why_not():
        pytest.skip(reason)
    base, told = tmp_path_factory.mktemp("slurm"), Story()
    local = scratch_at(base / "local")
    local.made(TARGET)
    told.local = contents(local.path("results"), SAME)
    shutil.rmtree(local.folder)
    scratch = scratch_at(base / "scratch")
    paused, timing = scratch.path("paused"), scratch.path("paused_timing")
    measured = scratch.path("results/measured/true_host")
    refusal = scratch.path("results/logs/measure_host/other_host/tiny/own.log")
    faults = [{"words": VICTIM, "pause": str(paused)}]
    faults += [{"words": TIMED, "pause": str(timing), "runs": KILLED_IN_RUN}]
    with Cluster(base / "cluster") as cluster:
        scratch.environment |= cluster.environment | {"PATH": f"{cluster.folder}/bin:{scratch.environment['PATH']}"}
        with submitted(scratch, TARGET, faults=faults) as run:
            Cluster.wait_until(lambda: paused.exists() or run.poll() is not None, LIMIT_S)
            os.kill(run.pid, signal.SIGKILL)
        told.left_behind = list(cluster.running())
        told.scores += [line for line in scratch.started() if set(VICTIM) <= set(line.split())]
        paused.unlink()

        with submitted(scratch, TARGET, MEASURED, faults=faults) as run:
            Cluster.wait_until(lambda: paused.exists() or run.poll() is not None, LIMIT_S)
            told.after_them = cluster.running()
            told.lost = told.after_them[cluster.job_of(*VICTIM)]
            cluster.lose_node(told.lost)
            cluster.start_node(told.lost)
            # a job that is just starting would end for want of the controller: the paused one alone is left
            alone = (timing.exists, scratch.path(TARGET).exists, lambda: ANOTHER in read(refusal))
            alone += (lambda: len(cluster.running()) == 1,)
            Cluster.wait_until(lambda: all(one() for one in alone) or run.poll() is not None, LIMIT_S)
            told.memory = cluster.memory()
            cluster.stop("slurmctld")
            time.sleep(AWAY_S)
            cluster.start_controller()
            told.kept = written(measured)
            cluster.lose_node("hosta")
            cluster.start_node("hosta")
            told.ended = ended(run, scratch, 2 * LIMIT_S)
        told.scores += [line for line in scratch.started() if set(VICTIM) <= set(line.split())]
        told.cluster = contents(scratch.path("results"), SAME)
        told.again = scratch.run(*SNAKEMAKE, *IMPATIENT, TARGET)
        scratch.started()

        scratch.configure(policies=["fetch_lfu_decay", "rule_015", SLOW, GLUTTON])
        faults = [{"words": [SCORE, SLOW], "pause": str(scratch.path("paused_slow"))}]
        faults += [{"words": [SCORE, GLUTTON], "memory_mb": GLUTTON_MB}]
        with submitted(scratch, f"{FIGURE}.png", *LIMITS, faults=faults) as run:
            told.limited = ended(run, scratch, 4 * LIMIT_S)
        told.over_memory = cluster.over_memory()
        lines = [line.split() for line in scratch.started()]
        told.attempts = {name: [line for line in lines if {SCORE, name} <= set(line)] for name in (SLOW, GLUTTON)}
    told.whole = written(measured)
    told.record = json.loads((measured / "tiny" / "own.json").read_text(encoding="utf-8"))
    told.table = pd.read_csv(scratch.path(TARGET), keep_default_na=False)
    told.figure = scratch.path(f"{FIGURE}.svg").read_text(encoding="utf-8")
    told.refusal = read(refusal)
    return told


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@contextlib.contextmanager
def submitted(scratch: Scratch, *arguments: str, faults: list[dict]):
    """A call of Snakemake that goes on while we look."""
    with scratch.path("run.log").open("wb") as log:
        command = [*SNAKEMAKE, *IMPATIENT, *arguments]
        environment = scratch.environment | {"FAULT": json.dumps(faults)}
        run = subprocess.Popen(command, cwd=scratch.folder, env=environment, stdout=log, stderr=log)
    try:
        yield run
    finally:
        run.kill()
        run.wait()


def ended(run: subprocess.Popen, scratch: Scratch, limit_s: float) -> Ended:
    code = run.wait(timeout=limit_s)
    return Ended(code, "", scratch.path("run.log").read_text(encoding="utf-8"))


def test_the_cluster_makes_the_same_files_as_one_machine(story):
    assert {name.split("/")[0] for name in story.local} == set(SAME)
    assert {name: story.cluster.get(name) for name in story.local} == story.local


def test_a_killed_run_leaves_jobs_which_the_next_one_cancels(story):
    assert story.left_behind
    assert not set(story.left_behind) & story.after_them.keys()
    assert all(job in story.ended.err for job in story.left_behind)
    assert story.ended.err.count("Building DAG of jobs") == 2, "what they wrote may be gone: planned anew"


def test_what_ran_on_a_lost_node_is_done_again_by_the_same_call(story):
    assert story.lost in ("hosta", "hostb")
    assert len(story.scores) == 3, "killed with its run, lost with its node, whole"


def test_a_lost_node_costs_a_measurement_the_run_that_was_running_and_no_other(story):
    assert len(runs(story.kept)) == KILLED_IN_RUN - 2
    assert {name: story.whole[name] for name in runs(story.kept)} == {
        name: story.kept[name] for name in runs(story.kept)
    }
    assert len(runs(story.whole)) == story.record["planned"]


def test_a_measurement_has_all_of_its_nodes_memory(story):
    assert story.memory == {"0"}, "as Slurm says it"


def test_a_job_over_its_time_is_tried_again_with_more(story):
    assert "'TIMEOUT'" in story.limited.err
    assert [line[line.index("--attempt") + 1] for line in story.attempts[SLOW]] == ["1", "2"]
    assert set(story.table[story.table.policy == SLOW].status) == {"ok"}


def test_a_job_over_its_memory_in_every_attempt_is_a_gap_and_the_figure_is_drawn(story):
    assert story.limited.code == 0, story.limited.err
    assert len(story.over_memory) == 3
    assert [line[line.index("--attempt") + 1] for line in story.attempts[GLUTTON]] == ["1", "2", "3", "4"]
    assert set(story.table[story.table.policy == GLUTTON].status) == {"failed"}
    assert set(story.table[story.table.policy == "rule_015"].status) == {"ok"}
    assert f"Without a result: {GLUTTON}" in story.figure


def test_a_run_that_went_through_it_all_has_nothing_left_to_do(story):
    assert story.again.code == 0 and "Nothing to be done" in story.again.out + story.again.err


def test_the_record_of_a_node_is_that_of_its_profile(story):
    assert story.record["host"]["id"] == "true_host" and story.record["host"]["fingerprint"] == fingerprint()
    assert [cell["status"] for cell in story.record["cells"]] == ["ok"] * story.record["planned"]


def test_a_node_that_is_not_the_profiles_is_refused_and_the_rest_is_done(story):
    assert story.ended.code == 1
    assert f"is of machine {ANOTHER}" in story.refusal and fingerprint() in story.refusal
