"""One expert as bytes: the record that a store keeps, a link carries and a slot holds.

The parameters of a transformers experts module are [E, ...]; a record is what one expert has of each of them, one after
another, each beginning at a multiple of 64 bytes, the whole a multiple of 4,096 (what O_DIRECT asks of a read). A slot
buffer is [rows, record_bytes]; `views` shows it as the module's own parameters [rows, ...], without a copy. Where the
layout has `bits`, matrices are codes and then scales (engine/quantised.py), and everything else is as it was.

    layout = Layout.of_module(experts_module, torch.bfloat16)
    module.gate_up_proj = Parameter(layout.views(buffer)["gate_up_proj"])
"""

from __future__ import annotations

import itertools
import mmap
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from engine.errors import error
from engine.quantisation import ALIGNED, PAGE, part_bytes, up
from engine.quantised import CODE_DTYPES, SCALE_DTYPES, Quantised

_LARGE_PAGE = 1 << 21  # bytes


@dataclass(frozen=True)
class Layout:
    """Where each parameter of one expert lies in its record; the same for all experts of a model."""

    names: tuple[str, ...]  # as the experts module calls them, in its order
    shapes: tuple[tuple[int, ...], ...]  # of one expert
    dtype: torch.dtype  # of the run
    bits: int | None = None  # of a weight in a matrix; None: the dtype's
    group: int | None = None  # inputs that share a scale
    transposed: bool = False  # matrices are [I, O], I summed over

    @classmethod
    def of_module(cls, module: nn.Module, dtype: torch.dtype) -> Layout:
        """Of a stock experts module with E experts, on whatever device; parameters without an expert axis stay out."""
        own = {
            name: tuple(parameter.shape[1:])
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.ndim > 1 and parameter.shape[0] == module.num_experts
        }
        if not own:
            raise error(f"{type(module).__name__} without parameters by expert", "[E, ...] parameters", "report it")
        return cls(tuple(own), tuple(own.values()), dtype, transposed=bool(getattr(module, "is_transposed", False)))

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(O, I) of every matrix of one expert."""
        two = {name: shape for name, shape in zip(self.names, self.shapes, strict=True) if len(shape) == 2}
        return {name: shape[::-1] if self.transposed else shape for name, shape in two.items()}

    @property
    def part_bytes(self) -> tuple[int, ...]:
        return tuple(sum(self._sizes(shape)) for shape in self.shapes)

    def _sizes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return part_bytes(shape, self.bits, self.group, self.dtype.itemsize)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte at which each parameter begins."""
        found, at = [], 0
        for size in self.part_bytes:
            found.append(at)
            at += up(size, ALIGNED)
        return tuple(found)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights alone: what computing one expert reads."""
        return sum(self.part_bytes)

    @property
    def record_bytes(self) -> int:
        return up(self.offsets[-1] + self.part_bytes[-1], PAGE)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor | Quantised]:
        """buffer [rows, record_bytes] uint8, rows contiguous, as parameters [rows, ...] over the same memory."""
        found, matrices = {}, self.matrices if self.bits else {}
        for name, shape, at in zip(self.names, self.shapes, self.offsets, strict=True):
            sizes = self._sizes(shape)
            if name not in matrices:
                found[name] = _view(buffer, at, sizes[0], self.dtype).unflatten(1, shape)
                continue
            codes = _view(buffer, at, sizes[0], CODE_DTYPES[self.bits])
            scales = _view(buffer, at + sizes[0], sizes[1], SCALE_DTYPES[self.bits])
            outputs = (matrices[name][0], -1)
            found[name] = Quantised(codes.unflatten(1, outputs), scales.unflatten(1, outputs), self.transposed)
        return found


def _view(buffer: torch.Tensor, at: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, size / itemsize]: the same bytes of every row."""
    return buffer.view(dtype)[:, at // dtype.itemsize : (at + size) // dtype.itemsize]


class Store(Protocol):
    """Where experts wait. `read` may be called from several threads at once.

    A store that can read a part of a record (`divisible`) also has `read_part(layer, expert, target, first)`: fill
    `target`, as many whole pages as it holds, from byte `first` of the record on. The rest is as in `read`.
    """

    layers: int
    experts: int
    layout: Layout

    def read(self, layer: int, expert: int, target: memoryview) -> int:
        """Fill `target` [record_bytes], page-aligned, with one expert's record.

        Returns the bytes that were read from where the experts wait. Raises UserError where the bytes are not there or
        not whole, OSError where the device fails; what `target` holds is undefined then.
        """

    def close(self) -> None: ...


def is_finite(weight: torch.Tensor) -> bool:
    """Whether every element is; True of other dtypes. Takes no memory: isfinite(weight) would, twice over."""
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not weight.numel():
        return True
    return all(torch.isfinite(extreme) for extreme in weight.aminmax())  # NaN is the least and the largest of any


def check_finite(layout: Layout, record: torch.Tensor, name: str) -> None:
    """UserError where a weight of one expert is not finite. record [record_bytes] uint8; name: the expert's."""
    for part, values in layout.views(record[None]).items():
        if not is_finite(values.scales if isinstance(values, Quantised) else values):
            raise error(f"{name}: {part} is not finite", "finite weights", "check the checkpoint, fetch it again")


def divisible(store: Store) -> bool:
    """Whether a part of a record can be read."""
    return hasattr(store, "read_part")


def pieces_of(record_bytes: int, pieces: int) -> list[tuple[int, int]]:
    """(first byte, byte after the last) of as many equal parts of a record, in whole pages, or of as many as it has."""
    pages = record_bytes // PAGE
    pieces = min(pieces, pages)
    cuts = [PAGE * (pages * n // pieces) for n in range(pieces + 1)]
    return list(itertools.pairwise(cuts))


def read_record(store: Store, layer: int, expert: int, target: memoryview, first: int | None = None) -> int:
    """store.read, or of a part store.read_part, where a device that fails is a UserError too."""
    try:
        if first is not None:
            return store.read_part(layer, expert, target, first)
        return store.read(layer, expert, target)
    except OSError as exc:
        raise error(
            f"layer {layer}, expert {expert}: {exc.strerror or exc}",
            "a device that gives back what was written",
            "check the disk, then verify the store or fetch the checkpoint again",
        ) from exc


def page_aligned(rows: int, width: int) -> torch.Tensor:
    """[rows, width] uint8 of zeroed, page-aligned memory of its own; pages are taken when they are first written.

    Large pages where the system has them, in memory that is private: O_DIRECT and the kernels are faster on them.
    """
    memory = mmap.mmap(-1, rows * width + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if rows * width >= _LARGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _LARGE_PAGE
    return whole[start : start + rows * width].view(rows, width)
