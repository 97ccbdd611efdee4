"""Agreement on a GPU: device slots, pinned memory and a copy stream give what the CPU gives. Skipped without one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.checkpoint import CheckpointStore
from engine.emulator import Emulator
from engine.harness import decode
from engine.hook import attach
from engine.offload_model import OpenModel
from engine.pack import pack
from engine.policies import load_policies
from engine.quantised_store import QuantisedStore

POLICIES = load_policies(Path(__file__).parents[2] / "config" / "policies.tsv")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: the GPU path is untested"),
]
IDS = torch.randint(0, 128, (40,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def packed(tiny_moe, tmp_path_factory):
    root = tmp_path_factory.mktemp("cuda")
    tiny_moe("qwen3_moe").save_pretrained(root / "checkpoint")
    with CheckpointStore(root / "checkpoint", torch.float32) as store:
        pack(store, root / "packed", source=root / "checkpoint", leave_out=store.tensor_names, facts={})
    return root / "packed"


@pytest.mark.parametrize("ram", [False, True], ids=["disk", "pinned"])
@pytest.mark.parametrize("policy", ["fetch_lfu_decay", "quality_first", "speed_first"])
def test_the_gpu_decides_and_computes_as_the_emulator(packed, tiny_moe, policy, ram):
    with torch.inference_mode(), OpenModel(packed, torch.float32, ram=ram, device="cuda") as opened:
        engine = opened.engine(slots=6)
        engine.use(POLICIES[policy], completion="next_step")
        timed = decode(opened.model, engine, [IDS])
        found = engine.log()
    whole = tiny_moe("qwen3_moe").to("cuda")
    with torch.inference_mode(), attach(whole) as attachment:
        emulator = Emulator(attachment, POLICIES[policy], slots=6)
        with emulator.phase("decode"):
            logits = whole(input_ids=torch.tensor([IDS[:-1]], device="cuda"), use_cache=False).logits[0]
    losses = -logits.log_softmax(-1)[torch.arange(len(IDS) - 1), IDS[1:]].cpu().numpy()
    np.testing.assert_array_equal(found.executed, emulator.log().executed)
    np.testing.assert_allclose(timed.losses, losses, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_gpu_computes_with_experts_of_few_bits(tiny_moe, tmp_path, bits):
    tiny_moe("qwen3_moe", moe_intermediate_size=64).save_pretrained(tmp_path / "checkpoint")
    with CheckpointStore(tmp_path / "checkpoint", torch.float32) as store:
        few, leave_out = QuantisedStore(store, bits, 64), store.tensor_names
        pack(few, tmp_path / "packed", source=tmp_path / "checkpoint", leave_out=leave_out, facts={})
    losses = {}
    for device in ("cuda", "cpu"):
        with torch.inference_mode(), OpenModel(tmp_path / "packed", torch.float32, device=device) as opened:
            engine = opened.engine(slots=16)
            engine.use(POLICIES["fetch_lfu_decay"])
            losses[device] = decode(opened.model, engine, [IDS]).losses
    np.testing.assert_allclose(losses["cuda"], losses["cpu"], rtol=1e-3, atol=1e-3)


def test_a_prefill_larger_than_the_slots_is_exact(packed, tiny_moe):
    ids = torch.tensor([IDS], device="cuda")
    with torch.inference_mode(), OpenModel(packed, torch.float32, device="cuda") as opened:
        engine = opened.engine(slots=4)
        engine.use(POLICIES["rule_015"])
        with engine.phase("prefill"):
            found = opened.model(input_ids=ids).logits
        wanted = tiny_moe("qwen3_moe").to("cuda")(input_ids=ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
