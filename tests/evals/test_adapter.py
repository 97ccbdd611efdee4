"""The lm-eval adapter: with all experts resident it is the parent, with few it acts; one request is one start.

Small seeded models in float32 with a tokenizer made here, so that one wide pass and cached decoding agree to rounding.
The parent is lm-eval's HFLM over the same weights in stock form.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
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

from engine.demand import save_demand
from engine.emulator import Emulator
from engine.errors import UserError
from engine.hook import attach
from engine.policies import load_policies
from engine.residency import Demand
from evals.adapter import OffloadedLM
from evals.instruments import parse
from evals.jobs import model_hash
from evals.perplexity import losses, tokenize

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


@pytest.fixture(scope="module")
def setting(tiny_moe):
    """setting(family, kind) -> a stock model and another with the same weights attached, and their tokenizer; kept."""
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


class Stepwise(Emulator):
    """An instrument that decodes one token a pass."""

    decodes_wide = False


# ---- agreement with the parent ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_agreement_all_slots_is_the_parent_under_every_policy(policy, kind, setting):
    s, arguments = setting(), REQUESTS[kind]
    stock = parent(s)
    if kind == "loglikelihood_rolling":  # the parent also predicts the BOS that a tokenizer, or the text, begins with
        stock = parent(s, add_bos_token=False)
        arguments = [args for args in arguments if not args[0].startswith(BOS)]
    lm = adapter(s, policy, slots=EXPERTS)
    assert same(kind, ask(lm, kind, arguments), ask(stock, kind, arguments))
    assert lm.counts["hits"] == lm.counts["demands"] == TOP_K * lm.counts["events"] > 0


@pytest.mark.parametrize("kind", REQUESTS)
def test_agreement_all_slots_is_the_parent_in_every_family(family, kind, setting):
    """With a tokenizer that knows no BOS: EOS is what an empty context and a document begin with, as the parent says.

    Among the families are one with linear attention, whose state takes single tokens, and one with a sliding window.
    """
    s = setting(family, "no_bos")
    lm = adapter(s, slots=EXPERTS)
    assert same(kind, ask(lm, kind, REQUESTS[kind]), ask(parent(s), kind, REQUESTS[kind]), 1e-3)


def test_agreement_of_greedy_flags_with_the_parent(setting):
    """A continuation that greedy decoding says, and others where the first, a middle or the last token alone is not."""
    s = setting()
    context = s.tokenizer.encode("the river ran")
    said = greedy_tokens(s, context, 5)
    continuations = [said]
    for i in (0, 2, 4):
        other = [*said[:i], said[i] ^ 1]
        continuations.append([*other, *greedy_tokens(s, context + other, 4 - i)] if i < 4 else other)
    requests = [(("", ""), context, continuation) for continuation in continuations]
    answers = adapter(s, slots=EXPERTS)._loglikelihood_tokens(requests, disable_tqdm=True)
    assert [greedy for _, greedy in answers] == [True, False, False, False]
    assert same("loglikelihood", answers, parent(s)._loglikelihood_tokens(requests, disable_tqdm=True))


@pytest.mark.parametrize("policy", ["fetch_lfu_decay", "fetch_lru"])
def test_law_a_policy_that_fetches_answers_as_the_parent_at_any_slots(policy, setting):
    s = setting()
    lm = adapter(s, policy)
    for kind in ("generate_until", "loglikelihood"):
        assert same(kind, ask(lm, kind, REQUESTS[kind]), ask(parent(s), kind, REQUESTS[kind]))
    assert lm.counts["fetches"] > 0


def test_agreement_of_rolling_with_our_own_perplexity(setting):
    """A document of one window, scored by evals.perplexity: the same tokens, the same BOS, the same sum."""
    s = setting()
    documents = tokenize(s.tokenizer, [("d", DOCUMENTS[0])])
    own = losses(s.stock, documents, context=MAX_LENGTH, bos=s.tokenizer.bos_token_id)
    assert ask(adapter(s, "fetch_lru"), "loglikelihood_rolling", [(DOCUMENTS[0],)]) == pytest.approx([-own.sum()])


# ---- a lossy policy acts, and on decoding alone ----------------------------------------------------------------------
@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("policy", LOSSY)
def test_law_a_lossy_policy_visibly_acts(policy, kind, setting):
    s = setting()
    lm, exact = adapter(s, policy), adapter(s, policy, slots=EXPERTS)
    assert not same(kind, ask(lm, kind, REQUESTS[kind]), ask(exact, kind, REQUESTS[kind]), 1e-2)
    info = lm.get_model_info()
    assert info["decisions"]["substitutions"] > 0 and info["decisions"]["substituted_mass"] > 0
    assert not info["lossy_without_effect"] and exact.get_model_info()["lossy_without_effect"]


def test_law_an_answer_of_one_token_is_exact_under_every_policy(setting):
    """The context is prefill and its own pass judges the first token: nothing is decided, and the results say so."""
    s = setting()
    pairs = [("the river ran past a stone", " the"), ("where an old man", " and")]
    assert [len(s.tokenizer.encode(word, add_special_tokens=False)) for _, word in pairs] == [1, 1]
    lm = adapter(s, "substitute_all")
    assert same("loglikelihood", ask(lm, "loglikelihood", pairs), ask(parent(s), "loglikelihood", pairs))
    info = lm.get_model_info()
    assert info["decisions"] is None and info["lossy_without_effect"]
    assert info["requests"] == info["requests_without_events"] == 2


def test_golden_events_of_every_kind_of_request(setting):
    """n scored or generated tokens are n - 1 events a layer; a window of a document is a request of its own in this."""
    s = setting()

    def events(kind, *arguments):
        lm = adapter(s)
        ask(lm, kind, [arguments])
        return (lm.counts or {"events": 0})["events"] / LAYERS

    def tokens(text):
        return len(s.tokenizer.encode(text, add_special_tokens=False))

    assert events("loglikelihood", "the river", " past a stone") == tokens(" past a stone") - 1 > 0
    assert events("loglikelihood", "", "an old man") == tokens("an old man") - 1 > 0
    assert events("loglikelihood_rolling", DOCUMENTS[0]) == tokens(DOCUMENTS[0]) - 1 > 0
    long = tokens(DOCUMENTS[1])
    assert events("loglikelihood_rolling", DOCUMENTS[1]) == long - -(-long // MAX_LENGTH) and long > MAX_LENGTH
    assert events("loglikelihood_rolling", "") == 0
    assert events("generate_until", "the river", {"max_gen_toks": 7}) == 6
    assert events("generate_until", "the river", {"max_gen_toks": 1}) == 0


def test_law_the_context_moves_the_residency_and_is_no_event(setting):
    """Prefill ends with the residents of the fetch decision over its tokens: another context, other decisions."""
    s = setting()
    handler = Emulator(s.attachment, POLICIES["substitute_all"], slots=SLOTS, demand=WARM)
    lm = OffloadedLM(s.model, handler, s.tokenizer, max_length=MAX_LENGTH)
    start = handler.residency.state.slots["expert"].copy()
    ask(lm, "loglikelihood", [("the river ran past", " a")])
    assert lm.counts is None
    assert (handler.residency.state.slots["expert"] != start).any()
    assert (handler.residency.state.rows["step"] == 1 + len(s.tokenizer.encode("the river ran past")) - 1).all()


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "qwen3_next"])
def test_agreement_of_wide_decoding_with_single_steps(family, setting):
    """An instrument that decodes one token a pass takes the same decisions and gives the same answers."""
    s = setting(family)
    wide, steps = adapter(s), adapter(s, handler=Stepwise)
    for args in PAIRS:
        (one,), (other,) = ask(wide, "loglikelihood", [args]), ask(steps, "loglikelihood", [args])
        assert one == pytest.approx(other, abs=1e-3)
        assert (wide.handler.residency.state.slots == steps.handler.residency.state.slots).all()
    assert wide.counts == pytest.approx(steps.counts) and wide.counts["substitutions"] > 0


# ---- one request is one start ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", REQUESTS)
def test_law_the_order_of_requests_does_not_matter(kind, setting):
    s = setting()
    order = list(range(len(REQUESTS[kind])))
    random.Random(3).shuffle(order)
    straight, shuffled = adapter(s), adapter(s)
    answers = ask(straight, kind, REQUESTS[kind])
    assert ask(shuffled, kind, [REQUESTS[kind][i] for i in order]) == [answers[i] for i in order]
    assert shuffled.counts == pytest.approx(straight.counts)
    assert ask(straight, kind, REQUESTS[kind]) == answers, "a second time, after others"


def test_law_requests_with_one_prefix_are_answered_as_if_alone(setting):
    s = setting()
    pairs = PAIRS[:2] * 2
    together = adapter(s)
    answers = ask(together, "loglikelihood", pairs)
    assert answers == [ask(adapter(s), "loglikelihood", [pair])[0] for pair in pairs]
    assert together.requests == 4
    twice = adapter(s)
    ask(twice, "loglikelihood", pairs[:2])
    assert together.counts["events"] == 2 * twice.counts["events"]
    assert together.counts["substituted_mass"] == pytest.approx(twice.counts["substituted_mass"])


def test_law_windows_of_a_document_share_one_start(setting):
    """The second window goes on from where the first one left the slots."""
    s, starts = setting(), []

    class Watched(Emulator):
        def restart(self):
            starts.append(1)
            super().restart()

    lm = adapter(s, handler=Watched)
    ask(lm, "loglikelihood_rolling", [(DOCUMENTS[1],)])
    assert len(starts) == 1


def test_law_counts_are_those_of_the_requests_and_no_log_is_kept(setting):
    s = setting()
    lm, masses, events = adapter(s), 0.0, 0
    for args in PAIRS:
        alone = adapter(s)
        ask(alone, "loglikelihood", [args])
        ask(lm, "loglikelihood", [args])
        if alone.counts:
            masses += alone.counts["substituted_mass"] * alone.counts["events"]
            events += alone.counts["events"]
        with pytest.raises(RuntimeError, match="nothing was decided"):
            lm.handler.log()
    assert lm.counts["events"] == events and lm.counts["substituted_mass"] == pytest.approx(masses / events)


def test_a_request_that_failed_leaves_nothing_to_the_next(setting):
    s = setting()
    lm = adapter(s)
    expected = ask(adapter(s), "loglikelihood", PAIRS[:1])
    inner, calls = lm.handler.residency.decide, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2 * LAYERS:
            raise MemoryError
        return inner(*args, **kwargs)

    lm.handler.residency.decide = failing
    with pytest.raises(MemoryError):
        ask(lm, "loglikelihood", PAIRS[1:2])
    assert ask(lm, "loglikelihood", PAIRS[:1]) == expected
    assert lm.requests == 1


# ---- truncation and empty requests -----------------------------------------------------------------------------------
def test_agreement_what_does_not_fit_is_cut_as_the_parent_cuts_it(setting):
    s = setting()
    lm = adapter(s, slots=EXPERTS)
    long = [(f"{WORDS} {WORDS}", " of grain"), (WORDS, f" {WORDS}")]
    assert same("loglikelihood", ask(lm, "loglikelihood", long), ask(parent(s), "loglikelihood", long))
    assert lm.requests_truncated == 2
    prompts = generation([f"{WORDS} {WORDS}"])
    assert ask(lm, "generate_until", prompts) == ask(parent(s), "generate_until", prompts)
    assert lm.requests_truncated == 3


@pytest.mark.parametrize(
    ("kind", "pair"),
    [
        ("adds_bos", ("", "")),
        ("adds_bos", ("the river", "")),
        ("adds_bos", ("", BOS)),
        ("adds_bos", ("the river", f" {WORDS} {WORDS} {WORDS}")),  # more to score than fits
        ("no_bos", (" ", "the river")),  # nothing left of the context but the space, which is moved
    ],
)
def test_a_request_that_the_parent_refuses_is_refused(kind, pair, setting):
    s = setting(kind=kind)
    with pytest.raises((AssertionError, IndexError)):
        ask(parent(s), "loglikelihood", [pair])
    with pytest.raises(UserError, match="a request of"):
        ask(adapter(s), "loglikelihood", [pair])


# ---- BOS -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_golden_bos_stands_once(kind, setting):
    s = setting(kind=kind)
    lm, bos = adapter(s), s.tokenizer.bos_token_id
    words = s.tokenizer.encode("the river", add_special_tokens=False)
    first = [] if bos is None else [bos]
    assert lm.tok_encode("the river") == lm.tok_batch_encode(["the river"])[0].tolist()[0] == first + words
    assert lm.tok_encode("the river", add_special_tokens=False) == words
    assert lm.tok_encode("") == first
    if bos is not None:
        assert lm.tok_encode(f"{BOS}the river") == first + words
        assert (
            lm._encode_pair(f"{BOS}the", " river") == lm._encode_pair("the", " river") == (first + words[:1], words[1:])
        )


@pytest.mark.parametrize("request_kind", REQUESTS)
def test_law_a_tokenizer_that_adds_bos_and_one_that_does_not_are_answered_alike(request_kind, setting):
    arguments = REQUESTS[request_kind]
    adds, has = setting(kind="adds_bos"), setting(kind="has_bos")
    assert ask(adapter(adds), request_kind, arguments) == ask(adapter(has), request_kind, arguments)


def test_law_bos_in_the_text_changes_nothing(setting):
    s = setting()
    lm = adapter(s)
    texts = [("the rain fell all night",), (f"{BOS}the rain fell all night",)]
    one, other = ask(lm, "loglikelihood_rolling", texts)
    assert one == other
    one, other = ask(lm, "loglikelihood", [("the rain", " fell all"), (f"{BOS}the rain", " fell all")])
    assert one == other
    one, other = ask(lm, "loglikelihood", [("", "fell all night"), ("", f"{BOS}fell all night")])
    assert one == other


# ---- generation ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lossy", [False, True], ids=["parent", "lossy"])
def test_generation_ends_before_the_first_stop_string(lossy, setting):
    """A word that is made in the middle of the answer, as a string, in a list, and with others that never come."""
    s = setting()
    lm = adapter(s, "substitute_all") if lossy else adapter(s, slots=EXPERTS)
    (whole,) = ask(lm, "generate_until", [("the river", {"max_gen_toks": 16, "until": []})])
    stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
    assert whole.index(stop) > 0
    for until in (stop, [stop], ["\n\n", stop, "unlikely"]):
        before = lm.counts["events"]
        (cut,) = ask(lm, "generate_until", [("the river", {"max_gen_toks": 16, "until": until})])
        assert cut == whole[: whole.index(stop)]
        assert lm.counts["events"] - before < 15 * LAYERS, "it stopped there, it was not only cut"
    if not lossy:
        arguments = [("the river", {"max_gen_toks": 16, "until": stop})]
        assert ask(parent(s), "generate_until", arguments) == [cut]


def test_agreement_generation_ends_with_eos_where_the_parent_ends(setting):
    """A model's own generation configuration may name several: the last of them is made here in the middle."""
    s, arguments = setting(), [("the river", {"max_gen_toks": 16, "until": []})]
    said = greedy_tokens(s, s.tokenizer.encode("the river"), 16)
    eos = said[8]
    assert s.tokenizer.eos_token_id not in said
    kept = s.stock.generation_config.eos_token_id
    try:
        for model in (s.stock, s.model):
            model.generation_config.eos_token_id = [kept, eos]
        lm = adapter(s, slots=EXPERTS)
        answers = ask(lm, "generate_until", arguments)
        assert answers == ask(parent(s), "generate_until", arguments)
        assert answers == [s.tokenizer.decode(said[: said.index(eos) + 1])]
        assert lm.counts["events"] == said.index(eos) * LAYERS > 0
    finally:
        for model in (s.stock, s.model):
            model.generation_config.eos_token_id = kept


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"do_sample": True}, "do_sample=True"),
        ({"temperature": 0.7}, "do_sample=True"),  # what lm-eval makes of it
        ({"do_sample": True, "temperature": 0.7}, "do_sample=True"),
        ({"num_beams": 4}, "num_beams=4"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"max_length": 20}, "max_length=20"),
        ({"max_gen_toks": MAX_LENGTH}, f"max_gen_toks={MAX_LENGTH}"),
        ({"max_gen_toks": 0}, "max_gen_toks=0"),
    ],
)
def test_generation_that_is_not_greedy_is_refused_by_name_before_the_first_request(keywords, said, setting):
    lm = adapter(setting())
    with pytest.raises(UserError, match=said):
        ask(lm, "generate_until", [*generation(), *generation(**keywords)])
    assert lm.requests == 0


