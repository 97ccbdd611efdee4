"""Router and experts of one layer, forward and backward, one expert at a time inside the processor's cache.

Tokens are sorted by expert (counting sort); each expert gathers its rows, multiplies, and adds its output to
the rows it came from. Experts are dealt to `threads` chunks; each chunk adds into a buffer of its own and the
buffers are added in chunk order, so one thread count gives one result.

Shapes: N rows (tokens), E experts, K chosen, D width, F expert width, P chunks. `order [N*K]` lists flat (row
* K + rank) positions grouped by expert, `offset [E+1]` its bounds. gate_up [E, 2F, D] and down [E, D, F] are
transformers' layout.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from evals.reference_model.row_kernels import OPTIONS, chunk, exp32


@njit(parallel=True, **OPTIONS)
def route(logits, normalise, threads, index, weight):
    """Softmax in place (logits [N, E]); top-K index and combine weight [N, K], ties to the lower id."""
    n, e = logits.shape
    k = index.shape[1]
    for p in prange(threads):
        first, last = chunk(p, threads, n)
        for i in range(first, last):
            line = logits[i]
            m = np.float32(-3.0e38)
            for j in range(e):
                m = max(m, line[j])
            s = np.float32(0.0)
            for j in range(e):
                x = exp32(line[j] - m)
                line[j] = x
                s += x
            for j in range(e):
                line[j] /= s
            filled = 0
            for j in range(e):
                x = line[j]
                if filled < k or x > weight[i, k - 1]:
                    at = filled if filled < k else k - 1
                    while at > 0 and weight[i, at - 1] < x:
                        weight[i, at] = weight[i, at - 1]
                        index[i, at] = index[i, at - 1]
                        at -= 1
                    weight[i, at] = x
                    index[i, at] = j
                    filled = min(filled + 1, k)
            if normalise:
                s = np.float32(0.0)
                for j in range(k):
                    s += weight[i, j]
                for j in range(k):
                    weight[i, j] /= s


@njit(parallel=True, **OPTIONS)
def route_backward(prob, index, weight, dweight, pressure, normalise, threads, dlogits):
    """Gradient of `route` plus the load balance: pressure [E] is the balance loss's gradient by probability."""
    n, e = prob.shape
    k = index.shape[1]
    for p in prange(threads):
        first, last = chunk(p, threads, n)
        for i in range(first, last):
            s = np.float32(0.0)
            for j in range(e):
                s += prob[i, j] * pressure[j]
            inner = np.float32(0.0)
            for j in range(k):
                inner += weight[i, j] * dweight[i, j]
            if not normalise:
                s += inner
            for j in range(e):
                dlogits[i, j] = prob[i, j] * (pressure[j] - s)
            for j in range(k):
                if normalise:
                    dlogits[i, index[i, j]] += weight[i, j] * (dweight[i, j] - inner)
                else:
                    dlogits[i, index[i, j]] += weight[i, j] * dweight[i, j]


@njit(**OPTIONS)
def sort_by_expert(index, experts):
    """(order [N*K], offset [E+1]) by a stable counting sort."""
    flat = index.reshape(-1)
    offset = np.zeros(experts + 1, np.int64)
    for e in flat:
        offset[e + 1] += 1
    for e in range(experts):
        offset[e + 1] += offset[e]
    place = offset[:-1].copy()
    order = np.empty(flat.size, np.int32)
    for i in range(flat.size):
        order[place[flat[i]]] = i
        place[flat[i]] += 1
    return order, offset


@njit(**OPTIONS)
def deal(offset, threads):
    """First expert of each chunk [P+1]: neighbouring experts, about equal rows."""
    experts = offset.size - 1
    bounds = np.full(threads + 1, experts, np.int64)
    bounds[0] = 0
    e = 0
    for p in range(1, threads):
        while e < experts and offset[e] * threads < p * offset[experts]:
            e += 1
        bounds[p] = e
    return bounds


