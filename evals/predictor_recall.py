"""How many of the experts that a layer chose had a predictor named? Counts by document, which intervals are made of.

An event is one token at one target layer, foretold from one anchor. Of the N names that a predictor gives, the first K
stand for a prediction of the choice, all N for what a scheduler may load:

    found           of the K chosen, how many are among the first K names
    found_names     ... among all N names
    exact           1 where the first K names are the K chosen
    missed          how many of the K chosen were not resident (under the baseline, from its decision log)
    found_missed, found_missed_names        how many of those were named

    counts = count(ids, chosen, missed, starts)            # of one (anchor, horizon); by document, of every column

Axes: T tokens, L layers, K chosen, N names, H horizons.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from engine.errors import error
from engine.predictors import pairs
from evals.records import is_rehearsal
from evals.stats import Interval, paired_difference

COUNTS = ("events", "found", "found_names", "exact", "missed", "found_missed", "found_missed_names")


def count(ids: np.ndarray, chosen: np.ndarray, missed: np.ndarray, starts: np.ndarray) -> dict[str, list[int]]:
    """By document, sums of COUNTS. ids [T, N], chosen [T, K], missed [T, K] bool, starts [documents] first tokens."""
    top_k = chosen.shape[1]
    if ids.shape[1] < top_k:
        raise error(f"{ids.shape[1]} names", f"at least K = {top_k}", "predict more names")
    same = ids[:, None, :] == chosen[:, :, None]  # [T, K, N]
    among_k, among_n = same[..., :top_k].any(-1), same.any(-1)  # [T, K]
    columns = {
        "events": np.ones(len(ids), np.int64),
        "found": among_k.sum(1),
        "found_names": among_n.sum(1),
        "exact": among_k.all(1).astype(np.int64),
        "missed": missed.sum(1),
        "found_missed": (among_k & missed).sum(1),
        "found_missed_names": (among_n & missed).sum(1),
    }
    return {name: np.add.reduceat(column, starts).tolist() for name, column in columns.items()}


def count_text(ids: np.ndarray, chosen: np.ndarray, missed: np.ndarray, scored: Sequence[int]) -> list[dict]:
    """Every (anchor, horizon) of a text: {anchor, horizon, counts by document}. ids [T, L, H, N], chosen [T, L, K]."""
    starts = np.cumsum([0, *scored[:-1]])
    return [
        {"anchor": anchor, "horizon": horizon}
        | count(ids[:, anchor, horizon - 1], chosen[:, anchor + horizon], missed[:, anchor + horizon], starts)
        for anchor, horizon in pairs(chosen.shape[1])
    ]


# ---- tables ----------------------------------------------------------------------------------------------------------
def by_document(record: dict) -> pd.DataFrame:
    """A record of predict_experts.py as rows: predictor, anchor, horizon, layer, text, topic, document and COUNTS.

    A document is a cluster: parts of one article count as one.
    """
    frames = []
    for cell in record["cells"]:
        clusters = record["clusters"][cell["text"]]
        frame = pd.DataFrame({name: cell[name] for name in COUNTS}).assign(document=[name for name, _ in clusters])
        same = {name: cell[name] for name in ("predictor", "anchor", "horizon", "text", "topic")}
        frames.append(frame.assign(**same, layer=cell["anchor"] + cell["horizon"]))
    keys = ["predictor", "anchor", "horizon", "layer", "text", "topic", "document"]
    return pd.concat(frames).groupby(keys, sort=False).sum().reset_index()


def recall_rows(record: dict, options: dict) -> list[dict]:
    """Rows of one model: every predictor, horizon, target layer (or all) and topic (or all).

    options: level, replicates, seed. Documents are drawn again within topics; the difference to gate replay is paired
    by event.
    """
    frame = by_document(record)
    model = {name: record[name] for name in ("model", "experts", "top_k", "names")}
    model["rehearsal"] = is_rehearsal(record)
    rows = []
    for horizon, here in frame.groupby("horizon", sort=True):
        for layer in (*sorted(here["layer"].unique()), "all"):
            of_layer = here if layer == "all" else here[here["layer"] == layer]
            for topic in (*dict.fromkeys(here["topic"]), "all"):
                part = of_layer if topic == "all" else of_layer[of_layer["topic"] == topic]
                by_predictor = {
                    name: own.groupby(["text", "topic", "document"], sort=False)[list(COUNTS)].sum()
                    for name, own in part.groupby("predictor", sort=False)
                }
                place = {"horizon": horizon, "layer": layer, "topic": topic}
                for name, own in by_predictor.items():
                    costs = {key: record["predictors"][name][key] for key in ("parameters", "multiply_adds_a_token")}
                    row = model | {"predictor": name} | place | recall(own, record["top_k"], options)
                    row |= difference(own, by_predictor.get("gate_replay"), record["top_k"], options)
                    rows.append(row | costs | {"level": options["level"]})
    return sorted(rows, key=lambda row: list(record["predictors"]).index(row["predictor"]))


def recall(own: pd.DataFrame, top_k: int, options: dict) -> dict:
    """Columns of one predictor; own: COUNTS by (text, topic, document)."""
    total = own.sum()
    chosen, missed = top_k * total["events"], max(total["missed"], 1)
    with_misses = own[own["missed"] > 0]
    of_missed = _interval(with_misses["found_missed"], with_misses, options, "missed") if len(with_misses) else None
    return {
        "documents": len(own),
        "events": int(total["events"]),
        **_ends("recall", _interval(own["found"] / top_k, own, options)),
        "recall_names": total["found_names"] / chosen,
        "exact": total["exact"] / total["events"],
        "missed": int(total["missed"]),
        **_ends("recall_missed", of_missed),
        "recall_missed_names": total["found_missed_names"] / missed,
    }


def difference(own: pd.DataFrame, replayed: pd.DataFrame | None, top_k: int, options: dict) -> dict:
    """Recall less that of gate replay on the same events; none where that was not asked."""
    if replayed is None:
        return {}
    found = _interval((own["found"] - replayed["found"]) / top_k, own, options)
    return _ends("over_replay", found) | {"detectable": found.detectable, "p_value": found.p_value}


def _interval(found: pd.Series, own: pd.DataFrame, options: dict, among: str = "events") -> Interval:
    """Of the sum of `found` over that of the column `among`."""
    return paired_difference(found, own[among], own.index.get_level_values("topic"), **options)


def _ends(name: str, found: Interval | None) -> dict[str, float | None]:
    if found is None:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"))
    return {name: found.estimate, f"{name}_low": found.low, f"{name}_high": found.high}
