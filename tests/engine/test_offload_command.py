"""End to end: the engine on the command line, over a checkpoint in place and its packed store; bad input by name."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.demand import save_demand
from engine.errors import main_guard
from engine.offload import main
from engine.offload_model import OpenModel
from engine.policies import load_policies
from engine.predictors import save_predictor
from engine.residency import Demand
from engine.safetensors_files import weights_hash

ROOT = Path(__file__).parents[2]
PROFILE = "epyc_2core_vm"  # committed, as a measured host's
PROMPT = "a b c d e f g h"


class Found(NamedTuple):
    stdout: str
    stderr: str


def run(*arguments, expect=0):
    """The command in this process: a process of its own takes seconds to import torch."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    threads = torch.get_num_threads()
    with (
        mock.patch.object(sys, "argv", ["offload", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main_guard(main)
        except SystemExit as exc:
            code = exc.code
        finally:
            torch.set_num_threads(threads)
    assert code == expect, err.getvalue()
    return Found(out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def folders(tiny_moe, tmp_path_factory):
    """checkpoint and packed store of a tiny model with a tokenizer of single letters, and its warm demand."""
    root = tmp_path_factory.mktemp("offload")
    model = tiny_moe("qwen3_moe", bos_token_id=0, eos_token_id=1)
    model.save_pretrained(root / "checkpoint")
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2} | {chr(97 + i): 3 + i for i in range(26)}
    vocabulary |= {f"w{i}": i for i in range(29, 128)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(root / "checkpoint")
    run("pack", "--model", root / "checkpoint", "--out", root / "packed")
    shutil.copy(ROOT / "results" / "measured" / PROFILE / "host.yaml", root / f"{PROFILE}.yaml")
    arrays = {"A": torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(1)), "B": torch.zeros(1, 16, 4)}
    facts = {"model_hash": weights_hash(root / "packed")}
    save_predictor(root / "spec_prefetch.safetensors", "spec_prefetch", arrays, facts)
    save_demand(root / "demand.safetensors", Demand(torch.ones(2, 16, dtype=torch.int64).numpy(), 1), {})
    return root


def generate(folders, model, *more, policy="quality_first", slots="50%", expect=0):
    flags = ("--policy", policy, "--slots", slots, "--prompt", PROMPT, "--max-new-tokens", 12)
    return run("generate", "--model", folders / model, *flags, *more, expect=expect)


@pytest.mark.parametrize("link", ["disk", "sdcard", "ram"])
@pytest.mark.parametrize("model", ["checkpoint", "packed"])
def test_generate_streams_text_and_ends_with_one_line_of_json(folders, model, link):
    found = generate(folders, model, "--link", link)
    *text, last = found.stdout.rstrip("\n").split("\n")
    facts = json.loads(last)
    assert "".join(text).strip()
    assert facts["policy"] == "quality_first" and facts["slots"] == 8 and facts["link"] == link
    decoded = facts["new_tokens"] - 1
    assert facts["events"] == 2 * decoded
    assert facts["hits"] + facts["fetches"] + facts["substitutions"] + facts["drops"] == 4 * facts["events"]
    assert facts["substitutions"] > 0 and 0 < facts["substituted_mass"] < 1
    assert facts["bytes"] >= facts["background_bytes"] >= 0 and facts["bytes"] > 0
    assert facts["peak_memory_bytes"] > 2**20
    numbers = ("tokens_per_s", "first_token_s", "compute_s", "ceiling_tokens_per_s", "link_bytes_per_s")
    assert all(facts[name] > 0 for name in numbers) and facts["stall_s"] >= 0
    assert facts["ceiling_tokens_per_s"] >= 0.999 * facts["tokens_per_s"]


@pytest.mark.parametrize("model", ["checkpoint", "packed"])
def test_with_all_experts_resident_it_is_the_stock_model(folders, model, tiny_moe):
    """S = E, warm: the stock greedy text, every demand a hit, not a byte read while decoding."""
    found = generate(folders, model, "--demand", folders / "demand.safetensors", "--dtype", "float32", slots="100%")
    *text, last = found.stdout.rstrip("\n").split("\n")
    facts = json.loads(last)
    assert facts["hits"] == 4 * facts["events"] and facts["bytes"] == 0
    stock = tiny_moe("qwen3_moe", bos_token_id=0, eos_token_id=1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folders / "checkpoint")
    ids = [0, *tokenizer(PROMPT, add_special_tokens=False)["input_ids"]]
    made = stock.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert "".join(text).split() == tokenizer.decode(made).split()


UNFIT = [("sdcard", name) for name in ("spec_prefetch", "gate_replay")]  # a tiny layer is shorter than its latency


@pytest.mark.parametrize("link", ["disk", "sdcard"])
@pytest.mark.parametrize("policy", ["spec_prefetch", "gate_replay", "spec_always"])
def test_a_policy_that_prefetches_says_the_same_and_what_it_brought(folders, policy, link):
    flags = ("--link", link, "--host", folders / f"{PROFILE}.yaml")
    flags += ("--predictor", folders / "spec_prefetch.safetensors") if policy != "gate_replay" else ()
    found = generate(folders, "packed", *flags, policy=policy)
    plain = generate(folders, "packed", "--link", link, policy="fetch_lfu_decay")
    assert found.stdout.split("\n{")[0] == plain.stdout.split("\n{")[0]
    facts, wanted = (json.loads(one.stdout.rstrip("\n").split("\n")[-1]) for one in (found, plain))
    assert facts["fetches"] == wanted["fetches"] > 0 and facts["hits"] == wanted["hits"]
    assert facts["prefetch_bytes"] >= 0 == wanted["prefetch_bytes"] == facts["background_bytes"]
    assert facts["prefetch_bytes"] > 0 or (link, policy) in UNFIT
    assert facts["prefetched"] >= 0 == wanted["prefetched"] and facts["dropped_pieces"] >= 0
    assert facts["failed_loads"] == []


def test_as_a_process_of_its_own(folders):
    flags = ["--policy", "rule_015", "--slots", "50%", "--prompt", PROMPT, "--max-new-tokens", "3"]
    command = [sys.executable, "-m", "engine.offload", "generate", "--model", str(folders / "packed"), *flags]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout.splitlines()[-1])["new_tokens"] <= 3


def test_place_and_packed_generate_the_same(folders):
    texts = [generate(folders, model, policy="rule_015").stdout.split("\n{")[0] for model in ("checkpoint", "packed")]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"slots": "0"}, "slots=0"),
        ({"slots": "1"}, "1 slots a layer; expected from K = 4"),
        ({"slots": "3"}, "3 slots a layer"),
        ({"slots": "17"}, "17 slots a layer; expected from K = 4 (one event must fit) to E = 16"),
        ({"policy": "fetch_belady"}, "belady"),
        ({"policy": "qualty_first"}, "did you mean 'quality_first'"),
        ({"flags": ("--link", "dsk")}, "did you mean 'disk'"),
        ({"flags": ("--max-new-tokens", "0")}, "--max-new-tokens 0"),
        ({"flags": ("--demand", "nothing.safetensors")}, "nothing.safetensors"),
        ({"model": "nowhere"}, "nowhere is no folder; expected a folder, or a hub id such as owner/name"),
        ({"flags": ("--revision", "main")}, "revision 'main' of "),
        ({"policy": "spec_prefetch"}, "policy 'spec_prefetch' without --host; expected the profile of this machine"),
        ({"policy": "spec_prefetch", "flags": ("--host", PROFILE)}, "without --predictor; expected a trained spec_pre"),
        ({"policy": "gate_replay", "flags": ("--host", "nothing.yaml")}, "nothing.yaml"),
        (
            {"policy": "spec_prefetch", "flags": ("--host", PROFILE, "--predictor", "nothing.safetensors")},
            "nothing.safetensors",
        ),
        ({"policy": "prefetch_oracle", "flags": ("--host", PROFILE)}, "predictor 'oracle' beside a running model"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_2(folders, more, message):
    options = {name: more[name] for name in ("slots", "policy") if name in more}
    flags = [folders / f"{PROFILE}.yaml" if flag == PROFILE else flag for flag in more.get("flags", ())]
    found = generate(folders, more.get("model", "packed"), *flags, **options, expect=2)
    (line,) = found.stderr.strip().splitlines()
    assert line.startswith("error: ") and message in line and not found.stdout


@pytest.mark.parametrize("slots", ["4", "16"])
def test_the_smallest_and_the_largest_number_of_slots_work(folders, slots):
    assert json.loads(generate(folders, "packed", slots=slots).stdout.splitlines()[-1])["slots"] == int(slots)


def test_a_damaged_store_is_found_by_verify_and_named(folders, tmp_path):
    run("pack", "--model", folders / "checkpoint", "--out", tmp_path / "packed")
    assert "every record" in run("verify", tmp_path / "packed").stdout
    with open(tmp_path / "packed" / "experts.bin", "r+b") as handle:
        handle.seek(100)
        handle.write(b"\x55")
    assert "layer 0, expert 0" in run("verify", tmp_path / "packed", expect=2).stderr


def test_a_store_says_whose_function_it_computes(folders):
    """Demand and answers belong to weights, wherever these lie."""
    assert weights_hash(folders / "packed") == weights_hash(folders / "checkpoint") is not None


def test_filled_from_its_store_the_model_is_the_stock_one(folders, tiny_moe):
    ids = torch.arange(20)[None]
    with torch.inference_mode(), OpenModel(folders / "packed", torch.float32) as opened:
        opened.fill()
        torch.testing.assert_close(opened.model(ids).logits, tiny_moe("qwen3_moe")(ids).logits, rtol=1e-4, atol=1e-4)


def test_two_engines_of_one_model_follow_each_other(folders):
    """As a measurement does, link after link."""
    policy = load_policies(ROOT / "config" / "policies.tsv")["rule_015"]
    logs = []
    with torch.inference_mode(), OpenModel(folders / "packed", torch.float32) as opened:
        for _ in range(2):
            engine = opened.engine(slots=5)
            engine.use(policy)
            with engine.phase("decode"):
                opened.model(torch.tensor([[7]]))
            logs.append(engine.log())
            engine.link.close()
    assert (logs[0].executed == logs[1].executed).all()
