"""How is one expert read from a Hugging Face checkpoint in place, without another copy of it on disk?

A read covers the pages of the expert's tensors, past the page cache where the filesystem can (else the store is
`cached`), into a buffer of its own; neighbours in the file come with one read. Where the expert's part is its tensors
one after another they are copied into the record as they are, else they go through transformers' own operations.
Nothing is opened before engine.expert_tensors has found every expert.

    with CheckpointStore(Path("my-model"), torch.bfloat16) as store:
        store.read(layer=3, expert=17, target=memoryview(buffer))
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine.conversion import Source, convert
from engine.direct import open_direct, read_pages
from engine.expert_tensors import Part, Piece, find_experts
from engine.record import PAGE, Layout, page_aligned

_GAP_BYTES = 1 << 16  # read along between two tensors of an expert: cheaper than a read of its own


@dataclass(frozen=True, slots=True)
class _Read:
    path: Path
    start: int  # whole pages
    length: int
    needed: int  # bytes up to the end of the last tensor: the file may end there
    at: int  # in the buffer


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one expert is read. A place is where in the buffer a piece begins."""

    reads: tuple[_Read, ...]
    copies: tuple[tuple[int, Piece, int], ...]  # (place, piece, byte of the record)
    conversions: tuple[tuple[Source, dict[str, tuple[int, Piece]]], ...]  # {pattern: (place, piece)}


class CheckpointStore:
    """engine.record.Store over a checkpoint folder; dtype is the run's.

    `cached`: some file may be answered by the page cache. UserError as find_experts raises it.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder, found = Path(folder), find_experts(Path(folder), dtype)
        self.layers, self.experts, self.layout = len(found.layers), found.count, found.layout
        self._model, self._paths = found.model, found.paths
        self.tensor_names = {name for parts in found.layers for part in parts for name in part.source.names}
        self._plans = [[_plan(parts, found.layout, e) for e in range(found.count)] for parts in found.layers]
        ends = [at + size for at, size in zip(self.layout.offsets, self.layout.part_bytes, strict=True)]
        begins = (*self.layout.offsets[1:], self.layout.record_bytes)
        self._gaps = [(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]
        reads = [read for plans in self._plans for plan in plans for read in plan.reads]
        self._buffer_bytes = max(read.at + read.length for read in reads)
        self._buffers: list[np.ndarray] = []  # those not in use: as many as have ever read at once
        opened = {path: open_direct(path) for path in sorted({read.path for read in reads})}
        self._descriptors = {path: descriptor for path, (descriptor, _) in opened.items()}
        self.cached = any(cached for _, cached in opened.values())

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors, self._buffers = {}, []

    def name(self, layer: int, expert: int) -> str:
        """What to call an expert in a message."""
        return f"{self._folder}: expert {expert} of {self._paths[layer]}"

    def read(self, layer: int, expert: int, target: memoryview) -> int:
        """As engine.record.Store says; bytes of the record that belong to no parameter are zero."""
        plan = self._plans[layer][expert]
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = page_aligned(1, self._buffer_bytes)[0].numpy()
        try:
            count = 0
            for read in plan.reads:
                pages = memoryview(buffer[read.at : read.at + read.length])
                count += read_pages(self._descriptors[read.path], pages, read.start, read.needed, read.path)
            self._fill(plan, buffer, np.frombuffer(target, np.uint8))
        finally:
            self._buffers.append(buffer)
        return count

    def _fill(self, plan: _Plan, buffer: np.ndarray, record: np.ndarray) -> None:
        """From the buffer to the record [record_bytes]; numpy copies on one thread and without Python's lock."""
        layout = self.layout
        for start, stop in self._gaps:
            record[start:stop] = 0
        for place, piece, at in plan.copies:
            if piece.dtype == layout.dtype:
                record[at : at + piece.nbytes] = buffer[place : place + piece.nbytes]
            else:
                values = _values(buffer, place, piece)
                part = torch.from_numpy(record[at : at + values.numel() * layout.dtype.itemsize])
                part.view(layout.dtype).copy_(values.view(-1))
        if not plan.conversions:
            return
        parameters = layout.views(torch.from_numpy(record)[None])
        for source, pieces in plan.conversions:
            tensors = {
                pattern: [_values(buffer, place, piece).to(layout.dtype)] for pattern, (place, piece) in pieces.items()
            }
            for name, value in convert(source, tensors, self._model).items():
                parameters[name.rpartition(".")[2]].copy_(value)  # [1, ...]


def _plan(parts: Iterable[Part], layout: Layout, expert: int) -> _Plan:
    mine = [(part.source, {pattern: pieces[expert] for pattern, pieces in part.pieces.items()}) for part in parts]
    reads, places = _cover([piece for _, pieces in mine for piece in pieces.values()])
    begins = dict(zip(layout.names, layout.offsets, strict=True))
    copies, conversions = [], []
    for source, pieces in mine:
        if not source.stacks:
            conversions.append((source, {pattern: (places[piece], piece) for pattern, piece in pieces.items()}))
            continue
        at = begins[source.target.rpartition(".")[2]]
        for piece in pieces.values():
            copies.append((places[piece], piece, at))
            at += piece.nbytes // piece.dtype.itemsize * layout.dtype.itemsize
    return _Plan(tuple(reads), tuple(copies), tuple(conversions))


def _cover(pieces: list[Piece]) -> tuple[list[_Read], dict[Piece, int]]:
    """Reads of whole pages that cover the pieces, one for neighbours, and where each piece begins in the buffer."""
    groups: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda piece: (piece.path, piece.start)):
        last = groups[-1][-1] if groups else None
        if last and last.path == piece.path and piece.start <= last.stop + _GAP_BYTES:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    reads, places, at = [], {}, 0
    for group in groups:
        start, needed = group[0].start // PAGE * PAGE, group[-1].stop
        length = -(-needed // PAGE) * PAGE - start
        reads.append(_Read(group[0].path, start, length, needed - start, at))
        places |= {piece: at + piece.start - start for piece in group}
        at += length
    return reads, places


def _values(buffer: np.ndarray, place: int, piece: Piece) -> torch.Tensor:
    """A piece as the tensor that it is; a copy where the file puts it at no multiple of its elements' size."""
    flat = buffer[place : place + piece.nbytes]
    flat = flat.copy() if place % piece.dtype.itemsize else flat
    return torch.from_numpy(flat).view(piece.dtype).view(piece.shape)
