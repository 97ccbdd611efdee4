"""Documents in turn: their order and cut, and that one run of the stream is kept text by text without loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.decision import ARRIVED, FETCHED, HIT, ISSUED, SUBSTITUTE
from engine.hook import attach
from engine.log import DecisionLog, count
from engine.policies import load_policies
from evals.perplexity import TokenizedDocument, losses
from evals.quality import Text, cells, emulate, mass_by_token, record_routing
from evals.stream import cut, in_turn, joined, part_of, text_by_text

ROOT = Path(__file__).parents[2]
BUNDLES, SWEEP = (load_policies(ROOT / "config" / f"{name}.tsv") for name in ("policies", "sweep"))
CONTEXT, BOS = 16, 1
SIZES = {"a": (20, 9, 30), "b": (12,), "c": (25, 18)}
ORDER = ["a0", "b0", "c0", "a1", "c1", "a2"]


def text_of(name: str, sizes: tuple[int, ...]) -> Text:
    rng = np.random.default_rng(ord(name))
    documents = tuple(
        TokenizedDocument(f"{name}{i}", tuple(rng.integers(2, 128, size=size).tolist()), words=size, bytes=3 * size)
        for i, size in enumerate(sizes)
    )
    return Text(name, f"topic of {name}", f"{ord(name):064}", documents, sizes)


TEXTS = [text_of(name, sizes) for name, sizes in SIZES.items()]


class Words:
    """A tokenizer whose token 7 is the word `w7`."""

    @staticmethod
    def decode(ids) -> str:
        return " ".join(f"w{i}" for i in ids)


# ---- order and cut ---------------------------------------------------------------------------------------------------
def test_golden_documents_come_in_turn_until_the_longest_text_has_no_more():
    assert [(number, document.id) for number, document in in_turn(TEXTS)] == [
        (0, "a0"), (1, "b0"), (2, "c0"), (0, "a1"), (2, "c1"), (0, "a2"),
    ]  # fmt: skip


def test_golden_stream_and_the_owner_of_every_token():
    stream, owner = joined(TEXTS)
    assert [document.id for document in stream.documents] == ORDER
    assert stream.scored == (20, 12, 25, 9, 18, 30)
    assert owner.tolist() == [0] * 20 + [1] * 12 + [2] * 25 + [0] * 9 + [2] * 18 + [0] * 30


@pytest.mark.parametrize("bos, kept", [(BOS, 10), (None, 11)])
def test_golden_cut_keeps_the_first_tokens_and_counts_their_words(bos, kept):
    """Without a BOS the first token is context alone, so one more of them is kept."""
    whole = replace(TEXTS[0], scored=tuple(len(d.ids) - (bos is None) for d in TEXTS[0].documents))
    found = cut(whole, 10, Words, bos)
    assert [d.ids for d in found.documents] == [d.ids[:kept] for d in whole.documents]
    assert found.scored == (10, 9 - (bos is None), 10)
    assert [d.words for d in found.documents] == [kept, 9, kept]
    assert found.documents[0].bytes == len(Words.decode(whole.documents[0].ids[:kept]))
    assert found.documents[1] is whole.documents[1]
    assert (found.id, found.topic) == (whole.id, whole.topic)


def test_a_cut_text_is_another_text():
    hashes = {cut(text, tokens, Words, BOS).sha256 for text in TEXTS for tokens in (10, 11)}
    assert len(hashes) == 2 * len(TEXTS) and not hashes & {text.sha256 for text in TEXTS}
    assert cut(TEXTS[0], 10, Words, BOS) == cut(TEXTS[0], 10, Words, BOS)


# ---- one run, text by text -------------------------------------------------------------------------------------------
def test_golden_a_part_has_its_tokens_and_its_moves_at_their_steps():
    """Five tokens, one layer: 1, 3 and 4 are of the text; a load issued at 1 arrives at 2, in another text."""
    shape = (5, 1, 2)
    moves = [(0, 0, 7, 0, 1, FETCHED), (0, 1, 8, 1, 2, ISSUED), (0, 2, 8, 1, -1, ARRIVED), (0, 4, 9, 2, 3, FETCHED)]
    log = DecisionLog(
        executed=np.arange(10, dtype=np.int16).reshape(shape),
        weights=np.full(shape, 0.5, np.float32),
        kind=np.full(shape, HIT, np.int8),
        first=np.array([[0], [1], [0], [0], [1]], np.int8),
        g=np.full(shape, 0.5, np.float32),
        moves=np.array(moves, np.int32),
    )
    loss, part = part_of(np.arange(5, dtype=np.float32), log, np.array([1, 3, 4]))
    assert loss.tolist() == [1, 3, 4] and part.first.ravel().tolist() == [1, 0, 1]
    assert part.executed[:, 0].tolist() == [[2, 3], [6, 7], [8, 9]]
    assert part.moves.tolist() == [[0, 0, 8, 1, 2, ISSUED], [0, 2, 9, 2, 3, FETCHED]]
    assert log.moves.tolist() == [list(move) for move in moves]
    counts = count(part)
    assert (counts["events"], counts["loads"], counts["background_arrived"]) == (3, 2, 0)


@pytest.fixture(scope="module")
def attached(tiny_moe):
    with attach(tiny_moe("qwen3_moe")) as attachment:
        yield attachment


@pytest.fixture(scope="module")
def demand(attached):
    calibration = text_of("z", (60,))
    return record_routing(attached.model, attached, calibration, context=CONTEXT, bos=BOS).trace.demand()


@pytest.fixture(scope="module")
def emulated(attached, demand):
    """emulated(policy, text) -> losses and log at 7 of 16 slots."""

    def run(policy, text, slots=7):
        options = {"demand": demand, "delay": 1, "context": CONTEXT, "bos": BOS}
        return emulate(attached.model, attached, policy, text, slots=slots, **options)

    return run


def parts(emulated, policy, texts) -> dict:
    """Losses and log of every text out of one run of the stream."""
    of_text = text_by_text(texts, lambda stream, slots: emulated(policy, stream, slots))
    return {text.id: of_text(text, 7) for text in texts}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_law_losses_of_an_exact_policy_are_the_stock_models_text_by_text_whatever_the_order(order, tiny_moe, emulated):
    texts = [TEXTS[number] for number in order]
    for text, (loss, log) in zip(texts, parts(emulated, SWEEP["fetch_lfu_decay"], texts).values(), strict=True):
        stock = losses(tiny_moe("qwen3_moe"), text.documents, context=CONTEXT, bos=BOS)
        assert loss.tobytes() == stock.tobytes() and log.events == 2 * sum(text.scored)


@pytest.mark.parametrize("policy", ["tau_015_beta_025", "tau_inf_random", "mass_050"])
def test_law_the_texts_of_a_stream_together_are_the_stream(policy, emulated):
    """No token, decision or move is lost or counted twice."""
    stream, owner = joined(TEXTS)
    whole_losses, whole = emulated(SWEEP[policy], stream)
    found = parts(emulated, SWEEP[policy], TEXTS)
    for number, text in enumerate(TEXTS):
        loss, log = found[text.id]
        assert loss.tobytes() == whole_losses[owner == number].tobytes()
        assert log.kind.tobytes() == whole.kind[owner == number].tobytes()
    counted = [count(log) for _, log in found.values()]
    for name in ("events", "hits", "fetches", "substitutions", "loads", "background_issued", "background_arrived"):
        assert sum(counts[name] for counts in counted) == count(whole)[name], name
    assert count(whole)["substitutions"] > 0
    assert (count(whole)["background_arrived"] > 0) == (SWEEP[policy].beta is not None)


def test_law_state_goes_on_over_the_texts_in_the_order_of_the_stream(emulated):
    """The first document is as it is alone; the next, of another text, finds what the first left, and so on."""
    policy = SWEEP["tau_inf"]
    stream = parts(emulated, policy, TEXTS)
    alone = {text.id: emulated(policy, text) for text in TEXTS}
    first = TEXTS[0].scored[0]
    assert stream["a"][1].kind[:first].tobytes() == alone["a"][1].kind[:first].tobytes()
    for name in ("a", "c"):
        assert stream[name][1].kind.tobytes() != alone[name][1].kind.tobytes()
    after_a0 = replace(TEXTS[1], documents=(TEXTS[0].documents[0], *TEXTS[1].documents), scored=(first, 12))
    assert stream["b"][1].kind.tobytes() == emulated(policy, after_a0)[1].kind[first:].tobytes()


SAME = {"tau_015": "rule_015", "tau_inf": "first_choice", "tau_015_beta_050": "quality_first"}
SAME |= {"tau_inf_beta_050": "speed_first", "substitute_all": "substitute_all", "fetch_lfu_decay": "fetch_lfu_decay"}


@pytest.mark.parametrize("row, bundle", SAME.items())
def test_law_a_row_equal_to_a_bundle_decides_as_it_does_where_the_stream_is_one_text(row, bundle, emulated):
    assert replace(SWEEP[row], id=bundle) == BUNDLES[bundle]
    loss, log = parts(emulated, SWEEP[row], TEXTS[:1])["a"]
    bundle_loss, bundle_log = emulated(BUNDLES[bundle], TEXTS[0])
    assert loss.tobytes() == bundle_loss.tobytes()
    for name in ("executed", "weights", "kind", "first", "g", "moves"):
        assert getattr(log, name).tobytes() == getattr(bundle_log, name).tobytes(), name


def test_golden_mass_of_a_token_is_that_of_its_layers():
    kind = np.array([[[HIT, SUBSTITUTE], [SUBSTITUTE, SUBSTITUTE]], [[HIT, HIT], [HIT, HIT]]], np.int8)
    g = np.array([[[0.75, 0.25], [0.5, 0.5]], [[0.9, 0.1], [0.6, 0.4]]], np.float32)
    log = DecisionLog(kind.astype(np.int16), g, kind, kind[..., 0], g, np.empty((0, 6), np.int32))
    assert mass_by_token(log).tolist() == [0.625, 0.0]


def test_a_stream_that_fails_was_run_once_for_every_text():
    runs = []

    def run(stream, slots):
        runs.append(slots)
        raise MemoryError("no room")

    rows = cells(
        SWEEP["tau_inf"], TEXTS, {"s25": 25, "s50": 50}, experts=16, run=text_by_text(TEXTS, run), keep=lambda *_: None
    )
    assert [row["status"] for row in rows] == ["failed"] * 6 and runs == [4, 8]
    assert {row["reason"] for row in rows} == {"MemoryError: no room"}


def test_a_text_without_finite_losses_fails_alone():
    shape = (sum(sum(sizes) for sizes in SIZES.values()), 2, 4)

    def run(stream, slots):
        loss, log = np.ones(shape[0], np.float32), DecisionLog(
            np.zeros(shape, np.int16), np.full(shape, 0.25, np.float32), np.full(shape, HIT, np.int8),
            np.zeros(shape[:2], np.int8), np.full(shape, 0.25, np.float32), np.empty((0, 6), np.int32),
        )  # fmt: skip
        loss[20] = np.nan  # of b0
        return loss, log

    rows = cells(SWEEP["tau_inf"], TEXTS, {"s25": 25}, experts=16, run=text_by_text(TEXTS, run), keep=lambda *_: None)
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"]


# ---- the sheet -------------------------------------------------------------------------------------------------------
def test_the_sheet_has_what_the_preregistration_names():
    """P1.2: six thresholds at four backgrounds; P1.4: five rules, both stand-ins; the ablation a column a row."""
    plain = [
        p for p in SWEEP.values() if (p.standin, p.standin_weight, p.standin_recency) == ("next_best", "own", True)
    ]
    grid = {(p.tau, p.beta) for p in plain if p.miss_rule == "threshold"}
    assert grid == {(t, b) for t in (0.05, 0.1, 0.15, 0.2, 0.3, float("inf")) for b in (None, 0.25, 0.5, 1.0)}
    budgets = {(p.miss_rule, p.share, p.standin) for p in SWEEP.values() if p.miss_rule not in ("threshold", "fetch")}
    rules = [("substitute_all", None), *(("mass_budget", share) for share in (0.1, 0.25, 0.5, 0.75))]
    assert budgets == {(*rule, standin) for rule in rules for standin in ("next_best", "random")}
    ordinary = {"standin": "next_best", "standin_weight": "own", "standin_recency": True, "seed": None}
    for base in ("tau_015", "tau_inf"):
        for column in ("standin", "standin_weight", "standin_recency"):
            changed = [p for p in SWEEP.values() if getattr(p, column) != ordinary[column]]
            assert [p for p in changed if replace(p, **ordinary, id=base) == SWEEP[base]], (base, column)
    assert len({replace(p, id="") for p in SWEEP.values()}) == len(SWEEP)
