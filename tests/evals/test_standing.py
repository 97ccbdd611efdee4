"""Whether a verdict stands, asked of throw-away git repositories, for every order of rules and rows."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.errors import UserError
from evals.standing import EXPLORATORY, PREREGISTERED, UNVERIFIABLE, Standing, of_published, of_run

KEY = ("P1.6", "reference", "pair", "s25")
OTHER = ("P1.8", "reference", "pair", "s25")


class Repository:
    """A git repository with rules and a ledger; nothing of the user's configuration is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.git("init", "--quiet", "--initial-branch=main")

    @property
    def rules(self) -> Path:
        return self.folder / "config" / "preregistration.yaml"

    @property
    def ledger(self) -> Path:
        return self.folder / "results" / "published" / "claims.csv"

    def git(self, *words: str) -> str:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        nobody = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
        command = ["git", "-C", str(self.folder), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=clean | nobody).stdout

    def commit(self, message: str = "x") -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)

    def write_rules(self, words: str = "low: 1\n") -> str:
        self.rules.parent.mkdir(exist_ok=True)
        self.rules.write_text(words)
        return hashlib.sha256(words.encode()).hexdigest()

    def write_ledger(self, *rows: tuple[tuple[str, ...], str]) -> None:
        self.ledger.parent.mkdir(parents=True, exist_ok=True)
        lines = ["id,model,part,slots,verdict,preregistration_sha256"]
        lines += [",".join((*key, "supported", digest)) for key, digest in rows]
        self.ledger.write_text("\n".join(lines) + "\n")

    def word(self, key: tuple[str, ...] = KEY) -> str:
        return of_published(self.ledger)[key].word


@pytest.fixture
def repository(tmp_path) -> Repository:
    return Repository(tmp_path / "checkout")


# ---- a published ledger ----------------------------------------------------------------------------------------------
def test_rules_before_the_row(repository):
    digest = repository.write_rules()
    repository.commit()
    repository.write_ledger((KEY, digest))
    repository.commit()
    assert repository.word() == PREREGISTERED
    repository.write_rules("low: 2\n")  # rules of a later question change nothing for this row
    repository.commit()
    assert repository.word() == PREREGISTERED


def test_rules_with_the_row(repository):
    repository.commit("root")
    repository.write_ledger((KEY, repository.write_rules()))
    repository.commit()
    assert repository.word() == EXPLORATORY


def test_rules_and_row_in_the_first_commit(repository):
    repository.write_ledger((KEY, repository.write_rules()))
    repository.commit()
    assert repository.word() == EXPLORATORY


def test_rules_after_the_row(repository):
    repository.write_ledger((KEY, hashlib.sha256(b"low: 1\n").hexdigest()))
    repository.commit()
    repository.write_rules()
    repository.commit()
    assert repository.word() == EXPLORATORY


def test_rules_changed_with_the_row(repository):
    """Other rules were there before; those of the row were not."""
    repository.write_rules("low: 0\n")
    repository.commit()
    repository.write_ledger((KEY, repository.write_rules("low: 1\n")))
    repository.commit()
    assert repository.word() == EXPLORATORY


def test_rules_published_late_do_not_cover_rows_by_older_rules(repository):
    old = repository.write_rules("low: 0\n")
    repository.commit()
    repository.write_ledger((KEY, old))
    repository.commit()
    new = repository.write_rules("low: 1\n")
    repository.commit()
    repository.write_ledger((KEY, old), (OTHER, new))
    repository.commit()
    assert repository.word() == repository.word(OTHER) == PREREGISTERED


def test_a_row_is_as_old_as_the_commit_that_first_held_it(repository):
    """Taking a row out and committing it again after the rules does not help."""
    digest = hashlib.sha256(b"low: 1\n").hexdigest()
    repository.write_ledger((KEY, digest))
    repository.commit()
    repository.ledger.unlink()
    repository.commit()
    repository.write_rules()
    repository.commit()
    repository.write_ledger((KEY, digest))
    repository.commit()
    assert repository.word() == EXPLORATORY


def test_rows_are_told_apart(repository):
    digest = hashlib.sha256(b"low: 1\n").hexdigest()
    repository.write_ledger((KEY, digest))
    repository.commit()
    repository.write_rules()
    repository.commit()
    repository.write_ledger((KEY, digest), (OTHER, digest))
    repository.commit()
    assert (repository.word(), repository.word(OTHER)) == (EXPLORATORY, PREREGISTERED)


