"""A policy is one row of config/policies.tsv; here the row is read, checked and turned into the decision's numbers.

Adding a policy that combines known parts is one row. A new part is one function in engine/decision.py, one line in its
dict there, and the row. Every column says what it needs: a value that a rule does not read must be `-`, so that two
rows that differ in one column differ in one thing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engine.decision import EVICTIONS, MISS_RULES, STANDINS, Rule
from engine.errors import error, nearest
from engine.sheets import ID, read_sheet

COLUMNS = (
    "id",
    "miss_rule",
    "tau",
    "share",
    "renormalise",
    "standin",
    "standin_weight",
    "standin_recency",
    "eviction",
    "half_life_tokens",
    "beta",
    "seed",
)
OPTIONAL = ("prefetch", "schedule")  # columns that a sheet may leave out: `-` in every row
PREFETCH = ("gate_replay", "markov", "mlp", "oracle", "random", "spec_prefetch")  # predictors (engine/predictors.py)
SCHEDULES = ("always", "pieces", "window")  # engine/scheduler.py
STANDIN_WEIGHTS = ("missing", "own")
# miss rules that can call for a stand-in; of these, those that read tau, and those that read share
SUBSTITUTING = ("few_heavy", "many_light", "mass_budget", "substitute_all", "threshold")
PAYING = ("few_heavy", "many_light")  # from an account that every event adds `share` to
STILL = "frozen"  # the eviction under which nobody leaves or enters; a miss that is left is computed where it lies
MOVING = tuple(name for name in EVICTIONS if name != STILL)
BASELINE = "fetch_lfu_decay"  # the one denominator of every loss and speedup
BUNDLES = (BASELINE, "substitute_all", "rule_015", "first_choice", "quality_first", "speed_first")  # of the first paper


@dataclass(frozen=True)
class Policy:
    """One row of the sheet. Units: tau, share and beta are shares of an event's gate weight; half-life in tokens."""

    id: str
    miss_rule: str
    tau: float | None
    share: float | None
    renormalise: bool | None
    standin: str | None
    standin_weight: str | None
    standin_recency: bool | None
    eviction: str
    half_life_tokens: float | None
    beta: float | None
    seed: int | None
    prefetch: str | None = None
    schedule: str | None = None

    @property
    def lossless(self) -> bool:
        """The model's own experts run with the model's own weights, whatever is resident."""
        return self.miss_rule == "fetch"

    @property
    def in_place(self) -> bool:
        """Misses are computed where they lie. No instrument but the emulator knows how long that takes."""
        return self.eviction == STILL

    @property
    def clairvoyant(self) -> bool:
        """It needs the whole trace in advance, so it cannot generate."""
        return self.eviction == "belady" or self.prefetch == "oracle"

    def rule(self, *, sigmoid: bool = False, delay: int = 1) -> Rule:
        """As the decision reads it. sigmoid: the model's score rule; delay: 1 is `next_step`, 0 told from outside."""
        return Rule(
            miss=MISS_RULES[self.miss_rule],
            tau=math.inf if self.tau is None else float(np.float32(self.tau)),  # decisions are float32
            share=self.share or 0.0,
            standin=STANDINS[self.standin or "next_best"],
            eviction=EVICTIONS[self.eviction],
            growth=2.0 ** (1.0 / self.half_life_tokens) if self.half_life_tokens else 1.0,
            beta=math.inf if self.beta is None else self.beta,
            delay=delay,
            own_weights=self.standin_weight == "own",
            sigmoid=sigmoid,
            renormalise=bool(self.renormalise),
            standin_recency=bool(self.standin_recency),
            seed=self.seed or 0,
        )


def load_policies(path: str | Path) -> dict[str, Policy]:
    """The sheet as a dict by id, in the sheet's order. UserError names file, row and value."""
    return read_sheet(path, COLUMNS, "the sheet of policies", parse_row, OPTIONAL)


def distinct(*sheets: Mapping[str, Policy]) -> dict[str, Policy]:
    """Lossy policies of several sheets by id, prefetching ones left out; of rows that differ in their id, the first."""
    found: dict[Policy, Policy] = {}
    for policy in (policy for sheet in sheets for policy in sheet.values()):
        if policy.lossless or policy.prefetch:
            continue
        found.setdefault(replace(policy, id=""), policy)
    named = {policy.id: policy for policy in found.values()}
    if len(named) < len(found):
        twice = next(policy for policy in found.values() if named[policy.id] != policy)
        raise error(f"two policies '{twice.id}' that differ", "one row an id over all sheets", "rename one")
    return named


def find_policy(policies: dict[str, Policy], name: str) -> Policy:
    if name not in policies:
        raise error(f"policy '{name}'", "an id of the sheet of policies", nearest(name, policies))
    return policies[name]


