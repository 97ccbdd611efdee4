"""How often does a 95 % interval hold the true value, at our own number and lengths of documents?

Losses are made up so that the truth is known: tokens of a document are an AR(1) with heavy tails, documents have
effects of their own (normal, Student t with 3 degrees of freedom, exponential or log-normal), documents are as long as
those of the published run, and its four topics differ. Nothing of a real loss goes in, only the sizes. What is
printed stands in docs/statistics.md.

    PYTHONPATH=. python -m tests.interval_coverage --sets 1000 --replicates 999     # ten minutes; --only mean, ...
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from scipy.signal import lfilter
from scipy.special import expit
from scipy.stats import spearmanr

from evals.bootstrap import quantiles, studentise
from evals.correlations import Sums, pearson_over_policies, pearson_within, spearman_over_policies
from evals.stats import paired_difference

RECORD = Path(__file__).parents[1] / "results" / "published" / "quality" / "reference" / "fetch_lfu_decay.json"
PHI = 0.6  # of the AR(1)
CUT, PROBLEMS, POSITIONS = 320, 16, 63
SEED = 11
Ends = tuple[float, float]

EFFECTS: dict[str, Callable[[np.random.Generator, tuple], np.ndarray]] = {  # mean 0, variance 1
    "exponential": lambda rng, shape: rng.exponential(size=shape) - 1,
    "log-normal": lambda rng, shape: (
        (rng.lognormal(0, 0.8, shape) - math.exp(0.32)) / math.sqrt((math.exp(0.64) - 1) * math.exp(0.64))
    ),
    "normal": lambda rng, shape: rng.normal(size=shape),
    "t3": lambda rng, shape: rng.standard_t(3, shape) / math.sqrt(3),
}


# ---- documents -------------------------------------------------------------------------------------------------------
def sizes() -> tuple[np.ndarray, np.ndarray]:
    """Tokens and topic number of every document of the published run."""
    clusters = json.loads(RECORD.read_text(encoding="utf-8"))["clusters"]
    tokens = [number for text in clusters.values() for _, number in text]
    return np.array(tokens), np.repeat(np.arange(len(clusters)), [len(text) for text in clusters.values()])


def ar_sums(rng: np.random.Generator, tokens: np.ndarray, series: int = 1) -> np.ndarray:
    """Sums over each document [N, series] of an AR(1) of variance 1 whose innovations are Student t with 3 df."""
    noise = rng.standard_t(3, (len(tokens), series, tokens.max())) * math.sqrt((1 - PHI**2) / 3)
    values = lfilter([1], [1, -PHI], noise, axis=-1)
    return (values * (np.arange(tokens.max()) < tokens[:, None, None])).sum(-1)


def variance_of_mean(tokens: np.ndarray) -> np.ndarray:
    """Of such an AR(1) over so many tokens, its start from zero left aside."""
    edge = 2 * PHI * (1 - PHI**tokens) / (tokens * (1 - PHI)) ** 2
    return (1 + PHI) / (1 - PHI) / tokens - edge


# ---- what is estimated: truth, interval and estimate of one set after the other --------------------------------------
def mean_differences(rng, sets: int, replicates: int, effect: str, scale: float) -> Iterator[tuple[float, Ends]]:
    """The mean paired difference a token. scale: of the documents' effects, nats; tokens have 0.5."""
    tokens, topic = sizes()
    level = 0.02 + 0.02 * (topic - 1.5)
    truth = (tokens * level).sum() / tokens.sum()
    for _ in range(sets):
        delta = tokens * (level + scale * EFFECTS[effect](rng, tokens.shape)) + 0.5 * ar_sums(rng, tokens)[:, 0]
        found = paired_difference(delta, tokens, topic, replicates=replicates)
        yield truth, (found.low, found.high)


def policies(
    rng, sets: int, replicates: int, effect: str, number: int, r: float, own: float, ranks: bool = False
) -> Iterator[tuple[float, Ends]]:
    """Correlation over so many policies, r in truth. own: sd of what a policy loses in a document of its own accord,
    in mean losses; besides all share a document's factor, and have 0.3 and 0.1 nats a token, shared and own."""
    tokens, topic = sizes()
    tokens = np.minimum(tokens, CUT)
    mass, loss = _true_policies(number, r)
    truth = spearmanr(mass, loss)[0] if ranks else r
    hard = np.array([0.7, 1.3, 1.15, 0.85])[topic]
    hard = (hard / (hard * tokens).sum() * tokens.sum())[:, None]
    kind, draw, back = pearson_over_policies, studentise, np.tanh
    if ranks:
        kind, draw, back = spearman_over_policies, quantiles, lambda rho: rho
    size = np.repeat(tokens[:, None], number, axis=1).astype(float)
    spread = size * np.sqrt(variance_of_mean(tokens))[:, None]  # of the sum of an AR(1), drawn as its normal limit
    for _ in range(sets):
        factor, heavy = (np.exp(s * rng.normal(size=(len(tokens), 1)) - s * s / 2) for s in (0.5, 0.3))
        x = mass * hard * heavy * (1 + 0.1 * rng.normal(size=size.shape))
        y = loss * hard * factor + own * loss.mean() * EFFECTS[effect](rng, size.shape)
        sums = y * size + 0.3 * ar_sums(rng, tokens) * loss / loss.mean() + 0.1 * rng.normal(size=size.shape) * spread
        drawn = draw(kind(Sums(x * size, size), Sums(sums, size)), topic, replicates=replicates)
        yield truth, tuple(back(np.array(drawn.ends(0.95))))


