"""The compute part of a host's profile: what a token, a layer, a decision and an experts call cost.

A stock transformers MoE of random weights decodes one token after another through the project's own hook, its experts
left out but for what they do to the caches: two depths differ by whole layers, so what a layer adds is their difference
and what is left is the token's; two widths, one with small and one with large experts, give the layer's cost by the
bytes it reads. Decisions are timed inside and subtracted. The stock experts run apart, on slot buffers that no cache
holds.

    compute, busy = measure_compute("cpu", threads=8, plan=FULL, say=print)      # engine.host_probe
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable

import numpy as np
import torch
import transformers
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.hook import attach
from engine.host_sample import number, sample, table
from engine.policies import Policy
from engine.residency import Residency

SEED = 20_512
EXPERTS = "grouped_mm"  # the implementation transformers chooses where none is asked for
CHOSEN = 8  # experts a token in the decoding model, and the widest experts call
SLOTS = 64  # experts a slot buffer holds: grouped kernels walk over all of them,
MANY_SLOTS = 256  # and this many tell what a slot more costs
HEAD_WIDTH = 64
VOCABULARY = 512
FLUSH_BYTES = 1 << 26  # more than the last cache of a processor (but for the largest servers)
CONTEXT = 32  # tokens in the KV cache
PROJECTION_WIDTH = 2048  # of the large output projection
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
RULE = Policy(
    id="probe",
    miss_rule="threshold",
    tau=0.15,
    share=None,
    renormalise=None,
    standin="next_best",
    standin_weight="missing",
    standin_recency=False,
    eviction="lfu_decay",
    half_life_tokens=128.0,
    beta=0.5,
    seed=None,
).rule()


def measure_compute(device: str, threads: int, plan: dict, say) -> tuple[dict, Callable[[], float]]:
    """The compute part of a profile, and its widest experts call, to be run beside the links."""
    dtypes, decisions, busy = {}, [], None
    pool = torch.zeros(plan["pool_bytes"], dtype=torch.uint8, device=device)
    for name, dtype in DTYPES.items():
        say(f"{device} {name}: decoding")
        token, layers, decision = _measure_decoding(pool, dtype, plan)
        decisions.append(decision)
        weights = pool.view(dtype).normal_(std=0.02)
        head = weights.view(-1, PROJECTION_WIDTH)
        hidden = torch.randn(1, PROJECTION_WIDTH, device=device, dtype=dtype)
        rest = sample(
            {"head": lambda h=hidden, w=head: _timed(lambda: torch.nn.functional.linear(h, w), device)}, 0.2, 3
        )
        (outside,) = token.values()
        token[plan["pool_bytes"], 1] = np.median(outside) + rest["head"]
        say(f"{device} {name}: experts")
        cells = {}
        for width, inner in plan["experts"]:
            call = _experts_call(width, inner, weights, device)
            for count in (1, CHOSEN // 2, CHOSEN):
                cells[3 * width * inner * weights.element_size(), count] = lambda call=call, n=count: call(n)
        busy = busy or (lambda call=call: call(CHOSEN))  # of the first dtype
        narrow = 3 * math.prod(plan["experts"][0]) * weights.element_size()
        many = _experts_call(*plan["experts"][0], weights, device, MANY_SLOTS)
        cells["many"] = lambda call=many: call(CHOSEN)
        found = sample(cells, plan["seconds"]["experts"], plan["repeats"])
        a_slot = (found.pop("many") - np.median(found[narrow, CHOSEN])) / (MANY_SLOTS - SLOTS)
        dtypes[name] = {
            "slot_s": number(np.maximum(a_slot, 1e-9)),
            "token": table(token, (1,)),
            "layers": table(layers, (1,)),
            "experts": table(found, (1, CHOSEN // 2, CHOSEN)),
        }
    waiting = os.environ.get("OMP_WAIT_POLICY", "unset").lower()
    head = {"threads": threads, "wait_policy": waiting, "experts_implementation": EXPERTS, "slots": SLOTS}
    return head | {"event_s": number(np.concatenate(decisions)), "dtypes": dtypes}, busy


def _timed(work: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.perf_counter() - start


def _measure_decoding(pool: torch.Tensor, dtype: torch.dtype, plan: dict) -> tuple[dict, dict, np.ndarray]:
    """Tables of a token outside its layers and of a layer by dense bytes, and seconds of decisions (narrow model)."""
    few, many = plan["depth_layers"]
    narrow, wide = plan["widths"]
    small = CHOSEN * 3 * math.prod(plan["experts"][0])  # weights
    flush = {narrow: pool[: small * dtype.itemsize].view(dtype), wide: pool[:FLUSH_BYTES].view(torch.float32)}
    models = {(width, depth): _Decoder(width, depth, flush[width], dtype) for width in flush for depth in (few, many)}
    found = sample({key: model.step for key, model in models.items()}, plan["seconds"]["decode"], plan["repeats"])
    a_layer = {width: np.maximum(found[width, many] - found[width, few], 1e-7) / (many - few) for width in flush}
    layers = {(models[width, few].dense_bytes, 1): a_layer[width] for width in flush}
    outside = np.maximum(found[narrow, few] - few * np.median(a_layer[narrow]), 1e-7)
    token = {(models[narrow, few].head_bytes, 1): outside}
    decisions = np.concatenate([models[narrow, depth].decisions[1:] for depth in (few, many)])
    for model in models.values():
        model.attachment.detach()
    return token, layers, decisions


def _config(width: int, layers: int, **fields) -> transformers.PretrainedConfig:
    heads = max(1, width // HEAD_WIDTH)
    shape = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": HEAD_WIDTH,
        "num_experts": SLOTS,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": 8,
        "vocab_size": VOCABULARY,
        "norm_topk_prob": True,
    }
    return transformers.Qwen3MoeConfig(**shape | fields)


class _Decoder:
    """A stock Qwen3-MoE of random weights, decoding by one token through the hook.

    Its experts compute nothing; `flush` is read in their place, so that dense weights are as cold as between experts.
    """

    def __init__(self, width: int, layers: int, flush: torch.Tensor, dtype: torch.dtype) -> None:
        device = flush.device.type
        config = _config(width, layers, dtype=dtype)
        torch.manual_seed(SEED)
        with torch.device(device):
            self.model = transformers.Qwen3MoeForCausalLM(config).eval().to(dtype)
        for name, parameter in self.model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.normal_(std=2.0 / width**0.5)  # a router that prefers clearly
        dense = {n: p for n, p in self.model.named_parameters() if ".layers.0." in n and ".experts." not in n}
        self.dense_bytes = sum(p.numel() * p.element_size() for p in dense.values())
        self.head_bytes = self.model.lm_head.weight.numel() * self.model.lm_head.weight.element_size()
        self.device, self.flush, self.inside, self.decisions = device, flush, 0.0, []
        self.residency = Residency(layers=layers, experts=SLOTS, top_k=CHOSEN, slots=SLOTS // 4, rule=RULE)
        self.attachment = attach(self.model)
        self.attachment.handler = self._decide
        self.cache = transformers.DynamicCache(config=config)  # filled in place
        self._pass(torch.arange(CONTEXT, device=device)[None])

    def _pass(self, ids: torch.Tensor) -> None:
        self.model(input_ids=ids, cache=self.cache, use_cache=True)

    def step(self) -> float:
        """Seconds of one token, the second in a row, without its decisions and experts, which are kept apart."""
        ids = torch.randint(0, VOCABULARY, (1, 1), device=self.device)
        self._pass(ids)  # the cell before this one left other things in the caches
        self.inside = 0.0
        total = _timed(lambda: self._pass(ids), self.device)
        self.cache.crop(-2)  # the context stays as long as it was
        return total - self.inside

    def _decide(self, call) -> torch.Tensor:
        """From the router's output to what would run, as the engine does it; only what experts do to caches is done."""
        if self.device == "cuda":
            torch.cuda.current_stream().synchronize()  # else the copy below would wait: that is the layer's time
        start = time.perf_counter()
        log, _ = self.residency.decide(
            0,
            call.layer,
            call.index.cpu().numpy(),
            call.weights.float().cpu().numpy(),
            call.scores.cpu().numpy(),
        )
        torch.from_numpy(log.executed).to(call.index.device, call.index.dtype)
        torch.from_numpy(log.weights).to(call.weights.device, call.weights.dtype)
        if len(call.hidden) == 1:
            self.decisions.append(time.perf_counter() - start)
        _timed(self.flush.sum, self.device)
        self.inside += time.perf_counter() - start
        return torch.zeros_like(call.hidden)


