"""Measuring in the pipeline: a killed measurement goes on, nothing is deleted, and results/all never measures.

The fixture `story` runs it all once and keeps what it found; the tests read it. The host is a made-up profile of this
machine (hosts.py); no time is asserted.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field

import pandas as pd
import pytest
from hosts import runs, write_profile, written
from measured_cases import rename
from test_pipeline import files
from tiny import TEST, Ended, Scratch, run_script

from engine.measured_run import cell_of, load_run, records

MEASURING = {"inflate_model", "pack_store", "measure_host", "rescore_runs"}
LINK = {"documents": 2, "tokens": 4, "repeats": 2}
RUNS = 4 * 2 * 2 * len(TEST)  # policies, links, repeats, texts
KILLED_AFTER = 4  # runs, and two warm-ups
TARGET = "results/measured/box"


@dataclass
class Story:
    scratch: Scratch
    killed: dict[str, str] = field(default_factory=dict)  # by name the sha256 of every file of the host's folder
    killed_at: dict[str, int] = field(default_factory=dict)  # when each was written
    record: dict = field(default_factory=dict)  # as the killed run left it
    whole: dict[str, str] = field(default_factory=dict)
    whole_at: dict[str, int] = field(default_factory=dict)
    second: Ended | None = None
    failing: Ended | None = None
    after_failing: dict[str, str] = field(default_factory=dict)
    planned: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    elsewhere: Ended | None = None
    collected: dict[str, str] = field(default_factory=dict)
    table: pd.DataFrame | None = None
    started: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> Story:
    scratch = Scratch(tmp_path_factory.mktemp("measure") / "scratch")
    profile = write_profile(scratch.path("config/hosts"))
    links = {"disk": dict(LINK), "sdcard": dict(LINK)}
    scratch.configure(measure={"models": ["tiny"], "slots": ["s50"], "prefetch": ["spec_prefetch"], "links": links})
    told, folder = Story(scratch), scratch.path(TARGET)
    words = ["workflow/scripts/measure_host.py", "results/packed/tiny/own"]
    try:
        scratch.kill_in_the_middle(TARGET, words=words, runs=2 + KILLED_AFTER + 1)
    except AssertionError:
        if any("O_DIRECT" in log.read_text() for log in scratch.path("results/logs").rglob("*.log")):
            pytest.skip("the scratch folder is on a file system without O_DIRECT: no run may be timed there")
        raise
    told.killed, told.killed_at = files(folder), written(folder)
    told.record = json.loads((folder / "tiny" / "own.json").read_text(encoding="utf-8"))

    scratch.made(TARGET)
    told.whole, told.whole_at = files(folder), written(folder)
    scratch.started()
    told.second = scratch.made(TARGET)
    assert scratch.started() == []
    told.planned["here"] = scratch.planned("results/all")

    text = profile.read_text(encoding="utf-8")
    profile.write_text(text.replace("seconds: 1.0", "seconds: 2.0"), encoding="utf-8")
    told.failing = scratch.snakemake(TARGET)
    told.after_failing = files(folder)
    profile.write_text(text, encoding="utf-8")

    rename(folder, "other", "f" * 16)  # a fresh clone, with the folder of another machine in it
    for name in ("stamps", "packed"):
        shutil.rmtree(scratch.path(f"results/{name}"))
    told.planned["clone"] = scratch.planned("results/all")
    other = scratch.path("results/measured/other")
    before = files(other)
    scratch.started()
    scratch.made("results/tables/local/measured.csv")
    told.started = scratch.started()
    told.elsewhere = scratch.snakemake("results/measured/other")
    assert files(other) == before
    told.table = pd.read_csv(scratch.path("results/tables/local/measured.csv"), keep_default_na=False)
    return told


# ---- killed ----------------------------------------------------------------------------------------------------------
def test_a_killed_measurement_keeps_its_finished_runs_and_leaves_no_half_of_one(story):
    own = {name for name in runs(story.killed) if "/own/" in name}  # the other size may have been measured before
    assert len(own) == KILLED_AFTER == len(story.record["cells"])
    assert story.record["planned"] == RUNS
    assert not [name for name in story.killed if ".tmp" in name]


def test_the_same_command_goes_on_and_takes_no_finished_run_again(story):
    for name in runs(story.killed):
        assert (story.whole[name], story.whole_at[name]) == (story.killed[name], story.killed_at[name])
    folder = story.scratch.path("results/measured/other")
    for record in records(folder):
        assert record["planned"] == len(record["cells"]) == RUNS
        assert all(len(load_run(cell_of(record, row).path(folder)).token_s) == 8 for row in record["cells"])
    assert len(runs(story.whole)) == 2 * RUNS


def test_a_second_call_has_nothing_to_do(story):
    assert "Nothing to be done" in story.second.out + story.second.err


def test_the_inflated_checkpoint_is_removed_after_it_was_packed(story):
    assert not story.scratch.path("results/inflated/tiny").exists()


# ---- nothing is deleted ----------------------------------------------------------------------------------------------
def test_a_failing_run_deletes_and_replaces_nothing(story):
    said = story.failing.out + story.failing.err
    assert story.failing.code != 0
    assert "with another host_sha256; expected one machine, profile, store and demand" in said
    assert story.after_failing == story.whole


# ---- results/all -----------------------------------------------------------------------------------------------------
def test_results_all_collects_and_never_measures(story):
    for plan in story.planned.values():
        assert "tabulate_measured" in plan and not MEASURING & plan.keys()
    assert not [line for line in story.started if "measure_host" in line or "rescore_runs" in line]
    assert set(story.table["host"]) == {"other"} and set(story.table["instrument"]) == {"engine", "simulator"}
    assert set(story.table["status"]) == {"ok"}


def test_another_machine_is_no_target_here(story):
    assert story.elsewhere.code != 0 and "No rule to produce results/measured/other" in story.elsewhere.err


def test_a_measurement_of_nothing_says_so(story):
    story.scratch.configure(measure={**story.scratch.configuration["measure"], "slots": ["s75"]})
    ended = story.scratch.snakemake(TARGET)
    assert ended.code == 2 and ended.err.splitlines()[-1].startswith(
        "error: measure: none of its models, or of its slots"
    )


def test_a_cluster_without_nodes_says_so(story):
    ended = story.scratch.snakemake("results/measured/cluster")
    assert ended.code == 2 and "names its node; expected `slurm:` in one at least" in ended.err.splitlines()[-1]


def test_retrying_forgets_the_stamp_of_a_measurement_with_failed_runs_and_none_of_its_runs(story, tmp_path):
    measured = tmp_path / "measured" / "other"
    shutil.copytree(story.scratch.path("results/measured/other"), measured)
    for name in ("own", "512x64"):
        stamp = tmp_path / "stamps" / "measured" / "other" / "tiny" / name / "timed"
        stamp.parent.mkdir(parents=True)
        stamp.touch()
    path = measured / "tiny" / "own.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    lost = record["cells"][0]
    del lost["sha256"], lost["failed_loads"], lost["other_cores"]
    lost |= {"status": "failed", "reason": "MemoryError: no"}
    path.write_text(json.dumps(record), encoding="utf-8")
    before = files(measured)
    ended = run_script("forget_failed.py", tmp_path / "quality")
    assert ended.code == 0 and "MemoryError: no" in ended.out and "results/measured/other" in ended.out
    left = {stamp.parent.name for stamp in tmp_path.glob("stamps/measured/other/tiny/*/timed")}
    assert left == {"512x64"} and files(measured) == before
