"""One token, or one expert, computed out of slots: what the engine runs in place of transformers' gather.

Both follow the interface that transformers gives every experts module (`has_gate`, `has_bias`, `is_transposed`,
`has_post_expert_norm`, `_apply_gate`), so there is no code for a family. Parameters are dicts by the module's own
names, [R, ...] of R rows or [...] of one expert, matrices in few bits or in full.

    decode_token(module, layout.views(buffer), hidden, rows, weights, stock)   # [1, D], K experts where they lie
    run_expert(module, one_expert, hidden)                                 # [T, D], one expert for T tokens
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from engine.kernels import DTYPES, products, quantised_products
from engine.quantised import Quantised

_FEW = 16  # tokens: a product each takes no longer than to dequantise an expert


def decode_token(
    module: nn.Module,
    parameters: dict[str, torch.Tensor],
    hidden: torch.Tensor,
    rows: np.ndarray,
    weights: np.ndarray,
    stock: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """hidden [1, D], rows [K] int64 of parameters [R, ...], weights [K] float32. Returns [1, D]; copies no weight.

    stock: transformers' implementation, which serves on other devices; the parameters must be the module's own then.
    """
    up = parameters["gate_up_proj" if module.has_gate else "up_proj"]
    if hidden.device.type != "cpu":
        if isinstance(up, Quantised):
            return _one_by_one(module, parameters, hidden, rows, weights)
        index = torch.from_numpy(rows).to(hidden.device)[None]
        return stock(module, hidden, index, torch.from_numpy(weights).to(hidden.device, hidden.dtype)[None])
    if not isinstance(up, Quantised) and (up.dtype not in DTYPES or module.is_transposed):
        return _one_by_one(module, parameters, hidden, rows, weights)
    multiply = quantised_products if isinstance(up, Quantised) else products
    inner = _up(module, parameters, multiply(up, rows, hidden).to(hidden.dtype), rows)  # [K, F]
    outer = _down(module, parameters, multiply(parameters["down_proj"], rows, inner).to(hidden.dtype), rows)  # [K, D]
    return _combine(outer, weights)


def run_expert(module: nn.Module, parameters: dict[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    """hidden [T, D] through one expert, whose parameters [...] are given: [T, D], not yet weighted."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _up(module, parameters, _linear(module, hidden, parameters[name]), ...)
    return _down(module, parameters, _linear(module, inner, parameters["down_proj"]), ...)


def _one_by_one(module, parameters, hidden, rows, weights) -> torch.Tensor:
    """Where there is no kernel: K products from where the weights lie, gate and combination together."""
    up, down = parameters["gate_up_proj" if module.has_gate else "up_proj"], parameters["down_proj"]
    places = rows.tolist()
    inner = _up(module, parameters, torch.cat([_linear(module, hidden, up[row]) for row in places]), rows)
    outer = torch.cat([_linear(module, inner[k : k + 1], down[row]) for k, row in enumerate(places)])
    return _combine(_down(module, parameters, outer, rows), weights)


def _linear(module: nn.Module, hidden: torch.Tensor, weight: torch.Tensor | Quantised) -> torch.Tensor:
    """hidden [T, D] by one expert's matrix."""
    if isinstance(weight, Quantised):
        if hidden.device.type == "cpu" and len(hidden) <= _FEW:
            alone = np.zeros(len(hidden), np.int64)
            return quantised_products(weight[None], alone, hidden).to(hidden.dtype)
        weight = weight.dequantise(hidden.dtype)
    return hidden @ weight if module.is_transposed else nn.functional.linear(hidden, weight)


def _up(module: nn.Module, parameters: dict[str, torch.Tensor], product: torch.Tensor, rows) -> torch.Tensor:
    """What follows the first product: bias, then gate or activation. rows: of the parameters, ... if they are one's."""
    if module.has_bias:
        product = product + parameters["gate_up_proj_bias" if module.has_gate else "up_proj_bias"][rows]
    return module._apply_gate(product) if module.has_gate else module.act_fn(product)


def _down(module: nn.Module, parameters: dict[str, torch.Tensor], product: torch.Tensor, rows) -> torch.Tensor:
    if module.has_bias:
        product = product + parameters["down_proj_bias"][rows]
    return module.post_expert_norm(product) if module.has_post_expert_norm else product


def _combine(outer: torch.Tensor, weights: np.ndarray) -> torch.Tensor:
    """[K, D] weighted and summed in float32, then in the model's type: [1, D]."""
    factors = torch.from_numpy(np.ascontiguousarray(weights)).to(outer.device)
    return (factors @ outer.float()).to(outer.dtype)[None]
