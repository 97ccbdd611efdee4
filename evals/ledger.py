"""From the preregistered rules and what was measured to a verdict for every claim, on every model and over them.

A part (evals/preregistration.py) is computed as a quantity (evals/ledger_measures.py) and judged here by the words
of `rules` and `running` in config/preregistration.yaml: region, Holm over the parts and models of a row, the sign rule
of the running estimate, conjunction over parts, agreement over models. Whether the verdict stands, or is exploratory,
is another question (evals/standing.py).

    findings = find_row(row, rules, evidence)           # every part of a row on every model
    judged = judge(findings, rules)
    by_model = {model: conclude(judged of that model) for model in ...}
    over_models(by_model, rules)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.errors import error, nearest
from evals.ledger_evidence import Evidence
from evals.ledger_measures import known_measures, measure
from evals.ledger_quantities import NotRun, Quantity, sign_change
from evals.preregistration import Part, Preregistration, Row
from evals.stats import Interval, holm, verdict

SUPPORTED, REFUTED, OPEN, NOT_RUN = "supported", "not supported", "inconclusive", "not run"
JUDGED_ROLES = ("primary", "secondary", "condition")


@dataclass(frozen=True)
class Finding:
    """One part of a row on one model at one slot budget: its number, or the reason why there is none."""

    row: Row
    part: Part
    model: str
    slots: str
    quantity: Quantity | None = None
    interval: Interval | None = None
    p_value: float | None = None  # of the decision that the estimate points at
    p_direction: float | None = None
    sign_change: int | None = None  # documents after which, in the last half, the sign last was another
    reason: str | None = None


@dataclass(frozen=True)
class Judged:
    """A finding with its verdict. verdict and direction: one of the four words; None where the role has none."""

    finding: Finding
    p_holm: float | None = None
    verdict: str | None = None
    direction: str | None = None
    reason: str | None = None


# ---- what was found --------------------------------------------------------------------------------------------------
def find_row(
    row: Row,
    rules: Preregistration,
    evidence: Mapping[str, Evidence],
    slots: str | None = None,
    refused: Mapping[str, str] = MappingProxyType({}),
) -> list[Finding]:
    """Every part on every model of the rules and of the run. evidence: by model.

    slots: another budget than the one that decides. refused: models that their fitness gate refused, with the reason.

    UserError: a row that is not declared `not_run` has a measure that nothing here computes.
    """
    models = list(dict.fromkeys([*rules.models, *evidence]))
    return [find(row, part, model, rules, evidence, slots, refused) for model in models for part in row.parts]


def find(
    row: Row,
    part: Part,
    model: str,
    rules: Preregistration,
    evidence: Mapping[str, Evidence],
    slots: str | None = None,
    refused: Mapping[str, str] = MappingProxyType({}),
) -> Finding:
    slots, bare = slots or rules.slots, Finding(row, part, model, slots or rules.slots)
    declared = row.not_run or part.not_run
    if declared:
        return _without(bare, declared)
    if part.measure not in known_measures(part):
        raise error(
            f"row {row.id}, part {part.id}: nothing computes measure '{part.measure}'",
            "a measure of evals/ledger_measures.py, or `not_run` with a reason",
            nearest(part.measure, known_measures(part)),
        )
    if model in refused:
        return _without(bare, refused[model])
    if model not in evidence:
        return _without(bare, f"{model} was not run")
    others = evidence[model].slots_percents(slots) - {rules.slots_percent}
    if slots == rules.slots and others:
        found = f"{slots} is {min(others):g} % in this run, {rules.slots_percent:g} % in the preregistration"
        return _without(bare, found)
    try:
        quantity = measure(part, evidence[model], slots=slots, rules=rules)
    except NotRun as exc:
        return _without(bare, str(exc))
    options = rules.statistics
    no_effect = rules.measures[part.measure].no_effect
    found = quantity.interval(**options)
    return Finding(
        row,
        part,
        model,
        slots,
        quantity,
        found,
        _decision_p(quantity, found, part, options),
        None if part.direction is None else _usable(found, quantity.p_value_at(no_effect, **options)),
        sign_change(quantity, no_effect, rules.last_half),
    )


def _without(finding: Finding, reason: str) -> Finding:
    return Finding(finding.row, finding.part, finding.model, finding.slots, reason=reason)


def _usable(found: Interval, p_value: float | None) -> float | None:
    return None if found.low is None or found.high is None else p_value


def _decision_p(quantity: Quantity, found: Interval, part: Part, options: dict) -> float | None:
    """The larger p-value against the ends of the region that the decision must exclude.

    Where the measure itself ends (a correlation of one), there is nothing beyond to exclude.
    """
    if found.low is None or found.high is None:
        return None
    if part.low <= found.estimate <= part.high:
        if found.low == found.high:
            return 0.0  # no spread, and it is there
        least, most = quantity.bounds
        ends = [end for end in (part.low, part.high) if math.isfinite(end) and least < end < most]
    else:
        ends = [part.low if found.estimate < part.low else part.high]
    p_values = [quantity.p_value_at(end, **options) for end in ends]
    return None if None in p_values else max(p_values, default=0.0)


# ---- verdicts --------------------------------------------------------------------------------------------------------
def judge(findings: list[Finding], rules: Preregistration) -> list[Judged]:
    """Verdicts of one row's findings at one budget, Holm's families as the rules say."""
    families: dict[tuple, list[Finding]] = {}
    for finding in findings:
        model = "" if finding.model in rules.models else finding.model  # one family for all preregistered models
        families.setdefault((model, finding.part.role), []).append(finding)
    judged: dict[int, Judged] = {}
    for (_, role), family in families.items():
        for finding, one in zip(family, _judge_family(family, role, rules), strict=True):
            judged[id(finding)] = one
    return [judged[id(finding)] for finding in findings]


def _judge_family(family: list[Finding], role: str, rules: Preregistration) -> list[Judged]:
    if role not in JUDGED_ROLES:
        return [Judged(finding, reason=finding.reason) for finding in family]
    p_holm = _adjusted({_key(f): f.p_value for f in family})
    directed = [f for f in family if f.part.direction is not None]
    p_signs = _adjusted({_key(f): f.p_direction for f in directed})
    most = 1 - rules.statistics["level"]
    result = []
    for finding in family:
        key, part = _key(finding), finding.part
        if finding.interval is None:
            direction = None if part.direction is None else NOT_RUN
            result.append(Judged(finding, None, NOT_RUN, direction, finding.reason))
            continue
        word, reason = _word(finding, part.low, part.high, p_holm[key], most)
        direction = None
        if part.direction is not None:
            no_effect = rules.measures[part.measure].no_effect
            ends = (no_effect, math.inf) if part.direction == "higher" else (-math.inf, no_effect)
            direction, _ = _word(finding, *ends, p_signs[key], most)
        result.append(Judged(finding, p_holm[key], word, direction, reason))
    return result


def _word(finding: Finding, low: float, high: float, p_holm: float | None, most: float) -> tuple[str, str | None]:
    """The verdict and, where it is not the interval's own, why."""
    found = finding.interval
    if found.low is None or found.high is None:
        return OPEN, found.reason or "no interval"
    word = verdict(found, low, high)
    if word == OPEN:
        return OPEN, "the interval reaches over an end of the region"
    if finding.sign_change is not None:
        after = f"{finding.sign_change} of {len(finding.quantity.documents)} {finding.quantity.units}"
        return OPEN, f"the sign was another after {after}; alone it were {word}"
    if p_holm is None or p_holm > most + 1e-12:
        return OPEN, f"several comparisons (Holm); alone it were {word}"
    return word, None


