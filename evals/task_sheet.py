"""The sheet of tasks, config/tasks.tsv: which text is asked, by which task of lm-eval, and what is scored.

load_tasks("config/tasks.tsv")["humaneval"].task
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from engine.errors import error, nearest
from engine.sheets import ID, read_sheet
from evals.corpora import row_of, table

COLUMNS = ("id", "text", "task", "new_tokens", "metrics")
# what a task may be scored by: filters of exact_match, whether a completion is code, and whether it passes its tests
METRICS = ("strict-match", "flexible-extract", "numeric", "parses", "pass_at_1")


@dataclass(frozen=True)
class Task:
    """One row. text: of evals/corpora.toml; task: of evals/tasks; new_tokens: the limit, None the configuration's."""

    id: str
    text: str
    task: str
    new_tokens: int | None
    metrics: tuple[str, ...]


def load_tasks(path: str | Path) -> dict[str, Task]:
    """The sheet by id, in its order. UserError names file, row and value."""
    return read_sheet(path, COLUMNS, "the sheet of tasks", _parse)


def _parse(row: dict[str, str], where: str) -> Task:
    for column in ("id", "task"):
        if not ID.fullmatch(row[column]):
            raise error(f"{where}: {column} '{row[column]}'", "letters, digits, '_' or '-'", "rename it")
    if row["text"] not in table():
        raise error(f"{where}: text '{row['text']}'", "an id of evals/corpora.toml", nearest(row["text"], table()))
    if (role := row_of(row["text"])["role"]) != "test":
        raise error(f"{where}: text '{row['text']}' of role {role}", "a text of role test", "choose another")
    if row["new_tokens"] != "-" and not re.fullmatch("[1-9][0-9]{0,5}", row["new_tokens"]):
        found, expected = f"{where}: new_tokens '{row['new_tokens']}'", "a whole number from 1, or '-'"
        raise error(found, expected, "mend the cell")
    metrics = tuple(row["metrics"].split(","))
    for name in metrics:
        if name not in METRICS:
            raise error(f"{where}: metric '{name}'", "a metric of tasks", nearest(name, METRICS))
    new_tokens = None if row["new_tokens"] == "-" else int(row["new_tokens"])
    return Task(row["id"], row["text"], row["task"], new_tokens, metrics)
