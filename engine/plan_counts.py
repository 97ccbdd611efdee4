"""How often an event fetches, substitutes and loads, from what was recorded: the counts that a plan's times stand on.

    counts = Published("results/published/tables", "reference")
    counts.of(policies["quality_first"], percent=25, top_k=10, sheet=policies)

A count is per event, one token in one layer. It is the rehearsal model's own over all test texts, decoded from the warm
start, per chosen expert: a model with another K, at the same share of residents, is taken to miss as often. Between the
recorded shares a straight line is drawn, to none at 100 %; below the least, counts are those of the least.

What a prefetch brings is no count of its own: `taken` says which share of it events take, `foretold` which share of the
misses the predictor names one layer ahead (engine/plan_time.py does the rest).
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from engine.errors import error, nearest
from engine.policies import BASELINE, Policy

TABLES = "results/published/tables"
REHEARSAL = "reference"
FROM_EMPTY = "run `snakemake --cores 1 results/all`, or give --tables results/tables/local"


@dataclass(frozen=True)
class Counts:
    """Of one event, on average."""

    fetched: float  # experts that the model waits for
    background: float = 0.0  # records that come beside its compute
    substituted: float = 0.0
    dropped: float = 0.0
    foretold: float = 0.0  # share of the misses that the predictor names one layer ahead
    taken: float = 1.0  # share of what a prefetch brings that an event takes


class Published:
    """The tables of a run, for one of its models."""

    def __init__(self, folder: str | Path, model: str = REHEARSAL) -> None:
        """UserError where the tables or the model are not there."""
        self._folder, self.model = Path(folder), model
        if model not in (known := {row["model"] for row in self._read("quality")}):
            raise error(f"counts of model '{model}'", f"a model of {self._folder}/quality.csv", nearest(model, known))

    def of(self, policy: Policy, percent: float, top_k: int, sheet: Mapping[str, Policy]) -> Counts | None:
        """None where no run recorded this policy. sheet: where the policy's row without prefetching is found."""
        plain = _without_prefetch(policy, sheet)
        shares = self._shares.get(plain.id) if plain else None
        if not shares:
            return None
        names = ("fetches", "background_issued", "substitutions", "drops")
        found = Counts(*(top_k * _between(shares, percent, column) for column in range(len(names))))
        if not policy.prefetch:
            return found
        return replace(found, foretold=self._foretold.get(policy.prefetch, 0.0), taken=self._taken(policy))

    @property
    def percents(self) -> list[float]:
        """The shares of residents that were recorded for the baseline."""
        return sorted(self._shares.get(BASELINE, {}))

    @cached_property
    def _shares(self) -> dict[str, dict[float, tuple[float, ...]]]:
        """{policy: {percent: counts of a chosen expert}}."""
        found: dict[str, dict[float, tuple[float, ...]]] = {}
        for row in self._rows("quality", text="all", status="ok"):
            names = ("fetches", "background_issued", "substitutions", "drops")
            counts = tuple(float(row[name]) / float(row["demands"]) for name in names)
            found.setdefault(row["policy"], {})[float(row["slots_percent"])] = counts
        return found

    @cached_property
    def _foretold(self) -> dict[str, float]:
        rows = self._rows("recall", topic="all", layer="all", horizon="1")
        return {row["predictor"]: float(row["recall_missed"]) for row in rows}

    def _taken(self, policy: Policy) -> float:
        """Over the host and link where the least was brought: there a scheduler brings what is surest."""
        rows = self._rows("speed", text="all", status="ok", policy=policy.id)
        brought = [(float(row["prefetched_per_token"]), float(row["taken_per_token"])) for row in rows]
        brought = [pair for pair in brought if pair[0] > 0.1]  # fewer are chance
        return min(1.0, min(brought)[1] / min(brought)[0]) if brought else 1.0

    def _rows(self, table: str, **wanted: str) -> list[dict[str, str]]:
        rows = self._read(table)
        return [r for r in rows if r["model"] == self.model and all(r[name] == v for name, v in wanted.items())]

    def _read(self, table: str) -> list[dict[str, str]]:
        path = self._folder / f"{table}.csv"
        try:
            with open(path, newline="", encoding="utf-8") as handle:
                return list(csv.DictReader(handle))
        except OSError as exc:
            raise error(f"{path}: {exc.strerror}", "the tables of a run, with its counts", FROM_EMPTY) from None


def _without_prefetch(policy: Policy, sheet: Mapping[str, Policy]) -> Policy | None:
    """The row that differs in prefetching alone."""
    plain = replace(policy, id="", prefetch=None, schedule=None)
    return next((row for row in sheet.values() if replace(row, id="") == plain), None)


def _between(shares: dict[float, tuple[float, ...]], percent: float, column: int) -> float:
    points = sorted((at, counts[column]) for at, counts in shares.items())
    points.append((100.0, 0.0))
    if percent <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in itertools.pairwise(points):
        if percent <= right:
            return low + (high - low) * (percent - left) / (right - left)
    return 0.0
