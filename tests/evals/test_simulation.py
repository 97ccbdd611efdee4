"""Times of policies by cell: what is kept, what fails alone, and the delay that quality is taken at."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.errors import UserError, error
from engine.geometry import Geometry
from engine.host import load_hosts
from engine.policies import load_policies
from engine.residency import Demand
from engine.simulator import simulate
from engine.timing import Timing
from engine.trace import RouterTrace
from engine.trace_file import open_trace, save_trace
from evals.simulation import Loaded, delay_of, load, simulate_cells

ROOT = Path(__file__).parents[2]
POLICIES = load_policies(ROOT / "config" / "policies.tsv")
HOST = load_hosts(ROOT / "config" / "hosts")["rtx3090_pcie4"]
TOKENS, LAYERS, EXPERTS, TOP_K = 300, 2, 16, 4
GEOMETRY = Geometry(LAYERS, EXPERTS, TOP_K, 1 << 20, 1 << 20, 1024, 1 << 20, "bfloat16")
FACTS = {"model": "tiny", "text": "story", "policy": "stock", "score_rule": "softmax"}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A trace file with whole scores, from a seed."""
    random = np.random.default_rng(3)
    scores = random.normal(size=(TOKENS, LAYERS, EXPERTS)).astype(np.float32)
    chosen = np.argsort(-scores, axis=-1, kind="stable")[..., :TOP_K].astype(np.int16)
    picked = np.take_along_axis(scores, chosen.astype(np.int64), axis=-1)
    weights = np.exp(picked) / np.exp(picked).sum(axis=-1, keepdims=True)
    file = tmp_path_factory.mktemp("trace") / "story.safetensors"
    trace = RouterTrace(chosen, weights.astype(np.float32), picked, experts=EXPERTS, scores=scores)
    save_trace(file, trace, [("a", 0, 100), ("b", 100, 200)], FACTS)
    return file


@pytest.fixture(scope="module")
def demand() -> Demand:
    return Demand(np.arange(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS) + 1, 100)


def cells(path: Path, demand: Demand, names: list[str], percent: float = 50.0, geometry=GEOMETRY):
    kept: dict[str, dict] = {}
    rows = simulate_cells(
        HOST, geometry, [load(open_trace(path))], [POLICIES[n] for n in names], {"s": percent}, demand,
        keep=kept.__setitem__,
    )  # fmt: skip
    return rows, kept


def test_agreement_a_cell_is_the_simulator_on_the_file(path, demand):
    """Read whole for all cells, or in chunks from the file: the same seconds to the bit."""
    rows, kept = cells(path, demand, ["fetch_belady", "quality_first"])
    assert [(row["policy"], row["slots"], row["slots_count"], row["status"]) for row in rows] == [
        ("fetch_belady", "s", 8, "ok"),
        ("quality_first", "s", 8, "ok"),
    ]
    for row in rows:
        timing = Timing.of(HOST, "pcie", GEOMETRY, 8)
        found = simulate(open_trace(path), POLICIES[row["policy"]], timing, demand=demand, chunk_tokens=70)
        arrays = kept[f"pcie/{row['policy']}/s/story"]
        assert arrays["token_s"].tobytes() == found.token_s.astype(np.float32).tobytes()
        assert arrays["delays"].tolist() == found.delays.tolist()
        assert row["mean_token_s"] == found.summary()["mean_token_s"] and row["bytes"] == found.bytes
        assert row["limit_token_s"] <= row["ceiling_token_s"]


@pytest.mark.parametrize(
    "percent, geometry, reason",
    [
        (12.5, GEOMETRY, "2 slots a layer; expected from K = 4"),
        (50.0, error("a model with shared experts", "stock experts", "build it"), "shared experts"),
    ],
)
def test_a_cell_that_cannot_be_keeps_its_reason(path, demand, percent, geometry, reason):
    rows, kept = cells(path, demand, ["fetch_lru"], percent, geometry)
    assert [row["status"] for row in rows] == ["failed"] and reason in rows[0]["reason"] and kept == {}


def test_a_trace_read_whole_is_cut_as_the_file_is(path):
    file = open_trace(path)
    whole = load(file)
    assert isinstance(whole, Loaded)
    for ours, theirs in zip(whole.chunks(77), file.chunks(77), strict=True):
        for name in ("chosen", "weights", "chosen_scores", "scores"):
            assert getattr(ours, name).tobytes() == getattr(theirs, name).tobytes()
        assert ours.logits is None and theirs.logits is None


def test_golden_the_delay_is_the_median_up_to_a_power_of_two():
    assert [delay_of(np.array(d)) for d in ([], [1], [1, 1, 9], [2, 3], [3, 3], [5], [8, 8], [9])] == [
        1, 1, 1, 4, 4, 8, 8, 16,
    ]  # fmt: skip


def test_another_trace_is_refused_by_name(path):
    with pytest.raises(UserError, match="16"):
        load(open_trace(path)).check_model(experts=32)
