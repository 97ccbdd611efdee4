"""Which families of transformers' experts interface does the engine run? Each is built tiny, by one rule, and tried.

    python -m tests.families --write        # docs/families.md; some minutes' worth of nothing: under one

A family is a folder of transformers whose modelling code is decorated with `use_experts_implementation`; its
configurations that AutoModelForCausalLM takes are shrunk by the table below, which knows keys and no family. Then the
model is saved as save_pretrained does and opened by the engine: attach, S = E against stock in emulator and engine, a
lossy policy that shows in both.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from engine.emulator import Emulator
from engine.errors import UserError
from engine.hook import attach
from engine.log import count
from engine.offload_model import OpenModel
from engine.policies import load_policies
from engine.residency import Demand

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "families.md"
POLICIES = load_policies(ROOT / "config" / "policies.tsv")
WORKS, NO_CAUSAL = "works", "no causal language model"
LAYERS, VOCABULARY, PROMPT = 4, 128, 12

# what configurations call their sizes; a key that a configuration lacks is not set
SIZES = {
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
LIKE_LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types")


@dataclass(frozen=True)
class Row:
    """A configuration of a family and what came of it."""

    family: str
    model: str  # model_type
    rule: str  # that attach found
    outcome: str


def families() -> dict[str, list[type]]:
    """{folder of transformers.models: its configurations that AutoModelForCausalLM takes}."""
    folder = Path(transformers.__file__).parent / "models"
    mark = "@use_experts_implementation"
    names = sorted({p.parent.name for p in folder.glob("*/modeling_*.py") if mark in p.read_text(encoding="utf-8")})
    classes = [CONFIG_MAPPING[name] for name in CONFIG_MAPPING]
    return {
        name: [c for c in classes if c.__module__.split(".")[2] == name and c in MODEL_FOR_CAUSAL_LM_MAPPING]
        for name in names
    }
