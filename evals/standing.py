"""Was a rule written before the result it decides? The question is put to git, not to the author.

A row of a ledger names the sha256 of the preregistration it used. A published row stands where a strict ancestor of
the first commit that holds it, with that hash, holds config/preregistration.yaml with exactly that hash. A row of a
fresh run stands where HEAD holds the file with that hash and the working tree has not changed it: the commit that adds
the row then comes after. Otherwise it is exploratory. Where git cannot tell (no repository, a shallow one that does
not reach back) it is unverifiable.

Assumed: commits have the order they claim. What was computed and thrown away before the rule was written, git cannot
see.

python -m evals.standing results/published/claims.csv
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import os
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from engine.errors import error, main_guard
from engine.files import sha256

PREREGISTERED, EXPLORATORY, UNVERIFIABLE = "preregistered", "exploratory", "unverifiable"
PREREGISTRATION = Path("config/preregistration.yaml")
KEY = ("id", "model", "part", "slots")  # of a row
HASH = "preregistration_sha256"


@dataclass(frozen=True)
class Standing:
    word: str
    why: str

    def of(self, verdict: str) -> str:
        """The verdict as it may be published: `not run` says nothing that could have been fitted."""
        return verdict if self.word == PREREGISTERED or verdict in ("", "not run") else self.word


class _NoGit(Exception):
    pass


# ---- a fresh run -----------------------------------------------------------------------------------------------------
def of_run(preregistration: str | Path = PREREGISTRATION) -> Standing:
    """Standing of results that are computed now, by the rules in the working tree. UserError: no such file."""
    path = Path(preregistration)
    if not path.is_file():
        raise error(f"{path} does not exist", "the preregistration", "restore it from the repository")
    try:
        committed = _blob(path.parent, "HEAD", f"./{path.name}")
    except _NoGit as exc:
        return Standing(UNVERIFIABLE, str(exc))
    if committed is None:
        return Standing(EXPLORATORY, f"HEAD has no {path.name}: commit it before the results")
    if hashlib.sha256(committed).hexdigest() != sha256(path):
        return Standing(EXPLORATORY, f"{path.name} was changed and not committed")
    return Standing(PREREGISTERED, "committed before the results")


# ---- a published ledger ----------------------------------------------------------------------------------------------
def of_published(ledger: str | Path, preregistration: str | Path | None = None) -> dict[tuple[str, ...], Standing]:
    """Standing of every row of a committed ledger by (id, model, part, slots).

    preregistration: its path in the same repository; config/preregistration.yaml of the root otherwise. A row that was
    never committed is judged as one of a fresh run. UserError: no ledger, or one without the columns.
    """
    path = Path(ledger)
    rows = _rows(path.read_bytes() if path.is_file() else None, str(path))
    try:
        root = Path(_git(path.parent, "rev-parse", "--show-toplevel").decode().strip())
        shallow = _git(root, "rev-parse", "--is-shallow-repository").strip() == b"true"
        rules = Path(preregistration).resolve() if preregistration else root / PREREGISTRATION
        first = _first_commits(root, path.resolve().relative_to(root.resolve()), rows)
        rules_name = rules.relative_to(root.resolve()) if preregistration else PREREGISTRATION
        cache: dict[str, set[str]] = {}
        return {
            key: _published(root, rules_name, digest, first.get((key, digest)), shallow, cache)
            for key, digest in rows.items()
        }
    except _NoGit as exc:
        return dict.fromkeys(rows, Standing(UNVERIFIABLE, str(exc)))


def _published(
    root: Path, rules: Path, digest: str, first: str | None, shallow: bool, cache: dict[str, set[str]]
) -> Standing:
    if first is None:
        found = of_run(root / rules) if (root / rules).is_file() else Standing(EXPLORATORY, f"there is no {rules}")
        if found.word == PREREGISTERED and sha256(root / rules) != digest:
            return Standing(EXPLORATORY, f"the row was made by other rules than {rules} now holds")
        return found
    if first not in cache:
        cache[first] = _hashes_before(root, first, rules)
    if digest in cache[first]:
        return Standing(PREREGISTERED, f"rules committed before {first[:12]}, which added the row")
    if shallow:
        return Standing(UNVERIFIABLE, "the history is shallow and does not reach back to the rules")
    return Standing(EXPLORATORY, f"no commit before {first[:12]}, which added the row, holds these rules")


def _first_commits(root: Path, ledger: Path, rows: dict[tuple[str, ...], str]) -> dict[tuple, str]:
    """(key, hash): the first commit whose ledger has that row with that hash."""
    wanted = {(key, digest) for key, digest in rows.items()}
    first: dict[tuple, str] = {}
    for commit in _commits(root, "HEAD", ledger):
        content = _blob(root, commit, ledger.as_posix())
        held = set(_rows(content, f"{ledger} of {commit[:12]}", strict=False).items())
        for row in (held & wanted) - first.keys():
            first[row] = commit
    return first


def _hashes_before(root: Path, commit: str, path: Path) -> set[str]:
    """sha256 of every version of a file in the strict ancestors of a commit."""
    found = set()
    for ancestor in _commits(root, commit, path):
        if ancestor == commit:
            continue
        content = _blob(root, ancestor, path.as_posix())
        if content is not None:
            found.add(hashlib.sha256(content).hexdigest())
    return found


def _rows(content: bytes | None, where: str, strict: bool = True) -> dict[tuple[str, ...], str]:
    """Key and hash of every row. Not strict: what is no ledger has no rows."""
    if content is None:
        if strict:
            raise error(f"{where} does not exist", "a published ledger", "publish one")
        return {}
    try:
        table = list(csv.DictReader(io.StringIO(content.decode("utf-8"))))
        return {tuple(row[name] or "" for name in KEY): row[HASH] or "" for row in table}
    except (KeyError, UnicodeDecodeError, csv.Error) as exc:
        if strict:
            expected = f"a ledger with columns {', '.join((*KEY, HASH))}"
            raise error(f"{where}: {type(exc).__name__} {exc}", expected, "publish it again") from None
        return {}


# ---- git -------------------------------------------------------------------------------------------------------------
def _commits(root: Path, revision: str, path: Path) -> list[str]:
    """Commits reachable from a revision that changed a file, ancestors first."""
    words = ("rev-list", "--topo-order", "--reverse", "--full-history", revision, "--", path.as_posix())
    return _git(root, *words).decode().split()


def _blob(folder: Path, commit: str, name: str) -> bytes | None:
    """A file of a commit; None where it has none."""
    try:
        return _git(folder, "cat-file", "blob", f"{commit}:{name}")
    except _NoGit:
        _git(folder, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")  # no repository, no commit: _NoGit
        return None


def _git(folder: Path, *words: str) -> bytes:
    """Standard output of a git command that changes nothing. _NoGit says in one line why there is none."""
    # a hook's variables would point git at its own repository
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=True, env=clean).stdout
    except OSError as exc:
        raise _NoGit(f"git does not run: {exc.strerror}") from None
    except subprocess.CalledProcessError as exc:
        said = exc.stderr.decode(errors="replace").strip().splitlines()
        raise _NoGit(f"git: {said[0]}" if said else "git has no history here") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ledger", help="results/published/claims.csv")
    parser.add_argument("--preregistration", help="default: config/preregistration.yaml of the repository")
    a = parser.parse_args()
    standings = of_published(a.ledger, a.preregistration)
    for standing, number in Counter(standings.values()).items():
        print(f"{standing.word}: {number} rows, {standing.why}")


if __name__ == "__main__":
    main_guard(main)
