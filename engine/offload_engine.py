"""The engine: weights really move. Slots are buffers in fast memory, and a link brings experts from where they wait.

It makes the same decision as the other instruments and does what the decision says: a fetch is a read that the model
waits for, a background load is a read beside the model's compute. One lane; decoding goes one token at a time.

    model, attachment, store = ...                                       # engine.offload_model
    with Link(store, limits=None) as link:
        engine = Engine(attachment, link, slots=64, demand=demand)
        engine.use(policy, completion="real")                            # warm start: reads the residents
        with engine.phase("decode"):
            model(input_ids[:, t : t + 1], cache=cache)
    engine.log()

Prefill is exact: the `fetch` decision scans its tokens for state alone, every expert that is not resident is read at
most once a layer, into the row it ends in or through a staging buffer, and the residents at the end are the scan's.

Completion of background loads: `next_step` waits for them at the next event of their layer, as the emulator assumes;
`real` takes them when they are there.

Prefetching (engine/prefetch.py) works under both: what has come when an event begins is there, and the log says which
experts were taken from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from engine.decision import ARRIVED, FETCHED, ISSUED, MISS_RULES, MOVE, TAKEN, cancel_load, complete_load
from engine.errors import UserError, error
from engine.experts import decode_token, run_expert
from engine.hook import Attachment, Call
from engine.kernels import set_threads
from engine.link import Link, Transfer
from engine.log import DecisionLog, LogWriter
from engine.phase import PhasedHandler
from engine.policies import Policy, refuse_in_place
from engine.predictors import Predictor
from engine.prefetch import Prefetching, check_prefetch
from engine.residency import Demand, Residency, check_slots
from engine.scheduler import Window
from engine.slots import NOBODY, Slots

COMPLETIONS = ("next_step", "real")
AT_ONCE = 32  # records of one read: on a GPU each has a pinned buffer of its own


class Engine(PhasedHandler):
    """One attached model whose experts live in slots; `use` says under which policy. Owns slots, residency and log."""

    decodes_wide = False  # one token at a time

    def __init__(self, attachment: Attachment, link: Link, *, slots: int, demand: Demand | None = None) -> None:
        """demand: calibration demand for the warm start, None starts cold. UserError on slots that cannot be."""
        check_slots(slots, attachment.experts, attachment.top_k)
        self._attachment, self.link, self._demand = attachment, link, demand
        layers = len(attachment.layers)
        device, store = attachment.model.device.type, link.store
        pinned = store.record if device == "cuda" and getattr(store, "pinned", False) else None
        self.slots = Slots(store.layout, layers=layers, slots=slots, device=device, pinned=pinned)
        self.slots.give_to(attachment.layers)
        self._loads: list[dict[int, Transfer]] = [{} for _ in range(layers)]  # pending, by expert
        self._written = LogWriter(layers)
        self.failures: list[str] = []  # background loads that failed, and why
        self.residency: Residency | None = None
        self.ahead: Prefetching | None = None  # of a policy that prefetches
        self.stalled_s = 0.0  # waited for records, in all
        self._broken = False
        set_threads()
        attachment.handler = self._experts

    # ---- policy, start, log ----------------------------------------------------------------------------------------
    def use(
        self,
        policy: Policy,
        *,
        completion: str = "next_step",
        predictor: Predictor | None = None,
        window: Window | None = None,
    ) -> None:
        """From now on this policy, from the warm (or cold) start. predictor, window: of one that prefetches."""
        if completion not in COMPLETIONS:
            raise error(f"completion '{completion}'", " or ".join(COMPLETIONS), "choose one of them")
        if policy.clairvoyant:
            raise error(
                f"policy '{policy.id}' (eviction {policy.eviction}, prefetch {policy.prefetch or '-'}) in the engine",
                "a policy that does not need the future",
                "replay it over a recorded trace (engine.trace)",
            )
        refuse_in_place(policy, "engine")
        if policy.prefetch:
            check_prefetch(policy, predictor, window)
        attachment = self._attachment
        rule = policy.rule(sigmoid=attachment.sigmoid, delay=1 if completion == "next_step" else 0)
        self._prefill_rule = rule._replace(miss=MISS_RULES["fetch"])
        self._drain()
        self.policy, self.completion, self.ahead = policy, completion, None
        self.residency = Residency(
            layers=len(attachment.layers),
            experts=attachment.experts,
            top_k=attachment.top_k,
            slots=self.slots.slots,
            rule=rule,
        )
        if self._demand is not None:
            self.residency.warm(self._demand)
        if policy.prefetch:
            self.ahead = Prefetching(predictor, window, self.slots, self.link, self.failures)
        self.clear_log()
        self.restart()

    def restart(self) -> None:
        """Back to the start (continuity `restart`): what its residents lack is read, not throttled."""
        self._broken = True
        self._drain()
        self.new_sequence()
        self.residency.restart(0)
        limits, self.link.limits = self.link.limits, None
        try:
            for layer, slots in enumerate(self.residency.state.slots):
                self._read([(*one, 0) for one in self.slots.arrange(layer, slots["expert"])], layer)
        finally:
            self.link.limits = limits
        self._broken = False

    def new_sequence(self) -> None:
        """The next token begins another document: what predicts from the tokens before it forgets them."""
        if self.ahead:
            self.ahead.new_sequence()

    def clear_log(self) -> None:
        self._written.clear()

    def log(self, **provenance: str) -> DecisionLog:
        """Everything decided in decode phases since the last `clear_log`, in the order of the calls."""
        return self._written.log(**provenance)

    def _drain(self) -> None:
        """No load is pending any more: queued ones are forgotten, the one in transit is waited for. Prefetches too."""
        if self.ahead:
            self.ahead.drop_all()
        for layer, loads in enumerate(self._loads):
            for expert, transfer in loads.items():
                held = self.link.withdraw(transfer) or not _ended_well(transfer)
                if held:
                    self.slots.forget(layer, expert)
            loads.clear()

    # ---- the handler -----------------------------------------------------------------------------------------------
    def _experts(self, call: Call) -> torch.Tensor:
        self._rows_of_lanes(len(call.hidden))  # refuses a call outside a phase
        if self.residency is None:
            raise RuntimeError("no policy is in use")
        if self._broken:
            raise error("an engine whose last read failed", "a whole state", "call restart()")
        self._broken = True  # until this call has ended well: no slot may claim what it does not hold
        output = self._prefill(call) if self._phase.kind == "prefill" else self._decode(call)
        self._broken = False
        return output

    def _decode(self, call: Call) -> torch.Tensor:
        layer = call.layer
        if len(call.hidden) != 1:
            raise error(f"{len(call.hidden)} tokens in one decode step", "one", "decode token by token")
        arrived = self._take_arrivals(layer)
        decided, moves = self._decide(call, None, self.ahead.due(layer) if self.ahead else None)
        moves = np.concatenate([arrived, moves])
        self._written.append(layer, decided, moves)
        self._bring(layer, moves, partial(self.ahead.foretell, call) if self.ahead else None)
        if self.ahead:
            self.ahead.drop(layer)
            self.ahead.plan(call, self.residency.state.experts)
        executed = decided.executed[0]
        kept = executed >= 0  # the others were dropped
        slots = self.residency.state.experts[layer]["slot"][executed[kept]]
        rows = self.slots.row_of_slot[layer, slots]
        output = self._compute(call, rows, decided.weights[0][kept])
        for _step, expert, slot, _victim, cause in moves.tolist():
            if cause == ISSUED:
                self._issue(layer, slot, expert)
        return output

    def _compute(self, call: Call, rows: np.ndarray, weights: np.ndarray) -> torch.Tensor:
        """One token through the experts in these rows [K]."""
        return decode_token(call.module, self.slots.parameters, call.hidden, rows, weights, call.stock)

    def _decide(self, call: Call, rule, staged=None):
        scores = call.scores.detach().cpu().numpy()
        return self.residency.decide(
            0,
            call.layer,
            call.index.cpu().numpy(),
            call.weights.detach().float().cpu().numpy(),
            scores,
            scores if call.logits is call.scores else call.logits.detach().cpu().numpy(),
            staged=staged,
            rule=rule,
        )

    # ---- loads -------------------------------------------------------------------------------------------------------
    def _take_arrivals(self, layer: int) -> np.ndarray:
        """Completion `real`: loads of this layer whose transfer has ended are resident from this event on."""
        moves = []
        if self.completion == "real" and self._loads[layer]:
            slots, experts, row = (array[layer] for array in self.residency.state)
            for expert, transfer in list(self._loads[layer].items()):
                if transfer.state not in ("done", "failed"):
                    continue
                del self._loads[layer][expert]
                slot = experts[expert]["load_slot"]
                if transfer.state == "failed":
                    self._forget(layer, expert, transfer)
                else:
                    complete_load(slots, experts, row, expert)
                    moves.append((row["step"], expert, slot, -1, ARRIVED))
        return np.array(moves, MOVE)

    def _forget(self, layer: int, expert: int, transfer: Transfer) -> None:
        """A background load has failed: nobody is in its slot, and the run goes on."""
        self.failures.append(f"layer {layer}, expert {expert}: {transfer.error}")
        cancel_load(*(array[layer] for array in self.residency.state), expert)
        self.slots.forget(layer, expert)

    def _bring(self, layer: int, moves: np.ndarray, meanwhile: Callable[[], object] | None) -> None:
        """Wait until everything that this event runs is there. meanwhile: done while records are read, if any are."""
        if not len(moves):
            return
        began = time.perf_counter()
        with self.link.hold():
            self._read([(row, *what) for row, what in self._wanted(layer, moves).items()], layer, meanwhile)
        self.stalled_s += time.perf_counter() - began

    def _wanted(self, layer: int, moves: np.ndarray) -> dict[int, tuple[int, int]]:
        """By row (expert, byte from which it lacks), once whatever was in transit for this event is there.

        By row: who arrives in an event may leave in it for one that is fetched.
        """
        wanted, loads = {}, self._loads[layer]
        for _step, expert, slot, _victim, cause in moves.tolist():
            due = cause != ISSUED and expert in loads  # promoted, or to be there by now
            here = due and self._there(layer, expert, loads[expert])
            if due:
                del loads[expert]  # only now: an interrupted wait leaves it to restart()
            if here or not (due or cause in (FETCHED, TAKEN)):
                continue
            taken = self.ahead.take(layer, expert, slot) if self.ahead and not due else None
            if taken:
                wanted.pop(taken.left, None)
                wanted[taken.row] = expert, taken.first
            else:
                wanted[int(self.slots.row_of_slot[layer, slot])] = expert, 0
        return wanted

    def _there(self, layer: int, expert: int, transfer: Transfer) -> bool:
        """Whether a load that is needed now is there, or was in transit and has been waited for."""
        if self.link.withdraw(transfer):
            return False
        if _ended_well(transfer):
            return True
        self.failures.append(f"layer {layer}, expert {expert}: {transfer.error}")
        return False

    def _read(
        self, wanted: list[tuple[int, int, int]], layer: int, meanwhile: Callable[[], object] | None = None
    ) -> None:
        """(row, expert, byte from which it lacks) of one layer, in the foreground."""
        rows = [row for row, _, _ in wanted]
        self.slots.held[rows] = NOBODY
        lacking = [(row, layer, *what) for row, *what in wanted if what[1] < self.slots.layout.record_bytes]
        for first in range(0, len(lacking), AT_ONCE):
            self.link.fetch([self.slots.place(*one) for one in lacking[first : first + AT_ONCE]], meanwhile)
            meanwhile = None
        self.slots.held[rows] = [expert for _, expert, _ in wanted]

    def _issue(self, layer: int, slot: int, expert: int) -> None:
        row = int(self.slots.row_of_slot[layer, slot])
        self.slots.held[row] = expert  # on its way
        self._loads[layer][expert] = self.link.issue(self.slots.place(row, layer, expert))

    # ---- prefill -----------------------------------------------------------------------------------------------------
    def _prefill(self, call: Call) -> torch.Tensor:
        layer, began = call.layer, time.perf_counter()
        if self.ahead:
            self.ahead.drop_all()  # its rows are needed
            self.ahead.observe(call)
        self._settle_loads(layer)
        self.stalled_s += time.perf_counter() - began
        self._decide(call, self._prefill_rule)
        needed = torch.unique(call.index).tolist()
        rows = self.slots.rows_of(layer, self._attachment.experts)
        state = self.residency.state.slots[layer]
        wanted = np.where(state["expert"] >= 0, state["expert"], state["load"])  # [S]
        if (rows[needed] != NOBODY).all() and self.slots.layout.bits is None:
            index = torch.from_numpy(rows).to(call.index.device)[call.index]
            output = call.compute(index.to(call.index.dtype), call.weights)
            to_read = self.slots.arrange(layer, wanted)
        else:
            output, to_read = self._prefill_in_parts(call, needed, rows, wanted)
        arrived = set(state["expert"].tolist())  # a load may have been issued and completed within the scan
        self._read([(row, expert, 0) for row, expert in to_read if expert in arrived], layer)
        for row, expert in to_read:
            if expert not in arrived:
                self.slots.held[row] = expert  # on its way
                self._loads[layer][expert] = self.link.issue(self.slots.place(row, layer, expert))
        return output

    def _prefill_in_parts(self, call: Call, needed: list[int], rows: np.ndarray, wanted: np.ndarray):
        """First those that are here; then rows change hands and the others are read, a few at a time."""
        layer, output = call.layer, torch.zeros_like(call.hidden)
        for expert in needed:
            if rows[expert] != NOBODY:
                self._add(call, expert, rows[expert], output)
        to_read = self.slots.arrange(layer, wanted)
        row_of = {expert: row for row, expert in to_read}
        missing = [expert for expert in needed if rows[expert] == NOBODY]
        staging = self.slots.staging_rows.tolist()
        for first in range(0, len(missing), len(staging)):
            batch = missing[first : first + len(staging)]
            here = [row_of.get(expert, row) for expert, row in zip(batch, staging, strict=False)]
            began = time.perf_counter()
            self.link.fetch([self.slots.place(row, layer, e) for row, e in zip(here, batch, strict=True)])
            self.stalled_s += time.perf_counter() - began
            for row, expert in zip(here, batch, strict=True):
                if expert in row_of:
                    self.slots.held[row] = expert
                self._add(call, expert, row, output)
        return output, [(row, expert) for row, expert in to_read if expert not in missing]

    def _add(self, call: Call, expert: int, row: int, output: torch.Tensor) -> None:
        """Add what one expert, in this row, gives the tokens that chose it to output [T, D]."""
        parameters = {name: tensor[row] for name, tensor in self.slots.parameters.items()}
        tokens, place = torch.where(call.index == expert)
        found = run_expert(call.module, parameters, call.hidden[tokens])
        output.index_add_(0, tokens, (found * call.weights[tokens, place, None]).to(output.dtype))

    def _settle_loads(self, layer: int) -> None:
        """Pending loads of a layer end before a prefill of it; their bytes stay in their rows."""
        slots, experts, row = (array[layer] for array in self.residency.state)
        for expert, transfer in self._loads[layer].items():
            if _ended_well(transfer):
                if self.completion == "real":
                    complete_load(slots, experts, row, expert)
            else:
                self._forget(layer, expert, transfer)
        self._loads[layer].clear()


def _ended_well(transfer: Transfer) -> bool:
    """Wait for a transfer's end; False where it failed."""
    try:
        transfer.wait()
    except UserError:
        return False
    return True
