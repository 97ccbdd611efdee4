"""Section 3 of the design read slowly: one layer and lane with lists, sets and words, for comparison alone.

Written from the text, not from engine/decision.py: no lists kept up to date by hand, every set is computed when it is
asked for. Numbers are kept as the text asks (float32 weights, sums in float64), so that decisions can be compared
exactly. Weights of what is executed are compared to a tolerance.
"""

from __future__ import annotations

import math

import numpy as np

from engine.decision import _hash  # the random part is a number out of (seed, purpose, layer, step, expert)
from engine.policies import Policy

INFINITY = math.inf


class SlowLayer:
    """State of one layer; `event` decides one event and returns (kinds, executed, weights) in the model's order."""

    def __init__(self, policy: Policy, experts: int, top_k: int, slots: int, delay: int = 1) -> None:
        self.policy, self.E, self.K, self.S, self.delay = policy, experts, top_k, slots, delay
        self.resident: list[int | None] = [None] * slots  # by slot
        self.loading: list[int | None] = [None] * slots  # by slot
        self.due: dict[int, float] = {}
        self.last_use = [-1] * experts
        self.loaded_at = [-1] * experts
        self.demand = [0.0] * experts
        self.decayed = [0.0] * experts
        self.A = [0.0] * experts
        self.unit = 1.0
        self.account = 0.0
        self.step = 0
        self.moves: list[tuple[int, int, int, int, str]] = []  # step, expert, slot, victim, cause
        self.future: list[list[int]] = []  # belady: chosen of every event to come

    # ---- questions -----------------------------------------------------------------------------------------------
    def residents(self) -> set[int]:
        return {e for e in self.resident if e is not None}

    def pending(self) -> set[int]:
        return {e for e in self.loading if e is not None}

    def over(self) -> set[int]:
        beta = INFINITY if self.policy.beta is None else self.policy.beta
        return {e for e in range(self.E) if self.A[e] >= beta} - self.residents() - self.pending()

    def _next_demand(self, e: int) -> float:
        for step in range(self.step + 1, len(self.future)):
            if e in self.future[step]:
                return step
        return INFINITY

    def _eviction_score(self, e: int) -> float:
        name = self.policy.eviction
        if name == "belady":
            return -self._next_demand(e)
        if name == "random":
            return _hash(self.policy.seed, 1, 0, self.step, e)
        return {"fifo": self.loaded_at, "lfu": self.demand, "lfu_decay": self.decayed, "lru": self.last_use}[name][e]

    # ---- movements -----------------------------------------------------------------------------------------------
    def _take_slot(self, used: set[int]) -> tuple[int, int] | None:
        """A free slot, else the victim's; (slot, victim or -1)."""
        for slot in range(self.S):
            if self.resident[slot] is None and self.loading[slot] is None:
                return slot, -1
        candidates = self.residents() - used
        if not candidates:
            return None
        victim = min(candidates, key=lambda e: (self._eviction_score(e), self.last_use[e], e))
        slot = self.resident.index(victim)
        self.resident[slot] = None
        return slot, victim

    def _arrive(self, e: int, cause: str) -> None:
        slot = self.loading.index(e)
        self.loading[slot] = None
        del self.due[e]
        self.resident[slot] = e
        self.loaded_at[e] = self.step
        self.moves.append((self.step, e, slot, -1, cause))

    # ---- one event -----------------------------------------------------------------------------------------------
    def event(self, chosen, weights, scores, logits):
        policy = self.policy
        chosen = [int(e) for e in chosen]
        for e in sorted(self.pending()):
            if self.due[e] <= self.step:
                self._arrive(e, "arrived")
        # 1
        by_rank = sorted(chosen, key=lambda e: (-float(scores[e]), e))
        weight = dict(zip(chosen, weights, strict=True))
        total = np.float32(0)
        for e in by_rank:
            total = np.float32(total + weight[e])
        g = {e: float(np.float32(weight[e] / total)) for e in chosen}
        # 2
        kind = {e: "hit" if e in self.residents() else "fetch" for e in chosen}
        hits = {e for e in chosen if kind[e] == "hit"}
        # 3
        misses = [e for e in by_rank if kind[e] == "fetch"]
        pays = policy.miss_rule in ("few_heavy", "many_light")
        if pays:
            self.account += policy.share
        if policy.miss_rule == "threshold":
            for e in misses:
                if e != by_rank[0] and not g[e] >= policy.tau:
                    kind[e] = "substitute"
        elif policy.miss_rule == "substitute_all":
            for e in misses:
                kind[e] = "substitute"
        elif policy.miss_rule == "mass_budget":
            spent = 0.0
            for e in sorted(misses, key=lambda e: (g[e], -by_rank.index(e))):
                if spent + g[e] > policy.share:
                    break
                spent += g[e]
                kind[e] = "substitute"
        elif pays:
            heavy, left = policy.miss_rule == "few_heavy", self.account
            tau = np.float32(policy.tau)
            mine = [e for e in misses if e != by_rank[0] and (g[e] >= tau) == heavy]
            wish = {e: (-g[e], by_rank.index(e)) if heavy else (g[e], -by_rank.index(e)) for e in mine}
            for e in sorted(mine, key=wish.get):
                if g[e] > left:
                    break
                left -= g[e]
                kind[e] = "substitute"
        elif policy.miss_rule == "drop":
            for e in misses:
                kind[e] = "drop"
            if not hits:
                kind[by_rank[0]] = "fetch"
        # 4
        standin: dict[int, int] = {}
        for e in by_rank:
            if kind[e] != "substitute":
                continue
            free = self.residents() - set(chosen) - set(standin.values())
            if not free:
                kind[e] = "fetch"
            elif policy.standin == "next_best":
                standin[e] = min(free, key=lambda r: (-float(scores[r]), r))
            else:
                standin[e] = min(free, key=lambda r: (-_hash(policy.seed, 2, 0, self.step, r), r))
        for e in standin if pays else ():
            self.account -= g[e]
        # 5
        used = hits | set(standin.values())
        for e in by_rank:
            if kind[e] != "fetch":
                continue
            if policy.eviction == "frozen":
                kind[e] = "in_place"
                continue
            if e in self.pending():
                self._arrive(e, "promoted")
            else:
                slot, victim = self._take_slot(used)
                self.resident[slot] = e
                self.loaded_at[e] = self.step
                self.moves.append((self.step, e, slot, victim, "fetched"))
            used.add(e)
        # 6
        for e in chosen:
            self.demand[e] += 1
            self.decayed[e] += self.unit
            if kind[e] in ("hit", "fetch"):
                self.last_use[e] = self.step
                self.A[e] = 0.0
            else:
                self.A[e] += g[e]
                if kind[e] == "in_place":
                    self.last_use[e] = self.step
        if policy.standin_recency:
            for r in standin.values():
                self.last_use[r] = self.step
        if policy.half_life_tokens:
            self.unit *= 2.0 ** (1.0 / policy.half_life_tokens)
        # 7
        while self.over() and len(self.pending()) < self.S - self.K:
            e = min(self.over(), key=lambda e: (-self.A[e], e))
            taken = self._take_slot(used)
            if taken is None:
                break
            slot, victim = taken
            self.loading[slot] = e
            self.due[e] = self.step + self.delay if self.delay else INFINITY
            self.A[e] = 0.0
            self.moves.append((self.step, e, slot, victim, "issued"))
        # 8
        executed = [standin.get(e, -1 if kind[e] == "drop" else e) for e in chosen]
        new = []
        for e, runs in zip(chosen, executed, strict=True):
            w = float(weight[e])
            if kind[e] == "drop":
                w = 0.0
            elif kind[e] == "substitute" and policy.standin_weight == "own":
                w *= math.exp(float(logits[runs]) - float(logits[e]))
            new.append(w)
        own = policy.standin_weight == "own" and "substitute" in kind.values()
        if own or (policy.renormalise and "drop" in kind.values()):
            scale = sum(float(w) for w in weights) / sum(new)
            new = [w * scale for w in new]
        self.step += 1
        return [kind[e] for e in chosen], executed, new
