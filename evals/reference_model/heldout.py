"""Loss on held-out documents by topic, during training: calibration texts, never test texts.

Documents are scored alone, from BOS, in windows of the training length; bits a byte divides by the bytes of
the scored text. For word problems the templates of the training texts with new numbers are scored too, under a
name that says so: they are not held out.
"""

from __future__ import annotations

import math

import numpy as np

from evals.reference_model.data import BOS
from evals.reference_model.model import Step

PER_TOPIC = 16
DOCUMENT_BYTES = 6000
SEEN = "seen templates, new numbers"
SEEN_SEED, SEEN_PROBLEMS, SEEN_BYTES = 90_210, 64, 2850


def load_documents(per_topic: int = PER_TOPIC) -> dict[str, list[str]]:
    """A few calibration documents of each topic, the first of each text, cut at DOCUMENT_BYTES."""
    from evals import corpora

    found: dict[str, list[str]] = {}
    for corpus_id in corpora.available(role="calibration"):
        try:
            corpus = corpora.load(corpus_id)
        except corpora.AbsentText:
            continue
        mine = found.setdefault(corpus.topic, [])
        mine += [document.text[:DOCUMENT_BYTES] for document in corpus.documents[:per_topic]]
    return found | seen_templates(per_topic)


def seen_templates(per_topic: int = PER_TOPIC) -> dict[str, list[str]]:
    """Word problems of the training templates, drawn with another seed, in documents like the asked ones."""
    from evals import corpora
    from evals.corpus_makers import pack

    found = {}
    for corpus_id in ("train_gsm_symbolic", "train_word_problems"):
        try:
            units, _ = corpora.units_of(corpus_id, changed={"seed": SEEN_SEED, "count": SEEN_PROBLEMS})
        except corpora.AbsentText:
            continue
        documents = [text for _, text in pack(units, SEEN_BYTES, "\n\n")]
        found[f"{corpora.row_of(corpus_id)['topic']} ({SEEN})"] = documents[:per_topic]
    return found


def evaluate(step: Step, tokenizer, documents: dict[str, list[str]], batch: int) -> dict[str, dict[str, float]]:
    """{topic: {nats_per_token, bits_per_byte, tokens}}; a document longer than the window is cut there."""
    window, result = step.shape.context, {}
    for topic, texts in documents.items():
        nats = tokens = size = 0
        encoded = [tokenizer.encode(text) for text in texts]
        encoded.sort(key=lambda encoding: len(encoding.ids))
        for first in range(0, len(encoded), batch):
            group = [encoding.ids[:window] for encoding in encoded[first : first + batch]]
            longest = max(map(len, group))
            rows = np.full((len(group), longest + 1), BOS, np.int64)
            for row, ids in zip(rows, group, strict=True):
                row[1 : len(ids) + 1] = ids
            losses = step.losses(rows).numpy()
            for line, ids in zip(losses, group, strict=True):
                nats += float(line[: len(ids)].sum())
                tokens += len(ids)
                size += len(tokenizer.decode(ids).encode())
        result[topic] = {
            "nats_per_token": round(nats / tokens, 4),
            "bits_per_byte": round(nats / math.log(2) / size, 4),
            "tokens": tokens,
        }
    return result
