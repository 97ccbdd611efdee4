"""Checkpoints as users have them: every layout on disk that transformers reads, whole or in shards.

original   one tensor an expert and projection, as the family's files are (where it has such a layout)
fused      the model's own parameters, all experts of a layer in one tensor
mixed      the first layer original, the others fused
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from engine.hook import experts_modules
from engine.record import page_aligned

LAYOUTS = ("original", "fused", "mixed")
HALF = (torch.bfloat16, torch.bfloat16)  # (on disk, of the run)
SINGLE = (torch.float32, torch.float32)


def tensors_of(model, layout):
    """{name: tensor} as the layout has them."""
    fused = {name: value.contiguous() for name, value in model.state_dict().items()}
    if layout == "fused":
        return fused
    if layout == "original":
        return {name: value.contiguous() for name, value in revert_weight_conversion(model, fused).items()}
    first = next(iter(experts_modules(model)))
    mine = {name: value for name, value in fused.items() if name.startswith(first)}
    others = {name: value for name, value in fused.items() if not name.startswith(first)}
    return others | {name: value.contiguous() for name, value in revert_weight_conversion(model, mine).items()}


def write(folder, config, tensors, shards=1):
    """A checkpoint of so many files; more shards than tensors: one tensor a file."""
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    config.save_pretrained(folder)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(tensors)
    shards = min(shards, len(names))
    weight_map = {}
    for i in range(shards):
        shard = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[i::shards]
        save_file({name: tensors[name] for name in mine}, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, shard)
    write_index(folder, weight_map)
    return folder


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def save(model, folder, layout="original", shards=1, dtype=torch.float32):
    return write(folder, model.config, {n: v.to(dtype) for n, v in tensors_of(model, layout).items()}, shards)


def edit(folder, change, file="model.safetensors"):
    """change(tensors) -> None on the tensors of one file, which is written again."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})


def reference(folder, dtype):
    """What from_pretrained makes, in memory of its own: float32 matrix products differ in their last bits by the
    alignment of their operands, and from_pretrained leaves them where the file has them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def records(store, layer):
    """Every expert of a layer as the store reads it, in memory that was not zero before: [E, record_bytes]."""
    buffer = page_aligned(store.experts, store.layout.record_bytes).fill_(0xFF)
    for expert in range(store.experts):
        store.read(layer, expert, memoryview(buffer[expert].numpy()))
    return buffer


def fill(model, store):
    """Put what the store reads in the place of a skeleton's experts."""
    for layer, module in enumerate(experts_modules(model).values()):
        for name, values in store.layout.views(records(store, layer)).items():
            setattr(module, name, torch.nn.Parameter(values, requires_grad=False))
    return model
