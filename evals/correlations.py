"""Does more of this go with more of that? Correlations over policies, or over documents, when documents are a sample.

Over policies the policies are fixed: no others stand behind them. Documents are drawn again, and every draw gives each
policy both its numbers. Over documents of one policy the documents are the points as well as the sample; both numbers
are taken less the mean of their text, so that texts which differ in both do not make a correlation.

Functions return statistics for `evals.bootstrap`. Pearson's r goes through Fisher's z = atanh(r) and is studentised by
its influence function; with a, b the two sides centred and of unit length, z = log(|a + b| / |a - b|), which keeps its
digits however near r is to one. Spearman's rho has no influence function and takes quantiles.

    drawn = studentise(pearson_over_policies(mass, loss), topics)
    np.tanh(drawn.ends(0.95))
    pearson_over_policies(mass, loss)(first_documents(83))      # z after the first, the first two, ... documents

Coverage of these intervals, and what was tried instead: docs/statistics.md, measured by tests/interval_coverage.py.

Sources: Fisher (1921), Metron 1, 3-32; Devlin, Gnanadesikan and Kettenring (1975), Biometrika 62, 531-545 (influence
function of r); Hall, Martin and Schucany (1989), J. Statist. Comput. Simul. 33, 161-172 (bootstrap-t after Fisher's z).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from evals.bootstrap import ROUNDING, Statistic


@dataclass(frozen=True)
class Sums:
    """A number of every policy by document: sum(total) / sum(size) over documents. Both [N, P]."""

    total: np.ndarray
    size: np.ndarray

    def values(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """weights [R, N] -> the numbers and their weighted sizes, each [R, P]."""
        size = weights @ self.size
        return (weights @ self.total) / size, size

    def without(self, policy: int) -> Sums:
        return Sums(np.delete(self.total, policy, axis=1), np.delete(self.size, policy, axis=1))

    def first(self, number: int) -> Sums:
        """Over the first documents alone."""
        return Sums(self.total[:number], self.size[:number])


# ---- statistics ------------------------------------------------------------------------------------------------------
def pearson_over_policies(x: Sums, y: Sums) -> Statistic:
    """Fisher's z of Pearson's r over policies."""

    def z(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # [R, N] -> [R], [R, N]
        sides = [sums.values(weights) for sums in (x, y)]
        (a, length_a), (b, length_b) = (_unit(values) for values, _ in sides)
        apart, together = _squares(a - b), _squares(a + b)  # 2 (1 - r), 2 (1 + r)  [R, 1]
        r, scale = (together - apart) / 4, apart * together / 4  # 1 - r^2
        slopes = ((b - r * a) / length_a / scale, (a - r * b) / length_b / scale)  # dz/dx, dz/dy  [R, P]
        influence = 0.0
        for sums, (values, size), slope in zip((x, y), sides, slopes, strict=True):
            per = slope / size
            influence = influence + per @ sums.total.T - (per * values) @ sums.size.T  # [R, N]
        return np.log(together / apart)[:, 0] / 2, influence

    return z


def spearman_over_policies(x: Sums, y: Sums) -> Statistic:
    """Spearman's rho over policies, ties at their mean rank; it has no influence (NaN)."""

    def rho(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        (a, _), (b, _) = (_unit(_ranks(sums.values(weights)[0])) for sums in (x, y))
        return (a * b).sum(1), np.full(weights.shape, np.nan)

    return rho


def pearson_within(x: np.ndarray, y: np.ndarray, groups: np.ndarray) -> Statistic:
    """Fisher's z of Pearson's r over documents, both less the mean of their group. x, y, groups [N]."""
    member = (groups[:, None] == np.unique(groups)).astype(np.float64)  # [N, groups]

    def z(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        u, v = (_within(values, member, weights) for values in (x, y))  # [R, N]
        apart, together = (_squares(np.sqrt(weights) * side) for side in (u - v, u + v))  # [R, 1]
        r, scale = (together - apart) / 4, apart * together / 4
        return np.log(together / apart)[:, 0] / 2, (u * v - r * (u**2 + v**2) / 2) / scale

    return z


def first_documents(number: int) -> np.ndarray:
    """Weights [number, number] of the running estimate: the first document, the first two, and so on."""
    return np.tril(np.ones((number, number)))


# ---- sides -----------------------------------------------------------------------------------------------------------
def _unit(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows centred and of unit length [R, P], and their lengths before [R, 1]."""
    centred = values - values.mean(axis=1, keepdims=True)
    length = _length(centred, values)
    return centred / length, length


def _ranks(values: np.ndarray) -> np.ndarray:
    """Of rows [R, P]; what differs by rounding alone is a tie."""
    largest = np.abs(values).max(axis=1, keepdims=True)
    return rankdata(np.round(values / np.where(largest > 0, largest, 1.0) / ROUNDING), axis=1, nan_policy="propagate")


def _within(values: np.ndarray, member: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Rows less the weighted mean of their group, of unit weighted length: [R, N]."""
    means = (weights * values) @ member / np.maximum(weights @ member, 1)  # [R, groups]
    root = np.sqrt(weights)
    centred = values - means @ member.T
    return centred / _length(root * centred, root * values)


def _length(centred: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Of rows [R, 1]; NaN where all that is left beside the values is rounding: one value has no correlation."""
    length, least = np.sqrt(_squares(centred)), ROUNDING * np.sqrt(_squares(values))
    return np.where(length > least, length, np.nan)


def _squares(values: np.ndarray) -> np.ndarray:
    return (values**2).sum(axis=1, keepdims=True)
