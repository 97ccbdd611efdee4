"""Quality of policies by perplexity: exact routing once, then a cell for every (policy, slots, text).

A cell is one policy at one slot budget over one text, from the warm start, with `stream` continuity: the documents in
their order, the state carried on. Policies that always fetch are replayed over the recorded trace, whose losses are
theirs too; the others run in the emulator. A cell that fails keeps its reason and lets the rest go on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from engine.decision import SUBSTITUTE
from engine.emulator import Emulator
from engine.errors import UserError, error
from engine.files import sha256
from engine.log import DecisionLog, count
from engine.policies import OPTIONAL, Policy
from engine.residency import Demand, slots_from_percent
from engine.trace import Recorder, RouterTrace, replay
from engine.trace_file import TraceFile, open_trace, trace_writer
from engine.trace_schema import EXACT, Document, documents_of
from evals.corpora import cluster
from evals.perplexity import TokenizedDocument, losses, perplexities
from evals.stats import Interval, paired_losses, paired_texts

# what can go wrong in one cell and leave the others sound: bad numbers, bad settings, out of memory
CELL_FAILURES = (UserError, ArithmeticError, MemoryError, RuntimeError)


@dataclass(frozen=True)
class Text:
    """A tokenised corpus. scored [documents]: tokens that have a loss, in the order of the losses."""

    id: str
    topic: str
    sha256: str
    documents: tuple[TokenizedDocument, ...]
    scored: tuple[int, ...]

    @property
    def clusters(self) -> list[tuple[str, int]]:
        """(cluster, scored tokens) of every document, as a record keeps it."""
        return [(cluster(d.id), n) for d, n in zip(self.documents, self.scored, strict=True)]

    @property
    def spans(self) -> list[Document]:
        """The documents as a trace of the text has them: an event a layer for every token that has a loss."""
        return documents_of((d.id, n) for d, n in zip(self.documents, self.scored, strict=True))


@dataclass(frozen=True)
class Routing:
    """What the model chose over one text under exact execution, without scores, and its losses [tokens] float32."""

    trace: RouterTrace
    losses: np.ndarray


def open_recording(path: str | Path, text: Text, model_hash: str) -> TraceFile:
    """A trace that `record_trace` wrote over this text with these weights. UserError on any other."""
    trace = open_trace(path)
    trace.check_model(model_hash=model_hash)
    missing = {"context", "expert_bytes"} - trace.provenance.keys()
    if missing or "losses" not in trace.places:
        found = f"{path}: a trace without {', '.join(sorted(missing)) or 'losses'}"
        raise error(found, "one that record_routing.py wrote", "record it")
    if trace.provenance.get("text_sha256") != text.sha256:
        raise error(f"{path}: {text.id} is another text", f"sha256 {text.sha256}", "record again")
    if trace.documents != text.spans:
        found = f"{path}: {trace.tokens} tokens in {len(trace.documents)} documents"
        raise error(found, f"the {sum(text.scored)} in {len(text.scored)} of {text.id}", "record again")
    return trace


def load_routing(trace: TraceFile) -> Routing:
    """Of a recording, all but its scores: a policy that always fetches reads no more."""
    return Routing(trace.read(scores=False), trace.losses())


# ---- scoring ---------------------------------------------------------------------------------------------------------
def record_routing(model, attachment, text: Text, *, context: int, bos: int | None, progress=None) -> Routing:
    """Run the stock model over a text and keep its routing, without scores."""
    recorder = Recorder(attachment)
    loss = losses(model, text.documents, context=context, bos=bos, progress=progress)
    return Routing(recorder.trace(), loss)


def record_trace(
    model,
    attachment,
    text: Text,
    path: str | Path,
    provenance: dict[str, str],
    *,
    context: int,
    bos: int | None,
    progress=None,
) -> None:
    """Run the stock model over a text and write its trace, with all scores and losses, window by window."""
    facts = {"policy": EXACT, "score_rule": attachment.rule_name, "text": text.id, "text_sha256": text.sha256}
    with trace_writer(path, text.spans, provenance | facts, losses=True) as writer:
        Recorder(attachment, writer.append, scores=True)
        writer.write_losses(losses(model, text.documents, context=context, bos=bos, progress=progress))


def emulate(
    model,
    attachment,
    policy: Policy,
    text: Text,
    *,
    slots: int,
    demand: Demand,
    delay: int,
    context: int,
    bos: int | None,
    progress: Callable[[int], None] | None = None,
) -> tuple[np.ndarray, DecisionLog]:
    """One lossy cell in the emulator: losses [tokens] and the decision log."""
    emulator = Emulator(attachment, policy, slots=slots, demand=demand, delay=delay)
    return run_emulator(model, emulator, text, context=context, bos=bos, progress=progress)


def run_emulator(
    model,
    emulator: Emulator,
    text: Text,
    *,
    context: int,
    bos: int | None,
    progress: Callable[[int], None] | None = None,
) -> tuple[np.ndarray, DecisionLog]:
    """A text through an emulator as it stands: losses [tokens] and the decision log."""
    with emulator.phase("decode"):
        loss = losses(model, text.documents, context=context, bos=bos, progress=progress)
    return loss, emulator.log()


def replay_cell(policy: Policy, routing: Routing, *, slots: int, demand: Demand) -> tuple[np.ndarray, DecisionLog]:
    """One lossless cell without the model: the recorded losses and the replayed decisions."""
    return routing.losses, replay(routing.trace, policy, slots=slots, demand=demand)


# ---- records ---------------------------------------------------------------------------------------------------------
def cells(
    policy: Policy,
    texts: Sequence[Text],
    slot_percents: dict[str, float],
    *,
    experts: int,
    run: Callable[[Text, int], tuple[np.ndarray, DecisionLog]],
    keep: Callable[[str, Text, np.ndarray, DecisionLog], None],
) -> list[dict]:
    """Run every (slots, text) cell; `keep(slots_id, text, losses, log)` stores the arrays. Returns the rows."""
    rows = []
    for slots_id, percent in slot_percents.items():
        for text in texts:
            slots = slots_from_percent(experts, percent)
            row = {
                "slots": slots_id,
                "slots_percent": percent,
                "slots_count": slots,
                "text": text.id,
                "topic": text.topic,
            }
            started = time.perf_counter()
            try:
                loss, log = run(text, slots)
                measured = measure(policy, text, loss, log, slots)
                keep(slots_id, text, loss, log)
                row |= {"status": "ok", **measured}
            except CELL_FAILURES as exc:
                row |= {"status": "failed", "reason": f"{type(exc).__name__}: {' '.join(str(exc).split())}"}
            row["wall_s"] = round(time.perf_counter() - started, 3)
            rows.append(row)
    return rows


def record_of(
    policy: Policy,
    texts: Sequence[Text],
    rows: list[dict],
    *,
    model: str,
    delay: int,
    provenance: dict[str, str],
    experts: int,
    expert_bytes: int,
    losses: str | Path,
) -> dict:
    """The record of a policy. rows: of `cells`; model: its id; losses: the file beside the record."""
    return {
        "schema": "quality-1",
        "model": model,
        "policy": policy.id,
        "policy_row": json_row(policy),
        "instrument": "emulator",
        "continuity": "stream",
        "start": "warm",
        "delay_tokens": delay,
        "completion": f"delay({delay})" if delay > 1 else "next_step",
        "provenance": provenance,
        "texts": {t.id: t.sha256 for t in texts},
        "clusters": {t.id: t.clusters for t in texts},  # of every document: its cluster and scored tokens
        "experts": experts,
        "expert_bytes": expert_bytes,
        "losses_sha256": sha256(losses),
        "cells": rows,
    }


def json_row(policy: Policy) -> dict:
    """All columns of the sheet, of the optional ones those that say something. JSON has no infinity (tau, beta)."""
    row = {name: value for name, value in asdict(policy).items() if value is not None or name not in OPTIONAL}
    return {name: "inf" if value == math.inf else value for name, value in row.items()}


def measure(policy: Policy, text: Text, loss: np.ndarray, log: DecisionLog, slots: int) -> dict:
    """A cell's numbers: sizes, perplexities, counts, flags. UserError on losses that are not finite."""
    counts = count(log)
    changed = counts["substitutions"] + counts["drops"]
    return {
        "tokens": len(loss),
        "words": sum(d.words for d in text.documents),
        "bytes": sum(d.bytes for d in text.documents),
        "documents": len(text.documents),
        **perplexities(loss, text.documents),
        **counts,
        "substituted_mass_by_document": mass_by_document(log, text.scored),
        "lossless": policy.lossless,
        "lossy_without_effect": not policy.lossless and changed == 0,
        "background_inert": policy.beta is not None and slots == log.kind.shape[2],
    }


