"""What the tests of the lm-eval adapter share: models with a tokenizer of their own, requests, and how to ask them.

Small seeded models in float32, so that one wide pass and cached decoding agree to rounding. `parent` is lm-eval's HFLM
over the same weights in stock form.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from engine.emulator import Emulator
from engine.hook import attach
from engine.policies import load_policies
from engine.residency import Demand
from evals.adapter import OffloadedLM

ROOT = Path(__file__).parents[2]
POLICIES = {name: p for name, p in load_policies(ROOT / "config" / "policies.tsv").items() if not p.clairvoyant}
LOSSY = sorted(name for name, p in POLICIES.items() if not p.lossless)
SLOTS, EXPERTS, TOP_K, LAYERS = 5, 16, 4, 2
MAX_LENGTH = 32
WARM = Demand(np.ones((LAYERS, EXPERTS), np.int64), 1)  # the first S experts are resident at the start
BOS, EOS = "<s>", "</s>"
WORDS = "the river ran past a stone mill where an old man counted sacks of grain and the rain fell all night"
PAIRS = [
    ("the river ran", " past a stone mill"),
    ("the river ran", " all night"),
    ("the river ran ", "past a stone"),
    ("", "an old man counted sacks"),
    ("where an old man counted", " s"),
    (f"{BOS}the rain fell", " all night and the river ran"),
    (f"{WORDS} {WORDS}", " of grain and the rain fell"),  # longer than the context
]
DOCUMENTS = ["the rain fell all night", f"{WORDS}, {WORDS}. {WORDS}", f"{BOS}an old man", "r", ""]
PROMPTS = ["the river", f"{BOS}an old man counted", f"{WORDS} {WORDS}"]
ENDS = [" all night", " past a stone mill"]
GENERATION = {"until": ["\n"], "max_gen_toks": 8}
TOKENIZERS = ("adds_bos", "has_bos", "no_bos")


# ---- what is tested --------------------------------------------------------------------------------------------------
def build_tokenizer(kind: str = "adds_bos") -> PreTrainedTokenizerFast:
    """Byte-level BPE of a few hundred tokens. adds_bos: it puts BOS before a text by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [EOS] if kind == "no_bos" else [EOS, BOS]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    if kind == "adds_bos":
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    names = {"eos_token": EOS} | ({} if kind == "no_bos" else {"bos_token": BOS})
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def settings(tiny_moe):
    """get(family, kind, dtype) -> a stock model, another with the same weights attached, and their tokenizer; kept."""
    made = {}

    def get(family="qwen3_moe", kind="adds_bos", dtype=torch.float32):
        if (family, kind, dtype) not in made:
            tokenizer = build_tokenizer(kind)
            shape = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
            stock, model = (tiny_moe(family, **shape).to(dtype) for _ in range(2))
            made[family, kind, dtype] = SimpleNamespace(
                stock=stock, model=model, attachment=attach(model), tokenizer=tokenizer, kind=kind
            )
        return made[family, kind, dtype]

    return get


def adapter(s, policy="quality_first", slots=SLOTS, handler=Emulator, max_length=MAX_LENGTH, **options) -> OffloadedLM:
    made = handler(s.attachment, POLICIES[policy], slots=slots, demand=WARM)
    return OffloadedLM(s.model, made, s.tokenizer, max_length=max_length, **options)


def parent(s, **options) -> HFLM:
    return HFLM(pretrained=s.stock, tokenizer=s.tokenizer, max_length=MAX_LENGTH, **options)


def ask(lm, kind: str, arguments: list[tuple]) -> list:
    """The answers of an adapter, the parent, or either behind lm-eval's cache."""
    if handler := getattr(lm, "handler", None):  # several handlers take turns on one model here
        handler._attachment.handler = handler._experts
    requests = [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]
    return getattr(lm, kind)(requests, **({} if isinstance(lm, CachingLM) else {"disable_tqdm": True}))


def generation(prompts=PROMPTS, **keywords) -> list[tuple]:
    return [(prompt, {"until": ["\n"], "max_gen_toks": 12, **keywords}) for prompt in prompts]


REQUESTS = {
    "generate_until": generation(),
    "loglikelihood": PAIRS,
    "loglikelihood_rolling": [(text,) for text in DOCUMENTS],
}


def same(kind: str, one: list, other: list, tolerance: float = 1e-4) -> bool:
    """Generations equal; sums of log-probabilities to the tolerance, greedy flags equal."""
    if kind == "generate_until":
        return one == other
    return all(a == pytest.approx(b, abs=tolerance) for a, b in zip(one, other, strict=True))


def greedy_tokens(s, prompt: list[int], number: int) -> list[int]:
    """What the stock model says after a prompt, by transformers' own generation."""
    options = {"max_new_tokens": number, "min_new_tokens": number, "do_sample": False, "pad_token_id": 0}
    return s.stock.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
