"""Inflation: the wide model computes what the small one does, weighs what Geometry says; faults leave nothing behind.

Tiny seeded models are compared in float64, where the order of a sum hides no mistake; the reference model in float32
and bfloat16 on source text of the standard library.
"""

from __future__ import annotations

import errno
import functools
import json
import json.decoder
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.activations import ACT2FN

import engine.inflate
from engine import widening
from engine.errors import UserError
from engine.files import sha256
from engine.geometry import Geometry
from engine.hook import attach
from engine.inflate import inflate, main
from engine.trace import Recorder
from engine.widening import DTYPES, EXPERT, LAYER, OUTER, Filler
from evals.reference_model.pack import unpack

ROOT = Path(__file__).parents[2]
OWN, OWN_EXPERT = 64, 32  # of the tiny models
WIDE, WIDE_EXPERT = 256, 48
EPSILON = 1e-2  # of the tiny models' norms: large, so that a wrong one shows
EXACT = 1e-6  # in float64; norms compute in float32
TIE = 1e-5  # scores that float32 does not tell apart: another order of sums moves them by less
WINDOW = 64  # tokens
ALL_PARTS = {**OUTER, **LAYER, **EXPERT}


@pytest.fixture(scope="module")
def saved(tiny_moe, tmp_path_factory):
    """saved(family, tied) -> folder of a tiny model that shares its key heads and whose norms are no ones."""

    @functools.cache
    def save(family="qwen3_moe", tied=False):
        model = tiny_moe(family, tie_word_embeddings=tied, num_key_value_heads=2, rms_norm_eps=EPSILON)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
        model.save_pretrained(folder := tmp_path_factory.mktemp("own"))
        return folder

    return save


@pytest.fixture
def own(saved, tmp_path):
    """A copy of a tiny model that a test may spoil."""
    return Path(shutil.copytree(saved(), tmp_path / "own"))


@torch.no_grad()
def run(folder, ids, dtype=torch.float64, **configuration):
    """Of ids [B, T]: logits [B, T, V], hidden states [layers + 1, B, T, D], chosen sets and scores [B, T, L, ...]."""
    configuration |= {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **configuration)
    with attach(model) as attachment:
        recorder = Recorder(attachment, scores=True)
        out = model(ids, use_cache=False, output_hidden_states=True)
        trace = recorder.trace()
    chosen, scores = (torch.from_numpy(a).unflatten(0, ids.shape) for a in (trace.chosen, trace.scores))
    return SimpleNamespace(
        logits=out.logits, hidden=torch.stack(out.hidden_states), chosen=chosen.sort(-1).values, scores=scores
    )


def weights(folder):
    """Every tensor of a folder by name."""
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def part_of(name):
    """The row of the table that a tensor's name belongs to."""
    return next(
        part for tail, part in ALL_PARTS.items() if name.endswith(tail) and ("experts" in name) == (tail in EXPERT)
    )


# ---- the same function -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_moe_raw"])  # norm_topk_prob true, false
@pytest.mark.parametrize("width, expert_width", [(OWN, 64), (256, OWN_EXPERT), (256, 48), (1024, 40)])
def test_law_the_wide_model_is_the_small_one(width, expert_width, family, tied, saved, random_ids, tmp_path):
    ids = random_ids(40, seed=31, rows=2)
    inflate(saved(family, tied), tmp_path / "wide", width=width, expert_width=expert_width, dtype="float32")
    small, wide = run(saved(family, tied), ids), run(tmp_path / "wide", ids)
    assert torch.equal(small.chosen, wide.chosen)
    torch.testing.assert_close(wide.logits, small.logits, atol=EXACT, rtol=0)
    torch.testing.assert_close(wide.hidden[:-1, ..., :OWN], small.hidden[:-1], atol=EXACT, rtol=0)
    assert wide.hidden.shape[-1] == width and not wide.hidden[..., OWN:].any()


PLANTED = [(name, {"zero": ""}) for name, part in ALL_PARTS.items() if part.zero]
PLANTED += [(name, {"scaled": False}) for name, part in ALL_PARTS.items() if part.scaled]


