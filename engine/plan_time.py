"""How long a token is expected to take: a host's times and a policy's counts, added up without a trace.

    expected = expect(timing, geometry, counts, policy)
    expected.token_s, expected.waited_s

    token  = token_s + L (layer_s + event_s + experts_s[K] + predict_s) + beside + waited
    waited = L (sum over n of P(n) fetch_s[n] + P(n > 0) busy background_s / 2)

Misses of an event are taken to fall independently: of K chosen experts n are fetched with the binomial P(n) of their
mean. `busy` is the share of a token during which the link brings something else; a record in transit is not broken off,
so half of one is waited for. `beside` is what compute loses to transfers beside it (the profile's slowdown).

A prefetch brings, in every layer but the first, at most what passes while a layer computes. Events take the share of it
that was published, never more than the misses that the predictor names. What they take is not fetched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.geometry import Geometry
from engine.plan_counts import Counts
from engine.policies import Policy
from engine.timing import Timing


@dataclass(frozen=True)
class Expected:
    """Of one token on average; modelled, whatever the profile is."""

    token_s: float
    compute_s: float
    waited_s: float
    fetched: float  # experts a token waits for
    beside: float  # records that came beside compute

    @property
    def tokens_per_s(self) -> float:
        return 1.0 / self.token_s


def expect(timing: Timing, geometry: Geometry, counts: Counts, policy: Policy) -> Expected:
    layers, top_k = geometry.layers, geometry.top_k
    brought, taken = _prefetched(timing, geometry, counts, policy)
    fetched = max(counts.fetched - taken, 0.0)
    layer_s = timing.layer_s + timing.event_s + timing.predictor_s(policy.prefetch or "")
    work_s = timing.token_s + layers * (layer_s + _mean(timing.experts_s, top_k - counts.dropped, top_k))
    passing_s = layers * (counts.background + brought) * timing.background_s * timing.slowdown_transfer
    lost_s = min(passing_s, work_s) * (1.0 - 1.0 / timing.slowdown_compute)
    waits_s = layers * _mean(timing.fetch_s, fetched, top_k)
    busy = min(1.0, passing_s / (work_s + waits_s)) if passing_s else 0.0
    none = _share(0, fetched / top_k, top_k)
    half_s = layers * (1.0 - none) * busy * timing.background_s / 2
    return Expected(
        token_s=work_s + lost_s + waits_s + half_s,
        compute_s=work_s + lost_s,
        waited_s=waits_s + half_s,
        fetched=layers * fetched,
        beside=layers * (counts.background + brought),
    )


def _prefetched(timing: Timing, geometry: Geometry, counts: Counts, policy: Policy) -> tuple[float, float]:
    """(records brought, records taken) of an event, on average over all layers."""
    if not policy.prefetch or not counts.fetched:
        return 0.0, 0.0
    part_s = (timing.experts_s[-1] + timing.layer_s) * timing.slowdown_compute
    passing = part_s / (timing.background_s * timing.slowdown_transfer) if timing.background_s else math.inf
    later = (geometry.layers - 1) / geometry.layers
    taken = min(counts.foretold * counts.fetched, counts.taken * passing)
    return later * taken / max(counts.taken, 1e-9), later * taken


def _mean(seconds: tuple[float, ...], mean: float, most: int) -> float:
    """Expected seconds of a number of experts that is binomial with this mean."""
    share = min(max(mean / most, 0.0), 1.0)
    return sum(_share(n, share, most) * seconds[n] for n in range(most + 1))


def _share(n: int, share: float, most: int) -> float:
    return math.comb(most, n) * share**n * (1.0 - share) ** (most - n)
