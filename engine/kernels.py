"""The matrix-vector products of one decoded token on a CPU: its experts', and its predictions'.

Of its experts, straight out of the slots:

    outputs[k] = weight[rows[k]] @ inputs[k]        weight [R, O, I] float32 or bfloat16, k of K

What transformers' kernels do with K gathered experts is a copy and then a product, or K products with a dispatch each;
this reads every weight once, where it lies, at the speed of memory. Sums are float32. R is not walked over: what a row
costs does not depend on how many there are. Inside, the weight is flat, row r beginning at r * stride: numba vectorises
over what it knows to lie in one piece. Threads are numba's; `set_threads` follows torch's.

`quantised_products` is the same for weights of 4 and 8 bits (engine/quantised.py). Codes become float32 on the way, so
that the sums are those of the dequantised weights, and inputs are never rounded.

Of its predictions, product, softmax and the best N in one call (`foretell`): between layers whose experts fill every
cache, each further call costs as much as its own work.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from numba import njit, prange, types
from numba.extending import overload

from engine.quantised import BLOCK, Quantised

_BLOCK = 64  # outputs a thread takes at once: many to a thread, and each long enough to be worth waking one
_WAKING_BYTES = 1 << 21  # fewer are read by the calling thread while another would wake up
DTYPES = (torch.bfloat16, torch.float32)
_HALF = BLOCK // 2
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


# ---- weights in few bits ---------------------------------------------------------------------------------------------
def _part(codes, x, b):
    """Block b of the codes by its inputs x; of 4 bits by x `_prepared`: a byte's low half, and the whole byte."""


@overload(_part, inline="always")
def _part_of_type(codes, x, b):
    # unsigned places, which cannot count from the end: what could would not be read as vectors
    def four(codes, x, b):
        total = np.float32(0.0)
        for j in range(_HALF):
            byte = np.int32(codes[np.uint64(b * _HALF + j)])
            low, whole = x[np.uint64(b * BLOCK + j)], x[np.uint64(b * BLOCK + _HALF + j)]
            total += np.float32(byte & 15) * low + np.float32(byte) * whole
        return total

    def eight(codes, x, b):
        total = np.float32(0.0)
        for j in range(BLOCK):
            place = np.uint64(b * BLOCK + j)
            total += np.float32(codes[place]) * x[place]
        return total

    return eight if codes.dtype.signed else four


@njit(inline="always", fastmath=True)
def _block_of_codes(codes, scales, strides, rows, inputs, sums, outputs, job):
    """As `_block`. strides: from row to row and from output to output, in codes and in scales."""
    jobs = (outputs.shape[1] + _BLOCK - 1) // _BLOCK
    k, first = job // jobs, job % jobs * _BLOCK
    n = min(k, inputs.shape[0] - 1)
    x, too_much = inputs[n], sums[n]
    row, line, scale_row, groups = strides
    blocks_a_group = too_much.size // groups
    for o in range(first, min(first + _BLOCK, outputs.shape[1])):
        at, scale_at = rows[k] * row + o * line, rows[k] * scale_row + o * groups
        mine, own = codes[at : at + line], scales[scale_at : scale_at + groups]
        total = np.float32(0.0)
        for b in range(too_much.size):
            total += (_part(mine, x, b) - too_much[b]) * _number(own[b // blocks_a_group])
        outputs[k, o] = total


@njit(**_OPTIONS)
def _codes_alone(codes, scales, strides, rows, inputs, sums, outputs):
    for job in range(_jobs(outputs)):
        _block_of_codes(codes, scales, strides, rows, inputs, sums, outputs, job)


@njit(parallel=True, **_OPTIONS)
def _codes_together(codes, scales, strides, rows, inputs, sums, outputs):
    for job in prange(_jobs(outputs)):
        _block_of_codes(codes, scales, strides, rows, inputs, sums, outputs, job)


@njit(cache=True, nogil=True)
def _prepared(inputs):
    """For 4 bits: (numbers [N, I], sums [N, I / BLOCK]) of inputs [N, I].

    A byte is low + 16 high, each 8 too much. So  low x + high y = low (x - y / 16) + byte (y / 16),  which spares every
    byte a shift, and what is too much is 8 times the sum of the inputs.
    """
    numbers, sums = np.empty_like(inputs), np.zeros((inputs.shape[0], inputs.shape[1] // BLOCK), np.float32)
    for n in range(inputs.shape[0]):
        for b in range(sums.shape[1]):
            for j in range(b * BLOCK, b * BLOCK + _HALF):
                x, y = inputs[n, j], inputs[n, j + _HALF]
                numbers[n, j], numbers[n, j + _HALF] = x - y / np.float32(16), y / np.float32(16)
                sums[n, b] += np.float32(8) * (x + y)
    return numbers, sums


# ---- predictions -----------------------------------------------------------------------------------------------------
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
    flat, stride, _ = _lines(weight)
    run(flat, stride, rows, inputs.float().numpy(), outputs.numpy())
    return outputs


def quantised_products(weight: Quantised, rows: np.ndarray, inputs: torch.Tensor) -> torch.Tensor:
    """As `products`: weight of R experts, each row in one piece; inputs [K or 1, I], whichever way weights are kept."""
    outputs = torch.empty(len(rows), weight.outputs)
    numbers = inputs.float().numpy()
    sums = np.zeros((len(numbers), weight.inputs // BLOCK), np.float32)
    if weight.bits == 4:
        numbers, sums = _prepared(numbers)
    (codes, *in_codes), (scales, *in_scales) = _lines(weight.codes), _lines(weight.scales)
    many = len(rows) * weight.outputs * weight.inputs * 2 >= _WAKING_BYTES  # takes as long as these bytes of bfloat16
    run = _codes_together if many else _codes_alone
    run(codes, scales, (*in_codes, *in_scales), rows, numbers, sums, outputs.numpy())
    return outputs


def _lines(tensor: torch.Tensor) -> tuple[np.ndarray, int, int]:
    """(flat, from row to row, from line to line) of [R, O, n], each row in one piece: numba must see all in one."""
    flat = tensor.as_strided([(len(tensor) - 1) * tensor.stride(0) + tensor[0].numel()], [1])
    return _array(flat), tensor.stride(0), tensor.shape[-1]


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
