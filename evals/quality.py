"""Quality of policies by perplexity: exact routing once, then a cell for every (policy, slots, text).

A cell is one policy at one slot budget over one text, from the warm start, with `stream` continuity: the documents in
their order, the state carried on. Policies that always fetch are replayed over the recorded routing, whose losses are
theirs too; the others run in the emulator. A cell that fails keeps its reason and lets the rest go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from engine.emulator import Emulator
from engine.errors import UserError, error
from engine.files import atomic
from engine.log import DecisionLog, count
from engine.policies import Policy
from engine.residency import Demand, slots_from_percent
from engine.trace import Recorder, RouterTrace, replay
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


@dataclass(frozen=True)
class Routing:
    """What the model chose over one text under exact execution, and its losses [tokens] float32."""

    trace: RouterTrace
    losses: np.ndarray


def save_routing(path: str | Path, routings: dict[str, Routing], provenance: dict[str, str]) -> None:
    """All texts of a model in one safetensors file, arrays named `<text>/<array>`."""
    arrays = {}
    for text, routing in routings.items():
        for name in ("chosen", "weights", "chosen_scores"):
            arrays[f"{text}/{name}"] = np.ascontiguousarray(getattr(routing.trace, name))
        arrays[f"{text}/losses"] = routing.losses
    experts = {str(routing.trace.experts) for routing in routings.values()}
    with atomic(path) as temporary:
        save_file(arrays, temporary, metadata={**provenance, "experts": experts.pop()})


def recorded_facts(path: str | Path) -> dict[str, str]:
    """Provenance of a recording or a calibration's demand: what `save_routing` and `save_demand` were given."""
    try:
        with safe_open(path, framework="numpy") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError) as exc:
        raise error(f"{path}: {exc}", "a whole safetensors file", "delete it and run again") from None


def load_routing(path: str | Path, text: str) -> Routing:
    try:
        with safe_open(path, framework="numpy") as file:
            experts = int(file.metadata()["experts"])
            arrays = {
                name: file.get_tensor(f"{text}/{name}") for name in ("chosen", "weights", "chosen_scores", "losses")
            }
    except (SafetensorError, OSError, KeyError, TypeError) as exc:
        raise error(f"{path}: {exc}", f"a whole recording with text '{text}'", "delete it and run again") from None
    loss = arrays.pop("losses")
    return Routing(RouterTrace(**arrays, experts=experts), loss)


def save_demand(path: str | Path, demand: Demand, provenance: dict[str, str]) -> None:
    with atomic(path) as temporary:
        save_file({"counts": demand.counts}, temporary, metadata={**provenance, "events": str(demand.events)})


def load_demand(path: str | Path) -> Demand:
    try:
        with safe_open(path, framework="numpy") as file:
            return Demand(file.get_tensor("counts"), int(file.metadata()["events"]))
    except (SafetensorError, OSError, KeyError, TypeError) as exc:
        raise error(f"{path}: {exc}", "a calibration's demand", "delete it and run again") from None


# ---- scoring ---------------------------------------------------------------------------------------------------------
def record_routing(model, attachment, text: Text, *, context: int, bos: int | None, progress=None) -> Routing:
    """Run the stock model over a text."""
    recorder = Recorder(attachment)
    loss = losses(model, text.documents, context=context, bos=bos, progress=progress)
    return Routing(recorder.trace(), loss)


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
        "lossless": policy.lossless,
        "lossy_without_effect": not policy.lossless and changed == 0,
        "background_inert": policy.beta is not None and slots == log.kind.shape[2],
    }


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
