"""Made-up evidence for the claims of the first paper: a sweep, experiment B and forced agreement of known sizes.

Losses are the baseline's plus a policy's effect, scaled by a factor of the document that all policies share, plus noise
of the policy's own; masses likewise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from engine.policies import COLUMNS
from evals.ledger_evidence import AGREEMENT_NUMBERS, AGREEMENT_WORDS
from evals.ledger_groups import GROUPS, Row
from evals.preregistration import load
from evals.records import Scored

RULES = load(Path(__file__).parents[1] / "config" / "preregistration.yaml")
TOPICS = dict(zip(RULES.texts, ("encyclopaedic", "code", "word_problems", "scripture"), strict=True))
DOCUMENTS, TOKENS = 8, 160  # a text, a document
THRESHOLDS, BUDGETS = GROUPS["threshold_sweep"].rows, GROUPS["first_choice_substituted_sweep"].rows
NAMED = {"rule_015": (0.15, None), "first_choice": (math.inf, None), "quality_first": (0.15, 0.5)}
NAMED |= {"speed_first": (math.inf, 0.5)}  # thresholds of the sheet, by tau and beta
ARMS = [f"{arm}_{level}" for arm in ("few_heavy", "many_light") for level in ("low", "middle", "high", "random")]


def name_of(row: Row) -> str:
    """Its id in the sweep."""
    return "_".join(str(row[key]) for key in ("miss_rule", "standin", "tau", "share", "beta"))


def row_of(name: str) -> Row:
    """A threshold of the sheet, which the sweep has under another id."""
    return next(row for row in THRESHOLDS if (row["tau"], row["beta"]) == NAMED[name])


def made(
    policy: str,
    mass: float,
    loss: float,
    *,
    row: Row | None = None,
    first_choices: int = 0,
    noise: float = 0.0,
    later: float = 1.0,
    documents: int = DOCUMENTS,
    tokens: int = TOKENS,
) -> Scored:
    """A record and its losses. mass: substituted an event; loss: nats a token over the baseline, times `later` after
    the first 128 tokens of a document; noise: of the policy in a document, nats a token."""
    own = np.random.default_rng([ord(letter) for letter in policy])
    cells, losses, clusters = [], {}, {}
    for number, (text, topic) in enumerate(TOPICS.items()):
        shared = np.random.default_rng(number)
        base = shared.normal(3, 1, documents * tokens)
        factor, heavier = shared.lognormal(0, 0.2, documents), shared.lognormal(0, 0.2, documents)
        after = np.where(np.arange(tokens) < 128, 1.0, later)
        wobble = noise * own.normal(size=documents)
        losses[f"{RULES.slots}/{text}"] = base + ((loss * factor)[:, None] * after + wobble[:, None]).ravel()
        clusters[text] = [[f"doc{i}", tokens] for i in range(documents)]
        cells.append(
            {
                "slots": RULES.slots,
                "slots_percent": 25,
                "text": text,
                "topic": topic,
                "status": "ok",
                "tokens": documents * tokens,
                "demands": 1000,
                "hits": 600,
                "substitutions": 100,
                "first_choices_changed": first_choices,
                "substituted_mass_by_document": list(mass * heavier),
                "lossy_without_effect": False,
                "background_inert": False,
            }
        )
    record = {"model": "reference", "policy": policy, "policy_row": as_json(row or {}, policy), "expert_bytes": 1}
    return Scored(record | {"cells": cells, "clusters": clusters}, losses)


def as_json(row: Row, policy: str) -> dict:
    """A row of the sheet as a record holds it: infinity is a word."""
    words = {key: "inf" if isinstance(value, float) and math.isinf(value) else value for key, value in row.items()}
    return dict.fromkeys(COLUMNS) | {"id": policy, "miss_rule": "fetch"} | words


def sweep(loss_of: Callable[[float, int], float], noise: float = 1e-4) -> dict[str, Scored]:
    """Baseline, thresholds and budgets, the mass rising with the row; loss_of: (mass, number in its group) -> nats."""
    found = {RULES.baseline: made(RULES.baseline, 0.0, 0.0)}
    for first_choices, rows in ((0, THRESHOLDS), (7, BUDGETS)):
        for number, row in enumerate(rows):
            mass = 0.02 + 0.01 * number + 0.2 * bool(first_choices)
            policy, effect = name_of(row), loss_of(mass, number)
            found[policy] = made(policy, mass, effect, row=row, first_choices=first_choices, noise=noise)
    return found


def quality() -> dict[str, Scored]:
    """The bundles."""
    found = {RULES.baseline: made(RULES.baseline, 0.0, 0.0)}
    found["substitute_all"] = made("substitute_all", 0.4, 0.1, row=BUDGETS[0], first_choices=7)
    return found | {name: made(name, 0.1, 0.01, row=row_of(name), noise=1e-3) for name in NAMED}


def experiment_b(heavy: float, light: float, mass: float = 1.0, noise: float = 1e-4) -> dict[str, Scored]:
    """All arms. heavy, light: nats a token at the middle level; mass: of the heavy arms over that of the light ones."""
    sizes = {"low": 0.5, "middle": 1.0, "high": 2.0, "random": 1.5}
    found = {}
    for arm in ARMS:
        kind, _, level = arm.rpartition("_")
        loss, share = (heavy, mass) if kind == "few_heavy" else (light, 1.0)
        found[arm] = made(arm, 0.05 * share * sizes[level], loss * sizes[level], row={"miss_rule": kind}, noise=noise)
    return found


def agreement(
    policies: dict[str, float], text: str, slope: float = -1.0, problems: int = 16, noise: float = 0.01
) -> pd.DataFrame:
    """Forced agreement of policies by mass: 0.95 plus slope times mass, 63 positions a problem."""
    rows, hard = [], np.random.default_rng(4).normal(0, 0.05, problems)
    for number, (policy, mass) in enumerate(policies.items()):
        rng = np.random.default_rng([number, 9])
        for i in range(problems):
            share = np.clip(0.95 + slope * mass + hard[i] + noise * rng.normal(), 0, 1)
            row = dict.fromkeys((*AGREEMENT_WORDS, *AGREEMENT_NUMBERS), "")
            row |= {"model": "reference", "policy": policy, "task": text, "text": text, "problem": f"p{i}"}
            row |= {"status": "ok", "slots": RULES.slots, "slots_percent": 25.0, "positions": 63, "events": 252}
            row |= {"agreed": round(63 * share), "substituted_mass": mass * (1 + 0.1 * rng.normal())}
            rows.append(row | {"substitutions": 50})
    return pd.DataFrame(rows)


def lossy_masses() -> dict[str, float]:
    """Mass of what is forced by id, that of the sheet where it has one: nothing is forced twice."""
    ids = {name_of(row): name_of(row) for row in THRESHOLDS} | {name_of(row_of(name)): name for name in NAMED}
    masses = {ids[name_of(row)]: 0.02 + 0.01 * number for number, row in enumerate(THRESHOLDS)}
    return {"substitute_all": 0.4} | masses