# ---- one row --------------------------------------------------------------------------------------------------------
def parse_row(row: dict[str, str], where: str) -> Policy:
    """Check one row, given as strings. `where` opens every message, e.g. `config/policies.tsv:4`."""
    row = dict.fromkeys(OPTIONAL, "-") | row
    if not ID.fullmatch(row["id"]):
        raise error(f"{where}: id '{row['id']}'", "letters, digits, '_' or '-'", "ids become file names: rename it")
    miss_rule = _choice(row, "miss_rule", MISS_RULES, where)
    eviction = _choice(row, "eviction", EVICTIONS, where)
    substitutes = miss_rule in SUBSTITUTING
    random = row["standin"] == "random" or eviction == "random"
    policy = Policy(
        id=row["id"],
        miss_rule=miss_rule,
        tau=_number(
            row,
            "tau",
            where,
            miss_rule in ("threshold", *PAYING),
            f"miss_rule {miss_rule}",
            most=1.0 if miss_rule in PAYING else math.inf,
        ),
        share=_number(row, "share", where, miss_rule in ("mass_budget", *PAYING), f"miss_rule {miss_rule}", 1.0),
        renormalise=_flag(row, "renormalise", where, miss_rule == "drop", f"miss_rule {miss_rule}"),
        standin=_word(row, "standin", STANDINS, where, substitutes, f"miss_rule {miss_rule}"),
        standin_weight=_word(row, "standin_weight", STANDIN_WEIGHTS, where, substitutes, f"miss_rule {miss_rule}"),
        standin_recency=_flag(row, "standin_recency", where, substitutes, f"miss_rule {miss_rule}"),
        eviction=eviction,
        half_life_tokens=_number(
            row,
            "half_life_tokens",
            where,
            eviction == "lfu_decay",
            f"eviction {eviction}",
            least=1.0,
            most=1e9,
        ),
        beta=None
        if row["beta"] == "-"
        else _number(row, "beta", where, miss_rule != "fetch", "miss_rule fetch, where nothing goes missing,"),
        seed=_seed(row, where, random),
        prefetch=None if row["prefetch"] == "-" else _choice(row, "prefetch", PREFETCH, where),
        schedule=_word(row, "schedule", SCHEDULES, where, row["prefetch"] != "-", "prefetch '-'"),
    )
    if policy.prefetch and (policy.eviction == "belady" or policy.in_place):
        raise error(
            f"{where}: prefetch {policy.prefetch} with eviction {policy.eviction}",
            "an eviction that does not need the future, and lets experts in",
            "write '-', or choose another eviction",
        )
    if policy.eviction == "belady" and not policy.lossless:
        raise error(
            f"{where}: eviction belady with miss_rule {miss_rule}",
            "miss_rule fetch (only then is the future known)",
            "choose another eviction",
        )
    if policy.in_place and policy.beta is not None:
        raise error(
            f"{where}: beta '{row['beta']}' with eviction {STILL}",
            "'-', as nobody enters a slot",
            "write '-', or choose another eviction",
        )
    return policy


def refuse_in_place(policy: Policy, instrument: str) -> None:
    """UserError where a policy computes misses where they lie: of an instrument that must know the time it takes."""
    if policy.in_place:
        raise error(
            f"policy '{policy.id}' (eviction {policy.eviction}) in the {instrument}",
            "a policy that fetches (how long computing in place takes is not known)",
            "run it in the emulator",
        )


def as_row(policy: Policy) -> dict[str, str]:
    """The cells of a policy's row, of the optional ones those that say something: `parse_row` makes the policy anew."""
    words = {None: "-", True: "yes", False: "no"}
    said = [column for column in OPTIONAL if getattr(policy, column) is not None]
    cells = {column: getattr(policy, column) for column in (*COLUMNS, *said)}
    return {name: words[cell] if cell is None or isinstance(cell, bool) else str(cell) for name, cell in cells.items()}


def _choice(row, column, known, where):
    if row[column] not in known:
        raise error(f"{where}: {column} '{row[column]}'", f"a known {column}", nearest(row[column], known))
    return row[column]


def _unread(row, column, where, reader):
    """The cell of a column that this row's rule does not read must be empty."""
    if row[column] != "-":
        raise error(f"{where}: {column} '{row[column]}' but {reader} does not read it", "'-'", "write '-'")


def _word(row, column, known, where, read, reader):
    if not read:
        _unread(row, column, where, reader)
        return None
    return _choice(row, column, known, where)


def _flag(row, column, where, read, reader):
    if not read:
        _unread(row, column, where, reader)
        return None
    if row[column] not in ("yes", "no"):
        raise error(f"{where}: {column} '{row[column]}'", "yes or no", "write one of them")
    return row[column] == "yes"


def _number(row, column, where, read, reader, most=math.inf, least=0.0):
    """A number in (least, most]; `least` itself is allowed where it is positive. NaN is refused."""
    if not read:
        _unread(row, column, where, reader)
        return None
    try:
        value = float(row[column])
    except ValueError:
        value = math.nan
    if not (least < value <= most or (least > 0 and value == least)):
        interval = f"a number in {'[' if least > 0 else '('}{least:g}, {most:g}]"
        raise error(f"{where}: {column} '{row[column]}'", interval, "mend the cell")
    return value


def _seed(row, where, read):
    if not read:
        _unread(row, "seed", where, "a row without a random part")
        return None
    if not re.fullmatch("[0-9]{1,18}", row["seed"]):  # 18 digits fit 63 bits
        raise error(f"{where}: seed '{row['seed']}'", "a whole number from 0, of at most 18 digits", "mend the cell")
    return int(row["seed"])
