"""The measures of the preregistration that can be computed now, from records, losses and times.

    quantity = measure(part, scored, speed, slots="s25", rules=rules)      # NotRun where there is nothing to compute

What each means stands under `measures` in config/preregistration.yaml; a measure is a function here and a line of
MEASURES.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from engine.errors import error
from evals.ledger_engine import ENGINE, ENGINE_MEASURES
from evals.ledger_quantities import NS_PER_S, NotRun, Quantity, ordered
from evals.measured_tables import read_documents as read_measured_documents
from evals.preregistration import Part, Preregistration
from evals.records import Scored
from evals.stats import documents, paired_losses, segments


@dataclass(frozen=True)
class Speed:
    """The tables of evals/speed.py: by text, and by document where there is one (else empty).

    measured: the documents of measured hosts (evals/measured_tables.py).
    """

    texts: pd.DataFrame
    documents: pd.DataFrame
    measured: pd.DataFrame = field(default_factory=lambda: read_measured_documents(None))

    def of(self, model: str) -> Speed:
        return Speed(*(table[table["model"] == model] for table in (self.texts, self.documents, self.measured)))


# ---- the measures ----------------------------------------------------------------------------------------------------
def measure(part: Part, scored: dict[str, Scored], speed: Speed, *, slots: str, rules: Preregistration) -> Quantity:
    """The quantity of a part on one model. scored: by policy; speed: of that model. NotRun."""
    if part.instrument == ENGINE:
        return ENGINE_MEASURES[part.measure](part, speed.measured, slots, rules)
    return MEASURES[part.measure](part, scored, speed, slots, rules)


def known_measures(part: Part) -> Collection[str]:
    """The measures that something computes with the part's instrument."""
    return ENGINE_MEASURES if part.instrument == ENGINE else MEASURES


def _perplexity_change(part: Part, scored, speed, slots: str, rules: Preregistration) -> Quantity:
    if part.within is not None:
        raise NotRun(f"no run has: {part.within}")
    one, other = _policy(part.of, scored), _policy(part.against, scored)
    _refuse_inert((one, other), slots, part.texts)
    frame = _differences(one, other, slots, part.texts).rename(columns={"delta_sum": "a", "tokens": "b"})
    return ordered(frame.assign(size=frame["b"]), "perplexity")


def _loss_per_substitution(part: Part, scored, speed, slots: str, rules: Preregistration) -> Quantity:
    one, other, baseline = (_policy(name, scored) for name in (part.of, part.against, rules.baseline))
    _refuse_inert((one, other), slots, part.texts)
    shares = [_total(policy, slots, part.texts, "substitutions", "demands") for policy in (one, other)]
    if not shares[1]:
        raise NotRun(f"{part.against} substituted nothing at {slots}")
    frame = _differences(one, baseline, slots, part.texts).rename(columns={"delta_sum": "a", "tokens": "size"})
    against = _differences(other, baseline, slots, part.texts)["delta_sum"]
    return ordered(frame.assign(b=against * (shares[0] / shares[1])), "ratio")


def _share(counted: Callable[[dict], int]):
    def of_calls(part: Part, scored, speed, slots: str, rules: Preregistration) -> Quantity:
        cells = [_cell(_policy(part.of, scored), slots, text) for text in part.texts]
        frame = pd.DataFrame([{"document": c["text"], "a": counted(c), "b": c["demands"]} for c in cells])
        tokens = sum(cell["tokens"] for cell in cells)
        return replace(_by_text(frame, tokens), bounds=(0.0, 100.0))

    return of_calls


def _token_time_change(part: Part, scored, speed: Speed, slots: str, rules: Preregistration) -> Quantity:
    timed = [[_timing(speed.texts, part, policy, slots, text) for text in part.texts] for policy in _both(part)]
    for one, other in zip(*timed, strict=True):
        if one["tokens"] != other["tokens"]:
            raise NotRun(f"{part.of} and {part.against} are timed on different tokens of {one['text']}")
    tokens = int(sum(row["tokens"] for row in timed[0]))
    topics = {cell["text"]: cell["topic"] for policy in scored.values() for cell in policy.record["cells"]}
    one, other = (_document_times(speed.documents, part, policy, slots) for policy in _both(part))
    if set(part.texts) <= set(topics) & set(one["text"]) and one["document"].equals(other["document"]):
        frame = pd.DataFrame({"document": one["document"], "stratum": one["text"].map(topics)})
        return replace(ordered(_changes(frame, one["time_s"], other["time_s"]), "percent"), tokens=tokens)
    seconds = [pd.Series([row["token_s_mean"] * row["tokens"] for row in rows]) for rows in timed]
    return _by_text(_changes(pd.DataFrame({"document": list(part.texts)}), *seconds), tokens)


def _not_there(what: str):
    def nothing(part: Part, scored, speed, slots: str, rules: Preregistration) -> Quantity:
        raise NotRun(f"this run has no {what}")

    return nothing


