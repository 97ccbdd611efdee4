"""Train what foretells the next layers' experts, on calibration text: adapter, multilayer predictor, transitions.

A file each, and README.md beside them: what they are, how they were trained, how well they foretell documents that they
were not trained on. evals/predictor_training.py has the method.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import numpy as np

from engine.errors import main_guard
from engine.files import write_text
from engine.hook import attach
from engine.predictors import multiply_adds, names, of_arrays, pairs, parameters, save_predictor
from engine.routers import routers_of
from evals.jobs import Progress, load_model, load_texts, load_tokenizer, model_hash, provenance
from evals.parallel import ahead
from evals.perplexity import context_of
from evals.predictor_recall import count_text
from evals.predictor_training import (
    BATCH,
    CLIP,
    EPOCHS,
    HELD_OUT,
    INITIAL_SEED,
    LEARNING_RATE,
    MLP_LEARNING_RATE,
    ORDER_SEED,
    SMOOTHING,
    WEIGHTS,
    Recorded,
    Trained,
    count_following,
    join,
    record,
    train,
)

KINDS = ("gate_replay", "markov", "mlp", "spec_prefetch")  # of the card


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="id, for the card")
    parser.add_argument("--model-dir", required=True, help="folder in Hugging Face layout, or hub id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--texts", nargs="+", required=True, help="resolved texts of role calibration")
    parser.add_argument("--documents", type=int, help="the first documents of each text alone")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rank", type=int, default=64, help="of the adapter")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--out", required=True, type=Path, help="folder")
    a = parser.parse_args()
    tokenizer, bos = load_tokenizer(a.model_dir)
    texts = load_texts(a.texts, tokenizer, bos, a.documents)
    model = load_model(a.model_dir, a.dtype, 1)  # evals/parallel.py has the others
    tokens = sum(sum(t.scored) for t in texts)
    with attach(model) as attachment:
        routers, sigmoid = routers_of(attachment), attachment.sigmoid
        context = context_of(model, a.context)
        progress = Progress("record router inputs", tokens)
        options = {"context": context, "bos": bos, "progress": progress.advance}
        with ahead([partial(record, model, attachment, text, **options) for text in texts], a.threads) as results:
            data = join([result() for result in results])
        progress = Progress("train predictors, at most", int((~data.held).sum()) * sum(EPOCHS.values()))
        rates = {"mlp": MLP_LEARNING_RATE, "spec_prefetch": a.learning_rate}
        options = {"rank": a.rank, "progress": progress.advance}
        work = [partial(train, kind, data, routers, sigmoid, learning_rate=rates[kind], **options) for kind in EPOCHS]
        with ahead(work, a.threads) as results:
            trained = {kind: result() for kind, result in zip(EPOCHS, results, strict=True)}
        arrays = {kind: one.arrays for kind, one in trained.items()} | {"markov": {"following": count_following(data)}}
        predictors = {kind: of_arrays(kind, attachment, arrays.get(kind)) for kind in KINDS}
        recalls = {kind: recall_by_pair(predictor, data) for kind, predictor in predictors.items()}
    facts = provenance(
        model=a.model,
        model_hash=model_hash(a.model_dir),
        score_rule=attachment.rule_name,
        context=context,
        texts=json.dumps({t.id: t.sha256 for t in texts}),
        tokens=tokens,
        held_out_tokens=int(data.held.sum()),
        held_out=f"cluster 2 of every {HELD_OUT} of a text",
    )
    recipe = {"clip": CLIP, "weights": json.dumps(WEIGHTS)}
    recipe |= {"initial_seed": INITIAL_SEED, "order_seed": ORDER_SEED}
    for kind, own in arrays.items():
        how = {"smoothing": SMOOTHING}
        if kind in trained:
            how = recipe | {"learning_rate": rates[kind], "batch": BATCH[kind]}
            how |= {"epochs": trained[kind].epochs, "rank": a.rank if kind == "spec_prefetch" else "-"}
        save_predictor(a.out / f"{kind}.safetensors", kind, own, facts | how)
    write_text(a.out / "README.md", card(facts, recipe, rates, trained, recalls, data, a.rank))


def recall_by_pair(predictor, data: Recorded) -> list[float]:
    """Recall at K on the documents held out, by pair."""
    import torch

    chosen, x = data.chosen[data.held], torch.from_numpy(data.inputs[data.held])
    previous = data.previous[data.held]
    ids = np.stack(
        [
            names(predictor.over_text(layer, x[:, layer], previous), predictor.top_k)[0]
            for layer in range(predictor.layers)
        ],
        axis=1,
    )  # [T, L, H, K]
    counts = count_text(ids, chosen, np.zeros_like(chosen, bool), [len(chosen)])
    return [c["found"][0] / (predictor.top_k * c["events"][0]) for c in counts]


def card(
    facts: dict[str, str],
    recipe: dict,
    rates: dict[str, float],
    trained: dict[str, Trained],
    recalls: dict[str, list[float]],
    data: Recorded,
    rank: int,
) -> str:
    layers, width, experts, top_k = *data.inputs.shape[1:], data.logits.shape[2], data.chosen.shape[2]
    sizes = {
        kind: (parameters(kind, layers, width, experts, rank), multiply_adds(kind, layers, width, experts, top_k))
        for kind in KINDS
    }
    lines = [
        f"# Predictors of {facts['model']}",
        "",
        f"Weights {facts['model_hash']}: L = {layers} layers of E = {experts} experts, K = {top_k} a token, width "
        f"D = {width}, score rule {facts['score_rule']}. Anchor layer l speaks of layers l + 1 and l + 2 of the same "
        "token; what each predictor is stands in engine/predictors.py.",
        "",
        f"Trained on {int((~data.held).sum()):,} tokens of the calibration texts "
        f"{', '.join(json.loads(facts['texts']))}; {int(data.held.sum()):,} tokens of other documents "
        f"({facts['held_out']}) chose the epoch, and the numbers "
        "below are theirs. No test text was read.",
        "",
        f"AdamW with torch's other settings, gradients clipped to {recipe['clip']:g}, horizons weighted "
        f"{recipe['weights']}, rank {rank}, seeds {recipe['initial_seed']} (first weights) and "
        f"{recipe['order_seed']} (order). Transitions are "
        f"smoothed by {SMOOTHING:g} events of the marginal. "
        + " ".join(_epochs(kind, one, rates[kind]) for kind, one in trained.items()),
        "",
        "| predictor | parameters | multiply-adds a token |",
        "|---|---|---|",
        *(f"| {kind} | {own:,} | {adds:,} |" for kind, (own, adds) in sizes.items()),
        "",
        "Recall at K: of the K experts a layer chose, the share among the K that were named; KL in nats of the loss.",
        "",
        f"| anchor | horizon | {' | '.join(f'recall of {kind}' for kind in KINDS)} | KL of gate_replay | "
        + " | ".join(f"KL of {kind}" for kind in trained)
        + " |",
        "|" + "---|" * (3 + len(KINDS) + len(trained)),
    ]
    for i, (anchor, horizon) in enumerate(pairs(layers)):
        found = [f"{recalls[kind][i]:.4f}" for kind in KINDS]
        found += [f"{trained['spec_prefetch'].before[i]:.4f}", *(f"{one.after[i]:.4f}" for one in trained.values())]
        lines.append(f"| {anchor} | {horizon} | {' | '.join(found)} |")
    return "\n".join(lines) + "\n"


def _epochs(kind: str, one: Trained, rate: float) -> str:
    how = f"learning rate {rate:g}, {BATCH[kind]} tokens a step"
    return f"{kind}: {how}, epoch {one.epochs} of {one.tried} is kept, at most {EPOCHS[kind]} are tried."


if __name__ == "__main__":
    main_guard(main)