def test_keywords_of_sampling_are_inert_where_nothing_is_sampled(setting):
    lm = adapter(setting())
    plain, more = generation(), generation(do_sample=False, temperature=0.7, top_p=0.9, top_k=5, num_beams=1)
    assert ask(lm, "generate_until", more) == ask(lm, "generate_until", plain)


# ---- lm-eval's cache of answers --------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", REQUESTS)
def test_two_policies_that_share_a_cache_do_not_share_answers(kind, setting, tmp_path):
    s, path = setting(), str(tmp_path / "answers.db")
    others = [("quality_first", SLOTS), ("substitute_all", SLOTS), ("substitute_all", EXPERTS)]
    expected = [ask(adapter(s, policy, slots), kind, REQUESTS[kind]) for policy, slots in others]
    assert expected[0] != expected[1] != expected[2]
    for _ in range(2):
        for (policy, slots), answers in zip(others, expected, strict=True):
            lm = adapter(s, policy, slots)
            caching = CachingLM(lm, path)
            assert ask(caching, kind, REQUESTS[kind]) == answers
            caching.dbdict.close()
    assert lm.requests == 0, "the second time nothing is run"


def test_an_answer_is_kept_as_soon_as_it_is_there(setting, tmp_path):
    """A run that is killed goes on where it was: the hook and the look-up agree on the key."""
    s, path = setting(), str(tmp_path / "answers.db")
    lm = adapter(s)
    caching, inner = CachingLM(lm, path), lm._score

    def third_fails(*args):
        if lm.requests == 2:
            raise KeyboardInterrupt
        return inner(*args)

    lm._score = third_fails
    with pytest.raises(KeyboardInterrupt):
        ask(caching, "loglikelihood", PAIRS)
    caching.dbdict.close()
    again = adapter(s)
    caching = CachingLM(again, path)
    assert ask(caching, "loglikelihood", PAIRS) == ask(adapter(s), "loglikelihood", PAIRS)
    caching.dbdict.close()
    assert again.requests == len(PAIRS) - 2