def documents(rng, sets: int, replicates: int, effect: str, mass: str, r: float) -> Iterator[tuple[float, Ends]]:
    """Correlation over documents within texts. r: before the tokens' noise, which the truth holds too."""
    tokens, topic = sizes()
    noise = 0.3**2 * variance_of_mean(tokens).mean()
    truth = r * 0.03 / math.sqrt(0.03**2 + noise)
    for _ in range(sets):
        x, effects = (EFFECTS[name](rng, tokens.shape) for name in (mass, effect))
        y = 0.03 * (r * x + math.sqrt(1 - r * r) * effects) + 0.02 * topic + 0.3 * ar_sums(rng, tokens)[:, 0] / tokens
        statistic = pearson_within(0.03 * x + 0.1 * topic, y, topic)
        drawn = studentise(statistic, topic, jackknife=True, replicates=replicates)
        yield truth, tuple(np.tanh(drawn.ends(0.95)))


def problems(rng, sets: int, replicates: int, own: float, r: float, number: int = 25) -> Iterator[tuple[float, Ends]]:
    """Correlation of mass and agreement over 16 problems. own: sd in logits of a policy's share in a problem."""
    mass, loss = _true_policies(number, r)
    logits = 2.5 - 8 * loss / loss.mean() / 4
    truth = np.corrcoef(mass, _agreed(np.random.default_rng(SEED), logits, own, 40_000).mean(0))[0, 1]
    size = np.full((PROBLEMS, number), float(POSITIONS))
    for _ in range(sets):
        x = mass * np.exp(0.2 * rng.normal(size=(PROBLEMS, 1))) * (1 + 0.1 * rng.normal(size=size.shape))
        y = np.round(_agreed(rng, logits, own, PROBLEMS) * POSITIONS)
        drawn = studentise(
            pearson_over_policies(Sums(x * size, size), Sums(y, size)), np.zeros(PROBLEMS), replicates=replicates
        )
        yield truth, tuple(np.tanh(drawn.ends(0.95)))


def _agreed(rng, logits: np.ndarray, own: float, number: int) -> np.ndarray:
    """Share of positions that agree [problems, policies]: hard problems are hard for all."""
    hard = 0.8 * rng.normal(size=(number, 1))
    share = expit(logits + hard + own * rng.normal(size=(number, len(logits))))
    sd = np.sqrt(share * (1 - share) / POSITIONS * 2)  # twice that of independent positions
    return np.clip(share + sd * rng.normal(size=share.shape), 0, 1)


def _true_policies(number: int, r: float, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Mass and loss a policy whose correlation is exactly r."""
    mass = np.linspace(0.02, 0.25, number)
    x = (mass - mass.mean()) / np.linalg.norm(mass - mass.mean())
    other = np.random.default_rng(seed).normal(size=number)
    other -= other.mean() + x * (other @ x)
    loss = r * x + math.sqrt(1 - r * r) * other / np.linalg.norm(other)
    return mass, 0.01 + 0.1 * (loss - loss.min())


TEN = {"effect": "t3", "number": 10, "ranks": True}


# ---- the table -------------------------------------------------------------------------------------------------------
CASES: dict[str, dict[str, Callable]] = {
    "mean": {
        f"{effect} effects of {scale:g} nats": partial(mean_differences, effect=effect, scale=scale)
        for effect, scale in (*((effect, 0.05) for effect in EFFECTS), ("t3", 0.01))
    },
    "policies": {
        f"Pearson {r:g}, own noise {own:g} ({effect})": partial(policies, effect=effect, number=24, r=r, own=own)
        for effect, r, own in (
            *(("t3", r, own) for r in (0.5, 0.92, 0.98) for own in (0.1, 0.5)),
            ("normal", 0.92, 0.1),
            ("normal", 0.92, 1.0),
        )
    },
    "ranks": {
        f"Spearman of ten, r {r:g}, own noise {own:g}": partial(policies, **TEN, r=r, own=own)
        for r in (0.3, 0.6, 0.92)
        for own in (0.1, 1.0)
    },
    "documents": {
        f"{r:g}, {effect} losses, {mass} masses": partial(documents, effect=effect, mass=mass, r=r)
        for effect in EFFECTS
        for mass, r in (("normal", 0.4), ("exponential", 0.0), ("exponential", 0.4))
    },
    "problems": {
        f"Pearson {-r:g} before noise, own noise {own:g}": partial(problems, r=r, own=own)
        for r in (0.5, 0.92)
        for own in (0.1, 0.5)
    },
}


def covered(case: Callable, sets: int, replicates: int) -> tuple[float, float, float]:
    """Share of intervals that hold the truth, the truth, and their mean length. No interval holds nothing."""
    inside, lengths, truth = 0, [], math.nan
    for truth, (low, high) in case(np.random.default_rng(SEED), sets, replicates):
        inside += low is not None and low <= truth <= high
        lengths.append(high - low)
    return inside / sets, truth, float(np.mean(lengths))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=2000, help="made-up runs a case")
    parser.add_argument("--replicates", type=int, default=1999)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    a = parser.parse_args()
    for kind in a.only:
        print(f"\n| {kind} | truth | covered | length |\n|---|---|---|---|", flush=True)
        for name, case in CASES[kind].items():
            share, truth, length = covered(case, a.sets, a.replicates)
            print(f"| {name} | {truth:.3f} | {100 * share:.1f} % | {length:.3f} |", flush=True)


if __name__ == "__main__":
    main()
