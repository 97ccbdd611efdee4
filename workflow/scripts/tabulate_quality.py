"""From records to tables: every cell with its paired difference against the baseline, and how bundles differ.

Losses are paired with the baseline's on the same tokens and resampled by document (evals/stats.py); the pooled rows
(text `all`) resample within topics. Holm's correction runs over the lossy policies of one (model, slots, text).
"""

import argparse
import itertools
from pathlib import Path

import numpy as np
import pandas as pd

from engine.errors import error, main_guard
from engine.files import atomic, write_text
from engine.log import load_log
from engine.policies import BASELINE
from evals.jobs import Progress
from evals.perplexity import perplexity
from evals.quality import paired_interval, share_of_events_that_differ
from evals.records import is_rehearsal, load_arrays, read_record
from evals.stats import holm, percent_change

COUNTS = [
    "events",
    "demands",
    "hits",
    "fetches",
    "substitutions",
    "drops",
    "first_choices_changed",
    "loads",
    "background_issued",
    "background_arrived",
    "promoted",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", nargs="+", required=True, help="results/quality/<model>/<policy>/perplexity.json")
    parser.add_argument("--level", type=float, default=0.95)
    parser.add_argument("--replicates", type=int, default=9999)
    parser.add_argument("--seed", type=int, default=20512)
    parser.add_argument("--out-quality", required=True)
    parser.add_argument("--out-differences", required=True)
    parser.add_argument("--out-bundles", required=True)
    a = parser.parse_args()
    records = [read_record(path) for path in a.records]
    roots = [Path(path).parents[3] for path in a.records]
    options = {"level": a.level, "replicates": a.replicates, "seed": a.seed}
    progress = Progress("tabulate", sum(len(record["cells"]) for record in records), "cells")
    rows = []
    for model in dict.fromkeys(record["model"] for record in records):
        own = {r["policy"]: (r, root) for r, root in zip(records, roots, strict=True) if r["model"] == model}
        rows += model_rows(own, options, progress)
    quality = pd.DataFrame(rows)
    different, bundles = differences(records, roots), bundles_table(quality)
    with atomic(a.out_quality) as temporary:
        quality.to_csv(temporary, index=False, float_format="%.8g")
    with atomic(a.out_differences) as temporary:
        different.to_csv(temporary, index=False, float_format="%.6f")
    write_text(a.out_bundles, bundles)


# ---- one model -------------------------------------------------------------------------------------------------------
def model_rows(own: dict[str, tuple[dict, Path]], options: dict, progress: Progress) -> list[dict]:
    """Rows of all cells of one model, and the pooled ones."""
    if BASELINE not in own:
        model = next(iter(own.values()))[0]["model"]
        raise error(f"{model}: no record of {BASELINE}", "the baseline among the records", "score it")
    losses = {
        policy: load_arrays(root / "losses" / record["model"] / f"{policy}.safetensors")
        for policy, (record, root) in own.items()
    }
    clusters = own[BASELINE][0]["clusters"]
    rows: list[dict] = []
    for policy, (record, _) in own.items():
        ok_by_slots: dict[str, list[dict]] = {}
        for cell in record["cells"]:
            # a table says what was found, the same in every run; how long it took stands in the record
            row = identity(record) | {key: value for key, value in cell.items() if key != "wall_s"}
            if cell["status"] == "ok":
                row |= paired(cell["slots"], [cell], policy, losses, clusters, options)
                ok_by_slots.setdefault(cell["slots"], []).append(cell)
            rows.append(row)
            progress.advance()
        texts = {cell["text"] for cell in record["cells"]}
        for slots, cells in ok_by_slots.items():
            if len(cells) == len(texts):
                rows.append(identity(record) | pool(cells) | paired(slots, cells, policy, losses, clusters, options))
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


def paired(slots: str, cells: list[dict], policy: str, losses: dict, clusters: dict, options: dict) -> dict:
    """Paired difference against the baseline over the cells' texts, clusters of documents resampled within topics."""
    parts = []
    for cell in cells:
        key = f"{slots}/{cell['text']}"
        if key not in losses[BASELINE]:
            return {"reason": f"the baseline has no losses for {key}"}
        if key not in losses[policy]:
            raise error(f"{policy}: no losses of its result for {key}", "one run's record and losses", "score it again")
        parts.append((cell["topic"], clusters[cell["text"]], losses[policy][key], losses[BASELINE][key]))
    interval = paired_interval(parts, **options)
    percent = percent_change(interval)
    return {
        "nll_per_token": float(np.concatenate([loss for _, _, loss, _ in parts]).mean(dtype=np.float64)),
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


def pool(cells: list[dict]) -> dict:
    """Counts of all texts of one slot budget, and the rates and perplexities made of them."""
    row = {key: cells[0][key] for key in ("slots", "slots_percent", "slots_count", "lossless")}
    row |= {"text": "all", "topic": "all", "status": "ok"}
    for key in (*COUNTS, "tokens", "words", "bytes", "documents"):
        row[key] = sum(cell[key] for cell in cells)
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


# ---- bundles against each other --------------------------------------------------------------------------------------
def differences(records: list[dict], roots: list[Path]) -> pd.DataFrame:
    """Share of events in which two bundles execute something else, for every pair, slots and text of a model."""
    where = {(r["model"], r["policy"]): root / "decisions" for r, root in zip(records, roots, strict=True)}
    keys = dict.fromkeys(
        (r["model"], cell["slots"], cell["text"]) for r in records for cell in r["cells"] if cell["status"] == "ok"
    )
    rows = []
    progress = Progress("compare bundles", len(keys), "texts")
    for model, slots, text in keys:
        progress.advance()
        logs = {}
        for (owner, policy), root in where.items():
            path = root / owner / policy / slots / f"{text}.safetensors"
            if owner == model and path.is_file():
                logs[policy] = load_log(path)
        for one, other in itertools.combinations(logs, 2):
            share = share_of_events_that_differ(logs[one], logs[other])
            rows.append(
                {
                    "model": model,
                    "slots": slots,
                    "text": text,
                    "policy": one,
                    "other": other,
                    "events_that_differ": share,
                }
            )
    return pd.DataFrame(rows, columns=["model", "slots", "text", "policy", "other", "events_that_differ"])


def bundles_table(quality: pd.DataFrame) -> str:
    """The pooled rows as Markdown: a table for every model and slot budget."""
    lines = ["# Bundles", ""]
    pooled = quality[(quality["text"] == "all") & (quality["status"] == "ok")]
    for (model, slots, percent), group in pooled.groupby(["model", "slots", "slots_percent"], sort=False):
        first = group.iloc[0]
        lines += [
            f"## {model}, {slots}: {percent:g} % resident ({first['slots_count']} of {first['experts']} a layer)",
            "",
            f"{first['documents']} documents, {first['tokens']:,} scored tokens, {first['events']:,} events. "
            f"Loss is the change of token perplexity against {BASELINE} on the same tokens, with its interval over "
            "documents.",
            "",
            "| policy | token perplexity | loss | smallest effect seen | substituted | mass | fetched | missed |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in group.to_dict("records"):
            loss, seen = loss_in_words(row)
            inert = " (background inert)" if row["background_inert"] else ""
            lines.append(
                f"| {row['policy']}{inert} | {row['token_perplexity']:.3f} | {loss} | {seen} "
                f"| {row['substituted_share']:.4f} | {row['substituted_mass']:.4f} "
                f"| {row['fetches'] / row['demands']:.4f} | {row['miss_rate']:.4f} |"
            )
        here = quality[(quality["model"] == model) & (quality["slots"] == slots)]
        for policy in here.loc[~here["policy"].isin(group["policy"]), "policy"].unique():
            cells = here[here["policy"] == policy]
            lost = ", ".join(cells.loc[cells["status"] != "ok", "text"])
            lines.append(f"| {policy} | no result on {lost} | | | | | | |")
        lines.append("")
    failed = quality[quality["status"] != "ok"]
    if len(failed):
        lines += ["## Cells without a result", ""]
        lines += [
            f"- {row['model']}, {row['policy']}, {row['slots']}, {row['text']}: {row['reason']}"
            for row in failed.to_dict("records")
        ]
        lines.append("")
    return "\n".join(lines)


def loss_in_words(row: dict) -> tuple[str, str]:
    """The loss of a pooled row and the smallest effect that could have been seen, where there are such."""
    low, high = row.get("delta_percent_low"), row.get("delta_percent_high")
    if row["lossless"]:
        return "exact", ""
    if row["lossy_without_effect"]:
        return "nothing was substituted", ""
    if pd.isna(row.get("delta_percent")):
        return "no baseline", ""
    if pd.isna(low) or pd.isna(high):
        return f"{row['delta_percent']:+.2f} % (no interval)", ""
    return f"{row['delta_percent']:+.2f} % ({low:+.2f} to {high:+.2f})", f"{row['detectable_percent']:.2f} %"


if __name__ == "__main__":
    main_guard(main)
