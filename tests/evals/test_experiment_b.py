"""Experiment B: what its arms may substitute, what its pilot decides, and what an emulator that looks on sees."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from engine.decision import IN_PLACE, SUBSTITUTE
from engine.errors import UserError
from engine.hook import attach
from engine.policies import load_policies
from engine.residency import Demand
from evals import experiment_b
from evals.experiment_b import (
    HEAVY,
    LIGHT,
    SHARES,
    arm,
    arms,
    foresee,
    mass_ratio,
    pilot,
    power,
    realised,
    supply,
    why_not,
    write_sheet,
)
from evals.perplexity import TokenizedDocument
from evals.preregistration import load
from evals.quality import CELL_FAILURES, Routing, Text, emulate, mass_by_token, record_routing, run_emulator
from evals.stats import Interval
from evals.watch import EVERY, SEEN, Watch, mechanism

CONTEXT, BOS, E, K, S = 64, 1, 16, 4, 6
TAU = 1 / K
STATISTICS = {"level": 0.95, "replicates": 999, "seed": 1}
OPTIONS = {"context": CONTEXT, "bos": BOS, "progress": None}


def text_of(seed: int, documents: int, tokens: int = 60, topic: str = "literary") -> Text:
    rng = np.random.default_rng(seed)
    held = tuple(
        TokenizedDocument(f"{topic}_{i}", tuple(rng.integers(2, 128, tokens).tolist()), words=9, bytes=99)
        for i in range(documents)
    )
    return Text(f"{topic}_{seed}", topic, f"{seed:064}", held, (tokens,) * documents)


@pytest.fixture(scope="module")
def attached(tiny_moe):
    with attach(tiny_moe("qwen3_moe")) as attachment:
        yield attachment


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    return [text_of(1, 6), text_of(2, 5, topic="code")]


@pytest.fixture(scope="module")
def routings(attached, texts) -> list[Routing]:
    return [record_routing(attached.model, attached, text, context=CONTEXT, bos=BOS) for text in texts]


@pytest.fixture(scope="module")
def demand(routings) -> Demand:
    first, second = (routing.trace.demand() for routing in routings)
    return Demand(first.counts + second.counts, first.events + second.events)


def piloted(attached, texts, demand, slots=S, test=None, **options):
    options = OPTIONS | options
    return pilot(
        attached.model, attached, texts, slots=slots, demand=demand, test=test or texts, comparisons=2,
        statistics=STATISTICS, **options,
    )  # fmt: skip


# ---- arms and their levels -------------------------------------------------------------------------------------------
def test_the_arms_are_those_that_the_preregistration_names(tmp_path):
    policies = {policy.id: policy for policy in arms({"low": 0.01, "middle": 0.02, "high": 0.036}, 0.1)}
    parts = load("config/preregistration.yaml").rows["P1.5"].parts
    assert {name for part in parts for name in (part.of, part.against)} == set(policies)
    write_sheet(tmp_path / "arms.tsv", policies.values())
    assert load_policies(tmp_path / "arms.tsv") == policies  # tau and level to the last bit
    for heavy, light in ((f"{HEAVY}_{name}", f"{LIGHT}_{name}") for name in (*SHARES, "random")):
        pair = [dataclasses.replace(policies[name], id="", miss_rule="") for name in (heavy, light)]
        assert pair[0] == pair[1]  # the rule alone tells a pair apart
    assert policies["few_heavy_random"] == dataclasses.replace(
        policies["few_heavy_middle"], id="few_heavy_random", standin="random", seed=experiment_b.SEED
    )
    assert all(policy.in_place and policy.beta is None for policy in policies.values())


def test_law_supply_is_what_weighs_on_each_side_of_tau_among_misses_but_the_first_choice(routings, demand):
    by_layer = supply(routings, TAU, slots=S, demand=demand)
    residents = np.argsort(-demand.counts, axis=1, kind="stable")[:, :S]
    for layer in range(demand.counts.shape[0]):
        g = np.concatenate([routing.trace.g[:, layer] for routing in routings])
        chosen = np.concatenate([routing.trace.chosen[:, layer] for routing in routings])
        scores = np.concatenate([routing.trace.chosen_scores[:, layer] for routing in routings])
        miss = ~np.isin(chosen, residents[layer]) & (scores < scores.max(axis=1, keepdims=True))
        assert by_layer[HEAVY][layer] == pytest.approx((g * (miss & (g >= TAU))).sum(axis=1).mean(), rel=1e-5)
        assert by_layer[LIGHT][layer] == pytest.approx((g * (miss & (g < TAU))).sum(axis=1).mean(), rel=1e-5)
    assert min(by_layer[HEAVY]) > 0.01 and min(by_layer[LIGHT]) > 0.01  # or nothing was compared


def test_the_pilot_takes_its_levels_from_the_poorer_arm_and_meets_them(attached, texts, demand):
    found = piloted(attached, texts, demand)
    poorer = min(found["supply"].values())
    assert found["tau"] == TAU
    for name, share in SHARES.items():
        assert found["levels"][name] == pytest.approx(share * poorer, rel=1e-5)
        assert found["realised"][name]["ratio"] == found["realised"][name][HEAVY] / found["realised"][name][LIGHT]
    for rule in (HEAVY, LIGHT):  # of 360 and 300 events a text, less than one weight is left over
        assert found["realised"]["low"][rule] == pytest.approx(found["levels"]["low"], abs=2 / 660)
    assert found["test_documents"] == found["effect"]["middle"]["documents"] == 11
    assert found["foreseen_standard_error"] == pytest.approx(found["effect"]["middle"]["standard_error"])
    assert found["go"] is (found["reason"] is None)
    more = piloted(attached, texts, demand, test=[text_of(3, 22), text_of(4, 22, topic="code")])
    assert more["foreseen_standard_error"] == pytest.approx(found["foreseen_standard_error"] / 2)
    assert more["power"] > found["power"]


def test_where_no_miss_is_left_nothing_is_run(attached, texts, demand, monkeypatch):
    monkeypatch.setattr(experiment_b, "emulate", lambda *_, **__: pytest.fail("an arm ran"))
    found = piloted(attached, texts, demand, slots=E)
    assert not found["go"] and found["reason"] == "few_heavy could substitute nothing with 16 of 16 experts resident"
    assert "levels" not in found


@pytest.mark.parametrize("failure", CELL_FAILURES)
def test_a_pilot_that_fails_says_why(attached, texts, demand, monkeypatch, failure):
    def fails(*_, **__):
        raise failure("the test\nwants it")

    monkeypatch.setattr(experiment_b, "emulate", fails)
    found = piloted(attached, texts, demand)
    assert not found["go"] and found["reason"] == f"the pilot failed: {failure.__name__}: the test wants it"
    assert found["levels"].keys() == SHARES.keys()


def test_too_few_slots_are_a_reason(attached, texts, demand):
    found = piloted(attached, texts, demand, slots=K - 1)
    assert not found["go"] and "3 slots a layer; expected from K = 4" in found["reason"]


def test_a_text_of_one_document_leaves_no_standard_error(attached, demand, monkeypatch):
    monkeypatch.setattr(experiment_b, "TOLERANCE", 1.0)
    found = piloted(attached, [text_of(1, 1, tokens=240), text_of(2, 5, topic="code")], demand)
    assert not found["go"] and found["power"] is None
    assert found["reason"].startswith("no standard error to foresee a power from: one document in stratum literary")


# ---- what the pilot decides ------------------------------------------------------------------------------------------
def interval(estimate=0.01, standard_error=0.002, documents=26) -> Interval:
    return Interval(estimate, None, None, standard_error, None, None, documents, 8000)


UNEQUAL = "at the middle level the arms realise a mass of"


@pytest.mark.parametrize(
    ("masses", "found", "foreseen", "reason"),
    [
        ((0.0205, 0.02), interval(), 0.9, None),
        ((0.0211, 0.02), interval(), 0.9, f"{UNEQUAL} 0.0211 and 0.02, more than 5 % apart"),
        ((0.0189, 0.02), interval(), 0.9, f"{UNEQUAL} 0.0189 and 0.02, more than 5 % apart"),
        ((0.02, 0.0), interval(), 0.9, f"{UNEQUAL} 0.02 and 0, more than 5 % apart"),
        ((0.02, 0.02), interval(), 0.79, "the foreseen power at the middle level is 0.79, below 0.8"),
        ((0.02, 0.02), interval(), None, "no standard error to foresee a power from: too few test documents"),
    ],
)
def test_the_pilot_stops_for_unequal_masses_and_for_too_little_power(masses, found, foreseen, reason):
    assert why_not(realised(*masses), found, foreseen) == reason


def test_golden_power():
    # Effect of 4 standard errors, 79 degrees of freedom, two comparisons: t quantile of 1 - .0125 is 2.285; the chance
    # of a normal with mean 4 to lie beyond it is Phi(1.715) = .957, beyond -2.285 nothing.
    assert power(0.04, 0.01, 79, 0.025) == pytest.approx(0.957, abs=1e-3)
    assert power(-0.04, 0.01, 79, 0.025) == power(0.04, 0.01, 79, 0.025)  # the sign is not known beforehand
    assert power(0.0, 0.01, 79, 0.025) == pytest.approx(2 * scipy_stats.norm.cdf(-2.285), abs=1e-4)
    assert (power(0.01, 0.0, 5, 0.05), power(0.0, 0.0, 5, 0.05)) == (1.0, 0.0)


def test_the_foreseen_error_falls_with_the_root_of_the_documents():
    texts = [text_of(seed, 13, topic=topic) for seed, topic in ((1, "a"), (2, "b"), (3, "c"), (4, "d"))]
    found = foresee(interval(documents=26), texts * 2, comparisons=2)
    assert found["test_documents"] == 104
    assert found["foreseen_standard_error"] == pytest.approx(0.001)
    assert found["power"] == power(0.01, 0.001, 100, 0.025)
    alone = foresee(interval(), [text_of(1, 1)], comparisons=2)
    assert alone["power"] is None and alone["test_documents"] == 1


# ---- masses ----------------------------------------------------------------------------------------------------------
def test_golden_mass_ratio():
    heavy, light = np.array([2.0, 3.0, 4.0, 3.0]), np.array([2.0, 3.0, 4.0, 3.0])
    topics = ["a", "a", "b", "b"]
    assert mass_ratio(1.02 * heavy, light, topics, **STATISTICS)[0] == pytest.approx(1.02)
    assert mass_ratio(heavy, np.zeros(4), topics, **STATISTICS) == (None, None, None)
    assert mass_ratio(heavy, light + np.arange(4), ["a", "b", "c", "d"], **STATISTICS)[1:] == (None, None)


def test_law_the_interval_of_a_ratio_is_that_of_its_inverse_roughly_and_holds_it():
    rng = np.random.default_rng(5)
    light = rng.uniform(5, 7, 80)
    heavy = light * rng.normal(1.03, 0.05, 80)
    topics = np.repeat(["a", "b", "c", "d"], 20)
    ratio, low, high = mass_ratio(heavy, light, topics, **STATISTICS)
    other, inverse_low, inverse_high = mass_ratio(light, heavy, topics, **STATISTICS)
    assert low < ratio < high and 1.0 < low and high < 1.06 and ratio == pytest.approx(1 / other)
    assert (1 / inverse_high, 1 / inverse_low) == pytest.approx((low, high), abs=2e-3)


# ---- an emulator that looks on ---------------------------------------------------------------------------------------
@pytest.fixture
def watched(attached, texts, demand):
    """watched(rule, level, standin) -> (policy, [(watch, losses, log) of each text])."""

    def run(rule=HEAVY, level=0.2, standin="next_best"):
        policy = arm(rule, "x", level, TAU, standin)
        found = []
        for text in texts:
            watch = Watch(attached, policy, slots=S, demand=demand)
            found.append((watch, *run_emulator(attached.model, watch, text, **OPTIONS)))
        return policy, found

    return run


@pytest.mark.parametrize("standin", ["next_best", "random"])
def test_law_looking_on_changes_nothing(attached, texts, demand, watched, standin):
    policy, found = watched(standin=standin)
    for text, (_, losses, log) in zip(texts, found, strict=True):
        plain = emulate(attached.model, attached, policy, text, slots=S, demand=demand, delay=1, **OPTIONS)
        assert losses.tobytes() == plain[0].tobytes() and log.kind.tobytes() == plain[1].kind.tobytes()
        assert (log.kind == IN_PLACE).any() and not (log.kind == SUBSTITUTE).all()


def test_what_is_seen_is_of_every_eighth_token(texts, watched):
    _, found = watched()
    for text, (watch, _, log) in zip(texts, found, strict=True):
        assert len(log.kind) == sum(text.scored)
        assert len(watch.seen) == (log.kind[::EVERY] == SUBSTITUTE).sum() > 5


def test_mechanism_counts_every_substitution_and_averages_what_was_seen(watched):
    _, found = watched()
    seen = mechanism([(watch, log) for watch, _, log in found])
    logs = [log for *_, log in found]
    assert seen["substitutions"] == sum((log.kind == SUBSTITUTE).sum() for log in logs)
    assert seen["events_with_substitution"] == sum((log.kind == SUBSTITUTE).any(axis=2).sum() for log in logs)
    mass = np.concatenate([mass_by_token(log) for log in logs]).mean()
    events = sum(log.events for log in logs)
    assert seen["g_mean"] * seen["substitutions"] / events == pytest.approx(mass)
    every = np.concatenate([watch.seen for watch, *_ in found])
    assert seen["looked_at"] == len(every)
    assert {name: seen[name] for name in SEEN} == pytest.approx(dict(zip(SEEN, every.mean(axis=0), strict=True)))


def test_mechanism_of_nothing_substituted_has_no_means():
    seen = mechanism([])
    assert (seen["substitutions"], seen["g_mean"], seen["standin_rank"]) == (0, None, None)


def test_law_the_best_stand_in_of_one_substitution_is_first_among_residents(watched):
    """With one substitution an event; random ones are anywhere."""
    for standin in ("next_best", "random"):
        _, found = watched(level=0.1, standin=standin)
        ranks = []
        for watch, _, log in found:
            number = (log.kind[::EVERY] == SUBSTITUTE).sum(axis=2)  # [T / 8, L]
            of_layer = [number[:, layer] for layer in range(number.shape[1])]
            alone = np.concatenate([np.repeat(n == 1, n) for n in _in_order_of_calls(of_layer, watch)])
            ranks.append(watch.seen[alone, list(SEEN).index("standin_rank_residents")])
        ranks = np.concatenate(ranks)
        assert len(ranks) > 20
        assert (ranks == 1).all() if standin == "next_best" else 1.5 < ranks.mean() <= S


def _in_order_of_calls(of_layer, watch):
    """A text's documents are passes of 60 tokens, and in each the layers follow each other."""
    starts = np.arange(0, len(of_layer[0]) * EVERY, EVERY)
    for first in range(0, starts[-1] + 1, 60):
        where = (starts >= first) & (starts < first + 60)
        yield from (numbers[where] for numbers in of_layer)


