"""Made-up evidence for the claims: a sweep, experiment B, forced agreement, recall and measured hosts of known sizes.

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
from evals.measured_tables import DOCUMENT_COLUMNS
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


# ---- prefetching -----------------------------------------------------------------------------------------------------
LAYERS, TOP_K = 4, 10
WEIGHTS = "unknown"  # what a record without provenance says its model's weights are


def recall_record(
    shares: dict[str, tuple[float, float]], noise: float = 0.01, missed: float = 0.4, spread: float = 0.05
) -> dict:
    """As predict_experts.py writes it. shares: by predictor, of the chosen experts named one and two layers ahead.

    Documents differ by `spread`, all predictors alike, and by `noise`, each for itself; of the misses, the share
    `missed` of the chosen, half as many are named.
    """
    shared = dict(zip(TOPICS, np.random.default_rng(8).normal(0, spread, (len(TOPICS), DOCUMENTS)), strict=True))
    cells, chosen = [], TOP_K * TOKENS
    for number, (predictor, of_horizon) in enumerate(shares.items()):
        own = np.random.default_rng([number, 5])
        for anchor, horizon in ((anchor, h) for anchor in range(LAYERS) for h in (1, 2) if anchor + h < LAYERS):
            for text, topic in TOPICS.items():
                share = of_horizon[horizon - 1] + shared[text] + own.normal(0, noise, DOCUMENTS)
                found = np.rint(chosen * np.clip(share, 0, 1)).astype(int)
                misses = np.full(DOCUMENTS, round(missed * chosen))
                cell = {"predictor": predictor, "anchor": anchor, "horizon": horizon, "text": text, "topic": topic}
                cell |= {"events": [TOKENS] * DOCUMENTS, "found": found.tolist(), "missed": misses.tolist()}
                cells.append(cell | {"found_missed": np.rint(misses * found / chosen / 2).astype(int).tolist()})
    record = {"model": "reference", "provenance": {"model_hash": WEIGHTS}, "top_k": TOP_K, "slots": RULES.slots}
    clusters = {text: [[f"doc{i}", TOKENS] for i in range(DOCUMENTS)] for text in TOPICS}
    return record | {"clusters": clusters, "cells": cells}


def measured_rows(
    speeds: dict[str, float], host: str = "box", link: str = "disk", noise: float = 0.002, **changes
) -> pd.DataFrame:
    """Documents of a measured host as tabulate_measured.py writes them, all exact, by policy how many times faster."""
    rows = []
    for number, (policy, faster) in enumerate({RULES.baseline: 1.0, **speeds}.items()):
        rng = np.random.default_rng([number, *host.encode(), *link.encode()])
        for text, topic, i in ((text, topic, i) for text, topic in TOPICS.items() for i in range(4)):
            row = dict.fromkeys(DOCUMENT_COLUMNS, "") | {"model": "reference", "size": "1024x1024", "rehearsal": True}
            row |= {"host": host, "fingerprint": host, "link": link, "policy": policy, "lossless": True}
            row |= {"link_status": "throttled" if link == "sdcard" else "measured", "slots": RULES.slots}
            row |= {"slots_percent": 25.0, "text": text, "topic": topic, "document": f"doc{i}", "tokens": 8}
            row |= {"timed_tokens": 7, "time_s": 7 / faster * (1 + rng.normal(0, noise)), "loss_nats": 24.0}
            row |= {"lossy_without_effect": False, "background_inert": False, "compared": 16, "identical": 16}
            rows.append(row | changes)
    return pd.DataFrame(rows)