def _experts_call(
    width: int, inner: int, weights: torch.Tensor, device: str, slots: int = SLOTS
) -> Callable[[int], float]:
    """call(n): seconds for n experts on one token. Slot buffers are windows of `weights`, another one every call."""
    each = 3 * width * inner
    slots = min(slots, weights.numel() // each)
    if slots < CHOSEN:
        raise ValueError(f"a pool of {weights.numel()} weights holds {slots} experts of {each}")
    config = _config(width, 1, moe_intermediate_size=inner, num_experts=slots)
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    bare = next(module for module in model.modules() if hasattr(module, "_is_expert_parallel"))
    windows = []
    for start in range(0, weights.numel() - slots * each + 1, slots * each):
        module = copy.deepcopy(bare)
        up, down = weights[start : start + slots * each].split([slots * each * 2 // 3, slots * each // 3])
        module.gate_up_proj = torch.nn.Parameter(up.view(slots, 2 * inner, width), requires_grad=False)
        module.down_proj = torch.nn.Parameter(down.view(slots, width, inner), requires_grad=False)
        windows.append(module)
    run, rng = ALL_EXPERTS_FUNCTIONS[EXPERTS], np.random.default_rng(SEED)
    hidden = torch.randn(1, width, dtype=weights.dtype, device=device)

    def call(count: int) -> float:
        module = windows[rng.integers(len(windows))]
        index = torch.from_numpy(rng.permutation(slots)[None, :count].copy()).to(device)
        combine = torch.full((1, count), 1 / count, dtype=weights.dtype, device=device)
        if device == "cuda":
            torch.cuda.current_stream().synchronize()
        return _timed(lambda: run(module, hidden, index, combine), device)

    return call
