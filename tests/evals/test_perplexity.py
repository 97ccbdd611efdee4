"""Perplexity of a text: every token scored once, in its window, over the right denominator, by its own losses."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.emulator import Emulator
from engine.errors import UserError
from engine.hook import attach
from engine.policies import load_policies
from engine.residency import Demand
from evals.jobs import Progress
from evals.perplexity import (
    TokenizedDocument,
    context_of,
    losses,
    perplexities,
    perplexity,
    scored_tokens,
    tokenize,
    windows,
)

BOS = 1
CONTEXT = 8
POLICIES = load_policies(Path(__file__).parents[2] / "config" / "policies.tsv")


def document(*ids: int, words: int = 1, size: int = 1) -> TokenizedDocument:
    return TokenizedDocument("d", tuple(ids), words, size)


# ---- windows ---------------------------------------------------------------------------------------------------------
def test_golden_windows_with_bos():
    ten = document(*range(11, 18))
    assert list(windows(ten, 4, BOS)) == [([1, 11, 12, 13], [11, 12, 13, 14]), ([14, 15, 16], [15, 16, 17])]


def test_golden_windows_without_bos_leave_the_first_token_unscored():
    ten = document(*range(11, 18))
    assert list(windows(ten, 4, None)) == [([11, 12, 13, 14], [12, 13, 14, 15]), ([15, 16], [16, 17])]


def test_golden_windows_of_short_documents():
    assert list(windows(document(11), 4, BOS)) == [([1], [11])]
    assert list(windows(document(11), 4, None)) == []
    assert list(windows(document(11, 12, 13, 14), 4, BOS)) == [([1, 11, 12, 13], [11, 12, 13, 14])]
    assert list(windows(document(11, 12, 13, 14, 15), 4, BOS))[1] == ([14], [15])


@pytest.mark.parametrize("bos", [BOS, None])
def test_law_every_token_is_a_target_once_and_after_the_token_before_it(bos):
    for tokens in range(1, 40):
        ids = tuple(range(100, 100 + tokens))
        for context in (2, 3, 7, 8, 39, 40, 1000):
            pairs = list(windows(document(*ids), context, bos))
            targets = [target for _, targets in pairs for target in targets]
            assert tuple(targets) == (ids if bos is not None else ids[1:])
            assert len(targets) == scored_tokens(document(*ids), bos)
            for inputs, targets in pairs:
                assert 0 < len(inputs) == len(targets) <= context
                assert inputs[1:] == targets[:-1]
            if bos is not None:
                assert pairs[0][0][0] == bos and all(bos not in inputs for inputs, _ in pairs[1:])


def test_the_models_own_context_is_the_limit_where_it_is_shorter():
    def model(**config):
        return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(**config)))

    assert context_of(model(max_position_embeddings=512), 1024) == 512
    assert context_of(model(max_position_embeddings=4096), 1024) == 1024
    assert context_of(model(), 1024) == 1024


# ---- tokens, words, bytes --------------------------------------------------------------------------------------------
def by_character(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
    assert add_special_tokens is False  # BOS is prepended by us and never by the tokenizer
    return {"input_ids": [ord(character) for character in text]}


def test_golden_tokens_words_and_bytes():
    (found,) = tokenize(by_character, [("x", "naïve  café\n")])
    assert found == TokenizedDocument("x", tuple(map(ord, "naïve  café\n")), words=2, bytes=14)


def test_a_document_without_a_scored_token_is_refused_by_name():
    with pytest.raises(UserError, match="a text: document 'void' of 0 tokens; expected at least 1"):
        tokenize(by_character, [("whole", "ab"), ("void", "")], where="a text")
    with pytest.raises(UserError, match="document 'one' of 1 tokens; expected at least 2"):
        tokenize(by_character, [("one", "a")], least=2)


def test_golden_perplexities_over_three_denominators():
    """Losses of 6 ln 2 in all: 3 tokens, 2 words, 6 bytes."""
    loss = np.log(np.array([2, 4, 8], np.float32))
    documents = [document(11, 12, words=1, size=2), document(13, words=1, size=4)]
    found = perplexities(loss, documents)
    assert found == pytest.approx({"token_perplexity": 4, "word_perplexity": 8, "byte_perplexity": 2})


def test_a_script_without_spaces_crashed_the_record():
    """Hundreds of nats over one word exceed float64; JSON has no infinity."""
    loss = np.full(400, 5.0, np.float32)
    found = perplexities(loss, [document(*range(400), words=1, size=1200)])
    assert found["word_perplexity"] is None and found["token_perplexity"] == pytest.approx(math.exp(5))
    assert perplexities(loss, [document(*range(400), words=0, size=1200)])["word_perplexity"] is None
    assert perplexity(708.0, 1) == pytest.approx(math.exp(708)) and perplexity(710.0, 1) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_losses_that_are_not_finite_are_no_perplexity(bad):
    with pytest.raises(UserError, match="2 losses are NaN or infinite"):
        perplexities(np.array([1, bad, bad], np.float32), [document(1, 2, 3)])


# ---- losses of a model -----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def documents() -> list[TokenizedDocument]:
    """Shorter than a window, exactly one, and several."""
    rng = np.random.default_rng(5)
    return [document(*rng.integers(2, 128, size=size).tolist()) for size in (5, CONTEXT, 3 * CONTEXT + 2)]


@pytest.mark.parametrize("bos", [BOS, None])
def test_law_losses_are_those_of_a_full_softmax_one_token_at_a_time(tiny_moe, documents, bos):
    model = tiny_moe("qwen3_moe")
    told: list[int] = []
    found = losses(model, documents, context=CONTEXT, bos=bos, progress=told.append)
    expected = []
    for one in documents:
        whole = [*([] if bos is None else [bos]), *one.ids]
        for position in range(1, len(whole)):
            start = (position - 1) // CONTEXT * CONTEXT  # of the window whose target this token is
            with torch.no_grad():
                logits = model(torch.tensor([whole[start:position]])).logits[0, -1].double().numpy()
            peak = logits.max()
            expected.append(peak + math.log(np.exp(logits - peak).sum()) - logits[whole[position]])
    assert found.dtype == np.float32 and len(found) == sum(scored_tokens(one, bos) for one in documents)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    assert sum(told) == len(found) and max(told) == CONTEXT  # progress shows inside a long document


def test_law_all_slots_give_the_stock_losses_to_the_bit(tiny_moe, documents):
    model = tiny_moe("qwen3_moe")
    stock = losses(model, documents, context=CONTEXT, bos=BOS)
    everyone = Demand(np.ones((2, 16), np.int64), 1)  # warm: all 16 experts are resident from the start
    with attach(model) as attachment:
        for name, slots in (("quality_first", 16), ("substitute_all", 16), ("fetch_lfu_decay", 4)):
            emulator = Emulator(attachment, POLICIES[name], slots=slots, demand=everyone)
            with emulator.phase("decode"):
                found = losses(model, documents, context=CONTEXT, bos=BOS)
            assert found.tobytes() == stock.tobytes(), name
        emulator = Emulator(attachment, POLICIES["substitute_all"], slots=4, demand=everyone)
        with emulator.phase("decode"):
            assert losses(model, documents, context=CONTEXT, bos=BOS).tobytes() != stock.tobytes()


def test_losses_of_a_half_precision_model_are_taken_in_float32(tiny_moe, documents):
    model = tiny_moe("qwen3_moe")
    exact = losses(model, documents, context=CONTEXT, bos=BOS)
    found = losses(model.to(torch.bfloat16), documents, context=CONTEXT, bos=BOS)
    assert found.dtype == np.float32 and np.isfinite(found).all()
    np.testing.assert_allclose(found.mean(), exact.mean(), rtol=0.05)


# ---- progress --------------------------------------------------------------------------------------------------------
def test_progress_tells_now_and_then_and_at_the_end(capsys, monkeypatch):
    clock = iter([0.0, 1.0, 5.0, 6.0, 7.0])
    monkeypatch.setattr("evals.jobs.time.perf_counter", lambda: next(clock))
    progress = Progress("score", 4000)
    for _ in range(4):
        progress.advance(1000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "score: 2,000 of 4,000 tokens, 400 a second, 5 s left",  # after 5 s; silent at 1 s and 6 s
        "score: 4,000 of 4,000 tokens, 571 a second, 0 s left",
    ]
