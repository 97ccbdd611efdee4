"""The measures of the preregistration that can be computed now: from a part of a claim and the evidence to a quantity.

    quantity = measure(part, evidence, slots="s25", rules=rules)      # NotRun where there is nothing to compute

What each means stands under `measures` in config/preregistration.yaml; a measure is a function here, or in
evals/ledger_correlations.py or evals/ledger_recall.py, and a line of MEASURES.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import pandas as pd

from engine.policies import PAYING
from evals import ledger_correlations, ledger_recall
from evals.ledger_documents import cell, differences, first_and_later, masses, policy, refuse_inert, share
from evals.ledger_engine import ENGINE, ENGINE_MEASURES, PEERS
from evals.ledger_evidence import Evidence
from evals.ledger_groups import by_name
from evals.ledger_quantities import NotRun, Quantity, Ratio, ratio, sign_change
from evals.ledger_statistics import Counted, change_after
from evals.ledger_times import by_text, token_time_change
from evals.preregistration import Part, Preregistration
from evals.records import Scored

AFTER_CHANGE = re.compile(r"the first (\d+) tokens after a change of topic\b")
CUT = re.compile(r"cut to (?:its|their) first (\d+) tokens")
CORRELATED = ("P1.2", "P1.3", "P1.4")  # rows that P1.11 counts


def measure(part: Part, evidence: Evidence, *, slots: str, rules: Preregistration) -> Quantity:
    """The quantity of a part on one model. NotRun."""
    if part.instrument in (ENGINE, PEERS):
        measured = evidence.speed.measured if part.instrument == ENGINE else evidence.speed.peers
        return ENGINE_MEASURES[part.measure](part, measured, slots, rules)
    return MEASURES[part.measure](part, evidence, slots, rules)


def known_measures(part: Part) -> Collection[str]:
    """The measures that something computes with the part's instrument."""
    return ENGINE_MEASURES if part.instrument in (ENGINE, PEERS) else MEASURES


# ---- losses ----------------------------------------------------------------------------------------------------------
def _perplexity_change(part: Part, evidence: Evidence, slots: str, rules: Preregistration) -> Quantity:
    one, other = _compared(part, evidence, slots)
    after = AFTER_CHANGE.search(part.within or "")
    if after:
        return change_after(first_and_later(one, other, slots, part.texts, int(after[1])))
    if part.role == "secondary" and {arm.record["policy_row"]["miss_rule"] for arm in (one, other)} == set(PAYING):
        _refuse_unequal_masses(one, other, slots, rules)
    frame = differences(one, other, slots, part.texts).rename(columns={"delta_sum": "a", "tokens": "b"})
    return ratio(frame.assign(size=frame["b"]), "perplexity")


def _compared(part: Part, evidence: Evidence, slots: str) -> tuple[Scored, Scored]:
    """The two runs of a part: of whole texts, unless `within` names others. NotRun: missing, inert, another cut."""
    names, within = (part.of, str(part.against)), part.within or ""
    if not within:
        one, other = (policy(name, evidence.quality) for name in names)
    elif AFTER_CHANGE.search(within):
        if not evidence.sweep:
            raise NotRun("this run has no sweep, and so no stream with changes of topic")
        one, other = (by_name(name, evidence.quality, evidence.sweep) for name in names)
    elif within.startswith("documents cut to"):
        one, other = (policy(name, _experiment_b(evidence)) for name in names)
    else:
        raise NotRun(f"no run has: {within}")
    cut, lengths = CUT.search(within), [n for text in part.texts for _, n in one.record["clusters"].get(text, ())]
    if cut and max(lengths, default=0) > int(cut[1]):
        raise NotRun(f"documents of {max(lengths)} tokens in this run, cut to {cut[1]} in the preregistration")
    refuse_inert((one, other), slots, part.texts)
    return one, other


def _refuse_unequal_masses(one: Scored, other: Scored, slots: str, rules: Preregistration) -> None:
    """What the condition `equal_mass` is for the primary comparison of experiment B, for the secondary ones."""
    (equal,) = (part for part in rules.rows["P1.5"].parts if part.role == "condition")
    heavy, light = (masses(arm, slots, rules.texts)["mass_sum"].sum() for arm in (one, other))
    if not equal.low <= heavy / light <= equal.high:
        raise NotRun(f"realised masses are {heavy / light:.3f} to 1, beyond {equal.low:g} to {equal.high:g}")


