"""Greedy generation under phases: the prompt is prefill, every new token but the last one decoding event a layer."""

from __future__ import annotations

import pytest
import torch
from policy_cases import POLICIES

from engine.emulator import Emulator, Replayer
from engine.errors import UserError
from engine.generate import generate
from engine.hook import attach


def test_law_a_lossless_policy_generates_what_the_stock_model_does(family, tiny_moe, random_ids):
    model, prompt = tiny_moe(family), random_ids(9, seed=50)
    stock = model.generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0)[0, 9:]
    with attach(model) as attachment:
        emulator = Emulator(attachment, POLICIES["fetch_lfu_decay"], slots=5)
        made = list(generate(model, emulator, prompt[0].tolist(), max_new_tokens=12))
        log = emulator.log()
    assert made == stock.tolist()
    assert log.executed.shape == (11, 2, 4)
    assert (emulator.residency.state.rows["step"] == 9 + 11).all()


def test_agreement_of_generation_and_its_log_forced(tiny_moe, random_ids):
    """A lossy run generates its own text; its log, played over the same calls, gives the same tokens."""
    model, prompt = tiny_moe("qwen3_moe"), random_ids(9, seed=51)[0].tolist()
    with attach(model) as attachment:
        emulator = Emulator(attachment, POLICIES["substitute_all"], slots=5)
        made = list(generate(model, emulator, prompt, max_new_tokens=20))
        exact = list(generate(model, Emulator(attachment, POLICIES["fetch_lru"], slots=5), prompt, max_new_tokens=20))
        replayer = Replayer(attachment, emulator.log())
        assert list(generate(model, replayer, prompt, max_new_tokens=20)) == made
        assert replayer.finished
    assert made[0] == exact[0], "the prompt is exact, so the first token is"
    assert made != exact


def test_generation_stops_after_the_stop_token(tiny_moe, random_ids):
    model, prompt = tiny_moe("qwen3_moe"), random_ids(9, seed=52)[0].tolist()
    with attach(model) as attachment:
        emulator = Emulator(attachment, POLICIES["fetch_lru"], slots=5)
        made = list(generate(model, emulator, prompt, max_new_tokens=10))
        stop = made[4]
        again = Emulator(attachment, POLICIES["fetch_lru"], slots=5)
        cut = list(generate(model, again, prompt, max_new_tokens=10, stop=stop))
    assert cut == made[: made.index(stop) + 1]
    assert torch.is_grad_enabled()


def test_an_empty_prompt_is_refused(tiny_moe):
    model = tiny_moe("qwen3_moe")
    with attach(model) as attachment, pytest.raises(UserError, match="an empty prompt"):
        list(generate(model, Emulator(attachment, POLICIES["fetch_lru"], slots=5), [], max_new_tokens=3))
