"""Bad input, through the real command lines: one line with file, row and value, exit code 2, nothing written.

What the configuration names is refused by Snakemake before any job; what a file holds, by the script that reads it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny import (
    ABSENT,
    CALIBRATION,
    CONTEXT,
    ROOT,
    TEST,
    TOPICS,
    Ended,
    Scratch,
    documents,
    policy_row,
    rewrite_weights,
    run_script,
    write_model,
    write_text_file,
)
from transformers import LlamaConfig, LlamaForCausalLM

from evals import corpora
from evals.corpora import row_of
from evals.jobs import model_hash

SHEET = ROOT / "config" / "policies.tsv"
BASE = ("fetch_lfu_decay", "rule_015")


# ---- the configuration and its sheets: Snakemake ---------------------------------------------------------------------
@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Scratch:
    return Scratch(tmp_path_factory.mktemp("configuration"), model=False)


def sheet(name: str, *rows: str):
    """The committed sheet of that name with rows added."""
    return lambda folder: (folder / "config" / name).write_text(
        "\n".join([(ROOT / "config" / name).read_text(encoding="utf-8").strip(), *rows, ""]), encoding="utf-8"
    )


def policies(**cells: str):
    return sheet("policies.tsv", policy_row(**cells))


LURED = {"miss_rule": "threshold", "standin": "next_best", "standin_weight": "own", "standin_recency": "yes"}
FIFO = {"eviction": "fifo"}
LAST = len((ROOT / "config" / "policies.tsv").read_text(encoding="utf-8").splitlines()) + 1
CONFIGURATIONS = {
    "a key that does not exist": ({"slot": {"s25": 25}}, None, ["config.yaml: the file has a key 'slot'", "'slots'?"]),
    "an id with a space": ({"policies": [*BASE, "rule 015"]}, None, ['config.yaml: policies.2 is "rule 015"']),
    "an id with a dot": ({"slots": {"s12.5": 12.5}}, None, ['config.yaml: a key of slots is "s12.5"']),
    "yaml turned no into a boolean": ({"policies": [*BASE, False]}, None, ["policies.2 is false", "in quotes"]),
    "an unknown policy": ({"policies": [*BASE, "rule_15"]}, None, ["policies names 'rule_15'", "'rule_015'?"]),
    "an unknown text": ({"texts": {"calibration": [CALIBRATION], "test": ["bibel_test"]}}, None, ["'bible_test'?"]),
    "a policy of an id with a space": ({}, policies(id="a b", miss_rule="fetch", **FIFO), [f":{LAST}: id 'a b'"]),
    "tau is not a number": ({}, policies(id="x", tau="nan", **LURED, **FIFO), [f"policies.tsv:{LAST}: tau 'nan'"]),
    "an unknown miss rule": ({}, policies(id="x", miss_rule="fetsch", **FIFO), [f":{LAST}: miss_rule 'fetsch'"]),
    "a cell that the rule does not read": (
        {}, policies(id="x", miss_rule="fetch", tau="0.1", **FIFO), [f":{LAST}: tau '0.1'", "does not read it"]
    ),
    "a policy twice": ({}, policies(id="rule_015", miss_rule="fetch", **FIFO), [f":{LAST}: id 'rule_015' a sec"]),
    "a model twice": ({}, sheet("models.tsv", *("m\ta\t-\tfloat32\t-\t-\t-\t-",) * 2), ["id 'm' a second time"]),
    "a sheet that is not there": ({"models_sheet": "config/nowhere.tsv"}, None, ["config/nowhere.tsv: No such file"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_snakemake_refuses_before_the_first_job(scratch, case):
    changes, write, parts = CONFIGURATIONS[case]
    kept = {name: (scratch.folder / "config" / name).read_bytes() for name in ("policies.tsv", "models.tsv")}
    configuration = dict(scratch.configuration)
    results = sorted(scratch.path("results").rglob("*"))
    try:
        scratch.configure(policies=list(BASE))
        scratch.configure(**changes)
        if write is not None:
            write(scratch.folder)
        ended = scratch.snakemake("results/all")
    finally:
        for name, content in kept.items():
            (scratch.folder / "config" / name).write_bytes(content)
        scratch.configuration = {}
        scratch.configure(**configuration)
    for part in parts:
        assert part in ended.message, ended.err
    assert sorted(scratch.path("results").rglob("*")) == results and scratch.started() == []


def test_slot_budgets_of_a_second_configuration_were_added_to_the_first(scratch):
    small = scratch.path("config/second.yaml")
    others = "".join(f"{key}:\n  slots: s33\n" for key in ("prefetch", "sweep", "experiment_b", "tasks"))
    small.write_text(f"slots:\n  s33: 33.333333\n{others}", encoding="utf-8")
    ended = scratch.made("results/all", "--configfile", "config/second.yaml", "-n", "-p")
    commands = [
        line for line in (ended.out + ended.err).splitlines() if "score_policy.py" in line and "--slots" in line
    ]
    assert commands and all("--slots s33=33.333333 --demand" in line for line in commands)


def test_an_error_of_an_overlay_named_every_file_of_the_run(scratch):
    scratch.path("config/third.yaml").write_text("slots: {s101: 101}\n", encoding="utf-8")
    ended = scratch.snakemake("results/all", "--configfile", "config/third.yaml")
    assert ended.message.startswith("error: config/third.yaml: slots.s101 is 101; ")
    ended = scratch.snakemake("results/all", "--config", "delay_tokens=0")
    assert ended.message.startswith("error: --config: delay_tokens is 0; ")


def test_a_path_with_a_space_or_a_quote_is_quoted(scratch):
    models = scratch.path("config/odd.tsv")
    header = (ROOT / "config" / "models.tsv").read_text(encoding="utf-8").splitlines()[0]
    models.write_text(f"{header}\ntiny\tmodels/it's a model\t-\tfloat32\t-\t-\t-\t-\n", encoding="utf-8")
    ended = scratch.made("results/all", "--config", "models_sheet=config/odd.tsv", "-n", "-p")
    assert """--model-dir 'models/it'"'"'s a model' --dtype""" in ended.out + ended.err


def test_a_model_in_fewer_bits_is_packed_first_and_that_is_what_is_scored(scratch):
    header = (ROOT / "config" / "models.tsv").read_text(encoding="utf-8").splitlines()[0]
    commit = "0123456789" * 4
    row = f"tiny\tsome/model\t{commit}\tbfloat16\t-\t-\t4\t64"
    scratch.path("config/bits.tsv").write_text(f"{header}\n{row}\n", encoding="utf-8")
    ended = scratch.made("results/all", "--config", "models_sheet=config/bits.tsv", "-n", "-p")
    said = " ".join((ended.out + ended.err).split())
    fetched = f"engine.hub --model some/model --revision {commit} --out results/models/tiny"
    packed = "pack --model results/models/tiny --dtype bfloat16 --bits 4 --group 64 --out results/packed/tiny/own"
    assert fetched in said and packed in said and said.count("--revision") == 1
    assert "--model-dir results/packed/tiny/own --bits 4 --group 64" in said  # what is simulated
    assert "--model-dir some/model" not in said


def test_the_lock_of_a_run_that_lives_is_left_alone(scratch):
    """A dead run's lock is removed, so two live ones must still keep each other out."""
    import fcntl

    folder = scratch.path(".snakemake/locks")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "0.output.lock").write_text("results/all\n", encoding="utf-8")
    with open(scratch.path(".snakemake/expertmiss.alive"), "w") as alive:
        fcntl.flock(alive, fcntl.LOCK_SH)  # as a running one holds it
        ended = scratch.snakemake("results/all")
    assert ended.code != 0 and "LockException" in ended.out + ended.err
    assert (folder / "0.output.lock").exists() and scratch.started() == []
    scratch.made("results/all", "-n")
    assert not (folder / "0.output.lock").exists()


