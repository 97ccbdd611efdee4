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

    geometry = Geometry.of_config(json.load(open("config.json")), width=4096, expert_width=768)
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import error, nearest

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# what a stock attention and routed experts do not cover, in the words of transformers' configurations
_FOREIGN = ("first_k_dense_replace", "kv_lora_rank", "mlp_only_layers", "n_shared_experts")
_FOREIGN = (*_FOREIGN, "shared_expert_intermediate_size", "linear_num_key_heads")
# what families call E and K in config.json
EXPERTS_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K_KEYS = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_top_k")


@dataclass(frozen=True)
class Geometry:
    """Sizes of a model whose layers are alike. *_bytes in the dtype; dense_bytes and kv_bytes are a layer's."""

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
        cls, config: dict, *, width: int | None = None, expert_width: int | None = None, dtype: str = "bfloat16"
    ) -> Geometry:
        """From a transformers configuration as a dict, inflated to D = width and F = expert_width (None: its own).

        UserError where width is not the model's own times a power of four, expert_width is below its own, or the
        model has parts that the formulas do not cover.
        """
        if dtype not in DTYPE_BYTES:
            raise error(f"dtype '{dtype}'", "a dtype with a size", nearest(dtype, DTYPE_BYTES))
        foreign = [name for name in _FOREIGN if config.get(name)]
        experts = next((config[name] for name in EXPERTS_KEYS if name in config), None)
        if foreign or experts is None or "moe_intermediate_size" not in config:
            raise error(
                f"a configuration with {', '.join(foreign) or 'no routed experts'}",
                "stock attention and routed experts in every layer",
                "build a Geometry from the model's own sizes",
            )
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
        return cls(
            layers=config["num_hidden_layers"],
            experts=experts,
            top_k=config["num_experts_per_tok"],
            expert_bytes=3 * width * expert_width * b,
            dense_bytes=(attention + experts * width + 2 * width + 2 * head_dim) * b,
            kv_bytes=2 * kv * b,
            head_bytes=config["vocab_size"] * width * b,
            dtype=dtype,
            width=width,
        )
