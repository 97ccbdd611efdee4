"""What do 4 and 8 bits cost a model? Token perplexity of packed stores, over that of the first, on the same tokens.

    python -m engine.inflate --model results/models/reference --width 1024 --expert-width 1024 --out inflated
    python -m engine.offload pack --model inflated --out plain
    python -m engine.offload pack --model inflated --out few --bits 4 --group 64
    PYTHONPATH=. python tests/quantised_perplexity.py plain few --texts results/texts/*_calibration.json

No test text is looked at before a claim is drawn from it: calibration texts serve. Windows do not overlap; the last
line is JSON. Experts are dequantised into memory (engine.offload_model, fill), 6.5 GB here.
"""

from __future__ import annotations

import argparse
import json
import math

import numpy as np
import torch

from engine.errors import main_guard
from evals.jobs import Progress, load_model, load_texts, load_tokenizer, model_hash
from evals.perplexity import losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stores", nargs="+", help="packed stores, the first is the reference")
    parser.add_argument("--texts", nargs="+", required=True, help="resolved texts")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    a = parser.parse_args()
    tokenizer, bos = load_tokenizer(a.stores[0])
    texts = load_texts(a.texts, tokenizer, bos)
    found: dict[str, np.ndarray] = {}  # [texts]: losses summed
    counts = [sum(text.scored) for text in texts]
    for store in a.stores:
        model = load_model(store, "auto", a.threads)
        progress = Progress(store, sum(counts))
        options = {"context": a.context, "bos": bos, "progress": progress.advance}
        found[store] = np.array([losses(model, text.documents, **options).sum(dtype=float) for text in texts])
        del model  # before the next is read
    reference, results = found[a.stores[0]], {}
    for store, sums in found.items():
        shares = np.expm1((sums - reference) / counts).tolist()
        by_text = {text.id: share for text, share in zip(texts, shares, strict=True)}
        perplexity = math.exp(sums.sum() / sum(counts))
        more = math.expm1((sums.sum() - reference.sum()) / sum(counts))
        results[store] = {"model": model_hash(store), "token_perplexity": perplexity, "more": more, "by_text": by_text}
        said = ", ".join(f"{name} {share:+.2%}" for name, share in by_text.items())
        print(f"{store}: token perplexity {perplexity:.3f}, {more:+.2%} ({said})")
    print(json.dumps({"tokens": sum(counts), "stores": results}))


if __name__ == "__main__":
    main_guard(main)
