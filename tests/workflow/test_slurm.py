"""End to end: the tiny pipeline on a real cluster of two nodes, through a killed run, a lost node and a new controller.

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
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hosts import write_profile
from same_on_cluster import contents
from slurm import Cluster, why_not
from tiny import CALIBRATION, TEST, Ended, Scratch

from engine.host_facts import fingerprint

pytestmark = pytest.mark.slurm
SNAKEMAKE = (sys.executable, "-m", "snakemake", "--profile", "workflow/profiles/slurm")
IMPATIENT = ("--slurm-init-seconds-before-status-checks", "1", "--slurm-status-command", "squeue")
IMPATIENT += ("--latency-wait", "5", "--retries", "0")
TARGET, MEASURED = "results/tables/local/quality.csv", "results/measured/cluster"
VICTIM = ["workflow/scripts/score_policy.py", "rule_015"]
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
    record: dict = field(default_factory=dict)  # of the host that was measured
    refusal: str = ""  # what the job of the other says


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
    paused = scratch.path("paused")
    with Cluster(base / "cluster") as cluster:
        scratch.environment |= cluster.environment | {"PATH": f"{cluster.folder}/bin:{scratch.environment['PATH']}"}
        with submitted(scratch, TARGET, pause=paused) as run:
            Cluster.wait_until(lambda: paused.exists() or run.poll() is not None, LIMIT_S)
            os.kill(run.pid, signal.SIGKILL)
        told.left_behind = list(cluster.running())
        told.scores += [line for line in scratch.started() if set(VICTIM) <= set(line.split())]
        paused.unlink()

        with submitted(scratch, TARGET, MEASURED, pause=paused) as run:
            Cluster.wait_until(lambda: paused.exists() or run.poll() is not None, LIMIT_S)
            told.after_them = cluster.running()
            told.lost = told.after_them[cluster.job_of(*VICTIM)]
            cluster.lose_node(told.lost)
            cluster.start_node(told.lost)
            cluster.stop("slurmctld")
            cluster.start_controller()
            out, err = run.communicate(timeout=2 * LIMIT_S)
            told.ended = Ended(run.returncode, out, err)
        told.scores += [line for line in scratch.started() if set(VICTIM) <= set(line.split())]
        told.cluster = contents(scratch.path("results"), SAME)
        told.again = scratch.run(*SNAKEMAKE, *IMPATIENT, TARGET)
    told.record = json.loads(scratch.path("results/measured/true_host/tiny/own.json").read_text(encoding="utf-8"))
    told.refusal = scratch.path("results/logs/measure_host/other_host/tiny/own.log").read_text(encoding="utf-8")
    return told


@contextlib.contextmanager
def submitted(scratch: Scratch, *targets: str, pause: Path):
    """A call of Snakemake that goes on while we look; the job of VICTIM pauses in its second cell."""
    fault = json.dumps({"words": VICTIM, "pause": str(pause)})
    run = subprocess.Popen(
        [*SNAKEMAKE, *IMPATIENT, *targets],
        cwd=scratch.folder,
        env=scratch.environment | {"FAULT": fault},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield run
    finally:
        run.kill()
        run.communicate()


def test_the_cluster_makes_the_same_files_as_one_machine(story):
    assert {name.split("/")[0] for name in story.local} == set(SAME)
    assert {name: story.cluster.get(name) for name in story.local} == story.local


def test_a_killed_run_leaves_jobs_which_the_next_one_cancels(story):
    assert story.left_behind
    assert not set(story.left_behind) & story.after_them.keys()
    assert all(job in story.ended.out + story.ended.err for job in story.left_behind)


def test_what_ran_on_a_lost_node_is_done_again_by_the_same_call(story):
    assert story.lost in ("hosta", "hostb")
    assert len(story.scores) == 3, "killed with its run, lost with its node, whole"


def test_a_run_that_went_through_it_all_has_nothing_left_to_do(story):
    assert story.again.code == 0 and "Nothing to be done" in story.again.out + story.again.err


def test_the_record_of_a_node_is_that_of_its_profile(story):
    assert story.record["host"]["id"] == "true_host" and story.record["host"]["fingerprint"] == fingerprint()
    assert [cell["status"] for cell in story.record["cells"]] == ["ok"] * story.record["planned"]


def test_a_node_that_is_not_the_profiles_is_refused_and_the_rest_is_done(story):
    assert story.ended.code == 1
    assert f"is of machine {ANOTHER}" in story.refusal and fingerprint() in story.refusal
