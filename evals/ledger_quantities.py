"""A number that decides a claim: what the ledger asks of it, and the commonest kind, one sum over documents by another.

Whatever its kind, a quantity has an interval, a p-value at any end of a region by the rule of that interval, and an
estimate after every document. Kinds: `Ratio` here; correlations and other statistics of documents, and plain counts,
in evals/ledger_statistics.py. Measures (evals/ledger_measures.py) make them.

    quantity = ratio(frame, "perplexity")
    quantity.interval(**rules.statistics), quantity.p_value_at(0.3, **rules.statistics), quantity.running(no_effect=0)

Formulas: Cochran (1977), Sampling Techniques, ch. 6 (ratio estimator); Fieller (1954), J. R. Statist. Soc. B 16,
175-185 (the interval of a ratio as the values a test does not reject).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import pandas as pd
from scipy.optimize import brentq

from evals.bootstrap import ROUNDING
from evals.stats import Interval, paired_difference, percent_change

NS_PER_S = 1e9
DOUBLINGS = 60  # of the search for an end of a ratio's interval


class NotRun(Exception):
    """There is nothing to compute: the reason."""


class Quantity(Protocol):
    """documents: names, in the order of the running estimate. tokens: scored ones behind it. units: what a document is.

    bounds: values it cannot leave. searched: its interval takes a search. beside: numbers shown with it, by column.
    options: level, replicates, seed.
    """

    tokens: int
    units: str
    bounds: tuple[float, float]
    beside: Mapping[str, float]

    @property
    def documents(self) -> Sequence[str]: ...

    @property
    def searched(self) -> bool: ...

    def interval(self, **options) -> Interval: ...

    def p_value_at(self, value: float, **options) -> float | None:
        """p-value of the quantity being `value`, by the rule of its interval; None where that has none."""

    def running(self, no_effect: float) -> tuple[np.ndarray, np.ndarray]:
        """After every document: the estimate, NaN where there is none, and its side of `no_effect`, in {-1, 0, 1}."""

    def first(self, number: int) -> Quantity:
        """Over the first documents of the running order alone."""


def sign_change(quantity: Quantity, no_effect: float, last_half: float) -> int | None:
    """Documents after which the running estimate last was on the other side of `no_effect` than at the end.

    Only from `last_half` of the documents on; None where it never was, or ends without a side.
    """
    _, sides = quantity.running(no_effect)
    counts = np.arange(1, len(sides) + 1)
    other = (sides * sides[-1] < 0) & (counts >= math.ceil(last_half * len(sides)))
    return int(counts[other][-1]) if other.any() else None


def running_order(names: Iterable[str]) -> np.ndarray:
    """Documents by the sha256 of their names: an order that no result can have chosen."""
    return np.argsort([hashlib.sha256(name.encode()).hexdigest() for name in names], kind="stable")


# ---- one sum by another ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Ratio:
    """`a` over `b` by document, in the order of the running estimate.

    frame: document, stratum, a, b, size (whole numbers). scale: how a ratio R = sum(a) / sum(b) becomes a value:
    `perplexity` 100 (exp(R) - 1), `percent` 100 R, `ratio` R. In the first two b is the size; of a ratio b may be
    negative, and its interval is found by inversion. units: `documents`, or `texts` where nothing finer was recorded.
    """

    frame: pd.DataFrame
    scale: str
    tokens: int
    bounds: tuple[float, float] = (-math.inf, math.inf)
    units: str = "documents"
    beside: Mapping[str, float] = field(default_factory=dict)

    @property
    def documents(self) -> list[str]:
        return list(self.frame["document"])

    @property
    def searched(self) -> bool:
        return self.scale == "ratio"

    def interval(self, **options) -> Interval:
        if self.scale == "ratio":
            found = _by_inversion(self, options)
        else:
            found = paired_difference(self.frame["a"], self.frame["b"], self.frame["stratum"], **options)
            found = percent_change(found) if self.scale == "perplexity" else _times_100(found)
        ends = {name: getattr(found, name) for name in ("low", "high")}
        ends = {name: None if end is None else float(np.clip(end, *self.bounds)) for name, end in ends.items()}
        return replace(found, **ends, tokens=self.tokens)

    def p_value_at(self, value: float, **options) -> float | None:
        """Without any spread the number is what it is: zero, unless it is that value."""
        against = self._against(value, options)
        if against.standard_error == 0 and against.p_value is not None:
            return 0.0 if against.estimate else 1.0
        return against.p_value

    def running(self, no_effect: float) -> tuple[np.ndarray, np.ndarray]:
        """The side is the sign of a - b times the ratio of `no_effect`, which is defined for every b."""
        a, b = (self.frame[name].to_numpy(np.float64).cumsum() for name in "ab")
        estimates = np.array([self._value(x / y) if y > 0 else math.nan for x, y in zip(a, b, strict=True)])
        return estimates, np.sign(a - self._ratio(no_effect) * b)

    def first(self, number: int) -> Ratio:
        return replace(self, frame=self.frame.head(number))

    def _value(self, ratio: float) -> float:
        if self.scale == "perplexity":
            return 100 * math.expm1(ratio)
        return 100 * ratio if self.scale == "percent" else ratio

    def _ratio(self, value: float) -> float:
        """The inverse of `_value`."""
        if self.scale == "perplexity":
            return math.log1p(value / 100)
        return value / 100 if self.scale == "percent" else value

    def _against(self, value: float, options: dict) -> Interval:
        """The difference a - ratio b, whose sign says on which side of `value` the quantity is."""
        frame = self.frame
        difference = frame["a"] - self._ratio(value) * frame["b"]
        return paired_difference(difference, frame["size"], frame["stratum"], **options)


def ratio(frame: pd.DataFrame, scale: str) -> Ratio:
    """A ratio in the running order."""
    frame = frame.iloc[running_order(frame["document"])].reset_index(drop=True)
    return Ratio(frame, scale, int(frame["size"].sum()))


# ---- the interval of a ratio -----------------------------------------------------------------------------------------
def _by_inversion(quantity: Ratio, options: dict) -> Interval:
    """All values that are not rejected, where the denominator is above zero beyond doubt."""
    frame = quantity.frame
    below = paired_difference(frame["b"], frame["size"], frame["stratum"], **options)
    total = float(frame["b"].sum())
    estimate = float(frame["a"].sum()) / total if total else math.nan
    centre = replace(quantity._against(estimate if math.isfinite(estimate) else 1.0, options), unit="ratio")
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
    left = np.abs(frame["a"] - estimate * frame["b"]).max()
    if left <= ROUNDING * np.abs(frame["a"]).max():  # the same ratio in every document
        low = high = estimate
        centre = replace(centre, standard_error=0.0, detectable=0.0)
    elif centre.low is None:
        low = high = None
    else:
        low = _end(lambda q: quantity._against(q, options).low, estimate, -1)
        high = _end(lambda q: quantity._against(q, options).high, estimate, +1)
    return replace(
        centre,
        estimate=estimate,
        low=low,
        high=high,
        standard_error=None if centre.standard_error is None else centre.standard_error / per_token,
        detectable=None if centre.detectable is None else centre.detectable / per_token,
        p_value=quantity.p_value_at(1.0, **options),
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
