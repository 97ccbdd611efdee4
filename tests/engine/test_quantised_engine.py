"""The engine over experts of 4 and 8 bits. Agreement: it is the stock model whose experts are the dequantised ones, in
every family, in prefill and decoding; under every policy it decides and computes as the emulator does on the filled
model. End to end: packed, reported, generated from, refused by name where a size or a calibration does not fit.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from engine import experts
from engine.checkpoint import CheckpointStore
from engine.demand import save_demand
from engine.emulator import Emulator
from engine.errors import UserError
from engine.harness import decode
from engine.hook import attach
from engine.log import count
from engine.offload_model import OpenModel
from engine.pack import pack
from engine.policies import load_policies
from engine.predictors import make_predictor
from engine.quantisation import BITS
from engine.quantised import Quantised, quantise
from engine.quantised_store import DequantisedStore, QuantisedStore
from engine.recheck import Recheck
from engine.record import page_aligned
from engine.residency import Demand
from engine.safetensors_files import weights_hash
from engine.store import PackedStore, read_manifest, verify
from evals.jobs import load_model, model_hash
from tests.engine.engine_cases import CONFIG, POLICIES, Both, ModelStore, text
from tests.engine.store_cases import Made, read_weights
from tests.engine.test_offload_command import run
from tests.engine.test_prefetch_engine import WINDOWS

NAMES = [name for name, policy in POLICIES.items() if not policy.clairvoyant and not policy.prefetch]
WIDE = {"moe_intermediate_size": 64, "intermediate_size": 64}  # of experts, whatever the family calls it
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def stores(tiny_moe, tmp_path_factory):
    """A tiny checkpoint and its stores: `8` and `4` bits, and `plain`."""
    root = tmp_path_factory.mktemp("quantised")
    tiny_moe("qwen3_moe", **WIDE).save_pretrained(root / "checkpoint")
    for bits in (None, *BITS):
        flags = ("--bits", bits) if bits else ()
        run("pack", "--model", root / "checkpoint", "--out", root / str(bits or "plain"), *flags)
    return root


def dequantise_experts(model, bits: int) -> None:
    """The stock model, with every expert's matrices quantised and back."""
    with attach(model) as attachment:
        for module in attachment.layers:
            for parameter in module.parameters(recurse=False):
                if parameter.ndim == 3:
                    few = quantise(parameter, bits, 64, transposed=module.is_transposed)
                    parameter.copy_(few.dequantise(parameter.dtype))


@pytest.mark.parametrize("prompt", [12, 120], ids=["few tokens an expert", "many tokens an expert"])
@pytest.mark.parametrize("bits", BITS)
def test_all_experts_resident_is_the_stock_model_of_dequantised_experts(tiny_moe, family, bits, prompt):
    """S = E, warm: logits in prefill and decoding, K x events hits."""
    both = Both(tiny_moe, family, store=lambda modules: QuantisedStore(ModelStore(modules), bits, 64), **WIDE)
    before = [parameter.clone() for parameter in both.whole.parameters()]
    dequantise_experts(both.whole, bits)
    assert any(not torch.equal(one, other) for one, other in zip(before, both.whole.parameters(), strict=True))
    demand = Demand(np.ones((both.store.layers, both.experts), np.int64), 1)
    engine = both.engine("quality_first", both.experts, demand=demand)
    ids = text(prompt)
    with engine.phase("prefill"):
        found = both.model(input_ids=torch.tensor([ids]), use_cache=True)
    wanted = both.whole(input_ids=torch.tensor([ids]), use_cache=True)
    torch.testing.assert_close(found.logits, wanted.logits, **CLOSE)
    cache, stock_cache = found.past_key_values, wanted.past_key_values
    for token in text(3, seed=3):
        with engine.phase("decode"):
            found = both.model(input_ids=torch.tensor([[token]]), cache=cache, use_cache=True)
        wanted = both.whole(input_ids=torch.tensor([[token]]), cache=stock_cache, use_cache=True)
        torch.testing.assert_close(found.logits, wanted.logits, **CLOSE)
    assert count(engine.log())["hits"] == 3 * both.top_k * both.store.layers
    both.link.close()


