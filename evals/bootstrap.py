"""Documents drawn again, whole, within topics: how sure is a number that was computed from documents?

A statistic is a function of weights [R, N], how often each of N documents counts in each of R draws. It returns its
values [R] and its influences [R, N]: to first order, by how much a value moves with the weight of each document. Every
number here is one of averages, so the weighted influences of a draw sum to zero, and its linearised variance is

    standard_error^2 = sum_h n_h / (n_h - 1) sum_{i in h} w_i (e_i - ebar_h)^2,  ebar_h = sum_{i in h} w_i e_i / n_h.

    drawn = studentise(statistic, topics, level=0.95, replicates=9999, seed=20512)
    drawn.ends(0.95), drawn.p_value(0.8)

Sources: Efron and Tibshirani (1993), An Introduction to the Bootstrap, ch. 12 and 13; Davison and Hinkley (1997),
Bootstrap Methods and their Application, ch. 2 to 5 (stratified, studentised, influence, p-values).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.stats import norm
from scipy.stats import t as student

from engine.errors import error

SEED = 20_512  # which documents each replicate draws: the same draws for every policy
REPLICATES = 9_999  # (REPLICATES + 1) * 0.025 is a whole number, so the ends are order statistics
POWER = 0.8  # with which the smallest detectable effect would have been found
ROUNDING = 1e-12  # a sum of squares this small beside its terms is zero

TOO_FEW = "the number rests on too few documents"

Statistic = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # weights [R, N] -> values [R], influences [R, N]


class NoSpread(Exception):
    """There is no interval: the reason."""


@dataclass(frozen=True)
class Studentised:
    """An estimate, its standard error and the sorted t* [replicates] of the draws.

    With a = 1 - level and order statistics of t*,

        low  = estimate - max(t*_(1 - a/2),  q) standard_error,   q = Student's t quantile (1 - a/2),
        high = estimate - min(t*_(a/2),     -q) standard_error.

    The bootstrap widens the end that skewness needs; `q` is a floor, because heavy tails make t* too short (without it
    92, with it 95 %, where document effects are Student t with 3 degrees of freedom).
    """

    estimate: float
    standard_error: float
    t_star: np.ndarray
    df: int  # documents less strata

    def ends(self, level: float) -> tuple[float, float] | None:
        """None where an end falls among draws without spread: the number rests on too few documents."""
        rank = rank_of(level, len(self.t_star))
        upper, lower = float(self.t_star[-rank]), float(self.t_star[rank - 1])
        if not math.isfinite(upper) or not math.isfinite(lower):
            return None
        q = self.quantile(level)
        return self.estimate - max(upper, q) * self.standard_error, self.estimate - min(lower, -q) * self.standard_error

    def p_value(self, value: float) -> float:
        """Of the number being `value`: at most 1 - level exactly where the interval excludes it.

        The larger of 2 (1 + number of t* beyond) / (replicates + 1) and Student's; never under 2 / (replicates + 1).
        """
        observed = (self.estimate - value) / self.standard_error
        beyond = (self.t_star >= observed).sum() if observed > 0 else (self.t_star <= observed).sum()
        least = 2 / (len(self.t_star) + 1)
        return float(min(1.0, max(least * (1 + beyond), 2 * student.sf(abs(observed), self.df))))

    def quantile(self, level: float) -> float:
        return float(student.ppf(0.5 + level / 2, self.df))

    def detectable(self, level: float) -> float:
        """The true difference that had an 80 % chance to be found."""
        return (self.quantile(level) + float(norm.ppf(POWER))) * self.standard_error


@dataclass(frozen=True)
class Quantiles:
    """An estimate and the sorted estimates [replicates] of the draws: for what has no influence, such as ranks."""

    estimate: float
    drawn: np.ndarray

    @property
    def standard_error(self) -> float:
        return float(self.drawn.std(ddof=1))

    def ends(self, level: float) -> tuple[float, float]:
        rank = rank_of(level, len(self.drawn))
        return float(self.drawn[rank - 1]), float(self.drawn[-rank])

    def p_value(self, value: float) -> float:
        """At most 1 - level exactly where the ends leave `value` out."""
        fewer = min((self.drawn <= value).sum(), (self.drawn >= value).sum())
        return float(min(1.0, 2 * (1 + fewer) / (len(self.drawn) + 1)))

    def detectable(self, level: float) -> float:
        """As of a normal estimate with this standard error."""
        return float(norm.ppf(0.5 + level / 2) + norm.ppf(POWER)) * self.standard_error


# ---- the two ways from a statistic to an interval --------------------------------------------------------------------
def studentise(
    statistic: Statistic,
    strata: ArrayLike,
    *,
    jackknife: bool = False,
    level: float = 0.95,
    replicates: int = REPLICATES,
    seed: int = SEED,
) -> Studentised:
    """The estimate over all documents with its t*. NoSpread.

    jackknife: the standard error of the estimate, not those of the draws, is the larger of the linearised one and that
    of leaving out one document after another. It holds what the line leaves out of a statistic bent in few documents.
    """
    rank = rank_of(level, replicates)
    stratum, sizes = stratify(strata)
    all_once = np.ones((1, len(stratum)))
    with np.errstate(divide="ignore", invalid="ignore"):
        (estimate,), influence = statistic(all_once)
        (variance,) = spread(all_once, influence, stratum, sizes)
        if not math.isfinite(estimate) or not variance > 0:
            raise NoSpread("no spread within strata: nothing to judge by")
        if jackknife:
            variance = np.fmax(variance, _jackknife(statistic, stratum, sizes))
        weights = weights_of(stratum, sizes, replicates, seed)
        values, influence = statistic(weights)
        shift = values - estimate
        t_star = np.where(shift == 0, 0.0, shift / np.sqrt(spread(weights, influence, stratum, sizes)))
    df = len(stratum) - len(sizes)
    return Studentised(float(estimate), math.sqrt(variance), _without_gaps(t_star, rank), df)


def quantiles(
    statistic: Statistic, strata: ArrayLike, *, level: float = 0.95, replicates: int = REPLICATES, seed: int = SEED
) -> Quantiles:
    """The estimate over all documents and those of the draws. NoSpread."""
    rank = rank_of(level, replicates)
    stratum, sizes = stratify(strata)
    with np.errstate(divide="ignore", invalid="ignore"):
        (estimate,), _ = statistic(np.ones((1, len(stratum))))
        values, _ = statistic(weights_of(stratum, sizes, replicates, seed))
    return Quantiles(float(estimate), _without_gaps(values, rank))


def _without_gaps(values: np.ndarray, rank: int) -> np.ndarray:
    """Sorted; a draw without a value could have had any, so half of them count at either end."""
    gaps = np.isnan(values)
    if gaps.sum() >= rank:
        raise NoSpread(TOO_FEW)
    return np.sort(np.r_[values[~gaps], np.resize([math.inf, -math.inf], gaps.sum())])


def _jackknife(statistic: Statistic, stratum: np.ndarray, sizes: np.ndarray) -> float:
    """Variance of the estimate from leaving out each document, within strata."""
    values, _ = statistic(1 - np.eye(len(stratum)))  # [N]
    about_mean = [((values[stratum == h] - values[stratum == h].mean()) ** 2).sum() for h in range(len(sizes))]
    return float(((sizes - 1) / sizes * about_mean).sum())


# ---- draws -----------------------------------------------------------------------------------------------------------
def stratify(strata: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Stratum number [N] and documents of each [strata]. NoSpread: one document of a stratum."""
    stratum, names = pd.factorize(np.asarray(strata))
    sizes = np.bincount(stratum)
    if sizes.min() < 2:
        where = f" in stratum {names[sizes.argmin()]}" if len(sizes) > 1 else ""
        raise NoSpread(f"one document{where}: no spread to judge by")
    return stratum, sizes


