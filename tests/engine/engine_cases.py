"""An engine under the test's control: records come from a model's own weights, background loads end when it says."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import torch

from engine.errors import error
from engine.hook import attach
from engine.link import Link
from engine.offload_engine import Engine
from engine.policies import load_policies
from engine.record import Layout, page_aligned

CONFIG = Path(__file__).parents[2] / "config"
POLICIES = load_policies(CONFIG / "policies.tsv")
TOKENS = 40


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


class PartStore(ModelStore):
    """The same, of whose records a part can be read. broken_parts: of (layer, expert) only these reads fail."""

    def __init__(self, modules, dtype=torch.float32) -> None:
        super().__init__(modules, dtype)
        self.broken_parts: set[tuple[int, int]] = set()

    def read_part(self, layer: int, expert: int, target: memoryview, first: int) -> int:
        if (layer, expert) in self.broken_parts:
            raise OSError(5, "Input/output error")
        record = page_aligned(1, self.layout.record_bytes)[0].numpy()
        self.read(layer, expert, memoryview(record))
        target[:] = memoryview(record)[first : first + len(target)]
        return len(target)


class Both:
    """A family's model twice: one for the emulator, one whose experts are behind a link."""

    def __init__(self, tiny_moe, family="qwen3_moe", store=ModelStore, **configuration) -> None:
        self.whole, self.model = tiny_moe(family, **configuration), tiny_moe(family, **configuration)
        self.attachment = attach(self.model)
        self.store = store(self.attachment.layers)
        self.experts, self.top_k = self.attachment.experts, self.attachment.top_k

    def engine(self, policy: str, slots: int, completion="next_step", demand=None, **changes) -> Engine:
        self.link = Link(self.store, readers=2)
        engine = Engine(self.attachment, self.link, slots=slots, demand=demand)
        engine.use(dataclasses.replace(POLICIES[policy], **changes), completion=completion)
        return engine

    def slow_background(self, seconds: float) -> None:
        """Every background read takes so long from now on."""
        read = self.store.read

        def slow(layer, expert, target):
            if "background" in threading.current_thread().name:
                time.sleep(seconds)
            return read(layer, expert, target)

        self.store.read = slow


def text(length=TOKENS, seed=1):
    return torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_slots_hold_their_experts(both, engine):
    for layer, module in enumerate(both.whole.model.layers):
        for slot, expert in enumerate(engine.residency.state.slots[layer]["expert"]):
            if expert >= 0:
                row = engine.slots.row_of_slot[layer, slot]
                assert engine.slots.held[row] == expert
                for name, tensor in engine.slots.parameters.items():
                    torch.testing.assert_close(tensor[row], getattr(module.mlp.experts, name)[expert])
