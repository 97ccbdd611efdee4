"""Cells of a policy: the recording and its file, replay against the emulator, what a cell's numbers and flags say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.decision import FETCH, HIT, SUBSTITUTE
from engine.demand import demand_facts, load_demand, save_demand
from engine.errors import UserError
from engine.hook import attach
from engine.log import DecisionLog, count
from engine.policies import Policy, load_policies
from engine.residency import Demand, Residency
from engine.trace_file import open_trace, save_trace
from evals.jobs import expert_bytes, load_model
from evals.perplexity import TokenizedDocument, losses
from evals.quality import (
    Routing,
    Text,
    cells,
    emulate,
    load_routing,
    mass_by_document,
    measure,
    open_recording,
    paired_interval,
    record_routing,
    record_trace,
    replay_cell,
    share_of_events_that_differ,
)

POLICIES = load_policies(Path(__file__).parents[2] / "config" / "policies.tsv")
CONTEXT, BOS = 16, 1
LOG_ARRAYS = ("executed", "weights", "kind", "first", "g", "moves")
TRACE_ARRAYS = ("chosen", "weights", "chosen_scores")


def text_of(seed: int, sizes: tuple[int, ...], name: str = "bible_test") -> Text:
    rng = np.random.default_rng(seed)
    documents = tuple(
        TokenizedDocument(str(i), tuple(rng.integers(2, 128, size=size).tolist()), words=size // 2, bytes=3 * size)
        for i, size in enumerate(sizes)
    )
    return Text(name, "literary", f"{seed:064}", documents, sizes)


@pytest.fixture(scope="module")
def text() -> Text:
    """Three documents, two of more than a window."""
    return text_of(1, (40, 9, 33))


@pytest.fixture(scope="module")
def attached(tiny_moe):
    with attach(tiny_moe("qwen3_moe")) as attachment:
        yield attachment


@pytest.fixture(scope="module")
def routing(attached, text) -> Routing:
    return record_routing(attached.model, attached, text, context=CONTEXT, bos=BOS)


@pytest.fixture(scope="module")
def demand(attached) -> Demand:
    calibration = text_of(2, (60,))
    return record_routing(attached.model, attached, calibration, context=CONTEXT, bos=BOS).trace.demand()


def emulated(attached, policy: Policy, text: Text, demand: Demand, slots: int, delay: int = 1):
    return emulate(
        attached.model, attached, policy, text, slots=slots, demand=demand, delay=delay, context=CONTEXT, bos=BOS
    )


def same(a: object, b: object, names: tuple[str, ...]) -> bool:
    return all(getattr(a, name).tobytes() == getattr(b, name).tobytes() for name in names)


# ---- the recording ---------------------------------------------------------------------------------------------------
def test_law_a_recording_holds_the_stock_losses_and_k_experts_a_token_and_layer(tiny_moe, routing, text):
    stock = losses(tiny_moe("qwen3_moe"), text.documents, context=CONTEXT, bos=BOS)
    assert routing.losses.tobytes() == stock.tobytes()
    assert routing.trace.chosen.shape == (sum(text.scored), 2, 4)
    assert (np.diff(np.sort(routing.trace.chosen, axis=-1)) > 0).all()


FACTS = {"model": "m", "model_hash": "abc", "context": "16", "expert_bytes": "9"}


def recorded(attached, text: Text, path: Path, **facts: str) -> Path:
    record_trace(attached.model, attached, text, path, FACTS | facts, context=CONTEXT, bos=BOS)
    return path


def test_law_a_recording_read_back_is_the_same_to_the_bit(attached, routing, text, tmp_path):
    """It is written window by window; what is kept of a text in memory is not."""
    trace = open_recording(recorded(attached, text, tmp_path / "trace.safetensors"), text, "abc")
    found = load_routing(trace)
    assert same(found.trace, routing.trace, TRACE_ARRAYS) and found.trace.experts == 16
    assert found.losses.tobytes() == routing.losses.tobytes()
    assert found.trace.scores is None and found.trace.chosen.dtype == routing.trace.chosen.dtype
    assert trace.provenance.items() >= {**FACTS, "policy": "exact", "text": "bible_test"}.items()
    assert [file.name for file in tmp_path.iterdir()] == ["trace.safetensors"]


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_law_a_recording_decides_as_the_emulator_does(family, tiny_moe, text, tmp_path):
    """Scores and logits are the model's: what layer 0 routes depends on no substitution, so its decisions are equal."""
    policy = POLICIES["rule_015"]
    with attach(tiny_moe(family)) as attachment:
        trace = open_trace(recorded(attachment, text, tmp_path / "trace.safetensors"))
        options = {"slots": 7, "demand": None, "delay": 1, "context": CONTEXT, "bos": BOS}
        _, log = emulate(attachment.model, attachment, policy, text, **options)
    whole = trace.read()
    assert trace.sigmoid == (family == "deepseek_v3") == (whole.logits is not None)
    held = Residency(layers=2, experts=16, top_k=4, slots=7, rule=policy.rule(sigmoid=trace.sigmoid))
    logits = whole.logits[:, 0] if trace.sigmoid else None
    decided, _ = held.decide(0, 0, whole.chosen[:, 0], whole.weights[:, 0], whole.scores[:, 0], logits)
    assert (decided.executed == log.executed[:, 0]).all() and (log.kind[:, 0] == SUBSTITUTE).any()
    assert decided.weights.tobytes() == log.weights[:, 0].tobytes()


