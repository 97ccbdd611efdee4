"""Calibrate a model on calibration text: the demand of its experts and the better combine weight of stand-ins.

Demand is what every policy's warm start is made of. The two combine weights (`own`, `missing`) are compared under the
0.15 rule with a quarter of the experts resident (or K, where that is more); the record says which loses less and
whether the sheet uses it.
"""

import argparse
import dataclasses

from engine.errors import main_guard
from engine.files import write_json
from engine.hook import attach
from engine.policies import COLUMNS, load_policies, parse_row
from engine.residency import Demand, slots_from_percent
from evals.jobs import Progress, load_model, load_texts, load_tokenizer, model_hash, provenance
from evals.perplexity import context_of
from evals.quality import emulate, paired_interval, record_routing, router_statistics, save_demand

ABLATED = "rule_015"
# the row that the weights are compared under, whatever stands in the sheet: a sheet need not have it
CELLS = {"miss_rule": "threshold", "tau": "0.15", "standin": "next_best", "standin_weight": "own"}
CELLS |= {"standin_recency": "yes", "eviction": "lfu_decay", "half_life_tokens": "128"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-dir", required=True, help="folder in Hugging Face layout, or hub id")
    parser.add_argument("--revision")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--texts", nargs="+", required=True, help="resolved texts of role calibration")
    parser.add_argument("--documents", type=int, help="the first documents of each text alone")
    parser.add_argument("--policies", required=True, help="the sheet")
    parser.add_argument("--slots-percent", type=float, default=25.0)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out-demand", required=True)
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    tokenizer, bos = load_tokenizer(a.model_dir, a.revision)
    texts = load_texts(a.texts, tokenizer, bos, a.documents)
    model = load_model(a.model_dir, a.dtype, a.threads, a.revision)
    tokens = sum(sum(t.scored) for t in texts)
    progress = Progress("calibrate", 3 * tokens)
    rule = parse_row({column: CELLS.get(column, "-") for column in COLUMNS} | {"id": ABLATED}, ABLATED)
    of_sheet = load_policies(a.policies).get(ABLATED)
    with attach(model) as attachment:
        options = {"context": context_of(model, a.context), "bos": bos, "progress": progress.advance}
        exact = {t.id: record_routing(model, attachment, t, **options) for t in texts}
        demands = [routing.trace.demand() for routing in exact.values()]
        demand = Demand(sum(d.counts for d in demands), sum(d.events for d in demands))
        slots = max(slots_from_percent(attachment.experts, a.slots_percent), attachment.top_k)
        compared = {}
        for weight in ("own", "missing"):
            policy = dataclasses.replace(rule, standin_weight=weight)
            scored = []
            for t in texts:
                loss, _ = emulate(model, attachment, policy, t, slots=slots, demand=demand, delay=1, **options)
                scored.append((t.topic, t.clusters, loss, exact[t.id].losses))
            compared[weight] = dataclasses.asdict(paired_interval(scored))
        facts = provenance(model=model_hash(a.model_dir), score_rule=attachment.rule_name, context=options["context"])
    better = min(compared, key=lambda weight: compared[weight]["estimate"])
    record = {
        "provenance": facts,
        "texts": {t.id: t.sha256 for t in texts},
        "events": demand.events,
        "router": router_statistics(exact.values()),
        "standin_weight": {
            "policy": ABLATED,
            "slots_percent": a.slots_percent,
            "slots_count": slots,
            "delta_nll": compared,
            "better": better,
            "sheet": of_sheet.standin_weight if of_sheet else None,
        },
    }
    save_demand(a.out_demand, demand, facts)
    write_json(a.out, record)


if __name__ == "__main__":
    main_guard(main)
