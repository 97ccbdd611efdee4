"""The tables of speed, checked, as the ledger and the answer read them: by text and, where there is one, by document.

A row is one policy at one slot budget on one host and link, over one text or `all` of them. Times are those of the
simulator on a measured or modelled host; which of the two, `host_status` and `link_status` say. A row of the second is
one document (a cluster of evals/corpora.py) of one text, with the seconds that all its tokens took.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from engine.errors import error

WORDS = ("model", "policy", "slots", "host", "host_status", "link", "link_status", "text", "status", "reason")
NUMBERS = ("tokens", "token_s_mean", "speedup", "speedup_low", "speedup_high")
NEEDED = ("tokens", "token_s_mean")  # of a row with status ok
KEY = ["model", "policy", "slots", "host", "link", "text"]
DOCUMENT_WORDS, DOCUMENT_NUMBERS = (*KEY, "document"), ("tokens", "time_s")


def read_speed(path: str | Path | None) -> pd.DataFrame:
    """The table; empty, with its columns, where no path is given.

    UserError: not there, no table, a missing column, a cell that is no number, an `ok` row without a time, rows twice.
    """
    table = _read(path, (*WORDS, *NUMBERS))
    ok = table["status"] == "ok"
    _refuse(path, table, ~table["status"].isin(["ok", "failed"]), "status", "ok or failed")
    _refuse(path, table, table.duplicated(KEY), "text", "one row a (model, policy, slots, host, link, text)")
    for name in NUMBERS:
        numbers = pd.to_numeric(table[name], errors="coerce")
        wrong = (numbers.isna() & (table[name] != "")) | (numbers <= 0) | np.isinf(numbers)
        _refuse(path, table, wrong | (ok & numbers.isna() & (name in NEEDED)), name, "a finite number above 0")
        table[name] = numbers
    return table


def read_documents(path: str | Path | None) -> pd.DataFrame:
    """Seconds of every document, columns DOCUMENT_WORDS and DOCUMENT_NUMBERS; empty without a path.

    UserError as of `read_speed`.
    """
    table = _read(path, (*DOCUMENT_WORDS, *DOCUMENT_NUMBERS))
    _refuse(path, table, table.duplicated(list(DOCUMENT_WORDS)), "document", "one row a document")
    for name in DOCUMENT_NUMBERS:
        numbers = pd.to_numeric(table[name], errors="coerce")
        _refuse(path, table, numbers.isna() | (numbers <= 0) | np.isinf(numbers), name, "a finite number above 0")
        table[name] = numbers
    return table


def _read(path: str | Path | None, columns: tuple[str, ...]) -> pd.DataFrame:
    """A table of words with at least these columns; empty where no path is given."""
    if path is None:
        return pd.DataFrame(columns=list(columns))
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8")
    except (OSError, UnicodeDecodeError, pd.errors.EmptyDataError, pd.errors.ParserError) as exc:
        raise error(f"{path}: {type(exc).__name__} {exc}", "the table of speed", "delete it and run again") from None
    missing = [name for name in columns if name not in table]
    if missing:
        raise error(f"{path}: no column {', '.join(missing)}", "the table of speed", "delete it and run again")
    return table


def _refuse(path, table: pd.DataFrame, wrong: pd.Series, column: str, expected: str) -> None:
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise error(f"{path}:{row + 2}: {column} '{table[column].iloc[row]}'", expected, "delete it and run again")
