"""The decision: what one event does about its misses. Written once, run by emulator, simulator and engine.

An event is one (token, MoE layer) with its whole top-K. `scan` takes the events of one layer and lane in order (the
model's chosen experts, their weights and scores) and fills a decision log: what is executed instead, with which
weights, and every movement of an expert. All it remembers lies in `State`. It knows no model, device, clock or file:
when a background load completes is counted in steps (`Rule.delay`) or told from outside (`complete_load`). The
numbers in `decide_event` are the steps of one event in the documentation (docs/decision.md).

    moves, stopped = scan(state, row, rule, events, log)

Axes: G rows of state (lane x layer), T events, E experts, K chosen an event, S slots. The lowest eviction score leaves
first; every tie ends at the lower expert id, so a run is a pure function of its inputs. Everything compiled lies in
this one file because numba's cache on disk watches a function's own file alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

# ---- the sheets' words as codes -------------------------------------------------------------------------------------
MISS_RULES = {
    "drop": 0,
    "fetch": 1,
    "few_heavy": 5,
    "many_light": 6,
    "mass_budget": 2,
    "substitute_all": 3,
    "threshold": 4,
}
STANDINS = {"next_best": 0, "random": 1}
EVICTIONS = {"belady": 0, "fifo": 1, "frozen": 6, "lfu": 2, "lfu_decay": 3, "lru": 4, "random": 5}

HIT, FETCH, SUBSTITUTE, DROP, IN_PLACE = 0, 1, 2, 3, 4  # kind of an entry of the decision log
# causes of a move: fetched now / a pending load promoted / a background load issued / it arrived / fetched from where a
# prefetch had brought it
FETCHED, PROMOTED, ISSUED, ARRIVED, TAKEN = 0, 1, 2, 3, 4
CAUSES = 5
STAGED = 4  # records that prefetches may have brought for one event: rows beside the slots of all layers
NEVER = np.int32(2**31 - 1)  # due step of a load completed from outside; next use of an expert not used again
_RESCALE = 2.0**500  # decayed counters are divided by this, exactly, before their unit overflows

# ---- state: three record arrays, every field the kernel's to write --------------------------------------------------
SLOT = np.dtype(
    [
        ("expert", np.int32),  # the resident, or -1
        ("load", np.int32),  # the expert whose load is pending into this slot, or -1
        ("pending", np.int32),  # a list apart: entry i is the i-th pending expert, i < row.pending
    ],
    align=True,
)
EXPERT = np.dtype(  # 56 bytes: what one event asks of an expert lies together
    [
        ("slot", np.int32),  # where it is resident, or -1
        ("load_slot", np.int32),  # where its load is pending, or -1
        ("due", np.int32),  # step at which that load completes
        ("in_use", np.int32),  # last step in which an event hit, fetched or borrowed it
        ("last_used", np.int32),  # step of its last execution, -1 never
        ("loaded_at", np.int32),  # step at which it entered its slot, -1 at the start
        ("next_use", np.int32),  # step of its next demand (belady only)
        ("over", np.int32),  # a list apart: entry i is the i-th absent expert with A >= beta, i < row.over
        ("demand", np.float64),  # how often chosen; kept across evictions, like the next two
        ("decayed", np.float64),  # the same with a half-life, in units of row.unit
        ("missing_mass", np.float64),  # A[e]
    ],
    align=True,
)
ROW = np.dtype(
    [
        ("unit", np.float64),  # what one demand adds to `decayed` at this step
        ("account", np.float64),  # few_heavy, many_light: mass that may still be substituted
        ("step", np.int32),  # events so far
        ("layer", np.int32),
        ("free", np.int32),  # slots with neither resident nor pending load
        ("pending", np.int32),
        ("over", np.int32),
    ],
    align=True,
)
MOVE = np.dtype(
    [
        ("step", np.int32),
        ("expert", np.int32),
        ("slot", np.int32),
        ("victim", np.int32),  # who leaves the slot for it, -1 nobody
        ("cause", np.int32),
    ],
    align=True,
)


class State(NamedTuple):
    """Slots and statistics of G rows; made by engine.residency."""

    slots: np.ndarray  # [G, S] SLOT
    experts: np.ndarray  # [G, E] EXPERT
    rows: np.ndarray  # [G] ROW


class Rule(NamedTuple):
    """A policy as numbers; made by engine.policies from a row of the sheet."""

    miss: int
    tau: float  # threshold on g, in (0, inf]; a float32 value, as g is
    share: float  # mass_budget: share of the token's mass; few_heavy, many_light: what an event adds to the account
    standin: int
    eviction: int
    growth: float  # 2 ** (1 / half-life in events)
    beta: float  # background admission threshold, inf: none
    delay: int  # events until a background load completes, 0: told from outside
    own_weights: bool  # stand-ins get the model's own weight and the row is rescaled; else the missing expert's
    sigmoid: bool  # the model turns logits into weights by a sigmoid, not a softmax
    renormalise: bool  # drop: rescale the rest to the row's former sum
    standin_recency: bool  # standing in counts as use for recency
    seed: int


class Events(NamedTuple):
    """What the model wants, in its own order. Scores and logits may have width 0 where nothing is substituted."""

    chosen: np.ndarray  # [T, K] int32
    chosen_scores: np.ndarray  # [T, K] float32, their selection scores; filled by `scan` where it has all scores
    weights: np.ndarray  # [T, K] float32, gate weights
    scores: np.ndarray  # [T, E] float32, selection scores
    logits: np.ndarray  # [T, E] float32, router logits
    staged: np.ndarray  # [T, N] int32, whose records a prefetch has brought, best first, -1; width 0: none ever


class Work(NamedTuple):
    """Scratch, made once a scan: of one event [K], by rank where it does not say otherwise; of one row of state [S]."""

    rank: np.ndarray  # int64, rank of each position
    order: np.ndarray  # int64, position of each rank
    g: np.ndarray  # float32, normalised gate weight
    kind: np.ndarray  # int64
    picked: np.ndarray  # int64, stand-ins, best first
    picked_score: np.ndarray  # float64
    staged: np.ndarray  # bool
    keys: np.ndarray  # [S] float64, eviction score of the resident; inf: none, or this event uses it


class Log(NamedTuple):
    """The decision log: what is executed, position by position of `Events`."""

    executed: np.ndarray  # [T, K] int32, -1 dropped
    weights: np.ndarray  # [T, K] float32
    kind: np.ndarray  # [T, K] int8, HIT | FETCH | SUBSTITUTE | DROP | IN_PLACE
    first: np.ndarray  # [T] int8, position of the first choice
    g: np.ndarray  # [T, K] float32, normalised gate weights of the chosen


# ---- slots ----------------------------------------------------------------------------------------------------------
@njit(cache=True, inline="always")
def _hash(seed, salt, layer, step, expert):
    """A number in [0, 1) that depends on its arguments alone (splitmix64's finaliser over their mix)."""
    x = np.uint64(seed) + np.uint64(salt) * np.uint64(0x9E3779B97F4A7C15)
    for part in (np.uint64(layer), np.uint64(step), np.uint64(expert)):
        x = (x ^ part) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return np.float64(x >> np.uint64(11)) * 2.0**-53


@njit(cache=True, inline="always")
def _eviction_score(expert, e, row, rule):
    """Of the resident `e`, whose record is `expert`; the lowest leaves first."""
    if rule.eviction == 3:  # lfu_decay: all in one unit, so no counter need be decayed to compare
        return expert.decayed
    if rule.eviction == 4:  # lru
        return np.float64(expert.last_used)
    if rule.eviction == 2:  # lfu
        return expert.demand
    if rule.eviction == 1:  # fifo
        return np.float64(expert.loaded_at)
    if rule.eviction == 0:  # belady: the farthest next demand leaves first
        return -np.float64(expert.next_use)
    if rule.eviction == 5:  # random
        return _hash(rule.seed, 1, row.layer, row.step, e)
    return 0.0  # frozen: nobody leaves


@njit(cache=True)
def refresh_keys(slots, experts, row, rule, keys):
    """Keys of one row, from its state: before its first event, and after `complete_load`."""
    for slot in range(slots.size):
        e = slots[slot].expert
        keys[slot] = np.inf
        if e >= 0 and experts[e].in_use != row.step:
            keys[slot] = _eviction_score(experts[e], e, row, rule)


@njit(cache=True, fastmath={"nnan", "nsz"}, _nrt=False)
def _lowest(keys):
    """Four chains, so that a comparison need not wait for the one before it. fastmath: no key is NaN."""
    quarter = keys.size // 4
    a = b = c = d = np.inf
    for i in range(quarter):
        a = min(a, keys[i])
        b = min(b, keys[quarter + i])
        c = min(c, keys[2 * quarter + i])
        d = min(d, keys[3 * quarter + i])
    for i in range(4 * quarter, keys.size):
        a = min(a, keys[i])
    return min(min(a, b), min(c, d))


@njit(cache=True, inline="always")
def _find_victim(slots, experts, row, rule, keys):
    """Slot of the resident with the lowest (score, last use, id) among those this event does not use, or -1."""
    if rule.eviction == 5:  # random: another number every step
        for slot in range(slots.size):
            if keys[slot] < np.inf:
                keys[slot] = _eviction_score(experts[slots[slot].expert], slots[slot].expert, row, rule)
    lowest = _lowest(keys)
    best = -1
    best_slot = -1
    if lowest < np.inf:
        for slot in range(slots.size):
            if keys[slot] == lowest:
                e = slots[slot].expert
                if best >= 0:
                    used, best_used = experts[e].last_used, experts[best].last_used
                    if used > best_used or (used == best_used and e > best):
                        continue
                best, best_slot = e, slot
    return best_slot


@njit(cache=True, inline="always")
def _vacate(slots, experts, row, rule, keys):
    """A slot to load into: (free slot, -1), else (the victim's slot, victim), else (-1, -1)."""
    if row.free > 0:
        for slot in range(slots.size):
            if slots[slot].expert < 0 and slots[slot].load < 0:
                row.free -= 1
                return slot, -1
    slot = _find_victim(slots, experts, row, rule, keys)
    if slot < 0:
        return -1, -1
    victim = slots[slot].expert
    slots[slot].expert = -1
    keys[slot] = np.inf
    experts[victim].slot = -1
    if experts[victim].missing_mass >= rule.beta:
        _add_over(experts, row, victim)
    return slot, victim


@njit(cache=True, inline="always")
def _settle(slots, experts, row, slot, e):
    """Expert `e` is resident in `slot` from now on."""
    slots[slot].expert = e
    experts[e].slot = slot
    experts[e].loaded_at = row.step


@njit(cache=True, inline="always")
def _end_load(slots, experts, row, e):
    """Take the pending load of `e` off the list; its slot."""
    slot = experts[e].load_slot
    experts[e].load_slot = -1
    slots[slot].load = -1
    row.pending -= 1
    for i in range(row.pending):
        if slots[i].pending == e:
            slots[i].pending = slots[row.pending].pending
            break
    return slot


@njit(cache=True, inline="always")
def _add_over(experts, row, e):
    experts[row.over].over = e
    row.over += 1


@njit(cache=True, inline="always")
def _remove_over(experts, row, e):
    row.over -= 1
    for i in range(row.over):
        if experts[i].over == e:
            experts[i].over = experts[row.over].over
            break


@njit(cache=True, inline="always")
def _record(moves, n, step, e, slot, victim, cause):
    move = moves[n]
    move.step, move.expert, move.slot, move.victim, move.cause = step, e, slot, victim, cause
    return n + 1


# ---- miss rules: misses come in marked FETCH; g and kind are by rank ------------------------------------------------
@njit(cache=True, inline="always")
def _mark_threshold(rule, g, kind):
    """Fetch the first choice and whatever weighs at least tau; substitute the rest."""
    for rank in range(1, kind.size):
        if kind[rank] == FETCH and g[rank] < rule.tau:
            kind[rank] = SUBSTITUTE


@njit(cache=True, inline="always")
def _mark_substitute_all(rule, g, kind):
    """Substitute even the first choice."""
    for rank in range(kind.size):
        if kind[rank] == FETCH:
            kind[rank] = SUBSTITUTE


@njit(cache=True, inline="always")
def _mark_mass_budget(rule, g, kind):
    """Substitute the lightest first while their sum stays within the share; of equals, the lower rank is kept."""
    total = 0.0
    for _ in range(kind.size):
        lightest = -1
        for k in range(kind.size - 1, -1, -1):
            if kind[k] == FETCH and (lightest < 0 or g[k] < g[lightest]):
                lightest = k
        if lightest < 0 or total + g[lightest] > rule.share:
            return
        total += g[lightest]
        kind[lightest] = SUBSTITUTE


@njit(cache=True, inline="always")
def _mark_drop(rule, g, kind):
    """Drop every miss; an event without a hit fetches its first choice: no token loses all its experts."""
    hits = 0
    for rank in range(kind.size):
        if kind[rank] == HIT:
            hits += 1
        else:
            kind[rank] = DROP
    if hits == 0:
        kind[0] = FETCH


@njit(cache=True, inline="always")
def _mark_paid(heavy, rule, row, g, kind):
    """few_heavy: substitute those of g >= tau, heaviest first; many_light: those of g < tau, lightest first.

    Never the first choice, and up to the first that the account cannot pay. Of equals the lower rank is the heavier.
    What is paid is known when the stand-ins are.
    """
    left = row.account
    for _ in range(kind.size):
        best = 0
        for i in range(1, kind.size):
            k = i if heavy else kind.size - i
            if kind[k] == FETCH and (g[k] >= rule.tau) == heavy:
                ahead = g[k] > g[best] if heavy else g[k] < g[best]
                if best == 0 or ahead:
                    best = k
        if best == 0 or g[best] > left:
            return
        left -= g[best]
        kind[best] = SUBSTITUTE


@njit(cache=True, inline="always")
def _mark_misses(rule, row, g, kind):
    if rule.miss == 4:
        _mark_threshold(rule, g, kind)
    elif rule.miss == 3:
        _mark_substitute_all(rule, g, kind)
    elif rule.miss == 2:
        _mark_mass_budget(rule, g, kind)
    elif rule.miss == 0:
        _mark_drop(rule, g, kind)
    elif rule.miss == 5:
        _mark_paid(True, rule, row, g, kind)
    elif rule.miss == 6:
        _mark_paid(False, rule, row, g, kind)


# ---- prefetched records ---------------------------------------------------------------------------------------------
@njit(cache=True, inline="always")
def _is_staged(experts, staged, t, e):
    """Whether `e`, not resident, is among the first STAGED of the event's list that neither are resident nor pend."""
    found = 0
    for i in range(staged.shape[1]):
        other = staged[t, i]
        if other < 0 or experts[other].slot >= 0 or experts[other].load_slot >= 0:
            continue
        if other == e:
            return True
        found += 1
        if found == STAGED:
            break
    return False


# ---- stand-ins and their weights ------------------------------------------------------------------------------------
@njit(cache=True, inline="always")
def _pick_standins(slots, row, rule, scores, t, wanted, work):
    """The `wanted` best residents that this event does not use, best first, into picked[:n]; returns n <= wanted."""
    picked, picked_score = work.picked, work.picked_score
    n = 0
    last = -np.inf  # score of the worst of a full list
    for slot in range(slots.size):
        if work.keys[slot] == np.inf:
            continue
        e = slots[slot].expert
        if rule.standin == 0:  # next_best
            score = np.float64(scores[t, e])
        else:  # random
            score = _hash(rule.seed, 2, row.layer, row.step, e)
        if score < last:
            continue
        if n == wanted:
            if score == last and e > picked[n - 1]:
                continue
            n -= 1
        i = n
        while i > 0 and (picked_score[i - 1] < score or (picked_score[i - 1] == score and picked[i - 1] > e)):
            picked[i] = picked[i - 1]
            picked_score[i] = picked_score[i - 1]
            i -= 1
        picked[i] = e
        picked_score[i] = score
        n += 1
        if n == wanted:
            last = picked_score[n - 1]
    return n


@njit(cache=True, inline="always")
def _own_ratio(rule, logit, of_logit):
    """What the model's own score rule gives one expert, over what it gives another."""
    if rule.sigmoid:
        return (1.0 + np.exp(-np.float64(of_logit))) / (1.0 + np.exp(-np.float64(logit)))
    return np.exp(np.float64(logit) - np.float64(of_logit))


@njit(cache=True, inline="always")
def _combine_weights(rule, events, log, t):
    """Weights of what is executed. A row without substitution or renormalised drop keeps the model's bits."""
    before = 0.0
    after = 0.0
    rescale = False
    for k in range(log.kind.shape[1]):
        weight = np.float64(events.weights[t, k])
        before += weight
        if log.kind[t, k] == SUBSTITUTE and rule.own_weights:
            weight *= _own_ratio(rule, events.logits[t, log.executed[t, k]], events.logits[t, events.chosen[t, k]])
            rescale = True
        elif log.kind[t, k] == DROP:
            weight = 0.0
            rescale = rescale or rule.renormalise
        after += weight
        log.weights[t, k] = weight
    if rescale and after > 0.0:
        for k in range(log.kind.shape[1]):
            log.weights[t, k] = np.float64(log.weights[t, k]) * (before / after)


# ---- one event ------------------------------------------------------------------------------------------------------
# _nrt=False: nothing is allocated here, and reference counting of the arrays took a fifth of the time
@njit(cache=True, _nrt=False)
def decide_event(slots, experts, row, rule, events, t, log, moves, n, work):
    """Event `t` of one row of state. `n` moves are logged so far; returns the new count.

    slots [S], experts [E], row: one row of State, whose keys `work` holds.
    """
    chosen, chosen_scores = events.chosen, events.chosen_scores
    K = chosen.shape[1]
    step = row.step
    order, g, kind, picked, keys = work.order, work.g, work.kind, work.picked, work.keys

    # loads that are due by now
    i = 0
    while i < row.pending:
        e = slots[i].pending
        if experts[e].due <= step:
            slot = _end_load(slots, experts, row, e)  # the last of the list takes place i
            _settle(slots, experts, row, slot, e)
            keys[slot] = _eviction_score(experts[e], e, row, rule)
            n = _record(moves, n, step, e, slot, -1, ARRIVED)
        else:
            i += 1

    # 1. ranks: by selection score, then lower id; many routers return them so, others are counted without a branch
    unsorted = 0
    for k in range(1, K):
        score, last = chosen_scores[t, k], chosen_scores[t, k - 1]
        unsorted += (score > last) | ((score == last) & (chosen[t, k] < chosen[t, k - 1]))
        work.rank[k] = k
    work.rank[0] = 0
    for k in range(K if unsorted > 0 else 0):
        e, score = chosen[t, k], chosen_scores[t, k]
        rank = 0
        for o in range(k):
            ahead = (chosen_scores[t, o] > score) | ((chosen_scores[t, o] == score) & (chosen[t, o] < e))
            rank += ahead
            work.rank[o] += 1 - ahead
        work.rank[k] = rank
    for k in range(K):
        order[work.rank[k]] = k
    log.first[t] = order[0]
    total = np.float32(0.0)  # by rank: a sum in float32 depends on its order, and ours must not follow the router's
    for rank in range(K):
        total += events.weights[t, order[rank]]

    # 2. hits
    misses = 0
    for rank in range(K):
        k = order[rank]
        g[rank] = events.weights[t, k] / total
        log.g[t, k] = g[rank]
        if experts[chosen[t, k]].slot >= 0:
            kind[rank] = HIT
            experts[chosen[t, k]].in_use = step
            keys[experts[chosen[t, k]].slot] = np.inf
        else:
            kind[rank] = FETCH
            misses += 1

    pays = rule.miss >= 5  # few_heavy, many_light
    if pays:
        row.account += rule.share
    if misses > 0:
        # 3. the miss rule; a record that a prefetch has brought costs no wait, so it is fetched whatever the rule says
        _mark_misses(rule, row, g, kind)
        for rank in range(K):
            work.staged[rank] = False
            if events.staged.shape[1] > 0 and kind[rank] != HIT:
                work.staged[rank] = _is_staged(experts, events.staged, t, chosen[t, order[rank]])
                if work.staged[rank]:
                    kind[rank] = FETCH

        # 4. stand-ins in rank order; none left: that miss is fetched, and not paid for
        wanted = 0
        for rank in range(K):
            wanted += kind[rank] == SUBSTITUTE
        if wanted > 0:
            found = _pick_standins(slots, row, rule, events.scores, t, wanted, work)
            taken = 0
            for rank in range(K):
                if kind[rank] == SUBSTITUTE:
                    if taken < found:
                        log.executed[t, order[rank]] = picked[taken]
                        experts[picked[taken]].in_use = step
                        keys[experts[picked[taken]].slot] = np.inf
                        taken += 1
                        if pays:
                            row.account -= g[rank]
                    else:
                        kind[rank] = FETCH

        # frozen: what is left to be fetched is computed where it lies
        for rank in range(K if rule.eviction == 6 else 0):
            if kind[rank] == FETCH:
                kind[rank] = IN_PLACE

        # 5. fetches in rank order: a pending load is promoted; else a free slot, else the victim's
        for rank in range(K):
            if kind[rank] != FETCH:
                continue
            e = chosen[t, order[rank]]
            if experts[e].load_slot >= 0:
                slot = _end_load(slots, experts, row, e)
                n = _record(moves, n, step, e, slot, -1, PROMOTED)
            else:
                if experts[e].missing_mass >= rule.beta:
                    _remove_over(experts, row, e)
                slot, victim = _vacate(slots, experts, row, rule, keys)
                n = _record(moves, n, step, e, slot, victim, TAKEN if work.staged[rank] else FETCHED)
            _settle(slots, experts, row, slot, e)
            experts[e].in_use = step

    # 6. statistics
    for rank in range(K):
        k = order[rank]
        e = chosen[t, k]
        expert = experts[e]
        log.kind[t, k] = kind[rank]
        expert.demand += 1.0
        expert.decayed += row.unit
        if kind[rank] == HIT or kind[rank] == FETCH:
            log.executed[t, k] = e
            expert.last_used = step
            expert.missing_mass = 0.0
            continue
        if kind[rank] == IN_PLACE:
            log.executed[t, k] = e
            expert.last_used = step
        before = expert.missing_mass
        expert.missing_mass = before + g[rank]
        if before < rule.beta and expert.missing_mass >= rule.beta and expert.load_slot < 0:
            _add_over(experts, row, e)
        if kind[rank] == DROP:
            log.executed[t, k] = -1
        elif kind[rank] == SUBSTITUTE and rule.standin_recency:
            experts[log.executed[t, k]].last_used = step
    row.unit *= rule.growth
    if row.unit > _RESCALE:
        row.unit /= _RESCALE
        for e in range(experts.size):
            experts[e].decayed /= _RESCALE
        refresh_keys(slots, experts, row, rule, keys)

    # 7. background: the most missed first; the victim leaves when the load is issued
    while row.over > 0 and row.pending < slots.size - K:
        best = experts[0].over
        for i in range(1, row.over):
            e = experts[i].over
            mass, best_mass = experts[e].missing_mass, experts[best].missing_mass
            if mass > best_mass or (mass == best_mass and e < best):
                best = e
        slot, victim = _vacate(slots, experts, row, rule, keys)
        if slot < 0:
            break
        _remove_over(experts, row, best)
        expert = experts[best]
        expert.missing_mass = 0.0
        expert.load_slot = slot
        expert.due = step + rule.delay if rule.delay > 0 else NEVER
        slots[slot].load = best
        slots[row.pending].pending = best
        row.pending += 1
        n = _record(moves, n, step, best, slot, victim, ISSUED)

    # what this event used may leave from now on
    for k in range(K):
        if log.kind[t, k] <= SUBSTITUTE:  # it ran from a slot
            e = log.executed[t, k]
            keys[experts[e].slot] = _eviction_score(experts[e], e, row, rule)

    # 8. combine weights
    _combine_weights(rule, events, log, t)
    row.step = step + 1
    return n


@njit(cache=True)
def complete_load(slots, experts, row, e):
    """Completion `clock` or `real`: the load of expert `e` has ended. False if none was pending."""
    if experts[e].load_slot < 0:
        return False
    _settle(slots, experts, row, _end_load(slots, experts, row, e), e)
    return True


@njit(cache=True)
def cancel_load(slots, experts, row, e):
    """The load of expert `e` has failed: its slot is free again. False if none was pending."""
    if experts[e].load_slot < 0:
        return False
    _end_load(slots, experts, row, e)
    row.free += 1
    return True


@njit(cache=True)
def link_next_use(next_use, step, chosen, first, stride):
    """For belady: the next demand [T, K] of every demand of rows first, first + stride, ... of chosen.

    One pass backwards. next_use [E]: each expert's first demand after these rows (NEVER: none); it is left at the first
    from `step` on, the step of the first row.
    """
    T, K = (chosen.shape[0] - first + stride - 1) // stride, chosen.shape[1]
    linked = np.empty((T, K), np.int32)
    for t in range(T - 1, -1, -1):
        for k in range(K):
            linked[t, k] = next_use[chosen[first + t * stride, k]]
        for k in range(K):
            next_use[chosen[first + t * stride, k]] = step + t
    return linked


@njit(cache=True, inline="always")
def ready(events, t):
    """Event t has numbers for scores, a positive finite sum of weights, and K distinct experts.

    Fills its chosen_scores where there are all scores. Reading the row of scores in order also brings it into the
    cache; stand-ins read it out of order.
    """
    if events.scores.shape[1] > 0:
        for k in range(events.chosen.shape[1]):
            events.chosen_scores[t, k] = events.scores[t, events.chosen[t, k]]
    bad = 0
    for e in range(events.scores.shape[1]):
        bad += events.scores[t, e] != events.scores[t, e]
    total = 0.0
    for k in range(events.chosen.shape[1]):
        total += events.weights[t, k]
        bad += events.chosen_scores[t, k] != events.chosen_scores[t, k]
        for other in range(k):
            bad += events.chosen[t, other] == events.chosen[t, k]
    return bad == 0 and 0.0 < total < np.inf


@njit(cache=True, inline="always")
def make_work(K, keys):
    """Scratch for events of K experts over the row whose keys these are."""
    return Work(
        np.empty(K, np.int64),
        np.empty(K, np.int64),
        np.empty(K, np.float32),
        np.empty(K, np.int64),
        np.empty(K, np.int64),
        np.empty(K, np.float64),
        np.zeros(K, np.bool_),
        keys,
    )


@njit(cache=True, inline="always")
def room_for_event(moves, n, slots):
    """`moves`, or a longer copy: an event logs at most S - K arrivals, K fetches and S - K issues."""
    if n + 3 * slots <= moves.size:
        return moves
    longer = np.empty(2 * moves.size + 3 * slots, moves.dtype)
    longer[:n] = moves[:n]
    return longer


@njit(cache=True, nogil=True)
def scan(state, r, rule, events, log, first, stride, linked):
    """The events of row `r` of state in order; fills `log`, returns the moves [N] MOVE and what stopped it, or -1.

    They are rows first, first + stride, ... of events and log: 0 and 1 for one layer's own arrays, layer and L for
    tokens x layers. An event that is not `ready` stops the scan undecided; the events before it stay decided, and its
    place in the sequence is returned. `belady` sees the future of this call alone where `linked` has width 0; else
    linked [T, K] is the next demand of every demand (`link_next_use`), and the state knows every expert's first.
    """
    slots, experts, row = state.slots[r], state.experts[r], state.rows[r]
    K = events.chosen.shape[1]
    T = (events.chosen.shape[0] - first + stride - 1) // stride
    work = make_work(K, np.empty(slots.size))
    moves = np.empty(T + 8 * slots.size, MOVE)
    n = 0
    clairvoyant = rule.eviction == 0
    if clairvoyant and linked.shape[1] == 0:
        next_use = np.full(experts.size, NEVER)
        linked = link_next_use(next_use, row.step, events.chosen, first, stride)
        for e in range(experts.size):
            experts[e].next_use = next_use[e]
    refresh_keys(slots, experts, row, rule, work.keys)
    for i in range(T):
        t = first + i * stride
        if not ready(events, t):
            return moves[:n].copy(), i
        moves = room_for_event(moves, n, slots.size)
        if clairvoyant:
            for k in range(K):
                experts[events.chosen[t, k]].next_use = linked[i, k]
        n = decide_event(slots, experts, row, rule, events, t, log, moves, n, work)
    return moves[:n].copy(), -1
