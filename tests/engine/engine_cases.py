"""A link under the test's control: records come from a model's own weights, background loads end when the test says."""

from __future__ import annotations

import torch

from engine.errors import error
from engine.record import Layout


class ModelStore:
    """The experts of a loaded model as a store. broken: (layer, expert) whose reads fail."""

    def __init__(self, modules, dtype=torch.float32) -> None:
        self._weights = [dict(module.named_parameters(recurse=False)) for module in modules]
        self.layers, self.experts = len(modules), modules[0].num_experts
        self.layout = Layout.of_module(modules[0], dtype)
        self.broken: set[tuple[int, int]] = set()
        self.reads: list[tuple[int, int]] = []

    def read(self, layer: int, expert: int, target: memoryview) -> int:
        self.reads.append((layer, expert))
        if (layer, expert) in self.broken:
            raise error(f"layer {layer}, expert {expert}: read error", "a whole record", "replace the disk")
        record = torch.frombuffer(target, dtype=torch.uint8)[None]
        for name, view in self.layout.views(record).items():
            view[0].copy_(self._weights[layer][name][expert])
        return self.layout.record_bytes

    def close(self) -> None: ...
