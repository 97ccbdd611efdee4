"""How fast are the decision and the emulator? Ratios of one run; these machines are noisy, so no test asserts a time.

1. decision: events a second on one thread at E=512, K=10, S=128, `lfu_decay`, threshold, background on, over a seeded
   trace with 65 to 75 % hits and at least two substitutions an event. Reordering and logging included. Why it matters:
   at a million events a second the 48 layers of a large model cost 50 microseconds a token.
2. emulator: time of each lossy bundle over the fastest stock forward (same type, threads and chunk) on the same tokens.
   Why it matters: the whole pipeline is made of such passes. Repeats are interleaved, medians compared.

    make bench        or        python tests/bench.py [--model-dir FOLDER] [--only decision]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from engine.errors import error, main_guard
from engine.policies import load_policies
from engine.residency import Demand, Residency, slots_from_percent

ROOT = Path(__file__).parent.parent
EVENTS, EXPERTS, TOP_K, SLOTS = 20_000, 512, 10, 128
SEED = 7


def drifting_logits(events: int, experts: int, spread: float, memory: float, seed: int) -> np.ndarray:
    """[T, E] float32: a fixed popularity plus an autoregressive part, so that experts stay wanted for a while."""
    random = np.random.default_rng(seed)
    popularity = random.normal(0, spread, experts)
    drift = random.normal(0, 1, experts)
    logits = np.empty((events, experts), np.float32)
    for t in range(events):
        drift = memory * drift + np.sqrt(1 - memory**2) * random.normal(0, 1, experts)
        logits[t] = popularity + drift
    return logits


def bench_decision() -> dict:
    """Median of five scans of the same trace, each from a cold start."""
    rule = load_policies(ROOT / "config/policies.tsv")["quality_first"].rule()
    logits = drifting_logits(EVENTS, EXPERTS, spread=0.5, memory=0.9, seed=SEED)
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :TOP_K]
    chosen = np.random.default_rng(SEED).permuted(chosen, axis=1)  # routers may return their choice unsorted
    weights = np.exp(np.take_along_axis(logits, chosen, axis=1))
    weights /= weights.sum(axis=1, keepdims=True)
    seconds = []
    for repeat in range(6):  # the first compiles
        residency = Residency(layers=1, experts=EXPERTS, top_k=TOP_K, slots=SLOTS, rule=rule)
        started = time.perf_counter()
        log, moves = residency.decide(0, 0, chosen, weights, logits)
        if repeat:
            seconds.append(time.perf_counter() - started)
    rate = EVENTS / statistics.median(seconds)
    hits, substitutions = float((log.kind == 0).mean()), float((log.kind == 2).sum() / EVENTS)
    if not (0.65 <= hits <= 0.75 and substitutions >= 2):
        raise error(
            f"a trace with {hits:.3f} hits, {substitutions:.2f} substitutions", "0.65 to 0.75, from 2", "mend it"
        )
    print(
        f"decision   E={EXPERTS} K={TOP_K} S={SLOTS}: {rate / 1e6:.2f} million events a second on one thread "
        f"(ratio to the 1.0 wanted: {rate / 1e6:.2f}); hits {hits:.3f}, {substitutions:.2f} substitutions and "
        f"{len(moves) / EVENTS:.2f} moves an event"
    )
    return {"events_per_s": rate, "ratio_to_wanted": rate / 1e6, "hits": hits, "substitutions_per_event": substitutions}


def bench_emulator(model_dir: str, tokens: int, chunk: int, repeats: int, threads: int) -> dict:
    import torch

    from engine.emulator import Emulator
    from engine.hook import attach
    from evals.jobs import load_model

    model = load_model(model_dir, "float32", threads)
    text = (ROOT / "engine/decision.py").read_text() * 4
    ids = _tokens(model_dir, text, tokens).view(-1, chunk)

    @torch.inference_mode()
    def forward() -> float:
        started = time.perf_counter()
        for row in ids:
            model(input_ids=row[None], use_cache=False)
        return time.perf_counter() - started

    stock: dict[str, float] = {}
    for name in ("eager", "grouped_mm", "batched_mm"):
        model.set_experts_implementation(name)
        forward()
        stock[name] = min(forward() for _ in range(2))
    fastest = min(stock, key=stock.get)
    model.set_experts_implementation(fastest)

    bundles = [p for p in load_policies(ROOT / "config/policies.tsv").values() if not p.lossless]
    times: dict[str, list[float]] = {"stock": [], **{p.id: [] for p in bundles}}
    substitutions = {}
    for _ in range(repeats + 1):  # the first warms up
        times["stock"].append(forward())
        for policy in bundles:
            with attach(model) as attachment:
                uniform = Demand(np.ones((len(attachment.layers), attachment.experts)), attachment.experts)
                slots = slots_from_percent(attachment.experts, 25)
                emulator = Emulator(attachment, policy, slots=slots, demand=uniform)
                with emulator.phase("decode"):
                    times[policy.id].append(forward())
                substitutions[policy.id] = int((emulator.log().kind == 2).sum())
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    rates = ", ".join(f"{name} {ids.numel() / seconds:,.0f}" for name, seconds in stock.items())
    ratios = {p.id: medians[p.id] / medians["stock"] for p in bundles}
    print(
        f"emulator   tokens a second of stock: {rates}; fastest "
        f"{fastest}; float32, {threads} threads, chunk {chunk}, {ids.numel():,} tokens, median of {repeats}"
    )
    for name, ratio in ratios.items():
        print(f"           {name:<16} {ratio:.3f} of stock (at most 1.3 wanted), {substitutions[name]:,} substitutions")
        if not substitutions[name]:
            raise error(f"{name} substituted nothing", "a lossy bundle that acts", "use a text that misses")
    return {"stock": fastest, "stock_tokens_per_s": ids.numel() / medians["stock"], "ratios": ratios}


def _tokens(model_dir: str, text: str, count: int):
    import torch

    from evals.jobs import load_tokenizer

    ids = load_tokenizer(model_dir)[0](text, add_special_tokens=False)["input_ids"]
    return torch.tensor((ids * (count // len(ids) + 1))[:count])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-dir", help="default: the embedded reference model, unpacked")
    parser.add_argument("--only", choices=["decision", "emulator"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    a = parser.parse_args()
    results: dict = {}
    if a.only != "emulator":
        results["decision"] = bench_decision()
    if a.only != "decision":
        with tempfile.TemporaryDirectory() as folder:
            results["emulator"] = _with_model(a.model_dir, folder, a)
    print(json.dumps(results))


def _with_model(model_dir: str | None, folder: str, a: argparse.Namespace) -> dict:
    if model_dir is None:
        from evals.reference_model.pack import unpack

        model_dir = f"{folder}/reference"
        unpack(ROOT / "models/reference", model_dir, dtype="float32")
    return bench_emulator(model_dir, a.tokens, a.chunk, a.repeats, a.threads)


if __name__ == "__main__":
    main_guard(main)