def test_a_demand_read_back_is_the_same(demand, tmp_path):
    save_demand(tmp_path / "demand.safetensors", demand, {"model": "m"})
    found = load_demand(tmp_path / "demand.safetensors")
    assert found.counts.tobytes() == demand.counts.tobytes() and found.events == demand.events == 60
    assert demand_facts(tmp_path / "demand.safetensors") == {"model": "m", "events": "60"}
    assert demand.counts.sum(axis=1).tolist() == [4 * 60] * 2


def test_a_recording_of_other_weights_or_another_text_is_named(attached, routing, text, tmp_path):
    path = recorded(attached, text, tmp_path / "trace.safetensors")
    with pytest.raises(UserError, match=r"trace\.safetensors: a trace of model m, weights abc; expected weights abd"):
        open_recording(path, text, "abd")
    with pytest.raises(UserError, match=r"trace\.safetensors: bible_test is another text"):
        open_recording(path, replace(text, sha256="0" * 64), "abc")
    fewer = replace(text, documents=text.documents[:2], scored=text.scored[:2])
    with pytest.raises(UserError, match=r"82 tokens in 3 documents; expected the 49 in 2 of bible_test"):
        open_recording(path, fewer, "abc")
    foreign = {"model": "m", "model_hash": "abc", "policy": "exact", "score_rule": "softmax", "text": "bible_test"}
    save_trace(path, routing.trace, text.spans, foreign, losses=routing.losses)
    with pytest.raises(UserError, match="a trace without context, expert_bytes; expected one that"):
        open_recording(path, text, "abc")
    save_trace(path, routing.trace, text.spans, {**foreign, **FACTS})
    with pytest.raises(UserError, match="a trace without losses"):
        open_recording(path, text, "abc")


def test_a_demand_that_is_cut_or_absent_is_named(demand, tmp_path):
    path = tmp_path / "demand.safetensors"
    save_demand(path, demand, {})
    path.write_bytes(path.read_bytes()[:-9])
    for read in (demand_facts, load_demand):
        with pytest.raises(UserError, match=r"demand\.safetensors: .*delete it and run again"):
            read(path)
        with pytest.raises(UserError, match=r"nowhere\.safetensors: "):
            read(tmp_path / "nowhere.safetensors")


# ---- replay against the emulator -------------------------------------------------------------------------------------
@pytest.mark.parametrize("slots", [4, 7, 16])
@pytest.mark.parametrize("policy", [n for n, p in POLICIES.items() if p.lossless and not p.clairvoyant])
def test_law_a_replayed_cell_is_the_emulated_one_to_the_bit(attached, routing, demand, text, policy, slots):
    replayed_losses, replayed = replay_cell(POLICIES[policy], routing, slots=slots, demand=demand)
    emulated_losses, log = emulated(attached, POLICIES[policy], text, demand, slots)
    assert same(replayed, log, LOG_ARRAYS)
    assert replayed_losses.tobytes() == emulated_losses.tobytes()
    assert (log.kind == FETCH).any() == (slots < 16)


def test_law_state_goes_on_from_document_to_document(attached, demand, text):
    """Continuity `stream`: the first document alone is the beginning of the whole; the next does not start afresh."""
    first = replace(text, documents=text.documents[:1], scored=text.scored[:1])
    later = replace(text, documents=text.documents[1:], scored=text.scored[1:])
    policy, tokens = POLICIES["rule_015"], text.scored[0]
    whole_losses, whole = emulated(attached, policy, text, demand, slots=7)
    first_losses, one = emulated(attached, policy, first, demand, slots=7)
    assert whole_losses[:tokens].tobytes() == first_losses.tobytes()
    assert whole.kind[:tokens].tobytes() == one.kind.tobytes()
    _, rest = emulated(attached, policy, later, demand, slots=7)
    assert whole.kind[tokens:].tobytes() != rest.kind.tobytes()


