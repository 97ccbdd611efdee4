"""Where in a checkpoint does each expert lie? Found, counted and measured before any weight is read.

Every parameter of every experts module must come from tensors that hold each expert once: one tensor an expert, or one
for all, whatever a family does, layer by layer. Their shapes are proved by running transformers' own operations on the
meta device.

    experts = find_experts(Path("my-model"), torch.bfloat16)
    experts.layers[3][0].pieces["mlp.experts.*.down_proj.weight"][17]      # what expert 17 of layer 3 has of it

Axes: L MoE layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.conversion import OneExpert, Source, convert, sources
from engine.errors import UserError, error
from engine.hook import experts_modules
from engine.record import Layout
from engine.safetensors_files import Stored, dtype_of, read_headers
from engine.skeleton import meta_model

_TODO = "check the checkpoint against its config.json, or fetch it again"


@dataclass(frozen=True, slots=True)
class Piece:
    """What one expert has of one tensor; shape is [1, ...] where the tensor holds all experts."""

    path: Path
    start: int  # its first byte in the file
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


@dataclass(frozen=True)
class Part:
    """One parameter of a layer's experts (several, where a converter splits) and what each expert has of it."""

    source: Source
    pieces: dict[str, list[Piece]]  # {source pattern: [E]}, in the order of the operations


@dataclass(frozen=True)
class Experts:
    """All experts of a checkpoint."""

    layout: Layout
    count: int  # E
    paths: tuple[str, ...]  # [L] of the experts modules
    layers: tuple[tuple[Part, ...], ...]  # [L]
    model: OneExpert


@dataclass(frozen=True)
class _Search:
    """What is known before the experts are found."""

    folder: Path
    tensors: dict[str, Stored]
    found: dict[str, Source]
    layout: Layout
    count: int  # E
    model: OneExpert


def find_experts(folder: Path, dtype: torch.dtype) -> Experts:
    """UserError where a file is not whole, an expert is missing or there twice, or a tensor has no right shape."""
    tensors = read_headers(folder)
    model = meta_model(folder, dtype)
    modules = experts_modules(model)
    if not modules:
        raise error(f"{folder} has no routed experts", "a Mixture-of-Experts model", "choose another model")
    shapes = {path: (Layout.of_module(module, dtype), module.num_experts) for path, module in modules.items()}
    layout, count = next(iter(shapes.values()))
    for path, shape in shapes.items():
        if shape != (layout, count):
            raise error(f"{folder}: experts of {path} unlike those before", "one shape", "choose another model")
    search = _Search(folder, tensors, sources(model, tensors), layout, count, OneExpert(model))
    layers = tuple(_layer(search, path) for path in modules)
    return Experts(layout, count, tuple(modules), layers, search.model)


def _layer(search: _Search, path: str) -> tuple[Part, ...]:
    """The parts that make every parameter of one experts module."""
    layout = search.layout
    wants = {f"{path}.{name}": (1, *shape) for name, shape in zip(layout.names, layout.shapes, strict=True)}
    parts, made = [], set()
    for target in wants:
        source = search.found.get(target)
        if source is None and target in made:  # a converter splits, and its source has the name of another
            continue
        if source is None:
            raise error(f"{search.folder}: {target} is missing", "the weights of every expert", _TODO)
        if source.twice or target in made:
            raise _twice(search, source)
        part = Part(source, {pattern: _pieces(search, source, pattern) for pattern in source.parts})
        made |= _made(search, part, wants)
        parts.append(part)
    return tuple(parts)


def _pieces(search: _Search, source: Source, pattern: str) -> list[Piece]:
    """What each expert [E] has of the tensors that match one pattern."""
    stored, count = [search.tensors[name] for name in source.keys[pattern]], search.count
    first = stored[0]
    if "*" in pattern:
        _check_numbers(search.folder, source.keys[pattern], count)
        for other in stored:
            if other.shape != first.shape:
                raise error(
                    f"{other.path}: tensor {other.name} has shape {list(other.shape)}",
                    f"{list(first.shape)}, as {first.name} has",
                    _TODO,
                )
        return [Piece(one.path, one.start, one.nbytes, dtype_of(one), one.shape) for one in stored]
    if len(stored) > 1:
        raise _twice(search, source)
    if not first.shape or first.shape[0] != count:
        raise error(
            f"{first.path}: tensor {first.name} has shape {list(first.shape)}", f"{count} experts on axis 0", _TODO
        )
    nbytes, shape, dtype = first.nbytes // count, (1, *first.shape[1:]), dtype_of(first)
    return [Piece(first.path, first.start + expert * nbytes, nbytes, dtype, shape) for expert in range(count)]


def _check_numbers(folder: Path, names: list[str], count: int) -> None:
    """Tensors of single experts, in transformers' order, which is the experts': each number from 0 must be there."""
    columns = list(zip(*(name.split(".") for name in names), strict=False))
    numbered = [all(map(str.isdigit, column)) and len(set(column)) == len(names) > 1 for column in columns]
    where = numbered.index(True) if any(numbered) else None
    numbers = [] if where is None else [int(number) for number in columns[where]]
    missing = sorted(set(range(count)) - set(numbers))
    if numbers and missing and set(numbers) < set(range(count)):
        parts = names[0].split(".")
        parts[where] = str(missing[0])
        raise error(f"{folder}: tensor {'.'.join(parts)} is missing ({len(missing)} such)", f"{count} experts", _TODO)
    if numbers != list(range(count)):
        raise error(f"{folder}: {len(names)} tensors like {names[0]}", f"one of each of {count} experts", _TODO)


def _made(search: _Search, part: Part, wants: dict[str, tuple[int, ...]]) -> set[str]:
    """The parameters that a part makes of one expert, all of the right shape."""
    first = {pattern: pieces[0] for pattern, pieces in part.pieces.items()}
    empty = {pattern: [torch.empty(piece.shape, device="meta")] for pattern, piece in first.items()}
    try:
        made = {name: tuple(value.shape) for name, value in convert(part.source, empty, search.model).items()}
    except (IndexError, KeyError, RuntimeError, ValueError):  # shapes that do not go together, or another count of them
        made = {part.source.target: ()}
    wrong = [name for name, shape in made.items() if shape != wants.get(name)]
    if wrong:
        some = [search.tensors[part.source.keys[pattern][0]] for pattern in part.pieces]
        given = " and ".join(f"{stored.name} {list(stored.shape)}" for stored in some)
        raise error(
            f"{some[0].path}: {given} does not make {wrong[0]}",
            f"{list(wants[wrong[0]][1:])} an expert" if wrong[0] in wants else "parameters of the model",
            _TODO,
        )
    return set(made)


def _twice(search: _Search, source: Source) -> UserError:
    some = sorted(source.names)
    return error(
        f"{search.folder}: {source.target} is there twice, as {some[0]} and as {some[-1]}", "one of them", _TODO
    )
