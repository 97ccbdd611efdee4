"""What tests of stores and links share: a made-up checkpoint folder and a store of its experts, in memory.

Every expert's weights are its own, so a record in the wrong place shows. The layout has gaps between and after its
parts, which `Made` fills with noise: nothing may depend on them.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.record import Layout, page_aligned

LAYERS, EXPERTS = 2, 5
SHAPES = {"gate_up_proj": (12, 150), "gate_up_proj_bias": (12,), "down_proj": (150, 6)}  # two pages, in half types


class Made:
    """A Store whose experts are made up. change: {(layer, expert): weights -> None} to spoil some."""

    def __init__(self, dtype=torch.bfloat16, layers=LAYERS, experts=EXPERTS, shapes=None, change=None) -> None:
        shapes = SHAPES if shapes is None else shapes
        self.layers, self.experts, self.shapes, self.change = layers, experts, shapes, change or {}
        self.layout = Layout(tuple(shapes), tuple(shapes.values()), dtype)
        self.closed = False

    def weights(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * layer + expert)
        drawn = {name: torch.randn(shape, generator=generator) for name, shape in self.shapes.items()}
        found = {name: weights.to(self.layout.dtype) for name, weights in drawn.items()}
        self.change.get((layer, expert), lambda _: None)(found)
        return found

    def read(self, layer: int, expert: int, target: memoryview) -> int:
        record = torch.frombuffer(target, dtype=torch.uint8)
        record.random_()  # noise in the gaps, other every time
        views = self.layout.views(record[None])
        for name, weights in self.weights(layer, expert).items():
            views[name][0] = weights
        return self.layout.weight_bytes

    def close(self) -> None:
        self.closed = True


def target_of(store) -> tuple[torch.Tensor, memoryview]:
    """A slot buffer of one row, and the memory behind it."""
    buffer = page_aligned(1, store.layout.record_bytes)
    return buffer, memoryview(buffer[0].numpy())


def read_weights(store, layer: int, expert: int) -> dict[str, torch.Tensor]:
    buffer, target = target_of(store)
    store.read(layer, expert, target)
    return {name: view[0].clone() for name, view in store.layout.views(buffer).items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


# ---- a checkpoint folder --------------------------------------------------------------------------------------------
PLAIN = {
    "model.embed_tokens.weight": torch.arange(30, dtype=torch.float32).view(10, 3).bfloat16(),
    "model.layers.0.mlp.gate.weight": torch.linspace(-1, 1, 15).view(5, 3),
    "model.norm.weight": torch.ones(3, dtype=torch.float16),
    "model.position": torch.arange(3),
    "model.flag": torch.tensor([True]),
    "model.empty": torch.empty(0, 3),
}
OURS = {  # experts' own tensors, which stay out
    f"model.layers.{layer}.mlp.experts.{expert}.up.weight": torch.full((4, 3), float(expert))
    for layer in range(2)
    for expert in range(2)
}


def write_source(folder: Path, *, shards: int = 1) -> Path:
    """Configuration, tokenizer, readme and weights in one file or several; the experts' tensors are OURS."""
    folder.mkdir(parents=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (folder / name).write_text(json.dumps({"name": name}), encoding="utf-8")
    (folder / "merges.txt").write_text("a b\n", encoding="utf-8")
    (folder / "README.md").write_text("# A model\n", encoding="utf-8")
    tensors = {**PLAIN, **OURS}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names, where = sorted(tensors), {}
    for n in range(shards):
        file = f"model-{n + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in names[n::shards]}, folder / file, metadata={"format": "pt"})
        where |= {name: file for name in names[n::shards]}
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder
