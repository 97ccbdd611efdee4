"""Which experts are resident: the state of every (lane, layer) and its public edge to the decision.

`Residency` owns the record arrays of engine.decision.State and checks shapes once; `decide` runs the compiled scan on
one row. It starts `warm` (the S experts of highest calibration demand, the same for every policy) or `cold` (empty).

    residency = Residency(layers=4, experts=256, top_k=10, slots=64, rule=policy.rule())
    residency.warm(demand)                                  # demand: Demand of the calibration text
    log, moves = residency.decide(0, layer, chosen, weights, scores, logits)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from engine.decision import EXPERT, MISS_RULES, ROW, SLOT, STANDINS, Events, Log, Rule, State, scan
from engine.errors import UserError, error

_UNLINKED = np.empty((0, 0), np.int32)


@dataclass(frozen=True)
class Demand:
    """How often calibration text chooses each expert: counts [L, E] over `events` events a layer."""

    counts: np.ndarray
    events: int

    @property
    def rate(self) -> np.ndarray:
        return self.counts / self.events


def slots_from_percent(experts: int, percent: float) -> int:
    """S of a share of E, rounded down (a budget is not exceeded)."""
    return int(experts * percent / 100)


def parse_slots(text: str | int, experts: int) -> int:
    """S from `64` (slots a layer) or `25%` (share of E), as a command line has it."""
    number, percent, rest = str(text).partition("%")
    try:
        if rest or not 0 < float(number) < math.inf:
            raise ValueError
        return slots_from_percent(experts, float(number)) if percent else int(number)
    except ValueError:
        raise error(f"slots={text}", "slots a layer, as 64, or a share of the experts, as 25%", "mend it") from None


def check_slots(slots: int, experts: int, top_k: int) -> None:
    """Refuse S < K and S > E."""
    if not top_k <= slots <= experts:
        raise error(
            f"{slots} slots a layer",
            f"from K = {top_k} (one event must fit) to E = {experts}",
            "choose another share of slots",
        )


def needs_scores(rule: Rule) -> bool:
    """Whether a decision reads scores of experts that were not chosen: of the best stand-in, or for its own weight."""
    substitutes = rule.miss not in (MISS_RULES["drop"], MISS_RULES["fetch"])
    return substitutes and (rule.standin == STANDINS["next_best"] or rule.own_weights)


class Residency:
    """State of `lanes` x `layers` rows under one rule. Not thread-safe; rows are independent."""

    def __init__(self, *, layers: int, experts: int, top_k: int, slots: int, rule: Rule, lanes: int = 1) -> None:
        check_slots(slots, experts, top_k)
        self.layers, self.experts, self.top_k, self.slots, self.lanes = layers, experts, top_k, slots, lanes
        self.rule = rule
        self.cold()

    # ---- starts --------------------------------------------------------------------------------------------------
    def cold(self) -> None:
        """All slots free, all counts zero."""
        rows = self.lanes * self.layers
        slots = np.zeros((rows, self.slots), SLOT)
        experts = np.zeros((rows, self.experts), EXPERT)
        row = np.zeros(rows, ROW)
        slots["expert"] = slots["load"] = -1
        for field in ("slot", "load_slot", "in_use", "last_used", "loaded_at"):
            experts[field] = -1
        row["unit"] = 1.0
        row["free"] = self.slots
        row["layer"] = np.tile(np.arange(self.layers), self.lanes)
        self._begin(State(slots, experts, row))

    def warm(self, demand: Demand) -> None:
        """The S experts of highest calibration demand resident (ties: lower id), counters at their long-run value.

        A decayed counter holds rate / (1 - 1/growth) in the long run; a plain one, which has no such limit, starts at
        the calibration's own counts. `A` is zero.
        """
        if demand.counts.shape != (self.layers, self.experts):
            raise error(
                f"calibration demand of shape {demand.counts.shape}",
                f"[L, E] = {(self.layers, self.experts)}",
                "calibrate on this model",
            )
        self.cold()
        state, growth = self.state, self.rule.growth
        ranking = np.argsort(-demand.counts, axis=1, kind="stable")[:, : self.slots].astype(np.int32)  # [L, S]
        decayed = demand.rate / (1.0 - 1.0 / growth) if growth > 1.0 else np.zeros_like(demand.rate)
        for r in range(self.lanes * self.layers):
            layer = r % self.layers
            state.slots[r]["expert"] = ranking[layer]
            state.experts[r]["slot"][ranking[layer]] = np.arange(self.slots, dtype=np.int32)
            state.experts[r]["demand"] = demand.counts[layer]
            state.experts[r]["decayed"] = decayed[layer]
        state.rows["free"] = 0
        self._begin(state)

    def _begin(self, state: State) -> None:
        """This is the state now, and what `restart` goes back to."""
        self.state = state
        self._start = State(*(array.copy() for array in state))

    def restart(self, lane: int) -> None:
        """Put one lane back to its start, warm or cold (continuity `restart`)."""
        self._row(lane, 0)
        rows = slice(lane * self.layers, (lane + 1) * self.layers)
        for array, start in zip(self.state, self._start, strict=True):
            array[rows] = start[rows]

    def _row(self, lane: int, layer: int) -> int:
        """Row of the state; the kernel does not check bounds."""
        if not (0 <= lane < self.lanes and 0 <= layer < self.layers):
            found = f"lane {lane}, layer {layer}"
            raise error(found, f"lanes below {self.lanes} and layers below {self.layers}", "open enough lanes")
        return lane * self.layers + layer

    # ---- the decision --------------------------------------------------------------------------------------------
    def decide(
        self,
        lane: int,
        layer: int,
        chosen: np.ndarray,
        weights: np.ndarray,
        scores: np.ndarray | None,
        logits: np.ndarray | None = None,
        *,
        chosen_scores: np.ndarray | None = None,
        staged: np.ndarray | None = None,
        rule: Rule | None = None,
    ) -> tuple[Log, np.ndarray]:
        """The events of one lane and layer in order.

        chosen [T, K] integers in the model's own order, weights [T, K] gate weights, scores [T, E] selection scores,
        logits [T, E] router logits (default: the scores). Without scores, `chosen_scores` [T, K] will do for a rule
        that reads no others (`needs_scores`). staged [T, N]: experts whose records a prefetch has brought by that
        event, best first, -1 none. rule: another than the residency's own (prefill). Returns the decision log and the
        moves. Raises UserError on non-finite weights or a shape that does not fit.
        """
        row = self._row(lane, layer)
        rule = self.rule if rule is None else rule
        events, log = self._arrays(np.shape(chosen)[:1], chosen, weights, scores, logits, chosen_scores, rule, staged)
        moves = self._scan(row, rule, events, log, 0, 1, _UNLINKED)
        return log, moves

    def decide_layers(
        self,
        lane: int,
        chosen: np.ndarray,
        weights: np.ndarray,
        scores: np.ndarray | None,
        logits: np.ndarray | None = None,
        *,
        chosen_scores: np.ndarray | None = None,
        staged: np.ndarray | None = None,
        linked: list[np.ndarray] | None = None,
    ) -> tuple[Log, list[np.ndarray]]:
        """The events of one lane in all layers, the layers one after another over arrays that are not copied.

        As `decide`, with an axis of layers: chosen, weights, chosen_scores [T, L, K], scores and logits [T, L, E],
        staged [T, L, N]; the log has it too, the moves are a list by layer. linked: for belady over a part of a trace,
        [T, K] a layer.
        """
        events, log = self.arrays(chosen, weights, scores, logits, chosen_scores, staged)
        moves = []
        for layer in range(self.layers):
            future = _UNLINKED if linked is None else linked[layer]
            moves.append(self._scan(self._row(lane, layer), self.rule, events, log, layer, self.layers, future))
        return Log(*(array.reshape(len(chosen), self.layers, *array.shape[1:]) for array in log)), moves

    def arrays(self, chosen, weights, scores, logits=None, chosen_scores=None, staged=None) -> tuple[Events, Log]:
        """The arguments of `decide_layers`, checked, as the decision's own arrays [T * L, ...], and an empty log."""
        shape = (len(chosen), self.layers)
        return self._arrays(shape, chosen, weights, scores, logits, chosen_scores, self.rule, staged)

    def _arrays(self, shape, chosen, weights, scores, logits, chosen_scores, rule, staged) -> tuple[Events, Log]:
        """shape: of events, (T,) or (T, L). UserError on arrays that do not fit it."""
        axes = "T, L" if len(shape) == 2 else "T"
        events = math.prod(shape)
        chosen = _own(chosen, np.int32)
        weights = _own(weights, np.float32)
        if chosen.shape != (*shape, self.top_k) or weights.shape != chosen.shape:
            raise error(
                f"chosen {chosen.shape} and weights {weights.shape}",
                f"[{axes}, {self.top_k}]",
                "pass one layer's events" if len(shape) == 1 else "pass all layers' events",
            )
        if events and not 0 <= chosen.min() <= chosen.max() < self.experts:
            raise error(
                f"expert ids from {chosen.min()} to {chosen.max()}", f"0 to {self.experts - 1}", "check the router"
            )
        if scores is None:
            if chosen_scores is None or needs_scores(rule):
                raise error("no selection scores", "scores [T, E] for a rule that reads them", "record them")
            scores = logits = np.empty((events, 0), np.float32)
        else:
            scores = _own(scores, np.float32)
            logits = scores if logits is None else _own(logits, np.float32)
            if scores.shape != (*shape, self.experts) or logits.shape != scores.shape:
                raise error(
                    f"scores {scores.shape}", f"[{axes}, E] = {(*shape, self.experts)}", "pass one layer's events"
                )
            chosen_scores = np.empty(chosen.shape, np.float32)
        chosen_scores = _own(chosen_scores, np.float32)
        if chosen_scores.shape != chosen.shape:
            raise error(
                f"chosen_scores {chosen_scores.shape}", f"as chosen, {chosen.shape}", "pass one a chosen expert"
            )
        staged = np.empty((*shape, 0), np.int32) if staged is None else _own(staged, np.int32)
        if staged.shape[:-1] != shape or (staged.size and not -1 <= staged.min() <= staged.max() < self.experts):
            raise error(
                f"staged {staged.shape}", f"[{axes}, N] of ids below {self.experts}", "pass one row an event, -1 none"
            )
        log = Log(
            executed=np.empty((events, self.top_k), np.int32),
            weights=np.empty((events, self.top_k), np.float32),
            kind=np.empty((events, self.top_k), np.int8),
            first=np.empty(events, np.int8),
            g=np.empty((events, self.top_k), np.float32),
        )
        wanted = (chosen, chosen_scores, weights, scores, logits, staged)
        return Events(*(array.reshape(events, array.shape[-1]) for array in wanted)), log

    def _scan(self, row, rule, events, log, first, stride, linked) -> np.ndarray:
        moves, stopped = scan(self.state, row, rule, events, log, first, stride, linked)
        if stopped >= 0:
            raise stopped_at(stopped, row % self.layers)
        return moves


def _own(array: np.ndarray, dtype: type) -> np.ndarray:
    """As the compiled code takes it; a copy only where it is not: another layout or a read-only array compiles anew."""
    return np.require(array, dtype, ["C", "W"])


def stopped_at(event: int, layer: int) -> UserError:
    """What to tell a user about an event that the decision refused."""
    return error(
        f"event {event} of layer {layer}: router output that is not finite, weights that sum to zero, or an "
        "expert chosen twice",
        "finite scores, a positive sum of weights, K distinct experts",
        "check the checkpoint or trace",
    )
