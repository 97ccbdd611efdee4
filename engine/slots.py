"""Fast memory: the slot buffers of every layer, and which of their rows holds which expert's bytes.

A layer has S rows of one record each, seen by the model's own experts module as its parameters [S, ...]. The decision
speaks of slots; `row_of_slot` says which row a slot is. So an expert that a scan has moved from one slot to another is
not copied: the slot is another row from then on.

    slots = Slots(layout, layers=4, slots=64)
    wanted = slots.arrange(layer, experts_by_slot)      # (row, expert) still to be read, once nobody needs the old ones
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from engine.link import Place
from engine.record import Layout, page_aligned

NOBODY = -1


class Slots:
    """S rows a layer and `staging` more for all layers together. What a row holds is noted by who filled it."""

    def __init__(
        self,
        layout: Layout,
        *,
        layers: int,
        slots: int,
        staging: int = 4,
        device: str = "cpu",
        pinned: Callable[[int, int], torch.Tensor] | None = None,
    ) -> None:
        """pinned: of a GPU, where the store keeps (layer, expert) in pinned memory [record_bytes], if it does."""
        self.layout, self.slots, self.device = layout, slots, device
        self._buffers = [self._buffer(slots) for _ in range(layers)]
        self._staging = self._buffer(staging)
        # of a CPU: every row's memory, looked up and not made for every read
        self._targets = [list(map(memoryview, buffer.numpy())) for buffer in self._buffers] if device == "cpu" else []
        self.parameters = [layout.views(buffer) for buffer in self._buffers]  # by layer: name: [S, ...]
        self.staged = layout.views(self._staging)  # name: [staging, ...]
        self.staging = staging
        self.held = np.full((layers, slots), NOBODY, np.int32)  # expert whose bytes are, or are on their way, in a row
        self._bounces: list[torch.Tensor] = []  # of a GPU: pinned, not in use, as many as ever were at once
        self._pinned = pinned
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        self.row_of_slot = np.tile(np.arange(slots), (layers, 1))  # [L, S] int64

    def _buffer(self, rows: int) -> torch.Tensor:
        """[rows, record_bytes] uint8."""
        if self.device == "cpu":
            return page_aligned(rows, self.layout.record_bytes)
        return torch.zeros(rows, self.layout.record_bytes, dtype=torch.uint8, device=self.device)

    @property
    def bytes(self) -> int:
        return sum(buffer.numel() for buffer in (*self._buffers, self._staging))

    def give_to(self, modules: list[nn.Module]) -> None:
        """The experts modules, in layer order, have S experts from now on, whose parameters are these buffers."""
        for module, parameters in zip(modules, self.parameters, strict=True):
            for name, tensor in parameters.items():
                setattr(module, name, nn.Parameter(tensor, requires_grad=False))
            module.num_experts = self.slots

    def place(self, layer: int, row: int, expert: int) -> Place:
        """Where a link is to bring an expert that a row is to hold."""
        if self._targets:
            return Place(layer, expert, self._targets[layer][row])
        return self._place(layer, expert, self._buffers[layer][row])

    def stage(self, number: int, layer: int, expert: int) -> Place:
        """The same for a staging buffer."""
        return self._place(layer, expert, self._staging[number])

    def _place(self, layer: int, expert: int, record: torch.Tensor) -> Place:
        """record [record_bytes] uint8. On a GPU the link fills pinned memory, and its reader copies on from there.

        Experts that wait in pinned memory are copied from where they are.
        """
        if self.device == "cpu":
            return Place(layer, expert, memoryview(record.numpy()))
        source = self._pinned(layer, expert) if self._pinned else self._bounce()

        free = torch.cuda.current_stream().record_event()  # what was computed from this record so far

        def copy_on() -> None:
            done = torch.cuda.Event()
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(free)
                record.copy_(source, non_blocking=True)
                done.record()
            done.synchronize()
            if not self._pinned:
                self._bounces.append(source)

        return Place(layer, expert, memoryview(source.numpy()), copy_on)

    def _bounce(self) -> torch.Tensor:
        try:
            return self._bounces.pop()
        except IndexError:
            return torch.empty(self.layout.record_bytes, dtype=torch.uint8, pin_memory=True)

    def rows_of(self, layer: int, experts: int) -> np.ndarray:
        """Of every expert [E] the row that holds it, or NOBODY."""
        found = np.full(experts, NOBODY, np.int64)
        rows = np.flatnonzero(self.held[layer] != NOBODY)
        found[self.held[layer, rows]] = rows
        return found

    def arrange(self, layer: int, wanted: np.ndarray) -> list[tuple[int, int]]:
        """wanted [S]: the expert each slot is to hold, NOBODY none. Returns (row, expert) of those that no row holds.

        Slots whose expert is held keep its row; the others take what rows are left, which hold nobody from now on.
        """
        row_of_expert = {int(expert): row for row, expert in enumerate(self.held[layer]) if expert != NOBODY}
        kept = {slot: row_of_expert.pop(int(e)) for slot, e in enumerate(wanted) if int(e) in row_of_expert}
        taken = set(kept.values())
        left = [row for row in range(self.slots) if row not in taken]
        to_read = []
        for slot, expert in enumerate(wanted):
            if slot in kept:
                self.row_of_slot[layer, slot] = kept[slot]
                continue
            row = left.pop(0)
            self.row_of_slot[layer, slot] = row
            self.held[layer, row] = NOBODY
            if expert != NOBODY:
                to_read.append((row, int(expert)))
        return to_read