def mass_by_token(log: DecisionLog) -> np.ndarray:
    """Substituted mass [T] float64 of every token, averaged over its layers."""
    return np.where(log.kind == SUBSTITUTE, log.g, 0).sum(axis=2, dtype=np.float64).mean(axis=1)


def mass_by_document(log: DecisionLog, scored: Sequence[int]) -> list[float]:
    """Substituted mass of every document, averaged over its events. scored: tokens of each, in the log's order."""
    mass, ends = mass_by_token(log), np.cumsum(scored)
    return [round(float(mass[end - n : end].mean()), 9) if n else 0.0 for n, end in zip(scored, ends, strict=True)]


def router_statistics(routings: Iterable[Routing]) -> dict[str, list[float]]:
    """By layer, mean over events: the weight of the first choice, and how many weigh at least 0.15."""
    g = np.concatenate([routing.trace.g for routing in routings])  # [T, L, K]
    return {
        "first_choice_weight_by_layer": g.max(-1).mean(0, dtype=np.float64).round(4).tolist(),
        "weights_from_0_15_by_layer": (g >= 0.15).sum(-1).mean(0).round(4).tolist(),
    }


def paired_interval(parts: Iterable[tuple[str, list[tuple[str, int]], np.ndarray, np.ndarray]], **options) -> Interval:
    """Mean paired difference a token. parts: (topic, clusters of the text, losses, losses to compare with) of each."""
    return paired_texts(
        (
            (paired_losses(loss, other), np.repeat([name for name, _ in clusters], [n for _, n in clusters]), topic)
            for topic, clusters, loss, other in parts
        ),
        **options,
    )


def share_of_events_that_differ(one: DecisionLog, other: DecisionLog) -> float:
    """Two bundles over the same text: events whose executed experts or weights are not the same."""
    same = (one.executed == other.executed) & (one.weights == other.weights)
    return 1.0 - float(same.all(axis=-1).mean())
