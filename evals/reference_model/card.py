"""From a finished run to what the repository carries: packed weights and a model card written from the run's
records.

`finish` exports the parameters, packs them, scores the packed model on the held-out texts and writes, under
the run's folder, `packed/` (what models/<id>/ holds) and returns the facts that results/reference_model/<id>
holds. No figure is typed.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path

import torch

from engine.files import sha256, write_json, write_text
from evals.reference_model import heldout, pack
from evals.reference_model.export import training_parameters, write_folder
from evals.reference_model.model import Step
from evals.reference_model.sample import samples
from evals.reference_model.train import Run

CURVE_ROWS = 12


def read_log(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def training_seconds(log: list[dict]) -> float:
    """Time spent in steps: pauses, evaluations and restarts are not counted."""
    total, before = 0.0, 0
    for line in log:
        if "tokens_per_s" in line:
            if line["tokens"] > before:
                total += (line["tokens"] - before) / line["tokens_per_s"]
            before = line["tokens"]
    return total


def thinned(rows: list[dict], count: int) -> list[dict]:
    """`count` rows evenly spaced, first and last among them."""
    if len(rows) <= count:
        return rows
    return [rows[round(i * (len(rows) - 1) / (count - 1))] for i in range(count)]


def gather(run: Run, texts: Path, log: list[dict], packed: Path, packed_loss: dict) -> dict:
    """Everything the card says, as data."""
    recipe, data = run.recipe, json.loads((texts / "data.json").read_text())
    seen = {topic: count * recipe.shape.context for topic, count in run.batches.dealt.items()}
    decay_from, decay_steps = run.decay()
    return {
        "id": recipe.id,
        "recipe": asdict(recipe),
        "recipe_sha256": recipe.digest(),
        "parameters": sum(value.numel() for value in run.parameters.values()),
        "tokens_seen": run.optimiser.count * recipe.step_tokens,
        "tokens_seen_by_topic": seen,
        "rounds_by_topic": {t: round(seen[t] / data["topics"][t]["tokens"], 2) for t in seen},
        "decay": {"from_step": decay_from, "steps": decay_steps},
        "settle": {"from_step": decay_from + decay_steps, "steps": run.whole() - decay_from - decay_steps},
        "steps": run.optimiser.count,
        "training_s": round(training_seconds(log)),
        "threads": run.settings.threads,
        "dense": run.settings.dense,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "texts": data["texts"],
        "tokenised": {topic: row for topic, row in data["topics"].items() if topic in seen},
        "heldout": heldout.evaluate(run.step, run.tokenizer, run.documents, recipe.batch),
        "heldout_packed": packed_loss,
        "curve": thinned([line for line in log if line.get("event") == "heldout"], CURVE_ROWS),
        "samples": samples(packed),
        "sha256": {path.name: sha256(path) for path in sorted(packed.iterdir()) if path.name != "README.md"},
        "bytes": (packed / pack.PACKED).stat().st_size,
    }


def finish(run: Run, texts: Path, folder: Path) -> dict:
    """Write folder/export (float32) and folder/packed with its card; return the facts."""
    write_folder(run.recipe.shape, run.parameters, texts / "tokenizer.json", folder / "export")
    packed = folder / "packed"
    weights = pack.pack(folder / "export", packed)
    parameters = training_parameters(run.recipe.shape, pack.unpack_tensors(weights))
    step = Step(run.recipe.shape, parameters, run.settings.threads, run.recipe.balance, "float32")
    loss = heldout.evaluate(step, run.tokenizer, run.documents, run.recipe.batch)
    facts = gather(run, texts, read_log(folder / "log.jsonl"), packed, loss)
    write_text(packed / "README.md", markdown(facts))
    write_json(folder / "facts.json", facts)
    return facts


def table(head: list[str], rows: list[list]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def mixture(shares: dict[str, float]) -> str:
    return ", ".join(f"{topic} {share:.0%}" for topic, share in sorted(shares.items()))


def markdown(facts: dict) -> str:
    """The model card."""
    recipe, shape, rates = facts["recipe"], facts["recipe"]["shape"], facts["recipe"]["rates"]
    packed, whole = facts["heldout_packed"], facts["heldout"]
    losses = table(
        ["topic", "bits a byte", "nats a token", "nats a token before packing", "tokens"],
        [
            [topic, row["bits_per_byte"], row["nats_per_token"], whole[topic]["nats_per_token"], row["tokens"]]
            for topic, row in packed.items()
        ],
    )
    texts = table(
        ["text", "topic", "licence", "documents", "bytes"],
        [[t["id"], t["topic"], t["licence"], f"{t['documents']:,}", f"{t['bytes']:,}"] for t in facts["texts"]],
    )
    topics = table(
        ["topic", "tokens there are", "tokens seen", "rounds"],
        [
            [t, f"{row['tokens']:,}", f"{facts['tokens_seen_by_topic'][t]:,}", facts["rounds_by_topic"][t]]
            for t, row in facts["tokenised"].items()
        ],
    )
    distinct = sum(row["tokens"] for row in facts["tokenised"].values())
    licence = recipe["licence"].lower().replace(" ", "-")
    names = list(packed)
    curve = table(
        ["tokens", *names],
        [
            [f"{line['tokens']:,}", *(line["topics"].get(n, {}).get("bits_per_byte", "-") for n in names)]
            for line in facts["curve"]
        ],
    )
    written = "\n\n".join(f"{topic}:\n\n```\n{text.strip()}\n```" for topic, text in facts["samples"].items())
    settling = ""
    if steps := facts["settle"]["steps"]:
        schedule = recipe["schedule"]
        settling = (
            f", and {schedule['settle_balance']:g} over the last {steps:,} steps, whose rates fall from "
            f"{schedule['settle_factor']:g} of the highest to zero"
        )
    kind = "softmax weights renormalised over the chosen" if shape["norm_topk_prob"] else "softmax weights as they are"
    return f"""---
