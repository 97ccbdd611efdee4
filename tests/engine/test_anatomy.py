"""What a model is made of, from its config.json alone: golden numbers of public models, and laws on small ones."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.anatomy import Anatomy
from engine.errors import UserError
from engine.geometry import Geometry

ROOT = Path(__file__).parents[2]
SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96, "head_dim": 16}
SMALL |= {"num_key_value_heads": 2, "intermediate_size": 48, "num_experts_per_tok": 2}
FAMILIES = {
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24}
    | {"first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "num_key_value_heads": 4}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8},
    "glm4_moe": {"n_routed_experts": 8, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
    "gpt_oss": {"num_local_experts": 8},
    "granitemoe": {"num_local_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 24},
    "qwen3_next": {"num_experts": 8, "moe_intermediate_size": 24, "num_hidden_layers": 4, "linear_num_key_heads": 2}
    | {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    | {"shared_expert_intermediate_size": 24},
}


def config_of(family: str) -> dict:
    return {"model_type": family, **SMALL, **FAMILIES[family]}


def tensors(held: object) -> list[torch.Tensor]:
    if isinstance(held, dict | list):
        return [t for part in (held.values() if isinstance(held, dict) else held) for t in tensors(part)]
    return [held] if isinstance(held, torch.Tensor) else []


def architecture(name: str) -> dict:
    return json.loads((ROOT / "config/architectures" / f"{name}.json").read_text())["config"]


def test_golden_the_papers_model():
    """Against the published sums: 79,674,391,296 parameters, 3,874,929,408 of a token."""
    found = Anatomy.of_config(architecture("qwen3_next_80b"))
    assert (found.layers, found.blocks, found.experts, found.top_k) == (48, 48, 512, 10)
    assert found.parameters == 79_674_391_296
    assert found.active_parameters == 3_874_929_408
    assert found.expert_shapes == ((2 * 512, 2048), (2048, 512))
    assert found.kv_bytes == 12 * 2 * 2 * 256 * 2  # every fourth layer has keys and values: 2 heads of 256
    # 36 layers of linear attention: a state of 32 heads in float32, and the last 4 inputs of a convolution
    assert found.state_bytes == 36 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 4 * 2)
    assert found.head_bytes == found.embedding_bytes == 151_936 * 2048 * 2
    routed = 48 * 512 * 3 * 512 * 2048
    assert found.rest_bytes == 2 * (found.parameters - routed)


def test_golden_a_model_for_a_laptop():
    """Against the published sums: 6,919,161,856 parameters, 1,282,017,280 of a token."""
    found = Anatomy.of_config(architecture("olmoe_1b_7b"))
    assert (found.parameters, found.active_parameters) == (6_919_161_856, 1_282_017_280)
    assert found.expert_parameters == 3 * 1024 * 2048 and found.kv_bytes == 16 * 2 * 2048 * 2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_law_sizes_are_those_of_the_real_model(family, tied):
    config = config_of(family) | {"tie_word_embeddings": tied}
    found = Anatomy.of_config(config, "float32")
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    own = {id(p): p for p in made.parameters()}.values()
    assert found.parameters == sum(p.numel() for p in own)
    routed = found.layers * found.experts * found.expert_parameters * 4
    assert found.rest_bytes + routed == sum(p.nbytes for p in own)
    assert found.active_parameters < found.parameters and found.top_k == 2
    with torch.no_grad():
        cache = made(torch.zeros(1, 7, dtype=torch.long), use_cache=True).past_key_values
    assert found.cache_bytes(7) == sum(t.nbytes for layer in cache.layers for t in tensors(vars(layer)))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_law_a_geometry_loses_no_byte(family):
    found = Anatomy.of_config(config_of(family))
    geometry = Geometry.of_anatomy(found)
    assert geometry.expert_bytes == 2 * found.expert_parameters
    alike = geometry.layers * geometry.dense_bytes + geometry.head_bytes
    assert alike == found.dense_bytes + found.state_bytes + found.head_bytes
    assert 0 <= geometry.layers * geometry.kv_bytes - found.kv_bytes < geometry.layers


def test_agreement_of_the_formulas_with_the_model():
    """The closed formulas, which inflation needs, against transformers' model: all but the last norm."""
    config = json.loads((ROOT / "models/reference/config.json").read_text())
    closed, made = Geometry.of_config(config), Geometry.of_anatomy(Anatomy.of_config(config))
    assert (closed.expert_bytes, closed.kv_bytes, closed.width) == (made.expert_bytes, made.kv_bytes, made.width)
    norm = 2 * config["hidden_size"]
    assert (
        made.layers * made.dense_bytes + made.head_bytes
        == closed.layers * closed.dense_bytes + closed.head_bytes + norm
    )


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "olmoe", "qwen3_next"])
def test_a_model_with_foreign_parts_had_no_times(family):
    assert Geometry.of_config(config_of(family)).layers in (2, 3, 4)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"model_type": "qwen4_moe"}, "qwen4_moe"),
        ({}, "None"),
        ({"model_type": "llama", **SMALL}, "routed experts"),
        (config_of("mixtral") | {"hidden_size": "wide"}, "mixtral"),
    ],
    ids=["unknown", "empty", "dense", "broken"],
)
def test_what_cannot_be_weighed_is_refused_in_one_line(config, match):
    with pytest.raises(UserError, match=match) as caught:
        Anatomy.of_config(config)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_quantised_checkpoint_is_weighed_as_it_was_before():
    config = config_of("gpt_oss")
    found = Anatomy.of_config(config | {"quantization_config": {"quant_method": "mxfp4"}})
    assert found.quantised == "mxfp4" and found.parameters == Anatomy.of_config(config).parameters
    assert math.prod(found.expert_shapes[0]) == 2 * 48 * 64 and found.expert_shapes[1] == (96,)  # biases too
