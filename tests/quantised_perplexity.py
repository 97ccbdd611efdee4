"""What do 4 and 8 bits cost a model? Token perplexity of packed stores, over that of the first, on the same tokens.

    python -m engine.inflate --model FOLDER --width 1024 --expert-width 1024 --out inflated
    python -m engine.offload pack --model inflated --out plain
    python -m engine.offload pack --model inflated --out few --bits 4 --group 64
    python tests/quantised_perplexity.py plain few

The text is CPython's own help (`pydoc_data.topics`), because everybody has it. Losses are those of the same positions,
windows do not overlap, and the last line is JSON. Run with PYTHONPATH=.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math

import numpy as np
import torch
from pydoc_data.topics import topics

from engine.errors import main_guard
from evals.jobs import load_model, load_tokenizer
from evals.perplexity import losses, tokenize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stores", nargs="+", help="packed stores, the first is the reference")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    a = parser.parse_args()
    tokenizer, bos = load_tokenizer(a.stores[0])
    text = "\n".join(topics[name] for name in sorted(topics))[: 8 * a.tokens]
    (whole,) = tokenize(tokenizer, [("topics", text)])
    document = dataclasses.replace(whole, ids=whole.ids[: a.tokens])
    found: dict[str, np.ndarray] = {}
    for store in a.stores:
        with torch.inference_mode():
            model = load_model(store, "auto", a.threads)
            found[store] = losses(model, [document], context=a.context, bos=bos)
        del model  # before the next is read
    results = {}
    for store, loss in found.items():
        ratio = math.exp(float(loss.mean() - found[a.stores[0]].mean()))
        results[store] = {"tokens": len(loss), "token_perplexity": math.exp(float(loss.mean())), "ratio": ratio}
        print(f"{store}: token perplexity {results[store]['token_perplexity']:.3f}, {ratio - 1:+.2%}")
    print(json.dumps(results))


if __name__ == "__main__":
    main_guard(main)
