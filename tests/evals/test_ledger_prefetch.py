"""P2.1 to P2.5 on made-up evidence of known sizes: every verdict can be reached, and what is missing has its reason.

Laws: recall is a share of the chosen experts and its difference is paired; every position, host and link counts; a
policy that prefetches is none of the first paper's.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd
import pytest
from ledger_cases import (
    DOCUMENTS,
    RULES,
    THRESHOLDS,
    TOKENS,
    TOPICS,
    WEIGHTS,
    made,
    measured_rows,
    name_of,
    quality,
    recall_record,
    row_of,
    sweep,
)

from engine.errors import UserError
from evals.ledger import NOT_RUN, OPEN, REFUTED, SUPPORTED, conclude, find_row, judge
from evals.ledger_engine import lift, shown_without_verdict
from evals.ledger_evidence import Evidence, Speed
from evals.ledger_groups import lossy_policies, members
from evals.ledger_quantities import NotRun
from evals.ledger_recall import load_recalls
from evals.measured_tables import read_documents

ONE = replace(RULES, models=("reference",), statistics=RULES.statistics | {"replicates": 399})
BOTH = ("spec_prefetch", "gate_replay")


def verdicts(row: str, evidence: Evidence, rules=ONE, slots: str | None = None) -> dict[str, object]:
    judged = judge(find_row(rules.rows[row], rules, {"reference": evidence}, slots), rules)
    return {one.finding.part.id: one for one in judged}


def whole(found: dict[str, object]) -> str:
    return conclude(list(found.values()))[0]


# ---- P2.1 ------------------------------------------------------------------------------------------------------------
def recalled(record: dict, tmp_path, **changes) -> Evidence:
    """Through the file, as the ledger reads it."""
    path = tmp_path / "recall.json"
    path.write_text(json.dumps(record | changes), encoding="utf-8")
    runs = {RULES.baseline: made(RULES.baseline, 0, 0)}
    return Evidence(quality=runs, recalled=load_recalls([path]).get("reference"))


def shares(adapter: float, replay: float, far: float = 0.9) -> dict[str, tuple[float, float]]:
    return {"spec_prefetch": (adapter, far), "gate_replay": (replay, far - 0.02)}


def test_nine_of_ten_and_a_little_ahead_of_replay_support_p2_1(tmp_path):
    record = recall_record(shares(0.90, 0.885))
    found = verdicts("P2.1", recalled(record, tmp_path))
    assert whole(found) == SUPPORTED and found["adapter_ahead_of_replay"].direction == SUPPORTED
    one, ahead = (found[name].finding for name in ("adapter_recall", "adapter_ahead_of_replay"))
    cells = [c for c in record["cells"] if (c["predictor"], c["horizon"]) == ("spec_prefetch", 1)]
    plain = 100 * sum(sum(cell["found"]) for cell in cells) / (10 * sum(sum(cell["events"]) for cell in cells))
    assert one.interval.estimate == pytest.approx(plain) and ahead.interval.estimate == pytest.approx(1.5, abs=0.3)
    assert (len(one.quantity.documents), one.quantity.tokens) == (len(TOPICS) * DOCUMENTS, len(TOPICS) * 8 * TOKENS)
    width = [finding.interval.high - finding.interval.low for finding in (ahead, one)]
    assert width[0] < width[1] / 3  # paired: what all predictors find hard in a document cancels
    points, _ = one.quantity.running(0)
    assert len(points) == len(TOPICS) * DOCUMENTS and points[-1] == pytest.approx(plain)


@pytest.mark.parametrize(
    ("adapter", "replay", "part", "word"),
    [
        (0.50, 0.49, "adapter_recall", REFUTED),
        (0.98, 0.97, "adapter_recall", REFUTED),
        (0.852, 0.84, "adapter_recall", OPEN),
        (0.90, 0.80, "adapter_ahead_of_replay", REFUTED),
        (0.90, 0.94, "adapter_ahead_of_replay", REFUTED),
        (0.90, 0.86, "adapter_ahead_of_replay", OPEN),
    ],
)
def test_what_is_not_in_its_region_does_not_support_p2_1(adapter, replay, part, word, tmp_path):
    found = verdicts("P2.1", recalled(recall_record(shares(adapter, replay), spread=0.02), tmp_path))
    assert found[part].verdict == whole(found) == word


def test_an_order_that_turns_late_is_inconclusive(tmp_path):
    record = recall_record(shares(0.90, 0.90))
    names = verdicts("P2.1", recalled(record, tmp_path))["adapter_recall"].finding.quantity.documents
    late = set(names[len(names) * 3 // 4 :])
    for cell in (cell for cell in record["cells"] if cell["predictor"] == "spec_prefetch"):
        for i in range(DOCUMENTS):
            cell["found"][i] += 60 if f"{cell['text']}/doc{i}" in late else -15
    one = verdicts("P2.1", recalled(record, tmp_path))["adapter_ahead_of_replay"]
    assert one.finding.sign_change and one.verdict == one.direction == OPEN


def test_the_layer_after_the_next_and_the_misses_do_not_decide(tmp_path):
    found = verdicts("P2.1", recalled(recall_record(shares(0.90, 0.885, far=0.6)), tmp_path))
    assert whole(found) == SUPPORTED and found["adapter_recall_horizon_2"].verdict == REFUTED
    assert found["adapter_ahead_of_replay_horizon_2"].verdict == SUPPORTED
    one = found["adapter_recall_of_misses"]
    assert one.verdict is None and one.finding.interval.estimate == pytest.approx(45, abs=1)


def test_recall_has_no_other_budget(tmp_path):
    found = verdicts("P2.1", recalled(recall_record(shares(0.90, 0.885)), tmp_path), slots="s12")
    assert {one.finding.reason for one in found.values()} == {"recall does not depend on the budget"}


def without(record: dict, **cell) -> dict:
    kept = [c for c in record["cells"] if any(c[name] != value for name, value in cell.items())]
    return record | {"cells": kept}


def other_events(record: dict) -> dict:
    record["cells"][-1]["events"][2] -= 1
    return record


LOST = {
    "no file": (lambda r: r | {"model": "another"}, "this run has no predictions of the next layers' experts"),
    "the adapter": (lambda r: without(r, predictor="spec_prefetch"), "no predictions of spec_prefetch at horizon 1"),
    "one of its texts": (
        lambda r: without(r, predictor="spec_prefetch", text="bible_test"), "spec_prefetch on bible_test for layers 1, "
    ),
    "one of its layers": (
        lambda r: without(r, predictor="spec_prefetch", anchor=1, text="boltons_test"), "boltons_test for layers 2"
    ),
    "its model": (
        lambda r: r | {"provenance": {"model_hash": "f" * 64}},
        f"predictions of weights {'f' * 16}, policies scored on {WEIGHTS}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
def test_recall_that_lacks_something_is_not_run_with_the_reason(name, tmp_path):
    change, words = LOST[name]
    found = verdicts("P2.1", recalled(change(recall_record(shares(0.90, 0.885))), tmp_path))
    one = found["adapter_recall"]
    assert one.verdict == whole(found) == NOT_RUN and one.finding.interval is None and words in one.reason


def test_predictors_that_were_asked_of_other_events_are_not_compared(tmp_path):
    found = verdicts("P2.1", recalled(other_events(recall_record(shares(0.90, 0.885))), tmp_path))
    assert found["adapter_ahead_of_replay"].reason == "spec_prefetch and gate_replay were asked of other events"
    found = verdicts("P2.1", recalled(recall_record(shares(0.90, 0.885)), tmp_path, slots="s12"))
    assert found["adapter_recall_of_misses"].reason == "misses were counted at s12, not at s25"


def broken(record: dict, **changes) -> dict:
    record["cells"][3] |= changes
    return record


FILES = {
    "no cells": (lambda r: {"model": "reference"}, "KeyError"),
    "counts of fewer documents": (lambda r: broken(r, found=[1]), "ValueError"),
    "an unknown text": (lambda r: broken(r, text="another"), "KeyError 'another'"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_broken_file_of_recall_is_one_line(name, tmp_path):
    change, words = FILES[name]
    with pytest.raises(UserError, match=r"recall\.json: ") as caught:
        recalled(change(recall_record(shares(0.9, 0.9))), tmp_path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_two_files_of_one_model_are_refused(tmp_path):
    path = tmp_path / "recall.json"
    path.write_text(json.dumps(recall_record(shares(0.9, 0.9))), encoding="utf-8")
    with pytest.raises(UserError, match="reference a second time"):
        load_recalls([path, path])


# ---- P2.2 ------------------------------------------------------------------------------------------------------------
def test_parameters_are_counted_from_the_sizes_of_the_part():
    found = verdicts("P2.2", Evidence())
    counted = {name: round(1e6 * one.finding.interval.estimate) for name, one in found.items()}
    assert counted == {
        "adapter_small": 1_634_304, "predictor_small": 32_686_080,
        "adapter_large": 12_951_552, "predictor_large": 414_449_664,
    }  # fmt: skip
    assert whole(found) == SUPPORTED and {one.p_holm for one in found.values()} == {0.0}
    assert verdicts("P2.2", Evidence(), slots="s12")["adapter_small"].finding.interval is None


def test_another_rank_refutes_p2_2():
    row = RULES.rows["P2.2"]
    parts = [replace(part, sizes=part.sizes | {"rank": 32}) for part in row.parts]
    rules = replace(ONE, rows=RULES.rows | {"P2.2": replace(row, parts=tuple(parts))})
    found = verdicts("P2.2", Evidence(), rules)
    assert [one.verdict for one in found.values()] == [REFUTED, SUPPORTED, REFUTED, SUPPORTED]
    assert whole(found) == REFUTED


# ---- P2.3 and P2.4 ---------------------------------------------------------------------------------------------------
def on_hosts(row: str, frames: list[pd.DataFrame], tmp_path) -> dict[str, object]:
    pd.concat(frames).to_csv(tmp_path / "documents.csv", index=False)
    speed = Speed(measured=read_documents(tmp_path / "documents.csv"))
    lifted = lift(RULES.rows[row], speed.measured)
    assert shown_without_verdict(RULES.rows[row], lifted, speed.measured) == (None, "")
    rules = replace(ONE, rows=RULES.rows | {row: lifted})
    return verdicts(row, Evidence(speed=speed), rules)


def two_links(disk: float = 1.1, sdcard: float = 1.1, host: str = "box", **options) -> list[pd.DataFrame]:
    links = {"disk": disk, "sdcard": sdcard}
    return [measured_rows(dict.fromkeys(BOTH, faster), host, link, **options) for link, faster in links.items()]


@pytest.mark.parametrize("row", ["P2.3", "P2.4"])
def test_one_measured_host_is_every_measured_host(row, tmp_path):
    found = on_hosts(row, two_links(), tmp_path)
    primary = [one for one in found.values() if one.finding.part.role == "primary"]
    assert {one.finding.part.link for one in primary} == {"disk", "sdcard"} and len(primary) == 2
    assert {one.verdict for one in primary} == {whole(found)} == {SUPPORTED}


@pytest.mark.parametrize("row", ["P2.3", "P2.4", "P2.5"])
def test_hosts_without_prefetching_leave_the_row_as_it_is_declared(row, tmp_path):
    found = on_hosts(row, [measured_rows({"rule_015": 2.0})], tmp_path)
    assert {one.reason for one in found.values()} == {RULES.rows[row].not_run} and whole(found) == NOT_RUN


def test_no_host_measures_a_phone(tmp_path):
    found = on_hosts("P2.5", two_links() + two_links(host="other"), tmp_path)
    assert whole(found) == NOT_RUN and {one.reason for one in found.values()} == {RULES.rows["P2.5"].not_run}


def changed(frames: list[pd.DataFrame], column: str, value, **where) -> list[pd.DataFrame]:
    table = pd.concat(frames, ignore_index=True)
    rows = pd.Series(True, table.index)
    for name, wanted in where.items():
        rows &= table[name] == wanted
    assert rows.any()
    table.loc[rows, column] = value
    return [table]


def test_one_position_of_one_document_that_differs_refutes_p2_3(tmp_path):
    frames = two_links() + two_links(host="other")
    where = {"policy": "spec_prefetch", "host": "other", "link": "sdcard", "text": "boltons_test", "document": "doc1"}
    found = on_hosts("P2.3", changed(frames, "identical", 15, **where), tmp_path)
    words = {name: one.verdict for name, one in found.items() if one.verdict}
    assert words.pop("identical_on_other_sdcard") == whole(found) == REFUTED and set(words.values()) == {SUPPORTED}
    one = found["identical_on_other_sdcard"].finding
    assert one.interval.estimate == one.interval.low == pytest.approx(100 * (256 - 1) / 256)
    assert (one.quantity.tokens, len(one.quantity.documents)) == (256, 16)
    at = one.quantity.documents.index("boltons_test/doc1")
    points, _ = one.quantity.running(0)
    assert set(points[:at]) <= {100.0} and points[at] == pytest.approx(100 * (1 - 1 / (16 * (at + 1))))
    assert one.quantity.first(at + 1).interval().estimate == points[at] and points[-1] == one.interval.estimate


def test_every_size_counts_where_output_is_compared(tmp_path):
    own = changed(two_links(size="own"), "identical", 0, policy="spec_prefetch", link="disk")
    found = on_hosts("P2.3", two_links() + own, tmp_path)
    one = found["identical_on_box_disk"].finding
    assert one.interval.estimate == 50 and one.quantity.tokens == 2 * 256 and whole(found) == REFUTED
    assert found["identical_on_box_sdcard"].verdict == SUPPORTED


def test_other_predictors_are_reported(tmp_path):
    found = on_hosts("P2.3", changed(two_links(), "identical", 8, policy="gate_replay"), tmp_path)
    one = found["identical_gate_replay_on_box_disk"]
    assert one.verdict is None and one.finding.interval.estimate == 50 and whole(found) == SUPPORTED
    lone = [frame[frame["policy"] != "gate_replay"] for frame in two_links()]
    found = on_hosts("P2.3", lone, tmp_path)
    assert "gate_replay is not measured at s25 on box, disk" in found["identical_gate_replay_on_box_disk"].reason
    assert whole(found) == SUPPORTED


LACKING = {
    "a host": (
        lambda f: [*f, measured_rows({"rule_015": 2.0}, "old"), measured_rows({}, "old", "sdcard")],
        "spec_prefetch is not measured at s25 on old, disk",
    ),
    "a text": (
        lambda f: [pd.concat(f).query("policy != 'spec_prefetch' or link != 'disk' or text != 'bible_test'")],
        "spec_prefetch is not measured at s25 on box, disk",
    ),
    "the budget": (lambda f: changed(f, "slots_percent", 20.0), "another budget than 25 % on box"),
}  # fmt: skip


@pytest.mark.parametrize("row", ["P2.3", "P2.4"])
@pytest.mark.parametrize("name", LACKING)
def test_what_a_measured_host_lacks_is_not_run_with_its_reason(row, name, tmp_path):
    change, words = LACKING[name]
    found = on_hosts(row, change(two_links()), tmp_path)
    reasons = [one.reason for one in found.values() if one.verdict == NOT_RUN]
    assert whole(found) == NOT_RUN and any(words in reason for reason in reasons), reasons


def test_runs_without_their_pair_are_not_compared(tmp_path):
    where = {"policy": "spec_prefetch", "text": "bible_test", "link": "disk"}
    found = on_hosts("P2.3", changed(changed(two_links(), "compared", 0, **where), "identical", 0, **where), tmp_path)
    assert whole(found) == NOT_RUN
    words = "no run of spec_prefetch has its pair of fetch_lfu_decay at s25 on box, disk: bible_test at size 1024x1024"
    assert found["identical_on_box_disk"].reason == words


@pytest.mark.parametrize(
    ("disk", "sdcard", "word"), [(1.1, 1.004, SUPPORTED), (1.1, 1.0, OPEN), (0.9, 1.1, REFUTED), (1.5, 1.1, REFUTED)]
)
def test_decoding_over_both_links_decides_p2_4(disk, sdcard, word, tmp_path):
    found = on_hosts("P2.4", two_links(disk, sdcard), tmp_path)
    assert whole(found) == word
    one = found["speedup_disk_on_box_disk"].finding
    assert one.interval.estimate == pytest.approx(disk, rel=0.005) and one.quantity.tokens == 7 * 16
    assert set(found) == {"speedup_disk_on_box_disk", "speedup_sdcard_on_box_sdcard"}


def test_a_slower_second_host_refutes_p2_4(tmp_path):
    found = on_hosts("P2.4", two_links() + two_links(disk=0.9, host="other"), tmp_path)
    assert whole(found) == REFUTED and found["speedup_disk_on_box_disk"].verdict == SUPPORTED


def test_a_link_that_no_host_has_is_not_run(tmp_path):
    found = on_hosts("P2.4", two_links()[:1], tmp_path)
    assert found["speedup_sdcard"].reason == "no host was measured over sdcard" and whole(found) == NOT_RUN
    assert found["speedup_disk_on_box_disk"].verdict == SUPPORTED


# ---- the first paper's policies --------------------------------------------------------------------------------------
def prefetching(name: str, row: dict):
    return made(name, 0.9, -3.0, row={**row, "prefetch": "spec_prefetch", "schedule": "pieces"})


def test_a_policy_that_prefetches_is_none_of_the_first_papers():
    runs, one = quality(), "quality_first_prefetch"
    with_it = runs | {one: prefetching(one, row_of("quality_first"))}
    ids = lossy_policies(with_it, sweep(lambda mass, number: mass))
    assert ids == lossy_policies(runs, sweep(lambda mass, number: mass)) and not any(one in own for own in ids)


def test_a_prefetching_row_stands_for_no_row_of_the_sweep():
    runs = sweep(lambda mass, number: mass)
    name = name_of(THRESHOLDS[3])
    found = members("threshold_sweep", {"a": prefetching("a", THRESHOLDS[3]), **runs}, RULES.slots, RULES.texts)
    assert [one.record["policy"] for one in found] == [name_of(row) for row in THRESHOLDS]
    runs[name] = prefetching(name, THRESHOLDS[3])
    with pytest.raises(NotRun, match="the sweep has no policy of miss_rule threshold"):
        members("threshold_sweep", runs, RULES.slots, RULES.texts)


def test_records_of_before_and_after_prefetching_hold_the_same_policy():
    """Newer records name the columns, with nothing in them."""
    runs = quality()
    runs["rule_015"].record["policy_row"] |= {"prefetch": None, "schedule": None}
    ids = lossy_policies(runs, sweep(lambda mass, number: mass))
    assert len(ids) == 25 and {"rule_015", name_of(row_of("rule_015"))} in ids