def test_a_job_that_is_refused_stops_the_run_with_its_line_and_leaves_nothing(scratch):
    ended = scratch.snakemake("results/calibration/tiny.json")  # there is no models/tiny
    assert ended.code == 1
    (line,) = [line for line in (ended.out + ended.err).splitlines() if line.startswith("error: ")]
    assert line.startswith("error: models/tiny: ") and "a whole checkpoint in Hugging Face layout" in line
    assert "Traceback" not in ended.out + ended.err
    assert sorted(path.name for path in scratch.path("results").iterdir() if path.name != "logs") == ["tasks", "texts"]
    assert scratch.path("results/logs/calibrate_model/tiny.log").read_text(encoding="utf-8").strip() == line
    scratch.started()


# ---- checkpoints: the scripts ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder with the model `tiny`, its texts, demand and traces, made by the scripts."""
    folder = tmp_path_factory.mktemp("inputs")
    threads = torch.get_num_threads()
    write_model(folder / "tiny")
    for text, topic in TOPICS.items():
        write_text_file(folder / f"{text}.json", text, topic, documents(topic, 3))
    assert calibrate(folder, folder / "tiny", folder).code == 0
    assert record_routing(folder, folder / "tiny", folder).code == 0
    yield folder
    torch.set_num_threads(threads)


