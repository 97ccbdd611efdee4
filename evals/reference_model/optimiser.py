"""Muon for the matrices of attention and experts, AdamW for embedding, router and norms; the learning-rate
schedule.

Muon (Jordan 2024): momentum, then the update's singular values are pushed towards one by five Newton-Schulz
steps. All steps are polynomials in the Gram matrix, so they are done there, on [rows, rows], and multiplied
into the update once; an expert's matrices stay in the processor's cache throughout. Gate, up and down of each
expert are matrices of their own.

The schedule is warm-up, stable, decay: the stable phase can go on for any number of steps, and a finished
model is a short decay to zero from any of its checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit, prange

from evals.reference_model.row_kernels import OPTIONS

A, B, C = np.float32(3.4445), np.float32(-4.7750), np.float32(2.0315)
ROUNDS = 5


@dataclass(frozen=True)
class Rates:
    muon: float = 0.02
    muon_momentum: float = 0.95
    muon_decay: float = 0.01
    adam: float = 3e-3
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_decay: float = 0.05
    clip: float = 1.0


def schedule(step: int, warmup: int, decay_from: int | None, decay_steps: int) -> float:
    """Factor on the rates of step `step` (0, 1, ...): linear warm-up, 1, from `decay_from` linear towards 0."""
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    if decay_from is None or step < decay_from:
        return rise
    return rise * max(0.0, 1.0 - (step - decay_from + 1) / (decay_steps + 1))


@njit(parallel=True, **OPTIONS)
def muon_update(weight, gradient, momentum, transposed, rate, keep, beta, scale):
    """One Muon step on M matrices, in place: arrays [M, R, C], smaller side R, or C where `transposed`."""
    m, rows, cols = weight.shape
    small, wide = (cols, rows) if transposed else (rows, cols)
    for at in prange(m):
        u = np.empty((small, wide), np.float32)
        total = np.float32(0.0)
        for i in range(rows):
            for j in range(cols):
                g = gradient[at, i, j]
                v = beta * momentum[at, i, j] + g
                momentum[at, i, j] = v
                n = g + beta * v
                total += n * n
                if transposed:
                    u[j, i] = n
                else:
                    u[i, j] = n
        # an expert no token chose has a zero update, and keeps it
        inverse = np.float32(1.0) / np.sqrt(total) if total > np.float32(1e-30) else np.float32(0.0)
        gram = np.dot(u, u.T)
        gram *= inverse * inverse
        product = np.zeros((small, small), np.float32)
        for i in range(small):
            product[i, i] = inverse
        for _ in range(ROUNDS):
            square = np.dot(gram, gram)
            p = B * gram + C * square
            for i in range(small):
                p[i, i] += A
            product = np.dot(p, product)
            gram = np.dot(np.dot(p, gram), p)
        u = np.dot(product, u)
        for i in range(rows):
            for j in range(cols):
                n = u[j, i] if transposed else u[i, j]
                weight[at, i, j] = weight[at, i, j] * keep - rate * scale * n


def is_muon(name: str) -> bool:
    return name.endswith((".qkv", ".o", ".gate_up", ".down"))


class Optimiser:
    """State (momenta, step count) of one run; `step(factor)` applies the gradients."""

    def __init__(self, parameters: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor], rates: Rates):
        self.parameters, self.gradients, self.rates, self.count = parameters, gradients, rates, 0
        self.first = {name: torch.zeros_like(value) for name, value in parameters.items()}
        self.second = {n: torch.zeros_like(v) for n, v in parameters.items() if not is_muon(n)}

    def step(self, factor: float) -> float:
        """Apply one update at `factor` times the rates; return the norm of AdamW's gradients before clipping."""
        r, self.count = self.rates, self.count + 1
        norm = float(sum(float(self.gradients[n].square().sum()) for n in self.second) ** 0.5)
        clip = min(1.0, r.clip / (norm + 1e-12))
        for name, weight in self.parameters.items():
            if is_muon(name):
                self.muon(name, weight, factor)
            else:
                self.adam(name, weight, factor, clip)
        return norm

    def muon(self, name: str, weight: torch.Tensor, factor: float) -> None:
        r = self.rates
        arrays = [weight, self.gradients[name], self.first[name]]
        if name.endswith(".gate_up"):  # [E, 2F, D]: gate and up are two matrices
            e, two_f, d = weight.shape
            arrays = [x.view(e * 2, two_f // 2, d) for x in arrays]
        elif weight.dim() == 2:
            arrays = [x.unsqueeze(0) for x in arrays]
        rows, cols = arrays[0].shape[1:]
        scale = max(1.0, rows / cols) ** 0.5
        rate = r.muon * factor
        f = np.float32
        muon_update(
            *(x.numpy() for x in arrays), rows > cols, f(rate), f(1 - rate * r.muon_decay), f(r.muon_momentum), f(scale)
        )

    def adam(self, name: str, weight: torch.Tensor, factor: float, clip: float) -> None:
        r, rate = self.rates, self.rates.adam * factor
        gradient = self.gradients[name] * clip
        first, second = self.first[name], self.second[name]
        first.lerp_(gradient, 1 - r.adam_beta1)
        second.lerp_(gradient.square(), 1 - r.adam_beta2)
        if weight.dim() > 1:
            weight.mul_(1 - rate * r.adam_decay)
        bias1, bias2 = 1 - r.adam_beta1**self.count, 1 - r.adam_beta2**self.count
        weight.addcdiv_(first, (second / bias2).sqrt_().add_(1e-8), value=-rate / bias1)
