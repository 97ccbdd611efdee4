"""Tables read as words and checked column by column: what is wrong is one line that names file, row and value.

    table = read_words(path, ("model", "status"), "the table of quality")
    refuse(path, table, ~table["status"].isin(("ok", "failed")), "status", "ok or failed")
    to_numbers(path, table, "tokens", needed=table["status"] == "ok")

Our tables are generated, so the way to mend one is always to delete it and run again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from engine.errors import error

TODO = "delete it and run again"


def read_words(path: str | Path, columns: Iterable[str], what: str, *, rows: bool = True) -> pd.DataFrame:
    """A CSV with every cell a word. UserError: not there, not a table, no rows (where `rows`), a column is missing."""
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8")
    except (OSError, UnicodeDecodeError, pd.errors.EmptyDataError, pd.errors.ParserError) as exc:
        raise error(f"{path}: {type(exc).__name__} {exc}", what, TODO) from None
    if table.empty and rows:
        raise error(f"{path}: no rows", what, TODO)
    need_columns(path, table, columns, what)
    return table


def need_columns(path: str | Path, table: pd.DataFrame, columns: Iterable[str], what: str) -> None:
    missing = [name for name in columns if name not in table]
    if missing:
        raise error(f"{path}: no column {', '.join(missing)}", what, TODO)


def add_columns(table: pd.DataFrame, columns: Iterable[str]) -> None:
    """Columns that are not there, empty."""
    for name in columns:
        if name not in table:
            table[name] = ""


def refuse(path: str | Path, table: pd.DataFrame, wrong: pd.Series, column: str, expected: str) -> None:
    """UserError that names the first row marked wrong."""
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise error(f"{path}:{row + 2}: {column} '{table[column].iloc[row]}'", expected, TODO)


def to_flags(path: str | Path, table: pd.DataFrame, column: str) -> None:
    """Words to booleans; an empty cell is False."""
    refuse(path, table, ~table[column].isin(["True", "False", ""]), column, "True or False")
    table[column] = table[column] == "True"


def to_numbers(path: str | Path, table: pd.DataFrame, column: str, needed: pd.Series | bool, low: float = -np.inf):
    """Words to finite numbers of at least `low`; NaN for an empty cell of a row that does not need it."""
    numbers = pd.to_numeric(table[column], errors="coerce")
    wrong = (numbers.isna() & (table[column] != "")) | np.isinf(numbers) | (needed & numbers.isna()) | (numbers < low)
    refuse(path, table, wrong, column, "a finite number" + (f" of at least {low:g}" if low > -np.inf else ""))
    table[column] = numbers
