"""Numbers that decide claims and are no plain ratio: correlations, a difference of two means, and counts.

Each is a statistic of documents (evals/bootstrap.py) on a scale, in the running order, with the three operations of
every quantity (evals/ledger_quantities.py).

    over_policies(mass, loss, documents, topics, tokens)             # Pearson, and beside it what else is shown
    over_documents(x, y, documents, texts, topics, tokens)
    change_after(frame)                                              # the beginning of documents less the rest
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import numpy as np
import pandas as pd

from evals.bootstrap import TOO_FEW, NoSpread, Quantiles, Statistic, Studentised, quantiles, studentise
from evals.correlations import Sums, first_documents, pearson_over_policies, pearson_within, spearman_over_policies
from evals.ledger_quantities import NotRun, running_order
from evals.stats import Interval

LEAST_POLICIES = 3  # two points always lie on a line


@dataclass(frozen=True)
class Scale:
    """How what a statistic returns becomes a value, and back. slope: of `value` there, for the standard error."""

    unit: str
    value: Callable
    inverse: Callable
    slope: Callable


FISHER = Scale("correlation", np.tanh, lambda r: np.arctanh(np.clip(r, -1, 1)), lambda z: 1 - np.tanh(z) ** 2)
PERCENT = Scale("percent", lambda x: 100 * np.expm1(x), lambda v: np.log1p(v / 100), lambda x: 100 * np.exp(x))
RANKS = Scale("correlation", lambda rho: rho, lambda rho: rho, lambda rho: 1.0)


# ---- statistics of documents -----------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Sampled:
    """A statistic of documents in the running order. strata [N]; draw: how an interval comes of it."""

    documents: Sequence[str]
    strata: np.ndarray
    statistic: Statistic
    scale: Scale
    draw: Callable[..., Studentised | Quantiles]
    tokens: int
    bounds: tuple[float, float] = (-math.inf, math.inf)
    units: str = "documents"
    beside: Mapping[str, float] = field(default_factory=dict)
    searched: bool = False

    def interval(self, **options) -> Interval:
        estimate = float(self.running(0.0)[0][-1])
        found = Interval(estimate, None, None, None, None, None, len(self.documents), self.tokens)
        found = replace(found, unit=self.scale.unit, level=options.get("level", found.level))
        try:
            drawn = _drawn(self, tuple(sorted(options.items())))
        except NoSpread as exc:
            return replace(found, reason=str(exc))
        slope = float(self.scale.slope(drawn.estimate))
        seen = slope * drawn.detectable(found.level)
        found = replace(found, standard_error=slope * drawn.standard_error, detectable=seen)
        ends = drawn.ends(found.level)
        if ends is None:
            return replace(found, reason=TOO_FEW)
        low, high = (float(self.scale.value(end)) for end in ends)
        return replace(found, low=low, high=high, p_value=drawn.p_value(0.0))

    def p_value_at(self, value: float, **options) -> float | None:
        try:
            drawn = _drawn(self, tuple(sorted(options.items())))
        except NoSpread:
            return None
        with np.errstate(divide="ignore"):  # a correlation of one is infinitely far
            return drawn.p_value(float(self.scale.inverse(value)))

    def running(self, no_effect: float) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(divide="ignore", invalid="ignore"):
            estimates = self.scale.value(self.statistic(first_documents(len(self.documents)))[0])
        return estimates, np.nan_to_num(np.sign(estimates - no_effect))

    def first(self, number: int) -> Sampled:
        own = partial(_of_first, self.statistic, len(self.documents))
        return replace(self, documents=self.documents[:number], strata=self.strata[:number], statistic=own)


@lru_cache(maxsize=4)
def _drawn(quantity: Sampled, options: tuple) -> Studentised | Quantiles:
    """One bootstrap for the interval and the p-values of a quantity."""
    return quantity.draw(quantity.statistic, quantity.strata, **dict(options))


def _of_first(statistic: Statistic, total: int, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A statistic of the first documents of so many: the others are never drawn."""
    number = weights.shape[1]
    values, influence = statistic(np.pad(weights, ((0, 0), (0, total - number))))
    return values, influence[:, :number]


