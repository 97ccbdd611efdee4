"""10. products: K = 8 of 256 experts by one token out of a slot buffer, by bits and group, over bfloat16 in one run;
beside it torch's own kernels, called once an expert: `_weight_int4pack_mm_for_cpu` (whose layout is this CPU's, packed
for it here) and `_weight_int8pack_mm` (one scale an output). Why it matters: few bits make a fetch shorter; if they
made computing longer than bfloat16, they would give that back at every hit. Called by tests/bench.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from engine.kernels import products, quantised_products, set_threads
from engine.quantisation import BITS, GROUPS
from engine.quantised import quantise
from engine.record import Layout, page_aligned

EXPERTS, TOP_K = 256, 8
SIZES = ((2048, 1024), (1024, 1024))  # gate and up, down


def bench_products(threads: int, repeats: int) -> dict:
    """Interleaved rounds, every one over other experts; medians."""
    torch.set_num_threads(threads)
    set_threads()
    return {f"{outputs}x{inputs}": _size(outputs, inputs, 10 * repeats) for outputs, inputs in SIZES}


def _size(outputs: int, inputs: int, rounds: int) -> dict:
    random, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()  # of every expert: what it says is not timed
    x = torch.randn(1, inputs, generator=generator).bfloat16()
    plain = Layout(("w",), ((outputs, inputs),), torch.bfloat16)
    full = plain.views(page_aligned(EXPERTS, plain.record_bytes))["w"]
    full.copy_(weight)
    calls: dict[str, Callable[[list[int]], object]] = {"bfloat16": lambda rows: products(full, np.array(rows), x)}
    for bits in BITS:
        for group in GROUPS:
            layout = Layout(("w",), ((outputs, inputs),), torch.bfloat16, bits, group)
            few, found = layout.views(page_aligned(EXPERTS, layout.record_bytes))["w"], quantise(weight, bits, group)
            few.codes.copy_(found.codes)
            few.scales.copy_(found.scales)
            calls[f"{bits} in {group}"] = lambda rows, few=few: quantised_products(few, np.array(rows), x)
    calls["torch 4 in 64"], calls["torch 8"] = _torch_4(weight, x), _torch_8(weight, x)
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        rows = random.permutation(EXPERTS)[:TOP_K].tolist()
        for name, call in calls.items():
            began = time.perf_counter()
            call(rows)
            took[name].append(time.perf_counter() - began)
    medians = {name: 1e6 * float(np.median(values[1:])) for name, values in took.items()}  # the first compiles
    ratios = {name: value / medians["bfloat16"] for name, value in medians.items() if name != "bfloat16"}
    text = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    print(f"products {outputs}x{inputs}: bfloat16 {medians['bfloat16']:.0f} microseconds; over it {text}")
    return {"us": medians, "over_bfloat16": ratios}


def _torch_4(weight: torch.Tensor, x: torch.Tensor) -> Callable[[list[int]], object]:
    codes = torch.randint(0, 16, weight.shape, dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1).repeat(EXPERTS, 1, 1)
    scales = torch.ones(weight.shape[1] // 64, weight.shape[0], 2).bfloat16()
    return lambda rows: [torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed[row], 64, scales) for row in rows]


def _torch_8(weight: torch.Tensor, x: torch.Tensor) -> Callable[[list[int]], object]:
    codes = torch.randint(-128, 128, weight.shape, dtype=torch.int8).repeat(EXPERTS, 1, 1)
    scales = torch.ones(weight.shape[0]).bfloat16()
    return lambda rows: [torch.ops.aten._weight_int8pack_mm(x, codes[row], scales) for row in rows]
