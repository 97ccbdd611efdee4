"""A number that decides a claim: a sum over documents divided by another, with interval and running estimate.

Every measure of the preregistration that can be computed now (evals/ledger_measures.py) is `a` over `b`, summed over
documents, or over texts where nothing finer was recorded. So one rule gives its interval, the p-value at any end of a
region, and the estimate after every document. All of it goes through evals/stats.py.

    quantity = ordered(frame, "perplexity")
    interval(quantity, **rules.statistics), p_value_at(quantity, 0.3), running(quantity, no_effect=0)

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

from evals.stats import Interval, paired_difference, percent_change

NS_PER_S = 1e9
DOUBLINGS = 60  # of the search for an end of a ratio's interval


class NotRun(Exception):
    """There is nothing to compute: the reason."""


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


def ordered(frame: pd.DataFrame, scale: str) -> Quantity:
    """A quantity whose documents stand by the sha256 of their names: an order that no result can have chosen."""
    digest = [hashlib.sha256(name.encode()).hexdigest() for name in frame["document"]]
    frame = frame.iloc[np.argsort(digest, kind="stable")].reset_index(drop=True)
    return Quantity(frame, scale, int(frame["size"].sum()))


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
