"""Laws of the training target: our passes equal transformers', runs repeat and resume, packing keeps its bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evals.reference_model import model as rm
from evals.reference_model.export import hugging_face_config, hugging_face_tensors

TINY = rm.Shape(
    layers=2, width=32, experts=8, chosen=3, expert_width=16, heads=4, key_value_heads=2, head_width=16,
    vocabulary=64, norm_topk_prob=True, context=96,
)  # fmt: skip


def stock_model(shape: rm.Shape, parameters: dict[str, torch.Tensor], folder):
    import json

    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(hugging_face_config(shape, "float32")))
    save_file(hugging_face_tensors(shape, parameters), folder / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )


@pytest.mark.parametrize("normalise", [True, False])
def test_forward_and_backward_equal_stock_qwen3moe(tmp_path, normalise):
    from dataclasses import replace

    shape = replace(TINY, norm_topk_prob=normalise)
    parameters = rm.initial_parameters(shape, 3)
    for name in parameters:
        parameters[name] *= 1 if name.endswith("norm") else 5
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, shape.vocabulary, (2, shape.context + 1))
    tokens[:, 0] = 0
    stock = stock_model(shape, parameters, tmp_path)
    ids = torch.from_numpy(tokens)
    logits = stock(ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    step = rm.Step(shape, parameters, 2, 0.0, "float32")
    assert step.losses(tokens).mean().item() == pytest.approx(loss.item(), abs=2e-5)
    ours, _ = step.loss_and_gradients(tokens)
    assert ours == pytest.approx(loss.item(), abs=2e-5)
    expected = {name: value.grad for name, value in stock.named_parameters()}
    i = "model.layers.1"
    pairs = {
        "embed": expected["model.embed_tokens.weight"],
        "1.router": expected[f"{i}.mlp.gate.weight"],
        "1.gate_up": expected[f"{i}.mlp.experts.gate_up_proj"],
        "0.down": expected["model.layers.0.mlp.experts.down_proj"],
        "0.o": expected["model.layers.0.self_attn.o_proj.weight"],
        "1.q_norm": expected[f"{i}.self_attn.q_norm.weight"],
        "0.k_norm": expected["model.layers.0.self_attn.k_norm.weight"],
        "0.moe_norm": expected["model.layers.0.post_attention_layernorm.weight"],
        "0.attention_norm": expected["model.layers.0.input_layernorm.weight"],
        "final_norm": expected["model.norm.weight"],
        "0.qkv": torch.cat([expected[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"]),
    }
    for name, value in pairs.items():
        scale = value.abs().max()
        assert (step.gradients[name] - value).abs().max() < 1e-4 * scale, name