@pytest.mark.parametrize("bits", BITS)
def test_dequantised_on_the_way_a_token_gets_the_same(tiny_moe, family, bits, monkeypatch):
    """What a GPU does, here on the CPU: an expert after the other, without a kernel of ours."""
    with attach(tiny_moe(family, **WIDE)) as attachment:
        module = attachment.layers[0]
        store = QuantisedStore(ModelStore(attachment.layers), bits, 64)
    buffer = page_aligned(store.experts, store.layout.record_bytes)
    for expert in range(store.experts):
        store.read(0, expert, memoryview(buffer[expert].numpy()))
    views, rows, weights = store.layout.views(buffer), np.array([3, 0, 9]), np.array([0.5, 0.3, 0.2], np.float32)
    hidden = torch.randn(1, 64, generator=torch.Generator().manual_seed(7))
    found = experts.decode_token(module, views, hidden, rows, weights, None)
    monkeypatch.setattr(experts, "quantised_products", lambda *_: pytest.fail("a kernel"))
    monkeypatch.setattr(experts, "_FEW", 0)
    torch.testing.assert_close(experts._one_by_one(module, views, hidden, rows, weights), found, **CLOSE)


def filled(folder):
    """The stock model of a store, all experts in memory."""
    with OpenModel(folder, torch.float32, device="cpu") as opened:
        opened.fill()
        return opened.model


@pytest.mark.parametrize("completion", ["next_step", "real"])
@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("bits", BITS)
def test_the_engine_decides_and_computes_as_the_emulator_of_the_filled_model(stores, bits, policy, completion):
    folder, ids = stores / str(bits), text()
    with OpenModel(folder, torch.float32) as opened:
        engine = opened.engine(slots=6)
        engine.use(POLICIES[policy], completion=completion)
        timed = decode(opened.model, engine, [ids])
        log = engine.log()
    tokens = torch.tensor([ids[:-1]])
    model = filled(folder)
    with attach(model) as attachment:
        recheck = Recheck(attachment, log, POLICIES[policy], slots=6, demand=None)
        with recheck.phase("decode"):
            logits = model(input_ids=tokens, use_cache=False).logits[0]
        assert recheck.finished and recheck.differences() == 0
        losses = -logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]].numpy()
        np.testing.assert_allclose(timed.losses, losses, **CLOSE)
    if completion == "next_step":
        with attach(model) as attachment:
            emulator = Emulator(attachment, POLICIES[policy], slots=6)
            with emulator.phase("decode"):
                model(input_ids=tokens, use_cache=False)
        np.testing.assert_array_equal(log.executed, emulator.log().executed)


@pytest.mark.parametrize("slots", [4, 7])
@pytest.mark.parametrize("bits", BITS)
def test_prefill_through_few_slots_is_exact(stores, bits, slots):
    folder, ids = stores / str(bits), torch.tensor([text(30)])
    with OpenModel(folder, torch.float32) as opened:
        engine = opened.engine(slots=slots)
        engine.use(POLICIES["speed_first"])
        for _ in range(2):  # the second time some are here
            with engine.phase("prefill"):
                found = opened.model(input_ids=ids).logits
            torch.testing.assert_close(found, filled(folder)(input_ids=ids).logits, **CLOSE)


@pytest.mark.parametrize("bits", BITS)
def test_prefetched_in_pieces_it_says_the_same(stores, bits):
    """Pieces are whole pages of a record, whatever they mean."""
    ids, outputs = text(25), {}
    policy = load_policies(CONFIG / "prefetch.tsv")["gate_replay"]
    for name in ("fetch_lfu_decay", "gate_replay"):
        with OpenModel(stores / str(bits), torch.float32) as opened:
            engine = opened.engine(slots=6)
            if name == "gate_replay":
                ahead = {"predictor": make_predictor(name, opened.attachment), "window": WINDOWS["pieces"]}
                engine.use(policy, completion="next_step", **ahead)
            else:
                engine.use(POLICIES[name])
            outputs[name] = decode(opened.model, engine, [ids]).losses
            brought = engine.link.journal()["prefetch"].sum()
    assert brought > 0
    np.testing.assert_array_equal(outputs["gate_replay"], outputs["fetch_lfu_decay"])


