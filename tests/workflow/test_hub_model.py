"""End to end: a row of models.tsv with a hub id and its commit, scored and packed like a folder; the hub is our own."""

from __future__ import annotations

import json
import shutil

import pytest
from tiny import Scratch, write_text

from engine.hub import commit_of
from engine.store import read_manifest
from tests.hub import COMMIT, ID, files_of, serve

TARGETS = ("results/calibration/tiny.json", "results/packed/tiny/own", "results/traces/tiny")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    scratch = Scratch(tmp_path_factory.mktemp("hub") / "scratch")
    folder = scratch.path("models/tiny")
    header, row = scratch.path("config/models.tsv").read_text(encoding="utf-8").splitlines()
    row = row.replace("models/tiny\t-", f"{ID}\t{COMMIT}")
    write_text(scratch.path("config/models.tsv"), f"{header}\n{row}\n")
    with serve(files_of(folder)) as hub:
        shutil.rmtree(folder)
        scratch.environment |= hub.environment(scratch.path("home"))
        planned = scratch.planned(*TARGETS)
        assert planned["fetch_model"] == {"results/models/tiny"} and "unpack_model" not in planned
        assert not hub.asked
        scratch.made(*TARGETS)
    yield scratch


def test_it_is_scored_and_packed_by_its_commit(scratch):
    store = scratch.path("results/packed/tiny/own")
    assert commit_of(scratch.path("results/models/tiny")) == commit_of(store) == COMMIT
    weights = read_manifest(store).facts["model"]
    record = json.loads(scratch.path("results/calibration/tiny.json").read_text(encoding="utf-8"))
    assert record["provenance"]["model"] == weights != "none"


def test_what_was_fetched_is_not_asked_for_again(scratch):
    """The hub is gone by now: what else the model is needed for finds it."""
    scratch.path("results/calibration/tiny.json").unlink()
    scratch.made(TARGETS[0])
    assert "fetch_model" not in scratch.planned("results/measured/local")


def test_a_branch_is_refused_before_the_first_job(scratch):
    sheet = scratch.path("config/models.tsv")
    pinned = sheet.read_text(encoding="utf-8")
    write_text(sheet, pinned.replace(COMMIT, "main"))
    message = scratch.snakemake("results/all", "-n").message
    write_text(sheet, pinned)
    assert "models.tsv:2: source 'owner/tiny' with revision 'main'; expected a hub id with a commit" in message