@pytest.mark.parametrize("name, mistake", PLANTED, ids=str)
def test_law_every_zero_and_every_scale_is_needed(name, mistake, saved, random_ids, tmp_path, monkeypatch):
    """A planted mistake in any row of the table shows in the logits or in the residual's zeros."""
    table = next(table for table in (OUTER, LAYER, EXPERT) if name in table)
    monkeypatch.setitem(table, name, replace(table[name], **mistake))
    ids = random_ids(40, seed=32)
    inflate(saved(), tmp_path / "wide", width=WIDE, expert_width=WIDE_EXPERT, dtype="float32")
    small, wide = run(saved(), ids), run(tmp_path / "wide", ids)
    apart = (wide.logits - small.logits).abs().max()
    assert apart > 100 * EXACT or wide.hidden[..., OWN:].any()


def test_law_the_epsilon_is_needed(saved, random_ids, tmp_path):
    ids = random_ids(40, seed=33)
    inflate(saved(), tmp_path / "wide", width=WIDE, dtype="float32")
    wide, planted = run(tmp_path / "wide", ids), run(tmp_path / "wide", ids, rms_norm_eps=EPSILON)
    assert (wide.logits - planted.logits).abs().max() > 100 * EXACT


def test_the_activations_let_through_leave_zero_alone():
    for name in widening._SILENT:
        assert ACT2FN[name](torch.zeros(1)) == 0, name


