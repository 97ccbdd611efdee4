"""Run the stock model once over the test texts: exact losses and what every layer chose.

All policies that always fetch are replayed over this file; its losses are the baseline of all others.
"""

import argparse

from engine.errors import main_guard
from engine.hook import attach
from evals.jobs import Progress, expert_bytes, load_model, load_texts, load_tokenizer, model_hash, provenance
from evals.perplexity import context_of
from evals.quality import record_routing, save_routing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-dir", required=True, help="folder in Hugging Face layout, or hub id")
    parser.add_argument("--revision")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--texts", nargs="+", required=True, help="resolved texts")
    parser.add_argument("--documents", type=int, help="the first documents of each text alone")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    tokenizer, bos = load_tokenizer(a.model_dir, a.revision)
    texts = load_texts(a.texts, tokenizer, bos, a.documents)
    model = load_model(a.model_dir, a.dtype, a.threads, a.revision)
    progress = Progress("record routing", sum(sum(t.scored) for t in texts))
    with attach(model) as attachment:
        context = context_of(model, a.context)
        routings = {
            t.id: record_routing(model, attachment, t, context=context, bos=bos, progress=progress.advance)
            for t in texts
        }
        facts = provenance(
            model=model_hash(a.model_dir),
            score_rule=attachment.rule_name,
            context=context,
            expert_bytes=expert_bytes(attachment),
        )
    save_routing(a.out, routings, facts | {f"sha256/{t.id}": t.sha256 for t in texts})


if __name__ == "__main__":
    main_guard(main)
