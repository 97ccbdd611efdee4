"""The table of experiment B as figures and the index read it: results/tables/local/experiment_b.csv."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from engine.policies import PAYING
from evals.checked_tables import read_words, refuse, to_flags, to_numbers
from evals.figures import LOSS

STATUSES = ("ok", "failed", "not run")
MIDDLE = "middle"  # the level that decides
WORDS = ("model", "arm", "miss_rule", "standin", "level_name", "instrument", "slots", "status", "reason")
LIGHT = ("light_percent", "light_percent_low", "light_percent_high")
ALWAYS = ("slots_percent", "slots_count", "experts")
OF_RESULT = ("documents", "tokens", "substituted_mass")
NUMBERS = (*ALWAYS, *OF_RESULT, "level", *LOSS, *LIGHT, "mass_ratio", "standin_rank", "difference_over_missing")
NUMBERS += ("level_of_interval",)


def read_experiment_b(path: str | Path) -> pd.DataFrame:
    """A row a (model, arm); NaN where there is no number. UserError: not there, a missing column, a wrong cell."""
    table = read_words(path, (*WORDS, *NUMBERS, "rehearsal"), "the table of experiment B")
    refuse(path, table, ~table["status"].isin(STATUSES), "status", f"one of {', '.join(STATUSES)}")
    refuse(path, table, ~table["miss_rule"].isin(PAYING), "miss_rule", f"one of {', '.join(PAYING)}")
    refuse(path, table, ~table["standin"].isin(["next_best", "random"]), "standin", "next_best or random")
    refuse(path, table, table.duplicated(["model", "arm"]), "arm", "one row an arm")
    to_flags(path, table, "rehearsal")
    ok = table["status"] == "ok"
    for name in NUMBERS:
        to_numbers(path, table, name, needed=True if name in ALWAYS else ok & (name in OF_RESULT))
    return table


def verdicts(table: pd.DataFrame) -> dict[str, str]:
    """By model, in words: heavy against light at the middle level with their masses, or why there is nothing."""
    return {model: _verdict(own) for model, own in table.groupby("model", sort=False)}


def _verdict(own: pd.DataFrame) -> str:
    middle = own[(own["level_name"] == MIDDLE) & (own["status"] == "ok")]
    decided = middle[middle["light_percent"].notna()]
    if decided.empty:
        lost = own[own["status"] != "ok"]
        return f"{lost['status'].iloc[0]}: {lost['reason'].iloc[0]}"
    row = decided.iloc[0]
    ends = f"{row['light_percent_low']:+.2f} to {row['light_percent_high']:+.2f}"
    ends = "no interval" if pd.isna(row["light_percent_low"]) else ends
    masses = " and ".join(f"{mass:.4f}" for mass in middle["substituted_mass"])
    words = f"{' against '.join(middle['miss_rule'])} at the {MIDDLE} level: {row['light_percent']:+.2f} % ({ends}), "
    return f"{words}realised masses {masses}"
