"""The rules that decide the ledger, read and checked: config/preregistration.yaml and its schema.

Which claim is tested how was written before its results. A row is one claim, its parts are the numbers that decide it;
the sha256 of the file names the rules in every row of the ledger. What role, measure and region mean stands in the
file itself.

    rules = load("config/preregistration.yaml")
    rules.rows["P1.6"].parts[0].low
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from engine.errors import error, nearest
from engine.schema import check_schema

SCHEMA = Path(__file__).parent.parent / "workflow" / "schemas" / "preregistration.schema.json"
TIMED = "token_time_change"  # the measure that needs a host and a link
COUNTED = "parameters"  # the one that needs sizes


@dataclass(frozen=True)
class Measure:
    unit: str
    no_effect: float
    what: str


@dataclass(frozen=True)
class Part:
    """One number and its region. low, high: infinite where the end is open. direction: the sign claimed, or None."""

    id: str
    role: str
    measure: str
    of: str
    against: str | None
    instrument: str
    low: float
    high: float
    direction: str | None
    why: str
    texts: tuple[str, ...]
    host: str | None = None
    link: str | None = None
    within: str | None = None
    not_run: str | None = None
    sizes: dict[str, int] | None = None  # of a model that is counted: layers, width, experts, rank


@dataclass(frozen=True)
class Row:
    """One claim. paper: number, instrument, status, known. not_run: why nothing can fill it now, or None.

    every_host: its parts stand on each measured host (evals/ledger_engine.py).
    """

    id: str
    source: str
    claim: str
    paper: dict[str, str]
    rule: str
    parts: tuple[Part, ...]
    not_run: str | None = None
    every_host: bool = False


@dataclass(frozen=True)
class Preregistration:
    sha256: str
    known_before: str
    seen_weights: tuple[str, ...]
    statistics: dict[str, float | int]
    models: tuple[str, ...]
    slots: str
    slots_percent: float
    texts: tuple[str, ...]
    baseline: str
    rules: dict[str, str]
    last_half: float
    running_rule: str
    measures: dict[str, Measure]
    rows: dict[str, Row]


def load(path: str | Path) -> Preregistration:
    """The checked rules. UserError names file, key and value."""
    path = Path(path)
    try:
        content = path.read_bytes()
        value = yaml.safe_load(content.decode("utf-8"))
    except OSError as exc:
        raise error(f"{path}: {exc.strerror}", "the preregistration", "restore it from the repository") from None
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise error(f"{path}: {exc}", "valid YAML in UTF-8", "mend the file") from None
    return check(value, hashlib.sha256(content).hexdigest(), str(path))


def check(value: object, sha256: str = "", where: str = "config/preregistration.yaml") -> Preregistration:
    """Validate parsed rules. UserError: the schema, ids twice, unknown measures, regions that decide nothing."""
    check_schema(value, where, SCHEMA, str(SCHEMA.relative_to(SCHEMA.parents[2])))
    measures = {name: Measure(**facts) for name, facts in value["measures"].items()}
    _refuse_twice([row["id"] for row in value["rows"]], f"{where}: rows")
    rows = {row["id"]: _row(row, tuple(value["texts"]), measures, f"{where}: row {row['id']}") for row in value["rows"]}
    return Preregistration(
        sha256=sha256,
        known_before=_line(value["known_before"]),
        seen_weights=tuple(value["seen_weights"]),
        statistics={name: value["statistics"][name] for name in ("level", "replicates", "seed")},
        models=tuple(value["models"]),
        slots=value["slots"]["id"],
        slots_percent=value["slots"]["percent"],
        texts=tuple(value["texts"]),
        baseline=value["baseline"],
        rules={name: _line(words) for name, words in value["rules"].items()},
        last_half=value["running"]["last_half"],
        running_rule=_line(value["running"]["rule"]),
        measures=measures,
        rows=rows,
    )


def _row(row: dict, texts: tuple[str, ...], measures: dict[str, Measure], where: str) -> Row:
    _refuse_twice([part["id"] for part in row["parts"]], f"{where}: parts")
    parts = tuple(_part(part, texts, measures, f"{where}, part {part['id']}") for part in row["parts"])
    if all(part.role != "primary" for part in parts):
        raise error(f"{where}: no part of role primary", "at least one that decides", "name it")
    words = {name: _line(row[name]) for name in ("source", "claim", "rule")}
    paper = {name: _line(said) for name, said in row["paper"].items()}
    every_host, not_run = row.get("hosts") == "every", _line(row.get("not_run"))
    return Row(id=row["id"], **words, paper=paper, parts=parts, not_run=not_run, every_host=every_host)


def _part(part: dict, texts: tuple[str, ...], measures: dict[str, Measure], where: str) -> Part:
    if part["measure"] not in measures:
        raise error(f"{where}: measure '{part['measure']}'", "one under measures", nearest(part["measure"], measures))
    low, high = part["region"]["low"], part["region"]["high"]
    low, high = -math.inf if low is None else float(low), math.inf if high is None else float(high)
    if not low <= high or (low, high) == (-math.inf, math.inf):
        raise error(f"{where}: region {low:g} to {high:g}", "two ordered ends, at least one finite", "mend the region")
    if part["measure"] == TIMED and not {"host", "link"} <= set(part):
        raise error(f"{where}: no host or no link", f"both, as {TIMED} is a time", "name them")
    if (part["measure"] == COUNTED) != ("sizes" in part):
        found = "sizes" if "sizes" in part else "no sizes"
        raise error(f"{where}: {found}", f"sizes of {COUNTED} alone", "mend the part")
    optional = {name: part.get(name) for name in ("host", "link", "sizes")}
    optional |= {name: _line(part.get(name)) for name in ("within", "not_run")}
    same = {name: part[name] for name in ("id", "role", "measure", "of", "against", "instrument", "direction")}
    own_texts = tuple(part.get("texts", texts))
    return Part(**same, **optional, low=low, high=high, why=_line(part["why"]), texts=own_texts)


def _refuse_twice(ids: Iterable[str], where: str) -> None:
    seen = set()
    for name in ids:
        if name in seen:
            raise error(f"{where}: id '{name}' a second time", "one of each", "rename or remove one")
        seen.add(name)


def _line(words: str | None) -> str | None:
    return None if words is None else " ".join(words.split())