def test_golden_what_a_stand_in_gives_is_computed_expert_by_expert(tiny_moe, texts, demand, monkeypatch):
    """Every number of every substitution that was looked at, from the model's own weights, one expert at a time."""
    model, looked = tiny_moe("qwen3_moe"), []
    look = Watch._look
    monkeypatch.setattr(Watch, "_look", lambda self, *a: looked.append((self, a, look(self, *a))) or looked[-1][2])
    with attach(model) as attachment:
        watch = Watch(attachment, arm(LIGHT, "x", 0.1, TAU), slots=S, demand=demand)
        run_emulator(model, watch, dataclasses.replace(texts[0], documents=texts[0].documents[:1]), **OPTIONS)
        compared = 0
        for held, (call, tokens, places, missing, standin, output), found in looked:
            resident = set(held.residency.state.slots[call.layer]["expert"].tolist())
            for n, (token, place) in enumerate(zip(tokens, places, strict=True)):
                hidden = call.hidden[token].double()
                ours, theirs = (one_expert(call.module, int(e), hidden) for e in (standin[n], missing[n]))
                chosen = set(call.index[token].tolist())
                assert int(missing[n]) in chosen - resident and int(standin[n]) in resident - chosen
                order = sorted(set(range(E)) - chosen, key=lambda e: (-float(call.scores[token, e]), e))
                among = [e for e in order if e in resident]
                weights = call.weights[token].double()
                gap, layer = float((ours - theirs).norm()), float(output[token].double().norm())
                expected = [order.index(int(standin[n])) + 1, among.index(int(standin[n])) + 1]
                expected += [gap, gap / float(theirs.norm()), gap / layer]
                expected.append(float(weights[place] / weights.sum()) * gap / layer)
                assert found[n].tolist() == pytest.approx(expected, rel=1e-4)
                compared += 1
    assert compared > 10


def one_expert(module, expert: int, hidden):
    gate, up = (module.gate_up_proj[expert].double() @ hidden).chunk(2)
    return module.down_proj[expert].double() @ (gate * gate.sigmoid() * up)


def test_a_policy_that_moves_its_residents_is_not_watched(attached, demand):
    policy = dataclasses.replace(arm(HEAVY, "x", 0.1, TAU), eviction="lru")
    with pytest.raises(ValueError, match="moves its residents"):
        Watch(attached, policy, slots=S, demand=demand)


@pytest.mark.parametrize("level", [0.0, 1.5, math.nan])
def test_a_level_that_is_no_share_is_refused(level):
    with pytest.raises(UserError, match="experiment B, arm few_heavy_low: share"):
        arm(HEAVY, "low", level, TAU)