def calibrate(inputs: Path, model: Path, out: Path, *texts: Path) -> Ended:
    return run_script(
        "calibrate_model.py", "--model-dir", model, "--texts", *(texts or [inputs / f"{CALIBRATION}.json"]),
        "--context", CONTEXT, "--threads", 1,
        "--out-demand", out / "demand.safetensors", "--out", out / "calibration.json",
    )  # fmt: skip


def record_routing(inputs: Path, model: Path, out: Path, *texts: Path) -> Ended:
    return run_script(
        "record_routing.py", "--model", "tiny", "--model-dir", model,
        "--texts", *(texts or [inputs / f"{text}.json" for text in TEST]),
        "--context", CONTEXT, "--threads", 1, "--out", out / "traces",
    )  # fmt: skip


def score(inputs: Path, out: Path, policy: str, slots: list[str], **changed: Path) -> Ended:
    files = {"model_dir": "tiny", "demand": "demand.safetensors", "traces": "traces"}
    paths = {name: inputs / file for name, file in files.items()} | {"policies": SHEET} | changed
    return run_script(
        "score_policy.py", "--model", "tiny", "--policy", policy, "--slots", *slots,
        *(part for name, path in paths.items() for part in (f"--{name.replace('_', '-')}", path)),
        "--texts", *(inputs / f"{text}.json" for text in TEST), "--context", CONTEXT, "--threads", 1,
        "--out-losses", out / "losses" / "tiny" / f"{policy}.safetensors",
        "--out-decisions", out / "decisions" / "tiny" / policy,
        "--out", out / "quality" / "tiny" / policy / "perplexity.json",
    )  # fmt: skip


def cells(out: Path, policy: str) -> list[dict]:
    record = out / "quality" / "tiny" / policy / "perplexity.json"
    return json.loads(record.read_text(encoding="utf-8"))["cells"]


def cut(fraction: float):
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * fraction)])

    return change


def tensors(change):
    return lambda folder: rewrite_weights(folder, change)


def configuration(**values):
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")

    return change


def without(*names: str):
    return lambda folder: [(folder / name).unlink() for name in names]


def dense(folder: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=320, **shape)).save_pretrained(folder)


