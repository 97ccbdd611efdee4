"""How fast are decision, simulator, emulator and fetch path? Ratios of one run; noise forbids tests that assert a time.

1. decision: events a second on one thread at E=512, K=10, S=128, `lfu_decay`, threshold, background on, over a seeded
   trace with 65 to 75 % hits and at least two substitutions an event. Reordering and logging included. Why it matters:
   at a million events a second the 48 layers of a large model cost 50 microseconds a token.
2. simulator: events a second on one core over such a trace of four layers in memory, with logits: the baseline, and
   beside it `quality_first` by the clock. Why it matters: a curve of miss ratios is dozens of such runs. Also the peak
   memory of a trace sixteen times as long, which may not grow with it.
3. lru: nanoseconds an expert request of `fetch_lru` in the simulator over those of libcachesim's LRU, same accesses,
   both in memory. libcachesim is the reference for cache simulators and no dependency: `pip install libcachesim` first.
4. emulator: time of each lossy bundle over the fastest stock forward (same type, threads and chunk) on the same tokens.
   Why it matters: the whole pipeline is made of such passes. Repeats are interleaved, medians compared.
5. fetch path: bytes a second of Link.fetch on a packed store over those of the disk's own: as many plain threads as the
   fetch has readers, each looping over O_DIRECT reads of the same records into the same memory, with nothing handed
   over. Why it matters: what the engine loses here no policy wins back. Asked in two ways: `batch`, one fetch of all
   records, which keeps as many reads in flight as the plain threads do, and `events`, a fetch of as many records as
   readers, over and over, which also waits for the slowest of each. Median and quartiles of the rounds.

6., 7., 8. resident, memory and predictor, of the engine: tests/bench_engine.py.
9. scheduler: microseconds of one plan over E=512 experts, 10 names of each of two layers and four rows, called from
   Python as the engine does. Why it matters: it stands in every event of a decoded token; 20 are allowed.
10. products of weights in 4 and 8 bits: tests/bench_products.py.

    make bench        or        python tests/bench.py [--model-dir FOLDER] [--only decision]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from engine.errors import error, main_guard
from engine.policies import load_policies
from engine.residency import Demand, Residency, slots_from_percent

ROOT = Path(__file__).parent.parent
EVENTS, EXPERTS, TOP_K, SLOTS = 20_000, 512, 10, 128
SEED = 7
ONLY = ("decision", "emulator", "engine", "fetch", "lru", "products", "scheduler", "simulator")


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


def routing(events: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One layer: chosen, weights [T, K], logits [T, E]; 65 to 75 % hits under quality_first at S=128."""
    logits = drifting_logits(events, EXPERTS, spread=0.5, memory=0.9, seed=seed)
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :TOP_K]
    chosen = np.random.default_rng(seed).permuted(chosen, axis=1)  # routers may return their choice unsorted
    weights = np.exp(np.take_along_axis(logits, chosen, axis=1))
    weights /= weights.sum(axis=1, keepdims=True)
    return chosen, weights, logits


def bench_decision() -> dict:
    """Median of five scans of the same trace, each from a cold start."""
    rule = load_policies(ROOT / "config/policies.tsv")["quality_first"].rule()
    chosen, weights, logits = routing(EVENTS, SEED)
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


class Chunked:
    """A trace in memory, `times` over, read in chunks."""

    experts, top_k, sigmoid = EXPERTS, TOP_K, False

    def __init__(self, tokens: int, layers: int, times: int = 1) -> None:
        parts = [routing(tokens, SEED + layer) for layer in range(layers)]
        self.chosen, self.weights, self.logits = (np.stack(arrays, axis=1) for arrays in zip(*parts, strict=True))
        self.chosen = self.chosen.astype(np.int16)
        self.chosen_scores = np.take_along_axis(self.logits, self.chosen.astype(np.int64), axis=2)
        self.layers, self.times, self.own_tokens = layers, times, tokens

    @property
    def tokens(self) -> int:
        return self.times * self.own_tokens

    def chunks(self, tokens: int = 2048):
        for _ in range(self.times):
            for start in range(0, self.own_tokens, tokens):
                part = slice(start, start + tokens)
                yield SimpleNamespace(
                    chosen=self.chosen[part],
                    weights=self.weights[part],
                    chosen_scores=self.chosen_scores[part],
                    scores=self.logits[part],
                    logits=None,
                )


