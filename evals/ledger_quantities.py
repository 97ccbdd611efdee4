"""The numbers that decide a claim: each a sum over documents divided by another, with interval and running estimate.

Every measure of the preregistration that can be computed now is `a` over `b`, summed over documents (or texts, where
nothing finer was recorded). So one rule gives its interval, the p-value at any end of a region, and the estimate after
every document. All of it goes through evals/stats.py.

    quantity = measure(part, scored, speed, slots="s25", rules=rules)      # NotRun where there is nothing to compute
    interval(quantity, **rules.statistics), p_value_at(quantity, 0.3), running(quantity)

Formulas: Cochran (1977), Sampling Techniques, ch. 6 (ratio estimator); Fieller (1954), J. R. Statist. Soc. B 16,
175-185 (the interval of a ratio as the values a test does not reject).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.optimize import brentq

from evals.preregistration import Part, Preregistration
from evals.records import Scored
from evals.stats import Interval, documents, paired_difference, paired_losses, percent_change, segments

DOUBLINGS = 60  # of the search for an end of a ratio's interval
NS_PER_S = 1e9


class NotRun(Exception):
    """There is nothing to compute: the reason."""


@dataclass(frozen=True)
class Speed:
    """The tables of evals/speed.py: by text, and by document where there is one (else empty)."""

    texts: pd.DataFrame
    documents: pd.DataFrame

    def of(self, model: str) -> Speed:
        return Speed(*(table[table["model"] == model] for table in (self.texts, self.documents)))


@dataclass(frozen=True)
class Quantity:
    """`a` over `b` by document, in the order of the running estimate.

    frame: document, stratum, a, b, size (whole numbers). scale: how a ratio R = sum(a) / sum(b) becomes a value:
    `perplexity` 100 (exp(R) - 1), `percent` 100 R, `ratio` R. In the first two b is the size; of a ratio b may be
    negative, and its interval is found by inversion. tokens: scored tokens behind it. bounds: values it cannot leave.
    units: what a row of the frame is, `documents` or `texts`.
    """

    frame: pd.DataFrame
    scale: str
    tokens: int
    bounds: tuple[float, float] = (-math.inf, math.inf)
    units: str = "documents"

    def value(self, ratio: float) -> float:
        if self.scale == "perplexity":
            return 100 * math.expm1(ratio)
        return 100 * ratio if self.scale == "percent" else ratio

    def ratio(self, value: float) -> float:
        """The inverse of `value`."""
        if self.scale == "perplexity":
            return math.log1p(value / 100)
        return value / 100 if self.scale == "percent" else value


# ---- interval, p-value, running estimate -----------------------------------------------------------------------------
def interval(quantity: Quantity, **options) -> Interval:
    """The interval in the unit of its scale (`percent` or `ratio`). options: level, replicates, seed."""
    frame = quantity.frame
    if quantity.scale == "ratio":
        found = _ratio_interval(quantity, options)
    else:
        found = paired_difference(frame["a"], frame["b"], frame["stratum"], **options)
        found = percent_change(found) if quantity.scale == "perplexity" else _times_100(found)
    ends = {name: getattr(found, name) for name in ("low", "high")}
    ends = {name: None if end is None else float(np.clip(end, *quantity.bounds)) for name, end in ends.items()}
    return replace(found, **ends, tokens=quantity.tokens)


def p_value_at(quantity: Quantity, value: float, **options) -> float | None:
    """p-value of the quantity being `value`, by the rule of its interval; None where that has none.

    Without any spread the number is what it is: zero, unless it is that value.
    """
    against = _against(quantity, value, options)
    if against.standard_error == 0 and against.p_value is not None:
        return 0.0 if against.estimate else 1.0
    return against.p_value


def running(quantity: Quantity, no_effect: float) -> tuple[np.ndarray, np.ndarray]:
    """After every document: the estimate, NaN where b sums to nothing, and the side of `no_effect` it is on.

    Returns estimates [documents] and sides [documents] in {-1, 0, 1}. The side is the sign of a - b times the ratio
    of `no_effect`, which is defined for every b.
    """
    a, b = (quantity.frame[name].to_numpy(np.float64).cumsum() for name in "ab")
    estimates = np.array([quantity.value(x / y) if y > 0 else math.nan for x, y in zip(a, b, strict=True)])
    return estimates, np.sign(a - quantity.ratio(no_effect) * b)


def first_documents(quantity: Quantity, number: int) -> Quantity:
    """The quantity over the first documents of the running order."""
    return replace(quantity, frame=quantity.frame.head(number))


def _against(quantity: Quantity, value: float, options: dict) -> Interval:
    """The difference a - ratio b, whose sign says on which side of `value` the quantity is."""
    frame = quantity.frame
    return paired_difference(
        frame["a"] - quantity.ratio(value) * frame["b"], frame["size"], frame["stratum"], **options
    )


def _ratio_interval(quantity: Quantity, options: dict) -> Interval:
    """All values that are not rejected, where the denominator is above zero beyond doubt."""
    frame = quantity.frame
    below = paired_difference(frame["b"], frame["size"], frame["stratum"], **options)
    total = float(frame["b"].sum())
    estimate = float(frame["a"].sum()) / total if total else math.nan
    centre = replace(_against(quantity, estimate if math.isfinite(estimate) else 1.0, options), unit="ratio")
    if below.low is None or below.low <= 0:
        reason = below.reason or "the denominator is not above zero beyond doubt"
        return replace(
            centre,
            estimate=estimate,
            low=None,
            high=None,
            standard_error=None,
            detectable=None,
            p_value=None,
            reason=reason,
        )
    per_token = below.estimate
    if centre.low is None or centre.low == centre.high:
        low = high = estimate if centre.low is not None else None
    else:
        low = _end(lambda q: _against(quantity, q, options).low, estimate, -1)
        high = _end(lambda q: _against(quantity, q, options).high, estimate, +1)
    return replace(
        centre,
        estimate=estimate,
        low=low,
        high=high,
        standard_error=None if centre.standard_error is None else centre.standard_error / per_token,
        detectable=None if centre.detectable is None else centre.detectable / per_token,
        p_value=p_value_at(quantity, 1.0, **options),
    )


def _end(end: Callable[[float], float | None], start: float, side: int) -> float | None:
    """Where an end of the difference's interval is zero, seen from the estimate; None where it has no end there."""
    step = max(abs(start), 1.0) / 8
    for _ in range(DOUBLINGS):
        beyond = start + side * step
        found = end(beyond)
        if found is None:
            return None
        if found * side < 0:
            return float(brentq(lambda q: end(q) or 0.0, *sorted((start, beyond)), xtol=1e-6 * max(abs(start), 1.0)))
        step *= 2
    return None


