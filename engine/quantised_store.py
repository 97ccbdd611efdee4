"""A store in few bits made of one in full, and the way back: two stores (engine.record.Store) wrapped round another.

few = QuantisedStore(store, bits=4, group=64)       # what `pack` reads
pack(few, ..., findings=few.report)                 # how far its weights are from the others, once all were read
DequantisedStore(PackedStore("my-4-bit-model"))     # what the stock model and the emulator compute with
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

from engine.errors import error
from engine.quantisation import check_group, effective_bits
from engine.quantised import Quantised, quantise
from engine.record import Store, check_finite, page_aligned, read_record


class QuantisedStore:
    """Every read quantises one expert. UserError on a size that the group does not divide."""

    def __init__(self, store: Store, bits: int, group: int) -> None:
        layout = store.layout
        if layout.bits is not None:
            raise error(f"experts of {layout.bits} bits", "experts that are not quantised", "pack the checkpoint")
        if odd := [name for name, shape in zip(layout.names, layout.shapes, strict=True) if len(shape) > 2]:
            raise error(f"{odd[0]} of more than two axes", "matrices and biases", "pack it without --bits")
        for name, (_outputs, inputs) in layout.matrices.items():
            check_group(name, inputs, bits, group)
        self._store = store
        self.layers, self.experts = store.layers, store.experts
        self.layout = dataclasses.replace(layout, bits=bits, group=group)
        self._squares: dict[tuple[int, int], np.ndarray] = {}  # [matrices, 2]: of errors and of weights, summed

    def read(self, layer: int, expert: int, target: memoryview) -> int:
        plain, given = self._store.layout, page_aligned(1, self._store.layout.record_bytes)
        size = read_record(self._store, layer, expert, memoryview(given[0].numpy()))
        check_finite(plain, given[0], f"layer {layer}, expert {expert}")
        views = self.layout.views(torch.frombuffer(target, dtype=torch.uint8)[None])
        squares = []
        for name, weight in plain.views(given).items():
            if name not in plain.matrices:
                views[name].copy_(weight)
                continue
            found = quantise(weight, self.layout.bits, self.layout.group, transposed=plain.transposed)
            views[name].codes.copy_(found.codes)
            views[name].scales.copy_(found.scales)
            off = found.dequantise(torch.float32).sub_(weight)
            squares.append([part.double().square().sum().item() for part in (off, weight)])
        self._squares[layer, expert] = np.array(squares)
        return size

    def report(self) -> dict:
        """What was lost in those that were read: root mean square errors over that of the weights."""
        names, bits, group = list(self.layout.matrices), self.layout.bits, self.layout.group
        places = sorted(self._squares)
        squares = np.array([self._squares[place] for place in places])  # [experts, matrices, 2]
        errors = _relative(squares.sum(1))
        worst = int(errors.argmax())
        found = {
            "bits": bits,
            "group": group,
            "effective_bits": effective_bits(bits, group),
            "relative_error": float(_relative(squares.sum((0, 1)))),
            "relative_error_by_parameter": dict(zip(names, _relative(squares.sum(0)).tolist(), strict=True)),
            "worst_expert": {
                "layer": places[worst][0],
                "expert": places[worst][1],
                "relative_error": float(errors[worst]),
            },
        }
        return {"quantisation": found}

    def close(self) -> None:
        self._store.close()


def _relative(squares: np.ndarray) -> np.ndarray:
    """[..., 2] of errors and of weights: [...], zero where there are no weights but zeros."""
    return np.sqrt(squares[..., 0] / np.where(squares[..., 1] > 0, squares[..., 1], math.inf))


class DequantisedStore:
    """Every read dequantises one expert, into the dtype of the run."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.layers, self.experts = store.layers, store.experts
        self.layout = dataclasses.replace(store.layout, bits=None, group=None)

    def read(self, layer: int, expert: int, target: memoryview) -> int:
        packed = self._store.layout
        given = page_aligned(1, packed.record_bytes)
        size = read_record(self._store, layer, expert, memoryview(given[0].numpy()))
        views = self.layout.views(torch.frombuffer(target, dtype=torch.uint8)[None])
        for name, value in packed.views(given).items():
            views[name].copy_(value.dequantise(packed.dtype) if isinstance(value, Quantised) else value)
        return size

    def close(self) -> None:
        self._store.close()