def weights_of(stratum: np.ndarray, sizes: np.ndarray, replicates: int, seed: int) -> np.ndarray:
    """How often each document is drawn [replicates, N], in the order of the documents."""
    weights = np.empty((replicates, len(stratum)))
    weights[:, np.argsort(stratum, kind="stable")] = draws(tuple(sizes.tolist()), replicates, seed)
    return weights


@lru_cache(maxsize=8)
def draws(sizes: tuple[int, ...], replicates: int, seed: int) -> np.ndarray:
    """How often each document is drawn [replicates, documents], strata side by side."""
    rng = np.random.default_rng(seed)
    drawn = np.hstack([rng.multinomial(n, np.full(n, 1 / n), replicates) for n in sizes]).astype(np.float64)
    drawn.flags.writeable = False  # shared by the calls
    return drawn


def spread(weights: np.ndarray, influence: np.ndarray, stratum: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The linearised variance of every draw [R]. weights, influence [R, N]; stratum [N]; sizes [strata]."""
    total = np.zeros(len(weights))
    for h, n in enumerate(sizes):
        w, e = weights[:, stratum == h], influence[:, stratum == h]
        squares = (w * e**2).sum(1)
        about_mean = squares - (w * e).sum(1) ** 2 / n
        total += n / (n - 1) * np.where(about_mean <= ROUNDING * squares, 0.0, about_mean)
    return total


def rank_of(level: float, replicates: int) -> int:
    """Of the order statistic at each end. UserError: too few replicates for the level."""
    rank = math.floor((replicates + 1) * (1 - level) / 2 + 1e-9)
    if not 0 < level < 1 or rank < 1:
        raise error(
            f"level {level} with {replicates} replicates",
            "a level between 0 and 1 and (replicates + 1) (1 - level) / 2 of at least 1",
            "raise the number of replicates",
        )
    return rank