# ---- stores ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bits", BITS)
def test_a_packed_store_gives_the_codes_of_what_it_was_made_from(stores, bits):
    store = PackedStore(stores / str(bits))
    assert (store.layout.bits, store.layout.group) == (bits, 64)
    verify(stores / str(bits))
    back = DequantisedStore(store)
    with CheckpointStore(stores / "checkpoint", torch.float32) as source:
        for place in [(0, 0), (1, 15)]:
            for name, weight in read_weights(source, *place).items():
                wanted = quantise(weight, bits, 64)
                view = page_aligned(1, store.layout.record_bytes)
                store.read(*place, memoryview(view[0].numpy()))
                found = store.layout.views(view)[name]
                assert isinstance(found, Quantised)
                assert torch.equal(found.codes[0], wanted.codes) and torch.equal(found.scales[0], wanted.scales)
                assert torch.equal(read_weights(back, *place)[name], wanted.dequantise(torch.float32))
    store.close()


def test_slots_weigh_a_quarter_and_a_half(stores):
    """Of float32 here: records are small, and end at whole pages."""
    sizes = {name: read_manifest(stores / name).layout.weight_bytes for name in ("plain", "8", "4")}
    assert sizes["plain"] / sizes["8"] == 32 / 8.5 and sizes["plain"] / sizes["4"] == 32 / 4.25


@pytest.mark.parametrize("bits", BITS)
def test_the_report_is_what_was_lost(stores, bits):
    report = read_manifest(stores / str(bits)).facts["quantisation"]
    assert (report["bits"], report["group"]) == (bits, 64)
    places = [(layer, expert) for layer in range(2) for expert in range(16)]
    with CheckpointStore(stores / "checkpoint", torch.float32) as source:
        here = [read_weights(source, *place) for place in places]
    few = DequantisedStore(PackedStore(stores / str(bits)))
    back = [read_weights(few, *place) for place in places]
    few.close()
    names = list(report["relative_error_by_parameter"])
    assert names == list(here[0])

    def relative(chosen: range, names: list[str]) -> float:
        weights = torch.cat([here[n][name].flatten() for n in chosen for name in names])
        found = torch.cat([back[n][name].flatten() for n in chosen for name in names])
        return float((found - weights).norm() / weights.norm())

    every = range(len(places))
    for name, found in report["relative_error_by_parameter"].items():
        assert found == pytest.approx(relative(every, [name]), rel=1e-4)
    assert report["relative_error"] == pytest.approx(relative(every, names), rel=1e-4)
    worst = max(every, key=lambda n: relative(range(n, n + 1), names))
    assert (report["worst_expert"]["layer"], report["worst_expert"]["expert"]) == places[worst]
    assert 0 < report["relative_error"] < {4: 0.12, 8: 0.01}[bits] < report["relative_error"] * 3


def test_the_command_ends_with_what_was_lost(stores, tmp_path):
    found = run("pack", "--model", stores / "checkpoint", "--out", tmp_path / "packed", "--bits", 4)
    (line,) = found.stdout.splitlines()
    assert "4.25 bits a weight with scales (4 in groups of 64)" in line
    assert all(name in line for name in ("gate_up_proj ", "down_proj ", "worst", "layer ", "expert "))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--bits", 4, "--group", 128), "gate_up_proj: 64 inputs in groups of 128; expected .*; choose --group 64"),
        (("--model", "4"), "is a packed store; expected a checkpoint folder; pack what it was packed from"),
        (("--group", 64), "--group 64 without --bits; expected --bits 4 or 8"),
    ],
)
def test_sizes_that_a_group_does_not_divide_are_one_line_and_leave_nothing(stores, tmp_path, flags, message):
    flags = [stores / flag if flag in ("4",) else flag for flag in flags]
    found = run("pack", "--model", stores / "checkpoint", "--out", tmp_path / "packed", *flags, expect=2)
    (line,) = found.stderr.strip().splitlines()
    assert line.startswith("error: ")
    with pytest.raises(UserError, match=message):
        raise UserError(line)
    assert list(tmp_path.iterdir()) == []


