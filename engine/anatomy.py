"""What a model is made of, from its config.json alone: parameters, experts, what a token reads, what context takes.

The model is made on the meta device, where a tensor has a shape and no memory, so 80 billion parameters take a second
and no family needs code of its own. What no parameter says (K, keys and values, states of linear attention) a few
tokens tell that pass through it there, experts giving zeros.

    anatomy = Anatomy.of_config(json.load(open("config.json")), dtype="bfloat16")
    anatomy.parameters, anatomy.active_parameters

Sizes are those of transformers' model: what a checkpoint holds beside it (heads that predict several tokens) is not
counted, and a cache is what transformers keeps of a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import error

_EXPERTS = "expertmiss_zeros"  # an experts function for this pass alone
_TOKENS = 16
_BROKEN = (AttributeError, KeyError, NotImplementedError, OSError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Anatomy:
    """Sizes of one model in one dtype. *_bytes of the whole model, not of a layer."""

    family: str
    dtype: str
    layers: int  # L, with routed experts
    blocks: int  # layers in all
    experts: int  # E
    top_k: int  # K
    width: int  # D
    expert_shapes: tuple[tuple[int, ...], ...]  # of one expert's parameters: matrices (O, I), biases (O,)
    parameters: int
    active_parameters: int  # of one token: all but the experts it does not choose
    dense_bytes: int  # what every token reads: all but routed experts, embedding and output projection
    head_bytes: int  # the output projection
    embedding_bytes: int  # 0 where it is the output projection
    state_bytes: int  # what the cache holds of a sequence, however long
    kv_bytes: int  # of a token more, at the start of a sequence
    quantised: str = ""  # how the checkpoint is, where it is

    @classmethod
    def of_config(cls, config: dict, dtype: str = "bfloat16") -> Anatomy:
        """UserError where transformers does not know the family, or the model has no routed experts of one size."""
        model = _meta_model(config, dtype)
        from engine.hook import experts_modules
        from engine.record import Layout

        family, modules = str(config.get("model_type")), list(experts_modules(model).values())
        if not modules:
            raise error(f"a model of family '{family}'", "routed experts", "the experts interface has none in it")
        layouts = {Layout.of_module(module, model.dtype) for module in modules}
        if len(layouts) > 1 or len({module.num_experts for module in modules}) > 1:
            raise error(f"'{family}' with layers of unlike experts", "experts of one size and number", "not supported")
        layout, experts, layers = layouts.pop(), modules[0].num_experts, len(modules)
        one = sum(map(math.prod, layout.shapes))
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
        rows = embedding.numel() + (0 if tied else head.numel())
        parameters = sum(p.numel() for p in model.parameters()) - (embedding.numel() if tied else 0)
        routed = layers * experts * one
        tables = {id(head), id(embedding)}
        held = {id(p) for module in modules for p in (getattr(module, name) for name in layout.names)}
        dense = sum(p.nbytes for p in model.parameters() if id(p) not in tables | held)
        top_k, short = _pass_through(model, _TOKENS, family)
        _, long = _pass_through(model, 2 * _TOKENS, family)
        kv = (long - short) // _TOKENS
        return cls(
            family=family,
            dtype=dtype,
            layers=layers,
            blocks=model.config.get_text_config().num_hidden_layers,
            experts=experts,
            top_k=top_k,
            width=embedding.shape[1],
            expert_shapes=_as_rows(layout.shapes, bool(getattr(modules[0], "is_transposed", False))),
            parameters=parameters,
            active_parameters=parameters - routed + layers * top_k * one,
            dense_bytes=dense,
            head_bytes=head.nbytes,
            embedding_bytes=0 if tied else (rows - head.numel()) * embedding.element_size(),
            state_bytes=short - _TOKENS * kv,
            kv_bytes=kv,
            quantised=_quantised(config),
        )

    @property
    def expert_parameters(self) -> int:
        return sum(map(math.prod, self.expert_shapes))

    @property
    def rest_bytes(self) -> int:
        """What stays in fast memory whatever the slots: all but routed experts."""
        return self.dense_bytes + self.head_bytes + self.embedding_bytes

    def cache_bytes(self, tokens: int) -> int:
        """Of a sequence of so many tokens, where no layer forgets (an upper bound under sliding windows)."""
        return self.state_bytes + tokens * self.kv_bytes


def _as_rows(shapes: tuple[tuple[int, ...], ...], transposed: bool) -> tuple[tuple[int, ...], ...]:
    """Matrices as (outputs, inputs), whichever way the family stores them."""
    return tuple(shape[::-1] if transposed else shape for shape in shapes)


def _quantised(config: dict) -> str:
    found = config.get("quantization_config")
    return str(found.get("quant_method", "unknown") if isinstance(found, dict) else found or "")


def _meta_model(config: dict, dtype: str):
    """From a configuration as a dict; tied weights are not tied, a quantised checkpoint is taken as it was before."""
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_tie_weights

    from engine.skeleton import quiet

    family = config.get("model_type")
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "model_type")}
    try:
        made = type(AutoConfig.for_model(family)).from_dict(plain)
        with quiet(), torch.device("meta"), no_tie_weights():
            model = AutoModelForCausalLM.from_config(made, dtype=getattr(torch, dtype), trust_remote_code=False)
    except (*_BROKEN, StrictDataclassError) as exc:
        raise error(
            f"a config.json of family '{family}': {' '.join(str(exc).split())[:160]}",
            "that of a causal language model that transformers knows",
            "check it, or install the version of transformers that it names",
        ) from None
    return model.eval()


def _pass_through(model, tokens: int, family: str) -> tuple[int, int]:
    """(K, bytes of the cache) after so many tokens on the meta device."""
    import torch
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from engine.skeleton import quiet

    chosen: set[int] = set()

    def zeros(module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *_: object) -> torch.Tensor:
        chosen.add(index.shape[-1])
        return torch.zeros_like(hidden)

    ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, zeros)
    model.set_experts_implementation(_EXPERTS)
    try:
        with quiet(), torch.no_grad():
            ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
            cache = model(input_ids=ids, use_cache=True).past_key_values
    except _BROKEN as exc:
        found = f"a pass through '{family}' without weights: {' '.join(str(exc).split())[:160]}"
        raise error(found, "a model whose sizes do not depend on its numbers", "its sizes are not known") from None
    if len(chosen) != 1 or cache is None:
        raise error(f"'{family}' that chooses {sorted(chosen)} experts", "one K in every layer", "not supported")
    return chosen.pop(), sum(_tensor_bytes(vars(layer)) for layer in cache.layers)


def _tensor_bytes(value: object) -> int:
    """Of every tensor in what a layer of a cache holds."""
    if isinstance(value, dict | list | tuple):
        return sum(map(_tensor_bytes, value.values() if isinstance(value, dict) else value))
    return getattr(value, "nbytes", 0)
