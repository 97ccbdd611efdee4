"""Calibrate a model: how often calibration text chooses each expert, which every policy's warm start is made of."""

import argparse
from functools import partial

from engine.demand import save_demand
from engine.errors import main_guard
from engine.files import write_json
from engine.hook import attach
from engine.residency import Demand
from evals.jobs import Progress, load_model, load_texts, load_tokenizer, model_hash, provenance
from evals.parallel import ahead
from evals.perplexity import context_of
from evals.quality import record_routing, router_statistics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-dir", required=True, help="folder in Hugging Face layout, or hub id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--texts", nargs="+", required=True, help="resolved texts of role calibration")
    parser.add_argument("--documents", type=int, help="the first documents of each text alone")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out-demand", required=True)
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    tokenizer, bos = load_tokenizer(a.model_dir)
    texts = load_texts(a.texts, tokenizer, bos, a.documents)
    model = load_model(a.model_dir, a.dtype, 1)  # evals/parallel.py has the others
    progress = Progress("calibrate", sum(sum(t.scored) for t in texts))
    with attach(model) as attachment:
        context = context_of(model, a.context)
        options = {"context": context, "bos": bos, "progress": progress.advance}
        with ahead([partial(record_routing, model, attachment, text, **options) for text in texts], a.threads) as found:
            exact = [result() for result in found]
        facts = provenance(model=model_hash(a.model_dir), score_rule=attachment.rule_name, context=context)
    demands = [routing.trace.demand() for routing in exact]
    demand = Demand(sum(d.counts for d in demands), sum(d.events for d in demands))
    record = {
        "provenance": facts,
        "texts": {t.id: t.sha256 for t in texts},
        "events": demand.events,
        "router": router_statistics(exact),
    }
    save_demand(a.out_demand, demand, facts)
    write_json(a.out, record)


if __name__ == "__main__":
    main_guard(main)
