"""The tables behind the figures of speed, checked: times a token (speed.csv) and misses by slots (curves.csv).

A row of the first is one (model, policy, slots, host, link, text), of the second one (model, eviction, slots, text)
with every miss fetched. `all` is the text of the rows over all texts; only those are drawn.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from engine.policies import MOVING, PREFETCH, SCHEDULES
from evals.checked_tables import add_columns, need_columns, read_words, refuse, to_flags, to_numbers
from evals.figures import COLOURS, LOSS, MARKERS, POOLED, SIZES

LOSS_INTERVAL, SPEEDUP = LOSS[:3], ("speedup", "speedup_low", "speedup_high")
KEY = ["model", "policy", "slots", "host", "link", "text"]
WORDS = (*KEY, "miss_rule", "eviction", "host_status", "link_kind", "link_status", "instrument", "status")
OPTIONAL_WORDS = ("reason", "dtype", "prefetch", "schedule")  # a table may be older than a column
TIMES = ("token_s_mean", "token_s_p95", "compute_s_mean", "stall_s_mean")  # of every row with a result
AHEAD = ("prefetched_per_token", "taken_per_token")  # records, of policies that prefetch
NOT_ALWAYS = ("limit_token_s", "documents", "expert_bytes", "delay_tokens", "loss_tokens", "level", *AHEAD)
SLACK = 1e-6  # numbers are written with eight digits
KNOWN = {
    "miss_rule": COLOURS,
    "instrument": MARKERS,
    "host_status": ("measured", "modelled"),
    "link_kind": ("disk", "memory", "pcie"),
    "link_status": ("measured", "throttled", "modelled"),
    "status": ("ok", "failed"),
    "prefetch": ("", *PREFETCH),
    "schedule": ("", *SCHEDULES),
}


def read_speed(path: str | Path) -> pd.DataFrame:
    """speed.csv: flags as booleans, absent numbers NaN; exact policies lose 0; column `effect` is False where a lossy
    policy changed nothing; `prefetch` and `schedule` are empty where nothing is prefetched.

    UserError: not there, not a table, no rows, a missing column, a cell that is no number, an `ok` row without a time,
    an interval that does not hold its estimate.
    """
    what = "the table of speed"
    table = read_words(path, (*WORDS, *SIZES, "rehearsal"), what)
    ok = table["status"] == "ok"
    if ok.any():
        need_columns(path, table, (*TIMES, *SPEEDUP, *LOSS_INTERVAL, "tokens", "lossless", "limit_token_s"), what)
    numbers = (*TIMES, *NOT_ALWAYS, "tokens", *SPEEDUP, *LOSS_INTERVAL)
    add_columns(table, (*numbers, *OPTIONAL_WORDS, "lossless"))
    for name, values in KNOWN.items():
        refuse(path, table, ~table[name].isin(values), name, f"one of {', '.join(values)}")
    refuse(path, table, table.duplicated(KEY), "text", "one row a cell")
    for name in ("lossless", "rehearsal"):
        to_flags(path, table, name)
    for name in (*SIZES, *numbers):
        low = -np.inf if name in LOSS_INTERVAL else 0.0
        needed = ok & (name in (*TIMES, "tokens")) | (name in SIZES)
        to_numbers(path, table, name, needed=needed, low=low)
    one_alone = (table["prefetch"] == "") != (table["schedule"] == "")
    refuse(path, table, one_alone, "schedule", "one where something is prefetched, else none")
    taken, brought = (table[name] for name in AHEAD[::-1])
    refuse(path, table, taken > brought * (1 + SLACK), AHEAD[1], f"at most what was brought, column {AHEAD[0]}")
    _refuse_interval(path, table, SPEEDUP)
    _refuse_interval(path, table, LOSS_INTERVAL)
    table["lossless"] |= table["miss_rule"] == "fetch"  # cells without a result have no flags
    table.loc[table["lossless"], list(LOSS_INTERVAL)] = 0.0  # the model's own experts always run
    table["effect"] = table["lossless"] | (table["delta_percent"] != 0)
    return table


def _refuse_interval(path: str | Path, table: pd.DataFrame, columns: tuple[str, ...]) -> None:
    estimate, low, high = (table[name] for name in columns)
    slack = SLACK * (1 + estimate.abs())
    refuse(path, table, low > estimate + slack, columns[1], f"at most the estimate, column {columns[0]}")
    refuse(path, table, high < estimate - slack, columns[2], f"at least the estimate, column {columns[0]}")


def read_curves(path: str | Path) -> pd.DataFrame:
    """curves.csv, checked: misses as numbers between 0 and 1.

    UserError: not there, not a table, no rows, a missing column, an eviction or a number that cannot be, no rows over
    all texts.
    """
    what = "the table of misses by slots"
    table = read_words(path, ("model", "eviction", "text", "tokens", "miss_rate", "rehearsal", *SIZES), what)
    refuse(path, table, ~table["eviction"].isin(MOVING), "eviction", f"one of {', '.join(MOVING)}")
    refuse(path, table, table.duplicated(["model", "eviction", "slots_count", "text"]), "text", "one row a cell")
    single = table["text"] != POOLED
    refuse(path, table, single & single.all(), "text", f"rows of the text {POOLED}")
    to_flags(path, table, "rehearsal")
    for name in (*SIZES, "tokens", "miss_rate"):
        to_numbers(path, table, name, needed=True, low=0.0)
    refuse(path, table, table["miss_rate"] > 1, "miss_rate", "a share, at most 1")
    refuse(path, table, table["slots_percent"] <= 0, "slots_percent", "above 0")
    return table
