"""The skeleton: everything but the experts as from_pretrained makes it, found by name where it is not, and small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_cases import HALF, LAYOUTS, SINGLE, edit, fill, reference, save, tensors_of, write
from transformers.utils import logging

from engine.checkpoint import CheckpointStore
from engine.errors import UserError
from engine.hook import attach, experts_modules
from engine.skeleton import expert_parameters, load_skeleton

DENSE_FIRST = {"num_hidden_layers": 3, "first_k_dense_replace": 1}


# ---- agreement with from_pretrained ---------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("disk", "run"), [SINGLE, HALF], ids=["float32", "bfloat16"])
def test_agreement_skeleton_and_store_are_from_pretrained(
    disk, run, layout, family, tiny_moe, random_ids, tmp_path, score_rule
):
    """Logits, parameters and buffers to the bit; the family is recognised while the experts are away."""
    folder, ids = save(tiny_moe(family), tmp_path, layout, dtype=disk), random_ids(40, seed=1)
    stock, skeleton = reference(folder, run), load_skeleton(folder, run)
    with attach(skeleton) as attachment:
        assert attachment.rule_name == score_rule(family)
    with CheckpointStore(folder, run) as store:
        fill(skeleton, store)
    assert torch.equal(skeleton(ids).logits, stock(ids).logits)
    for wants, found in ((stock.named_parameters(), skeleton), (stock.named_buffers(), skeleton)):
        for name, value in wants:
            mine = found.get_parameter_or_buffer(name)
            assert mine.dtype == value.dtype and torch.equal(mine, value), name


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"], indirect=True)
def test_agreement_behind_dense_layers(family, tiny_moe, random_ids, tmp_path, score_rule):
    """Layer 0 of the store is the first with experts."""
    folder, ids = save(tiny_moe(family, **DENSE_FIRST), tmp_path), random_ids(40, seed=2)
    stock, skeleton = reference(folder, torch.float32), load_skeleton(folder, torch.float32)
    with attach(skeleton) as attachment:
        assert (attachment.rule_name, len(attachment.layers)) == (score_rule(family), 2)
    with CheckpointStore(folder, torch.float32) as store:
        assert store.layers == 2
        fill(skeleton, store)
    assert torch.equal(skeleton(ids).logits, stock(ids).logits)


@pytest.mark.parametrize("disk", [torch.float16, torch.float32])
def test_agreement_casts_are_from_pretrained_s(disk, tiny_moe, tmp_path):
    folder = save(tiny_moe("qwen3_next"), tmp_path, dtype=disk)
    stock, skeleton = reference(folder, torch.bfloat16), load_skeleton(folder, torch.bfloat16)
    for name, value in skeleton.state_dict().items():
        if not value.is_meta:
            wants = stock.get_parameter_or_buffer(name)
            assert value.dtype == wants.dtype and torch.equal(value, wants), name


@pytest.mark.parametrize("stored", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_weights_are_tied_whichever_the_file_has(stored, tiny_moe, random_ids, tmp_path):
    model, ids = tiny_moe("qwen3_moe", tie_word_embeddings=True), random_ids(20, seed=3)
    tensors = tensors_of(model, "original")
    embedding = tensors.pop("model.embed_tokens.weight")
    tensors.pop("lm_head.weight", None)
    folder = write(tmp_path, model.config, tensors | {stored: embedding})
    skeleton = load_skeleton(folder, torch.float32)
    assert skeleton.lm_head.weight is skeleton.model.embed_tokens.weight
    with CheckpointStore(folder, torch.float32) as store:
        fill(skeleton, store)
    assert torch.equal(skeleton(ids).logits, reference(folder, torch.float32)(ids).logits)


# ---- what it is -----------------------------------------------------------------------------------------------------
def test_the_experts_and_nothing_else_are_away(family, tiny_moe, tmp_path):
    skeleton = load_skeleton(save(tiny_moe(family), tmp_path), torch.float32)
    absent = {name for name, value in skeleton.state_dict().items() if value.is_meta}
    assert absent == set(expert_parameters(skeleton))
    assert absent == {name for name, _ in skeleton.named_parameters() if ".experts." in name}
    assert not any(value.is_meta for value in skeleton.buffers())
    assert not skeleton.training and not any(value.requires_grad for value in skeleton.parameters())


def test_a_skeleton_does_not_need_the_experts_to_be_in_the_file(tiny_moe, tmp_path):
    """A packed store may hold them."""
    model = tiny_moe("qwen3_moe")
    tensors = {name: value for name, value in tensors_of(model, "original").items() if ".experts." not in name}
    skeleton = load_skeleton(write(tmp_path, model.config, tensors), torch.float32)
    assert torch.equal(skeleton.lm_head.weight, model.lm_head.weight)


def test_tensors_the_model_does_not_know_are_left_alone(tiny_moe, tmp_path):
    """Heads for training and layers beyond the last: whatever their dtype, nobody reads them."""
    folder = save(tiny_moe("qwen3_moe"), tmp_path)
    edit(folder, lambda tensors: tensors.update({"model.layers.9.mlp.gate.weight": torch.zeros(4, dtype=torch.int64)}))
    load_skeleton(folder, torch.float32)
    CheckpointStore(folder, torch.float32).close()


def test_the_reports_of_transformers_are_as_talkative_as_before(tiny_moe, tmp_path, capfd):
    folder = save(tiny_moe("qwen3_moe"), tmp_path)
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_warning()
    logging.enable_progress_bar()
    try:
        load_skeleton(folder, torch.float32)
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.WARNING, True)
    finally:
        logging.set_verbosity(before[0])
        if not before[1]:
            logging.disable_progress_bar()
    assert capfd.readouterr() == ("", "")


# ---- attach on a skeleton -------------------------------------------------------------------------------------------
def test_experts_that_are_there_take_part_in_the_recognition(tiny_moe, tmp_path):
    """A NaN of the first layer's experts reaches the second layer's router, unless those experts are away."""
    model = tiny_moe("qwen3_moe")
    skeleton = load_skeleton(save(model, tmp_path), torch.float32)
    for module in list(experts_modules(model).values())[:1]:
        module.down_proj.fill_(torch.nan)
    with pytest.raises(UserError, match="'qwen3_moe' is refused"):
        attach(model)
    attach(skeleton).detach()


def test_attach_refuses_on_a_skeleton_what_it_refuses_on_a_model(tiny_moe, tmp_path):
    skeleton = load_skeleton(save(tiny_moe("qwen3_moe"), tmp_path), torch.float32)
    router = type(skeleton.model.layers[1].mlp.gate)

    class Tampered(router):
        def forward(self, hidden_states):
            logits, weights, index = super().forward(hidden_states)
            return logits, weights**2, index

    skeleton.model.layers[1].mlp.gate.__class__ = Tampered
    with pytest.raises(UserError, match="'qwen3_moe' is refused"):
        attach(skeleton)


# ---- bad weights and configurations ---------------------------------------------------------------------------------
NORM, BIAS = "model.layers.1.input_layernorm.weight", "model.layers.0.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"weight {NORM} is missing (1 such)"),
        (lambda t: t.update({NORM: torch.ones(63)}), f"weight {NORM} has shape [63], not [64] (1 such)"),
        (lambda t: t[NORM][3:4].fill_(torch.nan), f"weight {NORM} is not finite (1 such)"),
        (lambda t: t[NORM][63:].fill_(-torch.inf), f"weight {NORM} is not finite (1 such)"),
        (lambda t: t[BIAS][:1].fill_(torch.inf), f"weight {BIAS} is not finite (1 such)"),
        (lambda t: t.update({NORM: torch.ones(64, dtype=torch.float64)}), f"tensor {NORM} is stored as F64"),
        (lambda t: t.update({NORM: torch.ones(64).to(torch.float8_e4m3fn)}), f"tensor {NORM} is stored as F8_E4M3"),
    ],
    ids=["missing", "shape", "nan", "infinite", "buffer", "float64", "float8"],
)
def test_a_wrong_weight_is_named(change, message, tiny_moe, tmp_path):
    folder = save(tiny_moe("deepseek_v3"), tmp_path)
    edit(folder, change)
    with pytest.raises(UserError) as raised:
        load_skeleton(folder, torch.float32)
    assert message in str(raised.value) and str(folder) in str(raised.value)
    assert str(raised.value).count("; ") == 2 and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(quantization_config={"quant_method": "fp8"}), "is quantised (fp8)"),
        (lambda c: c.update(model_type="unheard_of"), "unheard_of"),
        (lambda c: c.update(hidden_size="wide"), "hidden_size"),
        (lambda c: c.pop("model_type"), "model_type"),
    ],
    ids=["quantised", "unknown", "type", "no-type"],
)
def test_a_wrong_configuration_is_named(change, message, tiny_moe, tmp_path):
    folder = save(tiny_moe("qwen3_moe"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    for read in (load_skeleton, CheckpointStore):
        with pytest.raises(UserError) as raised:
            read(folder, torch.float32)
        assert message in str(raised.value) and str(folder) in str(raised.value)


@pytest.mark.parametrize("text", [None, "{", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"])
def test_a_configuration_that_is_no_json_is_refused(text, tiny_moe, tmp_path):
    folder = save(tiny_moe("qwen3_moe"), tmp_path)
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json|model_type"):
        load_skeleton(folder, torch.float32)


def test_experts_that_a_family_keeps_in_float32_are_refused_in_half_precision(tiny_moe, tmp_path, monkeypatch):
    model = tiny_moe("qwen3_moe")
    folder = save(model, tmp_path)
    monkeypatch.setattr(type(model), "_keep_in_fp32_modules_strict", ["down_proj"])
    load_skeleton(folder, torch.float32)
    with pytest.raises(UserError, match=r"the family keeps model\.layers\.0\.mlp\.experts\.down_proj in float32"):
        load_skeleton(folder, torch.bfloat16)


# ---- memory ---------------------------------------------------------------------------------------------------------
ALLOWANCE_BYTES = 60_000_000
MEMORY_CHILD = """
import json, sys, torch
from pathlib import Path
from transformers import Qwen3MoeForCausalLM
from engine.checkpoint import CheckpointStore
from engine.hook import attach
from engine.record import page_aligned
from engine.skeleton import load_skeleton

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

