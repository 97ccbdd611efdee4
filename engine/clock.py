"""The clock: seconds of every token, and background loads that complete when their transfer has ended.

`add_times` prices decisions that were already made: without background loads they do not depend on time.
`decide_by_clock` makes them token by token in all layers, while a single background transfer moves on beside compute:

    layer_s | the layer has routed: ended loads of this layer arrive, decide | event_s | wait | plan | experts_s | queue

* wait: what is left of the record or piece in transit (neither is broken off), then fetch_s of what is fetched now. A
  promoted load that is in transit is waited for, one that is only queued is fetched with the others, one whose transfer
  has ended is there.
* plan: engine.scheduler says which prefetches pass until the next plan, piece by piece, before any background record.
  What an event takes of them costs the pieces that are lacking; what it does not take is dropped.
* Background records pass one at a time, first queued first, never during a foreground fetch. While one passes beside
  compute both are slower by the link's factors; while the model waits for it, it goes at full speed.

Time is kept as what is left of the transfer, not as a date, so no precision is lost over a long trace. The decision is
engine.decision's `decide_event`, which is called, never repeated. numba's cache on disk watches a function's own file
alone; `run` therefore carries the hash of decision.py and scheduler.py in its closure, which is part of numba's key.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import njit

import engine.decision
import engine.scheduler
from engine.decision import (
    ARRIVED,
    DROP,
    FETCHED,
    HIT,
    ISSUED,
    MOVE,
    PROMOTED,
    STAGED,
    SUBSTITUTE,
    TAKEN,
    Events,
    Log,
    Rule,
    State,
    Work,
    complete_load,
    decide_event,
    make_work,
    ready,
    refresh_keys,
)
from engine.scheduler import Window, new_entries, plan, release

LOAD = np.dtype([("layer", np.int32), ("expert", np.int32), ("issued", np.int32)], align=True)  # issued: step
TRANSIT = np.dtype(
    [
        ("left_s", np.float64),  # of the record or piece in transit, at full speed
        ("entry", np.int32),  # of a piece: the row beside the slots, -1: nobody's any more; BACKGROUND of a record
        ("layer", np.int32),  # of it, -1 none
        ("expert", np.int32),
        ("issued", np.int32),
        ("head", np.int32),  # of the queue
        ("tail", np.int32),
    ],
    align=True,
)


BACKGROUND = -2


class Times(NamedTuple):
    """engine.timing.Timing as the compiled code reads it."""

    token_s: float
    layer_s: float
    event_s: float
    experts_s: np.ndarray  # [K + 1]
    fetch_s: np.ndarray  # [K + 1]
    background_s: float
    predict_s: float  # what a predictor takes of a layer
    piece_s: float
    slowdown_compute: float
    slowdown_transfer: float


class Ahead(NamedTuple):
    """What a policy that prefetches knows: of every event, what is named for the next layers."""

    names: np.ndarray  # [T * L, H, N] int32; [0, H, N] of a policy that does not prefetch
    claims: np.ndarray  # [T * L, H, N] float64
    window: Window


NOTHING_AHEAD = Ahead(np.empty((0, 1, 1), np.int32), np.empty((0, 1, 1)), Window(np.empty(1), 1.0, 1, 0, True))


class Line(NamedTuple):
    """The link as it stands; goes on from chunk to chunk."""

    transit: np.ndarray  # [1] TRANSIT
    queue: np.ndarray  # LOAD, entries head to tail wait
    done: np.ndarray  # [L, S] LOAD, transfers that ended and whose layer has had no event since
    done_count: np.ndarray  # [L] int64
    entries: np.ndarray  # [R] engine.scheduler.ENTRY, prefetches


class Totals(NamedTuple):
    """Sums over events; goes on from chunk to chunk."""

    kinds: np.ndarray  # [L, 4] int64, entries of each kind
    mass: np.ndarray  # [L, 2] float64, substituted and dropped
    pieces: np.ndarray  # [2] int64: of prefetches that passed; that an event took


def new_line(layers: int, slots: int) -> Line:
    transit = np.zeros(1, TRANSIT)
    transit["layer"] = -1
    return Line(
        transit,
        np.zeros(2 * layers * slots + 1, LOAD),
        np.zeros((layers, slots), LOAD),
        np.zeros(layers, np.int64),
        new_entries(STAGED),
    )


def new_totals(layers: int) -> Totals:
    return Totals(np.zeros((layers, 4), np.int64), np.zeros((layers, 2)), np.zeros(2, np.int64))


class Seconds(NamedTuple):
    """What each token took."""

    work_s: np.ndarray  # [T], compute with nothing beside it
    compute_s: np.ndarray  # [T], the same, slowed down by the transfers beside it
    stall_s: np.ndarray  # [T], waiting for the foreground
    records: np.ndarray  # [T], fetched in the foreground; of what was there in part, the rest


def new_seconds(tokens: int) -> Seconds:
    return Seconds(np.zeros(tokens), np.zeros(tokens), np.zeros(tokens), np.zeros(tokens))


# ---- counting -------------------------------------------------------------------------------------------------------
@njit(cache=True, inline="always")
def _tally(log, totals, layer, t):
    """Count event `t`; (executed, fetched)."""
    K = log.kind.shape[1]
    hits = substituted = dropped = 0
    for k in range(K):
        kind = log.kind[t, k]
        hits += kind == HIT
        substituted += kind == SUBSTITUTE
        dropped += kind == DROP
    if substituted + dropped > 0:
        for k in range(K):
            if log.kind[t, k] == SUBSTITUTE:
                totals.mass[layer, 0] += log.g[t, k]
            elif log.kind[t, k] == DROP:
                totals.mass[layer, 1] += log.g[t, k]
    fetched = K - hits - substituted - dropped
    totals.kinds[layer, 0] += hits
    totals.kinds[layer, 1] += fetched
    totals.kinds[layer, 2] += substituted
    totals.kinds[layer, 3] += dropped
    return K - dropped, fetched


@njit(cache=True, nogil=True, _nrt=False)
def add_times(layers, log, times, totals, seconds):
    """Of decisions without background loads: log is over [T * L] events, tokens outermost; fills totals and seconds."""
    for token in range(seconds.records.size):
        for layer in range(layers):
            executed, fetched = _tally(log, totals, layer, token * layers + layer)
            seconds.work_s[token] += times.layer_s + times.event_s + times.experts_s[executed]
            seconds.stall_s[token] += times.fetch_s[fetched]
            seconds.records[token] += fetched
        seconds.work_s[token] += times.token_s
        seconds.compute_s[token] = seconds.work_s[token]


# ---- the line -------------------------------------------------------------------------------------------------------
@njit(cache=True, inline="always")
def _start(line, times, totals):
    """The next granted piece goes, if the link is free, else the next queued record."""
    transit = line.transit[0]
    if transit.layer >= 0:
        return
    first = -1
    for i in range(line.entries.size):
        if line.entries[i].granted > 0 and (first < 0 or line.entries[i].order < line.entries[first].order):
            first = i
    if first >= 0:
        entry = line.entries[first]
        entry.granted -= 1
        entry.left -= 1
        transit.entry, transit.layer, transit.expert, transit.left_s = first, entry.layer, entry.expert, times.piece_s
        totals.pieces[0] += 1
    elif transit.head < transit.tail:
        load = line.queue[transit.head]
        transit.entry, transit.layer, transit.expert = BACKGROUND, load.layer, load.expert
        transit.issued, transit.left_s = load.issued, times.background_s
        transit.head += 1


@njit(cache=True, inline="always")
def _end(line):
    """What was in transit is here; a background record becomes resident when its layer has its next event."""
    transit = line.transit[0]
    layer = transit.layer
    transit.layer = -1
    if transit.entry == BACKGROUND:
        load = line.done[layer, line.done_count[layer]]
        load.layer, load.expert, load.issued = layer, transit.expert, transit.issued
        line.done_count[layer] += 1


@njit(cache=True, inline="always")
def _disown(line):
    """A piece in transit whose row is another's by now is nobody's."""
    transit = line.transit[0]
    if transit.layer >= 0 and transit.entry >= 0:
        entry = line.entries[transit.entry]
        if entry.layer != transit.layer or entry.expert != transit.expert:
            transit.entry = -1


@njit(cache=True, inline="always")
def _compute(line, times, totals, work_s):
    """Seconds that `work_s` of compute takes with the transfers beside it, which move on."""
    elapsed = 0.0
    while line.transit[0].layer >= 0:
        transit_s = line.transit[0].left_s * times.slowdown_transfer
        slowed_s = work_s * times.slowdown_compute
        if transit_s > slowed_s:
            line.transit[0].left_s -= slowed_s / times.slowdown_transfer
            return elapsed + slowed_s
        elapsed += transit_s
        work_s = max(work_s - transit_s / times.slowdown_compute, 0.0)
        _end(line)
        _start(line, times, totals)
    return elapsed + work_s


@njit(cache=True, inline="always")
def _promote(line, layer, e):
    """Forget the load of `e`, needed now: 0 it is here, 1 it is in transit, 2 it was queued and is to be fetched."""
    done = line.done[layer]
    for i in range(line.done_count[layer]):
        if done[i].expert == e:
            line.done_count[layer] -= 1
            for j in range(i, line.done_count[layer]):
                done[j].expert, done[j].issued = done[j + 1].expert, done[j + 1].issued
            return 0
    transit, queue = line.transit[0], line.queue
    if transit.entry == BACKGROUND and transit.layer == layer and transit.expert == e:
        return 1
    i = transit.head
    while queue[i].layer != layer or queue[i].expert != e:
        i += 1
    transit.tail -= 1
    for j in range(i, transit.tail):
        later = queue[j + 1]
        queue[j].layer, queue[j].expert, queue[j].issued = later.layer, later.expert, later.issued
    return 2


@njit(cache=True, inline="always")
def _enqueue(line, times, totals, layer, e, step):
    transit, queue = line.transit[0], line.queue
    if transit.tail == queue.size:
        for i in range(transit.tail - transit.head):
            moved = queue[transit.head + i]
            queue[i].layer, queue[i].expert, queue[i].issued = moved.layer, moved.expert, moved.issued
        transit.tail -= transit.head
        transit.head = 0
    load = queue[transit.tail]
    load.layer, load.expert, load.issued = layer, e, step
    transit.tail += 1
    _start(line, times, totals)


@njit(cache=True, inline="always")
def _missing(line, totals, pieces, layer, e):
    """The part of a record that is not there, with nothing in transit; what is there of it is taken."""
    for i in range(line.entries.size):
        if line.entries[i].layer == layer and line.entries[i].expert == e:
            totals.pieces[1] += pieces - line.entries[i].left
            return line.entries[i].left / pieces
    return 1.0


@njit(cache=True, inline="always")
def _wait(line, times, totals, pieces, layer, moves, before, n):
    """Foreground of one event whose moves are before to n: (seconds, records fetched, in parts)."""
    whole = 0
    awaited = -1  # a promoted expert in transit
    for i in range(before, n):
        if moves[i].cause == FETCHED:
            whole += 1
        elif moves[i].cause == TAKEN:
            totals.pieces[1] += pieces
        elif moves[i].cause == PROMOTED:
            where = _promote(line, layer, moves[i].expert)
            if where == 1:
                awaited = moves[i].expert
            elif where == 2:
                whole += 1
    if whole == 0 and awaited < 0:
        return 0.0, 0.0
    seconds = 0.0
    if line.transit[0].layer >= 0:
        seconds = line.transit[0].left_s
        _end(line)
        if awaited >= 0:
            line.done_count[layer] -= 1  # it was the promoted one: resident already
    records = np.float64(whole)
    for i in range(before, n):
        if moves[i].cause == FETCHED:
            records -= 1.0 - _missing(line, totals, pieces, layer, moves[i].expert)
    below = int(records)
    seconds += times.fetch_s[below]
    if records > below:
        seconds += (records - below) * (times.fetch_s[below + 1] - times.fetch_s[below])
    return seconds, records


@njit(cache=True, inline="always")
def _release(line, layer):
    """The event of this layer has taken what it wanted."""
    for i in range(line.entries.size):
        if line.entries[i].layer == layer:
            release(line.entries[i])
    _disown(line)


# ---- token by token -------------------------------------------------------------------------------------------------
class Journal(NamedTuple):
    """What `run` writes as it goes, with room for more than one token's moves."""

    moves: np.ndarray  # [N] MOVE
    layer: np.ndarray  # [N] int32, of each move
    delay: np.ndarray  # [N] int32, steps from issue to arrival of the loads that arrived, a list apart


