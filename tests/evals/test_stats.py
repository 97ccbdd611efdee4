"""Laws, golden numbers and coverage of `evals.stats`.

Coverage is measured on made-up losses whose true mean difference is known: autocorrelated within a document,
spiky and skewed, with document effects, documents of 300 to 1,000 tokens, topics with means of their own.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import lfilter
from scipy.stats import norm
from scipy.stats import t as student

from engine.errors import UserError
from evals.bootstrap import SEED as BOOTSTRAP_SEED
from evals.bootstrap import draws
from evals.stats import (
    Interval,
    documents,
    holm,
    paired_difference,
    paired_losses,
    percent_change,
    segments,
    verdict,
)

TRUE_DIFFERENCE = 0.02  # nats a token
SETS = 2_000
SIMULATION_SEED = 7


def simulated_losses(rng, sets, topics, docs_a_topic):
    """delta_sum, tokens, sum of squares, each [sets, documents], and topic [documents].

    A token's difference is an AR(1) (0.6) of rare log-normal spikes (3 %), plus 0.02, plus its document's
    exponential effect (sd 0.03), plus its topic's mean (they sum to zero).
    """
    n = topics * docs_a_topic
    tokens = rng.integers(300, 1001, (sets, n))
    spikes = np.where(rng.random((sets, n, 1000)) < 0.03, rng.lognormal(0, 1, (sets, n, 1000)), 0.0)
    noise = lfilter([1], [1, -0.6], spikes - 0.03 * math.exp(0.5), axis=2)  # [sets, documents, positions]
    effect = 0.03 * (rng.exponential(size=(sets, n)) - 1)
    topic = np.repeat(np.arange(topics), docs_a_topic)
    delta = noise + (TRUE_DIFFERENCE + effect + 0.02 * (topic - (topics - 1) / 2))[:, :, None]
    delta *= np.arange(1000) < tokens[:, :, None]
    return delta.sum(2), tokens, (delta**2).sum(2), topic


@pytest.mark.parametrize(("topics", "docs_a_topic"), [(1, 16), (4, 16)])
def test_law_coverage_is_95_percent_and_that_of_independent_tokens_is_not(topics, docs_a_topic):
    """Coverage, with twice its own binomial error (0.49 points) to either side, lies within 93 to 97 %."""
    rng = np.random.default_rng(SIMULATION_SEED)
    covered = naive = 0
    for _ in range(SETS // 50):
        delta_sum, tokens, squares, topic = simulated_losses(rng, 50, topics, docs_a_topic)
        for delta, size, square in zip(delta_sum, tokens, squares, strict=True):
            interval = paired_difference(delta, size, topic)
            covered += interval.low <= TRUE_DIFFERENCE <= interval.high
            mean = delta.sum() / size.sum()
            token_error = math.sqrt((square.sum() / size.sum() - mean**2) / size.sum())
            naive += abs(mean - TRUE_DIFFERENCE) <= norm.ppf(0.975) * token_error
    coverage = covered / SETS
    own_error = math.sqrt(coverage * (1 - coverage) / SETS)
    assert coverage - 2 * own_error > 0.93 and coverage + 2 * own_error < 0.97, coverage
    assert naive / SETS < 0.85


def test_law_an_effect_of_the_detectable_size_is_found_four_times_in_five():
    rng = np.random.default_rng(SIMULATION_SEED)
    noise = rng.normal(0, 10, (1000, 64))
    tokens = np.full(64, 500)
    effect = np.mean([paired_difference(row, tokens, replicates=999).detectable for row in noise[:200]])
    found = [paired_difference(row + effect * tokens, tokens, replicates=999).low > 0 for row in noise]
    assert abs(np.mean(found) - 0.8) < 0.05  # four binomial errors of 0.013


def test_golden_one_stratum():
    """R = 6/30; residuals -1, 0, 1; variance = 3/2 * 2 / 900 = 1/300. Three documents give no interval."""
    interval = paired_difference([1, 2, 3], [10, 10, 10])
    assert interval.estimate == pytest.approx(0.2)
    assert interval.standard_error == pytest.approx(math.sqrt(1 / 300))
    assert interval.detectable == pytest.approx((4.302653 + 0.841621) * math.sqrt(1 / 300), rel=1e-6)
    assert (interval.documents, interval.tokens) == (3, 30)
    assert interval.low is None and interval.p_value is None and "too few documents" in interval.reason


def test_golden_two_strata_of_unequal_documents():
    """R = 20/40; residuals a: 0, 2, 1 (mean 1, squares 2); b: -4, 1 (mean -1.5, squares 12.5).

    Variance = (3/2 * 2 + 2 * 12.5) / 1600.
    """
    interval = paired_difference([2, 6, 5, 3, 4], [4, 8, 8, 14, 6], ["a", "a", "a", "b", "b"])
    assert interval.estimate == pytest.approx(0.5)
    assert interval.standard_error == pytest.approx(math.sqrt(28) / 40)


def test_agreement_with_a_plain_loop_over_replicates():
    """The moments of the module against the definition: draw, re-estimate, studentise, sort."""
    rng = np.random.default_rng(3)
    tokens, topic = rng.integers(300, 1001, 15), np.repeat([0, 1], [8, 7])
    delta = rng.normal(5, 8, 15)
    replicates, rank = 399, 10

    def ratio_and_error(d, s, h):
        ratio = d.sum() / s.sum()
        groups = [(d - ratio * s)[h == k] for k in (0, 1)]
        return ratio, math.sqrt(sum(len(g) * g.var(ddof=1) for g in groups)) / s.sum()

    ratio, standard_error = ratio_and_error(delta, tokens, topic)
    t_star = []
    for counts in draws((8, 7), replicates, BOOTSTRAP_SEED).astype(int):
        drawn = np.repeat(np.arange(15), counts)
        again, its_error = ratio_and_error(delta[drawn], tokens[drawn], topic[drawn])
        t_star.append((again - ratio) / its_error)
    t_star = np.sort(t_star)
    floor = student.ppf(0.975, 13)
    got = paired_difference(delta, tokens, topic, replicates=replicates)
    assert got.low == pytest.approx(ratio - max(t_star[-rank], floor) * standard_error)
    assert got.high == pytest.approx(ratio - min(t_star[rank - 1], -floor) * standard_error)


def test_law_strata_remove_the_spread_between_topics_and_their_order_is_free():
    rng = np.random.default_rng(4)
    topic = np.repeat(["prose", "code", "mathematics"], 8)
    delta = rng.normal(0, 1, 24) + np.repeat([0, 30, 60], 8)
    tokens = np.full(24, 500)
    within = paired_difference(delta, tokens, topic)
    assert within.standard_error < 0.2 * paired_difference(delta, tokens).standard_error
    mixed = np.arange(24).reshape(3, 8).T.ravel()  # topics interleaved, their documents in order
    again = paired_difference(delta[mixed], tokens[mixed], topic[mixed])
    assert (again.low, again.high) == pytest.approx((within.low, within.high))


samples = st.lists(st.tuples(st.integers(-1000, 1000), st.integers(300, 1000)), min_size=6, max_size=12)


@settings(max_examples=60, deadline=None)
@given(samples)
def test_law_p_value_interval_sign_and_shift_agree(sample):
    delta, tokens = np.array(sample, float).T
    one = paired_difference(delta, tokens, replicates=399)
    mirrored = paired_difference(-delta, tokens, replicates=399)
    shifted = paired_difference(delta + 0.25 * tokens, tokens, replicates=399)
    if one.low is None:
        assert one.reason and mirrored.low is None and shifted.low is None
        return
    assert one.low <= one.estimate <= one.high
    assert (one.p_value <= 0.05) == (one.low > 0 or one.high < 0)
    assert 2 / 400 <= one.p_value <= 1
    assert (mirrored.low, mirrored.high) == pytest.approx((-one.high, -one.low), rel=1e-6)
    width = one.high - one.low
    assert (shifted.low - 0.25, shifted.high - 0.25) == pytest.approx((one.low, one.high), abs=1e-6 * width)


def test_law_the_p_value_has_a_floor():
    delta = 100 + np.random.default_rng(6).normal(0, 1, 20)
    assert paired_difference(delta, np.full(20, 512)).p_value == 2 / 10_000


def test_law_same_seed_same_interval_other_seed_another():
    rng = np.random.default_rng(5)
    delta, tokens = rng.lognormal(0, 1, 16), np.full(16, 400)
    one = paired_difference(delta, tokens)
    assert one == paired_difference(delta, tokens)
    assert one.high != paired_difference(delta, tokens, seed=BOOTSTRAP_SEED + 1).high
    wider = paired_difference(delta, tokens, level=0.99)
    assert wider.low < one.low and one.high < wider.high and one.detectable < wider.detectable


def test_law_the_baseline_against_itself_is_exactly_zero():
    interval = paired_difference(np.zeros(20), np.full(20, 512))
    assert (interval.estimate, interval.low, interval.high, interval.p_value) == (0, 0, 0, 1)


def test_the_same_difference_everywhere_is_a_point():
    interval = paired_difference([1.0, 2.0, 7.0], [10, 20, 70])
    assert interval.low == interval.high == pytest.approx(0.1) and interval.p_value == 2 / 10_000


@pytest.mark.parametrize(
    ("delta", "strata", "reason"),
    [
        ([3.0], None, "one document: "),
        ([1.0, 2.0, 3.0], ["code", "code", "prose"], "one document in stratum prose"),
        ([0.0] * 15 + [9.0], None, "too few documents"),
        ([1.0, 1.0, 2.0, 2.0], [0, 0, 1, 1], "no spread within strata"),
    ],
)
def test_no_interval_says_why_and_decides_nothing(delta, strata, reason):
    interval = paired_difference(delta, [10] * len(delta), strata)
    assert interval.low is None and interval.high is None and interval.p_value is None
    assert reason in interval.reason
    assert interval.estimate == pytest.approx(sum(delta) / (10 * len(delta)))
    assert verdict(percent_change(interval), region_low=0) == "inconclusive"


@pytest.mark.parametrize(
    ("delta", "tokens", "more", "message"),
    [
        ([], [], {}, "at least one document"),
        ([1.0, 2.0], [10], {}, "one of each"),
        ([1.0, math.nan], [10, 10], {}, "difference nan at row 1"),
        ([1.0, math.inf], [10, 10], {}, "finite nats"),
        ([1.0, 2.0], [10, 0], {}, "tokens 0.0 at row 1"),
        ([1.0, 2.0], [10, 10], {"strata": ["a", None]}, "stratum None at row 1"),
        ([1.0, 2.0], [10, 10], {"replicates": 20}, "raise the number of replicates"),
    ],
)
def test_refusals(delta, tokens, more, message):
    with pytest.raises(UserError, match=message):
        paired_difference(delta, tokens, **more)


def test_golden_segments_end_with_their_document():
    delta = paired_losses(np.arange(9.0), np.zeros(9))
    frame = segments(delta, ["b"] * 5 + ["a"] * 4, length=2)
    assert frame.to_dict("list") == {
        "doc": ["b", "b", "b", "a", "a"],
        "segment": [0, 1, 2, 0, 1],
        "tokens": [2, 2, 1, 2, 2],
        "delta_sum": [1, 5, 4, 11, 15],
    }
    assert documents(frame).to_dict("list") == {"doc": ["b", "a"], "tokens": [5, 4], "delta_sum": [10, 26]}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paired_losses([1.0, 2.0], [1.0]), "score both policies on the same text"),
        (lambda: paired_losses([1.0, math.nan], [1.0, 1.0]), "loss nan at row 1"),
        (lambda: paired_losses([1.0], [-math.inf]), "baseline loss -inf at row 0"),
        (lambda: segments([1.0, math.nan], [0, 0]), "never dropped"),
        (lambda: segments([1.0, 2.0, 3.0], [0, 1, 0]), "document 0 comes back"),
        (lambda: segments([1.0, 2.0], ["a", None]), "document id None at row 1"),
        (lambda: segments([], []), "not empty"),
    ],
)
def test_refusals_of_positions(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_golden_percent_change():
    delta = np.array([4.0, 6.0, 5.0, 7.0, 3.0, 5.0, 6.0, 4.0])
    nats = paired_difference(delta, np.full(8, 1000))
    percent = percent_change(nats)
    assert percent.estimate == pytest.approx(100 * (math.exp(0.005) - 1))
    assert percent.low == pytest.approx(100 * (math.exp(nats.low) - 1))
    assert percent.detectable == pytest.approx(100 * (math.exp(nats.detectable) - 1))
    assert (percent.unit, percent.p_value) == ("percent", nats.p_value)
    with pytest.raises(UserError, match="once"):
        percent_change(percent)


def test_golden_holm():
    assert holm({"a": 0.03, "b": 0.01, "c": 0.04, "d": 0.9}) == pytest.approx(
        {"a": 0.09, "b": 0.04, "c": 0.09, "d": 0.9}
    )
    assert holm({"a": 0.02, "failed": None}) == {"a": 0.04, "failed": None}
    with pytest.raises(UserError, match="p-value nan of a"):
        holm({"a": math.nan})


INTERVAL = Interval(0.4, 0.2, 0.6, 0.1, 0.3, 0.001, documents=64, tokens=40_000)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 0.6, "supported"),
        (0.2, math.inf, "supported"),
        (-math.inf, 0.1, "not supported"),
        (0.7, math.inf, "not supported"),
        (-0.5, -0.1, "not supported"),
        (0.3, 0.5, "inconclusive"),
        (0.5, 2.0, "inconclusive"),
        (0.6, math.inf, "inconclusive"),
        (-math.inf, 0.2, "inconclusive"),
        (-math.inf, 0.5, "inconclusive"),
    ],
)
def test_golden_verdict(low, high, expected):
    """On an interval of 0.2 to 0.6; touching the region is not excluding it."""
    assert verdict(INTERVAL, low, high) == expected


def test_verdict_refuses_a_region_that_decides_nothing():
    for low, high in [(1, 0), (-math.inf, math.inf), (math.nan, 1)]:
        with pytest.raises(UserError, match="mend the claim"):
            verdict(INTERVAL, low, high)
