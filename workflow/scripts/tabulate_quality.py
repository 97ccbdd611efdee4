"""From records to tables: every cell with its paired difference against the baseline, and how bundles differ."""

import argparse
import itertools
from pathlib import Path

import pandas as pd

from engine.errors import main_guard
from engine.files import atomic, write_text
from engine.log import load_log
from engine.policies import BASELINE
from evals.jobs import Progress
from evals.quality import share_of_events_that_differ
from evals.quality_tables import model_rows
from evals.records import load_scored


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
    scored = load_scored(a.records)
    records = [one.record for own in scored.values() for one in own.values()]
    options = {"level": a.level, "replicates": a.replicates, "seed": a.seed}
    progress = Progress("tabulate", sum(len(record["cells"]) for record in records), "cells")
    rows = [row for own in scored.values() for row in model_rows(own, options, progress.advance)]
    quality = pd.DataFrame(rows)
    different, bundles = differences(records, Path(a.records[0]).parents[3]), bundles_table(quality)
    with atomic(a.out_quality) as temporary:
        quality.to_csv(temporary, index=False, float_format="%.8g")
    with atomic(a.out_differences) as temporary:
        different.to_csv(temporary, index=False, float_format="%.6f")
    write_text(a.out_bundles, bundles)


# ---- bundles against each other --------------------------------------------------------------------------------------
def differences(records: list[dict], results: Path) -> pd.DataFrame:
    """Share of events in which two bundles execute something else, for every pair, slots and text of a model."""
    keys = dict.fromkeys(
        (r["model"], cell["slots"], cell["text"]) for r in records for cell in r["cells"] if cell["status"] == "ok"
    )
    rows = []
    progress = Progress("compare bundles", len(keys), "texts")
    for model, slots, text in keys:
        progress.advance()
        logs = {}
        for policy in (r["policy"] for r in records if r["model"] == model):
            path = results / "decisions" / model / policy / slots / f"{text}.safetensors"
            if path.is_file():
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