@njit(parallel=True, **OPTIONS)
def experts_forward(x, gate_up, down, weight, order, offset, threads, hidden, out):
    """out [P, N, D] (add over P) from x [N, D]; hidden [N*K, 2F] keeps gate and up products in sorted order."""
    d = x.shape[1]
    f = down.shape[2]
    k = weight.shape[1]
    flat = weight.reshape(-1)
    bounds = deal(offset, threads)
    widest = np.max(offset[1:] - offset[:-1])
    for p in prange(threads):
        mine = out[p]
        mine[:] = np.float32(0.0)
        rows = np.empty((widest, d), np.float32)
        active = np.empty((widest, f), np.float32)
        for e in range(bounds[p], bounds[p + 1]):
            lo, hi = offset[e], offset[e + 1]
            m = hi - lo
            if m == 0:
                continue
            xb, ab, hb = rows[:m], active[:m], hidden[lo:hi]
            for i in range(m):
                source = x[order[lo + i] // k]
                target = xb[i]
                for j in range(d):
                    target[j] = source[j]
            np.dot(xb, gate_up[e].T, hb)
            for i in range(m):
                w = flat[order[lo + i]]
                for j in range(f):
                    gate = hb[i, j]
                    ab[i, j] = w * hb[i, f + j] * gate / (np.float32(1.0) + exp32(-gate))
            np.dot(ab, down[e].T, xb)
            for i in range(m):
                source = xb[i]
                target = mine[order[lo + i] // k]
                for j in range(d):
                    target[j] += source[j]


@njit(parallel=True, **OPTIONS)
def experts_backward(x, gate_up, down, weight, order, offset, hidden, dout, threads, dx, dgate_up, ddown, dweight):
    """From dout [N, D], overwritten: dx [P, N, D] (add over P), dgate_up, ddown, dweight [N, K]."""
    d = x.shape[1]
    f = down.shape[2]
    k = weight.shape[1]
    flat = weight.reshape(-1)
    dflat = dweight.reshape(-1)
    bounds = deal(offset, threads)
    widest = np.max(offset[1:] - offset[:-1])
    for p in prange(threads):
        mine = dx[p]
        mine[:] = np.float32(0.0)
        rows = np.empty((widest, d), np.float32)
        drows = np.empty((widest, d), np.float32)
        active = np.empty((widest, f), np.float32)
        dactive = np.empty((widest, f), np.float32)
        dhidden = np.empty((widest, 2 * f), np.float32)
        for e in range(bounds[p], bounds[p + 1]):
            lo, hi = offset[e], offset[e + 1]
            m = hi - lo
            if m == 0:
                dgate_up[e] = np.float32(0.0)
                ddown[e] = np.float32(0.0)
                continue
            xb, yb, ab, db, gb, hb = rows[:m], drows[:m], active[:m], dactive[:m], dhidden[:m], hidden[lo:hi]
            for i in range(m):
                at = order[lo + i] // k
                source, target, dsource, dtarget = x[at], xb[i], dout[at], yb[i]
                for j in range(d):
                    target[j] = source[j]
                    dtarget[j] = dsource[j]
            np.dot(yb, down[e], db)
            for i in range(m):
                w = flat[order[lo + i]]
                s = np.float32(0.0)
                for j in range(f):
                    gate, up = hb[i, j], hb[i, f + j]
                    sigmoid = np.float32(1.0) / (np.float32(1.0) + exp32(-gate))
                    silu = gate * sigmoid
                    raw = db[i, j]
                    s += raw * silu * up
                    ab[i, j] = w * silu * up
                    gb[i, j] = w * raw * up * sigmoid * (np.float32(1.0) + gate * (np.float32(1.0) - sigmoid))
                    gb[i, f + j] = w * raw * silu
                dflat[order[lo + i]] = s
            np.dot(yb.T, ab, ddown[e])
            np.dot(gb.T, xb, dgate_up[e])
            np.dot(gb, gate_up[e], yb)
            for i in range(m):
                source = yb[i]
                target = mine[order[lo + i] // k]
                for j in range(d):
                    target[j] += source[j]
