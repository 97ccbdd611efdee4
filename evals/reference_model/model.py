"""The shape of a reference model, its parameters, and one training step's loss and gradients.

The model is a plain Qwen3-MoE decoder (tied embeddings, query/key norms, no biases), written out forward and
backward so that every part can be timed and made fast on a processor: dense products are torch's, the rest
are compiled loops. Exported weights load in transformers' Qwen3MoeForCausalLM and give the same logits (a
test compares both passes).

Parameter layout is transformers' own except that query, key and value projections are one matrix `qkv`.

Shapes: B windows, T tokens, N = B*T, L layers, E experts, K chosen, D width, F expert width, V vocabulary, H
query heads, G key/value heads, A head width, P threads.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import torch

from engine.errors import error
from evals.reference_model import attention_kernels as ak
from evals.reference_model import moe_kernels as mk
from evals.reference_model import row_kernels as rk

HEAD_ROWS = 512  # rows of logits that exist at once: [HEAD_ROWS, V]


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    experts: int
    chosen: int
    expert_width: int
    heads: int
    key_value_heads: int
    head_width: int
    vocabulary: int
    norm_topk_prob: bool
    rope_theta: float = 10000.0
    eps: float = 1e-6
    context: int = 1024

    def __post_init__(self) -> None:
        if self.heads % self.key_value_heads:
            raise error(f"{self.heads} heads", f"a multiple of {self.key_value_heads}", "mend the recipe")
        if not 0 < self.chosen <= self.experts:
            raise error(f"chosen {self.chosen}", f"1 to {self.experts}", "mend the recipe")

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        d, a = self.width, self.head_width
        shapes = {"embed": (self.vocabulary, d)}
        for i in range(self.layers):
            shapes |= {
                f"{i}.attention_norm": (d,),
                f"{i}.qkv": ((self.heads + 2 * self.key_value_heads) * a, d),
                f"{i}.q_norm": (a,),
                f"{i}.k_norm": (a,),
                f"{i}.o": (d, self.heads * a),
                f"{i}.moe_norm": (d,),
                f"{i}.router": (self.experts, d),
                f"{i}.gate_up": (self.experts, 2 * self.expert_width, d),
                f"{i}.down": (self.experts, d, self.expert_width),
            }
        return shapes | {"final_norm": (d,)}

    def facts(self) -> dict:
        return asdict(self)


def initial_parameters(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """Normal 0.02, products back into the residual stream smaller by (2L)^1/2, norms one."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {}
    for name, size in shape.parameter_shapes().items():
        if len(size) == 1:
            parameters[name] = torch.ones(size)
        else:
            into_stream = name.endswith((".o", ".down"))
            std = 0.02 / (2 * shape.layers) ** 0.5 if into_stream else 0.02
            parameters[name] = torch.randn(size, generator=generator) * std
    return parameters


def document_starts(tokens: np.ndarray, bos: int = 0) -> np.ndarray:
    """[B, T] window position at which each token's document begins (a BOS opens a document)."""
    position = np.arange(tokens.shape[1], dtype=np.int32)
    return np.maximum.accumulate(np.where(tokens == bos, position, 0).astype(np.int32), axis=1)