# ---- what is written -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_law_own_blocks_zeros_and_filler_lie_where_the_table_says(tied, dtype, saved, tmp_path):
    provenance = inflate(saved(tied=tied), tmp_path / "wide", width=WIDE, expert_width=WIDE_EXPERT, dtype=dtype)
    small, wide = weights(saved(tied=tied)), weights(tmp_path / "wide")
    assert set(small) == set(wide) and ("lm_head.weight" in wide) != tied
    rounded = 0
    for name, own in small.items():
        part, found = part_of(name), wide[name]
        own = own / 2 if part.scaled else own
        rounded += (own.to(DTYPES[dtype]) != own).sum()
        block = tuple(map(slice, own.shape))
        assert found.dtype == DTYPES[dtype] and torch.equal(found[block], own.to(found.dtype)), name
        added = torch.ones(found.shape, dtype=torch.bool)
        added[block] = False
        if part.zero:
            rows, columns = own.shape
            zero = (slice(rows, None), slice(columns)) if part.zero == "below" else (slice(rows), slice(columns, None))
            assert not found[zero].any(), name
            added[zero] = False
        assert added.sum() == found.numel() - own.numel() - (found[zero].numel() if part.zero else 0)
        assert found[added].ne(0).all(), name
        assert added.any() == (part.axes != "h" and part.zero != "right"), name
        assert not (found[added].abs() > 0.2).any(), name  # ten standard deviations
    assert provenance["rounded_weights"] == rounded and (rounded > 0) == (dtype == "bfloat16")


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("width, expert_width", [(OWN, OWN_EXPERT), (WIDE, WIDE_EXPERT), (1024, OWN_EXPERT)])
def test_agreement_bytes_written_are_those_of_geometry(width, expert_width, dtype, saved, tmp_path):
    inflate(saved(), tmp_path / "wide", width=width, expert_width=expert_width, dtype=dtype)
    config = json.loads((saved() / "config.json").read_text())
    geometry = Geometry.of_config(config, width=width, expert_width=expert_width, dtype=dtype)
    wide_config = json.loads((tmp_path / "wide/config.json").read_text())
    assert Geometry.of_config(wide_config, dtype=dtype) == geometry
    assert wide_config["head_dim"] == config["head_dim"] and wide_config["dtype"] == dtype
    size = {name: value.nbytes for name, value in weights(tmp_path / "wide").items()}
    for layer in range(geometry.layers):
        prefix = f"model.layers.{layer}."
        assert sum(b for n, b in size.items() if n.startswith(prefix) and "experts" not in n) == geometry.dense_bytes
        for e in range(geometry.experts):
            assert sum(b for n, b in size.items() if n.startswith(f"{prefix}mlp.experts.{e}.")) == geometry.expert_bytes
    assert size["lm_head.weight"] == size["model.embed_tokens.weight"] == geometry.head_bytes
    index = json.loads((tmp_path / "wide/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(size.values())


@pytest.mark.parametrize("shard_bytes, count", [(1, 35), (500_000, 9), (10**9, 1)])
def test_law_shards_change_no_number(shard_bytes, count, saved, tmp_path):
    sizes = {"width": WIDE, "expert_width": WIDE_EXPERT}
    inflate(saved(), tmp_path / "one", **sizes)
    inflate(saved(), tmp_path / "many", **sizes, shard_bytes=shard_bytes)
    one, many = weights(tmp_path / "one"), weights(tmp_path / "many")
    assert set(one) == set(many) and all(torch.equal(one[name], many[name]) for name in one)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())["weight_map"]
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert set(index) == set(many) and set(index.values()) == {path.name for path in files}
    assert len(files) == count  # at most one for each expert, each layer and the rest
    for path in files:
        tensors = load_file(path)
        assert all(index[name] == path.name for name in tensors)
        assert shard_bytes == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= shard_bytes
        experts = {name.rsplit(".", 2)[0] for name in tensors if "experts" in name}
        assert all(sum(name.startswith(f"{e}.") for name in tensors) == 3 for e in experts)  # whole where it lies


def test_law_the_seed_moves_the_filler_alone(saved, random_ids, tmp_path):
    ids = random_ids(40, seed=34)
    for name, seed in (("a", 1), ("again", 1), ("b", 2)):
        inflate(saved(), tmp_path / name, width=WIDE, dtype="float32", seed=seed)
    files = [(tmp_path / name / "model-00001-of-00001.safetensors").read_bytes() for name in ("a", "again", "b")]
    assert files[0] == files[1] != files[2]
    torch.testing.assert_close(run(tmp_path / "a", ids).logits, run(tmp_path / "b", ids).logits, atol=EXACT, rtol=0)


def test_law_no_page_of_filler_comes_twice(monkeypatch):
    """The block comes round hundreds of times, each time otherwise in a page of 4,096 bytes: nothing to deduplicate."""
    assert widening._FILLER_NUMBERS % 2 == 1
    rounds = 300
    monkeypatch.setattr(widening, "_FILLER_NUMBERS", block := 2049)
    filler = Filler(0, torch.bfloat16)
    shapes = [(2048, rounds // 3), (1, 2048, rounds // 3), (2048 * (rounds // 3),)]
    pages = torch.cat([filler.tensor(shape).flatten() for shape in shapes]).view(rounds, 2048)
    assert len({page.view(torch.int16).numpy().tobytes() for page in pages}) == rounds < block


def test_provenance_names_the_source(saved, tmp_path):
    found = inflate(saved(), tmp_path / "wide", width=WIDE, expert_width=WIDE_EXPERT, seed=7, dtype="float32")
    assert found == json.loads((tmp_path / "wide/inflation.json").read_text())
    assert found == {
        "source_sha256": {"model.safetensors": sha256(saved() / "model.safetensors")},
        "source_width": OWN,
        "source_expert_width": OWN_EXPERT,
        "width": WIDE,
        "expert_width": WIDE_EXPERT,
        "dtype": "float32",
        "seed": 7,
        "rounded_weights": 0,
    }


def test_an_inflated_model_is_a_model_to_inflate(saved, random_ids, tmp_path):
    """A sharded source too: 64 to 256 to 1024 computes what 64 does."""
    ids = random_ids(40, seed=35)
    inflate(saved(), tmp_path / "a", width=256, dtype="float32", shard_bytes=300_000)
    found = inflate(tmp_path / "a", tmp_path / "b", width=1024, dtype="float32")
    assert len(found["source_sha256"]) > 1
    torch.testing.assert_close(run(tmp_path / "b", ids).logits, run(saved(), ids).logits, atol=EXACT, rtol=0)


# ---- the reference model ---------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def reference():
    """The reference model, plain and inflated to 1024 x 64 in bfloat16, and windows [B, T] of Python source."""
    with tempfile.TemporaryDirectory() as folder:  # half a gigabyte: not kept as pytest keeps its own
        small, wide = Path(folder, "small"), Path(folder, "wide")
        unpack(ROOT / "models/reference", small)
        found = inflate(small, wide, width=1024, expert_width=64)
        assert found["rounded_weights"] == 0
        ids = AutoTokenizer.from_pretrained(wide)(Path(json.decoder.__file__).read_text())["input_ids"]
        yield small, wide, torch.tensor(ids[: 10 * WINDOW]).view(-1, WINDOW)


def test_agreement_the_reference_in_float32(reference):
    """Where no score is tied within rounding, then or earlier in the window: the same sets, logits within 1e-4."""
    *folders, ids = reference
    small, wide = (run(folder, ids, torch.float32) for folder in folders)
    top = small.scores.topk(11, dim=-1).values  # [B, T, L, K + 1]
    tied = (top[..., 9] - top[..., 10] < TIE).any(-1).cummax(-1).values  # [B, T]
    assert tied.float().mean() < 0.2
    assert torch.equal(small.chosen[~tied], wide.chosen[~tied])
    torch.testing.assert_close(wide.logits[~tied], small.logits[~tied], atol=1e-4, rtol=0)


def test_agreement_the_reference_in_bfloat16(reference):
    *folders, ids = reference
    losses = [
        torch.nn.functional.cross_entropy(
            run(folder, ids, torch.bfloat16).logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()
        )
        for folder in folders
    ]
    assert losses[0] < 0.9 * math.log(4096)  # it is a trained model that is compared
    assert abs(losses[0] - losses[1]) < 0.01


# ---- refusals --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "mixtral"}, "a model of family 'mixtral'; expected a qwen3_moe"),
        ({"mlp_only_layers": [0]}, "a configuration with mlp_only_layers"),
        ({"n_shared_experts": 1}, "a configuration with n_shared_experts"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2; expected 1"),
        ({"attention_bias": True}, "attention_bias True; expected False"),
        ({"hidden_act": "sigmoid"}, "hidden_act 'sigmoid'; expected act"),
        (
            {"vocab_size": 129},
            r"embed_tokens.weight of shape \(128, 64\); expected \(129, 64\)|lm_head.weight of shape",
        ),
        ({"num_hidden_layers": 3}, r"no tensor model.layers.2"),
        ({"num_hidden_layers": 1}, r"a tensor model.layers.1"),
        ({"num_local_experts": 15}, r"a tensor model.layers.0.mlp.experts.15"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_model_that_the_widening_does_not_cover_is_refused(change, message, own, tmp_path):
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=message):
        inflate(own, tmp_path / "wide", width=WIDE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"width": 128}, "width 128; expected 64 times a power of four"),
        ({"width": 100}, "width 100"),
        ({"width": 16}, "width 16"),
        ({"width": 0}, "width 0"),
        ({"expert_width": 31}, "expert width 31; expected at least the model's own 32"),
        ({"expert_width": 0}, "expert width 0"),
        ({"dtype": "bfloat61"}, "dtype 'bfloat61'; expected bfloat16 or float32; did you mean 'bfloat16'"),
        ({"dtype": "float16"}, "dtype 'float16'"),
        ({"shard_bytes": 0}, "shards of 0 bytes"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be_are_refused(arguments, message, saved, tmp_path):
    with pytest.raises(UserError, match=message):
        inflate(saved(), tmp_path / "wide", **arguments)
    assert not list(tmp_path.iterdir())


def spoil_int8(own):
    (own / "model.safetensors").rename(own / "model.int8.safetensors")


def spoil_nothing(own):
    shutil.rmtree(own)


def spoil_truncated(own):
    data = (own / "model.safetensors").read_bytes()
    (own / "model.safetensors").write_bytes(data[:-100])


def spoil_config(own):
    (own / "config.json").write_text("{")


def spoil_size(own):
    config = json.loads((own / "config.json").read_text())
    del config["moe_intermediate_size"]
    (own / "config.json").write_text(json.dumps(config))


def spoil_weight(own, change):
    tensors = load_file(own / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors[name] = change(tensors[name])
    save_file(tensors, own / "model.safetensors")


def spoil_nan(own):
    spoil_weight(own, lambda tensor: tensor.index_fill(0, torch.tensor(3), torch.nan))


def spoil_dtype(own):
    spoil_weight(own, lambda tensor: tensor.to(torch.int8))


@pytest.mark.parametrize(
    "spoil, message",
    [
        (spoil_int8, "int8 weights .*; unpack it first: python -m evals.reference_model.pack unpack"),
        (spoil_nothing, "no file .*config.json; expected a Hugging Face folder"),
        (spoil_truncated, "model.safetensors has .* bytes; expected .*, as its header says"),
        (spoil_config, "config.json: .*; expected JSON"),
        (spoil_size, "config.json without moe_intermediate_size"),
        (spoil_nan, "experts.3.up_proj.weight with numbers that are not finite"),
        (spoil_dtype, "experts.3.up_proj.weight is stored as I8; expected BF16"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_spoilt_source_is_one_line_and_leaves_nothing(spoil, message, own, tmp_path):
    spoil(own)
    with pytest.raises(UserError, match=message):
        inflate(own, tmp_path / "wide", width=WIDE)
    assert [path.name for path in tmp_path.iterdir()] in (["own"], [])


# ---- whole or not at all ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("content", [None, "kept"])
def test_an_existing_target_is_refused_and_kept(content, saved, tmp_path):
    (tmp_path / "wide").mkdir()
    if content:
        (tmp_path / "wide/config.json").write_text(content)
    with pytest.raises(UserError, match="wide exists; expected a new folder"):
        inflate(saved(), tmp_path / "wide", width=WIDE)
    assert [path.read_text() for path in (tmp_path / "wide").iterdir()] == [content] * bool(content)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "fault",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")],
    ids=["OSError", "SafetensorError"],
)
def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(fault, saved, tmp_path, monkeypatch):
    written = []

    def fill(tensors, path, metadata):
        if written:
            raise fault
        save_file(tensors, path, metadata)
        written.append(path.stat().st_size)

    monkeypatch.setattr(engine.inflate, "save_file", fill)
    with pytest.raises(UserError, match=r"writing .*wide: .*No space left on device.*; expected a disk with room"):
        inflate(saved(), tmp_path / "wide", width=WIDE, shard_bytes=200_000)
    assert written and not list(tmp_path.iterdir())


def test_a_small_disk_is_refused_before_anything_is_written(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**6))
    monkeypatch.setattr(engine.inflate, "save_file", lambda *_, **__: pytest.fail("written"))
    with pytest.raises(UserError, match=r"1,000,000 bytes free for .*; expected \d\d,"):
        inflate(saved(), tmp_path / "wide", width=WIDE)
    assert not list(tmp_path.iterdir())


def test_a_killed_run_leaves_nothing_that_the_next_does_not_clear(saved, tmp_path):
    """Killed after its first shard; folders of other names stay."""
    code = "import os, sys; from engine.inflate import inflate; inflate(sys.argv[1], sys.argv[2], width=256, "
    code += "shard_bytes=200_000, progress=lambda line: os.kill(os.getpid(), 9))"
    command = [sys.executable, "-c", code, str(saved()), str(tmp_path / "wide")]
    process = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert process.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name == ".wide.building" and len(list(left.iterdir())) == 1
    (foreign := tmp_path / ".other.building").mkdir()
    inflate(saved(), tmp_path / "wide", width=WIDE)
    assert set(tmp_path.iterdir()) == {tmp_path / "wide", foreign}


def test_end_to_end_the_command_line(saved, random_ids, tmp_path, monkeypatch, capsys):
    """Progress on standard error, the provenance as the last line of standard output; stock transformers loads it."""
    arguments = f"inflate --model {saved()} --width {WIDE} --expert-width {WIDE_EXPERT} --out {tmp_path}/deep/wide"
    monkeypatch.setattr(sys, "argv", [*arguments.split(), "--dtype", "float32", "--shard-bytes", "1_000_000"])
    main()
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads((tmp_path / "deep/wide/inflation.json").read_text())
    lines = err.splitlines()
    files = list((tmp_path / "deep/wide").glob("*.safetensors"))
    assert len(lines) == len(files) > 1 and lines[0].startswith(f"shard 1 of {len(files)}, ")
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in files)
    assert (tmp_path / "deep/wide/generation_config.json").is_file() == (saved() / "generation_config.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "deep/wide", dtype=torch.float32)
    small = AutoModelForCausalLM.from_pretrained(saved(), dtype=torch.float32)
    assert (model.config.hidden_size, model.config.moe_intermediate_size) == (WIDE, WIDE_EXPERT)
    ids = random_ids(20, seed=36)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, small(ids).logits, atol=1e-4, rtol=0)