ROUTER, EXPERT = "model.layers.1.mlp.gate.weight", "model.layers.0.mlp.experts.3.down_proj.weight"
FUSED = "model.layers.0.mlp.experts.down_proj"
CHECKPOINTS = {
    "a truncated file": (cut(0.6), ["incomplete metadata", "a whole checkpoint"]),
    "a truncated header": (cut(0.001), ["header", "a whole checkpoint"]),
    "no weights": (without("model.safetensors"), ["no file named model.safetensors"]),
    "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), ["has no tokenizer"]),
    "a broken tokenizer": (lambda f: (f / "tokenizer.json").write_text('{"a": '), ["a whole checkpoint"]),
    "a broken configuration": (lambda f: (f / "config.json").write_text('{"model_type": '), ["not a valid JSON"]),
    "a router that is missing": (tensors(lambda t: t.pop(ROUTER)), [f"weight {ROUTER} is missing (1 such)"]),
    "an expert that is missing": (tensors(lambda t: t.pop(EXPERT)), ["has shape [15, 32, 16], not [16, 32, 16]"]),
    "another width": (configuration(moe_intermediate_size=24), ["has shape [16, 32, 16], not [16, 32, 24]"]),
    "a weight that is not a number": (tensors(lambda t: t[EXPERT].fill_(np.nan)), [f"{FUSED} is not finite (1 such)"]),
    "an infinite weight": (tensors(lambda t: t["lm_head.weight"][0].fill_(np.inf)), ["lm_head.weight is not finite"]),
    "an unknown family": (configuration(model_type="unheard_of"), ["unheard_of"]),
    "a family attach refuses": (dense, ["model family 'llama' is refused: no experts module"]),
    "no folder": (shutil.rmtree, ["a whole checkpoint"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_broken_checkpoint_is_named_and_nothing_is_written(inputs, tmp_path, case):
    change, parts = CHECKPOINTS[case]
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(inputs / "tiny", model)
    change(model)
    message = calibrate(inputs, model, out).message
    for part in parts if case == "a family attach refuses" else [str(model), *parts]:
        assert part in message, message
    assert not out.exists()


def gate(inputs: Path, model: Path, out: Path, policies: Path = SHEET) -> Ended:
    return run_script(
        "gate_model.py", "--model", "tiny", "--model-dir", model, "--texts", inputs / f"{CALIBRATION}.json",
        "--policies", policies, "--demand", out / "demand.safetensors", "--context", CONTEXT, "--threads", 1,
        "--out", out / "gate.json", "--out-page", out / "gate.md",
    )  # fmt: skip


def test_a_quarter_of_the_experts_below_k_stopped_the_gate(inputs, tmp_path):
    write_model(tmp_path / "model", num_experts_per_tok=6)  # a quarter are 4
    assert calibrate(inputs, tmp_path / "model", tmp_path).code == 0
    assert gate(inputs, tmp_path / "model", tmp_path).code == 0
    assert json.loads((tmp_path / "gate.json").read_text(encoding="utf-8"))["slots"] == 6


def test_a_sheet_without_the_policies_of_the_gate_stopped_the_run(inputs, tmp_path):
    shutil.copy(inputs / "demand.safetensors", tmp_path)
    assert gate(inputs, inputs / "tiny", tmp_path).code == 0
    whole = json.loads((tmp_path / "gate.json").read_text(encoding="utf-8"))
    assert whole["standin_weight"]["sheet"] == "own" and all(c["value"] is not None for c in whole["checks"])
    own = tmp_path / "policies.tsv"
    lines = SHEET.read_text(encoding="utf-8").splitlines()
    own.write_text("\n".join(x for x in lines if not x.startswith(("rule_015\t", "substitute_all\t"))) + "\n")
    assert gate(inputs, inputs / "tiny", tmp_path, own).code == 0
    found = json.loads((tmp_path / "gate.json").read_text(encoding="utf-8"))
    assert not found["fit"] and found["standin_weight"] is None
    assert [check["value"] is None for check in found["checks"]] == [True, True, False]
    assert "| substitute_all loses, % perplexity | - |" in (tmp_path / "gate.md").read_text(encoding="utf-8")


def test_a_sheet_without_the_baseline_is_refused_by_the_gate(inputs, tmp_path):
    lines = SHEET.read_text(encoding="utf-8").splitlines()
    own = tmp_path / "policies.tsv"
    own.write_text("\n".join(line for line in lines if not line.startswith(f"{BASE[0]}\t")) + "\n", encoding="utf-8")
    message = gate(inputs, inputs / "tiny", tmp_path, own).message
    assert message.startswith(f"error: policy '{BASE[0]}'; expected an id of the sheet of policies; ")
    assert not (tmp_path / "gate.json").exists()


# ---- texts -----------------------------------------------------------------------------------------------------------
def broken_text(folder: Path, docs: list[dict[str, str]]) -> Path:
    return write_text_file(folder / "broken.json", "bible_test", "literary", docs)


@pytest.mark.parametrize("script", [calibrate, record_routing])
def test_a_text_that_cannot_be_scored_is_named_by_file_and_document(inputs, tmp_path, script):
    def message(text: Path) -> str:
        found = script(inputs, inputs / "tiny", tmp_path / "out", text).message
        assert str(text) in found
        return found

    whole = documents("literary", 1)
    assert "document 'void' of 0 tokens; expected at least 1" in message(
        broken_text(tmp_path, [*whole, {"id": "void", "text": ""}])
    )
    assert "has no documents" in message(broken_text(tmp_path, []))
    path = tmp_path / "cut.json"
    path.write_text('{"status": "ok", "id": "bible', encoding="utf-8")
    assert "JSONDecodeError" in message(path)
    path.write_text('{"status": "ok", "id": "bible_test"}', encoding="utf-8")
    assert "KeyError 'topic'" in message(path)
    assert "FileNotFoundError" in message(tmp_path / "nowhere.json")
    path.write_text('{"status": "absent", "id": "bible_test", "reason": "no network"}', encoding="utf-8")
    assert "is present; expected at least one" in message(path)
    assert not (tmp_path / "out").exists()


def test_a_document_of_one_token_without_bos_has_nothing_to_score(tmp_path, inputs):
    write_model(tmp_path / "model", bos=False)
    path = broken_text(tmp_path, [{"id": "whole", "text": "the river"}, {"id": "one", "text": "t"}])
    message = record_routing(inputs, tmp_path / "model", tmp_path / "out", path).message
    assert "document 'one' of 1 tokens; expected at least 2" in message


def test_a_text_of_another_hash_is_refused(tmp_path):
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text("{}\n", encoding="utf-8")
    out = tmp_path / "out.json"
    message = run_script("resolve_text.py", "--id", ABSENT, "--data-dir", tmp_path, "--out", out).message
    digest = row_of(ABSENT)["sha256"]
    assert f"{tmp_path}/gsm8k/test.jsonl has sha256" in message and f"expected sha256 {digest}" in message
    assert not out.exists()


def test_an_unknown_text_is_answered_by_the_nearest_id(tmp_path):
    message = run_script("resolve_text.py", "--id", "bibel_test", "--out", tmp_path / "out.json").message
    assert "text 'bibel_test'" in message and "did you mean 'bible_test'?" in message


def test_an_absent_text_is_a_record_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.delenv("EXPERTMISS_DATA", raising=False)
    out = tmp_path / "out.json"
    assert run_script("resolve_text.py", "--id", ABSENT, "--out", out).code == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["status"] == "absent" and "EXPERTMISS_DATA is not set" in found["reason"]


# ---- cells -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["fetch_lfu_decay", "rule_015"])
def test_fewer_slots_than_k_fail_their_cells_alone(inputs, tmp_path, policy):
    assert score(inputs, tmp_path, policy, ["s12=12.5", "s25=25"]).code == 0
    found = cells(tmp_path, policy)
    assert [(cell["slots"], cell["status"]) for cell in found] == [*[("s12", "failed")] * 2, *[("s25", "ok")] * 2]
    for cell in found[:2]:
        assert cell["reason"].startswith("UserError: 2 slots a layer; expected from K = 4")
        assert "miss_rate" not in cell and "token_perplexity" not in cell
    losses = load_file(tmp_path / "losses" / "tiny" / f"{policy}.safetensors")
    assert sorted(losses) == [f"s25/{text}" for text in sorted(TEST)]


@pytest.mark.parametrize("policy", ["fetch_lfu_decay", "rule_015"])
def test_a_record_of_failed_cells_alone_was_thrown_away_for_want_of_a_folder(inputs, tmp_path, policy):
    assert score(inputs, tmp_path, policy, ["s12=12.5"]).code == 0
    assert {cell["status"] for cell in cells(tmp_path, policy)} == {"failed"}
    assert (tmp_path / "decisions" / "tiny" / policy).is_dir()
    assert load_file(tmp_path / "losses" / "tiny" / f"{policy}.safetensors") == {}


def as_if_of(source: Path, target: Path, model: Path, change=lambda arrays: None) -> Path:
    """A trace or a demand with the hash of another model, its arrays changed."""
    with safe_open(source, framework="numpy") as file:
        facts = file.metadata() | {"model": model_hash(model), "model_hash": model_hash(model)}
    target.parent.mkdir(exist_ok=True)
    arrays = load_file(source)
    change(arrays)
    save_file(arrays, target, metadata=facts)
    return target


def test_losses_that_are_not_a_number_fail_the_cell_and_are_no_zeros(inputs, tmp_path):
    """Finite weights, infinite logits: in the emulator, and in the recording that lossless policies are scored by."""
    model = tmp_path / "model"
    shutil.copytree(inputs / "tiny", model)
    rewrite_weights(model, lambda t: t["lm_head.weight"].fill_(3e38))
    demand = as_if_of(inputs / "demand.safetensors", tmp_path / "demand.safetensors", model)
    traces = {
        text: as_if_of(inputs / "traces" / f"{text}.safetensors", tmp_path / "traces" / f"{text}.safetensors", model)
        for text in TEST
    }
    bad = traces["bible_test"]
    as_if_of(bad, bad, model, lambda arrays: arrays["losses"].__setitem__(3, np.nan))
    changed = {"model_dir": model, "demand": demand, "traces": tmp_path / "traces"}
    assert score(inputs, tmp_path, "rule_015", ["s50=50"], **changed).code == 0
    tokens = [len(load_file(traces[text])["losses"]) for text in TEST]
    for cell, number in zip(cells(tmp_path, "rule_015"), tokens, strict=True):
        assert cell["status"] == "failed"
        assert cell["reason"].startswith(f"UserError: {number} losses are NaN or infinite")
    assert score(inputs, tmp_path, "fetch_lfu_decay", ["s50=50"], **changed).code == 0
    assert [cell["status"] for cell in cells(tmp_path, "fetch_lfu_decay")] == ["failed", "ok"]
    assert "1 losses are NaN" in cells(tmp_path, "fetch_lfu_decay")[0]["reason"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_loss_of_a_recording_that_is_nan_or_infinite_fails_its_text_alone(inputs, tmp_path, value):
    shutil.copytree(inputs / "traces", tmp_path / "traces")
    bad = tmp_path / "traces" / "bible_test.safetensors"
    as_if_of(bad, bad, inputs / "tiny", lambda arrays: arrays["losses"].__setitem__(-1, value))
    assert score(inputs, tmp_path, "fetch_lfu_decay", ["s50=50"], traces=tmp_path / "traces").code == 0
    (failed, *rest), kept = cells(tmp_path, "fetch_lfu_decay"), tmp_path / "losses" / "tiny"
    assert (
        failed["reason"] == "UserError: 1 losses are NaN or infinite; expected finite losses; the cell is recorded "
        "as failed"
    )
    assert failed["status"] == "failed" and failed["text"] == "bible_test" and "token_perplexity" not in failed
    assert [cell["status"] for cell in rest] == ["ok"] * (len(TEST) - 1)
    assert sorted(load_file(kept / "fetch_lfu_decay.safetensors")) == sorted(f"s50/{cell['text']}" for cell in rest)


def test_losses_at_another_delay_that_were_not_a_number_were_stored_as_a_result(inputs, tmp_path):
    """Finite weights, infinite logits, as above; the simulation says how late the loads are."""
    model = tmp_path / "model"
    shutil.copytree(inputs / "tiny", model)
    rewrite_weights(model, lambda t: t["lm_head.weight"].fill_(3e38))
    demand = as_if_of(inputs / "demand.safetensors", tmp_path / "demand.safetensors", model)
    found = {"link": "disk", "policy": "quality_first", "slots": "s50", "slots_count": 8, "text": "x", "status": "ok"}
    simulation, row = tmp_path / "host.json", {"beta": 0.5, "prefetch": None, "lossless": False}
    simulation.write_text(
        json.dumps({"cells": [found], "rows": {"quality_first": row}, "host": {"id": "host"}}), encoding="utf-8"
    )
    save_file({"disk/quality_first/s50/x/delays": np.full(3, 4.0)}, simulation.with_suffix(".safetensors"))
    ended = run_script(
        "score_delayed.py", "--model", "tiny", "--model-dir", model, "--policies", SHEET,
        "--texts", *(inputs / f"{text}.json" for text in TEST), "--simulations", simulation,
        "--demand", demand, "--delay", 1, "--context", CONTEXT, "--threads", 1,
        "--out-losses", tmp_path / "delayed.safetensors", "--out", tmp_path / "delayed.json",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    record = json.loads((tmp_path / "delayed.json").read_text(encoding="utf-8"))
    assert [cell["delay_tokens"] for cell in record["cells"]] == [4] * len(TEST)
    for cell in record["cells"]:
        assert cell["status"] == "failed" and "losses are NaN or infinite" in cell["reason"]
    assert sorted(load_file(tmp_path / "delayed.safetensors")) == ["none"]


def test_a_document_longer_than_the_context_is_scored_whole(inputs, tmp_path):
    """In windows: as many losses as tokens, however long the context is; the first window's are the same in both."""
    document = {"id": "long", "text": " ".join(d["text"] for d in documents("literary", 12))}
    text = broken_text(tmp_path, [document])
    found = {}
    for context in (CONTEXT, 10 * CONTEXT):
        ended = run_script(
            "record_routing.py", "--model", "tiny", "--model-dir", inputs / "tiny", "--texts", text,
            "--context", context, "--threads", 1, "--out", tmp_path / str(context),
        )  # fmt: skip
        assert ended.code == 0, ended.err
        found[context] = load_file(tmp_path / str(context) / "bible_test.safetensors")["losses"]
    short, long = found.values()
    assert len(short) == len(long) > 2 * CONTEXT and np.isfinite(short).all()
    np.testing.assert_allclose(short[:CONTEXT], long[:CONTEXT], rtol=1e-4)
    assert not np.allclose(short[CONTEXT:], long[CONTEXT:], rtol=1e-4)


def test_a_recording_of_another_model_or_text_is_refused(inputs, tmp_path):
    other = write_model(tmp_path / "other", initializer_range=0.1)
    message = score(inputs, tmp_path / "out", "rule_015", ["s50=50"], model_dir=other).message
    assert "demand.safetensors is of model" in message and model_hash(other) in message
    shutil.copytree(inputs / "traces", tmp_path / "traces")
    path = tmp_path / "traces" / "bible_test.safetensors"
    with safe_open(path, framework="numpy") as file:
        facts = file.metadata() | {"text_sha256": "0" * 64}
    save_file(load_file(path), path, metadata=facts)
    message = score(inputs, tmp_path / "out", "rule_015", ["s50=50"], traces=tmp_path / "traces").message
    assert f"{path}: bible_test is another text" in message
    path.write_bytes(path.read_bytes()[:-9])
    message = score(inputs, tmp_path / "out", "rule_015", ["s50=50"], traces=tmp_path / "traces").message
    assert f"{path}: " in message and "it was cut" in message
    assert not (tmp_path / "out").exists()


def test_an_unknown_policy_is_answered_by_the_nearest_id(inputs, tmp_path):
    message = score(inputs, tmp_path / "out", "rule_15", ["s50=50"]).message
    assert "policy 'rule_15'" in message and "did you mean 'rule_015'?" in message
    assert not (tmp_path / "out").exists()


def test_an_infinite_beta_crashed_the_record_after_all_was_scored(inputs, tmp_path):
    odd = tmp_path / "policies.tsv"
    odd.write_text(
        f"{SHEET.read_text(encoding='utf-8')}{policy_row(id='x', beta='inf', tau='0.15', **LURED, **FIFO)}\n"
    )
    assert score(inputs, tmp_path, "x", ["s50=50"], policies=odd).code == 0
    record = json.loads((tmp_path / "quality" / "tiny" / "x" / "perplexity.json").read_text(encoding="utf-8"))
    assert record["policy_row"]["beta"] == "inf" and record["cells"][0]["background_issued"] == 0


# ---- tables of odd records -------------------------------------------------------------------------------------------
def tabulated(out: Path) -> tuple[pd.DataFrame, str]:
    records = sorted(out.glob("quality/tiny/*/perplexity.json"))
    ended = run_script(
        "tabulate_quality.py", "--records", *records, "--replicates", 199, "--out-quality", out / "quality.csv",
        "--out-differences", out / "differences.csv", "--out-bundles", out / "bundles.md",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    return pd.read_csv(out / "quality.csv"), (out / "bundles.md").read_text(encoding="utf-8")


@pytest.fixture
def scored(inputs, tmp_path) -> Path:
    """Records of three policies at one slot budget."""
    for policy in ("fetch_belady", "fetch_lfu_decay", "rule_015"):
        assert score(inputs, tmp_path, policy, ["s50=50"]).code == 0
    return tmp_path


def rewrite_record(out: Path, policy: str, change) -> None:
    path = out / "quality" / "tiny" / policy / "perplexity.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    change(record)
    path.write_text(json.dumps(record), encoding="utf-8")


def fail(record: dict) -> None:
    kept = ("slots", "slots_percent", "slots_count", "text", "topic")
    record["cells"] = [{k: cell[k] for k in kept} | {"status": "failed", "reason": "x"} for cell in record["cells"]]


def test_a_table_without_any_interval_crashed(scored):
    def one_document(record):
        record["clusters"] = {text: [["one", sum(n for _, n in parts)]] for text, parts in record["clusters"].items()}

    rewrite_record(scored, "fetch_lfu_decay", one_document)
    table, bundles = tabulated(scored)
    assert table["delta_percent"].notna().all() and table["delta_percent_low"].isna().all()
    assert "% (no interval) |" in bundles


def test_a_table_without_a_baseline_crashed(scored):
    rewrite_record(scored, "fetch_lfu_decay", fail)
    save_file({}, scored / "losses" / "tiny" / "fetch_lfu_decay.safetensors")
    table, bundles = tabulated(scored)
    lossy = table[(table["policy"] == "rule_015")]
    assert lossy["reason"].str.startswith("the baseline has no losses for s50/").all()
    assert "| rule_015 | " in bundles and "| no baseline |" in bundles
    assert "- tiny, fetch_lfu_decay, s50, bible_test: x" in bundles


def test_an_absent_baseline_is_named(scored):
    """Where its record is missing; that its cells failed is a gap, as above."""
    records = [path for path in sorted(scored.glob("quality/tiny/*/perplexity.json")) if BASE[0] not in str(path)]
    ended = run_script(
        "tabulate_quality.py", "--records", *records, "--out-quality", scored / "q.csv",
        "--out-differences", scored / "d.csv", "--out-bundles", scored / "b.md",
    )  # fmt: skip
    assert ended.message == f"error: tiny: no record of {BASE[0]}; expected the baseline among the records; score it"
    simulation = scored / "simulation.json"
    simulation.write_text(json.dumps({"model": "tiny", "cells": [{"link": "disk"}]}), encoding="utf-8")
    save_file({"none": np.zeros(0)}, simulation.with_suffix(".safetensors"))
    ended = run_script(
        "tabulate_speed.py", "--simulations", simulation, "--records", *records,
        "--out", scored / "speed.csv", "--out-documents", scored / "documents.csv",
    )  # fmt: skip
    assert ended.message.startswith(f"error: tiny: no record of {BASE[0]}; expected the baseline among the records; ")
    assert not list(scored.glob("*.csv")) and not list(scored.glob("*.md"))


def test_a_policy_with_one_failed_cell_is_a_gap_in_tables_and_figures(inputs, scored):
    """It keeps its other texts, has no pooled row, and counts among the comparisons: a gap helps no other policy."""
    assert score(inputs, scored, "first_choice", ["s50=50"]).code == 0
    lost, *kept = TEST

    def one_fails(record):
        (cell,) = (cell for cell in record["cells"] if cell["text"] == lost)
        known = {name: cell[name] for name in ("slots", "slots_percent", "slots_count", "text", "topic")}
        cell.clear()
        cell.update(known | {"status": "failed", "reason": "MemoryError: 3 GiB"})

    rewrite_record(scored, "rule_015", one_fails)
    losses = scored / "losses" / "tiny" / "rule_015.safetensors"
    save_file({key: loss for key, loss in load_file(losses).items() if not key.endswith(lost)}, losses)
    table, bundles = tabulated(scored)
    own = table[table["policy"] == "rule_015"].set_index("text")
    assert own.loc[lost, "status"] == "failed" and own.loc[lost, "reason"] == "MemoryError: 3 GiB"
    assert pd.isna(own.loc[lost, "token_perplexity"]) and pd.isna(own.loc[lost, "delta_percent"])
    assert sorted(own.index) == sorted(TEST) and own.loc[kept, "delta_percent"].notna().all()
    assert f"| rule_015 | no result on {lost} | | | | | | |" in bundles
    assert f"- tiny, rule_015, s50, {lost}: MemoryError: 3 GiB" in bundles
    (other,) = table[(table["policy"] == "first_choice") & (table["text"] == "all")].to_dict("records")
    assert other["p_holm"] == pytest.approx(min(1.0, 2 * other["p_value"]), rel=1e-6)
    for figure in ("loss_and_misses_by_slots", "loss_by_bundle", "loss_by_mass"):
        ended = run_script(f"plot_{figure}.py", "--table", scored / "quality.csv", "--out-prefix", scored / figure)
        assert ended.code == 0, ended.err
        drawn = pd.read_csv(scored / f"{figure}.csv")
        assert drawn.loc[drawn["policy"] == "rule_015", "text"].isin(kept).all()
        assert f"rule_015 s50 {lost}" in " ".join((scored / f"{figure}.svg").read_text(encoding="utf-8").split())


def test_a_result_without_its_losses_is_named(scored):
    save_file({}, scored / "losses" / "tiny" / "rule_015.safetensors")
    ended = run_script(
        "tabulate_quality.py", "--records", *sorted(scored.glob("quality/tiny/*/perplexity.json")),
        "--out-quality", scored / "q.csv", "--out-differences", scored / "d.csv", "--out-bundles", scored / "b.md",
    )  # fmt: skip
    assert ended.message.startswith("error: rule_015: no losses of its result for s50/")
    assert not (scored / "q.csv").exists()


def test_a_table_of_failed_cells_alone_names_them(scored):
    for policy in ("fetch_belady", "fetch_lfu_decay", "rule_015"):
        rewrite_record(scored, policy, fail)
    table, bundles = tabulated(scored)
    assert set(table["status"]) == {"failed"} and len(table) == 3 * len(TEST)
    assert bundles.count("s50, bible_test: x") == 3


def test_tables_hold_no_seconds(scored):
    """The same results gave another quality.csv in every run."""
    table, _ = tabulated(scored)
    assert not [column for column in table.columns if column.endswith("_s")]


def test_a_cut_record_is_named(scored):
    path = scored / "quality" / "tiny" / "rule_015" / "perplexity.json"
    path.write_text(path.read_text(encoding="utf-8")[:50], encoding="utf-8")
    ended = run_script(
        "tabulate_quality.py", "--records", path, "--out-quality", scored / "q.csv",
        "--out-differences", scored / "d.csv", "--out-bundles", scored / "b.md",
    )  # fmt: skip
    assert str(path) in ended.message and not (scored / "q.csv").exists()


# ---- trying again ----------------------------------------------------------------------------------------------------
@pytest.fixture
def finished(scored) -> Path:
    """A finished run with an absent text."""
    tabulated(scored)
    for name in ("tables/local/quality.csv", "all"):
        (scored / name).parent.mkdir(parents=True, exist_ok=True)
        (scored / name).touch()
    (scored / "texts").mkdir()
    (scored / "texts" / f"{ABSENT}.json").write_text(json.dumps({"status": "absent", "id": ABSENT, "reason": "x"}))
    return scored


def forgotten(folder: Path) -> set[str]:
    before = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    ended = run_script("forget_failed.py", folder / "quality")
    assert ended.code == 0, ended.err
    return before - {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_nothing_failed_nothing_is_forgotten(finished, monkeypatch):
    monkeypatch.delenv("EXPERTMISS_DATA", raising=False)
    assert forgotten(finished) == set()


def test_a_record_that_cannot_be_read_is_made_again(finished, monkeypatch):
    monkeypatch.delenv("EXPERTMISS_DATA", raising=False)
    (finished / "quality" / "tiny" / "rule_015" / "perplexity.json").write_text("{", encoding="utf-8")
    assert forgotten(finished) == {"quality/tiny/rule_015/perplexity.json", "tables/local/quality.csv", "all"}


def test_a_text_stayed_absent_although_it_was_there_again(finished, monkeypatch):
    monkeypatch.setattr(corpora, "load", lambda name: None)
    assert forgotten(finished) == {f"texts/{ABSENT}.json", "tables/local/quality.csv", "all"}
