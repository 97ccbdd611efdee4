"""What several tests share: tiny seeded MoE models of every score rule, and made-up router traces.

The models are built from configurations, never downloaded. Their weights are larger than a fresh model's, so that
routers prefer clearly and a wrong expert shows in the logits. torch and transformers are imported on first use: tests
of the decision alone do without them.

Axes: T events, L layers, E experts, K chosen an event.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

MODEL_SEED = 20
ROUTER_STD = 0.25  # hidden states have norm 8 (root of 64): logits of standard deviation 2
CORRECTION_STD = 0.1  # of the correction bias of the sigmoid families
BIAS_STD = 0.3  # of the biases of experts

_SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "intermediate_size": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "num_experts_per_tok": 4,
    "tie_word_embeddings": False,
}
_SIXTEEN = {"num_experts": 16, "moe_intermediate_size": 32}
_GROUPED = {  # four groups of four experts, the best two count
    "n_routed_experts": 16,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_DEEPSEEK = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
_LINEAR_ATTENTION = {
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
# name: (class prefix in transformers, configuration over _SHAPE, the score rule that must be found)
FAMILIES = {
    "deepseek_v3": ("DeepseekV3", {**_GROUPED, **_DEEPSEEK}, "sigmoid"),
    "glm4_moe": ("Glm4Moe", {**_GROUPED, "head_dim": 16}, "sigmoid"),
    "gpt_oss": ("GptOss", {"num_local_experts": 16, "head_dim": 16}, "softmax"),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 16}, "softmax"),
    "mixtral": ("Mixtral", {"num_local_experts": 16}, "softmax"),
    "olmoe": ("Olmoe", {"num_experts": 16, "norm_topk_prob": False}, "softmax"),
    "qwen3_moe": ("Qwen3Moe", {**_SIXTEEN, "head_dim": 16, "norm_topk_prob": True}, "softmax"),
    "qwen3_moe_raw": ("Qwen3Moe", {**_SIXTEEN, "head_dim": 16, "norm_topk_prob": False}, "softmax"),
    "qwen3_next": ("Qwen3Next", {**_SIXTEEN, **_LINEAR_ATTENTION, "head_dim": 16, "norm_topk_prob": True}, "softmax"),
}


@pytest.fixture(params=sorted(FAMILIES))
def family(request):
    """Every family; parametrise a test by "family" to take some."""
    return request.param


@pytest.fixture(scope="module")
def tiny_moe():
    """tiny_moe(family, **configuration) -> a fresh model in float32, the same weights every time.

    One thread while it is in use: models this small lose an order of magnitude to the waiting of a second one.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    @torch.no_grad()
    def build(family, **configuration):
        prefix, own, _ = FAMILIES[family]
        config = getattr(transformers, f"{prefix}Config")(**{**_SHAPE, **own, **configuration})
        torch.manual_seed(MODEL_SEED)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
        for name, module in model.named_modules():
            if name.endswith((".gate", ".router")):
                module.weight.normal_(std=ROUTER_STD)
                if hasattr(module, "e_score_correction_bias"):
                    module.e_score_correction_bias.normal_(std=CORRECTION_STD)
        for name, parameter in model.named_parameters():
            if ".experts." in name and name.endswith("_bias"):  # zero in a fresh model: one misread would not show
                parameter.normal_(std=BIAS_STD)
        return model.requires_grad_(False)

    yield build
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def score_rule():
    """score_rule(family) -> the name of the score rule that attach must find."""
    return lambda family: FAMILIES[family][2]


@pytest.fixture(scope="session")
def random_ids():
    """random_ids(tokens, seed, rows=1) -> token ids [rows, tokens]."""
    import torch

    def draw(tokens, seed, rows=1):
        return torch.randint(0, _SHAPE["vocab_size"], (rows, tokens), generator=torch.Generator().manual_seed(seed))

    return draw


@pytest.fixture(scope="session")
def router_trace():
    """router_trace(seed, T, E, K, ...) -> chosen, weights [T, K], scores [T, E] of one layer, in no sorted order.

    Popularity is Zipf-like, topics change every `topic_tokens` events and favour other experts. norm: weights sum to
    one. sorted: chosen by score, as most softmax routers return it. steps: scores are multiples of 1/steps, so that
    they tie.
    """

    def draw(seed, T=200, E=16, K=4, *, norm=True, sorted=False, topic_tokens=50, noise=1.0, steps=None):
        rng = np.random.default_rng(seed)
        popularity = -np.log(rng.permutation(E) + 1.0)
        topics = rng.normal(size=(T // topic_tokens + 1, E)) * 1.5
        scores = popularity + topics[np.arange(T) // topic_tokens] + noise * rng.normal(size=(T, E))
        if steps:
            scores = np.round(scores * steps) / steps
        scores = scores.astype(np.float32)
        chosen = np.argsort(-(scores + 1e-3 * rng.random((T, E))), axis=1)[:, :K]  # ties: any of them
        if not sorted:
            chosen = rng.permuted(chosen, axis=1)
        chosen = chosen.astype(np.int32)
        mass = np.exp(scores - scores.max(axis=1, keepdims=True))
        mass /= mass.sum(axis=1, keepdims=True)
        weights = np.take_along_axis(mass, chosen, axis=1)
        if norm:
            weights /= weights.sum(axis=1, keepdims=True)
        return SimpleNamespace(chosen=chosen, weights=weights.astype(np.float32), scores=scores)

    return draw
