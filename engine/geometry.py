"""What a model weighs: the bytes that a token's parts read, by which a host profile prices them.

The embedded reference model stands in for large ones by *inflation*: a function-preserving widening to width D and
expert width F, so that routing is the small model's own while an expert weighs megabytes. With w = D / (own width), a
power of four (then rescaling is exact in bfloat16), and b bytes a number:

    expert_bytes      3 D F b                                        gate, up and down projection
    attention         (2 w H + 2 w G) h D b                          query and output of w H heads, key and value of w G
    dense_bytes       attention + E D b + (2 D + 2 h) b              with router and norms, a layer
    kv_bytes          2 w G h b                                      keys and values of one token of context, a layer
    head_bytes        V D b                                          the output projection

H heads, G heads of keys and values, h numbers a head: heads grow in number with the width, never in size.

Any other model is weighed as transformers makes it (engine/anatomy.py): shared experts, layers without experts, linear
attention. The time model knows layers that are alike, so what all layers have besides routed experts is shared out
evenly among those with routed experts; the few bytes that do not divide go to the output projection, and the sums are
exact. Experts that are packed in 4 or 8 bits weigh their codes and scales (engine/quantisation.py).

    geometry = Geometry.of_config(json.load(open("config.json")), width=4096, expert_width=768)
    geometry = Geometry.of_config(config, bits=4, group=64)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.anatomy import Anatomy
from engine.errors import error, nearest
from engine.quantisation import part_bytes

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# what a stock attention and routed experts do not cover, in the words of transformers' configurations
_FOREIGN = ("first_k_dense_replace", "kv_lora_rank", "mlp_only_layers", "n_shared_experts")
_FOREIGN = (*_FOREIGN, "shared_expert_intermediate_size", "linear_num_key_heads")
# what must be as it is in the one family that is inflated, where a configuration says it
_STOCK = {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "attention_bias": False}
# what families call E and K in config.json
EXPERTS_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K_KEYS = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_top_k")


@dataclass(frozen=True)
class Geometry:
    """Sizes of a model as if its layers were alike. *_bytes in the dtype; dense_bytes and kv_bytes are a layer's."""

    layers: int  # L, MoE layers
    experts: int  # E
    top_k: int  # K
    expert_bytes: int
    dense_bytes: int  # norms, attention and router; no keys and values
    kv_bytes: int  # a token of context
    head_bytes: int
    dtype: str
    width: int = 0  # D; 0 where a record does not say it

    @property
    def predictor_bytes(self) -> dict[str, int]:
        """What predictors of the next two layers' experts read a layer (engine/predictors.py): maps [2 E, D], of `mlp`
        [2 D, D] before them."""
        maps = 2 * self.experts * self.width * DTYPE_BYTES[self.dtype]
        hidden = 2 * self.width * self.width * DTYPE_BYTES[self.dtype]
        return {"gate_replay": maps, "mlp": maps + hidden, "spec_prefetch": maps}

    @classmethod
    def of_config(
        cls,
        config: dict,
        *,
        width: int | None = None,
        expert_width: int | None = None,
        dtype: str = "bfloat16",
        bits: int | None = None,
        group: int | None = None,
    ) -> Geometry:
        """From a transformers configuration as a dict, inflated to D = width and F = expert_width (None: its own).

        bits, group: of the store that experts are read from, None the dtype. UserError where width is not the model's
        own times a power of four, expert_width is below its own, or the model has parts that cannot be inflated.
        """
        if dtype not in DTYPE_BYTES:
            raise error(f"dtype '{dtype}'", "a dtype with a size", nearest(dtype, DTYPE_BYTES))
        foreign = foreign_parts(config)
        if foreign and (width or expert_width):
            raise error(
                f"a configuration with {', '.join(foreign)}, inflated",
                "stock attention and routed experts in every layer",
                "leave its widths out",
            )
        if foreign:
            return cls.of_anatomy(Anatomy.of_config(config, dtype), bits=bits, group=group)
        own, own_expert = config["hidden_size"], config["moe_intermediate_size"]
        width, expert_width = width or own, expert_width or own_expert
        ratio = width // own
        if width % own or ratio not in [4**n for n in range(16)]:
            raise error(f"width {width}", f"{own} times a power of four", "choose another width: bfloat16 stays exact")
        if expert_width < own_expert:
            raise error(f"expert width {expert_width}", f"at least the model's own {own_expert}", "widen, never narrow")
        b, heads = DTYPE_BYTES[dtype], config["num_attention_heads"]
        head_dim = config.get("head_dim") or own // heads
        kv = ratio * config.get("num_key_value_heads", heads) * head_dim  # numbers of keys, as many of values
        attention = 2 * (ratio * heads * head_dim + kv) * width
        experts = next(config[name] for name in EXPERTS_KEYS if name in config)
        return cls(
            layers=config["num_hidden_layers"],
            experts=experts,
            top_k=config["num_experts_per_tok"],
            expert_bytes=expert_bytes(((2 * expert_width, width), (width, expert_width)), dtype, bits, group),
            dense_bytes=(attention + experts * width + 2 * width + 2 * head_dim) * b,
            kv_bytes=2 * kv * b,
            head_bytes=config["vocab_size"] * width * b,
            dtype=dtype,
            width=width,
        )

    @classmethod
    def of_anatomy(cls, anatomy: Anatomy, *, bits: int | None = None, group: int | None = None) -> Geometry:
        """Of any model; what a sequence keeps whatever its length is read by every token, and so dense."""
        dense = anatomy.dense_bytes + anatomy.state_bytes
        return cls(
            layers=anatomy.layers,
            experts=anatomy.experts,
            top_k=anatomy.top_k,
            expert_bytes=expert_bytes(anatomy.expert_shapes, anatomy.dtype, bits, group),
            dense_bytes=dense // anatomy.layers,
            kv_bytes=-(-anatomy.kv_bytes // anatomy.layers),
            head_bytes=anatomy.head_bytes + dense % anatomy.layers,
            dtype=anatomy.dtype,
            width=anatomy.width,
        )


def foreign_parts(config: dict) -> list[str]:
    """What of a configuration the formulas of inflation do not cover, in its own words; empty: a stock model."""
    found = [name for name in _FOREIGN if config.get(name)]
    found += [name for name, stock in _STOCK.items() if config.get(name, stock) != stock]
    if not any(name in config for name in EXPERTS_KEYS):
        found.append("no routed experts")
    elif "moe_intermediate_size" not in config:
        found.append("no moe_intermediate_size")
    return found


def expert_bytes(shapes: Sequence[tuple[int, ...]], dtype: str, bits: int | None, group: int | None) -> int:
    """Of one expert: its weights in the dtype, or codes and scales. shapes: (outputs, inputs) and (outputs,)."""
    return sum(sum(part_bytes(shape, bits, group, DTYPE_BYTES[dtype])) for shape in shapes)
