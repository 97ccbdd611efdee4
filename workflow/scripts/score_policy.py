"""Score one policy by perplexity: a cell for every slot budget and text, failed cells with their reason.

A policy that always fetches is replayed over the recorded traces, without the model; any other runs in the emulator.
A job that was killed ATTEMPTS times, out of memory or of time, is tried no more: all its cells failed, with that
reason, and the rest is drawn without them.
"""

import argparse
import dataclasses
import functools
from pathlib import Path

from safetensors.numpy import save_file

from engine.cluster import ATTEMPTS
from engine.errors import main_guard
from engine.files import atomic, write_json
from engine.policies import find_policy, load_policies
from engine.residency import slots_from_percent
from evals.jobs import Progress, load_calibration, load_model, load_texts, load_tokenizer, provenance
from evals.parallel import ahead
from evals.perplexity import context_of
from evals.quality import cells, emulate, load_routing, open_recording, record_of, replay_cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="id, for the record")
    parser.add_argument("--model-dir", required=True, help="folder in Hugging Face layout, or hub id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--policy", required=True)
    parser.add_argument("--policies", required=True, help="the sheet")
    parser.add_argument("--texts", nargs="+", required=True, help="resolved texts")
    parser.add_argument("--documents", type=int, help="the first documents of each text alone")
    parser.add_argument("--slots", nargs="+", required=True, help="id=percent ...")
    parser.add_argument("--demand", required=True)
    parser.add_argument("--traces", required=True, type=Path, help="folder of record_routing.py")
    parser.add_argument("--delay", type=int, default=1, help="tokens until a background load completes")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--attempt", type=int, default=1, help=f"of the job; after {ATTEMPTS} nothing is run")
    parser.add_argument("--out-losses", required=True)
    parser.add_argument("--out-decisions", required=True, help="folder")
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    policy = find_policy(load_policies(a.policies), a.policy)
    slot_percents = {name: float(percent) for name, _, percent in (pair.partition("=") for pair in a.slots)}
    tokenizer, bos = load_tokenizer(a.model_dir)
    texts = load_texts(a.texts, tokenizer, bos, a.documents)
    demand, model = load_calibration(a.demand, a.model_dir)
    traces = {t.id: open_recording(a.traces / f"{t.id}.safetensors", t, model) for t in texts}
    recorded = traces[texts[0].id].provenance

    arrays: dict = {}

    def keep(slots_id, text, loss, log) -> None:
        arrays[f"{slots_id}/{text.id}"] = loss
        facts = {"model": model, "policy": policy.id, "slots": slots_id, "text": text.id, "text_sha256": text.sha256}
        dataclasses.replace(log, provenance=facts).save(f"{a.out_decisions}/{slots_id}/{text.id}.safetensors")

    Path(a.out_decisions).mkdir(parents=True, exist_ok=True)  # there even if every cell fails
    if a.attempt > ATTEMPTS:
        score_rule, context = recorded["score_rule"], recorded["context"]
        rows = cells(policy, texts, slot_percents, experts=demand.counts.shape[1], run=_lost, keep=keep)
    elif policy.lossless:
        score_rule, context = recorded["score_rule"], recorded["context"]
        routings = {name: load_routing(trace) for name, trace in traces.items()}
        rows = cells(
            policy,
            texts,
            slot_percents,
            experts=demand.counts.shape[1],
            run=lambda text, slots: replay_cell(policy, routings[text.id], slots=slots, demand=demand),
            keep=keep,
        )
    else:
        rows, score_rule, context = _emulate_all(a, policy, texts, slot_percents, demand, bos, keep)

    with atomic(a.out_losses) as temporary:
        save_file(arrays, temporary)
    facts = provenance(model=model, score_rule=score_rule, context=context, threads=a.threads, dtype=a.dtype)
    record = record_of(
        policy,
        texts,
        rows,
        model=a.model,
        delay=a.delay,
        provenance=facts,
        experts=demand.counts.shape[1],
        expert_bytes=int(recorded["expert_bytes"]),
        losses=a.out_losses,
    )
    write_json(a.out, record)


def _lost(text, slots):
    raise RuntimeError(f"the job ended {ATTEMPTS} times before it was done; .snakemake/slurm_logs say how")


def _emulate_all(a, policy, texts, slot_percents, demand, bos, keep):
    """All cells of a lossy policy: one model, one attachment."""
    from engine.hook import attach

    model = load_model(a.model_dir, a.dtype, 1)  # evals/parallel.py has the others
    context = context_of(model, a.context)
    progress = Progress(f"score {policy.id}", len(slot_percents) * sum(sum(t.scored) for t in texts))
    with attach(model) as attachment:
        experts = attachment.experts
        options = {"demand": demand, "delay": a.delay, "context": context, "bos": bos, "progress": progress.advance}
        work = [
            functools.partial(emulate, model, attachment, policy, text, slots=slots, **options)
            for slots in (slots_from_percent(experts, percent) for percent in slot_percents.values())
            for text in texts
        ]
        with ahead(work, a.threads) as results:
            cell = iter(results)  # in the order in which `cells` asks
            rows = cells(policy, texts, slot_percents, experts=experts, run=lambda *_: next(cell)(), keep=keep)
        return rows, attachment.rule_name, context


if __name__ == "__main__":
    main_guard(main)
