"""Router traces as files: round trip to the bit, chunks, the best M alone, what is refused by name, and memory."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from policy_cases import POLICIES
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from engine.errors import UserError
from engine.policies import SUBSTITUTING, load_policies
from engine.residency import Demand, Residency, needs_scores
from engine.trace import RouterTrace, join
from engine.trace_file import open_trace, outside_top_m, save_trace, trace_writer
from engine.trace_schema import SCORE_RULES, documents_of

SHEET = load_policies(Path(__file__).parents[2] / "config" / "policies.tsv")
T, L, E, K = 90, 2, 16, 4
DOCUMENTS = documents_of([("a", 50), ("b", 1), ("c", 39)])
FACTS = {"model": "m", "model_hash": "abc", "text": "t", "policy": "exact", "score_rule": "softmax"}
NAMES = ("chosen", "weights", "chosen_scores", "scores", "logits")


@pytest.fixture(scope="module")
def whole(router_trace) -> RouterTrace:
    """Two layers, all scores."""
    layers = [router_trace(seed, T=T) for seed in (60, 61)]
    chosen = np.stack([layer.chosen for layer in layers], axis=1).astype(np.int16)
    scores = np.stack([layer.scores for layer in layers], axis=1)
    weights = np.stack([layer.weights for layer in layers], axis=1)
    return RouterTrace(chosen, weights, np.take_along_axis(scores, chosen, axis=-1), experts=E, scores=scores)


@pytest.fixture(scope="module")
def kinds(whole) -> dict[str, RouterTrace]:
    sigmoid = 1 / (1 + np.exp(-whole.scores))
    chosen_scores = np.take_along_axis(sigmoid, whole.chosen, axis=-1)
    return {
        "scores": whole,
        "none": replace(whole, scores=None),
        "scores and logits": replace(whole, scores=sigmoid, chosen_scores=chosen_scores, logits=whole.scores),
    }


@pytest.fixture
def written(whole, tmp_path) -> Path:
    save_trace(tmp_path / "trace.safetensors", whole, DOCUMENTS, FACTS)
    return tmp_path / "trace.safetensors"


def equal(a: RouterTrace, b: RouterTrace) -> bool:
    pairs = [(getattr(a, name), getattr(b, name)) for name in NAMES]
    return a.experts == b.experts and all(
        x is y is None or (x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()) for x, y in pairs
    )


def parts(trace: RouterTrace, sizes: list[int]) -> list[RouterTrace]:
    """The trace cut into pieces of these numbers of tokens."""
    stops = np.cumsum(sizes)
    return [
        replace(trace, **{n: getattr(trace, n)[b - s : b] for n in NAMES if getattr(trace, n) is not None})
        for s, b in zip(sizes, stops, strict=True)
    ]


# ---- round trip ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["scores", "none", "scores and logits"])
def test_law_a_trace_read_back_is_the_same_to_the_bit(kinds, kind, tmp_path):
    path = tmp_path / "trace.safetensors"
    facts = FACTS | {"score_rule": "sigmoid" if "logits" in kind else "softmax"}
    losses = np.arange(T, dtype=np.float32)
    losses[3] = np.nan  # what a loss that is no number means is for its reader to say
    save_trace(path, kinds[kind], DOCUMENTS, facts, losses=losses)
    trace = open_trace(path)
    assert equal(trace.read(), kinds[kind])
    assert (trace.tokens, trace.layers, trace.experts, trace.top_k, trace.top_m) == (T, L, E, K, 0)
    assert trace.documents == DOCUMENTS and trace.documents[2] == ("c", 51, 39)
    assert trace.provenance == facts and trace.losses().tobytes() == losses.tobytes()
    assert trace.sigmoid == ("logits" in kind) and trace.has_scores == (kind != "none")
    assert trace.has_logits == (kind != "none")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("tokens", [1, 7, 50, 89, 90, 1000])
def test_law_chunks_of_any_size_are_the_whole(written, whole, tokens):
    trace = open_trace(written)
    chunks = list(trace.chunks(tokens))
    assert len(chunks) == -(-T // tokens) and {len(c.chosen) for c in chunks[:-1]} <= {tokens}
    assert equal(join(chunks), whole)
    light = join(trace.chunks(tokens, scores=False))
    assert equal(light, replace(whole, scores=None))


@pytest.mark.parametrize("sizes", [[90], [1, 89], [30, 30, 30]])
def test_law_chunks_of_any_size_write_the_same_file(written, whole, sizes, tmp_path):
    save_trace(tmp_path / "other.safetensors", iter(parts(whole, sizes)), DOCUMENTS, FACTS)
    assert (tmp_path / "other.safetensors").read_bytes() == written.read_bytes()


def test_safetensors_reads_it_too(written, whole):
    arrays = load_file(written)
    assert sorted(arrays) == ["chosen", "chosen_scores", "scores", "weights"]
    assert all(arrays[name].tobytes() == getattr(whole, name).tobytes() for name in arrays)
    with safe_open(written, framework="numpy") as file:
        facts = file.metadata()
    assert facts["expertmiss"] == "router-trace-1" and json.loads(facts["documents"])[1] == ["b", 50, 1]


def test_score_rules_are_those_of_the_hook():
    from engine import hook

    assert {name: rule.sigmoid for name, rule in hook.SCORE_RULES.items()} == SCORE_RULES


# ---- the best M ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["scores", "scores and logits"])
@pytest.mark.parametrize("top_m", [K, 7, E])
def test_law_of_the_best_m_those_are_known_to_the_bit(kinds, kind, top_m, tmp_path):
    path, trace = tmp_path / "trace.safetensors", kinds[kind]
    save_trace(path, parts(trace, [40, 50]), DOCUMENTS, FACTS | {"score_rule": "sigmoid"}, top_m=top_m)
    found = open_trace(path).read()
    assert open_trace(path).top_m == found.top_m == top_m
    known = ~np.isneginf(found.scores)
    assert (known.sum(axis=-1) == top_m).all() and np.take_along_axis(known, trace.chosen, axis=-1).all()
    assert (found.scores[known] == trace.scores[known]).all()
    others = np.where(known, np.inf, trace.scores).max(axis=-1, where=~known, initial=-np.inf)
    assert (np.where(known, trace.scores, np.inf).min(axis=-1) >= others).all() or top_m == K  # ties within the K
    if kind == "scores and logits":
        assert (found.logits[known] == trace.logits[known]).all()
    save_trace(tmp_path / "again.safetensors", found, DOCUMENTS, FACTS | {"score_rule": "sigmoid"})
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_law_with_the_best_e_minus_s_plus_k_every_stand_in_is_known(whole, tmp_path):
    """And decisions are those of all scores; with fewer, stand-ins of unknown score are counted."""
    outside, executed = {}, {}
    for top_m in (0, E - 7 + K, 5):
        path = tmp_path / f"{top_m}.safetensors"
        save_trace(path, whole, DOCUMENTS, FACTS, top_m=top_m)
        chunk = open_trace(path).read()
        held = Residency(layers=1, experts=E, top_k=K, slots=7, rule=SHEET["substitute_all"].rule())
        held.warm(Demand(whole.demand().counts[:1], T))  # no slot is free
        log, _ = held.decide(0, 0, chunk.chosen[:, 0], chunk.weights[:, 0], chunk.scores[:, 0])
        one = replace(chunk, scores=chunk.scores[:, :1])
        outside[top_m], executed[top_m] = outside_top_m(log.executed[:, None], one), log.executed
    assert outside[0] == outside[E - 7 + K] == 0 < outside[5]
    assert (executed[0] == executed[E - 7 + K]).all()
    assert outside_top_m(np.full((T, 1, K), -1), one) == 0  # dropped is not executed


# ---- which policies --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", SHEET)
def test_a_policy_that_needs_scores_is_refused_by_name(policy, kinds, tmp_path):
    path = tmp_path / "trace.safetensors"
    save_trace(path, kinds["none"], DOCUMENTS, FACTS)
    trace = open_trace(path)
    if SHEET[policy].miss_rule not in SUBSTITUTING:
        trace.check_policy(SHEET[policy])
        return
    message = rf"trace\.safetensors: policy '{policy}' \(miss rule {SHEET[policy].miss_rule}, stand-in 'next_best'"
    with pytest.raises(UserError, match=message + r" with weight 'own'\) over a trace without scores; expected"):
        trace.check_policy(SHEET[policy])


@pytest.mark.parametrize("policy", POLICIES)
def test_law_what_is_let_through_without_scores_decides_the_same(policy, kinds, tmp_path):
    path = tmp_path / "trace.safetensors"
    save_trace(path, kinds["none"], DOCUMENTS, FACTS)
    rule = POLICIES[policy].rule()
    if needs_scores(rule):
        with pytest.raises(UserError, match=f"policy '{policy}'"):
            open_trace(path).check_policy(POLICIES[policy])
        return
    open_trace(path).check_policy(POLICIES[policy])
    logs = []
    for trace in (kinds["none"], kinds["scores"]):
        held = Residency(layers=1, experts=E, top_k=K, slots=6, rule=rule)
        scores = None if trace.scores is None else trace.scores[:, 0]
        arrays = (trace.chosen[:, 0], trace.weights[:, 0], scores)
        logs.append(held.decide(0, 0, *arrays, chosen_scores=trace.chosen_scores[:, 0])[0])
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*logs, strict=True))


@pytest.mark.parametrize(
    ("kind", "options", "changes", "lacks"),
    [
        ("none", {}, {"standin": "random", "standin_weight": "own", "seed": 1}, "logits"),
        ("none", {}, {"standin": "random", "standin_weight": "missing", "seed": 1}, None),
        ("none", {}, {"standin_weight": "missing"}, "scores"),
        ("scores", {}, {}, None),
        ("scores", {"top_m": 7}, {}, None),
        ("scores", {"top_m": 7}, {"standin": "random", "seed": 1}, "the logits of any but the best 7"),
        ("scores", {"rule": "sigmoid"}, {}, "logits"),
        ("scores", {"rule": "sigmoid"}, {"standin_weight": "missing"}, None),
        ("scores and logits", {"rule": "sigmoid"}, {}, None),
    ],
)
def test_what_was_recorded_decides_which_stand_ins_and_weights(kinds, kind, options, changes, lacks, tmp_path):
    path = tmp_path / "trace.safetensors"
    facts = FACTS | {"score_rule": options.get("rule", "softmax")}
    save_trace(path, kinds[kind], DOCUMENTS, facts, top_m=options.get("top_m", 0))
    policy = replace(SHEET["rule_015"], **changes)
    if lacks is None:
        open_trace(path).check_policy(policy)
    else:
        with pytest.raises(UserError, match=rf"policy 'rule_015' .* over a trace without {lacks}; expected"):
            open_trace(path).check_policy(policy)


@pytest.mark.parametrize(
    ("wanted", "found", "expected"),
    [
        ({"model_hash": "abd"}, "weights abc", "weights abd"),
        ({"experts": 512, "layers": 2, "top_k": 10}, "experts 16, top-K 4", "experts 512, top-K 10"),
        ({"layers": 48}, "layers 2", "layers 48"),
    ],
)
def test_a_trace_of_another_model_is_refused(written, wanted, found, expected):
    trace = open_trace(written)
    trace.check_model()
    trace.check_model(model_hash="abc", experts=E, layers=L, top_k=K)
    with pytest.raises(UserError, match=rf"a trace of model m, {found}; expected {expected}; give"):
        trace.check_model(**wanted)


# ---- bad files -------------------------------------------------------------------------------------------------------
def rewrite(path: Path, arrays=lambda arrays: None, **facts: str | None) -> None:
    """The file with its arrays changed in place and metadata replaced (None: left out)."""
    with safe_open(path, framework="numpy") as file:
        metadata = {name: value for name, value in (file.metadata() | facts).items() if value is not None}
    found = load_file(path)
    arrays(found)
    save_file(found, path, metadata=metadata)


def put(name: str, index: tuple, value: float):
    return lambda arrays: arrays[name].__setitem__(index, value)


def without(name: str):
    return lambda arrays: arrays.pop(name)


def instead(name: str, change):
    return lambda arrays: arrays.__setitem__(name, change(arrays[name]))


def test_a_trace_cut_anywhere_is_refused(written):
    content = written.read_bytes()
    for size in (0, 4, 8, 100, len(content) // 2, len(content) - 1):
        written.write_bytes(content[:size])
        with pytest.raises(UserError, match=r"trace\.safetensors: .*cut.*copy or record it again"):
            open_trace(written)
    written.write_bytes(content + b"x")
    with pytest.raises(UserError, match="its header tells of"):
        open_trace(written)


def test_a_trace_cut_while_it_is_read_is_refused(written):
    trace = open_trace(written)
    written.write_bytes(written.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"trace\.safetensors: cut within 'chosen'"):
        trace.read()
    written.unlink()
    for read in (trace.read, lambda: open_trace(written)):
        with pytest.raises(UserError, match=r"trace\.safetensors: No such file"):
            read()


@pytest.mark.parametrize("content", [b"id\tmiss_rule\n", b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{]"])
def test_what_is_no_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UserError, match=r"x: (cut, or no|a header that is no) safetensors"):
        open_trace(tmp_path / "x")


HEADERS = {
    "a foreign file": ({"expertmiss": None}, "metadata expertmiss is None; expected 'router-trace-1'"),
    "another version": ({"expertmiss": "router-trace-2"}, "metadata expertmiss is 'router-trace-2'"),
    "no policy": ({"policy": None}, "metadata without 'policy'"),
    "no model": ({"model": None}, "metadata without 'model'"),
    "no number of experts": ({"experts": None}, "metadata without 'experts'"),
    "no documents": ({"documents": None}, "metadata without 'documents'"),
    "a number that is none": ({"experts": "many"}, "experts 'many'; expected a whole number from 1 to 32767"),
    "an unknown score rule": ({"score_rule": "softmix"}, "score_rule 'softmix'.*did you mean 'softmax'"),
    "another E": ({"experts": "17"}, r"array 'scores' of shape \[90, 2, 16\]; expected \[T = 90, L = 2, E = 17\]"),
    "K > E": ({"experts": "3", "drop": "scores"}, "K = 4 of E = 3 experts"),
    "documents that are no JSON": ({"documents": "a, b"}, "documents 'a, b'; expected JSON of"),
    "documents without sizes": ({"documents": '[["a", 0]]'}, "expected JSON of"),
    "documents of half tokens": ({"documents": '[["a", 0, 90.0]]'}, "expected JSON of"),
    "unsorted documents": (
        {"documents": '[["b", 50, 40], ["a", 0, 50]]'},
        r"document 0 \('b'\) of 40 tokens from token 50; expected at least 1 token, from token 0",
    ),
    "a gap": ({"documents": '[["a", 0, 50], ["b", 51, 39]]'}, r"document 1 \('b'\) .* from token 51; .* token 50"),
    "an overlap": ({"documents": '[["a", 0, 50], ["b", 49, 41]]'}, r"document 1 \('b'\) .* from token 49"),
    "an empty document": ({"documents": '[["a", 0, 90], ["b", 90, 0]]'}, r"document 1 \('b'\) of 0 tokens"),
    "too few tokens": ({"documents": '[["a", 0, 89]]'}, "documents of 89 tokens together; expected the trace's 90"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_is_wrong_is_named(written, case):
    facts, message = HEADERS[case]
    facts = dict(facts)
    drop = facts.pop("drop", None)
    rewrite(written, without(drop) if drop else lambda arrays: None, **facts)
    with pytest.raises(UserError, match=rf"trace\.safetensors: .*{message}"):
        open_trace(written)


SHAPES = {
    "ids of another type": (instead("chosen", lambda a: a.astype(np.int32)), "array 'chosen' is I32; expected I16"),
    "doubles": (instead("weights", lambda a: a.astype(np.float64)), "array 'weights' is F64; expected F32"),
    "another K": (instead("weights", lambda a: a[..., :3].copy()), r"'weights' of shape \[90, 2, 3\]; .*K = 4"),
    "another T": (instead("scores", lambda a: a[:89].copy()), r"'scores' of shape \[89, 2, 16\]; .*T = 90"),
    "another L": (instead("scores", lambda a: a[:, :1].copy()), r"'scores' of shape \[90, 1, 16\]; .*L = 2"),
    "an axis too few": (instead("chosen", lambda a: a[:, 0].copy()), r"'chosen' of shape \[90, 4\]"),
    "no axis": (instead("weights", lambda a: np.array(1, np.float32)), "offsets that do not fit the shapes"),
    "no token": (instead("weights", lambda a: a[:0].copy()), "offsets that do not fit the shapes"),
    "nothing chosen": (without("chosen"), "no array 'chosen'"),
    "a misspelt array": (lambda a: a.update(score=a.pop("scores")), "array 'score'.*did you mean 'scores'"),
    "logits without scores": (lambda a: a.update(logits=a.pop("scores")), "no array 'scores'"),
    "a top without ids": (lambda a: a.update(top_scores=a.pop("scores")), "no array 'top_experts'"),
    "both": (
        lambda a: a.update(top_experts=a["chosen"].copy(), top_scores=a["chosen_scores"].copy()),
        "both scores and top_scores",
    ),
    "M < K": (
        lambda a: a.update(top_experts=a["chosen"][..., :3].copy(), top_scores=a.pop("scores")[..., :3].copy()),
        "K = 4, M = 3 of E = 16 experts; expected K <= M <= E",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHAPES)
def test_arrays_that_do_not_fit_are_named(written, case):
    change, message = SHAPES[case]
    rewrite(written, change)
    with pytest.raises(UserError, match=rf"trace\.safetensors: .*{message}"):
        open_trace(written)


CONTENTS = {
    "an id of E": (put("chosen", (70, 1, 2), E), "chosen with an id outside 0 to 15"),
    "a negative id": (put("chosen", (70, 1, 2), -1), "chosen with an id outside 0 to 15"),
    "an expert twice": (instead("chosen", lambda a: repeat(a)), "chosen with an id twice"),
    "a weight that is NaN": (put("weights", (70, 1, 2), np.nan), "a weight that is negative, NaN or infinite"),
    "an infinite weight": (put("weights", (70, 1, 2), np.inf), "a weight that is negative, NaN or infinite"),
    "a negative weight": (put("weights", (70, 1, 2), -0.1), "a weight that is negative, NaN or infinite"),
    "no weight at all": (put("weights", (70, 1), 0), "weights that sum to zero"),
    "a score that is NaN": (put("scores", (70, 1, 9), np.nan), "a score that is NaN or infinite"),
    "an infinite score": (put("scores", (70, 1, 9), np.inf), "a score that is NaN or infinite"),
    "an infinite chosen score": (put("chosen_scores", (70, 1, 2), -np.inf), "chosen_scores that are not the scores"),
    "another chosen score": (put("chosen_scores", (70, 1, 2), 99), "chosen_scores that are not the scores of the ch"),
}  # fmt: skip


def repeat(chosen: np.ndarray) -> np.ndarray:
    chosen = chosen.copy()
    chosen[70, 1, 2] = chosen[70, 1, 0]
    return chosen


@pytest.mark.parametrize("tokens", [20, 71, 1000])
@pytest.mark.parametrize("case", CONTENTS)
def test_an_event_that_is_no_routing_is_named_by_token_and_layer(written, case, tokens):
    change, message = CONTENTS[case]
    rewrite(written, change)
    trace = open_trace(written)  # the header is sound
    with pytest.raises(UserError, match=rf"trace\.safetensors: token 70, layer 1: {message}"):
        list(trace.chunks(tokens))
    if tokens == 20:
        trace.read(0, 70)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_chosen_score_that_is_not_finite_is_named_where_there_are_no_others(kinds, value, tmp_path):
    path = tmp_path / "trace.safetensors"
    save_trace(path, kinds["none"], DOCUMENTS, FACTS)
    rewrite(path, put("chosen_scores", (70, 1, 2), value))
    with pytest.raises(UserError, match="token 70, layer 1: a score of a chosen expert that is NaN or infinite"):
        open_trace(path).read()


TOPS = {
    "an id of E": (put("top_experts", (70, 1, 2), E), "top_experts with an id outside 0 to 15"),
    "an id twice": (instead("top_experts", lambda a: repeat(a)), "top_experts with an id twice"),
    "a score that is NaN": (put("top_scores", (70, 1, 2), np.nan), "a score that is NaN or infinite"),
    "an excluded expert": (put("top_scores", (70, 1, 2), -np.inf), "a score that is NaN or infinite"),
    "a chosen one is not there": (
        lambda a: a.update(top_experts=shifted(a["top_experts"], a["chosen"])),
        "a chosen expert that is not among the 7 best",
    ),
}  # fmt: skip


def shifted(experts: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    experts = experts.copy()
    absent = np.setdiff1d(np.arange(E), experts[70, 1])[0]
    experts[70, 1][experts[70, 1] == chosen[70, 1, 0]] = absent
    return experts


@pytest.mark.parametrize("case", TOPS)
def test_the_best_m_that_are_wrong_are_named_by_token_and_layer(whole, tmp_path, case):
    path = tmp_path / "trace.safetensors"
    save_trace(path, whole, DOCUMENTS, FACTS, top_m=7)
    change, message = TOPS[case]
    rewrite(path, change)
    with pytest.raises(UserError, match=rf"trace\.safetensors: token 70, layer 1: {message}"):
        list(open_trace(path).chunks(20))


def test_an_excluded_expert_is_no_fault(whole, tmp_path):
    """Routers that choose within groups score the others -inf."""
    scores = whole.scores.copy()
    np.put_along_axis(scores, np.argmin(scores, axis=-1)[..., None], -np.inf, axis=-1)
    save_trace(tmp_path / "x.safetensors", replace(whole, scores=scores), DOCUMENTS, FACTS)
    assert open_trace(tmp_path / "x.safetensors").read().scores.tobytes() == scores.tobytes()


# ---- writing ---------------------------------------------------------------------------------------------------------
def bad(trace: RouterTrace) -> RouterTrace:
    weights = trace.weights.copy()
    weights[9, 1, 0] = np.nan
    return replace(trace, weights=weights)


WRITERS = {
    "a bad event": (lambda t: [*parts(t, [40, 50])[:1], bad(parts(t, [40, 50])[1])], "token 49, layer 1: a weight"),
    "too few tokens": (lambda t: parts(t, [40, 50])[:1], "40 tokens written; expected the 90 of the documents"),
    "too many tokens": (lambda t: [t, t], "90 tokens after 90, .*; expected at most 0 tokens"),
    "no chunk": (lambda t: [], "0 tokens written; expected the 90"),
    "a chunk of another kind": (
        lambda t: [a if i else replace(a, scores=None) for i, a in enumerate(parts(t, [40, 50]))],
        "50 tokens after 40, arrays chosen, weights, chosen_scores, scores; expected .* as in the first chunk",
    ),
}


@pytest.mark.parametrize("case", WRITERS)
def test_a_trace_that_cannot_be_written_leaves_nothing(whole, tmp_path, case):
    chunks, message = WRITERS[case]
    path = tmp_path / "trace.safetensors"
    path.write_text("old")
    with pytest.raises(UserError, match=message):
        save_trace(path, chunks(whole), DOCUMENTS, FACTS)
    assert path.read_text() == "old" and [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("documents", "facts", "options", "message"),
    [
        ([], {}, {}, "documents of 0 tokens"),
        ([("a", 5, 90)], {}, {}, r"document 0 \('a'\) of 90 tokens from token 5"),
        (DOCUMENTS, {"policy": ""}, {}, "metadata without 'policy'"),
        (DOCUMENTS, {"score_rule": "none"}, {}, "score_rule 'none'"),
        (DOCUMENTS, {}, {"top_m": 3}, "the best M = 3 scores; expected from K = 4 to E = 16"),
        (DOCUMENTS, {}, {"top_m": 17}, "the best M = 17 scores"),
        (DOCUMENTS, {}, {"losses": np.zeros(89, np.float32)}, "89 losses; expected 90"),
    ],
)
def test_a_writer_refuses_what_a_reader_would(whole, tmp_path, documents, facts, options, message):
    with pytest.raises(UserError, match=message):
        save_trace(tmp_path / "x.safetensors", whole, documents, FACTS | facts, **options)
    assert list(tmp_path.iterdir()) == []


def test_losses_that_were_promised_are_missed(whole, tmp_path):
    with pytest.raises(UserError, match="90 tokens written, no losses"):  # noqa: SIM117
        with trace_writer(tmp_path / "x.safetensors", DOCUMENTS, FACTS, losses=True) as writer:
            writer.append(whole)
    assert list(tmp_path.iterdir()) == []


# ---- memory ----------------------------------------------------------------------------------------------------------
def peak(run) -> int:
    """Most bytes in use at a time; numpy tells tracemalloc of its arrays."""
    tracemalloc.start()
    run()
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


@pytest.mark.parametrize("top_m", [0, 24])
def test_law_memory_grows_with_the_chunk_and_not_with_the_trace(tmp_path, top_m):
    """A trace of some 60 MB (whole) in chunks of 0.6 MB: reading and writing hold a few chunks."""
    tokens, layers, experts, chunk_tokens = 15000, 4, 256, 128
    chunk_bytes = chunk_tokens * layers * experts * 4
    rng = np.random.default_rng(5)
    scores = rng.normal(size=(chunk_tokens, layers, experts)).astype(np.float32)
    chosen = np.argsort(-scores, axis=-1)[..., :8].astype(np.int16)
    own = np.take_along_axis(scores, chosen, axis=-1)
    chunk = RouterTrace(chosen, np.exp(own), own, experts, scores)

    def chunks():
        for first in range(0, tokens, chunk_tokens):
            size = min(chunk_tokens, tokens - first)
            yield RouterTrace(chosen[:size], chunk.weights[:size], own[:size], experts, scores[:size])

    path = tmp_path / "trace.safetensors"
    written = peak(lambda: save_trace(path, chunks(), documents_of([("a", tokens)]), FACTS, top_m=top_m))
    assert top_m or path.stat().st_size > 60e6
    trace = open_trace(path)
    read = peak(lambda: [None for _ in trace.chunks(chunk_tokens)])
    assert written < 8 * chunk_bytes and read < 8 * chunk_bytes
