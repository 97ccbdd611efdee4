"""Prefetching in the engine: who is on the way into which staging row, and what an event takes of it.

A predictor names the experts of the next layers, the scheduler (engine/scheduler.py) grants pieces of their records to
the link, and they arrive in the staging rows, which no slot is. Nothing that is resident moves for it. Once an event
fetches an expert that has come, wholly or in part, its staging row becomes the slot's row; what an event leaves is
dropped. So under a `fetch` rule the decisions and the output are those without prefetching, whatever was predicted.

    ahead = Prefetching(predictor, window, slots, link, failures)
    staged = ahead.due(layer)                       # [1, R], for the decision
    taken = ahead.take(layer, expert, slot)         # of every expert that it fetches: its new row, and what it lacks
    ahead.drop(layer)                               # the others were named in vain
    ahead.foretell(call)                            # at the latest by `plan`
    ahead.plan(call, residency.state.experts)       # once the event has what it runs, before it is computed
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.errors import error
from engine.hook import Call
from engine.link import Link, Prefetch
from engine.policies import Policy
from engine.predictors import Predictor
from engine.record import divisible, pieces_of
from engine.scheduler import Window, new_entries, plan
from engine.slots import Slots


class Taken(NamedTuple):
    row: int  # of the slot from now on
    left: int  # the row that it was, which stages from now on
    first: int  # byte of the record at which begins what has not come


class Prefetching:
    """What is on the way for one predictor and window. A row of `entries` is a staging row of the slots."""

    def __init__(self, predictor: Predictor, window: Window, slots: Slots, link: Link, failures: list[str]) -> None:
        """failures: told of pieces that failed."""
        self._predictor, self._slots, self._link, self._failures = predictor, slots, link, failures
        self._parts = pieces_of(slots.layout.record_bytes, window.pieces if divisible(link.store) else 1)
        record_s, pieces = window.piece_s * window.pieces, len(self._parts)
        self._window = window._replace(pieces=pieces, piece_s=record_s / pieces)
        self._entries = new_entries(len(slots.staging_rows))
        self._coming: list[Prefetch | None] = [None] * len(self._entries)
        self._named: tuple[np.ndarray, np.ndarray] | None = None  # what this event's anchor says
        self.clear()

    def clear(self) -> None:
        """Count anew."""
        self.dropped_pieces = 0  # that came and were not needed
        self.taken_bytes = 0  # that had come of what was fetched

    # ---- an event ----------------------------------------------------------------------------------------------------
    def due(self, layer: int) -> np.ndarray:
        """[1, R] int32: experts of this layer that are wholly there, -1 none. No further piece for it starts."""
        self._look()
        staged = np.full((1, len(self._coming)), -1, np.int32)
        for i in self._of(layer):
            self._link.halt(self._coming[i])
            if self._coming[i].whole:
                staged[0, i] = self._coming[i].expert
        return staged

    def take(self, layer: int, expert: int, slot: int) -> Taken | None:
        """The expert enters the slot with what has come of it; None: nothing has."""
        i = next((i for i in self._of(layer) if self._coming[i].expert == expert), None)
        if i is None:
            return None
        coming = self._coming[i]
        self._link.settle(coming)
        if coming.error or not coming.here:
            return None  # `drop` sees to it
        self._free(i)
        row, left = self._slots.exchange(layer, slot, i)
        first = self._parts[coming.here - 1][1]
        self.taken_bytes += first
        return Taken(row, left, first)

    def drop(self, layer: int) -> None:
        """The event of this layer has passed."""
        self._look()
        for i in self._of(layer):
            self.dropped_pieces += self._coming[i].here
            self._free(i)

    def drop_all(self) -> None:
        """Nothing is on the way any more but a piece in transit, for which every fetch waits."""
        self._named = None
        self._link.schedule([])
        for i, coming in enumerate(self._coming):
            if coming:
                self.dropped_pieces += coming.here
                self._free(i)

    # ---- the agenda --------------------------------------------------------------------------------------------------
    def foretell(self, call: Call) -> None:
        """What the next layers will choose; while the event's own records are read, if some are."""
        if call.layer + 1 < self._predictor.layers:
            self._named = self._predictor.names(call.layer, call.router_input, self._window.names + 1)  # [H, N]

    def plan(self, call: Call, experts: np.ndarray) -> None:
        """Tell the link what may start until the next event. experts [L, E] EXPERT of the residency."""
        if self._named is None:
            self.foretell(call)
        if self._named is not None:
            self._look()
            plan(experts, call.layer, *self._named, self._window, self._entries)
            self._link.schedule(self._agenda())
        self._named = None
        self._predictor.observe(call.layer, call.index)

    def _agenda(self) -> list[tuple[Prefetch, int]]:
        granted = []
        for i, (layer, expert, _left, pieces, order, _claim) in enumerate(self._entries.tolist()):
            if layer < 0:
                continue
            coming = self._coming[i]
            if coming is None or (coming.layer, coming.expert) != (layer, expert):
                self.dropped_pieces += coming.here if coming else 0  # its row was given away
                row = int(self._slots.staging_rows[i])
                places = self._slots.places(row, layer, expert, self._parts)
                self._coming[i] = coming = Prefetch(layer, expert, len(self._parts), places)
            if pieces:
                granted.append((order, coming, pieces))
        return [(coming, pieces) for _, coming, pieces in sorted(granted, key=lambda one: one[0])]

    def observe(self, call: Call) -> None:
        """A call that is not predicted from: prefill."""
        self._predictor.observe(call.layer, call.index)

    def new_sequence(self) -> None:
        self._predictor.reset()

    # ---- rows --------------------------------------------------------------------------------------------------------
    def _of(self, layer: int) -> list[int]:
        return [i for i, coming in enumerate(self._coming) if coming and coming.layer == layer]

    def _free(self, i: int) -> None:
        self._coming[i] = None
        self._entries[i : i + 1] = new_entries(1)

    def _look(self) -> None:
        """What has come by now, and what has failed."""
        for i, coming in enumerate(self._coming):
            if coming is None:
                continue
            if coming.error:
                self._failures.append(f"layer {coming.layer}, expert {coming.expert}: {coming.error}")
                self.dropped_pieces += coming.here
                self._free(i)
            else:
                self._entries[i]["left"] = len(self._parts) - coming.begun


def check_prefetch(policy: Policy, predictor: Predictor | None, window: Window | None) -> None:
    """UserError where a policy that prefetches lacks what it needs."""
    if predictor is None or window is None:
        missing = [name for name, given in (("predictor", predictor), ("window", window)) if given is None]
        raise error(
            f"policy '{policy.id}' (prefetch {policy.prefetch}) without a {' and a '.join(missing)}",
            "both",
            "give those of engine.predictors.make_predictor and engine.timing.Timing.window",
        )
    if predictor.kind != policy.prefetch:
        raise error(f"policy '{policy.id}' with a predictor of kind {predictor.kind}", policy.prefetch, "give that one")
