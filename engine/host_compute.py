"""The compute part of a host's profile: what a token, a layer, a decision and an experts call cost.

A stock transformers MoE of random weights decodes one token after another through the engine itself, its experts left
out but for what they do to the caches: two depths differ by whole layers, so what a layer adds is their difference and
what is left is the token's; widths from small to large give the layer's cost by the bytes it reads. Events are timed
inside and subtracted. The experts run apart, as the engine runs them, on slot buffers that no cache holds.

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

from engine.experts import decode_token
from engine.hook import Attachment, Call, attach, experts_modules
from engine.host_sample import number, sample, table
from engine.kernels import set_threads
from engine.link import Link
from engine.offload_engine import Engine
from engine.policies import Policy
from engine.record import Layout

SEED = 20_512
EXPERTS = "grouped_mm"  # what transformers chooses where none is asked for; the engine uses it on a GPU
ENGINE = "engine"  # whose experts were measured: its kernels on a CPU, EXPERTS on slots on a GPU
CHOSEN = 8  # experts a token in the decoding model, and the widest experts call
SLOTS = 64  # experts a slot buffer holds: grouped kernels walk over all of them,
MANY_SLOTS = 256  # and this many tell what a slot more costs
HEAD_WIDTH = 64
VOCABULARY = 512
FLUSH_BYTES = 1 << 26  # more than the last cache of a processor (but for the largest servers)
CONTEXT = 32  # tokens in the KV cache
PROJECTION_WIDTH = 2048  # of the large output projection
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
POLICY = Policy(
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
)


def measure_compute(device: str, threads: int, plan: dict, say) -> tuple[dict, Callable[[], float]]:
    """The compute part of a profile, and its widest experts call, to be run beside the links."""
    dtypes, decisions, busy = {}, [], None
    set_threads()
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
            call = _experts_call(width, inner, pool, dtype)
            for count in (1, CHOSEN // 2, CHOSEN):
                cells[3 * width * inner * weights.element_size(), count] = lambda call=call, n=count: call(n)
        busy = busy or (lambda call=call: call(CHOSEN))  # of the first dtype
        narrow = 3 * math.prod(plan["experts"][0]) * weights.element_size()
        many = _experts_call(*plan["experts"][0], pool, dtype, MANY_SLOTS)
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
    head = {"threads": threads, "wait_policy": waiting, "experts_implementation": ENGINE, "slots": SLOTS}
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
    narrow = plan["widths"][0]
    small = CHOSEN * 3 * math.prod(plan["experts"][0]) * dtype.itemsize  # bytes
    flush = {width: pool[: small if width == narrow else FLUSH_BYTES].view(torch.float32) for width in plan["widths"]}
    models = {(width, depth): _Decoder(width, depth, flush[width], dtype) for width in flush for depth in (few, many)}
    found = sample({key: model.step for key, model in models.items()}, plan["seconds"]["decode"], plan["repeats"])
    a_layer = {width: np.maximum(found[width, many] - found[width, few], 1e-7) / (many - few) for width in flush}
    layers = {(models[width, few].dense_bytes, 1): a_layer[width] for width in flush}
    outside = np.maximum(found[narrow, few] - few * np.median(a_layer[narrow]), 1e-7)
    token = {(models[narrow, few].head_bytes, 1): outside}
    decisions = np.concatenate([models[narrow, depth].engine.decisions[1:] for depth in (few, many)])
    for model in models.values():
        model.close()
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


class _Empty:
    """A store of records that nobody looks at: a read takes no time."""

    def __init__(self, attachment: Attachment, dtype: torch.dtype) -> None:
        self.layers, self.experts = len(attachment.layers), attachment.experts
        self.layout = Layout.of_module(attachment.layers[0], dtype)

    def read(self, layer: int, expert: int, target: memoryview) -> int:
        return len(target)

    def close(self) -> None: ...


class _Watched(Engine):
    """The engine, with a clock around each call and a flush of the caches in place of the experts' computation."""

    flush: torch.Tensor
    inside = within = 0.0  # seconds in the handler; of them in the flush and waiting for the link
    decisions: list[float]

    def _experts(self, call: Call) -> torch.Tensor:
        if call.hidden.is_cuda:
            torch.cuda.current_stream().synchronize()  # else the first copy would wait: that is the layer's time
        start, before = time.perf_counter(), self.within + self.stalled_s
        output = super()._experts(call)
        took = time.perf_counter() - start
        self.inside += took
        if len(call.hidden) == 1:
            self.decisions.append(took - (self.within + self.stalled_s - before))
        return output

    def _compute(self, call: Call, rows: np.ndarray, weights: np.ndarray) -> torch.Tensor:
        self.within += _timed(self.flush.sum, call.hidden.device.type)
        return torch.zeros_like(call.hidden)