def _compiled(decision_hash: str):
    @njit(cache=True, nogil=True, _nrt=False)
    def run(state, layers, rule, events, log, times, ahead, line, totals, seconds, work, keys, journal, token):
        """Tokens from `token` on in all L layers of lane 0, until the events or the journal's room end.

        Returns (next token, moves, arrivals, row of events that was refused or -1).
        """
        _ = decision_hash
        slots = keys.shape[1]
        prefetching = ahead.names.shape[0] > 0
        pieces = ahead.window.pieces
        for layer in range(layers):
            refresh_keys(state.slots[layer], state.experts[layer], state.rows[layer], rule, keys[layer])
        moves = journal.moves
        n = arrived = 0
        while token < seconds.records.size and n + layers * 3 * slots <= moves.size:
            for layer in range(layers):
                t = token * layers + layer
                if not ready(events, t):
                    return token, n, arrived, t
                slot_row, experts, row = state.slots[layer], state.experts[layer], state.rows[layer]
                before = n
                compute_s = _compute(line, times, totals, times.layer_s)
                for i in range(line.done_count[layer]):
                    load = line.done[layer, i]
                    move = moves[n]
                    move.step, move.expert, move.victim, move.cause = row.step, load.expert, -1, ARRIVED
                    move.slot = experts[load.expert].load_slot
                    complete_load(slot_row, experts, row, load.expert)
                    journal.delay[arrived] = row.step - load.issued
                    arrived += 1
                    n += 1
                if n > before:
                    refresh_keys(slot_row, experts, row, rule, keys[layer])
                    line.done_count[layer] = 0
                for i in range(line.entries.size if prefetching else 0):
                    entry = line.entries[i]
                    transit = line.transit[0]
                    there = entry.layer == layer and entry.left == 0 and (transit.layer < 0 or transit.entry != i)
                    events.staged[t, i] = entry.expert if there else -1
                scratch = Work(
                    work.rank, work.order, work.g, work.kind, work.picked, work.picked_score, work.staged, keys[layer]
                )
                n = decide_event(slot_row, experts, row, rule, events, t, log, moves, n, scratch)
                executed, _fetched = _tally(log, totals, layer, t)
                work_s = times.layer_s + times.event_s + times.experts_s[executed]
                compute_s += _compute(line, times, totals, times.event_s)
                stall_s, records = _wait(line, times, totals, pieces, layer, moves, before, n)
                if prefetching:
                    _release(line, layer)
                    if layer < layers - 1:
                        if records == 0.0:  # else it was foretold while they were read
                            compute_s += _compute(line, times, totals, times.predict_s)
                            work_s += times.predict_s
                        plan(state.experts, layer, ahead.names[t], ahead.claims[t], ahead.window, line.entries)
                        _disown(line)
                _start(line, times, totals)
                compute_s += _compute(line, times, totals, times.experts_s[executed])
                for i in range(before, n):
                    journal.layer[i] = layer
                    if moves[i].cause == ISSUED:
                        _enqueue(line, times, totals, layer, moves[i].expert, moves[i].step)
                seconds.work_s[token] += work_s
                seconds.compute_s[token] += compute_s
                seconds.stall_s[token] += stall_s
                seconds.records[token] += records
            seconds.work_s[token] += times.token_s
            seconds.compute_s[token] += _compute(line, times, totals, times.token_s)
            token += 1
        return token, n, arrived, -1

    return run


