"""The scheduler: which records does the link bring before they are asked for, and how much of each?

Once an event has what it runs, the link is free until the next layer has routed and knows what it misses. `plan` fills
that window: it takes what a predictor names for the next layers, and grants pieces of records to a link that passes
them one after another. Ours: the paper's released material does not hold its scheduler.

    plan(state.experts, layer, names, claims, window, entries)        # entries: a row beside the slots each

* Candidates: at most `window.names` a layer by falling claim, those that are neither resident nor pending; the nearer
  layer first. A row that already holds or awaits a candidate keeps it.
* `bounded`: a piece is granted only if it is expected to end before its layer has routed, counted from now, all granted
  before it included. What no longer fits is late: it gets nothing, and the event of its layer drops it. Nor is one
  granted that costs the compute beside it more than it is expected to save, its claim times its share of a fetch.
* A candidate without a row takes a free one, else that of what is not a candidate any more, else that of the last
  candidate behind it: of a farther layer, whatever its chance, because it is needed later and named again before, or of
  the same layer with a lower claim. No resident loses its slot: only the event that chooses an expert gives it one.

Axes: R rows, H horizons, N names, L layers, E experts. Written once for simulator and engine; knows no clock.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

HORIZONS = 2  # H: layers ahead that a predictor looks
ENTRY = np.dtype(
    [
        ("layer", np.int32),  # -1: the row is free
        ("expert", np.int32),
        ("left", np.int32),  # pieces that have not begun; 0, and none in transit: it is there
        ("granted", np.int32),  # of these, pieces that may pass until the next plan
        ("order", np.int32),  # place among the candidates, in which the rows pass; -1: none of them
        ("claim", np.float64),
    ],
    align=True,
)


class Window(NamedTuple):
    """What a plan may count on; made by engine.timing."""

    window_s: np.ndarray  # [H], from the end of an event's fetches until layer + 1, layer + 2, ... has routed
    piece_s: float  # one piece, beside compute
    pieces: int  # of a record
    names: int  # at most so many candidates a layer
    bounded: bool  # by the window
    saved_s: float = 0.0  # of the foreground, by a piece that is taken
    cost_s: float = 0.0  # to the compute, by a piece that passes beside it


def new_entries(rows: int) -> np.ndarray:
    """[R] ENTRY, all free."""
    entries = np.zeros(rows, ENTRY)
    entries["layer"] = entries["expert"] = entries["order"] = -1
    return entries


@njit(cache=True, inline="always")
def release(entry):
    entry.layer = entry.expert = entry.order = -1
    entry.left = entry.granted = 0


@njit(cache=True, inline="always")
def _find(entries, layer, e):
    for i in range(entries.size):
        if entries[i].layer == layer and entries[i].expert == e:
            return i
    return -1


@njit(cache=True, inline="always")
def _row_for(entries, order):
    """Index of the row that the candidate of this order may take, or -1."""
    best = -1
    for i in range(entries.size):
        if entries[i].layer < 0:
            return i
        unclaimed, behind = entries[i].order < 0, entries[i].order > order
        if unclaimed or (behind and (best < 0 or 0 <= entries[best].order < entries[i].order)):
            best = i
    return best


@njit(cache=True, nogil=True)
def plan(experts, layer, names, claims, window, entries):
    """Rewrite entries [R] for what is known once layer `layer` has its experts.

    experts [L, E] of State, the rows of one lane; names [H, N] experts of layer + 1, ... by falling claim, -1 none;
    claims [H, N] in [0, 1], the chance that the layer chooses it.
    """
    for i in range(entries.size):
        entries[i].granted = 0
        entries[i].order = -1
    horizons = min(window.window_s.size, names.shape[0], experts.shape[0] - 1 - layer)
    most = min(window.names, names.shape[1])
    for h in range(horizons):
        for n in range(most):
            at = _find(entries, layer + 1 + h, names[h, n])
            if at >= 0:
                entries[at].order = h * most + n
    used_s = 0.0
    for order in range(horizons * most):
        h, n = order // most, order % most
        target, e = layer + 1 + h, names[h, n]
        if e < 0 or experts[target, e].slot >= 0 or experts[target, e].load_slot >= 0:
            continue
        at = _find(entries, target, e)
        granted = window.pieces if at < 0 else entries[at].left
        if window.bounded:
            if claims[h, n] * window.saved_s < window.cost_s:
                continue
            granted = min(granted, max(0, int((window.window_s[h] - used_s) / window.piece_s)))
        if at < 0:
            at = _row_for(entries, order) if granted > 0 else -1
            if at < 0:
                continue
            entry = entries[at]
            entry.layer, entry.expert, entry.left, entry.order = target, e, window.pieces, order
        entries[at].granted, entries[at].claim = granted, claims[h, n]
        used_s += granted * window.piece_s