def test_a_later_completion_changes_what_is_executed(attached, demand, text):
    policy = replace(POLICIES["quality_first"], beta=0.2)
    logs = {delay: emulated(attached, policy, text, demand, slots=8, delay=delay)[1] for delay in (1, 5)}
    assert share_of_events_that_differ(logs[1], logs[5]) > 0


# ---- numbers and flags of a cell -------------------------------------------------------------------------------------
def test_golden_numbers_of_a_cell(text):
    """Two tokens, one layer, K = 2: a hit, a fetch, and two misses of weight 0.25 and 0.5 substituted."""
    log = DecisionLog(
        executed=np.array([[[0, 1]], [[2, 3]]], np.int16),
        weights=np.full((2, 1, 2), 0.5, np.float32),
        kind=np.array([[[HIT, SUBSTITUTE]], [[SUBSTITUTE, FETCH]]], np.int8),
        first=np.array([[0], [0]], np.int8),
        g=np.array([[[0.75, 0.25]], [[0.5, 0.5]]], np.float32),
        moves=np.empty((0, 6), np.int32),
    )
    two = Text("t", "literary", "0" * 64, (TokenizedDocument("d", (5, 6), words=1, bytes=4),), (2,))
    loss = np.log(np.array([2, 8], np.float32))
    found = measure(POLICIES["rule_015"], two, loss, log, slots=4)
    assert found["tokens"] == 2 and found["words"] == 1 and found["bytes"] == 4 and found["documents"] == 1
    assert found["token_perplexity"] == pytest.approx(4) and found["word_perplexity"] == pytest.approx(16)
    assert (found["events"], found["demands"], found["hits"], found["fetches"], found["substitutions"]) == (
        2,
        4,
        1,
        1,
        2,
    )
    assert found["substituted_mass"] == pytest.approx(0.375) and found["miss_rate"] == 0.75
    assert found["first_choices_changed"] == 1
    assert (found["lossless"], found["lossy_without_effect"], found["background_inert"]) == (False, False, False)


def test_a_lossy_policy_that_changed_nothing_is_flagged(attached, demand, text):
    flags = {}
    for name, slots in (("rule_015", 16), ("rule_015", 7), ("fetch_lfu_decay", 16)):
        loss, log = emulated(attached, POLICIES[name], text, demand, slots)
        flags[name, slots] = measure(POLICIES[name], text, loss, log, slots)["lossy_without_effect"]
    assert flags == {("rule_015", 16): True, ("rule_015", 7): False, ("fetch_lfu_decay", 16): False}


def test_background_admission_is_marked_inert_where_s_is_k(attached, demand, text):
    for name, slots, inert in (("quality_first", 4, True), ("quality_first", 7, False), ("rule_015", 4, False)):
        loss, log = emulated(attached, POLICIES[name], text, demand, slots)
        assert measure(POLICIES[name], text, loss, log, slots)["background_inert"] is inert


def test_golden_share_of_events_that_differ(attached, demand, text):
    _, log = emulated(attached, POLICIES["rule_015"], text, demand, slots=7)
    assert share_of_events_that_differ(log, log) == 0
    executed, weights = log.executed.copy(), log.weights.copy()
    executed[3, 1, 2] += 1
    weights[3, 1, 0] += 0.5  # the same event
    weights[7, 0, 0] += 0.5
    other = replace(log, executed=executed, weights=weights)
    assert share_of_events_that_differ(log, other) == pytest.approx(2 / log.events)


# ---- cells -----------------------------------------------------------------------------------------------------------
def run_cells(run, keep=lambda *_: None, policy="rule_015"):
    texts = [text_of(1, (3,), "a"), text_of(2, (3,), "b")]
    return cells(POLICIES[policy], texts, {"s25": 25, "s30": 30.0}, experts=16, run=run, keep=keep)


def log_of(text: Text) -> DecisionLog:
    shape = (sum(text.scored), 2, 4)
    return DecisionLog(
        np.zeros(shape, np.int16), np.full(shape, 0.25, np.float32), np.full(shape, HIT, np.int8),
        np.zeros(shape[:2], np.int8), np.full(shape, 0.25, np.float32), np.empty((0, 6), np.int32),
    )  # fmt: skip


def good(text: Text, slots: int):
    return np.ones(sum(text.scored), np.float32), log_of(text)


def test_cells_are_every_slots_and_text_in_order_and_all_are_kept():
    kept = []
    rows = run_cells(good, keep=lambda slots, text, loss, log: kept.append((slots, text.id)))
    assert [(r["slots"], r["slots_count"], r["text"], r["status"]) for r in rows] == [
        ("s25", 4, "a", "ok"), ("s25", 4, "b", "ok"), ("s30", 4, "a", "ok"), ("s30", 4, "b", "ok"),
    ]  # fmt: skip
    assert kept == [(row["slots"], row["text"]) for row in rows]
    assert all(row["wall_s"] >= 0 and row["topic"] == "literary" for row in rows)