def _times_100(found: Interval) -> Interval:
    scaled = {
        name: None if getattr(found, name) is None else 100 * getattr(found, name)
        for name in ("estimate", "low", "high", "standard_error", "detectable")
    }
    return replace(found, **scaled, unit="percent")


# ---- the measures ----------------------------------------------------------------------------------------------------
def measure(part: Part, scored: dict[str, Scored], speed: Speed, *, slots: str, rules: Preregistration) -> Quantity:
    """The quantity of a part on one model. scored: by policy; speed: of that model. NotRun."""
    return MEASURES[part.measure](part, scored, speed, slots, rules)


def _perplexity_change(part: Part, scored, speed, slots: str, rules: Preregistration) -> Quantity:
    one, other = _policy(part.of, scored), _policy(part.against, scored)
    _refuse_inert((one, other), slots, part.texts)
    frame = _differences(one, other, slots, part.texts).rename(columns={"delta_sum": "a", "tokens": "b"})
    return _ordered(frame.assign(size=frame["b"]), "perplexity")


def _loss_per_substitution(part: Part, scored, speed, slots: str, rules: Preregistration) -> Quantity:
    one, other, baseline = (_policy(name, scored) for name in (part.of, part.against, rules.baseline))
    _refuse_inert((one, other), slots, part.texts)
    shares = [_total(policy, slots, part.texts, "substitutions", "demands") for policy in (one, other)]
    if not shares[1]:
        raise NotRun(f"{part.against} substituted nothing at {slots}")
    frame = _differences(one, baseline, slots, part.texts).rename(columns={"delta_sum": "a", "tokens": "size"})
    against = _differences(other, baseline, slots, part.texts)["delta_sum"]
    return _ordered(frame.assign(b=against * (shares[0] / shares[1])), "ratio")


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
        return replace(_ordered(_changes(frame, one["time_s"], other["time_s"]), "percent"), tokens=tokens)
    seconds = [pd.Series([row["token_s_mean"] * row["tokens"] for row in rows]) for rows in timed]
    return _by_text(_changes(pd.DataFrame({"document": list(part.texts)}), *seconds), tokens)


MEASURES = {
    "loss_per_substitution": _loss_per_substitution,
    "miss_rate": _share(lambda cell: cell["demands"] - cell["hits"]),
    "perplexity_change": _perplexity_change,
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
    return replace(_ordered(frame, "percent"), tokens=tokens, units="texts")


def _ordered(frame: pd.DataFrame, scale: str) -> Quantity:
    """By the sha256 of the documents' names: an order that no result can have chosen."""
    digest = [hashlib.sha256(name.encode()).hexdigest() for name in frame["document"]]
    frame = frame.iloc[np.argsort(digest, kind="stable")].reset_index(drop=True)
    return Quantity(frame, scale, int(frame["size"].sum()))
