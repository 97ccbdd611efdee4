"""What every predictor says about the test texts, as files for the simulator, and how often it is right.

One stock pass a text: from the router's input of every layer the experts of the next two. results/predictions/<model>/
gets <predictor>/<text>.safetensors (engine/predictions.py) and recall.json, the counts by document that tables and
intervals are made of. What misses is taken from the baseline's decision log.
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np

from engine.decision import HIT
from engine.errors import error, main_guard
from engine.files import write_json
from engine.hook import attach
from engine.log import load_log
from engine.policies import BASELINE
from engine.predictions import HORIZONS, from_trace, save_predictions
from engine.predictors import Predictor, make_predictor, multiply_adds, names
from engine.routers import routers_of
from evals.jobs import Progress, expert_bytes, load_model, load_texts, load_tokenizer, model_hash, provenance
from evals.parallel import ahead
from evals.perplexity import context_of, losses
from evals.predictor_recall import count_text
from evals.predictor_training import first_tokens, listen, previous_of
from evals.quality import Text, open_recording

PREDICTED = ("gate_replay", "markov", "mlp", "spec_prefetch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="id, for the provenance")
    parser.add_argument("--model-dir", required=True, help="folder in Hugging Face layout, or hub id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--predictors", required=True, type=Path, help="folder of train_predictors.py")
    parser.add_argument("--traces", required=True, type=Path, help="folder of record_routing.py")
    parser.add_argument("--decisions", required=True, type=Path, help=f"folder of {BASELINE}'s decision logs")
    parser.add_argument("--slots", required=True, help="id of the budget whose misses count")
    parser.add_argument("--texts", nargs="+", required=True, help="resolved texts of role test")
    parser.add_argument("--documents", type=int, help="the first documents of each text alone")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--names", type=int, default=16, help="experts named of a layer, at least K")
    parser.add_argument("--out", required=True, type=Path, help="folder")
    a = parser.parse_args()
    tokenizer, bos = load_tokenizer(a.model_dir)
    texts = load_texts(a.texts, tokenizer, bos, a.documents)
    model = load_model(a.model_dir, a.dtype, 1)  # evals/parallel.py has the others
    weights = model_hash(a.model_dir)
    progress = Progress("predict experts", sum(sum(t.scored) for t in texts))
    with attach(model) as attachment:
        if not attachment.top_k <= a.names <= attachment.experts:
            found = f"{a.names} names of {attachment.experts} experts, K = {attachment.top_k}"
            raise error(found, "from K to E of them", "choose another number")
        predictors = [make_predictor(kind, attachment, a.predictors, weights) for kind in PREDICTED]
        context = context_of(model, a.context)
        facts = provenance(model=a.model, model_hash=weights, context=context)
        options = {"context": context, "bos": bos, "progress": progress.advance}
        arguments = (model, attachment, predictors, facts, a)
        with ahead([partial(predict, text, *arguments, **options) for text in texts], a.threads) as results:
            cells = [cell for result in results for cell in result()]
        sizes = (len(attachment.layers), routers_of(attachment)[0].weight.shape[1], attachment.experts)
        record = {
            "schema": "recall-1",
            "model": a.model,
            "provenance": facts,
            "texts": {t.id: t.sha256 for t in texts},
            "clusters": {t.id: t.clusters for t in texts},
            "experts": attachment.experts,
            "top_k": attachment.top_k,
            "expert_bytes": expert_bytes(attachment),
            "names": a.names,
            "slots": a.slots,
            "predictors": {
                kind: {
                    "parameters": number,
                    "multiply_adds_a_token": multiply_adds(kind, *sizes, attachment.top_k),
                }
                for kind, number in (("oracle", 0), *((p.kind, p.parameters) for p in predictors))
            },
            "cells": cells,
        }
    write_json(a.out / "recall.json", record)


def predict(
    text: Text,
    model,
    attachment,
    predictors: list[Predictor],
    facts: dict[str, str],
    a: argparse.Namespace,
    **options,
) -> list[dict]:
    """Write what is said about one text; the counts of every predictor, anchor and horizon."""
    trace = open_recording(a.traces / f"{text.id}.safetensors", text, facts["model_hash"])
    routing = trace.read(scores=False)
    missed = load_log(a.decisions / a.slots / f"{text.id}.safetensors").kind != HIT  # [T, L, K], in the trace's order
    if missed.shape != routing.chosen.shape:
        found = f"{a.decisions}: decisions {list(missed.shape)} of {text.id}"
        raise error(found, f"{list(routing.chosen.shape)}, as its trace", "score the baseline again")
    said = {p.kind: nothing(trace.tokens, trace.layers, a.names) for p in predictors}
    previous, done = previous_of(routing.chosen, first_tokens(text.scored)), 0

    def ask(inputs, _logits, _chosen) -> None:
        """The tokens of one pass: inputs [t, L, D]."""
        nonlocal done
        part = slice(done, done + len(inputs))
        for predictor in predictors:
            for layer in range(trace.layers - 1):  # nothing comes after the last
                claims = predictor.over_text(layer, inputs[:, layer], previous[part])
                for array, found in zip(said[predictor.kind], names(claims, a.names, predictor.top_k), strict=True):
                    array[part, layer] = found
        done += len(inputs)

    listen(attachment, ask)
    losses(model, text.documents, **options)
    said = {"oracle": from_trace(routing.chosen, routing.chosen_scores, a.names)} | said
    cells = []
    for kind, (ids, claims) in said.items():
        about = facts | {"predictor": kind, "text": text.id, "text_sha256": text.sha256}
        path = a.out / kind / f"{text.id}.safetensors"
        save_predictions(path, ids, claims, experts=trace.experts, provenance=about)
        for cell in count_text(ids, routing.chosen, missed, text.scored):
            cells.append({"predictor": kind, "text": text.id, "topic": text.topic} | cell)
    return cells


def nothing(tokens: int, layers: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    shape = (tokens, layers, HORIZONS, number)
    return np.full(shape, -1, np.int16), np.zeros(shape, np.float16)


if __name__ == "__main__":
    main_guard(main)
