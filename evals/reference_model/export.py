"""From training parameters to a Hugging Face folder's tensors and configuration."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from engine.files import atomic, write_json
from evals.reference_model.data import BOS, BOS_TOKEN
from evals.reference_model.model import Shape
from evals.reference_model.pack import PLAIN, write


def hugging_face_config(shape: Shape, dtype: str) -> dict:
    """config.json of a stock Qwen3MoeForCausalLM."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS,
        "decoder_sparse_step": 1,
        "dtype": dtype,
        "eos_token_id": BOS,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "hidden_size": shape.width,
        "initializer_range": 0.02,
        "intermediate_size": shape.chosen * shape.expert_width,
        "max_position_embeddings": shape.context,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": shape.expert_width,
        "norm_topk_prob": shape.norm_topk_prob,
        "num_attention_heads": shape.heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.chosen,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.key_value_heads,
        "output_router_logits": False,
        "pad_token_id": None,
        "rms_norm_eps": shape.eps,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocabulary,
    }


def hugging_face_tensors(shape: Shape, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names and layouts of the checkpoint on disk: projections apart, one tensor an expert."""
    tensors = {"model.embed_tokens.weight": parameters["embed"], "model.norm.weight": parameters["final_norm"]}
    q, g, f = shape.heads * shape.head_width, shape.key_value_heads * shape.head_width, shape.expert_width
    for i in range(shape.layers):
        layer = f"model.layers.{i}"
        query, key, value = parameters[f"{i}.qkv"].split([q, g, g])
        tensors |= {
            f"{layer}.input_layernorm.weight": parameters[f"{i}.attention_norm"],
            f"{layer}.post_attention_layernorm.weight": parameters[f"{i}.moe_norm"],
            f"{layer}.self_attn.q_proj.weight": query,
            f"{layer}.self_attn.k_proj.weight": key,
            f"{layer}.self_attn.v_proj.weight": value,
            f"{layer}.self_attn.o_proj.weight": parameters[f"{i}.o"],
            f"{layer}.self_attn.q_norm.weight": parameters[f"{i}.q_norm"],
            f"{layer}.self_attn.k_norm.weight": parameters[f"{i}.k_norm"],
            f"{layer}.mlp.gate.weight": parameters[f"{i}.router"],
        }
        for e in range(shape.experts):
            expert = f"{layer}.mlp.experts.{e}"
            gate_up = parameters[f"{i}.gate_up"][e]
            tensors[f"{expert}.gate_proj.weight"] = gate_up[:f]
            tensors[f"{expert}.up_proj.weight"] = gate_up[f:]
            tensors[f"{expert}.down_proj.weight"] = parameters[f"{i}.down"][e]
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def training_parameters(shape: Shape, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `hugging_face_tensors`, in float32."""
    parameters = {"embed": tensors["model.embed_tokens.weight"], "final_norm": tensors["model.norm.weight"]}
    for i in range(shape.layers):
        layer = f"model.layers.{i}"
        parameters |= {
            f"{i}.attention_norm": tensors[f"{layer}.input_layernorm.weight"],
            f"{i}.moe_norm": tensors[f"{layer}.post_attention_layernorm.weight"],
            f"{i}.qkv": torch.cat([tensors[f"{layer}.self_attn.{x}_proj.weight"] for x in "qkv"]),
            f"{i}.o": tensors[f"{layer}.self_attn.o_proj.weight"],
            f"{i}.q_norm": tensors[f"{layer}.self_attn.q_norm.weight"],
            f"{i}.k_norm": tensors[f"{layer}.self_attn.k_norm.weight"],
            f"{i}.router": tensors[f"{layer}.mlp.gate.weight"],
        }
        experts = [f"{layer}.mlp.experts.{e}" for e in range(shape.experts)]
        parameters[f"{i}.gate_up"] = torch.stack(
            [torch.cat([tensors[f"{e}.gate_proj.weight"], tensors[f"{e}.up_proj.weight"]]) for e in experts]
        )
        parameters[f"{i}.down"] = torch.stack([tensors[f"{e}.down_proj.weight"] for e in experts])
    return {name: parameters[name].float().contiguous() for name in shape.parameter_shapes()}


def write_folder(shape: Shape, parameters: dict[str, torch.Tensor], tokenizer: Path, folder: Path) -> None:
    """A Hugging Face folder in float32: weights, config.json, generation_config.json, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / PLAIN, hugging_face_tensors(shape, parameters), {"format": "pt"})
    write_json(folder / "config.json", hugging_face_config(shape, "float32"))
    write_json(folder / "generation_config.json", {"bos_token_id": BOS, "do_sample": False, "eos_token_id": BOS})
    with atomic(folder / "tokenizer.json") as temporary:
        shutil.copyfile(tokenizer, temporary)
    write_json(
        folder / "tokenizer_config.json",
        {
            "bos_token": BOS_TOKEN,
            "eos_token": BOS_TOKEN,
            "model_max_length": shape.context,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