def test_rules_on_a_branch_that_was_merged_too_late(repository):
    """In the history now, but no ancestor of the commit that added the row."""
    repository.commit("root")
    repository.git("checkout", "--quiet", "-b", "rules")
    digest = repository.write_rules()
    repository.commit()
    repository.git("checkout", "--quiet", "main")
    repository.write_ledger((KEY, digest))
    repository.commit()
    repository.git("merge", "--quiet", "--no-edit", "rules")
    assert repository.word() == EXPLORATORY


def test_rules_on_a_branch_that_was_merged_in_time(repository):
    repository.commit("root")
    repository.git("checkout", "--quiet", "-b", "rules")
    digest = repository.write_rules()
    repository.commit()
    repository.git("checkout", "--quiet", "main")
    repository.commit("elsewhere")
    repository.git("merge", "--quiet", "--no-edit", "rules")
    repository.write_ledger((KEY, digest))
    repository.commit()
    assert repository.word() == PREREGISTERED


def test_a_shallow_history(repository, tmp_path):
    digest = repository.write_rules()
    repository.commit()
    repository.write_ledger((KEY, digest))
    repository.commit()
    for depth, word in ((1, UNVERIFIABLE), (2, PREREGISTERED)):
        clone = Repository(tmp_path / f"depth{depth}")
        clone.git("fetch", "--quiet", "--depth", str(depth), f"file://{repository.folder}", "main")
        clone.git("checkout", "--quiet", "FETCH_HEAD")
        assert clone.word() == word


def test_without_git(repository, tmp_path, monkeypatch):
    digest = repository.write_rules()
    repository.write_ledger((KEY, digest))
    shutil.rmtree(repository.folder / ".git")
    assert repository.word() == UNVERIFIABLE and of_run(repository.rules).word == UNVERIFIABLE
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    found = of_run(repository.rules)
    assert found.word == UNVERIFIABLE and "git does not run" in found.why


def test_a_row_that_is_not_committed_is_one_of_a_fresh_run(repository):
    digest = repository.write_rules()
    repository.commit()
    repository.write_ledger((KEY, digest), (OTHER, "0" * 64))
    assert (repository.word(), repository.word(OTHER)) == (PREREGISTERED, EXPLORATORY)


@pytest.mark.parametrize("content", [None, b"a,b\n1,2\n", b"\xff\xfe"])
def test_what_is_no_ledger_is_refused(repository, content):
    repository.ledger.parent.mkdir(parents=True)
    if content is not None:
        repository.ledger.write_bytes(content)
    with pytest.raises(UserError, match="ledger"):
        of_published(repository.ledger)


# ---- a fresh run -----------------------------------------------------------------------------------------------------
def test_a_run_by_committed_rules(repository):
    repository.write_rules()
    repository.commit()
    assert of_run(repository.rules).word == PREREGISTERED


def test_a_run_by_rules_changed_since(repository):
    repository.write_rules()
    repository.commit()
    repository.write_rules("low: 2\n")
    assert of_run(repository.rules).word == EXPLORATORY
    repository.git("add", "--all")  # staged is not committed
    assert of_run(repository.rules).word == EXPLORATORY


def test_a_run_by_rules_never_committed(repository):
    repository.commit("root")
    repository.write_rules()
    assert of_run(repository.rules).word == EXPLORATORY


def test_a_run_before_any_commit(repository):
    repository.write_rules()
    assert of_run(repository.rules).word == UNVERIFIABLE


def test_the_environment_of_a_hook_does_not_lead_elsewhere(repository, tmp_path, monkeypatch):
    repository.write_rules()
    repository.commit()
    Repository(tmp_path / "elsewhere")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere" / ".git"))
    assert of_run(repository.rules).word == PREREGISTERED


# ---- what may be published -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("verdict", ["supported", "not supported", "inconclusive"])
def test_only_a_preregistered_verdict_keeps_its_word(verdict):
    assert Standing(PREREGISTERED, "").of(verdict) == verdict
    assert Standing(EXPLORATORY, "").of(verdict) == EXPLORATORY
    assert Standing(UNVERIFIABLE, "").of(verdict) == UNVERIFIABLE
    assert Standing(EXPLORATORY, "").of("not run") == "not run"
