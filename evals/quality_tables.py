"""From records and losses to the rows of a table: every cell paired with the baseline's, and all texts pooled.

    rows = model_rows(scored_by_policy, {"level": 0.95, "replicates": 9999, "seed": 1}, progress)

Losses are paired with the baseline's on the same tokens and resampled by document (evals/stats.py); the pooled rows
(text `all`) resample within topics. Holm's correction runs over the lossy policies of one (model, slots, text).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from engine.errors import error
from engine.policies import BASELINE
from evals.perplexity import perplexity
from evals.quality import paired_interval
from evals.records import Scored, is_rehearsal
from evals.stats import Interval, holm, percent_change

COUNTS = [
    "events",
    "demands",
    "hits",
    "fetches",
    "substitutions",
    "drops",
    "in_place",
    "first_choices_changed",
    "loads",
    "background_issued",
    "background_arrived",
    "promoted",
]


OF_RECORDS_ALONE = ("substituted_mass_by_document", "wall_s")  # a table says what was found, the same in every run


def model_rows(own: Mapping[str, Scored], options: dict, progress: Callable[[], None]) -> list[dict]:
    """Rows of all cells of one model, and the pooled ones. own: by policy; progress: called after every cell."""
    if BASELINE not in own:
        model = next(iter(own.values())).record["model"]
        raise error(f"{model}: no record of {BASELINE}", "the baseline among the records", "score it")
    rows: list[dict] = []
    for one in own.values():
        ok_by_slots: dict[str, list[dict]] = {}
        for cell in one.record["cells"]:
            row = identity(one.record) | {key: value for key, value in cell.items() if key not in OF_RECORDS_ALONE}
            if cell["status"] == "ok":
                row |= paired(one, own[BASELINE], [cell], options)
                ok_by_slots.setdefault(cell["slots"], []).append(cell)
            rows.append(row)
            progress()
        texts = {cell["text"] for cell in one.record["cells"]}
        for cells in ok_by_slots.values():
            if len(cells) == len(texts):
                rows.append(identity(one.record) | pool(cells) | paired(one, own[BASELINE], cells, options))
    correct_for_number(rows)
    return rows


def identity(record: dict) -> dict:
    row = record["policy_row"]
    return {
        "model": record["model"],
        "policy": record["policy"],
        "miss_rule": row["miss_rule"],
        "eviction": row["eviction"],
        "beta": row["beta"],
        "instrument": record["instrument"],
        "experts": record["experts"],
        "rehearsal": is_rehearsal(record),
    }


def paired(one: Scored, baseline: Scored, cells: list[dict], options: dict) -> dict:
    """Columns of the paired difference against the baseline over the cells' texts, or the reason why there is none."""
    keys = [f"{cell['slots']}/{cell['text']}" for cell in cells]
    for key in keys:
        if key not in baseline.losses:
            return {"reason": f"the baseline has no losses for {key}"}
        if key not in one.losses:
            found = f"{one.record['policy']}: no losses of its result for {key}"
            raise error(found, "one run's record and losses", "score it again")
    interval = difference(one, baseline, cells, options)
    percent = percent_change(interval)
    return {
        "nll_per_token": float(np.concatenate([one.losses[key] for key in keys]).mean(dtype=np.float64)),
        "delta_nll": interval.estimate,
        "delta_nll_low": interval.low,
        "delta_nll_high": interval.high,
        "delta_percent": percent.estimate,
        "delta_percent_low": percent.low,
        "delta_percent_high": percent.high,
        "detectable_percent": percent.detectable,
        "level": interval.level,
        "p_value": interval.p_value,
    }


def difference(
    one: Scored, other: Scored, cells: list[dict], options: dict, where: Mapping[str, np.ndarray] | None = None
) -> Interval:
    """Mean paired difference over the cells' texts; clusters of documents are resampled within topics.

    where: by text, the tokens [T] bool that count; a document or text without any is left out.
    """
    parts = []
    for cell in cells:
        text, key = cell["text"], f"{cell['slots']}/{cell['text']}"
        if where is not None and not where[text].any():
            continue
        clusters, loss, paired_with = other.record["clusters"][text], one.losses[key], other.losses[key]
        if where is not None:
            counted = np.split(where[text], np.cumsum([tokens for _, tokens in clusters])[:-1])
            clusters = [(name, int(own.sum())) for (name, _), own in zip(clusters, counted, strict=True)]
            loss, paired_with = loss[where[text]], paired_with[where[text]]
        parts.append((cell["topic"], clusters, loss, paired_with))
    return paired_interval(parts, **options)


def pool(cells: list[dict]) -> dict:
    """Counts of all texts of one slot budget, and the rates and perplexities made of them."""
    row = {key: cells[0][key] for key in ("slots", "slots_percent", "slots_count", "lossless")}
    row |= {"text": "all", "topic": "all", "status": "ok"}
    for key in (*COUNTS, "tokens", "words", "bytes", "documents"):
        row[key] = sum(cell.get(key, 0) for cell in cells)  # an older record counts less
    nll = sum(np.log(cell["token_perplexity"]) * cell["tokens"] for cell in cells)
    for name in ("token", "word", "byte"):
        row[f"{name}_perplexity"] = perplexity(nll, row[f"{name}s"])
    row["miss_rate"] = 1 - row["hits"] / row["demands"]
    row["substituted_share"] = row["substitutions"] / row["demands"]
    for key in ("substituted_mass", "dropped_mass"):
        row[key] = sum(cell[key] * cell["events"] for cell in cells) / row["events"]
    row["lossy_without_effect"] = all(cell["lossy_without_effect"] for cell in cells)
    row["background_inert"] = all(cell["background_inert"] for cell in cells)
    return row


def correct_for_number(rows: list[dict]) -> None:
    """p_holm over the lossy policies of one (model, slots, text). One without a p-value counts: a gap helps nobody."""
    tried = dict.fromkeys(row["policy"] for row in rows if row["miss_rule"] != "fetch")
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if row.get("p_value") is not None and row["policy"] in tried:
            groups.setdefault((row["model"], row["slots"], row["text"]), []).append(row)
    for group in groups.values():
        adjusted = holm(tried | {row["policy"]: row["p_value"] for row in group})
        for row in group:
            row["p_holm"] = adjusted[row["policy"]]