def made_up_timing():
    """A host whose link brings 25 GB/s and whose experts weigh 3 MiB."""
    from engine.timing import Timing

    fetch_s = tuple(6e-6 * (n > 0) + n * 126e-6 for n in range(TOP_K + 1))
    experts_s = tuple(4e-6 * n for n in range(TOP_K + 1))
    return Timing(
        "made_up",
        "pcie",
        SLOTS,
        3_145_728,
        1e-5,
        1e-3,
        6e-5,
        experts_s,
        fetch_s,
        fetch_s[1],
        bandwidth_bytes_per_s=25e9,
    )


def bench_simulator(repeats: int) -> dict:
    from engine.simulator import simulate

    policies = load_policies(ROOT / "config/policies.tsv")
    trace, timing = Chunked(4096, layers=4), made_up_timing()
    events = trace.tokens * trace.layers
    results: dict = {}
    for name in ("fetch_lfu_decay", "rule_015", "quality_first"):
        started = time.perf_counter()
        simulate(trace, policies[name], timing)
        first_s = time.perf_counter() - started
        seconds = []
        for _ in range(repeats):
            started = time.perf_counter()
            simulation = simulate(trace, policies[name], timing)
            seconds.append(time.perf_counter() - started)
        rate = events / statistics.median(seconds)
        results[name] = {"events_per_s": rate, "ratio_to_wanted": rate / 1e6, "first_call_s": first_s}
        print(
            f"simulator  {name:<16} {rate / 1e6:.2f} million events a second on one core (ratio to the 1.0 wanted "
            f"of the baseline: {rate / 1e6:.2f}; fastest of {repeats}: {events / min(seconds) / 1e6:.2f}); hits "
            f"{simulation.kinds[:, 0].sum() / events / TOP_K:.3f}; first call {first_s:.1f} s"
        )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trace.times = 16
    simulate(trace, policies["quality_first"], timing)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trace_bytes = trace.times * sum(a.nbytes for a in (trace.chosen, trace.weights, trace.chosen_scores, trace.logits))
    print(
        f"           a trace of {trace_bytes / 2**20:,.0f} MiB: peak memory {after / 1024:,.0f} MiB, "
        f"{(after - before) / 1024:,.0f} more than for a sixteenth of it"
    )
    return {**results, "trace_bytes": trace_bytes, "peak_bytes": after * 1024, "more_bytes": (after - before) * 1024}


def bench_lru(repeats: int) -> dict:
    """libcachesim by `process_trace`: all in C++, over a file of its own format in the page cache.

    Both orders within an event: sorted, as softmax routers return it, and shuffled, which we must rank and it need not.
    """
    try:
        import libcachesim
    except ImportError as exc:
        print(f"lru        skipped: {exc}; `pip install libcachesim` to compare")
        return {"skipped": str(exc)}
    trace = Chunked(EVENTS, layers=1)
    results = {"shuffled": _race_lru(libcachesim, trace, "shuffled", repeats)}
    order = np.argsort(-trace.chosen_scores, axis=2, kind="stable")
    for name in ("chosen", "weights", "chosen_scores"):
        setattr(trace, name, np.take_along_axis(getattr(trace, name), order, axis=2))
    return {**results, "sorted": _race_lru(libcachesim, trace, "sorted", repeats)}


def _race_lru(libcachesim, trace: Chunked, order: str, repeats: int) -> dict:
    from engine.simulator import simulate

    policy, timing = load_policies(ROOT / "config/policies.tsv")["fetch_lru"], made_up_timing()
    requests = trace.chosen.size
    record = np.dtype([("time", "<u4"), ("id", "<u8"), ("bytes", "<u4"), ("next", "<i8")])
    with tempfile.TemporaryDirectory() as folder:
        rows = np.zeros(requests, record)
        rows["time"], rows["id"], rows["bytes"] = np.arange(requests) // TOP_K, trace.chosen.ravel() + 1, 1
        rows["next"] = -1
        rows.tofile(f"{folder}/trace.oracleGeneral")
        ours, theirs = [], []
        for _ in range(repeats + 1):  # the first warms up
            reader = libcachesim.TraceReader(
                f"{folder}/trace.oracleGeneral",
                libcachesim.TraceType.ORACLE_GENERAL_TRACE,
                libcachesim.ReaderInitParam(ignore_obj_size=True),
            )
            cache = libcachesim.LRU(SLOTS)
            started = time.perf_counter()
            miss_rate, _ = cache.process_trace(reader)
            theirs.append(time.perf_counter() - started)
            started = time.perf_counter()
            simulation = simulate(trace, policy, timing)
            ours.append(time.perf_counter() - started)
    our_ns, their_ns = (1e9 * statistics.median(s[1:]) / requests for s in (ours, theirs))
    our_best, their_best = (1e9 * min(s[1:]) / requests for s in (ours, theirs))
    print(
        f"lru        {order:<8} simulator {our_ns:.1f} ns a request, libcachesim {their_ns:.1f}: ratio "
        f"{our_ns / their_ns:.2f} (at most 1.0 wanted); fastest of {repeats}: {our_best:.1f}, {their_best:.1f}; miss "
        f"rate {1 - simulation.kinds[0, 0] / requests:.4f} by whole events, {miss_rate:.4f} one request at a time"
    )
    return {"simulator_ns": our_ns, "libcachesim_ns": their_ns, "ratio": our_ns / their_ns}


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


