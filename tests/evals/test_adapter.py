"""The lm-eval adapter: with all experts resident it is the parent, with few it acts; one request is one start."""

from __future__ import annotations

import random

import pytest
from adapter_cases import (
    BOS,
    DOCUMENTS,
    EXPERTS,
    LAYERS,
    LOSSY,
    MAX_LENGTH,
    PAIRS,
    POLICIES,
    PROMPTS,
    REQUESTS,
    SLOTS,
    TOKENIZERS,
    TOP_K,
    WARM,
    WORDS,
    adapter,
    ask,
    generation,
    greedy_tokens,
    parent,
    same,
    settings,
)

from engine.emulator import Emulator
from engine.errors import UserError
from evals.adapter import OffloadedLM
from evals.perplexity import losses, tokenize


@pytest.fixture(scope="module")
def setting(tiny_moe):
    return settings(tiny_moe)


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


@pytest.mark.parametrize("kind", REQUESTS)
def test_law_two_requests_with_one_prefix_take_nothing_from_each_other(kind, setting):
    """The same prompt with other keywords or another continuation, a text that begins as another, and all twice."""
    s = setting()
    arguments = {
        "generate_until": [*generation(["the river"]), *generation(["the river"], max_gen_toks=5)],
        "loglikelihood": [("the river", " ran past a stone"), ("the river", " fell all night")],
        "loglikelihood_rolling": [(WORDS[:40],), (WORDS[:60],)],
    }[kind] * 2
    together = adapter(s)
    answers = ask(together, kind, arguments)
    assert answers == [ask(adapter(s), kind, [request])[0] for request in arguments]
    assert together.requests == 4 and answers[0] != answers[1] and answers[:2] == answers[2:]


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


def test_an_empty_document_is_no_loss_and_no_event(setting):
    """It has no word either, so a perplexity takes nothing from it. Beside it the others are answered as alone."""
    lm = adapter(setting())
    assert ask(lm, "loglikelihood_rolling", [("",)]) == [0.0]
    assert lm.counts is None and lm.requests == lm.requests_without_events == 1
    alone = ask(adapter(setting()), "loglikelihood_rolling", [(DOCUMENTS[0],)])
    assert ask(lm, "loglikelihood_rolling", [("",), (DOCUMENTS[0],)]) == [0.0, *alone]


def test_an_empty_prompt_is_bos_alone_and_refused_where_there_is_none(setting):
    s = setting()
    assert ask(adapter(s, slots=EXPERTS), "generate_until", generation([""])) == ask(
        parent(s), "generate_until", generation([""])
    )
    with pytest.raises(UserError, match="an empty prompt; expected at least one token"):
        ask(adapter(setting(kind="no_bos")), "generate_until", generation([""]))


def test_a_document_longer_than_the_context_is_scored_whole_and_once(setting):
    """The windows of the parent, from one start: a log-probability for every token, none cut and none twice."""
    s, scored = setting(), []
    lm = adapter(s, slots=EXPERTS)
    inner = lm._score
    lm._score = lambda context, continuation: scored.append(continuation) or inner(context, continuation)
    ask(lm, "loglikelihood_rolling", [(DOCUMENTS[1],)])
    assert [token for part in scored for token in part] == s.tokenizer.encode(DOCUMENTS[1], add_special_tokens=False)
    assert len(scored) > 1 and max(map(len, scored)) <= MAX_LENGTH and lm.requests_truncated == 0


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("value", [float("nan"), 3e38])
def test_losses_that_are_nan_or_infinite_are_no_answer(value, kind, setting):
    """A mean would take them in; a multiple choice would choose the NaN."""
    s = setting()
    weight = s.model.lm_head.weight.data
    kept = weight.clone()
    try:
        weight[:] = value
        lm = adapter(s)
        with pytest.raises(UserError, match="; expected finite weights; find the weight"):
            ask(lm, kind, REQUESTS[kind][:1])
    finally:
        weight[:] = kept
    assert lm.requests == 0


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


def test_max_gen_toks_one_smaller_than_the_context_leaves_one_token_of_the_prompt(setting):
    s = setting()
    lm = adapter(s, slots=EXPERTS)
    prompts = generation(PROMPTS, until=[], max_gen_toks=MAX_LENGTH - 1)
    assert ask(lm, "generate_until", prompts) == ask(parent(s), "generate_until", prompts)
    assert lm.counts["events"] == len(PROMPTS) * (MAX_LENGTH - 2) * LAYERS and lm.requests_truncated == len(PROMPTS)


@pytest.mark.parametrize("until", [None, "", ["\n", ""], 5, ["\n", 5], ("\n",), {"\n": 1}], ids=str)
def test_until_that_is_no_string_and_no_list_of_strings_is_refused(until, setting):
    """An empty one is in every text: each generation would end after its first token."""
    lm = adapter(setting())
    with pytest.raises(UserError, match=r"until=.*; expected a stop string or a list of them, none empty"):
        ask(lm, "generate_until", [*generation(), *generation(until=until)])
    assert lm.requests == 0


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
        ({"max_gen_toks": "many"}, "'many'; expected numbers"),
        ({"max_gen_toks": float("inf")}, "infinity.*expected numbers"),
        ({"temperature": "hot"}, "'hot'; expected numbers"),
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
