"""The tables of measured hosts, checked: measured.csv, its documents, and how far engine and simulator agree.

A row of measured.csv is one (host, link, model, size, policy, slots, text or `all`, instrument); `engine` is measured,
`simulator` modelled. What knows the future has rows of the simulator alone. All three may be without rows: then no host
was measured. workflow/scripts/tabulate_measured.py
writes them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from evals.checked_tables import add_columns, read_words, refuse, to_flags, to_numbers
from evals.figures import COLOURS, POOLED

ENGINE, SIMULATOR = "engine", "simulator"
KEY = ("host", "link", "model", "size", "policy", "slots", "text", "instrument")
PREFETCH = ("prefetch", "schedule")  # a table may be older than these columns
CELL = ("policy", "miss_rule", "eviction", "beta", *PREFETCH, "lossless")
CELL += ("slots", "slots_percent", "slots_count", "experts")
MACHINE = ("host", "fingerprint", "host_status", "profile_quick", "link", "link_kind", "link_status")
TIMES = ("token_s_mean", "token_s_median", "token_s_p95", "token_s_lowest_repeat", "token_s_highest_repeat")
TIMES += ("first_token_s", "compute_s_mean", "stall_s_mean", "stall_share", "bytes_per_token")
TIMES += ("background_bytes_per_token", "miss_rate", "ceiling_token_s", "limit_token_s")
COUNTS = ("tokens", "documents", "repeats", "events", "hits", "fetches", "substitutions", "drops", "failed_loads")
MASSES = ("substituted_mass", "dropped_mass")
SPEEDUP = ("speedup", "speedup_low", "speedup_high")
LOSS = ("delta_percent", "delta_percent_low", "delta_percent_high", "detectable_percent")
SCORED = ("rescored_events", "rescored_differences", "largest_loss_difference")
MODEL = ("model", "size", "rehearsal", "expert_bytes", "width", "expert_width", "dtype")
COLUMNS = (*MODEL, *CELL, *MACHINE, "text", "topic", "instrument", *COUNTS, *TIMES, *MASSES, *SPEEDUP, *LOSS, *SCORED)
COLUMNS += ("other_cores", "null_s", "level", "status", "reason")
DOCUMENT_COLUMNS = ("model", "size", "rehearsal", "host", "fingerprint", "link", "link_status", "policy", "lossless")
DOCUMENT_COLUMNS += ("slots", "slots_percent", "text", "topic", "document", "tokens", "timed_tokens", "time_s")
DOCUMENT_COLUMNS += ("loss_nats", "lossy_without_effect", "background_inert", "compared", "identical")
BOUNDS = ("stall_s", "link_bound_s", "stall_over_link", "token_bound_s", "token_over_bound")
RATIOS = ("median_ratio", "p95_ratio")  # simulator over engine
ERROR_COLUMNS = ("model", "size", "host", "profile_quick", "link", "link_status", "slots", "policy", "tokens")
ERROR_COLUMNS += ("repeats", "engine_median_s", "simulator_median_s", "median_ratio", "engine_p95_s", "simulator_p95_s")
ERROR_COLUMNS += ("p95_ratio", *BOUNDS, "reason")
STATUSES = {ENGINE: ("ok", "failed"), SIMULATOR: ("ok", "absent")}
NEEDED = (*TIMES[:3], "compute_s_mean", "stall_s_mean", "tokens", "repeats")


def read_measured(path: str | Path | None) -> pd.DataFrame:
    """measured.csv: flags as booleans, absent numbers NaN; `label` is the model with its size, `prefetch` and
    `schedule` are empty where nothing is prefetched. Empty without a path.

    UserError: not there, no table, a missing column, a cell that is no number, an `ok` row without a time, rows twice.
    """
    if path is None:
        return pd.DataFrame(columns=[*COLUMNS, "label", "effect"])
    needed = [name for name in COLUMNS if name not in PREFETCH]
    table = read_words(path, needed, "the table of measured hosts", rows=False)
    add_columns(table, PREFETCH)
    ok = table["status"] == "ok"
    for instrument, statuses in STATUSES.items():
        wrong = (table["instrument"] == instrument) & ~table["status"].isin(statuses)
        refuse(path, table, wrong, "status", f"one of {', '.join(statuses)} for the {instrument}")
    refuse(path, table, ~table["instrument"].isin(STATUSES), "instrument", f"one of {', '.join(STATUSES)}")
    refuse(path, table, ~table["miss_rule"].isin(COLOURS), "miss_rule", f"one of {', '.join(COLOURS)}")
    refuse(path, table, table.duplicated(list(KEY)), "text", "one row a cell")
    for name in ("lossless", "rehearsal", "profile_quick"):
        to_flags(path, table, name)
    for name in (*TIMES, *COUNTS, *MASSES, *SPEEDUP, *SCORED, "slots_percent", "slots_count", "experts"):
        to_numbers(path, table, name, needed=ok & (name in NEEDED), low=0.0)
    for name in (*LOSS, "level", "expert_bytes", "other_cores"):
        to_numbers(path, table, name, needed=False)
    own = table["size"] == "own"
    table["label"] = table["model"] + np.where(own, ", own size", ", " + table["size"])
    table["effect"] = table["lossless"] | (table["substitutions"].fillna(1) + table["drops"].fillna(1) > 0)
    return table


def read_documents(path: str | Path | None) -> pd.DataFrame:
    """Seconds and losses of every document, by the engine. Empty without a path. UserError as of `read_measured`.

    identical: of `compared` tokens, all repeats that the baseline has too, those that came to the same bit by bit.
    """
    if path is None:
        return pd.DataFrame(columns=list(DOCUMENT_COLUMNS))
    table = read_words(path, DOCUMENT_COLUMNS, "the documents of measured hosts", rows=False)
    key = ["model", "size", "host", "link", "policy", "slots", "text", "document"]
    refuse(path, table, table.duplicated(key), "document", "one row a document")
    for name in ("lossless", "rehearsal", "lossy_without_effect", "background_inert"):
        to_flags(path, table, name)
    for name in ("tokens", "timed_tokens", "time_s", "slots_percent"):
        to_numbers(path, table, name, needed=True, low=1e-12)
    for name in ("compared", "identical"):
        to_numbers(path, table, name, needed=True, low=0)
    to_numbers(path, table, "loss_nats", needed=False)
    return table


def read_errors(path: str | Path | None) -> pd.DataFrame:
    """engine_simulator.csv. Empty without a path. UserError as of `read_measured`."""
    if path is None:
        return pd.DataFrame(columns=list(ERROR_COLUMNS))
    table = read_words(path, ERROR_COLUMNS, "the table of engine and simulator", rows=False)
    to_flags(path, table, "profile_quick")
    numbers = [name for name in ERROR_COLUMNS if name.endswith(("_s", "_ratio", "_link", "_bound"))]
    for name in (*numbers, "tokens", "repeats"):
        to_numbers(path, table, name, needed=False, low=0.0)
    return table


def pooled(table: pd.DataFrame, instrument: str = ENGINE) -> pd.DataFrame:
    """Rows over all texts that have a result."""
    return table[(table["text"] == POOLED) & (table["instrument"] == instrument) & (table["status"] == "ok")]


def worst(errors: pd.DataFrame, column: str) -> pd.Series | None:
    """The row whose ratio is furthest from 1, by the factor; None where none has one."""
    ratios = errors[column].dropna()
    return errors.loc[np.abs(np.log(ratios)).idxmax()] if len(ratios) else None