def _experiment_b(evidence: Evidence) -> Mapping[str, Scored]:
    if evidence.pilot is None:
        raise NotRun("this run has no experiment B")
    if not evidence.pilot["go"]:
        raise NotRun(f"the pilot of experiment B stopped it: {evidence.pilot.get('reason', 'without a reason')}")
    return evidence.experiment_b


def _loss_per_substitution(part: Part, evidence: Evidence, slots: str, rules: Preregistration) -> Ratio:
    one, other, baseline = (policy(str(name), evidence.quality) for name in (part.of, part.against, rules.baseline))
    refuse_inert((one, other), slots, part.texts)
    shares = [share(scored, slots, part.texts, "substitutions", "demands") for scored in (one, other)]
    if not shares[1]:
        raise NotRun(f"{part.against} substituted nothing at {slots}")
    frame = differences(one, baseline, slots, part.texts).rename(columns={"delta_sum": "a", "tokens": "size"})
    against = differences(other, baseline, slots, part.texts)["delta_sum"]
    return ratio(frame.assign(b=against * (shares[0] / shares[1])), "ratio")


# ---- counts and masses -----------------------------------------------------------------------------------------------
def _share(counted: Callable[[dict], int]):
    def of_calls(part: Part, evidence: Evidence, slots: str, rules: Preregistration) -> Ratio:
        cells = [cell(policy(part.of, evidence.quality), slots, text) for text in part.texts]
        frame = pd.DataFrame([{"document": c["text"], "a": counted(c), "b": c["demands"]} for c in cells])
        tokens = sum(one["tokens"] for one in cells)
        return replace(by_text(frame, tokens), bounds=(0.0, 100.0))

    return of_calls


def _mass_ratio(part: Part, evidence: Evidence, slots: str, rules: Preregistration) -> Ratio:
    frame, against = (masses(arm, slots, part.texts) for arm in _compared(part, evidence, slots))
    if not frame[["document", "tokens"]].equals(against[["document", "tokens"]]):
        raise NotRun(f"{part.of} and {part.against} were scored on other documents")
    frame = frame.rename(columns={"mass_sum": "a"}).assign(b=against["mass_sum"], size=frame["tokens"])
    return ratio(frame, "ratio")


def _token_time_change(part: Part, evidence: Evidence, slots: str, rules: Preregistration) -> Ratio:
    refuse_inert(tuple(policy(str(name), evidence.quality) for name in (part.of, part.against)), slots, part.texts)
    return token_time_change(part, evidence.quality, evidence.speed, slots)


# ---- over other claims -----------------------------------------------------------------------------------------------
def _sign_changes(part: Part, evidence: Evidence, slots: str, rules: Preregistration) -> Counted:
    """Of the primary correlations of P1.2 to P1.4 on this model; all of them, or NotRun."""
    parts = {f"{row}/{one.id}": one for row in CORRELATED for one in rules.rows[row].parts if one.role == "primary"}
    quantities = {name: measure(one, evidence, slots=slots, rules=rules) for name, one in parts.items()}
    changed = [
        sign_change(quantity, rules.measures[parts[name].measure].no_effect, rules.last_half) is not None
        for name, quantity in quantities.items()
    ]
    tokens = max(quantity.tokens for quantity in quantities.values())
    return Counted(list(quantities), float(sum(changed)), tokens, "correlations")


# ---- counted from shapes ---------------------------------------------------------------------------------------------
def _parameters(part: Part, evidence: Evidence, slots: str, rules: Preregistration) -> Counted:
    """In millions, of the model that the part describes."""
    from engine.predictors import parameters  # with torch: nothing else here needs it

    if slots != rules.slots:
        raise NotRun("parameters do not depend on the budget")
    return Counted(["shapes"], parameters(part.of, **part.sizes) / 1e6, 0, "shapes")


MEASURES = {
    "agreement_correlation": ledger_correlations.agreement,
    "correlation_over_documents": ledger_correlations.over_documents,
    "correlation_over_policies": ledger_correlations.over_policies,
    "loss_per_substitution": _loss_per_substitution,
    "mass_ratio": _mass_ratio,
    "miss_rate": _share(lambda cell: cell["demands"] - cell["hits"]),
    "parameters": _parameters,
    "perplexity_change": _perplexity_change,
    "recall": ledger_recall.recall,
    "recall_difference": ledger_recall.recall_difference,
    "rank_correlation_over_policies": ledger_correlations.rank_over_policies,
    "sign_changes": _sign_changes,
    "substituted_share": _share(lambda cell: cell["substitutions"]),
    "token_time_change": _token_time_change,
}