FETCH_BYTES, FETCH_DEPTHS = {65_536: 1 << 26, 1 << 20: 1 << 27, 6 << 20: 1 << 28}, (1, 4, 8)  # record: bytes a round


def bench_fetch(folder: Path, repeats: int) -> dict:
    from engine.link import Link, Place
    from engine.record import page_aligned
    from engine.store import PackedStore

    results: dict = {}
    for size, round_bytes in FETCH_BYTES.items():
        store = PackedStore(_pack_noise(folder, size))
        if store.cached:
            print(f"fetch path skipped: {folder} has no O_DIRECT; give --dir on a disk")
            return {"skipped": "no O_DIRECT"}
        targets = page_aligned(max(FETCH_DEPTHS), size).fill_(1)
        views = [memoryview(row.numpy()) for row in targets]
        handle = os.open(store.folder / "experts.bin", os.O_RDONLY | os.O_DIRECT)
        rng = np.random.default_rng(SEED)
        for depth in FETCH_DEPTHS:
            count = round_bytes // size // depth * depth
            seconds: dict[str, list[float]] = {"disk": [], "events": [], "batch": []}
            with Link(store, readers=depth) as link:
                for repeat in range(repeats + 1):  # the first warms up
                    experts = rng.integers(0, store.experts, count).tolist()
                    places = [Place(0, e, views[i % depth]) for i, e in enumerate(experts)]
                    took = {"disk": _plain_reads(handle, size, depth, experts, views)}
                    started = time.perf_counter()
                    for first in range(0, count, depth):
                        link.fetch(places[first : first + depth])
                    took["events"] = time.perf_counter() - started
                    started = time.perf_counter()
                    link.fetch(places)
                    took["batch"] = time.perf_counter() - started
                    for name, value in took.items():
                        seconds[name] += [value] if repeat else []
            disk = count * size / statistics.median(seconds["disk"])
            said = {}
            for name in ("batch", "events"):  # round by round: what disturbs one disturbs its neighbours too
                low, ratio, high = np.percentile(np.array(seconds["disk"]) / np.array(seconds[name]), [25, 50, 75])
                results[f"{size}_{depth}_{name}"] = float(ratio)
                said[name] = f"{ratio:.2f} of it ({low:.2f} to {high:.2f})"
            print(
                f"fetch path {size >> 10:>5} KiB, depth {depth}: disk {disk / 1e6:6,.0f} MB/s; batch "
                f"{said['batch']}, at least 0.85 wanted; events {said['events']}",
                flush=True,
            )
        os.close(handle)
        store.close()
    return results