# ---- correlations ----------------------------------------------------------------------------------------------------
def over_policies(
    mass: Sums,
    other: Sums,
    documents: Sequence[str],
    strata: Sequence[str],
    tokens: int,
    *,
    ranks: bool = False,
    units: str = "documents",
) -> Sampled:
    """Pearson's r over policies of their mass against another number of theirs, or Spearman's rho (`ranks`).

    mass, other [N, P]. Beside it: the number of policies, Spearman's rho and the range when one policy is left out.
    NotRun: fewer than three policies, or one side the same for all.
    """
    order = running_order(documents)
    mass, other = (Sums(sums.total[order], sums.size[order]) for sums in (mass, other))
    policies = mass.total.shape[1]
    if policies < LEAST_POLICIES:
        raise NotRun(f"a correlation over {policies} policies: it takes {LEAST_POLICIES}")
    kind, scale, draw = pearson_over_policies, FISHER, studentise
    if ranks:
        kind, scale, draw = spearman_over_policies, RANKS, quantiles
    left_out = [_value(kind, scale, mass.without(p), other.without(p)) for p in range(policies)]
    beside = {"policies": policies, "spearman": _value(spearman_over_policies, RANKS, mass, other)}
    beside |= {"left_out_low": min(left_out), "left_out_high": max(left_out)}
    if not math.isfinite(beside["spearman"]):
        raise NotRun("mass, or what it is to go with, is the same for all policies: no correlation")
    names, topics = [documents[i] for i in order], np.asarray(strata)[order]
    return Sampled(names, topics, kind(mass, other), scale, draw, tokens, (-1.0, 1.0), units, beside)


def over_documents(frame: pd.DataFrame, tokens: int) -> Sampled:
    """Pearson's r over documents within texts. frame: document, text, stratum, x, y, a row a document.

    NotRun: one side the same for all documents of a text, in every text.
    """
    frame = frame.iloc[running_order(frame["document"])].reset_index(drop=True)
    statistic = pearson_within(frame["x"].to_numpy(), frame["y"].to_numpy(), frame["text"].to_numpy())
    draw = partial(studentise, jackknife=True)  # 83 points, some of them far off: r is bent (docs/statistics.md)
    found = Sampled(list(frame["document"]), frame["stratum"].to_numpy(), statistic, FISHER, draw, tokens, (-1.0, 1.0))
    if not math.isfinite(found.running(0.0)[0][-1]):
        raise NotRun("mass or loss is the same for all documents of a text: no correlation")
    return found


def _value(kind: Callable, scale: Scale, mass: Sums, other: Sums) -> float:
    """The correlation over all documents."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(scale.value(kind(mass, other)(np.ones((1, len(mass.total))))[0][0]))


# ---- a difference of two means ---------------------------------------------------------------------------------------
def change_after(frame: pd.DataFrame) -> Sampled:
    """100 (exp(x) - 1), x = mean of the first tokens of documents less mean of the later ones, both over all documents.

    frame: document, stratum, first_sum, first_tokens, later_sum, later_tokens. Each mean is a ratio of sums,

        x = sum(first_sum) / sum(first_tokens) - sum(later_sum) / sum(later_tokens),

    and a document is drawn with both, so what makes all of a document lose more or less cancels. Documents without
    later tokens count in the first mean alone. NotRun: no document has any.
    """
    frame = frame.iloc[running_order(frame["document"])].reset_index(drop=True)
    if not frame["later_tokens"].sum():
        raise NotRun("no document goes on after its first tokens")
    sides = [Sums(frame[[f"{part}_sum"]].to_numpy(float), frame[[f"{part}_tokens"]].to_numpy(float))
             for part in ("first", "later")]  # fmt: skip

    def difference(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        (first, first_size), (later, later_size) = (side.values(weights) for side in sides)  # each [R, 1]
        influence = (sides[0].total.T - first * sides[0].size.T) / first_size
        influence = influence - (sides[1].total.T - later * sides[1].size.T) / later_size
        return (first - later)[:, 0], influence

    tokens = int(frame["first_tokens"].sum() + frame["later_tokens"].sum())
    return Sampled(list(frame["document"]), frame["stratum"].to_numpy(), difference, PERCENT, studentise, tokens)


# ---- counts ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Counted:
    """A number that nothing was sampled for: the interval is the number. documents: what was counted over.

    estimates: after every document, where it has any before the last.
    """

    documents: Sequence[str]
    value: float
    tokens: int
    units: str
    bounds: tuple[float, float] = (0.0, math.inf)
    beside: Mapping[str, float] = field(default_factory=dict)
    searched: bool = False
    estimates: np.ndarray | None = None

    def interval(self, **options) -> Interval:
        found = Interval(self.value, self.value, self.value, 0.0, 0.0, None, len(self.documents), self.tokens)
        return replace(found, unit="count", level=options.get("level", found.level))

    def p_value_at(self, value: float, **options) -> float:
        return 1.0 if value == self.value else 0.0

    def running(self, no_effect: float) -> tuple[np.ndarray, np.ndarray]:
        estimates = self.estimates
        if estimates is None:
            estimates = np.full(len(self.documents), math.nan)
            estimates[-1] = self.value
        return estimates, np.nan_to_num(np.sign(estimates - no_effect))

    def first(self, number: int) -> Counted:
        if self.estimates is None:
            return self
        own, estimates = self.documents[:number], self.estimates[:number]
        return replace(self, documents=own, estimates=estimates, value=float(estimates[-1]))
