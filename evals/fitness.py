"""Is a model fit to decide claims? Checked on calibration text, before any claim is drawn from it.

The papers' effects can only be seen in a model whose experts differ and whose misses hurt. At a quarter of the experts
resident:

    substituting every miss raises perplexity, its interval above 0
    the next best stand-in loses less than a random one, the interval of the difference above 0
    the baseline's miss rate lies between 5 and 40 %

and, for information: the weight of the first choice, the number of choices of weight 0.15 and more, for each pair of
bundles the share of events in which they differ, and which combine weight of stand-ins loses less. A model that fails
is refused for the ledger by name. A check whose policy the sheet lacks is not passed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np

from engine.log import DecisionLog, count
from engine.policies import BASELINE, STANDIN_WEIGHTS, Policy
from engine.residency import Demand, slots_from_percent
from evals.parallel import ahead
from evals.quality import (
    Text,
    emulate,
    paired_interval,
    record_routing,
    replay_cell,
    router_statistics,
    share_of_events_that_differ,
)
from evals.stats import Interval, percent_change

SLOTS_PERCENT = 25.0
MISS_RATE = (0.05, 0.40)
CONTROL_SEED = 0
ABLATED = "rule_015"  # the policy that both combine weights are tried under


def paired(texts: Sequence[Text], losses: dict[str, np.ndarray], baseline: dict[str, np.ndarray]) -> Interval:
    """Mean difference a token over all texts. losses, baseline: [tokens] by text id."""
    return paired_interval((text.topic, text.clusters, losses[text.id], baseline[text.id]) for text in texts)


def gate(
    model,
    attachment,
    policies: dict[str, Policy],
    texts: Sequence[Text],
    demand: Demand,
    *,
    threads: int = 1,
    **options,
) -> dict:
    """Run the gate; returns its record: checks (name, value, wanted, passed), fit, and what is for information.

    policies: those of engine.policies.BUNDLES that the sheet has, the baseline among them.
    threads: of all processes (evals/parallel.py). options: context, bos, progress of evals.quality.emulate.
    """
    slots = max(slots_from_percent(attachment.experts, SLOTS_PERCENT), attachment.top_k)
    with ahead([partial(record_routing, model, attachment, text, **options) for text in texts], threads) as results:
        exact = {text.id: result() for text, result in zip(texts, results, strict=True)}
    baseline = {name: routing.losses for name, routing in exact.items()}
    tried = list(policies.values())
    if "substitute_all" in policies:
        tried.append(
            dataclasses.replace(policies["substitute_all"], id="random_stand_in", standin="random", seed=CONTROL_SEED)
        )
    if ABLATED in policies:
        other = next(weight for weight in STANDIN_WEIGHTS if weight != policies[ABLATED].standin_weight)
        tried.append(dataclasses.replace(policies[ABLATED], id="other_weight", standin_weight=other))
    losses: dict[str, dict[str, np.ndarray]] = {}
    logs: dict[str, dict[str, DecisionLog]] = {}
    start = {"slots": slots, "demand": demand}
    pairs = list(itertools.product(tried, texts))
    work = [
        partial(replay_cell, policy, exact[text.id], **start)
        if policy.lossless
        else partial(emulate, model, attachment, policy, text, delay=1, **start, **options)
        for policy, text in pairs
    ]
    with ahead(work, threads) as results:
        for (policy, text), result in zip(pairs, results, strict=True):
            loss, log = result()
            losses.setdefault(policy.id, {})[text.id], logs.setdefault(policy.id, {})[text.id] = loss, log
    counts = [count(log) for log in logs[BASELINE].values()]
    miss_rate = 1 - sum(c["hits"] for c in counts) / sum(c["demands"] for c in counts)
    checks = [
        _check("substitute_all loses, % perplexity", texts, losses.get("substitute_all"), baseline),
        _check(
            "a random stand-in loses more than the next best, % perplexity",
            texts,
            losses.get("random_stand_in"),
            losses.get("substitute_all"),
        ),
        {
            "name": f"miss rate of {BASELINE}",
            "value": miss_rate,
            "wanted": f"{MISS_RATE[0]:g} to {MISS_RATE[1]:g}",
            "passed": MISS_RATE[0] <= miss_rate <= MISS_RATE[1],
        },
    ]
    lossy = [p.id for p in policies.values() if not p.lossless]
    events = sum(log.events for log in logs[BASELINE].values())
    return {
        "fit": all(check["passed"] for check in checks),
        "slots_percent": SLOTS_PERCENT,
        "slots": slots,
        "events": events,
        "checks": checks,
        **router_statistics(exact.values()),
        "loss_percent": {p: dataclasses.asdict(percent_change(paired(texts, losses[p], baseline))) for p in lossy},
        "standin_weight": _standin_weight(policies, texts, losses, baseline),
        "events_that_differ": {
            f"{one} {other}": sum(
                share_of_events_that_differ(logs[one][t.id], logs[other][t.id]) * logs[one][t.id].events for t in texts
            )
            / events
            for one, other in itertools.combinations([BASELINE, *lossy], 2)
        },
    }


def _check(name: str, texts: Sequence[Text], losses: dict | None, than: dict | None) -> dict:
    """Is the loss surely greater than the other?"""
    wanted = "an interval above 0"
    if losses is None or than is None:
        return {"name": name, "value": None, "wanted": f"{wanted}; the sheet lacks substitute_all", "passed": False}
    percent = percent_change(paired(texts, losses, than))
    return {
        "name": name,
        "value": percent.estimate,
        "low": percent.low,
        "high": percent.high,
        "wanted": wanted,
        "passed": percent.low is not None and percent.low > 0,
    }


def _standin_weight(policies: dict[str, Policy], texts: Sequence[Text], losses: dict, baseline: dict) -> dict | None:
    """Loss of both combine weights of stand-ins under one policy, in percent, and which the sheet uses."""
    if ABLATED not in policies:
        return None
    used = policies[ABLATED].standin_weight
    found = {
        weight: dataclasses.asdict(
            percent_change(paired(texts, losses[ABLATED if weight == used else "other_weight"], baseline))
        )
        for weight in STANDIN_WEIGHTS
    }
    better = min(found, key=lambda weight: found[weight]["estimate"])
    return {"policy": ABLATED, "loss_percent": found, "better": better, "sheet": used}
