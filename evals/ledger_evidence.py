"""What decides claims: everything a run measured of one model, in one place.

    evidence = gather(load_scored(records), sweep=load_folders(folders), ...)       # by model
    evidence["reference"].sweep["tau_010"].record["cells"]

What a run does not have is empty, and every claim that needs it is `not run` with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from engine.errors import error
from evals.checked_tables import read_words, refuse, to_numbers
from evals.ledger_engine import PEERS
from evals.ledger_recall import Recalled
from evals.measured_tables import read_documents as read_measured_documents
from evals.preregistration import Row
from evals.records import Scored
from evals.speed import read_documents, read_speed

AGREEMENT_WORDS = ("model", "policy", "task", "text", "problem", "status", "reason", "slots")
AGREEMENT_NUMBERS = ("positions", "agreed", "events", "substituted_mass", "substitutions", "slots_percent")
PILOT = "pilot.json"


@dataclass(frozen=True)
class Speed:
    """The tables of evals/speed.py: by text, and by document where there is one (else empty).

    measured: the documents of measured hosts (evals/measured_tables.py). peers: those of programs that were run beside
    the engine under a memory limit, in the same columns (evals/peers/tables.py).
    """

    texts: pd.DataFrame = field(default_factory=lambda: read_speed(None))
    documents: pd.DataFrame = field(default_factory=lambda: read_documents(None))
    measured: pd.DataFrame = field(default_factory=lambda: read_measured_documents(None))
    peers: pd.DataFrame = field(default_factory=lambda: read_measured_documents(None))

    def of(self, model: str) -> Speed:
        tables = (self.texts, self.documents, self.measured, self.peers)
        return Speed(*(table[table["model"] == model] for table in tables))

    def of_hosts(self, row: Row) -> pd.DataFrame:
        """What a claim about measured hosts is about."""
        return self.peers if any(part.instrument == PEERS for part in row.parts) else self.measured


def read_agreement(path: str | Path | None) -> pd.DataFrame:
    """Forced agreement, a row a (model, policy, text, problem, slots); empty without a path.

    UserError: not there, no table, a missing column, a cell that is no number, an `ok` row without one, rows twice.
    """
    columns = (*AGREEMENT_WORDS, *AGREEMENT_NUMBERS)
    if path is None:
        return pd.DataFrame(columns=list(columns))
    table = read_words(path, columns, "the table of forced agreement", rows=False)
    key = ["model", "policy", "text", "problem", "slots"]
    refuse(path, table, table.duplicated(key), "problem", f"one row a ({', '.join(key)})")
    for name in AGREEMENT_NUMBERS:
        to_numbers(path, table, name, needed=table["status"] == "ok", low=0.0)
    return table


@dataclass(frozen=True)
class Evidence:
    """Of one model. quality, sweep, experiment_b: by policy or arm; pilot: what that of experiment B decided; recalled:
    what predictors named.
    """

    quality: Mapping[str, Scored] = field(default_factory=dict)
    sweep: Mapping[str, Scored] = field(default_factory=dict)
    experiment_b: Mapping[str, Scored] = field(default_factory=dict)
    pilot: Mapping[str, object] | None = None
    agreement: pd.DataFrame = field(default_factory=lambda: read_agreement(None))
    speed: Speed = field(default_factory=Speed)
    recalled: Recalled | None = None

    def slots_percents(self, slots: str) -> set[float]:
        """What a slot budget is called in percent, wherever it was run."""
        scored = [*self.quality.values(), *self.sweep.values(), *self.experiment_b.values()]
        cells = [cell for policy in scored for cell in policy.record["cells"] if cell["slots"] == slots]
        forced = self.agreement[self.agreement["slots"] == slots]["slots_percent"].dropna()
        return {float(cell["slots_percent"]) for cell in cells} | set(forced.astype(float))


def gather(
    quality: Mapping[str, Mapping[str, Scored]],
    *,
    sweep: Mapping[str, Mapping[str, Scored]] | None = None,
    experiment_b: Mapping[str, Mapping[str, Scored]] | None = None,
    pilots: Mapping[str, Mapping[str, object]] | None = None,
    agreement: pd.DataFrame | None = None,
    speed: Speed | None = None,
    recalled: Mapping[str, Recalled] | None = None,
) -> dict[str, Evidence]:
    """By model, for every model of `quality`."""
    sweep, experiment_b, pilots, speed = sweep or {}, experiment_b or {}, pilots or {}, speed or Speed()
    recalled = recalled or {}
    agreement = read_agreement(None) if agreement is None else agreement
    return {
        model: Evidence(
            policies,
            sweep.get(model, {}),
            experiment_b.get(model, {}),
            pilots.get(model),
            agreement[agreement["model"] == model],
            speed.of(model),
            recalled.get(model),
        )
        for model, policies in quality.items()
    }


def load_pilots(folders: Iterable[str | Path]) -> dict[str, dict]:
    """results/experiment_b/<model>/pilot.json, by model. UserError: no such file, or it does not say `go`."""
    found = {}
    for path in (Path(folder) / PILOT for folder in folders):
        try:
            pilot = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(pilot["go"], bool):
                raise TypeError(f"go is {pilot['go']!r}")
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise error(f"{path}: {type(exc).__name__} {exc}", "the pilot's decision", "delete it, run again") from None
        found[path.parent.name] = pilot
    return found
