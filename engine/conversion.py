"""Which checkpoint tensors become which parameter? transformers' own conversion mapping, read as a table.

A checkpoint may hold one tensor an expert and projection where the model has one parameter for all of them, or call
things by other names. transformers knows how its families were stored, as a list of renamings and of converters
(operations on what source patterns collect); `from_pretrained` applies it to whole parameters. Here the same objects
are asked for names, and the same operations run on the tensors of one expert.

    found = sources(model, tensor_names)
    found["model.layers.3.mlp.experts.gate_up_proj"].keys
    # {"mlp.experts.*.gate_proj.weight": ["model.layers.3.mlp.experts.0.gate_proj.weight", ...], ...}
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)


@dataclass
class Source:
    """What becomes one parameter, or the several that one converter makes."""

    target: str  # name of the parameter, the first of several
    converter: WeightConverter | None = None  # None: renamed at most
    keys: dict[str, list[str]] = field(default_factory=dict)  # {source pattern, or the key alone: keys of the file}

    @property
    def names(self) -> list[str]:
        return [key for keys in self.keys.values() for key in keys]

    @property
    def twice(self) -> bool:
        """Whether the file says more than once what the parameter is: fused and by expert, under two names."""
        if self.converter is None:
            return len(self.keys) > 1
        return any(pattern not in self.converter.source_patterns for pattern in self.keys)

    @property
    def stacks(self) -> bool:
        """Whether one expert's part is its tensors one after another, in the order of `parts`, and nothing else."""
        if self.converter is None:
            return True
        return len(self.converter.target_patterns) == 1 and all(_stacks(op) for op in self.converter.operations)

    @property
    def parts(self) -> list[str]:
        """The patterns that are there, in the order in which they are concatenated."""
        if self.converter is None:
            return list(self.keys)
        return [pattern for pattern in self.converter.source_patterns if pattern in self.keys]


class OneExpert:
    """Stands in for the model where an operation asks for the shape of a parameter: of one expert it is [1, ...]."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def get_parameter(self, name: str) -> torch.Tensor:
        return self._model.get_parameter(name)[:1]

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


def sources(model: nn.Module, names: Iterable[str]) -> dict[str, Source]:
    """{parameter: its source} of the names that the model uses, in transformers' order; the others are left out."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, wanted = model.base_model_prefix, model.state_dict()
    found: dict[str, Source] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:  # a name of the model's own that looks like an old one
            target, pattern = rename_source_key(name, [], [], prefix, wanted)
        if target not in wanted:
            continue
        source = found.setdefault(target, Source(target))
        if pattern is not None:
            source.converter = by_pattern[pattern]
        source.keys.setdefault(name if pattern is None else pattern, []).append(name)
    return found


def convert(source: Source, tensors: dict[str, list[torch.Tensor]], model: OneExpert) -> dict[str, torch.Tensor]:
    """{parameter: tensor [1, ...]} of one expert; tensors: by pattern, one tensor each, [1, ...] where it was fused."""
    if source.converter is None:
        return {source.target: next(iter(tensors.values()))[0]}
    converter = deepcopy(source.converter)  # it collects tensors in itself; threads must not share it
    for pattern, collected in tensors.items():
        for tensor in collected:
            converter.add_tensor(source.target, pattern, pattern, tensor)
    return converter.convert(source.target, model=model, config=model.config)


def _stacks(operation: object) -> bool:
    if isinstance(operation, MergeModulelist):
        return operation.dim == 0
    return (
        isinstance(operation, Concatenate) and operation.dim == 1
    )  # after the axis of experts comes the first of its own
