"""Fast memory: one pool of rows for all layers, and which of its rows holds which expert's bytes.

A row is room for one record. L x S of them are the slots of the layers, the others are staging: where prefill puts what
it needs for one call, and where a prefetch arrives. Every experts module sees the whole pool as its own parameters
[N, ...]. The decision speaks of slots; `row_of_slot` says which row a slot is. So nothing is ever copied: an expert
that a scan has moved to another slot takes its row along, and one that waits in a staging row enters a slot by
`exchange`, the slot's old row being a staging row from then on.

    slots = Slots(layout, layers=4, slots=64)
    wanted = slots.arrange(layer, experts_by_slot)      # (row, expert) still to be read, once nobody needs the old ones
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from engine.decision import STAGED
from engine.link import Place
from engine.record import Layout, page_aligned

NOBODY = -1


class Slots:
    """N = L x S + staging rows. What a row holds is noted by who filled it."""

    def __init__(
        self,
        layout: Layout,
        *,
        layers: int,
        slots: int,
        staging: int = STAGED,
        device: str = "cpu",
        pinned: Callable[[int, int], torch.Tensor] | None = None,
    ) -> None:
        """pinned: of a GPU, where the store keeps (layer, expert) in pinned memory [record_bytes], if it does."""
        self.layout, self.slots, self.device = layout, slots, device
        rows = layers * slots + staging
        self._pool = self._buffer(rows)
        # of a CPU: every row's memory, looked up and not made for every read
        self._targets = list(map(memoryview, self._pool.numpy())) if device == "cpu" else []
        self.parameters = layout.views(self._pool)  # name: [N, ...]
        self.held = np.full(rows, NOBODY, np.int32)  # [N] expert whose bytes are, or are on their way, in a row
        self.row_of_slot = np.arange(layers * slots).reshape(layers, slots)  # [L, S] int64
        self.staging_rows = np.arange(layers * slots, rows)  # [staging] int64; they change hands
        self._bounces: list[torch.Tensor] = []  # of a GPU: pinned, not in use, as many as ever were at once
        self._pinned = pinned
        self._stream = torch.cuda.Stream() if device == "cuda" else None

    def _buffer(self, rows: int) -> torch.Tensor:
        """[rows, record_bytes] uint8."""
        if self.device == "cpu":
            return page_aligned(rows, self.layout.record_bytes)
        return torch.zeros(rows, self.layout.record_bytes, dtype=torch.uint8, device=self.device)

    @property
    def bytes(self) -> int:
        return self._pool.numel()

    def give_to(self, modules: list[nn.Module]) -> None:
        """The experts modules have N experts from now on, whose parameters are the pool; not in few bits, which no
        module of transformers can compute with."""
        for module in modules if self.layout.bits is None else []:
            _give(module, self.parameters, len(self.held))

    def give_parts_to(self, modules: list[nn.Module]) -> None:
        """In layer order, instead: a module has the S slots of its layer as its experts. Only before any `exchange`."""
        for layer, module in enumerate(modules):
            rows = slice(layer * self.slots, (layer + 1) * self.slots)
            _give(module, {name: tensor[rows] for name, tensor in self.parameters.items()}, self.slots)

    def place(self, row: int, layer: int, expert: int, first: int = 0, stop: int | None = None) -> Place:
        """Where a link is to bring an expert that a row is to hold: of its record the bytes from first to stop."""
        return self._place(row, layer, expert, first, self.layout.record_bytes if stop is None else stop, self._now())

    def places(self, row: int, layer: int, expert: int, parts: list[tuple[int, int]]) -> Callable[[int], Place]:
        """The same of a record that comes in parts, each asked for by its number, by whatever thread."""
        now = self._now()
        return lambda number: self._place(row, layer, expert, *parts[number], now)

    def _now(self) -> torch.cuda.Event | None:
        """Of a GPU: once what was computed so far is done, a row that nobody needs any more may be written to."""
        return torch.cuda.current_stream().record_event() if self._stream else None

    def _place(self, row: int, layer: int, expert: int, first: int, stop: int, free: torch.cuda.Event | None) -> Place:
        """On a GPU the link fills pinned memory, and its reader copies on from there.

        Experts that wait in pinned memory are copied from where they are.
        """
        part = None if (first, stop) == (0, self.layout.record_bytes) else first
        if self._targets:
            memory = self._targets[row]
            return Place(layer, expert, memory if part is None else memory[first:stop], None, part)
        target = self._pool[row, first:stop]
        bounce = None if self._pinned else self._bounce()
        source = self._pinned(layer, expert)[first:stop] if bounce is None else bounce[: stop - first]

        def copy_on() -> None:
            done = torch.cuda.Event()
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(free)
                target.copy_(source, non_blocking=True)
                done.record()
            done.synchronize()
            if bounce is not None:
                self._bounces.append(bounce)

        return Place(layer, expert, memoryview(source.numpy()), copy_on, part)

    def _bounce(self) -> torch.Tensor:
        try:
            return self._bounces.pop()
        except IndexError:
            return torch.empty(self.layout.record_bytes, dtype=torch.uint8, pin_memory=True)

    def exchange(self, layer: int, slot: int, number: int) -> tuple[int, int]:
        """A slot and a staging row change places. Returns (the slot's row from now on, the one it was)."""
        row, old = int(self.staging_rows[number]), int(self.row_of_slot[layer, slot])
        self.row_of_slot[layer, slot], self.staging_rows[number] = row, old
        self.held[old] = NOBODY
        return row, old

    def forget(self, layer: int, expert: int) -> None:
        """Nobody is in the row of this layer that held the expert."""
        rows = self.row_of_slot[layer]
        self.held[rows[self.held[rows] == expert]] = NOBODY

    def rows_of(self, layer: int, experts: int) -> np.ndarray:
        """Of every expert [E] the row that holds it, or NOBODY."""
        found = np.full(experts, NOBODY, np.int64)
        rows = self.row_of_slot[layer]
        rows = rows[self.held[rows] != NOBODY]
        found[self.held[rows]] = rows
        return found

    def arrange(self, layer: int, wanted: np.ndarray) -> list[tuple[int, int]]:
        """wanted [S]: the expert each slot is to hold, NOBODY none. Returns (row, expert) of those that no row holds.

        Slots whose expert is held keep its row; the others take what rows are left, which hold nobody from now on.
        """
        rows = sorted(self.row_of_slot[layer].tolist())
        row_of_expert = {int(self.held[row]): row for row in rows if self.held[row] != NOBODY}
        kept = {slot: row_of_expert.pop(int(e)) for slot, e in enumerate(wanted) if int(e) in row_of_expert}
        taken = set(kept.values())
        left = [row for row in rows if row not in taken]
        to_read = []
        for slot, expert in enumerate(wanted):
            if slot in kept:
                self.row_of_slot[layer, slot] = kept[slot]
                continue
            row = left.pop(0)
            self.row_of_slot[layer, slot] = row
            self.held[row] = NOBODY
            if expert != NOBODY:
                to_read.append((row, int(expert)))
        return to_read


def _give(module: nn.Module, parameters: dict[str, torch.Tensor], experts: int) -> None:
    for name, tensor in parameters.items():
        setattr(module, name, nn.Parameter(tensor, requires_grad=False))
    module.num_experts = experts
