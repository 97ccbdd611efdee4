"""The ledger on made-up losses of known size: what is in the region is supported, what is not is not, and the rest.

Laws: the verdict follows the interval, the sign rule and Holm can only make it inconclusive, rows are conjunctions.
The rules are the committed ones, with fewer replicates.
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from engine.errors import UserError
from engine.policies import load_policies
from evals.corpora import row_of
from evals.ledger import (
    NOT_RUN,
    OPEN,
    REFUTED,
    SUPPORTED,
    Finding,
    Judged,
    conclude,
    find_row,
    judge,
    over_models,
)
from evals.ledger_engine import lift, shown_without_verdict
from evals.ledger_evidence import Speed, gather
from evals.ledger_measures import MEASURES
from evals.ledger_quantities import Ratio, ratio, sign_change
from evals.measured_tables import read_documents as read_measured_documents
from evals.preregistration import check, load
from evals.quality import paired_interval
from evals.records import Scored
from evals.speed import read_documents
from evals.stats import percent_change

PATH = Path(__file__).parents[2] / "config" / "preregistration.yaml"
RULES = load(PATH)
RULES = replace(RULES, statistics=RULES.statistics | {"replicates": 999})
ONE = replace(RULES, models=("reference",))
TOPICS = dict(zip(RULES.texts, ("encyclopaedic", "code", "word_problems", "scripture"), strict=True))
DOCUMENTS, TOKENS = 12, 30  # a text, a document
CLAIMS = [*(f"P1.{n}" for n in ("1a", "1b", *range(2, 12))), *(f"P2.{n}" for n in range(1, 6))]  # of the design
NO_SPEED = Speed()


# ---- made-up runs ----------------------------------------------------------------------------------------------------
def scored(effects: dict[str, float], noise: float = 0.0, model: str = "reference", shares=None) -> dict[str, Scored]:
    """Policies whose loss is the baseline's plus an effect (nats a token), plus noise by document, on four texts."""
    base = np.random.default_rng(1).normal(3, 1, (len(TOPICS), DOCUMENTS * TOKENS))
    found = {}
    for number, (policy, effect) in enumerate({RULES.baseline: 0.0, **effects}.items()):
        wobble = np.random.default_rng(100 + number).normal(0, noise, (len(TOPICS), DOCUMENTS))
        loss = base + (effect + np.repeat(wobble, TOKENS, axis=1) if policy != RULES.baseline else 0)
        found[policy] = Scored(record(policy, model, (shares or {}).get(policy, 0.1)), losses(loss))
    return found


def losses(loss: np.ndarray) -> dict[str, np.ndarray]:
    return {f"{RULES.slots}/{text}": own for text, own in zip(TOPICS, loss, strict=True)}


def record(policy: str, model: str, share: float) -> dict:
    demands = 1000
    cells = [
        {
            "slots": RULES.slots,
            "slots_percent": 25,
            "text": text,
            "topic": topic,
            "status": "ok",
            "tokens": DOCUMENTS * TOKENS,
            "demands": demands + 10 * number,
            "hits": 600 + 3 * number,
            "substitutions": round(share * (demands + 10 * number)),
            "lossy_without_effect": False,
            "background_inert": False,
        }
        for number, (text, topic) in enumerate(TOPICS.items())
    ]
    clusters = {text: [[f"doc{i}", TOKENS] for i in range(DOCUMENTS)] for text in TOPICS}
    return {"model": model, "policy": policy, "cells": cells, "clusters": clusters, "expert_bytes": 1}


def percent(change: float) -> float:
    return math.log1p(change / 100)


def verdicts(row: str, runs: dict[str, dict[str, Scored]], rules=ONE, speed=NO_SPEED) -> dict[tuple[str, str], Judged]:
    judged = judge(find_row(rules.rows[row], rules, gather(runs, speed=speed)), rules)
    return {(one.finding.model, one.finding.part.id): one for one in judged}


def pair(quality: float, speed: float, noise: float = 0.0) -> dict[str, Scored]:
    """P1.6: change of perplexity in percent that background admission makes, in both pairs."""
    return scored({"rule_015": 0.01, "quality_first": 0.01 + percent(quality), "first_choice": 0.1,
                   "speed_first": 0.1 + percent(speed)}, noise)  # fmt: skip


QUALITY, SPEED = "quality_first_against_rule_015", "speed_first_against_first_choice"


