"""Correlations over policies and over documents, and what draws their intervals.

Laws: a statistic's influences are its slopes, ends and p-values agree, the estimate of the first documents is that of
those documents alone. Golden: numbers worked out by hand. Agreement: with numpy, scipy and a plain loop over draws.
Coverage at our number of documents is printed by tests/interval_coverage.py; here a few sets of it.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from interval_coverage import CASES, covered, policies
from scipy.stats import spearmanr

from evals.bootstrap import SEED, NoSpread, Quantiles, Studentised, quantiles, studentise, weights_of
from evals.correlations import Sums, pearson_over_policies, pearson_within, spearman_over_policies
from evals.ledger_quantities import NotRun
from evals.ledger_statistics import Counted, over_policies

TOPICS = np.repeat([0, 1, 2], [5, 8, 7])
N, P = len(TOPICS), 6


def made(seed: int = 1, slope: float = 0.5) -> tuple[Sums, Sums]:
    """Masses and losses of six policies over twenty documents of unequal length."""
    rng = np.random.default_rng(seed)
    size = rng.integers(100, 400, (N, 1)) * np.ones((1, P))
    mass = np.linspace(0.1, 0.6, P) * rng.lognormal(0, 0.3, (N, 1))
    loss = slope * mass + 0.03 * rng.normal(size=(N, P)) + 0.02 * np.arange(P) ** 2 / P
    return Sums(mass * size, size), Sums(loss * size, size)


def plain(sums: Sums, weights: np.ndarray) -> np.ndarray:
    return (weights @ sums.total) / (weights @ sums.size)


X, Y = made()
RNG = np.random.default_rng(8)
STATISTICS = {
    "over policies": pearson_over_policies(X, Y),
    "over policies, other sizes": pearson_over_policies(X, Sums(Y.total, RNG.integers(10, 60, (N, P)).astype(float))),
    "within texts": pearson_within(X.total[:, 0], Y.total[:, 0] + RNG.normal(size=N), TOPICS),
    "within texts that are no topics": pearson_within(X.total[:, 1], Y.total[:, 3], np.arange(N) % 4),
}


# ---- statistics ------------------------------------------------------------------------------------------------------
def test_agreement_with_numpy_and_scipy_in_every_draw():
    weights = weights_of(TOPICS, np.bincount(TOPICS), 40, SEED)
    z, rho = (kind(X, Y)(weights)[0] for kind in (pearson_over_policies, spearman_over_policies))
    for draw, one, other in zip(weights, z, rho, strict=True):
        assert np.tanh(one) == pytest.approx(np.corrcoef(plain(X, draw), plain(Y, draw))[0, 1])
        assert other == pytest.approx(spearmanr(plain(X, draw), plain(Y, draw))[0])


def test_golden_within_texts():
    """Text a: x less its mean -1, 0, 1, y 1, -2, 1; text b: -1, 1 and -1, 1. r = 2 / sqrt(4 * 8)."""
    x, y, text = np.array([4.0, 5, 6, 10, 12]), np.array([3.0, 0, 3, 7, 9]), np.array(list("aaabb"))
    (z,), _ = pearson_within(x, y, text)(np.ones((1, 5)))
    assert np.tanh(z) == pytest.approx(2 / math.sqrt(32))
    (z,), _ = pearson_within(x, y, text)(np.array([[1.0, 1, 1, 0, 0]]))
    assert np.tanh(z) == pytest.approx(0, abs=1e-12)


def test_golden_policies_of_unequal_documents():
    """Two documents of 1 and 3 tokens: masses 1/4, 2/4, 6/4 and losses 4/4, 2/4, 3/4: r = -1 / sqrt(28 / 3 * 4 / 2)."""
    size = np.array([[1.0], [3.0]]) * np.ones((1, 3))
    mass, loss = Sums(np.array([[1.0, 0, 2], [0, 2, 4]]), size), Sums(np.array([[1.0, 1, 1], [3, 1, 2]]), size)
    x, y = [Fraction(n, 4) for n in (1, 2, 6)], [Fraction(n, 4) for n in (4, 2, 3)]
    dx, dy = ([value - sum(side) / 3 for value in side] for side in (x, y))
    expected = float(sum(a * b for a, b in zip(dx, dy, strict=True))) / math.sqrt(
        float(sum(a * a for a in dx) * sum(b * b for b in dy))
    )
    (z,), _ = pearson_over_policies(mass, loss)(np.ones((1, 2)))
    assert np.tanh(z) == pytest.approx(expected)


@pytest.mark.parametrize("name", STATISTICS)
def test_law_influences_are_slopes_and_sum_to_zero(name):
    weights = weights_of(TOPICS, np.bincount(TOPICS), 3, SEED)
    _, influence = STATISTICS[name](weights)
    assert (weights * influence).sum(1) == pytest.approx(0, abs=1e-9 * np.abs(influence).max())
    for document in (0, 7, N - 1):
        step = np.zeros((1, N))
        step[0, document] = 1e-6
        slope = (STATISTICS[name](weights + step)[0] - STATISTICS[name](np.maximum(weights - step, 0))[0]) / 2e-6
        drawn = weights[:, document] > 0  # a document that is not there has no side to step to
        assert influence[drawn, document] == pytest.approx(slope[drawn], rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("off", [1e-2, 1e-5, 1e-8])
def test_law_a_correlation_near_one_keeps_its_digits(off):
    """y = x + off times a direction orthogonal to it and as long: r = 1 / sqrt(1 + off^2), z = asinh(1 / off)."""
    x = np.array([-3.0, -1, 1, 3])
    other = np.array([1.0, -1, -1, 1]) * math.sqrt(5)
    size = np.ones((1, 4))
    (z,), influence = pearson_over_policies(Sums(x[None], size), Sums((x + off * other)[None], size))(np.ones((1, 1)))
    assert z == pytest.approx(math.asinh(1 / off), rel=1e-8) and np.isfinite(influence).all()


def test_law_units_order_of_policies_and_common_losses_change_nothing():
    one = studentise(pearson_over_policies(X, Y), TOPICS, replicates=199)
    order = np.random.default_rng(2).permutation(P)
    mass = Sums(1000 * X.total[:, order], X.size[:, order])
    loss = Sums(Y.total[:, order] + 0.7 * Y.size[:, order], Y.size[:, order])  # what all policies lose alike
    other = studentise(pearson_over_policies(mass, loss), TOPICS, replicates=199)
    assert other.ends(0.95) == pytest.approx(one.ends(0.95))


# ---- intervals -------------------------------------------------------------------------------------------------------
def test_agreement_with_a_plain_loop_over_draws():
    """Draw, re-estimate, studentise, sort, with slopes taken by hand."""

    def z_and_error(weights):
        _, (influence,) = pearson_over_policies(X, Y)(weights[None])
        variance = 0.0
        for topic in range(3):
            own = np.repeat(influence[topic == TOPICS], weights[topic == TOPICS].astype(int))
            variance += len(own) * own.var(ddof=1)
        return math.atanh(np.corrcoef(plain(X, weights), plain(Y, weights))[0, 1]), math.sqrt(variance)

    z, standard_error = z_and_error(np.ones(N))
    t_star = []
    for weights in weights_of(TOPICS, np.bincount(TOPICS), 199, SEED):
        again, its_error = z_and_error(weights)
        t_star.append((again - z) / its_error)
    drawn = studentise(pearson_over_policies(X, Y), TOPICS, replicates=199)
    assert drawn.standard_error == pytest.approx(standard_error)
    assert drawn.t_star == pytest.approx(np.sort(t_star), rel=1e-6)


DRAWN = {
    "pearson": lambda: studentise(STATISTICS["over policies"], TOPICS, replicates=399),
    "within texts": lambda: studentise(STATISTICS["within texts"], TOPICS, jackknife=True, replicates=399),
    "spearman": lambda: quantiles(spearman_over_policies(X, made(4, 0.0)[1]), TOPICS, replicates=399),
}


@pytest.mark.parametrize("name", DRAWN)
def test_law_p_values_and_ends_agree_at_every_end(name):
    drawn = DRAWN[name]()
    low, high = drawn.ends(0.95)
    assert low < high
    for value, rejected in ((low - 1e-6, True), (low + 1e-6, False), (high - 1e-6, False), (high + 1e-6, True)):
        assert (drawn.p_value(value) <= 0.05 + 1e-12) == rejected, value
    assert drawn.p_value(math.inf) == 2 / 400


def test_the_jackknife_can_only_widen():
    statistic = STATISTICS["within texts"]
    plain_error = studentise(statistic, TOPICS, replicates=99).standard_error
    assert studentise(statistic, TOPICS, jackknife=True, replicates=99).standard_error >= plain_error


def test_a_draw_without_a_value_counts_at_both_ends_and_many_leave_no_interval():
    """Of the draws, `lost` have no value: the ends move outwards by half of them; many leave none."""

    def rho(lost):
        def statistic(weights):
            values = np.linspace(-0.5, 0.5, len(weights))
            values[:lost] = np.nan
            return values, np.full(weights.shape, np.nan)

        return quantiles(statistic, TOPICS, replicates=399)

    whole, some = rho(0), rho(4)
    assert isinstance(whole, Quantiles) and np.isinf(some.drawn).sum() == 4
    assert some.ends(0.95)[1] > whole.ends(0.95)[1]
    with pytest.raises(NoSpread, match="too few documents"):
        rho(10)


@pytest.mark.parametrize(
    ("topics", "words"),
    [(np.r_[TOPICS[1:], 9], "one document in stratum 9"), (np.arange(N) // 2, None)],
)
def test_one_document_of_a_topic_cannot_be_drawn(topics, words):
    if words is None:
        assert isinstance(studentise(pearson_over_policies(X, Y), topics, replicates=99), Studentised)
    else:
        with pytest.raises(NoSpread, match=words):
            studentise(pearson_over_policies(X, Y), topics, replicates=99)


# ---- quantities ------------------------------------------------------------------------------------------------------
NAMES = [f"text/doc{i}" for i in range(N)]


@pytest.mark.parametrize("ranks", [False, True])
def test_law_the_estimate_of_the_first_documents_is_that_of_those_alone(ranks):
    quantity = over_policies(X, Y, NAMES, TOPICS, 1000, ranks=ranks)
    estimates, sides = quantity.running(0.0)
    order = [NAMES.index(name) for name in quantity.documents]
    for number in (1, 9, N):
        own = order[:number]
        alone = over_policies(
            *(Sums(s.total[own], s.size[own]) for s in (X, Y)), [NAMES[i] for i in own], TOPICS[own], 1
        )
        value = alone.beside["spearman"] if ranks else alone.interval(replicates=99).estimate
        assert estimates[number - 1] == pytest.approx(value)
        assert quantity.first(number).interval(replicates=99).estimate == pytest.approx(value)
    assert set(sides) <= {-1, 0, 1} and quantity.interval(replicates=99).estimate == estimates[-1]


def test_one_policy_left_out_shows_who_carries_a_correlation():
    rng = np.random.default_rng(3)
    size = np.full((N, P), 100.0)
    values = [np.r_[0.1 + 0.001 * rng.normal(size=P - 1), 0.9] * np.ones((N, 1)) for _ in range(2)]
    mass, loss = (Sums(side * size, size) for side in values)
    beside = over_policies(mass, loss, NAMES, TOPICS, 1000).beside
    assert beside["left_out_high"] > 0.99 > 0.9 > beside["left_out_low"] and beside["policies"] == P


def test_two_policies_or_equal_ones_are_no_correlation():
    two = [Sums(sums.total[:, :2], sums.size[:, :2]) for sums in (X, Y)]
    with pytest.raises(NotRun, match="over 2 policies: it takes 3"):
        over_policies(*two, NAMES, TOPICS, 1)
    flat = Sums(np.repeat(Y.total[:, :1], P, axis=1), Y.size)
    with pytest.raises(NotRun, match="the same for all policies"):
        over_policies(X, flat, NAMES, TOPICS, 1)


def test_a_count_is_its_own_interval():
    count = Counted(["a", "b"], 2.0, 10, "correlations")
    found = count.interval(level=0.9)
    assert (found.low, found.estimate, found.high, found.level) == (2, 2, 2, 0.9)
    assert (count.p_value_at(1.0), count.p_value_at(2.0)) == (0.0, 1.0)
    assert count.running(0.0)[1].tolist() == [0, 1]


# ---- coverage --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "case",
    [
        CASES["mean"]["t3 effects of 0.05 nats"],
        partial(policies, effect="t3", number=6, r=0.92, own=0.1),
        CASES["documents"]["0.4, exponential losses, normal masses"],
        CASES["problems"]["Pearson -0.92 before noise, own noise 0.1"],
    ],
    ids=["mean", "policies", "documents", "problems"],
)
def test_law_coverage_is_near_95_percent(case):
    """With three binomial errors (1.5 points at 200 sets) to either side; many more sets are in docs/statistics.md."""
    share, _, length = covered(case, sets=200, replicates=199)
    assert 0.95 - 0.046 < share < 0.95 + 0.046, share
    assert 0 < length < 1.5
