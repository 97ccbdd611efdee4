"""Token by token under phases: the prompt is prefill, every new token but the last one decoding event a layer."""

from __future__ import annotations

import pytest
import torch
from policy_cases import POLICIES
from transformers import JambaConfig, JambaForCausalLM

from engine.emulator import Emulator, Replayer
from engine.errors import UserError
from engine.generate import _WIDE, forced, generate
from engine.hook import attach
from engine.phase import PhasedHandler


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


@pytest.mark.parametrize("start", [generate, forced])
def test_an_empty_prompt_is_refused(start, tiny_moe):
    model = tiny_moe("qwen3_moe")
    rest = {"max_new_tokens": 3} if start is generate else {"continuation": [1, 2]}
    with attach(model) as attachment, pytest.raises(UserError, match="an empty prompt"):
        list(start(model, Emulator(attachment, POLICIES["fetch_lru"], slots=5), [], **rest))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_nan_or_infinite_say_no_token(value, tiny_moe, random_ids):
    """argmax names one all the same."""
    model, prompt = tiny_moe("qwen3_moe"), random_ids(9, seed=52)[0].tolist()
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits.index_fill(-1, torch.tensor([7]), value))
    with attach(model) as attachment, pytest.raises(UserError, match="NaN or infinite; expected finite weights"):
        list(generate(model, Emulator(attachment, POLICIES["fetch_lru"], slots=5), prompt, max_new_tokens=10))


# ---- a continuation that is given ------------------------------------------------------------------------------------
@pytest.mark.parametrize("tokens", [1, 2, _WIDE, _WIDE + 1, _WIDE + 2])
def test_law_every_forced_token_is_judged_once(tokens, tiny_moe, random_ids):
    """Across the passes that a long continuation is cut into."""
    model, ids = tiny_moe("qwen3_moe"), random_ids(9 + tokens, seed=53)[0].tolist()
    with torch.inference_mode(), attach(model) as attachment:
        stock = model(torch.tensor([ids])).logits[0, 8:-1]
        emulator = Emulator(attachment, POLICIES["fetch_lru"], slots=5)
        logits, wanted = zip(*forced(model, emulator, ids[:9], ids[9:]), strict=True)
    assert torch.cat(wanted).tolist() == ids[9:]
    torch.testing.assert_close(torch.cat(logits), stock, rtol=1e-3, atol=1e-3)
    assert (emulator.residency.state.rows["step"] == 9 + tokens - 1).all()


def test_agreement_of_generation_with_what_it_made_forced(family, tiny_moe, random_ids):
    """The same decisions and the same choice at every token, wide or step by step as the family can."""
    model, prompt = tiny_moe(family), random_ids(9, seed=54)[0].tolist()
    with attach(model) as attachment:
        emulator = Emulator(attachment, POLICIES["substitute_all"], slots=5)
        made = list(generate(model, emulator, prompt, max_new_tokens=20))
        again = Emulator(attachment, POLICIES["substitute_all"], slots=5)
        logits = torch.cat([logits for logits, _ in forced(model, again, prompt, made)])
    assert logits.argmax(dim=-1).tolist() == made
    assert (again.log().executed == emulator.log().executed).all()


def test_bug_a_state_that_is_no_kv_cache_went_wrong_where_several_tokens_came_at_once(random_ids):
    """Jamba forgets its state when more than one token goes on from it; one at a time they are right."""

    class Wide(PhasedHandler):
        decodes_wide = True

    shape = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
    config = JambaConfig(**shape, **heads, num_experts=4, initializer_range=0.1, use_mamba_kernels=False)
    torch.manual_seed(0)
    model, ids = JambaForCausalLM(config).eval(), random_ids(24, seed=55)[0].tolist()
    with torch.inference_mode():
        stock = model(torch.tensor([ids]), use_cache=False).logits[0, 8:-1]
        forgetful = model(torch.tensor([ids[9:]]), cache=model(torch.tensor([ids[:9]])).cache).logits[0, :-1]
        logits = torch.cat([logits for logits, _ in forced(model, Wide(), ids[:9], ids[9:])])
    torch.testing.assert_close(logits, stock, rtol=1e-3, atol=1e-3)
    assert (forgetful - stock[1:]).abs().max() > 0.1, "transformers has mended it: all families may go wide"