_SOURCES = (Path(module.__file__).read_bytes() for module in (engine.decision, engine.scheduler))
run = _compiled(hashlib.sha256(b"".join(_SOURCES)).hexdigest())


def decide_by_clock(
    state: State,
    layers: int,
    rule: Rule,
    events: Events,
    log: Log,
    times: Times,
    line: Line,
    totals: Totals,
    ahead: Ahead = NOTHING_AHEAD,
) -> tuple[Seconds, list[np.ndarray], np.ndarray, int]:
    """All tokens of events [T * L], tokens outermost, in lane 0; rule.delay must be 0. Fills log, line and totals.
    A policy that prefetches has room for its staged records in events: [T * L, STAGED].

    Returns seconds, moves by layer, the delays [tokens] of the loads that arrived, and the row of events that was
    refused, or -1.
    """
    tokens, slots = len(events.chosen) // layers, state.slots.shape[1]
    seconds, keys = new_seconds(tokens), np.empty((layers, slots))
    work = make_work(events.chosen.shape[1], keys[0])
    room = tokens * layers + 6 * slots * layers
    journal = Journal(np.empty(room, MOVE), np.empty(room, np.int32), np.empty(room, np.int32))
    moves: list[list[np.ndarray]] = [[] for _ in range(layers)]
    delays, token, stopped = [], 0, -1
    while token < tokens and stopped < 0:
        token, n, arrived, stopped = run(
            state, layers, rule, events, log, times, ahead, line, totals, seconds, work, keys, journal, token
        )
        for layer in range(layers):
            moves[layer].append(journal.moves[:n][journal.layer[:n] == layer])
        delays.append(journal.delay[:arrived].copy())
    return seconds, [np.concatenate(parts) for parts in moves], np.concatenate(delays), stopped
