"""Policies to test over: the sheet's own rows, and rows for every miss rule x stand-in x eviction x admission."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np

from engine.decision import EVICTIONS, MISS_RULES, STANDINS
from engine.policies import COLUMNS, OPTIONAL, STILL, SUBSTITUTING, Policy, load_policies, parse_row
from engine.residency import Demand, Residency

SHEET = Path(__file__).parents[2] / "config" / "policies.tsv"


def policy(**cells: str) -> Policy:
    """A row of the sheet from the cells that are not `-`."""
    unknown = set(cells) - {*COLUMNS, *OPTIONAL}
    assert not unknown, unknown
    return parse_row({column: cells.get(column, "-") for column in (*COLUMNS, *OPTIONAL)}, "tests")


def _crossed() -> dict[str, Policy]:
    own = {
        "drop": {},
        "fetch": {},
        "few_heavy": {"tau": "0.1", "share": "0.3"},
        "many_light": {"tau": "0.35", "share": "0.2"},
        "mass_budget": {"share": "0.3"},
        "substitute_all": {},
        "threshold": {"tau": "0.2"},
    }
    assert sorted(own) == sorted(MISS_RULES), "a new miss rule: say here which cells it needs"
    rows = {}
    for miss_rule, eviction, beta in product(MISS_RULES, EVICTIONS, ("-", "0.5")):
        if eviction == "belady" and miss_rule != "fetch":  # what the sheet refuses
            continue
        if beta != "-" and (miss_rule == "fetch" or eviction == STILL):
            continue
        for standin in STANDINS if miss_rule in SUBSTITUTING else ("-",):
            odd = len(rows) % 2 == 1
            cells = {"miss_rule": miss_rule, "eviction": eviction, "beta": beta, "standin": standin, **own[miss_rule]}
            if eviction == "lfu_decay":
                cells["half_life_tokens"] = "16"
            if "random" in (standin, eviction):
                cells["seed"] = str(len(rows))
            if miss_rule == "drop":
                cells["renormalise"] = "yes" if odd else "no"
            if standin != "-":
                cells |= {"standin_weight": "own" if odd else "missing", "standin_recency": "no" if odd else "yes"}
            words = [miss_rule, standin, eviction, "background" if beta != "-" else "-"]
            name = "_".join(word for word in words if word != "-")
            rows[name] = policy(id=name, **cells)
    return rows


POLICIES = {**_crossed(), **load_policies(SHEET)}
CAUSAL = {name: p for name, p in POLICIES.items() if not p.clairvoyant}  # the emulator's
TIMED = {name: p for name, p in POLICIES.items() if not p.in_place}  # simulator and engine take these
FETCHING = {name: p for name, p in TIMED.items() if p.lossless}  # every miss enters a slot
IN_PLACE = {name: p for name, p in POLICIES.items() if p.in_place}
LOSSY = {name: p for name, p in POLICIES.items() if not p.lossless}
BACKGROUND = {name: p for name, p in POLICIES.items() if p.beta is not None}


def residency(
    rule_of: Policy, experts: int, top_k: int, slots: int, *, delay: int = 1, layers: int = 1, lanes: int = 1
):
    """A cold residency of one policy."""
    rule = rule_of.rule(delay=delay)
    return Residency(layers=layers, experts=experts, top_k=top_k, slots=slots, rule=rule, lanes=lanes)


def demand_of(trace) -> Demand:
    """What one layer's trace itself asks for."""
    return Demand(np.bincount(trace.chosen.ravel(), minlength=trace.scores.shape[1])[None], len(trace.chosen))


def run(rule_of: Policy, trace, slots: int, *, delay: int = 1, demand=None):
    """One layer's trace from a cold (or warm) start: (log, moves, residency).

    Where nobody ever enters a slot it is warm by default: cold, nobody would be resident.
    """
    held = residency(rule_of, trace.scores.shape[1], trace.chosen.shape[1], slots, delay=delay)
    if rule_of.in_place and demand is None:
        demand = demand_of(trace)
    if demand is not None:
        held.warm(demand)
    log, moves = held.decide(0, 0, trace.chosen, trace.weights, trace.scores)
    return log, moves, held


def identical(a, b) -> bool:
    """Two tuples of arrays, byte by byte; records field by field, whose padding is anything."""
    return all(
        identical(*([array[name] for name in array.dtype.names] for array in (x, y)))
        if x.dtype.names
        else x.dtype == y.dtype and x.tobytes() == y.tobytes()
        for x, y in zip(a, b, strict=True)
    )


def join(logs):
    """The logs of consecutive calls as one."""
    return type(logs[0])(*(np.concatenate(parts) for parts in zip(*logs, strict=True)))