class _Decoder:
    """A stock Qwen3-MoE of random weights, decoding by one token through the engine.

    Its experts compute nothing; `flush` is read in their place, so that dense weights are as cold as between experts.
    """

    def __init__(self, width: int, layers: int, flush: torch.Tensor, dtype: torch.dtype) -> None:
        self.device = flush.device.type
        config = _config(width, layers, dtype=dtype)
        torch.manual_seed(SEED)
        with torch.device(self.device):
            self.model = transformers.Qwen3MoeForCausalLM(config).eval().to(dtype)
        for name, parameter in self.model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.normal_(std=2.0 / width**0.5)  # a router that prefers clearly
        dense = {n: p for n, p in self.model.named_parameters() if ".layers.0." in n and ".experts." not in n}
        self.dense_bytes = sum(p.numel() * p.element_size() for p in dense.values())
        self.head_bytes = self.model.lm_head.weight.numel() * self.model.lm_head.weight.element_size()
        self._attachment = attach(self.model)
        self._link = Link(_Empty(self._attachment, dtype), readers=1)
        self.engine = _Watched(self._attachment, self._link, slots=SLOTS // 4)
        self.engine.flush, self.engine.decisions = flush, []
        self.engine.use(POLICY, completion="real")
        self.cache = transformers.DynamicCache(config=config)  # filled in place
        self._pass("prefill", torch.arange(CONTEXT, device=self.device)[None])

    def close(self) -> None:
        self._link.close()
        self._attachment.detach()

    def _pass(self, phase: str, ids: torch.Tensor) -> None:
        with self.engine.phase(phase):
            self.model(input_ids=ids, cache=self.cache, use_cache=True)

    def step(self) -> float:
        """Seconds of one token, the second in a row, without its decisions and experts, which are kept apart."""
        ids = torch.randint(0, VOCABULARY, (1, 1), device=self.device)
        self._pass("decode", ids)  # the cell before this one left other things in the caches
        self.engine.inside = 0.0
        total = _timed(lambda: self._pass("decode", ids), self.device)
        self.cache.crop(-2)  # the context stays as long as it was
        return total - self.engine.inside


def _experts_call(
    width: int, inner: int, pool: torch.Tensor, dtype: torch.dtype, slots: int = SLOTS
) -> Callable[[int], float]:
    """call(n): seconds for n experts on one token, out of slots that are windows of `pool`, another one every call."""
    config = _config(width, 1, moe_intermediate_size=inner, num_experts=slots)
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    bare = next(iter(experts_modules(model).values()))
    layout, device = Layout.of_module(bare, dtype), pool.device.type
    slots = min(slots, len(pool) // layout.record_bytes)
    if slots < CHOSEN:
        raise ValueError(f"a pool of {len(pool)} bytes holds {slots} experts of {layout.record_bytes}")
    windows = []
    for window in pool.split(slots * layout.record_bytes):
        if len(window) == slots * layout.record_bytes:
            module, parameters = copy.deepcopy(bare), layout.views(window.view(slots, layout.record_bytes))
            for name, tensor in parameters.items():
                setattr(module, name, torch.nn.Parameter(tensor, requires_grad=False))
            module.num_experts = slots
            windows.append((module, parameters))
    stock, rng = ALL_EXPERTS_FUNCTIONS[EXPERTS], np.random.default_rng(SEED)
    hidden = torch.randn(1, width, dtype=dtype, device=device)

    def call(count: int) -> float:
        module, parameters = windows[rng.integers(len(windows))]
        rows, weights = rng.permutation(slots)[:count], np.full(count, 1 / count, np.float32)
        if device == "cuda":
            torch.cuda.current_stream().synchronize()
        return _timed(lambda: decode_token(module, parameters, hidden, rows, weights, stock), device)

    return call