def _pack_noise(folder: Path, size: int) -> Path:
    """A packed store of one layer of experts of `size` bytes, half a GiB of them."""
    import torch
    from safetensors.torch import save_file

    from engine.pack import pack
    from engine.record import Layout

    class Noise:
        layers, experts, layout = 1, (1 << 29) // size, Layout(("weight",), ((size // 4,),), torch.float32)
        record = torch.randn(size // 4).numpy().tobytes()

        def read(self, layer: int, expert: int, target: memoryview) -> int:
            target[:] = self.record
            return size

    source = folder / f"source_{size}"
    source.mkdir()
    (source / "config.json").write_text("{}")
    save_file({"norm": torch.ones(8)}, source / "model.safetensors")
    pack(Noise(), folder / f"store_{size}", source=source, leave_out=(), facts={})
    return folder / f"store_{size}"


def _plain_reads(handle: int, size: int, depth: int, experts: list[int], targets: list[memoryview]) -> float:
    """Seconds of `depth` threads from a common start until the last has read its share."""
    gate, ends = threading.Barrier(depth + 1), [0.0] * depth

    def loop(n: int) -> None:
        offsets, target = [e * size for e in experts[n::depth]], [targets[n]]
        gate.wait()
        for offset in offsets:
            os.preadv(handle, target, offset)
        ends[n] = time.perf_counter()

    threads = [threading.Thread(target=loop, args=(n,)) for n in range(depth)]
    for thread in threads:
        thread.start()
    started = time.perf_counter()
    gate.wait()
    for thread in threads:
        thread.join()
    return max(ends) - started


def _tokens(model_dir: str, text: str, count: int):
    import torch

    from evals.jobs import load_tokenizer

    ids = load_tokenizer(model_dir)[0](text, add_special_tokens=False)["input_ids"]
    return torch.tensor((ids * (count // len(ids) + 1))[:count])


def bench_scheduler() -> dict:
    """Plans of one sequence of events: entries go on from one to the next."""
    from engine.decision import EXPERT, STAGED
    from engine.scheduler import Window, new_entries, plan

    random = np.random.default_rng(SEED)
    experts = np.zeros((48, EXPERTS), EXPERT)
    experts["slot"] = np.where(random.random(experts.shape) < SLOTS / EXPERTS, 0, -1)
    experts["load_slot"] = -1
    named = [random.permuted(np.arange(EXPERTS, dtype=np.int32))[None, :11].repeat(2, 0) for _ in range(1000)]
    claims = np.linspace(0.9, 0.1, 11)[None].repeat(2, 0)
    window, entries, took = Window(np.array([2e-3, 4e-3]), 3e-4, 4, TOP_K, True), new_entries(STAGED), []
    for event, names in enumerate(named):
        began = time.perf_counter()
        plan(experts, event % 47, names, claims, window, entries)
        took.append(time.perf_counter() - began)
    median, high = 1e6 * np.median(took[1:]), 1e6 * np.quantile(took[1:], 0.99)  # the first compiles
    print(f"scheduler: {median:.1f} microseconds a plan, 99 % within {high:.1f} (20 allowed)")
    return {"us": median, "us_99": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-dir", help="default: the embedded reference model, unpacked")
    parser.add_argument("--only", choices=ONLY)
    parser.add_argument("--dir", help="a folder on the disk whose reads are timed; default: that of temporary files")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    a = parser.parse_args()
    results: dict = {}
    if a.only in (None, "decision"):
        results["decision"] = bench_decision()
    if a.only in (None, "simulator"):
        results["simulator"] = bench_simulator(a.repeats)
    if a.only in (None, "scheduler"):
        results["scheduler"] = bench_scheduler()
    if a.only in (None, "products"):
        from tests.bench_products import bench_products

        results["products"] = bench_products(a.threads, a.repeats)
    if a.only in (None, "lru"):
        results["lru"] = bench_lru(4 * a.repeats)
    if a.only in (None, "fetch"):
        with tempfile.TemporaryDirectory(dir=a.dir) as folder:
            results["fetch"] = bench_fetch(Path(folder), 2 * a.repeats)
    if a.only in (None, "emulator"):
        with tempfile.TemporaryDirectory() as folder:
            results["emulator"] = _with_model(a.model_dir, folder, a)
    if a.only in (None, "engine"):
        with tempfile.TemporaryDirectory(dir=a.dir) as folder:
            results["engine"] = _engine(Path(folder), a.threads, a.repeats)
    print(json.dumps(results))


def _engine(folder: Path, threads: int, repeats: int) -> dict:
    from tests.bench_engine import bench_memory, bench_predictor, bench_resident, make_stores

    found = {}
    for size, store in make_stores(folder).items():
        if isinstance(store, str):
            print(f"engine {size}: left out, {store}")
        else:
            found[size] = {
                "resident": bench_resident(size, store, threads, repeats),
                "memory": bench_memory(size, store),
                "predictor": bench_predictor(size, store, threads, repeats),
            }
    return found


def _with_model(model_dir: str | None, folder: str, a: argparse.Namespace) -> dict:
    if model_dir is None:
        from evals.reference_model.pack import unpack

        model_dir = f"{folder}/reference"
        unpack(ROOT / "models/reference", model_dir, dtype="float32")
    return bench_emulator(model_dir, a.tokens, a.chunk, a.repeats, a.threads)


if __name__ == "__main__":
    main_guard(main)