@pytest.mark.parametrize(
    "failure", [UserError("of\nours"), MemoryError("of\nours"), RuntimeError("of\nours"), ZeroDivisionError("of\nours")]
)
def test_a_cell_that_fails_has_a_reason_and_no_numbers_and_the_rest_goes_on(failure):
    def run(text, slots):
        if text.id == "a":
            raise failure
        return good(text, slots)

    kept = []
    rows = run_cells(run, keep=lambda slots, text, *_: kept.append(text.id))
    assert [row["status"] for row in rows] == ["failed", "ok", "failed", "ok"]
    assert rows[0]["reason"] == f"{type(failure).__name__}: of ours"
    assert "tokens" not in rows[0] and kept == ["b", "b"]


def test_a_cell_that_could_not_be_kept_had_numbers_beside_its_reason():
    def keep(*_):
        raise RuntimeError("no room")

    for row in run_cells(good, keep=keep):
        assert row["status"] == "failed" and "token_perplexity" not in row and "hits" not in row


def test_a_cell_of_losses_that_are_not_finite_is_not_kept():
    kept = []
    rows = run_cells(
        lambda text, slots: (np.full(3, np.nan, np.float32), log_of(text)), keep=lambda *parts: kept.append(parts)
    )
    assert {row["status"] for row in rows} == {"failed"} and kept == []
    assert rows[0]["reason"].startswith("UserError: 3 losses are NaN or infinite")


def test_a_bug_is_no_failed_cell():
    def run(text, slots):
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        run_cells(run)


# ---- checkpoints of every family -------------------------------------------------------------------------------------
def test_a_saved_checkpoint_is_whole_in_every_family(family, tiny_moe, tmp_path):
    """No weight is taken for missing that transformers makes itself, and none is changed."""
    model = tiny_moe(family, tie_word_embeddings=family == "qwen3_moe_raw")
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, "float32", threads=1)
    for (name, one), (_, other) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_golden_bytes_of_experts_in_every_family(family, tiny_moe):
    """A checkpoint that does not call them experts (granitemoe), or of unusual dtypes, was no rehearsal or crashed."""
    with attach(tiny_moe(family)) as attachment:
        biases = 16 * (2 * 32 + 64) if family == "gpt_oss" else 0  # of both projections
        assert expert_bytes(attachment) == 2 * 4 * (16 * 3 * 64 * 32 + biases)  # layers, bytes of a float32


# ---- pairing ---------------------------------------------------------------------------------------------------------
def test_parts_of_one_article_were_taken_for_independent_documents():
    random = np.random.default_rng(3)
    loss = random.normal(size=60).astype(np.float32)
    names = ("a/0", "a/1", "b/0", "b/1", "c/0", "d/0")
    documents = tuple(TokenizedDocument(name, tuple(range(10)), 1, 1) for name in names)
    text = Text("t", "prose", "0", documents, (10,) * 6)
    assert text.clusters == [("a", 10), ("a", 10), ("b", 10), ("b", 10), ("c", 10), ("d", 10)]
    found = paired_interval([("prose", text.clusters, loss, np.zeros(60, np.float32))])
    whole = [("a", 20), ("b", 20), ("c", 10), ("d", 10)]
    assert found == paired_interval([("prose", whole, loss, np.zeros(60, np.float32))])
    assert found.documents == 4 and found.tokens == 60
    assert found.estimate == pytest.approx(float(loss.mean(dtype=np.float64)))


def test_documents_of_two_texts_are_never_one_cluster():
    loss, zero = np.arange(40, dtype=np.float32), np.zeros(20, np.float32)
    same = [("row0", 10), ("row1", 10)]
    found = paired_interval([("x", same, loss[:20], zero), ("y", same, loss[20:], zero)])
    assert found.documents == 4


def test_golden_mass_by_document_and_its_mean_is_the_cells():
    """Two documents of 1 and 2 tokens, 2 layers: 0.25 and 0.5 of the first token's events are substituted, then one."""
    text = text_of(1, (1, 2), "a")
    kind = np.full((3, 2, 4), HIT, np.int8)
    kind[0, 0, 1] = kind[0, 1, 0] = kind[0, 1, 2] = kind[2, 0, 3] = SUBSTITUTE
    log = replace(log_of(text), kind=kind)
    found = mass_by_document(log, text.scored)
    assert found == [pytest.approx((0.25 + 0.5) / 2), pytest.approx(0.25 / 4)]
    assert np.average(found, weights=text.scored) == pytest.approx(count(log)["substituted_mass"])