folder = Path(sys.argv[1])
torch.set_num_threads(1)
Path("/proc/self/clear_refs").write_text("5")  # the peak so far, of the imports, is forgotten
before = peak()
with CheckpointStore(folder, torch.bfloat16) as store:
    model = load_skeleton(folder, torch.bfloat16)
    attach(model)
    target, bytes_read = memoryview(page_aligned(1, store.layout.record_bytes)[0].numpy()), 0
    for layer in range(store.layers):
        for expert in range(store.experts):
            bytes_read += store.read(layer, expert, target)
    weights = store.layers * store.experts * store.layout.weight_bytes
others = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
print(json.dumps({"grown": peak() - before, "others": others, "read": bytes_read, "experts": weights}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from /proc")
def test_law_memory_is_the_other_weights_and_no_expert(tiny_moe, tmp_path):
    """Half a gigabyte of experts, read whole: the process grows by the other weights and an allowance, not by them."""
    model = tiny_moe("qwen3_moe")
    model.config.update({"hidden_size": 512, "moe_intermediate_size": 1024, "num_experts": 64, "vocab_size": 16_000})
    model.config.update({"num_hidden_layers": 3, "head_dim": 64})
    folder = sparse_checkpoint(tmp_path, model.config)
    found = subprocess.run(
        [sys.executable, "-c", MEMORY_CHILD, str(folder)], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert not found.returncode, found.stderr
    facts = json.loads(found.stdout)
    assert facts["read"] >= facts["experts"] > 5 * (facts["others"] + ALLOWANCE_BYTES)
    assert facts["grown"] < facts["others"] + ALLOWANCE_BYTES


def sparse_checkpoint(folder, config):
    """A checkpoint of zeros in bfloat16, fused, that takes no room on disk: a header, and a hole."""
    config.save_pretrained(folder)
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    entries, at = {}, 0
    for name, value in model.state_dict().items():
        entries[name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    header = json.dumps(entries).encode()
    with open(folder / "model.safetensors", "wb") as handle:
        handle.write(len(header).to_bytes(8, "little") + header)
        handle.truncate(8 + len(header) + at)
    return folder
