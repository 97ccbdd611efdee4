"""Causal attention inside documents, a block of queries at a time, so that scores stay in the processor's
cache.

Documents are packed into windows; `start[b, t]` is the window position at which token t's document begins,
and no token looks behind it. That is what the model meets when a document is scored alone, and it saves the
products across documents.

Shapes: B windows, T tokens, H query heads, G key/value heads (H/G queries share one), A head width. One job
is one (window, key/value head): every output belongs to one job, so the result does not depend on the thread
count.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from evals.reference_model.row_kernels import OPTIONS, exp32

BLOCK = 64


@njit(inline="always")
def add(target, part):
    for i in range(target.shape[0]):
        for j in range(target.shape[1]):
            target[i, j] += part[i, j]


@njit(inline="always")
def masked_exp(scores, i0, k0, start, scale):
    """Raw scores [R, C] (rows i0.., columns k0..) become probabilities in place; return log-sum-exp [R]."""
    rows = scores.shape[0]
    lse = np.empty(rows, np.float32)
    for r in range(rows):
        low, high = start[i0 + r] - k0, i0 + r + 1 - k0
        scores[r, :low] = np.float32(0.0)
        scores[r, high:] = np.float32(0.0)
        line = scores[r, low:high]  # loops from 0 over a slice: numba vectorises no others
        m = np.float32(-3.0e38)
        for j in range(line.size):
            m = max(m, line[j])
        shift = m * scale
        s = np.float32(0.0)
        for j in range(line.size):
            e = exp32(line[j] * scale - shift)
            line[j] = e
            s += e
        inverse = np.float32(1.0) / s
        for j in range(line.size):
            line[j] *= inverse
        lse[r] = m * scale + np.log(s)
    return lse


@njit(parallel=True, **OPTIONS)
def attention_forward(q, k, v, start, scale, out, lse):
    """out [B, T, H*A] and lse [B, H, T] from q [B, H, T, A], k and v [B, G, T, A], start [B, T]."""
    b, h, t, a = q.shape
    g = k.shape[1]
    share = h // g
    scale = np.float32(scale)
    for job in prange(b * g):
        row, group = job // g, job % g
        buffer = np.empty(BLOCK * t, np.float32)
        small = np.empty((BLOCK, a), np.float32)
        for i0 in range(0, t, BLOCK):
            i1 = min(i0 + BLOCK, t)
            k0 = start[row, i0]
            n = i1 - k0
            scores = buffer[: (i1 - i0) * n].reshape(i1 - i0, n)
            for head in range(group * share, (group + 1) * share):
                np.dot(q[row, head][i0:i1], k[row, group][k0:i1].T, scores)
                lse[row, head, i0:i1] = masked_exp(scores, i0, k0, start[row], scale)
                np.dot(scores, v[row, group][k0:i1], small[: i1 - i0])
                for i in range(i0, i1):
                    for j in range(a):
                        out[row, i, head * a + j] = small[i - i0, j]


@njit(parallel=True, **OPTIONS)
def attention_backward(q, k, v, start, scale, out, lse, dout, dq, dk, dv):
    """Gradients dq, dk, dv (overwritten) from dout [B, T, H*A]; probabilities are computed again."""
    b, h, t, a = q.shape
    g = k.shape[1]
    share = h // g
    scale = np.float32(scale)
    for job in prange(b * g):
        row, group = job // g, job % g
        buffer = np.empty(BLOCK * t, np.float32)
        other = np.empty(BLOCK * t, np.float32)
        grad = np.empty((BLOCK, a), np.float32)
        part = np.empty((t, a), np.float32)
        dk[row, group] = np.float32(0.0)
        dv[row, group] = np.float32(0.0)
        for i0 in range(0, t, BLOCK):
            i1 = min(i0 + BLOCK, t)
            k0 = start[row, i0]
            n = i1 - k0
            p = buffer[: (i1 - i0) * n].reshape(i1 - i0, n)
            ds = other[: (i1 - i0) * n].reshape(i1 - i0, n)
            for head in range(group * share, (group + 1) * share):
                queries = q[row, head][i0:i1]
                keys = k[row, group][k0:i1]
                np.dot(queries, keys.T, p)
                for i in range(i0, i1):
                    for j in range(a):
                        grad[i - i0, j] = dout[row, i, head * a + j]
                dblock = grad[: i1 - i0]
                np.dot(dblock, v[row, group][k0:i1].T, ds)
                for r in range(i1 - i0):
                    i = i0 + r
                    delta = np.float32(0.0)
                    for j in range(a):
                        delta += grad[r, j] * out[row, i, head * a + j]
                    low, high = start[row, i] - k0, i + 1 - k0
                    # spelt out: over the tuple (p, ds) numba compiles this loop wrongly
                    p[r, :low] = np.float32(0.0)
                    p[r, high:] = np.float32(0.0)
                    ds[r, :low] = np.float32(0.0)
                    ds[r, high:] = np.float32(0.0)
                    line, dline, shift = p[r, low:high], ds[r, low:high], lse[row, head, i]
                    for j in range(line.size):
                        e = exp32(line[j] * scale - shift)
                        line[j] = e
                        dline[j] = e * (dline[j] - delta) * scale
                np.dot(ds, keys, dq[row, head][i0:i1])
                np.dot(ds.T, queries, part[:n])
                add(dk[row, group][k0:i1], part)
                np.dot(p.T, dblock, part[:n])
                add(dv[row, group][k0:i1], part)