def _key(finding: Finding) -> tuple[str, str]:
    return finding.model, finding.part.id


def _adjusted(p_values: dict[tuple[str, str], float | None]) -> dict[tuple[str, str], float | None]:
    return holm(p_values) if p_values else {}


def conclude(judged: list[Judged]) -> tuple[str, str | None]:
    """One row on one model, from its parts at the deciding budget: the word and why it is no other."""
    primary = [one for one in judged if one.finding.part.role == "primary"]
    for word in (REFUTED, NOT_RUN, OPEN):
        those = [one for one in primary if one.verdict == word]
        if those:
            return word, _reasons(those, len(primary))
    failed = [one for one in judged if one.finding.part.role == "condition" and one.verdict != SUPPORTED]
    if failed:
        return OPEN, f"condition {failed[0].finding.part.id} does not hold"
    return SUPPORTED, None


def _reasons(those: list[Judged], primary: int) -> str:
    """Why, said once where it is one reason for all primary parts."""
    parts: dict[str, list[str]] = {}
    for one in those:
        parts.setdefault(one.reason or str(one.verdict), []).append(one.finding.part.id)
    if len(parts) == 1 and len(those) == primary and those[0].reason:
        return those[0].reason
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in parts.items())


def over_models(by_model: dict[str, tuple[str, str | None]], rules: Preregistration) -> tuple[str, str | None]:
    """The verdict over the models of the rules: they have to agree."""
    words = {model: by_model[model] for model in rules.models}
    missing = {model: why for model, (word, why) in words.items() if word == NOT_RUN}
    if missing:
        reasons = list(dict.fromkeys(missing.values()))
        return NOT_RUN, "; ".join(str(reason) for reason in reasons)
    if len({word for word, _ in words.values()}) == 1:
        return next(iter(words.values()))[0], None
    return OPEN, "the models differ: " + ", ".join(f"{model} {word}" for model, (word, _) in words.items())