def test_biases_stay_as_they_are_and_weights_that_are_not_finite_are_refused():
    shapes = {"gate_up_proj": (12, 128), "gate_up_proj_bias": (12,), "down_proj": (64, 64)}
    few = QuantisedStore(Made(shapes=shapes), 4, 64)
    found = read_weights_of(few, 1, 2)
    assert torch.equal(found["gate_up_proj_bias"][0], Made(shapes=shapes).weights(1, 2)["gate_up_proj_bias"])
    spoiled = Made(shapes=shapes, change={(1, 2): lambda weights: weights["down_proj"].view(-1)[5].fill_(torch.nan)})
    with pytest.raises(UserError, match="layer 1, expert 2: down_proj is not finite"):
        read_weights_of(QuantisedStore(spoiled, 4, 64), 1, 2)


def read_weights_of(store, layer, expert):
    buffer = page_aligned(1, store.layout.record_bytes)
    store.read(layer, expert, memoryview(buffer[0].numpy()))
    return store.layout.views(buffer)


def test_experts_are_not_quantised_twice():
    few = QuantisedStore(Made(shapes={"down_proj": (64, 64)}), 4, 64)
    with pytest.raises(UserError, match="experts of 4 bits; expected experts that are not quantised"):
        QuantisedStore(few, 8, 64)


# ---- whose function it computes --------------------------------------------------------------------------------------
def test_a_store_of_few_bits_is_a_model_of_its_own(stores, tmp_path):
    """Calibration of the source is not taken for it."""
    source = weights_hash(stores / "checkpoint")
    hashes = {name: weights_hash(stores / name) for name in ("plain", "8", "4")}
    assert hashes["plain"] == source and len(set(hashes.values())) == 3
    for bits in BITS:
        assert hashes[str(bits)].startswith(f"{source}~{bits}bit64~")
    save_demand(tmp_path / "demand.safetensors", Demand(np.ones((2, 16), np.int64), 1), {"model": source})
    flags = ("--policy", "rule_015", "--slots", "50%", "--prompt", "a", "--demand", tmp_path / "demand.safetensors")
    found = run("generate", "--model", stores / "4", *flags, expect=2)
    assert f"is of model {source}; expected {hashes['4']}" in found.stderr


def test_a_store_of_few_bits_of_an_inflated_model_is_not_the_small_one(stores, tmp_path):
    """Its provenance is copied along, and says whose function the inflated weights compute."""
    shutil.copytree(stores / "checkpoint", tmp_path / "inflated")
    (tmp_path / "inflated" / "inflation.json").write_text(json.dumps({"source_sha256": {"a": "f" * 64}}))
    for name, flags in (("plain", ()), ("4", ("--bits", 4))):
        run("pack", "--model", tmp_path / "inflated", "--out", tmp_path / name, *flags)
    assert weights_hash(tmp_path / "plain") == weights_hash(tmp_path / "inflated") == "f" * 16
    assert weights_hash(tmp_path / "4").startswith("f" * 16 + "~4bit64~")


def test_the_same_checkpoint_gives_the_same_store(stores, tmp_path):
    with CheckpointStore(stores / "checkpoint", torch.float32) as store:
        few = QuantisedStore(store, 4, 64)
        leave_out = store.tensor_names
        again = pack(few, tmp_path / "again", source=stores / "checkpoint", leave_out=leave_out, facts={})
    assert again.identity == read_manifest(stores / "4").identity


@pytest.mark.parametrize("name", ["plain", "8", "4"])
def test_the_pipeline_scores_a_store_as_the_model_it_is(stores, name):
    """What scripts load is the stock model, free of hooks, with the store's own experts; its hash says which."""
    model, ids = load_model(stores / name, "float32", threads=1), torch.tensor([text(20)])
    torch.testing.assert_close(model(input_ids=ids).logits, filled(stores / name)(input_ids=ids).logits, **CLOSE)
    checkpoint = load_model(stores / "checkpoint", "float32", threads=1)
    if name != "plain":
        dequantise_experts(checkpoint, int(name))
    torch.testing.assert_close(model(input_ids=ids).logits, checkpoint(input_ids=ids).logits, **CLOSE)
    with attach(model) as attachment:
        assert attachment.rule_name == "softmax"
    assert model_hash(stores / name) == weights_hash(stores / name)


def test_the_store_of_another_dtype_is_refused(stores):
    with pytest.raises(UserError, match=r"packed as torch\.float32; expected torch\.bfloat16"):
        load_model(stores / "4", "bfloat16", threads=1)
