"""Times of policies on a host: a cell for every (link, policy, slots, text), as evals/quality.py has them for losses.

A cell replays the trace of one text, from the warm start, on the host's time model (engine/simulator.py). Every expert
weighs what it would in the inflated model (engine/geometry.py); what is executed is the small model's own. A cell that
fails keeps its reason and lets the rest go on.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock

import numpy as np
import yaml

from engine.errors import UserError, error
from engine.geometry import Geometry
from engine.host import load_host
from engine.host_times import Host
from engine.policies import Policy
from engine.predictions import Predictions
from engine.residency import Demand, check_slots, slots_from_percent
from engine.simulator import Named, simulate
from engine.timing import Timing, limit_bytes_per_s, offload_links
from engine.trace import RouterTrace, join
from engine.trace_file import TraceFile
from evals.quality import CELL_FAILURES

LOGGED = ("executed", "weights")  # of a decision log: what scoring it takes
IN_MEMORY_BYTES = 1 << 30  # a trace up to this size is read once for all cells, a larger one in chunks for each


@dataclass(frozen=True)
class Loaded:
    """A trace, or parts of it, in memory: as TraceFile for whoever reads it in chunks."""

    file: TraceFile
    whole: RouterTrace

    @property
    def text(self) -> str:
        return self.file.provenance["text"]

    tokens = property(lambda self: len(self.whole.chosen))
    layers = property(lambda self: self.file.layers)
    experts = property(lambda self: self.file.experts)
    top_k = property(lambda self: self.file.top_k)
    sigmoid = property(lambda self: self.file.sigmoid)

    def check_policy(self, policy: Policy) -> None:
        self.file.check_policy(policy)

    def check_model(self, **expected) -> None:
        self.file.check_model(**expected)

    def chunks(self, tokens: int = 2048) -> Iterator[RouterTrace]:
        for first in range(0, self.tokens, tokens):
            part = slice(first, first + tokens)
            arrays = {
                name: getattr(self.whole, name)[part]
                for name in ("chosen", "weights", "chosen_scores", "scores", "logits")
                if getattr(self.whole, name) is not None
            }
            yield dataclasses.replace(self.whole, **arrays)


def read_host(path: str) -> Host:
    """The profile. UserError also where probe_host.py could not make one."""
    try:
        value = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        value = None  # load_host says what is wrong
    if isinstance(value, dict) and value.get("status") == "absent":
        raise error(f"{path}: no probe of this machine", "a host profile", value.get("reason", "probe it"))
    return load_host(path)


def load(trace: TraceFile) -> TraceFile | Loaded:
    """The trace in memory where it is small."""
    size = trace.path.stat().st_size
    return Loaded(trace, trace.read()) if size <= IN_MEMORY_BYTES else trace


def load_parts(trace: TraceFile, rows: Sequence[range]) -> Loaded:
    """These rows of a trace alone, one part after another. UserError where the trace does not reach so far."""
    end = max(part.stop for part in rows)
    if end > trace.tokens:
        raise error(f"{trace.path}: {trace.tokens} tokens", f"{end} at least", "record it of as many documents")
    return Loaded(trace, join(trace.read(part.start, len(part)) for part in rows))


def text_of(trace: TraceFile | Loaded) -> str:
    return trace.text if isinstance(trace, Loaded) else trace.provenance["text"]


def simulate_cells(
    host: Host,
    geometry: Geometry | UserError,
    traces: Sequence[TraceFile | Loaded],
    policies: Sequence[Policy],
    slot_percents: dict[str, float],
    demand: Demand | None,
    *,
    keep: Callable[[str, dict[str, np.ndarray]], None],
    named: Callable[[str, str], Named] | None = None,
    threads: int = 1,
    progress: Callable[[int], None] = lambda tokens: None,
) -> list[dict]:
    """Rows of all cells; `keep("<link>/<policy>/<slots>/<text>", arrays)` stores token_s, stall_s [T] and delays.

    geometry: or why the model has none; then every cell fails for that reason. named: of a predictor and a text, what
    it names. A lossy policy that prefetches decides by what arrives in time: executed and weights are kept too.
    threads: cells at once; the compiled scan holds no lock.
    """
    links, _ = offload_links(host)
    cells = list(itertools.product(links.values(), policies, slot_percents.items(), traces))
    rows = []
    with ThreadPoolExecutor(threads) as pool:
        work = partial(_simulate_cell, host, geometry, demand, named)
        for (*_, trace), (row, arrays) in zip(cells, pool.map(work, cells), strict=True):
            if arrays is not None:
                keep("/".join(row[name] for name in ("link", "policy", "slots", "text")), arrays)
            rows.append(row)
            progress(trace.tokens)
    return rows


def _simulate_cell(host, geometry, demand, named, cell) -> tuple[dict, dict[str, np.ndarray] | None]:
    """The row of one (link, policy, (slots, percent), trace), and its arrays where it has not failed."""
    link, policy, (slots_id, percent), trace = cell
    text, slots = text_of(trace), slots_from_percent(trace.experts, percent)
    row = {"link": link.name, "link_kind": link.kind, "link_status": link.status, "policy": policy.id}
    row |= {"slots": slots_id, "slots_percent": percent, "slots_count": slots, "text": text}
    arrays, started = None, time.perf_counter()
    try:
        if isinstance(geometry, UserError):
            raise geometry
        check_slots(slots, trace.experts, trace.top_k)
        trace.check_policy(policy)
        timing = Timing.of(host, link.name, geometry, slots)
        logged = bool(policy.prefetch) and not policy.lossless
        said = named(policy.prefetch, text) if policy.prefetch else None
        found = simulate(trace, policy, timing, demand=demand, named=said, keep_log=logged)
        limit = found.work_s + found.foreground * (timing.expert_bytes / limit_bytes_per_s(host, link.name))
        arrays = {
            "token_s": found.token_s.astype(np.float32),
            "stall_s": found.stall_s.astype(np.float32),
            "delays": found.delays,
        }
        if logged:
            arrays |= {part: getattr(found.log, part) for part in LOGGED}
        limit_s = float(limit[1:].mean() if len(limit) > 1 else limit[0])
        row = found.summary() | row | {"status": "ok", "limit_token_s": limit_s}
    except CELL_FAILURES as exc:
        row |= {"status": "failed", "reason": f"{type(exc).__name__}: {' '.join(str(exc).split())}"}
    return row | {"wall_s": round(time.perf_counter() - started, 3)}, arrays


@dataclass(frozen=True)
class Said:
    """What a predictor names for the tokens of a text, or parts of it, in memory: ids, claims [T, L, H, N]."""

    ids: np.ndarray
    claims: np.ndarray

    def chunks(self, tokens: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for first in range(0, len(self.ids), tokens):
            yield self.ids[first : first + tokens], self.claims[first : first + tokens]

    def parts(self, rows: Sequence[range]) -> Said:
        index = np.concatenate([np.asarray(part) for part in rows])
        return Said(self.ids[index], self.claims[index])


class Predicted:
    """The predictions of a folder, `<predictor>/<text>.safetensors`, each read once and checked against its trace."""

    def __init__(self, folder: str | Path, traces: Sequence[TraceFile | Loaded]) -> None:
        self._folder = Path(folder)
        self._traces = {text_of(t): t.file if isinstance(t, Loaded) else t for t in traces}
        self._read: dict[tuple[str, str], Said] = {}
        self._lock = Lock()

    def __call__(self, predictor: str, text: str) -> Said:
        with self._lock:
            return self._of(predictor, text)

    def _of(self, predictor: str, text: str) -> Said:
        if (predictor, text) not in self._read:
            found = Predictions(self._folder / predictor / f"{text}.safetensors")
            found.check(self._traces[text])
            ids, claims = next(iter(found.chunks(found.tokens)))
            self._read[predictor, text] = Said(ids, claims)
        return self._read[predictor, text]


def scored_under(*, policy: str, slots: str, text: str, delay_tokens: int = 0, host: str = "", link: str = "") -> str:
    """Name of the losses that score_delayed.py found: at a delay, or under the decisions of a host and link."""
    return f"{f'{host}/{link}' if host else delay_tokens}/{policy}/{slots}/{text}"


def delay_of(delays: np.ndarray) -> int:
    """Tokens at which the emulator scores the background loads of a simulation: their median, up to a power of two.

    Hosts whose links differ little then share one run of the emulator; rounding up is to the policy's disadvantage.
    """
    median = float(np.median(delays)) if len(delays) else 1.0
    return 1 << max(0, int(np.ceil(np.log2(max(median, 1.0)))))


def fetching_policy(baseline: Policy, eviction: str) -> Policy:
    """The baseline under another eviction: it always fetches."""
    return dataclasses.replace(
        baseline,
        id=eviction,
        eviction=eviction,
        half_life_tokens=baseline.half_life_tokens if eviction == "lfu_decay" else None,
        seed=0 if eviction == "random" else None,
    )
