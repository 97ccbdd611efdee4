"""Laws: experts computed where they lie are transformers' own experts, in every family and type, up to rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.experts import decode_token, run_expert
from engine.hook import attach
from engine.kernels import DTYPES, products, set_threads
from engine.record import Layout, page_aligned

TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-5}  # of the largest output


@pytest.fixture(autouse=True)
def inference():
    set_threads()
    with torch.inference_mode():
        yield


def in_records(module, dtype):
    """The module's experts in a buffer of records: strided parameters, as slots have them."""
    module = module.to(dtype)
    layout = Layout.of_module(module, dtype)
    views = layout.views(page_aligned(module.num_experts, layout.record_bytes))
    for name, view in views.items():
        view.copy_(getattr(module, name))
    return views


def stock(module, hidden, index, weights):
    return ALL_EXPERTS_FUNCTIONS["batched_mm"](module, hidden, index, weights)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_decoded_token_gets_what_the_stock_experts_give(tiny_moe, family, dtype):
    model = tiny_moe(family)
    with attach(model) as attachment:
        module = attachment.layers[0]
    views = in_records(module, dtype)
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        hidden = torch.randn(1, model.config.hidden_size, generator=generator).to(dtype)
        rows = torch.randperm(module.num_experts, generator=generator)[:4]
        weights = torch.rand(1, 4, generator=generator)
        wanted = stock(module, hidden, rows[None], weights.to(dtype))
        found = decode_token(module, views, hidden, rows.numpy(), weights[0].numpy(), stock)
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        assert (found - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()


def test_one_expert_gives_what_the_stock_experts_give_with_it_alone(tiny_moe, family):
    model = tiny_moe(family)
    with attach(model) as attachment:
        module = attachment.layers[0]
    views = in_records(module, torch.float32)
    hidden = torch.randn(7, model.config.hidden_size, generator=torch.Generator().manual_seed(4))
    for expert in (0, 5, module.num_experts - 1):
        wanted = stock(module, hidden, torch.full((7, 1), expert), torch.ones(7, 1))
        found = run_expert(module, {name: view[expert] for name, view in views.items()}, hidden)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "width"), [(1, 1), (63, 5), (65, 33), (200, 257), (700, 1030)])  # both ways
@pytest.mark.parametrize("inputs", [1, 4])
def test_products_are_matrix_products(dtype, outputs, width, inputs):
    """Also where sizes are no multiple of a vector or a block, and rows are read in any order."""
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(6, outputs, width, generator=generator).to(dtype)
    x = torch.randn(inputs, width, generator=generator)
    rows = np.array([5, 0, 3, 3])
    found = products(weight, rows, x)
    wanted = torch.einsum("koi,ki->ko", weight[rows].float(), x.expand(4, -1))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
