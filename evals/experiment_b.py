"""Experiment B: at equal substituted mass, do few heavy substitutions cost more than many light ones? (claim P1.5)

Residents are frozen: the S experts of highest calibration demand, from which stand-ins are taken. Every other chosen
expert is computed where it lies, unless its arm substitutes it: never the first choice, and no more than the level,
which every event pays into an account of its layer. `few_heavy` takes what weighs at least tau = 1/K, heaviest first,
`many_light` what weighs less, lightest first. So the arms differ in how the same mass is made up, and in nothing else.

    found = pilot(model, attachment, calibration_texts, slots=64, demand=demand, test=test_texts, ...)
    policies = arms(found["levels"], found["tau"])          # where found["go"]; else found["reason"] says why not

The pilot, on calibration text, fixes the levels and says beforehand whether the test could decide anything. Of three
levels the middle one decides, by its masses and its power; the others are shown. Random arms take any resident for a
stand-in: between them weight differs and rank does not, between a random arm and its own rule rank and not weight.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy.stats import norm
from scipy.stats import t as student

from engine.decision import SUBSTITUTE
from engine.files import write_text
from engine.policies import COLUMNS, PAYING, STILL, Policy, as_row, parse_row
from engine.residency import Demand, Residency
from evals.bootstrap import POWER, NoSpread, studentise
from evals.parallel import ahead
from evals.quality import CELL_FAILURES, Routing, Text, emulate, mass_by_token, paired_interval, record_routing
from evals.stats import Interval, percent_change

HEAVY, LIGHT = PAYING
SHARES = {"low": 0.25, "middle": 0.5, "high": 0.9}  # levels: of the mass that the poorer arm could substitute
DECIDES = "middle"
RANDOM = "random"  # level of the arms with random stand-ins: the middle one
TOLERANCE = 0.05  # realised masses of a pair are equal within this share
SEED = 20_512  # of the random stand-ins


# ---- arms ------------------------------------------------------------------------------------------------------------
def arm(rule: str, name: str, level: float, tau: float, standin: str = "next_best") -> Policy:
    """One arm as a row of a sheet. Stand-ins have the weight that they have in every bundle, the model's own."""
    cells = {
        "id": f"{rule}_{name}",
        "miss_rule": rule,
        "tau": repr(tau),
        "share": repr(level),
        "standin": standin,
        "standin_weight": "own",
        "standin_recency": "yes",
        "eviction": STILL,
        "seed": str(SEED) if standin == "random" else "-",
    }
    return parse_row(dict.fromkeys(COLUMNS, "-") | cells, f"experiment B, arm {rule}_{name}")


def arms(levels: Mapping[str, float], tau: float) -> list[Policy]:
    """All eight. levels: of SHARES, in mass an event."""
    ordinary = [arm(rule, name, levels[name], tau) for rule in PAYING for name in SHARES]
    return ordinary + [arm(rule, RANDOM, levels[DECIDES], tau, "random") for rule in PAYING]


def write_sheet(path: str | Path, policies: Iterable[Policy]) -> None:
    """A sheet of policies that `engine.policies.load_policies` reads."""
    rows = ["\t".join(COLUMNS), *("\t".join(as_row(policy).values()) for policy in policies)]
    write_text(path, "\n".join(rows) + "\n")


def supply(routings: Iterable[Routing], tau: float, *, slots: int, demand: Demand) -> dict[str, list[float]]:
    """By rule, for every layer: the mean mass an event that it could substitute where the model runs exactly.

    Taken from the decision itself at a level of 1, where the account always pays. Who stands in does not matter.
    """
    routings = list(routings)
    found = {}
    for rule in PAYING:
        policy = dataclasses.replace(
            arm(rule, "supply", 1.0, tau, "random"), standin_weight="missing"
        )  # needs no scores
        mass = np.zeros(demand.counts.shape[0])
        for trace in (routing.trace for routing in routings):
            layers, top_k = trace.chosen.shape[1:]
            residency = Residency(layers=layers, experts=trace.experts, top_k=top_k, slots=slots, rule=policy.rule())
            residency.warm(demand)
            log, _ = residency.decide_layers(0, trace.chosen, trace.weights, None, chosen_scores=trace.chosen_scores)
            mass += np.where(log.kind == SUBSTITUTE, log.g, 0).sum(axis=(0, 2), dtype=np.float64)
        found[rule] = (mass / sum(len(routing.trace.chosen) for routing in routings)).tolist()
    return found


