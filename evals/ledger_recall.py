"""How often predictors named what the next layers chose: from results/predictions/<model>/recall.json to quantities.

The file has counts by document (evals/predictor_recall.py). A claim about recall is over all layers that are predicted,
one layer ahead unless `within` names another horizon; it does not depend on a budget, but for the experts that missed.

    recalled = load_recalls(["results/predictions/reference/recall.json"])["reference"]
    recalled.of("spec_prefetch", horizon=1, texts=texts)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from engine.errors import error
from evals.ledger_quantities import NotRun, Ratio, ratio
from evals.preregistration import Part, Preregistration
from evals.records import read_json

if TYPE_CHECKING:
    from evals.ledger_evidence import Evidence

HORIZON = re.compile(r"^horizon (\d+)$")
MISSES = "chosen experts that were not resident under {}"
COUNTS = ["events", "found", "missed", "found_missed"]  # of events: all, chosen named, chosen missed, of those named
KEYS = ("text", "topic", "document")


@dataclass(frozen=True)
class Recalled:
    """Of one model. counts: predictor, horizon, layer, text, topic, document and COUNTS, a row of each."""

    weights: str
    top_k: int
    slots: str  # of the misses
    counts: pd.DataFrame

    def of(self, predictor: str, horizon: int, texts: Sequence[str]) -> pd.DataFrame:
        """Counts by document over all layers, in the order of the names; `tokens` beside them. NotRun."""
        here = self.counts[(self.counts["horizon"] == horizon) & self.counts["text"].isin(texts)]
        own = here[here["predictor"] == predictor]
        if own.empty:
            raise NotRun(f"this run has no predictions of {predictor} at horizon {horizon}")
        layers = set(self.counts[self.counts["horizon"] == horizon]["layer"])
        for text in texts:
            missing = layers - set(own[own["text"] == text]["layer"])
            if missing:
                words = ", ".join(str(layer) for layer in sorted(missing))
                raise NotRun(f"no predictions of {predictor} on {text} for layers {words}")
        counts = own.groupby(list(KEYS))[COUNTS].sum().reset_index()
        counts = counts.assign(name=counts["text"] + "/" + counts["document"], tokens=counts["events"] // len(layers))
        return counts.sort_values("name", ignore_index=True)


def load_recalls(paths: Iterable[str | Path]) -> dict[str, Recalled]:
    """By model. UserError: no such file, a key or count is missing, two of one model."""
    found: dict[str, Recalled] = {}
    for path in map(Path, paths):
        record = read_json(path, "model", "provenance", "clusters", "top_k", "slots", "cells")
        if record["model"] in found:
            raise error(f"{path}: {record['model']} a second time", "one file a model", "leave one out")
        try:
            weights, counts = str(record["provenance"]["model_hash"]), _by_document(record)
        except (KeyError, TypeError, ValueError) as exc:
            found_what = f"{path}: {type(exc).__name__} {exc}"
            raise error(found_what, "counts by document", "delete it and run again") from None
        found[record["model"]] = Recalled(weights, int(record["top_k"]), str(record["slots"]), counts)
    return found


def _by_document(record: dict) -> pd.DataFrame:
    frames = []
    for cell in record["cells"]:
        counts = {name: cell[name] for name in COUNTS}
        names = [str(name) for name, _ in record["clusters"][cell["text"]]]
        place = {name: cell[name] for name in ("predictor", "horizon", "text", "topic")}
        place["layer"] = cell["anchor"] + cell["horizon"]
        frames.append(pd.DataFrame(counts | {"document": names}).assign(**place))
    return pd.concat(frames, ignore_index=True)


# ---- measures --------------------------------------------------------------------------------------------------------
def recall(part: Part, evidence: Evidence, slots: str, rules: Preregistration) -> Ratio:
    """Percent of the chosen experts, or of those that missed."""
    recalled, horizon, misses = _asked(part, evidence, slots, rules)
    own = recalled.of(part.of, horizon, part.texts)
    named, chosen = own["found"], recalled.top_k * own["events"]
    if misses:
        named, chosen = own["found_missed"], own["missed"]
    return _ratio(own, named, chosen, (0.0, 100.0))


def recall_difference(part: Part, evidence: Evidence, slots: str, rules: Preregistration) -> Ratio:
    """Points, on the same events."""
    recalled, horizon, misses = _asked(part, evidence, slots, rules)
    own, other = (recalled.of(str(name), horizon, part.texts) for name in (part.of, part.against))
    if not own[["name", "events", "missed"]].equals(other[["name", "events", "missed"]]):
        raise NotRun(f"{part.of} and {part.against} were asked of other events")
    named, chosen = own["found"] - other["found"], recalled.top_k * own["events"]
    if misses:
        named, chosen = own["found_missed"] - other["found_missed"], own["missed"]
    return _ratio(own, named, chosen, (-100.0, 100.0))


def _ratio(own: pd.DataFrame, named: pd.Series, chosen: pd.Series, bounds: tuple[float, float]) -> Ratio:
    frame = pd.DataFrame({"document": own["name"], "stratum": own["topic"], "a": named, "b": chosen, "size": chosen})
    frame = frame[chosen > 0]
    if frame.empty:
        raise NotRun("there was nothing to name")
    return replace(ratio(frame, "percent"), tokens=int(own["tokens"].sum()), bounds=bounds)


def _asked(part: Part, evidence: Evidence, slots: str, rules: Preregistration) -> tuple[Recalled, int, bool]:
    """(what was counted, horizon, of the misses alone). NotRun: nothing was, or of other weights, or not that."""
    recalled = evidence.recalled
    if recalled is None:
        raise NotRun("this run has no predictions of the next layers' experts")
    if slots != rules.slots:
        raise NotRun("recall does not depend on the budget")
    scored = {policy.weights for policy in evidence.quality.values()}
    if scored and scored != {recalled.weights}:
        found = f"predictions of weights {recalled.weights[:16]}"
        raise NotRun(f"{found}, policies scored on {', '.join(sorted(w[:16] for w in scored))}")
    within = part.within or "horizon 1"
    horizon, misses = HORIZON.match(within), within == MISSES.format(rules.baseline)
    if not horizon and not misses:
        raise NotRun(f"no predictions were counted in: {within}")
    if misses and recalled.slots != slots:
        raise NotRun(f"misses were counted at {recalled.slots}, not at {slots}")
    return recalled, int(horizon[1]) if horizon else 1, misses
