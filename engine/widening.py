"""What stays the same when a small trained Qwen3-MoE is made wider, tensor by tensor.

With D -> D', F -> F' and w = D' / D (sizes as engine/geometry.py states them):

    residual     the first D numbers are the model's own, the others are zero everywhere: nothing writes to them
    norms        over D' numbers of which D are not zero the mean square is w times smaller: eps / w, weights / sqrt(w)
    q, k         / sqrt(w), because q_norm and k_norm share that eps over heads whose size does not change
    heads        w times as many; the own ones come first, each with its own key and value head
    added rows   of v_proj and gate_proj are zero where the input is not: an added head attends to zeros, an added
                 neuron is act(0) * up = 0

w is a power of four, so that sqrt(w) is a power of two and every division is exact in bfloat16. Whatever else meets a
zero is filler, random numbers: nothing on the way from a disk may find the weights easy to compress.

    wide_config = widen_config(config, 1024, 1024, "bfloat16")
    wide = widen(own, (1024, 256), Part("GD", zero="below").zero, Filler(FILLER_SEED, torch.bfloat16))
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.errors import error, nearest
from engine.geometry import EXPERTS_KEYS, Geometry, foreign_parts

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}  # of what is written
FILLER_SEED = 1024
_SILENT = ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "silu", "swish")  # act(0) = 0
_SIZES = ("hidden_size", "moe_intermediate_size", "num_attention_heads", "num_experts_per_tok")
_SIZES = (*_SIZES, "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "vocab_size")
_FILLER_STD = 0.02
_FILLER_NUMBERS = 2**22 - 3  # odd: when the block comes round again it lies otherwise in a page


@dataclass(frozen=True)
class Part:
    """One tensor. axes: D, E, F, V as everywhere; H, G numbers of all query, all key heads; h of one head.

    The own block is the upper left. zero: `below` it (own columns, added rows) or `right` of it (own rows, added
    columns); all else that is added is filler. scaled: the own block over sqrt(w).
    """

    axes: str
    zero: str = ""
    scaled: bool = False


OUTER = {
    "lm_head.weight": Part("VD"),  # not there in a model with tied embeddings
    "model.embed_tokens.weight": Part("VD", zero="right"),  # begins the residual
    "model.norm.weight": Part("D", scaled=True),
}
LAYER = {
    "input_layernorm.weight": Part("D", scaled=True),
    "mlp.gate.weight": Part("ED"),
    "post_attention_layernorm.weight": Part("D", scaled=True),
    "self_attn.k_norm.weight": Part("h"),
    "self_attn.k_proj.weight": Part("GD", scaled=True),
    "self_attn.o_proj.weight": Part("DH", zero="below"),  # adds to the residual
    "self_attn.q_norm.weight": Part("h"),
    "self_attn.q_proj.weight": Part("HD", scaled=True),
    "self_attn.v_proj.weight": Part("GD", zero="below"),
}
EXPERT = {
    "down_proj.weight": Part("DF", zero="below"),  # adds to the residual
    "gate_proj.weight": Part("FD", zero="below"),
    "up_proj.weight": Part("FD"),
}


class Filler:
    """Small random numbers: one block drawn once, laid out again and again; billions of draws would take minutes."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._block = (torch.randn(_FILLER_NUMBERS, generator=generator) * _FILLER_STD).to(dtype)
        self._at = 0

    def tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        """The next numbers of the endless row."""
        flat = torch.empty(math.prod(shape), dtype=self._block.dtype)
        done = 0
        while done < len(flat):
            piece = self._block[self._at : self._at + len(flat) - done]
            flat[done : done + len(piece)] = piece
            done, self._at = done + len(piece), (self._at + len(piece)) % len(self._block)
        return flat.view(shape)


def widen(own: torch.Tensor, shape: tuple[int, ...], zero: str, filler: Filler) -> torch.Tensor:
    """own [rows, columns] or [numbers], as the upper left of a tensor of `shape`."""
    wide = filler.tensor(shape)
    wide[tuple(map(slice, own.shape))] = own
    if zero == "below":
        wide[own.shape[0] :, : own.shape[1]] = 0
    if zero == "right":
        wide[: own.shape[0], own.shape[1] :] = 0
    return wide


def widen_config(config: dict, width: int | None, expert_width: int | None, dtype: str) -> dict:
    """config.json of the inflated model. UserError where the model is none that this widening keeps the same."""
    if (family := config.get("model_type")) != "qwen3_moe":
        raise error(f"a model of family '{family}'", "a qwen3_moe", "inflate one: this is worked out for it alone")
    if missing := [name for name in _SIZES if name not in config]:
        raise error(f"config.json without {missing[0]}", f"all of {', '.join(_SIZES)}", "save the model again")
    refused = {"decoder_sparse_step": 1, "attention_bias": False}
    for name, needed in refused.items():
        if (found := config.get(name, needed)) != needed:
            raise error(f"{name} {found}", f"{needed}", "inflate a model of stock attention, experts in every layer")
    if (act := config.get("hidden_act", "silu")) not in _SILENT:
        raise error(f"hidden_act '{act}'", f"act(0) = 0 ({', '.join(_SILENT)})", "inflate another model")
    for name, size in (("width", width), ("expert width", expert_width)):
        if size is not None and size < 1:
            raise error(f"{name} {size}", "a size, or none for the model's own", "choose one")
    if dtype not in DTYPES:
        raise error(f"dtype '{dtype}'", " or ".join(DTYPES), nearest(dtype, DTYPES))
    if foreign := foreign_parts(config):
        raise error(
            f"a configuration with {', '.join(foreign)}", "stock attention, experts in every layer", "inflate one"
        )
    Geometry.of_config(config, width=width, expert_width=expert_width, dtype=dtype)  # refuses sizes
    width, expert_width = width or config["hidden_size"], expert_width or config["moe_intermediate_size"]
    ratio = width // config["hidden_size"]
    return {key: value for key, value in config.items() if key != "torch_dtype"} | {
        "dtype": dtype,
        "head_dim": axes(config)["h"],
        "hidden_size": width,
        "moe_intermediate_size": expert_width,
        "num_attention_heads": ratio * config["num_attention_heads"],
        "num_key_value_heads": ratio * config["num_key_value_heads"],
        "rms_norm_eps": config["rms_norm_eps"] / ratio,
    }


def axes(config: dict) -> dict[str, int]:
    """How many numbers each axis letter of a Part has."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {
        "D": config["hidden_size"],
        "E": next(config[name] for name in EXPERTS_KEYS if name in config),
        "F": config["moe_intermediate_size"],
        "G": config["num_key_value_heads"] * head,
        "H": config["num_attention_heads"] * head,
        "V": config["vocab_size"],
        "h": head,
    }


def groups(config: dict) -> Iterator[dict[str, Part]]:
    """Every tensor by name, in groups that stay in one shard: an expert is whole where it lies."""
    tied = config.get("tie_word_embeddings", False)
    yield {name: part for name, part in OUTER.items() if not (tied and name == "lm_head.weight")}
    for layer in range(config["num_hidden_layers"]):
        yield {f"model.layers.{layer}.{name}": part for name, part in LAYER.items()}
        for expert in range(axes(config)["E"]):
            yield {f"model.layers.{layer}.mlp.experts.{expert}.{name}": part for name, part in EXPERT.items()}