@pytest.mark.parametrize(
    "change",
    [
        {"policy": "speed_first"},
        {"slots": SLOTS + 1},
        {"max_length": MAX_LENGTH - 1},
        {"identity": {"model_hash": "another"}},
        {"identity": {"instrument": "offload"}},
        {"kind": "has_bos"},
        {"dtype": torch.bfloat16},
        {"family": "mixtral"},
    ],
    ids=str,
)
def test_law_whatever_changes_an_answer_changes_the_key(change, setting):
    """No two of these may be taken for each other; the same twice may."""

    def key(policy="quality_first", slots=SLOTS, max_length=MAX_LENGTH, identity=None, **of_setting):
        hook = SimpleNamespace(dbdict=SimpleNamespace())
        lm = adapter(setting(**of_setting), policy, slots, max_length=max_length, identity=identity)
        lm.set_cache_hook(hook)
        return hook.dbdict.encode_key("request")

    assert key() == key()
    assert key(**change) != key()


def test_a_chat_template_is_part_of_the_key_of_prompts(setting):
    s = setting()
    lm = adapter(s)
    before = lm.tokenizer_name
    s.tokenizer.chat_template = "{{ messages }}"
    try:
        assert lm.tokenizer_name != before
    finally:
        s.tokenizer.chat_template = None


