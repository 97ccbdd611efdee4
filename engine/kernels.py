"""The matrix-vector products of one decoded token on a CPU: its experts', and its predictions'.

Of its experts, straight out of the slots:

    outputs[k] = weight[rows[k]] @ inputs[k]        weight [R, O, I] float32 or bfloat16, k of K

What transformers' kernels do with K gathered experts is a copy and then a product, or K products with a dispatch each;
this reads every weight once, where it lies, at the speed of memory. Sums are float32. R is not walked over: what a row
costs does not depend on how many there are. Inside, the weight is flat, row r beginning at r * stride: numba vectorises
over what it knows to lie in one piece. Threads are numba's; `set_threads` follows torch's.

Of its predictions, product, softmax and the best N in one call (`foretell`): between layers whose experts fill every
cache, each further call costs as much as its own work.
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


@njit(cache=True, nogil=True)
def to_chances(claims, top_k, odds):
    """In place: claims [n, N], falling, as chances to be among the K chosen (engine.predictors.chances)."""
    for n in range(claims.shape[0]):
        bar = max(claims[n, min(top_k, claims.shape[1] - 1)], 1e-37)
        for i in range(claims.shape[1]):
            ratio = odds * min(claims[n, i] / bar, 1e3) ** 4
            claims[n, i] = ratio / (1.0 + ratio)


@njit(**_OPTIONS)
def _foretell(weight, x, bias, experts, ids, claims):
    """As `foretell`; weight [n E D] flat, x [D]."""
    numbers = np.empty(x.size, np.float32)
    for i in range(x.size):
        numbers[i] = _number(x[i])
    odds = np.empty(experts, np.float32)
    for target in range(weight.size // (experts * x.size)):
        for e in range(experts):
            row = target * experts + e
            line = weight[row * x.size : (row + 1) * x.size]
            total = bias[row] if bias.size else np.float32(0.0)
            for i in range(x.size):
                total += _number(line[i]) * numbers[i]
            odds[e] = total
        largest = odds.max()
        total = np.float32(0.0)
        for e in range(experts):
            odds[e] = np.exp(odds[e] - largest)
            total += odds[e]
        _best(odds, total, ids[target], claims[target])


@njit(inline="always")
def _best(odds, total, ids, claims):
    """The largest in falling order; of equal ones the lower id comes first, because it is met first."""
    known = 0
    for e in range(odds.size):
        claim = odds[e] / total
        if known < ids.size:
            known += 1
        elif claim <= claims[known - 1]:
            continue
        place = known - 1
        while place > 0 and claims[place - 1] < claim:
            ids[place], claims[place] = ids[place - 1], claims[place - 1]
            place -= 1
        ids[place], claims[place] = e, claim


def products(weight: torch.Tensor, rows: np.ndarray, inputs: torch.Tensor) -> torch.Tensor:
    """weight [R, O, I] in one of DTYPES, each row in one piece; rows [K] int64; inputs [K or 1, I]: [K, O] float32."""
    outputs = torch.empty(len(rows), weight.shape[1])
    run = _together if len(rows) * weight[0].nbytes >= _WAKING_BYTES else _alone
    stride = weight.stride(0)
    flat = weight.as_strided([(len(weight) - 1) * stride + weight[0].numel()], [1])  # numba must see it in one piece
    run(_array(flat), stride, rows, inputs.float().numpy(), outputs.numpy())
    return outputs


def foretell(
    weight: torch.Tensor, x: torch.Tensor, bias: np.ndarray, experts: int, ids: np.ndarray, claims: np.ndarray
) -> None:
    """Write the N largest of softmax(weight x + bias) of n targets into ids [>= n, N] int32, claims float64, falling.

    weight [n E, D] in one piece, x [1, D], both in one of DTYPES; bias [n E] float32, or empty. What is not written,
    beyond the last target or expert, stays as it is.
    """
    _foretell(_array(weight.view(-1)), _array(x.view(-1)), bias, experts, ids, claims)


def _array(flat: torch.Tensor) -> np.ndarray:
    """As numba takes it: bfloat16 as uint16."""
    return (flat.view(torch.uint16) if flat.dtype == torch.bfloat16 else flat).numpy()


def set_threads() -> None:
    """As many as torch has, at most as many as numba was started with."""
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
