"""The lm-eval adapter from outside: lm-eval's caches, model arguments, both instruments, the command line."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from adapter_cases import (
    BOS,
    DOCUMENTS,
    ENDS,
    EXPERTS,
    GENERATION,
    MAX_LENGTH,
    PAIRS,
    POLICIES,
    REQUESTS,
    ROOT,
    SLOTS,
    WARM,
    adapter,
    ask,
    parent,
    same,
    settings,
)
from lm_eval.api.model import CachingLM

from engine.demand import save_demand
from engine.errors import UserError
from engine.offload import pack_model
from evals.adapter import OffloadedLM
from evals.instruments import parse
from evals.jobs import model_hash


@pytest.fixture(scope="module")
def setting(tiny_moe):
    return settings(tiny_moe)


# ---- lm-eval's cache of answers --------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", REQUESTS)
def test_two_policies_that_share_a_cache_do_not_share_answers(kind, setting, tmp_path):
    s, path = setting(), str(tmp_path / "answers.db")
    others = [("quality_first", SLOTS), ("substitute_all", SLOTS), ("substitute_all", EXPERTS)]
    expected = [ask(adapter(s, policy, slots), kind, REQUESTS[kind]) for policy, slots in others]
    assert expected[0] != expected[1] != expected[2]
    for _ in range(2):
        for (policy, slots), answers in zip(others, expected, strict=True):
            lm = adapter(s, policy, slots)
            caching = CachingLM(lm, path)
            assert ask(caching, kind, REQUESTS[kind]) == answers
            caching.dbdict.close()
    assert lm.requests == 0, "the second time nothing is run"


def test_an_answer_is_kept_as_soon_as_it_is_there(setting, tmp_path):
    """A run that is killed goes on where it was: the hook and the look-up agree on the key."""
    s, path = setting(), str(tmp_path / "answers.db")
    lm = adapter(s)
    caching, inner = CachingLM(lm, path), lm._score

    def third_fails(*args):
        if lm.requests == 2:
            raise KeyboardInterrupt
        return inner(*args)

    lm._score = third_fails
    with pytest.raises(KeyboardInterrupt):
        ask(caching, "loglikelihood", PAIRS)
    caching.dbdict.close()
    again = adapter(s)
    caching = CachingLM(again, path)
    assert ask(caching, "loglikelihood", PAIRS) == ask(adapter(s), "loglikelihood", PAIRS)
    caching.dbdict.close()
    assert again.requests == len(PAIRS) - 2


@pytest.mark.parametrize(
    "change",
    [
        {"policy": "speed_first"},
        {"slots": SLOTS + 1},
        {"max_length": MAX_LENGTH - 1},
        {"identity": {"model_hash": "another"}},
        {"identity": {"instrument": "offload"}},
        {"kind": "has_bos"},
        {"dtype": torch.bfloat16},
        {"family": "mixtral"},
    ],
    ids=str,
)
def test_law_whatever_changes_an_answer_changes_the_key(change, setting):
    """No two of these may be taken for each other; the same twice may."""

    def key(policy="quality_first", slots=SLOTS, max_length=MAX_LENGTH, identity=None, **of_setting):
        hook = SimpleNamespace(dbdict=SimpleNamespace())
        lm = adapter(setting(**of_setting), policy, slots, max_length=max_length, identity=identity)
        lm.set_cache_hook(hook)
        return hook.dbdict.encode_key("request")

    assert key() == key()
    assert key(**change) != key()


def test_a_chat_template_is_part_of_the_key_of_prompts(setting):
    s = setting()
    lm = adapter(s)
    before = lm.tokenizer_name
    s.tokenizer.chat_template = "{{ messages }}"
    try:
        assert lm.tokenizer_name != before
    finally:
        s.tokenizer.chat_template = None


# ---- arguments -------------------------------------------------------------------------------------------------------
GIVEN = {"pretrained": "model", "policy": "quality_first", "slots": "25%", "demand": "cold"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"polcy": "rule_015"}, "model argument 'polcy'.*did you mean 'policy'.*demand"),
        ({"add_bos_token": True}, "model argument 'add_bos_token'"),
        ({"slots": None}, "no model argument 'slots'"),
        ({"instrument": "emulater"}, "did you mean 'emulator'"),
        ({"dtype": "float61"}, "did you mean 'float16'"),
        ({"delay": 0}, "delay=0"),
        ({"delay": 2, "instrument": "offload"}, "delay=2 with instrument=offload"),
        ({"link": "ram"}, "link=ram with instrument=emulator"),
        ({"threads": "all"}, "threads=all"),
        ({"max_length": -5}, "max_length=-5"),
    ],
    ids=str,
)
def test_arguments_that_do_not_exist_or_cannot_be_are_named(change, said):
    with pytest.raises(UserError, match=said):
        parse(GIVEN | change)


def test_what_lm_eval_passes_along_is_no_argument_of_ours():
    passed = {"batch_size": "auto", "max_batch_size": 64, "trust_remote_code": True, "device": "cuda:0"}
    assert parse(GIVEN | passed) == parse(GIVEN | {"device": "cuda:0"})


# ---- from a folder, in Python and by the command line ----------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(setting, tmp_path_factory):
    """A model, also packed, a calibration of it and one of another model, tasks of the three kinds over local data."""
    s, root = setting(), tmp_path_factory.mktemp("lm_eval")
    s.stock.save_pretrained(root / "model")
    s.tokenizer.save_pretrained(root / "model")
    how = {"revision": None, "dtype": None, "bits": None, "group": None}
    pack_model(argparse.Namespace(model=root / "model", out=root / "packed", **how))
    for name, model in (("demand", model_hash(root / "model")), ("other", "0" * 16)):
        save_demand(root / f"{name}.safetensors", WARM, {"model": model})
    (root / "pairs.json").write_text(json.dumps([{"text": text, "ends": ENDS} for text in DOCUMENTS[:2]]))
    of_yaml = GENERATION | {"until": "\n"}  # as a string
    tasks = {
        "tiny_choice": {"output_type": "multiple_choice", "doc_to_choice": "ends", "doc_to_target": 0},
        "tiny_generation": {"output_type": "generate_until", "doc_to_target": "text", "generation_kwargs": of_yaml},
        "tiny_rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text"},
    }
    metrics = {"tiny_choice": "acc", "tiny_generation": "exact_match", "tiny_rolling": "word_perplexity"}
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{root}/pairs.json"}}}
    for name, own in tasks.items():
        task = {"task": name, "test_split": "test", "doc_to_text": "text", "target_delimiter": "", **data, **own}
        task["metric_list"] = [{"metric": metrics[name]}]
        (root / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return root


def arguments(folder: Path, **change) -> dict:
    sheet = str(ROOT / "config" / "policies.tsv")
    given = {"pretrained": f"{folder}/model", "policy": "substitute_all", "slots": "32%", "policies": sheet}
    return given | {"demand": f"{folder}/demand.safetensors", "max_length": MAX_LENGTH} | change


@pytest.mark.parametrize("passed", [{}, {"batch_size": 8}, {"batch_size": "auto:4", "max_batch_size": 64}], ids=str)
def test_agreement_of_a_model_from_its_folder_whatever_the_batch_size(passed, folder, setting):
    lm = OffloadedLM.create_from_arg_obj(arguments(folder, threads=1), passed | {"device": "cuda:0"})
    direct = adapter(setting(), "substitute_all")
    assert lm.batch_size == 1
    for kind in REQUESTS:
        assert ask(lm, kind, REQUESTS[kind]) == ask(direct, kind, REQUESTS[kind])
    info = lm.get_model_info()
    assert info["slots_count"] == SLOTS and info["policy"]["id"] == "substitute_all"
    assert info["model_hash"] == model_hash(folder / "model") and info["start"] == "warm"
    assert info["decisions"] == pytest.approx(direct.counts)
    json.dumps(info, allow_nan=False)


def test_infinite_thresholds_are_strict_json(folder):
    lm = OffloadedLM.create_from_arg_obj(arguments(folder, policy="speed_first", demand="cold", threads=1))
    assert lm.get_model_info()["policy"]["tau"] == "inf" and lm.identity["start"] == "cold"
    json.dumps(lm.get_model_info(), allow_nan=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"policy": "quality_frist"}, "did you mean 'quality_first'"),
        ({"policy": "fetch_belady"}, "a policy that does not need the future"),
        ({"slots": "10%"}, "1 slots a layer"),
        ({"slots": 17}, "17 slots a layer"),
        ({"slots": 0.25}, "slots=0.25"),
        ({"demand": "FOLDER/other.safetensors"}, "is of model 0000000000000000"),
        ({"demand": "FOLDER/none.safetensors"}, "a calibration's demand"),
        ({"pretrained": "FOLDER/hf"}, "hf is no folder"),
        ({"instrument": "offload", "link": "disc"}, "did you mean 'disk'"),
        ({"instrument": "offload", "slots": 17}, "17 slots a layer"),
        ({"instrument": "offload", "policy": "fetch_belady"}, "a policy that does not need the future"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_the_model_are_refused(change, said, folder):
    change = {
        name: value.replace("FOLDER", str(folder)) if isinstance(value, str) else value
        for name, value in change.items()
    }
    with pytest.raises(UserError, match=said):
        OffloadedLM.create_from_arg_obj(arguments(folder, **change))


# ---- the engine as instrument ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_agreement_of_the_engine_with_parent_and_emulator(policy, kind, folder, setting):
    """Weights that really move: S = E is the parent, few slots are the emulator (loads complete at the next step)."""
    given = arguments(folder, policy=policy, instrument="offload", dtype="float32", threads=1)
    all_slots = OffloadedLM.create_from_arg_obj(given | {"slots": "100%"})
    stock, asked = parent(setting()), REQUESTS[kind]
    if kind == "loglikelihood_rolling":
        stock, asked = parent(setting(), add_bos_token=False), [a for a in asked if not a[0].startswith(BOS)]
    assert same(kind, ask(all_slots, kind, asked), ask(stock, kind, asked))
    assert all_slots.counts["hits"] == all_slots.counts["demands"]
    few, emulated = OffloadedLM.create_from_arg_obj(given), adapter(setting(), policy)
    assert same(kind, ask(few, kind, REQUESTS[kind]), ask(emulated, kind, REQUESTS[kind]))
    assert few.counts == pytest.approx(emulated.counts)
    assert few.get_model_info()["failed_loads"] == 0
    assert not len(few.handler.link.journal()), "it would grow with the requests"


def test_agreement_of_a_packed_store_with_its_checkpoint(folder):
    """The same answers from the same calibration under keys of their own."""
    made = [
        arguments(folder, instrument="offload", threads=1, pretrained=f"{folder}/{name}")
        for name in ("model", "packed")
    ]
    checkpoint, packed = (OffloadedLM.create_from_arg_obj(given) for given in made)
    for kind in REQUESTS:
        assert same(kind, ask(packed, kind, REQUESTS[kind]), ask(checkpoint, kind, REQUESTS[kind]))
    assert packed.counts == pytest.approx(checkpoint.counts)
    assert packed.identity["model_hash"] != checkpoint.identity["model_hash"]


# ---- the command line ------------------------------------------------------------------------------------------------
def command_line(folder: Path, *words: str, **change) -> subprocess.CompletedProcess:
    given = ",".join(f"{name}={value}" for name, value in arguments(folder, threads=1, **change).items())
    command = [sys.executable, "-m", "evals.lm_eval", "--model", "offloaded", "--model_args", given]
    command += ["--include_path", str(folder), "--tasks", "tiny_choice,tiny_generation,tiny_rolling", *words]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": f"{folder}/hf"}
    return subprocess.run(command, cwd=ROOT, env=os.environ | offline, capture_output=True, text=True, check=False)


def test_end_to_end_the_command_line_of_lm_eval(folder, setting):
    """Tasks of the three kinds: the numbers are those of the same class in Python, and say what happened."""
    done = command_line(folder, "--output_path", f"{folder}/found.json", "--use_cache", f"{folder}/cache")
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = folder.glob("found_*.json")  # lm-eval adds the time
    found = json.loads(path.read_text())
    texts, lm = DOCUMENTS[:2], adapter(setting(), "substitute_all")
    nll = -sum(ask(lm, "loglikelihood_rolling", [(text,) for text in texts]))
    words = sum(len(text.split()) for text in texts)
    assert found["results"]["tiny_rolling"]["word_perplexity,none"] == pytest.approx(np.exp(nll / words))
    ask(lm, "loglikelihood", [(text, end) for text in texts for end in ENDS])
    ask(lm, "generate_until", [(text, GENERATION) for text in texts])
    config = found["config"]
    assert config["model"] == "offloaded" and config["policy"]["id"] == "substitute_all"
    assert config["slots_count"] == SLOTS and config["requests"] == lm.requests == 2 + 4 + 2
    assert config["decisions"] == pytest.approx(lm.counts) and config["decisions"]["substitutions"] > 0


@pytest.mark.parametrize(
    ("words", "change", "said"),
    [
        ((), {"polcy": "rule_015"}, ["error: model argument 'polcy'; expected", "did you mean 'policy'? known:"]),
        (("--gen_kwargs", f"max_gen_toks={MAX_LENGTH}"), {}, [f"error: max_gen_toks={MAX_LENGTH}; expected 1 to"]),
    ],
    ids=["a wrong argument", "max_gen_toks not smaller than the context"],
)
def test_end_to_end_a_bad_word_is_one_line_and_exit_code_2(words, change, said, folder):
    done = command_line(folder, *words, **change)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ") and all(part in line for part in said)
