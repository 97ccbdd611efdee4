"""The tables of speed, checked, as the ledger and the answer read them: by text and, where there is one, by document.

A row is one policy at one slot budget on one host and link, over one text or `all` of them. Times are those of the
simulator on a measured or modelled host; which of the two, `host_status` and `link_status` say. A row of the second is
one document (a cluster of evals/corpora.py) of one text, with the seconds that all its tokens took.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from evals.checked_tables import add_columns, read_words, refuse, to_flags, to_numbers

WORDS = ("model", "policy", "slots", "host", "host_status", "link", "link_status", "text", "status", "reason")
NUMBERS = ("tokens", "token_s_mean", "speedup", "speedup_low", "speedup_high")
LOSS = ("delta_percent", "delta_percent_low", "delta_percent_high")  # of the decisions that were timed; may be empty
OF_POLICY = ("eviction", "prefetch", "lossless")  # a table may be without them
NEEDED = ("tokens", "token_s_mean")  # of a row with status ok
KEY = ["model", "policy", "slots", "host", "link", "text"]
DOCUMENT_WORDS, DOCUMENT_NUMBERS = (*KEY, "document"), ("tokens", "time_s")
SMALLEST = 1e-12  # no time, and no ratio of times, is zero


def read_speed(path: str | Path | None) -> pd.DataFrame:
    """The table; empty, with its columns, where no path is given. `prefetch` is empty where nothing is prefetched.

    UserError: not there, no table, a missing column, a cell that is no number, an `ok` row without a time, rows twice.
    """
    table = _read(path, (*WORDS, *NUMBERS))
    ok = table["status"] == "ok"
    refuse(path, table, ~table["status"].isin(["ok", "failed"]), "status", "ok or failed")
    refuse(path, table, table.duplicated(KEY), "text", "one row a (model, policy, slots, host, link, text)")
    add_columns(table, (*LOSS, *OF_POLICY))
    to_flags(path, table, "lossless")
    for name in LOSS:
        to_numbers(path, table, name, needed=False)
    for name in NUMBERS:
        to_numbers(path, table, name, needed=ok & (name in NEEDED), low=SMALLEST)
    return table


def read_documents(path: str | Path | None) -> pd.DataFrame:
    """Seconds of every document, columns DOCUMENT_WORDS and DOCUMENT_NUMBERS; empty without a path.

    UserError as of `read_speed`.
    """
    table = _read(path, (*DOCUMENT_WORDS, *DOCUMENT_NUMBERS))
    refuse(path, table, table.duplicated(list(DOCUMENT_WORDS)), "document", "one row a document")
    for name in DOCUMENT_NUMBERS:
        to_numbers(path, table, name, needed=True, low=SMALLEST)
    return table


def _read(path: str | Path | None, columns: tuple[str, ...]) -> pd.DataFrame:
    """A table of words with at least these columns; empty where no path is given."""
    if path is None:
        return pd.DataFrame(columns=list(columns))
    return read_words(path, columns, "the table of speed", rows=False)
