"""Score a sheet of policies over one stream whose topic changes after every document, each from the warm start.

The documents of all texts in turn, each cut to its first tokens, go through the emulator once a policy, the state
carried on; losses, counts and masses are kept text by text. A policy that fails keeps its reason, the rest goes on.

    <out>/<policy>.json           a record as score_policy.py writes it, one slot budget
    <out>/<policy>.safetensors    by `<slots>/<text>`: losses [T]; `.../hits` [T] of all layers; `.../mass` [T], mean
"""

import argparse
import functools
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from engine.decision import HIT
from engine.errors import main_guard
from engine.files import atomic, write_json
from engine.hook import attach
from engine.policies import load_policies
from evals.jobs import (
    Progress,
    expert_bytes,
    load_calibration,
    load_model,
    load_texts,
    load_tokenizer,
    provenance,
)
from evals.parallel import ahead
from evals.perplexity import context_of
from evals.quality import cells, emulate, mass_by_token, record_of
from evals.stream import cut, text_by_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="id, for the record")
    parser.add_argument("--model-dir", required=True, help="folder in Hugging Face layout, or hub id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--policies", required=True, help="the sheet: every row is scored")
    parser.add_argument("--texts", nargs="+", required=True, help="resolved texts")
    parser.add_argument("--documents", type=int, help="the first documents of each text alone")
    parser.add_argument("--tokens", type=int, required=True, help="the first of every document")
    parser.add_argument("--slots", required=True, help="id=percent")
    parser.add_argument("--demand", required=True)
    parser.add_argument("--delay", type=int, default=1, help="tokens until a background load completes")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", required=True, type=Path, help="folder")
    a = parser.parse_args()
    policies = load_policies(a.policies)
    slots_id, _, percent = a.slots.partition("=")
    tokenizer, bos = load_tokenizer(a.model_dir)
    texts = load_texts(a.texts, tokenizer, bos, a.documents)
    texts = [cut(text, a.tokens, tokenizer, bos) for text in texts]
    demand, weights = load_calibration(a.demand, a.model_dir)
    model = load_model(a.model_dir, a.dtype, 1)  # evals/parallel.py has the others
    context = context_of(model, a.context)
    progress = Progress("score sweep", len(policies) * sum(sum(text.scored) for text in texts))
    with attach(model) as attachment:
        facts = {"model": weights, "score_rule": attachment.rule_name, "context": context, "threads": a.threads}
        facts = provenance(**facts, dtype=a.dtype)
        options = {"demand": demand, "delay": a.delay, "context": context, "bos": bos, "progress": progress.advance}
        percents = {slots_id: float(percent)}
        work = [
            functools.partial(
                score,
                one,
                texts,
                percents,
                attachment.experts,
                functools.partial(emulate, model, attachment, one, **options),
            )
            for one in policies.values()
        ]
        with ahead(work, a.threads) as results:
            for policy, result in zip(policies.values(), results, strict=True):
                rows, arrays = result()
                losses = a.out / f"{policy.id}.safetensors"
                with atomic(losses) as temporary:
                    save_file(arrays, temporary)
                record = record_of(
                    policy,
                    texts,
                    rows,
                    model=a.model,
                    delay=a.delay,
                    provenance=facts,
                    experts=attachment.experts,
                    expert_bytes=expert_bytes(attachment),
                    losses=losses,
                )
                order = {"order": "documents of the texts in turn", "first_tokens": a.tokens}
                write_json(a.out / f"{policy.id}.json", record | order)


def score(policy, texts, slot_percents, experts, run) -> tuple[list[dict], dict[str, np.ndarray]]:
    """Cells of one policy, and the arrays that go beside them. run(stream, slots=): one run over all texts."""
    arrays = {}

    def keep(slots_id, text, loss, log) -> None:
        key = f"{slots_id}/{text.id}"
        hits = (log.kind == HIT).sum(axis=(1, 2), dtype=np.int16)
        arrays.update({key: loss, f"{key}/hits": hits, f"{key}/mass": mass_by_token(log).astype(np.float32)})

    part = text_by_text(texts, lambda stream, slots: run(stream, slots=slots))
    return cells(policy, texts, slot_percents, experts=experts, run=part, keep=keep), arrays


if __name__ == "__main__":
    main_guard(main)
