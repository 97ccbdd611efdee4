"""The matrix-vector products of one decoded token's experts, straight out of the slots, on a CPU.

    outputs[k] = weight[rows[k]] @ inputs[k]        weight [R, O, I] float32 or bfloat16, k of K

What transformers' kernels do with K gathered experts is a copy and then a product, or K products with a dispatch each;
this reads every weight once, where it lies, at the speed of memory. Sums are float32. R is not walked over: what a row
costs does not depend on how many there are. Inside, the weight is flat, row r beginning at r * stride: numba vectorises
over what it knows to lie in one piece. Threads are numba's; `set_threads` follows torch's.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from numba import njit, prange

_BLOCK = 64  # outputs a thread takes at once: many to a thread, and each long enough to be worth waking one
_WAKING_BYTES = 1 << 21  # fewer are read by the calling thread while another would wake up
_OPTIONS = {"cache": True, "fastmath": True, "nogil": True}  # fastmath: sums in vectors


@njit(inline="always")
def _jobs(outputs):
    """Blocks of outputs, of all K."""
    return outputs.shape[0] * ((outputs.shape[1] + _BLOCK - 1) // _BLOCK)


@njit(inline="always", fastmath=True)
def _bfloat16_block(weight, stride, rows, inputs, outputs, job):
    """weight: uint16, the upper halves of float32 numbers."""
    blocks = (outputs.shape[1] + _BLOCK - 1) // _BLOCK
    k, first = job // blocks, job % blocks * _BLOCK
    x = inputs[min(k, inputs.shape[0] - 1)]
    for o in range(first, min(first + _BLOCK, outputs.shape[1])):
        start = rows[k] * stride + o * x.size
        line = weight[start : start + x.size]
        total = np.float32(0.0)
        for i in range(x.size):
            total += np.uint32(np.uint32(line[i]) << np.uint32(16)).view(np.float32) * x[i]
        outputs[k, o] = total


@njit(inline="always", fastmath=True)
def _float32_block(weight, stride, rows, inputs, outputs, job):
    blocks = (outputs.shape[1] + _BLOCK - 1) // _BLOCK
    k, first = job // blocks, job % blocks * _BLOCK
    x = inputs[min(k, inputs.shape[0] - 1)]
    for o in range(first, min(first + _BLOCK, outputs.shape[1])):
        start = rows[k] * stride + o * x.size
        line = weight[start : start + x.size]
        total = np.float32(0.0)
        for i in range(x.size):
            total += line[i] * x[i]
        outputs[k, o] = total


# four functions and not two compiled twice: numba's cache does not know `parallel`
@njit(**_OPTIONS)
def _bfloat16(weight, stride, rows, inputs, outputs):
    for job in range(_jobs(outputs)):
        _bfloat16_block(weight, stride, rows, inputs, outputs, job)


@njit(parallel=True, **_OPTIONS)
def _bfloat16_by_threads(weight, stride, rows, inputs, outputs):
    for job in prange(_jobs(outputs)):
        _bfloat16_block(weight, stride, rows, inputs, outputs, job)


@njit(**_OPTIONS)
def _float32(weight, stride, rows, inputs, outputs):
    for job in range(_jobs(outputs)):
        _float32_block(weight, stride, rows, inputs, outputs, job)


@njit(parallel=True, **_OPTIONS)
def _float32_by_threads(weight, stride, rows, inputs, outputs):
    for job in prange(_jobs(outputs)):
        _float32_block(weight, stride, rows, inputs, outputs, job)


_KERNELS = {torch.bfloat16: (_bfloat16, _bfloat16_by_threads), torch.float32: (_float32, _float32_by_threads)}
DTYPES = tuple(_KERNELS)


def products(weight: torch.Tensor, rows: np.ndarray, inputs: torch.Tensor) -> torch.Tensor:
    """weight [R, O, I] in one of DTYPES, each row in one piece; rows [K] int64; inputs [K or 1, I]: [K, O] float32."""
    outputs = torch.empty(len(rows), weight.shape[1])
    alone, together = _KERNELS[weight.dtype]
    run = together if len(rows) * weight[0].nbytes >= _WAKING_BYTES else alone
    stride = weight.stride(0)
    flat = weight.as_strided([(len(weight) - 1) * stride + weight[0].numel()], [1])  # numba must see it in one piece
    if weight.dtype == torch.bfloat16:
        flat = flat.view(torch.uint16)
    run(flat.numpy(), stride, rows, inputs.float().numpy(), outputs.numpy())
    return outputs


def set_threads() -> None:
    """As many as torch has, at most as many as numba was started with."""
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
