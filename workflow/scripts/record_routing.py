"""Run the stock model once over the test texts: a router trace of each, with all scores and the exact losses.

All policies that always fetch are replayed over these files; their losses are the baseline of all others. The schema is
public: docs/router_traces.md.
"""

import argparse
from functools import partial
from pathlib import Path

from engine.errors import main_guard
from engine.hook import attach
from engine.hub import commit_of
from evals.jobs import Progress, expert_bytes, load_model, load_texts, load_tokenizer, model_hash, provenance
from evals.parallel import ahead
from evals.perplexity import context_of
from evals.quality import record_trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="id, for the provenance")
    parser.add_argument("--model-dir", required=True, help="folder in Hugging Face layout, or hub id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--texts", nargs="+", required=True, help="resolved texts")
    parser.add_argument("--documents", type=int, help="the first documents of each text alone")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", required=True, type=Path, help="folder: <text>.safetensors of each")
    a = parser.parse_args()
    tokenizer, bos = load_tokenizer(a.model_dir)
    texts = load_texts(a.texts, tokenizer, bos, a.documents)
    model = load_model(a.model_dir, a.dtype, 1)  # evals/parallel.py has the others
    progress = Progress("record routing", sum(sum(t.scored) for t in texts))
    with attach(model) as attachment:
        context = context_of(model, a.context)
        facts = provenance(
            model=a.model,
            model_hash=model_hash(a.model_dir),
            revision=commit_of(a.model_dir) or "-",
            dtype=a.dtype,
            context=context,
            expert_bytes=expert_bytes(attachment),
        )
        options = {"context": context, "bos": bos, "progress": progress.advance}
        paths = [a.out / f"{text.id}.safetensors" for text in texts]
        work = [
            partial(record_trace, model, attachment, text, path, facts, **options)
            for text, path in zip(texts, paths, strict=True)
        ]
        with ahead(work, a.threads) as results:
            for written in results:
                written()


if __name__ == "__main__":
    main_guard(main)
