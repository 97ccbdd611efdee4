"""Agreement: every Python program beside the engine gives the losses of the model itself, token by token."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.checkpoint import CheckpointStore
from engine.demand import save_demand
from engine.pack import pack
from engine.residency import Demand
from evals.peers.runs import Outcome, read_lines
from evals.peers.worker import PROGRAMS

CONFIG = Path(__file__).parents[2] / "config"
DOCUMENTS = [[0, 5, 9, 3], [0, 100, 7, 7, 1], [0, 2, 2]]
TOLERANCE = 0.05  # nats, of sums in bfloat16 in another order


@pytest.fixture(scope="module")
def model(tiny_moe, tmp_path_factory):
    """A checkpoint in bfloat16 with its experts together, as programs map it, and a packed store of it."""
    folder = tmp_path_factory.mktemp("peers")
    built = tiny_moe("qwen3_moe").to(torch.bfloat16)
    built.save_pretrained(folder / "checkpoint", save_original_format=False)
    with CheckpointStore(folder / "checkpoint", torch.bfloat16) as store:
        out = folder / "store"
        pack(store, out, source=folder / "checkpoint", leave_out=store.tensor_names, facts={"model": "tiny"})
    counts = np.ones((len(built.model.layers), built.config.num_experts), np.int64)
    save_demand(folder / "demand", Demand(counts, 16), {"model": "tiny"})
    return folder, built


def arguments(folder, program, policy=None):
    engine = {"policies": [CONFIG / "policies.tsv"], "policy": policy, "slots": "50%", "demand": folder / "demand"}
    common = {"model": folder / ("store" if program == "engine" else "checkpoint"), "offload": folder / "offload"}
    return argparse.Namespace(**common, **engine, predictors=None, host=None)


@pytest.mark.parametrize(
    ("program", "policy"),
    [("accelerate", None), ("engine", "fetch_lfu_decay"), ("engine", "speed_first"), ("transformers", None)],
)
def test_programs_decode_the_same_tokens(program, policy, model, capsys):
    folder, built = model
    PROGRAMS[program](arguments(folder, program, policy), DOCUMENTS)
    outcome = Outcome()
    read_lines(capsys.readouterr().out, outcome)
    assert [len(document) for document in outcome.seconds] == [3, 4, 2] and outcome.read_bytes is not None
    differences = []
    with torch.inference_mode():
        for ids, losses in zip(DOCUMENTS, outcome.losses, strict=True):
            logits = built(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            differences += [loss + float(logits[i, ids[i + 1]]) for i, loss in enumerate(losses)]
    exact = policy != "speed_first"
    assert (np.abs(differences) < TOLERANCE).all() == exact
    if program == "engine":
        assert outcome.counts["events"] == 2 * 6  # two layers; the warm-up's are not counted
        assert (outcome.counts["substitutions"] == 0) == exact
        json.dumps(outcome.counts, allow_nan=False)