# ---- measured hosts --------------------------------------------------------------------------------------------------
HOSTS = {"box": ("a" * 16, 2.7), "other": ("b" * 16, 2.8)}  # fingerprint, speedup of quality_first; the other's + 0.1
LOSS = {"quality_first": percent(1.0), "speed_first": percent(1.2)}


def timed(hosts=HOSTS, models=("reference",), noise: float = 0.002, **changes) -> pd.DataFrame:
    """Documents of measured hosts as tabulate_measured.py writes them: 4 of every text, 8 tokens, over both links."""
    rows = []
    for model, (host, (mark, faster)), (link, status) in itertools.product(
        models, hosts.items(), (("disk", "measured"), ("sdcard", "throttled"))
    ):
        for policy, times in ((RULES.baseline, 1.0), ("quality_first", faster), ("speed_first", faster + 0.1)):
            rng = np.random.default_rng(len(rows))
            for text, topic, i in ((text, topic, i) for text, topic in TOPICS.items() for i in range(4)):
                effect = 8 * LOSS.get(policy, 0.0) * (1 + rng.normal(0, noise))
                row = {"model": model, "size": "1024x1024", "rehearsal": True, "host": host, "fingerprint": mark}
                row |= {"link": link, "link_status": status, "policy": policy, "lossless": policy == RULES.baseline}
                row |= {"slots": RULES.slots, "slots_percent": 25.0, "text": text, "topic": topic, "document": f"d{i}"}
                row |= {"tokens": 8, "timed_tokens": 7, "time_s": 7 / times * (1 + rng.normal(0, noise))}
                row |= {"loss_nats": 24.0 + effect, "lossy_without_effect": False, "background_inert": False}
                row |= {"compared": 16, "identical": 16 if policy == RULES.baseline else 3}
                rows.append(row | changes)
    return pd.DataFrame(rows)


def measured_speed(documents: pd.DataFrame, path: Path) -> Speed:
    """Through the file, as the ledger reads it."""
    documents.to_csv(path, index=False)
    return replace(NO_SPEED, measured=read_measured_documents(path))


def lifted(speed: Speed, rules=ONE, row: str = "P1.7"):
    return replace(rules, rows=rules.rows | {row: lift(rules.rows[row], speed.measured)})


RUN = {"reference": scored({})}


def test_no_or_one_measured_host_decides_nothing(tmp_path):
    row = RULES.rows["P1.7"]
    assert lift(row, NO_SPEED.measured) is row and shown_without_verdict(row, row, NO_SPEED.measured) == (None, "")
    speed = measured_speed(timed({"box": HOSTS["box"]}), tmp_path / "d.csv")
    own = lift(row, speed.measured)
    assert own.not_run == "1 measured host, the claim is about 2" and own.parts == row.parts
    found = verdicts("P1.7", RUN, lifted(speed), speed)
    assert {one.verdict for one in found.values()} == {NOT_RUN} and conclude(list(found.values()))[0] == NOT_RUN


def test_the_numbers_of_one_host_are_shown_without_a_verdict(tmp_path):
    speed = measured_speed(timed({"box": HOSTS["box"]}), tmp_path / "d.csv")
    row = RULES.rows["P1.7"]
    shown, reason = shown_without_verdict(row, lift(row, speed.measured), speed.measured)
    found = {f.part.id: f for f in find_row(shown, ONE, gather(RUN, speed=speed))}
    assert reason == "1 measured host, the claim is about 2" and len(found) == 2 * len(row.parts)
    assert found["quality_first_speedup_on_box_disk"].interval.estimate == pytest.approx(2.7, rel=0.01)
    assert found["speed_first_loss_on_box_sdcard"].interval.estimate == pytest.approx(1.2, rel=0.02)


def test_two_measured_hosts_decide_and_each_must_agree(tmp_path):
    speed = measured_speed(timed(), tmp_path / "d.csv")
    found = verdicts("P1.7", RUN, lifted(speed), speed)
    assert len(found) == 2 * len(RULES.rows["P1.7"].parts)
    assert {one.verdict for one in found.values()} == {SUPPORTED} == {one.direction for one in found.values()}
    assert conclude(list(found.values())) == (SUPPORTED, None)
    one = found["reference", "quality_first_speedup_on_other_disk"].finding
    assert (one.part.host, one.part.link, one.quantity.tokens) == ("other", "disk", 7 * 16)

    speed = measured_speed(timed(HOSTS | {"other": ("b" * 16, 1.5)}), tmp_path / "d.csv")
    word, why = conclude(list(verdicts("P1.7", RUN, lifted(speed), speed).values()))
    assert word == REFUTED and "quality_first_speedup_on_other_disk" in why and "box" not in why