MEASURES = {
    "agreement_correlation": _not_there("task"),
    "correlation_over_documents": _not_there("substituted mass by document"),
    "correlation_over_policies": _not_there("sweep of policies"),
    "loss_per_substitution": _loss_per_substitution,
    "mass_ratio": _not_there("experiment B"),
    "miss_rate": _share(lambda cell: cell["demands"] - cell["hits"]),
    "perplexity_change": _perplexity_change,
    "rank_correlation_over_policies": _not_there("sweep of policies"),
    "sign_changes": _not_there("correlation of P1.2 to P1.4"),
    "substituted_share": _share(lambda cell: cell["substitutions"]),
    "token_time_change": _token_time_change,
}


# ---- from records to documents ---------------------------------------------------------------------------------------
def _policy(name: str, scored: dict[str, Scored]) -> Scored:
    if name not in scored:
        raise NotRun(f"{name} was not scored")
    return scored[name]


def _cell(policy: Scored, slots: str, text: str) -> dict:
    for cell in policy.record["cells"]:
        if (cell["slots"], cell["text"]) == (slots, text):
            if cell["status"] != "ok":
                raise NotRun(f"{policy.record['policy']}, {slots}, {text}: {cell.get('reason', 'failed')}")
            return cell
    raise NotRun(f"{policy.record['policy']} has no {slots}, {text}")


def _total(policy: Scored, slots: str, texts: tuple[str, ...], count: str, of: str) -> float:
    cells = [_cell(policy, slots, text) for text in texts]
    return sum(cell[count] for cell in cells) / sum(cell[of] for cell in cells)


def _refuse_inert(policies: tuple[Scored, ...], slots: str, texts: tuple[str, ...]) -> None:
    for policy in policies:
        cells, name = [_cell(policy, slots, text) for text in texts], policy.record["policy"]
        if all(cell["lossy_without_effect"] for cell in cells):
            raise NotRun(f"{name} replaced nothing at {slots}")
        if any(cell["background_inert"] for cell in cells):
            raise NotRun(f"background admission of {name} is inert at {slots}")


def _differences(one: Scored, other: Scored, slots: str, texts: tuple[str, ...]) -> pd.DataFrame:
    """A frame document, stratum, tokens, delta_sum of two policies on the same tokens, position by position."""
    frames = []
    for text in texts:
        cell, key = _cell(one, slots, text), f"{slots}/{text}"
        _cell(other, slots, text)
        clusters = one.record["clusters"][text]
        if clusters != other.record["clusters"][text] or key not in one.losses or key not in other.losses:
            names = " and ".join(policy.record["policy"] for policy in (one, other))
            raise error(f"{key}: records and losses of {names} differ", "one run", "score both again")
        ids = np.repeat([name for name, _ in clusters], [number for _, number in clusters])  # [T]
        delta = paired_losses(one.losses[key], other.losses[key])
        frame = documents(segments(delta, ids)).rename(columns={"doc": "document"})
        frames.append(frame.assign(document=f"{text}/" + frame["document"].astype(str), stratum=cell["topic"]))
    return pd.concat(frames, ignore_index=True)


def _both(part: Part) -> tuple[str, str]:
    return part.of, str(part.against)


def _timing(speed: pd.DataFrame, part: Part, policy: str, slots: str, text: str) -> pd.Series:
    rows = _on_host(speed, part, policy, slots)
    rows = rows[rows["text"] == text]
    if rows.empty:
        raise NotRun(f"no timing of {policy}, {slots}, {text} on {part.host}, {part.link}")
    row = rows.iloc[0]
    if row["status"] != "ok":
        raise NotRun(f"no timing of {policy}, {slots}, {text} on {part.host}, {part.link}: {row['reason']}")
    return row


def _document_times(speed: pd.DataFrame, part: Part, policy: str, slots: str) -> pd.DataFrame:
    """Rows text, document (named `<text>/<document>`), time_s of a policy over the part's texts, by name."""
    rows = _on_host(speed, part, policy, slots)
    rows = rows[rows["text"].isin(part.texts)]
    return rows.assign(document=rows["text"] + "/" + rows["document"]).sort_values("document", ignore_index=True)


def _on_host(speed: pd.DataFrame, part: Part, policy: str, slots: str) -> pd.DataFrame:
    keys = {"policy": policy, "slots": slots, "host": part.host, "link": part.link}
    return speed[np.logical_and.reduce([speed[name] == wanted for name, wanted in keys.items()])]


def _changes(frame: pd.DataFrame, one_s: pd.Series, other_s: pd.Series) -> pd.DataFrame:
    """a, b in whole nanoseconds: the change, and what it is a change of."""
    one, other = (np.rint(seconds.to_numpy(np.float64) * NS_PER_S) for seconds in (one_s, other_s))
    return frame.assign(a=one - other, b=other, size=other)


def _by_text(frame: pd.DataFrame, tokens: int) -> Quantity:
    """Texts as the units: nothing finer was recorded. One stratum, as each has a topic of its own."""
    frame = frame.assign(size=frame["b"], stratum="all")
    return replace(ordered(frame, "percent"), tokens=tokens, units="texts")
