"""Laws: whatever a predictor says, a `fetch` rule's output is that without prefetching, bit for bit, and so are its
decisions; under a lossy rule the log says what prefetching changed, and the emulator agrees. Faults leave nothing over.

An engine that is `Patient` computes an event's experts only when everything that the link was granted has come, so that
what fires does not depend on how fast this machine is.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
import torch

from engine.checkpoint import CheckpointStore
from engine.decision import FETCHED, MOVE, TAKEN
from engine.errors import UserError
from engine.generate import generate
from engine.harness import decode
from engine.hook import attach
from engine.host_times import Affine
from engine.link import Link
from engine.log import count
from engine.offload_engine import Engine
from engine.pack import pack
from engine.policies import SCHEDULES, load_policies
from engine.predictors import PREDICTORS, make_predictor, names, of_arrays
from engine.predictors import pairs as pairs_of
from engine.recheck import Recheck
from engine.residency import Demand
from engine.scheduler import Window
from engine.store import PackedStore
from tests.engine.engine_cases import (
    CONFIG,
    POLICIES,
    Both,
    ModelStore,
    PartStore,
    check_slots_hold_their_experts,
    text,
)

SHEET = load_policies(CONFIG / "prefetch.tsv")
EXACT = SHEET["spec_prefetch"]
LAYERS, SLOTS, PATIENCE_S = 4, 6, 10
CAUSE = 1 + MOVE.names.index("cause")
LINKS = {"unthrottled": None, "throttled": Affine(0.0003, 5e7)}
WINDOWS = {  # of a layer a second each: all that are named fit
    "always": Window(np.array([1.0, 2.0]), 1e-3, 1, 4, False),
    "pieces": Window(np.array([1.0, 1.0]), 1e-3, 3, 4, True),
    "window": Window(np.array([1.0, 2.0]), 1e-3, 1, 4, True),
}
assert set(WINDOWS) == set(SCHEDULES)


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


class Patient(Engine):
    def _compute(self, *arguments):
        end = time.monotonic() + PATIENCE_S
        while self.link._transit or any(prefetch.granted for prefetch in list(self.link._agenda)):
            assert time.monotonic() < end
            time.sleep(1e-5)
        return super()._compute(*arguments)


class Said:
    """A predictor of the test: claims(token, target layer) -> [E] of every target, tokens counted over documents."""

    kind, horizons = "spec_prefetch", 2

    def __init__(self, claims, layers=LAYERS, experts=16) -> None:
        self.claims, self.layers, self.experts, self.token = claims, layers, experts, -1

    def predict(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        self.token += layer == 0
        found = np.zeros((1, self.horizons, self.experts), np.float32)
        for h in range(min(self.horizons, self.layers - 1 - layer)):
            found[0, h] = self.claims(self.token, layer + 1 + h)
        return torch.from_numpy(found)

    def names(self, layer: int, x: torch.Tensor, number: int):
        ids, claims = names(self.predict(layer, x), number)
        return ids[0], claims[0]

    def observe(self, layer, chosen): ...

    def reset(self): ...


@pytest.fixture
def both(tiny_moe):
    made = Both(tiny_moe, store=PartStore, num_hidden_layers=LAYERS)
    yield made
    if hasattr(made, "link"):
        made.link.close()


def engine_of(both, kind=Engine, slots=SLOTS, limits=None, store=None, demand=None):
    if hasattr(both, "link"):
        both.link.close()
    both.link = Link(store or both.store, readers=2, limits=limits)
    return kind(both.attachment, both.link, slots=slots, demand=demand)


def decoded(both, engine, policy=EXACT, documents=2, **use):
    """(what the harness timed, log) of a text, from the start."""
    engine.use(policy, **use)
    timed = decode(both.model, engine, [text(25, seed=seed) for seed in range(documents)])
    return timed, engine.log()


def plain(both, policy="fetch_lfu_decay", slots=SLOTS):
    return decoded(both, engine_of(both, slots=slots), POLICIES[policy])


def same(found, wanted) -> None:
    """Bit for bit: losses, what ran, with which weights, who came and who left."""
    np.testing.assert_array_equal(found[0].losses, wanted[0].losses)
    for name in ("executed", "weights", "kind", "first", "g"):
        np.testing.assert_array_equal(getattr(found[1], name), getattr(wanted[1], name), name)
    moves = found[1].moves.copy()
    moves[moves[:, CAUSE] == TAKEN, CAUSE] = FETCHED
    np.testing.assert_array_equal(moves, wanted[1].moves)


def future(log):
    """Names exactly who will be chosen, of a run under `fetch`: the same documents again."""

    def claims(token, layer):
        found = np.zeros(16)
        found[log.executed[token, layer]] = np.linspace(1, 0.5, log.executed.shape[-1])
        return found

    return Said(claims)


def predictor_of(kind, attachment):
    """Of every kind; a trained one of random numbers."""
    if kind in ("gate_replay", "random"):
        return make_predictor(kind, attachment)
    generator = torch.Generator().manual_seed(8)
    number, experts, width, rank = len(pairs_of(LAYERS)), attachment.experts, 64, 5
    shapes = {
        "markov": {"following": (LAYERS - 1, experts, experts)},
        "mlp": {"hidden": (number, width, width), "output": (number, experts, width)},
        "spec_prefetch": {"A": (number, rank, width), "B": (number, experts, rank)},
    }[kind]
    drawn = {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
    return of_arrays(kind, attachment, drawn)


# ---- exactness ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("schedule", WINDOWS)
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("kind", [kind for kind in PREDICTORS if kind != "oracle"])
def test_whatever_is_predicted_the_output_is_that_without_prefetching(both, kind, link, schedule):
    wanted = plain(both)
    policy = dataclasses.replace(EXACT, prefetch=kind, schedule=schedule)
    engine = engine_of(both, limits=LINKS[link])
    predictor = predictor_of(kind, both.attachment)
    for completion in ("next_step", "real"):
        engine.link.clear()
        found = decoded(both, engine, policy, predictor=predictor, window=WINDOWS[schedule], completion=completion)
        same(found, wanted)
        assert engine.link.journal()["prefetch"].any() and not engine.failures
    check_slots_hold_their_experts(both, engine)


ADVERSARIES = {
    "nobody who is chosen": lambda log: lambda t, layer: 1.0 - np.isin(np.arange(16), log.executed[t, layer]),
    "always the same": lambda log: lambda t, layer: np.arange(16) == 3,
    "all alike": lambda log: lambda t, layer: np.ones(16),
    "no number": lambda log: lambda t, layer: np.full(16, np.nan),
    "one of another layer": lambda log: lambda t, layer: np.isin(np.arange(16), log.executed[t, 0]),
    "beyond all numbers": lambda log: lambda t, layer: np.where(np.arange(16) % 2, np.inf, np.nan),
}


@pytest.mark.parametrize("patient", [Engine, Patient])
@pytest.mark.parametrize("schedule", WINDOWS)
@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_an_adversary_changes_nothing(both, adversary, schedule, patient):
    wanted = plain(both)
    said = Said(ADVERSARIES[adversary](wanted[1]))
    engine = engine_of(both, patient)
    same(decoded(both, engine, predictor=said, window=WINDOWS[schedule]), wanted)
    if adversary == "nobody who is chosen" and patient is Patient:
        assert engine.ahead.dropped_pieces > 0
        assert not (engine.log().moves[:, CAUSE] == TAKEN).any()
    check_slots_hold_their_experts(both, engine)


@pytest.mark.parametrize("policy", ["fetch_lfu_decay", "fetch_lru"])
@pytest.mark.parametrize("slots", [4, 7, 15])
@pytest.mark.parametrize("schedule", WINDOWS)
def test_who_knows_the_future_takes_what_has_come_and_reads_nothing_twice(both, schedule, slots, policy):
    wanted = plain(both, policy, slots)
    exact = dataclasses.replace(POLICIES[policy], prefetch="spec_prefetch", schedule=schedule)
    engine = engine_of(both, Patient, slots)
    found = decoded(both, engine, exact, predictor=future(wanted[1]), window=WINDOWS[schedule])
    same(found, wanted)
    counts = count(found[1])
    assert counts["prefetched"] > 0 and counts["fetches"] == count(wanted[1])["fetches"]
    assert engine.ahead.dropped_pieces == 0
    journal, record = engine.link.journal(), both.store.layout.record_bytes
    assert journal["bytes"][journal["prefetch"]].sum() == counts["prefetched"] * record
    assert journal["bytes"].sum() == counts["loads"] * record
    check_slots_hold_their_experts(both, engine)
    rows = [*engine.slots.row_of_slot.ravel().tolist(), *engine.slots.staging_rows.tolist()]
    assert sorted(rows) == list(range(len(engine.slots.held)))


def test_what_is_there_in_part_is_taken_and_the_rest_is_fetched(both):
    """One piece of three fits into the window of a layer."""
    wanted = plain(both)
    engine = engine_of(both, Patient)
    window = Window(np.array([1.5, 1.5]), 1.0, 3, 4, True)
    same(decoded(both, engine, predictor=future(wanted[1]), window=window), wanted)
    journal, record = engine.link.journal(), both.store.layout.record_bytes
    assert set(journal["bytes"][journal["prefetch"]]) == {record // 3}
    lacking = set(journal["bytes"][journal["foreground"]])
    assert lacking & {record // 3, 2 * (record // 3)} and lacking <= {record // 3, 2 * (record // 3), record}
    check_slots_hold_their_experts(both, engine)


@pytest.mark.parametrize("schedule", WINDOWS)
def test_where_all_experts_are_resident_nothing_is_prefetched(both, schedule):
    demand = Demand(np.ones((LAYERS, 16), np.int64), 1)
    engine = engine_of(both, slots=16, demand=demand)
    engine.use(EXACT, predictor=Said(lambda t, layer: np.ones(16)), window=WINDOWS[schedule])
    engine.link.clear()
    timed = decode(both.model, engine, [text(25)])
    assert len(engine.link.journal()) == 0 and count(engine.log())["hits"] == engine.log().kind.size
    assert len(timed.losses) == 24


@pytest.mark.parametrize("kind", [Engine, Patient])
def test_a_prompt_between_decoded_tokens_drops_what_is_on_the_way(both, kind):
    """Generation, twice over: prefill needs the staging rows, and goes on from rows that have changed hands."""

    def tokens(engine):
        return [list(generate(both.model, engine, text(n, seed=n), max_new_tokens=15)) for n in (20, 3, 12)]

    engine = engine_of(both)
    engine.use(POLICIES["fetch_lfu_decay"])
    wanted, log = tokens(engine), engine.log()
    engine = engine_of(both, kind)
    engine.use(EXACT, predictor=Said(lambda t, layer: np.arange(16, 0, -1.0)), window=WINDOWS["pieces"])
    assert tokens(engine) == wanted
    np.testing.assert_array_equal(engine.log().executed, log.executed)
    np.testing.assert_array_equal(engine.log().kind, log.kind)
    assert engine.link.journal()["prefetch"].any() and (kind is Engine or count(engine.log())["prefetched"] > 0)
    check_slots_hold_their_experts(both, engine)


# ---- lossy rules ----------------------------------------------------------------------------------------------------
LOSSY = {
    **{name: policy for name, policy in SHEET.items() if not policy.lossless},
    **{name: POLICIES[name] for name in ("rule_015", "substitute_all")},
    "drop": dataclasses.replace(
        POLICIES["rule_015"],
        miss_rule="drop",
        tau=None,
        standin=None,
        standin_weight=None,
        standin_recency=None,
        renormalise=True,
    ),
}


@pytest.mark.parametrize("completion", ["next_step", "real"])
@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_runs_log_forced_upon_the_emulator_gives_its_losses(both, name, completion):
    policy = dataclasses.replace(LOSSY[name], prefetch="gate_replay", schedule="pieces")
    engine = engine_of(both, Patient)
    predictor = make_predictor("gate_replay", both.attachment)
    timed, log = decoded(both, engine, policy, 1, predictor=predictor, window=WINDOWS["pieces"], completion=completion)
    assert count(log)["prefetched"] > 0
    check_slots_hold_their_experts(both, engine)
    ids = text(25, seed=0)
    with attach(both.whole) as attachment:
        recheck = Recheck(attachment, log, policy, slots=SLOTS, demand=None)
        with recheck.phase("decode"):
            logits = both.whole(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0]
    assert recheck.finished and recheck.differences() == 0
    losses = -logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]].numpy()
    np.testing.assert_allclose(timed.losses, losses, rtol=1e-4, atol=1e-4)


def test_what_is_there_is_fetched_where_it_would_have_been_substituted(both):
    """The rule substitutes every miss; with prefetching a part of them runs, and none is waited for."""
    _, before = plain(both, "substitute_all")
    policy = dataclasses.replace(POLICIES["substitute_all"], prefetch="gate_replay", schedule="window")
    engine = engine_of(both, Patient)
    predictor = make_predictor("gate_replay", both.attachment)
    _, log = decoded(both, engine, policy, predictor=predictor, window=WINDOWS["window"])
    counts = count(log)
    assert counts["prefetched"] > 0 and counts["substitutions"] < count(before)["substitutions"]
    later = log.moves[log.moves[:, 1] > 5]  # once the cold start is over
    assert set(later[:, CAUSE]) == {TAKEN}


# ---- stores ---------------------------------------------------------------------------------------------------------
def test_a_store_that_reads_whole_records_alone_prefetches_whole_ones(tiny_moe):
    both = Both(tiny_moe, store=ModelStore, num_hidden_layers=LAYERS)
    wanted = plain(both)
    engine = engine_of(both, Patient)
    same(decoded(both, engine, predictor=future(wanted[1]), window=WINDOWS["pieces"]), wanted)
    journal = engine.link.journal()
    assert set(journal["bytes"][journal["prefetch"]]) == {both.store.layout.record_bytes}
    both.link.close()


@pytest.mark.parametrize("schedule", WINDOWS)
def test_out_of_a_packed_store(both, tmp_path, schedule):
    wanted = plain(both)
    both.whole.save_pretrained(tmp_path / "checkpoint")
    with CheckpointStore(tmp_path / "checkpoint", torch.float32) as store:
        pack(store, tmp_path / "packed", source=tmp_path / "checkpoint", leave_out=store.tensor_names, facts={})
    packed = PackedStore(tmp_path / "packed")
    engine = engine_of(both, Patient, store=packed)
    found = decoded(both, engine, predictor=future(wanted[1]), window=WINDOWS[schedule])
    same(found, wanted)
    assert count(found[1])["prefetched"] > 0
    both.link.close()
    packed.close()


# ---- faults, starts and ends ----------------------------------------------------------------------------------------
def test_a_piece_that_fails_is_reported_and_its_expert_is_fetched(both):
    wanted = plain(both)
    both.store.broken_parts = {(layer, expert) for layer in (1, 3) for expert in range(16)}
    engine = engine_of(both, Patient)
    found = decoded(both, engine, predictor=future(wanted[1]), window=WINDOWS["pieces"])
    same(found, wanted)
    assert engine.failures and all("Input/output error" in failure for failure in engine.failures)
    assert {failure[:7] for failure in engine.failures} == {"layer 1", "layer 3"}
    taken = found[1].moves[found[1].moves[:, CAUSE] == TAKEN]
    assert set(taken[:, 0]) == {2}
    check_slots_hold_their_experts(both, engine)


def test_after_a_failed_fetch_a_restart_leaves_nothing_on_the_way(both):
    wanted = plain(both)
    engine = engine_of(both, Patient)
    engine.use(EXACT, predictor=future(wanted[1]), window=WINDOWS["pieces"])
    both.store.broken = {(2, expert) for expert in range(16)}
    with pytest.raises(UserError, match="layer 2, expert"):
        decode(both.model, engine, [text(25, seed=seed) for seed in range(2)])
    both.store.broken = set()
    engine.restart()
    assert (engine.ahead._entries["layer"] == -1).all() and not engine.link._agenda
    same(decoded(both, engine, predictor=future(wanted[1]), window=WINDOWS["pieces"]), wanted)
    check_slots_hold_their_experts(both, engine)


def test_another_policy_begins_without_the_prefetches_of_the_last(both):
    wanted = plain(both)
    engine = engine_of(both, Patient)
    decoded(both, engine, predictor=future(wanted[1]), window=WINDOWS["always"])
    found = decoded(both, engine, POLICIES["fetch_lfu_decay"])
    same(found, wanted)
    engine.link.clear()
    decode(both.model, engine, [text(5)])
    assert engine.ahead is None and not engine.link.journal()["prefetch"].any()


@pytest.mark.parametrize(
    "policy, given, message",
    [
        (EXACT, {}, "without a predictor and a window; expected both"),
        (EXACT, {"window": WINDOWS["pieces"]}, "without a predictor; expected both"),
        (EXACT, {"predictor": Said(None)}, "without a window; expected both"),
        (
            SHEET["gate_replay"],
            {"predictor": Said(None), "window": WINDOWS["pieces"]},
            "with a predictor of kind spec_prefetch; expected gate_replay",
        ),
        (
            SHEET["prefetch_oracle"],
            {},
            r"\(eviction lfu_decay, prefetch oracle\) in the engine",
        ),
    ],
)
def test_what_prefetching_needs_is_asked_for(both, policy, given, message):
    engine = engine_of(both)
    with pytest.raises(UserError, match=message):
        engine.use(policy, **given)
