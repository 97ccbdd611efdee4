"""Statistics of paired losses: how large is a difference, and how small a one could have been seen?

A policy and the baseline are scored on the same tokens; the difference of their losses, position by position,
is what is averaged. Tokens of one document are not independent (autocorrelation, one subject, one author), so
the document is the sampling unit: documents are drawn again, whole, within topics. Topics are fixed.

Assumed: documents are independent given their topic, and stand for more documents like them. Where residency
is carried from one document to the next (`stream`) that is an approximation. Where a few documents out of
some twenty carry nearly all of the difference (log-normal document effects) the interval covers 92, not 95 %.
At our own number of documents: docs/statistics.md.

    delta = paired_losses(loss, baseline_loss)  # of one text
    interval = paired_texts([(delta, document_ids, topic), ...])  # nats a token
    verdict(percent_change(interval), region_low=0.3, region_high=1.5)

Sources: Efron and Tibshirani (1993), An Introduction to the Bootstrap, ch. 12 (bootstrap-t); Davison and
Hinkley (1997), Bootstrap Methods and their Application, ch. 2 to 4 (studentised, stratified, p-values);
Cochran (1977), Sampling Techniques, ch. 6 (ratio estimator); Holm (1979), Scand. J. Statist. 6, 65-70.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from engine.errors import error
from evals.bootstrap import REPLICATES, ROUNDING, SEED, Studentised, draws, rank_of

SEGMENT_TOKENS = 512


@dataclass(frozen=True)
class Interval:
    """A mean difference and how sure we are of it; `unit` is `nats_per_token` or `percent`.

    Where there is no interval, `low`, `high` and `p_value` are None and `reason` says why. `detectable` is
    the size, without sign, of the smallest effect that could have been seen.
    """

    estimate: float
    low: float | None
    high: float | None
    standard_error: float | None
    detectable: float | None
    p_value: float | None
    documents: int
    tokens: int
    level: float = 0.95
    unit: str = "nats_per_token"
    reason: str | None = None


def paired_losses(loss: ArrayLike, baseline_loss: ArrayLike) -> np.ndarray:
    """Loss minus baseline loss [T] in nats, both [T] over the same positions.

    UserError: shapes, NaN, infinity.
    """
    loss, baseline_loss = np.asarray(loss, np.float64), np.asarray(baseline_loss, np.float64)
    if loss.ndim != 1 or loss.shape != baseline_loss.shape:
        raise error(
            f"losses of shape {loss.shape} against a baseline of shape {baseline_loss.shape}",
            "two vectors over the same positions",
            "score both policies on the same text",
        )
    _refuse_unless(np.isfinite(loss), loss, "loss", "finite nats")
    _refuse_unless(np.isfinite(baseline_loss), baseline_loss, "baseline loss", "finite nats")
    return loss - baseline_loss


def segments(position_losses: ArrayLike, document_ids: ArrayLike, length: int = SEGMENT_TOKENS) -> pd.DataFrame:
    """Paired losses summed over segments of at most `length` tokens, none across the end of a document.

    position_losses [T] nats (of `paired_losses`), document_ids [T], the positions of a document together.
    Returns a frame doc, segment (0, 1, ... within the document), tokens, delta_sum, in the order of the text.
    UserError: shapes, NaN, infinity, a missing document id, a document in two places.
    """
    delta, ids = np.asarray(position_losses, np.float64), np.asarray(document_ids)
    if delta.ndim != 1 or delta.shape != ids.shape or not len(ids) or length < 1:
        raise error(
            f"losses of shape {delta.shape}, document ids of shape {ids.shape}, segments of {length} tokens",
            "two vectors over the same positions, not empty, and a length of at least 1",
            "give one document id a token",
        )
    _refuse_unless(np.isfinite(delta), delta, "paired loss", "finite nats")
    codes, names = pd.factorize(ids)  # [T], -1 where an id is missing
    _refuse_unless(codes >= 0, ids, "document id", "a name for every position")
    starts = np.flatnonzero(np.r_[True, codes[1:] != codes[:-1]])  # [runs]
    if len(starts) != len(names):
        run_codes = codes[starts]
        back = names[run_codes[pd.Series(run_codes).duplicated()][0]]
        raise error(
            f"document {back} comes back after another document",
            "the positions of a document together",
            "sort the positions or give the parts ids of their own",
        )
    offset = np.arange(len(ids)) - np.repeat(starts, np.diff(np.r_[starts, len(ids)]))  # within a document [T]
    frame = pd.DataFrame({"doc": ids, "segment": offset // length, "delta_sum": delta})
    grouped = frame.groupby(["doc", "segment"], sort=False)["delta_sum"]
    return grouped.agg(tokens="size", delta_sum="sum").reset_index()


def documents(segment_frame: pd.DataFrame) -> pd.DataFrame:
    """Segments summed to documents: a frame doc, tokens, delta_sum, in the order of the text."""
    return segment_frame.groupby("doc", sort=False)[["tokens", "delta_sum"]].sum().reset_index()


def paired_texts(texts: Iterable[tuple[ArrayLike, ArrayLike, str]], **options) -> Interval:
    """`paired_difference` over whole texts: the way every table goes from losses to an interval.

    texts: (delta [T] of `paired_losses`, document ids [T], topic) of each; topics are the strata, and the documents of
    two texts are never the same. options: level, replicates, seed.
    """
    frames = [documents(segments(delta, ids)).assign(topic=topic) for delta, ids, topic in texts]
    frame = pd.concat(frames, ignore_index=True)
    return paired_difference(frame["delta_sum"], frame["tokens"], frame["topic"], **options)


def paired_difference(
    delta_sum: ArrayLike,
    tokens: ArrayLike,
    strata: ArrayLike | None = None,
    level: float = 0.95,
    replicates: int = REPLICATES,
    seed: int = SEED,
) -> Interval:
    """Mean paired difference a token, with a studentised bootstrap interval over documents.

    delta_sum [documents] nats, tokens [documents], strata [documents] labels (topics; None: all in one).

    The estimate is R = sum(delta_sum) / sum(tokens). With residuals e = delta_sum - R tokens and their mean
    ebar_h in stratum h, its linearised variance is

        standard_error^2 = sum_h n_h / (n_h - 1) sum_{i in h} (e_i - ebar_h)^2 / sum(tokens)^2.

    A replicate draws n_h documents with replacement in every stratum: t* = (R* - R) / standard_error*. From there to
    ends and p-value, of no difference: `evals.bootstrap.Studentised`.

    detectable = (q + z_0.8) standard_error: the true difference that had an 80 % chance to be found.

    A draw of copies of one value has no spread and an infinite t*. Where an end falls among those, the
    difference rests on too few documents and there is no interval; nor with one document in a stratum.
    UserError: no documents, shapes, NaN, infinity, a document without tokens, too few replicates.
    """
    delta, size, stratum, names = _checked(delta_sum, tokens, strata)
    rank_of(level, replicates)
    sizes = np.bincount(stratum)  # [strata]
    order = np.argsort(stratum, kind="stable")  # strata side by side
    delta, size = delta[order], size[order]
    ratio = float(delta.sum() / size.sum())
    found = Interval(ratio, None, None, None, None, None, len(delta), int(size.sum()), level)
    if sizes.min() < 2:
        where = f" in stratum {names[sizes.argmin()]}" if len(sizes) > 1 else ""
        return replace(found, reason=f"one document{where}: no spread to judge by")

    residual = delta - ratio * size
    least_p = 2 / (replicates + 1)
    if np.abs(residual).max() <= ROUNDING * np.abs(delta).max():  # the same difference a token everywhere
        p_value = least_p if ratio else 1.0
        return replace(found, low=ratio, high=ratio, standard_error=0.0, detectable=0.0, p_value=p_value)

    _, variance = _linearised(np.ones((1, len(delta))), residual, size, sizes)
    standard_error = math.sqrt(variance[0])
    if standard_error == 0:  # strata differ, but no document from its stratum
        return replace(found, standard_error=0.0, reason="no spread within strata: nothing to judge by")
    shift, variance = _linearised(draws(tuple(sizes.tolist()), replicates, seed), residual, size, sizes)
    with np.errstate(divide="ignore", invalid="ignore"):
        t_star = np.sort(np.where(shift == 0, 0.0, shift / np.sqrt(variance)))  # [replicates]
    drawn = Studentised(ratio, standard_error, t_star, len(delta) - len(sizes))
    found = replace(found, standard_error=standard_error, detectable=drawn.detectable(level))
    ends = drawn.ends(level)
    if ends is None:
        return replace(found, reason="the difference rests on too few documents")
    return replace(found, low=ends[0], high=ends[1], p_value=drawn.p_value(0.0))


def percent_change(interval: Interval) -> Interval:
    """Change of token perplexity in percent, 100 (exp(x) - 1), of an interval in nats a token.

    The map is monotone, so level and p-value stay; the standard error is the delta method's.
    """
    if interval.unit != "nats_per_token":
        raise error(
            f"an interval in {interval.unit}",
            "one in nats_per_token",
            "convert the difference of losses, once",
        )

    def percent(x: float | None) -> float | None:
        return None if x is None else 100 * math.expm1(x)

    error_nats = interval.standard_error
    return replace(
        interval,
        estimate=percent(interval.estimate),
        low=percent(interval.low),
        high=percent(interval.high),
        standard_error=None if error_nats is None else 100 * math.exp(interval.estimate) * error_nats,
        detectable=percent(interval.detectable),
        unit="percent",
    )


def holm(p_values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Holm's step-down p-values, in the order given: max over the smaller ones of (m - rank) p, at most 1.

    A comparison without a p-value stays None but counts in m, so a failed run never helps the others.
    """
    for name, p in p_values.items():
        if p is not None and not 0 <= p <= 1:
            raise error(f"p-value {p} of {name}", "a number from 0 to 1, or None", "repair that comparison")
    adjusted: dict[str, float | None] = dict.fromkeys(p_values)
    largest = 0.0
    for rank, name in enumerate(sorted((k for k in p_values if p_values[k] is not None), key=p_values.get)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return adjusted


def verdict(interval: Interval, region_low: float = -math.inf, region_high: float = math.inf) -> str:
    """`supported` where the interval lies inside the preregistered region, `not supported` where it lies
    outside, else `inconclusive`; so is no interval. In the unit of the interval, ends included.

    A one-sided claim leaves one end out: `region_low=0` claims a rise, `region_high=0` claims none.
    """
    if not region_low <= region_high or (region_low, region_high) == (-math.inf, math.inf):
        raise error(f"region {region_low} to {region_high}", "two ordered ends, at least one finite", "mend the claim")
    if interval.low is None or interval.high is None:
        return "inconclusive"
    if region_low <= interval.low and interval.high <= region_high:
        return "supported"
    return "not supported" if interval.high < region_low or region_high < interval.low else "inconclusive"


def _linearised(
    weights: np.ndarray, residual: np.ndarray, size: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """R* - R and the linearised variance of R*, each [replicates].

    weights [replicates, documents]: how often each document is drawn; residual, size [documents]; sizes
    [strata] documents each. Weighted moments stand in for a gather of [replicates, documents] values.
    """
    moments = np.stack([residual, size, residual**2, residual * size, size**2], axis=1)  # [documents, 5]
    ends = np.cumsum(sizes)
    parts = [weights[:, end - n : end] @ moments[end - n : end] for n, end in zip(sizes, ends, strict=True)]
    e, s, ee, es, ss = np.stack(parts).transpose(2, 0, 1)  # each [strata, replicates]
    drawn = s.sum(0)  # tokens of a replicate
    shift = e.sum(0) / drawn  # sum(w delta) / sum(w size) - R
    n = sizes[:, None]
    spread = ee - 2 * shift * es + shift**2 * ss - (e - shift * s) ** 2 / n  # about the stratum's mean
    spread = np.where(spread <= ROUNDING * (ee + shift**2 * ss), 0.0, spread)
    return shift, (n / (n - 1) * spread).sum(0) / drawn**2


def _checked(
    delta_sum: ArrayLike, tokens: ArrayLike, strata: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """delta, tokens, stratum number, each [documents], and the strata's names; UserError otherwise."""
    delta, size = np.asarray(delta_sum, np.float64), np.asarray(tokens, np.float64)
    labels = np.zeros(len(np.atleast_1d(delta)), int) if strata is None else np.asarray(strata)
    if delta.ndim != 1 or not len(delta) or delta.shape != size.shape or delta.shape != labels.shape:
        raise error(
            f"differences {delta.shape}, tokens {size.shape}, strata {labels.shape}",
            "one of each for at least one document",
            "pass the columns of one frame of documents",
        )
    _refuse_unless(np.isfinite(delta), delta, "difference", "finite nats")
    _refuse_unless(np.isfinite(size) & (size >= 1) & (size == np.floor(size)), size, "tokens", "a whole number from 1")
    stratum, names = pd.factorize(labels)
    _refuse_unless(stratum >= 0, labels, "stratum", "a topic for every document")
    return delta, size, stratum, names


def _refuse_unless(good: np.ndarray, values: np.ndarray, what: str, expected: str) -> None:
    bad = np.flatnonzero(~good)
    if len(bad):
        raise error(
            f"{what} {values[bad[0]]} at row {bad[0]} ({len(bad)} such rows)",
            expected,
            "repair the run that wrote it; rows are never dropped",
        )
