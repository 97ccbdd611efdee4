"""The tables of tasks, checked: what every policy wrote and how it agrees, and every forced problem.

tasks.csv has a row a (model, policy, task, metric): value, n and, where there is one, its interval. agreement.csv has a
row a (model, policy, task, problem), lossy policies alone; a task or policy without problems has one row that says why.
workflow/scripts/tabulate_tasks.py writes both.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from evals.checked_tables import read_words, refuse, to_flags, to_numbers
from evals.figures import COLOURS

NOT_RUN = "not run"  # opens the status of what was not asked
NO_EFFECT = "lossy without effect"  # a note: a lossy policy that replaced nothing
STATUSES = ("ok", "failed", "absent")
POLICY = ("miss_rule", "eviction", "standin", "beta", "bundle")
TASK_COLUMNS = ("model", "policy", "task", "text", "metric", "unit", "value", "n", "low", "high", "interval", "level")
TASK_COLUMNS += ("status", "reason", "note", "slots", "slots_percent", "slots_count", "experts", "rehearsal", *POLICY)
AGREEMENT_COUNTS = ("positions", "agreed", "common_prefix", "events", "substituted_mass", "substitutions")
AGREEMENT_COUNTS += ("first_choices_changed",)
AGREEMENT_COLUMNS = ("model", "policy", "task", "text", "problem", "status", "reason", *AGREEMENT_COUNTS)
AGREEMENT_COLUMNS += ("slots", "slots_percent", "rehearsal", "drops", *POLICY)


def read_tasks(path: str | Path) -> pd.DataFrame:
    """tasks.csv: flags as booleans, absent numbers NaN. UserError names file, row and value."""
    table = read_words(path, TASK_COLUMNS, "the table of tasks")
    ok = table["status"] == "ok"
    wrong = ~table["status"].isin(STATUSES) & ~table["status"].str.startswith(NOT_RUN)
    refuse(path, table, wrong, "status", f"one of {', '.join(STATUSES)}, or {NOT_RUN} and why")
    refuse(path, table, table.duplicated(["model", "policy", "task", "metric"]), "metric", "one row a metric")
    _policies(path, table)
    to_numbers(path, table, "value", needed=ok)
    for name in ("n", "low", "high", "level", "slots_percent", "slots_count", "experts"):
        to_numbers(path, table, name, needed=False)
    return table


def read_agreement(path: str | Path) -> pd.DataFrame:
    """agreement.csv: flags as booleans, absent numbers NaN. UserError names file, row and value."""
    table = read_words(path, AGREEMENT_COLUMNS, "the table of forced agreement", rows=False)
    refuse(path, table, ~table["status"].isin(STATUSES), "status", f"one of {', '.join(STATUSES)}")
    refuse(path, table, table.duplicated(["model", "policy", "task", "problem"]), "problem", "one row a problem")
    _policies(path, table)
    for name in (*AGREEMENT_COUNTS, "drops"):
        to_numbers(path, table, name, needed=table["status"] == "ok", low=0.0)
    for name in ("agreed", "common_prefix"):
        refuse(path, table, table[name] > table["positions"], name, "at most the positions")
    to_numbers(path, table, "slots_percent", needed=True, low=0.0)
    return table


def _policies(path: str | Path, table: pd.DataFrame) -> None:
    refuse(path, table, ~table["miss_rule"].isin(COLOURS), "miss_rule", f"one of {', '.join(COLOURS)}")
    for name in ("rehearsal", "bundle"):
        to_flags(path, table, name)
