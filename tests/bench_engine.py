"""The engine's own benches, on the embedded reference model at its own size and inflated to 6.3 MB an expert.

6. resident: time a token with all experts in slots, over the fastest of transformers' own implementations on the very
   same weights. Why it matters: what the engine costs where nothing has to move; 1.10 is the most that is allowed.
7. memory: peak resident memory of `generate` in a process of its own, above what imports take, beside non-expert
   weights + slots + 300 MB. Why it matters: a model ten times larger than that must run.
8. predictor: what naming 16 experts of the next two layers takes before a layer's experts are computed, over the rest
   of that layer. Why it matters: prefetching gains nothing that predicting loses; 0.03 is the most that is allowed.

Called by tests/bench.py, which gives the folder; the inflated model takes 13 GB of disk there and 6.5 GB of RAM.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import torch

from engine.checkpoint import CheckpointStore
from engine.harness import decode
from engine.hook import experts_modules
from engine.inflate import inflate
from engine.offload_model import OpenModel
from engine.pack import pack
from engine.policies import load_policies
from engine.predictors import of_arrays, pairs
from engine.residency import Demand
from engine.skeleton import load_skeleton
from engine.store import read_manifest

ROOT = Path(__file__).parent.parent
STOCK = ("eager", "batched_mm", "grouped_mm")
WIDTH = 1024  # of the inflated model, and of its experts
DISK_BYTES, RAM_BYTES = 15 << 30, 9 << 30  # the inflated model and its store; all its experts and the rest
TOKENS = 48
ALLOWANCE_BYTES = 300_000_000


def make_stores(folder: Path) -> dict[str, Path | str]:
    """Packed stores by size, or why there is none."""
    from evals.reference_model.pack import unpack

    made: dict[str, Path | str] = {}
    for size, dtype in (("own", "float32"), (f"{WIDTH}x{WIDTH}", "bfloat16")):
        source = folder / f"checkpoint_{size}"
        if size == "own":
            unpack(ROOT / "models/reference", str(source), dtype=dtype)
        elif shutil.disk_usage(folder).free < DISK_BYTES or psutil.virtual_memory().available < RAM_BYTES:
            made[size] = f"needs {DISK_BYTES >> 30} GiB of disk and {RAM_BYTES >> 30} GiB of RAM"
            continue
        else:
            inflate(folder / "checkpoint_own", source, width=WIDTH, expert_width=WIDTH, dtype=dtype)
        with CheckpointStore(source, getattr(torch, dtype)) as store:
            pack(store, folder / size, source=source, leave_out=store.tensor_names, facts={})
        if size != "own":
            shutil.rmtree(source)
        made[size] = folder / size
    return made


@torch.inference_mode()
def bench_resident(size: str, store: Path, threads: int, repeats: int) -> dict:
    """Rounds of the engine with S = E and of every stock implementation over the same slots, medians compared."""
    torch.set_num_threads(threads)
    dtype = read_manifest(store).layout.dtype
    ids = [0, *np.random.default_rng(0).integers(1, 4000, TOKENS).tolist()]
    with OpenModel(store, dtype) as opened:
        experts, layers = opened.attachment.experts, len(opened.attachment.layers)
        engine = opened.engine(slots=experts, demand=Demand(np.ones((layers, experts), np.int64), 1))
        engine.use(load_policies(ROOT / "config/policies.tsv")["fetch_lfu_decay"])
        stock = load_skeleton(store, dtype)
        engine.slots.give_to(list(experts_modules(stock).values()))
        found: dict[str, list[float]] = {name: [] for name in (*STOCK, "engine")}
        for _ in range(repeats):
            for name in STOCK:
                stock.set_experts_implementation(name)
                found[name].append(_stock_token_s(stock, ids))
            found["engine"].append(float(np.median(decode(opened.model, engine, [ids]).token_s[1:])))
    medians = {name: float(np.median(values)) for name, values in found.items()}
    fastest = min(STOCK, key=medians.get)
    ratio = medians["engine"] / medians[fastest]
    times = ", ".join(f"{name} {1e3 * value:.2f}" for name, value in medians.items())
    print(f"resident {size}: ms a token {times}; engine over {fastest} {ratio:.2f} (1.10 allowed)")
    return {"ms": {name: 1e3 * value for name, value in medians.items()}, "fastest": fastest, "ratio": ratio}


def _stock_token_s(model, ids: list[int]) -> float:
    """Median seconds of a token decoded by the stock model, the first apart."""
    cache, found = None, []
    for token in ids[:-1]:
        wanted = torch.tensor([[token]])
        began = time.perf_counter()
        output = model(input_ids=wanted, cache=cache, use_cache=True)
        found.append(time.perf_counter() - began)
        cache = output.past_key_values
    return float(np.median(found[1:]))


@torch.inference_mode()
def bench_predictor(size: str, store: Path, threads: int, repeats: int) -> dict:
    """In the engine with S = E, at every event of a decoded text: an adapter of rank 64 with made-up numbers."""
    torch.set_num_threads(threads)
    dtype = read_manifest(store).layout.dtype
    ids = [0, *np.random.default_rng(0).integers(1, 4000, TOKENS).tolist()]
    with OpenModel(store, dtype) as opened:
        experts, layers = opened.attachment.experts, len(opened.attachment.layers)
        engine = opened.engine(slots=experts, demand=Demand(np.ones((layers, experts), np.int64), 1))
        engine.use(load_policies(ROOT / "config/policies.tsv")["fetch_lfu_decay"])
        width, number = opened.model.config.hidden_size, len(pairs(layers))
        arrays = {"A": torch.randn(number, 64, width) / width, "B": torch.randn(number, experts, 64)}
        predictor = of_arrays("spec_prefetch", opened.attachment, arrays)
        inner, spent = opened.attachment.handler, []

        def handler(call):
            began = time.perf_counter()
            predictor.names(call.layer, call.router_input, 16)
            spent.append(time.perf_counter() - began)
            return inner(call)

        opened.attachment.handler = handler
        token_s = np.concatenate([decode(opened.model, engine, [ids]).token_s[1:] for _ in range(repeats)])
    by_layer = np.median(np.array(spent).reshape(-1, layers), axis=0)  # the last has nothing to predict
    layer_s = (float(np.median(token_s)) - by_layer.sum()) / layers
    ratio, most = float(by_layer.mean()) / layer_s, float(by_layer.max()) / layer_s
    times = ", ".join(f"{1e6 * value:.0f}" for value in by_layer)
    print(
        f"predictor {size}: microseconds by layer {times}; over a layer of {1e3 * layer_s:.2f} ms {ratio:.3f} "
        f"(0.03 allowed), at most {most:.3f}"
    )
    return {"us_by_layer": (1e6 * by_layer).tolist(), "layer_ms": 1e3 * layer_s, "ratio": ratio, "most": most}


_IMPORTS = """
import engine.offload, engine.offload_model
from transformers import AutoTokenizer, Qwen3MoeForCausalLM
print(engine.offload.peak_memory_bytes())
"""


def bench_memory(size: str, store: Path) -> dict:
    """K slots a layer: the smallest engine there is."""
    manifest = read_manifest(store)
    top_k = json.loads((store / "config.json").read_text(encoding="utf-8"))["num_experts_per_tok"]
    imports = int(subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True).stdout)
    flags = ["--policy", "rule_015", "--policies", str(ROOT / "config/policies.tsv"), "--slots", str(top_k)]
    command = [
        sys.executable,
        "-m",
        "engine.offload",
        "generate",
        "--model",
        str(store),
        "--prompt",
        "def main",
        *flags,
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    peak = json.loads(found.stdout.splitlines()[-1])["peak_memory_bytes"]
    record_bytes = manifest.layout.record_bytes
    whole = manifest.layers * manifest.experts * record_bytes
    slots = manifest.layers * top_k * record_bytes
    bound = (store / "model.safetensors").stat().st_size + slots + ALLOWANCE_BYTES
    print(
        f"memory {size}: {(peak - imports) / 1e6:,.0f} MB above imports, bound {bound / 1e6:,.0f} MB "
        f"(of it slots {slots / 1e6:,.0f}); experts {whole / 1e6:,.0f} MB, {whole / bound:.1f} times the bound"
    )
    return {"above_imports_bytes": peak - imports, "bound_bytes": bound, "experts_bytes": whole}
