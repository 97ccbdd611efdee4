"""The simulator: a router trace replayed without the model, on a host's time model. What would a token have taken?

It makes the same compiled decision as the other instruments and adds seconds (docs/simulator.md has the formulas).
Background loads complete by the clock. It is open-loop by nature: the trace was recorded under one execution, and a
lossy policy would have changed what the next layers choose; `open_loop_error` sets its counts beside the emulator's.

    timing = Timing.of(host, "pcie", geometry, slots=64)
    simulation = simulate(trace, policy, timing, demand=demand)
    simulation.summary()["median_token_s"]

A trace is an object with tokens, layers, experts, top_k, sigmoid and `chunks(tokens)`, which yields RouterTrace parts
of at most so many tokens: memory is bounded by a chunk, and results do not depend on its size. One lane, continuity
`stream`, decoding throughout: every token is one event a layer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from engine.clock import (
    BACKGROUND,
    NOTHING_AHEAD,
    Ahead,
    Times,
    add_times,
    decide_by_clock,
    new_line,
    new_seconds,
    new_totals,
)
from engine.decision import CAUSES, FETCHED, ISSUED, NEVER, STAGED, TAKEN, Log, link_next_use
from engine.errors import error
from engine.log import DecisionLog, count, join_moves
from engine.policies import SUBSTITUTING, Policy, refuse_in_place
from engine.residency import Demand, Residency, stopped_at
from engine.scheduler import Window
from engine.timing import Timing

if TYPE_CHECKING:
    from engine.trace import RouterTrace

CHUNK_BYTES = 1 << 26  # of scores of one chunk, as far as it is not given in tokens


class Named(Protocol):
    """What a predictor names (engine.predictions)."""

    def chunks(self, tokens: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """ids [t, L, H, N] int32 by falling claim, -1 none, and claims [t, L, H, N] float64, for tokens in order."""
        ...


class Trace(Protocol):
    tokens: int
    layers: int
    experts: int
    top_k: int
    sigmoid: bool  # the model's score rule

    def chunks(self, tokens: int = 2048) -> Iterator[RouterTrace]: ...


# ---- what a simulation finds ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Simulation:
    """One policy over one trace on one host; T tokens, L layers."""

    policy: str
    timing: Timing
    open_loop: bool  # the policy changes what is executed, and the trace does not know it
    work_s: np.ndarray  # [T], compute with nothing beside it
    compute_s: np.ndarray  # [T], the same, slowed down by the transfers beside it
    stall_s: np.ndarray  # [T], waiting for what is fetched
    kinds: np.ndarray  # [L, 4]: hits, fetches, substitutions, drops
    mass: np.ndarray  # [L, 2]: substituted and dropped, summed over events
    moves: np.ndarray  # [L, 5]: fetched, promoted, issued, arrived, taken from where a prefetch had brought it
    foreground: np.ndarray  # [T]: records that were fetched while the model waited, of prefetched ones what was lacking
    prefetched: np.ndarray  # [2]: records that prefetches brought, piece by piece; of these, what events took
    waiting: int  # records that were still queued or in transit at the end
    delays: np.ndarray  # of every background load that arrived: tokens from its issue to its first event in a slot
    log: DecisionLog | None

    @property
    def token_s(self) -> np.ndarray:
        return self.compute_s + self.stall_s

    @property
    def loads(self) -> int:
        """Records read: a promoted load was issued before and counts once."""
        return int(self.moves[:, [FETCHED, ISSUED, TAKEN]].sum())

    @property
    def bytes(self) -> int:
        """What the link passed: of what was there in part, the rest, and all that was prefetched, in vain or not."""
        brought, taken = self.prefetched
        return round((self.loads + brought - taken) * self.timing.expert_bytes)

    @property
    def ceiling_s(self) -> np.ndarray:
        """[T]: compute plus bytes over bandwidth of what is waited for; no token of these decisions is faster."""
        return self.work_s + self.foreground * (self.timing.expert_bytes / self.timing.bandwidth_bytes_per_s)

    def summary(self) -> dict:
        """For a record: seconds of a token (all but the first, which has its own), counts, and the ceiling beside."""
        token_s, rest = self.token_s, slice(1, None) if len(self.stall_s) > 1 else slice(None)
        events = len(token_s) * len(self.kinds)
        return {
            "policy": self.policy,
            "host": self.timing.host,
            "link": self.timing.link,
            "slots": self.timing.slots,
            "open_loop": self.open_loop,
            "tokens": len(token_s),
            "first_token_s": float(token_s[0]),
            "median_token_s": float(np.median(token_s[rest])),
            "p95_token_s": float(np.quantile(token_s[rest], 0.95)),
            "mean_token_s": float(token_s[rest].mean()),
            "mean_compute_s": float(self.compute_s[rest].mean()),
            "mean_stall_s": float(self.stall_s[rest].mean()),
            "ceiling_token_s": float(self.ceiling_s[rest].mean()),
            "events": events,
            "hits": int(self.kinds[:, 0].sum()),
            "fetches": int(self.kinds[:, 1].sum()),
            "substitutions": int(self.kinds[:, 2].sum()),
            "drops": int(self.kinds[:, 3].sum()),
            "substituted_mass": float(self.mass[:, 0].sum() / events),
            "dropped_mass": float(self.mass[:, 1].sum() / events),
            "loads": self.loads,
            "bytes": self.bytes,
            "hits_by_layer": self.kinds[:, 0].tolist(),
            "background_issued": int(self.moves[:, 2].sum()),
            "background_promoted": int(self.moves[:, 1].sum()),
            "background_arrived": len(self.delays),
            "median_delay_tokens": float(np.median(self.delays)) if len(self.delays) else None,
            "p90_delay_tokens": float(np.quantile(self.delays, 0.9)) if len(self.delays) else None,
            "prefetched": float(self.prefetched[0]),
            "prefetched_taken": float(self.prefetched[1]),
        }


# ---- the instrument -------------------------------------------------------------------------------------------------
def simulate(
    trace: Trace,
    policy: Policy,
    timing: Timing,
    *,
    demand: Demand | None = None,
    named: Named | None = None,
    keep_log: bool = False,
    chunk_tokens: int | None = None,
) -> Simulation:
    """A policy over a trace with timing.slots slots a layer, background loads completing by the clock.

    demand: calibration demand for the warm start, None starts cold. named: of a policy that prefetches, what its
    predictor said of these tokens. keep_log: also the decision log, whose memory grows
    with the trace; the emulator scores it, so that quality and speed come from the same decisions. The first call with
    a background policy after a change of code compiles for about 20 seconds. UserError: sizes that do not fit, a trace
    without scores under a policy that substitutes, router output that is not finite, a policy that computes in place.
    """
    _check(trace, policy, timing)
    if policy.prefetch and named is None:
        raise error(f"policy '{policy.id}' without predictions", f"those of {policy.prefetch}", "record them first")
    residency = _start(trace, policy, timing.slots, demand, delay=0)
    window = timing.window(policy.schedule) if policy.prefetch else NOTHING_AHEAD.window
    times = _times(timing, policy, window)
    line, totals = new_line(trace.layers, timing.slots), new_totals(trace.layers)
    causes = np.zeros((trace.layers, CAUSES), np.int64)
    parts, delays, kept = [], [], _Kept(keep_log, trace.layers)
    tokens = chunk_tokens or _chunk_tokens(trace)
    names = named.chunks(tokens) if policy.prefetch else _nothing()
    with _futures(trace, policy.eviction == "belady", tokens) as (first, futures):
        _foresee(residency, first)
        for part, linked, said in zip(_parts(trace, tokens), futures, names, strict=False):
            arrays = _arguments(part, policy)
            if policy.beta is None and not policy.prefetch:
                log, moves = residency.decide_layers(0, **arrays, linked=linked)
                flat = Log(*(array.reshape(-1, *array.shape[2:]) for array in log))
                seconds = new_seconds(len(part.chosen))
                add_times(trace.layers, flat, times, totals, seconds)
            else:
                ahead = NOTHING_AHEAD
                if policy.prefetch:
                    arrays["staged"] = np.full((len(part.chosen), trace.layers, STAGED), -1, np.int32)
                    ahead = _ahead(said, part, window)
                events, flat = residency.arrays(**arrays)
                seconds, moves, delay, stopped = decide_by_clock(
                    residency.state, trace.layers, residency.rule, events, flat, times, line, totals, ahead
                )
                if stopped >= 0:
                    raise stopped_at(stopped // trace.layers, stopped % trace.layers)
                delays.append(delay)
            parts.append(seconds)
            causes += [np.bincount(m["cause"], minlength=CAUSES) for m in moves]
            kept.add(flat, moves)
    work_s, compute_s, stall_s, records = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    transit = line.transit[0]
    return Simulation(
        policy=policy.id,
        timing=timing,
        open_loop=not policy.lossless,
        work_s=work_s,
        compute_s=compute_s,
        stall_s=stall_s,
        kinds=totals.kinds,
        mass=totals.mass,
        moves=causes,
        foreground=records,
        prefetched=totals.pieces / window.pieces,
        waiting=int(transit["tail"] - transit["head"] + (transit["layer"] >= 0 and transit["entry"] == BACKGROUND)),
        delays=np.concatenate(delays) if delays else np.zeros(0, np.int32),
        log=kept.log(),
    )


def decide(
    trace: Trace,
    policy: Policy,
    *,
    slots: int,
    demand: Demand | None = None,
    delay: int = 1,
    chunk_tokens: int | None = None,
) -> DecisionLog:
    """The decisions alone, background loads completing after `delay` tokens (1 is `next_step`): the agreement mode.

    On the routing that the emulator saw, its decision log bit for bit.
    """
    if delay < 1:
        raise error(f"a delay of {delay} tokens", "1 or more", "the clock is `simulate`")
    residency = _start(trace, policy, slots, demand, delay=delay)
    kept = _Kept(True, trace.layers)
    with _futures(trace, policy.eviction == "belady", chunk_tokens) as (first, futures):
        _foresee(residency, first)
        for part, linked in zip(_parts(trace, chunk_tokens), futures, strict=False):
            log, moves = residency.decide_layers(0, **_arguments(part, policy), linked=linked)
            kept.add(Log(*(array.reshape(-1, *array.shape[2:]) for array in log)), moves)
    return kept.log()


def miss_curves(
    trace: Trace,
    policies: Iterable[Policy],
    slots: Sequence[int],
    *,
    demand: Demand | None = None,
    delay: int = 1,
    chunk_tokens: int | None = None,
) -> list[dict]:
    """A row for every policy and slot budget, from one read of the trace (belady: and one of `chosen` before it).

    Rows: policy, slots, events, demands, misses, miss_rate, fetches, loads. Every budget's residency is fed by each
    chunk, so memory grows with their number and not with the trace.
    """
    cells = [
        (policy, count, _start(trace, policy, count, demand, delay=delay), np.zeros(4, np.int64), np.zeros(CAUSES, int))
        for policy in policies
        for count in slots
    ]
    clairvoyant = any(policy.eviction == "belady" for policy, *_ in cells)
    with _futures(trace, clairvoyant, chunk_tokens) as (first, futures):
        for policy, _, residency, _, _ in cells:
            if policy.eviction == "belady":
                _foresee(residency, first)
        for part, linked in zip(_parts(trace, chunk_tokens), futures, strict=False):
            for policy, _, residency, kinds, causes in cells:
                future = linked if policy.eviction == "belady" else None
                log, moves = residency.decide_layers(0, **_arguments(part, policy), linked=future)
                kinds += np.bincount(log.kind.ravel(), minlength=4)
                causes += sum(np.bincount(m["cause"], minlength=CAUSES) for m in moves)
    demands = trace.tokens * trace.layers * trace.top_k
    return [
        {
            "policy": policy.id,
            "slots": count,
            "events": trace.tokens * trace.layers,
            "demands": demands,
            "misses": int(kinds[1:].sum()),
            "miss_rate": float(kinds[1:].sum() / max(demands, 1)),
            "fetches": int(kinds[1]),
            "loads": int(causes[FETCHED] + causes[ISSUED]),
        }
        for policy, count, _, kinds, causes in cells
    ]


def open_loop_error(simulated: DecisionLog, emulated: DecisionLog) -> dict[str, dict[str, float]]:
    """{count: {simulated, emulated, error}} of two logs of one policy over one text; error is the difference."""
    if simulated.kind.shape != emulated.kind.shape:
        raise error(
            f"logs of {simulated.kind.shape} and {emulated.kind.shape}", "one text, one model", "simulate that text"
        )
    ours, theirs = count(simulated), count(emulated)
    return {
        name: {"simulated": ours[name], "emulated": theirs[name], "error": ours[name] - theirs[name]} for name in ours
    }


# ---- parts ----------------------------------------------------------------------------------------------------------
class _Kept:
    """The decision log of a run in chunks, or nothing."""

    def __init__(self, keep: bool, layers: int) -> None:
        self._keep, self._layers = keep, layers
        self._logs: list[Log] = []
        self._moves: list[list[np.ndarray]] = [[] for _ in range(layers)]

    def add(self, flat: Log, moves: list[np.ndarray]) -> None:
        if self._keep:
            self._logs.append(flat._replace(executed=flat.executed.astype(np.int16)))
            for kept, moved in zip(self._moves, moves, strict=True):
                kept.append(moved)

    def log(self) -> DecisionLog | None:
        if not self._keep:
            return None
        arrays = (np.concatenate(parts) for parts in zip(*self._logs, strict=True))
        arrays = (array.reshape(-1, self._layers, *array.shape[1:]) for array in arrays)
        return DecisionLog(*arrays, moves=join_moves(self._moves))


def _check(trace: Trace, policy: Policy, timing: Timing) -> None:
    if len(timing.fetch_s) != trace.top_k + 1:
        raise error(
            f"times of up to {len(timing.fetch_s) - 1} experts", f"K = {trace.top_k} of the trace", "use its geometry"
        )


def _start(trace: Trace, policy: Policy, slots: int, demand: Demand | None, *, delay: int) -> Residency:
    refuse_in_place(policy, "simulator")
    rule = policy.rule(sigmoid=trace.sigmoid, delay=delay)
    residency = Residency(layers=trace.layers, experts=trace.experts, top_k=trace.top_k, slots=slots, rule=rule)
    if demand is not None:
        residency.warm(demand)
    return residency


def _times(timing: Timing, policy: Policy, window: Window) -> Times:
    """The fields of one name: numbers as floats, tuples as arrays; and what prefetching takes."""
    own = {"piece_s": window.piece_s / timing.slowdown_transfer, "predict_s": timing.predictor_s(policy.prefetch or "")}
    values = (own.get(name, getattr(timing, name, None)) for name in Times._fields)
    return Times(*(np.array(v, np.float64) if isinstance(v, tuple) else float(v) for v in values))


def _chunk_tokens(trace: Trace) -> int:
    return max(1, CHUNK_BYTES // (4 * trace.layers * trace.experts))


def _parts(trace: Trace, tokens: int | None) -> Iterator[RouterTrace]:
    if trace.tokens < 1:
        raise error("a trace of no tokens", "1 or more", "record a longer text")
    return trace.chunks(tokens or _chunk_tokens(trace))


def _ahead(said: tuple[np.ndarray, np.ndarray], part: RouterTrace, window: Window) -> Ahead:
    """said: ids and claims [t, L, H, N] of the part's tokens."""
    ids, claims = said
    tokens, layers = part.chosen.shape[:2]
    if ids.shape[:2] != (tokens, layers) or claims.shape != ids.shape:
        raise error(f"predictions of {ids.shape}", f"[{tokens}, {layers}, H, N] as the trace", "record them anew")
    flat = (-1, *ids.shape[2:])
    return Ahead(
        np.ascontiguousarray(ids, np.int32).reshape(flat), np.ascontiguousarray(claims, float).reshape(flat), window
    )