license: {licence}
language: en
library_name: transformers
tags: [mixture-of-experts, qwen3_moe, benchmark]
---

# expertmiss {facts["id"]}

A small Mixture-of-Experts language model to measure miss policies on. It is an instrument, not an assistant.

Stock `Qwen3MoeForCausalLM`: {shape["layers"]} layers of width {shape["width"]}, {shape["experts"]} experts a layer of
width {shape["expert_width"]}, top-{shape["chosen"]} ({kind}), {shape["heads"]} query and {shape["key_value_heads"]}
key/value heads of width {shape["head_width"]}, tied embeddings, byte-level BPE of {shape["vocabulary"]:,}, context
{shape["context"]}, {facts["parameters"] / 1e6:.1f} M parameters. Weights here are int8 with a scale a row
({facts["bytes"] / 1e6:.1f} MB; router and norms bfloat16);
`python -m evals.reference_model.pack unpack models/{facts["id"]} FOLDER` writes a bfloat16 Hugging Face folder.

## Limits

Trained on {facts["tokens_seen"] / 1e6:.0f} M tokens from texts of {distinct / 1e6:.0f} M: it knows no facts and
solves no task. Held-out losses below are on calibration texts of the same kinds as the training texts, a few thousand
tokens a topic. Its experts are small; that its misses cost what those of a large model cost is not claimed. English and
Python only.

## Held-out loss (calibration texts, the packed model, float32)

Rows "{heldout.SEEN}" are not held out: their templates were trained on, their numbers and names are drawn anew. Beside
`word_problems` they tell how much is a template known by heart.

{losses}

During training, bits a byte before packing:

{curve}

## What it writes

One continuation a prompt (the first line or words), not chosen among several.

{written}

## Recipe

Windows by topic: {mixture(recipe["shares"])}; in the decay: {mixture(recipe["decay_shares"] or recipe["shares"])}.

{facts["steps"]:,} steps of {recipe["batch"]} windows of {shape["context"]} tokens ({facts["tokens_seen"]:,} tokens),
seed {recipe["seed"]}, {facts["training_s"] / 3600:.1f} hours in steps on {facts["threads"]} threads (dense products in
{facts["dense"]}, all else float32). Muon (momentum {rates["muon_momentum"]}, rate {rates["muon"]}, weight decay
{rates["muon_decay"]}) on attention and expert matrices; AdamW (rate {rates["adam"]}, betas {rates["adam_beta1"]} and
{rates["adam_beta2"]}, weight decay {rates["adam_decay"]}, gradient norm at most {rates["clip"]}) on embedding, router
and norms; warm-up {recipe["schedule"]["warmup"]} steps, stable, linear decay over {facts["decay"]["steps"]:,} steps
from step {facts["decay"]["from_step"]:,}; load-balance loss {recipe["balance"]}{settling}; attention stays inside a
document.
Recipe {facts["recipe_sha256"][:16]}, torch {facts["torch"]}, Python
{facts["python"]} (the standard library and the installed packages are texts: other versions make another model).
Retrain:
`snakemake --cores 2 results/reference_model/{facts["id"]}`.

{topics}

## Texts

{texts}

No test text is among them (`evals/corpora.toml` lists roles; an n-gram overlap check is part of the project).
"""
