"""The sheet of policies: the rows that are there, and every way to get one wrong, with file, row and value."""

from __future__ import annotations

import math

import numpy as np
import pytest
from policy_cases import POLICIES, SHEET, policy, residency

from engine.decision import EVICTIONS, MISS_RULES, STANDINS
from engine.errors import UserError, main_guard
from engine.policies import BASELINE, COLUMNS, as_row, distinct, find_policy, load_policies, parse_row
from engine.residency import Demand, check_slots, parse_slots, slots_from_percent

GOOD = {
    "id": "good",
    "miss_rule": "threshold",
    "tau": "0.15",
    "share": "-",
    "renormalise": "-",
    "standin": "next_best",
    "standin_weight": "own",
    "standin_recency": "yes",
    "eviction": "lfu_decay",
    "half_life_tokens": "128",
    "beta": "0.5",
    "seed": "-",
}


@pytest.fixture
def sheet(tmp_path):
    """sheet(row, row, ...) -> the path of a sheet of these rows (dicts over GOOD, or raw lines)."""

    def write(*rows, header=COLUMNS):
        path = tmp_path / "policies.tsv"
        lines = ["\t".join(header)]
        lines += [row if isinstance(row, str) else "\t".join({**GOOD, **row}.values()) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


# ---- the sheet itself -------------------------------------------------------------------------------------------
def test_the_sheet_holds_the_bundles_of_the_design():
    rows = load_policies(SHEET)
    assert list(rows) == [
        "fetch_lfu_decay",
        "fetch_lru",
        "fetch_belady",
        "substitute_all",
        "rule_015",
        "first_choice",
        "quality_first",
        "speed_first",
    ]
    assert rows[BASELINE].lossless and rows[BASELINE].half_life_tokens == 128
    assert [name for name, row in rows.items() if row.clairvoyant] == ["fetch_belady"]
    assert (rows["rule_015"].tau, rows["first_choice"].tau) == (0.15, math.inf)


@pytest.mark.parametrize(("one", "two"), [("rule_015", "quality_first"), ("first_choice", "speed_first")])
def test_the_bundles_that_are_compared_differ_in_background_alone(one, two):
    rows = load_policies(SHEET)
    differ = [column for column in COLUMNS[1:] if getattr(rows[one], column) != getattr(rows[two], column)]
    assert differ == ["beta"]
    assert (rows[one].beta, rows[two].beta) == (None, 0.5)


def test_a_row_becomes_the_decisions_numbers(sheet):
    rule = load_policies(sheet({}))["good"].rule(sigmoid=True, delay=4)
    assert rule.miss == MISS_RULES["threshold"] and rule.standin == STANDINS["next_best"]
    assert rule.eviction == EVICTIONS["lfu_decay"] and rule.growth**128 == pytest.approx(2)
    assert (rule.tau, rule.beta, rule.delay) == (float(np.float32(0.15)), 0.5, 4)
    assert rule.own_weights and rule.sigmoid and rule.standin_recency and not rule.renormalise


def test_rules_have_one_type_whatever_the_row():
    """Else the kernel compiles once a policy."""
    types = {tuple(type(value) for value in p.rule()) for p in POLICIES.values()}
    assert len(types) == 1


def test_every_part_of_the_decision_is_in_a_policy_under_test():
    assert {p.miss_rule for p in POLICIES.values()} == set(MISS_RULES)
    assert {p.eviction for p in POLICIES.values()} == set(EVICTIONS)
    assert {p.standin for p in POLICIES.values()} - {None} == set(STANDINS)


# ---- wrong cells ------------------------------------------------------------------------------------------------
WRONG_CELLS = {
    # name: (cells over GOOD, what the message must say after file and row)
    "tau_nan": ({"tau": "nan"}, "tau 'nan'; expected a number in (0, inf]"),
    "tau_zero": ({"tau": "0"}, "tau '0'; expected a number in (0, inf]"),
    "tau_negative": ({"tau": "-0.1"}, "tau '-0.1'"),
    "tau_minus_infinity": ({"tau": "-inf"}, "tau '-inf'"),
    "tau_word": ({"tau": "high"}, "tau 'high'"),
    "tau_empty": ({"tau": ""}, "tau ''"),
    "tau_missing": ({"tau": "-"}, "tau '-'; expected a number"),
    "tau_comma": ({"tau": "0,15"}, "tau '0,15'"),
    "tau_not_read": (
        {"miss_rule": "substitute_all"},
        "tau '0.15' but miss_rule substitute_all does not read it; expected '-'",
    ),
    "share_not_read": ({"share": "0.1"}, "share '0.1' but miss_rule threshold does not read it"),
    "share_above_one": ({"miss_rule": "mass_budget", "tau": "-", "share": "1.5"}, "share '1.5'; expected a number in"),
    "share_nan": ({"miss_rule": "mass_budget", "tau": "-", "share": "nan"}, "share 'nan'"),
    "tau_above_one_for_a_rule_that_pays": (
        {"miss_rule": "few_heavy", "tau": "1.5", "share": "0.1"},
        "tau '1.5'; expected a number in (0, 1]",
    ),
    "tau_infinite_for_a_rule_that_pays": (
        {"miss_rule": "many_light", "tau": "inf", "share": "0.1"},
        "tau 'inf'; expected a number in (0, 1]",
    ),
    "level_missing": ({"miss_rule": "many_light"}, "share '-'; expected a number in (0, 1]"),
    "level_zero": ({"miss_rule": "few_heavy", "share": "0"}, "share '0'; expected a number in (0, 1]"),
    "background_with_frozen": (
        {"eviction": "frozen", "half_life_tokens": "-"},
        "beta '0.5' with eviction frozen; expected '-', as nobody enters a slot",
    ),
    "half_life_with_frozen": (
        {"eviction": "frozen", "beta": "-"},
        "half_life_tokens '128' but eviction frozen",
    ),
    "renormalise_not_read": ({"renormalise": "no"}, "renormalise 'no' but miss_rule threshold"),
    "renormalise_word": (
        {
            "miss_rule": "drop",
            "tau": "-",
            "renormalise": "maybe",
            "standin": "-",
            "standin_weight": "-",
            "standin_recency": "-",
        },
        "renormalise 'maybe'; expected yes or no",
    ),
    "miss_rule_unknown": ({"miss_rule": "treshold"}, "miss_rule 'treshold'; expected a known miss_rule; did you mean"),
    "standin_unknown": ({"standin": "nextbest"}, "standin 'nextbest'; expected a known standin; did you mean 'next_b"),
    "standin_missing": ({"standin": "-"}, "standin '-'; expected a known standin"),
    "standin_weight_unknown": ({"standin_weight": "theirs"}, "standin_weight 'theirs'"),
    "standin_recency_word": ({"standin_recency": "true"}, "standin_recency 'true'; expected yes or no"),
    "standin_not_read": (
        {"miss_rule": "fetch", "tau": "-", "beta": "-"},
        "standin 'next_best' but miss_rule fetch does not read it",
    ),
    "eviction_unknown": (
        {"eviction": "lfu_decayed"},
        "eviction 'lfu_decayed'; expected a known eviction; did you mean",
    ),
    "eviction_case": ({"eviction": "LRU", "half_life_tokens": "-"}, "eviction 'LRU'"),
    "half_life_not_read": ({"eviction": "lru"}, "half_life_tokens '128' but eviction lru does not read it"),
    "half_life_below_one": ({"half_life_tokens": "0.5"}, "half_life_tokens '0.5'; expected a number in [1, 1e+09]"),
    "half_life_infinite": ({"half_life_tokens": "inf"}, "half_life_tokens 'inf'"),
    "half_life_nan": ({"half_life_tokens": "nan"}, "half_life_tokens 'nan'"),
    "beta_zero": ({"beta": "0"}, "beta '0'; expected a number in (0, inf]"),
    "beta_nan": ({"beta": "nan"}, "beta 'nan'"),
    "beta_with_fetch": (
        {"miss_rule": "fetch", "tau": "-", "standin": "-", "standin_weight": "-", "standin_recency": "-"},
        "beta '0.5' but miss_rule fetch, where nothing goes missing, does not read it",
    ),
    "seed_missing": ({"standin": "random"}, "seed '-'; expected a whole number from 0"),
    "seed_negative": ({"standin": "random", "seed": "-1"}, "seed '-1'"),
    "seed_fraction": ({"standin": "random", "seed": "1.5"}, "seed '1.5'"),
    "seed_not_read": ({"seed": "3"}, "seed '3' but a row without a random part does not read it"),
    "belady_with_a_lossy_rule": (
        {"eviction": "belady", "half_life_tokens": "-", "beta": "-"},
        "eviction belady with miss_rule threshold; expected miss_rule fetch",
    ),
    "id_with_a_space": ({"id": "my rule"}, "id 'my rule'"),
    "id_with_a_dot": ({"id": "rule.1"}, "id 'rule.1'; expected letters, digits, '_' or '-'"),
    "id_with_a_slash": ({"id": "a/b"}, "id 'a/b'"),
    "id_empty": ({"id": ""}, "id ''"),
    "id_leading_dash": ({"id": "-x"}, "id '-x'"),
    "id_accented": ({"id": "règle"}, "id 'règle'"),
}


@pytest.mark.parametrize("name", WRONG_CELLS)
def test_a_wrong_cell_is_one_line_with_file_row_and_value(name, sheet, capsys):
    cells, said = WRONG_CELLS[name]
    path = sheet({}, {"id": "second"}, {"id": "third", **cells})
    with pytest.raises(UserError) as raised:
        load_policies(path)
    message = str(raised.value)
    assert message.startswith(f"{path}:4: {said}"), message
    assert "\n" not in message and message.count(";") >= 2
    with pytest.raises(SystemExit) as left:
        main_guard(lambda: load_policies(path))
    assert left.value.code == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_the_row_that_all_wrong_rows_start_from_is_right(sheet):
    assert list(load_policies(sheet({}, {"id": "second"}))) == ["good", "second"]


def test_infinity_may_be_written_for_tau(sheet):
    assert load_policies(sheet({"tau": "inf"}))["good"].tau == math.inf


# ---- wrong sheets -----------------------------------------------------------------------------------------------
def test_a_missing_sheet(tmp_path):
    with pytest.raises(UserError, match=r"absent\.tsv: No such file"):
        load_policies(tmp_path / "absent.tsv")


@pytest.mark.parametrize(
    "header",
    [COLUMNS[:-1], (*COLUMNS, "comment"), ("name", *COLUMNS[1:]), tuple(reversed(COLUMNS))],
    ids=["one_too_few", "one_too_many", "renamed", "reordered"],
)
def test_a_wrong_header(header, sheet):
    path = sheet({}, header=header)
    with pytest.raises(UserError) as raised:
        load_policies(path)
    assert str(raised.value).startswith(f"{path}:1: columns")
    assert ", ".join(COLUMNS) in str(raised.value)


def test_an_empty_sheet(tmp_path):
    (tmp_path / "policies.tsv").write_text("")
    with pytest.raises(UserError, match=r"policies\.tsv:1: columns \[\]"):
        load_policies(tmp_path / "policies.tsv")


@pytest.mark.parametrize("line", ["only\ttwo", "\t".join(GOOD.values()) + "\t-", ""])
def test_a_wrong_number_of_cells(line, sheet):
    path = sheet({}, line)
    with pytest.raises(UserError) as raised:
        load_policies(path)
    assert str(raised.value).startswith(f"{path}:3: {len(line.split(chr(9))) if line else 0} cells; expected 12")


def test_a_duplicate_id(sheet):
    path = sheet({}, {"id": "other"}, {"tau": "0.3"})
    with pytest.raises(UserError) as raised:
        load_policies(path)
    assert str(raised.value).startswith(f"{path}:4: id 'good' a second time")


def test_an_unknown_policy_lists_the_known_ones_and_the_nearest():
    with pytest.raises(UserError) as raised:
        find_policy(load_policies(SHEET), "quality_frist")
    message = str(raised.value)
    assert message.startswith("policy 'quality_frist'")
    assert "did you mean 'quality_first'?" in message and "fetch_belady" in message


def test_bug_a_superscript_seed_is_a_user_error(sheet):
    try:
        load_policies(sheet({"standin": "random", "seed": "²"}))
    except UserError:
        return
    pytest.fail("accepted")


def test_bug_a_seed_beyond_64_bits_is_a_user_error(sheet):
    with pytest.raises(UserError, match="seed"):
        load_policies(sheet({"standin": "random", "seed": str(2**64)}))


def test_bug_a_sheet_that_is_not_utf8_is_a_user_error(tmp_path):
    (tmp_path / "policies.tsv").write_bytes("\t".join(COLUMNS).encode() + b"\nr\xe8gle\n")
    try:
        load_policies(tmp_path / "policies.tsv")
    except UserError:
        return
    pytest.fail("accepted")


# ---- slots ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("slots", [-1, 0, 3, 17])
def test_slots_below_k_or_above_e_are_refused(slots):
    with pytest.raises(UserError, match=f"^{slots} slots a layer; expected from K = 4 .* to E = 16"):
        check_slots(slots, 16, 4)
    with pytest.raises(UserError):
        residency(POLICIES["rule_015"], 16, 4, slots)


def test_a_budget_in_percent_is_not_exceeded():
    assert [slots_from_percent(512, p) for p in (12.5, 25, 50, 100)] == [64, 128, 256, 512]
    assert slots_from_percent(60, 33.3) == 19


def test_slots_as_a_command_line_has_them():
    assert [parse_slots(text, 512) for text in ("64", 64, "12.5%", "25%", "100%")] == [64, 64, 64, 128, 512]


@pytest.mark.parametrize("text", ["", "%", "25%%", "25%x", "-5", "0", "0%", "nan%", "inf%", "0.25", 0.25, "s25", None])
def test_slots_that_are_no_number_are_refused(text):
    with pytest.raises(UserError, match=f"^slots={text};"):
        parse_slots(text, 512)


def test_demand_of_another_model_is_refused():
    held = residency(POLICIES["rule_015"], 16, 4, 8, layers=2)
    for shape in ((2, 15), (1, 16), (16,)):
        with pytest.raises(UserError, match="calibration demand of shape"):
            held.warm(Demand(np.ones(shape), 10))


# ---- prefetching -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"prefetch": "gate_replays", "schedule": "pieces"}, ["prefetch 'gate_replays'", "did you mean 'gate_replay'"]),
        ({"prefetch": "mlp"}, ["schedule '-'", "a known schedule"]),
        ({"schedule": "pieces"}, ["schedule 'pieces' but prefetch '-' does not read it"]),
        ({"prefetch": "mlp", "schedule": "pieces", "eviction": "belady"}, ["prefetch mlp with eviction belady"]),
        ({"prefetch": "mlp", "schedule": "pieces", "eviction": "frozen"}, ["prefetch mlp with eviction frozen"]),
    ],
)
def test_a_row_that_prefetches_says_how_and_needs_an_eviction_that_lets_experts_in(cells, words):
    with pytest.raises(UserError) as caught:
        policy(id="p", miss_rule="fetch", **({"eviction": "lru"} | cells))
    assert all(part in str(caught.value) for part in words)


def test_a_sheet_may_leave_the_columns_of_prefetching_out_but_not_one_of_them(tmp_path):
    with_them, without = (
        SHEET.with_name(name).read_text(encoding="utf-8") for name in ("prefetch.tsv", "policies.tsv")
    )
    assert with_them.split("\n")[0] == without.split("\n")[0] + "\tprefetch\tschedule"
    (tmp_path / "p.tsv").write_text(without.replace("\tseed\n", "\tseed\tprefetch\n"), encoding="utf-8")
    with pytest.raises(UserError, match="then prefetch, schedule or nothing"):
        load_policies(tmp_path / "p.tsv")


@pytest.mark.parametrize("name", load_policies(SHEET.with_name("prefetch.tsv")))
def test_law_a_row_that_prefetches_survives_being_written(name):
    own = load_policies(SHEET.with_name("prefetch.tsv"))[name]
    assert parse_row(as_row(own), "here") == own and as_row(own)["prefetch"] == own.prefetch
    assert own.clairvoyant == (own.prefetch == "oracle")
    assert not distinct({name: own})
