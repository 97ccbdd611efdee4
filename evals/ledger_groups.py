"""Groups of policies that a claim correlates: who belongs to them, by the columns of the sheet and by counts.

A group is a list of rows that must all be there and sound; which of them count then is decided by what they did, not
by what they are called: whether any first choice was replaced. A row that is missing, failed or inert makes the claim
`not run`: a correlation over what is left would be another claim.

    members("threshold_sweep", evidence.sweep, "s25", texts)        # NotRun
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.policies import BUNDLES
from evals.ledger_documents import cell, policy, refuse_inert
from evals.ledger_quantities import NotRun
from evals.records import Scored

Row = Mapping[str, object]

TAUS, BETAS, SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, math.inf), (None, 0.25, 0.5, 1.0), (0.1, 0.25, 0.5, 0.75)
STANDINS = ("next_best", "random")
COMMON = {"standin_weight": "own", "standin_recency": True, "eviction": "lfu_decay", "half_life_tokens": 128.0}
OPTIONAL = ("prefetch", "schedule")
NUMBERS = ("tau", "share", "beta", "half_life_tokens")


def _row(miss_rule: str, standin: str, **values) -> Row:
    return {"miss_rule": miss_rule, "standin": standin, "tau": None, "share": None, "beta": None, **COMMON, **values}


@dataclass(frozen=True)
class Group:
    """rows: what the sheet must hold. first_choice: whether its members replaced one, by their counts."""

    rows: tuple[Row, ...]
    first_choice: bool


GROUPS = {
    "first_choice_substituted_sweep": Group(
        tuple(
            row
            for standin in STANDINS
            for row in (
                _row("substitute_all", standin),
                *(_row("mass_budget", standin, share=share) for share in SHARES),
            )
        ),
        first_choice=True,
    ),
    "threshold_sweep": Group(
        tuple(_row("threshold", "next_best", tau=tau, beta=beta) for tau in TAUS for beta in BETAS),
        first_choice=False,
    ),
}


def members(name: str, sweep: Mapping[str, Scored], slots: str, texts: Sequence[str]) -> list[Scored]:
    """The policies of a group, in the order of its rows. NotRun."""
    group = GROUPS[name]
    found = [find(row, sweep) for row in group.rows]
    changed = [sum(cell(one, slots, text)["first_choices_changed"] for text in texts) > 0 for one in found]
    inside = [one for one, replaced in zip(found, changed, strict=True) if replaced == group.first_choice]
    refuse_inert(inside, slots, texts)
    return inside


def by_name(name: str, quality: Mapping[str, Scored], sweep: Mapping[str, Scored]) -> Scored:
    """A policy of the sheet in the sweep, which may have its row under another id. NotRun."""
    return sweep[name] if name in sweep else find(_own_row(policy(name, quality)), sweep)


def find(row: Row, scored: Mapping[str, Scored]) -> Scored:
    """The policy whose row is this one, whatever its id. NotRun: none, or the sweep is not there."""
    if not scored:
        raise NotRun("this run has no sweep of policies")
    for one in scored.values():
        if _holds(one, row):
            return one
    words = ", ".join(f"{key} {value}" for key, value in row.items() if value is not None and key not in COMMON)
    raise NotRun(f"the sweep has no policy of {words}")


def lossy_policies(quality: Mapping[str, Scored], sweep: Mapping[str, Scored]) -> list[set[str]]:
    """All lossy policies of the sheet and the sweep of P1.2, each with its ids: two sheets may name one policy.

    The first paper's policies do not prefetch: those that do are none of them. NotRun: a bundle, or a row of the sweep,
    is missing.
    """
    for name in BUNDLES:
        policy(name, quality)
    policies = [one for one in quality.values() if one.record["policy_row"]["miss_rule"] != "fetch"]
    policies = [one for one in policies if not prefetches(one)]
    policies += [find(row, sweep) for row in GROUPS["threshold_sweep"].rows]
    ids: dict[tuple, set[str]] = {}
    for one in policies:
        row = tuple(sorted((key, str(value)) for key, value in _own_row(one).items()))
        ids.setdefault(row, set()).add(one.record["policy"])
    return list(ids.values())


def prefetches(one: Scored) -> bool:
    return one.record["policy_row"].get("prefetch") not in (None, "-")


def _holds(one: Scored, row: Row) -> bool:
    own = _own_row(one)
    return not prefetches(one) and all(own.get(key) == value for key, value in row.items())


def _own_row(one: Scored) -> Row:
    """All but the id, and the columns that records of before prefetching have not. Records write infinity as a word."""
    row = {key: value for key, value in one.record["policy_row"].items() if key not in ("id", *OPTIONAL)}
    return {key: float(value) if key in NUMBERS and value is not None else value for key, value in row.items()}
