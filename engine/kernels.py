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
from numba import njit, prange, types
from numba.extending import overload

_BLOCK = 64  # outputs a thread takes at once: many to a thread, and each long enough to be worth waking one
_WAKING_BYTES = 1 << 21  # fewer are read by the calling thread while another would wake up
DTYPES = (torch.bfloat16, torch.float32)
_OPTIONS = {"cache": True, "fastmath": True, "nogil": True}  # fastmath: sums in vectors


def _number(x):
    """An element as float32; a bfloat16 comes as uint16, the upper half of one."""


@overload(_number, inline="always")
def _number_of_type(x):
    if isinstance(x, types.Integer):
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


@njit(inline="always")
def _jobs(outputs):
    """Blocks of outputs, of all K."""
    return outputs.shape[0] * ((outputs.shape[1] + _BLOCK - 1) // _BLOCK)


@njit(inline="always", fastmath=True)
def _block(weight, stride, rows, inputs, outputs, job):
    blocks = (outputs.shape[1] + _BLOCK - 1) // _BLOCK
    k, first = job // blocks, job % blocks * _BLOCK
    x = inputs[min(k, inputs.shape[0] - 1)]
    for o in range(first, min(first + _BLOCK, outputs.shape[1])):
        start = rows[k] * stride + o * x.size
        line = weight[start : start + x.size]
        total = np.float32(0.0)
        for i in range(x.size):
            total += _number(line[i]) * x[i]
        outputs[k, o] = total


# two functions and not one compiled twice: numba's cache does not know `parallel`
@njit(**_OPTIONS)
def _alone(weight, stride, rows, inputs, outputs):
    for job in range(_jobs(outputs)):
        _block(weight, stride, rows, inputs, outputs, job)


@njit(parallel=True, **_OPTIONS)
def _together(weight, stride, rows, inputs, outputs):
    for job in prange(_jobs(outputs)):
        _block(weight, stride, rows, inputs, outputs, job)


def products(weight: torch.Tensor, rows: np.ndarray, inputs: torch.Tensor) -> torch.Tensor:
    """weight [R, O, I] in one of DTYPES, each row in one piece; rows [K] int64; inputs [K or 1, I]: [K, O] float32."""
    outputs = torch.empty(len(rows), weight.shape[1])
    run = _together if len(rows) * weight[0].nbytes >= _WAKING_BYTES else _alone
    stride = weight.stride(0)
    flat = weight.as_strided([(len(weight) - 1) * stride + weight[0].numel()], [1])  # numba must see it in one piece
    if weight.dtype == torch.bfloat16:
        flat = flat.view(torch.uint16)
    run(flat.numpy(), stride, rows, inputs.float().numpy(), outputs.numpy())
    return outputs


def set_threads() -> None:
    """As many as torch has, at most as many as numba was started with."""
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
