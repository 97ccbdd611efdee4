"""The fitness gate of a model, on calibration text: a record and a page. A model that fails decides no claim."""

import argparse

from engine.demand import load_demand
from engine.errors import main_guard
from engine.files import write_json, write_text
from engine.hook import attach
from engine.policies import BASELINE, BUNDLES, find_policy, load_policies
from evals.fitness import gate
from evals.jobs import Progress, load_model, load_texts, load_tokenizer, model_hash, provenance
from evals.perplexity import context_of


def page(model: str, record: dict) -> str:
    """The record as Markdown."""
    verdict = "is fit to decide claims" if record["fit"] else "is refused: it decides no claim"
    lines = [
        f"# Fitness of {model}",
        "",
        f"{model} {verdict}. {record['slots']} slots a layer ({record['slots_percent']:g} %), calibration text, "
        f"{record['events']:,} events.",
        "",
        "| check | found | wanted | passed |",
        "|---|---|---|---|",
    ]
    for check in record["checks"]:
        found = "-" if check["value"] is None else f"{check['value']:.4g}"
        if check.get("low") is not None:
            found += f" ({check['low']:.4g} to {check['high']:.4g})"
        lines.append(f"| {check['name']} | {found} | {check['wanted']} | {'yes' if check['passed'] else 'no'} |")
    lines += [
        "",
        f"First-choice weight by layer: {', '.join(map(str, record['first_choice_weight_by_layer']))}. "
        f"Choices with weight from 0.15 by layer: {', '.join(map(str, record['weights_from_0_15_by_layer']))}.",
        "",
        "| policy | loss, % perplexity | interval |",
        "|---|---|---|",
    ]
    lines += [f"| {policy} | {in_words(loss)} |" for policy, loss in record["loss_percent"].items()]
    if weight := record["standin_weight"]:
        lines += [
            "",
            f"Combine weight of stand-ins under {weight['policy']}; better: {weight['better']}; the sheet uses "
            f"{weight['sheet']}.",
            "",
            "| weight | loss, % perplexity | interval |",
            "|---|---|---|",
            *(f"| {name} | {in_words(loss)} |" for name, loss in weight["loss_percent"].items()),
        ]
    lines += ["", "| two bundles | share of events in which they differ |", "|---|---|"]
    lines += [f"| {pair} | {share:.4f} |" for pair, share in record["events_that_differ"].items()]
    return "\n".join(lines) + "\n"


def in_words(loss: dict) -> str:
    """Estimate and interval, two cells of a row."""
    interval = "none" if loss["low"] is None else f"{loss['low']:+.2f} to {loss['high']:+.2f}"
    return f"{loss['estimate']:+.2f} | {interval}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="id, for the page")
    parser.add_argument("--model-dir", required=True, help="folder in Hugging Face layout, or hub id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--texts", nargs="+", required=True, help="resolved texts of role calibration")
    parser.add_argument("--documents", type=int, help="the first documents of each text alone")
    parser.add_argument("--policies", required=True, help="the sheet")
    parser.add_argument("--demand", required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", required=True, help="record; the page lies beside it")
    parser.add_argument("--out-page", required=True)
    a = parser.parse_args()
    tokenizer, bos = load_tokenizer(a.model_dir)
    texts = load_texts(a.texts, tokenizer, bos, a.documents)
    sheet = load_policies(a.policies)
    find_policy(sheet, BASELINE)
    policies = {name: policy for name, policy in sheet.items() if name in BUNDLES}
    model = load_model(a.model_dir, a.dtype, 1)  # evals/parallel.py has the others
    passes = 3 + sum(not policy.lossless for policy in policies.values())
    progress = Progress(f"gate {a.model}", passes * sum(sum(t.scored) for t in texts))
    with attach(model) as attachment:
        context = context_of(model, a.context)
        options = {"context": context, "bos": bos, "progress": progress.advance}
        demand = load_demand(a.demand)
        record = gate(model, attachment, policies, texts, demand, threads=a.threads, **options)
    record["model"] = a.model
    record["provenance"] = provenance(model=model_hash(a.model_dir), context=context, threads=a.threads)
    write_json(a.out, record)
    write_text(a.out_page, page(a.model, record))
    print(f"{a.model}: {'fit' if record['fit'] else 'refused'}")


if __name__ == "__main__":
    main_guard(main)