# ---- arguments -------------------------------------------------------------------------------------------------------
GIVEN = {"pretrained": "model", "policy": "quality_first", "slots": "25%", "demand": "cold"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"polcy": "rule_015"}, "model argument 'polcy'.*did you mean 'policy'.*demand"),
        ({"add_bos_token": True}, "model argument 'add_bos_token'"),
        ({"slots": None}, "no model argument 'slots'"),
        ({"instrument": "emulater"}, "did you mean 'emulator'"),
        ({"dtype": "float61"}, "did you mean 'float16'"),
        ({"delay": 0}, "delay=0"),
        ({"threads": "all"}, "threads=all"),
        ({"max_length": -5}, "max_length=-5"),
    ],
    ids=str,
)
def test_arguments_that_do_not_exist_or_cannot_be_are_named(change, said):
    with pytest.raises(UserError, match=said):
        parse(GIVEN | change)


def test_what_lm_eval_passes_along_is_no_argument_of_ours():
    passed = {"batch_size": "auto", "max_batch_size": 64, "trust_remote_code": True, "device": "cuda:0"}
    assert parse(GIVEN | passed) == parse(GIVEN | {"device": "cuda:0"})


# ---- from a folder, in Python and by the command line ----------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(setting, tmp_path_factory):
    """A model folder, a calibration of it and one of another model, and tasks of the three kinds over local data."""
    s, root = setting(), tmp_path_factory.mktemp("lm_eval")
    s.stock.save_pretrained(root / "model")
    s.tokenizer.save_pretrained(root / "model")
    for name, model in (("demand", model_hash(root / "model")), ("other", "0" * 16)):
        save_demand(root / f"{name}.safetensors", WARM, {"model": model})
    (root / "pairs.json").write_text(json.dumps([{"text": text, "ends": ENDS} for text in DOCUMENTS[:2]]))
    tasks = {
        "tiny_choice": {"output_type": "multiple_choice", "doc_to_choice": "ends", "doc_to_target": 0},
        "tiny_generation": {"output_type": "generate_until", "doc_to_target": "text", "generation_kwargs": GENERATION},
        "tiny_rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text"},
    }
    metrics = {"tiny_choice": "acc", "tiny_generation": "exact_match", "tiny_rolling": "word_perplexity"}
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{root}/pairs.json"}}}
    for name, own in tasks.items():
        task = {"task": name, "test_split": "test", "doc_to_text": "text", "target_delimiter": "", **data, **own}
        task["metric_list"] = [{"metric": metrics[name]}]
        (root / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return root


def arguments(folder: Path, **change) -> dict:
    sheet = str(ROOT / "config" / "policies.tsv")
    given = {"pretrained": f"{folder}/model", "policy": "substitute_all", "slots": "32%", "policies": sheet}
    return given | {"demand": f"{folder}/demand.safetensors", "max_length": MAX_LENGTH} | change


@pytest.mark.parametrize("passed", [{}, {"batch_size": 8}, {"batch_size": "auto:4", "max_batch_size": 64}], ids=str)
def test_agreement_of_a_model_from_its_folder_whatever_the_batch_size(passed, folder, setting):
    lm = OffloadedLM.create_from_arg_obj(arguments(folder, threads=1), passed | {"device": "cuda:0"})
    direct = adapter(setting(), "substitute_all")
    assert lm.batch_size == 1
    for kind in REQUESTS:
        assert ask(lm, kind, REQUESTS[kind]) == ask(direct, kind, REQUESTS[kind])
    info = lm.get_model_info()
    assert info["slots_count"] == SLOTS and info["policy"]["id"] == "substitute_all"
    assert info["model_hash"] == model_hash(folder / "model") and info["start"] == "warm"
    assert info["decisions"] == pytest.approx(direct.counts)
    json.dumps(info, allow_nan=False)


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_agreement_of_the_engine_with_parent_and_emulator(policy, kind, folder, setting):
    """Weights that really move: S = E is the parent, few slots are the emulator (loads complete at the next step)."""
    given = arguments(folder, policy=policy, instrument="offload", dtype="float32", threads=1)
    all_slots = OffloadedLM.create_from_arg_obj(given | {"slots": "100%"})
    stock, asked = parent(setting()), REQUESTS[kind]
    if kind == "loglikelihood_rolling":
        stock, asked = parent(setting(), add_bos_token=False), [a for a in asked if not a[0].startswith(BOS)]
    assert same(kind, ask(all_slots, kind, asked), ask(stock, kind, asked))
    assert all_slots.counts["hits"] == all_slots.counts["demands"]
    few, emulated = OffloadedLM.create_from_arg_obj(given), adapter(setting(), policy)
    assert same(kind, ask(few, kind, REQUESTS[kind]), ask(emulated, kind, REQUESTS[kind]))
    assert few.counts == pytest.approx(emulated.counts)


def test_infinite_thresholds_are_strict_json(folder):
    lm = OffloadedLM.create_from_arg_obj(arguments(folder, policy="speed_first", demand="cold", threads=1))
    assert lm.get_model_info()["policy"]["tau"] == "inf" and lm.identity["start"] == "cold"
    json.dumps(lm.get_model_info(), allow_nan=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"policy": "quality_frist"}, "did you mean 'quality_first'"),
        ({"policy": "fetch_belady"}, "a policy that does not need the future"),
        ({"slots": "10%"}, "1 slots a layer"),
        ({"slots": 17}, "17 slots a layer"),
        ({"slots": 0.25}, "slots=0.25"),
        ({"demand": "FOLDER/other.safetensors"}, "is of model 0000000000000000"),
        ({"demand": "FOLDER/none.safetensors"}, "a calibration's demand"),
        ({"pretrained": "FOLDER/hf"}, "a whole checkpoint"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_the_model_are_refused(change, said, folder):
    change = {
        name: value.replace("FOLDER", str(folder)) if isinstance(value, str) else value
        for name, value in change.items()
    }
    with pytest.raises(UserError, match=said):
        OffloadedLM.create_from_arg_obj(arguments(folder, **change))


def command_line(folder: Path, *words: str, **change) -> subprocess.CompletedProcess:
    given = ",".join(f"{name}={value}" for name, value in arguments(folder, threads=1, **change).items())
    command = [sys.executable, "-m", "evals.lm_eval", "--model", "offloaded", "--model_args", given]
    command += ["--include_path", str(folder), "--tasks", "tiny_choice,tiny_generation,tiny_rolling", *words]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": f"{folder}/hf"}
    return subprocess.run(command, cwd=ROOT, env=os.environ | offline, capture_output=True, text=True, check=False)


def test_end_to_end_the_command_line_of_lm_eval(folder, setting):
    """Tasks of the three kinds: the numbers are those of the same class in Python, and say what happened."""
    done = command_line(folder, "--output_path", f"{folder}/found.json", "--use_cache", f"{folder}/cache")
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = folder.glob("found_*.json")  # lm-eval adds the time
    found = json.loads(path.read_text())
    texts, lm = DOCUMENTS[:2], adapter(setting(), "substitute_all")
    nll = -sum(ask(lm, "loglikelihood_rolling", [(text,) for text in texts]))
    words = sum(len(text.split()) for text in texts)
    assert found["results"]["tiny_rolling"]["word_perplexity,none"] == pytest.approx(np.exp(nll / words))
    ask(lm, "loglikelihood", [(text, end) for text in texts for end in ENDS])
    ask(lm, "generate_until", [(text, GENERATION) for text in texts])
    config = found["config"]
    assert config["model"] == "offloaded" and config["policy"]["id"] == "substitute_all"
    assert config["slots_count"] == SLOTS and config["requests"] == lm.requests == 2 + 4 + 2
    assert config["decisions"] == pytest.approx(lm.counts) and config["decisions"]["substitutions"] > 0


def test_end_to_end_a_wrong_argument_is_one_line_and_exit_code_2(folder):
    done = command_line(folder, polcy="rule_015")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("error: model argument 'polcy'; expected") and "did you mean 'policy'? known:" in line
