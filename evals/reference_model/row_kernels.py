"""Row-wise parts of a training step: fast exponential, RMS norm, head norm with rotary positions.

They are memory-bound, so each is one fused pass, forward and backward, split over `threads` chunks of rows.
Sums over rows (weight gradients) are kept per chunk and added in chunk order: one thread count, one result.

Shapes: N = B * T rows; D width; H query heads, G key/value heads, A head width; P chunks (threads).
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

OPTIONS = {"fastmath": {"reassoc", "contract", "nnan", "nsz", "arcp"}, "nogil": True, "cache": True}


@njit(inline="always")
def exp32(x):
    """e**x in float32, relative error 2e-7 between -87 and 88: numba does not vectorise np.exp."""
    x = min(max(np.float32(x), np.float32(-87.0)), np.float32(88.0))
    n = math.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(inline="always")
def chunk(p, threads, n):
    """Rows [first, last) of chunk p."""
    return p * n // threads, (p + 1) * n // threads


@njit(parallel=True, **OPTIONS)
def norm_forward(x, weight, eps, threads, y, rstd):
    """y = x * rstd * weight, rstd = (mean(x^2) + eps)^-1/2. x, y [N, D], rstd [N]."""
    n, d = x.shape
    for p in prange(threads):
        first, last = chunk(p, threads, n)
        for i in range(first, last):
            s = np.float32(0.0)
            for j in range(d):
                s += x[i, j] * x[i, j]
            r = np.float32(1.0) / np.sqrt(s / np.float32(d) + np.float32(eps))
            rstd[i] = r
            for j in range(d):
                y[i, j] = x[i, j] * r * weight[j]


@njit(parallel=True, **OPTIONS)
def norm_backward(x, weight, rstd, dy, threads, dx, dweight):
    """Add the input gradient to dx [N, D] (it holds the residual's already); dweight [P, D] per chunk."""
    n, d = x.shape
    for p in prange(threads):
        first, last = chunk(p, threads, n)
        dw = np.zeros(d, np.float32)
        for i in range(first, last):
            r = rstd[i]
            s = np.float32(0.0)
            for j in range(d):
                s += dy[i, j] * weight[j] * x[i, j]
            c = s * r * r * r / np.float32(d)
            for j in range(d):
                dw[j] += dy[i, j] * x[i, j] * r
                dx[i, j] += dy[i, j] * weight[j] * r - x[i, j] * c
        dweight[p] = dw


@njit(parallel=True, **OPTIONS)
def heads_forward(qkv, q_weight, k_weight, eps, cos, sin, threads, q, k, v):
    """Split qkv [N, (H+2G)*A] into q [B, H, T, A], k and v [B, G, T, A]; norm q and k by head, rotate by position.

    cos, sin [T, A/2]; halves are rotated against each other (transformers' rotate_half).
    """
    b, h, t, a = q.shape
    g = k.shape[1]
    half = a // 2
    n = b * t
    for p in prange(threads):
        first, last = chunk(p, threads, n)
        for i in range(first, last):
            row, pos = i // t, i % t
            for head in range(h + g):
                o = head * a
                s = np.float32(0.0)
                for j in range(a):
                    s += qkv[i, o + j] * qkv[i, o + j]
                r = np.float32(1.0) / np.sqrt(s / np.float32(a) + np.float32(eps))
                w = q_weight if head < h else k_weight
                out = q[row, head, pos] if head < h else k[row, head - h, pos]
                for j in range(half):
                    one = qkv[i, o + j] * r * w[j]
                    two = qkv[i, o + half + j] * r * w[half + j]
                    out[j] = one * cos[pos, j] - two * sin[pos, j]
                    out[half + j] = two * cos[pos, j] + one * sin[pos, j]
            for head in range(g):
                o = (h + g + head) * a
                for j in range(a):
                    v[row, head, pos, j] = qkv[i, o + j]


@njit(parallel=True, **OPTIONS)
def heads_backward(qkv, q_weight, k_weight, eps, cos, sin, dq, dk, dv, threads, dqkv, dq_weight, dk_weight):
    """Gradient of heads_forward: dqkv [N, (H+2G)*A] is overwritten; dq_weight, dk_weight [P, A] per chunk."""
    b, h, t, a = dq.shape
    g = dk.shape[1]
    half = a // 2
    n = b * t
    for p in prange(threads):
        first, last = chunk(p, threads, n)
        dwq = np.zeros(a, np.float32)
        dwk = np.zeros(a, np.float32)
        dy = np.empty(a, np.float32)
        for i in range(first, last):
            row, pos = i // t, i % t
            for head in range(h + g):
                o = head * a
                w = q_weight if head < h else k_weight
                dw = dwq if head < h else dwk
                dout = dq[row, head, pos] if head < h else dk[row, head - h, pos]
                s = np.float32(0.0)
                for j in range(a):
                    s += qkv[i, o + j] * qkv[i, o + j]
                r = np.float32(1.0) / np.sqrt(s / np.float32(a) + np.float32(eps))
                for j in range(half):
                    dy[j] = dout[j] * cos[pos, j] + dout[half + j] * sin[pos, j]
                    dy[half + j] = dout[half + j] * cos[pos, j] - dout[j] * sin[pos, j]
                s = np.float32(0.0)
                for j in range(a):
                    s += dy[j] * w[j] * qkv[i, o + j]
                c = s * r * r * r / np.float32(a)
                for j in range(a):
                    dw[j] += dy[j] * qkv[i, o + j] * r
                    dqkv[i, o + j] = dy[j] * w[j] * r - qkv[i, o + j] * c
            for head in range(g):
                o = (h + g + head) * a
                for j in range(a):
                    dqkv[i, o + j] = dv[row, head, pos, j]
        dq_weight[p] = dwq
        dk_weight[p] = dwk