def _arguments(part: RouterTrace, policy: Policy) -> dict:
    """What this policy's decision reads of a part: a rule that never substitutes needs no scores but the chosen's."""
    arrays = {"chosen": part.chosen, "weights": part.weights, "chosen_scores": part.chosen_scores, "scores": None}
    if policy.miss_rule in SUBSTITUTING:
        arrays |= {"scores": part.scores, "logits": part.logits}
    return arrays


# ---- the future, for belady -----------------------------------------------------------------------------------------
@contextmanager
def _futures(trace: Trace, wanted: bool, tokens: int | None):
    """(first demands [L, E], then for every part the next demand of every demand, [t, K] a layer), or (None, Nones).

    One pass copies `chosen` into a temporary file, a second goes back over it and turns it into next demands.
    """
    if not wanted:
        yield None, _nothing()
        return
    with tempfile.TemporaryFile() as file:
        sizes = []
        for part in _parts(trace, tokens):
            sizes.append(len(part.chosen))
            file.write(np.ascontiguousarray(part.chosen, np.int32).data)
        first = np.full((trace.layers, trace.experts), NEVER)
        step = sum(sizes)
        for size in reversed(sizes):
            step -= size
            rows = _read(file, step, size, trace).reshape(size * trace.layers, trace.top_k)
            linked = [link_next_use(first[layer], step, rows, layer, trace.layers) for layer in range(trace.layers)]
            file.seek(step * trace.layers * trace.top_k * 4)
            file.write(np.stack(linked).data)  # [L, t, K]
        yield first, _read_futures(file, sizes, trace)


def _nothing() -> Iterator[None]:
    while True:
        yield None


def _read(file, step: int, size: int, trace: Trace) -> np.ndarray:
    file.seek(step * trace.layers * trace.top_k * 4)
    rows = bytearray(size * trace.layers * trace.top_k * 4)  # not `read`: compiled code takes writable arrays alone
    file.readinto(rows)
    return np.frombuffer(rows, np.int32)


def _read_futures(file, sizes: list[int], trace: Trace) -> Iterator[np.ndarray]:
    step = 0
    for size in sizes:
        yield _read(file, step, size, trace).reshape(trace.layers, size, trace.top_k)
        step += size


def _foresee(residency: Residency, first: np.ndarray | None) -> None:
    if first is not None:
        residency.state.experts["next_use"] = first