# ---- pilot -----------------------------------------------------------------------------------------------------------
def pilot(
    model,
    attachment,
    texts: Sequence[Text],
    *,
    slots: int,
    demand: Demand,
    test: Sequence[Text],
    comparisons: int,
    statistics: Mapping[str, float | int],
    threads: int = 1,
    **options,
) -> dict:
    """The levels, what the arms realise there, and whether the test would decide: `go`, or a `reason`.

    texts: of role calibration; test: the texts that the arms will be scored on, of which the number of documents alone
    is read; comparisons: of the Holm family that the test is in; threads: of all processes (evals/parallel.py).
    options: context, bos, progress of `emulate`.
    """
    tau = 1.0 / attachment.top_k
    found = {"status": "ok", "go": False, "reason": None, "tau": tau}
    found |= {"slots_count": slots, "experts": attachment.experts}
    try:
        exact = [record_routing(model, attachment, text, **options) for text in texts]
        by_layer = supply(exact, tau, slots=slots, demand=demand)
        offered = {rule: float(np.mean(masses)) for rule, masses in by_layer.items()}
        found |= {"supply": offered, "supply_by_layer": by_layer}
        poorer = min(offered, key=offered.get)
        if not offered[poorer]:
            resident = f"{slots} of {attachment.experts} experts resident"
            return found | {"reason": f"{poorer} could substitute nothing with {resident}"}
        found |= {"levels": {name: float(f"{share * offered[poorer]:.6g}") for name, share in SHARES.items()}}
        tried = [policy for policy in arms(found["levels"], tau) if policy.standin != "random"]
        start = {"slots": slots, "demand": demand}
        work = [functools.partial(_run, model, attachment, policy, texts, **start, **options) for policy in tried]
        with ahead(work, threads) as results:
            runs = {policy.id: result() for policy, result in zip(tried, results, strict=True)}
    except CELL_FAILURES as exc:
        reason = f"the pilot failed: {type(exc).__name__}: {' '.join(str(exc).split())}"
        return found | {"status": "failed", "reason": reason}
    pairs = {name: [runs[f"{rule}_{name}"] for rule in PAYING] for name in SHARES}
    masses = {name: realised(*(mass for _, mass in pair)) for name, pair in pairs.items()}
    effects = {
        name: paired_interval(
            ((text.topic, text.clusters, *losses) for text, *losses in zip(texts, heavy, light, strict=True)),
            **statistics,
        )
        for name, ((heavy, _), (light, _)) in pairs.items()
    }
    foreseen = foresee(effects[DECIDES], test, comparisons)
    reason = why_not(masses[DECIDES], effects[DECIDES], foreseen["power"])
    found |= {"realised": masses, "effect": {name: effect(interval) for name, interval in effects.items()}}
    return found | foreseen | {"go": reason is None, "reason": reason}


def _run(model, attachment, policy: Policy, texts: Sequence[Text], **options) -> tuple[list[np.ndarray], float]:
    """Losses [tokens] of every text, each from the warm start, and the substituted mass of all events."""
    losses, masses = [], []
    for text in texts:
        loss, log = emulate(model, attachment, policy, text, delay=1, **options)
        losses.append(loss)
        masses.append(mass_by_token(log))
    return losses, float(np.concatenate(masses).mean())


def realised(heavy: float, light: float) -> dict:
    """Masses of a pair of arms, and whether they are equal enough to be compared."""
    ratio = heavy / light if light else None
    return {HEAVY: heavy, LIGHT: light, "ratio": ratio, "equal": ratio is not None and abs(ratio - 1) <= TOLERANCE}


def effect(interval: Interval) -> dict:
    """Of the heavy arm against the light one, in percent of perplexity; the standard error in nats a token."""
    percent = percent_change(interval)
    numbers = {"percent": percent.estimate, "percent_low": percent.low, "percent_high": percent.high}
    sizes = {"standard_error": interval.standard_error, "documents": interval.documents, "tokens": interval.tokens}
    return numbers | sizes


def foresee(interval: Interval, test: Sequence[Text], comparisons: int) -> dict:
    """The power of the test on the test texts, if the pilot's effect were the true one, whichever sign it has.

    The standard error falls with the root of the number of documents; the level is shared out among the comparisons,
    as Holm's step-down does with the smallest p-value.
    """
    documents = sum(len({name for name, _ in text.clusters}) for text in test)
    df = documents - len({text.topic for text in test})
    found = {"test_documents": documents, "comparisons": comparisons, "foreseen_standard_error": None, "power": None}
    if interval.standard_error is None or df < 1:
        return found
    standard_error = interval.standard_error * math.sqrt(interval.documents / documents)
    return found | {
        "foreseen_standard_error": standard_error,
        "power": power(interval.estimate, standard_error, df, (1 - interval.level) / comparisons),
    }


def power(effect: float, standard_error: float, df: int, alpha: float) -> float:
    """Chance that a two-sided test at alpha finds a true effect."""
    if not standard_error:
        return 1.0 if effect else 0.0
    reach, critical = abs(effect) / standard_error, float(student.ppf(1 - alpha / 2, df))
    return float(norm.cdf(reach - critical) + norm.cdf(-reach - critical))


def why_not(masses: dict, interval: Interval, foreseen: float | None) -> str | None:
    """Why the experiment stops after its pilot, or None."""
    if not masses["equal"]:
        return (
            f"at the {DECIDES} level the arms realise a mass of {masses[HEAVY]:.4g} and {masses[LIGHT]:.4g}, "
            f"more than {100 * TOLERANCE:g} % apart"
        )
    if foreseen is None:
        return f"no standard error to foresee a power from: {interval.reason or 'too few test documents'}"
    if foreseen < POWER:
        return f"the foreseen power at the {DECIDES} level is {foreseen:.2f}, below {POWER}"
    return None


# ---- masses ----------------------------------------------------------------------------------------------------------
def mass_ratio(
    heavy: np.ndarray, light: np.ndarray, topics: Sequence[str], *, level: float, replicates: int, seed: int
) -> tuple[float | None, float | None, float | None]:
    """Realised mass of one arm over that of the other, with its interval over documents; None where there is none.

    heavy, light [documents]: substituted mass, summed over a document. The ratio of sums, studentised.
    """
    if not light.sum():
        return None, None, None

    def ratio(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # [R, N] -> [R], [R, N]
        total = weights @ light
        value = weights @ heavy / total
        return value, (heavy - value[:, None] * light) / total[:, None]

    try:
        ends = studentise(ratio, topics, level=level, replicates=replicates, seed=seed).ends(level)
    except NoSpread:
        ends = None, None
    return float(heavy.sum() / light.sum()), *ends