class Step:
    """Loss and gradients of `parameters` on a batch. Holds gradients and nothing else between calls.

    `balance` weighs E/K * sum_e share_e * mean probability_e a layer (1 when even). `dense` is the dtype of the dense
    products ("float32", or "bfloat16" where the processor multiplies it natively); sums and weights stay float32.
    """

    def __init__(self, shape: Shape, parameters: dict[str, torch.Tensor], threads: int, balance: float, dense: str):
        self.shape, self.parameters, self.threads, self.balance = shape, parameters, threads, balance
        self.dense = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dense]
        self.gradients = {name: torch.zeros_like(value) for name, value in parameters.items()}
        inverse = shape.rope_theta ** (-np.arange(0, shape.head_width, 2) / shape.head_width)
        angle = np.outer(np.arange(shape.context), inverse)
        self.cos, self.sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def low(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dense)

    def product(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x [N, I] times w [O, I] transposed -> [N, O], in the dense dtype, returned in float32."""
        return torch.mm(x, w.t()).float()

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        y, rstd = torch.empty_like(x), np.empty(x.shape[0], np.float32)
        rk.norm_forward(x.numpy(), weight.numpy(), self.shape.eps, self.threads, y.numpy(), rstd)
        return y, rstd

    def norm_back(self, name: str, x: torch.Tensor, rstd: np.ndarray, dy: torch.Tensor, dx: torch.Tensor) -> None:
        dweight = np.empty((self.threads, x.shape[1]), np.float32)
        weight = self.parameters[name].numpy()
        rk.norm_backward(x.numpy(), weight, rstd, dy.numpy(), self.threads, dx.numpy(), dweight)
        self.gradients[name].copy_(torch.from_numpy(dweight.sum(0)))

    # ------------------------------------------------------------------ layers

    def attention(self, i: int, x: torch.Tensor, start: np.ndarray) -> tuple[torch.Tensor, tuple]:
        """x [N, D] -> (x + attention [N, D], what the backward pass needs)."""
        s, p = self.shape, self.parameters
        b, t = start.shape
        normed, rstd = self.norm(x, p[f"{i}.attention_norm"])
        normed = self.low(normed)
        qkv = self.product(normed, self.low(p[f"{i}.qkv"]))
        q = np.empty((b, s.heads, t, s.head_width), np.float32)
        k = np.empty((b, s.key_value_heads, t, s.head_width), np.float32)
        v = np.empty_like(k)
        weights = p[f"{i}.q_norm"].numpy(), p[f"{i}.k_norm"].numpy()
        rk.heads_forward(qkv.numpy(), *weights, s.eps, self.cos, self.sin, self.threads, q, k, v)
        mixed = np.empty((b, t, s.heads * s.head_width), np.float32)
        lse = np.empty((b, s.heads, t), np.float32)
        ak.attention_forward(q, k, v, start, s.head_width**-0.5, mixed, lse)
        low_mixed = self.low(torch.from_numpy(mixed).view(b * t, -1))
        y = x + self.product(low_mixed, self.low(p[f"{i}.o"]))
        return y, (x, rstd, normed, qkv, q, k, v, mixed, lse, low_mixed)

    def attention_back(self, i: int, saved: tuple, start: np.ndarray, dy: torch.Tensor) -> None:
        """Turn dy, the gradient by the layer's output, into the gradient by its input, in place."""
        s, p, g = self.shape, self.parameters, self.gradients
        x, rstd, normed, qkv, q, k, v, mixed, lse, low_mixed = saved
        low_dy = self.low(dy)
        g[f"{i}.o"].copy_(torch.mm(low_dy.t(), low_mixed))
        dmixed = torch.mm(low_dy, self.low(p[f"{i}.o"])).float().view(mixed.shape)
        dq, dk, dv = np.empty_like(q), np.empty_like(k), np.empty_like(v)
        ak.attention_backward(q, k, v, start, s.head_width**-0.5, mixed, lse, dmixed.numpy(), dq, dk, dv)
        dqkv = torch.empty_like(qkv)
        dwq = np.empty((self.threads, s.head_width), np.float32)
        dwk = np.empty_like(dwq)
        weights = p[f"{i}.q_norm"].numpy(), p[f"{i}.k_norm"].numpy()
        rk.heads_backward(
            qkv.numpy(), *weights, s.eps, self.cos, self.sin, dq, dk, dv, self.threads, dqkv.numpy(), dwq, dwk
        )
        g[f"{i}.q_norm"].copy_(torch.from_numpy(dwq.sum(0)))
        g[f"{i}.k_norm"].copy_(torch.from_numpy(dwk.sum(0)))
        low_dqkv = self.low(dqkv)
        g[f"{i}.qkv"].copy_(torch.mm(low_dqkv.t(), normed))
        dnormed = torch.mm(low_dqkv, self.low(p[f"{i}.qkv"])).float()
        self.norm_back(f"{i}.attention_norm", x, rstd, dnormed, dy)

    def moe(self, i: int, x: torch.Tensor) -> tuple[torch.Tensor, tuple, float]:
        """x [N, D] -> (x + experts [N, D], what the backward pass needs, balance loss)."""
        s, p = self.shape, self.parameters
        n = x.shape[0]
        normed, rstd = self.norm(x, p[f"{i}.moe_norm"])
        probability = torch.mm(normed, p[f"{i}.router"].t())  # [N, E], logits until `route`; float32: it decides
        index, weight = np.empty((n, s.chosen), np.int32), np.empty((n, s.chosen), np.float32)
        mk.route(probability.numpy(), s.norm_topk_prob, self.threads, index, weight)
        order, offset = mk.sort_by_expert(index, s.experts)
        share = torch.from_numpy(np.diff(offset).astype(np.float32)) / n  # [E], sums to K
        pressure = share * (s.experts / s.chosen)
        loss = float(torch.dot(pressure, probability.mean(0)))
        hidden = np.empty((n * s.chosen, 2 * s.expert_width), np.float32)
        out = torch.empty((self.threads, *x.shape))
        mk.experts_forward(
            normed.numpy(), p[f"{i}.gate_up"].numpy(), p[f"{i}.down"].numpy(), weight, order, offset, self.threads,
            hidden, out.numpy(),
        )  # fmt: skip
        y = x.clone()
        for part in out:
            y += part
        return y, (x, rstd, normed, probability, index, weight, order, offset, hidden, pressure), loss

    def moe_back(self, i: int, saved: tuple, dy: torch.Tensor) -> None:
        """As `attention_back`."""
        s, p, g = self.shape, self.parameters, self.gradients
        x, rstd, normed, probability, index, weight, order, offset, hidden, pressure = saved
        parts = torch.empty((self.threads, *x.shape))
        dweight = np.empty_like(weight)
        mk.experts_backward(
            normed.numpy(), p[f"{i}.gate_up"].numpy(), p[f"{i}.down"].numpy(), weight, order, offset, hidden,
            dy.numpy(), self.threads, parts.numpy(), g[f"{i}.gate_up"].numpy(), g[f"{i}.down"].numpy(), dweight,
        )  # fmt: skip
        dlogits = torch.empty_like(probability)
        push = (pressure * (self.balance / x.shape[0])).numpy()
        mk.route_backward(
            probability.numpy(), index, weight, dweight, push, s.norm_topk_prob, self.threads, dlogits.numpy()
        )
        torch.mm(dlogits.t(), normed, out=g[f"{i}.router"])
        dnormed = parts[0]
        for part in parts[1:]:
            dnormed += part
        dnormed.addmm_(dlogits, p[f"{i}.router"])
        self.norm_back(f"{i}.moe_norm", x, rstd, dnormed, dy)

    def head(self, x: torch.Tensor, target: torch.Tensor, gradient: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss by row [N], gradient of their mean by x [N, D]); logits exist HEAD_ROWS rows at a time."""
        n = x.shape[0]
        loss, dx = torch.empty(n), torch.empty_like(x)
        embed, low_x = self.low(self.parameters["embed"]), self.low(x)
        dembed = self.gradients["embed"]
        for first in range(0, n, HEAD_ROWS):
            rows = slice(first, min(first + HEAD_ROWS, n))
            logits = self.product(low_x[rows], embed)
            aim = target[rows, None]
            logits -= logits.amax(1, keepdim=True)
            picked = logits.gather(1, aim)[:, 0]
            total = logits.exp_().sum(1)
            loss[rows] = total.log() - picked
            if gradient:
                logits *= (1.0 / (n * total))[:, None]
                logits.scatter_add_(1, aim, torch.full(aim.shape, -1.0 / n))
                low = self.low(logits)
                dx[rows] = torch.mm(low, embed)
                dembed += torch.mm(low.t(), low_x[rows])
        return loss, dx

    # ------------------------------------------------------------------ whole passes

    def losses(self, tokens: np.ndarray) -> torch.Tensor:
        """Loss in nats of each predicted token [B, T] of windows tokens [B, T+1]; gradients are left alone."""
        x, target, start, _ = self.open(tokens)
        for i in range(self.shape.layers):
            x, _ = self.attention(i, x, start)
            x, _, _ = self.moe(i, x)
        x, _ = self.norm(x, self.parameters["final_norm"])
        return self.head(x, target, gradient=False)[0].view(start.shape)

    def open(self, tokens: np.ndarray):
        inputs = np.ascontiguousarray(tokens[:, :-1])
        ids = torch.from_numpy(inputs.astype(np.int64)).view(-1)
        target = torch.from_numpy(tokens[:, 1:].astype(np.int64)).reshape(-1)
        return self.parameters["embed"][ids], target, document_starts(inputs), ids

    def loss_and_gradients(self, tokens: np.ndarray) -> tuple[float, float]:
        """(mean loss in nats, mean balance loss) of windows tokens [B, T+1]; fills `gradients`."""
        x, target, start, ids = self.open(tokens)
        saved, balance = [], 0.0
        for i in range(self.shape.layers):
            x, attention = self.attention(i, x, start)
            x, moe, loss = self.moe(i, x)
            saved.append((attention, moe))
            balance += loss / self.shape.layers
        normed, rstd = self.norm(x, self.parameters["final_norm"])
        self.gradients["embed"].zero_()
        loss, dnormed = self.head(normed, target, gradient=True)
        dx = torch.zeros_like(x)
        self.norm_back("final_norm", x, rstd, dnormed, dx)
        for i in reversed(range(self.shape.layers)):
            attention, moe = saved.pop()
            self.moe_back(i, moe, dx)
            self.attention_back(i, attention, start, dx)
        self.gradients["embed"].index_add_(0, ids, dx)
        return float(loss.mean()), balance