def test_two_folders_of_one_machine_are_one_host(tmp_path):
    speed = measured_speed(timed({"box": HOSTS["box"], "again": HOSTS["box"]}), tmp_path / "d.csv")
    assert lift(RULES.rows["P1.7"], speed.measured).not_run == "1 measured host, the claim is about 2"


def test_a_throttled_link_never_decides(tmp_path):
    speed = measured_speed(timed(), tmp_path / "d.csv")
    row = lift(RULES.rows["P1.7"], speed.measured)
    assert {part.link for part in row.parts} == {"disk"}
    shown, reason = shown_without_verdict(RULES.rows["P1.7"], row, speed.measured)
    assert {part.link for part in shown.parts} == {"sdcard"} and reason == "a throttled link decides nothing"


NOT_RUN_ON_HOSTS = {
    "a text is missing": (lambda d: d[(d["host"] == "box") | (d["text"] != "bible_test")], "other, disk: bible_test"),
    "another budget": (lambda d: d.assign(slots_percent=20.0), "another budget than 25 %"),
    "nothing replaced": (lambda d: d.assign(lossy_without_effect=d["policy"] == "quality_first"), "replaced nothing"),
    "background is inert": (lambda d: d.assign(background_inert=d["policy"] == "speed_first"), "is inert"),
    "not scored": (lambda d: d.assign(loss_nats=None), "are not scored"),
    "other documents": (
        lambda d: d[(d["policy"] != "quality_first") | (d["document"] != "d0")], "measured on other documents"
    ),
    "two sizes": (lambda d: pd.concat([d, d.assign(size="2048x512")]), "at several sizes: 1024x1024, 2048x512"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_RUN_ON_HOSTS)
def test_what_the_hosts_lack_is_not_run_with_its_reason(name, tmp_path):
    change, reason = NOT_RUN_ON_HOSTS[name]
    speed = measured_speed(change(timed()), tmp_path / "d.csv")
    found = verdicts("P1.7", RUN, lifted(speed), speed)
    assert any(one.verdict == NOT_RUN and reason in one.reason for one in found.values()), [
        one.reason for one in found.values()
    ]
    assert conclude(list(found.values()))[0] == NOT_RUN


def test_the_inflated_size_decides_where_it_was_measured(tmp_path):
    small = timed({name: (mark, 1.1) for name, (mark, _) in HOSTS.items()}, size="own")
    both = measured_speed(pd.concat([small, timed()]), tmp_path / "both.csv")
    assert conclude(list(verdicts("P1.7", RUN, lifted(both), both).values()))[0] == SUPPORTED
    own = measured_speed(small, tmp_path / "own.csv")
    assert conclude(list(verdicts("P1.7", RUN, lifted(own), own).values()))[0] == REFUTED


@pytest.mark.parametrize("row", ["P1.8", "P1.9", "P2.3", "P2.4", "P2.5"])
def test_other_claims_are_not_lifted_by_measured_hosts(row, tmp_path):
    speed = measured_speed(timed(), tmp_path / "d.csv")
    assert lift(RULES.rows[row], speed.measured) is RULES.rows[row]
    assert shown_without_verdict(RULES.rows[row], RULES.rows[row], speed.measured) == (None, "")


# ---- programs beside the engine --------------------------------------------------------------------------------------
def beside(faster: float, loss: float, models=("reference",)) -> pd.DataFrame:
    """llama.cpp, and the engine that is so many times faster and loses so many percent, under a memory limit."""
    table = timed({"box": HOSTS["box"]}, models, link="limited", link_status="limited")
    names = {RULES.baseline: "llama_cpp", "quality_first": "rule_015", "speed_first": "fetch_lfu_decay"}
    table = table.assign(policy=table["policy"].map(names)).drop_duplicates(["model", "policy", "text", "document"])
    base = table[table["policy"] == "llama_cpp"].set_index(["model", "text", "document"])
    for name, times, change in (("rule_015", faster, percent(loss)), ("fetch_lfu_decay", 6.0, 0.0)):
        own = table["policy"] == name
        pairs = base.loc[list(table.loc[own, ["model", "text", "document"]].itertuples(index=False, name=None))]
        spread = 1 + 0.01 * np.cos(np.arange(len(pairs)))
        table.loc[own, "time_s"] = pairs["time_s"].to_numpy() / (times * spread)
        table.loc[own, "loss_nats"] = pairs["loss_nats"].to_numpy() + 8 * change * spread
    return table


@pytest.mark.parametrize(
    ("faster", "loss", "word"), [(2.9, 1.6, SUPPORTED), (20.0, 1.6, REFUTED), (2.9, 5.0, REFUTED), (0.5, 1.6, REFUTED)]
)
def test_a_claim_about_llama_cpp_is_decided_by_the_programs_under_the_limit(faster, loss, word, tmp_path):
    beside(faster, loss).to_csv(tmp_path / "peers.csv", index=False)
    speed = replace(NO_SPEED, peers=read_measured_documents(tmp_path / "peers.csv"))
    row = lift(RULES.rows["P1.9"], speed.of_hosts(RULES.rows["P1.9"]))
    assert row.not_run is None and {part.host for part in row.parts} == {"box"}
    rules = replace(ONE, rows=ONE.rows | {"P1.9": row})
    found = verdicts("P1.9", RUN, rules, speed)
    assert conclude(list(found.values()))[0] == word
    own = found["reference", "speedup_on_box_limited"]
    assert own.finding.interval.estimate == pytest.approx(faster, rel=0.01)
    assert own.direction == (SUPPORTED if faster > 1 else REFUTED)
    assert found["reference", "loss_on_box_limited"].finding.interval.estimate == pytest.approx(loss, rel=0.02)
    assert found["reference", "exact_speedup_on_box_limited"].verdict == SUPPORTED


def test_measured_policies_do_not_decide_a_claim_about_llama_cpp(tmp_path):
    speed = measured_speed(timed(), tmp_path / "d.csv")
    row = RULES.rows["P1.9"]
    assert lift(row, speed.of_hosts(row)) is row and row.not_run


# ---- the verdict of a part -------------------------------------------------------------------------------------------
def test_an_effect_inside_the_region_is_supported():
    found = verdicts("P1.6", {"reference": pair(-0.9, -0.7, noise=0.0005)})
    one = found["reference", QUALITY]
    assert one.verdict == one.direction == SUPPORTED and one.finding.interval.estimate == pytest.approx(-0.9, abs=0.05)
    assert found["reference", SPEED].verdict == SUPPORTED
    assert conclude(list(found.values())) == (SUPPORTED, None)


@pytest.mark.parametrize("change", [-4.0, 1.0])
def test_an_interval_outside_the_region_is_not_supported(change):
    found = verdicts("P1.6", {"reference": pair(change, -0.7, noise=0.0005)})
    assert found["reference", QUALITY].verdict == REFUTED
    assert found["reference", QUALITY].direction == (SUPPORTED if change < 0 else REFUTED)
    word, why = conclude(list(found.values()))
    assert word == REFUTED and QUALITY in why


def test_a_wide_interval_is_inconclusive():
    one = verdicts("P1.6", {"reference": pair(-0.9, -0.9, noise=0.2)})["reference", QUALITY]
    assert one.verdict == OPEN and one.finding.interval.low < -1.5 and one.finding.interval.high > -0.3


def test_a_bundle_is_paired_with_the_other_not_with_the_baseline():
    """Noise that both bundles share cancels: the interval is much shorter than either's against the baseline."""
    runs = scored({"rule_015": 0.01, "quality_first": 0.01}, noise=0.3)
    shared = {key: loss + percent(-0.9) for key, loss in runs["rule_015"].losses.items()}
    runs["quality_first"] = replace(runs["quality_first"], losses=shared)
    one = verdicts("P1.6", {"reference": runs})["reference", QUALITY].finding.interval
    assert one.high - one.low < 1e-6 and one.estimate == pytest.approx(-0.9)


def test_the_interval_is_that_of_the_tables():
    runs = pair(-0.9, -0.7, noise=0.02)
    one = verdicts("P1.6", {"reference": runs})["reference", QUALITY].finding.interval
    names = [(f"doc{i}", TOKENS) for i in range(DOCUMENTS)]
    parts = [
        (topic, names, *(runs[policy].losses[f"{RULES.slots}/{text}"] for policy in ("quality_first", "rule_015")))
        for text, topic in TOPICS.items()
    ]
    expected = percent_change(paired_interval(parts, replicates=999))
    assert one.estimate == pytest.approx(expected.estimate)
    # documents stand in another order, so the replicates draw others
    assert (one.low, one.high) == pytest.approx((expected.low, expected.high), abs=0.35)
    assert one.standard_error == pytest.approx(expected.standard_error)


def test_a_sign_change_in_the_last_half_is_inconclusive():
    """The same documents, told in an order in which the mean changes its side late."""
    runs = pair(-0.9, -0.9, noise=0.0005)
    clean = verdicts("P1.6", {"reference": runs})["reference", QUALITY]
    names = list(clean.finding.quantity.documents)
    assert clean.verdict == SUPPORTED and clean.finding.sign_change is None
    late = set(names[30:])  # the first 30 of 48 rise slightly, the rest fall far
    for key, loss in runs["quality_first"].losses.items():
        text = key.split("/")[1]
        for i in range(DOCUMENTS):
            own = slice(i * TOKENS, (i + 1) * TOKENS)
            loss[own] += 0.0005 - percent(-0.9) if f"{text}/doc{i}" not in late else -0.0145
    one = verdicts("P1.6", {"reference": runs})["reference", QUALITY]
    estimates, sides = one.finding.quantity.running(0)
    assert estimates[29] > 0 > estimates[-1] and sides[29] == 1
    assert one.finding.sign_change is not None and one.finding.sign_change >= 30
    assert one.verdict == OPEN and one.direction == OPEN


def test_a_sign_change_in_the_first_half_does_not_matter():
    frame = pd.DataFrame({"document": list("abcdefgh"), "stratum": "x", "a": [9, -1, -3, -9, -9, -9, -9, -9], "b": 100})
    quantity = Ratio(frame.assign(size=100), "perplexity", 800)
    _, sides = quantity.running(0)
    assert sides.tolist() == [1, 1, 1, -1, -1, -1, -1, -1]
    assert sign_change(quantity, 0, 0.5) is None and sign_change(quantity, 0, 0.25) == 3


def test_the_order_of_documents_does_not_depend_on_the_text_they_came_in():
    frame = pd.DataFrame({"document": [f"t/{i}" for i in range(20)], "stratum": "x", "a": 1.0, "b": 10, "size": 10})
    one, other = ratio(frame, "perplexity"), ratio(frame.iloc[::-1], "perplexity")
    assert one.frame["document"].tolist() == other.frame["document"].tolist() != frame["document"].tolist()


def test_several_comparisons_can_only_make_a_verdict_inconclusive():
    """A part that its interval alone just supports falls to Holm when a second model is in the family."""
    noises = np.linspace(0.002, 0.02, 40)
    seen = set()
    for noise in noises:
        runs = pair(-0.9, -0.9, noise=noise)
        alone = verdicts("P1.6", {"reference": runs})["reference", QUALITY]
        family = verdicts("P1.6", {"reference": runs}, RULES)["reference", QUALITY]  # reference_b is counted too
        assert family.p_holm >= alone.p_holm >= alone.finding.p_value
        assert family.verdict in (alone.verdict, OPEN)
        seen.add((alone.verdict, family.verdict))
    assert (SUPPORTED, OPEN) in seen and (SUPPORTED, SUPPORTED) in seen


def test_p_values_and_intervals_agree_at_every_end():
    for noise in (0.002, 0.01, 0.05):
        one = verdicts("P1.6", {"reference": pair(-0.9, -0.9, noise=noise)})["reference", QUALITY].finding
        low, high = one.interval.low, one.interval.high
        for value, rejected in ((low - 1e-3, True), (low + 1e-3, False), (high - 1e-3, False), (high + 1e-3, True)):
            assert (one.quantity.p_value_at(value, **RULES.statistics) <= 0.05 + 1e-9) == rejected


# ---- loss a substitution ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("heavy", "word"), [(0.6, SUPPORTED), (0.03, REFUTED), (0.06, OPEN)])
def test_loss_a_substitution_is_a_ratio_of_losses_over_shares(heavy, word):
    """substitute_all substitutes twice as often: its loss counts half."""
    runs = scored({"rule_015": 0.01, "substitute_all": heavy}, 0.001, shares={"rule_015": 0.1, "substitute_all": 0.2})
    one = verdicts("P1.1a", {"reference": runs})["reference", "loss_per_substitution"]
    found = one.finding.interval
    assert found.estimate == pytest.approx(heavy / 2 / 0.01, rel=0.1)
    assert found.low < found.estimate < found.high and one.verdict == word
    for end in (found.low, found.high):  # what the interval leaves out is what the test rejects
        assert one.finding.quantity.p_value_at(end, **RULES.statistics) == pytest.approx(0.05, abs=0.01)


def test_a_ratio_over_nothing_has_no_interval():
    runs = scored({"rule_015": 0.0, "substitute_all": 0.5}, 0.01)
    one = verdicts("P1.1a", {"reference": runs})["reference", "loss_per_substitution"]
    assert one.verdict == one.direction == OPEN and "denominator" in one.reason


# ---- times and shares ------------------------------------------------------------------------------------------------
def speed(changes: dict[str, float], by_document: bool) -> Speed:
    """Times on the deciding host: one second a token for every policy, times 1 + change, wobbling by document."""
    rng, rows, docs = np.random.default_rng(5), [], []
    for policy, change in changes.items():
        for text in TOPICS:
            common = {"model": "reference", "policy": policy, "slots": RULES.slots, "host": "rtx3090_pcie4"}
            common |= {"link": "pcie", "text": text}
            times = (1 + change) * (1 + rng.normal(0, 0.01, DOCUMENTS))
            rows.append(common | {"status": "ok", "reason": "", "tokens": DOCUMENTS * TOKENS})
            rows[-1]["token_s_mean"] = times.mean()
            docs += [common | {"document": f"doc{i}", "time_s": TOKENS * t} for i, t in enumerate(times)]
    return Speed(pd.DataFrame(rows), pd.DataFrame(docs) if by_document else read_documents(None))


@pytest.mark.parametrize("by_document", [False, True])
def test_a_change_of_time(by_document):
    changes = {"rule_015": 0, "quality_first": 0.04, "first_choice": 0, "speed_first": -0.05}
    times = speed(changes, by_document)
    runs = scored({name: 0.01 * number for number, name in enumerate(changes)}, 0.1)  # losses that decide nothing
    found = verdicts("P1.8", {"reference": runs}, speed=times)
    more, less = found["reference", "quality_first_time"], found["reference", "speed_first_time"]
    assert more.finding.interval.estimate == pytest.approx(4, abs=1)
    assert less.finding.interval.estimate == pytest.approx(-5, abs=1)
    assert more.finding.quantity.units == ("documents" if by_document else "texts")
    assert len(more.finding.quantity.documents) == len(TOPICS) * (DOCUMENTS if by_document else 1)
    # four texts have too few draws for a family of four
    assert {more.verdict, less.verdict} == ({SUPPORTED} if by_document else {OPEN})
    assert found["reference", "quality_first_time_nvme"].verdict == NOT_RUN


def test_background_admission_that_is_inert_had_a_time_all_the_same():
    changes = {"rule_015": 0, "quality_first": 0.04, "first_choice": 0, "speed_first": -0.05}
    runs = scored(dict.fromkeys(changes, 0.01))
    for cell in runs["quality_first"].record["cells"]:
        cell["background_inert"] = True
    found = verdicts("P1.8", {"reference": runs}, speed=speed(changes, True))["reference", "quality_first_time"]
    assert found.verdict == NOT_RUN and "background admission of quality_first is inert" in found.reason


def test_shares_stay_between_nothing_and_all():
    one = verdicts("P1.1a", {"reference": scored({"rule_015": 0.01}, shares={"rule_015": 0.97})})
    share = one["reference", "rule_015_share"]
    assert share.verdict is None and share.finding.interval.estimate == pytest.approx(97, abs=0.2)
    assert 0 <= share.finding.interval.low <= share.finding.interval.high <= 100


# ---- rows and models -------------------------------------------------------------------------------------------------
def made(words: dict[str, str], role: str = "primary") -> list[Judged]:
    row = RULES.rows["P1.6"]
    parts = [replace(row.parts[0], id=name, role=role) for name in words]
    return [Judged(Finding(row, part, "reference", "s25"), verdict=words[part.id], reason="x") for part in parts]


@pytest.mark.parametrize(("words", "whole"), [
    ((SUPPORTED, SUPPORTED), SUPPORTED), ((SUPPORTED, OPEN), OPEN), ((OPEN, NOT_RUN), NOT_RUN),
    ((NOT_RUN, REFUTED), REFUTED), ((SUPPORTED, REFUTED), REFUTED),
])  # fmt: skip
def test_a_row_is_a_conjunction(words, whole):
    assert conclude(made(dict(zip("ab", words, strict=True))))[0] == whole


@pytest.mark.parametrize("word", [OPEN, NOT_RUN, REFUTED])
def test_without_its_condition_a_row_is_inconclusive(word):
    assert conclude([*made({"a": SUPPORTED}), *made({"c": word}, "condition")])[0] == OPEN
    assert conclude([*made({"a": SUPPORTED}), *made({"c": word}, "secondary")])[0] == SUPPORTED


@pytest.mark.parametrize(("words", "whole"), [
    ((SUPPORTED, SUPPORTED), SUPPORTED), ((REFUTED, REFUTED), REFUTED), ((SUPPORTED, REFUTED), OPEN),
    ((SUPPORTED, OPEN), OPEN), ((SUPPORTED, NOT_RUN), NOT_RUN),
])  # fmt: skip
def test_models_have_to_agree(words, whole):
    assert over_models({m: (w, None) for m, w in zip(RULES.models, words, strict=True)}, RULES)[0] == whole


def test_a_model_that_the_rules_do_not_name_changes_nothing_for_the_others():
    runs = {"reference": pair(-0.9, -0.7, 0.01)}
    alone = verdicts("P1.6", runs)
    other = verdicts("P1.6", runs | {"mine": pair(5, 5, 0.01)})
    one, same = other["reference", QUALITY], alone["reference", QUALITY]
    assert (one.verdict, one.p_holm, one.finding.interval) == (same.verdict, same.p_holm, same.finding.interval)
    assert other["mine", QUALITY].verdict == REFUTED


# ---- not run ---------------------------------------------------------------------------------------------------------
def test_what_cannot_be_computed_is_not_run_with_the_reason():
    runs = pair(-0.9, -0.7)
    found = verdicts("P1.6", {"reference": runs}, RULES)
    assert found["reference_b", QUALITY].reason == "reference_b was not run"
    assert "topic" in found["reference", "speed_first_after_topic_change"].reason
    del runs["speed_first"]
    runs["quality_first"].record["cells"][1] |= {"status": "failed", "reason": "MemoryError: no"}
    found = verdicts("P1.6", {"reference": runs})
    assert found["reference", SPEED].reason == "speed_first was not scored"
    assert found["reference", QUALITY].reason.endswith("boltons_test: MemoryError: no")
    assert all(one.verdict == NOT_RUN for one in found.values())


@pytest.mark.parametrize(
    ("flag", "says"), [("lossy_without_effect", "replaced nothing"), ("background_inert", "inert")]
)
def test_a_policy_without_effect_is_not_run(flag, says):
    runs = pair(-0.9, -0.7)
    for cell in runs["quality_first"].record["cells"]:
        cell[flag] = True
    one = verdicts("P1.6", {"reference": runs})["reference", QUALITY]
    assert one.verdict == NOT_RUN and says in one.reason


def test_another_budget_of_the_same_name_does_not_decide():
    runs = pair(-0.9, -0.7)
    for policy in runs.values():
        for cell in policy.record["cells"]:
            cell["slots_percent"] = 20
    one = verdicts("P1.6", {"reference": runs})["reference", QUALITY]
    assert one.verdict == NOT_RUN and "20 % in this run" in one.reason


def test_records_of_two_runs_are_refused():
    runs = pair(-0.9, -0.7)
    runs["rule_015"].record["clusters"]["bible_test"][0][0] = "another"
    with pytest.raises(UserError, match=r"quality_first and rule_015 differ"):
        verdicts("P1.6", {"reference": runs})


# ---- the preregistration ---------------------------------------------------------------------------------------------
def test_every_claim_of_the_design_has_a_region_and_a_rule():
    assert list(RULES.rows) == CLAIMS
    for row in RULES.rows.values():
        assert row.rule and row.claim and set(row.paper) == {"number", "instrument", "status", "known"}
        assert any(part.role == "primary" for part in row.parts)
        for part in row.parts:
            assert part.low <= part.high and (math.isfinite(part.low) or math.isfinite(part.high)) and part.why
            assert part.not_run or row.not_run or part.measure in MEASURES


def test_what_the_rows_say_of_policies_models_and_texts_exists():
    policies = load_policies(PATH.parent / "policies.tsv")
    for row in RULES.rows.values():
        if not row.not_run:
            named = {(p.measure, name) for p in row.parts for name in (p.of, p.against) if name}
            assert {name for measure, name in named if measure in OF_PREDICTORS} <= {"gate_replay", *TRAINED}
            named = {name for measure, name in named if "correl" not in measure and measure not in OF_PREDICTORS}
            assert {n for n in named if not n.startswith(("few_heavy", "many_light", "corr"))} <= set(policies)
    assert all(row_of(text)["role"] == "test" for text in RULES.texts) and RULES.baseline in policies
    hosts = {part.host for row in RULES.rows.values() for part in row.parts if part.host}
    assert all((PATH.parent / "hosts" / f"{host}.yaml").is_file() for host in hosts)


def put(path: str, value: object) -> dict:
    """The committed rules with one value changed; DELETE removes it."""
    rules = copy.deepcopy(yaml.safe_load(PATH.read_text(encoding="utf-8")))
    *folders, last = path.split(".")
    place = rules
    for folder in folders:
        place = place[int(folder)] if folder.isdigit() else place[folder]
    if value is DELETE:
        del place[last]
    else:
        place[int(last) if last.isdigit() else last] = value
    return rules


DELETE = object()
OF_PREDICTORS, TRAINED = ("parameters", "recall", "recall_difference"), ("mlp", "spec_prefetch")
PART = "rows.0.parts.0"
SIZES = {"layers": 11, "width": 1280, "experts": 64, "rank": 64}
WRONG = {
    "an unknown key": ("model", ["a"], ["has a key 'model'", "did you mean 'models'?"]),
    "an unknown key of a part": (f"{PART}.regions", {}, ["rows.0.parts.0 has a key 'regions'", "mean 'region'?"]),
    "no region": (f"{PART}.region", DELETE, ["rows.0.parts.0 has no key 'region'"]),
    "no rule": ("rows.0.rule", DELETE, ["rows.0 has no key 'rule'"]),
    "a region the wrong way round": (f"{PART}.region", {"low": 2, "high": 1}, ["part rule_015_loss: region 2 to 1"]),
    "a region of everything": (f"{PART}.region", {"low": None, "high": None}, ["region -inf to inf", "at least one"]),
    "a region that is not a number": (f"{PART}.region.low", float("nan"), ["region.low is nan", "a finite number"]),
    "a region in words": (f"{PART}.region.low", "0.3", ['region.low is "0.3"', "a number or null"]),
    "an unknown measure": (f"{PART}.measure", "perplexity", ["measure 'perplexity'", "mean 'perplexity_change'?"]),
    "an unknown role": (f"{PART}.role", "first", ['role is "first"', "one of primary, secondary"]),
    "an id twice": ("rows.1.id", "P1.1a", ["id 'P1.1a' a second time"]),
    "a part twice": ("rows.0.parts.1.id", "rule_015_loss", ["row P1.1a: parts: id 'rule_015_loss' a second time"]),
    "nothing that decides": ("rows.2.parts.0.role", "reported", ["row P1.2: no part of role primary"]),
    "a time without a host": (f"{PART}.measure", "token_time_change", ["no host or no link"]),
    "a count without sizes": (f"{PART}.measure", "parameters", ["no sizes", "sizes of parameters alone"]),
    "sizes of what is not counted": (f"{PART}.sizes", SIZES, ["rule_015_loss: sizes;"]),
    "a size that is none": (f"{PART}.sizes", SIZES | {"rank": 0}, ["sizes.rank is 0"]),
    "hosts by name": ("rows.0.hosts", "box", ['rows.0.hosts is "box"']),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_bad_rules_are_named(name):
    path, value, says = WRONG[name]
    with pytest.raises(UserError) as caught:
        check(put(path, value), where="rules.yaml")
    text = str(caught.value)
    assert text.startswith("rules.yaml: ") and "; expected " in text and "\n" not in text
    assert all(words in text for words in says), text


@pytest.mark.parametrize("content", [b"rows: [", b"\xff\xfe", b"", b"- a"])
def test_a_file_that_is_no_preregistration_is_refused(tmp_path, content):
    (tmp_path / "rules.yaml").write_bytes(content)
    for path in (tmp_path / "rules.yaml", tmp_path / "nowhere.yaml"):
        with pytest.raises(UserError):
            load(path)


def test_a_measure_nothing_computes_is_an_error_unless_declared():
    row = replace(RULES.rows["P1.9"], not_run=None)
    row = replace(row, parts=(replace(row.parts[0], instrument="emulator"),))
    with pytest.raises(UserError, match="nothing computes measure 'speedup'"):
        find_row(row, ONE, gather({"reference": pair(0, 0)}))


def test_a_number_without_spread_is_what_it_is():
    frame = pd.DataFrame({"document": list("abcd"), "stratum": "x", "a": 0.0, "b": 10, "size": 10})
    quantity = ratio(frame, "perplexity")
    assert quantity.interval(replicates=99).high == 0 and quantity.p_value_at(1.0, replicates=99) == 0.0
