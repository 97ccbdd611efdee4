"""Correlations of substituted mass with loss or agreement, as the claims P1.2, P1.3, P1.4 and P1.10 have them.

Each goes from a part of a claim and the evidence to a quantity (evals/ledger_statistics.py). The policies of a
correlation are those of evals/ledger_groups.py; a group with a missing or failed member is NotRun.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd

from evals import ledger_statistics
from evals.correlations import Sums
from evals.ledger_documents import differences, masses, policy, refuse_inert
from evals.ledger_evidence import Evidence
from evals.ledger_groups import lossy_policies, members
from evals.ledger_quantities import NotRun
from evals.ledger_statistics import Sampled
from evals.preregistration import Part, Preregistration
from evals.records import Scored

PROBLEMS = re.compile(r"^(\d+) problems\b")


def over_policies(part: Part, evidence: Evidence, slots: str, rules: Preregistration) -> Sampled:
    """Pearson's r over the policies of a group, of mass against loss over the baseline on the same tokens."""
    return _over_policies(part, evidence, slots, ranks=False)


def rank_over_policies(part: Part, evidence: Evidence, slots: str, rules: Preregistration) -> Sampled:
    """Spearman's rho, otherwise the same."""
    return _over_policies(part, evidence, slots, ranks=True)


def over_documents(part: Part, evidence: Evidence, slots: str, rules: Preregistration) -> Sampled:
    """Pearson's r over documents, within texts, of a policy's mass against its mean loss over the baseline."""
    one, baseline = policy(part.of, evidence.quality), policy(str(part.against), evidence.quality)
    refuse_inert([one], slots, part.texts)
    mass, loss = masses(one, slots, part.texts), differences(one, baseline, slots, part.texts)
    frame = loss[["document", "text", "stratum"]]
    frame = frame.assign(x=mass["mass_sum"] / mass["tokens"], y=loss["delta_sum"] / loss["tokens"])
    return ledger_statistics.over_documents(frame, int(loss["tokens"].sum()))


def agreement(part: Part, evidence: Evidence, slots: str, rules: Preregistration) -> Sampled:
    """Pearson's r over policies of mass against the share of positions that agree with the baseline's continuation."""
    table = evidence.agreement
    table = table[table["text"].isin(part.texts) & (table["slots"] == slots)]
    if table.empty:
        raise NotRun(f"this run has no forced agreement on {', '.join(part.texts)}")
    tables = [_problems(table, ids) for ids in lossy_policies(evidence.quality, evidence.sweep)]
    first = tables[0]
    wanted = PROBLEMS.match(part.within or "")
    if wanted and len(first) != int(wanted[1]):
        raise NotRun(f"{len(first)} problems in this run, {wanted[1]} in the preregistration")
    for own in tables:
        if not own[["document", "positions"]].equals(first[["document", "positions"]]):
            found = f"{own['policy'].iloc[0]} and {first['policy'].iloc[0]}"
            raise NotRun(f"{found} were forced on other problems, or other positions of them")
    mass = Sums(_columns(tables, "mass_sum"), _columns(tables, "events"))
    agreed = Sums(_columns(tables, "agreed"), _columns(tables, "positions"))
    topics, tokens = list(first["text"]), int(first["positions"].sum())
    return ledger_statistics.over_policies(mass, agreed, list(first["document"]), topics, tokens, units="problems")


# ---- columns of policies ---------------------------------------------------------------------------------------------
def _over_policies(part: Part, evidence: Evidence, slots: str, *, ranks: bool) -> Sampled:
    group = members(part.of, evidence.sweep, slots, part.texts)
    baseline = policy(str(part.against), evidence.sweep, " in the sweep")
    losses = [differences(one, baseline, slots, part.texts) for one in group]
    weights = [_masses_of(one, slots, part.texts, losses[0]) for one in group]
    mass = Sums(_columns(weights, "mass_sum"), _columns(weights, "tokens"))
    loss = Sums(_columns(losses, "delta_sum"), _columns(losses, "tokens"))
    names, topics, tokens = losses[0]["document"], losses[0]["stratum"], int(losses[0]["tokens"].sum())
    return ledger_statistics.over_policies(mass, loss, list(names), list(topics), tokens, ranks=ranks)


def _masses_of(one: Scored, slots: str, texts: Sequence[str], like: pd.DataFrame) -> pd.DataFrame:
    found = masses(one, slots, texts)
    if list(found["document"]) != list(like["document"]):
        raise NotRun(f"{one.record['policy']} was scored on other documents than the rest of the sweep")
    return found


def _columns(frames: Sequence[pd.DataFrame], name: str) -> np.ndarray:
    """[N, P]: documents, policies."""
    return np.column_stack([frame[name].to_numpy(np.float64) for frame in frames])


def _problems(table: pd.DataFrame, ids: set[str]) -> pd.DataFrame:
    """The problems of a policy under the first of its ids that the table has. NotRun: none, one failed, no effect."""
    own = table[table["policy"].isin(ids)]
    if own.empty:
        raise NotRun(f"no forced agreement of {' or '.join(sorted(ids))}")
    own = own[own["policy"] == own["policy"].iloc[0]]
    name, failed = own["policy"].iloc[0], own[own["status"] != "ok"]
    if len(failed):
        row = failed.iloc[0]
        raise NotRun(f"{name}, {row['text']}/{row['problem']}: {row['reason'] or row['status']}")
    if not own["substitutions"].sum():
        raise NotRun(f"{name} replaced nothing in {', '.join(own['text'].unique())}")
    own = own.assign(document=own["text"] + "/" + own["problem"], mass_sum=own["substituted_mass"] * own["events"])
    return own.sort_values("document", ignore_index=True)
