"""One trace replayed by hand: curves, times, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tiny import ROOT, run_script

from engine.policies import load_policies
from engine.trace import RouterTrace
from engine.trace_file import save_trace

TOKENS, LAYERS, EXPERTS, TOP_K = 200, 2, 15, 3  # 15: budgets in percent do not come out even
FACTS = {"model": "elsewhere", "text": "story", "policy": "stock", "score_rule": "softmax"}
SIZES = ("--expert-bytes", 1_000_000, "--dense-bytes", 1_000_000, "--head-bytes", 1_000_000)
HOST = ROOT / "config" / "hosts" / "rtx3090_pcie4.yaml"


def trace(path: Path, scored: bool) -> Path:
    random = np.random.default_rng(5)
    scores = random.normal(size=(TOKENS, LAYERS, EXPERTS)).astype(np.float32)
    chosen = np.argsort(-scores, axis=-1, kind="stable")[..., :TOP_K].astype(np.int16)
    picked = np.take_along_axis(scores, chosen.astype(np.int64), axis=-1)
    weights = (np.exp(picked) / np.exp(picked).sum(axis=-1, keepdims=True)).astype(np.float32)
    arrays = RouterTrace(chosen, weights, picked, experts=EXPERTS, scores=scores if scored else None)
    save_trace(path, arrays, [("a", 0, TOKENS)], FACTS)
    return path


def test_law_curves_fall_with_slots_and_belady_is_never_beaten(tmp_path):
    out = tmp_path / "curves.csv"
    ended = run_script(
        "replay_trace.py", "--trace", trace(tmp_path / "t.safetensors", False), "--slots", "all", "--out-curves", out
    )
    assert ended.code == 0, ended.err
    table = pd.read_csv(out).pivot(index="slots", columns="eviction", values="miss_rate")
    assert list(table.index) == list(range(TOP_K, EXPERTS + 1))
    assert (table["lru"].diff().dropna() <= 0).all() and (table["belady"].diff().dropna() <= 0).all()
    assert (table.sub(table["belady"], axis=0) >= 0).all(axis=None)


def test_times_of_an_imported_trace_and_what_it_cannot_decide(tmp_path):
    out = tmp_path / "times.csv"
    file = trace(tmp_path / "t.safetensors", False)
    flags = ("--host", HOST, *SIZES, "--slots", 7, "--out-times", out)
    assert run_script("replay_trace.py", "--trace", file, *flags).code == 0
    table = pd.read_csv(out).set_index("policy")
    for name, policy in load_policies(ROOT / "config" / "policies.tsv").items():
        assert (table.loc[name, "status"] == "ok") == policy.lossless
        if not policy.lossless:
            assert name in table.loc[name, "reason"] and "scores" in table.loc[name, "reason"]
    assert (table["slots_count"] == 7).all() and (table["link"] == "pcie").all()
    assert run_script("replay_trace.py", "--trace", trace(file, True), *flags).code == 0
    assert (pd.read_csv(out)["status"] == "ok").all()


@pytest.mark.parametrize(
    "flags, part",
    [
        ((), "neither --out-curves nor --out-times"),
        (("--out-times", "x.csv"), "--out-times without --host"),
        (("--out-times", "x.csv", "--host", HOST), "no --expert-bytes"),
        (("--out-times", "x.csv", "--host", HOST, *SIZES, "--kv-bytes", -1), "a size of -1"),
        (("--out-curves", "x.csv", "--slots", 2), "--slots 2"),
        (("--out-curves", "x.csv", "--slots", "half"), "--slots half"),
        (("--out-times", "x.csv", "--host", HOST, "--config", "nowhere.json"), "nowhere.json"),
    ],
)
def test_what_is_missing_is_one_line_and_nothing_is_written(tmp_path, monkeypatch, flags, part):
    monkeypatch.chdir(tmp_path)
    ended = run_script(
        "replay_trace.py",
        "--trace",
        trace(tmp_path / "t.safetensors", False),
        "--policies",
        ROOT / "config" / "policies.tsv",
        *flags,
    )
    assert part in ended.message
    assert [path.name for path in tmp_path.iterdir()] == ["t.safetensors"]
